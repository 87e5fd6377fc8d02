"""The registered pair of the deployment's tests."""

from tests.deploy.conftest import proven, proven_template, registered

__all__ = ["proven", "proven_template", "registered"]
