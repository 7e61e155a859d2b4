"""Kernels compiled ahead of calls: after ``warm`` the first call compiles nothing, since both ask for the same keys."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import portakern as pk
from portakern import api
from portakern.core import registry, targets
from portakern.core.cache import BoundedCache
from portakern.core.dispatch import Choice
from portakern.core.targets import Target
from portakern.tools.compile import pool, worker
from portakern.tools.compile.build import Build

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from portakern.backends.triton import cache, compiler, launcher, pickled  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.frameworks.torch import custom_ops, functions  # noqa: E402
from portakern.frameworks.torch.arrays import Torch  # noqa: E402
from portakern.frameworks.torch.models import recording as recording_of_models  # noqa: E402

ROOT = Path(__file__).parent.parent
HOPPER = targets.find("sm_90")


class Driver:
    """Triton's part of a machine with an H100, as far as it is asked before a launch."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return tmp_path / "triton"


@pytest.fixture
def on_hopper(monkeypatch):
    """CPU tensors are on an H100, as far as dispatch is concerned; what is decided for them goes with the fixture."""
    monkeypatch.setattr(Torch, "target", lambda self, device: Target("cuda", "sm_90"))
    monkeypatch.setattr(functions, "_ops", {})
    monkeypatch.setattr(api, "_made", BoundedCache())
    custom_ops._choice.cache_clear()
    yield
    custom_ops._choice.cache_clear()


@contextlib.contextmanager
def launched_by_triton():
    """Kernels that are launched inside go through Triton's own launch, as far as a binary: their names, and whether the
    cache had each."""
    found = []
    before, active = knobs.compilation.listener, triton.runtime.driver._active
    knobs.compilation.listener = lambda *, src, cache_hit, **others: found.append((src.name, cache_hit))
    triton.runtime.driver.set_active(Driver())
    try:
        with recording(lambda kernel, grid, args, constexprs: kernel.warmup(*args, grid=(grid,), **constexprs)):
            yield found
    finally:
        knobs.compilation.listener = before
        triton.runtime.driver._active = active


@contextlib.contextmanager
def keys_of_launches():
    """The keys under which launches inside look for their kernels, with these kernels' names."""
    found, target = {}, compiler.gpu_target(HOPPER)

    def launch(kernel, grid, args, constexprs):
        source, options = compiler.specialised(kernel, args, constexprs, HOPPER)
        found[cache.cache_key(source, options, target)] = source.name

    with recording(launch):
        yield found


@pytest.fixture
def planned_keys(monkeypatch):
    """What warm would compile, and it compiles nothing."""
    found, plan = {}, compiler.planned

    def planned(impl, call, config):
        kernels = [k for k in plan(impl, call, config) if k.name]
        found.update({k.key: k.name for k in kernels})
        return [k._replace(is_cached=True) for k in kernels]

    monkeypatch.setattr(compiler, "planned", planned)
    return found


def fresh_op(name):
    """An op for which nothing is decided yet."""
    return api.Op(registry.find_spec(name), Choice())


def meta(*shape, dtype=torch.bfloat16, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


def test_after_warm_the_first_call_and_its_gradients_compile_nothing(folder, on_hopper):
    """Triton's own launch of them finds every kernel in its cache."""
    calls = [functools.partial(pk.op("rmsnorm"), meta(64, 256), meta(256))]
    warmed = pk.warm(calls, target="sm_90", processes=2, progress=False)
    assert warmed.failures == () and warmed.calls == 2 and warmed.compiled == warmed.kernels >= 2

    x, weight = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((64, 256), (256,)))
    with launched_by_triton() as launched:
        fresh_op("rmsnorm")(x, weight).backward(torch.zeros(64, 256, dtype=torch.bfloat16))
    assert len({name for name, _ in launched}) >= 2
    assert all(hit for _, hit in launched), launched

    again = pk.warm(calls, target="sm_90")
    assert (again.calls, again.kernels, again.compiled) == (2, warmed.kernels, 0)
    with launched_by_triton() as launched:  # of another form: the listener does tell
        fresh_op("rmsnorm")(x.detach()[:, :200], weight.detach()[:200])
    assert [hit for _, hit in launched] == [False]


CALLS = {
    "attention": lambda new: (new(1, 128, 4, 64), new(1, 128, 2, 64), new(1, 128, 2, 64)),
    "softmax": lambda new: (new(16, 300),),
    "matmul": lambda new: (new(128, 64), new(64, 192)),
    "swiglu": lambda new: (new(32, 512), new(32, 512)),
    "layernorm": lambda new: (new(32, 512), new(512), new(512)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("train", [False, True])
def test_a_call_asks_for_what_was_planned(name, train, on_hopper, planned_keys):
    pk.warm([functools.partial(pk.op(name), *CALLS[name](meta))], train=train, target="sm_90")
    given = CALLS[name](functools.partial(torch.zeros, dtype=torch.bfloat16, requires_grad=train))
    given = [x if isinstance(x, torch.Tensor) else torch.zeros(x, dtype=torch.bfloat16) for x in given]
    with keys_of_launches() as asked:
        found = fresh_op(name)(*given)
        if train:
            found.backward(torch.zeros_like(found))
    assert asked and asked == planned_keys


def test_strides_and_what_begins_off_16_bytes_count(on_hopper, planned_keys):
    op = pk.op("softmax")
    memory = torch.zeros(64 * 300 + 8, dtype=torch.bfloat16)
    odd = memory[1 : 64 * 256 + 1].view(64, 256)
    pk.warm([functools.partial(op, memory[: 64 * 256].view(64, 256))], train=False, target="sm_90")
    aligned = dict(planned_keys)
    planned_keys.clear()
    pk.warm([functools.partial(op, odd)], train=False, target="sm_90")
    with keys_of_launches() as asked:
        fresh_op("softmax")(odd)
    assert asked == planned_keys and not aligned.keys() & planned_keys.keys()


def test_gradients_are_of_the_arrays_that_require_one(planned_keys):
    def warmed(**options):
        planned_keys.clear()
        pk.warm([functools.partial(pk.op("matmul"), meta(128, 64, **options), meta(64, 192))], target="sm_90")
        return len(planned_keys)

    assert warmed(requires_grad=True) < warmed()


@functools.cache
def small_model(name, dtype=torch.bfloat16):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    common = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=128, n_layer=1, n_head=2, n_positions=128, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **common
        )
        return transformers.GPT2LMHeadModel(config).to(dtype)
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, num_hidden_layers=1,
        **common,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def step(model, train, how=""):
    ids = torch.zeros(2, 64, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        if not train:
            with torch.no_grad():
                model.eval()(input_ids=ids)
            return
        run = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        loss = run.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    model.zero_grad()


@pytest.mark.parametrize(
    ("name", "train", "how"),
    [("llama", True, ""), ("llama", False, ""), ("gpt2", True, ""), ("llama", True, "autocast"),
     ("llama", True, "compiled")],
)  # fmt: skip
def test_steps_of_a_model_launch_what_was_warmed(name, train, how, on_hopper, planned_keys):
    """The first step, and the second, which has learnt plans; under torch.compile and torch.autocast too."""
    model = small_model(name, torch.float32 if how == "autocast" else torch.bfloat16)
    with pk_torch().apply(model) as applied:
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            warmed = applied.warm(batch=2, seq=64, train=train)
        assert warmed.failures == () and warmed.calls > 3
        with keys_of_launches() as asked:
            step(model, train, how)
            step(model, train, how)
    assert asked == planned_keys


def pk_torch():
    import portakern.torch

    return portakern.torch


def test_a_model_that_is_warmed_stays_as_it_was(planned_keys):
    model = small_model("llama").eval()
    model.model.layers[0].train()
    modes = [module.training for module in model.modules()]
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters, numbers = dict(model.named_parameters()), torch.get_rng_state()
    with pk_torch().apply(model) as applied:
        assert applied.warm(2, 64, target="sm_90").calls > 3
        assert applied.warm(inputs={"input_ids": meta(2, 64, dtype=torch.int64)}, target="sm_90").calls > 3
    assert [module.training for module in model.modules()] == modes
    assert all(parameters[name] is p and p.grad is None for name, p in model.named_parameters())
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_plain_module_is_warmed_from_its_inputs(planned_keys):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256)).bfloat16()
    with pk_torch().apply(model) as applied:
        warmed = applied.warm(inputs={"input": meta(32, 64)}, target="sm_90")
        with pytest.raises(pk.SpecError, match="takes no input_ids; expected inputs="):
            applied.warm(2, 64, target="sm_90")
        with pytest.raises(pk.SpecError, match="inputs is given beside batch or seq"):
            applied.warm(2, inputs={"input": meta(32, 64)})
        with pytest.raises(pk.SpecError, match="batch is None"):
            applied.warm()
    assert warmed.calls == 2 and "layernorm_kernel" in planned_keys.values()


def test_seconds_count_from_the_beginning(planned_keys, monkeypatch):
    monkeypatch.setattr(recording_of_models, "recorded_calls", lambda *args: time.sleep(0.2) or [])
    with pk_torch().apply(torch.nn.LayerNorm(256)) as applied:
        assert applied.warm(inputs={"input": meta(32, 256)}, target="sm_90").seconds >= 0.2


def test_a_model_without_memory_is_warmed_for_a_target(planned_keys):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256)).bfloat16()
    with pk_torch().apply(model) as applied:
        assert applied.warm(inputs={"input": meta(32, 64)}, target="sm_90").failures == ()
        assert "layernorm_kernel" in planned_keys.values()
        refused = applied.warm(inputs={"input": meta(32, 64)}).failures
    assert len(refused) == 2 and all("pass target=" in why for _, why in refused)


def test_a_model_whose_calls_depend_on_values_is_refused():
    class Chooses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(64)

        def forward(self, x):
            return self.norm(x[x.sum(1).nonzero()[:, 0]])

    with pk_torch().apply(Chooses()) as applied, pytest.raises(pk.UnsupportedError, match="asks for the values"):
        applied.warm(inputs={"x": meta(32, 64, dtype=torch.float32)}, target="sm_90")


def test_what_is_refused_is_reported_by_its_call(planned_keys, caplog):
    calls = [
        functools.partial(pk.op("softmax"), meta(16, 64, dtype=torch.float64)),
        functools.partial(pk.op("softmax"), meta(16, 64)),
    ]
    warmed = pk.warm(calls, train=False, target="sm_90")
    ((call, why),) = warmed.failures
    assert call == "softmax(float64; shape=(16, 64), axis=1)" and "float64 is not compiled for GPUs" in why
    assert warmed.calls == 2 and warmed.kernels == 1
    assert f"not compiled: {call}" in str(warmed) and f"{call} is not compiled" in caplog.text


def test_arrays_without_a_compiler_are_refused_in_words():
    import numpy as np

    (only,) = pk.warm([functools.partial(pk.op("softmax"), torch.zeros(4, 8))], train=False).failures
    assert "compiles nothing for cpu: pass target=" in only[1]
    (only,) = pk.warm([functools.partial(pk.op("softmax"), np.zeros((4, 8), np.float32))], target="sm_90").failures[:1]
    assert "takes arrays of torch" in only[1] or "by default" in only[1]
    with pytest.raises(pk.SpecError, match="is on arrays without a device; pass target="):
        pk.warm([functools.partial(pk.op("softmax"), meta(4, 8))])


def test_jax_compiles_its_own_programs():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.ShapeDtypeStruct((128, 512), "bfloat16")
    warmed = pk.warm([functools.partial(pk.op("softmax"), x)], train=False, target="v6e")
    ((call, why),) = warmed.failures
    assert call.startswith("softmax(bfloat16") and "jax.jit(f).lower(...).compile()" in why
    assert "jax_compilation_cache_dir" in why


def test_wrong_arguments_are_refused_by_number():
    op, x = pk.op("softmax"), meta(4, 8)
    with pytest.raises(pk.SpecError, match="call 1 is a function; expected a functools.partial of an op"):
        pk.warm([functools.partial(op, x), lambda: op(x)], target="sm_90")
    with pytest.raises(pk.SpecError, match="warm: call 0: softmax: axis is 7"):
        pk.warm([functools.partial(op, x, axis=7)], target="sm_90")
    with pytest.raises(pk.SpecError, match="processes is 0; expected a whole number of at least 1"):
        pk.warm([functools.partial(op, x)], target="sm_90", processes=0)


def test_a_kernel_that_fails_is_reported_by_its_call(monkeypatch, folder):
    def run(jobs, processes, timeout):
        for job in jobs:
            yield (
                job,
                job.failed("the compiler died of SIGSEGV", 0.1)
                if job.kernel != compiler.DRIVER
                else Build(job.spec.name, "", "", "sm_90", "triton", ok=True),
            )

    monkeypatch.setattr(pool, "run", run)
    warmed = pk.warm([functools.partial(pk.op("softmax"), meta(16, 64))], train=False, target="sm_90", progress=True)
    assert warmed.failures == (
        ("softmax(bfloat16; shape=(16, 64), axis=1)", "softmax_kernel: the compiler died of SIGSEGV"),
    )  # fmt: skip
    assert warmed.compiled == 0 and warmed.kernels == 1


def test_a_worker_says_what_is_wrong_with_a_source():
    b = registry.backend("triton")
    built = worker.make(b, b.families[0], HOPPER, "softmax", "no pickle")
    assert not built.ok and built.reason


def test_only_functions_that_another_process_finds_are_sent_there():
    from portakern.backends.triton.gpu.softmax import softmax_kernel

    source = triton.compiler.ASTSource(softmax_kernel, {}, {}, {})
    assert pickled.unpacked(pickled.packed(source, {"num_warps": 4}))[0].fn is softmax_kernel
    hidden = triton.jit(softmax_kernel.fn)
    with pytest.raises(Exception, match="no other process finds"):
        pickled.packed(triton.compiler.ASTSource(hidden, {}, {}, {}), {})


def test_progress_is_for_terminals_alone(monkeypatch, folder, capsys):
    monkeypatch.setattr("portakern.progress.PATIENCE", -1.0)
    monkeypatch.setattr("portakern.progress.PACE", -1.0)
    monkeypatch.setattr(pool, "run", lambda jobs, processes, timeout: ((job, job.failed("no", 0.0)) for job in jobs))
    for progress in (None, False, True):
        assert pk.warm([functools.partial(pk.op("softmax"), meta(16, 64))], target="sm_90", progress=progress).failures
        shown = capsys.readouterr().err
        assert ("compiling: 1 of " in shown) == bool(progress)


def test_kernels_stay_in_the_users_folder_when_torch_compile_sets_another(monkeypatch, tmp_path):
    """It sets the variable in the process that runs, when it makes its first kernel."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    assert cache.cache_folder() == str(tmp_path / "mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor" / "triton" / "0"))
    default = knobs.cache.get_triton_dir("cache")
    assert cache.cache_folder() == default
    seen = []

    class Kernel:
        hash = "known"

        def __getitem__(self, grid):
            return lambda *args, **constexprs: seen.append(knobs.cache.dir)

    launcher._launched_by_triton(Kernel(), 1, (torch.zeros(1),), {})
    assert seen == [default] and knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] != default


def test_a_process_that_compiles_a_kernel_imports_no_torch():
    """It would take longer than most kernels."""
    files = [
        p
        for p in (ROOT / "backends/triton").rglob("*.py")
        if "interpreter" not in p.parts and "emulator" not in p.parts
    ]
    modules = [
        ".".join(("portakern", *p.relative_to(ROOT).with_suffix("").parts))
        for p in files
        if "@triton.jit" in p.read_text() or "@gluon.jit" in p.read_text()
    ]
    assert len(modules) > 20
    text = (
        "import importlib, sys\n"
        f"for name in ['portakern.tools.compile.worker', 'portakern.backends.triton.compiler', *{modules!r}]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True, cwd=ROOT, timeout=120)


def test_what_a_driver_compiles_is_known_before_it_is_compiled(monkeypatch, folder):
    target = GPUTarget("cuda", 90, 32)
    part = cache.DriverPart(target)
    if not part.is_needed:
        assert part.is_cached()  # nothing is launched here
        monkeypatch.setattr(cache.DriverPart, "_has_driver", lambda self: True)
        monkeypatch.setattr(part.module, "library_dirs", list)
        part = cache.DriverPart(target)
    assert part.is_needed and not part.is_cached()
    source, name = part._source()
    assert name == "cuda_utils" and "fill_tma_descriptor" in source
    monkeypatch.setattr("triton.runtime.build._build", lambda name, src, folder, *others: src)
    monkeypatch.setattr("triton.runtime.build._load_module_from_path", lambda name, path: None)
    with contextlib.suppress(AttributeError):  # of the module that was not loaded
        part.build()
    assert part.is_cached()


def test_what_a_wheel_says_of_itself_is_parsed_once():
    """Of each of portakern's entry points it took more than 10 ms of every process."""

    class Wheel:
        parsed = 0

        @property
        def name(self):
            Wheel.parsed += 1
            return "portakern"

    wheel = Wheel()
    entries = [EntryPoint(name, "portakern", registry.BACKENDS_GROUP)._for(wheel) for name in "abc"]
    assert all(map(registry._is_own, entries)) and Wheel.parsed == 1


NAMES_OF_KERNELS = """
import sys
from portakern.backends.triton.cache import settle
from portakern.backends.triton.lib import cross_entropy
kernels = [getattr(cross_entropy, n) for n in sorted(vars(cross_entropy)) if n.endswith("_kernel")]
for kernel in kernels[:: int(sys.argv[1])]:
    settle(kernel)
print(*(kernel.cache_key for kernel in kernels))
"""


def test_a_kernels_name_in_the_cache_does_not_depend_on_what_ran_before():
    """Triton by itself names some kernels otherwise in a process that met another kernel first."""
    found = [
        subprocess.run(
            [sys.executable, "-c", NAMES_OF_KERNELS, step], capture_output=True, text=True, check=True
        ).stdout
        for step in ("1", "-1")
    ]
    assert found[0] == found[1] and len(found[0].split()) > 2
