"""DTensors into every op and every twin, cut along every axis: equal to the full arrays, in results and gradients."""

from __future__ import annotations

import functools
import logging

import pytest

from tests.ops import forward_records
from tests.ops.record import Sample

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402

import portakern as pk  # noqa: E402
import portakern.torch as twins  # noqa: E402
from portakern.core.binder import unchecked  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.partitions import partition_rules  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

WORLD = 2


def tensors(record, sample):
    """The arrays of a call by name. Of 8-bit numbers integers: gloo moves no other."""
    numpy = sample.arrays(record.op, "float32" if "float32" in record.spec.dtypes else "float16")
    return {n: frameworks()["torch"].from_numpy(x, None) for n, x in numpy.items()}


def cuts(arrays):
    """Placements of a call: each has all arrays that have an axis cut along it."""
    for axis in range(max(x.dim() for x in arrays)):
        yield [Shard(axis) if axis < x.dim() else Replicate() for x in arrays]


def cuts_of_rules(spec, arrays, options):
    """Placements of a call that its rules name, which need nothing to move."""
    call = unchecked(spec, **arrays, **options)
    for rule in partition_rules(call):
        at = [rule.arrays[n] for n in arrays]
        yield [Replicate() if a is None else Shard(a.axis) for a in at]


def results(call, given):
    """(every result, the gradient of every array that has one)."""
    found = call(*given)
    outputs = [y for y in (found if isinstance(found, tuple | list) else [found]) if isinstance(y, torch.Tensor)]
    watched = [y for y in outputs if y.requires_grad]
    leaves = [x for x in given if x.requires_grad]
    if watched:
        sum((y.double().sin() * (i + 1)).sum() for i, y in enumerate(watched)).backward()
    return outputs, [x.grad for x in leaves]


def gathered(x):
    """The values of a DTensor on all devices."""
    if x.dtype.is_floating_point and x.element_size() == 1:  # which gloo does not move
        form = {"shape": x.shape, "stride": x.stride()}
        return (
            DTensor.from_local(x.to_local().view(torch.uint8), x.device_mesh, x.placements, **form)
            .full_tensor()
            .view(x.dtype)
        )
    return x.full_tensor()


def same(label, call, given, leaves, mesh, placements):
    """A call of DTensors that are placed so gives what the call of the full arrays gives."""
    alone = [x.clone().requires_grad_(i in leaves) for i, x in enumerate(given)]
    cut = [distribute_tensor(x.clone(), mesh, [p], src_data_rank=None) for x, p in zip(given, placements, strict=True)]
    cut = [x.requires_grad_(i in leaves) for i, x in enumerate(cut)]
    (found, theirs), (want, gradients) = results(call, cut), results(call, alone)
    for kind, ours, full in (("result", found, want), ("gradient", theirs, gradients)):
        assert len(ours) == len(full)
        for i, (x, y) in enumerate(zip(ours, full, strict=True)):
            assert (x is None) == (y is None), (label, placements, kind, i)
            if y is not None:
                near = 0.0 if y.element_size() == 1 else 2e-5
                torch.testing.assert_close(
                    gathered(x), y, rtol=near, atol=near, equal_nan=True,
                    msg=lambda m, i=i, kind=kind: f"{label} {placements}, {kind} {i}: {m}",
                )  # fmt: skip


def every_op():
    logging.getLogger("portakern").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (WORLD,))
    for record in forward_records():
        op = pk.op(record.op, backend="reference")
        sample: Sample
        for name, sample in record.small.items():
            arrays = tensors(record, sample)
            names, leaves = [*arrays], {*record.differentiable(sample)} if record.spec.vjp else set()

            def call(*given, op=op, names=names, options=sample.options):
                return op(**dict(zip(names, given, strict=True)), **options)

            given = [*arrays.values()]
            for placements in (*cuts_of_rules(record.spec, arrays, sample.options), *cuts(given)):
                same(f"{record.op} {name}", call, given, leaves, mesh, placements)


FORWARD_ONLY = ("scaled_mm", "scaled_grouped_mm")


def calls_of_twins():
    """(name of a twin, a call of it, its tensors)."""
    rng = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=rng)

    q, k, v, x, w = normal(2, 4, 6, 8), normal(2, 2, 6, 8), normal(2, 2, 6, 8), normal(4, 6, 32), normal(32)
    mask = torch.rand(2, 1, 6, 6, generator=rng) > 0.3
    mask[..., 0] = True
    labels, ends, starts = torch.arange(24) % 32, torch.tensor([3, 3, 9, 24]), torch.tensor([0, 3, 6])
    a, b, scale_a, scale_b = (normal(*s).mul(9).to(torch.int8) for s in ((6, 32), (32, 8), (6, 1), (1, 8)))
    recipe = {"scale_recipe_a": "RowWise", "scale_recipe_b": "RowWise", "output_dtype": torch.float32}
    heads = {"enable_gqa": True}
    yield "scaled_dot_product_attention", lambda f, *t: f(*t, is_causal=True, **heads), (q, k, v)
    yield "scaled_dot_product_attention", lambda f, *t: f(*t, **heads), (q, k, v, mask)
    yield "scaled_dot_product_attention", lambda f, *t: f(*t), (normal(2, 2, 4, 6, 8),) * 3
    yield "softmax", lambda f, x: f(x, -1), (x,)
    yield "logsumexp", lambda f, x: f(x, (0, 2), keepdim=True), (x,)
    yield "layer_norm", lambda f, x, *t: f(x, (32,), *t), (x, w, normal(32))
    yield "layer_norm", lambda f, x, *t: f(x, (6, 32), *t), (x, normal(6, 32))
    yield "rms_norm", lambda f, x, w: f(x, (32,), w), (x, w)
    taps = normal(6, 4), normal(6)
    yield "causal_conv1d", lambda f, *t: f(*t, activation="silu"), (normal(4, 6, 32), *taps)
    yield "embedding", lambda f, *t: f(*t, padding_idx=-2), (labels.reshape(4, 6), normal(32, 8))
    for other in ((32, 16), (4, 32, 8), (32,)):
        yield "matmul", lambda f, *t: f(*t), (x, normal(*other))
    yield "cross_entropy", lambda f, *t: f(*t), (x.reshape(24, 32), labels)
    yield "cross_entropy", lambda f, *t: f(*t), (x.movedim(-1, 1).contiguous(), labels.reshape(4, 6))
    yield "linear_cross_entropy", lambda f, *t: f(*t), (x.reshape(24, 32), normal(40, 32), labels)
    yield "grouped_mm", lambda f, a, b, offs: f(a, b, offs=offs), (x.reshape(24, 32), normal(4, 32, 8), ends.int())
    yield (
        "varlen_attn",
        lambda f, q, k, v, s: f(q, k, v, s, s, 3, 3, **heads),
        (*(t[0].transpose(0, 1).contiguous() for t in (q, k, v)), starts.int()),
    )
    scaled = a, b, scale_a.abs() + 1.0, scale_b.abs() + 1.0
    yield "scaled_mm", lambda f, a, b, s, t: f(a, b, s, scale_b=t, **recipe), scaled
    groups = torch.stack([b, b.roll(1), b.roll(2), -b.clamp(-100)])
    yield (
        "scaled_grouped_mm",
        lambda f, a, b, s, t, offs: f(a, b, s, scale_b=t, offs=offs, **recipe),
        (a, groups, scaled[2], scaled[3].expand(4, 8).contiguous(), torch.tensor([2, 2, 3, 6], dtype=torch.int32)),
    )


def every_twin():
    logging.getLogger("portakern").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (WORLD,))
    for name, arguments, given in calls_of_twins():
        twin = functools.partial(getattr(twins, name), backend="reference")
        leaves = {i for i, x in enumerate(given) if x.is_floating_point() and name not in FORWARD_ONLY}
        for placements in cuts(given):
            same(name, functools.partial(arguments, twin), given, leaves, mesh, placements)


def every_twin_compiled():
    """In one graph, forward and backward, before any eager call has told PyTorch on which placements the op runs."""
    logging.getLogger("portakern").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (WORLD,))
    seen = set()
    for name, arguments, given in calls_of_twins():
        if name not in seen:
            seen.add(name)
            torch._dynamo.reset()  # each call is another function to it of the same code
            twin = functools.partial(getattr(twins, name), backend="reference")
            call = torch.compile(functools.partial(arguments, twin), fullgraph=True, backend="aot_eager")
            leaves = {i for i, x in enumerate(given) if x.is_floating_point() and name not in FORWARD_ONLY}
            same(f"compiled {name}", call, given, leaves, mesh, next(iter(cuts(given))))


def test_every_op_takes_dtensors_cut_along_any_axis():
    on_ranks(every_op, WORLD)


def test_every_twin_takes_dtensors_cut_along_any_axis():
    on_ranks(every_twin, WORLD)


def test_every_twin_is_compiled_with_dtensors_in_one_graph():
    on_ranks(every_twin_compiled, WORLD)


def test_every_twin_is_among_those_that_are_tried():
    assert {name for name, *_ in calls_of_twins()} == {*frameworks()["torch"].twins}
