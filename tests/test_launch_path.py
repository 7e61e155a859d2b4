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
from tests.ops.record import dtype_for  # noqa: E402

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
        arrays, options = testing.sample_arrays(op, name, dtype=dtype_for(op, "bfloat16"), seed=0, framework="torch")
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


def warm_norm(driver, **options):
    """A norm that was called often, the arguments, and what compares later calls with these."""
    op = pk.op("rmsnorm", backend="triton", variant="gpu")
    args = torch.randn(4, 8), torch.randn(8)
    for _ in range(WARM):
        driver.call(lambda: op(*args, **options))
    ((match, _),) = op._recent[args[0].shape, args[1].shape]
    return op, args, match


def test_the_signature_of_a_warm_call_is_not_read(driver, monkeypatch):
    op, args, _ = warm_norm(driver, eps=1e-3)
    monkeypatch.setattr(op, "_read", None)
    assert len(driver.call(lambda: op(*args, eps=1e-3))) == 1
    assert len(driver.call(lambda: op(*(x.clone() for x in args), eps=float("1e-3")))) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # nested tensors are a prototype
def test_what_differs_from_a_recent_call_is_not_taken_for_one(driver):
    _, (x, w), match = warm_norm(driver, eps=1e-3)
    assert match(x, w, eps=1e-3) == {"x": x, "weight": w} and match(x.clone(), w.clone(), eps=1e-3)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    others = [
        x[:3], x[:, :4], torch.randn(8, 4).T, x.double(), x.clone().requires_grad_(), torch.nn.Parameter(x), freed,
        torch.complex(x, x).conj().imag, torch._efficientzerotensor(4, 8), x.to("meta"), x.numpy(), None, x[None],
        torch.randn(4, 16)[:, :8], torch.nested.nested_tensor([x[0], x[1, :4]]),
    ]  # fmt: skip
    for other in others:
        assert match(other, w, eps=1e-3) is None, other
    for other in (None, torch.nn.Parameter(w), w.half(), w[:4], torch.nested.nested_tensor([w])):
        assert match(x, other, eps=1e-3) is None, other
    for options in ({}, {"eps": 1e-4}, {"eps": 1e-3, "rounding": "before_weight"}):
        assert match(x, w, **options) is None, options
    with pytest.raises(RuntimeError):  # it has no memory to ask for, as for a signature
        match(x.to_sparse(), w, eps=1e-3)


def test_no_recent_call_hides_a_later_one_from_who_steps_in(driver):
    from torch.autograd import forward_ad
    from torch.utils._python_dispatch import TorchDispatchMode

    _, (x, w), match = warm_norm(driver)
    seen = []

    def told(*_):
        seen.append(match(x, w))
        return x

    for transform in (torch.func.vmap, torch.func.functionalize, lambda f: torch.func.grad(lambda x: f(x).sum())):
        transform(lambda a: told() + a)(x)
    contexts = (
        TorchDispatchMode(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), pk.observe(told),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), forward_ad.dual_level(),
    )  # fmt: skip
    for context in contexts:
        with context:
            told()
    torch.jit.trace(lambda a: told() + a, (x,), check_trace=False)
    assert seen == [None] * 10
    assert match(x, w)


def test_gradients_are_recorded_again_after_a_call_without(driver):
    op = pk.op("softmax", backend="triton", variant="gpu")
    x = torch.randn(4, 8, requires_grad=True)
    for recorded in (True, False, True, False):
        with torch.set_grad_enabled(recorded):
            for _ in range(WARM):
                assert op(x).requires_grad is recorded
    assert len(op._recent[x.shape]) == 2


def test_calls_that_alternate_are_told_apart_up_to_a_number(driver):
    from portakern.core.signatures import ALIKE

    op = pk.op("softmax", backend="triton", variant="gpu")
    forms = [torch.randn(4, 8 * n)[:, :8] for n in range(1, ALIKE + 3)]
    for _ in range(WARM):
        launched = [len(driver.call(lambda: op(x))) for x in forms]  # noqa: B023
    assert launched == [1] * len(forms)
    assert len(op._recent[forms[0].shape]) == ALIKE
    cache.forget()
    assert not op._recent


def test_products_by_many_weights_are_told_apart_by_the_shapes_of_both(driver):
    from portakern.core.signatures import ALIKE

    op = pk.op("matmul", backend="triton", variant="gpu")
    a, weights = torch.randn(4, 16), [torch.randn(16, 16 * n) for n in range(1, ALIKE + 3)]
    for _ in range(WARM):
        for b in weights:
            op(a, b)
    assert [len(op._recent[a.shape, b.shape]) for b in weights] == [1] * len(weights)
