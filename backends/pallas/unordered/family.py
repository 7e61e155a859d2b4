"""What the kernels of this folder are for."""

from portakern.backends.pallas.hopper import family

FAMILY = family("unordered")
