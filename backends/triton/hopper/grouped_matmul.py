"""Matrix products of groups of rows, each with a matrix of its own, on Hopper's asynchronous copy engine and matrix
unit, in 16 bits; and their gradients.

    c[i, j] = sum_k a[i, k] b[g, k, j]        d_a = d_c b_g^T        d_b[g] = a_g^T d_c_g        g: the group of row i

a: (rows, k), b: (groups, k, n), ends: (groups,), where each group ends -> c: (rows, n). A program takes tiles of
block_m x block_n, which begin where their group does, by warps that have roles, and walks along the ends to find them
(:mod:`._grouped`): the host knows no size, and no kernel runs before. d_a is the same product, of d_c and the
transposed matrices. A tile of d_b sums its group's rows from the first one on; that of a group without rows is zeros.

An element's bits depend on the order of its sum alone, as in ``matmul``, so that tiles may follow how many rows and
groups there are. They are those of the portable kernel (tests/test_gpu.py tries it).

Of 4096 rows, 8 x 2048 x 2048, on an H100, operations take 35 us and 256 tiles of 128 x 256 two rounds of 132 programs,
of 22 us each by the times that ``matmul`` has. Groups of few rows wait for their matrices: 64 x 2048 x 1408 are 369 MB,
110 us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import HopperGroupedConfig
from portakern.backends.triton.hopper._scratch import operand
from portakern.backends.triton.hopper._tiles import BEGIN_AND_END, RATES, STEP
from portakern.backends.triton.hopper.family import FAMILY
from portakern.backends.triton.hopper.matmul import described
from portakern.backends.triton.launch import GLUON, cdiv, launch, shared_limit
from portakern.backends.triton.layout import fresh, fresh_like
from portakern.backends.triton.lib.matmul import products
from portakern.backends.triton.lib.tma import (
    BARRIERS,
    RAGGED_ROWS,
    in_room,
    movable,
    not_tried,
    processors,
    ragged,
)
from portakern.core import targets
from portakern.core.backend import Drawn
from portakern.core.tilings import default
from portakern.specs.matmul import product_dtype

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

ROWS, DEPTH = 128, 64
"""Rows of a tile, 64 of each group of warps that multiplies; and a step of the sum, a line of the copy engine."""

TILES = {
    256: (RATES["16-bit"]["128 x 256"], BEGIN_AND_END["128 x 256"]),
    128: (RATES["16-bit"]["128 x 128"], BEGIN_AND_END["128 x 128"]),
    64: (0.6, 0.9),
}
"""Columns of a tile -> the part of the best rate that a multiprocessor reaches on it, and microseconds of a round that
do not depend on the sum's length: matmul's, those of 64 columns estimated."""


MEMORY = (targets.family("sm_90").bandwidth or float("inf")) / 1e6
"""Bytes that an H100's memory moves in a microsecond."""


def extents_of(call: Call, name: str) -> tuple[int, int, int, int]:
    """Of an output's product: how many groups have tiles if all that can have some do, rows and columns of c of each
    such, and what is summed, where groups have as many rows each."""
    rows, groups, k, n = (call.dims[d] for d in ("rows", "groups", "k", "n"))
    some = max(1, min(groups, rows))
    if name == "d_b":
        return groups, k, n, cdiv(rows, some)
    return (some, cdiv(rows, some), n, k) if name == "c" else (some, cdiv(rows, some), k, n)


class ProductTimes(NamedTuple):
    """Of an output's product in one tile: rounds of the multiprocessors, and microseconds that these take, and that
    memory needs for the matrices."""

    rounds: int
    multiplied: float
    moved: float


def times_of(call: Call, name: str, columns: int) -> ProductTimes:
    rate, besides = TILES[columns]
    groups, m, n, k = extents_of(call, name)
    rounds = cdiv(groups * cdiv(m, ROWS) * cdiv(n, columns), processors(None))
    multiplied = rounds * (besides + cdiv(k, DEPTH) * STEP * columns / 256 / rate)
    return ProductTimes(rounds, multiplied, 2 * groups * call.dims["k"] * call.dims["n"] / MEMORY)


def multiplied_dtype(call: Call) -> str:
    """In which dtype the products of an op, or of its gradient, are taken."""
    return product_dtype(call) if "d_c" in call.arrays else call.dtype


def key(call: Call) -> dict[str, str | int]:
    """The kind of the products, the tile in which they are done first, of 16 bits, and how many rounds of tiles the
    first of them has, up to 4; one where memory needs longer."""
    kind, columns, rounds = products(call, multiplied_dtype(call)), min(TILES), 1
    if kind == "16-bit" and call.wants:
        of = {columns: [times_of(call, name, columns) for name in call.wants] for columns in TILES}
        columns = min(of, key=lambda columns: sum(max(t.multiplied, t.moved) for t in of[columns]))
        first = of[columns][0]
        rounds = min(first.rounds, 4) if first.multiplied > first.moved else 1
    return {"products": kind, "tile": f"{ROWS} x {columns}", "rounds": rounds}


def shared_memory(config: HopperGroupedConfig) -> int:
    """Bytes of shared memory: the stages of operands, and what of c waits there."""
    stage = (config.block_m + config.block_n) * config.block_k * 2
    return config.num_stages * stage + config.block_m * box_columns(config) * 2 + BARRIERS


def box_columns(config: HopperGroupedConfig) -> int:
    """Columns of c that leave at a time."""
    return config.block_n // (2 if config.epilogue_subtile else 1)


def fit(call: Call, config: HopperGroupedConfig) -> HopperGroupedConfig:
    """As many stages as shared memory has room for."""
    return in_room(config, shared_memory, shared_limit(call.target.arch))


def supports(call: Call, config: HopperGroupedConfig) -> str | None:
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    reason = not_tried(call) or not_of_16_bits(call) or out_of_reach(call, columns)
    if reason:
        return reason
    if (rows, depth) != (ROWS, DEPTH) or columns not in TILES:
        return f"tiles of {rows} x {columns} x {depth}; this kernel takes {ROWS} x 64, 128 or 256 x {DEPTH}"
    if columns == 64 and config.epilogue_subtile:
        return "tiles of 64 columns leave in one; use epilogue_subtile=0"
    shared, limit = shared_memory(config), shared_limit(call.target.arch)
    if shared > limit:
        return (
            f"{config.num_stages} stages of {rows} x {columns} x {depth}, and c's tile, take {shared} bytes of shared "
            f"memory; {call.target.arch} has {limit}; use a smaller num_stages"
        )
    return None


def not_of_16_bits(call: Call) -> str | None:
    """Why the call's dtypes are left to the portable kernel, or None."""
    given = {multiplied_dtype(call), *(dtype for _, dtype in call.outputs.values())}
    if len(given) == 1 and given <= {"float16", "bfloat16"}:
        return None
    return f"arrays and results of {' and '.join(sorted(given))}: this kernel takes one of float16 and bfloat16 for all"


def out_of_reach(call: Call, columns: int) -> str | None:
    """Why the call's extents are left to the portable kernel, or None."""
    rows, groups, k, n = (call.dims[d] for d in ("rows", "groups", "k", "n"))
    if n % 8 or k % 8:
        return f"n = {n} and k = {k}: the copy engine takes rows of multiples of 8 elements"
    tiles = (rows // ROWS + groups + 1) * cdiv(max(n, k), columns) + groups * cdiv(k, ROWS) * cdiv(n, columns)
    if rows > RAGGED_ROWS or max(n, k, tiles) > 2**31 - 512:
        return f"rows = {rows}, groups = {groups}, k = {k}, n = {n}: more than 2^30 rows, or 2^31 columns or tiles"
    return None


DRAWN = Drawn(("gradient_dtype",), {"k": 8, "n": 8}, narrow=("d_c",))


@BACKEND.implements("grouped_matmul", key=key, fit=fit, supports=supports, config=HopperGroupedConfig, same_bits=True,
                    drawn=DRAWN, compiled_alone=GLUON)  # fmt: skip
def grouped_matmul(call: Call, config: HopperGroupedConfig) -> tuple[Any, ...]:
    a, b = call.arrays["a"], call.arrays["b"]
    c = fresh((a.shape[0], b.shape[2]), a.dtype, a.device)
    multiply(call, a, b, c, config)
    return (c,)


def multiply(call: Call, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, config: HopperGroupedConfig) -> None:
    """c = a b_g in the rows of each group g, and zeros in the others."""
    from portakern.backends.triton.hopper._grouped import GroupedPlan, grouped_matmul_by_roles

    (rows, k), (groups, _, n), ends = a.shape, b.shape, call.arrays["group_ends"]
    columns, box = config.block_n, box_columns(config)
    of_b = operand(call, b, b.stride(0), b.shape, None)
    if groups == 1:
        of_b = of_b._replace(batch=0)
    plan = GroupedPlan(ROWS, columns, DEPTH, config.group, config.num_stages, box, b_across=of_b.across)
    grid = min(processors(c.device), (rows // ROWS + groups + 1) * cdiv(n, columns))
    launch(grouped_matmul_by_roles, grid, call, ragged(movable(a)[:, None], ROWS, DEPTH),
           described(of_b, tuple(b.shape), (DEPTH, columns), True, layout=laid(DEPTH if of_b.across else columns)),
           ragged(c[:, None], ROWS // 2, box), ends, ends.stride(0), rows, groups, n, k, plan=plan,
           num_warps=4)  # fmt: skip


def laid(columns: int) -> Any:
    """How a tile of a matrix, of lines of so many elements, lies in shared memory."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(min(2 * columns, 128), 16, 3)


# ------------------------------------------------------------------------------------------------------------- gradient
@BACKEND.implements("grouped_matmul_vjp", key=key, fit=fit, supports=supports, config=HopperGroupedConfig,
                    same_bits=True, drawn=DRAWN, compiled_alone=GLUON)  # fmt: skip
def grouped_matmul_vjp(call: Call, config: HopperGroupedConfig) -> tuple[Any, ...]:
    a, b, d_c = (call.arrays[name] for name in ("a", "b", "d_c"))
    d_a, d_b = (fresh_like(x) if name in call.wants else None for name, x in (("d_a", a), ("d_b", b)))
    if d_a is not None:
        multiply(call, d_c, b.mT, d_a, own_tiling(call, "d_a", config))
    if d_b is not None:
        matrix_gradients(call, a, d_c, d_b, own_tiling(call, "d_b", config))
    return d_a, d_b


def own_tiling(call: Call, name: str, config: HopperGroupedConfig) -> HopperGroupedConfig:
    """The tiling of a gradient's product: that of the gradient alone, unless somebody named or found another for the
    call, which is then for both."""
    implementation = BACKEND.implementation("grouped_matmul_vjp", FAMILY)
    assert implementation is not None
    if default(implementation, call).tiling != config:
        return config
    return default(implementation, call.replace(wants=(name,))).tiling


def matrix_gradients(
    call: Call, a: torch.Tensor, d_c: torch.Tensor, d_b: torch.Tensor, config: HopperGroupedConfig
) -> None:
    """d_b = a_g^T d_c_g of each group g."""
    from portakern.backends.triton.hopper._grouped import GroupedPlan, grouped_matmul_vjp_by_roles
    from portakern.backends.triton.hopper._scratch import Operand

    (groups, k, n), ends = d_b.shape, call.arrays["group_ends"]
    columns, box = config.block_n, box_columns(config)
    plan = GroupedPlan(ROWS, columns, DEPTH, config.group, config.num_stages, box, sums=True)
    grid = min(processors(d_b.device), groups * cdiv(k, ROWS) * cdiv(n, columns))
    of_d_b = described(Operand(d_b, k * n, n, False), (groups, k, n), (ROWS // 2, box), True, layout=laid(box))
    launch(grouped_matmul_vjp_by_roles, grid, call, ragged(movable(a)[:, None], DEPTH, ROWS),
           ragged(movable(d_c)[:, None], DEPTH, columns), of_d_b, ends, ends.stride(0), a.shape[0], groups, n, k,
           plan=plan, num_warps=4)  # fmt: skip
