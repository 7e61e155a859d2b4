"""What the checker says that planted mistakes look like: one line a fault, to be read by hand.

python -m tests.mutants.diagnoses                  # the faults of every op's record, and those of functions
python -m tests.mutants.diagnoses softmax matmul
python -m tests.mutants.diagnoses --kernels        # those planted in kernels that the tests sample; minutes
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import portakern as pk
from portakern.core import registry
from portakern.core.binder import bind
from portakern.spec.dtypes import numpy_dtype
from portakern.spec.tolerance import rounded
from portakern.testing.likeness import Likeness
from portakern.testing.mistakes import supposed
from portakern.testing.verdict import Broken, compare_bounds
from tests.mutants.faults import FAULTS
from tests.mutants.functions import PLANTED
from tests.mutants.harness import mutant
from tests.ops import records

__all__ = ["diagnosed", "of_records"]


def diagnosed(op: str, arrays: Any, options: Any, results: Any) -> Likeness | None:
    """What results of a call look like; None where they are within their bounds."""
    call = bind(registry.find_spec(op), *arrays, **options)
    call.any_order = True
    wanted = [(o, r) for o, r in zip(call.spec.outputs, results, strict=False) if o.name in call.wants]
    stored = [
        r
        if r.dtype == numpy_dtype(call.outputs[o.name][1])
        else rounded(np.asarray(r, np.float64), call.outputs[o.name][1])
        for o, r in wanted
    ]
    try:
        compare_bounds(call, stored)
    except Broken as e:
        before = Likeness(e.cause, e.explanation)
        return supposed(e.wrong, before) if e.wrong is not None else before
    return None


def of_records(ops: Any) -> Iterator[tuple[str, str, Likeness | None]]:
    """(op, fault, what it looks like) of the faults in simulated kernels."""
    for op, record in records().items():
        for name, fault in record.faults.items() if not ops or op in ops else ():
            dtype = "float32" if "float32" in fault.dtypes else fault.dtypes[0]
            arrays = fault.arrays(np.random.default_rng(5), dtype)
            with np.errstate(all="ignore"):
                results = record.simulate(*arrays, **{**fault.options, **fault.plant})
            try:
                yield op, f"{name} {dict(fault.plant)}", diagnosed(op, arrays, fault.options, results)
            except Exception as e:
                yield op, name, Likeness("not run", f"{type(e).__name__}: {e}"[:150])


def of_kernels(ops: Any) -> Iterator[tuple[str, str, Likeness | None]]:
    """The same of the faults planted in kernels, on the cases by which the tests find them."""
    for fault in FAULTS:
        if not fault.sample or fault.case is not None or fault.lacks() or (ops and fault.op not in ops):
            continue
        seed, examples = fault.at
        how: dict[str, Any] = {"variant": fault.variant, "only_edges": fault.edge and [fault.edge]}
        report = pk.check(
            fault.op, backend=mutant(fault), device="cpu", seed=seed, max_examples=examples, shrink=False, **how
        )
        failure = next(iter(report.failures), None)
        yield fault.op, fault.what, Likeness(failure.cause, failure.explanation) if failure else None


def main() -> None:
    if "--kernels" in sys.argv:
        for op, what, found in of_kernels([a for a in sys.argv[1:] if a != "--kernels"]):
            print(f"{op:24} {what[:90]:90} {'-' if found is None else f'{found.name}: {found.words}'}", flush=True)
        return
    for op, what, found in of_records(sys.argv[1:]):
        print(f"{op:24} {what[:70]:70} {'-' if found is None else f'{found.name}: {found.words}'}", flush=True)
    for planted in PLANTED:
        if not sys.argv[1:] or planted.op in sys.argv[1:]:
            report = pk.check(planted.op, fn=planted.make(), dtypes=["float32"], max_examples=150, promises=False)
            f = report.failures[0] if report.failures else None
            print(f"{planted.op:24} {planted.what[:70]:70} {f'{f.cause}: {f.explanation}' if f else '-'}", flush=True)


if __name__ == "__main__":
    main()
