"""d_weight[r] = sum of d_y[t] over the tokens t with ids[t] = r; 0 for the padding row."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("embedding_vjp")
def embedding_vjp(call: Call, config: Config) -> tuple[np.ndarray]:
    ids, d_y = call.arrays["ids"].reshape(-1), call.arrays["d_y"]
    d_weight = np.zeros(call.arrays["weight"].shape)
    there = (ids >= 0) & (ids < len(d_weight)) & (ids != call.options["padding_index"])
    with np.errstate(all="ignore"):
        np.add.at(d_weight, ids[there], d_y.reshape(-1, d_weight.shape[1])[there])
    return (d_weight,)
