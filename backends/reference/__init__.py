"""The oracle: NumPy in float64, obviously right, one file an op. Results are unrounded; the caller rounds them."""

from portakern.core.backend import Backend

if __name__ != "portakern.backends.reference":
    raise ImportError(f"import this package as portakern.backends.reference, not {__name__!r}")

BACKEND = Backend("reference", framework="numpy", compiles={"cpu": __name__}, oracle=True)
