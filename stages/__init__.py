"""Draftline's stages and the libraries they share; see README.md for the graph."""

import os

# Before PyTorch is imported: its OpenMP threads sleep while they wait for each other instead of spinning. Where anything else
# runs on the same cores, spinning makes training 4 times and decoding 50 times slower (measured on two cores); alone it gains nothing.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
