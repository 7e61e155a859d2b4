"""c = the sum over groups of k of scale_b (a q - zeros sum a), + bias."""

from __future__ import annotations

import math

import numpy as np

import portakern as pk
from portakern.spec.dtypes import numpy_dtype
from tests.ops._shared import BF16, F32, HALVES, SWEPT, accumulator, normal64, pick, positive, sweep, whole, zeros
from tests.ops.record import DTYPES, Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample


# ------------------------------------------------------------------------------------------------- the simulated kernel
def codes(b, k, codes_per_byte, unsigned, exchanged=False):
    """The codes (k, n), those of 4 bits one by one; ``exchanged``: the halves of each byte."""
    if codes_per_byte == 1:
        return b.astype(np.int64)
    first = 4 if exchanged else 0
    found = np.stack([(b.astype(np.int64) >> (first if i % 2 == 0 else 4 - first))[i // 2] & 15 for i in range(k)])
    return found if unsigned else np.where(found > 7, found - 16, found)


def simulate(a, b, scale_b, zeros=None, bias=None, k_width=128, codes_per_byte=1, out_dtype=None, *, block=32,
             less_first=False, exchanged=False, unsigned=None, zeroless=False, late=0, twice=False, short=0,
             biased=True, weights=None, low=None):  # fmt: skip
    """``block``: products that are summed together; ``less_first``: zeros are taken from codes, and not from sums.

    Faults: ``exchanged``: the halves of a byte; ``unsigned``: whether codes of 4 bits are; ``zeroless``: zeros count
    nowhere; ``late``: the scale of so many groups before; ``twice``: it counts twice; ``short``: so many products at
    the end are left out; ``biased``: whether the bias counts; ``weights``: the dtype to which each weight is rounded
    before its product; ``low``: that of the accumulator.
    """
    acc, (m, k), n = accumulator(a), a.shape, b.shape[1]
    a = a.astype(acc)
    q = codes(b, k, codes_per_byte, zeros is not None if unsigned is None else unsigned, exchanged).astype(acc)
    count = max(len(scale_b), 1 if zeros is None else len(zeros))
    width, c = k_width if count > 1 else k, np.zeros((m, n), acc)
    with np.errstate(all="ignore"):
        for first in range(0, k, width):
            p, end = first // width, min(first + width, k - short)
            s = scale_b[min(max(p - late, 0), len(scale_b) - 1)].astype(acc)
            z = acc(0) if zeros is None or zeroless else zeros[min(p, len(zeros) - 1)].astype(acc)
            s = s * s if twice else s
            for at in range(first, end, block):
                x, w = a[:, at : min(at + block, end)], q[at : min(at + block, end)]
                if weights is not None:
                    part = x @ (s * (w - z)).astype(weights).astype(acc)
                elif less_first or zeros is None:
                    part = s * (x @ (w - z))
                else:
                    part = s * (x @ w - z * x.sum(1, keepdims=True))
                c = (c + part) if low is None else (c + part).astype(low).astype(acc)
    return (c if bias is None or not biased else c + bias.astype(acc),)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def made(rng, dtype, m, k, n, width=32, codes_per_byte=1, regime="normal", given=(), shared=False):
    """Rows, bytes, scales of both signs, and what is given of zeros and bias; scales are float32 now and then."""
    own = "float32" if rng.random() < 0.5 and dtype != "float64" else dtype
    groups = 1 if shared else -(-k // width)
    b = rng.integers(-128, 128, (-(-k // codes_per_byte), n)).astype(np.int8)
    scale = (rng.choice([-1, 1], (groups, n)) * np.exp2(rng.uniform(-4, 4, (groups, n)))).astype(numpy_dtype(own))
    zero = rng.integers(0, 16, (groups, n)).astype(numpy_dtype(own)) if "zeros" in given else None
    bias = rng.standard_normal(n).astype(numpy_dtype(own)) if "bias" in given else None
    arrays = [sweep(rng, (m, k), dtype, regime), b, scale, zero, bias]
    while arrays[-1] is None:
        arrays.pop()
    return tuple(arrays), {"k_width": width, "codes_per_byte": codes_per_byte}


def case(rng, dtype, regime):
    m, n, k = int(rng.integers(1, 20)), int(rng.integers(1, 20)), int(pick(rng, (1, 7, 64, 300, 1024)))
    given = [name for name in ("zeros", "bias") if rng.random() < 0.5]
    arrays, options = made(rng, dtype, m, k, n, pick(rng, (16, 32, 128)), pick(rng, (1, 2)), regime, given,
                           rng.random() < 0.3)  # fmt: skip
    return arrays, options | pick(rng, ({}, {"out_dtype": "float32"}))


def large_case(rng, dtype, regime):
    arrays, options = made(rng, dtype, 24, 200, 20, 64, pick(rng, (1, 2)), regime)
    return arrays, options | ({} if rng.random() < 0.6 else {"out_dtype": "float32"})


def typical(rng, dtype, **options):
    arrays, widths = made(rng, dtype, 48, 256, 48, 64)
    return arrays, widths | options


def some(codes_per_byte=1, given=(), k=70):
    """Groups of 16, scales of which each is its own."""

    def arrays(rng, dtype):
        (a, b, scale, *rest), _ = made(rng, dtype, 8, k, 12, 16, codes_per_byte, given=given)
        return a, b, np.exp2(np.arange(scale.size) % 7).astype(F32).reshape(scale.shape), *rest

    return arrays


def of_one_sign(rng, dtype):
    """Long sums, in which a rounding of each weight leans nowhere but adds up to more than those of the sums."""
    a, b = positive(rng, 4, 2048).astype(numpy_dtype(dtype)), rng.integers(64, 128, (2048, 8)).astype(np.int8)
    return a, b, (1 + rng.random((16, 8))).astype(F32)


def near(rng):
    return positive(rng, 40, 64), np.abs(whole(rng, (64, 40), "int8", 100)), np.ones((1, 40), F32)


# ------------------------------------------------------------------------------------------------ written another way
def formula(a, b, scale_b, zeros=None, bias=None, k_width=128, codes_per_byte=1, **_):
    """Each number by itself: every product with a weight."""
    (m, k), n = a.shape, b.shape[1]
    q = codes(b, k, codes_per_byte, zeros is not None)
    c = np.zeros((m, n))
    for i, j in np.ndindex(m, n):
        terms = []
        for p in range(k):
            of_scale, of_zero = (
                0.0 if x is None else float(x[min(p // k_width, len(x) - 1), j]) for x in (scale_b, zeros)
            )
            terms.append(float(a[i, p]) * of_scale * (float(q[p, j]) - of_zero))
        c[i, j] = math.fsum([*terms, 0 if bias is None else float(bias[j])])
    return (c,)


def formula_call(width, codes_per_byte=1, given=(), shared=False):
    (a, *rest), options = made(
        np.random.default_rng(3), "float64", 5, 11, 7, width, codes_per_byte, given=given, shared=shared
    )
    return (normal64(*a.shape), *rest), options


def in_torch(a, b, scale_b, zeros=None, bias=None, k_width=128, codes_per_byte=1, out_dtype=None):
    """The product with the weights, in float64 where no dtype is named."""
    import torch

    k, q = a.shape[1], b.long()
    if codes_per_byte == 2:
        q = torch.stack([q & 15, q >> 4 & 15], 1).flatten(0, 1)[:k]
        q = q if zeros is not None else (q ^ 8) - 8

    def spread(x):
        return x.double().repeat_interleave(k_width, 0)[:k] if len(x) > 1 else x.double()

    weight = spread(scale_b) * (q if zeros is None else q - spread(zeros))
    c = a.double() @ weight
    return (c if bias is None else c + bias).to(a.dtype if out_dtype is None else getattr(torch, out_dtype))


def in_jax(a, b, scale_b, zeros=None, bias=None, k_width=128, codes_per_byte=1, out_dtype=None):
    import jax.numpy as jnp

    k, q = a.shape[1], b.astype(jnp.int32)
    if codes_per_byte == 2:
        q = jnp.stack([q & 15, q >> 4 & 15], 1).reshape(-1, b.shape[1])[:k]
        q = q if zeros is not None else (q ^ 8) - 8

    def spread(x):
        return jnp.repeat(x, k_width, 0)[:k] if len(x) > 1 else x

    weight = spread(scale_b) * (q if zeros is None else q - spread(zeros))
    c = a @ weight.astype(a.dtype)
    return (c if bias is None else c + bias).astype(out_dtype or a.dtype)


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    m, k, n = r.extent(), max(r.extent(), 1), r.extent()
    width, packed = r.pick((2, 32, 128)), r.pick((1, 2))
    groups, own = r.pick((1, -(-k // width))), r.pick((dtype, "float32")) if dtype != "float64" else dtype
    b = r.rng.integers(-128, 128, (-(-k // packed), n)).astype(np.int8)
    arrays = {"a": r.array(dtype, m, k), "b": b, "scale_b": r.array(own, groups, n)}
    for name, shape in (("zeros", (groups, n)), ("bias", (n,))):
        if r.pick((True, False)):
            arrays[name] = r.array(own, *shape)
    return arrays, {"k_width": width, "codes_per_byte": packed, "out_dtype": r.pick((None, *DTYPES))}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    torch = gpu.torch
    rows, k = gpu.big // 512 + 16, 512
    a = torch.randn(rows, k, dtype=torch.bfloat16, device=gpu.device)
    assert a.numel() > gpu.big
    b = torch.randint(-128, 128, (k // 2, 24), dtype=torch.int8, device=gpu.device)
    scale, picked = gpu.normal(4, 24), gpu.rows_to_sample(rows, k)
    found = gpu.op("weight_only_matmul")(a, b, scale, codes_per_byte=2)
    yield found[picked], (a[picked], b, scale), {"codes_per_byte": 2}


def far(gpu):
    torch = gpu.torch
    b = torch.randint(-128, 128, (300, 20), dtype=torch.int8, device=gpu.device)
    yield gpu.far((4, 300)), b, gpu.normal(3, 20)


def in_layer(op, x, p):
    """Each hidden state times a matrix as codes, in 32nds."""
    rows, name = x.reshape(-1, x.shape[-1]), str(x.dtype).removeprefix("torch.")
    if hasattr(x, "new_full"):
        import torch

        rows, weight = rows.detach(), p["w"].detach()
        b = (weight * 32).round().clamp(-127, 127).to(torch.int8)
        scale = torch.full((1, weight.shape[1]), 1 / 32, device=x.device)
    else:
        import jax
        import jax.numpy as jnp

        rows, weight = (jax.lax.stop_gradient(t) for t in (rows, p["w"]))
        b = jnp.clip(jnp.round(weight * 32), -127, 127).astype(jnp.int8)
        scale = jnp.full((1, weight.shape[1]), 1 / 32, jnp.float32)
    return op(rows, b, scale, out_dtype=name).reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("weight_only_matmul", backend="reference")(*arrays, **options)


X, Q, S = zeros(3, 300), zeros(300, 4, dtype=np.int8), zeros(3, 4)
WRONG = {
    "unsigned bytes": (lambda: call(X, Q.astype(np.uint8), S), r"b is uint8; expected one of int8"),
    "rows of codes": (
        lambda: call(X.astype(np.int8), Q, S),
        r"a is int8; expected one of float32, float16, bfloat16, float64",
    ),
    "weights that are numbers": (lambda: call(X, X.T, S), r"b is float32; expected one of int8"),
    "scales by columns and groups": (
        lambda: call(X, Q, S.T),
        r"scale_b axis 0 \(k/k_width\) is 4; expected 3 or 1, as set by a axis 1 and the option k_width",
    ),
    "zeros of other groups": (
        lambda: call(X, Q, S, zeros(2, 4)),
        r"zeros axis 0 \(k/k_width\) is 2; expected 3 or 1",
    ),
    "pairs of codes that nobody told of": (
        lambda: call(X, Q[:150], S),
        r"b axis 0 \(k/codes_per_byte\) is 150; expected 300, as set by a axis 1 and the option codes_per_byte",
    ),
    "single codes that were told to be pairs": (
        lambda: call(X, Q, S, codes_per_byte=2),
        r"b axis 0 \(k/codes_per_byte\) is 300; expected 150",
    ),
    "codes of 2 bits": (lambda: call(X, Q, S, codes_per_byte=4), r"codes_per_byte is 4; expected an integer in"),
    "a byte with codes of two groups": (
        lambda: call(X, Q[:150], zeros(100, 4), codes_per_byte=2, k_width=3),
        r"k_width must be even where two codes share a byte",
    ),
    "narrower scales": (
        lambda: call(X, Q, S.astype(np.float16)),
        r"scale_b is float16 but a is float32; expected float32",
    ),
    "no products": (
        lambda: call(zeros(3, 0), zeros(0, 4, dtype=np.int8), zeros(1, 4)),
        r"k is 0 .*; expected at least 1",
    ),
}


def shapes(m, k, n, width=128, codes_per_byte=1, given=()):
    groups = -(-k // width)
    found = {"a": (m, k), "b": (-(-k // codes_per_byte), n), "scale_b": (groups, n)}
    return found | {name: (groups, n) if name == "zeros" else (n,) for name in given}


def sample(m, k, n, width=128, codes_per_byte=1, given=(), **options):
    """A call; the extents that are not at their defaults are options of it."""
    usual = {"k_width": (width, 128), "codes_per_byte": (codes_per_byte, 1)}
    named = {name: value for name, (value, default) in usual.items() if value != default}
    return Sample(shapes(m, k, n, width, codes_per_byte, given), named | options)


SIXTEEN = {"k_width": 16, "out_dtype": "float32"}
PAIRS = {**SIXTEEN, "codes_per_byte": 2}

RECORD = ForwardRecord(
    op="weight_only_matmul",
    simulate=simulate,
    variants=({}, {"block": 16}, {"less_first": True}),
    case=case,
    regimes=SWEPT,
    near=Near(near, off={"c": 1e-5}),
    faults={
        "with the halves of bytes exchanged": Fault(some(2), {"exchanged": True}, PAIRS),
        "without the sign of 4 bits": Fault(some(2), {"unsigned": True}, PAIRS),
        "with a sign beside zeros": Fault(some(2, ("zeros",)), {"unsigned": False}, PAIRS),
        "without zeros": Fault(some(2, ("zeros",)), {"zeroless": True}, PAIRS),
        "with the scale of the group before": Fault(some(), {"late": 1}, SIXTEEN),
        "with scales that count twice": Fault(some(), {"twice": True}, SIXTEEN),
        "without the last product": Fault(some(), {"short": 1}, SIXTEEN),
        "without its bias": Fault(some(1, ("bias",)), {"biased": False}, SIXTEEN),
        "weights rounded to 16 bits": Fault(of_one_sign, {"weights": BF16}, {"out_dtype": "float32"}),
        "accumulating in 16 bits": Fault(some(k=700), {"low": BF16}, SIXTEEN),
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "c truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "c accumulated in bfloat16": Hiding("typical", {"low": BF16}),
    },
    small={"groups": sample(2, 6, 3, 4), "pairs": sample(2, 5, 3, 4, 2, ("zeros", "bias"))},
    usual=(
        sample(40, 200, 72),
        sample(33, 96, 64, 32, 2, ("bias",)),
        sample(24, 160, 40, 64, 2, ("zeros",), out_dtype="float32"),
        Sample({"a": (40, 200), "b": (200, 24), "scale_b": (1, 24)}),
    ),
    formula=formula,
    formula_calls={
        "groups": lambda: formula_call(4),
        "pairs": lambda: formula_call(4, 2, ("bias",)),
        "pairs and zeros": lambda: formula_call(6, 2, ("zeros",)),
        "columns": lambda: formula_call(128, 1, ("zeros", "bias"), shared=True),
    },
    formula_tolerance=(1e-12, 1e-12),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=sample(5, 8, 6, 32, 2),
    lowered={
        "groups": sample(130, 300, 200),
        "pairs": sample(130, 300, 200, 128, 2, ("zeros", "bias")),
        "groups of 32": sample(64, 128, 128, 32, 2),
    },
    mapped={"rows": Mapped(Sample({**shapes(3, 5, 4), "a": (2, 3, 5)}), {"a": 0}, folds=False)},
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer, lambda width: {"w": (width, width)}),
    extents={"m": 64, "n": 128, "k": 96, "k_width": 128, "codes_per_byte": 1},
    launched=sample(64, 128, 64),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)
