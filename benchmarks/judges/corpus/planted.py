"""Every fault that is planted somewhere in this repository: in functions, in simulated kernels, in shipped kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import portakern as pk
from benchmarks.judges.subject import OWN, Subject
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.oracle import degenerate_outputs
from portakern.spec.dtypes import numpy_dtype
from tests.mutants.faults import FAULTS, Fault
from tests.mutants.functions import EXAMPLES, PLANTED, RIGHT
from tests.ops import record, records
from tests.ops._shared import truncate

__all__ = ["kernels", "planted", "right_ones", "simulated", "simulations"]


INTERPRETED = 200
SIMULATED = 100
"""Cases for a simulated kernel, which is slow."""


def functions() -> Iterator[Subject]:
    """Faults of ordinary functions: what they keep between calls, sizes, options and layouts that they mistake."""
    for fault in PLANTED:
        name = f"{fault.op}, {fault.group}: {fault.what}"
        yield Subject(
            "functions", name, fault.op, fault.make, asked=lambda: {"max_examples": EXAMPLES, "promises": OWN}
        )


def kernel(op: str, plant: Mapping[str, Any], truncates: bool) -> Callable[..., Any]:
    """A record's simulated kernel with the op's arguments, as far as the simulation has them, and its results in the
    op's dtypes."""
    spec, simulate = registry.find_spec(op), record(op).simulate
    parameters = inspect.signature(simulate).parameters
    kinds = {p.kind for p in parameters.values()}
    arrays = [a for a in spec.arrays if a.name in parameters or inspect.Parameter.VAR_POSITIONAL in kinds]
    options = [o.name for o in spec.options if o.name in parameters or inspect.Parameter.VAR_KEYWORD in kinds]

    def fn(*given: Any, **named: Any) -> Any:
        call = bind(spec, *given, **named)
        if call.degenerate:
            results: Any = degenerate_outputs(call)
        else:
            told = {n: call.options[n] for n in options if n in call.options}
            told |= {"return_lse": True} if "return_lse" in options and "lse" in call.wants else {}
            with np.errstate(all="ignore"):
                results = simulate(*(call.arrays.get(a.name) for a in arrays), **{**told, **plant})
        wanted = ((y, o.name) for y, o in zip(results, spec.outputs, strict=True) if o.name in call.wants)
        stored = [store(y, call.outputs[name][1]) for y, name in wanted]
        return tuple(stored) if len(stored) > 1 else stored[0]

    def store(y: Any, dtype: str) -> np.ndarray:
        cut = truncates and dtype in ("float16", "bfloat16")
        return np.array(truncate(np.asarray(y), dtype) if cut else np.asarray(y).astype(numpy_dtype(dtype)), order="C")

    vars(fn)["__signature__"] = inspect.Signature(
        [
            *(inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_ONLY) for a in arrays if not a.optional),
            *(
                inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
                for n in (*(a.name for a in arrays if a.optional), *options, *["wants"] * spec.is_vjp)
            ),
        ]
    )
    return fn


def simulated(op: str, plant: Mapping[str, Any], name: str, truncates: bool = False, right: bool = False) -> Subject:
    """A simulated kernel, with or without a fault."""
    group = "unusual" if right else "simulated"
    make = functools.partial(kernel, op, plant, truncates)
    return Subject(group, f"{op}: {name}", op, make, right=right, asked=lambda: {"max_examples": SIMULATED})


def simulations() -> Iterator[Subject]:
    """The faults of the records, those that bounds show and those that only statistics do."""
    for op, r in records().items():
        for name, fault in r.faults.items():
            yield simulated(op, fault.plant, name)
        for name, hiding in r.hiding.items():
            yield simulated(op, hiding.plant, name, hiding.truncates)


def kernels() -> Iterator[Subject]:
    """A fixed part of the faults in shipped kernels, run by Triton's and Pallas's interpreters: those that the tests
    plant."""
    for fault in FAULTS:
        if not fault.sample or fault.case or fault.lacks():
            continue

        def asked(fault: Fault = fault) -> Mapping[str, Any]:
            from tests.mutants.harness import mutant

            given = {"backend": mutant(fault), "variant": fault.variant}
            return given | {"promises": OWN, "max_examples": INTERPRETED}

        def make(asked: Callable[[], Mapping[str, Any]] = asked, op: str = fault.op) -> Callable[..., Any]:
            given = asked()
            return pk.op(op, backend=given["backend"], variant=given["variant"])

        framework = registry.backend(fault.backend).framework
        yield Subject("kernels", fault.name, fault.op, make, framework, asked=asked)


def planted() -> Iterator[Subject]:
    yield from functions()
    yield from simulations()
    yield from kernels()


def right_ones() -> Iterator[Subject]:
    """Right functions beside the planted ones, and right variants of the simulated kernels: of forward ops
    all, of gradients the first, without which a caught fault would say nothing."""
    for name, (op, fn, _) in RIGHT.items():
        yield Subject("unusual", f"{op}: {name}", op, lambda fn=fn: fn, right=True)
    for op, r in records().items():
        for variant in r.variants[: 1 if r.spec.is_vjp else None]:
            told = ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in variant.items())
            yield simulated(op, variant, f"simulated {told}".strip(), right=True)
