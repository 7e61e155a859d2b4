"""What Pallas kernels of an op from outside are launched with, and walk rows with on TPUs: public names."""

from portakern.backends.pallas.common import Refs, launch
from portakern.backends.pallas.tpu._rows import Held, Walk, launched

__all__ = ["Held", "Refs", "Walk", "launch", "launched"]
