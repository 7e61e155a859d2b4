"""The conformance suite: any implementation of an op against the float64 oracle, within bounds derived from rounding.

>>> report = check("softmax", backend="triton", max_examples=200)
>>> report.passed, report.worst                 # worst: the largest share of the permitted error that any element used
>>> check("attention", fn=my_kernel)            # any callable with the op's arguments, registered nowhere
"""

from portakern.testing.audit import Audit, audit
from portakern.testing.cases import Case, edges
from portakern.testing.laws import Draw
from portakern.testing.parallel import Interrupted, check_all
from portakern.testing.report import Failure, Report
from portakern.testing.runner import check, replay
from portakern.testing.samples import sample_arrays, sample_case, samples
from portakern.testing.sizes import Limits
from portakern.testing.subject import backend_variants
from portakern.testing.suite import conformance
from portakern.testing.verdict import Broken, BrokenPromise, OtherEdges, compare_call

__all__ = [
    "Audit",
    "Broken",
    "BrokenPromise",
    "Case",
    "Draw",
    "Failure",
    "Interrupted",
    "Limits",
    "OtherEdges",
    "Report",
    "audit",
    "backend_variants",
    "check",
    "check_all",
    "compare_call",
    "conformance",
    "edges",
    "replay",
    "sample_arrays",
    "sample_case",
    "samples",
]
