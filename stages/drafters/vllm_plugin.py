"""vLLM general plug-in: DSpark drafters on engines that have no native support for them."""


def register() -> None:
    """Called by vLLM in each of its processes."""
