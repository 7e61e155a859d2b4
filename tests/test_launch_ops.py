"""Kept launches of the ops themselves: the bits and errors of Triton's own launches, streams, devices, and capture in a
CUDA graph.
"""

import importlib.util
import itertools
from pathlib import Path

import pytest

import portakern as pk
from portakern.core import registry, targets
from portakern.core.binder import unchecked
from portakern.core.framework import frameworks
from portakern.core.targets import Target
from portakern.core.tilings import resolve
from tests.ops import forward_records

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from portakern.backends.triton import launch as launching  # noqa: E402
from portakern.backends.triton import plan  # noqa: E402

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")


class Call:
    interpret = False
    target = Target("cuda", "sm_90")


def benchmark():
    found = importlib.util.spec_from_file_location("launch", Path(__file__).parent.parent / "benchmarks" / "launch.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def served_ops():
    return benchmark().served_ops()


@pytest.mark.parametrize("optional", [False, True], ids=["required", "all"])
@pytest.mark.parametrize("name", served_ops())
def test_small_inputs_fit_every_op(name, optional):
    spec = pk.op(name).spec
    pk.op(name, backend="triton").bind(**benchmark().small_inputs(spec, "cpu", optional=optional))


@pytest.mark.parametrize("name", served_ops())
def test_small_inputs_obey_the_rules_for_values_and_differ(name):
    """What a graph is captured with, and what it is replayed with."""
    spec = pk.op(name).spec
    rules = [rule for rule in spec.require if rule.values]
    first, second = (benchmark().small_inputs(spec, "cpu", seed=seed) for seed in (0, 1))
    for arrays in (first, second):
        call = unchecked(spec, **{n: frameworks()["torch"].to_numpy(a) for n, a in arrays.items()})
        assert all(rule.holds(call) for rule in rules)
    made = [n for n, a in first.items() if n in spec.generators and not a.is_floating_point()]
    assert not made or any(not torch.equal(first[n], second[n]) for n in made)


@pytest.mark.parametrize("name", [r.op for r in forward_records() if r.spec.vjp])
def test_what_is_timed_of_a_training_step_runs(name):
    for step in benchmark().training(name, "cpu").values():
        step()


@pytest.mark.parametrize("name", served_ops())
def test_calls_are_planned_whatever_outputs_they_want(name):
    """In each variant that a Hopper GPU has, with and without the optional arrays and outputs: what is launched stands
    in the form that a plan reads, arrays first."""
    spec, backend, hopper = pk.op(name).spec, registry.backend("triton"), targets.find("sm_90").target
    every = {o.name: True for o in spec.options if o.name.startswith("return_")}
    learned = 0
    for family in (f for f in backend.families if f.name in ("gpu", "hopper") and backend.implementation(name, f)):
        impl = backend.implementation(name, family)
        for optional, more in itertools.product((False, True), [{}, every] if every else [{}]):
            given = benchmark().small_inputs(spec, "cpu", "bfloat16", optional=optional)
            call = unchecked(spec, *(given.get(a.name) for a in spec.arrays), **more)
            call = call.replace(target=hopper, interpret=False)
            try:
                tiling = resolve(impl, call, {}).tiling
            except pk.UnsupportedError:  # such calls are the portable variant's
                assert family.name != "gpu"
                continue
            with launching.recording(lambda *launch: None):
                _, again = plan.learn(impl, call, tiling)
            assert again is not None, (family.name, optional, more)
            learned += 1
    assert learned


def test_the_benchmark_finds_what_an_op_launches():
    op, x = pk.op("softmax", backend="triton"), torch.randn(2, 5)
    for _ in range(3):
        op(x)
    kernel, grid, args, constexprs = benchmark().launched(lambda: op(x))
    assert kernel.__name__ == "softmax_kernel" and grid == 1 and args[0] is x and constexprs["tile"].tiles == 1


@gpu
@pytest.mark.parametrize("optional", [False, True], ids=["required", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", served_ops())
def test_a_captured_op_replays_to_the_bit(name, dtype, optional):
    assert benchmark().replay_differs(name, dtype, optional) == []


@gpu
@pytest.mark.parametrize("name", benchmark().with_lengths())
def test_a_captured_op_replays_with_other_lengths(name):
    """The extents of its typical call, captured once: other starts, lengths and tables each time."""
    extents = benchmark().extents_of_lengths(name)
    assert benchmark().replay_differs(name, "bfloat16", extents=extents, times=4) == []


@gpu
def test_a_kept_launch_gives_the_bits_of_tritons(monkeypatch):
    inputs = {name: benchmark().small_inputs(pk.op(name).spec, "cuda") for name in served_ops()}
    by_us, by_triton = [], []
    for launches in (by_us, by_triton):
        for name, arrays in inputs.items():
            for _ in range(2):
                out = pk.op(name, backend="triton")(**arrays)
            launches += [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
        monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)  # whom Triton alone tells
    assert len(by_us) == len(by_triton) and all(torch.equal(a, b) for a, b in zip(by_us, by_triton, strict=True))


@gpu
def test_later_launches_do_not_go_through_triton(monkeypatch, caplog):
    arrays = {name: benchmark().small_inputs(pk.op(name).spec, "cuda") for name in served_ops()}
    for name in arrays:
        pk.op(name, backend="triton")(**arrays[name])
    monkeypatch.setattr(
        JITFunction, "__getitem__", lambda self, grid: pytest.fail(f"{self.__name__} was launched by Triton again")
    )
    for name in arrays:
        pk.op(name, backend="triton")(**arrays[name])
    torch.cuda.synchronize()
    assert "Triton's own path" not in caplog.text


@gpu
def test_launches_go_to_the_current_stream():
    x, op = torch.randn(512, 4096, device="cuda"), pk.op("softmax", backend="triton")
    want = op(x)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x * 1.0
        y = op(late)  # reads what the stream has not written yet, unless it waits in the same stream
    side.synchronize()
    assert torch.equal(y, want)


@gpu
def test_a_kernel_that_does_not_fit_says_so_every_time():
    from portakern.backends.triton.gpu.matmul import MatmulExtents, MatrixStrides, ProductTile, matmul_kernel

    a = torch.randn(256, 256, device="cuda")
    c = torch.empty_like(a)
    for _ in range(2):
        with pytest.raises(triton.runtime.errors.OutOfResources):
            launching.launch(
                matmul_kernel, 4, Call, a, a, c, MatmulExtents(256, 256, 256, 2, 2, 2, 1), MatrixStrides(0, 0, 256, 1),
                MatrixStrides(0, 0, 256, 1), MatrixStrides(0, 0, 256),
                tile=ProductTile(128, 128, 128, 8, tl.float32, "tf32", True), num_warps=8, num_stages=5,
            )  # fmt: skip


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tensor_on_another_gpu_than_the_current_one():
    op = pk.op("softmax", backend="triton")
    x = torch.randn(64, 300, device="cuda:1")
    want = torch.softmax(x, -1)
    for device in (0, 1, 0):
        with torch.cuda.device(device):
            assert torch.allclose(op(x), want, atol=1e-6) and torch.allclose(
                op(x.to("cuda:0")), want.to("cuda:0"), atol=1e-6
            )
            assert torch.cuda.current_device() == device
