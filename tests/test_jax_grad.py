"""Gradients under JAX: grad, vjp, jit, vmap, checkpoint, export and shard_map, on the oracle and on the Pallas
kernels.
"""

import functools
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import portakern as pk

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp  # noqa: E402

from tests.ops import of_each_kind, record  # noqa: E402
from tests.ops._shared import results  # noqa: E402
from tests.ops.record import ForwardRecord  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_on_the_host")


RNG = np.random.default_rng(5)
BACKENDS = ["reference", "pallas"]


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


FORWARD = [r for r in of_each_kind() if isinstance(r, ForwardRecord) and r.spec.vjp]
every_kind = pytest.mark.parametrize("r", FORWARD, ids=lambda r: r.op)


def compared(r, seed=0):
    """Arrays and options of the record's call, and the op in plain JAX."""
    return [jnp.asarray(a) for a in r.compared.arrays(r.op, seed=seed).values()], r.compared.options, r.in_jax


def close(actual, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), actual, want)


def loss_of(f, options):
    return lambda *arrays: sum(jnp.sum(jnp.sin(y)) for y in results(f(*arrays, **options)))


@functools.cache
def plain_gradients(op):
    """Of the record's call in plain JAX, which every backend's are compared with."""
    r = record(op)
    arrays, options, plain = compared(r)
    return jax.jit(jax.grad(loss_of(plain, options), r.differentiable(r.compared)))(*arrays)


@pytest.mark.parametrize("backend", BACKENDS)
@every_kind
def test_gradients_are_those_of_plain_jax(r, backend):
    arrays, options, _ = compared(r)
    every = r.differentiable(r.compared)
    want = plain_gradients(r.op)
    mine = jax.grad(loss_of(pk.op(r.op, backend=backend), options), every)
    close(mine(*arrays), want)
    close(jax.jit(mine)(*arrays), want)


def gradients_under_vmap(r, f):
    """(those of each of two calls that share all arrays but the first, those of both losses' sum), as functions; and
    the arrays."""
    (first, options, _), (second, *_) = compared(r), compared(r, seed=1)
    arrays, axes = (jnp.stack([first[0], second[0]]), *first[1:]), (0, *(None,) * (len(first) - 1))
    every, loss = r.differentiable(r.compared), loss_of(f, options)
    total = jax.jit(jax.grad(lambda *a: jax.vmap(loss, in_axes=axes)(*a).sum(), every))
    return jax.vmap(jax.grad(loss, every), in_axes=axes), total, arrays


@functools.cache
def plain_gradients_under_vmap(op):
    grads, total, arrays = gradients_under_vmap(record(op), record(op).in_jax)
    return jax.jit(grads)(*arrays), total(*arrays)


@pytest.mark.parametrize("backend", BACKENDS)
@every_kind
def test_vmap_of_gradients_with_shared_arrays(r, backend):
    grads, total, arrays = gradients_under_vmap(r, pk.op(r.op, backend=backend))
    close((grads(*arrays), total(*arrays)), plain_gradients_under_vmap(r.op))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cotangent_of_lse_counts(backend):
    q, k, v = normal(1, 5, 2, 8), normal(1, 7, 1, 8), normal(1, 7, 1, 8)

    def loss(f):
        def inner(q, k, v):
            o, lse = f(q, k, v, return_lse=True)
            return jnp.sum(o * o) + jnp.sum(jnp.cos(lse))

        return jax.grad(inner, (0, 1, 2))

    close(loss(pk.op("attention", backend=backend))(q, k, v), loss(record("attention").in_jax)(q, k, v))
    only_lse = jax.grad(lambda q: pk.op("attention", backend=backend)(q, k, v, return_lse=True).lse.sum())(q)
    close(only_lse, jax.grad(lambda q: record("attention").in_jax(q, k, v, return_lse=True)[1].sum())(q))


def test_only_the_gradients_that_are_asked_for_are_computed():
    q, k, v, bias = compared(record("attention"))[0]
    text = str(jax.make_jaxpr(jax.grad(lambda q: pk.op("attention")(q, k, v, bias).sum()))(q))
    asked = text[text.index("attention_vjp") :]
    assert "wants=('d_q',)" in asked
    assert "wants=('d_q', 'd_bias')" in str(
        jax.make_jaxpr(jax.grad(lambda q, b: pk.op("attention")(q, k, v, b).sum(), (0, 1)))(q, bias)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_recomputes(backend):
    arrays, options, plain = compared(record("attention"))
    loss = loss_of(pk.op("attention", backend=backend), options)
    close(jax.grad(jax.checkpoint(loss), (0, 1, 2))(*arrays), jax.grad(loss_of(plain, options), (0, 1, 2))(*arrays))


@every_kind
def test_gradients_export_for_one_platform(r):
    import jax.export

    arrays, options, plain = compared(r)
    grads = jax.jit(jax.grad(loss_of(pk.op(r.op, backend="pallas"), options), r.differentiable(r.compared)))
    assert "tpu_custom_call" in jax.export.export(grads, platforms=["tpu"])(*arrays).mlir_module()
    back = jax.export.deserialize(jax.export.export(grads, platforms=["cpu"])(*arrays).serialize())
    close(back.call(*arrays), jax.grad(loss_of(plain, options), r.differentiable(r.compared))(*arrays))


def test_second_order_and_forward_mode_are_refused_by_name():
    x = normal(3, 5)
    softmax = pk.op("softmax")
    with pytest.raises(pk.UnsupportedError, match="softmax: gradients are of first order and in reverse mode"):
        jax.grad(lambda x: jax.grad(lambda x: softmax(x)[0, 0])(x).sum())(x)
    for call in (lambda: jax.jvp(softmax, (x,), (x,)), lambda: jax.jacfwd(softmax)(x)):
        with pytest.raises(
            pk.UnsupportedError, match=r"softmax: gradients.*jax\.jvp.*use jax.grad, jax.vjp or jax.jacrev"
        ):
            call()
    np.testing.assert_array_equal(jax.jvp(lambda y: softmax(x) + y, (x,), (x,))[1], x)


def test_extents_of_zero_have_gradients_of_zero():
    k = normal(1, 0, 1, 8)
    d_q, d_k = jax.grad(lambda q, k: pk.op("attention")(q, k, k).sum(), (0, 1))(normal(1, 3, 1, 8), k)
    assert not np.asarray(d_q).any() and d_k.shape == k.shape


SHARDED = """
    import os
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 " + os.environ.get("XLA_FLAGS", "")
    import jax, jax.numpy as jnp, numpy as np
    import portakern as pk
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, w = jnp.asarray(np.random.default_rng(0).standard_normal((8, 40)), jnp.float32), jnp.linspace(1, 2, 40)
    for backend in ("reference", "pallas"):
        layernorm = pk.op("layernorm", backend=backend)
        def sharded(f):
            return jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())

        loss = sharded(lambda x, w: jax.lax.psum(jnp.sum(jnp.sin(layernorm(x, w))), "data"))
        got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
        want = jax.grad(lambda x, w: jnp.sum(jnp.sin(layernorm(x, w))), (0, 1))(x, w)
        for a, b in zip(got, want):
            np.testing.assert_allclose(a, b, atol=1e-5)
        inside = sharded(lambda x, w: jax.grad(lambda w: jnp.sum(jnp.sin(layernorm(x, w))))(w))
        np.testing.assert_allclose(jax.jit(inside)(x, w), want[1], atol=1e-5)

    # what is refused, as Auto axes are on TPUs, says which call serves
    import portakern
    def put(a, *spec): return jax.device_put(a, NamedSharding(mesh, P(*spec)))
    def refused(op, arrays, **options):
        try:
            f = jax.jit(lambda a: pk.op(op, backend="pallas")(**a, **options))
            f.trace(arrays).lower(lowering_platforms=("tpu",))
        except pk.UnsupportedError as e:
            return str(e)
        raise SystemExit("Auto axes were taken on a TPU")
    shapes = (4, 6, 2, 8), (1, 2, 6, 6)
    q, bias = (jnp.asarray(np.random.default_rng(1).standard_normal(n), jnp.float32) for n in shapes)
    ids = jnp.asarray([[0, 0, 1, 1, 1, 2]] * 4)
    calls = [
        ("layernorm", {"x": put(x, "data"), "weight": put(w)}, {}),
        ("softmax", {"x": put(jnp.swapaxes(x, 0, 1), None, "data")}, {"axis": 0}),
        ("attention", {"q": put(q, "data"), "k": put(q, "data"), "v": put(q, "data"), "bias": put(bias),
                       "q_segment_ids": put(ids, "data"), "kv_segment_ids": put(ids, "data")},
         {"window": (2, None), "return_lse": True}),
        ("matmul", {"a": put(q, "data"), "b": put(jnp.ones((8, 3)))}, {}),
        ("rmsnorm", {"x": put(x, "data")}, {"eps": 0.1}),
    ]
    for op, arrays, options in calls:
        want = pk.op(op, backend="reference")(**{n: np.asarray(a) for n, a in arrays.items()}, **options)
        said = refused(op, arrays, **options)
        line = "jax.shard_map(" + said.partition("rest whole: jax.shard_map(")[2]
        got = eval(line, {"jax": jax, "portakern": portakern, "mesh": mesh, **arrays})
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, jax.tree.map(jnp.asarray, want))
        assert not jax.tree.leaves(got)[0].sharding.is_fully_replicated
    assert "whole: " not in refused("matmul", {"a": put(x), "b": put(x.T)})  # no axis of samples
    of_gradient = refused("layernorm_vjp", {"x": put(x, "data"), "d_y": put(x, "data"), "weight": put(w)})
    assert "layernorm inside jax.shard_map" in of_gradient
    print("agreed")
"""


def test_shard_map_sums_gradients_of_replicated_arrays_and_refusals_say_which_call_to_write():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SHARDED)], capture_output=True, text=True, timeout=300)
    assert "agreed" in done.stdout, done.stderr[-3000:]
