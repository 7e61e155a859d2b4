"""Pallas kernels for Hopper GPUs, through Mosaic GPU, for calls in which few queries meet many keys."""

if __name__ != "portakern.backends.pallas.decode":
    raise ImportError(
        f"this package is portakern.backends.pallas.decode and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
