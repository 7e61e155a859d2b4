"""Cross entropy of the logits of a linear layer, a chunk of rows at a time.

    x = h weight^T        loss, lse = those of cross_entropy        slope = b weight
    b_j = exp(x_j - lse) (1 + 2 z lse) - (1 - e) [j = t] - e / n

hidden h: (*batch, d), weight: (n, d), labels t, loss, lse: (*batch), slope: (*batch, d). ``chunk_rows`` rows
have their logits in memory at a time, in hidden's dtype: matmul writes them, cross_entropy reads them, the gradient of
that writes b over them, and matmul meets them again. All rows of a chunk are rows of one product, and no row sees
another, so that chunks change no bit.

The floor is 2 T n d operations for the losses and as many for slopes, which matmul does at its rate, beside 3 to 5
walks over the logits, 2 T n bytes each in 16 bits: at T = 8192, d = 4096, n = 128256 on an H100 26 ms beside 3 ms.

Source: Hsu et al. 2024, "Liger Kernel", section 3.2, for chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from portakern.backends.triton import BACKEND
from portakern.backends.triton.copies import in_order
from portakern.backends.triton.gpu import cross_entropy as losses
from portakern.backends.triton.gpu import cross_entropy_vjp as brackets
from portakern.backends.triton.gpu import matmul as portable
from portakern.backends.triton.gpu.family import FAMILY
from portakern.backends.triton.launch import refuse_tile, torch_dtype
from portakern.backends.triton.layout import collapse, fresh
from portakern.backends.triton.lib.rows import tile_rows
from portakern.backends.triton.outline import Outline
from portakern.backends.triton.parts import in_parts, scratch
from portakern.core.registry import find_spec
from portakern.core.tilings import default

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

Product = Callable[[Any, Any, Any, Any], None]
"""(call, a, b, c): c = a b, by whichever matmul a family has."""


def as_product(call: Call, a: Any, b: Any, m: int, n: int, k: int) -> Call:
    """The call of matmul that multiplies a (m, k) and b (k, n)."""
    return call.replace(
        spec=find_spec("matmul"),
        arrays={"a": a, "b": b},
        options={"precision": call.options["precision"], "out_dtype": None},
        dims={"batch": (), "m": m, "n": n, "k": k},
        wants=("c",),
    )


def multiply(call: Call, a: Any, b: Any, c: Any) -> None:
    """c = a b, with the tiling that matmul has for it."""
    of = as_product(call, a, b, a.shape[0], b.shape[1], a.shape[1])
    matmul = BACKEND.implementation("matmul", FAMILY)
    assert matmul is not None
    portable.matmul(of, default(matmul, of).tiling, c)


def refused(call: Call, m: int, n: int, k: int) -> str | None:
    """Why matmul does not take a product of these extents."""
    of = as_product(call, call.arrays["hidden"], call.arrays["weight"], m, n, k)
    matmul = BACKEND.implementation("matmul", FAMILY)
    assert matmul is not None
    return portable.supports(of, default(matmul, of).tiling)


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "d": call.dims["d"]}


def default_tiling(call: Call) -> dict[str, int]:
    """Rows enough that the product with weight, of few columns, has tiles for all multiprocessors: on an H100 at 8192
    rows of 4096 columns, 128256 classes, 2048 take 24.9 ms, 512 34.8, 1024 26.9 and 4096 25.6."""
    return {"chunk_rows": 2048}


def walks_of(call: Call) -> tuple[dict[str, int], dict[str, int]]:
    """The tilings of the loss of the logits that one chunk has, and of their gradient."""
    n, arch = call.dims["n"], call.target.arch
    return tile_rows(n, arch), brackets.tile_brackets(n, arch)


def supports(
    call: Call, tiling: Mapping[str, int], refused: Callable[[Any, int, int, int], str | None] = refused
) -> str | None:
    rows, n, d = prod(call.dims["batch"]), call.dims["n"], call.dims["d"]
    chunk = min(tiling["chunk_rows"], rows)
    walks = walks_of(call)
    return (
        refused(call, chunk, n, d)
        or refused(call, chunk, d, n)
        or next(filter(None, (refuse_tile(call, walk, chunk) for walk in walks)), None)
    )


@BACKEND.implements("linear_cross_entropy", key=key, tiling=default_tiling, supports=supports)
def linear_cross_entropy(call: Call, tiling: Mapping[str, int]) -> tuple[Any, ...]:
    return in_chunks(call, tiling, multiply)


def in_chunks(call: Call, tiling: Mapping[str, int], multiply: Product) -> tuple[Any, ...]:
    hidden, labels, n, d = flat(call, "hidden", "labels", "n", "d")
    weight, rows = call.arrays["weight"], prod(call.dims["batch"])
    wide = torch_dtype("float64" if call.dtype == "float64" else "float32")
    # The slope needs lse and lse_low, whether or not the caller does.
    made = ({"loss"}, {"lse", "slope"}, {"lse_low", "slope"})
    loss, lse, low = (fresh((rows,), wide, hidden.device) if of & {*call.wants} else None for of in made)
    slope = fresh((rows, d), hidden.dtype, hidden.device) if "slope" in call.wants else None
    walk, back = walks_of(call)
    chunk = min(tiling["chunk_rows"], rows)
    room = scratch(hidden, chunk, n)

    def piece(
        first: int, start: Any, h: Any, t: Any, own_loss: Any, own_lse: Any, own_low: Any, own_slope: Any
    ) -> None:
        x = room(h.shape[0], n)
        multiply(call, h, weight.mT, x)
        losses.losses_into(call, x, t, own_loss, (own_lse, own_low), walk)
        if slope is not None:
            b = overwritten(x)
            brackets.gradient_into(call, x, t, (own_lse, own_low), None, b, back, 0, n)
            multiply(call, b, weight, own_slope)

    in_parts(rows, chunk, piece, (hidden, labels), (loss, lse, low, slope))
    found: dict[str, Any] = {"loss": loss, "lse": lse, "slope": slope, "lse_low": low}
    shapes = call.outputs
    return tuple(found[o.name].reshape(shapes[o.name][0]) if o.name in call.wants else None for o in call.spec.outputs)


def overwritten(x: Any) -> Any:
    """Where the gradient by logits x goes: over them, or to an array of its own where a launch in another library's
    program may not be told of one array twice."""
    return fresh(x.shape, x.dtype, x.device) if isinstance(x, Outline) else x


def flat(call: Call, rows: str, numbers: str, *dims: str) -> tuple[Any, ...]:
    """An array by rows, one of a number a row, and extents."""
    x: torch.Tensor = call.arrays[rows]
    apart = len(collapse(tuple(x.shape[:-1]), x.stride()[:-1])[0]) > 1  # as rows of a slice of each sequence are
    return (
        (in_order(call, x) if apart else x).reshape(-1, x.shape[-1]),
        in_order(call, call.arrays[numbers]).reshape(-1),
        *(call.dims[name] for name in dims),
    )
