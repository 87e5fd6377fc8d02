"""Draftline's stages and the libraries they share; see README.md for the graph."""

import os

# Before PyTorch is imported: how long its OpenMP threads (GNU's runtime) spin while they wait for each other, in turns of a loop.
# Its default is 300,000. Alone on two cores 5,000 is as fast; where anything else runs there, the default makes training 6 times and
# decoding 50 times slower, because each thread waits spinning for one that has no core. (Measured; an engine that does not spin at all is half as slow again.)
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
