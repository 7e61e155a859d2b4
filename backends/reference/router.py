"""The experts of each token, and their weights."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("router")
@np.errstate(all="ignore")
def router(call: Call, config: Config) -> tuple[np.ndarray, ...]:
    """Groups are sorted, then the experts of those that are kept: what is NaN first, then by size, and equal ones as
    they stood."""
    x, bias, k = call.arrays["logits"], call.arrays["bias"], call.dims["k"]
    s = softmax(x) if call.options["scoring"] == "softmax" else sigmoid(x)
    score = s if bias is None else s + bias
    out = np.zeros(x.shape, bool)
    groups, kept = call.dims["groups"], call.options["groups_kept"] or call.dims["groups"]
    if kept < groups:
        two_best = np.sort(score.reshape(*x.shape[:-1], groups, -1), -1)[..., -2:].sum(-1)
        dropped = best_first(two_best, np.zeros(two_best.shape, bool))[..., kept:]
        left_out = np.zeros(two_best.shape, bool)
        np.put_along_axis(left_out, dropped, True, -1)
        out = np.repeat(left_out, call.dims["width"], -1)
    indices = best_first(x if bias is None else score, out)[..., :k]
    chosen, s = np.take_along_axis(x, indices, -1), np.take_along_axis(s, indices, -1)
    if call.options["normalize"]:
        s = softmax(chosen) if call.options["scoring"] == "softmax" else s / (s.sum(-1, keepdims=True) + 1e-20)
    return call.options["scale"] * s, indices.astype(np.float64)


def softmax(x: np.ndarray) -> np.ndarray:
    parts = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(parts / parts.sum(-1, keepdims=True))


def sigmoid(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def best_first(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Places in the order of their numbers, the greatest first, and those that are out last."""
    nan = np.isnan(x)
    return np.lexsort((-np.where(nan, 0.0, x), ~nan, out), axis=-1)
