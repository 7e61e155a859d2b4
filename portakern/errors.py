"""The three ways a call can fail, so that a caller can tell a wrong call from a missing kernel from a missing
device.
"""

from __future__ import annotations

__all__ = ["SpecError", "UnavailableError", "UnsupportedError"]


class SpecError(ValueError, TypeError):
    """The call is wrong on every backend: a shape, dtype, option or argument breaks the op's declaration.

    It is both a ``ValueError`` and a ``TypeError`` because NumPy, PyTorch and JAX disagree on which of the two a bad
    argument raises; code written against any of them catches it.
    """


class UnsupportedError(NotImplementedError):
    """The call is right, but this backend cannot serve it; the message says why and what can."""


class UnavailableError(RuntimeError):
    """The backend cannot run in this process; the message says what is missing and how to install it."""
