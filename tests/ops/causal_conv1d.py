"""y[t] = f(bias + sum over j of weight[j] X[t + j]), X the initial state and then x.

d_X[e] = sum over j of weight[j] d_z[e - j], d_weight[j] = sum of d_z[t] X[t + j], d_bias = sum of d_z.
"""

from __future__ import annotations

import math

import ml_dtypes
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
    positive,
    sweep,
    through,
    with_specials,
    zeros,
)
from tests.ops.linear import activated, cotangent
from tests.ops.record import Fault, ForwardRecord, GradientRecord, Hiding, Layer, Mapped, Near, Sample, Twin

ACTIVATIONS = ("none", "silu")


# ------------------------------------------------------------------------------------------------- the simulated kernel
def whole_inputs(x, state, past, ftz=False):
    """The inputs behind the initial state, or zeros, in the accumulator's type."""
    acc = accumulator(x)
    before = np.zeros((len(x), past, x.shape[2]), acc) if state is None else np.swapaxes(state, 1, 2)
    return flush(np.concatenate((before.astype(acc), x.astype(acc)), 1), ftz)


def met(inputs, ids, j, past):
    """What outputs see through tap j."""
    length = inputs.shape[1] - past
    found = inputs[:, j : j + length]
    if ids is None or j == past:
        return found
    same = (ids == ids[:, np.maximum(np.arange(length) - past + j, 0)])[..., None]
    return np.where(same, found, found.dtype.type(0))


def of_last_segment(ids, past):
    """Which of the last inputs are of the last segment."""
    if ids is None:
        return True
    return (ids[:, np.maximum(np.arange(-past, 0), -ids.shape[1])] == ids[:, -1:])[..., None]


def sums(x, weight, bias, state, ids, *, ftz=False, low=None, last=False, turned=False):
    """z. ``last``: the bias comes last; ``turned``: taps in the other order, as of a convolution in mathematics."""
    acc, past = accumulator(x), weight.shape[1] - 1
    inputs, w = whole_inputs(x, state, past, ftz), flush(weight.astype(acc), ftz)
    w = w[:, ::-1] if turned else w
    b = acc(0) if bias is None else flush(bias.astype(acc), ftz)
    z = np.zeros(x.shape, acc) if last else np.zeros(x.shape, acc) + b
    for j in range(past + 1):
        z = flush(through(z + flush(met(inputs, ids, j, past) * w[:, j], ftz), low), ftz)
    return z + b if last else z


def simulate(x, weight, bias=None, initial_state=None, segment_ids=None, activation="none", return_final_state=False,
             *, ftz=False, low=None, last=False, turned=False, fresh=False, leaks=False, late=0,
             factor=1.0):  # fmt: skip
    """``fresh``: the initial state is taken for zeros; ``leaks``: segments see each other; ``late``: the state is that
    of so many inputs before the last; the others: of :func:`sums`."""
    past = weight.shape[1] - 1
    state, ids = None if fresh else initial_state, None if leaks else segment_ids
    z = sums(x, weight, bias, state, ids, ftz=ftz, low=low, last=last, turned=turned)
    y = activated(z, activation, ftz=ftz) * z.dtype.type(factor)
    inputs = whole_inputs(x, initial_state, past)
    end = inputs.shape[1] - late
    state = np.where(of_last_segment(segment_ids, past), inputs[:, end - past : end], 0)
    return y, np.swapaxes(state, 1, 2) if return_final_state else None


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def made(rng, dtype, regime, extents, make, kind):
    """x, weight, bias, state and segments; ``kind``: 0 bare, 1 with a bias, 2 with a state, 3 with segments."""
    batch, length, channels, past = extents
    shapes = ((batch, length, channels), (channels, past + 1), (channels,), (batch, channels, past))
    x, weight, bias, state = (make(rng, shape, dtype, regime) for shape in shapes)
    ids = np.cumsum(rng.random((batch, length)) < 0.3, 1).astype(pick(rng, (np.int32, np.int64)))
    return x, weight, bias if kind else None, state if kind == 2 else None, ids if kind == 3 else None


def any_case(rng, dtype, regime, extents, make=sweep):
    kind = int(rng.integers(4))
    options = {"activation": pick(rng, ACTIVATIONS), "return_final_state": True}
    return made(rng, dtype, regime, extents, make, kind), options


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, [int(rng.integers(1, top)) for top in (4, 24, 40, 6)])


def special(rng, dtype, seed):
    """NaN and infinities in inputs, weights and states."""
    arrays, options = case(rng, dtype, pick(rng, SWEPT))
    return (*with_specials(rng, arrays[:4]), arrays[4]), options


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (2, pick(rng, [24, 40]), pick(rng, [33, 40]), pick(rng, [2, 3])), draw)


def of_kind(kind, extents=(2, 20, 24, 3)):
    return lambda rng, dtype: made(rng, dtype, "normal", extents, sweep, kind)


def typical(rng, dtype):
    return made(rng, dtype, "normal", (2, 64, 40, 3), draw, 1), {}


def formula(x, weight, bias=None, initial_state=None, activation="none", return_final_state=True):
    past, y = weight.shape[1] - 1, np.zeros(x.shape)

    def seen(b, t, c):
        if t >= 0:
            return x[b, t, c]
        return 0.0 if initial_state is None else initial_state[b, c, past + t]

    for b, t, c in np.ndindex(y.shape):
        terms = [0.0 if bias is None else bias[c]]
        for lag in range(past + 1):
            terms.append(seen(b, t - lag, c) * weight[c, past - lag])
        z = math.fsum(terms)
        y[b, t, c] = z if activation == "none" else z / (1 + math.exp(-z))
    batch, length, channels = x.shape
    state = [seen(b, length - past + k, c) for b in range(batch) for c in range(channels) for k in range(past)]
    return y, np.reshape(state, (batch, channels, past))


def in_torch(x, weight, bias=None, initial_state=None, segment_ids=None, activation="none", return_final_state=False):
    import torch

    past = weight.shape[1] - 1
    before = x.new_zeros(x.shape[0], x.shape[2], past) if initial_state is None else initial_state
    whole = torch.cat((before, x.transpose(1, 2)), -1)
    if segment_ids is None:
        z = torch.nn.functional.conv1d(whole, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    else:
        z = 0 if bias is None else bias
        for j in range(past + 1):
            seen, lag = whole[:, :, j : j + x.shape[1]].transpose(1, 2), past - j
            before = (torch.arange(x.shape[1], device=x.device) - lag).clamp(min=0)
            same = segment_ids == segment_ids[:, before]
            z = z + torch.where(same[..., None], seen, 0) * weight[:, j]
    y = torch.nn.functional.silu(z) if activation == "silu" else z
    return (y, whole[:, :, x.shape[1] :]) if return_final_state else y


def in_jax(x, weight, bias=None, initial_state=None, segment_ids=None, activation="none", return_final_state=False):
    import jax
    import jax.numpy as jnp

    past = weight.shape[1] - 1
    state = jnp.zeros((x.shape[0], x.shape[2], past), x.dtype) if initial_state is None else initial_state
    whole = jnp.concatenate((jnp.swapaxes(state, 1, 2), x), 1)
    z, ids = 0.0, segment_ids
    for j in range(past + 1):
        seen, lag = whole[:, j : j + x.shape[1]], past - j
        if ids is not None:
            same = ids == ids[:, jnp.maximum(jnp.arange(x.shape[1]) - lag, 0)]
            seen = jnp.where(same[..., None], seen, 0)
        z = z + seen * weight[:, j]
    z = z if bias is None else z + bias
    y = jax.nn.silu(z) if activation == "silu" else z
    return (y, jnp.swapaxes(whole[:, x.shape[1] :], 1, 2)) if return_final_state else y


def call(*arrays, **options):
    return pk.op("causal_conv1d")(*arrays, **options)


def fuzzed(r, dtype):
    batch, channels = r.extent(), r.extent()
    length, past = max(r.extent(), 1), int(r.rng.integers(1, 5))
    arrays = {"x": r.array(dtype, batch, length, channels), "weight": r.array(dtype, channels, past + 1)}
    if r.chance(0.5):
        arrays["bias"] = r.array(dtype, channels)
    if r.chance(0.5):
        arrays["initial_state"] = r.array(dtype, batch, channels, past)
    return arrays, {"activation": r.pick(ACTIVATIONS)}


def past_2_31(gpu):
    torch, (length, channels) = gpu.torch, (16, 32)
    batch = gpu.big // (length * channels) + 16
    x = torch.randn(batch, length, channels, dtype=torch.bfloat16, device=gpu.device)
    assert x.numel() > gpu.big
    weight, picked = gpu.normal(channels, 4, dtype=torch.bfloat16), gpu.rows_to_sample(batch, length * channels)
    yield gpu.op("causal_conv1d")(x, weight)[picked], (x[picked], weight), {}
    row = torch.randn(1, gpu.big // channels + 16, channels, dtype=torch.bfloat16, device=gpu.device)
    yield gpu.op("causal_conv1d")(row, weight)[:, -16:], (row[:, -16:], weight, None, row[:, -19:-16].mT), {}


def far(gpu):
    weight = gpu.normal(300, 4, dtype=gpu.torch.bfloat16)
    yield gpu.far((3, 4, 300)), weight
    yield gpu.far((3, 300, 4)).transpose(1, 2), weight


X, W = zeros(2, 5, 3), zeros(3, 4)
WRONG = {
    "other channels": (lambda: call(X, zeros(4, 4)), r"causal_conv1d: weight axis 0 \(channels\) is 4; expected 3"),
    "another dtype": (lambda: call(X, W.astype(ml_dtypes.bfloat16)), r"weight is bfloat16 but x is float32"),
    "a state of another width": (
        lambda: call(X, W, None, zeros(2, 3, 4)),
        r"causal_conv1d: .*past.*expected",
    ),
    "one tap": (lambda: call(X, zeros(3, 1)), r"causal_conv1d: .*past.* is 0"),
    "a long filter": (lambda: call(X, zeros(3, 64)), r"weight has more than 16 taps; this op is for short filters"),
    "no inputs": (lambda: call(zeros(2, 0, 3), W), r"causal_conv1d: .*length.* is 0"),
    "an activation that there is not": (
        lambda: call(X, W, activation="gelu"),
        r"activation is 'gelu'; expected one of 'none', 'silu'",
    ),
}


def shapes(batch, length, channels, past, *more):
    """Shapes by name; ``more``: bias, initial_state or segment_ids."""
    optional = {
        "bias": (channels,),
        "initial_state": (batch, channels, past),
        "segment_ids": (batch, length),
        "d_final_state": (batch, channels, past),
    }
    return {"x": (batch, length, channels), "weight": (channels, past + 1)} | {name: optional[name] for name in more}


SILU = {"activation": "silu"}
STATE = {"return_final_state": True}

RECORD = ForwardRecord(
    op="causal_conv1d",
    simulate=simulate,
    variants=({}, {"ftz": True}, {"last": True}),
    case=case,
    regimes=SWEPT,
    special=special,
    copies=("final_state",),
    near=Near(
        lambda rng: (positive(rng, 2, 40, 30), positive(rng, 30, 4), positive(rng, 30)),
        STATE,
        off={"y": 8e-7, "final_state": 1.2e-7},
    ),
    faults={
        "with the taps in the other order": Fault(of_kind(0), {"turned": True}, breaks="y"),
        "that begins at zeros": Fault(of_kind(2), {"fresh": True}, breaks="y"),
        "whose segments see each other": Fault(of_kind(3), {"leaks": True}, breaks="y"),
        "whose state lacks the last input": Fault(of_kind(2), {"late": 1}, STATE, breaks="final_state"),
        "accumulated in bfloat16": Fault(of_kind(1), {"low": BF16}, breaks="y"),
        "1 % off": Fault(of_kind(1), {"factor": 1.01}, SILU, breaks="y"),
    },
    large_case=large_case,
    typical=typical,
    hiding={"y truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={
        "plain": Sample(shapes(2, 4, 3, 2)),
        "silu from a state": Sample(shapes(2, 4, 3, 2, "bias", "initial_state"), SILU),
    },
    derived={
        "segments": Sample(shapes(1, 6, 2, 3, "bias", "initial_state", "segment_ids"), SILU),
        "fewer inputs than taps": Sample(shapes(2, 2, 2, 4, "initial_state"), STATE),
    },
    usual=(
        Sample(shapes(2, 70, 72, 3, "bias"), SILU),
        Sample(shapes(2, 70, 72, 3, "initial_state"), STATE, tiling={"block_length": 32, "block_channels": 128}),
        Sample(shapes(2, 40, 33, 2, "segment_ids")),
        Sample(shapes(1, 21, 130, 1)),
    ),
    formula=formula,
    formula_calls={
        "a state": lambda: (
            (normal64(2, 3, 2), normal64(2, 4), normal64(2), normal64(2, 2, 3)),
            {"activation": "silu", "return_final_state": True},
        ),
    },
    formula_tolerance=(1e-12, 1e-14),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=Sample(shapes(2, 9, 7, 3, "bias", "initial_state", "segment_ids"), SILU),
    lowered={
        "with all": Sample(shapes(2, 300, 200, 3, "bias", "initial_state"), SILU | STATE),
        "segments": Sample(shapes(2, 65, 130, 2, "segment_ids")),
        "many taps": Sample(shapes(1, 40, 64, 12)),
    },
    mapped={
        "x": Mapped(Sample({"x": (3, 2, 4, 3), "weight": (3, 3)}, SILU), {"x": 0}),
        "own weights": Mapped(Sample({"x": (3, 2, 4, 3), "weight": (3, 3, 3)}), {"x": 0, "weight": 0}, folds=False),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    twin=Twin("causal_conv1d", sampled=None, package="causal_conv1d"),
    layer=Layer(
        lambda op, x, p: op(x, p["w"], p["b"], activation="silu"),
        lambda width: {"w": (width, 4), "b": (width,)},
    ),
    extents={"batch": 2, "length": 40, "channels": 24, "past": 3},
    launched=Sample(shapes(2, 64, 64, 3, "bias"), SILU),
    past_2_31=past_2_31,
    far=far,
)


# ------------------------------------------------------------------------------------------------------------- gradient
def simulate_vjp(x, weight, d_y, bias=None, initial_state=None, segment_ids=None, d_final_state=None, activation="none",
                 *, ftz=False, low=None, identity=False, turned=False, leaks=False, skips=0, ends=True, of_sum=None,
                 factor=1.0):  # fmt: skip
    """``identity``: without the slope; ``turned``: inputs meet the taps in the other order; ``leaks``: segments see
    each other; ``skips``: positions that sums leave out; ``ends``: with the cotangent of the final state; ``low``: d_z
    is kept in a narrower dtype; ``of_sum``: sums are."""
    acc, past, length = accumulator(x), weight.shape[1] - 1, x.shape[1]
    ids = None if leaks else segment_ids
    z = sums(x, weight, bias, initial_state, segment_ids, ftz=ftz)
    d_z = through(cotangent(d_y, z, activation, ftz=ftz, identity=identity), low) * acc(factor)
    inputs, w = whole_inputs(x, initial_state, past, ftz), flush(weight.astype(acc), ftz)
    w = w[:, ::-1] if turned else w
    d_inputs, d_weight = np.zeros(inputs.shape, acc), np.zeros(weight.shape, acc)
    ones = np.ones(inputs.shape, acc)
    for j in range(past + 1):
        own = np.zeros(inputs.shape, acc)
        own[:, j : j + length] = np.where(met(ones, ids, j, past) > 0, d_z, acc(0))
        d_inputs += own * w[:, j]
        terms = (d_z * met(inputs, ids, j, past))[:, : length - skips]
        d_weight[:, j] = in_blocks(through(terms.reshape(-1, x.shape[2]), of_sum), 1, 0)[0]
    if d_final_state is not None and ends:
        end = np.swapaxes(d_final_state, 1, 2).astype(acc)
        d_inputs[:, length:] += np.where(of_last_segment(segment_ids, past), end, acc(0))
    d_bias = None if bias is None else in_blocks(d_z[:, : length - skips].reshape(-1, x.shape[2]), 1, 0)[0]
    d_state = None if initial_state is None else np.swapaxes(d_inputs[:, :past], 1, 2)
    return d_inputs[:, past:], d_weight, d_bias, d_state


def any_case_vjp(rng, dtype, regime, extents, kind, make=draw):
    x, weight, bias, state, ids = made(rng, dtype, regime, extents, make, kind)
    last = make(rng, (x.shape[0], x.shape[2], weight.shape[1] - 1), dtype, regime)
    return (x, weight, make(rng, x.shape, dtype, regime), bias, state, ids, last), {
        "activation": pick(rng, ACTIVATIONS)
    }


def case_vjp(rng, dtype, regime):
    return any_case_vjp(rng, dtype, regime, [int(rng.integers(1, top)) for top in (4, 24, 40, 6)], int(rng.integers(4)))


def large_case_vjp(rng, dtype, regime):
    return any_case_vjp(rng, dtype, regime, (2, pick(rng, [16, 24]), pick(rng, [65, 80]), 3), 2)


def gradient_of(kind, extents=(2, 40, 24, 3)):
    def arrays(rng, dtype):
        x, weight, bias, state, ids = made(rng, dtype, "normal", extents, draw, kind)
        last = draw(rng, (extents[0], extents[2], extents[3]), dtype) if kind == 2 else None
        return x, weight, draw(rng, x.shape, dtype), bias, state, ids, last

    return arrays


def past_2_31_vjp(gpu):
    torch, (length, channels) = gpu.torch, (16, 32)
    batch = gpu.big // (length * channels) + 16
    x = torch.randn(batch, length, channels, dtype=torch.bfloat16, device=gpu.device)
    weight, picked = gpu.normal(channels, 4, dtype=torch.bfloat16), gpu.rows_to_sample(batch, length * channels)
    d_y = gpu.sampled(x.view(batch, -1), picked).view(x.shape)
    d_x, d_weight = (y for y in gpu.op("causal_conv1d_vjp")(x, weight, d_y) if y is not None)
    assert d_x.numel() > gpu.big
    yield (d_x[picked], d_weight), (x[picked], weight, d_y[picked]), {}


def far_vjp(gpu):
    weight = gpu.normal(300, 4, dtype=gpu.torch.bfloat16)
    yield gpu.far((3, 4, 300)), weight, gpu.far((3, 300, 4)).transpose(1, 2)


def with_cotangent(*extents_and_names):
    found = shapes(*extents_and_names)
    return {"x": found["x"], "weight": found["weight"], "d_y": found["x"]} | found


GRADIENT = GradientRecord(
    op="causal_conv1d_vjp",
    simulate=simulate_vjp,
    variants=({}, {"ftz": True}),
    case=case_vjp,
    regimes=CHECKED,
    near=Near(
        lambda rng: tuple(positive(rng, *shape) for shape in ((2, 40, 30), (30, 4), (2, 40, 30), (30,), (2, 30, 3))),
        off={"d_x": 1e-6, "d_weight": 1e-5, "d_bias": 1e-5, "d_initial_state": 1e-6},
    ),
    faults={
        "without the slope": Fault(gradient_of(1), {"identity": True}, SILU, breaks="d_x"),
        "with the taps in the other order": Fault(gradient_of(0), {"turned": True}, breaks="d_x"),
        "whose segments see each other": Fault(gradient_of(3), {"leaks": True}, breaks="d_weight"),
        "without the last position": Fault(gradient_of(1), {"skips": 1}, breaks="d_bias"),
        "without the cotangent of the state": Fault(
            gradient_of(2, (2, 2, 24, 3)), {"ends": False}, breaks="d_initial_state"
        ),
        "whose sums are of bfloat16": Fault(
            gradient_of(0), {"of_sum": BF16}, breaks="d_weight", dtypes=("float32", "float16")
        ),
    },
    large_case=large_case_vjp,
    typical=lambda rng, dtype: (gradient_of(2, (2, 24, 80, 3))(rng, dtype), {}),
    hiding={"gradients truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES)},
    small={
        "silu": Sample(with_cotangent(2, 4, 3, 2, "bias", "initial_state", "d_final_state"), SILU),
        "one gradient": Sample(with_cotangent(2, 3, 2, 2), wants=("d_weight",)),
    },
    usual=(
        Sample(with_cotangent(2, 70, 72, 3, "bias"), SILU),
        Sample(with_cotangent(2, 40, 33, 2, "initial_state", "d_final_state")),
        Sample(with_cotangent(2, 40, 33, 2, "segment_ids")),
        Sample(with_cotangent(1, 21, 130, 1)),
    ),
    extents=RECORD.extents,
    past_2_31=past_2_31_vjp,
    far=far_vjp,
)
