"""What the kernels of this folder are for."""

from portakern.core.backend import Family

FAMILY = Family(
    "portakern.backends.triton.gpu",
    platforms=("cuda", "rocm"),
    interprets=True,
    compiler="portakern.backends.triton.compiler",
    replays="portakern.backends.triton.replay:learn",
)
