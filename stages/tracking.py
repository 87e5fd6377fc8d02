"""How Draftline reaches MLflow: one client, bounded waits, errors of one line, artifacts below the repository.

MLflow retries an unreachable server for minutes and a bad SQLite path for a quarter of an hour; both are looked
at before it is asked. Credentials belong into MLFLOW_TRACKING_USERNAME / _PASSWORD or into the database URL of
params.yaml; they are never written into an output (`redacted`).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from stages.errors import DraftlineError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

ARTIFACTS = Path("mlartifacts")
"""Where a client that talks to a database itself, without a server, keeps artifacts."""

PROBE_SECONDS = 5.0
GATEWAY_ERRORS = (502, 503, 504)
MEND = "start the server (make up starts one on this machine), or correct the address (MLFLOW_TRACKING_URI, or the key)"
DEFAULT_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


class TrackingError(DraftlineError):
    """MLflow cannot be reached, or refuses what it is asked."""


def redacted(uri: str) -> str:
    """`uri` without user name and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _sqlite_file(uri: str) -> Path | None:
    """The file of a `sqlite:///` URI; None for any other URI."""
    scheme, _, rest = uri.partition(":///")
    return Path(rest.partition("?")[0]) if scheme.partition("+")[0] == "sqlite" and rest else None


def probe(uri: str, name: str = "mlflow.tracking_uri") -> None:
    """Refuse a place that MLflow would try in vain for minutes. (`name`: of the setting.)

    Raises:
        TrackingError: it cannot be reached, or is none.
    """
    where = f"{name} = {redacted(uri)!r}"
    database = _sqlite_file(uri)
    if database is not None:
        if not database.parent.is_dir():
            raise TrackingError(f"{where}: no such directory: {database.parent}")
        if database.exists():
            try:
                with database.open("r+b") as stream:
                    head = stream.read(16)
            except OSError as error:
                raise TrackingError(f"{where}: {error.strerror or error}") from None
            if head and head != b"SQLite format 3\x00":
                raise TrackingError(f"{where}: not an SQLite database")
        return
    parts = urlsplit(uri)
    scheme = parts.scheme.partition("+")[0]
    if scheme not in DEFAULT_PORTS or not parts.hostname:
        raise TrackingError(f"{where}: expected sqlite:///<file>, http(s)://<host>, or a database URL (postgresql, mysql, mssql)")
    try:
        socket.create_connection((parts.hostname, parts.port or DEFAULT_PORTS[scheme]), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        raise TrackingError(f"{where}: cannot connect: {error}{f'; {MEND}' if scheme.startswith('http') else ''}") from None
    if scheme.startswith("http"):
        _probe_server(uri, where)
    else:
        _probe_database(uri, where)


def _probe_server(uri: str, where: str) -> None:
    """Refuse a server that takes connections and says nothing, and a proxy with no server behind it: MLflow would ask them again and again."""
    import requests

    try:
        status = requests.get(f"{uri.rstrip('/')}/health", timeout=PROBE_SECONDS, allow_redirects=False).status_code
    except requests.exceptions.SSLError:
        # MLflow has settings of its own for certificates.
        return
    except requests.Timeout:
        raise TrackingError(f"{where}: it takes connections, but has not answered within {PROBE_SECONDS:g} s; {MEND}") from None
    except requests.RequestException as error:
        raise TrackingError(f"{where}: no answer: {_first_line(error)}; {MEND}") from None
    if status in GATEWAY_ERRORS:
        raise TrackingError(f"{where}: HTTP {status}: there is no server behind it; {MEND}")


def _probe_database(uri: str, where: str) -> None:
    """Refuse a database that lets nobody in, or whose driver is not installed."""
    import sqlalchemy

    bound = {} if uri.startswith("mssql") else {"connect_timeout": int(PROBE_SECONDS)}
    try:
        engine = sqlalchemy.create_engine(uri, connect_args=bound)
        engine.connect().close()
        engine.dispose()
    except ImportError as error:
        raise TrackingError(f"{where}: the database's driver is not installed: {error} (PostgreSQL: pip install 'psycopg[binary]')") from None
    except (sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
        raise TrackingError(f"{where}: {_first_line(getattr(error, 'orig', None) or error)}") from None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def tracking_errors(uri: str) -> Iterator[None]:
    """Turn what MLflow raises inside the block into one line that names the server."""
    import requests
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, requests.RequestException, SQLAlchemyError) as error:
        raise TrackingError(f"mlflow.tracking_uri = {redacted(uri)!r}: {_first_line(error)}") from error


def connect(uri: str) -> MlflowClient:
    """A client of tracking server and registry at `uri`.

    Raises:
        TrackingError: unreachable, or not a place that MLflow can use.
    """
    probe(uri)
    # Read by MLflow per request. A server that goes away is asked again for some eight seconds (by default, for four minutes), and one
    # that falls silent is waited for.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    # A new database is announced by forty lines of migrations, and each database error by its traceback before it is raised.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    from mlflow import MlflowClient

    # MLflow keeps one store per URI: a relative path must not mean two databases in one process.
    database = _sqlite_file(uri)
    address = uri if database is None else uri.replace(str(database), str(database.absolute()), 1)
    with tracking_errors(uri):
        return MlflowClient(tracking_uri=address, registry_uri=address)


def _require_here(uri: str, experiment: Experiment) -> None:
    """MLflow stores where artifacts go as an absolute path: a database that was moved or copied would still write to the old place."""
    database = _sqlite_file(uri)
    location = urlsplit(experiment.artifact_location)
    if database is None or location.scheme != "file":
        return
    made = Path(unquote(location.path))
    if made.name == ARTIFACTS.name and made != ARTIFACTS.resolve():
        raise TrackingError(
            f"mlflow.tracking_uri = {redacted(uri)!r}: {database} was made in {made.parent}, this is {Path.cwd()}, and artifacts would go there; "
            f"move the checkout back, or remove {database} and register again"
        )


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """Id of the experiment `name`, made where it is missing; a deleted one is restored.

    Without a server the artifacts of a new experiment go below `mlartifacts/`; a server decides itself.

    Raises:
        TrackingError: MLflow refuses, or this database belongs to a checkout elsewhere and would write there.
    """
    from mlflow.exceptions import MlflowException

    with tracking_errors(uri):
        found = client.get_experiment_by_name(name)
        if found is None:
            served = urlsplit(uri).scheme in ("http", "https")
            try:
                return str(client.create_experiment(name, artifact_location=None if served else ARTIFACTS.resolve().as_uri()))
            except MlflowException:
                # Another process made it in between.
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        _require_here(uri, found)
        if found.lifecycle_stage == "deleted":
            client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)
