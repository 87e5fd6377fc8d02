"""The draft models in torch: configuration, modules, greedy drafting, weights in and out."""
