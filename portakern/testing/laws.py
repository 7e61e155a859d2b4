"""What a law draws from, and what it asserts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from portakern.spec.dtypes import numpy_dtype
from portakern.testing.subject import Subject
from portakern.testing.verdict import Broken

__all__ = ["Draw", "LawCase", "run_law"]


@dataclass(frozen=True)
class LawCase:
    """One instance of a law; ``to_json`` gives the line that :func:`portakern.testing.replay` takes."""

    law: str
    dtype: str
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


class Draw:
    """Random extents and arrays for a law, and its assertion. ``dtype`` is the op's."""

    def __init__(self, dtype: str, seed: int) -> None:
        self.dtype = dtype
        self.rng = np.random.default_rng(seed)

    def extent(self, lo: int, hi: int) -> int:
        return int(self.rng.integers(lo, hi + 1))

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal values in the op's dtype."""
        return self.rng.standard_normal(shape).astype(numpy_dtype(self.dtype))

    def integers(self, lo: int, hi: int, *shape: int, dtype: str | None = None) -> np.ndarray:
        """Integers from lo to hi, both included, in the op's dtype or another."""
        return self.rng.integers(lo, hi + 1, shape).astype(numpy_dtype(dtype or self.dtype))

    def row_alone(self, run: Callable[[np.ndarray], np.ndarray]) -> None:
        """The law of an op on rows: a row gives the same bits alone and among others."""
        x = self.normal(self.extent(2, 40), self.extent(1, 300))
        row = self.extent(0, x.shape[0] - 1)
        self.same_bits(run(x[row : row + 1]), run(x)[row : row + 1], "a row alone")

    def same_bits(self, got: np.ndarray, want: np.ndarray, what: str) -> None:
        """The law's claim: two results agree to the bit."""
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Broken(f"{what}: {got.dtype.name} {got.shape} and {want.dtype.name} {want.shape}; expected the same")
        got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
        raw = np.dtype(f"u{got.itemsize}")
        differ = (got.view(raw) != want.view(raw)) & ~(
            np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64))
        )
        if differ.any():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), differ.shape))
            raise Broken(
                f"{what}: {float(got[index]):.9g} and {float(want[index]):.9g} at {list(index)}; {int(differ.sum())} "
                f"of {differ.size} elements differ"
            )


def run_law(subject: Subject, case: LawCase) -> None:
    """Assert one instance of a law on a subject."""
    fw = subject.framework
    op = subject.run({})

    def run(*arrays: np.ndarray | None, **options: Any) -> Any:
        ours = [
            None
            if a is None
            else fw.strided(np.ascontiguousarray(a).reshape(-1), a.shape, _strides(a.shape), 0, subject.device)
            for a in arrays
        ]
        out = op(*ours, **options)
        return tuple(None if o is None else fw.to_numpy(o) for o in out) if isinstance(out, tuple) else fw.to_numpy(out)

    law: Callable[..., None] = subject.spec.laws[case.law]
    law(run, Draw(case.dtype, case.seed))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :], dtype=int)) for i in range(len(shape)))
