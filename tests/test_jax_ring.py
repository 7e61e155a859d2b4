"""Attention around a ring of JAX's devices: within the bounds of one device, in either direction. The devices are the
CPU's, in a process of their own.
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
from tests.places import DEEP

CASES = {
    "causal": {"count": 2, "dtype": "float32", "options": {"is_causal": True}},
    "causal_4": {"count": 4, "dtype": "bfloat16", "options": {"is_causal": True}},
    "no_mask": {"count": 2, "dtype": "bfloat16", "options": {"scale": 0.3, "softcap": 2.0}},
    "causal_window": {"count": 2, "dtype": "float32", "options": {"is_causal": True, "window": (6, None)}},
    "near": {"count": 8, "dtype": "float32", "order": "contiguous", "options": {"window": (2, 1)}},
    "uneven": {"count": 4, "dtype": "bfloat16", "order": "contiguous", "lengths": [8, 3, 0, 6],
               "options": {"is_causal": True}},
}  # fmt: skip
if DEEP:
    CASES["causal_8"] = {"count": 8, "dtype": "bfloat16", "options": {"is_causal": True}}

IN_A_PROCESS = """
    import os, sys
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    import jax, jax.numpy as jnp, numpy as np
    import portakern as pk, portakern.jax
    from jax.sharding import AxisType, PartitionSpec as P
    sys.path.insert(0, {tests!r})
    from test_jax_ring import CASES, qkvd

    cut, of_lse = P(None, "ring"), P(None, None, "ring")
    for name, case in CASES.items():
        count, order, lengths = case["count"], case.get("order", "zigzag"), case.get("lengths")
        mesh = jax.make_mesh((count,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])

        def ring(q, k, v):
            return portakern.jax.ring_attention(
                q, k, v, "ring", order=order, lengths=lengths, return_lse=True, backend="pallas", **case["options"]
            )

        def alone(q, k, v):  # o alone, whose gradient is another call
            return portakern.jax.ring_attention(
                q, k, v, "ring", order=order, lengths=lengths, backend="pallas", **case["options"]
            )

        put = jax.shard_map(ring, mesh=mesh, in_specs=(cut,) * 3, out_specs=(cut, of_lse))

        @jax.jit
        def both(q, k, v, d_o, d_lse):
            found, transposed = jax.vjp(put, q, k, v)
            return *found, *transposed((d_o, d_lse))

        arrays = [jnp.asarray(x) for x in qkvd(case)]
        if order == "zigzag":
            arrays = [portakern.jax.to_zigzag(x, count, axis) for x, axis in zip(arrays, (1, 1, 1, 1, 2))]
        found = both(*arrays)
        for a, b in zip(found, both(*arrays)):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{{name}}: two runs have other bits"
        if order == "zigzag":
            found = [portakern.jax.from_zigzag(x, count, axis) for x, axis in zip(found, (1, 2, 1, 1, 1))]
        np.savez({folder!r} + name, *(np.asarray(x).view(np.int16) if x.dtype == jnp.bfloat16 else x for x in found))
    o_alone = jax.jit(jax.shard_map(alone, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut))
    gradients = jax.jit(lambda q, k, v, d_o: jax.vjp(o_alone, q, k, v)[1](d_o))(*arrays[:4])
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients)

    def refused(call, words):
        try:
            call()
        except (pk.SpecError, pk.UnsupportedError) as e:
            assert words in str(e), e
        else:
            raise SystemExit(f"was not refused: {{words}}")

    q, k, v = (x[:, :8] for x in arrays[:3])
    refused(lambda: portakern.jax.ring_attention(q, k, v, "ring"), "axis_name is 'ring', which no shard_map around")
    for wrong, words in (
        ({{"lengths": [1, 2]}}, "lengths is [1, 2] on 4 devices"),
        ({{"lengths": [1.5] * 4}}, "expected an integer from 0"),
        ({{"lengths": [9] * 4}}, "lengths is [9, 9, 9, 9] on devices that hold 8 tokens each"),
        ({{"window": (-100, None)}}, "window is (-100, None)"), ({{"window": 3}}, "window is 3; expected a tuple of 2"),
    ):
        refused(lambda: jax.shard_map(lambda q, k, v: portakern.jax.ring_attention(q, k, v, "ring", **wrong),
                                      mesh=mesh, in_specs=(cut,) * 3, out_specs=cut)(*arrays[:3]), words)
    refused(lambda: portakern.jax.ring_attention(q, k[:, 1:], v, "ring"), "key has shape")
    refused(lambda: portakern.jax.to_zigzag(q, 3), "8 tokens on 3 devices")
"""


def qkvd(case):
    """Queries, keys, values and cotangents of o and lse, of 32 tokens on all devices; padding is NaN."""
    import ml_dtypes

    rng = np.random.default_rng(7)
    dtype = ml_dtypes.bfloat16 if case["dtype"] == "bfloat16" else np.float32
    shapes = (1, 32, 4, 16), (1, 32, 2, 16), (1, 32, 2, 8), (1, 32, 4, 8), (1, 4, 32)
    arrays = [rng.standard_normal(s).astype(dtype if len(s) == 4 else np.float32) for s in shapes]
    padding = np.setdiff1d(np.arange(32), tokens(case))
    for x in arrays[:4]:
        x[:, padding] = np.nan
    arrays[4][:, :, padding] = np.nan
    return arrays


def tokens(case):
    """Where the tokens that are no padding lie."""
    each = 32 // case["count"]
    lengths = case.get("lengths") or [each] * case["count"]
    return np.concatenate([r * each + np.arange(n) for r, n in enumerate(lengths)]).astype(int)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ring")
    script = textwrap.dedent(IN_A_PROCESS).format(folder=f"{path}/", tests=os.path.dirname(__file__))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return path


def shares(name, found, arrays, options):
    """The largest share of its bound that each result of the full call errs by."""
    call = pk.op(name, backend="reference").bind(**arrays, **options)
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call), ref)
    return [
        float(np.max(np.abs(np.asarray(x, np.float64) - want) / bound))
        for x, want, bound in zip(found, ref, bounds, strict=False)
        if x is not None
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_ring_is_within_the_bound_of_one_device(folder, name):
    case = CASES[name]
    here, given = tokens(case), qkvd(case)
    with np.load(f"{folder}/{name}.npz") as stored:
        found = [x.view(given[0].dtype) if x.dtype == np.int16 else x for x in stored.values()]
    padding = np.setdiff1d(np.arange(32), here)
    for x, axis in zip(found, (1, 2, 1, 1, 1), strict=True):
        rest = np.asarray(x.take(padding, axis), np.float32)
        assert (np.isneginf(rest) if axis == 2 else rest == 0).all()
    o, lse, *gradients = (x.take(here, axis) for x, axis in zip(found, (1, 2, 1, 1, 1), strict=True))
    q, k, v, d_o, d_lse = (x.take(here, axis) for x, axis in zip(given, (1, 1, 1, 1, 2), strict=True))
    arrays = {"q": q, "k": k, "v": v}
    forward = shares("attention", (o, lse), arrays, {"return_lse": True, **case["options"]})
    arrays |= {"o": o, "lse": lse, "d_o": d_o, "d_lse": d_lse}
    backward = shares("attention_vjp", gradients, arrays, case["options"])
    print(f"{name}: o, lse, d_q, d_k, d_v at", ", ".join(f"{s:.2f}" for s in forward + backward))
    assert max(forward + backward) <= 1
