"""What the checker draws, and how the calls are built of it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
from jaxtyping import Float

import portakern as pk
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.framework import frameworks
from portakern.core.oracle import degenerate_outputs, oracle, rounded, rounded_oracle
from portakern.spec import Range, spec
from portakern.spec.tolerance import round_to, units
from portakern.testing.cases import Case
from portakern.testing.sizes import Limits
from portakern.testing.source import Source, shrunk
from portakern.testing.strategies import drawn
from tests.ops import gradient_records

A = TypeVar("A")


def by_oracle(op):
    """A function of an op's arguments, given by the oracle and rounded: whole outputs, wanted or not."""

    def call(*arrays, **options):
        bound = bind(registry.find_spec(op), *arrays, **options)
        bound = bound.replace(wants=tuple(n for n in bound.outputs if n in bound.wants or not bound.spec.is_vjp))
        with np.errstate(all="ignore"):
            return [*(degenerate_outputs(bound) if bound.degenerate else rounded_oracle(bound))]

    return call


# --- a seed ---

LISTED = """
import sys
from portakern.testing.check_options import CheckOptions
from portakern.testing.runner import cases_of, subject_of
NUMBERS = [123456789, 0.7312345, "a constant of a module that is loaded"]
for op in ("attention", "layernorm_vjp", "logsumexp_vjp"):
    for case in cases_of(subject_of(op, backend="reference"), CheckOptions(max_examples=120, seed=7)):
        print(case.to_json())
"""


def test_a_seed_names_the_same_cases_in_every_process():
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code + LISTED],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": order},
        ).stdout
        for order, code in (("0", ""), ("1", "import fractions, decimal, email, portakern.cli\nMORE = 987654321\n"))
    )
    assert first == second and len({*first.splitlines()}) > 100


def test_what_is_drawn_does_not_depend_on_how_much():
    few, many = (
        [c.to_json() for c in listed("softmax", n)[:100]] for n in (400, 440)
    )  # as many cases an edge, and as many runs of free ones
    assert few == many


def listed(op, examples, seed=0, **how):
    from portakern.testing.check_options import CheckOptions
    from portakern.testing.runner import cases_of, subject_of

    cases = cases_of(subject_of(op, backend="reference"), CheckOptions(max_examples=examples, seed=seed, **how))
    return [c for c in cases if isinstance(c, Case)]


def test_choices_shrink_to_the_least_that_fail():
    def fails(choices):
        source = Source(1, choices)
        numbers = [source.integer(0, 100) for _ in range(source.integer(0, 20))]
        return numbers if sum(numbers) > 150 else None

    source = Source(3)
    first = [source.integer(0, 100) for _ in range(source.integer(0, 20))]
    assert sum(first) > 300
    least = shrunk(source.choices, fails)
    assert least is not None and 150 < sum(least) < 200 and len(least) < len(first)


# --- what comes back ---


def test_gradient_functions_of_an_ordinary_signature_are_right_and_may_give_a_list():
    whole = by_oracle("layernorm_vjp")

    def plain(x, d_y, weight=None, bias=None, *, eps=1e-5):
        return whole(x, d_y, weight, bias, eps=eps)

    @functools.wraps(plain)
    def as_a_tuple(*args, **kwargs):
        return tuple(plain(*args, **kwargs))

    for fn in (plain, as_a_tuple):
        report = pk.check("layernorm_vjp", fn=fn, max_examples=60, seed=1)
        assert report.passed, report.failures
    assert not any("wants" in case for case in report.combinations)


def test_an_output_that_a_call_does_not_want_is_left_out():
    whole = by_oracle("attention")

    def always(q, k, v, *, is_causal=False):
        return tuple(whole(q, k, v, is_causal=is_causal))

    report = pk.check("attention", fn=always, max_examples=40)
    assert report.passed, report.failures


# --- gradients ---

SAVING = [
    r.op
    for r in gradient_records()
    if {o.name for o in registry.forward_of(r.spec).outputs} & {a.name for a in r.spec.arrays}
    and {a.name for a in registry.forward_of(r.spec).arrays if not a.optional} <= {a.name for a in r.spec.arrays}
]


@pytest.mark.parametrize("op", SAVING)
def test_what_was_saved_follows_from_the_inputs_as_they_lie(op):
    """An index that a layout repeats is so before the forward pass: a kernel may make lse again."""
    spec_ = registry.find_spec(op)
    forward = registry.forward_of(spec_)
    known, checked = {o.name for o in forward.options}, 0
    for seed in range(60):
        case, _ = drawn(seed, spec_, Limits(elements=512), {})
        if "expanded" not in case.layouts.values():
            continue
        arrays = {n: b.view() for n, b in case.buffers(spec_).items()}
        call = bind(
            forward,
            **{a.name: arrays[a.name] for a in forward.arrays if a.name in arrays},
            **{n: v for n, v in case.options.items() if n in known},
        )
        saved = tuple(o.name for o in forward.outputs if o.name in arrays)
        call = call.replace(wants=saved)
        if call.degenerate:
            continue
        for (name, (_, dtype)), y in zip(call.outputs.items(), oracle(call), strict=True):
            if name in saved:
                found, want = (np.asarray(a, np.float64) for a in (arrays[name], rounded(y, dtype)))
                np.testing.assert_array_equal(found, want, err_msg=f"{case.to_json()}: {name}")
                checked += 1
    assert checked


# --- functions that torch.compile made ---


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_compiled_functions_are_checked_as_compiled_code(factor):
    """Every form of call is compiled: a check has more forms than torch.compile's limit, after which it gives up."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ran = [0]

    def longer_rows_times_the_factor(graph, inputs):
        def run(*args):
            ran[0] += 1
            found = graph(*args)
            return tuple(y * factor if y.ndim and y.shape[-1] > 128 else y for y in found)

        return run

    def softmax(x):
        return torch.softmax(x.double(), -1).to(x.dtype).contiguous()

    torch.compiler.reset()
    compiled = torch.compile(softmax, backend=longer_rows_times_the_factor, dynamic=True)
    report = pk.check("softmax", fn=compiled, framework="torch", max_examples=40, shrink=False)
    assert report.passed == (factor == 1), report.failures
    if factor == 1:
        assert ran[0] >= 2 * report.examples, "every call ran compiled code, but those that are empty"


def test_memory_is_poisoned_after_a_compiled_function_was_checked():
    """Compiled functions are poisoned for in a weaker way; the next function, which is not compiled, is not."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def softmax(x):
        return torch.softmax(x.double(), -1).to(x.dtype).contiguous()

    def fills_nothing(x):
        return torch.empty(x.shape, dtype=x.dtype)

    torch.compiler.reset()
    compiled = torch.compile(softmax, backend="eager", dynamic=True)
    assert pk.check("softmax", fn=compiled, framework="torch", max_examples=3, shrink=False).passed
    fw = frameworks()["torch"]
    with fw.poisoned(fills_nothing):
        assert fills_nothing(torch.ones(9)).isnan().all()


# --- options ---


class ScaledOut(NamedTuple):
    y: Float[A, "*shape"]


def test_options_that_are_plain_numbers_are_drawn():
    @spec(tiling={}, flops=lambda call: 1.0)
    def scaled(x: Float[A, "*shape"], *, by: float = 2.0, times: int = 1) -> ScaledOut:
        """y = by x."""
        raise NotImplementedError

    @scaled.tolerance
    def bound(call, ref):
        return (round_to(2 * units(call).u * np.abs(ref[0]) + units(call).tau, ref[0], call.dtype),)

    seen = set()

    def oracle_of(call, tiling):
        seen.add((call.options["by"], call.options["times"]))
        return (call.arrays["x"] * call.options["by"],)

    implementation = pk.backends()["reference"]
    implementation.implements("scaled")(oracle_of)

    def fn(x, *, by=2.0, times=1):
        with np.errstate(all="ignore"):
            return np.ascontiguousarray(x.astype(np.float64) * by).astype(x.dtype)

    report = pk.check(scaled, fn=fn, max_examples=60)
    assert report.passed, report.failures
    assert len({by for by, _ in seen}) > 5 and len({times for _, times in seen}) > 1
    assert Range in {type(o.range) for o in scaled.options}
