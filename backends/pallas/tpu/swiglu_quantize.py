"""The gated product of a feed-forward layer on TPUs, in codes of 8 bits and one scale for each group of a row.

    y = g s u        s = 1 / (1 + exp(-g))        q, scale = those of y as in rmsnorm_quantize

gate, up, q: (*batch, n); scale: (*batch, groups). Blocks and strips are those of rmsnorm_quantize.

Source: Shazeer, "GLU variants improve transformer" (2020), equation 5.
"""

from __future__ import annotations

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import WholeRowsConfig
from portakern.backends.pallas.lib.blocks import Refs
from portakern.backends.pallas.lib.mosaic_tpu.rows import Strip, StripSlice
from portakern.backends.pallas.tpu.rmsnorm_quantize import coded_rows, whole_rows, write_codes
from portakern.backends.pallas.tpu.swiglu import open_and_shut
from portakern.core.call import Call


def gated(ref: Refs, at: StripSlice) -> jax.Array:
    """y of a piece of rows."""
    g = at(ref.gate)
    s, _ = open_and_shut(g)
    return g * s * at(ref.up)


def kernel(ref: Refs, strip: Strip, call: Call) -> None:
    """Of a strip's rows."""
    write_codes(ref, strip, gated, call)


@BACKEND.implements("swiglu_quantize", **whole_rows("gate", arrays=2))
def swiglu_quantize(call: Call, config: WholeRowsConfig) -> tuple[jax.Array, ...]:
    found = coded_rows(call, config, kernel, ("gate", "up"), flops=18)
    return found["q"], found["scale"]
