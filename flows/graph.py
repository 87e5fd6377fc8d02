"""The graph that `dvc.yaml` declares, read from DVC: flows run it and know nothing else of it."""

from __future__ import annotations

from pathlib import Path

from flows.errors import FlowError


def stage_names(directory: Path) -> list[str]:
    """Names of all stages of the repository in `directory`, each after those that it depends on.

    Raises:
        FlowError: no DVC repository, or a `dvc.yaml` that DVC refuses.
    """
    import networkx
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(directory)) as repository:
            graph = repository.index.graph.reverse()
            return [stage.name for stage in networkx.lexicographical_topological_sort(graph, key=lambda stage: str(stage.name)) if stage.name]
    except DvcException as error:
        raise FlowError(f"{directory / 'dvc.yaml'}: {' '.join(str(error).split())}") from None
