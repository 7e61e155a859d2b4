"""Which tiles Hopper's matrix products take, which warps compute them, and what is refused.

A tile of c is chosen by how many rounds the multiprocessors make, times what a round takes: a time for each step of k,
and another that does not depend on k. How many parts a long sum has follows from n and k alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portakern.backends.triton.configs import EpilogueSubtile, HopperProductConfig, WarpSpecialized
from portakern.backends.triton.hopper._direct import REACH, in_lines
from portakern.backends.triton.hopper._scratch import begins_off_lines, describable
from portakern.backends.triton.launch import MAX_GRID, cdiv, refuse_common, shared_limit
from portakern.backends.triton.layout import pow2_at_least
from portakern.backends.triton.lib.matmul import products
from portakern.core import targets
from portakern.spec.dtypes import numpy_dtype

if TYPE_CHECKING:
    from portakern.core.call import Call

MULTIPROCESSORS = targets.family("sm_90").cores or 132

RATES = {
    "16-bit": {
        "128 x 256": 1.0,
        "128 x 192": 0.95,
        "128 x 160": 0.786,
        "128 x 128": 0.86,
        "64 x 128": 0.67,
        "64 x 64": 0.47,
    },
    "tf32": {"128 x 256": 1.0, "128 x 128": 0.81, "64 x 128": 0.7, "64 x 64": 0.4},
    "ieee": {"128 x 128": 1.0, "64 x 64": 0.7, "16 x 128": 0.3},
}
"""Of each kind of product the tiles of c that there are, and which part of the best rate a multiprocessor reaches on
them, begin and end of a tile aside: of 16-bit operands fitted to the times of 27 products on an H200 (192 columns are
accumulators of 128 and of 64, 160 of 128 and of 32); of tf32 measured on an H100 for 128 columns, the others
estimated."""

BEGIN_AND_END = {
    "256 x 128": 2.25, "128 x 256": 2.35, "128 x 192": 1.75, "128 x 160": 1.55, "128 x 128": 0.95, "64 x 128": 1.22,
    "64 x 64": 1.0,
}  # fmt: skip
"""Microseconds of a round of 16-bit tiles that do not depend on k, fitted to the same times."""

STEP = 0.6155
"""Microseconds of a step of 64 of k at the best rate, in a tile of 128 x 256, fitted too."""

OFF_LINES = {
    "a": {"128 x 256": 0.94, "128 x 192": 0.79, "128 x 128": 0.65, "64 x 128": 0.5, "64 x 64": 0.3},
    "b": {"256 x 128": 0.94, "128 x 256": 0.77, "128 x 192": 0.7, "128 x 128": 0.6, "64 x 128": 0.4, "64 x 64": 0.25},
    "ab": {"128 x 256": 0.7, "128 x 192": 0.57, "128 x 128": 0.5, "64 x 128": 0.4, "64 x 64": 0.25},
}
"""The same for 16-bit operands of which a's, b's or both's lines in memory begin within lines of the cache: 128 bytes
of them are parts of two, and L2 is asked for each part. So a tile is longer along the axis of the other operand, of
which it then reads less: measured on an H100, the last two tiles estimated."""

OFF_LINES_OF_H200 = {**OFF_LINES, "b": {**OFF_LINES["b"], "128 x 192": 0.92}}
"""The same with an H200's memory: 1000 x 3000 x 5120 takes 45.7 us in 128 x 192 and 55.5 in 256 x 128, on an H100 59.3
and 52.7."""

MEMORY_OF_H200 = 100 * 2**30
"""More bytes of memory than an H100 has."""

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

DIRECT = {
    "n": 256, "k": 1024, "k of few programs": 512, "k of one matrix": 256, "n of whole rows": 128,
    "b of whole rows": 2**14, "c of whole rows": 2**15, "steps": 32,
}  # fmt: skip
"""Up to this n and k matrices are read as they lie, if the copy engine takes one of them only from a copy: a program
has all columns of c, and reads both once or a few times. A long k needs programs for all multiprocessors (H200: 500 x
100 x 1000 at 0.48 of cuBLAS, by a copy 0.88). Where the engine takes both, this is faster for batches of smaller ones
(500 x (64 x 64 x 64) 7.8 us for 13.5, 240 x (77 x 77 x 64) 8.3 for 12.6; 384 x (197 x 197 x 64) 30.0 for 28.7, 64 x
(256 x 128 x 256) 11.3 for 10.6)."""

FEW_ROWS = 64

MOST_PARTS = 8
"""Into how many chunks k is cut at most (16 in tiles of 128 x 256 read a quarter less through L2: 512 x 512 x 65536 on
an H200 57.9 us for 54.3)."""


MORE: dict[int, int] = {WarpSpecialized.HALF_MORE: 2, WarpSpecialized.QUARTER_MORE: 4}
"""Of how many parts of a tile's columns there is one more: 128 and 64 are 192, 128 and 32 are 160."""


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


def parts_of(call: Call, config: HopperProductConfig) -> int:
    """How many programs share a tile's sum over k, of warps that all do the same."""
    (entries, m), n = extents(call), call.dims["n"]
    return split(entries * cdiv(m, config.block_m) * cdiv(n, config.block_n), n, call.dims["k"])


def extents(call: Call) -> tuple[int, int]:
    """Batch entries and rows of the product: where b is not batched, all rows of a are one tall matrix."""
    batch, m = prod(call.dims["batch"]), call.dims["m"]
    return (1, batch * m) if prod(call.arrays["b"].shape[:-2]) == 1 else (batch, m)


def size_of(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize


class TileTimes(NamedTuple):
    """Rows and columns of a tile of c, and what a round of such tiles takes: of each element of c and of k, and
    besides."""

    rows: int
    columns: int
    each: float
    besides: float = 0.0


def tiles_there_are(call: Call) -> dict[str, TileTimes]:
    """Tiles of c that may serve a call."""
    kind, (_, m), n = products(call, call.dtype), extents(call), call.dims["n"]
    if m <= FEW_ROWS and kind != "ieee":
        rows = pow2_at_least(m, 16)
        return {f"{rows} rows x {columns}": TileTimes(rows, columns, 1.0) for columns in COLUMNS_OF_FEW[kind]}
    roles, c_size = may_have_roles(call), size_of(call.outputs["c"][1])
    wide, boxes = roles or c_size == 2, n * c_size % 16 == 0  # else c's tile leaves no room for operands
    found = {}
    whole = copied(call)
    off = "".join(x for x in off_lines(call) if x != whole) if kind == "16-bit" else ""
    h200 = on_h200(call)
    rates = (OFF_LINES_OF_H200 if h200 else OFF_LINES)[off] if off else RATES[kind]
    for name, rate in rates.items():
        rows, columns = map(int, name.split(" x "))
        by_roles_alone = columns in (160, 192) or rows == 256
        if (roles or not by_roles_alone) and (wide or columns != 256):
            stays = boxes or (roles and rows * columns > 128 * 128)
            slower = 1.0 if stays else 1 / WITHOUT_BOXES
            besides = BEGIN_AND_END[name] * slower if kind == "16-bit" and (h200 or not off) else 0.0
            found[name] = TileTimes(rows, columns, STEP / (64 * 128 * 256) / rate * slower, besides)
    return found


def on_h200(call: Call) -> bool:
    """Whether the arrays lie in a memory as large as an H200's."""
    device = getattr(call.arrays["a"], "device", None)
    return getattr(device, "type", None) == "cuda" and _memory_of(device) > MEMORY_OF_H200


@functools.cache
def _memory_of(device: Any) -> int:
    cuda = sys.modules["torch"].cuda
    return int(cuda.get_device_properties(device).total_memory) if cuda.is_available() else 0


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

    def cost(tile: TileTimes) -> float:
        made, parts = rounds(tile.rows, tile.columns)
        return made * (tile.besides + k / parts * tile.rows * tile.columns * tile.each)

    there = tiles_there_are(call)
    name = min(there, key=lambda name: cost(there[name]))
    return name, rounds(*there[name][:2])[0]


def key(call: Call) -> dict[str, str | int]:
    """The kind of the products, which tile of c suits m, n and k, how many rounds of tiles there are, up to 4, and how
    long a sum is."""
    # The interpreter's own sums follow the steps of k.
    tile, rounds = ("any", 1) if call.interpret else best_tile(call)
    return {"products": products(call, call.dtype), "tile": tile, "rounds": min(rounds, 4), "k": call.dims["k"]}


def key_of_batches(call: Call) -> dict[str, str | int]:
    """The same, where a batch of small matrices may be read as it lies."""
    return {**key(call), "tile": "direct", "rounds": 1} if loads_directly(call) else key(call)


def loads_directly(call: Call) -> bool:
    """Whether small operands are read as they lie, because the copy engine takes some of them only from a copy, or is
    slower for a batch of such."""
    (entries, m), n, k = extents(call), call.dims["n"], call.dims["k"]
    if n > DIRECT["n"] or k > DIRECT["k"] or products(call, call.dtype) != "16-bit" or not counted(call):
        return False
    if not all_described(call):
        short = "k of one matrix" if entries == 1 else "k of few programs"
        return k <= DIRECT[short] or (entries > 1 and entries * cdiv(m, 64) >= MULTIPROCESSORS)
    whole_rows = n * size_of(call.outputs["c"][1]) % 16 == 0
    return (
        entries > 1 and n <= DIRECT["n of whole rows"] and n * k <= DIRECT["b of whole rows"]
        and (not whole_rows or 16 <= m <= DIRECT["c of whole rows"] // n)
    )  # fmt: skip


def all_described(call: Call) -> bool:
    """Whether the copy engine takes both operands without a copy."""
    return all(describable(call.arrays[name]) for name in "ab")


def counted(call: Call) -> bool:
    """Whether elements of both operands lie side by side along an axis, and 32 bits count those of a matrix."""
    (entries, m), a, b = extents(call), call.arrays["a"], call.arrays["b"]
    if min(a.ndim, b.ndim) < 2:  # of a linear layer's call, whose rows nobody has made yet
        return False
    return m * call.dims["n"] < REACH and in_lines(a, entries == 1) and in_lines(b, False)


def reads_directly(config: HopperProductConfig) -> bool:
    """Whether operands are read as they lie; swapped ones and those of warps with roles are not."""
    return bool(config.direct_loads) and not config.swap_ab and config.warp_specialized == WarpSpecialized.NO


def refuse_direct(call: Call, config: HopperProductConfig) -> str | None:
    """Why operands cannot be read as they lie, or None."""
    (entries, m), n, told = extents(call), call.dims["n"], "direct_loads=1"
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if products(call, call.dtype) != "16-bit" or not counted(call):
        return (
            f"{told} needs 16-bit operands whose elements lie side by side along an axis, and fewer than 2^31 in a "
            "matrix; use direct_loads=0"
        )
    if n > columns or cdiv(call.dims["k"], depth) > DIRECT["steps"]:
        return f"{told} takes all columns in a tile, and k in at most {DIRECT['steps']} steps; use larger tiles"
    if not call.interpret:
        shared = max((rows + columns) * depth * 2, rows * columns * 4)
        if shared > shared_limit(call.target.arch):
            return f"tiles of {rows} x {columns} x {depth} take {shared} bytes of shared memory; use smaller ones"
        if rows * columns > config.num_warps * 32 * 128:
            return (
                f"a {rows} x {columns} accumulator does not fit in the registers of {config.num_warps} warps; "
                "use a smaller tile or more warps"
            )
    return refuse_common(call, config.num_warps, entries * cdiv(m, rows))


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


def warp_specialized(call: Call, config: HopperProductConfig) -> bool:
    """Whether warps have roles."""
    return config.warp_specialized != WarpSpecialized.NO


def refuse_roles(call: Call, config: HopperProductConfig) -> str | None:
    """Why warps cannot have roles, or None."""
    rows, columns, depth, size = config.block_m, config.block_n, config.block_k, size_of(call.dtype)
    told, stages = f"warp_specialized={config.warp_specialized}", config.num_stages
    if call.interpret:
        return f"{told} has no interpreter, since it is written in Gluon; use warp_specialized=0"
    if not may_have_roles(call):
        return (
            f"{told} needs operands of at most 32 bits, c of their size, and sums over k in one chunk; "
            "use warp_specialized=0"
        )
    if (config.num_warps, config.swap_ab) != (8, 0):
        return f"{told} needs num_warps=8 and swap_ab=0"
    if depth * size != 128 or (rows, columns) not in ((128, 128), (128, 256), (256, 128)):
        return (
            f"{told} needs tiles of 128 x 128, 128 x 256 or 256 x 128 with block_k={128 // size}, not {rows} x "
            f"{columns} x {depth}"
        )
    if rows == 256 and (size == 4 or config.warp_specialized in MORE):
        return f"{told}: tiles of 256 x 128 need 16-bit operands and warp_specialized=1"
    if products(call, call.dtype) == "ieee" and (columns != 128 or config.warp_specialized in MORE):
        return f"{told}: precision 'ieee' needs block_n=128 and warp_specialized=1"
    if config.epilogue_subtile and size == 4:
        return f"{told}: epilogue_subtile=1 or 2 needs 16-bit operands"
    if config.epilogue_subtile and config.warp_specialized == WarpSpecialized.QUARTER_MORE:
        return f"{told} has tiles of 160 columns, which need epilogue_subtile=0"
    if config.epilogue_subtile == EpilogueSubtile.IN_STAGES and tiles_of(call, config) > MULTIPROCESSORS:
        return f"{told}: epilogue_subtile=2 needs one tile for each program; use epilogue_subtile=0 or 1"
    if config.epilogue_subtile == EpilogueSubtile.IN_STAGES and columns + more_columns(config) > 64 * stages:
        return f"{told}: epilogue_subtile=2 writes 64 columns of c in each of {stages} stages; use a larger num_stages"
    if config.warp_specialized in MORE and (columns == 256 or size == 4):
        return f"{told} needs 16-bit operands and block_n=128"
    return None


def without_idle_roles(
    call: Call, config: HopperProductConfig, may: Callable[[Call], bool] = may_have_roles
) -> HopperProductConfig:
    """The tiling without roles where a call has no use for them, and c's way one that it can take."""
    if not may(call):
        return config.replace(**dict.fromkeys({"warp_specialized", "epilogue_subtile"} & set(config), 0))
    if config.epilogue_subtile != EpilogueSubtile.IN_STAGES or tiles_of(call, config) <= MULTIPROCESSORS:
        return config
    return config.replace(epilogue_subtile=EpilogueSubtile.WHOLE)


def tiles_of(call: Call, config: HopperProductConfig) -> int:
    """How many tiles of c there are, of warps that have roles."""
    entries, m = extents(call)
    return entries * cdiv(m, config.block_m) * cdiv(call.dims["n"], config.block_n + more_columns(config))


def more_columns(config: HopperProductConfig) -> int:
    """Columns that a tile has beside those of its two powers of two, where warps have roles."""
    return config.block_n // MORE[config.warp_specialized] if config.warp_specialized in MORE else 0


def box_columns(config: HopperProductConfig, size: int) -> int:
    """Columns of c that leave at a time, of warps that have roles."""
    if config.epilogue_subtile == EpilogueSubtile.IN_STAGES or (
        config.epilogue_subtile and config.warp_specialized in MORE
    ):
        return 64
    if more := more_columns(config):
        return more
    return int(min(config.block_n, 512 // size)) // (2 if config.epilogue_subtile == EpilogueSubtile.HALVES else 1)


def shared_memory(call: Call, config: HopperProductConfig) -> int:
    """Bytes of shared memory: the stages of operands, and what of c waits there."""
    rows, columns, size, stored = config.block_m, config.block_n, size_of(call.dtype), 0
    if warp_specialized(call, config) and products(call, call.dtype) == "ieee":
        stored = 1024
    elif warp_specialized(call, config):
        columns += more_columns(config)
        boxes = (
            columns if config.warp_specialized in MORE and not config.epilogue_subtile else box_columns(config, size)
        )
        if call.dims["n"] * size % 16:
            boxes = max(boxes, 128)  # what turns c's elements into rows takes as much
        elif config.epilogue_subtile == EpilogueSubtile.IN_STAGES:
            boxes = 0
        stored = rows * boxes * size + 1024
    elif call.dims["n"] * size_of(call.outputs["c"][1]) % 16 == 0 and parts_of(call, config) == 1:
        stored = rows * columns * size_of(call.outputs["c"][1])
    return config.num_stages * (rows + columns) * config.block_k * size + stored


def fit(
    call: Call, config: HopperProductConfig, needed: Callable[[Call, HopperProductConfig], int] = shared_memory,
    may: Callable[[Call], bool] = may_have_roles,
) -> HopperProductConfig:  # fmt: skip
    """No roles where a call has no use for them (``may``), and as many stages as shared memory has room for:
    ``needed``, a tiling's bytes."""
    if reads_directly(config):
        columns = pow2_at_least(call.dims["n"], 16, config.block_n)
        depth, warps = pow2_at_least(call.dims["k"], 16), max(config.num_warps, columns // 32)
        at_once = depth <= 128 >= columns or (depth <= 256 and columns <= 64 and not all_described(call))
        return config.replace(
            block_n=columns, block_k=min(depth, config.block_k if at_once else 64), num_warps=min(warps, 8)
        )
    if call.interpret:
        return config
    found = without_idle_roles(call, config, may)
    while found.num_stages > 2 and needed(call, found) > shared_limit(call.target.arch):
        found = found.replace(num_stages=found.num_stages - 1)
    return found


def supports(call: Call, config: HopperProductConfig) -> str | None:
    if reads_directly(config):
        return refuse_direct(call, config)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    if max(block_m, block_n, block_k) > 256:
        return f"a tile of {block_m} x {block_n} x {block_k} has an extent beyond 256, the limit of TMA"
    if max(call.dims["n"], call.dims["k"], extents(call)[1]) > 2**31 - 512:
        return "an extent is 2^31 or more, beyond TMA's 32-bit coordinates"
    if warp_specialized(call, config):
        reason = refuse_roles(call, config)
        if reason:
            return reason
    if not call.interpret:
        shared, limit = shared_memory(call, config), shared_limit(call.target.arch)
        if shared > limit:
            return (
                f"{config.num_stages} stages of {block_m} x {block_n} x {block_k}, and c's tile, take {shared} "
                "bytes "
                f"of shared memory; {call.target.arch} has {limit}"
            )
        if not warp_specialized(call, config) and block_m * block_n > config.num_warps * 32 * 128:
            return (
                f"a {block_m} x {block_n} accumulator does not fit in the registers of {config.num_warps} warps; "
                "use a smaller tile or more warps"
            )
    entries, m = extents(call)
    return refuse_common(
        call, config.num_warps, min(entries * cdiv(m, block_m) * cdiv(call.dims["n"], block_n), 8 * MAX_GRID)
    )
