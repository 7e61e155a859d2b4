"""Keys and values of new tokens, written into pages: by NumPy's indices."""

from __future__ import annotations

import numpy as np

from portakern.backends.reference import BACKEND
from portakern.core.call import Call
from portakern.core.config import Config


@BACKEND.implements("kv_append")
def kv_append(call: Call, config: Config) -> tuple[np.ndarray, ...]:
    slots, size = call.arrays["slots"], call.dims["page_size"]
    used = slots >= 0
    found = []
    for new, pages in (("k", "k_pages"), ("v", "v_pages")):
        cache = np.array(call.arrays[pages])
        cache[slots[used] // size, slots[used] % size] = call.arrays[new][used]
        found.append(cache)
    return tuple(found)
