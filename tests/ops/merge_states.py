"""o = w_a o_a + w_b o_b, lse = log(exp(lse_a) + exp(lse_b)), w_a = 1 / (1 + exp(lse_b - lse_a)).

d_o_a = w_a d_o, d_lse_a = w_a d_lse + w_a w_b sum d_o (o_a - o_b).
"""

from __future__ import annotations

import math

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
    in_blocks,
    normal64,
    pick,
    sweep,
    through,
    zeros,
)
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample


def beside(numbers):
    return np.swapaxes(numbers, -1, -2)[..., None]


def shares(lse_a, lse_b, acc, *, base2, ftz, plain, octaves=False):
    """(w_a, w_b, lse) of each row; 0 of parts without keys.

    ``plain``: each weight as a sigmoid of the difference; ``octaves``: lse taken for one of base 2.
    """
    a, b = (flush(x.astype(acc), ftz) for x in (lse_a, lse_b))
    apart = np.where(np.isneginf(a) & np.isneginf(b), acc(0), a - b)

    def exp(t):
        return flush(np.exp2(t * (acc(1) if octaves else acc(np.log2(np.e)))) if base2 else np.exp(t), ftz)

    e = exp(-np.abs(apart))
    high = 1 / (1 + e)
    low = flush(e * high, ftz)
    w_a, w_b = np.where(apart >= 0, high, low), np.where(apart >= 0, low, high)
    if plain:
        w_a, w_b = flush(1 / (1 + exp(-apart)), ftz), flush(1 / (1 + exp(apart)), ftz)
    total = np.where(apart >= 0, a, b) + np.log(1 + np.where(a == b, acc(1), e))
    return np.where(np.isneginf(a), acc(0), w_a), np.where(np.isneginf(b), acc(0), w_b), total


def part(o, lse, acc, ftz, reads_all):
    """A part's o, 0 where it has no keys."""
    o = flush(o.astype(acc), ftz)
    return o if reads_all else np.where(beside(np.isneginf(lse)), acc(0), o)


def simulate(o_a, lse_a, o_b, lse_b, *, base2=True, ftz=False, plain=False, octaves=False, low=None, factor=1.0,
             swapped=False, reads_all=False, larger=False, late=0):  # fmt: skip
    """``low``: weights kept in a narrower dtype; ``swapped``: each part has the other's weight; ``larger``: lse is the
    larger of the two; ``late``: weights of as many tokens before."""
    acc = accumulator(o_a)
    w_a, w_b, lse = shares(lse_a, lse_b, acc, base2=base2, ftz=ftz, plain=plain, octaves=octaves)
    w_a, w_b = (np.roll(through(w, low), late, -1) for w in ((w_b, w_a) if swapped else (w_a, w_b)))
    a, b = part(o_a, lse_a, acc, ftz, reads_all), part(o_b, lse_b, acc, ftz, reads_all)
    o = flush(beside(w_a) * a, ftz) + flush(beside(w_b) * b, ftz)
    lse = np.maximum(lse_a, lse_b).astype(acc) if larger else lse
    return flush(o * acc(factor), ftz), flush(lse, ftz)


def log_sums(rng, shape, dtype, regime="normal"):
    """lse of two parts, as attentions have them or as the regime says."""
    wide = "float64" if dtype == "float64" else "float32"
    if regime in ("normal", "rising"):
        return (3 + 2 * rng.standard_normal(shape)).astype(wide)
    return draw(rng, shape, wide, regime) if regime in CHECKED else sweep(rng, shape, wide, regime)


def states(rng, dtype, shape, regime="normal", values=sweep):
    """Two states; often the lse are ordinary, and sometimes a part has no keys."""
    *batch, tokens, heads, _ = shape
    of_lse = regime if rng.random() < 0.3 else "normal"
    found = []
    for _ in range(2):
        lse = log_sums(rng, (*batch, heads, tokens), dtype, of_lse)
        found += [values(rng, shape, dtype, regime), lse]
    return tuple(found)


def case(rng, dtype, regime):
    batch = pick(rng, [(), (1,), (2,)])
    shape = (*batch, int(rng.integers(1, 40)), int(rng.integers(1, 5)), pick(rng, [1, 5, 64, 130]))
    arrays = states(rng, dtype, shape, regime)
    for i in (1, 3):
        arrays[i][rng.random(arrays[i].shape) < 0.1] = -np.inf
    return arrays, {}


def large_case(rng, dtype, regime):
    return states(rng, dtype, (pick(rng, [65, 130]), 3, pick(rng, [40, 64])), regime, draw), {}


def some(tokens=40, heads=3, d=64):
    return lambda rng, dtype: states(rng, dtype, (2, tokens, heads, d))


def without_keys(rng, dtype):
    """A part without keys, whose o is NaN."""
    arrays = some()(rng, dtype)
    arrays[0][..., :20, :, :], arrays[1][..., :20] = np.nan, -np.inf
    return arrays


def formula(o_a, lse_a, o_b, lse_b):
    """Of one part a copy of each key, as many as exp(lse) says."""
    o, lse = np.empty(o_a.shape), np.empty(lse_a.shape)
    for *batch, token, head in np.ndindex(o.shape[:-1]):
        row, number = (*batch, token, head), (*batch, head, token)
        a, b = math.exp(lse_a[number]), math.exp(lse_b[number])
        o[row] = (a * o_a[row] + b * o_b[row]) / (a + b)
        lse[number] = math.log(a + b)
    return o, lse


def in_torch(o_a, lse_a, o_b, lse_b):
    import torch

    w_a = torch.sigmoid(lse_a - lse_b).swapaxes(-1, -2)[..., None]
    o = w_a * o_a + (1 - w_a) * o_b
    return o.to(o_a.dtype), torch.logaddexp(lse_a, lse_b)


def in_jax(o_a, lse_a, o_b, lse_b):
    import jax
    import jax.numpy as jnp

    w_a = jnp.swapaxes(jax.nn.sigmoid(lse_a - lse_b), -1, -2)[..., None]
    return (w_a * o_a + (1 - w_a) * o_b).astype(o_a.dtype), jnp.logaddexp(lse_a, lse_b)


def statistic(numbers, x):
    """Numbers in the dtype that they have beside x: float32, and float64 beside float64."""
    if "float64" in str(x.dtype):
        return numbers
    return numbers.astype("float32") if hasattr(numbers, "astype") else numbers.float()


def in_layer(op, x, p):
    """Two heads of the hidden state merged with half of it, by weights that it says itself."""
    o = x.reshape(*x.shape[:2], 2, -1)
    lse = statistic(o.sum(-1).swapaxes(1, 2), x)
    merged, total = op(o, lse, o / 2, lse / 4)
    total = total.swapaxes(1, 2)[..., None]
    total = total.astype(x.dtype) if hasattr(total, "astype") else total.to(x.dtype)
    return (merged + total).reshape(x.shape)


def call(*arrays, **options):
    return pk.op("merge_states")(*arrays, **options)


def fuzzed(r, dtype):
    batch = pick(r.rng, [(), (1,), (2,)])
    tokens, heads, d = r.extent(), r.extent(), max(r.extent(), 1)
    wide = "float64" if dtype == "float64" else "float32"
    arrays = {}
    for name in ("a", "b"):
        arrays[f"o_{name}"] = r.array(dtype, *batch, tokens, heads, d)
        arrays[f"lse_{name}"] = r.array(wide, *batch, heads, tokens)
    return arrays, {}


def past_2_31(gpu):
    tokens, heads, d = gpu.big // 512 + 16, 4, 128
    o_a, o_b = (gpu.torch.randn(tokens, heads, d, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    assert o_a.numel() > gpu.big
    lse_a, lse_b = (gpu.normal(heads, tokens) for _ in range(2))
    picked = gpu.rows_to_sample(tokens, heads * d)
    o, lse = gpu.op("merge_states")(o_a, lse_a, o_b, lse_b)
    cut = (o_a[picked], lse_a[:, picked], o_b[picked], lse_b[:, picked])
    yield (o[picked], lse[:, picked]), cut, {}


def far(gpu):
    lse = gpu.normal(2, 4)
    yield gpu.far((4, 2, 33)), lse, gpu.normal(4, 2, 33, dtype=gpu.torch.bfloat16), lse
    o, lse = gpu.normal(2, 4, 33, dtype=gpu.torch.bfloat16), gpu.far((4, 2), gpu.torch.float32)
    yield o, lse, o, gpu.normal(4, 2)


O, L = zeros(5, 2, 4), zeros(2, 5)
WRONG = {
    "lse by tokens": (
        lambda: call(O, zeros(5, 2), O, zeros(5, 2)),
        r"merge_states: lse_a axis -2 \(heads\) is 5; expected 2",
    ),
    "lse in 16 bits": (lambda: call(O, L.astype(BF16), O, L), r"merge_states: lse_a is bfloat16; expected float32"),
    "lse in float64": (
        lambda: call(O, L.astype(np.float64), O, L),
        r"merge_states: lse_a is float64; expected float32: cast it",
    ),
    "parts of two shapes": (lambda: call(O, L, zeros(4, 2, 4), L), r"merge_states: o_b .*expected"),
    "parts of two dtypes": (lambda: call(O, L, O.astype(BF16), L), r"o_b is bfloat16 but o_a is float32"),
    "no second part": (lambda: call(O, L), r"merge_states.*o_b"),
    "heads of nothing": (lambda: call(zeros(5, 2, 0), L, zeros(5, 2, 0), L), r"d is 0"),
}

PACKED = {"o_a": (5, 3, 8), "lse_a": (3, 5), "o_b": (5, 3, 8), "lse_b": (3, 5)}
BATCHED = {"o_a": (2, 5, 3, 7), "lse_a": (2, 3, 5), "o_b": (2, 5, 3, 7), "lse_b": (2, 3, 5)}
LONG = {"o_a": (1, 70, 4, 64), "lse_a": (1, 4, 70), "o_b": (1, 70, 4, 64), "lse_b": (1, 4, 70)}
WIDE = {"o_a": (30, 2, 300), "lse_a": (2, 30), "o_b": (30, 2, 300), "lse_b": (2, 30)}

RECORD = ForwardRecord(
    op="merge_states",
    simulate=simulate,
    variants=({}, {"base2": False}, {"ftz": True}, {"plain": True}),
    case=case,
    regimes=SWEPT,
    near=Near(lambda rng: some()(rng, "float32"), off={"o": 1.2e-6, "lse": 4e-7}),
    faults={
        "weights exchanged": Fault(some(), {"swapped": True}, breaks="o"),
        "lse of base 2": Fault(some(), {"octaves": True}, breaks="o"),
        "weights in bfloat16": Fault(some(), {"low": BF16}, breaks="o"),
        "the larger lse": Fault(some(), {"larger": True}, breaks="lse"),
        "the token before": Fault(some(), {"late": 1}, breaks="o"),
        "a part without keys read": Fault(without_keys, {"reads_all": True}, breaks="o"),
        "1 % off": Fault(some(), {"factor": 1.01}, breaks="o"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (some(70)(rng, dtype), {}),
    hiding={
        "o truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "o 1e-6 off": Hiding("typical", {"factor": 1 + 1e-6}, dtypes=("float32",)),
    },
    least_z={"lse": 0.1},
    small={
        "packed": Sample(PACKED),
        "batched": Sample(BATCHED),
    },
    usual=(
        Sample(LONG),
        Sample(LONG, tiling={"block_rows": 16}),
        Sample(WIDE),
    ),
    formula=formula,
    formula_calls={
        "packed": lambda: (tuple(normal64(*s, seed=i) for i, s in enumerate(PACKED.values())), {}),
        "batched": lambda: (tuple(normal64(*s, seed=i) for i, s in enumerate(BATCHED.values())), {}),
    },
    formula_tolerance=(1e-14, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(BATCHED),
    lowered={
        "packed": Sample({"o_a": (70, 3, 64), "lse_a": (3, 70), "o_b": (70, 3, 64), "lse_b": (3, 70)}),
        "batched": Sample(LONG),
        "wide heads": Sample(WIDE),
    },
    mapped={
        "every array": Mapped(
            Sample({"o_a": (2, 5, 3, 8), "lse_a": (3, 2, 5), "o_b": (5, 3, 2, 8), "lse_b": (2, 3, 5)}),
            {"o_a": 0, "lse_a": 1, "o_b": 2, "lse_b": 0},
        ),
        "one part": Mapped(Sample(PACKED | {"o_a": (2, 5, 3, 8), "lse_a": (2, 3, 5)}), {"o_a": 0, "lse_a": 0}),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer),
    extents={"batch": 2, "tokens": 32, "heads": 4, "d": 64},
    launched=Sample({"o_a": (64, 8, 64), "lse_a": (8, 64), "o_b": (64, 8, 64), "lse_b": (8, 64)}),
    past_2_31=past_2_31,
    far=far,
)


# ---------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(o_a, lse_a, o_b, lse_b, d_o, d_lse=None, *, base2=True, ftz=False, plain=False, octaves=False,
                 low=None, factor=1.0, block=None, tail=True, swapped=False, forget="", passes=False):  # fmt: skip
    """``forget``: the part of d_lse_a and d_lse_b that is left out, "d_lse" or "slope"; ``passes``: a part without keys
    has the cotangent of o; ``tail``: S without its last block."""
    acc = accumulator(o_a)
    w_a, w_b, _ = shares(lse_a, lse_b, acc, base2=base2, ftz=ftz, plain=plain, octaves=octaves)
    w_a, w_b = (through(w, low) for w in ((w_b, w_a) if swapped else (w_a, w_b)))
    empty_a, empty_b = np.isneginf(lse_a), np.isneginf(lse_b)
    d = flush(d_o.astype(acc), ftz)
    a, b = part(o_a, lse_a, acc, ftz, False), part(o_b, lse_b, acc, ftz, False)
    terms = flush(d * flush(a - b, ftz), ftz)
    n = terms.shape[-1]
    s = in_blocks(terms if tail else terms[..., : n - 1], block or n)
    s = np.swapaxes(s[..., 0], -1, -2)
    slope = np.where(empty_a | empty_b, acc(0), w_a * w_b * s) * acc("slope" not in forget)
    g = acc(0) if d_lse is None or "d_lse" in forget else flush(d_lse.astype(acc), ftz)
    found = []
    for w, sign, empty in ((w_a, 1, empty_a), (w_b, -1, empty_b)):
        of_o = np.where(
            beside(empty) & (not passes), acc(0), flush(np.where(beside(empty), acc(1), beside(w)) * d, ftz)
        )
        found += [of_o * acc(factor), np.where(empty, acc(0), w * g + acc(sign) * slope) * acc(factor)]
    return tuple(found)


def any_case(rng, dtype, regime, shape, lse_too):
    arrays = states(rng, dtype, shape, regime, draw)
    d_o = draw(rng, shape, dtype, regime if rng.random() < 0.5 else "normal")
    return (*arrays, d_o, log_sums(rng, arrays[1].shape, dtype) if lse_too else None), {}


def case_vjp(rng, dtype, regime):
    batch = pick(rng, [(), (1,), (2,)])
    shape = (*batch, int(rng.integers(1, 40)), int(rng.integers(1, 5)), pick(rng, [1, 5, 64, 130]))
    arrays, options = any_case(rng, dtype, regime, shape, rng.random() < 0.7)
    arrays[3][rng.random(arrays[3].shape) < 0.1] = -np.inf
    return arrays, options


def large_case_vjp(rng, dtype, regime):
    return any_case(rng, dtype, regime, (pick(rng, [65, 130]), 3, pick(rng, [40, 64])), True)


def arrays_vjp(rng, dtype):
    return any_case(rng, dtype, "normal", (2, 40, 3, 64), True)[0]


def without_keys_vjp(rng, dtype):
    arrays = arrays_vjp(rng, dtype)
    arrays[1][..., :20] = -np.inf
    return arrays


def past_2_31_vjp(gpu):
    tokens, heads, d = gpu.big // 512 + 16, 4, 128
    o_a, o_b = (gpu.torch.randn(tokens, heads, d, dtype=gpu.torch.bfloat16, device=gpu.device) for _ in range(2))
    lse_a, lse_b, d_lse = (gpu.normal(heads, tokens) for _ in range(3))
    picked = gpu.rows_to_sample(tokens, heads * d)
    d_o = gpu.sampled(o_a, picked)
    assert d_o.numel() > gpu.big
    found = gpu.op("merge_states_vjp")(o_a, lse_a, o_b, lse_b, d_o, d_lse)
    cut = (o_a[picked], lse_a[:, picked], o_b[picked], lse_b[:, picked], d_o[picked], d_lse[:, picked])
    yield tuple(x[picked] if x.dim() == 3 else x[:, picked] for x in found), cut, {}


def far_vjp(gpu):
    lse, o = gpu.normal(2, 4), gpu.normal(4, 2, 33, dtype=gpu.torch.bfloat16)
    yield gpu.far((4, 2, 33)), lse, o, lse, gpu.far((4, 2, 33)), lse
    o, lse = gpu.normal(2, 4, 33, dtype=gpu.torch.bfloat16), gpu.far((4, 2), gpu.torch.float32)
    yield o, lse, o, gpu.normal(4, 2), o, lse


def with_cotangents(shapes):
    return {**shapes, "d_o": shapes["o_a"], "d_lse": shapes["lse_a"]}


GRADIENT = GradientRecord(
    op="merge_states_vjp",
    simulate=simulate_vjp,
    variants=({}, {"base2": False}, {"ftz": True}, {"plain": True}, {"block": 16}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(
        lambda rng: arrays_vjp(rng, "float32"),
        off={"d_o_a": 1.2e-6, "d_lse_a": 1.4e-6, "d_o_b": 1.2e-6, "d_lse_b": 1.4e-6},
    ),
    faults={
        "weights exchanged": Fault(arrays_vjp, {"swapped": True}, breaks="d_o_a"),
        "lse of base 2": Fault(arrays_vjp, {"octaves": True}, breaks="d_o_b"),
        "weights in bfloat16": Fault(arrays_vjp, {"low": BF16}, breaks="d_o_a"),
        "d_lse forgotten": Fault(arrays_vjp, {"forget": "d_lse"}, breaks="d_lse_a"),
        "no slope of the weights": Fault(arrays_vjp, {"forget": "slope"}, breaks="d_lse_b"),
        "S without its last term": Fault(arrays_vjp, {"tail": False}, breaks="d_lse_a"),
        "a part without keys": Fault(without_keys_vjp, {"passes": True}, breaks="d_o_a"),
        "1 % off": Fault(arrays_vjp, {"factor": 1.01}, breaks="d_o_b"),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (any_case(rng, dtype, "normal", (2, 70, 3, 64), True)[0], {}),
    hiding={
        "gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "gradients 1e-6 off": Hiding("typical", {"factor": 1 + 1e-6}, dtypes=("float32",)),
    },
    least_z={"d_lse_a": 0.1, "d_lse_b": 0.1},
    small={
        "packed": Sample(with_cotangents(PACKED)),
        "without d_lse": Sample({**BATCHED, "d_o": BATCHED["o_a"]}),
        "one gradient": Sample(with_cotangents(PACKED), wants=("d_o_b",)),
    },
    usual=(
        Sample(with_cotangents(LONG)),
        Sample(with_cotangents(LONG), tiling={"block_rows": 16}),
        Sample(with_cotangents(WIDE)),
    ),
    extents={"batch": 2, "tokens": 32, "heads": 4, "d": 64},
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
