"""Formulas of the gradients of normalisations on Hopper, which variants walk rows with (`rows`).

    layernorm: xh = (x - mean) r, r = (var + eps)^-1/2        d_x = r (h - mean(h) - xh mean(h xh))
    rmsnorm: xh = x r, r = (mean(x^2) + eps)^-1/2             d_x = r (h - xh mean(h xh))        h = weight d_y

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979),
equation 2.1, for the merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from portakern.backends.pallas.lib.mosaic_gpu import rows as row_walk
from portakern.backends.pallas.lib.mosaic_gpu.rows import Formula, WarpRowWalk, Weights
from portakern.core.call import Call


def key(call: Call) -> dict[str, str | int]:
    return row_walk.key(call, call.dims["n"])


def mean_of(x: Any, walk: WarpRowWalk, start: Any = None) -> Any:
    """The mean of a block, of a chunk that begins at ``start`` or of whole rows: a sum over a count, and the mean of
    what that leaves of each element. Equal numbers have themselves as their mean so, however both round."""
    at = () if start is None else (start,)
    count = walk.counted(start)[1] if at else walk.n
    rounded = jnp.sum(walk.within(x, 0.0, *at), axis=1) / count
    return rounded + jnp.sum(walk.within(x - walk.spread(rounded), 0.0, *at), axis=1) / count


def parted(seen: Any, here: Any) -> tuple[Any, Any]:
    """Of ``seen`` elements and ``here`` more: the share of these, and as many of the others (equation 2.1)."""
    seen, here = (lax.convert_element_type(count, jnp.float32) for count in (seen, here))
    share = here / (seen + here)
    return share, share * seen


SUMS = ("d_weight", "d_bias")


@dataclass(frozen=True)
class LayerNormVjp(Formula):
    """The formula of a row of x and d_y; its statistics are the mean, m2, and the sums of h and of h (x - mean)."""

    empty = (0.0,) * 4
    eps: float

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
        x, h = x[0], walk.within(cotangent(x[1], weights), 0.0, start)
        mean = mean_of(x, walk, start)
        centred = walk.within(x - walk.spread(mean), 0.0, start)
        return mean, jnp.sum(centred * centred, axis=1), jnp.sum(h, axis=1), jnp.sum(h * centred, axis=1)

    def merged(self, before: tuple[Any, ...], after: tuple[Any, ...], seen: Any, here: Any) -> tuple[Any, ...]:
        """Equation 2.1; h (x - mean) moves with the mean."""
        (mean, m2, h_sum, hx), (mean_after, m2_after, h_after, hx_after) = before, after
        share, weight = parted(seen, here)
        delta = mean_after - mean
        moved = delta * share
        hx = hx + hx_after + ((delta - moved) * h_after - moved * h_sum)
        # delta is squared last: it is the whole mean in the first chunk, where its weight is 0
        return mean + moved, m2 + m2_after + delta * (delta * weight), h_sum + h_after, hx

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        mean, _, h_sum, hx = statistics
        r = self.scale(statistics, walk)
        xh = (x[0] - walk.spread(mean)) * walk.spread(r)
        pull = walk.spread(h_sum / walk.n) + xh * walk.spread(r * (hx / walk.n))
        return walk.spread(r) * (cotangent(x[1], weights) - pull)

    def row_numbers(self, statistics: tuple[Any, ...], walk: WarpRowWalk) -> tuple[Any, ...]:
        return statistics[0], self.scale(statistics, walk)

    def scale(self, statistics: tuple[Any, ...], walk: WarpRowWalk) -> Any:
        """r of each row."""
        return lax.rsqrt(statistics[1] / walk.n + self.eps)


def cotangent(d_y: Any, weights: Weights) -> Any:
    """h of a block."""
    return d_y * weights["weight"]() if "weight" in weights else d_y


def normalised_columns(x: Any, mean: Any, r: Any) -> Any:
    """xh of some columns of a row."""
    return (x - mean) * r


def narrow_dtype(call: Call) -> str | None:
    """The dtype that a normalised row is rounded to before the weight, or None."""
    before = call.options["rounding"] == "before_weight" and call.dtype in ("float16", "bfloat16")
    return call.dtype if before else None


def narrowed(y: Any, dtype: str | None) -> Any:
    """float32 numbers, rounded to a dtype if there is one."""
    return y.astype(dtype).astype(jnp.float32) if dtype else y


@dataclass(frozen=True)
class RmsNormVjp(Formula):
    """The formula of a row of x and d_y; its statistics are the sums of x^2 and of h x."""

    empty = 0.0, 0.0
    eps: float
    narrow: str | None

    def of_chunk(self, x: Any, walk: WarpRowWalk, start: Any, weights: Weights) -> tuple[Any, ...]:
        x, h = walk.within(x[0], 0.0, start), walk.within(self.cotangent(x[1], weights), 0.0, start)
        return jnp.sum(x * x, axis=1), jnp.sum(h * x, axis=1)

    def result(self, statistics: tuple[Any, ...], x: Any, walk: WarpRowWalk, weights: Weights) -> Any:
        (r,) = self.row_numbers(statistics, walk)
        xh = x[0] * walk.spread(r)
        return walk.spread(r) * (self.cotangent(x[1], weights) - xh * walk.spread(r * (statistics[1] / walk.n)))

    def row_numbers(self, statistics: tuple[Any, ...], walk: WarpRowWalk) -> tuple[Any, ...]:
        return (lax.rsqrt(statistics[0] / walk.n + self.eps),)

    def cotangent(self, d_y: Any, weights: Weights) -> Any:
        """h of a block."""
        return narrowed(cotangent(d_y, weights), self.narrow) if "weight" in weights else d_y
