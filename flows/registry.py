"""Verifiers and drafters in the MLflow registry: what is known, what is served, what may be.

    verifier.<name>    one version per content identity; alias `serving`: the one that users are to be served
    drafter.<name>     one version per checkpoint (stages/register); aliases `candidate`, `champion`, `previous`

Nothing here believes a status: a version is usable when its tags say what is needed and its files verify (`verify`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.errors import FlowError
from stages.artifacts import canonical_json
from stages.errors import PairError
from stages.pairing.identity import VerifierIdentity
from stages.pairing.lock import require_pair
from stages.serving.fetch import VersionError, bring
from stages.tracking import TrackingError, connect, experiment_id, tracking_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

SERVING, CANDIDATE, CHAMPION, PREVIOUS = "serving", "candidate", "champion", "previous"
IDENTITY_FILE = "identity.json"


@dataclass(frozen=True)
class VerifierVersion:
    """A registered verifier. `source`: what `verifier.source` of params.yaml must be to get it; `quantization` likewise."""

    name: str
    version: int
    digest: str
    source: str
    quantization: str
    identity: VerifierIdentity


@dataclass(frozen=True)
class DrafterVersion:
    """A registered drafter: tags of `stages/register`, numbers parsed. `costs`: what evaluate measured of its speed, JSON; "null": nothing."""

    name: str
    version: int
    content: str
    verifier: str
    gate: str
    acceptance_length: float
    aliases: tuple[str, ...]
    costs: str = "null"


class Registry:
    """One MLflow registry; every call asks it anew."""

    def __init__(self, uri: str, experiment: str) -> None:
        """Raises TrackingError: it cannot be reached."""
        self.uri = uri
        self.client: MlflowClient = connect(uri)
        self._experiment = experiment

    # Verifiers.

    def verifiers(self) -> Iterator[str]:
        """Names of all registered verifiers."""
        with tracking_errors(self.uri):
            for model in self.client.search_registered_models("name LIKE 'verifier.%'"):
                yield model.name.removeprefix("verifier.")

    def register_verifier(self, name: str, identity: VerifierIdentity, source: str, quantization: str) -> tuple[VerifierVersion, bool]:
        """The version of this identity, and whether it was made now."""
        found = self.verifier_of(name, identity.digest)
        if found is not None:
            return found, False
        model = f"verifier.{name}"
        with tracking_errors(self.uri), tempfile.TemporaryDirectory() as scratch:
            self._ensure_model(model)
            run = self.client.create_run(
                experiment_id(self.client, self.uri, self._experiment), run_name=f"register {model}", tags={"identity": identity.digest}
            )
            path = Path(scratch) / IDENTITY_FILE
            path.write_text(canonical_json(identity.model_dump(mode="json")), encoding="utf-8")
            self.client.log_artifact(run.info.run_id, str(path))
            self.client.set_terminated(run.info.run_id)
            tags = {
                "identity": identity.digest,
                "identity_json": path.read_text(encoding="utf-8"),
                "source": source,
                "quantization": quantization,
                "method": str(identity.quantization.get("method", "none")),
                "dtype": str(identity.quantization.get("serving_dtype", "")),
            }
            self.client.create_model_version(model, f"{run.info.artifact_uri}/{IDENTITY_FILE}", run.info.run_id, tags=tags)
        made = self.verifier_of(name, identity.digest)
        assert made is not None
        return made, True

    def verifier_of(self, name: str, digest: str) -> VerifierVersion | None:
        """The oldest version with this identity."""
        with tracking_errors(self.uri):
            found = self.client.search_model_versions(f"name = 'verifier.{name}' and tag.`identity` = '{digest}'")
        return _verifier(min(found, key=lambda version: int(version.version))) if found else None

    def serving_verifier(self, name: str) -> VerifierVersion | None:
        """The version that alias `serving` points to; None: no alias, or what it points to is gone."""
        version = self._by_alias(f"verifier.{name}", SERVING)
        return _verifier(version) if version is not None else None

    # Drafters.

    def drafters(self, name: str) -> list[DrafterVersion]:
        """All versions of a verifier's drafter, oldest first."""
        model = f"drafter.{name}"
        with tracking_errors(self.uri):
            versions = sorted(self.client.search_model_versions(f"name = '{model}'"), key=lambda version: int(version.version))
            aliases = self._aliases(model) if versions else {}
        return [drafter for version in versions if (drafter := _drafter(version, aliases)) is not None]

    def drafter(self, name: str, alias: str) -> DrafterVersion | None:
        """The drafter behind an alias; None: no such alias, or what it points to is gone."""
        version = self._by_alias(f"drafter.{name}", alias)
        return _drafter(version, {alias: int(version.version)}) if version is not None else None

    def set_alias(self, model: str, alias: str, version: int) -> None:
        with tracking_errors(self.uri):
            self.client.set_registered_model_alias(model, alias, str(version))

    def delete_alias(self, model: str, alias: str) -> None:
        with tracking_errors(self.uri):
            self.client.delete_registered_model_alias(model, alias)

    def verify(self, drafter: DrafterVersion, identity: VerifierIdentity) -> None:
        """Hold every stored file of a drafter against its digest, and its lock against a verifier.

        Raises:
            FlowError: missing or altered artifacts, a gate that did not pass, or a drafter of another verifier.
            TrackingError: the registry cannot be asked.
        """
        label = f"{drafter.name} version {drafter.version}"
        if drafter.gate != "pass":
            raise FlowError(f"{label}: gate = {drafter.gate!r}: only drafters that passed it are served")
        with tracking_errors(self.uri):
            source = self.client.get_model_version_download_uri(drafter.name, str(drafter.version))
        with tempfile.TemporaryDirectory(prefix="draftline-verify-") as scratch:
            stored = Path(scratch)
            try:
                bring(self.uri, source, stored, label, drafter.content)
                require_pair(stored, identity)
            except VersionError as error:
                raise FlowError(str(error).replace(f"{stored}/", "")) from None
            except PairError as error:
                raise FlowError(f"{label}: {error}") from None
            except OSError as error:
                # A full disk says nothing about the drafter.
                raise TrackingError(f"{label}: its files cannot be brought here: {error.strerror or error}") from None

    def _ensure_model(self, model: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _aliases(self, model: str) -> dict[str, int]:
        # Versions that a search returns have no aliases; the model has.
        return {alias: int(version) for alias, version in self.client.get_registered_model(model).aliases.items()}

    def _by_alias(self, model: str, alias: str) -> ModelVersion | None:
        from mlflow.exceptions import MlflowException

        with tracking_errors(self.uri):
            try:
                return self.client.get_model_version_by_alias(model, alias)
            except MlflowException as error:
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    return None
                raise


def _verifier(version: ModelVersion) -> VerifierVersion:
    tags = version.tags
    try:
        identity = VerifierIdentity.model_validate(json.loads(tags["identity_json"]))
        return VerifierVersion(version.name.removeprefix("verifier."), int(version.version), tags["identity"], tags["source"], tags["quantization"], identity)
    except (KeyError, ValueError) as error:
        raise FlowError(f"{version.name} version {version.version}: not registered by `python -m flows.verifiers` ({error})") from None


def _drafter(version: ModelVersion, aliases: dict[str, int]) -> DrafterVersion | None:
    """A version whose tags are whole; one that is still being registered, or was made by hand, is none."""
    tags = version.tags
    number = int(version.version)
    try:
        return DrafterVersion(
            version.name,
            number,
            tags["content"],
            tags["verifier"],
            tags["gate"],
            float(tags["acceptance_length"]),
            tuple(sorted(alias for alias, of in aliases.items() if of == number)),
            tags.get("costs", "null"),
        )
    except (KeyError, ValueError):
        return None
