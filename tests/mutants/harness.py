"""From a fault to a backend that runs the faulty kernel, and what can be measured on it."""

from __future__ import annotations

import atexit
import copy
import importlib
import importlib.util
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import portakern as pk
from portakern import testing
from portakern.core import registry
from portakern.core.backend import Backend, Family, Implementation
from portakern.core.binder import bind
from portakern.core.framework import frameworks
from portakern.core.observe import Served, observe
from portakern.core.oracle import oracle
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import format_of
from portakern.testing import cases
from tests.ops import record

from .faults import ON_HOST, Fault

__all__ = ["beside_flat", "catch", "checked", "error_on_ordinary_data", "found_on_host", "mutant", "mutated_source"]

PORTAKERN = Path(pk.__file__).parent
FLAT = 1e-2  # rtol and atol of the usual test
UNBUILT = (
    AssertionError,
    NameError,
    UnboundLocalError,
    KeyError,
    ImportError,
    ModuleNotFoundError,
    AttributeError,
    SyntaxError,
    IndentationError,
)
"""What a mutant raises that was put together wrongly, or whose kernel was edited after it was read: it says nothing
about the fault.
"""


@cache
def _folder() -> Path:
    """Where mutated sources live as long as this process: Triton and tracebacks read them again."""
    folder = Path(tempfile.mkdtemp(prefix="portakern-mutants-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def mutated_source(fault: Fault) -> str:
    """The source of the module that holds the fault's text with the fault in it; AssertionError where the text is not
    there as often as the fault says.
    """
    source = _source(fault.module)
    seen = source.count(fault.old)
    assert seen == fault.times, (
        f"{fault.name}: its text stands {seen} times in {fault.module}, not {fault.times}; rewrite the "
        "fault for the kernel as it is now"
    )
    assert fault.old != fault.new
    return source.replace(fault.old, fault.new)


def _source(module: str) -> str:
    """The text of a module of portakern's, whether or not what it is in can be imported here."""
    package, *inner = module.split(".")
    assert package == "portakern"
    file = PORTAKERN.joinpath(*inner)
    return (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text(encoding="utf-8")


def _loaded(name: str, source: str, **names: Any) -> ModuleType:
    """A module of this name and source, that has these names before it runs."""
    path = _folder() / f"{name.rpartition('.')[2]}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def found_on_host(fault: Fault, planted: bool = True) -> bool:
    """Whether a kernel with the fault in it, or without it, shows a fault where the host runs its threads."""
    name = ("mutant_" if planted else "shipped_") + "".join(c if c.isalnum() else "_" for c in fault.name)
    module = _loaded(name, mutated_source(fault) if planted else _source(fault.module))
    return bool(importlib.import_module(ON_HOST[fault.home, fault.op]).finds_on_host(module, fault.case))


def _importing(mutated: str, module: str, source: str, name: str) -> str:
    """A source that imports ``mutated`` in place of ``module``, itself or through copies of what the families share."""
    direct = f"from {module} import"
    found = source.replace(direct, f"from {mutated} import")
    for shared in dict.fromkeys(re.findall(r"^from (portakern\.backends\.\w+\.lib\.[\w.]+) import", source, re.M)):
        if shared != module and direct in (between := _source(shared)):
            own = f"{name}_{shared.rpartition('.')[2]}"
            _loaded(own, _importing(mutated, module, between, name))
            found = found.replace(f"from {shared} import", f"from {own} import")
    assert found != source, f"{name}: nothing imports {module}"
    return found


@cache
def mutant(fault: Fault) -> Backend:
    """A backend of its own, like the shipped one but for this op; the shipped backend stays as it is."""
    shipped, nowhere = registry.backend(fault.backend), "portakern_mutants"
    backend = copy.copy(shipped)
    backend.name, backend._found = fault.name, {}
    backend.package = None
    backend.families = tuple(replace(f, package=f"{nowhere}.{f.name}") for f in shipped.families)
    registration = f"from portakern.backends.{fault.backend} import BACKEND\n"
    source = mutated_source(fault)
    # as if it lay beside the shipped module: it takes the same tables of tilings
    name = f"{fault.family.package}.mutant_" + fault.name.replace("-", "_")
    if fault.within:
        _loaded(f"{name}_within", source)
        source = _importing(f"{name}_within", fault.module, _source(fault.op_module), name)
    assert source.count(registration) == 1
    backend.implementation = partial(_beside, fault.op, backend, shipped)  # type: ignore[method-assign]
    _loaded(name, source.replace(registration, "\n"), BACKEND=backend)
    return backend


def _beside(op: str, own: Backend, shipped: Backend, name: str, family: Family) -> Implementation | None:
    """What a mutant finds: its own kernel of its op, and the shipped ones of the ops that this is made of."""
    backend = own if name == op else shipped
    return Backend.implementation(backend, name, next(f for f in backend.families if f.name == family.name))


def catch(fault: Fault, seed: int, device: str, max_examples: int, only: Sequence[str] | None = None) -> dict[str, Any]:
    """One check of a faulty kernel: was the fault found, after how many examples, and how. A case that the shipped
    kernel fails too finds nothing, nor does a mutant that could not be built. ``only``: these edges alone."""
    row = checked(fault.op, mutant(fault), seed, device, max_examples, variant=fault.variant, only=only)
    if row["failed"] and any(f"raised {e.__name__}:" in row["what"] for e in UNBUILT):
        return {**row, "caught": False, "error": f"the mutant could not be built: {row['what']}"}
    again = partial(testing.replay, backend=fault.backend, variant=fault.variant, device=device)
    if row["failed"] and again(fault.op, row["case"]).failures:
        return {**row, "caught": False, "error": "the shipped kernel fails the same case"}
    return {**row, "caught": row["failed"]}


def checked(
    op: str,
    backend: str | Backend,
    seed: int,
    device: str,
    max_examples: int,
    variant: str | None = None,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """One check, up to its first failure. ``examples`` counts the instances of laws as well, which come last."""
    start = time.perf_counter()
    asked = {"backend": backend, "variant": variant, "device": device}
    report = pk.check(op, **asked, max_examples=max_examples, seed=seed, only_edges=only, shrink=False)
    failure = report.failures[0] if report.failures else None
    return {
        "failed": failure is not None,
        "examples": report.examples + sum(report.refused.values()) + sum(report.laws.values()),
        "what": failure and failure.what[:300],
        "case": failure and failure.case,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _flat_ok(outputs: Sequence[Any], exact: Sequence[np.ndarray | None]) -> bool:
    try:
        for got, want in zip(outputs, exact, strict=True):
            if got is not None:
                np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=FLAT, atol=FLAT)
    except AssertionError:
        return False
    return True


def _again(served: Served, backend: Backend, variant: str | None) -> list[Any]:
    """Another backend's outputs for a call that was served, with the same tiling; None where unwanted."""
    call = served.call
    (family, _), *_ = backend.families_for(call.target, variant)
    impl = backend.implementation(call.spec.name, family)
    assert impl is not None
    outputs = call.framework.run(impl, call, impl.configured(call.spec, served.tiling))
    return [None if o is None else call.framework.to_numpy(o) for o in outputs]


class Seen(Exception):
    """A flat tolerance sees the fault: the check may end."""


def beside_flat(
    op: str, backend: str, fault: Fault | None, seed: int, device: str, max_examples: int, variant: str | None = None
) -> dict[str, Any]:
    """The shipped kernel under a check and, on the very calls that the check makes, under
    ``assert_allclose(rtol=atol=1e-2)``: ``calls``, and the ``false_alarms`` among them. With a fault, ``sees_at``
    alone: the first call where the faulty kernel misses that tolerance and the shipped one does not; the check ends
    there. None: it never does. A crash counts as seen.
    """
    count = {"calls": 0, "false_alarms": 0}
    sees_at: list[int] = []
    last: list[Any] = []
    busy: list[bool] = []

    def compare(served: Served) -> None:
        call = served.call
        if (
            busy
            or call.degenerate
            or served.backend != backend
            or (last and all(a is b for a, b in zip(last, call.arrays.values(), strict=True)))
        ):
            return
        last[:] = call.arrays.values()
        busy.append(True)
        try:
            _compare(served)
        finally:
            busy.clear()

    def _compare(served: Served) -> None:
        exact = oracle(served.call)
        count["calls"] += 1
        if not _flat_ok([None if o is None else served.call.framework.to_numpy(o) for o in served.outputs], exact):
            count["false_alarms"] += 1
        elif fault is not None and not _flat_right(served, fault, exact):
            sees_at.append(count["calls"])
            raise Seen

    with observe(compare):
        row = checked(op, backend, seed, device, max_examples, variant)
    if fault is None:
        return {**row, **count}
    if row["failed"] and not sees_at:
        return {"error": f"the shipped kernel fails: {row['what']}"}
    return {"sees_at": sees_at[0] if sees_at else None}


def _flat_right(served: Served, fault: Fault, exact: Sequence[np.ndarray | None]) -> bool:
    try:
        return _flat_ok(_again(served, mutant(fault), fault.variant), exact)
    except UNBUILT:
        raise
    except Exception:
        return False


def error_on_ordinary_data(fault: Fault, device: str) -> float:
    """The largest error on the record's usual calls in float32 and bfloat16, beyond the half unit in the last place
    that any stored result may have; inf where a faulty kernel crashes, or gives NaN for a number."""
    fw = frameworks()[registry.backend(fault.backend).framework]
    where = next(d for d in fw.devices() if fw.target(d).platform == device)
    rng = np.random.default_rng(7)
    worst = 0.0
    for sample in record(fault.op).usual:
        shapes, options, tiling = sample.shapes, sample.options, sample.tiling
        for dtype in ("float32", "bfloat16"):
            drawn = cases.Case(dtype, shapes, seed=7, options=options).buffers(registry.find_spec(fault.op))
            arrays = {n: np.ascontiguousarray(b.view()) for n, b in drawn.items()}
            if not registry.find_spec(fault.op).is_vjp:  # results that the forward op left must be its own
                arrays |= {
                    n: np.sort(rng.integers(0, 3, s)).astype(np.int32)
                    if "segment" in n
                    else rng.standard_normal(s).astype(numpy_dtype(dtype))
                    for n, s in shapes.items()
                    if "segment" in n or arrays[n].dtype.kind not in "iub"
                }
            call = bind(registry.find_spec(fault.op), **arrays, **options)
            exact = oracle(call)
            try:
                with fw.poisoned():
                    got = pk.op(fault.op, backend=mutant(fault), variant=fault.variant, tiling=tiling)(
                        **{n: fw.from_numpy(a, where) for n, a in arrays.items()}, **options
                    )
            except UNBUILT:
                raise
            except Exception:
                return float("inf")
            wanted = [i for i, o in enumerate(call.spec.outputs) if o.name in call.wants]
            given = [y for y in (got if isinstance(got, tuple) else (got,)) if y is not None]
            for i, y in zip(wanted, given, strict=True):
                want, unit = exact[i], format_of(call.outputs[call.spec.outputs[i].name][1]).U
                value = np.asarray(fw.to_numpy(y), np.float64)
                with np.errstate(invalid="ignore"):
                    error = np.where(
                        (value == want) | (np.isnan(value) & np.isnan(want)),
                        0.0,
                        np.abs(value - want) - unit * np.abs(want),
                    )
                worst = max(worst, float(np.nan_to_num(error, nan=np.inf).max()))
    return worst
