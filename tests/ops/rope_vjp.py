"""d_x_a = d_y_a cos + d_y_b sin, d_x_b = d_y_b cos - d_y_a sin."""

from __future__ import annotations

import functools

from tests.ops import rope
from tests.ops._shared import BF16, CHECKED, HALVES, draw, pick
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample
from tests.ops.rope import BESIDE, some, tables


def simulate(d_y, cos, sin, interleaved=False, *, sign=-1, **plant):
    return rope.simulate(d_y, cos, sin, interleaved, sign=sign, **plant)


def any_case(rng, dtype, regime, batch, seq, pairs, rest=0):
    d_y = draw(rng, (batch, seq, 2, 2 * pairs + rest), dtype, regime)
    return (d_y, *tables(rng, dtype, pick(rng, [1, batch]), seq, pairs)), {"interleaved": bool(rng.integers(2))}


def case(rng, dtype, regime):
    batch, seq = int(rng.integers(1, 3)), int(rng.integers(1, 20))
    return any_case(rng, dtype, regime, batch, seq, pick(rng, [1, 5, 32]), pick(rng, [0, 3]))


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, 1, pick(rng, [65, 130]), pick(rng, [32, 40]))


def far(gpu):
    yield from rope.far(gpu)


LONG = {"d_y": (1, 70, 4, 64), "cos": (1, 70, 32), "sin": (1, 70, 32)}
PART = {"d_y": (2, 30, 8, 80), "cos": (1, 30, 16), "sin": (1, 30, 16)}

RECORD = GradientRecord(
    op="rope_vjp",
    simulate=simulate,
    variants=({}, {"fused": True}, {"ftz": True}),
    case=case,
    regimes=CHECKED,
    near=Near(lambda rng: some()(rng, "float32"), off={"d_x": 4e-7}),
    faults={
        "turned as forward": Fault(some(), {"sign": 1}, breaks="d_x"),
        "the other convention": Fault(some(), {"interleaved": True}, breaks="d_x"),
        "a product in bfloat16": Fault(some(40), {"low": BF16}, breaks="d_x"),
        "1 % off": Fault(some(), {"factor": 1.01}, breaks="d_x"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (some(70)(rng, dtype), {}),
    hiding={"d_x truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"part of a head": Sample({"d_y": (2, 5, 3, 11), "cos": (2, 5, 4), "sin": (2, 5, 4)}, BESIDE)},
    usual=(Sample(LONG), Sample(LONG, BESIDE), Sample(PART, tiling={"block_seq": 16, "block_heads": 8})),
    extents={"batch": 2, "seq": 32, "heads": 4, "d": 64, "pairs": 32},
    past_2_31=functools.partial(rope.past_2_31, op="rope_vjp"),
    far=far,
)
