"""What Triton kernels of an op from outside are launched with, and read rows with: public names."""

from portakern.backends.triton.configs import RowsConfig
from portakern.backends.triton.launch import accumulator, cdiv, launch, refuse_tile
from portakern.backends.triton.layout import TensorRows, aligned, fresh_like, row_start, walk_rows

__all__ = [
    "RowsConfig",
    "TensorRows",
    "accumulator",
    "aligned",
    "cdiv",
    "fresh_like",
    "launch",
    "refuse_tile",
    "row_start",
    "walk_rows",
]  # fmt: skip
