"""DTensors: ops on shards, over processes of gloo."""

from __future__ import annotations

import contextlib
import functools
import logging

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.parallel import loss_parallel  # noqa: E402

import portakern as pk  # noqa: E402
import portakern.torch  # noqa: E402
from portakern.core.binder import unchecked  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.partitions import partition_rules  # noqa: E402
from portakern.errors import SpecError  # noqa: E402
from tests.ops import records  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

WORLD = 2
ALL = Replicate()


def made(*shapes, dtype=torch.float32):
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=rng).to(dtype) for s in shapes]


def same(name, arrays, placements, result, gradients=None, mesh=None, **options):
    """The op on DTensors placed so: its results and gradients are those of the full arrays, placed as expected."""
    mesh = mesh or init_device_mesh("cpu", (WORLD,))
    placements, result = ([p if isinstance(p, tuple) else (p,) for p in ps] for ps in (placements, [result]))
    op = pk.op(name, backend="reference")
    full = [a.clone().requires_grad_(gradients is not None) for a in arrays]
    cut = [distribute_tensor(a.clone(), mesh, p) for a, p in zip(arrays, placements, strict=True)]
    cut = [a.requires_grad_(gradients is not None) for a in cut]
    expected, found = op(*full, **options), op(*cut, **options)
    assert found.placements == result[0], (name, options, found.placements)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=2e-6, atol=2e-6)
    if gradients is not None:
        expected.sin().sum().backward()
        found.sin().sum().backward()
        for ours, theirs, placed in zip(cut, full, gradients, strict=True):
            if placed is not None:
                assert ours.grad.placements == (placed if isinstance(placed, tuple) else (placed,)), (
                    ours.grad.placements
                )
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=2e-5, atol=2e-5)


def products_and_norms():
    a, b = made((5, 16), (16, 12))
    same("matmul", (a, b), (Shard(0), ALL), Shard(0), (Shard(0), Partial()))
    same("matmul", (a, b), (ALL, Shard(1)), Shard(1), (Partial(), Shard(1)))
    same("matmul", (a, b), (Shard(1), Shard(0)), Partial(), (Shard(1), Shard(0)))
    x, w = made((3, 7, 32), (32,))  # seven rows on two devices
    same("layernorm", (x, w), (Shard(1), ALL), Shard(1), (Shard(1), Partial()))
    same("softmax", (x,), (Shard(2),), ALL, axis=-1)  # the axis that it works along
    same("softmax", (x,), (Shard(2),), Shard(2), (Shard(2),), axis=1)


def attentions():
    q, k, v = made((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    heads, rows = (Shard(2),) * 3, (Shard(1), ALL, ALL)
    same("attention", (q, k, v), heads, Shard(2), heads, is_causal=True)
    queries = (Shard(1), Partial(), Partial())
    same("attention", (q, k, v), rows, Shard(1), queries)
    same("attention", (q, k, v), rows, ALL, (None,) * 3, is_causal=True)  # no rule of another call is kept for it
    same("attention", (q, k, v), rows, ALL, (None,) * 3, window=(2, 1))
    same("attention", (q, k, v), rows, Shard(1), queries)
    same("attention", (q, k, v), (Shard(0),) * 3, Shard(0), (Shard(0),) * 3, window=(2, None))
    q, k, v = made((2, 6, 6, 8), (2, 6, 3, 8), (2, 6, 3, 8))  # three key heads on two devices
    same("attention", (q, k, v), heads, ALL, (None,) * 3)


def products_of_sequences():
    """Rows that are cut along an axis between the first and the last are no longer one device's if they are flattened:
    products leave them as they are."""
    mesh = init_device_mesh("cpu", (WORLD,))
    x, weight, bias = made((4, 6, 32), (16, 32), (16,))
    cut = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    w, b = (distribute_tensor(t, mesh, [ALL]).requires_grad_() for t in (weight, bias))
    with portakern.torch.swapped(backend="reference"):
        for found in (portakern.torch.matmul(cut, w.mT, backend="reference"), F.linear(cut, w), F.linear(cut, w, b)):
            assert found.placements == (Shard(1),)
            gradients = torch.autograd.grad(found.sum(), [cut, w])
            assert [g.placements for g in gradients] == [(Shard(1),), (Partial(),)]
    torch.testing.assert_close(found.full_tensor(), F.linear(x, weight, bias), rtol=2e-6, atol=2e-6)


def wrong_calls_are_refused_in_the_ops_words():
    mesh, op = init_device_mesh("cpu", (WORLD,)), pk.op("matmul", backend="reference")
    a, b = made((4, 16), (12, 5))
    placed = [distribute_tensor(x, mesh, [ALL]) for x in (a, b)]
    with pytest.raises(SpecError, match=r"b axis -2 \(k\) is 12; expected 16"):
        op(*placed)
    with pytest.raises(SpecError, match="b is a Tensor beside a, a DTensor; place it on the same mesh"):
        op(placed[0], b)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.text = []

    def emit(self, record):
        self.text.append(record.getMessage())


def what_is_gathered_is_said():
    lines = Lines()
    logging.getLogger("portakern").addHandler(lines)
    q, k, v = made((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    same("attention", (q, k, v), (ALL, Shard(1), Shard(1)), ALL, is_causal=True)
    assert "attention: k is cut along axis 1 and gathered: its parts are asked with other" in "\n".join(lines.text)


def calls_of_sums():
    """A call of 16 bits of each op with float32 parts of sums: (op, arrays, options, placements, parts' options)."""
    for record in records().values():
        named = {o.dtype_option for o in record.spec.outputs}
        for sample in record.small.values() if "bfloat16" in record.spec.dtypes else ():
            arrays = {
                n: frameworks()["torch"].from_numpy(a, None) for n, a in sample.arrays(record.op, "bfloat16").items()
            }
            rules = partition_rules(unchecked(record.spec, **arrays, **sample.options))
            rule = next((r for r in rules if {*r.options_at(0, 0)} & named and r.extent >= WORLD), None)
            if rule is not None and not (rule.once or rule.equal) and {*rule.options_at(0, 0)} <= named:
                places = {n: ALL if (at := rule.arrays[n]) is None else Shard(at.axis) for n in arrays}
                yield pk.op(record.op, backend="reference"), arrays, sample.options, places, rule.options
                break


def sums_of_16_bits_are_those_of_float32_parts():
    """Nothing is gathered: devices add float32 parts, and round their sum once."""
    mesh, tried = init_device_mesh("cpu", (WORLD,)), 0
    for op, arrays, options, places, wide in calls_of_sums():
        parts = []
        for rank in range(WORLD):
            own = {n: a.chunk(WORLD, places[n].dim)[rank] if places[n].is_shard() else a for n, a in arrays.items()}
            parts.append(listed(op(**own, **{**options, **wide})))
        cut = {n: distribute_tensor(a, mesh, [places[n]]) for n, a in arrays.items()}
        with CommDebugMode() as sent:
            found = listed(op(**cut, **options))
        assert {str(k).rpartition(".")[2] for k in sent.get_comm_counts()} == {"all_reduce"}, (op, sent.comm_counts)
        for y, full, *own in zip(found, listed(op(**arrays, **options)), *parts, strict=True):
            (at,) = y.placements
            expected = torch.cat(own, at.dim) if at.is_shard() else sum(own)
            assert y.dtype == full.dtype and torch.equal(y.full_tensor(), expected.to(y.dtype)), (op, at)
        tried += 1
    assert tried > 8


def losses_of_classes_are_taken_where_they_lie():
    """Each device takes those of its own classes, as many as it has, inside of loss_parallel() too; what moves between
    devices are three numbers a row."""
    mesh = init_device_mesh("cpu", (WORLD,))
    entropy = functools.partial(portakern.torch.cross_entropy, backend="reference")
    labels = torch.tensor([6, 0, 3, -100, 4])
    for x, aims, axis in ((made((5, 7))[0], labels, 1), (made((5, 7, 3))[0], labels[:, None].expand(5, 3), 1)):
        full = x.clone().requires_grad_()
        expected = F.cross_entropy(full, aims, label_smoothing=0.1)
        expected.backward()
        for inside in (contextlib.nullcontext(), loss_parallel()):
            cut = distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_()
            with inside, CommDebugMode() as sent:
                loss = entropy(cut, aims, label_smoothing=0.1)
                loss.backward()
            assert {str(k) for k in sent.get_comm_counts()} == {"c10d.allgather_"}, sent.comm_counts
            torch.testing.assert_close(loss.full_tensor(), expected, rtol=2e-6, atol=2e-6)
            assert cut.grad.placements == (Shard(axis),)
            torch.testing.assert_close(cut.grad.full_tensor(), full.grad, rtol=2e-5, atol=2e-6)


def listed(outputs):
    """The outputs of a call that are given."""
    return [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]


def lines_of(name, arrays, placements, mesh, gradients=False, **named):
    """What an op says of a call of DTensors that are placed so; nothing is sent."""
    cut = [distribute_tensor(a, mesh, p).requires_grad_(gradients) for a, p in zip(arrays, placements, strict=True)]
    with CommDebugMode() as sent:
        text = pk.op(name, **named).explain(*cut)
    assert not sent.get_total_counts()
    return [line.strip() for line in text.splitlines() if "conversion:" not in line]


def what_would_move_is_explained():
    mesh = init_device_mesh("cpu", (WORLD,))
    a, b = made((4, 16), (16, 12))
    lines = lines_of("matmul", (a, b), ([Shard(1)], [Shard(0)]), mesh, backend="triton")
    assert lines[4:9] == [
        "devices: 2 of cpu",
        "a: Shard(1), stays",
        "b: Shard(0), stays",
        "c: Partial(sum), a sum that is pending: added where it is read",
        "each device runs: matmul(float32; batch=(), m=4, k=8, n=12)",
    ]
    assert "kernels: gpu.matmul.matmul_kernel" in lines
    (moves,) = [x for x in lines_of("softmax", (a,), ([Shard(1)],), mesh) if x.startswith("x: Shard")]
    gathered = "gathered over axis 0 of the devices, 128 bytes more on each device"
    assert moves == f"x: Shard(1) -> Replicate(), {gathered}: softmax is not cut along this axis"
    (moves,) = [x for x in lines_of("matmul", (a, b), ([Shard(0)], [Shard(1)]), mesh) if "->" in x]
    assert moves.endswith("the call is cut along another dimension there")
    pending = DTensor.from_local(torch.ones(4, 8), mesh, [Partial()])
    assert "x: Partial(sum) -> Shard(0), its pending sum is added" in pk.op("softmax").explain(pending)
    x, w = made((2, 6, 8), (8,), dtype=torch.bfloat16)
    lines = lines_of("rmsnorm", (x, w), ([Shard(1)], [ALL]), mesh, gradients=True)
    assert "in the gradients, rmsnorm_vjp:" in lines and not any("->" in x for x in lines)
    assert "d_weight: Replicate(), a sum of float32 parts, added and rounded once" in lines
    lines = lines_of("matmul", [t.bfloat16() for t in (a, b)], ([Shard(1)], [Shard(0)]), mesh)
    assert "c: Replicate(), a sum of float32 parts, added and rounded once" in lines
    assert "each device runs: matmul(bfloat16; batch=(), m=4, k=8, n=12, out_dtype='float32')" in lines


def two_axes_of_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    q = made((2, 6, 4, 8))[0]
    lines = lines_of("attention", (q, q, q), ([Shard(0), Shard(1)], *[[Shard(0), ALL]] * 2), mesh)
    assert "devices: 2 x 2 (data, heads) of cpu" in lines
    assert "q: (Shard(0), Shard(1)), stays" in lines
    lines = lines_of("attention", (q, q, q), ([Shard(0), Shard(1)], *[[Shard(0), Shard(1)]] * 2), mesh)
    (moves,) = [x for x in lines if x.startswith("k: (")]  # to all heads of a device, or to all keys
    assert moves.startswith("k: (Shard(0), Shard(1)) -> (Shard(0), ") and " over heads" in moves
    a, b = made((4, 16), (16, 12))
    same("matmul", (a, b), ((Shard(0), ALL), (ALL, Shard(1))), (Shard(0), Shard(1)),
         ((Shard(0), Partial()), (Partial(), Shard(1))), mesh=mesh)  # fmt: skip
    q, k, v = made((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    both = (Shard(0), Shard(2))
    same("attention", (q, k, v), (both,) * 3, both, (both,) * 3, mesh=mesh, is_causal=True)
    same("attention", (q, k, v), ((Shard(2), Shard(2)),) * 3, (Shard(2), ALL), (None,) * 3, mesh=mesh)  # two key heads


def on_two_devices():
    what_is_gathered_is_said()
    sums_of_16_bits_are_those_of_float32_parts()
    losses_of_classes_are_taken_where_they_lie()
    products_and_norms()
    attentions()
    products_of_sequences()
    what_would_move_is_explained()
    wrong_calls_are_refused_in_the_ops_words()


def test_ops_run_on_shards():
    on_ranks(on_two_devices, WORLD)


def test_a_mesh_of_two_axes():
    on_ranks(two_axes_of_a_mesh, 4)


def one_that_fails():
    if torch.distributed.get_rank():
        raise RuntimeError("this rank has nothing to give")
    torch.distributed.barrier()


def test_a_rank_that_fails_ends_those_that_wait_for_it():
    with pytest.raises(Exception, match="this rank has nothing to give|Connection (closed|reset) by peer"):
        on_ranks(one_that_fails, WORLD, limit=50.0)
