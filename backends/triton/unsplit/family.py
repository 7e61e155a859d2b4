"""What the kernels of this folder are for."""

from portakern.core.backend import Family

FAMILY = Family(
    "portakern.backends.triton.unsplit",
    platforms=("cuda",),
    targets=("sm_90",),
    compiler="portakern.backends.triton.compiler",
    plans="portakern.backends.triton.plan:learn",
    lists="portakern.backends.triton.lowering:kernels",
    stages="portakern.backends.triton.lowering:stage",
    imports="portakern.backends.triton.imports:compiled",
)
