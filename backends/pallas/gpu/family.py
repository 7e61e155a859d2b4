"""What the kernels of this folder are for."""

from portakern.core.backend import Family, Need

FAMILY = Family(
    "portakern.backends.pallas.gpu",
    platforms=("cuda",),
    targets=("sm_90",),
    before=("unordered",),
    interprets=True,
    needs=(Need("jax", "0.11", "which takes Python 3.12 or newer"),),
    lists="portakern.backends.pallas.listed:kernels",
    compiler="portakern.backends.pallas.gpu.toolchain.compiler",
    profiles={"races": "portakern.backends.pallas.gpu.toolchain.races:raising"},
)
