"""Losses whose classes lie on several devices of JAX: within the bounds of one device, forward and gradient. The
devices are the CPU's, in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import portakern as pk
from portakern.core.oracle import as_float64, oracle

ROWS, TOTAL, WIDTH = 24, 104, 16
CASES = {
    "plain": ("float32", {}, 1.0),
    "certain": ("float32", {}, 40.0),
    "smoothed": ("bfloat16", {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 3}, 4.0),
}


def arrays(name):
    """Logits, hidden and weight that have others, labels of which some are ignored, and a cotangent."""
    import ml_dtypes

    dtype, options, spread = CASES[name]
    rng = np.random.default_rng(5)
    x, h, w = (rng.standard_normal(s).astype(np.float32) for s in ((ROWS, TOTAL), (ROWS, WIDTH), (TOTAL, WIDTH)))
    x = x * spread + 4 * spread
    labels = rng.integers(0, TOTAL, ROWS).astype(np.int32)
    labels[: ROWS // 2] = x.argmax(-1)[: ROWS // 2]
    labels[::5] = options.get("ignore_index", -100)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return x.astype(dtype), h.astype(dtype), w.astype(dtype), labels, rng.random(ROWS).astype(np.float32)


IN_A_PROCESS = """
    import os, sys
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    import jax, jax.numpy as jnp, numpy as np
    import portakern as pk, portakern.jax as twins
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from portakern.frameworks.jax import vocabulary
    sys.path.insert(0, {tests!r})
    from test_jax_vocabulary import CASES, arrays

    vocabulary.CHUNK_ROWS, vocabulary.CHUNK_CLASSES = 5, 10
    for name, kind in [(n, k) for n in CASES for k in (("Auto", "Explicit") if n == "smoothed" else ("Explicit",))]:
        mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType[kind],) * 2)
        how = {{**CASES[name][1], "backend": "reference"}}
        axis = None if kind == "Explicit" else "model"

        def losses(x, h, w, t):
            return (twins.vocabulary_parallel_cross_entropy(x, t, axis, **how),
                    twins.vocabulary_parallel_linear_cross_entropy(h, w, t, axis, **how))

        places = P("data", "model"), P("data"), P("model"), P("data"), P("data")
        given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays(name), places)]
        function = losses
        if kind == "Auto":
            function = jax.shard_map(losses, mesh=mesh, in_specs=places[:4], out_specs=(P("data"),) * 2)

        def both(x, h, w, t, d):
            found, transposed = jax.vjp(lambda x, h, w: function(x, h, w, t), x, h, w)
            return *found, *transposed((d, d))

        with jax.set_mesh(mesh):
            program = jax.jit(both).lower(*given).compile()
            found, again = program(*given), program(*given)
        text = program.as_text()
        assert "all-gather" not in text and "all-to-all" not in text, "logits move"
        for a, b, s in zip(found, again, (P("data"), P("data"), *places)):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{{name}}: two runs have other bits"
            assert a.sharding.is_equivalent_to(NamedSharding(mesh, s), a.ndim), (name, a.sharding, s)
        found = [np.asarray(x).view(np.int16) if x.dtype == jnp.bfloat16 else x for x in found]
        np.savez(f"{folder}/{{name}}-{{kind}}", *found)

    def refused(call, words):
        try:
            call()
        except (pk.SpecError, pk.UnsupportedError) as e:
            assert words in str(e), e
        else:
            raise SystemExit(f"was not refused: {{words}}")

    x, h, w, t, _ = (jnp.asarray(a) for a in arrays("plain"))
    refused(lambda: twins.vocabulary_parallel_cross_entropy(x, t), "logits is not cut along its classes over Explicit")
    refused(lambda: twins.vocabulary_parallel_cross_entropy(x, t, "model"), "along which logits does not vary")
    refused(lambda: twins.vocabulary_parallel_cross_entropy(x, t[:3], "model"), "labels is int32 (3,) beside logits")
    refused(lambda: twins.vocabulary_parallel_linear_cross_entropy(x, w, t, "model"), "weight is float32 (104, 16)")
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    cut = lambda h, w, t: twins.vocabulary_parallel_linear_cross_entropy(h, w, t, "model", backend="reference")
    rows = {{"mesh": mesh, "in_specs": (P("model"), P("model"), P("model")), "out_specs": P("model")}}
    refused(lambda: jax.shard_map(cut, **rows)(h, w, t), "hidden varies along 'model'")
    smooth = lambda x, t: twins.vocabulary_parallel_cross_entropy(x, t, "model", label_smoothing=2.0)
    apart = {{"mesh": mesh, "in_specs": (P(None, "model"), P()), "out_specs": P()}}
    refused(lambda: jax.shard_map(smooth, **apart)(x, t), "label_smoothing is 2.0")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What eight devices found of each case."""
    path = tmp_path_factory.mktemp("losses")
    script = textwrap.dedent(IN_A_PROCESS).format(tests=os.path.dirname(__file__), folder=path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def share(name, found, options, off=None, **given):
    """The largest share of its bound that each result errs by; ``off``: how far what the forward pass gives may be."""
    call = pk.op(name, backend="reference").bind(**given, **options)
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call).replace(off=off or {}), ref)
    return [
        float(np.max(np.abs(x.astype(np.float64) - want) / np.where(bound == 0, 1e-300, bound)))
        for x, want, bound in zip(found, ref, bounds, strict=False)
        if x is not None
    ]


@pytest.mark.parametrize("of", ["plain-Explicit", "certain-Explicit", "smoothed-Explicit", "smoothed-Auto"])
def test_parts_of_the_classes_are_within_the_bound_of_one_device(folder, of):
    import ml_dtypes

    name = of.partition("-")[0]
    x, h, w, labels, d_loss = arrays(name)
    options = CASES[name][1]
    found = [a.view(ml_dtypes.bfloat16) if a.dtype == np.int16 else a for a in np.load(folder / f"{of}.npz").values()]
    loss, of_linear, d_logits, d_hidden, d_weight = found
    assert max(share("cross_entropy", [loss], options, logits=x, labels=labels)) <= 1
    call = pk.op("cross_entropy", backend="reference").bind(x, labels, **options)
    _, lse, low = oracle(call.replace(wants=("loss", "lse", "lse_low")))
    saved = {"labels": labels, "lse": lse.astype(np.float32), "lse_low": low.astype(np.float32), "d_loss": d_loss}
    assert (
        max(share("cross_entropy_vjp", [d_logits], options, {"lse": 2e-7 * np.abs(lse) + 1e-6}, logits=x, **saved)) <= 1
    )
    assert max(share("linear_cross_entropy", [of_linear], options, hidden=h, weight=w, labels=labels)) <= 1
    linear = pk.op("linear_cross_entropy", backend="reference")
    call = linear.bind(h, w, labels, return_lse=True, return_slope=True, **options)
    call = call.replace(wants=(*call.wants, "lse_low"))
    ref = oracle(call)
    named = dict(
        zip(
            (o.name for o in call.spec.outputs),
            zip(ref, call.spec.bound(as_float64(call), ref), strict=True),
            strict=True,
        )
    )
    (lse, off), (slope, of_slope) = named["lse"], named["slope"]
    want, room = d_loss[:, None] * slope, d_loss[:, None] * of_slope
    room = room + np.abs(want) * (2.0**-8 if h.dtype != np.float32 else 2.0**-22) + 1e-30
    assert np.max(np.abs(d_hidden.astype(np.float64) - want) / room) <= 1
    given = {"hidden": h, "weight": w, "labels": labels, "lse": lse.astype(np.float32), "slope": slope.astype(h.dtype)}
    given |= {"d_loss": d_loss, "lse_low": named["lse_low"][0].astype(np.float32)}
    moved = {"lse": off + 1e-6}
    assert max(share("linear_cross_entropy_vjp", [None, d_weight], options, moved, **given)) <= 1
