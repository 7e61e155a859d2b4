"""Exceptions of portakern: a wrong call, a missing kernel, a missing device or package."""

from __future__ import annotations

__all__ = ["NotEmulatedError", "SpecError", "UnavailableError", "UnsupportedError"]


class SpecError(ValueError, TypeError):
    """The call is wrong on every backend: a shape, dtype, option or argument does not fit the op's spec.

    It is both a ``ValueError`` and a ``TypeError``: NumPy, PyTorch and JAX raise one or the other for the same mistake,
    and code that catches either also catches this.
    """


class UnsupportedError(NotImplementedError):
    """The call is valid, but this backend cannot serve it. The message gives the reason and the backends that can."""


class NotEmulatedError(UnsupportedError):
    """The call is valid, but the hardware's emulator lacks a feature that the kernel uses; the message names it. The
    checker counts these cases separately from refusals."""


class UnavailableError(RuntimeError):
    """The backend cannot run in this process. The message names what is missing and how to install it."""
