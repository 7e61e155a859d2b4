"""d_x = y (d_y - Delta), Delta = sum y d_y."""

from __future__ import annotations

import numpy as np

from portakern.spec.dtypes import numpy_dtype
from tests.ops._shared import (
    BF16,
    CHECKED,
    HALVES,
    accumulator,
    draw,
    flush,
    in_blocks,
    long_rows_of_gradients,
    outputs_of,
    pick,
    positive,
    through,
)
from tests.ops.record import Fault, GradientRecord, Hiding, Near, Sample


def simulate(y, d_y, axis=-1, *, block=4096, ftz=False, apart=False, factor=1.0, tail=True, low=None):
    """``apart``: y d_y and y Delta are rounded each, as where a row is read twice."""
    acc = accumulator(y)
    y, g = (flush(np.moveaxis(a.astype(acc), axis, -1), ftz) for a in (y, d_y))
    terms = flush(y * g, ftz)
    delta = in_blocks(terms if tail else terms[..., : terms.shape[-1] // block * block or 1], block)
    delta = through(delta, low)
    d_x = flush(y * g, ftz) - flush(y * delta, ftz) if apart else y * (g - delta)
    return (np.moveaxis(flush(d_x * acc(factor), ftz), -1, axis),)


def of_softmax(x):
    return outputs_of("softmax", x)[0]


def any_case(rng, dtype, regime, shape):
    x = draw(rng, shape, dtype, regime)
    x = x if regime != "wide" or rng.random() < 0.5 else draw(rng, shape, dtype)
    return (of_softmax(x), draw(rng, shape, dtype, regime)), {}


def case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (int(rng.integers(1, 24)), pick(rng, [1, 5, 64, 300, 1024])))


def large_case(rng, dtype, regime):
    return any_case(rng, dtype, regime, (pick(rng, [1, 7, 64]), pick(rng, [64, 257, 1030])))


def arrays(rng, dtype):
    return of_softmax(draw(rng, (4, 300), dtype)), draw(rng, (4, 300), dtype) + numpy_dtype(dtype).type(2)


def opposed(rng):
    """A cotangent of one sign in every other element of a row."""
    return of_softmax(draw(rng, (20, 64), "float32")), positive(rng, 20, 64) * np.where(
        np.arange(64) % 2, 1, -1
    ).astype(np.float32)


def far(gpu):
    yield gpu.far((4, 300)), gpu.far((4, 300))


RECORD = GradientRecord(
    op="softmax_vjp",
    simulate=simulate,
    variants=({}, {"block": 128}, {"apart": True}, {"ftz": True}, {"block": 128, "ftz": True, "apart": True}),
    case=case,
    regimes=CHECKED,
    near=Near(opposed, off={"d_x": 2e-6}),
    faults={
        "Delta without the last tile": Fault(arrays, {"tail": False, "block": 128}, breaks="d_x"),
        "Delta kept in bfloat16": Fault(arrays, {"low": BF16}, breaks="d_x"),
        "d_x 1 % off": Fault(arrays, {"factor": 1.01}, breaks="d_x"),
    },
    large_case=large_case,
    typical=lambda rng, dtype: (arrays(rng, dtype), {}),
    hiding={
        "d_x truncated": Hiding("lean towards 0", truncates=True, dtypes=HALVES),
        "d_x 3e-6 off": Hiding("typical", {"factor": 1 + 3e-6}, dtypes=("float32",)),
    },
    small={"plain": Sample({"y": (2, 3), "d_y": (2, 3)})},
    usual=(
        Sample({"y": (64, 1000), "d_y": (64, 1000)}),
        Sample({"y": (64, 1000), "d_y": (64, 1000)}, tiling={"block_rows": 16, "block_n": 128}),
        Sample({"y": (8, 257, 6), "d_y": (8, 257, 6)}, {"axis": 1}),
        Sample({"y": (40, 300), "d_y": (40, 300)}),
    ),
    extents={"shape": 64},
    rows=("x", "x"),
    past_2_31=long_rows_of_gradients("softmax_vjp", lambda gpu, x: gpu.op("softmax")(x), weighs=False),
    far=far,
)
