"""What ``explain()`` says would be launched is what is launched; and what nothing interprets is refused."""

from __future__ import annotations

import re
import sys

import pytest

import portakern as pk
from portakern.core import registry, tilings
from portakern.core.binder import unchecked
from portakern.core.targets import find
from portakern.testing import sample_arrays

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.jit import JITFunction  # noqa: E402

from portakern.backends.triton import interpreter, lowering  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402

BACKEND = registry.backend("triton")
(HOPPER,) = (f for f in BACKEND.families if f.name == "hopper")
SM_90 = find("sm_90").target


def samples(op):
    """Names of calls of an op: those of its own, or one of the op whose gradients it has."""
    spec = registry.find_spec(op)
    return [*spec.samples] or [*registry.forward_of(spec).samples][:1]


SAMPLES = [(op, name) for op in pk.ops() for name in samples(op)]


def named(told):
    """The kernels that ``explain()`` names, each as often as it is launched."""
    line = re.search(r"^  kernels: (.*)$", told, re.MULTILINE)
    assert line, told
    found = []
    for part in line[1].split(", "):
        name, _, count = part.partition(" x")
        found += [name] * int(count or 1)
    return sorted(found)


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=["-".join(s) for s in SAMPLES])
def test_explain_names_what_the_interpreter_runs(op, sample, monkeypatch):
    ran, run = [], interpreter.run

    def noted(kernel, *args, **constexprs):
        ran.append(lowering.qualified(kernel))
        return run(kernel, *args, **constexprs)

    monkeypatch.setattr(interpreter, "run", noted)
    arrays, options = sample_arrays(op, sample, framework="torch")
    made = pk.op(op, backend="triton")
    told = named(made.explain(**arrays, **options))
    assert not ran, "explaining launches nothing"
    made(**arrays, **options)
    assert told == sorted(ran)


def on_hopper(op, *arrays, **options):
    call = unchecked(registry.find_spec(op), *arrays, **options).replace(target=SM_90, interpret=False)
    return BACKEND.implementation(op, HOPPER), call


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def attention(q_len, kv_len, heads=8, group=1, d=128, **options):
    k = empty(1, kv_len, heads, d)
    return on_hopper("attention", empty(1, q_len, heads * group, d), k, k, **options)


def product(m, n, k, dtype=torch.bfloat16, **options):
    return on_hopper("matmul", empty(m, k, dtype=dtype), empty(k, n, dtype=dtype), **options)


CALLS = {  # what a variant chooses by the form of a call
    "many queries": (lambda: attention(4096, 4096), {"hopper._flash.attention_flash_kernel"}),
    "one query": (
        lambda: attention(1, 8192), {"hopper._shares.attention_shares_kernel", "lib.attention.attention_combine_kernel"}
    ),
    "few queries of many heads": (lambda: attention(40, 8192, group=4), {"gpu.attention.", "lib.attention."}),
    "gradients": (
        lambda: on_hopper("attention_vjp", *[empty(1, 512, 4, 64)] * 4, empty(1, 4, 512, dtype=torch.float32),
                          empty(1, 512, 4, 64)),
        {"lib.attention.", "hopper._flash_gradients.attention_vjp_gradients_kernel"},
    ),
    "a large product": (lambda: product(4096, 4096, 4096), {"hopper._warps.matmul_by_roles"}),
    "few rows": (lambda: product(16, 4096, 4096), {"hopper.matmul.matmul_kernel"}),
    "a long sum": (lambda: product(64, 64, 65536), {"hopper.matmul."}),
    "float32": (lambda: product(4096, 4096, 4096, torch.float32), {"hopper._float32.matmul_in_slices"}),
    "tf32": (lambda: product(4096, 4096, 4096, torch.float32, precision="tf32"), {"hopper._float32.matmul_turned"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_hopper_chooses_by_a_calls_form_is_named(name):
    make, expected = CALLS[name]
    impl, call = make()
    impl, tiling = impl.resolve(call, tilings.default(impl, call).tiling)
    launched = []
    with recording(lambda kernel, *_: launched.append(lowering.qualified(kernel))):
        impl.run(call, tiling)
        told = HOPPER.kernels(impl, call, tiling)
    assert [*told] == launched and launched
    assert all(any(kernel.startswith(e) for e in expected) for kernel in told), told
    assert all(any(kernel.startswith(e) for kernel in told) for e in expected), told


def test_a_list_of_kernels_takes_nobody_elses_launches():
    """Of another thread, which listing must not stop."""
    import threading

    impl, call = product(64, 64, 64)
    tiling, seen = tilings.default(impl, call).tiling, []

    def other():
        with recording(lambda kernel, *_: seen.append(kernel.__name__)):
            impl.run(call, tiling)

    class Slow(lowering.Listed):
        def launched(self, *launch):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            super().launched(*launch)

    before, lowering.Listed = lowering.Listed, Slow
    try:
        told = HOPPER.kernels(impl, call, tiling)
    finally:
        lowering.Listed = before
    assert len(seen) == len(told) > 0


ON_HOPPER = [(op, BACKEND.implementation(op, HOPPER)) for op in pk.ops() if BACKEND.module_of(op, HOPPER)]


@pytest.mark.parametrize("op", [op for op, impl in ON_HOPPER if impl.compiled_alone])
def test_what_nothing_interprets_is_refused(op):
    what = r"hopper is not interpreted: its kernels are Gluon's, which Triton compiles and has no interpreter for"
    with pytest.raises(pk.UnsupportedError, match=what):
        pk.check(op, backend="triton", variant="hopper", device="cpu", max_examples=1)
    arrays, options = sample_arrays(op, samples(op)[0], framework="torch")
    hopper = pk.op(op, backend="triton", variant="hopper")
    with pytest.raises(pk.UnsupportedError, match=what):
        hopper(**arrays, **options)
    assert re.search(f"refused: .*{what}", hopper.explain(**arrays, **options))


def test_every_kernel_in_gluon_says_so():
    """Of the variant's modules that name their kernels, those that launch none that the interpreter knows."""
    found = {True: [], False: []}
    for op, impl in ON_HOPPER:
        names = vars(sys.modules[impl.fn.__module__]).items()
        kernels = [x.is_gluon() for n, x in names if n.endswith("_kernel") and isinstance(x, JITFunction)]
        if kernels:
            assert (impl.compiled_alone is not None) == all(kernels), op
            found[all(kernels)].append(op)
    assert all(found.values())


@pytest.mark.parametrize("op", [op for op, impl in ON_HOPPER if "warp_specialized" in impl.knobs])
def test_warps_with_roles_are_refused_where_nothing_is_compiled(op):
    arrays, options = sample_arrays(op, samples(op)[0], framework="torch")
    named_roles = pk.op(op, backend="triton", variant="hopper", tiling={"warp_specialized": 1})
    with pytest.raises(pk.UnsupportedError, match="warp_specialized=1 has no interpreter"):
        named_roles(**arrays, **options)


def test_pallas_names_its_kernels():
    pytest.importorskip("jax", reason="jax is not installed")
    arrays, options = sample_arrays("layernorm_vjp", samples("layernorm_vjp")[0], framework="jax")
    told = named(pk.op("layernorm_vjp", backend="pallas").explain(**arrays, **options))
    assert told == ["portakern_layernorm_vjp", "portakern_layernorm_vjp_sum", "portakern_layernorm_vjp_sum"]
