"""Kernels in plain Triton, one module an op, for every NVIDIA and AMD GPU."""

if __name__ != "portakern.backends.triton.gpu":
    raise ImportError(
        f"this package is portakern.backends.triton.gpu and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
