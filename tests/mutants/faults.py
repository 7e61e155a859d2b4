"""Faults planted in the shipped kernels: what people get wrong, one replacement of source text each.

A fault says how often its text stands in the kernel today, so that a change to the kernel breaks this table loudly instead of emptying it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """One mutation of one kernel.

    Attributes:
      name: unique; backend, op: whose source is changed.
      old, new: the text and its replacement; times: how often ``old`` occurs there.
      what: the mistake in words.
      small: it adds less than 1e-2 to any element on ordinary N(0, 1) data (``python -m tests.mutants`` measures it).
      gpu: it may also run compiled: it touches no memory outside its arguments there.
    """

    name: str
    backend: str
    op: str
    old: str
    new: str
    what: str
    small: bool = False
    times: int = 1
    gpu: bool = True


def _triton(op: str, name: str, what: str, old: str, new: str, **more: object) -> Fault:
    return Fault(f"triton-{op}-{name}", "triton", op, old, new, what, **more)  # type: ignore[arg-type]


FOLD = "    return fold(visit, state, own, keys, pairs,"  # in Triton's attention, where the tiles to visit are known
TRITON_ATTENTION = [
    _triton(
        "attention", "p-truncated", "bfloat16 weights are cut instead of rounded to nearest",
        "        acc = tl.dot(p.to(v_tile.dtype), v_tile,",
        "        if v_tile.dtype == tl.bfloat16:\n            p = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n"
        "        acc = tl.dot(p.to(v_tile.dtype), v_tile,",
        small=True,
    ),
    _triton(
        "attention", "scale-off", "the default scale is 0.3 % too large",
        "    pre, unit = score_unit(call)\n", "    pre, unit = score_unit(call)\n    unit *= 1.003\n", small=True,
    ),
    _triton(
        "attention", "last-key-dropped", "the last key of a long row is masked where the tail tile is ragged",
        "limits(i + (kv_len - q_len), left, right, kv_len)",
        "limits(i + (kv_len - q_len), left, right, kv_len - tl.minimum(kv_len // 129, 1))",
    ),
    _triton(
        "attention", "causal-edge-at-tile", "the first query of a tile sees one key beyond its own where that key ends a tile",
        FOLD,
        "    first, inner_first, inner_last, last = span\n    if right is not None:\n"
        "        seen = tl.minimum(tl.maximum(top + right + 2, 0), kv_len) // plan.block_kv * plan.block_kv\n"
        "        span = first, inner_first, tl.maximum(seen, inner_first), last\n" + FOLD,
        small=True,
    ),
    _triton(
        "attention", "window-off-by-one", "the window is one key short on its left",
        "    pairs = Pairs(i_ok, lo, hi,", "    if left is not None:\n        lo += 1\n    pairs = Pairs(i_ok, lo, hi,",
    ),
    _triton(
        "attention", "window-left-unmasked", "the tile that holds a window's left edge counts as wholly visible",
        FOLD,
        "    first, _, _, last = span\n    if left is not None:\n"
        "        inner_first = tl.minimum(tl.maximum(bottom - left, 0) // plan.block_kv * plan.block_kv, last)\n"
        "        _, _, seen, _ = band(top, bottom, None, right, kv_len, plan.block_kv)\n"
        "        span = first, inner_first, tl.maximum(seen, inner_first), last\n" + FOLD,
    ),
    _triton("attention", "finite-sentinel", "causal, window and tail masks write -1e4 for -inf", '< pairs.hi), s, float("-inf"))', "< pairs.hi), s, -1e4)", small=True),
    _triton(
        "attention", "no-minus-inf-guard", "a tile with no visible key subtracts -inf from -inf",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)', "shift = m_new",
    ),
    _triton("attention", "lse-base-2", "the log-sum-exp takes its logarithm in base 2", "m * scores.unit + tl.log(l)", "m * scores.unit + tl.log2(l)"),
    _triton(
        "attention", "segments-only-on-edges", "segments are compared on edge tiles only",
        's = tl.where(pairs.segment == kv_segment, s, float("-inf"))',
        'if edge:\n                s = tl.where(pairs.segment == kv_segment, s, float("-inf"))',
    ),
    _triton(
        "attention", "acc-bfloat16", "the accumulator of o is rounded to bfloat16 after each tile",
        "out_dtype=plan.acc_dtype)\n    return acc, l, m",
        "out_dtype=plan.acc_dtype).to(tl.bfloat16).to(plan.acc_dtype)\n    return acc, l, m",
        small=True,
    ),
    _triton("attention", "kv-head-modulo", "query head h reads key head h % kv_heads", "head // extents.group", "head % (extents.heads // extents.group)"),
    _triton(
        "attention", "rescale-skipped", "l and o are not rescaled where the maximum grows by little",
        "tl.exp2((m - shift) * scores.rate)",
        "tl.where((m - shift) * scores.rate > -0.01, 1.0, tl.exp2((m - shift) * scores.rate))", small=True,
    ),
    _triton(
        "attention", "l-not-rescaled", "l keeps its unit when the maximum grows in an edge tile",
        "l = l * alpha + tl.sum(p, 1)", "l = l * (1.0 if edge else alpha) + tl.sum(p, 1)",
    ),
    _triton(
        "attention", "bias-stride", "a bias that broadcasts over heads is walked as if it had them",
        "bias += batch * bias_b + head * bias_h", "bias += batch * bias_b + head // extents.group * bias_h",
    ),
    _triton("attention", "tanh-range", "the tanh fraction is used beyond the range where it converges", "tl.abs(x) < 0.5", "tl.abs(x) < 3.5", small=True),
    _triton(
        "attention", "q-prescaled", "q is scaled and rounded to its dtype before the dot, where a bias or a softcap follows",
        "        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=plan.precision, out_dtype=plan.acc_dtype)\n"
        "        if scores.pre is not None:\n            s = s * scores.pre",
        "        qs = q_tile\n        if scores.pre is not None:\n"
        "            qs = (q_tile.to(plan.acc_dtype) * scores.pre).to(q_tile.dtype)\n"
        "        s = tl.dot(qs, tl.trans(k_tile), input_precision=plan.precision, out_dtype=plan.acc_dtype)",
        small=True,
    ),
    _triton(
        "attention", "store-unmasked", "lanes of a head dimension beyond dv are written too",
        "mask=i_ok & (ddv < extents.dv))", "mask=i_ok)", gpu=False,
    ),
    _triton(
        "attention", "v-tail-unmasked", "rows of v beyond the last key are read",
        "j_ok[:, None], keys.dv_ok, edge, plan.ragged_dv)", "j_ok[:, None], keys.dv_ok, False, plan.ragged_dv)",
        gpu=False,
    ),
]  # fmt: skip

TRITON_SOFTMAX = [
    _triton(
        "softmax", "no-minus-inf-guard", "a first tile of nothing but -inf subtracts -inf from -inf",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)', "shift = m_new", small=True,
    ),
    _triton(
        "softmax", "finite-padding", "lanes beyond a short row hold -1e4 instead of -inf",
        'ok = row_ok & (col < n)\n        t = tl.load(x_row + col * x_n, mask=ok, other=float("-inf"))', "ok = row_ok & (col < n)\n        t = tl.load(x_row + col * x_n, mask=ok, other=-1e4)",
        small=True,
    ),
    _triton(
        "softmax", "last-not-summed", "the sum of a long row leaves out its last element",
        "mask=row_ok & (start + col < n), other", "mask=row_ok & (start + col < n - 1), other", small=True,
    ),
    _triton("softmax", "log2e-rounded", "exp is exp2 with log2(e) of five digits", "p = tl.exp(t - tl.max(t, 1)[:, None])", "p = tl.exp2((t - tl.max(t, 1)[:, None]) * 1.4427)", small=True),
    _triton("softmax", "l-not-rescaled", "the running sum keeps its unit when the maximum grows", "l = l * tl.exp(m - shift) + ", "l = l + "),
    _triton(
        "softmax", "p-rounded-before-sum", "the normaliser sums weights already rounded to the output's dtype",
        "(p / tl.sum(p, 1)[:, None])", "(p / tl.sum(p.to(y.dtype.element_ty).to(acc_dtype), 1)[:, None])", small=True,
    ),
    _triton(
        "softmax", "store-truncated", "a bfloat16 result is cut instead of rounded to nearest",
        "        tl.store(y_row + col * y_n, (p / tl.sum(p, 1)[:, None]).to",
        "        p = p / tl.sum(p, 1)[:, None]\n        if y.dtype.element_ty == tl.bfloat16:\n"
        "            p = (p.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n        tl.store(y_row + col * y_n, p.to",
        small=True,
    ),
]  # fmt: skip

TRITON_LAYERNORM = [
    _triton(
        "layernorm", "one-pass-variance", "the variance is E[x^2] - mean^2",
        "tl.rsqrt(tl.sum(d * d, 1) / n + eps)", "tl.rsqrt(tl.maximum(tl.sum(t * t, 1) / n - mean * mean, 0.0) + eps)", small=True,
    ),
    _triton(
        "layernorm", "padding-in-variance", "lanes beyond the row count in the variance",
        "        d = tl.where(ok, t - mean[:, None], 0.0)\n        r =", "        d = t - mean[:, None]\n        r =",
        small=True,
    ),
    _triton("layernorm", "eps-outside", "eps is added to the standard deviation", "tl.rsqrt(tl.sum(d * d, 1) / n + eps)", "1.0 / (tl.sqrt(tl.sum(d * d, 1) / n) + eps)", small=True),
    _triton("layernorm", "mean-over-tile", "the mean divides by the tile's extent", "mean = tl.sum(t, 1) / n", "mean = tl.sum(t, 1) / block_n"),
    _triton("layernorm", "unbiased-variance", "long rows divide the variance by n - 1", "r = tl.rsqrt(total / n + eps)", "r = tl.rsqrt(total / (n - 1) + eps)", small=True),
    _triton(
        "layernorm", "weight-float16", "the weight passes through float16",
        "tl.load(weight + col * weight_n, mask=col < n, other=0.0).to(acc_dtype)", "tl.load(weight + col * weight_n, mask=col < n, other=0.0).to(tl.float16).to(acc_dtype)", small=True,
    ),
    _triton(
        "layernorm", "long-row-padding", "lanes beyond a long row count in the variance",
        "            d = tl.where(ok, t - mean[:, None], 0.0)\n            total", "            d = t - mean[:, None]\n            total", small=True,
    ),
]  # fmt: skip

TRITON_RMSNORM = [
    _triton("rmsnorm", "mean-over-tile", "the mean of squares divides by the tile's extent", "tl.rsqrt(tl.sum(t * t, 1) / n + eps)", "tl.rsqrt(tl.sum(t * t, 1) / block_n + eps)"),
    _triton("rmsnorm", "eps-outside", "eps is added to the root", "tl.rsqrt(tl.sum(t * t, 1) / n + eps)", "1.0 / (tl.sqrt(tl.sum(t * t, 1) / n) + eps)", small=True),
    _triton("rmsnorm", "squares-rounded", "squares are rounded to x's dtype", "tl.rsqrt(tl.sum(t * t, 1) / n + eps)", "tl.rsqrt(tl.sum((t * t).to(x.dtype.element_ty).to(acc_dtype), 1) / n + eps)", small=True),
    _triton("rmsnorm", "last-not-summed", "the sum of a long row leaves out its last element", "other=0.0).to(acc_dtype)\n            total", "other=0.0).to(acc_dtype)\n            t = tl.where(start + col < n - 1, t, 0.0)\n            total"),
]  # fmt: skip

TRITON_MATMUL = [
    _triton(
        "matmul", "tf32-for-ieee", "float32 operands lose 13 bits although precision is ieee",
        "        acc = tl.dot(at, bt, acc,",
        "        if at.dtype == tl.float32:\n            at = (at.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n"
        "            bt = (bt.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)\n        acc = tl.dot(at, bt, acc,",
    ),
    _triton("matmul", "k-tail-unmasked", "one operand is read beyond k", "mask=j_ok & (kk < left)[:, None]", "mask=j_ok", gpu=False),
    _triton("matmul", "group-unclamped", "the last group of row tiles is numbered as if it were full", "min(tiles_m - first_m, group)", "group", gpu=False),
    _triton("matmul", "group-clamped-once", "the last group of row tiles is numbered as if it were full, where it is not the only one", "min(tiles_m - first_m, group)", "min(tiles_m, group)", gpu=False, small=True),
    _triton("matmul", "acc-bfloat16", "the accumulator is rounded to bfloat16 at each step", "input_precision=precision, out_dtype=acc_dtype)\n        a_tile", "input_precision=precision, out_dtype=acc_dtype).to(tl.bfloat16).to(acc_dtype)\n        a_tile"),
    _triton("matmul", "k-tail-short", "the ragged end of k loses its last product", "a_tile, mask=i_ok & (kk < left)", "a_tile, mask=i_ok & (kk < left - (k > 64).to(tl.int64))"),
    _triton("matmul", "batch-stride", "b walks the inner batch axis with a's stride", "inner * b_inner)", "inner * (a_inner if b_inner != 0 else b_inner))", gpu=False),
    _triton("matmul", "rounded-twice", "the result passes through the operands' dtype before out_dtype", "acc.to(c.dtype.element_ty)", "acc.to(a.dtype.element_ty).to(c.dtype.element_ty)"),
    _triton(
        "matmul", "store-truncated", "a bfloat16 result is cut instead of rounded to nearest",
        "    tl.store(c_tile, acc.to(", "    if c.dtype.element_ty == tl.bfloat16:\n        acc = (acc.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)\n    tl.store(c_tile, acc.to(",
    ),
]  # fmt: skip

from .faults_pallas import FAULTS_PALLAS  # noqa: E402  the other tables need Fault
from .faults_pallas_vjp import FAULTS_PALLAS_VJP  # noqa: E402
from .faults_vjp import FAULTS_VJP  # noqa: E402

FAULTS = (
    TRITON_ATTENTION
    + TRITON_SOFTMAX
    + TRITON_LAYERNORM
    + TRITON_RMSNORM
    + TRITON_MATMUL
    + FAULTS_PALLAS
    + FAULTS_VJP
    + FAULTS_PALLAS_VJP
)
