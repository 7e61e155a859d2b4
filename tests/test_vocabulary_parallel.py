"""Losses whose classes lie on several processes: within the bounds of one device, forward and gradient."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402

import portakern as pk  # noqa: E402
import portakern.torch as twins  # noqa: E402
from portakern.core.oracle import as_float64, oracle  # noqa: E402
from portakern.errors import SpecError  # noqa: E402
from portakern.frameworks.torch import vocabulary  # noqa: E402
from portakern.frameworks.torch.custom_ops import define  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

WORLD, ROWS, WIDTH = 4, 24, 16
CLASSES = {2: [40, 64], 4: [40, 1, 33, 30]}
TOTAL = 104
CASES = {
    "plain": ("float32", {}, 1.0),
    "certain": ("float32", {}, 40.0),
    "smoothed": ("bfloat16", {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 3}, 4.0),
}


def arrays(name):
    """Logits, hidden and weight that have others, labels of which some are ignored, and a cotangent."""
    dtype, options, spread = CASES[name]
    rng = torch.Generator().manual_seed(5)
    x, h, w = (torch.randn(s, generator=rng) for s in ((ROWS, TOTAL), (ROWS, WIDTH), (TOTAL, WIDTH)))
    x = x * spread + 4 * spread
    labels = torch.randint(0, TOTAL, (ROWS,), generator=rng)
    labels[: ROWS // 2] = x.argmax(-1)[: ROWS // 2]
    labels[::5] = options.get("ignore_index", -100)
    dtype = getattr(torch, dtype)
    return x.to(dtype), h.to(dtype), w.to(dtype), labels, torch.rand(ROWS, generator=rng)


def losses(name, group):
    """loss and d_logits; loss, d_hidden and d_weight."""
    x, h, w, labels, d_loss = arrays(name)
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    how = {"classes": CLASSES[count], "backend": "reference", **CASES[name][1]}
    x, w = (t.split(CLASSES[count], dim)[rank].clone().requires_grad_() for t, dim in ((x, 1), (w, 0)))
    loss = twins.vocabulary_parallel_cross_entropy(x, labels, group, **how)
    (d_x,) = torch.autograd.grad(loss, x, d_loss)
    h = h.requires_grad_()
    of_linear = twins.vocabulary_parallel_linear_cross_entropy(h, w, labels, group, **how)
    return loss.detach(), d_x, of_linear.detach(), *torch.autograd.grad(of_linear, (h, w), d_loss)


def wrong_calls():
    """All processes refuse, so that none waits for another."""
    x, _, w, labels, _ = arrays("plain")
    for classes in ([9] * 4, [TOTAL + 0.5] * 4, 9):
        with pytest.raises(
            SpecError, match=r"classes is (9|\[9, .*|\[104.5, .*) and process \d of 4 holds 104; expected"
        ):
            twins.vocabulary_parallel_cross_entropy(x, labels, classes=classes)
    with pytest.raises(SpecError, match=r"labels is torch.float32 \(24,\) beside logits of \(24, 104\)"):
        twins.vocabulary_parallel_cross_entropy(x, labels.float())
    with pytest.raises(SpecError, match="label_smoothing is 2.0; expected a finite number"):
        twins.vocabulary_parallel_cross_entropy(x, labels, label_smoothing=2.0)
    with pytest.raises(SpecError, match="label_smoothing is -0.5; expected a finite number"):
        twins.vocabulary_parallel_linear_cross_entropy(w, w, labels, label_smoothing=-0.5)
    with pytest.raises(SpecError, match=r"weight is torch.float32 \(104, 16\) beside hidden"):
        twins.vocabulary_parallel_linear_cross_entropy(x, w, labels)


def every_case(folder):
    """On each process: what it gets in each case is left in a folder."""
    vocabulary.CHUNK_ROWS, vocabulary.CHUNK_CLASSES = 10, 16
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for name in CASES:
        for group, count in ((None, WORLD), (halves[rank // 2], 2)):
            found, again = losses(name, group), losses(name, group)
            for a, b in zip(found, again, strict=True):
                assert torch.equal(a, b), f"{name}: two runs have other bits"
            if count == WORLD or rank < count:
                torch.save(found, f"{folder}/{name}-{count}-{rank}")
    wrong_calls()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What all processes of all cases found."""
    path = tmp_path_factory.mktemp("losses")
    on_ranks(every_case, WORLD, str(path))
    return path


def numpy(x):
    return x.view(torch.int16).numpy().view("bfloat16") if x.dtype == torch.bfloat16 else x.numpy()


def share(name, found, given, options, off=None):
    """The largest share of its bound that the first result of the full call errs by, or each of a gradient's; ``off``:
    how far what the forward pass gives may be off."""
    call = pk.op(name, backend="reference").bind(**{n: numpy(x) for n, x in given.items()}, **options)
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call).replace(off=off or {}), ref)
    return [
        float(np.max(np.abs(numpy(x).astype(np.float64) - want) / np.where(bound == 0, 1e-300, bound)))
        for x, want, bound in zip(found, ref, bounds, strict=False)
        if x is not None
    ]


def of_forward(given, options):
    """slope as one device finds it, the bound of that, and of lse."""
    arrays = {n: numpy(given[n]) for n in ("hidden", "weight", "labels")}
    call = pk.op("linear_cross_entropy", backend="reference").bind(
        **arrays, return_lse=True, return_slope=True, **options
    )
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call), ref)
    return ref[2], bounds[2], bounds[1]


def of_hidden(found, d_loss, slope, off):
    """The share of what one device's d_hidden may err by: d_loss times the bound of its slope, and one rounding."""
    d_loss = numpy(d_loss)[:, None].astype(np.float64)
    want = d_loss * slope
    bound = d_loss * off + np.abs(want) * (2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-23)
    return float(np.max(np.abs(numpy(found).astype(np.float64) - want) / np.where(bound == 0, 1e-300, bound)))


@pytest.mark.parametrize("count", [2, WORLD])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_classes_are_within_the_bound_of_one_device(folder, name, count):
    import ml_dtypes  # noqa: F401  names bfloat16 to NumPy

    each = [torch.load(f"{folder}/{name}-{count}-{r}") for r in range(count)]
    for other in each[1:]:
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(each[0], other, strict=True)) if i in (0, 2, 3))
    loss, _, of_linear, d_hidden, _ = each[0]
    d_logits, d_weight = torch.cat([e[1] for e in each], 1), torch.cat([e[4] for e in each])
    x, h, w, labels, d_loss = arrays(name)
    options = CASES[name][1]
    ids = labels.to(torch.int64)
    found = share("cross_entropy", [loss], {"logits": x, "labels": ids}, options)
    of_rows = define(pk.op("cross_entropy").spec)
    _, lse, low = of_rows(x, labels, wants="lse,lse_low", backend="reference", **options)
    given = {"logits": x, "labels": ids, "lse": lse, "lse_low": low, "d_loss": d_loss}
    found += share("cross_entropy_vjp", [d_logits], given, options)
    found += share("linear_cross_entropy", [of_linear], {"hidden": h, "weight": w, "labels": ids}, options)
    op = define(pk.op("linear_cross_entropy").spec)
    _, lse, slope, _, low = op(h, w, labels, wants="lse,slope,lse_low", backend="reference", **options)
    given = {"hidden": h, "weight": w, "labels": ids, "lse": lse, "slope": slope, "lse_low": low, "d_loss": d_loss}
    exact, off_slope, off_lse = of_forward(given, options)
    found += [of_hidden(d_hidden, d_loss, exact, off_slope)]
    found += share("linear_cross_entropy_vjp", [None, d_weight], given, options, {"lse": off_lse})
    words = "loss, d_logits; of a linear layer loss, d_hidden, d_weight"
    print(f"{name} on {count}: {words} at", ", ".join(f"{s:.2f}" for s in found))
    assert max(found) <= 1
