"""c = the sum over blocks of k of (scale_a a) (scale_b b), + bias."""

from __future__ import annotations

import math

import numpy as np

import portakern as pk
from portakern.spec.dtypes import DTYPES as KINDS
from portakern.spec.dtypes import numpy_dtype
from portakern.specs.scaled_matmul import CUT, RUN, STEP
from tests.ops._shared import pick, sweep, zeros
from tests.ops.record import EIGHT_BITS, Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample, Twin, dtype_for

F32 = np.float32


# ------------------------------------------------------------------------------------------------- the simulated kernel
def below(x, unit):
    """x cut towards 0 to multiples of ``unit``, a power of two."""
    return np.trunc(x / unit) * unit


def in_the_unit(x, y, run):
    """Sums of products as Hopper's matrix unit has them, of at most ``run`` products each, added in float32: a step
    aligns 32 products and the sum before to the largest of them and cuts at 13 bits, then cuts the sum."""
    total = np.zeros((x.shape[0], y.shape[1]), F32)
    for first in range(0, x.shape[1], run):
        acc = np.zeros(total.shape)
        for at in range(first, min(first + run, x.shape[1]), STEP):
            own = slice(at, min(at + STEP, first + run))
            terms = np.concatenate([x[:, own, None].astype(np.float64) * y[None, own], acc[:, None]], 1)
            largest = np.abs(terms).max(1, keepdims=True)
            unit = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1)))) * CUT
            kept = below(terms, unit).sum(1)
            size = np.exp2(np.floor(np.log2(np.where(kept != 0, np.abs(kept), 1)))) * CUT
            acc = np.where(np.isfinite(terms).all(1), below(kept, size), terms.sum(1))
        total = total + acc.astype(F32)
    return total


def in_steps(x, y, block):
    """Sums in float32, ``block`` products after the other; of integers exact."""
    if x.dtype.kind == "i":
        return (x.astype(np.int64) @ y.astype(np.int64)).astype(F32)
    x, y = x.astype(F32), y.astype(F32)
    total = np.zeros((x.shape[0], y.shape[1]), F32)
    for at in range(0, x.shape[1], block):
        total = total + x[:, at : at + block] @ y[at : at + block]
    return total


def simulate(a, b, scale_a, scale_b, bias=None, m_width=1, n_width=1, k_width=128, precision="promoted",
             out_dtype=None, *, unit=False, block=32, late=0, crossed=False, twice=False, inverted=False, short=0,
             scales=True, biased=True):  # fmt: skip
    """``unit``: sums of 13 bits, where the precision permits them; ``block``: products that are summed together.

    Faults: ``late``: the scale of so many blocks before; ``crossed``: scale_b's axes are exchanged; ``twice``: scale_a
    counts twice; ``inverted``: c is divided by it; ``short``: so many products at the end are left out; ``scales``,
    ``biased``: whether those count at all.
    """
    (m, k), n = a.shape, b.shape[1]
    count = max(scale_a.shape[1], scale_b.shape[0])
    width = k_width if count > 1 else k
    row, column = np.arange(m) // m_width, np.arange(n) // n_width
    c, floats = np.zeros((m, n), F32), a.dtype.kind != "i"
    for p in range(count):
        x, y = a[:, p * width : min((p + 1) * width, k - short)], b[p * width : min((p + 1) * width, k - short)]
        seen = max(p - late, 0)
        of_a = scale_a[row % len(scale_a) if len(scale_a) == 1 else row, seen % scale_a.shape[1]][:, None]
        q = column % scale_b.shape[1] if scale_b.shape[1] == 1 else column
        of_b = scale_b[seen % len(scale_b), q]
        if crossed:
            of_b = scale_b[q % len(scale_b), seen % scale_b.shape[1]]
        of_a = of_a * of_a if twice else F32(1) / of_a if inverted else of_a
        if unit and floats and precision != "ieee":
            part = in_the_unit(x, y, RUN if precision == "promoted" else max(k, 1))
        else:
            part = in_steps(x, y, block)
        c = c + (part * (of_a * of_b) if scales else part)
    return (c if bias is None or not biased else c + bias,)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def kind_of(dtype):
    """What stands for a dtype in which other ops are tried."""
    return KINDS[dtype_for("scaled_matmul", dtype)]


def eight(rng, shape, dtype, regime="normal"):
    """Values of one of the op's dtypes."""
    x = sweep(rng, shape, "float32", regime).astype(F32)
    kind = kind_of(dtype)
    x = np.clip(x, -kind.largest, kind.largest) if kind.floating else np.clip(np.rint(x * 20), -128, 127)
    return x.astype(kind.numpy)


def made(rng, dtype, m, k, n, widths=(1, 1, 128), regime="normal", shared=(), other=None, bias=False):
    """Operands, scales of both signs, and the widths; ``shared``: (scale, axis) that have the extent 1."""
    m_width, n_width, k_width = widths
    shape_a, shape_b = [-(-m // m_width), -(-k // k_width)], [-(-k // k_width), -(-n // n_width)]
    for name, axis in shared:
        {"scale_a": shape_a, "scale_b": shape_b}[name][axis] = 1
    of_a, of_b = ((rng.choice([-1, 1], s) * np.exp2(rng.uniform(-4, 4, s))).astype(F32) for s in (shape_a, shape_b))
    arrays = eight(rng, (m, k), dtype, regime), eight(rng, (k, n), other or dtype, regime), of_a, of_b
    arrays = (*arrays, rng.standard_normal(n).astype(F32)) if bias else arrays
    return arrays, {"m_width": m_width, "n_width": n_width, "k_width": k_width}


TENSORS = (("scale_a", 0), ("scale_a", 1), ("scale_b", 0), ("scale_b", 1))
ONE_BLOCK = (("scale_a", 1), ("scale_b", 0))


def case(rng, dtype, regime):
    m, n, k = int(rng.integers(1, 20)), int(rng.integers(1, 20)), int(pick(rng, (1, 7, 64, 300)))
    widths = pick(rng, ((1, 1, 128), (1, 3, 16), (1, 128, 128), (5, 1, 32), (3, 4, 9)))
    shared = pick(rng, ((), TENSORS, ONE_BLOCK, (("scale_a", 1),)))
    other = pick(rng, EIGHT_BITS[:2]) if kind_of(dtype).floating else dtype
    arrays, options = made(rng, dtype, m, k, n, widths, regime, shared, other, bias=rng.random() < 0.5)
    return arrays, options | {"precision": pick(rng, ("ieee", "promoted", "fast")), "out_dtype": pick(rng, OUT)}


OUT = ("bfloat16", "float32", "float16")


def large_case(rng, dtype, regime):
    arrays, options = made(rng, dtype, 24, 200, 20, (1, 4, 64), regime)
    return arrays, options | {"precision": pick(rng, ("ieee", "ieee", "promoted")), "out_dtype": "bfloat16"}


def typical(rng, dtype, **options):
    """Sums of 4096 products, one block of k: where "fast" sums tell from others."""
    arrays, widths = made(rng, dtype, 12, 4096, 12, shared=ONE_BLOCK)
    return arrays, {**widths, "out_dtype": "float32", **options}


def near(rng):
    a, b = (np.abs(eight(rng, s, "float8_e4m3fn").astype(F32)).astype(numpy_dtype("float8_e4m3fn"))
            for s in ((40, 64), (64, 40)))  # fmt: skip
    return a, b, np.ones((1, 1), F32), np.ones((1, 1), F32)


def some(rng, dtype):
    """Blocks of 16 and columns of 3, scales of which each is its own."""
    (a, b, of_a, of_b, bias), _ = made(rng, dtype, 8, 70, 12, (1, 3, 16), bias=True)
    return a, b, np.exp2(np.arange(of_a.size) % 7).astype(F32).reshape(of_a.shape), of_b, bias


def past_unit(rng, dtype):
    """Sums of one sign, long enough to leave 13 bits behind."""
    a, b = (np.abs(eight(rng, s, dtype).astype(F32)).astype(kind_of(dtype).numpy) for s in ((4, 4096), (4096, 4)))
    return a, b, np.ones((1, 1), F32), np.ones((1, 1), F32)


SOME = {"n_width": 3, "k_width": 16, "out_dtype": "float32"}


# ------------------------------------------------------------------------------------------------ written another way
def formula(a, b, scale_a, scale_b, bias=None, m_width=1, n_width=1, k_width=128, **_):
    """Each number by itself: every product times its scales."""
    (m, k), n = a.shape, b.shape[1]
    a, b = a.astype(float), b.astype(float)
    c = np.zeros((m, n))
    for i, j in np.ndindex(m, n):
        terms = [
            a[i, p] * b[p, j]
            * scale_a[min(i // m_width, len(scale_a) - 1), min(p // k_width, scale_a.shape[1] - 1)]
            * scale_b[min(p // k_width, len(scale_b) - 1), min(j // n_width, scale_b.shape[1] - 1)]
            for p in range(k)
        ]  # fmt: skip
        c[i, j] = math.fsum([*terms, 0 if bias is None else bias[j]])
    return (c,)


def formula_call(widths, shared=(), bias=False):
    arrays, options = made(np.random.default_rng(3), "float8_e4m3fn", 5, 11, 7, widths, shared=shared, bias=bias)
    return arrays, options


def in_torch(a, b, scale_a, scale_b, bias=None, m_width=1, n_width=1, k_width=128, precision=None, out_dtype=None):
    """The product of what the codes stand for, in float64 where no dtype is named."""
    import torch

    def dequantised(x, scale, widths):
        x = x.double()
        for axis, width in enumerate(widths):
            if scale.shape[axis] > 1:
                scale = scale.repeat_interleave(width, axis).narrow(axis, 0, x.shape[axis])
        return x * scale

    c = dequantised(a, scale_a, (m_width, k_width)) @ dequantised(b, scale_b, (k_width, n_width))
    c = c if bias is None else c + bias
    return c if out_dtype is None else c.to(getattr(torch, out_dtype))


def in_jax(a, b, scale_a, scale_b, bias=None, m_width=1, n_width=1, k_width=128, precision=None, out_dtype=None):
    import jax.numpy as jnp

    def dequantised(x, scale, widths):
        for axis, width in enumerate(widths):
            if scale.shape[axis] > 1:
                scale = jnp.repeat(scale, width, axis)[tuple(slice(x.shape[i] if i == axis else None) for i in (0, 1))]
        return x.astype(jnp.float32) * scale

    c = dequantised(a, scale_a, (m_width, k_width)) @ dequantised(b, scale_b, (k_width, n_width))
    c = c if bias is None else c + bias
    return c if out_dtype is None else c.astype(out_dtype)


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    m, k, n = r.extent(), max(r.extent(), 1), r.extent()
    m_width, n_width, k_width = (r.pick((1, 3, 128)) for _ in range(3))
    kind = r.pick(EIGHT_BITS)
    a, b = (r.rng.integers(-8, 8, s).astype(numpy_dtype(kind)) for s in ((m, k), (k, n)))
    shapes = (-(-m // m_width), -(-k // k_width)), (-(-k // k_width), -(-n // n_width))
    scale_a, scale_b = (r.array("float32", *(r.pick((1, e)) for e in shape)) for shape in shapes)
    options = {"m_width": m_width, "n_width": n_width, "k_width": k_width}
    arrays = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
    return arrays, options | {"precision": r.pick(("promoted", "ieee", "fast")), "out_dtype": r.pick(OUT)}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    torch = gpu.torch
    k = 512
    rows, code = gpu.big // k + 16, torch.float8_e5m2
    a = torch.randint(0, 100, (rows, k), dtype=torch.uint8, device=gpu.device).view(code)
    b = gpu.normal(k, 24).to(code)
    assert a.numel() > gpu.big
    of_a, of_b = gpu.normal(rows, 4).abs() + 1, gpu.normal(4, 24).abs() + 1
    picked = gpu.rows_to_sample(rows, k)
    part = a.view(torch.uint8)[picked].view(code)
    yield gpu.op("scaled_matmul")(a, b, of_a, of_b)[picked], (part, b, of_a[picked], of_b), {}


def far(gpu):
    torch = gpu.torch
    a = gpu.far((4, 300), torch.float8_e5m2)
    ones = torch.ones(1, 1, device=gpu.device)
    yield a, gpu.normal(300, 20).to(torch.float8_e5m2), ones, ones


def in_layer(op, x, p):
    """Each hidden state times a matrix, both as codes, with a scale of 1/8 for the tensor."""
    rows, name = x.reshape(-1, x.shape[-1]) * 8, str(x.dtype).removeprefix("torch.")
    if hasattr(x, "new_full"):
        import torch

        a, b = (t.detach().to(torch.float8_e4m3fn) for t in (rows, p["w"]))
        scale = torch.full((1, 1), 0.125, device=x.device)
    else:
        import jax.numpy as jnp

        a, b = rows.astype("float8_e4m3fn"), p["w"].astype("float8_e4m3fn")
        scale = jnp.full((1, 1), 0.125, jnp.float32)
    return op(a, b, scale, 8 * scale, out_dtype=name).reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("scaled_matmul", backend="reference")(*arrays, **options)


E4M3, E5M2 = numpy_dtype("float8_e4m3fn"), numpy_dtype("float8_e5m2")
P, Q, ONE = zeros(3, 300, dtype=E4M3), zeros(300, 200, dtype=E4M3), np.ones((1, 1), F32)
WRONG = {
    "operands of 16 bits": (
        lambda: call(zeros(2, 2), zeros(2, 2), ONE, ONE),
        r"a is float32; expected one of float8_e4m3fn, float8_e5m2, int8",
    ),
    "a float and an integer": (
        lambda: call(P, Q.astype(np.int8), ONE, ONE),
        r"a and b must both be 8-bit floats, which may differ, or both int8",
    ),
    "a scale for each of 2 blocks of 300": (
        lambda: call(P, Q, zeros(3, 2), ONE),
        r"scale_a axis 1 \(k/k_width\) is 2; expected 3 or 1, as set by a axis 1 and the option k_width",
    ),
    "weights' blocks without their width": (
        lambda: call(P, Q, zeros(3, 3), zeros(3, 2)),
        r"scale_b axis 1 \(n/n_width\) is 2; expected 200 or 1, as set by b axis 1 and the option n_width",
    ),
    "a scale's axes exchanged": (
        lambda: call(P, Q, zeros(3, 3), zeros(2, 3), n_width=128),
        r"scale_b axis 0 \(k/k_width\) is 2; expected 3 or 1",
    ),
    "a scale of one axis": (
        lambda: call(P, Q, zeros(3), ONE),
        r"scale_a has 1 axis, shape \(3,\); expected 2: \(#m/m_width, #k/k_width\)",
    ),
    "scales of 16 bits": (
        lambda: call(P, Q, zeros(3, 3, dtype=np.float16), ONE),
        r"scale_a is float16; expected float32",
    ),
    "scales of 8 bits": (
        lambda: call(P, Q, zeros(3, 3, dtype=np.uint8), ONE),
        r"scale_a is uint8; expected float32",
    ),
    "an int8 sum beyond int32": (
        lambda: call(zeros(1, 131072, dtype=np.int8), zeros(131072, 1, dtype=np.int8), ONE, ONE),
        r"int32 holds no sum of more than 131071 products of int8",
    ),
    "no products": (
        lambda: call(zeros(3, 0, dtype=E4M3), zeros(0, 2, dtype=E4M3), ONE, ONE),
        r"k is 0 .*; expected at least 1",
    ),
}


def shapes(m, k, n, widths=(1, 1, 128), bias=False):
    m_width, n_width, k_width = widths
    count = -(-k // k_width)
    found = {"a": (m, k), "b": (k, n), "scale_a": (-(-m // m_width), count), "scale_b": (count, -(-n // n_width))}
    return found | ({"bias": (n,)} if bias else {})


def sample(m, k, n, widths=(1, 1, 128), bias=False, **options):
    """A call; the widths that are not at their defaults are options of it."""
    named = zip(("m_width", "n_width", "k_width"), widths, (1, 1, 128), strict=True)
    return Sample(shapes(m, k, n, widths, bias), {n: w for n, w, usual in named if w != usual} | options)


FLOATS = ("float32", "bfloat16")  # of the names by which EIGHT_BITS are asked for

RECORD = ForwardRecord(
    op="scaled_matmul",
    simulate=simulate,
    variants=({}, {"block": 16}, {"unit": True}),
    case=case,
    regimes=("normal", "wide", "large mean", "constant", "rising"),
    near=Near(near, {"precision": "ieee", "out_dtype": "float32"}, off={"c": 1e-5}),
    faults={
        "with the scale of the block before": Fault(some, {"late": 1}, SOME),
        "with scale_b's axes exchanged": Fault(some, {"crossed": True}, SOME),
        "with scale_a twice": Fault(some, {"twice": True}, SOME),
        "that divides by scale_a": Fault(some, {"inverted": True}, SOME),
        "without scales": Fault(some, {"scales": False}, SOME),
        "without its bias": Fault(some, {"biased": False}, SOME),
        "without the last product": Fault(some, {"short": 1}, SOME),
        "fast in place of promoted": Fault(
            past_unit, {"precision": "fast", "unit": True}, {"out_dtype": "float32"}, dtypes=("float32",)
        ),
        "promoted in place of ieee": Fault(
            past_unit, {"precision": "promoted", "unit": True}, {"precision": "ieee", "out_dtype": "float32"},
            dtypes=FLOATS,
        ),
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "fast for promoted, of typical numbers": Hiding(
            "typical", {"precision": "fast", "unit": True}, dtypes=("float32",)
        ),
        "promoted for ieee, of typical numbers": Hiding(
            "typical", {"precision": "promoted", "unit": True}, options={"precision": "ieee"}, dtypes=FLOATS
        ),
    },
    small={"blocks": sample(2, 5, 3, (1, 2, 2)), "rows": sample(2, 3, 2, bias=True)},
    usual=(
        sample(40, 200, 72, (1, 128, 128)),
        sample(33, 96, 64, (1, 1, 32), bias=True, precision="ieee", out_dtype="float32"),
        Sample({"a": (40, 200), "b": (200, 24), "scale_a": (40, 1), "scale_b": (1, 24)}),
    ),
    formula=formula,
    formula_calls={
        "blocks": lambda: formula_call((2, 3, 4)),
        "rows beside blocks": lambda: formula_call((1, 3, 4), (("scale_a", 1),), bias=True),
        "tensors": lambda: formula_call((1, 1, 128), TENSORS),
    },
    formula_tolerance=(1e-12, 1e-12),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=sample(5, 70, 6, (1, 3, 32), out_dtype="float32"),
    lowered={
        "blocks": sample(130, 300, 200, (1, 128, 128)),
        "rows": Sample({"a": (130, 300), "b": (300, 200), "scale_a": (130, 1), "scale_b": (1, 200), "bias": (200,)}),
        "blocks of 32": sample(64, 128, 128, (1, 1, 32), precision="ieee"),
    },
    mapped={
        "rows": Mapped(
            Sample({**shapes(3, 5, 4), "a": (2, 3, 5), "scale_a": (2, 3, 1)}), {"a": 0, "scale_a": 0}, folds=False
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer, lambda width: {"w": (width, width)}),
    extents={"m": 64, "n": 128, "k": 96, "m_width": 1, "n_width": 1, "k_width": 128},
    launched=sample(64, 128, 64),
    twin=Twin(
        "scaled_mm", sampled=None
    ),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip
