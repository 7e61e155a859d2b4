"""What the kernels of this folder are for."""

from dataclasses import replace

from portakern.backends.pallas.gpu.family import FAMILY as GPU

FAMILY = replace(GPU, package="portakern.backends.pallas.fused", before=("gpu",))
