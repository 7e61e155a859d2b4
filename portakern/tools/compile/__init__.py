"""Compiling kernels for hardware that is not here: what to build (``abstract``, ``matrix``), in which process
(``pool``, ``worker``), what came out (``build``), what is kept (``cache``).
"""
