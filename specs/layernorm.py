"""Layer normalisation over the last axis."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.options import Range
from portakern.spec import Tile, spec
from portakern.tolerance import chain, magnitude, round_to, units

if TYPE_CHECKING:
    from portakern.call import Call

A = TypeVar("A")


class LayernormOut(NamedTuple):
    y: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384)},
    or_float32=("weight", "bias"),
    flops=lambda call: 8.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def layernorm(
    x: Float[A, "*batch n"],
    weight: Float[A, "n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    eps: Annotated[float, Range(0.0, typical=(1e-5, 1e-12, 1e-2))] = 1e-5,
) -> LayernormOut:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis, var the mean squared deviation (Ba, Kiros, Hinton 2016, eq. 3-4).

    Args:
      x: (*batch, n).
      weight, bias: (n,), x's dtype or float32; None is 1 and 0.
      eps: added to the variance, >= 0.

    Returns:
      y: the shape and dtype of x. A row that holds inf or NaN is all NaN.
    """
    raise NotImplementedError


@layernorm.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """B = E (1 + U) + U|y| + eta,  E = |w| [r (delta + 3 tau)(1 + rho) + |xh| (rho + 4u) + tau] + 2u (|b| + |xh w|) + 2 tau.

    v = var + eps, r = v^-1/2, xh = (x - mean) r, and c = c_N + 2 the roundings on the way to a mean.
    The mean errs by delta = c u mean|x|. Two passes about such a mean find between var and var + delta^2; merging partial means (Welford) finds the mean
    square of deviations that are each off by delta, between (sqrt(var) - delta)^2 and (sqrt(var) + delta)^2. Summing that rounds by a share (c + 4) u, and
    3 tau come or go where squares, var or eps flush. rho is the share by which the ends of that range of v move r, and 4u for the root and its products.
    Nothing is promised where the low end is not positive (eps = 0 on a row whose variance is 0, drowns in the mean's rounding or is subnormal), or where
    sum|x|, sum (x - mean)^2 or the output's terms reach 2^127, or w is infinite (xh rounds to either side of 0).
    """
    x, w, b = (call.arrays[name] for name in ("x", "weight", "bias"))
    w, b = 1.0 if w is None else np.abs(w), 0.0 if b is None else magnitude(b)
    unit, n, eps = units(call), x.shape[-1], call.options["eps"]
    u, tau, c = unit.u, unit.tau, chain(x.shape[-1]) + 2
    with np.errstate(all="ignore"):
        size = np.abs(x).sum(-1, keepdims=True)
        centred = x - x.sum(-1, keepdims=True) / n
        var = np.square(centred).sum(-1, keepdims=True) / n
        delta, sd, v = c * u * size / n, np.sqrt(var), var + eps
        low = np.maximum(sd - delta, 0) ** 2 * (1 - (c + 4) * u) + eps - 3 * tau
        high = (sd + delta) ** 2 * (1 + (c + 4) * u) + eps + 3 * tau
        rho = np.maximum(np.sqrt(v / low) - 1, 1 - np.sqrt(v / high)) + 4 * u
        r, xh = 1 / np.sqrt(v), np.abs(centred) / np.sqrt(v)
        err = w * (r * (delta + 3 * tau) * (1 + rho) + xh * (rho + 4 * u) + tau) + 2 * u * (b + xh * w) + 2 * tau
        overflows = np.isfinite(size) & ((size >= unit.huge) | (n * var >= unit.huge) | (xh * w + b >= unit.huge) | np.isinf(w))
        err = np.where((low <= 0) | overflows, np.inf, err)
    return (round_to(err, ref[0], call.dtype),)
