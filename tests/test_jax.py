"""JAX transformations: jit and vmap on every backend that can be staged, TPU lowering on a machine without one,
gradients refused.
"""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import portakern as pk
from portakern import inventory, testing
from portakern.core import registry
from portakern.core.targets import Target
from portakern.testing.strategies import drawn
from tests.ops import forward_records
from tests.ops._shared import results
from tests.ops.record import dtype_for
from tests.places import DEEP

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_on_the_host")


RNG = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv():
    return normal(2, 9, 4, 16), normal(2, 13, 2, 16), normal(2, 13, 2, 16)


@pytest.mark.parametrize("backend", [None, "reference", "pallas"])
def test_jit_agrees_with_eager(backend):
    attention = pk.op("attention", backend=backend)
    q, k, v = qkv()
    o, lse = jax.jit(lambda q, k, v: attention(q, k, v, is_causal=True, return_lse=True))(q, k, v)
    eager = pk.op("attention", backend="reference")(q, k, v, is_causal=True, return_lse=True)
    np.testing.assert_allclose(o, eager.o, atol=2e-6)
    np.testing.assert_allclose(lse, eager.lse, atol=2e-6)


@pytest.mark.parametrize("backend", ["reference", "pallas"])
def test_vmap_nested_and_with_unmapped_arguments(backend):
    layernorm, reference = pk.op("layernorm", backend=backend), pk.op("layernorm", backend="reference")
    x, w, b = normal(3, 2, 5, 40), normal(3, 40), normal(40)
    mapped = jax.vmap(jax.vmap(lambda x, w, b: layernorm(x, w, b), in_axes=(0, None, None)), in_axes=(0, 0, None))(
        x, w, b
    )
    want = np.stack([reference(x[i], w[i], b) for i in range(3)])
    np.testing.assert_allclose(mapped, want, atol=2e-6)
    out_axis = jax.vmap(lambda x: pk.op("softmax", backend=backend)(x), in_axes=2, out_axes=1)(x[0])
    np.testing.assert_allclose(
        out_axis,
        np.moveaxis(pk.op("softmax", backend="reference")(np.moveaxis(np.asarray(x[0]), 2, 0)), 0, 1),
        atol=2e-6,
    )


@pytest.mark.parametrize("r", forward_records(), ids=lambda r: r.op)
def test_vmap_of_every_shape_of_kernel(r):
    arrays, options = [jnp.asarray(a) for a in r.compared.arrays(r.op).values()], r.compared.options
    mapped = [jnp.stack([a, 2 * a if jnp.issubdtype(a.dtype, jnp.floating) else a]) for a in arrays]
    got = jax.vmap(lambda *a: pk.op(r.op, backend="pallas")(*a, **options))(*mapped)
    want = [pk.op(r.op, backend="reference")(*(a[i] for a in mapped), **options) for i in range(2)]
    for mine, *others in zip(results(got), *map(results, want), strict=True):
        np.testing.assert_allclose(mine, jnp.stack(others), atol=1e-5)


def test_constants_may_join_tracers():
    x, w = normal(4, 24), normal(24)
    got = jax.jit(lambda x: pk.op("layernorm", backend="pallas")(x, w))(x)
    np.testing.assert_allclose(got, pk.op("layernorm", backend="reference")(x, w), atol=2e-6)


def test_extents_of_zero_under_jit():
    o, lse = jax.jit(lambda q, k: pk.op("attention")(q, k, k, return_lse=True))(normal(1, 2, 1, 8), normal(1, 0, 1, 8))
    assert not np.asarray(o).any() and np.isneginf(np.asarray(lse)).all()
    assert jax.jit(pk.op("softmax"))(normal(0, 3)).shape == (0, 3)


def test_triton_cannot_be_staged_on_a_host():
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(
        pk.UnsupportedError,
        match="backend 'triton' runs torch kernels, which JAX cannot stage into a traced function for cpu; "
        "call it outside jit, vmap and grad, or use one of: pallas, reference",
    ):
        jax.jit(pk.op("softmax", backend="triton"))(normal(3, 4))


LOWERED = [pytest.param(r, key, id=f"{r.op}: {key}") for r in forward_records() for key in r.lowered]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("r", "key"), LOWERED)
def test_every_kernel_lowers_for_tpu(r, key, dtype):
    import jax.export

    sample = r.lowered[key]
    arrays = {n: jnp.asarray(a) for n, a in sample.arrays(r.op, dtype).items()}
    run = jax.jit(lambda given: pk.op(r.op, backend="pallas")(**given, **sample.options))
    assert "tpu_custom_call" in jax.export.export(run, platforms=["tpu"])(arrays).mlir_module()


DRAWN = testing.Limits(dtypes=("float32", "bfloat16"), layouts=("contiguous",), elements=600)


@pytest.mark.parametrize("op", [op for op in pk.ops() if "pallas" in inventory.backends_with(op)])
@pytest.mark.parametrize("seed", range(4 if DEEP else 1))
def test_every_op_lowers_for_tpu_and_vmaps_on_drawn_cases(op, seed):
    import jax.export

    spec = registry.find_spec(op)
    run = pk.op(op, backend="pallas")
    for attempt in itertools.count():
        dtypes = [dtype_for(op, dtype) for dtype in DRAWN.dtypes]
        case, _ = drawn(seed + 1000 * attempt, spec, replace(DRAWN, dtypes=dtypes), {})
        arrays = {n: jnp.asarray(b.view()) for n, b in case.buffers(spec).items()}
        call = run.bind(**arrays, **case.options)
        if not call.degenerate:
            break
    try:
        exported = jax.export.export(jax.jit(lambda a: run(**a, **case.options)), platforms=["tpu"])(
            arrays
        ).mlir_module()
    except pk.UnsupportedError as e:
        assert "TPUs have no float16" in str(e) and "float16" in (
            *case.options.values(),
            *(a.dtype for a in arrays.values()),
        )
        return
    assert "tpu_custom_call" in exported
    together = jax.tree.leaves(
        jax.vmap(lambda a: run(**a, **case.options))({n: jnp.stack([a, a]) for n, a in arrays.items()})
    )
    alone = jax.tree.leaves(jax.eval_shape(lambda a: run(**a, **case.options), arrays))
    for both, one in zip(together, alone, strict=True):
        assert both.shape == (2, *one.shape) and both.dtype == one.dtype
        testing.compare_call(call, [np.asarray(x[1]) for x in together])


def test_float16_is_refused_on_tpu_with_the_reason():
    import jax.export

    with pytest.raises(pk.UnsupportedError, match="float16"):
        jax.export.export(jax.jit(pk.op("softmax", backend="pallas")), platforms=["tpu"])(
            normal(4, 128, dtype=jnp.float16)
        )


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="here is a GPU for which it can be lowered")
def test_lowering_for_a_gpu_that_nobody_names_is_refused():
    import jax.export

    with pytest.raises(pk.UnsupportedError, match="pallas: its kernels for cuda are only for sm_90, and the chip"):
        jax.export.export(jax.jit(pk.op("softmax")), platforms=["cuda"])(normal(4, 128))


@pytest.mark.parametrize("arch", ["8.0", "10.0"])
def test_a_gpu_under_jit_is_the_one_that_it_is_lowered_for(monkeypatch, arch):
    """Another chip never reaches Mosaic, which takes every one that it does not know for Hopper."""
    from jax import export

    from portakern.frameworks.jax import tracing

    chip = SimpleNamespace(platform="gpu", compute_capability=arch, client=SimpleNamespace(platform_version="cuda"))
    hopper = SimpleNamespace(**{**vars(chip), "compute_capability": "9.0"})
    named = SimpleNamespace(device_assignment=(chip,))
    monkeypatch.setattr(jax, "local_devices", lambda: [hopper])
    assert tracing._target("cuda", named) == Target("cuda", f"sm_{arch.replace('.', '')}")
    assert tracing._target("cuda") == Target("cuda", "sm_90") and tracing._target("tpu") == Target("tpu")
    mesh = SimpleNamespace(device_assignment=None, mesh=SimpleNamespace(devices=np.array([[hopper, chip]])))
    assert tracing._target("cuda", mesh) == Target("cuda"), "two kinds"
    monkeypatch.setattr(jax, "local_devices", lambda: [chip])
    with pytest.raises(pk.UnsupportedError, match=f"on cuda sm_{arch.replace('.', '')} by default.*only for sm_90"):
        export.export(jax.jit(pk.op("softmax")), platforms=["cuda"])(normal(4, 128))


def with_x64():
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


@pytest.mark.parametrize("wide", [(False, True), (True, False), (True, True)])
def test_segment_ids_of_two_widths_are_compared_by_value(wide):
    """The lowest words of some agree where the ids do not, and a negative id is the same in either width."""
    q = normal(1, 4, 2, 8)
    narrow = np.array([[0, -1, 1, 1]], np.int32)
    far = np.array([[0, -1, 2**32 + 1, 1]])
    with with_x64():
        ids = [jnp.asarray(far if w else narrow) for w in wide]
        assert [i.dtype.itemsize for i in ids] == [8 if w else 4 for w in wide]

        def both(backend):
            def f(q, k, v):
                return pk.op("attention", backend=backend)(q, k, v, None, *ids)

            return f(q, q + 1, 2 * q), jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))(q, q + 1, 2 * q)

        # d_o v is a sum of terms up to 100, of which delta leaves the roundings where a key is alone
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), both("pallas"), both("reference"))


def test_the_checker_draws_integer_arrays_of_two_widths():
    """Each argument's for itself, as far as the library has them: JAX with 64 bits does."""
    ids = [a for a in registry.find_spec("attention").arrays if "int64" in a.dtypes]
    drawn = {tuple(testing.Case("float32", {}, seed=seed).dtype_of(a) for a in ids) for seed in range(20)}
    assert drawn == {(a, b) for a in ("int32", "int64") for b in ("int32", "int64")}
    with with_x64():
        report = testing.check(
            "attention", backend="pallas", device="cpu", only_edges=["nan_in_masked_keys"], max_examples=8
        )
    assert report.passed, report.failures


@pytest.mark.parametrize("backend", ["reference", "pallas"])
def test_calls_on_constants_within_what_jax_traces(backend):
    """The array is here although JAX traces: the call is part of the trace, and not a program of its own."""
    softmax, x = pk.op("softmax", backend=backend), normal(3, 5)
    want = softmax(x) + x
    np.testing.assert_allclose(jax.jit(lambda y: softmax(x) + y)(x), want, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda y: softmax(x) + y)(x[None])[0], want, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(lambda y: softmax(x) + y))(x[None])[0], want, atol=1e-6)
    np.testing.assert_allclose(jax.lax.scan(lambda c, y: (c, softmax(x)[0] + y), 0, x)[1], softmax(x)[0] + x, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "pallas"])
def test_checkify_sees_through_a_call(backend):
    from jax.experimental import checkify

    softmax, x = pk.op("softmax", backend=backend), normal(3, 5)

    def checked(x):
        checkify.check(x.sum() < 1e6, "large")
        return softmax(x)

    for f in (softmax, jax.jit(softmax), checked):
        err, y = checkify.checkify(f)(x)
        err.throw()
        np.testing.assert_allclose(y, softmax(x), atol=1e-6)
    assert "large" in checkify.checkify(checked)(x + 1e6)[0].get()


@pytest.mark.parametrize("backend", ["reference", "pallas"])
@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        pytest.param("softmax", ["n, 8"]),
        pytest.param("matmul", ["m, k", "k, n"]),
        pytest.param("attention", ["b, n, h, 8", "b, m, 2, 8", "b, m, 2, 8"]),
    ],
)
def test_symbolic_extents_are_refused_in_words(op, shapes, backend):
    import jax.export

    scope = jax.export.SymbolicScope()
    given = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(s, scope=scope), jnp.float32) for s in shapes]
    call = pk.op(op, backend=backend)
    for f in (call, jax.grad(lambda *a: call(*a).sum())):
        with pytest.raises(
            pk.UnsupportedError, match=rf"an array of shape \({shapes[0]}\) has a symbolic extent.*export once"
        ):
            jax.export.export(jax.jit(f))(*given)
