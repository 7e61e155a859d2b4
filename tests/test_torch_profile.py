"""Op calls in PyTorch's profiles, and in its counts of floating-point operations."""

import threading

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from portakern.frameworks.torch import profiling  # noqa: E402
from portakern.torch import swapped  # noqa: E402


def named(events):
    return [e.name for e in events if e.name.startswith("portakern::")]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_call_and_its_gradients_stand_in_a_profile_once_each(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    x, matmul = torch.randn(4, 8, requires_grad=True), pk.op("matmul", backend=backend)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as p:
        (pk.op("softmax", backend=backend)(x) @ x.T).sum().backward()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert matmul(x, b=x.T).dtype == torch.bfloat16
        with pytest.raises(pk.SpecError):
            matmul(x)
        matmul(x.detach(), x.T.detach())
    matmul(x, x.T)
    events = [e for e in p.events() if e.name.startswith("portakern::")]
    names = " ".join(name.removeprefix("portakern::") for name in named(events))
    assert names == "softmax softmax_vjp matmul matmul matmul"
    assert events[2].input_shapes[:2] == [[4, 8], [8, 4]]


def test_calls_of_threads_and_of_kernels_are_named_by_themselves():
    x = torch.randn(2, 3)
    mine = pk.Backend("mine", framework="torch", platforms=["cpu"])

    @mine.implements("softmax")
    def softmax(call, tiling):
        e = call.arrays["x"].exp()
        return (e / pk.op("matmul")(e, torch.ones(3, 3)),)

    with profile(activities=[ProfilerActivity.CPU]) as p:
        pk.op("softmax", backend=mine)(x)
        pk.op("softmax")(np.ones((2, 3), np.float32))
    assert named(p.events()) == ["portakern::softmax", "portakern::matmul", "portakern::softmax"]
    seen = []
    thread = threading.Thread(target=lambda: seen.append(profiling.begun()))
    profiling._state.already = True
    thread.start()
    thread.join()
    assert seen == [False] and profiling.begun() and not profiling.begun()


def test_without_a_profiler_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(profiling, "begun", None)
    monkeypatch.setattr(profiling, "recorded", None)
    assert pk.op("softmax")(torch.randn(2, 3)).shape == (2, 3)


def test_operations_are_counted_as_the_specs_say():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3)
    y = pk.op("softmax")(x)
    with FlopCounterMode(display=False) as counter:
        pk.op("matmul")(x, w).sum().backward()
        y.sum().backward()  # whose forward call nobody counted
    counted = {str(op).partition(".")[2]: n for op, n in counter.get_flop_counts()["Global"].items()}
    vjp = registry.find_spec("softmax").vjp
    assert " ".join(sorted(counted)) == f"matmul matmul_vjp {vjp}"
    assert counted["matmul"] == 2 * 4 * 8 * 3 and counted["matmul_vjp"] == 2 * 4 * 8 * 3  # the gradient of x alone
    layer = torch.nn.Linear(8, 3)
    with FlopCounterMode(display=False) as plain:
        layer(x).sum().backward()
    with FlopCounterMode(display=False) as mine, swapped():
        layer(x).sum().backward()
    assert mine.get_total_flops() == plain.get_total_flops() > 0
    assert sum(mine.get_flop_counts()["Linear"].values()) == plain.get_total_flops()
