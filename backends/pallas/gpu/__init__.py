"""Pallas kernels written for Hopper GPUs, through Mosaic GPU: one module an op.

A kernel is written for a block of warpgroups, of 128 threads each, and moves its own data: the copy engine brings tiles
from device memory into shared memory and says so on barriers, tensor cores (wgmma) read them there, and what is written
goes back the same way.
"""

if __name__ != "portakern.backends.pallas.gpu":
    raise ImportError(
        f"this package is portakern.backends.pallas.gpu and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
