"""Kernels for CPUs: an op's kernel is in <op>.mojo, its call in <op>.py."""
