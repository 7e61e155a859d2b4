"""What a spec is written with: :func:`spec` and what it takes here, options in :mod:`portakern.spec.options`, bounds in
:mod:`portakern.spec.tolerance`."""

from portakern.spec.declare import Spec, no_narrower, spec
from portakern.spec.fields import (
    ArrayArg,
    Count,
    Dim,
    Edge,
    Origin,
    Output,
    Rule,
    Sample,
    Sum,
    Tile,
    WeightedMean,
    When,
)
from portakern.spec.options import Axis, DType, Extent, Range

__all__ = [
    "ArrayArg",
    "Axis",
    "Count",
    "DType",
    "Dim",
    "Edge",
    "Extent",
    "Origin",
    "Output",
    "Range",
    "Rule",
    "Sample",
    "Spec",
    "Sum",
    "Tile",
    "WeightedMean",
    "When",
    "no_narrower",
    "spec",
]
