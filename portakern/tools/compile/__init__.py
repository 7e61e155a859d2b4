"""Compile kernels for hardware that is not present: what to build (``abstract``, ``matrix``), the compiler's process
(``pool``, ``worker``), the result (``build``) and the cache (``cache``)."""
