"""c = the sum over blocks of k of (scale_a a) (scale_b b_g), + bias_g, for the rows of a that belong to group g."""

from __future__ import annotations

import numpy as np

import portakern as pk
from portakern.spec.dtypes import numpy_dtype
from tests.ops import scaled_matmul as one
from tests.ops._shared import pick, zeros
from tests.ops.grouped_matmul import cut, ends_among, spans
from tests.ops.record import EIGHT_BITS, Fault, ForwardRecord, Hiding, Layer, Mapped, Near, Sample, Twin

F32, INT = np.float32, np.int32


def simulate(a, b, group_ends, scale_a, scale_b, bias=None, n_width=1, k_width=128, precision="promoted",
             out_dtype=None, *, late=0, shared=False, neighbour=False, scaled_late=0, tail_rows=True,
             **of_one):  # fmt: skip
    """scaled_matmul's simulated kernel on each group.

    ``late``: groups begin and end so many rows later; ``shared``: the last group has the matrix of the one before, and
    ``neighbour``: its scales; ``scaled_late``: the scale of so many blocks before; ``tail_rows``: False: rows of no
    group are multiplied with the last matrix.
    """
    c = np.zeros((len(a), b.shape[-1]), F32)
    for g, rows in enumerate(spans(group_ends)):
        last = g == len(b) - 1
        start, end = (min(x + late, len(a)) for x in (rows.start, rows.stop))
        end = len(a) if last and not tail_rows else end
        if start < end:
            own = slice(start, end)
            of_a, of_b = scale_a if len(scale_a) == 1 else scale_a[own], scale_b[max(g - neighbour, 0) % len(scale_b)]
            (c[own],) = one.simulate(
                a[own], b[g - 1] if shared and last else b[g], of_a, of_b, None if bias is None else bias[g],
                n_width=n_width, k_width=k_width, precision=precision, late=scaled_late, **of_one,
            )  # fmt: skip
    return (c,)


# ------------------------------------------------------------------------------------------------------- calls on NumPy
def made(rng, dtype, ends, m, k, n, widths=(1, 128), regime="normal", shared=(), other=None, bias=False):
    """Rows and as many matrices as ends, scales of both signs, and the widths; ``shared``: (scale, axis) of one
    group's that have the extent 1, and ("groups", 0) where all groups have the same."""
    groups, within = len(ends), tuple(pair for pair in shared if pair[0] != "groups")
    each = [one.made(rng, dtype, m, k, n, (1, *widths), regime, within, other, bias)[0] for _ in range(groups)]
    a, _, of_a = each[0][:3]
    b, of_b = (np.stack([x[i] for x in each]) for i in (1, 3))
    of_b = of_b[:1] if len(within) < len(shared) else of_b
    arrays = a, b, np.asarray(ends), of_a, of_b
    return (*arrays, np.stack([x[4] for x in each])) if bias else arrays, dict(zip(WIDTHS, widths, strict=True))


WIDTHS = ("n_width", "k_width")
GROUPS = (("scale_a", 0), ("scale_a", 1), ("scale_b", 0), ("scale_b", 1))
"""One scale of all rows, and one of each group."""


def case(rng, dtype, regime):
    m, n, k = int(rng.integers(1, 20)), int(rng.integers(1, 20)), int(pick(rng, (1, 7, 64, 300)))
    ends = cut(rng, m, int(rng.integers(1, 4)))
    ends[-1] = max(ends[-1], 1)
    widths = pick(rng, ((1, 128), (3, 16), (128, 128), (1, 32), (4, 9)))
    shared = pick(rng, ((), GROUPS, one.ONE_BLOCK, (("scale_a", 1),), (*GROUPS, ("groups", 0))))
    other = pick(rng, EIGHT_BITS[:2]) if one.kind_of(dtype).floating else dtype
    arrays, options = made(rng, dtype, ends, m, k, n, widths, regime, shared, other, bias=rng.random() < 0.5)
    return arrays, options | {"precision": pick(rng, ("ieee", "promoted", "fast")), "out_dtype": pick(rng, one.OUT)}


def large_case(rng, dtype, regime):
    arrays, options = made(rng, dtype, np.array([9, 24], INT), 24, 200, 20, (4, 64), regime)
    return arrays, options | {"precision": pick(rng, ("ieee", "ieee", "promoted")), "out_dtype": "bfloat16"}


def typical(rng, dtype, **options):
    """Sums of 4096 products, one block of k: where "fast" sums tell from others."""
    arrays, widths = made(rng, dtype, np.array([5, 12], INT), 12, 4096, 12, shared=one.ONE_BLOCK)
    return arrays, {**widths, "out_dtype": "float32", **options}


def in_two(arrays, at):
    """A call of scaled_matmul as one of two groups with the same matrix, which end after ``at`` rows and the last."""
    a, b, of_a, of_b, *bias = arrays
    ends = np.array([at, len(a)], INT)
    return a, np.stack([b, b]), ends, of_a, np.stack([of_b, of_b]), *(np.stack([x, x]) for x in bias)


def some(rng, dtype):
    """Blocks of 16 and columns of 3, scales of which each is its own, two groups and rows of none."""
    arrays = list(made(rng, dtype, np.array([5, 11], INT), 14, 70, 12, (3, 16), bias=True)[0])
    arrays[3] = np.exp2(np.arange(arrays[3].size) % 7).astype(F32).reshape(arrays[3].shape)
    return tuple(arrays)


SOME = {"n_width": 3, "k_width": 16, "out_dtype": "float32"}


# ------------------------------------------------------------------------------------------------ written another way
def formula(a, b, group_ends, scale_a, scale_b, bias=None, **options):
    """Each group by the formula of scaled_matmul."""
    c = np.zeros((len(a), b.shape[-1]))
    for g, rows in enumerate(spans(group_ends)):
        of_a = scale_a if len(scale_a) == 1 else scale_a[rows]
        (c[rows],) = one.formula(a[rows], b[g], of_a, scale_b[g % len(scale_b)], None if bias is None else bias[g],
                                 **options)  # fmt: skip
    return (c,)


def formula_call(widths, shared=(), bias=False):
    ends = np.array([2, 2, 4], INT)
    return made(np.random.default_rng(3), "float8_e4m3fn", ends, 5, 11, 7, widths, shared=shared, bias=bias)


def in_torch(a, b, group_ends, scale_a, scale_b, bias=None, **options):
    """The product of what the codes stand for, in float64 where no dtype is named."""
    import torch

    found = [
        one.in_torch(a[rows], b[g], scale_a if len(scale_a) == 1 else scale_a[rows], scale_b[g % len(scale_b)],
                     None if bias is None else bias[g], **options)
        for g, rows in enumerate(spans(group_ends.detach().cpu().tolist()))
    ]  # fmt: skip
    return torch.cat([*found, found[0].new_zeros(len(a) - sum(map(len, found)), b.shape[-1])])


def in_jax(a, b, group_ends, scale_a, scale_b, bias=None, **options):
    import jax.numpy as jnp

    group = (jnp.arange(a.shape[0])[:, None] >= group_ends).sum(1)[:, None]
    products = (one.in_jax(a, b[g], scale_a, scale_b[g % len(scale_b)], None if bias is None else bias[g], **options)
                for g in range(len(b)))  # fmt: skip
    return sum(jnp.where(group == g, c, 0) for g, c in enumerate(products))


# ------------------------------------------------------------------------------------------------------- random calls
def fuzzed(r, dtype):
    rows, k, n, groups = r.extent(), max(r.extent(), 1), r.extent(), r.extent()
    n_width, k_width = (r.pick((1, 3, 128)) for _ in range(2))
    kind = numpy_dtype(r.pick(EIGHT_BITS))
    a, b = (r.rng.integers(-8, 8, s).astype(kind) for s in ((rows, k), (groups, k, n)))
    shapes = (rows, -(-k // k_width)), (groups, -(-k // k_width), -(-n // n_width))
    scale_a, scale_b = (r.array("float32", *(r.pick((1, e)) for e in shape)) for shape in shapes)
    arrays = {"a": a, "b": b, "group_ends": cut(r.rng, rows, groups), "scale_a": scale_a, "scale_b": scale_b}
    options = {"n_width": n_width, "k_width": k_width, "out_dtype": r.pick(one.OUT)}
    return arrays, options | {"precision": r.pick(("promoted", "ieee", "fast"))}


# ------------------------------------------------------------------------------------------------------------- on a GPU
def past_2_31(gpu):
    torch = gpu.torch
    k = 512
    rows, code = gpu.big // k + 16, torch.float8_e5m2
    a = torch.randint(0, 100, (rows, k), dtype=torch.uint8, device=gpu.device).view(code)
    b, ends = gpu.normal(3, k, 24).to(code), torch.tensor([rows // 3, rows // 3, rows - 5], device=gpu.device)
    assert a.numel() > gpu.big
    of_a, of_b = gpu.normal(rows, 4).abs() + 1, gpu.normal(3, 4, 24).abs() + 1
    picked = gpu.rows_to_sample(rows, k)
    part = a.view(torch.uint8)[picked].view(code)
    found = gpu.op("scaled_grouped_matmul")(a, b, ends, of_a, of_b)[picked]
    yield found, (part, b, ends_among(picked, ends), of_a[picked], of_b), {}


def far(gpu):
    torch = gpu.torch
    ends = torch.tensor([1, 4], dtype=torch.int32, device=gpu.device)
    scales = torch.ones(1, 1, device=gpu.device), torch.ones(1, 1, 1, device=gpu.device)
    yield gpu.far((4, 300), torch.float8_e5m2), gpu.normal(2, 300, 20).to(torch.float8_e5m2), ends, *scales


def in_layer(op, x, p):
    """The first half of all rows and the second have a matrix each, all as codes, with a scale of 1/8 for the rows."""
    rows, name = x.reshape(-1, x.shape[-1]) * 8, str(x.dtype).removeprefix("torch.")
    ends = np.array([len(rows) // 2, len(rows)], INT)
    if hasattr(x, "new_full"):
        import torch

        a, b = (t.detach().to(torch.float8_e4m3fn) for t in (rows, p["w"]))
        scale, ends = torch.full((1, 1), 0.125, device=x.device), torch.as_tensor(ends, device=x.device)
    else:
        import jax
        import jax.numpy as jnp

        a, b = rows.astype("float8_e4m3fn"), p["w"].astype("float8_e4m3fn")
        with jax.ensure_compile_time_eval():  # a constant of the program that is traced, known while it is
            scale, ends = jnp.full((1, 1), 0.125, jnp.float32), jnp.asarray(ends)
    return op(a, b, ends, scale, 8 * scale[None], out_dtype=name).reshape(x.shape)


# ------------------------------------------------------------------------------------------------ what users get wrong
def call(*arrays, **options):
    return pk.op("scaled_grouped_matmul", backend="reference")(*arrays, **options)


P, Q, ENDS = zeros(4, 300, dtype=one.E4M3), zeros(2, 300, 200, dtype=one.E4M3), np.array([1, 4], INT)
ROWS, ALL = np.ones((1, 1), F32), np.ones((1, 1, 1), F32)
WRONG = {
    "operands of 16 bits": (
        lambda: call(zeros(4, 2), zeros(2, 2, 2), ENDS, ROWS, ALL),
        r"a is float32; expected one of float8_e4m3fn, float8_e5m2, int8",
    ),
    "a float and an integer": (
        lambda: call(P, Q.astype(np.int8), ENDS, ROWS, ALL),
        r"a and b must both be 8-bit floats, which may differ, or both int8",
    ),
    "a scale for each of 2 blocks of 300": (
        lambda: call(P, Q, ENDS, zeros(4, 2), ALL),
        r"scale_a axis 1 \(k/k_width\) is 2; expected 3 or 1, as set by a axis 1 and the option k_width",
    ),
    "the scales of one matrix": (
        lambda: call(P, Q, ENDS, ROWS, zeros(3, 200)),
        r"scale_b has 2 axes, shape \(3, 200\); expected 3: \(#groups, #k/k_width, #n/n_width\)",
    ),
    "scales of more groups": (
        lambda: call(P, Q, ENDS, ROWS, zeros(3, 1, 1)),
        r"scale_b axis 0 \(groups\) is 3; expected 2 or 1",
    ),
    "a bias of all groups": (
        lambda: call(P, Q, ENDS, ROWS, ALL, zeros(200)),
        r"bias has 1 axis, shape \(200,\); expected 2: \(groups, n\)",
    ),
    "ends that fall": (
        lambda: call(P, Q, ENDS[::-1].copy(), ROWS, ALL),
        r"group_ends are the rows before which groups end: numbers from 0 to rows, none smaller than the one before",
    ),
    "no products": (
        lambda: call(P[:, :0], Q[:, :0], ENDS, ROWS, ALL),
        r"k is 0 .*; expected at least 1",
    ),
}


def shapes(rows, groups, k, n, widths=(1, 128), bias=False):
    n_width, k_width = widths
    blocks = -(-k // k_width)
    found = {"a": (rows, k), "b": (groups, k, n), "group_ends": (groups,), "scale_a": (rows, blocks),
             "scale_b": (groups, blocks, -(-n // n_width))}  # fmt: skip
    return found | ({"bias": (groups, n)} if bias else {})


def sample(rows, groups, k, n, widths=(1, 128), bias=False, **options):
    """A call; the widths that are not at their defaults are options of it."""
    named = zip(WIDTHS, widths, (1, 128), strict=True)
    return Sample(
        shapes(rows, groups, k, n, widths, bias), {name: w for name, w, usual in named if w != usual} | options
    )


RECORD = ForwardRecord(
    op="scaled_grouped_matmul",
    simulate=simulate,
    variants=({}, {"block": 16}, {"unit": True}),
    case=case,
    regimes=one.RECORD.regimes,
    near=Near(
        lambda rng: in_two(one.near(rng), 11), {"precision": "ieee", "out_dtype": "float32"}, off={"c": 1e-5}
    ),
    faults={
        "a group that begins and ends a row late": Fault(some, {"late": 1}, SOME),
        "the matrix of the group before": Fault(some, {"shared": True}, SOME),
        "the scales of the group before": Fault(some, {"neighbour": True}, SOME),
        "rows of no group multiplied": Fault(some, {"tail_rows": False}, SOME),
        "with the scale of the block before": Fault(some, {"scaled_late": 1}, SOME),
        "with scale_a twice": Fault(some, {"twice": True}, SOME),
        "without its bias": Fault(some, {"biased": False}, SOME),
        "without the last product": Fault(some, {"short": 1}, SOME),
        "fast in place of promoted": Fault(
            lambda rng, dtype: in_two(one.past_unit(rng, dtype), 2), {"precision": "fast", "unit": True},
            {"out_dtype": "float32"}, dtypes=("float32",),
        ),
    },
    large_case=large_case,
    typical=typical,
    hiding={
        "fast for promoted, of typical numbers": Hiding(
            "typical", {"precision": "fast", "unit": True}, dtypes=("float32",)
        ),
        "promoted for ieee, of typical numbers": Hiding(
            "typical", {"precision": "promoted", "unit": True}, options={"precision": "ieee"}, dtypes=one.FLOATS
        ),
    },
    small={"blocks": sample(3, 2, 5, 3, (2, 2)), "rows": sample(3, 2, 3, 2, bias=True)},
    usual=(
        sample(40, 3, 200, 72, (128, 128)),
        sample(33, 2, 96, 64, (1, 32), bias=True, precision="ieee", out_dtype="float32"),
        Sample(shapes(40, 3, 200, 24) | {"scale_a": (1, 1), "scale_b": (3, 1, 1)}),
    ),
    formula=formula,
    formula_calls={
        "blocks": lambda: formula_call((3, 4)),
        "rows beside blocks": lambda: formula_call((3, 4), (("scale_a", 1),), bias=True),
        "groups": lambda: formula_call((1, 128), GROUPS),
    },
    formula_tolerance=(1e-12, 1e-12),
    in_torch=in_torch,
    in_jax=in_jax,
    compared=sample(9, 3, 70, 6, (3, 32), out_dtype="float32"),
    lowered={
        "blocks": sample(130, 3, 300, 200, (128, 128)),
        "rows": Sample(shapes(130, 2, 300, 200, bias=True) | {"scale_a": (130, 1), "scale_b": (2, 1, 200)}),
    },
    mapped={
        "rows": Mapped(
            Sample(shapes(3, 2, 5, 4) | {"a": (2, 3, 5), "scale_a": (2, 3, 1)}), {"a": 0, "scale_a": 0}, folds=False
        ),
    },
    wrong=WRONG,
    fuzzed=fuzzed,
    layer=Layer(in_layer, lambda width: {"w": (2, width, width)}),
    extents={"rows": 64, "groups": 3, "k": 96, "n": 128, "n_width": 1, "k_width": 128},
    launched=sample(64, 2, 64, 64),
    twin=Twin(
        "scaled_grouped_mm",
        sampled=None,  # offs is passed by name
    ),
    matrix_units=True,
    past_2_31=past_2_31,
    far=far,
)  # fmt: skip
