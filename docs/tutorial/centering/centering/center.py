"""Rows about their mean: what the op is, its oracle, and which modules hold its kernels."""

from __future__ import annotations

from math import inf, prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

import portakern as pk
from portakern.spec import Tile, spec
from portakern.spec.tolerance import magnitude, round_to, units

# --8<-- [start:signature]
A = TypeVar("A")


class CenterOut(NamedTuple):
    y: Float[A, "*batch n"]


@spec(
    tiling={"block_rows": Tile(1, 256), "block_n": Tile(128, 16384, of="n")},
    apart=("batch",),
    typical={"batch": (4096,), "n": 4096},
    flops=lambda call: 2.0 * prod(call.dims["batch"]) * call.dims["n"],
)
def center(x: Float[A, "*batch n"]) -> CenterOut:
    """y = x - mean(x) over the last axis, in float32 (float64 for float64).

    Args:
      x: (*batch, n).

    Returns:
      y: the shape and dtype of x. A row that holds a NaN is all NaN. An inf makes its own element NaN, and the others
      of its row an inf of the other sign. Guaranteed while a row's sum of |x| is under 2^127 (2^1023 in float64).
    """
    raise NotImplementedError


# --8<-- [end:signature]


# --8<-- [start:bound]
@center.tolerance
def bound(call: pk.Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """B = E (1 + U) + U |y| + eta,  E = u (c_N + 6) mean|x| + u |y| + 4 tau,  c_N = chain(N)

    The sum of N terms errs by c_N u sum|x| at most, whatever their signs, and its quotient by N (2 ulp) by another 4u
    of it; 2u are room for products of these. The difference rounds by u |y|. Elements, their mean and the result may
    be flushed: 4 tau. Nothing is promised where sum|x| reaches 2^127.
    """
    x, unit = call.arrays["x"], units(call)
    with np.errstate(all="ignore"):
        total = magnitude(x).sum(-1, keepdims=True)
        err = unit.u * ((unit.chain(x.shape[-1]) + 6) * total / x.shape[-1] + magnitude(ref[0])) + 4 * unit.tau
        err = np.where(total < unit.huge, err, inf)
    return (round_to(err, ref[0], call.dtype),)


# --8<-- [end:bound]


# --8<-- [start:edges]
@center.edge(dims={"n": (2, 300)})
def nan_in_a_row(arrays: dict[str, np.ndarray], rng: np.random.Generator, options: dict[str, Any]) -> None:
    """A NaN makes its whole row NaN, and no other row."""
    arrays["x"][rng.random(arrays["x"].shape[:-1]) < 0.5, 0] = np.nan


@center.edge(dims={"n": (2, 300)}, regime="large_mean")
def large_mean(arrays: dict[str, np.ndarray], rng: np.random.Generator, options: dict[str, Any]) -> None:
    """Rows far from 0 that hardly spread: almost everything cancels."""


@center.edge(dims={"n": (129, 513)}, smallest_tiles=True)
def many_tiles(arrays: dict[str, np.ndarray], rng: np.random.Generator, options: dict[str, Any]) -> None:
    """Rows of several tiles, the last of them ragged."""


@center.law
def rows_are_independent(run: Any, draw: Any) -> None:
    """A row alone gives the same bits as among others."""
    draw.row_alone(run)


@center.law
def powers_of_two_scale_exactly(run: Any, draw: Any) -> None:
    """center(2^k x) = 2^k center(x), to the bit."""
    x = draw.normal(draw.extent(1, 5), draw.extent(1, 300))
    two = x.dtype.type(2.0 ** draw.extent(0, 8))
    draw.same_bits(run(x * two), run(x) * two, "a row times a power of two")


center.sample("rows", dims={"batch": (3,), "n": 5})
# --8<-- [end:edges]


# --8<-- [start:oracle]
@pk.backends()["reference"].implements("center")
def oracle(call: pk.Call, config: pk.Config) -> tuple[np.ndarray]:
    x = call.arrays["x"]
    with np.errstate(all="ignore"):
        return (x - x.sum(-1, keepdims=True) / x.shape[-1],)


# --8<-- [end:oracle]


# --8<-- [start:backends]
pk.backends()["triton"].implemented_in("center", "centering.on_triton")
pk.backends()["pallas"].implemented_in("center", "centering.on_pallas")


def row_tiles(call: pk.Call) -> dict[str, int]:
    """A formula of n alone, so that a row has the same bits whatever stands beside it."""
    return {"block_rows": 16, "block_n": min(max(1 << (call.dims["n"] - 1).bit_length(), 128), 1024)}


def key(call: pk.Call) -> dict[str, str | int]:
    """What the best tiling depends on; tables of tuned tilings are looked up by it."""
    return {"dtype": call.dtype, "n": call.dims["n"]}


# --8<-- [end:backends]
