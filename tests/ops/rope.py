"""y_a = x_a cos - x_b sin and y_b = x_b cos + x_a sin.

d_x_a = d_y_a cos + d_y_b sin, d_x_b = d_y_b cos - d_y_a sin.
"""

from __future__ import annotations

import functools

import numpy as np

import portakern as pk
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    SWEPT,
    accumulator,
    draw,
    flush,
    normal64,
    pick,
    sweep,
    through,
    zeros,
)
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample


def fma(a, b, c):
    """a b + c, rounded once (in float64 twice)."""
    return (a.astype(np.float64) * b + c).astype(c.dtype)


def simulate(x, cos, sin, interleaved=False, *, fused=False, ftz=False, low=None, sign=1, late=0, factor=1.0, all_of=0,
             tables=None):  # fmt: skip
    """``fused``: the second product is not rounded; ``sign``: of sin; ``late``: tables of as many tokens before.

    ``low``: products kept in a narrower dtype; ``tables``: these; ``all_of``: as many numbers beyond the pairs scaled.
    """
    acc, pairs = accumulator(x), cos.shape[-1]
    y = flush(x.astype(acc), ftz)
    c, s = (flush(through(t.astype(acc), tables), ftz)[:, :, None] for t in (cos, sin))
    c, s = (np.roll(t, late, 1) for t in (c, s))
    s = s * acc(sign)
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (
        slice(pairs), slice(pairs, 2 * pairs))  # fmt: skip
    a, b = y[..., first], y[..., second]

    def turned(p, t, q, r):
        product = through(flush(q * r, ftz), low)
        return fma(p, t, product) if fused else flush(flush(p * t, ftz) + product, ftz)

    ya, yb = turned(a, c, b, -s), turned(b, c, a, s)
    y = np.array(x.astype(acc))
    y[..., first], y[..., second] = ya * acc(factor), yb * acc(factor)
    if all_of:
        y[..., 2 * pairs :] *= acc(0.5)
    return (y,)


def tables(rng, dtype, batch, seq, pairs):
    """Cosines and sines of random angles, with an attention factor."""
    angle = rng.uniform(-np.pi, np.pi, (batch, seq, pairs))
    wide = dtype if dtype == "float64" or rng.random() < 0.5 else "float32"
    return tuple(draw_as(1.1 * turn(angle), wide) for turn in (np.cos, np.sin))


def draw_as(values, dtype):
    from portakern.spec.dtypes import numpy_dtype

    return values.astype(numpy_dtype(dtype))


def case(rng, dtype, regime):
    batch, seq, heads = (int(rng.integers(1, top)) for top in (3, 12, 6))
    pairs, rest = pick(rng, [1, 5, 16, 32]), pick(rng, [0, 0, 3])
    x = sweep(rng, (batch, seq, heads, 2 * pairs + rest), dtype, regime)
    return (x, *tables(rng, dtype, pick(rng, [1, batch]), seq, pairs)), {"interleaved": bool(rng.integers(2))}


def large_case(rng, dtype, regime):
    seq, pairs = pick(rng, [65, 130]), pick(rng, [32, 40])
    return (draw(rng, (1, seq, 2, 2 * pairs), dtype, regime), *tables(rng, dtype, 1, seq, pairs)), {}


def some(seq=9, pairs=32, rest=0):
    def arrays(rng, dtype):
        return sweep(rng, (2, seq, 3, 2 * pairs + rest), dtype), *tables(rng, dtype, 1, seq, pairs)

    return arrays


def in_float32(rng, dtype):
    """Tables in float32 beside x."""
    return sweep(rng, (2, 9, 3, 64), dtype), *tables(rng, "float32", 1, 9, 32)


def formula(x, cos, sin, interleaved=False):
    y, pairs = np.array(x), cos.shape[-1]
    for b, s, h, _ in np.ndindex(*x.shape[:3], 1):
        for i in range(pairs):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, pairs + i)
            table = b if cos.shape[0] > 1 else 0
            z = complex(x[b, s, h, first], x[b, s, h, second]) * complex(cos[table, s, i], sin[table, s, i])
            y[b, s, h, first], y[b, s, h, second] = z.real, z.imag
    return (y,)


def in_torch(x, cos, sin, interleaved=False):
    import torch

    pairs = cos.shape[-1]
    cos, sin = cos.detach()[:, :, None], sin.detach()[:, :, None]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    halves = a * cos - b * sin, b * cos + a * sin
    both = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat((both.to(x.dtype), rest), -1)


def in_jax(x, cos, sin, interleaved=False):
    import jax.numpy as jnp

    pairs = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, -1)
    halves = a * cos - b * sin, b * cos + a * sin
    both = jnp.stack(halves, -1).reshape(turned.shape) if interleaved else jnp.concatenate(halves, -1)
    return jnp.concatenate((both.astype(x.dtype), rest), -1)


def in_layer(op, x, p):
    """Two heads, turned by tables of which no gradient is asked: they follow from signs alone."""
    batch, length, width = x.shape
    up = x[..., : width // 4] > 0
    up = up.astype(x.dtype) if hasattr(up, "astype") else up.to(x.dtype)
    return op(x.reshape(batch, length, 2, width // 2), 0.6 + 0.2 * up, 0.8 - 0.2 * up).reshape(batch, length, width)


def call(*arrays, **options):
    return pk.op("rope")(*arrays, **options)


def fuzzed(r, dtype):
    batch, seq, heads, pairs = r.extent(), r.extent(), r.extent(), max(r.extent(), 1)
    x = r.array(dtype, batch, seq, heads, 2 * pairs + r.pick((0, 0, 3)))
    shared = r.pick((1, batch))
    cos, sin = (r.array(dtype, shared, seq, pairs) for _ in range(2))
    return {"x": x, "cos": cos, "sin": sin}, {"interleaved": r.pick((False, True))}


def past_2_31(gpu, op="rope"):
    rows, d = gpu.big // 256 + 16, 128
    x = gpu.torch.randn(1, rows, 2, d, dtype=gpu.torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    cos, sin = (gpu.normal(1, rows, d // 2, dtype=gpu.torch.bfloat16) for _ in range(2))
    picked = gpu.rows_to_sample(rows, 2 * d)
    y = gpu.op(op)(x, cos, sin)
    y = y[0] if isinstance(y, tuple) else y
    yield y[:, picked], (x[:, picked], cos[:, picked], sin[:, picked]), {}


def far(gpu):
    table = gpu.normal(1, 4, 150, dtype=gpu.torch.bfloat16)
    yield gpu.far((4, 300))[None, :, None], table, table
    yield gpu.far((4, 300))[None, None], gpu.normal(1, 1, 150), gpu.normal(1, 1, 150)


X, T = zeros(2, 3, 2, 8), zeros(1, 3, 4)
WRONG = {
    "tables of another length": (lambda: call(X, zeros(1, 4, 4), zeros(1, 4, 4)), r"rope: cos .*expected"),
    "tables of two equal halves": (
        lambda: call(X, zeros(1, 3, 8), zeros(1, 3, 8)),
        r"cos and sin have more columns than d / 2 pairs; .*cos\[..., : d // 2\]",
    ),
    "tables without a batch": (lambda: call(X, zeros(3, 4), zeros(3, 4)), r"rope: cos .*expected"),
    "no sin": (lambda: call(X, T), r"rope.*sin"),
    "tables of no column": (lambda: call(X, zeros(1, 3, 0), zeros(1, 3, 0)), r"pairs is 0"),
    "tables of another dtype": (lambda: call(X, T.astype(BF16), T.astype(BF16)), r"cos is bfloat16 but x is float32"),
    "a convention by its name": (lambda: call(X, T, T, interleaved="gptj"), r"interleaved is 'gptj'; expected True or"),
}

HALF = {"x": (2, 5, 3, 8), "cos": (1, 5, 4), "sin": (1, 5, 4)}
PART = {"x": (2, 5, 3, 11), "cos": (2, 5, 4), "sin": (2, 5, 4)}
LONG = {"x": (1, 70, 4, 64), "cos": (1, 70, 32), "sin": (1, 70, 32)}
BESIDE = {"interleaved": True}

RECORD = ForwardRecord(
    op="rope",
    simulate=simulate,
    variants=({}, {"fused": True}, {"ftz": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: some()(rng, "float32"), off={"y": 4e-7}),
    faults={
        "turned the other way": Fault(some(), {"sign": -1}, breaks="y"),
        "the other convention": Fault(some(), {"interleaved": True}, breaks="y"),
        "the token before": Fault(some(), {"late": 1}, breaks="y"),
        "tables in bfloat16": Fault(in_float32, {"tables": BF16}, breaks="y", dtypes=("float32", "float16")),
        "a product in bfloat16": Fault(some(40), {"low": BF16}, breaks="y"),
        "what passes through, halved": Fault(some(rest=5), {"all_of": 1}, breaks="y"),
        "1 % off": Fault(some(), {"factor": 1.01}, breaks="y"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (some(70)(rng, dtype), {}),
    hiding={"y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={
        "halves": Sample(HALF),
        "neighbours": Sample(HALF, BESIDE),
        "part of a head": Sample(PART),
    },
    usual=(
        Sample(LONG),
        Sample({"x": (2, 33, 12, 64), "cos": (2, 33, 32), "sin": (2, 33, 32)}, BESIDE),
        Sample(
            {"x": (2, 30, 8, 80), "cos": (1, 30, 16), "sin": (1, 30, 16)}, tiling={"block_seq": 16, "block_heads": 8}
        ),
    ),
    formula=formula,
    formula_calls={
        f"interleaved {beside}, rest {rest}": lambda beside=beside, rest=rest: (
            (normal64(2, 3, 2, 10 + rest), normal64(1, 3, 5), normal64(1, 3, 5, seed=1)),
            {"interleaved": beside},
        )
        for beside in (False, True)
        for rest in (0, 3)
    },
    formula_tolerance=(1e-14, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(PART, BESIDE),
    lowered={
        "halves": Sample(LONG),
        "neighbours": Sample(LONG, BESIDE),
        "part of a head": Sample({"x": (2, 30, 3, 80), "cos": (1, 30, 16), "sin": (1, 30, 16)}),
    },
    mapped={
        "every array": Mapped(
            Sample({"x": (2, 3, 5, 2, 8), "cos": (2, 5, 3, 4), "sin": (3, 1, 5, 4)}), {"x": 1, "cos": 2, "sin": 0}
        ),
        "shared tables": Mapped(Sample(HALF | {"x": (3, 2, 5, 3, 8)}), {"x": 0}),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"batch": 2, "seq": 32, "heads": 4, "d": 64, "pairs": 32},
    launched=Sample({"x": (1, 64, 8, 64), "cos": (1, 64, 32), "sin": (1, 64, 32)}),
    past_2_31=past_2_31,
    far=far,
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(d_y, cos, sin, interleaved=False, *, sign=-1, **plant):
    return simulate(d_y, cos, sin, interleaved, sign=sign, **plant)


def any_case(rng, dtype, regime, batch, seq, pairs, rest=0):
    d_y = draw(rng, (batch, seq, 2, 2 * pairs + rest), dtype, regime)
    return (d_y, *tables(rng, dtype, pick(rng, [1, batch]), seq, pairs)), {"interleaved": bool(rng.integers(2))}


def case_vjp(rng, dtype, regime):
    batch, seq = int(rng.integers(1, 3)), int(rng.integers(1, 20))
    return any_case(rng, dtype, regime, batch, seq, pick(rng, [1, 5, 32]), pick(rng, [0, 3]))


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, 1, pick(rng, [65, 130]), pick(rng, [32, 40]))


def far_vjp(gpu):
    yield from far(gpu)


LONG_vjp = {"d_y": (1, 70, 4, 64), "cos": (1, 70, 32), "sin": (1, 70, 32)}
PART_vjp = {"d_y": (2, 30, 8, 80), "cos": (1, 30, 16), "sin": (1, 30, 16)}

GRADIENT = GradientRecord(
    op="rope_vjp",
    simulate=simulate_vjp,
    variants=({}, {"fused": True}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(lambda rng: some()(rng, "float32"), off={"d_x": 4e-7}),
    faults={
        "turned as forward": Fault(some(), {"sign": 1}, breaks="d_x"),
        "the other convention": Fault(some(), {"interleaved": True}, breaks="d_x"),
        "a product in bfloat16": Fault(some(40), {"low": BF16}, breaks="d_x"),
        "1 % off": Fault(some(), {"factor": 1.01}, breaks="d_x"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (some(70)(rng, dtype), {}),
    hiding={"d_x truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={"part of a head": Sample({"d_y": (2, 5, 3, 11), "cos": (2, 5, 4), "sin": (2, 5, 4)}, BESIDE)},
    usual=(Sample(LONG_vjp), Sample(LONG_vjp, BESIDE), Sample(PART_vjp, tiling={"block_seq": 16, "block_heads": 8})),
    extents={"batch": 2, "seq": 32, "heads": 4, "d": 64, "pairs": 32},
    past_2_31=functools.partial(past_2_31, op="rope_vjp"),
    far=far_vjp,
)
