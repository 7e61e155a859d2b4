"""Matrix product of 8-bit numbers with scales, on Hopper's copy engine and matrix unit.

    c[i, j] = sum_p scale_a[i, p] scale_b[p, j] (sum_{k in block p} a[i, k] b[k, j]) + bias[j]

a: (m, k), b: (k, n), scales by blocks -> c: (m, n), by warps that have roles (:mod:`._scaled`). The matrix unit reads
8-bit operands along k alone: an operand that lies otherwise in memory is copied (:mod:`._scratch`), and weights (n, k)
that come as b.T are not. "ieee" of floats, blocks that are not 128 long, and those whose scales differ from column to
column of b are the portable kernel's.

Sums are "chained" where they may stay in the unit: of "fast", and of int8, whose int32 is exact. "promoted" ones leave
it after 128 products, and those of "blocks" with their scales. Up to 64 rows are columns of tiles of c^T. No bit of an
element depends on its tile, so that tiles follow m.

A tile is chosen by the rounds that the multiprocessors make, times what a round takes. The bytes and the instructions
of 128 along k are those of 64 along k of 16-bit numbers, whose times (``TIMES``) these are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import HopperScaledConfig, MoreColumns
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.hopper import _tiles
from portakern.backends.triton.hopper._scratch import Operand, operand
from portakern.backends.triton.launch import GLUON, cdiv, launch, refuse_common, shared_limit, torch_dtype
from portakern.backends.triton.layout import fresh, pow2_at_least
from portakern.backends.triton.lib.scaled_matmul import shared_strides
from portakern.backends.triton.lib.tma import BARRIERS, in_room
from portakern.core.backend import Drawn
from portakern.core.framework import DTYPE_NAME
from portakern.specs.scaled_matmul import RUN, of_integers, scale_blocks

if TYPE_CHECKING:
    import torch

    from portakern.backends.triton.hopper._scaled import ScaledPlan
    from portakern.core.call import Call

FEW_ROWS = 64
OWN = 64  # rows of a group of four warps

GLUON_NAMES = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5", "int8": "int8"}


class RoundTimes(NamedTuple):
    """Microseconds of a round of tiles: of each step of k, and besides."""

    step: float
    besides: float


TIMES = {
    "128 x 256": RoundTimes(0.616, 2.35),
    "128 x 192": RoundTimes(0.474, 1.75),
    "128 x 128": RoundTimes(0.342, 0.95),
    "128 x 64": RoundTimes(0.229, 1.2),
}
"""What a round of tiles of 16-bit numbers takes on an H200, in steps of 64 (docs/porting/matmul.md)."""

TILES = {
    "chained": ("128 x 256", "128 x 128", "128 x 64"),
    "promoted": ("128 x 192", "128 x 128", "128 x 64"),
    "blocks": ("128 x 128", "128 x 64"),
}
"""The tiles of each kind of sums. Registers hold two sums of 128 columns beside the one of all, none of 256."""


def sums(call: Call) -> str:
    """How the sum over k is made: "chained", "promoted" or "blocks"."""
    if scale_blocks(call)[0] > 1:
        return "blocks"
    return "chained" if of_integers(call) or call.options["precision"] == "fast" else "promoted"


def widest(call: Call) -> int:
    """Columns of a product at most: Triton has no integer ones of 256."""
    return 128 if of_integers(call) else 256


def best_tile(call: Call) -> str:
    """The tile of c that finishes first."""
    m, n, k = (call.dims[name] for name in ("m", "n", "k"))
    if m <= FEW_ROWS:
        return "few rows"

    def cost(name: str) -> float:
        rows, columns = map(int, name.split(" x "))
        rounds = cdiv(cdiv(m, rows) * cdiv(n, columns), _tiles.MULTIPROCESSORS)
        return rounds * (TIMES[name].besides + cdiv(k, RUN) * TIMES[name].step)

    return min((name for name in TILES[sums(call)] if int(name.split(" x ")[1]) <= widest(call)), key=cost)


def key(call: Call) -> dict[str, str | int]:
    return {"sums": sums(call), "tile": best_tile(call)}


def more_columns(config: HopperScaledConfig) -> int:
    """Columns that a tile has beside its ``block_n``."""
    return {MoreColumns.NONE: 0, MoreColumns.HALF: config.block_n // 2, MoreColumns.SAME: config.block_n}[
        config.more_columns
    ]


def sides(config: HopperScaledConfig) -> tuple[int, int]:
    """Rows that a tile takes of the left and of the right operand, without what is more."""
    return (config.block_n, config.block_m) if config.swap_ab else (config.block_m, config.block_n)


def box_columns(config: HopperScaledConfig) -> int:
    """Columns of c that leave at a time."""
    return min(config.block_n, more_columns(config) or 128, 128)


def in_boxes(call: Call, config: HopperScaledConfig) -> bool:
    """Whether the copy engine writes c."""
    return not config.swap_ab and call.dims["n"] * _tiles.size_of(call.outputs["c"][1]) % 16 == 0


def shared_memory(call: Call, config: HopperScaledConfig) -> int:
    """Bytes of shared memory: the stages of operands, what of c waits there, and barriers."""
    (rows, columns), more = sides(config), more_columns(config)
    stored = rows * (box_columns(config) if in_boxes(call, config) else columns)
    return config.num_stages * (rows + columns + more) * RUN + stored * _tiles.size_of(call.outputs["c"][1]) + BARRIERS


def fit(call: Call, config: HopperScaledConfig) -> HopperScaledConfig:
    """As many rows as a call of few has, and as many stages as there is room for. No bit depends on either."""
    if config.swap_ab:
        config = config.replace(block_m=pow2_at_least(min(call.dims["m"], FEW_ROWS), 16))
    return in_room(config, lambda found: shared_memory(call, found), shared_limit(call.target.arch))


def refuse_call(call: Call) -> str | None:
    """Why a call is another variant's, or None."""
    if call.framework.name != BACKEND.framework:
        return f"its tensor descriptors of 8-bit arrays were not tried in programs of {call.framework.name}"
    if call.options["precision"] == "ieee" and not of_integers(call):
        return "precision 'ieee' of 8-bit floats is of products of 16-bit ones; this variant multiplies 8-bit operands"
    if scale_blocks(call)[0] > 1 and call.dims["k_width"] != RUN:
        return f"k_width is {call.dims['k_width']}: blocks that have scales of their own must be {RUN} long"
    if sums(call) == "blocks" and call.arrays["scale_b"].shape[1] > 1 and call.dims["n_width"] % RUN:
        return (
            f"n_width is {call.dims['n_width']}: beside blocks along k, the columns of b that share a scale must be "
            f"a multiple of {RUN}, since a tile has one scale of b in a register"
        )
    if max(call.dims[name] for name in "mnk") > 2**31 - 512:
        return "an extent is 2^31 or more, beyond TMA's 32-bit coordinates"
    return None


def refuse_tiling(call: Call, config: HopperScaledConfig) -> str | None:
    """Why a tiling cannot serve a call, or None."""
    (rows, columns), more, kind = sides(config), more_columns(config), sums(call)
    told = f"a tile of {config.block_m} x {config.block_n + more} x {config.block_k} with swap_ab={int(config.swap_ab)}"
    if config.block_k != RUN or rows not in (64, 128) or config.num_warps * 16 != rows:
        return (
            f"{told} and num_warps={config.num_warps}: expected block_k={RUN}, and 64 or 128 rows (columns with "
            "swap_ab=1) with num_warps=4 or 8"
        )
    if config.swap_ab and (more or columns > FEW_ROWS):
        return f"{told}: swap_ab=1 has at most {FEW_ROWS} rows and more_columns=0"
    if kind == "chained" and (more or columns > widest(call)):
        return f"{told}: sums that stay in the matrix unit have at most {widest(call)} columns and more_columns=0"
    held = columns + more + (columns + (more or columns) if config.overlap else max(columns, more))
    if kind != "chained" and (columns > 128 or held > 384):
        return f"{told} has {held} columns of sums in registers; 384 fit, by a smaller block_n or overlap=0"
    if kind == "blocks" and config.more_columns == MoreColumns.HALF:
        return f"{told}: more_columns=1 has tiles of 192 columns, which no block of {RUN} divides; use 0 or 2"
    return None


def supports(call: Call, config: HopperScaledConfig) -> str | None:
    reason = refuse_call(call) or refuse_tiling(call, config)
    if reason:
        return reason
    shared, limit = shared_memory(call, config), shared_limit(call.target.arch)
    if shared > limit:
        return f"{config.num_stages} stages and c's tile take {shared} bytes of shared memory; the limit is {limit}"
    (rows, columns), more = sides(config), more_columns(config)
    left, right = (call.dims[name] for name in ("nm" if config.swap_ab else "mn"))
    return refuse_common(call, config.num_warps, cdiv(left, rows) * cdiv(right, columns + more))


DRAWN = Drawn(least={"k_width": RUN, "n_width": RUN}, most={"k_width": RUN, "n_width": RUN})


@BACKEND.implements("scaled_matmul", key=key, fit=fit, supports=supports, config=HopperScaledConfig, same_bits=True,
                    drawn=DRAWN, compiled_alone=GLUON)  # fmt: skip
def scaled_matmul(call: Call, config: HopperScaledConfig) -> tuple[Any, ...]:
    from portakern.backends.triton.hopper._scaled import ScaleArrays, ScaleSteps, scaled_matmul_by_roles

    a, b, scale_a, scale_b, bias = (call.arrays[name] for name in ("a", "b", "scale_a", "scale_b", "bias"))
    dims, plan = call.dims, plan_of(call, config)
    c = fresh((dims["m"], dims["n"]), torch_dtype(call.options["out_dtype"]), a.device)
    of_a = a, scale_a, ScaleSteps(*steps_of(scale_a, dims["m_width"]))
    of_b = b.t(), scale_b, ScaleSteps(*steps_of(scale_b.t(), dims["n_width"]))
    (left, left_scale, left_steps), (right, right_scale, right_steps) = (of_b, of_a) if config.swap_ab else (of_a, of_b)
    lines, columns = left.shape[0], right.shape[0]
    grid = min(_tiles.MULTIPROCESSORS, cdiv(lines, plan.rows) * cdiv(columns, plan.columns + plan.more))
    in_columns = operand(call, right, 0, (1, *right.shape), 1)
    launch(scaled_matmul_by_roles, grid, call,
           described(operand(call, left, 0, (1, *left.shape), 1), left, plan.rows),
           described(in_columns, right, plan.columns), described(in_columns, right, plan.more or plan.columns),
           ScaleArrays(left_scale, right_scale), None if bias is None else bias.contiguous(), result(call, c, config),
           left_steps, right_steps, lines, columns, dims["k"], plan=plan, num_warps=4,
           enable_fp_fusion=False)  # fmt: skip
    return (c,)


def steps_of(scale: torch.Tensor, width: int) -> tuple[int, int, int]:
    """Between scales of two blocks of an operand's rows and of two blocks of k, and how many rows share one; 1, which
    costs no division, where all do."""
    row, block = shared_strides(scale)
    return row, block, width if row else 1


def plan_of(call: Call, config: HopperScaledConfig) -> ScaledPlan:
    """What the kernel is compiled for."""
    from portakern.backends.triton.hopper._scaled import ScaledPlan

    (rows, columns), kind = sides(config), sums(call)
    return ScaledPlan(
        rows, columns, config.block_k, config.group, config.num_stages, more_columns(config), config.swap_ab,
        leaves=kind != "chained", blocks=kind == "blocks", overlapped=config.overlap and kind != "chained",
        shared=kind == "blocks" and not config.swap_ab, described=in_boxes(call, config), integers=of_integers(call),
    )  # fmt: skip


def described(memory: Operand, x: torch.Tensor, rows: int) -> Any:
    """The descriptor of an operand x (its own axis, k), which lies there, in tiles of so many rows."""
    from triton.experimental.gluon import language as gl

    block = [rows, RUN]
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, GLUON_NAMES[DTYPE_NAME[x.dtype]]))
    return describe(memory.memory, x.shape, (memory.row, 1), block, layout=layout)


def result(call: Call, c: torch.Tensor, config: HopperScaledConfig) -> Any:
    """The descriptor of c in boxes, or c where threads write it."""
    if not in_boxes(call, config):
        return c
    from triton.experimental.gluon import language as gl

    block = [OWN, box_columns(config)]
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, DTYPE_NAME[c.dtype]))
    return describe(c, c.shape, (c.shape[1], 1), block, layout=layout)
