"""Ops as objects: equal where they are made alike, copied, pickled and saved with the models that hold them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry
from portakern.spec import Spec

ROOT = Path(__file__).resolve().parents[1]
X = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
MADE = {
    "plain": lambda: pk.op("softmax"),
    "a backend": lambda: pk.op("softmax", backend="triton"),
    "a variant": lambda: pk.op("softmax", backend="reference", variant=registry.backend("reference").families[0].name),
    "tiles": lambda: pk.op("softmax", backend="triton", tiling={"block_n": 256, "block_rows": 2}),
    "another op": lambda: pk.op("layernorm"),
}


@pytest.mark.parametrize("name", MADE)
def test_ops_made_alike_are_equal_and_others_are_not(name):
    one, two = MADE[name](), MADE[name]()
    if name == "plain":
        one(X)  # what was found for a call is no part of it
    assert one == two and hash(one) == hash(two)
    assert [n for n, make in MADE.items() if make() == one] == [name]
    assert one != "softmax" and len({make() for make in [*MADE.values()] * 2}) == len(MADE)


def test_the_order_of_tiles_does_not_count():
    one = pk.op("softmax", tiling={"block_n": 256, "block_rows": 2})
    assert one == pk.op("softmax", tiling={"block_rows": 2, "block_n": 256})
    assert hash(one) == hash(pk.op("softmax", tiling={"block_rows": 2, "block_n": 256}))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", MADE)
def test_ops_are_pickled_by_name(name, protocol):
    op = MADE[name]()
    back = pickle.loads(pickle.dumps(op, protocol))
    assert back == op and repr(back) == repr(op) and back.user_tiling == op.user_tiling
    assert copy.copy(op) == copy.deepcopy(op) == op


def test_an_op_that_served_a_call_is_pickled_without_what_it_found():
    op = pk.op("softmax")
    before = pickle.dumps(op)
    op(X)
    assert pickle.dumps(op) == before
    np.testing.assert_array_equal(pickle.loads(before)(X), op(X))


def test_what_has_no_name_says_why_it_is_not_pickled():
    mine = pk.Backend("mine", framework="numpy")
    op = pk.op("softmax", backend=mine)
    with pytest.raises(pickle.PicklingError, match="its backend 'mine' is not registered.*portakern.register here"):
        pickle.dumps(op)
    assert copy.deepcopy([op])[0] == op
    pk.register(mine)
    text = pickle.dumps(op)
    assert pickle.loads(text) == op
    registry._registered.clear()
    with pytest.raises(pk.SpecError, match="backend 'mine' is unknown"):
        pickle.loads(text)
    ours = registry.find_spec("softmax")
    namesake = Spec(**{f: getattr(ours, f) for f in Spec.__dataclass_fields__ if Spec.__dataclass_fields__[f].init})
    assert pk.op(namesake) != pk.op("softmax")
    with pytest.raises(pickle.PicklingError, match="softmax on auto> cannot be pickled: its spec is not installed"):
        pickle.dumps(pk.op(namesake))


def test_models_that_hold_ops_are_copied_and_saved(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.softmax = pk.op("softmax", backend="reference")

        def forward(self, x):
            return self.softmax(x)

    model, x = Layer(), torch.from_numpy(X)
    model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    torch.save([model.softmax], tmp_path / "ops.pt")
    assert torch.load(tmp_path / "ops.pt", weights_only=False) == [model.softmax]


def test_jit_traces_equal_ops_once():
    """In a process where nothing has used JAX before too: what portakern loads then changes nothing that JAX's caches
    depend on."""
    pytest.importorskip("jax", reason="jax is not installed")
    code = "from tests.test_op_objects import traced_once; traced_once()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    traced_once()


def traced_once():
    import jax

    traced = []

    def body(op, x):
        traced.append(op)
        return op(x)

    jitted = jax.jit(body, static_argnums=0)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for _ in range(3):
            jitted(pk.op("softmax", backend="reference"), X)
        assert len(traced) == 1
        jitted(pk.op("softmax"), X)
    assert len(traced) == 2
