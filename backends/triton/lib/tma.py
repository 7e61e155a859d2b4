"""Heads as Hopper's copy engine moves them, and what its programs have."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from triton.experimental.gluon import language as gl

from portakern.backends.triton import BACKEND
from portakern.backends.triton.configs import PipelineConfig
from portakern.backends.triton.descriptors import describe
from portakern.backends.triton.layout import contiguous_strides, gathered, pow2_at_least
from portakern.core import targets

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

ConfigT = TypeVar("ConfigT", bound=PipelineConfig)

QUERIES = 64  # of a consumer
TOGETHER = 8  # heads at most whose tiles are taken by turns where the last queries see most keys: their keys stay in L2
IN_L2 = 40 << 20  # bytes of their keys and values: fewer heads of long rows, whose keys would leave it
REGISTERS = {2: (240, 168), 3: (160, 128)}  # consumers -> registers of their threads, and of all threads at the start
BARRIERS = 1024  # bytes of shared memory that are set aside for them


def movable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy where the copy engine cannot move its rows: from odd addresses, or over odd strides."""
    *strides, along = x.stride()
    odd = [s % 8 or not s for s, extent in zip(strides, x.shape[:-1], strict=True) if extent > 1]
    if along == 1 and not any(odd) and x.data_ptr() % 16 == 0:
        return x
    return gathered(x)


def tiled(x: torch.Tensor, rows: int, columns: int) -> Any:
    """(batch, length, heads, d) in tiles of so many rows of one head."""
    strides = [
        s if extent > 1 else of_a_copy
        for s, extent, of_a_copy in zip(x.stride(), x.shape, contiguous_strides(x.shape), strict=True)
    ]
    return describe(x, x.shape, strides, (1, rows, 1, columns), gl.NVMMASharedLayout(min(2 * columns, 128), 16, 4))


def in_room(config: ConfigT, needed: Callable[[ConfigT], int], limit: int) -> ConfigT:
    """As many stages as there is room for, two at least. needed: a tiling's bytes of shared memory."""
    while config.num_stages > 2 and needed(config) > limit:
        config = config.replace(num_stages=config.num_stages - 1)
    return config


def not_tried(call: Call) -> str | None:
    """Why a kernel that takes ``ragged`` arrays does not take those of another library than PyTorch."""
    if call.framework.name == BACKEND.framework:
        return None
    return (
        "its tensor descriptors, whose extents are not those of an array, were not tried in programs of "
        f"{call.framework.name}"
    )


RAGGED_ROWS, FARTHEST, MANY = 1 << 30, 1 << 34, 0x7FFF0000


def ragged(x: torch.Tensor, rows: int, columns: int) -> Any:
    """(tokens, heads, d) in tiles of so many rows of one head, for kernels that read and write sequences of tokens one
    by one: see ``lib.gluon_sequences``. Rows begin at multiples of 16 bytes, and there are up to 2^30."""
    of_token, of_head, along = (
        s if extent > 1 else of_a_copy
        for s, extent, of_a_copy in zip(x.stride(), x.shape, contiguous_strides(x.shape), strict=True)
    )
    shape = MANY, MANY, RAGGED_ROWS, *x.shape[1:]
    strides = FARTHEST - of_token, of_token, of_token, of_head, along
    layout = gl.NVMMASharedLayout(min(2 * columns, 128), 16, 5)
    return describe(x, shape, strides, (1, 1, rows, 1, columns), layout)


LINE = 64  # numbers of a line of 128 bytes


def paged(x: torch.Tensor, rows: int) -> tuple[Any, int]:
    """(pages, page_size, heads, d) in tiles of so many slots of a page, one head and a line of 128 bytes; and rows from
    a page to the next, as far as a slot is from the next. A page's keys are described as a sequence of packed ones is
    (``ragged``): they end where the caller says."""
    (of_page, *steps), shape = x.stride(), x.shape
    of_slot, of_head, along = (
        s if extent > 1 else of_a_copy
        for s, extent, of_a_copy in zip(steps, shape[1:], contiguous_strides(shape)[1:], strict=True)
    )
    extents = MANY, MANY, RAGGED_ROWS, *shape[2:]
    strides = FARTHEST - of_slot, of_slot, of_slot, of_head, along
    layout = gl.NVMMASharedLayout(2 * LINE, 16, 5)
    return describe(x, extents, strides, (1, 1, rows, 1, LINE), layout), of_page // of_slot


def pages_movable(x: torch.Tensor) -> bool:
    """Whether the copy engine can move parts of pages: rows that begin at multiples of 16 bytes, and pages that are
    whole numbers of slots apart."""
    of_page, of_slot, of_head, along = x.stride()
    pages, size, heads, _ = x.shape
    odd = of_slot % 8 or (of_head % 8 and heads > 1) or along != 1 or of_slot <= 0
    return not odd and of_page % of_slot == 0 and 0 <= of_page // of_slot * pages + size < MANY


SUMS = {80: (64, 16), 96: (64, 32), 144: (128, 16), 160: (128, 32), 192: (128, 64)}
"""Columns that a head's tile may have beside powers of two: those of two pieces, each a power of two."""

MEASURED: dict[str, tuple[int, ...]] = {"forward": (80, 96, 192), "gradients": (192,)}
"""Which of these heads take, where they are measured to be faster than the next power of two."""


def pieces(d: int, direction: str) -> tuple[int, int]:
    """The columns of a head's tile, and of its second piece, 0 where it has none: as few in all as hold d, and 64 or
    more. direction: "forward" or "gradients"."""
    whole = pow2_at_least(d, 64)
    columns = min((n for n in MEASURED[direction] if d <= n < whole), default=whole)
    return SUMS.get(columns, (columns, 0))


def in_pieces(x: torch.Tensor, rows: int, columns: int, more: int) -> tuple[Any, Any]:
    """``tiled``, or ``ragged`` where there is no batch, and as much of the columns after these; None where there are
    no more."""
    of = tiled if len(x.shape) == 4 else ragged
    return of(x, rows, columns), of(x, rows, more) if more else None


def processors(device: torch.device | None) -> int:
    """How many multiprocessors a device has. Of arrays without memory those of the GPU that is in use, if it is a
    Hopper; else, and where another library launches, an H100's."""
    if device is not None and device.type != "cuda":
        cuda = sys.modules["torch"].cuda
        here = cuda.is_initialized() and cuda.get_device_capability() == (9, 0)
        device = sys.modules["torch"].device("cuda", cuda.current_device()) if here else None
    return targets.family("sm_90").cores or 0 if device is None else _of_gpu(device)


@functools.cache
def _of_gpu(device: torch.device) -> int:
    return int(sys.modules["torch"].cuda.get_device_properties(device).multi_processor_count)
