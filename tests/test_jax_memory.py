"""Arrays of JAX's and NumPy's without memory, and calls where nothing is computed or nothing is compiled: deleted
arrays, files that were cut, maps over no sample, ``jax.disable_jit``, values that a traced function closes over."""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core.gradients import wiring
from portakern.errors import SpecError, UnsupportedError
from tests.ops import of_each_kind
from tests.ops._shared import results

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

import portakern.jax as twins  # noqa: E402
from tests.ops.record import dtype_for  # noqa: E402

BACKENDS = ["reference", "pallas"]
FIRST = [(r.op, next(iter(testing.samples(r.op)))) for r in of_each_kind()]
FORWARD = [(op, name) for op, name in FIRST if pk.op(op).spec.vjp]


pytestmark = pytest.mark.usefixtures("jax_on_the_host")


def drawn(op, name, framework="jax"):
    return testing.sample_arrays(op, name, dtype=dtype_for(op, "float32"), framework=framework)


def deleted(x):
    x = jnp.array(x, copy=True)
    x.delete()
    return x


def same(actual, expected):
    actual, expected = results(actual), results(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(("op", "name"), FIRST)
def test_deleted_arrays_are_refused_by_name(op, name):
    arrays, options = drawn(op, name)
    for backend in (*BACKENDS, "triton"):
        for n, x in arrays.items():
            with pytest.raises(SpecError, match=f"{op}: {n} was deleted, or donated to another computation; pass"):
                pk.op(op, backend=backend)(**arrays | {n: deleted(x)}, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_deleted_residuals_and_cotangents_are_refused_by_name(backend):
    softmax, x = pk.op("softmax", backend=backend), jnp.ones((3, 5))
    y, pullback = jax.vjp(softmax, x)
    with pytest.raises(SpecError, match="softmax_vjp: d_y was deleted"):
        pullback(deleted(x))
    y.delete()
    with pytest.raises(SpecError, match="softmax_vjp: y was deleted"):
        pullback(x)


def test_twins_name_deleted_arrays():
    q = jnp.ones((1, 2, 1, 4))
    for name, given in (("query", (deleted(q), q, q)), ("key", (q, deleted(q), q)), ("value", (q, q, deleted(q)))):
        with pytest.raises(SpecError, match=f"dot_product_attention: {name} was deleted"):
            twins.dot_product_attention(*given)
    a, axes = jnp.ones((2, 2)), (((1,), (0,)), ((), ()))
    for name, pair in (("lhs", (deleted(a), a)), ("rhs", (a, deleted(a)))):
        with pytest.raises(SpecError, match=f"dot_general: {name} was deleted"):
            twins.dot_general(*pair, axes)


def test_files_that_were_cut_are_refused(tmp_path):
    file = tmp_path / "x"
    np.zeros(4096, np.float32).tofile(file)
    x = np.memmap(file, np.float32, "r+", offset=8192, shape=(4, 512))
    same(pk.op("softmax", backend="reference")(x[1:]), np.full((3, 512), 1 / 512, np.float32))
    with file.open("r+b") as f:
        f.truncate(8192)
    for backend in (*BACKENDS, "triton"):
        for given in (x, x[1:]):
            with pytest.raises(
                SpecError, match="softmax: x is mapped from the first 16384 bytes of a file that has 8192"
            ):
                pk.op("softmax", backend=backend)(given)


def gradients(op, arrays, options, backend):
    """A sum of the outputs, its gradients, and both over samples."""
    call, wired = pk.op(op, backend=backend), wiring(pk.op(op).spec)
    leaves = {n: x for n, x in arrays.items() if n in wired.gradients}
    names = [o.name for o in call.spec.outputs]

    def total(leaves, others):
        out = call(**others, **leaves, **options)
        named = dict(zip(names, out if isinstance(out, tuple) else (out,), strict=False))
        return sum(jnp.sum(jnp.sin(y)) for n, y in named.items() if y is not None and n in wired.cotangents)

    return jax.grad(total), leaves, {n: x for n, x in arrays.items() if n not in leaves}


@pytest.mark.parametrize(("op", "name"), FIRST)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_jit_results_are_the_same_to_the_bit(op, name, backend):
    arrays, options = drawn(op, name)
    call = pk.op(op, backend=backend)
    expected = call(**arrays, **options)
    with jax.disable_jit():
        same(call(**arrays, **options), expected)
        same(jax.jit(lambda arrays: results(call(**arrays, **options)))(arrays), expected)
    if (op, name) in FORWARD:
        derivative, leaves, others = gradients(op, arrays, options, backend)
        expected = derivative(leaves, others)
        with jax.disable_jit():
            found = derivative(leaves, others)
        for n in leaves:
            np.testing.assert_array_equal(found[n], expected[n])


@pytest.mark.parametrize("backend", BACKENDS)
def test_transforms_without_jit(backend):
    softmax, x = pk.op("softmax", backend=backend), jnp.linspace(0.0, 1.0, 15).reshape(3, 5)
    loss = lambda x: softmax(x)[..., 0].sum()  # noqa: E731
    for transformed in (
        jax.vmap(softmax),
        jax.vmap(jax.grad(loss)),
        jax.grad(jax.checkpoint(loss)),
        jax.jacrev(lambda x: softmax(x)[0]),
        lambda x: jax.lax.scan(lambda c, row: (c, softmax(row)), 0.0, x)[1],
        lambda x: jax.lax.cond(True, softmax, lambda x: x, x),
    ):
        expected = transformed(x)
        with jax.disable_jit():
            np.testing.assert_allclose(transformed(x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("op", "name"), FIRST)
@pytest.mark.parametrize("backend", BACKENDS)
def test_maps_over_no_sample(op, name, backend):
    arrays, options = drawn(op, name)
    call = pk.op(op, backend=backend)
    one = jax.eval_shape(lambda arrays: results(call(**arrays, **options)), arrays)
    none = {n: jnp.zeros((0, *x.shape), x.dtype) for n, x in arrays.items()}
    mapped = jax.vmap(lambda arrays: results(call(**arrays, **options)))
    for run in (mapped, jax.jit(mapped)):
        assert [(y.shape, y.dtype) for y in run(none)] == [((0, *y.shape), y.dtype) for y in one]
    twice = jax.vmap(mapped)({n: jnp.zeros((2, *x.shape), x.dtype) for n, x in none.items()})
    assert [y.shape for y in twice] == [(2, 0, *y.shape) for y in one]
    if (op, name) in FORWARD:
        derivative, leaves, others = gradients(op, none, options, backend)
        found = jax.vmap(derivative)(leaves, others)
        assert all(found[n].shape == leaves[n].shape for n in leaves)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_traced_function_may_close_over_arrays_of_other_libraries(backend, framework):
    softmax, x = pk.op("softmax", backend=backend), jnp.linspace(0.0, 1.0, 5)
    given = drawn("softmax", next(iter(testing.samples("softmax"))), framework)[0]["x"]
    expected = np.asarray(softmax(given))

    def added(x):
        y = softmax(given)
        assert type(y) is type(given)
        return x.sum() + jnp.asarray(np.asarray(y)).sum()

    total = expected.sum()
    np.testing.assert_allclose(jax.jit(added)(x), total + x.sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(added)(x), total + x, rtol=1e-6)
    for derivative in (jax.grad(added)(x), jax.jit(jax.vmap(jax.grad(added)))(x)):
        np.testing.assert_array_equal(derivative, jnp.ones(5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_within_ensure_compile_time_eval(backend):
    softmax, x = pk.op("softmax", backend=backend), jnp.ones((3, 5))

    def f(y):
        with jax.ensure_compile_time_eval():
            return y + softmax(x)

    np.testing.assert_allclose(jax.jit(f)(x), 1.2, rtol=1e-6)


def test_what_calls_back_is_not_exported():
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    with pytest.raises(UnsupportedError, match=r"softmax: backend 'reference' computes in this process.*: pallas$"):
        jax.export.export(jax.jit(pk.op("softmax", backend="reference")))(x)
    exported = jax.export.export(jax.jit(pk.op("softmax", backend="pallas")))(x)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(jnp.ones((3, 5))), 0.2, rtol=1e-6)
