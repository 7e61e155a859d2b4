"""scale = max |x| / L of each block, q = x / scale clipped at L and rounded to a code."""

from __future__ import annotations

from functools import partial

import numpy as np

import portakern as pk
from portakern.spec.dtypes import DTYPES
from portakern.spec.tolerance import rounded
from tests.ops._shared import F32, SWEPT, accumulator, draw, flush, normal64, pick, sweep, with_specials, zeros
from tests.ops.record import Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample

E4M3, E5M2, INT8 = "float8_e4m3fn", "float8_e5m2", "int8"
LEAST = 2.0**-126


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(x, static_scale=None, height=1, width=128, to=E4M3, scales="float32", scale_ub=None, scale_floor=0.0, *,
             inverse=False, ftz=False, off=0.0, inverted=False, of_a_row=False, clips=True, cut=False, zeros=1.0,
             most=None, floors=False, logarithm=False):  # fmt: skip
    """``inverse``: x is multiplied by the inverse of the scale.

    ``off``: by which share scales err; ``inverted``: 1 / scale is returned; ``of_a_row``: each row of a block has its
    own maximum; ``clips``: numbers beyond the codes are clipped; ``cut``: codes are cut towards 0; ``zeros``: the scale
    of zeros; ``most``: L; ``floors``: powers of two are rounded down; ``logarithm``: they come from logarithms in
    float32.
    """
    acc = accumulator(x)
    shape = x.shape[0] // height, height, x.shape[1] // width, width
    a, top = flush(x.astype(acc), ftz).reshape(shape), acc(most or DTYPES[to].largest)
    greatest = np.abs(a).max((1, 3))
    if static_scale is not None:
        scale = np.broadcast_to(static_scale.astype(acc), greatest.shape)
    else:
        limited = greatest if scale_ub is None else np.minimum(greatest, acc(scale_ub))
        scale = np.maximum(np.maximum(limited / top, acc(scale_floor)), acc(LEAST)) * acc(1 + off)
        if scales == "power_of_two":
            scale = power(scale, floors, logarithm)
        scale = np.where((greatest == 0) & (scale_floor == 0), acc(zeros), scale)
    wide = scale[:, None, :, None]
    if of_a_row:
        wide = np.abs(a).max(3, keepdims=True) / top
    v = a * (acc(1) / wide) if inverse else a / wide
    v = np.clip(v, -top, top) if clips else v
    codes = coded(v.reshape(x.shape), to, cut)
    return codes, acc(1) / scale if inverted else scale


def power(scale, floors, logarithm):
    """The least powers of two that are no less."""
    acc = scale.dtype.type
    mantissa, exponent = np.frexp(scale)
    exact = acc(np.ldexp(acc(1), exponent - ((mantissa == 0.5) | floors)))
    if logarithm:
        exact = np.exp2(np.round(np.log2(scale.astype(np.float32)))).astype(acc)
    return np.where(np.isfinite(scale), exact, scale)


def coded(v, to, cut):
    """Numbers that codes of a dtype are; what overflows in ml_dtypes is NaN or inf there."""
    wide = v.astype(np.float64)
    if not cut:
        return rounded(wide, to).astype(v.dtype)
    every = np.arange(256, dtype=np.uint8).view(DTYPES[to].numpy).astype(np.float64)
    every = np.unique(np.abs(every[np.isfinite(every)]))
    return np.copysign(every[np.searchsorted(every, np.abs(wide), "right") - 1], wide).astype(v.dtype)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def case(rng, dtype, regime):
    height, width = int(rng.integers(1, 5)), int(rng.integers(1, 40))
    x = sweep(rng, (height * int(rng.integers(1, 6)), width * int(rng.integers(1, 5))), dtype, regime)
    options = {"height": height, "width": width, "to": pick(rng, (E4M3, E5M2, INT8))}
    if rng.random() < 0.3:
        return (
            x,
            scale_like(rng, x, (pick(rng, (1, x.shape[0] // height)), pick(rng, (1, x.shape[1] // width)))),
        ), options
    options |= {"scales": pick(rng, ("float32", "power_of_two")), "scale_ub": pick(rng, (None, None, 1.0))}
    return (x, None), options | {"scale_floor": pick(rng, (0.0, 0.0, 0.01))}


def scale_like(rng, x, shape):
    return rng.uniform(0.001, 0.1, shape).astype(accumulator(x))


def special(rng, dtype, seed):
    arrays, options = case(rng, dtype, pick(rng, SWEPT))
    (x,) = with_specials(rng, arrays[:1])
    return (x, arrays[1]), options


def large_case(rng, dtype, regime):
    """Rows of different size, whose scales differ."""
    x = draw(rng, (60, 128), dtype, regime)
    return ((x.astype(np.float64) * rng.uniform(0.5, 8, (60, 1))).astype(x.dtype), None), {"width": 16}


def some(rng, dtype):
    """Rows of different size."""
    x = sweep(rng, (12, 96), dtype)
    x[0, 3] = 3.0  # so that no row's greatest number is next to 0
    return ((x.astype(np.float64) * np.linspace(0.5, 4, 12)[:, None]).astype(x.dtype), None)


def some_zeros(rng, dtype):
    x, _ = some(rng, dtype)
    x[2:4] = 0
    return x, None


def beyond(rng, dtype):
    """Given scales by which some numbers are beyond the codes."""
    x, _ = some(rng, dtype)
    return x, np.full((1, 1), 1e-3, accumulator(x))


# ------------------------------------------------------------------------------------------------ written another way
def formula(x, static_scale=None, height=1, width=128, to=E4M3, scales="float32", scale_ub=None, scale_floor=0.0):
    """One block after the other."""
    q, scale, most = np.zeros(x.shape), np.zeros((x.shape[0] // height, x.shape[1] // width)), DTYPES[to].largest
    for i, j in np.ndindex(*scale.shape):
        block = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        top = max(abs(float(v)) for v in x[block].reshape(-1))
        s = (min(top, scale_ub) if scale_ub else top) / most
        s = max(s, scale_floor, LEAST)
        if scales == "power_of_two":
            s = min(2.0**e for e in range(-126, 128) if 2.0**e >= s)
        s = 1.0 if top == 0 and not scale_floor else s
        if static_scale is not None:
            s = float(np.broadcast_to(static_scale, scale.shape)[i, j])
        scale[i, j], q[block] = s, np.minimum(np.maximum(x[block] / s, -most), most)
    return q, scale


def formula_call(options, given=False):
    x = normal64(6, 12)
    x[0] = 0
    return (x, np.full((6, 1), 0.01) if given else None), {"width": 4, **options}


def in_torch(x, static_scale=None, height=1, width=128, to=E4M3, scales="float32", scale_ub=None, scale_floor=0.0):
    import torch

    most, (m, n) = DTYPES[to].largest, x.shape
    a = x if x.dtype == torch.float64 else x.float()
    a = a.reshape(m // height, height, n // width, width)
    scale = (a.abs().amax((1, 3)) / most).clamp(min=LEAST) if static_scale is None else static_scale
    if scales == "power_of_two":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    v = (a / scale[:, None, :, None]).clamp(-most, most).reshape(m, n)
    return (v.round() if to == INT8 else v).to(getattr(torch, to)), scale


def in_jax(x, static_scale=None, height=1, width=128, to=E4M3, scales="float32", scale_ub=None, scale_floor=0.0):
    import jax.numpy as jnp

    most, (m, n) = DTYPES[to].largest, x.shape
    a = x.astype(jnp.float32).reshape(m // height, height, n // width, width)
    scale = jnp.maximum(jnp.abs(a).max((1, 3)) / most, LEAST) if static_scale is None else static_scale
    if scales == "power_of_two":
        scale = jnp.exp2(jnp.ceil(jnp.log2(scale)))
    v = jnp.clip(a / scale[:, None, :, None], -most, most).reshape(m, n)
    return (jnp.round(v) if to == INT8 else v).astype(to), scale


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    height, width = (max(r.extent(), 1) for _ in range(2))
    x = r.array(dtype, height * r.pick((1, 2, 3)), width * r.pick((1, 2, 3)))
    to, scales = r.pick((E4M3, E5M2, INT8)), r.pick(("float32", "power_of_two"))
    return {"x": x}, {"height": height, "width": width, "to": to, "scales": scales}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    rows, n = gpu.big // 256 + 16, 256
    x = gpu.torch.randn(rows, n, dtype=gpu.torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    picked = gpu.rows_to_sample(rows, n)
    q, scale = gpu.op("quantize")(x)
    yield (q[picked], scale[picked]), (x[picked], None), {}


def far(gpu):
    yield gpu.far((4, 256)), None
    yield gpu.far((4, 256)), gpu.normal(4, 2).abs() + 0.01


def in_layer(op, x, p):
    """What codes and scales give back of the hidden state."""
    rows = x.reshape(-1, x.shape[-1])
    q, scale = op(rows, width=x.shape[-1])
    q, scale = (a.astype(x.dtype) if hasattr(a, "astype") else a.to(x.dtype) for a in (q, scale))
    return (q * scale).reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("quantize", backend="reference")(*arrays, **options)


X = zeros(4, 256)
WRONG = {
    "groups that do not fit": (
        lambda: call(X, width=96),
        r"quantize: x axis 1 \(column_blocks\*width\) is 256; expected a multiple of width = 96",
    ),
    "three axes": (lambda: call(zeros(2, 4, 256)), r"x has 3 axes, shape \(2, 4, 256\); expected 2"),
    "codes of 16 bits": (
        lambda: call(X, to="float16"),
        r"to is 'float16'; expected a dtype \(float8_e4m3fn, float8_e5m2, int8\)",
    ),
    "given scales and a limit": (
        lambda: call(X, zeros(4, 2) + F32(1), scale_ub=1.0),
        r"static_scale is the scale: leave out scales, scale_ub, scale_floor",
    ),
    "given scales of 0": (lambda: call(X, zeros(4, 2)), r"static_scale must be from 2\^-126 to 2\^126"),
    "a scale for each number": (
        lambda: call(X, zeros(4, 256) + F32(1)),
        r"static_scale axis 1 \(column_blocks\) is 256; expected 2 or 1",
    ),
    "scales of 16 bits": (
        lambda: call(X, zeros(4, 2, dtype=np.float16)),
        r"static_scale is float16; expected float32",
    ),
    "a limit of 0": (lambda: call(X, scale_ub=0.0), r"scale_ub is 0.0; expected a finite number"),
}

TWO, BLOCKS = {"scales": "power_of_two"}, {"height": 4, "width": 8}
GIVEN = {"x": (6, 256), "static_scale": (6, 2)}

RECORD = ForwardRecord(
    op="quantize",
    simulate=simulate,
    variants=({}, {"inverse": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    special=special,
    near=Near(lambda rng: some(rng, "float32"), {"width": 32}, off={"scale": 6e-7}),
    faults={
        "the inverse of the scale": Fault(some, {"inverted": True}, {"width": 32}, breaks="scale"),
        "a row's scale for the tensor's": Fault(some, {"of_a_row": True}, {"height": 12, "width": 96}, breaks="q"),
        "no clip": Fault(beyond, {"clips": False}, {"width": 96}, breaks="q"),
        "cut for rounded": Fault(some, {"cut": True}, {"width": 32}, breaks="q"),
        "cut for rounded, of int8": Fault(some, {"cut": True}, {"width": 32, "to": INT8}, breaks="q"),
        "a scale of 0 for zeros": Fault(some_zeros, {"zeros": 0.0}, {"width": 32}, breaks="scale"),
        "240 for 448": Fault(some, {"most": 240.0}, {"width": 32}, breaks="scale"),
        "128 for 127": Fault(some, {"most": 128.0}, {"width": 32, "to": INT8}, breaks="scale"),
        "powers of two below": Fault(some, {"floors": True}, {"width": 32, **TWO}, breaks="scale"),
        "the nearest power of two": Fault(some, {"logarithm": True}, {"width": 32, **TWO}, breaks="scale"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: large_case(rng, dtype, "normal"),
    hiding={"scales three roundings off": Hiding("typical errors are", {"off": 3 * 2.0**-24})},
    small={"groups": Sample({"x": (3, 128)}), "blocks": Sample({"x": (8, 16)}, BLOCKS)},
    usual=(
        Sample({"x": (9, 384)}),
        Sample({"x": (40, 200)}, {"width": 200, "to": INT8}),
        Sample({"x": (24, 40)}, {"height": 24, "width": 40, **TWO}),
        Sample(GIVEN, {"to": E5M2}),
    ),
    formula=formula,
    formula_calls={
        str(options): partial(formula_call, options, given)
        for options, given in (
            ({}, False), ({"to": INT8, "scale_ub": 1.0}, False), ({**TWO, "height": 3, "width": 6}, False),
            ({"scale_floor": 0.5, **TWO}, False), ({"to": E5M2, "scale_floor": 1e-6}, False), ({"to": E5M2}, True),
        )
    },
    formula_tolerance=(1e-14, 0.0),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample({"x": (16, 256)}, TWO),
    lowered={
        "groups": Sample({"x": (16, 512)}),
        "tokens in int8": Sample({"x": (40, 640)}, {"width": 640, "to": INT8}),
        "blocks": Sample({"x": (256, 256)}, {"height": 128, **TWO}),
        "given": Sample(GIVEN, {"to": E5M2}),
    },
    mapped={
        "every array": Mapped(
            Sample({"x": (6, 2, 256), "static_scale": (2, 6, 2)}), {"x": 1, "static_scale": 0}, folds=False
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"row_blocks": 8, "height": 1, "column_blocks": 2, "width": 128},
    launched=Sample({"x": (64, 512)}),
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip
