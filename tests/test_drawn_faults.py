"""Faults that calls as people make them meet: the checker finds them, and passes what they were made of."""

from __future__ import annotations

import pytest

import portakern as pk
from tests.mutants.drawn import FAULTS, found, kernel

SLOW = ("attention", "attention_vjp", "linear_cross_entropy", "linear_cross_entropy_vjp", "cross_entropy_vjp")
HELD_OUT = "unseen"
FEW = [f for f in FAULTS if f.op not in SLOW and not f.kind.startswith(HELD_OUT)][::2]
FEW += [f for f in FAULTS if f.kind == "precision"][1:] + [
    f for f in FAULTS if f.op not in SLOW and f.kind.startswith(HELD_OUT)
][::3]
EDGES = ("causal_with_odd_heads_and_one_key_beyond", "two_causal_queries", "causal_heads_of_128")
MASKED = [f for f in FAULTS if f.kind == "attention" and f.op in ("attention", "attention_vjp")]


@pytest.mark.parametrize("fault", FEW, ids=[f"{f.op}: {f.what}" for f in FEW])
def test_faults_are_found(fault):
    """Some of each kind; ``python -m tests.mutants.drawn`` tries all on several seeds."""
    assert found(fault, 1, 200), f"{fault.op}: {fault.what} was not found"


@pytest.mark.parametrize("fault", MASKED, ids=[f"{f.op}: {f.what}" for f in MASKED])
def test_edges_of_attention_as_people_run_it_find_their_faults(fault):
    edges = [*EDGES, *(["decoding_over_many_keys"] if fault.op == "attention" else [])]
    report = pk.check(fault.op, fn=fault.make(), only=edges, max_examples=4 * len(edges), shrink=False)
    assert report.failures


def test_there_are_several_of_each_kind():
    seen = {f.kind for f in FAULTS if not f.kind.startswith(HELD_OUT)}
    assert seen <= {f.kind for f in (*FEW, *MASKED)} and sum(f.kind.startswith(HELD_OUT) for f in FAULTS) >= 60


@pytest.mark.parametrize("op", ["softmax", "cross_entropy_vjp", "rmsnorm", "matmul"])
def test_what_they_are_made_of_is_right(op):
    report = pk.check(op, fn=kernel(op), max_examples=100, seed=2)
    assert report.passed, report.failures
