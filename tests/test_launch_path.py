"""The way from a call to its kernels: how many files it leads through, what it decides anew, and what a traceback shows
of it. Kernels are compiled ones, on a driver that launches none."""

import gc
import linecache
import sys
import traceback
from types import SimpleNamespace

import pytest

import portakern as pk
from portakern import testing
from portakern.core import cache, dispatch, registry
from portakern.core import plan as plans

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tests.fake_gpu import fake_gpu  # noqa: E402

VARIANTS = [(op, family.name) for op in pk.ops() for family in pk.backends()["triton"].families_with(op)]
WARM = 3  # calls: decided, learned, and one that Triton's maps of its arrays are made in


@pytest.fixture
def driver(monkeypatch):
    with fake_gpu(monkeypatch) as found:
        yield found


def entered(call, driver):
    """The files whose functions a call enters before its first launch, in their order."""
    files, ours = dict[str, None](), __file__

    def profile(frame, event, arg):
        if event == "call" and frame.f_code.co_filename != ours:
            files.setdefault(frame.f_code.co_filename)

    driver.on_launch = lambda: sys.setprofile(None)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        driver.on_launch = lambda: None
    files.pop(sys.modules["tests.fake_gpu"].__file__, None)
    return list(files)


def attention(variant, watched=False, **options):
    op = pk.op("attention", backend="triton", variant=variant)
    q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.bfloat16, requires_grad=watched) for _ in range(3))
    return lambda: op(q, k, v, is_causal=True, **options)


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "differentiated"])
@pytest.mark.parametrize("variant", ["gpu", "hopper"])
def test_a_warm_attention_call_enters_eight_files_before_its_kernel(driver, variant, watched):
    call = attention(variant, watched)
    for _ in range(WARM):
        driver.call(call)
    launched, compiled = len(driver.launches), len(driver.compiled)
    driver.turns.clear()
    files = entered(call, driver)
    assert len(driver.launches) == launched + 1 and len(driver.compiled) == compiled
    assert len(files) <= 8, files
    assert sum(f.startswith("<") for f in files) == 2, files  # what reads the signature, and the launch


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "differentiated"])
def test_a_cold_call_decides_once_who_serves_it(driver, monkeypatch, watched):
    call, asked = attention("gpu", watched), []
    call()  # the first tensor of a process is not known for one

    def noted(function):
        def called(*args):
            of = args[1] if function is dispatch.pick else args[0]
            asked.append((function.__name__, of.spec.name))
            return function(*args)

        return called

    monkeypatch.setattr(plans, "routes", noted(plans.routes))
    monkeypatch.setattr(plans, "pick", noted(plans.pick))
    cache.forget()
    call()
    assert asked == [("routes", "attention"), ("pick", "attention")]
    asked.clear()
    call(), call()
    assert not asked


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "differentiated"])
def test_a_warm_attention_call_enters_eight_files_before_the_interpreter(monkeypatch, watched):
    from portakern.backends.triton import interpreter

    call, run = attention("gpu", watched), interpreter.run

    def stop(*args, **kwargs):
        sys.setprofile(None)
        run(*args, **kwargs)

    monkeypatch.setattr(interpreter, "run", stop)
    for _ in range(WARM):
        call()
    files = entered(call, SimpleNamespace())
    assert 5 <= len(files) <= 8, files


def test_a_traceback_shows_the_launch_that_failed(driver):
    call = attention("gpu")
    for _ in range(WARM):
        call()

    def refuse():
        raise RuntimeError("an illegal memory access was encountered")

    driver.on_launch = refuse
    with pytest.raises(RuntimeError) as caught:
        call()
    text = "".join(traceback.format_exception(caught.value))
    name = "attention(bfloat16; batch=1, q_len=128, kv_heads=2, group=1, d=64, kv_len=128, dv=64, is_causal=True)"
    assert f'File "<launch of {name}>"' in text
    assert "attention_kernel_0(attention_kernel_0_grid, 1, 1, " in text and "at_q, at_k, at_v" in text


def test_the_lines_of_launches_go_with_what_is_remembered(driver):
    op = pk.op("softmax", backend="triton", variant="gpu")
    for n in range(2, 12):
        for _ in range(WARM):
            op(torch.ones(2, n))
    launches = [f for f in linecache.cache if f.startswith("<launch of softmax")]
    assert len(launches) == 10
    cache.forget()
    gc.collect()
    assert not [f for f in linecache.cache if f.startswith("<launch of softmax")]


def test_allocations_take_the_short_way_unless_memory_is_to_be_filled(driver, monkeypatch):
    from portakern.backends.triton import launcher, plan

    quick, here = [], [-1]

    def allocate(shape, strides, dtype):
        assert type(shape) is type(strides) is tuple  # as PyTorch's own expects
        quick.append(shape)
        return torch.empty_strided(shape, strides, dtype=dtype)

    monkeypatch.setattr(plan, "quick_on", lambda device: allocate)
    monkeypatch.setattr(launcher, "current_device", lambda: here[0])
    op, x = pk.op("softmax", backend="triton", variant="gpu"), torch.randn(3, 5)
    for _ in range(WARM):
        y = op(x)
    assert quick == [(3, 5)] and (y.shape, y.stride(), y.dtype) == ((3, 5), (5, 1), torch.float32)
    torch.use_deterministic_algorithms(True)
    try:  # what is allocated is filled, and an element that is not written shows
        assert op(x).isnan().all() and len(quick) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    op(x)
    assert len(quick) == 2


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_a_warm_call_launches_what_its_implementation_did(driver, op, variant, offset):
    """Kernels, grids, numbers and addresses: of inputs, of what is allocated, and of parts of both."""
    made, launches = pk.op(op, backend="triton", variant=variant), 0
    for name in testing.samples(op):
        arrays, options = testing.sample_arrays(op, name, dtype="bfloat16", seed=0, framework="torch")
        arrays = {n: None if a is None else moved(a, offset) for n, a in arrays.items()}
        try:
            calls = [driver.call(lambda: made(**arrays, **options)) for _ in range(5)]  # noqa: B023
        except pk.UnsupportedError:
            continue
        assert calls[1] == calls[2] == calls[3] == calls[4], name
        launches += len(calls[-1])
    assert launches or variant != "gpu"  # the others take few calls


def moved(array, by):
    """The same values, so many elements beyond the beginning of some memory."""
    memory = array.new_empty(by + array.numel())
    return memory[by:].view(array.shape).copy_(array)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_warm_call_launches_on_parts_what_its_implementation_did(driver, gradient):
    loss = registry.find_spec("linear_cross_entropy")
    op, chunk = (str(loss.vjp), "chunk_n") if gradient else (loss.name, "chunk_rows")
    made, dims = (
        pk.op(op, backend="triton", variant="gpu", tiling={chunk: 16}),
        {"batch": (40,), "n": (50,), "d": (64,)},
    )
    arrays = {}
    for a in made.spec.arrays:
        if not made.spec.reads_under(a.name, {}, True):
            continue
        shape = [n for d in a.dims for n in dims[d.factors[0]]]
        dtype = torch.int64 if a.name == "labels" else torch.bfloat16 if "bfloat16" in a.dtypes else torch.float32
        arrays[a.name] = torch.zeros(shape, dtype=dtype)
    calls = [driver.call(lambda: made(**arrays)) for _ in range(5)]
    assert calls[1] == calls[2] == calls[3] == calls[4] and len(calls[1]) > 3
    (plan,) = made.choice.plans.values()
    assert "after0" in plan.serve.__globals__
