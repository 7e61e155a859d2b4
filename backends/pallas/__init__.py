"""The Pallas backend: kernels for TPUs (``tpu/``) and for Hopper GPUs (``gpu/``), run elsewhere by Pallas's own
interpreters.

Importing this package imports no jax: the op modules do, when a call needs them.
"""

if __name__ != "portakern.backends.pallas":
    raise ImportError(
        f"this package is portakern.backends.pallas and was imported as {__name__!r}; run scripts from outside the "
        "backends folder"
    )

from portakern.core.backend import Backend

BACKEND = Backend(
    "pallas",
    framework="jax",
    package=__name__,
    requires=("jax",),
    extra="pallas",
    refusals=(
        "TPUs have no float16",
        "TPUs have no float64",
        "Pallas on GPUs has no float64",
        "take no float32 operands whole",
        "elements that fit here",
        "that decode together",
        "fit the registers that",
        "as the ring wants them",
        "gradient of a bias is not written yet",
        "sinks are given, which",
        "alibi_slopes are given, which",
        "places are float32 on TPUs",
        "results of float32 are asked for, which",
        "o or d_o is float32, which",
        "pages of 8 bits, which",
        "elements along k are too narrow for a TPU",
    ),
)
