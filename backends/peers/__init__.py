"""Other people's kernels as backends to compare with: one module a library, found through the entry points.

A peer serves a call only when it is named; lists of backends, error messages and ``explain()`` of other calls leave it
out (``Backend.peer``). Named, it is checked, explained and timed as any backend is. Its functions take the arguments of
an op's spec, or as many of them as the library knows: :mod:`.provide` refuses the rest by name, and makes the op of the
gradients from the library's own autograd. Importing this package imports no framework: the functions do, when a call
needs them.
"""

if __name__ != "portakern.backends.peers":
    raise ImportError(
        f"this package is portakern.backends.peers and was imported as {__name__!r}; "
        "run scripts from outside the backends folder"
    )
