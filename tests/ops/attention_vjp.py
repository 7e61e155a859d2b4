"""The gradients of attention from q, k, v, o, lse and the cotangents of o and lse.

With P = exp(min(S - lse, 0)) and Delta = sum d_o o - d_lse: dS = P (d_o v^T - Delta), d_q = dS k scale, d_k = dS^T q
scale and
d_v = P^T d_o.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from portakern.api import op
from portakern.spec.dtypes import numpy_dtype
from portakern.specs.attention import allowed
from tests.ops import matmul
from tests.ops._shared import (
    BF16,
    HALVES,
    accumulator,
    draw,
    flush,
    in_order,
    outputs_of,
    pick,
    rounded_tanh,
    through,
    truncate,
)
from tests.ops.record import EVERY, Corner, Fault, GradientRecord, Hiding, Near, Sample

FORWARD = ("q", "k", "v", "bias", "q_segment_ids", "kv_segment_ids")


# ------------------------------------------------------------------------------------------------- the simulated kernel
def simulate(*arrays, block_q=16, block_kv=16, ftz=False, drop=None, factor=1.0, truncate_p=False, truncate_ds=False,
             low=None, tanh=np.tanh, base2=True, forget=(), **options):  # fmt: skip
    """One tile of scores at a time.

    ``base2``: exp is exp2 of scores in units of log 2. ``forget``: terms to leave out.
    """
    call = op("attention_vjp").bind(*arrays, **options)
    arrays, options = call.arrays, call.options
    q, k, v, o, d_o, lse, bias, d_lse = (arrays[n] for n in ("q", "k", "v", "o", "d_o", "lse", "bias", "d_lse"))
    F, (batch, q_len, heads, depth), kv_len = accumulator(q), q.shape, k.shape[1]
    scale = F((1 / np.sqrt(depth) if options["scale"] is None else options["scale"]) * factor)
    d_q, d_k, d_v, d_bias = (None if a is None else np.zeros(a.shape, F) for a in (q, k, v, bias))
    log2e = F(np.log2(np.e))

    def dot(a, b):
        return matmul.simulate(a, b, options["precision"], block=a.shape[-1], ftz=ftz)[0]

    def store(x, cut):
        return truncate(x, q.dtype.name) if cut else x.astype(q.dtype)

    for b, h in np.ndindex(batch, heads):
        kv_head = h // call.dims["group"]
        may, row = allowed(call, b), lse[b, h].astype(F)[:, None] * (log2e if base2 else F(1))
        row = np.where(row == -np.inf, F(np.inf), row)  # no key was seen, or none but by a bias of finfo.min
        delta = flush(d_o[b, :, h].astype(F) * o[b, :, h].astype(F), ftz).sum(1, keepdims=True)
        delta = delta - (0 if d_lse is None or "d_lse" in forget else d_lse[b, h].astype(F)[:, None])
        for i, j in np.ndindex(-(-q_len // block_q), -(-kv_len // block_kv)):
            rows, keys = slice(i * block_q, (i + 1) * block_q), slice(j * block_kv, (j + 1) * block_kv)
            here, qt, gt = may[rows, keys].copy(), q[b, rows, h], d_o[b, rows, h]
            kt, vt = k[b, keys, kv_head], v[b, keys, kv_head]
            if drop is not None and keys.start <= drop < keys.stop:
                here[:, drop - keys.start] = False
            s, slope = dot(qt, kt.T) * scale, F(1)
            if options["softcap"] is not None:
                cap = F(options["softcap"])
                t = tanh(s / cap).astype(F)
                s, slope = cap * t, F(1) if "slope" in forget else F(1) - t * t
            if bias is not None:
                s = s + np.broadcast_to(bias, (batch, heads, q_len, kv_len))[b, h][rows, keys].astype(F)
            apart = np.minimum((s * log2e if base2 else s) - row[rows], F(0))
            p = np.exp2(apart) if base2 else np.exp(apart)
            ds = flush(p, ftz) * (dot(gt, vt.T) - (0 if "delta" in forget else delta[rows]))
            p, ds, capped = (np.where(here, flush(x, ftz), F(0)) for x in (p, ds, ds * slope))
            stored_p, stored_ds = store(p, truncate_p), store(capped, truncate_ds)
            d_q[b, rows, h] = through(d_q[b, rows, h] + dot(stored_ds, kt), low)
            d_k[b, keys, kv_head] = through(d_k[b, keys, kv_head] + dot(stored_ds.T, qt), low)
            d_v[b, keys, kv_head] = through(d_v[b, keys, kv_head] + dot(stored_p.T, gt), low)
            if bias is not None:
                at = d_bias[b % bias.shape[0], h % bias.shape[1], slice(0, 1) if bias.shape[2] == 1 else rows, keys]
                at += ds.sum(0, keepdims=True) if bias.shape[2] == 1 else ds
    return d_q * scale, d_k * scale, d_v, d_bias


# ---------------------------------------------------------------------------------------------------------------- calls
def with_residuals(rng, arrays, options, dtype, regime="normal", lse_too=False):
    """The arguments of the gradient by name: o and lse as the forward oracle gives them, d_o and perhaps d_lse
    drawn.
    """
    o, lse = outputs_of("attention", *(arrays.get(n) for n in FORWARD), **options, return_lse=True)
    more = {"o": o, "lse": lse, "d_o": draw(rng, o.shape, dtype, regime)}
    return arrays | more | ({"d_lse": draw(rng, lse.shape, lse.dtype.name, regime)} if lse_too else {})


def forward_case(rng, dtype, regime, extents, masks):
    """Arrays of a forward call by name, and its options."""
    batch, q_len, kv_len = rng.integers(1, 3), pick(rng, extents), pick(rng, extents)
    kv_heads, group = rng.integers(1, 3), rng.integers(1, 4)
    d, dv = pick(rng, (3, 16, 40)), pick(rng, (3, 16, 40))
    drawn = {
        "is_causal": (0.4, (True,)),
        "window": (0.3, ((3, 0), (None, 2), (5, 5), (0, 0))),
        "scale": (0.5, (0.125, 1.0, -0.3)),
        "softcap": (0.4, (2.0, 30.0)),
        "precision": (0.3 * (dtype == "float32"), ("tf32",)),
    }
    options = {name: pick(rng, values) for name, (share, values) in drawn.items() if rng.random() < share}
    shapes = {
        "q": (batch, q_len, kv_heads * group, d),
        "k": (batch, kv_len, kv_heads, d),
        "v": (batch, kv_len, kv_heads, dv),
    }
    arrays = {name: draw(rng, shape, dtype, regime) for name, shape in shapes.items()}
    if rng.random() < 0.6:
        shape = tuple(1 if rng.random() < 0.33 else n for n in (batch, kv_heads * group, q_len)) + (kv_len,)
        own = "float32" if rng.random() < 0.5 and dtype != "float64" else dtype
        arrays["bias"] = draw(rng, shape, own, pick(rng, masks))
    if rng.random() < 0.3:
        ids = ("q_segment_ids", q_len), ("kv_segment_ids", kv_len)
        arrays |= {name: rng.integers(0, 3, (batch, n)) for name, n in ids}
    return arrays, options


def any_case(rng, dtype, regime, extents, masks):
    arrays, options = forward_case(rng, dtype, regime, extents, masks)
    full = with_residuals(rng, arrays, options, dtype, regime, rng.random() < 0.4)
    return in_order("attention_vjp", full), options


SEEN = ("normal", "mask", "very_negative")


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (1, 5, 16, 33, 64), SEEN)


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (64, 97), (*SEEN, "mask_finfo_min"))


def special(rng, dtype, seed):
    """NaN and infinities in the inputs of the forward call, which its outputs then hold too, and in the cotangents."""
    arrays, options = forward_case(rng, dtype, "normal", (1, 5, 16, 33), SEEN)
    for name in ("q", "k", "v", "bias"):
        if name in arrays and rng.random() < 0.4:
            arrays[name] = arrays[name].copy()
            arrays[name][tuple(rng.integers(n) for n in arrays[name].shape)] = rng.choice([np.nan, np.inf, -np.inf])
    return in_order("attention_vjp", with_residuals(rng, arrays, options, dtype, "special", seed % 2 == 0)), options


def ordinary(rng, dtype, **options):
    """No mask, a float32 bias for each head, grouped queries, a cotangent of lse."""
    q, k, v = (draw(rng, shape, dtype) for shape in ((1, 80, 2, 40), (1, 97, 1, 40), (1, 97, 1, 16)))
    arrays = {"q": q, "k": k, "v": v, "bias": draw(rng, (1, 2, 80, 97), "float32")}
    return in_order("attention_vjp", with_residuals(rng, arrays, options, dtype, lse_too=True))


capped = partial(ordinary, softcap=2.0)
CAP = {"softcap": 2.0}


def one_key_matters(rng, dtype):
    """The last of 65 keys takes most of each query's weight."""
    keys = np.zeros((1, 65, 1, 16))
    keys[:, 64, :, 0] = 3
    arrays = {"q": np.ones((1, 4, 1, 16)), "k": keys, "v": rng.standard_normal((1, 65, 1, 8))}
    arrays = {n: x.astype(numpy_dtype(dtype)) for n, x in arrays.items()}
    return in_order("attention_vjp", with_residuals(rng, arrays, {}, dtype))


def with_finfo_min(rng, dtype):
    """A bias of finfo.min on one query: its keys have weights of 0, or of 1."""
    q, k, v, bias = (draw(rng, shape, dtype) for shape in ((1, 8, 1, 16), (1, 40, 1, 16), (1, 40, 1, 4), (1, 1, 8, 40)))
    bias = bias.astype(np.float32)
    bias[:, :, 3] = np.finfo(np.float32).min
    return in_order("attention_vjp", with_residuals(rng, {"q": q, "k": k, "v": v, "bias": bias}, {}, dtype))


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    heads, d, left = 64, 128, 63
    length, edge = gpu.big // (heads * d) + 64, gpu.big // (heads * d)
    q, k, v = (gpu.normal(1, length, heads, d, dtype=gpu.torch.bfloat16) for _ in range(3))
    band = {"is_causal": True, "window": (left, 0)}
    o, lse = gpu.op("attention")(q, k, v, return_lse=True, **band)
    between = range(left + 1, edge - 2 * left, max(edge // 61, left + 1))
    picked = gpu.torch.tensor([0, *between, edge - 1, length - 1], device=gpu.device)
    assert picked.diff().min() > left  # no key meets two of them
    d_o = gpu.sampled(q[0], picked)[None]
    d_q, d_k, d_v = gpu.op("attention_vjp")(q, k, v, o, lse, d_o, **band)[:3]
    assert d_k.numel() > gpu.big
    for i in picked.tolist():
        row, keys = slice(i, i + 1), slice(max(i - left, 0), i + 1)
        part = (q[:, row], k[:, keys], v[:, keys], o[:, row], lse[..., row], d_o[:, row])
        gradients = (d_q[:, row], d_k[:, keys], d_v[:, keys])
        yield tuple(t.contiguous() for t in gradients), tuple(t.contiguous() for t in part), {}


def far(gpu):
    torch = gpu.torch
    q, d_o, lse = gpu.far((4, 33, 2, 64)), gpu.far((4, 33, 2, 64)), gpu.far((4, 2, 33), torch.float32)
    near = gpu.normal(4, 33, 2, 64, dtype=torch.bfloat16)
    for qkv in ((q, near, near), (near, q, q)):
        o, of_rows = gpu.op("attention")(*qkv, return_lse=True)
        yield *qkv, d_o.copy_(o), lse.copy_(of_rows), d_o  # one far buffer is both o and its cotangent


def saved(batch, q_len, kv_len, heads, kv_heads, d, dv):
    """The shapes of what attention's gradients always take."""
    o = (batch, q_len, heads, dv)
    k, v = ((batch, kv_len, kv_heads, n) for n in (d, dv))
    return {"q": (batch, q_len, heads, d), "k": k, "v": v, "o": o, "lse": (batch, heads, q_len), "d_o": o}


TILES = {"block_q": 128, "block_kv": 128}

RECORD = GradientRecord(
    op="attention_vjp",
    simulate=simulate,
    variants=(
        {},
        {"block_q": 64, "block_kv": 32},
        {"block_q": 512, "block_kv": 512},
        {"ftz": True},
        {"base2": False},
    ),
    case=case,
    regimes=(
        "normal",
        "integers",
        "spikes",
        "wide",
        "constant",
        "large_mean",
        "very_negative",
        "near_overflow",
        "subnormal",
        "special",
    ),
    telling=("normal", "integers", "constant"),
    special=special,
    near=Near(lambda rng: ordinary(rng, "float32"), plant={"factor": 1 + 1.8e-5}),
    faults={
        "delta left out": Fault(capped, {"forget": ("delta",)}, CAP),
        "d_lse left out": Fault(capped, {"forget": ("d_lse",)}, CAP),
        "the softcap's slope left out": Fault(capped, {"forget": ("slope",)}, CAP),
        "scale 3 % off": Fault(capped, {"factor": 1.03}, CAP),
        "scale 10 % off": Fault(capped, {"factor": 1.1}, CAP),
        "a key that is dropped": Fault(one_key_matters, {"drop": 64}, breaks=EVERY),
    },
    corners={
        "a bias of finfo.min poisons no key": Corner(with_finfo_min),
        "a bias of finfo.min poisons no key by exp": Corner(with_finfo_min, variant={"base2": False}),
    },
    large_case=large_case,
    least_z={"d_bias": 0.6},
    typical=lambda rng, dtype, **options: (ordinary(rng, dtype, **options), options),
    hiding={
        "P truncated": Hiding("lean towards 0", {"truncate_p": True}, dtypes=HALVES),
        "D truncated": Hiding("lean towards 0", {"truncate_ds": True}, dtypes=HALVES),
        "scale 0.3 % off": Hiding("typical", {"factor": 1.003}),
        "scale 1e-5 off": Hiding("typical", {"factor": 1 + 1e-5}, dtypes=("float32",)),
        "accumulated in bfloat16": Hiding("typical", {"low": BF16}),
        "tanh of 11 bits": Hiding("typical", {"tanh": rounded_tanh}, options=CAP),
    },
    small={"two gradients": Sample(saved(1, 3, 4, 2, 1, 2, 3), wants=("d_q", "d_v"))},
    usual=(
        Sample(saved(2, 100, 260, 4, 2, 64, 40) | {"d_lse": (2, 4, 100)}),
        Sample(saved(1, 200, 200, 4, 4, 48, 48), {"is_causal": True}, TILES),
        Sample(saved(1, 150, 330, 2, 1, 64, 64), {"window": (100, 30)}, TILES),
        Sample(saved(1, 90, 300, 4, 2, 32, 32) | {"bias": (1, 4, 1, 300)}, {"softcap": 5.0}),
        Sample(saved(2, 128, 256, 2, 2, 64, 64) | {"q_segment_ids": (2, 128), "kv_segment_ids": (2, 256)}),
    ),
    extents={"batch": 2, "q_len": 64, "kv_len": 96, "kv_heads": 2, "group": 2, "d": 64, "dv": 64},
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)
