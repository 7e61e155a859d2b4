"""The checker finds faults that are planted in the shipped kernels; a sample here, all of them by ``python -m
tests.mutants``.
"""

import ast
import sys
from pathlib import Path

import pytest

from portakern.core import registry

ROOT = str(Path(__file__).parent.parent)
if ROOT not in sys.path:  # importing by path leaves siblings unseen
    sys.path.insert(0, ROOT)

from tests.mutants import harness  # noqa: E402
from tests.mutants.faults import FAULTS  # noqa: E402

BY_NAME = {f.name: f for f in FAULTS}
SAMPLE = [f.name for f in FAULTS if f.sample and f.case is None]
ON_HOST = [f.name for f in FAULTS if f.case is not None]
SHIPPED_ON_HOST = {f"{f.module} {f.op} {f.case}": f for f in FAULTS if f.case is not None}
SAMPLED = {BY_NAME[n].home: BY_NAME[n] for n in SAMPLE if not registry.find_spec(BY_NAME[n].op).is_vjp}


def needs(fault):
    if fault.lacks():
        pytest.skip(f"{fault.home} needs {fault.lacks()}")


def test_the_table_is_large_and_spread():
    """Every op has faults in the kernels that serve every machine, and in all or none of a variant's for some."""
    assert len(FAULTS) >= 28 and len(BY_NAME) == len(FAULTS) and sum(f.small for f in FAULTS) >= 10
    planted = {(f.backend, f.family, f.op) for f in FAULTS if f.case is None}
    families = {(backend, family) for backend, family, _ in planted}
    kernels = {
        (b.name, family, op)
        for b in registry.backends().values()
        for family in b.declared
        if family.interprets and (not family.targets or (b.name, family) in families)
        for op in registry.ops()
        if b.module_of(op, family)
    }
    assert planted == kernels and len(SAMPLE) >= 9 and all(f.sample for f in FAULTS if f.edge or f.case)


def test_every_fault_still_fits_its_kernel():
    """Those of kernels that nothing here can import as well."""
    unfit = {}
    for fault in FAULTS:
        try:
            ast.parse(harness.mutated_source(fault))
        except (AssertionError, SyntaxError) as e:
            unfit[fault.name] = str(e)
    assert unfit == {}


def test_a_mutant_leaves_the_shipped_backend_alone():
    fault = BY_NAME[SAMPLE[0]]
    needs(fault)
    shipped = registry.backend(fault.backend)
    home = next(family for family in shipped.families if shipped.module_of(fault.op, family))
    before = shipped.implementation(fault.op, home)
    mutant = harness.mutant(fault)
    ours = mutant.implementation(fault.op, next(f for f in mutant.families if f.name == home.name))
    assert ours.fn is not before.fn and ours.backend is mutant
    assert shipped.implementation(fault.op, home) is before
    assert fault.name not in registry.backends()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_fault_is_caught(name):
    fault = BY_NAME[name]
    needs(fault)
    seed, examples = fault.at
    found = harness.catch(fault, seed, "cpu", max_examples=examples, only=fault.edge and [fault.edge])
    assert found["caught"], found


@pytest.mark.parametrize("name", ON_HOST)
def test_a_fault_is_found_where_the_host_runs_the_threads(name):
    fault = BY_NAME[name]
    needs(fault)
    assert harness.found_on_host(fault)


@pytest.mark.parametrize("what", SHIPPED_ON_HOST)
def test_without_a_fault_none_is_found_where_the_host_runs_the_threads(what):
    fault = SHIPPED_ON_HOST[what]
    needs(fault)
    assert not harness.found_on_host(fault, planted=False)


@pytest.mark.parametrize("home", SAMPLED)
def test_the_kernel_without_it_passes(home):
    """An op a backend, for the harness's sake: all of them pass more of the same in test_conformance."""
    fault = SAMPLED[home]
    needs(fault)
    examples = 4 if fault.variant else 10  # a variant that is named is for a machine, and slow on others
    found = harness.checked(fault.op, fault.backend, seed=0, device="cpu", max_examples=examples, variant=fault.variant)
    assert not found["failed"], found["what"]
