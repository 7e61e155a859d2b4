"""Faults planted in ordinary functions are found, and right functions of unusual kinds pass: a sample of
``python -m tests.mutants.functions``, which takes all on 5 seeds."""

import pytest

import portakern as pk
from tests.mutants.functions import PLANTED, RIGHT, found

SAMPLE = [p for i, p in enumerate(PLANTED) if i % 4 == 0 and p.op != "attention"]
QUICK = [name for name, (op, _, _) in RIGHT.items() if op != "attention" and name != "Kahan sums"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_the_table_is_large_and_spread():
    assert len(PLANTED) >= 30 and len({(p.op, p.what) for p in PLANTED}) == len(PLANTED)
    assert (
        {p.group for p in PLANTED} == {"state", "buffers", "sizes", "options", "layouts"} == {p.group for p in SAMPLE}
    )


@pytest.mark.parametrize("fault", SAMPLE, ids=[f"{p.op}: {p.what}" for p in SAMPLE])
def test_a_fault_in_a_function_is_found(fault):
    assert fault.kind in found(fault, seed=7)


@pytest.mark.parametrize("name", QUICK)
def test_right_functions_of_unusual_kinds_pass(name):
    op, fn, keeps = RIGHT[name]
    report = pk.check(op, fn=fn, max_examples=150, seed=7, promises=keeps, shrink=False)
    assert report.passed, report.failures
