"""The merge of two attentions over disjoint sets of keys."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


def beside(numbers: np.ndarray) -> np.ndarray:
    """One number a token and head as it stands beside o."""
    return np.swapaxes(numbers, -1, -2)[..., None]


def weights(lse_a: np.ndarray, lse_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 / (1 + exp(lse_b - lse_a)), and with a and b exchanged; 0 of parts without keys."""
    empty_a, empty_b = np.isneginf(lse_a), np.isneginf(lse_b)
    w_a, w_b = 1 / (1 + np.exp(lse_b - lse_a)), 1 / (1 + np.exp(lse_a - lse_b))
    return np.where(empty_a, 0.0, w_a), np.where(empty_b, 0.0, w_b)


def with_keys(o: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """o, with 0 where its part has no keys."""
    return np.where(beside(np.isneginf(lse)), 0.0, o)


@BACKEND.implements("merge_states")
def merge_states(call: Call, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """o = w_a o_a + w_b o_b and lse = log(exp(lse_a) + exp(lse_b))."""
    o_a, lse_a, o_b, lse_b = (call.arrays[name] for name in ("o_a", "lse_a", "o_b", "lse_b"))
    with np.errstate(all="ignore"):
        w_a, w_b = weights(lse_a, lse_b)
        o = beside(w_a) * with_keys(o_a, lse_a) + beside(w_b) * with_keys(o_b, lse_b)
        return o, np.logaddexp(lse_a, lse_b)
