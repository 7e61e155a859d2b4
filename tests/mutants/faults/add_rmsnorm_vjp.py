"""Faults planted in the kernels of add_rmsnorm_vjp."""

from __future__ import annotations

from tests.mutants.faults._added_vjp import FAULTS

__all__ = ["FAULTS"]
