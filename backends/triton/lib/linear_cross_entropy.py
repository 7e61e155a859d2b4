"""The cross entropy of the logits of a linear layer, rows at a time, and its gradients, classes at a time, by whichever
products a variant has."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from portakern.backends.triton.chunked import in_parts, scratch
from portakern.backends.triton.configs import LogitGradientsConfig, LogitsConfig, RowsConfig
from portakern.backends.triton.copies import in_order
from portakern.backends.triton.launch import cdiv, launch, refuse_tile, torch_dtype
from portakern.backends.triton.layout import aligned, collapse, fresh, pow2_at_least, result_like, walk_rows
from portakern.backends.triton.lib.cross_entropy import gradient_into, losses_into, tile_brackets
from portakern.backends.triton.lib.rows import TiledExtents, block_tile, start_of, tile_of, tile_rows_once
from portakern.backends.triton.trace import AbstractArray
from portakern.core.registry import find_spec

if TYPE_CHECKING:
    import torch

    from portakern.core.call import Call

Product = Callable[[Any, Any, Any, Any], None]
"""(call, a, b, c): c = a b, by whichever matmul a family has."""
Refused = Callable[..., "str | None"]
"""(call, m, n, k, stored=None): why a family's matmul does not take a product of these extents, stored in this dtype or
in the call's."""


def as_product(call: Call, a: Any, b: Any, m: int, n: int, k: int, stored: str | None = None) -> Call:
    """The call of matmul that multiplies a (m, k) and b (k, n), stored in another dtype than the call's if one is
    named."""
    return call.replace(
        spec=find_spec("matmul"),
        arrays={"a": a, "b": b},
        options={"precision": call.options["precision"], "out_dtype": None if stored == call.dtype else stored},
        dims={"batch": (), "m": m, "n": n, "k": k},
        wants=("c",),
    )


def key(call: Call) -> dict[str, str | int]:
    return {"dtype": call.dtype, "n": call.dims["n"], "d": call.dims["d"]}


def default_tiling(call: Call) -> LogitsConfig:
    """Rows enough that the product with weight, of few columns, has tiles for all multiprocessors: on an H100 at 8192
    rows of 4096 columns, 128256 classes, 2048 take 24.9 ms, 512 34.8, 1024 26.9 and 4096 25.6."""
    return LogitsConfig(chunk_rows=2048)


def walks_of(call: Call) -> tuple[RowsConfig, RowsConfig]:
    """The tilings of the loss of the logits that one chunk has, and of their gradient."""
    n, arch = call.dims["n"], call.target.arch
    return tile_rows_once(n, arch), tile_brackets(n, arch)


def supports(call: Call, config: LogitsConfig, refused: Refused) -> str | None:
    rows, n, d = prod(call.dims["batch"]), call.dims["n"], call.dims["d"]
    chunk = min(config.chunk_rows, rows)
    walks = walks_of(call)
    return (
        refused(call, chunk, n, d)
        or refused(call, chunk, d, n)
        or next(filter(None, (refuse_tile(call, walk, chunk) for walk in walks)), None)
    )


def in_chunks(call: Call, config: LogitsConfig, multiply: Product) -> tuple[Any, ...]:
    hidden, labels, n, d = flat(call, "hidden", "labels", "n", "d")
    weight, rows, wants = call.arrays["weight"], prod(call.dims["batch"]), {*call.wants}
    wide = torch_dtype("float64" if call.dtype == "float64" else "float32")
    # The slope and b need lse and lse_low, whether or not the caller does.
    derived = wants & {"slope", "logit_gradients"}
    made = ({"loss"} & wants, derived or {"lse"} & wants, derived or {"lse_low"} & wants)
    loss, lse, low = (fresh((rows,), wide, hidden.device) if of else None for of in made)
    slope, kept = (
        fresh((rows, width), hidden.dtype, hidden.device) if name in wants else None
        for name, width in (("slope", d), ("logit_gradients", n))
    )
    walk, back = walks_of(call)
    chunk = min(config.chunk_rows, rows)
    room = scratch(hidden, chunk, n) if kept is None or isinstance(kept, AbstractArray) else None

    def piece(
        first: int, start: Any, h: Any, t: Any, own_loss: Any, own_lse: Any, own_low: Any, own_slope: Any, own_kept: Any
    ) -> None:
        x = own_kept if room is None else room(h.shape[0], n)
        multiply(call, h, weight.mT, x)
        losses_into(call, x, t, own_loss, (own_lse, own_low), walk)
        if derived:
            b = overwritten(x) if own_kept is None else own_kept
            gradient_into(call, x, t, (own_lse, own_low), None, b, back, 0, n)
            if own_slope is not None:
                multiply(call, b, weight, own_slope)

    in_parts(rows, chunk, piece, (hidden, labels), (loss, lse, low, slope, kept))
    found: dict[str, Any] = {"loss": loss, "lse": lse, "slope": slope, "logit_gradients": kept, "lse_low": low}
    shapes = call.outputs
    return tuple(found[o.name].reshape(shapes[o.name][0]) if o.name in wants else None for o in call.spec.outputs)


def overwritten(x: Any) -> Any:
    """Where the gradient by logits x goes: over them, or to an array of its own where a launch in another library's
    program may not be told of one array twice."""
    return fresh(x.shape, x.dtype, x.device) if isinstance(x, AbstractArray) else x


def flat(call: Call, rows: str, numbers: str, *dims: str) -> tuple[Any, ...]:
    """An array by rows, one of a number a row, and extents."""
    x: torch.Tensor = call.arrays[rows]
    apart = len(collapse(tuple(x.shape[:-1]), x.stride()[:-1])[0]) > 1  # as rows of a slice of each sequence are
    return (
        (in_order(call, x) if apart else x).reshape(-1, x.shape[-1]),
        in_order(call, call.arrays[numbers]).reshape(-1),
        *(call.dims[name] for name in dims),
    )


@triton.jit
def linear_cross_entropy_vjp_scale_kernel(x, labels, factor, y, extents, ignored, x_strides, tile: tl.constexpr):
    """y = factor x of each row, 0 of one that is ignored."""
    n = aligned(extents.n, tile.unit)
    row, col = tile_of(extents.steps, tile)
    row_ok = row < extents.height
    counted = (row_ok & (tl.load(labels + row, mask=row_ok, other=ignored).to(tl.int64) != ignored))[:, None]
    g = tl.load(factor + row, mask=row_ok, other=0.0).to(tile.acc_dtype)[:, None]
    x_row = start_of(x, row, extents, x_strides, tile)
    t = tl.load(x_row + col * x_strides.n, mask=counted & (col < n), other=0.0).to(tile.acc_dtype)
    out = tl.where(counted, g * t, 0.0)
    tl.store(y + (row * n)[:, None] + col, out.to(y.dtype.element_ty), mask=row_ok[:, None] & (col < n))


def gradient_tiling(call: Call) -> LogitGradientsConfig:
    """About half as many classes as hidden has columns, whose logits take half as much memory as hidden does; but not
    few. With 128256 classes and 8192 rows of 4096 columns the loss and its gradients take 52.1 ms on an H100 in chunks
    of 2048, and 53 to 54 in chunks of 4096."""
    return LogitGradientsConfig(chunk_n=pow2_at_least(cdiv(call.dims["d"], 2), 2048, 8192))


def supports_gradient(call: Call, config: LogitGradientsConfig, refused: Refused) -> str | None:
    rows, n, d = prod(call.dims["batch"]), call.dims["n"], call.dims["d"]
    chunk = min(config.chunk_n, n)
    of_weight = (scaling(call), d) if keeps(call) else (bracketing(call, chunk), chunk)
    walks = {"d_hidden": (scaling(call), d), "d_weight": of_weight}
    reasons = [
        refuse_tile(call, walk, rows * cdiv(length, walk.block_n))
        for name, (walk, length) in walks.items()
        if name in call.wants
    ]
    if "d_weight" in call.wants and keeps(call):
        reasons += [refused(call, n, d, rows, call.outputs["d_weight"][1])]
    elif "d_weight" in call.wants:
        reasons += [refused(call, rows, chunk, d), refused(call, chunk, d, rows, call.outputs["d_weight"][1])]
    return next(filter(None, reasons), None)


def keeps(call: Call) -> bool:
    """Whether the forward call kept b of all rows."""
    return bool(call.options["keep_logit_gradients"])


def bracketing(call: Call, n: int) -> RowsConfig:
    """The tiling of the gradient of cross_entropy on rows of n."""
    return tile_brackets(n, call.target.arch)


def scaling(call: Call) -> RowsConfig:
    """The tiling of rows that are scaled: that of as long a row of another elementwise kernel."""
    return bracketing(call, call.dims["d"])


def gradients_in_chunks(call: Call, config: LogitGradientsConfig, multiply: Product) -> tuple[Any, ...]:
    """The weight's gradient first: its scratch is free again when the other's memory is taken."""
    of_weight = kept_weight_gradient if keeps(call) else weight_gradient
    d_weight = of_weight(call, config, multiply) if "d_weight" in call.wants else None
    return hidden_gradient(call) if "d_hidden" in call.wants else None, d_weight


def weight_gradient(call: Call, config: LogitGradientsConfig, multiply: Product) -> Any:
    hidden, labels, n = flat(call, "hidden", "labels", "n")
    weight, rows = call.arrays["weight"], hidden.shape[0]
    lse, d_loss, low = (
        None if call.arrays[name] is None else in_order(call, call.arrays[name]).reshape(-1)
        for name in ("lse", "d_loss", "lse_low")
    )
    chunk = min(config.chunk_n, n)
    d_weight = fresh(weight.shape, torch_dtype(call.outputs["d_weight"][1]), weight.device)
    room = scratch(hidden, rows, chunk)

    def piece(first: int, start: Any, w: Any, own: Any) -> None:
        """``w``: the rows of weight from class first, and start, on; ``own``: those of its gradient."""
        length = w.shape[0]
        x = room(rows, length)
        multiply(call, hidden, w.mT, x)
        d_x, walk = overwritten(x), bracketing(call, length)
        gradient_into(call, x, labels, (lse, low), d_loss, d_x, walk, first, n, start)
        multiply(call, d_x.mT, hidden, own)

    in_parts(n, chunk, piece, (weight,), (d_weight,))
    return d_weight


def kept_weight_gradient(call: Call, config: LogitGradientsConfig, multiply: Product) -> Any:
    """b^T (d_loss h), b as it was kept."""
    weight, rows, d = call.arrays["weight"], prod(call.dims["batch"]), call.dims["d"]
    weighed = fresh(call.arrays["hidden"].shape, weight.dtype, weight.device)
    scale_rows(call, call.arrays["hidden"], weighed)
    d_weight = fresh(weight.shape, torch_dtype(call.outputs["d_weight"][1]), weight.device)
    b, _ = flat(call, "logit_gradients", "labels")
    multiply(call, b.mT, weighed.reshape(rows, d), d_weight)
    return d_weight


def hidden_gradient(call: Call) -> Any:
    d_hidden = result_like(call.arrays["slope"], call, "d_hidden")
    scale_rows(call, call.arrays["slope"], d_hidden)
    return d_hidden


def scale_rows(call: Call, x: Any, y: Any) -> None:
    """y = d_loss x of each row, 0 of one that is ignored; y is contiguous, and may be x."""
    d, walk = call.dims["d"], scaling(call)
    labels, d_loss = (in_order(call, call.arrays[name]) for name in ("labels", "d_loss"))
    (x,), rows = walk_rows(x.ndim - 1, x)
    steps = cdiv(d, walk.block_n)
    launch(linear_cross_entropy_vjp_scale_kernel, cdiv(rows.height, walk.block_rows) * steps, call, x, labels,
           d_loss, y, TiledExtents(rows.height, rows.inner, d, steps), call.options["ignore_index"],
           rows.strides[0], tile=block_tile(call, rows, walk), num_warps=walk.num_warps)  # fmt: skip
