"""y = gate / (1 + exp(-gate)) up in float32, scale = max |y| / L of a group, q = y / scale rounded to a code."""

from __future__ import annotations

from functools import partial

import portakern as pk
from tests.ops import swiglu
from tests.ops._codes import (
    E5M2,
    INT8,
    TWO,
    any_codes,
    any_width,
    by_formula,
    coded,
    given_back,
    of_jax,
    of_torch,
    past_2_31,
)
from tests.ops._shared import BF16, HALVES, SWEPT, draw, normal64, sweep, zeros
from tests.ops.record import Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample


def simulate(gate, up, *, base2=True, ftz=False, plain=False, low=None, swapped=False, factor=1.0, **options):
    """swiglu's kernel, whose result stays in the accumulator's type, and quantize's. Keywords are those of both, and of
    :func:`tests.ops._codes.coded`."""
    how = {"base2": base2, "plain": plain, "low": low, "swapped": swapped, "factor": factor}
    (y,) = swiglu.simulate(gate, up, ftz=ftz, **how)
    return coded(y, gate, options, ftz=ftz)


def case(rng, dtype, regime):
    arrays, _ = swiglu.case(rng, dtype, regime)
    return arrays, any_codes(rng, arrays[0].shape[-1])


def large_case(rng, dtype, regime):
    return (draw(rng, (64, 128), dtype, regime), draw(rng, (64, 128), dtype, regime)), {"width": 8}


def two(rng, dtype):
    """No group is next to 0."""
    gate, up = sweep(rng, (6, 96), dtype), sweep(rng, (6, 96), dtype)
    gate[:, ::16], up[:, ::16] = 2, 3
    return gate, up


def some_zeros(rng, dtype):
    gate, up = two(rng, dtype)
    up[:, 32:64] = 0
    return gate, up


def formula(gate, up, **options):
    return by_formula(*swiglu.formula(gate, up), **options)


def in_torch(gate, up, **options):
    import torch

    gate, up = (a.float() if a.dtype.itemsize < 4 else a for a in (gate, up))
    return of_torch(torch.nn.functional.silu(gate) * up, **options)


def in_jax(gate, up, **options):
    import jax

    gate, up = (a.astype("float32") if a.dtype.itemsize < 4 else a for a in (gate, up))
    return of_jax(jax.nn.silu(gate) * up, **options)


def call(*arrays, **options):
    return pk.op("swiglu_quantize")(*arrays, **options)


def fuzzed(r, dtype):
    shape = (*(r.extent() for _ in range(r.pick((0, 1, 2)))), max(r.extent(), 1))
    return {"gate": r.array(dtype, *shape), "up": r.array(dtype, *shape)}, any_width(r, shape[-1])


def pair(*shape):
    return {"gate": shape, "up": shape}


X, GROUPS = zeros(2, 256), {"width": 32}
WRONG = {
    "another shape": (lambda: call(X, zeros(2, 4)), r"swiglu_quantize: up .*expected"),
    "no axes": (lambda: call(zeros(), zeros()), r"swiglu_quantize: gate has 0 axes, shape \(\); expected at least 1"),
    "groups of nothing": (lambda: call(X, X, width=0), r"width is 0; expected"),
    "codes of 16 bits": (
        lambda: call(X, X, to="float16"),
        r"to is 'float16'; expected a dtype \(float8_e4m3fn, float8_e5m2, int8\)",
    ),
}

RECORD = ForwardRecord(
    op="swiglu_quantize",
    simulate=simulate,
    variants=({}, {"base2": False}, {"plain": True}, {"inverse": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: two(rng, "float32"), {"width": 96}, off={"scale": 2e-6}),
    faults={
        "up for the gate": Fault(two, {"swapped": True}, GROUPS, breaks="scale"),
        "a share off": Fault(two, {"factor": 1.001}, GROUPS, breaks="scale"),
        "silu in 16 bits": Fault(two, {"low": BF16}, {"width": 4}, breaks="scale"),
        "y of 16 bits": Fault(two, {"stored": True}, {"width": 4}, breaks="scale", dtypes=HALVES),
        "the inverse of the scale": Fault(two, {"inverted": True}, GROUPS, breaks="scale"),
        "a row's scale for each group's": Fault(two, {"of_a_row": True}, {"width": 8}, breaks="q"),
        "no clip": Fault(two, {"clips": False}, {**GROUPS, "scale_ub": 0.1}, breaks="q"),
        "cut for rounded": Fault(two, {"cut": True}, GROUPS, breaks="q"),
        "a scale of 0 for zeros": Fault(some_zeros, {"zeros": 0.0}, GROUPS, breaks="scale"),
        "240 for 448": Fault(two, {"most": 240.0}, GROUPS, breaks="scale"),
        "powers of two below": Fault(two, {"floors": True}, {**GROUPS, **TWO}, breaks="scale"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: large_case(rng, dtype, "normal"),
    hiding={"scales eight roundings off": Hiding("typical errors are", {"off": 8 * 2.0**-24})},
    small={"groups": Sample(pair(3, 12), {"width": 4}), "tokens": Sample(pair(2, 3), {"width": 3})},
    usual=(
        Sample(pair(9, 384)),
        Sample(pair(40, 200), {"width": 200, "to": INT8}),
        Sample(pair(4, 8, 300), {"width": 24, **TWO}),
        Sample(pair(16, 1000), {"width": 1000, "to": E5M2}, tiling={"block_rows": 32}),
    ),
    formula=formula,
    formula_calls={
        str(options): partial(lambda options: ((normal64(2, 3, 12) * 3, normal64(2, 3, 12, seed=1)), options), options)
        for options in ({"width": 4}, {"width": 5, "to": INT8, "scale_ub": 1.0}, {"width": 12, **TWO})
    },
    formula_tolerance=(1e-13, 0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(pair(2, 8, 256)),
    lowered={
        "groups": Sample(pair(3, 16, 512)),
        "tokens in int8": Sample(pair(40, 640), {"width": 640, "to": INT8}),
        "short groups": Sample(pair(33, 300), {"width": 96, **TWO}),
    },
    mapped={"both": Mapped(Sample({"gate": (2, 3, 12), "up": (3, 2, 12)}, {"width": 4}), {"gate": 0, "up": 1})},
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(lambda op, x, p: given_back(*op(x, x * p["up"], width=x.shape[-1]), x), lambda width: {"up": (width,)}),
    extents={"batch": 2, "n": 256, "width": 128},
    launched=Sample(pair(64, 512)),
    past_2_31=past_2_31("swiglu_quantize", 2, affine=False),
    far=lambda gpu: [(gpu.far((4, 300)), gpu.far((4, 300)))],
)
