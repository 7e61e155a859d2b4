"""A process that was forked after JAX had begun says so where it would wait for ever; what needs no JAX runs there."""

import functools
import os
import re
import select
import signal

import numpy as np
import pytest

import portakern as pk
from portakern.frameworks.jax import arrays

jax = pytest.importorskip("jax", reason="jax is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")

WORDS = "JAX cannot run in this process, which was forked after JAX had begun: .*'spawn' or 'forkserver'"


def forked(call):
    """What a call returns in a child process, or its error, as text."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(call())
        except BaseException as e:
            said = f"{type(e).__name__}: {e}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    if not select.select([reads], [], [], 20)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reads) as f:
        said = f.read()
    os.waitpid(child, 0)
    return said


MADE = {
    "numpy": lambda: np.ones((2, 4), np.float32),
    "torch": lambda: torch.ones(2, 4),
    "jax": lambda: jax.numpy.ones((2, 4)),
}


@pytest.mark.parametrize("framework", MADE)
def test_a_forked_process_does_not_wait_for_ever(framework):
    x, softmax = MADE[framework](), pk.op("softmax", backend="pallas")
    softmax(x)
    assert re.match(f"UnavailableError: {WORDS}", forked(lambda: softmax(x)))
    if framework == "jax":
        for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())):
            assert forked(functools.partial(transform(softmax), x)).startswith("UnavailableError: ")
    else:
        for backend in ("reference", "triton"):
            call = functools.partial(pk.op("softmax", backend=backend), x)
            assert forked(call) == str(call())


def test_a_worker_of_a_data_loader_says_so():
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return pk.op("softmax", backend="pallas")(torch.ones(1, 4))

    pk.op("softmax", backend="pallas")(torch.ones(1, 4))
    loader = torch.utils.data.DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(pk.UnavailableError, match=f"(?s){WORDS}"):
        next(iter(loader))


def test_a_fork_before_jax_begins_may_use_it(monkeypatch):
    from jax._src import xla_bridge

    monkeypatch.setattr(xla_bridge, "_backends", {})
    assert forked(lambda: arrays._forked) == "False"
    monkeypatch.undo()
    jax.devices()
    assert forked(lambda: arrays._forked) == "True"
    assert forked(lambda: forked(lambda: arrays._forked)) == "True"
