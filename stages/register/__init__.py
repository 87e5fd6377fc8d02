"""Stage: the proven drafter becomes one version in the MLflow registry."""
