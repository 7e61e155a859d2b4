"""The cause of an unexpected NaN: the call is repeated with other memory around and behind its arrays, and the check
compares the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.core.framework import strided_view
from portakern.testing.layouts import Buffer
from portakern.testing.likeness import NUMBERLESS, Likeness

if TYPE_CHECKING:
    from portakern.testing.comparing import CallOutputs, CaseOnSubject

__all__ = ["FILL", "other_memory", "source_of_nan"]

FILL = 3.0
"""What lies, in a call that is made again, where NaN lay before."""

BLOCKS = 8
"""Arrays of an output's size that are filled and given back, for the next call to be given."""


def source_of_nan(trial: CaseOnSubject, looks: str, first: CallOutputs) -> Likeness | None:
    """What a result that holds NaN looks like once the call was made again, with numbers beside one input's elements,
    and then with numbers in fresh memory. None: neither changes it, so that it is the kernel's own arithmetic.

    Args:
      looks: the name of what it looked like; first: the result.
    """
    if looks not in NUMBERLESS:
        return None
    for name, b in trial.buffers.items():
        other = _with_numbers_beside(b)
        if other is not None and _turned(first, _again(trial, {name: other})):
            return Likeness(
                "beside", f"memory outside the elements of {name} is read: its strides or its extents are ignored"
            )
    with trial.subject.fresh(first.outputs):
        written = _again(trial, {}, poisoned=False)
    if _turned(first, written):
        return Likeness("unwritten", "memory that was never written to: it holds other values on another call")
    return None


@contextmanager
def other_memory(fw: Any, like: tuple[Any, ...]) -> Iterator[None]:
    """Inside, memory of arrays of these sizes that a library hands out is likely to hold a number."""
    blocks = [fw.copy(a) for a in like for _ in range(BLOCKS)] if not fw.immutable else []
    for block in blocks:
        if fw.to_numpy(block).dtype.kind not in "iub":
            block[...] = FILL
    del blocks
    yield


def _with_numbers_beside(b: Buffer) -> Buffer | None:
    """The same array with numbers where poison lies; None where there is none."""
    beside = np.ones(b.memory.size, bool)
    strided_view(beside, b.shape, b.strides, b.offset)[...] = False
    if b.memory.dtype.kind in "iub" or not beside.any():
        return None
    memory = b.memory.copy()
    memory[beside] = FILL
    return b._replace(memory=memory)


def _again(trial: CaseOnSubject, changed: Mapping[str, Buffer], poisoned: bool = True) -> list[np.ndarray] | None:
    """The outputs of the call on other arrays; None where it does not come back."""
    fw, before = trial.fw, (trial.arrays, trial.buffers)
    trial.buffers = {**trial.buffers, **changed}
    try:
        trial.arrays = trial.place_arrays()
        if not poisoned:
            result = trial.called()
        else:
            with fw.poisoned(trial.subject.run):
                result = trial.called()
        outputs = (o for o in (result if isinstance(result, tuple) else (result,)) if o is not None)
        return [np.array(fw.to_numpy(o)) for o in outputs]
    except Exception:
        return None
    finally:
        trial.arrays, trial.buffers = before


def _turned(first: CallOutputs, outputs: list[np.ndarray] | None) -> bool:
    """Whether some NaN of the first result is a number now."""
    if outputs is None or len(outputs) != len(first.values):
        return False
    return any(
        a.shape == b.shape and bool((np.isnan(_wide(a)) & np.isfinite(_wide(b))).any())
        for a, b in zip(first.values, outputs, strict=True)
    )


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float64)
