"""What Pallas kernels of an op from outside are launched with, and walk rows with on TPUs: public names."""

from portakern.backends.pallas.configs import RowsConfig
from portakern.backends.pallas.lib.blocks import Refs, launch
from portakern.backends.pallas.lib.mosaic_tpu.rows import BlockWalk, VmemUse, launched

__all__ = ["BlockWalk", "Refs", "RowsConfig", "VmemUse", "launch", "launched"]
