"""Keys and values of new tokens, written into pages: by NumPy's indices."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.backends.reference.rope import turned
from portakern.core.call import Call
from portakern.core.config import Config
from portakern.spec.dtypes import DTYPES


def rows(call: Call, name: str) -> np.ndarray:
    """Keys or values as the cache is to hold them, before they are rounded."""
    x, scale, cos = call.arrays[name], call.arrays[f"{name}_scale"], call.arrays["cos"]
    if name == "k" and cos is not None:
        (x,) = turned(x[None], cos[None], call.arrays["sin"][None], call.options["interleaved"])
    dtype = call.dtype_of(f"{name}_pages")
    most = np.inf if dtype == call.dtype else DTYPES[dtype].largest
    with np.errstate(all="ignore"):
        return np.clip(x if scale is None else x / scale[:, None], -most, most)


@BACKEND.implements("kv_append")
def kv_append(call: Call, config: Config) -> tuple[np.ndarray, ...]:
    slots, size = call.arrays["slots"], call.dims["page_size"]
    used = slots >= 0
    found = []
    for name in ("k", "v"):
        cache = np.array(call.arrays[f"{name}_pages"])
        cache[slots[used] // size, slots[used] % size] = rows(call, name)[used]
        found.append(cache)
    return tuple(found)
