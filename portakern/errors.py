"""The ways a call can fail, so that a caller can tell a wrong call from a missing kernel from a missing device."""

from __future__ import annotations

__all__ = ["NotEmulatedError", "SpecError", "UnavailableError", "UnsupportedError"]


class SpecError(ValueError, TypeError):
    """The call is wrong on every backend: a shape, dtype, option or argument breaks the op's declaration.

    It is both a ``ValueError`` and a ``TypeError`` because NumPy, PyTorch and JAX disagree on which of the two a bad
    argument raises; code written against any of them catches it.
    """


class UnsupportedError(NotImplementedError):
    """The call is right, but this backend cannot serve it; the message says why and what can."""


class NotEmulatedError(UnsupportedError):
    """The call is right and its kernel may be, but what stands in for the hardware lacks something, which the message
    names. The checker counts it apart from refusals."""


class UnavailableError(RuntimeError):
    """The backend cannot run in this process; the message says what is missing and how to install it."""
