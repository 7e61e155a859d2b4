"""NVIDIA and AMD GPUs through Triton (Tillet, Kung, Cox, MAPL 2019): one kernel source an op serves every architecture.

``interpreter/`` runs the same kernels on CPU tensors; ``launch.py`` chooses between the two per call.
"""

if __name__ != "portakern.backends.triton":
    raise ImportError(
        f"portakern's Triton backend was imported as {__name__!r}, which shadows the real triton package: a script "
        "was started inside backends/. "
        "Start it from another folder, and import portakern.backends.triton"
    )

from portakern.core.backend import Backend

BACKEND = Backend(
    "triton",
    framework="torch",
    package=__name__,
    requires=("torch", "triton"),
    extra="triton",
    refusals=(
        "float64 is not compiled for GPUs",
        "threads hold several copies",
        "Triton reads no",
        "reads float16 of less than",
    ),
)
