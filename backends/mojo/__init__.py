"""Mojo kernels for CPUs, on NumPy's memory: ``cpu/`` has the kernels, a module of Mojo and one of Python for each op,
and ``lib/`` the Mojo that they share. ``library.py`` compiles them, once a machine.

Importing this package compiles nothing and needs no compiler.
"""

if __name__ != "portakern.backends.mojo":
    raise ImportError(
        f"this package is portakern.backends.mojo and was imported as {__name__!r}; run scripts from outside the "
        "backends folder"
    )

from portakern.core.backend import Backend

BACKEND = Backend(
    "mojo",
    framework="numpy",
    package=__name__,
    requires=("mojo",),
    extra="mojo",
    named_only=True,
)
