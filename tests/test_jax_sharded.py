"""Arrays that several devices of JAX hold (sharded_calls.py, in processes with eight): Explicit and Auto axes of a
mesh, axes beside those of a ``jax.shard_map``, what is gathered, what is refused, and what ``explain()`` says."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("jax")

DEVICES = """
    import os
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    import jax, jax.numpy as jnp, numpy as np
    import portakern as pk
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 16, 32)).astype(np.float32), np.linspace(1, 2, 32, dtype=np.float32)
    def mesh_of(*kinds, sizes=(4, 2)):
        types = tuple(AxisType[k] for k in kinds)
        return jax.make_mesh(sizes, ("data", "model", "third")[: len(sizes)], axis_types=types)
    def put(mesh, a, *spec):
        return jax.device_put(a, NamedSharding(mesh, P(*spec)))
    def close(ours, theirs, tolerance=1e-5):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), atol=tolerance)
    def refused(call, *words):
        try:
            call()
        except pk.UnsupportedError as e:
            assert all(word in str(e) for word in words), e
            return str(e)
        raise SystemExit(f"not refused: {words}")
    layernorm = pk.op("layernorm", backend="pallas")
    def loss(x, w, op=layernorm):
        return jnp.sin(op(x, w)).sum()
    alone = layernorm(jnp.asarray(x), jnp.asarray(w))
    gradients = jax.grad(loss, (0, 1))(jnp.asarray(x), jnp.asarray(w))
"""


def in_a_process(script: str) -> str:
    program = textwrap.dedent(DEVICES) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("what", ["rules", "transforms"])
def test_ops_are_cut_as_their_rules_say(kind, what):
    command = [sys.executable, "-m", "tests.sharded_calls", kind, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ", 0 failed" in done.stdout, (done.stdout[-6000:], done.stderr[-3000:])


BESIDE = """
    for kinds in (["Auto", "Auto"], ["Explicit", "Explicit"], ["Auto", "Explicit"], ["Explicit", "Auto"]):
        mesh = mesh_of(*kinds)
        xs, ws = put(mesh, x, "data", "model"), put(mesh, w)
        close(layernorm(xs, jnp.asarray(w)), alone, 0)  # without jit, beside an array of one device
        with jax.set_mesh(mesh):
            close(jax.grad(loss, (0, 1))(xs, ws), gradients)
        for name, spec in (("data", P("data")), ("model", P(None, "model"))):
            held = {"mesh": mesh, "in_specs": (spec, P()), "axis_names": {name}}
            inside = jax.shard_map(layernorm, out_specs=spec, **held)
            summed = jax.shard_map(lambda x, w: jax.lax.psum(loss(x, w), name), out_specs=P(), **held)
            with jax.set_mesh(mesh):
                close(jax.jit(inside)(xs, ws), alone, 0)
                close(jax.jit(jax.grad(summed, (0, 1)))(xs, ws), gradients)

    # of two Auto axes beside Manual ones XLA does not tell them apart, and the oracle is called on the host
    mesh = mesh_of("Auto", "Auto", "Auto", sizes=(2, 2, 2))
    xs, ws = put(mesh, x, ("model", "data"), "third"), put(mesh, w)
    held = {"mesh": mesh, "in_specs": (P("data"), P()), "out_specs": P("data"), "axis_names": {"data"}}
    with jax.set_mesh(mesh):
        refused(lambda: jax.jit(jax.shard_map(layernorm, **held))(xs, ws), "along 'model' and 'third'", "all but one")
        both = {**held, "axis_names": {"data", "third"}, "in_specs": (P("data", "third"), P()),
                "out_specs": P("data", "third")}
        close(jax.jit(jax.shard_map(layernorm, **both))(xs, ws), alone, 0)
        oracle = pk.op("layernorm", backend="reference")
        refused(lambda: jax.jit(jax.shard_map(oracle, **both))(xs, ws), "the oracle cannot be called on the host")
    mesh = mesh_of("Explicit", "Explicit", "Explicit", sizes=(2, 2, 2))
    xs, ws = put(mesh, x, "model", "third"), put(mesh, w)
    held = {"mesh": mesh, "in_specs": (P(), P()), "out_specs": P(), "axis_names": {"data"}}
    with jax.set_mesh(mesh):
        close(jax.jit(jax.shard_map(layernorm, **held))(xs, ws), alone, 0)
"""


def test_axes_beside_those_of_a_shard_map():
    in_a_process(BESIDE)


WORDS = """
    import jax.export
    matmul = pk.op("matmul", backend="pallas")
    a, b = x.reshape(128, 32), rng.standard_normal((32, 64)).astype(np.float32)
    for kind in ("Auto", "Explicit"):
        mesh = mesh_of(kind, kind)
        softmax = pk.op("softmax", backend="pallas")
        text = softmax.explain(put(mesh, x, "data", None, "model"))
        assert f"devices: 4 along 'data' ({kind})" in text, text
        assert "cut along shape[-3] into 4 parts over 'data': y: side by side" in text, text
        assert "each part: softmax(float32; shape=(2, 16, 32)" in text, text
        assert "x is cut along axis 2 over the mesh's axis 'model' and gathered: softmax is not cut along" in text, text
        gathered = jax.jit(softmax)(put(mesh, x, "data", None, "model"))  # is said in the log
        close(gathered, jax.nn.softmax(x, -1))
        assert gathered.sharding.spec[0] == "data"
        # one all-gather of the weight, and no sum over k, where rows and k lie on one axis
        given = put(mesh, a, "data"), put(mesh, b, "data")
        program = jax.jit(matmul).lower(*given).compile()
        assert "all-gather" in program.as_text() and "all-reduce" not in program.as_text()
        assert "b is cut along axis 0 over the mesh's axis 'data' and gathered: the mesh's axis cuts m" in (
            matmul.explain(*given)
        )
        close(program(*given), a @ b, 1e-3)
        # gradients of 16-bit weights are sums of float32 parts, rounded once: nothing is gathered
        half = [put(mesh, v.astype(jnp.bfloat16), *s) for v, s in ((x, ("data",)), (w, ()))]
        slope = jax.jit(jax.grad(lambda x, w: layernorm(x, w).astype(jnp.float32).sum(), 1))
        program = slope.lower(*half).compile().as_text()
        assert "all-reduce" in program and "all-gather" not in program
        ours = slope(*half)
        theirs = jax.grad(lambda x, w: layernorm(x, w).astype(jnp.float32).sum(), 1)(
            *(jnp.asarray(v, jnp.bfloat16) for v in (x, w)))
        close(ours, theirs, 0)
    # the oracle gathers what jax.jit partitions; parts of Explicit axes call it on their own
    mesh = mesh_of("Auto", "Auto")
    oracle = pk.op("layernorm", backend="reference")
    xs, ws = put(mesh, x, "data"), put(mesh, w)
    assert "the oracle gathers all arrays" in oracle.explain(xs, ws)
    close(jax.jit(oracle)(xs, ws), oracle(x, w), 0)
    close(jax.jit(jax.vmap(oracle, (0, None)))(xs, ws), oracle(x, w), 0)
    close(jax.jit(jax.grad(lambda x, w: loss(x, w, oracle), (0, 1)))(xs, ws), gradients)
    mesh = mesh_of("Explicit", "Explicit")
    close(jax.jit(oracle)(put(mesh, x, "data"), put(mesh, w)), oracle(x, w), 0)
    # TPUs, exports and observers: refused with the call to write, or in words
    mesh = mesh_of("Auto", "Auto")
    lowered = lambda: jax.jit(layernorm).trace(xs, ws).lower(lowering_platforms=("tpu",))
    refused(lowered, "no way on TPUs", "jax.shard_map(lambda x, weight: portakern.op('layernorm', backend='pallas')")
    refused(lambda: jax.export.export(jax.jit(layernorm), platforms=["cpu"])(xs, ws), "jax.export does not keep")
    with pk.observe(print):
        refused(lambda: jax.jit(lambda x, w: layernorm(x, w) + 1)(xs, ws), "observe() cannot look into")
    mesh = mesh_of("Explicit", "Explicit")
    given = put(mesh, x, "data"), put(mesh, w)
    jax.jit(layernorm).trace(*given).lower(lowering_platforms=("tpu",))
    deleted = put(mesh, x, "data")
    deleted.delete()
    try:
        layernorm(deleted, given[1])
    except pk.SpecError as e:
        assert "x was deleted" in str(e)
    else:
        raise SystemExit("a deleted array was taken")
"""


def test_what_is_gathered_and_refused_is_said():
    said = in_a_process(WORDS)
    assert "softmax: x is cut along axis 2 over the mesh's axis 'model' and gathered" in said
    assert "layernorm_vjp: x is cut" not in said
    assert "layernorm: the float64 oracle gathers arrays that jax.jit partitions" in said
