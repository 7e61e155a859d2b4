"""NVIDIA and AMD GPUs through Triton (Tillet, Kung, Cox, MAPL 2019): one kernel source an op serves every architecture.

``interpreter/`` runs the same kernels on CPU tensors; ``launch.py`` chooses between the two per call.
"""

if __name__ != "portakern.backends.triton":
    raise ImportError(
        f"portakern's Triton backend was imported as {__name__!r}, which shadows the real triton package: a script was started inside backends/. "
        "Start it from another folder, and import portakern.backends.triton"
    )

from portakern.registry import Backend

BACKEND = Backend("triton", framework="torch", compiles={"cuda": f"{__name__}.gpu", "rocm": f"{__name__}.gpu"}, interprets=f"{__name__}.gpu", compiler=f"{__name__}.compiler", requires=("torch", "triton"), extra="triton",
                  refusals=("float64 is not compiled for GPUs",))  # fmt: skip
