"""Pallas kernels for Hopper GPUs, through Mosaic GPU, that do in one pass what takes others several."""

if __name__ != "portakern.backends.pallas.fused":
    raise ImportError(
        f"this package is portakern.backends.pallas.fused and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
