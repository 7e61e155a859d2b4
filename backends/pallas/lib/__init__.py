"""What Pallas kernels of an op from outside are launched with, and walk rows with on TPUs: public names."""

from portakern.backends.pallas.lib.blocks import Refs, launch
from portakern.backends.pallas.lib.mosaic_tpu.rows import Held, Walk, launched

__all__ = ["Held", "Refs", "Walk", "launch", "launched"]
