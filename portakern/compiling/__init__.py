"""Compiling kernels for hardware that is not here: what to build (``calls``), in which process (``pool``, ``worker``),
what came out (``report``), what is kept (``cache``).
"""
