"""Kernels that portakern did not write, held to its contract. README.md says what came out."""
