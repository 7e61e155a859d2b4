"""Real text to train on: the documentation of the checkout that this is, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import portakern

__all__ = ["batches", "read"]


def read(paths: Sequence[Path] = ()) -> np.ndarray:
    """The bytes of the files, or where none are named of every page of the checkout's documentation; uint8, (n,)."""
    root = Path(portakern.__file__).resolve().parents[1]
    files = list(paths) or [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md"))]
    if not files:
        raise FileNotFoundError(f"no page of documentation lies in {root}; expected a checkout: name files with --text")
    return np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)


def batches(text: np.ndarray, seed: int, number: int, batch: int, length: int) -> np.ndarray:
    """Stretches of a text, drawn by a seed: int64, (number, batch, length)."""
    if len(text) < length:
        raise ValueError(f"the text has {len(text)} bytes; expected at least {length}, the length of a sample")
    starts = np.random.default_rng(seed).integers(0, len(text) - length + 1, (number, batch, 1))
    return text[starts + np.arange(length)].astype(np.int64)
