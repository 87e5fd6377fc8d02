"""Draftline's stages and the libraries they share; see README.md for the graph."""

import os

from stages.environment import THREADS

# Before PyTorch is imported.
for _name, _value in THREADS.items():
    os.environ.setdefault(_name, _value)
