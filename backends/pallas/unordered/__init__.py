"""Pallas kernels for Hopper GPUs, through Mosaic GPU, in which several blocks add to one result: faster, and its bits
may change from one run to the next.

They serve calls that name them, ``variant="unordered"``, and no others.
"""

if __name__ != "portakern.backends.pallas.unordered":
    raise ImportError(
        f"this package is portakern.backends.pallas.unordered and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
