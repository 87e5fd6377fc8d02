"""What cannot be asked is not what is missing: only the latter makes a drafter unusable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
import requests

from flows.errors import FlowError
from flows.registry import Registry
from stages.tracking import TrackingError
from tests.flows.versions import drafter, identity


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (requests.exceptions.ChunkedEncodingError("Connection broken"), TrackingError),
        (requests.exceptions.ConnectionError("Connection refused"), TrackingError),
        (FileNotFoundError("no such file"), FlowError),
    ],
)
def test_a_registry_that_goes_while_files_are_fetched_says_nothing_about_them(raised: OSError, says: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(**_: Any) -> str:
        raise raised

    monkeypatch.setattr(mlflow.artifacts, "list_artifacts", lambda **_: ["checkpoint"])
    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", download)
    registry = Registry.__new__(Registry)
    registry.uri = "http://127.0.0.1:5000"
    registry.client = SimpleNamespace(get_model_version_download_uri=lambda *_: "mlflow-artifacts:/1/checkpoint")  # type: ignore[assignment]
    with pytest.raises(says) as error:
        registry.verify(drafter(), identity())
    assert "\n" not in str(error.value)
