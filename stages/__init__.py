"""Draftline's stages and the libraries they share; see README.md for the graph."""
