"""What the kernels of this folder are for."""

from portakern.core.backend import Family

FAMILY = Family(
    "portakern.backends.pallas.tpu",
    platforms=("tpu",),
    interprets=True,
    lists="portakern.backends.pallas.listed:kernels",
    compiler="portakern.backends.pallas.tpu.toolchain.compiler",
    profiles={"simulated": "portakern.backends.pallas.tpu.toolchain.simulator:simulated"},
)
