"""What the kernels of this folder are for."""

from portakern.core.backend import Family, Profile

FAMILY = Family(
    "portakern.backends.triton.gpu",
    platforms=("cuda", "rocm"),
    interprets=True,
    compiler="portakern.backends.triton.compiler",
    profiles={
        "emulated": Profile(
            "portakern.backends.triton.emulator.profile:emulated", ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
        )
    },
    plans="portakern.backends.triton.plan:learn",
    lists="portakern.backends.triton.lowering:kernels",
    stages="portakern.backends.triton.lowering:stage",
    imports="portakern.backends.triton.imports:compiled",
)
