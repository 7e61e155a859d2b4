"""What a spec is written with: :func:`spec` and what it takes here, options in :mod:`portakern.spec.options`, bounds in
:mod:`portakern.spec.tolerance`."""

from portakern.spec.declare import Spec, spec
from portakern.spec.fields import ArrayArg, Count, Dim, Edge, Output, Rule, Sample, Tile, When
from portakern.spec.options import Axis, DType, Extent, Range

__all__ = [
    "ArrayArg",
    "Axis",
    "Count",
    "DType",
    "Dim",
    "Edge",
    "Extent",
    "Output",
    "Range",
    "Rule",
    "Sample",
    "Spec",
    "Tile",
    "When",
    "spec",
]
