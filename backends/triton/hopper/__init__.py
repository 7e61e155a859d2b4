"""Kernels for Hopper's tensor memory accelerator and asynchronous matrix unit, one module an op."""

if __name__ != "portakern.backends.triton.hopper":
    raise ImportError(
        f"this package is portakern.backends.triton.hopper and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
