"""Pallas kernels written for TPUs.

VMEM blocks on the (8, 128) grid, a sequential grid, float32 accumulators in scratch.
"""

if __name__ != "portakern.backends.pallas.tpu":
    raise ImportError(
        f"this package is portakern.backends.pallas.tpu and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
