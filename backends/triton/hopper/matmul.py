"""Matrix product with batch broadcasting, on Hopper's asynchronous copy engine and matrix unit.

    c[.., i, j] = sum_k a[.., i, k] b[.., k, j]

a: (*#batch, m, k), b: (*#batch, k, n) -> c: (*batch, m, n). A program computes block_m x block_n tiles of c, walking k
in steps of block_k; tiles of operands are described, and arrive in shared memory while the ones before are multiplied.
Programs stay, and take one tile after another. Large products are by warps that have roles (:mod:`._warps`; of float32
:mod:`._float32` too).

Few rows are multiplied the other way round, c^T = b^T a^T (``swapped``): the matrix unit takes 64 rows at a time, and
then these are columns of b, where m is filled up to 16.

A long k and few columns make too few tiles. There the sum over k goes in ``chunk`` long parts, each summed alone, which
programs of their own compute or, where there are tiles enough, one program one after another; the same sums in the same
order. How long a chunk is follows from n and k. All else may follow m and the batch: an element's bits depend on the
order of k alone, which the matrix unit and every tile keep (tests/test_gpu.py tries it).

Operands that cannot be described, and 32-bit ones that lie the wrong way (``ALONG``), are copied (:mod:`._scratch`).

Source: the order of tiles in "Matrix Multiplication" of the Triton tutorials (Tillet).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.hopper._scratch import Operand, begins_off_lines, operand
from portakern.backends.triton.launch import (
    MAX_GRID,
    accumulator,
    cdiv,
    dot_precision,
    launch,
    refuse_common,
    shared_limit,
    torch_dtype,
)
from portakern.backends.triton.layout import collapse, fresh, pow2_at_least
from portakern.backends.triton.lib.matmul import place, products
from portakern.core import targets
from portakern.spec import Count, Tile
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.backends.triton.hopper._warps import WarpPlan
    from portakern.core.call import Call

MULTIPROCESSORS = targets.family("sm_90").cores or 132

RATES = {
    "16-bit": {"128 x 256": 1.0, "128 x 192": 0.93, "128 x 128": 0.86, "64 x 128": 0.7, "64 x 64": 0.37},
    "tf32": {"128 x 256": 1.0, "128 x 128": 0.81, "64 x 128": 0.7, "64 x 64": 0.4},
    "ieee": {"128 x 128": 1.0, "64 x 64": 0.7, "16 x 128": 0.3},
}
"""Of each kind of product the tiles of c that there are, and which part of the best rate a multiprocessor reaches on
them: measured on an H100 for 16-bit operands (192 columns are accumulators of 128 and of 64) and for 128 columns of
tf32, the others estimated."""

OFF_LINES = {
    "a": {"128 x 256": 0.94, "128 x 192": 0.79, "128 x 128": 0.65, "64 x 128": 0.5, "64 x 64": 0.3},
    "b": {"256 x 128": 0.94, "128 x 256": 0.77, "128 x 192": 0.7, "128 x 128": 0.6, "64 x 128": 0.4, "64 x 64": 0.25},
    "ab": {"128 x 256": 0.7, "128 x 192": 0.57, "128 x 128": 0.5, "64 x 128": 0.4, "64 x 64": 0.25},
}
"""The same for 16-bit operands of which a's, b's or both's lines in memory begin within lines of the cache: 128 bytes
of them are parts of two, and L2 is asked for each part. So a tile is longer along the axis of the other operand, of
which it then reads less: measured on an H100, the last two tiles estimated."""

COPIED = {"extent": 1024, "products": 2**32}
"""Where both begin so, the smaller one is copied for c of at least so many rows or columns, and at least so many
products: what L2 is spared grows with both, the copy with the shorter side."""

COLUMNS_OF_FEW = {"16-bit": (128, 64), "tf32": (64,)}
"""How many columns tiles of few rows have. 128 have longer runs of memory where b lies in rows (16 x 14336 x 4096 on an
H100: 1.05 of cuBLAS's rate, 64 columns 1.03), and 64 make twice the programs (1 x 4096 x 4096: 1.03, 128 0.81)."""

WITHOUT_BOXES = 0.85
"""Which part of it is left where c cannot be described, so that each program computes one tile and then writes it:
0.88 with 128 columns, 0.79 with 256, measured on an H100. Where warps have roles the next tile's operands come
meanwhile."""

ALONG = {"tf32": (1, 0), "ieee": (1, 1)}
"""Of each kind of product along which axis a's and b's lines must run, where it matters: the matrix unit reads 32-bit
operands only along k, of which warps with roles may turn b's in registers; threads that multiply read rows of both
(H100, 4096^3: 29 ms where one of them lies the other way, 3 ms where neither does)."""

FEW_ROWS = 64

ADDED = 512  # elements of c whose parts a program adds

MOST_PARTS = 8
"""Into how many chunks k is cut at most (16 in tiles of 128 x 256 read a quarter less through L2: 512 x 512 x 65536 on
an H200 57.9 us for 54.3)."""


class WarpSpecialized(IntEnum):
    """``roles`` of a tiling: whether one warp copies and others multiply, and how many columns a tile then has beside
    its ``block_n``."""

    NO = 0
    YES = 1
    HALF_MORE = 2
    QUARTER_MORE = 3


class EpilogueSubtile(IntEnum):
    """``halves`` of a tiling: how a tile of c leaves, of warps that have roles. By halves, or, where a program has one
    tile, through a's stages, which nobody needs any more, it leaves room for one more stage."""

    WHOLE = 0
    HALVES = 1
    IN_STAGES = 2


KNOBS = {
    "num_warps": Tile(4, 8), "num_stages": Count(2, 8), "group": Tile(1, 32),
    "swapped": Count(0, 1), "roles": Count(0, max(WarpSpecialized)), "halves": Count(0, max(EpilogueSubtile)),
}  # fmt: skip
"""``swapped``: tiles of c^T (swap_ab)."""

MORE: dict[int, int] = {WarpSpecialized.HALF_MORE: 2, WarpSpecialized.QUARTER_MORE: 4}
"""Of how many parts of a tile's columns there is one more: 128 and 64 are 192, 128 and 32 are 160."""

TORCH = {tl.float32: "float32", tl.float64: "float64"}
ELEMENTS = {
    torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64,
}  # fmt: skip


class TilePlan(NamedTuple):
    """What a product by warps that all do the same is compiled for.

    Attributes:
      block_m, block_n, block_k: extents of a tile; group: rows of tiles that are finished together.
      a_across, b_across: an operand's lines run along the first of its axes.
      swap_ab: tiles are of c^T. chunked: a program sums all chunks of k, one after another.
      precision, acc_dtype: how products are taken and sums kept.
      batched: there are entries; a_batched, b_batched: 1 where the operand has its own for each, else 0.
      flat: the loops over tiles and over k are one. c_described: c is a descriptor, and no pointer; c_dtype: of c.
      activation: what a linear layer applies to its sums.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    a_across: bool
    b_across: bool
    swap_ab: bool
    chunked: bool
    precision: str
    acc_dtype: Any
    batched: bool = False
    a_batched: int = 0
    b_batched: int = 0
    flat: bool = False
    c_described: bool = False
    c_dtype: Any = None
    activation: str | None = None


@triton.jit
def described_tile(x, z, row, column, rows: tl.constexpr, columns: tl.constexpr, across: tl.constexpr,
                   batched: tl.constexpr):  # fmt: skip
    """The tile of x at (row, column), which lies the other way in memory if ``across``."""
    if across:
        if batched:
            return x.load([z, column, row]).reshape(columns, rows).T
        else:
            return x.load([column, row]).T
    else:
        if batched:
            return x.load([z, row, column]).reshape(rows, columns)
        else:
            return x.load([row, column])


@triton.jit
def no_sums(plan: tl.constexpr):
    """What the sums of a tile begin with."""
    rows: tl.constexpr = plan.block_n if plan.swap_ab else plan.block_m
    columns: tl.constexpr = plan.block_m if plan.swap_ab else plan.block_n
    return tl.zeros([rows, columns], plan.acc_dtype)


@triton.jit
def summed(a, b, a_z, b_z, i, j, first, last, plan: tl.constexpr):
    """The tile of c at (i, j), of the steps first .. last - 1 of k; its transpose if ``plan.swap_ab``."""
    acc = no_sums(plan)
    for step in range(first, last):
        kk = step * plan.block_k
        at = described_tile(a, a_z, i, kk, plan.block_m, plan.block_k, plan.a_across, plan.batched)
        bt = described_tile(b, b_z, kk, j, plan.block_k, plan.block_n, plan.b_across, plan.batched)
        if plan.swap_ab:
            acc = tl.dot(bt.T, at.T, acc, input_precision=plan.precision, out_dtype=plan.acc_dtype)
        else:
            acc = tl.dot(at, bt, acc, input_precision=plan.precision, out_dtype=plan.acc_dtype)
    return acc


@triton.jit
def in_chunks(a, b, a_z, b_z, i, j, part, steps, chunk, plan: tl.constexpr):
    """The ``part``-th chunk of the sum, or with ``plan.chunked`` all of them, each summed alone."""
    if plan.chunked:
        acc = no_sums(plan)
        for first in range(0, steps, chunk):
            acc += summed(a, b, a_z, b_z, i, j, first, min(first + chunk, steps), plan)
    else:
        first = part * chunk
        acc = summed(a, b, a_z, b_z, i, j, first, min(first + chunk, steps), plan)
    return acc


@triton.jit(do_not_specialize=["m", "n", "k", "chunk", "parts", "entries"])
def matmul_kernel(a, b, c, m, n, k, chunk, parts, entries, c_m, plan: tl.constexpr):
    """chunk: steps of k that are summed alone. parts: how many chunks programs of their own take, each of which has its
    own c, of rows that are c_m apart; ``plan.chunked``: one program takes them all."""
    tiles_m, tiles_n = tl.cdiv(m, plan.block_m), tl.cdiv(n, plan.block_n)
    steps, tiles = tl.cdiv(k, plan.block_k), tiles_m * tiles_n
    for index in tl.range(tl.program_id(0), tiles * parts * entries, tl.num_programs(0), flatten=plan.flat):
        tile_m, tile_n = place(index % tiles, tiles_m, tiles_n, plan.group)
        i, j = tile_m * plan.block_m, tile_n * plan.block_n
        part, z = index // tiles % parts, index // tiles // parts
        acc = in_chunks(a, b, z * plan.a_batched, z * plan.b_batched, i, j, part, steps, chunk, plan)
        if plan.swap_ab:
            c_tile = acc.T.to(plan.c_dtype)
        else:
            c_tile = acc.to(plan.c_dtype)
        if plan.c_described:
            if plan.batched:
                c.store([z, i, j], c_tile.reshape(1, plan.block_m, plan.block_n))
            else:
                c.store([i, j], c_tile)
        else:
            row, column = i + tl.arange(0, plan.block_m), j + tl.arange(0, plan.block_n)
            c_row = c + ((part * entries + z).to(tl.int64) * m + row) * c_m
            tl.store(c_row[:, None] + column[None, :], c_tile, mask=(row < m)[:, None] & (column < n)[None, :])


@triton.jit
def matmul_add_parts_kernel(partial, c, numel, parts: tl.constexpr, block: tl.constexpr):
    """c = the sum of its parts, in order. All of them are on their way before the first is needed."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < numel
    read = ()
    for part in tl.static_range(parts):
        at = partial + tl.cast(part, tl.int64) * numel + i
        read = read + (tl.load(at, mask=inside, other=0.0),)  # type: ignore[assignment]
    tl.debug_barrier()  # else each part is read when the one before is added, and waited for
    acc = tl.zeros([block], partial.dtype.element_ty)
    for part in tl.static_range(parts):
        acc += read[part]
    tl.store(c + i, acc.to(c.dtype.element_ty), mask=inside)


def chunk_of(n: int, k: int) -> int:
    """How much of k one chain sums, from n and k alone: all of it, unless 128 rows would leave most multiprocessors
    idle for long."""
    parts = min(MOST_PARTS, k // 4096, MULTIPROCESSORS // max(1, cdiv(n, 128)))
    return k if parts < 4 else pow2_at_least(cdiv(k, parts))


def split(tiles: int, n: int, k: int) -> int:
    """How many programs share a tile's sum over k: each chunk has its own, or one takes all of them."""
    chunk = chunk_of(n, k)
    parts = cdiv(k, chunk)
    alone = cdiv(tiles, MULTIPROCESSORS) * k
    return parts if cdiv(tiles * parts, MULTIPROCESSORS) * chunk < 0.8 * alone else 1


def parts_of(call: Call, tiling: Mapping[str, int]) -> int:
    """How many programs share a tile's sum over k, of warps that all do the same."""
    (entries, m), n = extents(call), call.dims["n"]
    return split(entries * cdiv(m, tiling["block_m"]) * cdiv(n, tiling["block_n"]), n, call.dims["k"])


def extents(call: Call) -> tuple[int, int]:
    """Batch entries and rows of the product: where b is not batched, all rows of a are one tall matrix."""
    batch, m = prod(call.dims["batch"]), call.dims["m"]
    return (1, batch * m) if prod(call.arrays["b"].shape[:-2]) == 1 else (batch, m)


def size_of(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize


def tiles_there_are(call: Call) -> dict[str, tuple[int, int, float]]:
    """Tiles of c that may serve a call: their rows, columns, and the rate that a multiprocessor reaches on them."""
    kind, (_, m), n = products(call, call.dtype), extents(call), call.dims["n"]
    if m <= FEW_ROWS and kind != "ieee":
        rows = pow2_at_least(m, 16)
        return {f"{rows} rows x {columns}": (rows, columns, 1.0) for columns in COLUMNS_OF_FEW[kind]}
    roles, c_size = may_have_roles(call), size_of(call.outputs["c"][1])
    wide, boxes = roles or c_size == 2, n * c_size % 16 == 0  # else c's tile leaves no room for operands
    found = {}
    whole = copied(call)
    off = "".join(x for x in off_lines(call) if x != whole) if kind == "16-bit" else ""
    for name, rate in (OFF_LINES[off] if off else RATES[kind]).items():
        rows, columns = map(int, name.split(" x "))
        by_roles_alone = columns == 192 or rows == 256
        if (roles or not by_roles_alone) and (wide or columns != 256):
            stays = boxes or (roles and rows * columns > 128 * 128)
            found[name] = (rows, columns, rate * (1.0 if stays else WITHOUT_BOXES))
    return found


def off_lines(call: Call) -> str:
    """Of which operands lines begin within lines of the cache: "a", "b", "ab" or ""."""
    return "".join(name for name in ("a", "b") if begins_off_lines(call.arrays[name]))


def copied(call: Call) -> str | None:
    """Which operand warps with roles have copied to whole lines of the cache, if any."""
    (entries, m), n, k = extents(call), call.dims["n"], call.dims["k"]
    large = max(m, n) >= COPIED["extent"] and entries * m * n * k >= COPIED["products"]
    if size_of(call.dtype) != 2 or off_lines(call) != "ab" or not (large and on_matrix_unit(call)):
        return None
    return min("ab", key=lambda name: prod(call.arrays[name].shape))


def best_tile(call: Call) -> tuple[str, int]:
    """The tile of c that finishes first, and how many rounds the multiprocessors make: times what a round takes."""
    (entries, m), n, k = extents(call), call.dims["n"], call.dims["k"]

    def rounds(rows: int, columns: int) -> tuple[int, int]:
        tiles = entries * cdiv(m, rows) * cdiv(n, columns)
        parts = split(tiles, n, k)
        return cdiv(tiles * parts, MULTIPROCESSORS), parts

    def cost(tile: tuple[int, int, float]) -> float:
        rows, columns, rate = tile
        made, parts = rounds(rows, columns)
        return made / parts * rows * columns / rate

    there = tiles_there_are(call)
    name = min(there, key=lambda name: cost(there[name]))
    return name, rounds(*there[name][:2])[0]


def key(call: Call) -> dict[str, str | int]:
    """The kind of the products, which tile of c suits m, n and k, how many rounds of tiles there are, up to 4, and how
    long a sum is."""
    # The interpreter's own sums follow the steps of k.
    tile, rounds = ("any", 1) if call.interpret else best_tile(call)
    return {"products": products(call, call.dtype), "tile": tile, "rounds": min(rounds, 4), "k": call.dims["k"]}


def may_have_roles(call: Call) -> bool:
    """Whether warps that have roles take the call: whole sums, c of the operands' size."""
    n, k, size = call.dims["n"], call.dims["k"], size_of(call.dtype)
    return bool(
        not call.interpret and call.dtype != "float64" and chunk_of(n, k) == k
        and size_of(call.outputs["c"][1]) == size
    )  # fmt: skip


def on_matrix_unit(call: Call) -> bool:
    """The same, and that the products are the matrix unit's."""
    return may_have_roles(call) and products(call, call.dtype) != "ieee"


def warp_specialized(call: Call, tiling: Mapping[str, int]) -> bool:
    """Whether warps have roles."""
    return tiling["roles"] != WarpSpecialized.NO


def subtile_of(tiling: Mapping[str, int]) -> EpilogueSubtile:
    """How a tile of c leaves."""
    return EpilogueSubtile(tiling.get("halves", EpilogueSubtile.WHOLE))


def refuse_roles(call: Call, tiling: Mapping[str, int]) -> str | None:
    """Why warps cannot have roles, or None."""
    rows, columns, depth, size = tiling["block_m"], tiling["block_n"], tiling["block_k"], size_of(call.dtype)
    told, stages = f"warps with roles (roles={tiling['roles']})", tiling["num_stages"]
    if call.interpret:
        return f"{told} are compiled alone: Gluon has no interpreter; use roles=0"
    if not may_have_roles(call):
        return f"{told} take products whose sums are whole, of operands of c's size and up to 32 bits; use roles=0"
    if (tiling["num_warps"], tiling["swapped"]) != (8, 0):
        return f"{told} are 8 that multiply, rows first; use num_warps=8 and swapped=0"
    if depth * size != 128 or (rows, columns) not in ((128, 128), (128, 256), (256, 128)):
        return (
            f"{told} take tiles of 128 x 128, 128 x 256 and 256 x 128, in steps of {128 // size} of k, not {rows} x "
            f"{columns} x {depth}"
        )
    if rows == 256 and (size == 4 or tiling["roles"] in MORE):
        return f"{told} take tiles of 256 x 128 where operands have 16 bits and roles=1"
    if products(call, call.dtype) == "ieee" and (columns != 128 or tiling["roles"] in MORE):
        return f"{told} take tiles of 128 x 128 in ieee; use block_n=128 and roles=1"
    if subtile_of(tiling) and size == 4:
        return f"{told} write c by halves (halves=1 or 2) where they take 16-bit operands"
    if subtile_of(tiling) and tiling["roles"] == WarpSpecialized.QUARTER_MORE:
        return f"{told}, which are of 160 columns, write c at once; use halves=0"
    if subtile_of(tiling) == EpilogueSubtile.IN_STAGES and tiles_of(call, tiling) > MULTIPROCESSORS:
        return f"{told} write c through stages (halves=2) where each program has one tile; use halves=0 or 1"
    if subtile_of(tiling) == EpilogueSubtile.IN_STAGES and columns + more_columns(tiling) > 64 * stages:
        return f"{told} write 64 columns of c through each of {stages} stages (halves=2); use more stages"
    if tiling["roles"] in MORE and (columns == 256 or size == 4):
        return f"{told}, which add columns, take 16-bit operands and block_n=128"
    return None


def without_idle_roles(
    call: Call, tiling: Mapping[str, int], may: Callable[[Call], bool] = may_have_roles
) -> dict[str, int]:
    """The tiling without roles where a call has no use for them, and c's way one that it can take."""
    if not may(call):
        return {**tiling, **dict.fromkeys({"roles", "halves"} & set(tiling), 0)}
    if subtile_of(tiling) != EpilogueSubtile.IN_STAGES or tiles_of(call, tiling) <= MULTIPROCESSORS:
        return dict(tiling)
    return {**tiling, "halves": int(EpilogueSubtile.WHOLE)}


def tiles_of(call: Call, tiling: Mapping[str, int]) -> int:
    """How many tiles of c there are, of warps that have roles."""
    entries, m = extents(call)
    return entries * cdiv(m, tiling["block_m"]) * cdiv(call.dims["n"], tiling["block_n"] + more_columns(tiling))


def more_columns(tiling: Mapping[str, int]) -> int:
    """Columns that a tile has beside those of its two powers of two, where warps have roles."""
    return tiling["block_n"] // MORE[tiling["roles"]] if tiling["roles"] in MORE else 0


def box_columns(tiling: Mapping[str, int], size: int) -> int:
    """Columns of c that leave at a time, of warps that have roles."""
    if subtile_of(tiling) == EpilogueSubtile.IN_STAGES or (subtile_of(tiling) and tiling["roles"] in MORE):
        return 64
    if more := more_columns(tiling):
        return more
    return int(min(tiling["block_n"], 512 // size)) // (2 if subtile_of(tiling) == EpilogueSubtile.HALVES else 1)


def shared_memory(call: Call, tiling: Mapping[str, int]) -> int:
    """Bytes of shared memory: the stages of operands, and what of c waits there."""
    rows, columns, size, stored = tiling["block_m"], tiling["block_n"], size_of(call.dtype), 0
    if warp_specialized(call, tiling) and products(call, call.dtype) == "ieee":
        stored = 1024
    elif warp_specialized(call, tiling):
        columns += more_columns(tiling)
        boxes = columns if tiling["roles"] in MORE and not subtile_of(tiling) else box_columns(tiling, size)
        if call.dims["n"] * size % 16:
            boxes = max(boxes, 128)  # what turns c's elements into rows takes as much
        elif subtile_of(tiling) == EpilogueSubtile.IN_STAGES:
            boxes = 0
        stored = rows * boxes * size + 1024
    elif call.dims["n"] * size_of(call.outputs["c"][1]) % 16 == 0 and parts_of(call, tiling) == 1:
        stored = rows * columns * size_of(call.outputs["c"][1])
    return tiling["num_stages"] * (rows + columns) * tiling["block_k"] * size + stored


def fit(
    call: Call, tiling: Mapping[str, int], needed: Callable[[Call, Mapping[str, int]], int] = shared_memory,
    may: Callable[[Call], bool] = may_have_roles,
) -> Mapping[str, int]:  # fmt: skip
    """No roles where a call has no use for them (``may``), and as many stages as shared memory has room for:
    ``needed``, a tiling's bytes."""
    if call.interpret:
        return tiling
    found = without_idle_roles(call, tiling, may)
    while found["num_stages"] > 2 and needed(call, found) > shared_limit(call.target.arch):
        found["num_stages"] -= 1
    return found


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    block_m, block_n, block_k = tiling["block_m"], tiling["block_n"], tiling["block_k"]
    if max(block_m, block_n, block_k) > 256:
        return f"a tile of {block_m} x {block_n} x {block_k} is longer than the copy engine's 256"
    if max(call.dims["n"], call.dims["k"], extents(call)[1]) > 2**31 - 512:
        return "an extent of 2^31 is beyond what the copy engine counts"
    if warp_specialized(call, tiling):
        reason = refuse_roles(call, tiling)
        if reason:
            return reason
    if not call.interpret:
        shared, limit = shared_memory(call, tiling), shared_limit(call.target.arch)
        if shared > limit:
            return (
                f"{tiling['num_stages']} stages of {block_m} x {block_n} x {block_k}, and c's tile, take {shared} "
                "bytes "
                f"of shared memory; {call.target.arch} has {limit}"
            )
        if not warp_specialized(call, tiling) and block_m * block_n > tiling["num_warps"] * 32 * 128:
            return (
                f"a {block_m} x {block_n} accumulator does not fit in the registers of {tiling['num_warps']} warps; "
                "use a smaller tile or more warps"
            )
    entries, m = extents(call)
    return refuse_common(
        call, tiling["num_warps"], min(entries * cdiv(m, block_m) * cdiv(call.dims["n"], block_n), 8 * MAX_GRID)
    )


@BACKEND.implements(
    "matmul",
    key=key,
    fit=fit,
    supports=supports,
    knobs=KNOBS,
    same_bits=True,
)
def matmul(call: Call, tiling: Mapping[str, int], into: torch.Tensor | None = None) -> tuple[Any, ...]:
    """``into``: contiguous memory for c, where another op has some."""
    dims, dtype = call.dims, call.options["out_dtype"]
    a, b, n, k = call.arrays["a"], call.arrays["b"], dims["n"], dims["k"]
    if into is None:
        into = fresh((*dims["batch"], dims["m"], n), torch_dtype(dtype) if dtype else a.dtype, a.device)
    c = into
    entries, m = extents(call)
    kind = products(call, call.dtype)
    along_a, along_b = (None, None) if tiling["swapped"] else ALONG.get(kind, (None, None))
    if warp_specialized(call, tiling) and kind == "tf32":
        along_b = None
    whole = copied(call) if warp_specialized(call, tiling) else None
    of_a = _operand(call, a, (entries, m, k), along_a, whole == "a", flattened=m != dims["m"])
    of_b = _operand(call, b, (entries, k, n), along_b, whole == "b")
    if warp_specialized(call, tiling) and (kind == "ieee" or (kind == "tf32" and not of_b.across)):
        _launch_float32(call, of_a, of_b, c, (entries, m), tiling)
    elif warp_specialized(call, tiling):
        _launch_roles(call, of_a, of_b, c, (entries, m), tiling)
    else:
        _launch(call, of_a, of_b, c, (entries, m), tiling)
    return (c,)


def _operand(
    call: Call, x: torch.Tensor, extents: tuple[int, int, int], along: int | None, whole: bool, flattened: bool = False
) -> Operand:
    """``x`` with its batch axes as one, or as rows (``flattened``). Axes that one stride does not walk are gathered.
    ``whole``: lines begin where lines of the cache do."""
    entries, rows, columns = extents
    if flattened:
        x = x.expand(*call.dims["batch"], -1, -1)
        shape, (strides,) = collapse(x.shape[:-1], x.stride()[:-1])
        if len(shape) > 1:
            x, strides = x.contiguous(), (columns,)
        x = x.as_strided((rows, columns), (strides[0] if shape else columns, x.stride(-1)))
        return operand(call, x, 0, (1, rows, columns), along, whole)
    if prod(x.shape[:-2]) == 1:
        return operand(call, x, 0, (1, rows, columns), along, whole)
    x = x.expand(*call.dims["batch"], -1, -1)
    shape, (strides,) = collapse(x.shape[:-2], x.stride()[:-2])
    if len(shape) > 1:
        x = x.contiguous()
        strides = (rows * columns,)
    return operand(call, x, strides[0], (entries, rows, columns), along, whole)


def described(x: Operand, shape: tuple[int, int, int], block: tuple[int, int], batched: bool, **how: Any) -> Any:
    """The descriptor of an operand whose two axes have these extents, in tiles ``block``."""
    entries, rows, columns = shape
    lines, length = (columns, rows) if x.across else (rows, columns)
    tile = block[::-1] if x.across else block
    if batched:
        strides = (x.batch or x.row * lines, x.row, 1)
        return describe(x.memory, (entries if x.batch else 1, lines, length), strides, (1, *tile), **how)
    return describe(x.memory, (lines, length), (x.row, 1), tile, **how)


class Roles(NamedTuple):
    """A product as warps with roles take it.

    Attributes:
      operands: what describes a and b, and b for the columns that are more.
      result: the descriptor of memory for c, or the memory where that cannot be described.
      plan: what the kernel is compiled for.
    """

    grid: int
    operands: tuple[Any, Any, Any]
    result: Callable[[torch.Tensor], Any]
    plan: WarpPlan


def roles_of(call: Call, a: Operand, b: Operand, extents: tuple[int, int], tiling: Mapping[str, int]) -> Roles:
    """How warps with roles take the product of a and b. extents: batch entries and rows."""
    from triton.experimental.gluon import language as gl

    from portakern.backends.triton.hopper._warps import WarpPlan

    (entries, m), n, k, given = extents, call.dims["n"], call.dims["k"], a.memory.dtype
    rows, columns, depth, more = tiling["block_m"], tiling["block_n"], tiling["block_k"], more_columns(tiling)
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[given]
    tf32, batched = given == torch.float32, entries > 1

    def tile(x: Operand, shape: tuple[int, int], block: tuple[int, int], tf32: bool = tf32) -> Any:
        laid = [1] * batched + list(block[::-1] if x.across else block)
        layout = gl.NVMMASharedLayout.get_default_for(laid, dtype)
        return described(x, (entries, *shape), block, batched, layout=layout, tf32=tf32)

    size = size_of(call.dtype)
    box = (rows // 2, box_columns(tiling, size))
    in_boxes = n * size % 16 == 0

    def result(c: torch.Tensor) -> Any:
        return tile(Operand(c, m * n * batched, n, False), (m, n), box, tf32=False) if in_boxes else c

    of_a, of_b = tile(a, (m, k), (rows, depth)), tile(b, (k, n), (depth, columns))
    of_more = tile(b, (k, n), (depth, more)) if more else of_b
    grid = min(MULTIPROCESSORS, cdiv(m, rows) * cdiv(n, columns + more) * entries)
    plan = WarpPlan(
        rows, columns, depth, tiling["group"], tiling["num_stages"], more=more, a_across=a.across, b_across=b.across,
        batched=batched, a_batched=int(a.batch > 0), b_batched=int(b.batch > 0), described=in_boxes,
        c_in_stages=subtile_of(tiling) == EpilogueSubtile.IN_STAGES,
        c_whole=subtile_of(tiling) == EpilogueSubtile.WHOLE,
    )  # fmt: skip
    return Roles(grid, (of_a, of_b, of_more), result, plan)


def _launch_roles(
    call: Call, a: Operand, b: Operand, c: torch.Tensor, extents: tuple[int, int], tiling: Mapping[str, int]
) -> None:
    from portakern.backends.triton.hopper._warps import matmul_by_roles

    (entries, m), roles = extents, roles_of(call, a, b, extents, tiling)
    launch(matmul_by_roles, roles.grid, call, *roles.operands, roles.result(c), m, call.dims["n"], call.dims["k"],
           entries, plan=roles.plan, num_warps=4)  # fmt: skip


def _launch_float32(
    call: Call, a: Operand, b: Operand, c: torch.Tensor, extents: tuple[int, int], tiling: Mapping[str, int]
) -> None:
    """Of operands whose lines run along k and n. In tf32 the longer side of a tile is rows, and what c does not take of
    shared memory holds a stage more."""
    from triton.experimental.gluon import language as gl

    from portakern.backends.triton.hopper import _float32
    from portakern.backends.triton.hopper._warps import WarpPlan

    (entries, m), n, k, tf32 = extents, call.dims["n"], call.dims["k"], dot_precision(call) == "tf32"
    rows, columns, depth, batched = tiling["block_m"], tiling["block_n"], tiling["block_k"], entries > 1
    kernel, stages, slices, warps = _float32.matmul_in_slices, tiling["num_stages"], depth // _float32.SLICE.value, 8
    if tf32:
        kernel, stages, slices, warps, rows, columns = _float32.matmul_turned, stages + 1, 1, 4, columns, rows

    def tile(x: Operand, shape: tuple[int, int], block: tuple[int, int]) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for([1] * batched + list(block), gl.float32)
        return described(x, (entries, *shape), block, batched, layout=layout, tf32=tf32)

    grid = min(MULTIPROCESSORS, cdiv(m, rows) * cdiv(n, columns) * entries)
    plan = WarpPlan(rows, columns, depth, tiling["group"], stages, slices=slices, batched=batched,
                     a_batched=int(a.batch > 0), b_batched=int(b.batch > 0))  # fmt: skip
    launch(kernel, grid, call, tile(a, (m, k), (rows, depth // slices)), tile(b, (k, n), (depth, columns)), c, m, n, k,
           entries, plan=plan, num_warps=warps)  # fmt: skip


def _launch(
    call: Call, a: Operand, b: Operand, c: torch.Tensor, rows: tuple[int, int], tiling: Mapping[str, int]
) -> None:
    (entries, m), n, k = rows, call.dims["n"], call.dims["k"]
    block_m, block_n, block_k = tiling["block_m"], tiling["block_n"], tiling["block_k"]
    tiles = entries * cdiv(m, block_m) * cdiv(n, block_n)
    parts, chunk = split(tiles, n, k), cdiv(chunk_of(n, k), block_k)
    chunked = parts == 1 and chunk * block_k < k
    acc = accumulator(call.dtype)
    target = c if parts == 1 else fresh((parts, entries * m, n), torch_dtype(TORCH[acc]), c.device)
    batched, swapped = entries > 1, bool(tiling["swapped"])
    in_boxes = parts == 1 and n * c.element_size() % 16 == 0
    stays = in_boxes and not swapped
    how: dict[str, Any] = {"tf32": True} if dot_precision(call) == "tf32" else {}
    of_a = described(a, (entries, m, k), (block_m, block_k), batched, **how)
    of_b = described(b, (entries, k, n), (block_k, block_n), batched, **how)
    of_c = Operand(c, m * n * batched, n, False)
    grid = min(MULTIPROCESSORS if stays else MAX_GRID, tiles * parts)
    plan = TilePlan(
        block_m, block_n, block_k, tiling["group"], a.across, b.across, swapped, chunked, dot_precision(call), acc,
        batched=batched, a_batched=int(a.batch > 0), b_batched=int(b.batch > 0), flat=stays and not chunked,
        c_described=in_boxes, c_dtype=ELEMENTS[target.dtype],
    )  # fmt: skip
    launch(matmul_kernel, grid, call, of_a, of_b,
           described(of_c, (entries, m, n), (block_m, block_n), batched) if in_boxes else target,
           m, n, k, chunk, parts, entries, n, plan=plan, num_warps=tiling["num_warps"],
           num_stages=tiling["num_stages"])  # fmt: skip
    if parts > 1:
        launch(matmul_add_parts_kernel, cdiv(c.numel(), ADDED), call, target, c, c.numel(), parts=parts, block=ADDED,
               num_warps=4, maxnreg=128)  # fmt: skip
