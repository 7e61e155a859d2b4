"""QuACK's kernels in CuTe DSL, where ``quack-kernels`` is installed (Dao et al. 2025, "Getting memory-bound kernels to
speed-of-light")."""

from __future__ import annotations

from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call

BACKEND = Backend(
    "quack",
    framework="torch",
    peer=True,
    platforms=("cuda",),
    requires=("torch", "quack"),
    install="quack-kernels",
    refusals=(LACKS, "QuACK computes", "QuACK takes"),
)
BYTES = 16
"""It copies so many at a time: a row is a multiple of them."""


def whole_rows(call: Call) -> str | None:
    """Why it would not take the rows of the first array."""
    first = call.arrays[call.spec.arrays[0].name]
    if call.dtype == "float64":
        return "QuACK computes in float32, which is less than float64"
    if first.shape[-1] * first.element_size() % BYTES:
        return f"QuACK takes rows of a multiple of {BYTES} bytes; these hold {first.shape[-1]} elements"
    if not all(a is None or a.is_contiguous() for a in call.arrays.values()):
        return "QuACK takes contiguous rows: pass x.contiguous()"
    return None


def along_rows(call: Call) -> str | None:
    """Why its softmax does not take a call."""
    x = call.arrays[call.spec.arrays[0].name]
    if call.options["axis"] not in (-1, x.ndim - 1):
        return "QuACK takes the last axis only: move yours there, x.movedim(axis, -1)"
    return whole_rows(call)


def wide_weights(call: Call) -> str | None:
    """Why its layer norm does not take a call."""
    weight, bias = call.arrays["weight"], call.arrays["bias"]
    if weight is None or not all(a is None or a.element_size() == 4 for a in (weight, bias)):
        return "QuACK takes a layer norm with its weight, and its bias if there is one, in float32"
    return whole_rows(call)


def _rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


@provides(BACKEND, refuses=along_rows, gradients=False)
def softmax(x: Any, *, axis: int = -1) -> Any:
    from quack import softmax as quack_softmax

    return quack_softmax(_rows(x)).view(x.shape)


@provides(BACKEND, refuses=along_rows, gradients=False)
def softmax_vjp(y: Any, d_y: Any, *, axis: int = -1) -> Any:
    from quack.softmax import softmax_bwd

    return softmax_bwd(_rows(d_y), _rows(y)).view(y.shape)


@provides(BACKEND, refuses=whole_rows)
def rmsnorm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    from quack import rmsnorm as quack_rmsnorm

    return quack_rmsnorm(_rows(x), weight, eps=eps).view(x.shape)


@provides(BACKEND, refuses=wide_weights, gradients=False)
def layernorm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    from quack.rmsnorm import layernorm_fwd

    return layernorm_fwd(_rows(x), weight, bias, eps).view(x.shape)
