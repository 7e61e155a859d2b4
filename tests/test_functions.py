"""Faults in ordinary functions: what they keep between calls, sizes, options and layouts that they mistake, and what
calls as people make them meet. A sample: ``python -m tests.mutants.functions`` and ``python -m tests.mutants.drawn``
take all, on several seeds.
"""

from __future__ import annotations

import pytest

import portakern as pk
from tests.mutants.drawn import FAULTS, kernel
from tests.mutants.functions import EXAMPLES, PLANTED, RIGHT, found

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SLOW = ("attention", "attention_vjp", "linear_cross_entropy", "linear_cross_entropy_vjp", "cross_entropy_vjp")
HELD_OUT = "unseen"
ORDINARY = [p for i, p in enumerate(PLANTED) if i % 4 == 0 and p.op != "attention"]
QUICK = [f for f in FAULTS if f.op not in SLOW]
FEW = [f for f in QUICK if not f.group.startswith(HELD_OUT)][::2]
FEW += [f for f in FAULTS if f.group == "precision"][1:] + [f for f in QUICK if f.group.startswith(HELD_OUT)][::3]
EDGES = ("causal_with_odd_heads_and_one_key_beyond", "two_causal_queries", "causal_heads_of_128")
MASKED = [f for f in FAULTS if f.group == "attention" and f.op in ("attention", "attention_vjp")]


def test_the_tables_are_large_and_spread():
    assert len(PLANTED) >= 30 and len({(p.op, p.what) for p in PLANTED}) == len(PLANTED)
    groups = {"state", "buffers", "sizes", "options", "layouts"}
    assert {p.group for p in PLANTED} == groups == {p.group for p in ORDINARY}
    assert {f.group for f in FAULTS if not f.group.startswith(HELD_OUT)} <= {f.group for f in (*FEW, *MASKED)}
    assert sum(f.group.startswith(HELD_OUT) for f in FAULTS) >= 60


@pytest.mark.parametrize(
    ("fault", "seed", "examples"),
    [
        pytest.param(p, *how, id=f"{p.op}: {p.what}")
        for some, how in ((ORDINARY, (7, EXAMPLES)), (FEW, (1, 200)))
        for p in some
    ],
)
def test_a_fault_in_a_function_is_found(fault, seed, examples):
    assert found(fault, seed, examples)


@pytest.mark.parametrize("fault", MASKED, ids=[f"{f.op}: {f.what}" for f in MASKED])
def test_edges_of_attention_as_people_run_it_find_their_faults(fault):
    edges = [*EDGES, *(["decoding_over_many_keys"] if fault.op == "attention" else [])]
    report = pk.check(fault.op, fn=fault.make(), only_edges=edges, max_examples=4 * len(edges), shrink=False)
    assert report.failures


@pytest.mark.parametrize("name", [n for n, (op, _, _) in RIGHT.items() if op != "attention" and n != "Kahan sums"])
def test_right_functions_of_unusual_kinds_pass(name):
    op, fn, keeps = RIGHT[name]
    report = pk.check(op, fn=fn, max_examples=150, seed=7, promises=keeps, shrink=False)
    assert report.passed, report.failures


@pytest.mark.parametrize("op", ["softmax", "cross_entropy_vjp", "rmsnorm", "matmul"])
def test_what_they_are_made_of_is_right(op):
    report = pk.check(op, fn=kernel(op), max_examples=100, seed=2)
    assert report.passed, report.failures
