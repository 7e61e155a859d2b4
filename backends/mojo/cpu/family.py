"""What the kernels of this folder are for."""

from portakern.core.backend import Family

FAMILY = Family("portakern.backends.mojo.cpu", platforms=("cpu",))
