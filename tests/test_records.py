"""Every op has its record, every shipped backend every op, and no list of tests and benchmarks names ops by hand."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from pathlib import Path

import pytest

from portakern.api import op
from portakern.core import registry
from portakern.spec import Spec
from tests.ops import forward_records, records
from tests.ops.record import ForwardRecord, GradientRecord

ROOT = Path(__file__).resolve().parents[1]
every_record = pytest.mark.parametrize("r", records().values(), ids=records())
MAY_BE_EMPTY = {"telling", "corners", "copies", "least_z", "derived"}

ABSENT: dict[tuple[str, str], str] = {}
"""(backend, op) -> why a shipped backend does not have a shipped op."""


def modules(package):
    """The modules of a family that are ops: no subpackage, no name that begins with an underscore, not what it is
    for.
    """
    found = {m.name for m in pkgutil.iter_modules(package) if not m.ispkg and not m.name.startswith("_")}
    return found - {"family"}


SHIPPED = set(registry.own_modules())
BACKENDS = [b for b in registry.backends().values() if b.auto]
HOMES = [(b, family) for b in BACKENDS for family in b.families]
WHOLE = [(b, family) for b, family in HOMES if b.oracle or (family.interprets and not family.targets)]
"""Those that are to have every op: the oracle, and what runs everywhere. Others hold kernels for some machines."""

in_homes = pytest.mark.parametrize(("b", "family"), HOMES, ids=[family.package for _, family in HOMES])


# --- records ---


def test_a_module_of_specs_declares_an_op_and_its_gradient():
    """What the registry knows without an import is what the modules declare: the op that the module is called after,
    and the one that it names as its gradient."""
    declared = {}
    for module in dict.fromkeys(registry.own_modules().values()):
        name = module.rpartition(".")[2]
        specs = [s for s in vars(importlib.import_module(module)).values() if isinstance(s, Spec)]
        own = [s for s in specs if f"{s.fn.__module__}.".startswith(f"{module}.")]
        assert {s.name for s in own} == {name, registry.find_spec(name).vjp} - {None}
        declared |= {s.name: module for s in own}
    assert declared == registry.own_modules()


def test_edges_and_laws_of_a_gradient_have_names_of_their_own_and_no_ending():
    """The ending ``_vjp`` tells functions of a module apart; messages and cases name edges as before."""
    softmax_vjp, attention_vjp = registry.find_spec("softmax_vjp"), registry.find_spec("attention_vjp")
    assert "rows_are_independent" in softmax_vjp.laws and "narrow_windows" in attention_vjp.edges
    assert softmax_vjp.laws["rows_are_independent"] is not registry.find_spec("softmax").laws["rows_are_independent"]
    specs = [registry.find_spec(name) for name in SHIPPED]
    assert not [n for s in specs for n in (*s.edges, *s.laws) if n.endswith("_vjp")]
    assert all(name == edge.name for s in specs for name, edge in s.edges.items())


def test_every_op_has_its_record_and_every_record_its_op():
    assert set(registry.ops()) >= SHIPPED
    missing, unknown = SHIPPED - records().keys(), records().keys() - SHIPPED
    assert not missing, f"no record of {', '.join(sorted(missing))}: write tests/ops/<op>.py"
    assert not unknown, f"no op called {', '.join(sorted(unknown))}, of which tests/ops has a record"


@every_record
def test_a_record_is_of_its_op_and_whole(r):
    assert records()[r.op] is r and type(r) is (GradientRecord if r.spec.is_vjp else ForwardRecord)
    may_be = MAY_BE_EMPTY | ({"hiding"} if r.exact else set())
    empty = [f.name for f in dataclasses.fields(r) if f.name not in may_be and getattr(r, f.name) in ((), {}, [])]
    assert not empty, f"the record of {r.op} has nothing in {', '.join(empty)}"
    assert r.extents.keys() == set(r.spec.dims), "extents name each dimension of the spec"
    assert {} in r.variants and (r.exact or r.near.off.keys() | r.near.plant.keys())
    assert {f.breaks for f in r.faults.values()} & {o.name for o in r.spec.outputs} or len(r.faults) >= 3


@pytest.mark.parametrize("kind", [ForwardRecord, GradientRecord])
def test_a_record_without_a_required_field_cannot_be_made(kind):
    whole = next(r for r in records().values() if type(r) is kind)
    given = {f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    assert len(required) >= 10
    for name in required:
        with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{name}'"):
            kind(**{n: value for n, value in given.items() if n != name})


@every_record
def test_samples_are_right_calls(r):
    samples = [*r.small.values(), *r.usual]
    if isinstance(r, ForwardRecord):
        samples += [r.compared, r.launched, *r.derived.values(), *r.lowered.values()]
    for sample in samples:
        for dtype in ("float32", "bfloat16"):
            op(r.op, tiling=sample.tiling).bind(**sample.arrays(r.op, dtype), **sample.options)


@every_record
def test_what_a_gpu_is_asked_is_right_where_less_is_much(r):
    """On the CPU, with 2^20 elements in place of 2^31: the outputs that are compared belong to the calls that are."""
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.gpu import Gpu, worst_of_far_strides, worst_past_2_31

    gpu = Gpu(device="cpu", big=2**20, backend="reference")
    for worst in (worst_past_2_31(r, gpu), worst_of_far_strides(r, gpu)):
        assert worst == 0 if r.exact else 0 < worst <= 1


def test_a_gradient_has_a_forward_record():
    assert {r.op for r in records().values() if r.spec.is_vjp} == {r.spec.vjp for r in forward_records()} - {None}


# --- backends ---


@pytest.mark.parametrize(("b", "family"), WHOLE, ids=[family.package for _, family in WHOLE])
def test_a_shipped_backend_has_every_op_that_it_does_not_say_it_lacks(b, family):
    has = {name for name in SHIPPED if b.module_of(name, family)}
    without = {name for name in SHIPPED if (b.name, name) in ABSENT}
    assert has | without == SHIPPED, f"{family.package} has no module of {', '.join(sorted(SHIPPED - has - without))}"
    assert not has & without, f"{family.package} has {', '.join(sorted(has & without))}, which ABSENT says it lacks"
    assert all(ABSENT[b.name, name] for name in without), "an absence has its reason"


@in_homes
def test_a_module_of_a_backend_is_an_op_that_it_implements(b, family):
    if b.unavailable():
        pytest.skip(b.unavailable())
    imported = importlib.import_module(family.package)
    assert modules(imported.__path__) <= SHIPPED, "what belongs to no op begins with an underscore or lies in a folder"
    for name in modules(imported.__path__):
        assert b.implementation(name, family) is not None, f"{family.package}.{name} implements no {name}"


# --- lists ---

ALLOWED = (
    "benchmarks/judges/", "benchmarks/tpu_programs.py", "tests/ops/", "tests/mutants/f",
    "tests/mutants/machine_code.py", "tests/test_emulator.py", "tests/test_hopper.py", "tests/test_judges.py",
    "tests/test_pallas_gpu.py", "tests/test_peers.py", "tests/test_row_tiles.py", "tests/test_tilings.py",
    "tests/test_tpu_static.py", "tests/test_apply_wrapped.py", "tests/test_bench_cheats.py", "tests/test_report.py",
    "tests/test_swapped.py", "tests/test_tf32_range.py", "tests/test_verdicts.py", "tests/mutants/drawn.py",
    "tests/test_library_functions.py", "tests/test_statistics.py",
    "tests/test_torch_compile.py", "tests/test_sources.py", "tests/test_functions.py", "tests/test_warm.py",
    "tests/test_paged_cache.py", "tests/test_parts.py", "tests/test_composed.py", "tests/test_invariances.py",
    "tests/test_mistakes.py", "tests/test_public_bounds.py",
)  # fmt: skip
"""Where ops are named: their own files, what was found out about single kernels or single calls, and the tasks that
other people's harnesses have for ops, none of which a new op need join."""


def displays(tree):
    """Each list, tuple, set or dict that is written out, with the strings in it and in those that it holds."""
    kinds = (ast.List, ast.Tuple, ast.Set, ast.Dict)

    def strings(node):
        for part in (*node.keys, *node.values) if isinstance(node, ast.Dict) else node.elts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value
            elif isinstance(part, kinds):
                yield from strings(part)

    return [(node.lineno, set(strings(node))) for node in ast.walk(tree) if isinstance(node, kinds)]


def lists_by_hand(path, names):
    found = displays(ast.parse(path.read_text(encoding="utf-8")))
    return [f"{path}:{line}: {', '.join(sorted(texts & names))}" for line, texts in found if len(texts & names) > 1]


def test_no_list_names_ops_by_hand():
    files = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    checked = [path for path in files if not path.relative_to(ROOT).as_posix().startswith(ALLOWED)]
    assert len(checked) > 30
    found = [line for path in checked for line in lists_by_hand(path, SHIPPED)]
    assert not found, "take it from tests.ops.records() instead:\n" + "\n".join(found)


def test_a_list_by_hand_is_seen(tmp_path):
    first, second = sorted(SHIPPED)[:2]
    path = tmp_path / "some_test.py"
    for text in (
        f"[{first!r}, {second!r}]",
        f"{{{first!r}: 1, {second!r}: 2}}",
        f"f(((1, {first!r}), (2, {second!r})))",
    ):
        path.write_text(text)
        assert lists_by_hand(path, SHIPPED), text
    for text in (f"[{first!r}, 'another']", f"f({first!r}), g({second!r})", f"[f({first!r}), f({second!r})]"):
        path.write_text(text)
        assert not lists_by_hand(path, SHIPPED), text
