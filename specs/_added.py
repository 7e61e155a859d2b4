"""What the specs of norms of a sum share: x + residual is rounded to their dtype, and that is what is normed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.tolerance import KAPPA, magnitude, round_to, rounded, store_spread, units

if TYPE_CHECKING:
    from portakern.core.call import Call

FLUSHES = 3.0
"""Of how many tau the sum may be off: x and residual may each be read as 0, and the sum may be stored as 0. A subnormal
term that is lost moves a rounded sum by no more than twice itself."""


def of_sum(call: Call) -> Call:
    """The call of the norm on x + residual, rounded once to their dtype.

    Kernels round twice, to the accumulator and to 16 bits. Of a sum that is the same: the accumulator has more than
    twice their bits and two (Figueroa 1995, "When is double rounding innocuous?").
    """
    with np.errstate(all="ignore"):
        return normed(call, rounded(call.arrays["x"] + call.arrays["residual"], call.dtype).astype(np.float64))


def normed(call: Call, total: np.ndarray) -> Call:
    """The call of the norm on a sum."""
    given = None if call.given is None else {**call.given, "x": call.dtype}
    off = {"x": call.off["residual_out"]} if "residual_out" in call.off else {}
    return call.replace(arrays={**call.arrays, "x": total}, given=given, off=off)


def sum_bound(call: Call, total: np.ndarray | None) -> np.ndarray | None:
    """The bound of the sum as it is stored: FLUSHES tau, U |sum| + eta."""
    if total is None:
        return None
    return round_to(np.full(total.shape, FLUSHES * units(call).tau), total, call.dtype)


def sum_spread(call: Call, total: np.ndarray | None) -> np.ndarray | None:
    """The RMS error of the sum: that of storing it, and what flushes."""
    return None if total is None else np.hypot(store_spread(total, call.dtype), FLUSHES * units(call).tau)


def sum_forced(call: Call, total: np.ndarray | None) -> np.ndarray | None:
    """Where the sum must be that of the exact one, rounded once: where no term is subnormal, and it is not either."""
    if total is None:
        return None
    x, residual, tiny = call.arrays["x"], call.arrays["residual"], DTYPES[call.dtype].tiny
    return np.logical_and.reduce([np.isfinite(a) & ((a == 0) | (np.abs(a) >= tiny)) for a in (x, residual, total)])


def inherit(op: Spec[Any], norm: Spec[Any]) -> None:
    """The corners of a norm, of a sum of two halves, which is exact."""

    def halved(plant: Callable[..., None]) -> Callable[..., None]:
        def both(arrays: dict[str, Any], rng: Any, options: Mapping[str, Any]) -> None:
            plant(arrays, rng, options)
            arrays["x"] /= 2
            arrays["residual"][...] = arrays["x"]

        return both

    for name, edge in norm.edges.items():
        assert edge.plant is not None
        op.edges[name] = replace(edge, plant=halved(edge.plant))


def cancelling(arrays: dict[str, Any], rng: Any, options: Mapping[str, Any]) -> None:
    """A residual of -x and a little: what is left of the sum has few digits, all of them right."""
    arrays["residual"][...] = -arrays["x"] * (1 + 2.0**-5 * rng.standard_normal(arrays["x"].shape))


def opposed_infinities(arrays: dict[str, Any], rng: Any, options: Mapping[str, Any]) -> None:
    """inf - inf is NaN in the sum, which the norm then has in its row."""
    places = rng.random(arrays["x"].shape) < 0.05
    arrays["x"][places], arrays["residual"][places] = np.inf, rng.choice([-np.inf, np.inf])


def sum_is_what_is_normed(run: Callable[..., Any], draw: Any) -> None:
    """The sum is that of its terms in any order, and y the norm of the sum as it is stored, to the bit."""
    x, residual = _two(draw)
    y, total = run(x, residual)
    draw.same_bits(run(residual, x)[1], total, "the sum in another order")
    draw.same_bits(run(total, np.zeros_like(total))[0], y, "the norm of the sum")


def rows_alone(run: Callable[..., Any], draw: Any) -> None:
    """A row alone gives the same bits as among others, in both results."""
    x, residual = _two(draw)
    first = draw.extent(0, x.shape[0] - 1)
    row = slice(first, first + 1)
    for name, alone, among in zip(("y", "the sum"), run(x[row], residual[row]), run(x, residual), strict=True):
        draw.same_bits(alone, among[row], f"{name} of a row alone")


def _two(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    shape = draw.extent(2, 40), draw.extent(1, 300)
    return draw.normal(*shape), draw.normal(*shape)


def without_a_cotangent_of_the_sum(run: Callable[..., Any], draw: Any, weights: int) -> None:
    """A cotangent of zeros for the sum is none, and one of the sum alone is its gradient, both to the bit."""
    shape = draw.extent(2, 40), draw.extent(2, 300)
    total, d_y, d_total = (draw.normal(*shape) for _ in range(3))
    given = [draw.normal(shape[1]) for _ in range(weights)]
    zeros = np.zeros_like(d_y)
    none = run(total, d_y, *given)[0]
    draw.same_bits(run(total, d_y, *given, zeros)[0], none, "a cotangent of zeros")
    draw.same_bits(run(total, zeros, *given, d_total)[0], d_total, "a cotangent of the sum alone")


def added_errors(call: Call, err: np.ndarray, of_norm: np.ndarray) -> np.ndarray:
    """E of d_x, from that of the norm's and its exact value: the sum with the other cotangent rounds and may flush."""
    other, unit = call.arrays["d_residual_out"], units(call)
    if other is None:
        return err
    unsure = np.isinf(err) | (np.isfinite(of_norm) & (magnitude(of_norm) + magnitude(other) >= unit.huge))
    return np.where(unsure, np.inf, err + unit.u * (magnitude(of_norm + other) + err) + 2 * unit.tau)


def added_variances(call: Call, ref: tuple[Any, ...], variances: list[np.ndarray]) -> list[np.ndarray]:
    """The variances of a norm's gradients, d_x first, with that of the sum with the other cotangent."""
    if call.arrays["d_residual_out"] is None or ref[0] is None:
        return variances
    return [variances[0] + (KAPPA * units(call).u * magnitude(ref[0])) ** 2, *variances[1:]]
