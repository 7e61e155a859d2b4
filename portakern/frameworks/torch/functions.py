"""Drop-in twins of PyTorch's own functions on portakern ops: the same arguments, the same semantics where PyTorch's
differ from the ops'.

Arrays choose the backend, as for :func:`portakern.op`; ``backend="triton"`` names one.
:mod:`portakern.frameworks.torch.swapping` puts them under a model that calls PyTorch's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from portakern.api import Op, op
from portakern.core.dispatch import Choice
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.casting import lowered, widened
from portakern.frameworks.torch.memory import is_distributed, is_under_way, readable, unreadable
from portakern.frameworks.torch.ring import across_devices, ring_of_devices
from portakern.frameworks.torch.vocabulary import mesh_axis_of_classes, row_losses

__all__ = [
    "CAUSAL",
    "LOSS_PARALLEL",
    "apply_rotary_pos_emb",
    "cross_entropy",
    "cut_within",
    "embedding",
    "into",
    "kept_op",
    "layer_norm",
    "linear_cross_entropy",
    "logsumexp",
    "loss_is_parallel",
    "matmul",
    "placed_beside",
    "rms_norm",
    "rotary_tables",
    "scaled_dot_product_attention",
    "softmax",
]

CAUSAL = (None, 0)
"""The window of a causal mask of as many keys as queries: one object, which a warm call knows by sight."""

THEIR_ATTENTION = torch._C._nn.scaled_dot_product_attention
"""The function that torch.nn.functional has under this name, unless somebody replaced it there."""

_ops: dict[tuple[str, str | None, tuple[str, ...]], Op] = {}


def kept_op(name: str, backend: str | None, spends: tuple[str, ...] = ()) -> Op:
    """The op, kept: to make one takes longer than to call it.

    ``spends``: arguments that its caller made for this call and that nobody else sees, so that a backward pass that is
    the last one may write gradients over them."""
    key = name, backend, spends
    kept = _ops.get(key)
    if kept is None:
        made = op(name, backend=backend)
        kept = _ops.setdefault(key, Op(made.spec, Choice(made.backend, spends=spends)) if spends else made)
    return kept


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on the attention op.

    Under ``torch.distributed.tensor.experimental.context_parallel`` DTensors that are cut along the sequence are served
    by :func:`~portakern.frameworks.torch.ring.ring_attention`.

    Args:
      query: (..., L, E); key: (..., S, E); value: (..., S, Ev). The leading axes broadcast; the last of them is the
        heads.
      attn_mask: bool, True where a query attends to a key; or of query's dtype or float32, added to the scores. It
        broadcasts to (..., L, S). Or a ``torch.nn.attention.bias.CausalBias`` of that shape, such as
        ``causal_lower_right(L, S)``.
      dropout_p: 0; no kernel supports dropout.
      is_causal: query i sees keys up to i (aligned at the top left).
      scale: None is 1/sqrt(E).
      enable_gqa: key and value may have fewer heads, which divide query's.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (..., L, Ev). A row with all keys masked is zeros.

    Raises:
      UnsupportedError: dropout_p > 0; a mask of a tensor subclass that has no values in memory; under context_parallel
        a mask, or tensors that one device holds. SpecError: shapes that do not broadcast; attn_mask with
        is_causal=True; an integer mask.
    """
    name = "scaled_dot_product_attention"
    if dropout_p > 0.0:
        raise UnsupportedError(
            f"{name}: dropout_p is {dropout_p}; expected 0.0: no kernel draws random numbers; pass 0.0, or apply "
            "dropout to the output"
        )
    if attn_mask is not None and is_causal:
        raise SpecError(
            f"{name}: attn_mask and is_causal=True exclude each other; pass one, with the causal mask in attn_mask"
        )
    if (type(query) is not Tensor or F.scaled_dot_product_attention is not THEIR_ATTENTION) and across_devices(query):
        return ring_of_devices(query, key, value, attn_mask, is_causal, scale, enable_gqa, backend)
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if attn_mask is None and _plain(q_shape, k_shape, v_shape, is_causal, enable_gqa):  # as most calls are
        window = None
        if is_causal:
            window = CAUSAL if q_shape[2] == k_shape[2] else (None, q_shape[2] - k_shape[2])
        o = kept_op("attention", backend)(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, window=window, scale=scale
        )
        return o.transpose(1, 2)
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise SpecError(
                f"{name}: {argument} has shape {tuple(x.shape)}; expected at least 2 axes: (..., length, head dim)"
            )
    lead, q, k, v = _same_lead(name, query, key, value, enable_gqa)
    length, keys, bias = query.shape[-2], key.shape[-2], None
    variant = _causal_variant(name, attn_mask, length, keys)
    if variant is None and attn_mask is not None:
        bias = _bias(name, attn_mask, query, lead, length, keys)
    shape = (*lead, length, value.shape[-1])
    if 0 in shape:  # nothing to compute, and a graph through which every gradient is zeros
        given = [lowered(x) for x in (query, key, value, bias) if x is not None]
        return sum(x.sum().to(given[0].dtype) for x in given) * given[0].new_empty(shape)
    window = None
    if variant is CausalVariant.LOWER_RIGHT:
        window = (None, 0)
    elif is_causal or variant is CausalVariant.UPPER_LEFT:
        if keys > length:  # later keys are past every query
            keys, k, v = length, k[:, :, :length], v[:, :, :length]
        window = (None, length - keys)
    o = kept_op("attention", backend)(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, window=window, scale=scale
    )
    o = o.transpose(1, 2)
    return o if len(lead) == 2 else o.reshape(shape)


def _plain(q: torch.Size, k: torch.Size, v: torch.Size, is_causal: bool, enable_gqa: bool) -> bool:
    """Whether arrays of these shapes are as the attention op takes them, but for the order of their axes, and a causal
    mask leaves no key without a query."""
    if not len(q) == len(k) == len(v) == 4 or 0 in q or (is_causal and k[2] > q[2]):
        return False
    heads = q[1] == k[1] or (enable_gqa and k[1] != 0 and q[1] % k[1] == 0)
    return heads and q[0] == k[0] == v[0] and k[1] == v[1] and v[3] != 0


def _same_lead(
    name: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """The leading axes of the result, and the three tensors as (batch, heads, length, head dim)."""
    query_lead, leads = tuple(query.shape[:-2]), [tuple(key.shape[:-2]), tuple(value.shape[:-2])]
    kv_heads = None
    if enable_gqa and query_lead and all(leads):
        heads, kv_heads = query_lead[-1], leads[0][-1]
        if leads[1][-1] != kv_heads or kv_heads == 0 or heads % kv_heads:
            raise SpecError(
                f"{name}: query has {heads} heads, key {kv_heads} and value {leads[1][-1]}; expected key's and "
                "value's equal, and to divide query's"
            )
        if query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]:
            return query_lead, query, key, value
        leads = [(*x[:-1], heads) for x in leads]
    try:
        lead = tuple(torch.broadcast_shapes(query_lead, *leads))
    except RuntimeError as e:
        hint = "" if enable_gqa else ", or enable_gqa=True for fewer key heads"
        raise SpecError(
            f"{name}: the leading axes {query_lead} of query, {tuple(key.shape[:-2])} of key and "
            f"{tuple(value.shape[:-2])} of value do not broadcast; make them equal{hint}"
        ) from e

    def four(x: Tensor, heads: int | None) -> Tensor:
        outer = lead if heads is None else (*lead[:-1], heads)
        x = x.expand(*outer, *x.shape[-2:])
        return x.reshape(math.prod(outer[:-1]), outer[-1] if outer else 1, *x.shape[-2:])

    return lead, four(query, None), four(key, kv_heads), four(value, kv_heads)


def _causal_variant(name: str, mask: Any, length: int, keys: int) -> CausalVariant | None:
    """Which causal mask a ``CausalBias`` stands for; None for any other mask, which is read as an array.

    Such a mask is a tensor whose memory holds nothing, and which must not be read."""
    if not isinstance(mask, CausalBias):
        return None
    if (mask.seq_len_q, mask.seq_len_kv) != (length, keys):
        raise SpecError(
            f"{name}: attn_mask is a CausalBias of shape {(mask.seq_len_q, mask.seq_len_kv)}; expected "
            f"{(length, keys)}, the lengths of query and key: make it for them"
        )
    return mask.variant


def _bias(name: str, mask: Tensor, query: Tensor, lead: tuple[int, ...], length: int, keys: int) -> Tensor:
    """An attention mask as (batch or 1, heads or 1, length or 1, keys) to add."""
    if not isinstance(mask, Tensor):
        raise SpecError(f"{name}: attn_mask is a {type(mask).__name__}; expected a tensor: pass it as a bool tensor")
    why = None if is_distributed(mask) or is_under_way(mask) else unreadable(type(mask))
    if why is not None:
        raise UnsupportedError(f"{name}: attn_mask {why}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise SpecError(
            f"{name}: attn_mask is {mask.dtype}; expected torch.bool, True where a pair takes part, or floating-point "
            "numbers, added to the scores: pass attn_mask.bool() if it holds ones and zeros"
        )
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=query.dtype, memory_format=torch.contiguous_format)
        mask = zeros.masked_fill(mask.logical_not(), -math.inf)
    full = (*lead, length, keys)
    if mask.dim() > len(full) or any(
        m not in (1, f) for m, f in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        raise SpecError(f"{name}: attn_mask has shape {tuple(mask.shape)}; expected one that broadcasts to {full}")
    mask = mask.reshape((1,) * (max(len(full), 4) - mask.dim()) + tuple(mask.shape))
    outer = mask.shape[:-3]
    if len(full) > 4 and any(n != 1 for n in outer):
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
        outer = mask.shape[:-3]
    return mask.reshape(math.prod(outer), *mask.shape[-3:]).expand(-1, -1, -1, keys)


def softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.softmax`` on the softmax op: along ``dim``, after a cast to ``dtype`` if it is not None.

    Raises:
      SpecError: dim None (PyTorch's implicit choice is deprecated) or out of range, a dtype that is not floating-point.
    """
    if dim is None:
        raise SpecError(
            "softmax: dim is None; expected an axis: PyTorch's implicit choice is deprecated, pass dim=-1 for the "
            "last axis"
        )
    x = input if dtype is None else input.to(dtype)
    if x.dim() == 0:  # PyTorch takes a number for a row of one
        return softmax(x.reshape(1), dim, _stacklevel, backend=backend).reshape(())
    y = kept_op("softmax", backend)(x, axis=dim)
    return y if dtype is None else y.to(dtype)  # autocast may have widened x again


def logsumexp(
    input: Tensor,
    dim: int | Sequence[int],
    keepdim: bool = False,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``torch.logsumexp`` on the logsumexp op, along one or several axes.

    Args:
      input: any shape; integers are cast to PyTorch's default dtype.
      dim: the axes to reduce; keepdim: keep them with extent 1.
      out: a tensor of the result's shape and dtype to write to, or an empty one, which is resized.

    Raises:
      SpecError: an axis out of range or named twice; an ``out`` of another shape or dtype, or that requires a gradient.
    """
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    rank = max(input.dim(), 1)  # PyTorch takes a number for a row of one
    if not given or any(not isinstance(d, int) or not -rank <= d < rank for d in given):
        raise SpecError(
            f"logsumexp: dim is {dim}; expected an integer from {-rank} to {rank - 1}, or several: input has shape "
            f"{tuple(input.shape)}"
        )
    axes = [d % rank for d in given]
    if len(set(axes)) < len(axes):
        raise SpecError(f"logsumexp: dim is {dim}, which names an axis twice; name each once")
    x = input if input.is_floating_point() or input.is_complex() else input.to(torch.get_default_dtype())
    x = x.reshape(1) if x.dim() == 0 else x
    axis = axes[0]
    if len(axes) > 1:
        x, axis = x.movedim(axes, [*range(-len(axes), 0)]).flatten(-len(axes)), -1
    y = kept_op("logsumexp", backend)(x, axis=axis)
    if keepdim and input.dim():
        y = y.reshape([1 if i in axes else n for i, n in enumerate(input.shape)])
    return into("logsumexp", out, y)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` on the cross_entropy op, for class indices as targets.

    Args:
      input: (C), (N, C) or (N, C, d1, ...), logits; target: input's shape without C, integers from 0 to C - 1. Beside
        an input that is a DTensor, target may be a plain tensor, the whole of which each device has. Of one that is cut
        along its classes each device takes its own, as :func:`portakern.torch.vocabulary_parallel_cross_entropy` does.
      weight, size_average, reduce: None; PyTorch deprecates the last two.
      ignore_index: rows with this target are ignored, and not counted in the mean.
      reduction: "none", "sum" or "mean", over rows in float32 before the result is rounded to input's dtype.
      label_smoothing: the part of the target that is spread evenly over all classes.

    Returns:
      target's shape or a scalar, in input's dtype (under autocast float32 for 16-bit input, as in PyTorch). The mean of
      no rows is NaN. An invalid class gives NaN, where PyTorch raises an error or aborts the process.

    Raises:
      UnsupportedError: weight, size_average, reduce, or probabilities as targets. SpecError: shapes that do not agree,
        or an unknown reduction.
    """
    if loss_is_parallel(input):
        raise UnsupportedError(
            f"cross_entropy: {LOSS_PARALLEL}; call torch.nn.functional.cross_entropy, or leave "
            "loss_parallel() out, so that input is gathered"
        )
    for argument, given in (("weight", weight), ("size_average", size_average), ("reduce", reduce)):
        if given is not None:
            instead = "" if argument == "weight" else ", or pass reduction, which it is deprecated for"
            raise UnsupportedError(f"cross_entropy: {argument} is given; expected None: {CALL_THEIRS}{instead}")
    _check_reduction("cross_entropy", reduction)
    labels = _classes(input, placed_beside(input, target))
    rows = input if input.dim() < 3 else input.movedim(1, -1)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = row_losses(kept_op("cross_entropy", backend), rows, labels, backend, **options)
    return _reduced(input, loss, labels, ignore_index, reduction)


LOSS_PARALLEL = (
    "input is cut along its classes inside loss_parallel(), in a graph or so that a device has none of them, where "
    "PyTorch's own function computes the loss"
)


def loss_is_parallel(logits: Tensor) -> bool:
    """Whether PyTorch's own function computes the loss of (..., classes) or (rows, classes, ...) logits: they are a
    DTensor that is cut along its classes, inside of PyTorch's ``loss_parallel()``, and no device can take the loss of
    its own (:func:`mesh_axis_of_classes`)."""
    if not is_distributed(logits) or not _in_loss_parallel():
        return False
    cut = {p.dim for p in logits.placements if p.is_shard()} & {1, logits.dim() - 1}
    return bool(cut) and all(mesh_axis_of_classes(logits, axis) is None for axis in cut)


@torch.compiler.assume_constant_result
def _in_loss_parallel() -> bool:
    """``loss_parallel()`` has no other sign than the functions that it gives DTensors."""
    dispatcher = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    return torch.ops.aten._log_softmax.default in getattr(dispatcher, "_custom_op_handlers", ())


def placed_beside(x: Tensor, labels: Tensor) -> Tensor:
    """Labels as they go with x: where that is a DTensor and they are a plain tensor, each device has all of them, as
    PyTorch's ``loss_parallel`` takes them."""
    if not is_distributed(x) or is_distributed(labels):
        return labels
    from torch.distributed.tensor import DTensor, Replicate

    mesh = x.device_mesh
    placed: Tensor = DTensor.from_local(labels, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return placed


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise SpecError(f"{name}: reduction is {reduction!r}; expected 'none', 'mean' or 'sum'")


def _reduced(input: Tensor, loss: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The losses of rows as PyTorch returns them."""
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / (labels != ignore_index).sum()
    return loss if widened(input) else loss.to(input.dtype)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    memory_limit: int = 0,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.linear_cross_entropy`` on the linear_cross_entropy op: the cross entropy of the logits
    input linear_weight^T for class indices as targets. The full logits are not stored unless ``memory_limit`` has room
    for them. Works with PyTorch versions without this function.

    For training, the gradient of input is computed with the loss, without the loss's cotangent; the gradient of
    linear_weight is computed in the backward pass, which computes the logits again, or reads what the forward pass
    kept.

    Args:
      input: (..., E), hidden states; linear_weight: (C, E), one row per class; target: (...), integers from 0 to C - 1.
      linear_bias, weight: None.
      reduction: "none", "sum" or "mean", over rows in float32 before the result is rounded to input's dtype.
      ignore_index: rows with this target are ignored, and not counted in the mean; None: -100.
      label_smoothing: the part of the target that is spread evenly over all classes.
      options: PyTorch's chunk options, ignored here; the op's tiling replaces them.
      memory_limit: bytes that the call may keep for its backward pass beside its arguments. Where the logits in
        input's dtype take no more, the gradient of the loss by them is kept, and the backward pass takes one matrix
        product less. Not in PyTorch's function.

    Returns:
      target's shape or a scalar, as in :func:`cross_entropy`.

    Raises:
      UnsupportedError: linear_bias, weight, probabilities as targets, a linear_weight of more than two axes.
      SpecError: shapes that do not agree, an unknown reduction, or a memory_limit that is no number of bytes.
    """
    for argument, given in (("linear_bias", linear_bias), ("weight", weight)):
        if given is not None:
            raise UnsupportedError(f"linear_cross_entropy: {argument} is given; expected None: {CALL_THEIR_LINEAR}")
    if linear_weight.dim() > 2:
        raise UnsupportedError(
            f"linear_cross_entropy: linear_weight has {linear_weight.dim()} axes; expected 2: {CALL_THEIR_LINEAR}"
        )
    _check_reduction("linear_cross_entropy", reduction)
    check_memory_limit("linear_cross_entropy", memory_limit)
    if target.is_floating_point():
        raise UnsupportedError(
            f"linear_cross_entropy: target is {target.dtype}, probabilities of classes; expected integers, the "
            f"classes: {CALL_THEIR_LINEAR} for probabilities"
        )
    labels = placed_beside(input, target.long() if target.dtype == torch.uint8 else target)
    ignored = -100 if ignore_index is None else ignore_index
    loss = kept_op("linear_cross_entropy", backend)(
        input,
        linear_weight,
        labels,
        ignore_index=ignored,
        label_smoothing=label_smoothing,
        keep_logit_gradients=logits_fit(input, linear_weight, memory_limit),
    )
    return _reduced(input, loss, labels, ignored, reduction)


def check_memory_limit(function: str, memory_limit: Any) -> None:
    """SpecError unless a function's ``memory_limit`` is a number of bytes."""
    if not isinstance(memory_limit, int) or isinstance(memory_limit, bool) or memory_limit < 0:
        raise SpecError(f"{function}: memory_limit is {memory_limit!r}; expected a number of bytes, 0 or more")


def logits_fit(hidden: Tensor, weight: Tensor, memory_limit: int) -> bool:
    """Whether the logits of (..., d) hidden states by (classes, d) weights take no more than so many bytes."""
    logits = math.prod(hidden.shape[:-1]) * weight.shape[0]
    return bool(0 < logits * hidden.element_size() <= memory_limit)


CALL_THEIR_LINEAR = "call torch.nn.functional.linear and cross_entropy"


CALL_THEIRS = "call torch.nn.functional.cross_entropy"


def _classes(input: Tensor, target: Tensor) -> Tensor:
    """The class of each row of logits, as the op takes it."""
    if target.is_floating_point():
        raise UnsupportedError(
            f"cross_entropy: target is {target.dtype}, probabilities of classes; expected integers, the classes: "
            f"{CALL_THEIRS} for probabilities"
        )
    shape = tuple(input.shape)
    if not shape or tuple(target.shape) != (() if len(shape) == 1 else shape[:1] + shape[2:]):
        raise SpecError(
            f"cross_entropy: target has shape {tuple(target.shape)} and input {shape}; expected (C), (N, C) or "
            "(N, C, d1, ...) for input, and the same without C for target"
        )
    return target.long() if target.dtype == torch.uint8 else target  # bytes are classes to PyTorch as well


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.layer_norm`` on the layernorm op, over the trailing axes ``normalized_shape``, the shape of
    weight and bias.

    Raises:
      SpecError: input's shape does not end with normalized_shape, or weight or bias has another shape.
    """
    return _normalised("layer_norm", kept_op("layernorm", backend), input, normalized_shape, eps, weight, bias)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.embedding`` on the embedding op.

    Args:
      input: int32 or int64 of any shape: rows of weight, from 0 up.
      weight: (rows, d), the table.
      padding_idx: a row without a gradient; a negative one counts from the end.
      max_norm, norm_type: None, with which norm_type says nothing: the op writes to no table.
      scale_grad_by_freq, sparse: False: gradients are sums, and dense.

    Returns:
      (*input.shape, d), of weight's dtype, with the bits of its rows. A number that is no row gives NaN, where PyTorch
      raises an error or aborts the process. Each row of the gradient has the same bits whatever other rows are named.

    Raises:
      UnsupportedError: max_norm, scale_grad_by_freq, sparse. SpecError: shapes or dtypes that do not agree, or a
        padding_idx that is no row.
    """
    if max_norm is not None or scale_grad_by_freq or sparse:
        given = {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
        name = next(n for n, value in given.items() if value is not None and value is not False)
        raise UnsupportedError(
            f"embedding: {name} is {given[name]}; expected {'None' if name == 'max_norm' else False}: "
            "call torch.nn.functional.embedding"
        )
    if padding_idx is not None and weight.dim() == 2:
        rows = weight.shape[0]
        if not -rows <= padding_idx < rows:
            raise SpecError(
                f"embedding: padding_idx is {padding_idx}; expected a row of weight, from {-rows} to {rows - 1}"
            )
        padding_idx %= rows
    try:
        return kept_op("embedding", backend)(weight, input, padding_index=padding_idx)
    except SpecError as e:
        raise SpecError(f"{e} (ids is input, padding_index is padding_idx)") from e


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.rms_norm`` on the rmsnorm op, over the trailing axes ``normalized_shape``, the shape of
    weight.

    Args:
      eps: None: ``torch.finfo(dtype).eps`` of the compute dtype: float32 for 16-bit input, else input's.

    Raises:
      SpecError: input's shape does not end with normalized_shape, or weight has another shape.
    """
    if eps is None:
        eps = FLOAT64_EPS if input.dtype == torch.float64 else FLOAT32_EPS
    return _normalised("rms_norm", kept_op("rmsnorm", backend), input, normalized_shape, eps, weight)


FLOAT32_EPS, FLOAT64_EPS = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def _normalised(
    name: str, norm: Op, input: Tensor, normalized_shape: Sequence[int], eps: float, *affine: Tensor | None
) -> Tensor:
    """An op along the last axis, along all the trailing axes ``normalized_shape``. ``affine``: weight, bias."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) == 1 and input.shape[-1:] == shape:  # as most calls have it
        weight, bias = (*affine, None)[:2]
        if (weight is None or weight.shape == shape) and (bias is None or bias.shape == shape):
            return norm(input, *affine, eps=eps)
    elif not shape or input.shape[-len(shape) :] != shape:
        raise SpecError(
            f"{name}: normalized_shape is {shape}; expected the last axes of input, whose shape is {tuple(input.shape)}"
        )
    for argument, x in zip(("weight", "bias"), affine, strict=False):
        if x is not None and x.shape != shape:
            raise SpecError(f"{name}: {argument} has shape {tuple(x.shape)}; expected normalized_shape, {shape}")
    n, lead = math.prod(shape), tuple(input.shape[: -len(shape)])
    flat = [None if x is None else x.reshape(n) for x in affine]
    return norm(input.reshape(*lead, n), *flat, eps=eps).reshape(input.shape)


def matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """``torch.matmul`` on the matmul op: vectors are rows or columns, leading axes broadcast.

    Args:
      input: (..., m, k) or (k,); other: (..., k, n) or (k,).
      out: a tensor of the result's shape and dtype to write to, or an empty one, which is resized.

    Raises:
      SpecError: shapes that do not agree; a scalar operand; an ``out`` of another shape or dtype, or that requires a
        gradient.
    """
    if input.dim() > 1 and other.dim() > 1:  # as most calls have it
        return into("matmul", out, rows_times(kept_op("matmul", backend), input, other))
    for name, x in (("input", input), ("other", other)):
        if x.dim() == 0:
            raise SpecError(f"matmul: {name} is a number; expected at least 1 axis: multiply with * instead")
    a, b = input[None] if input.dim() == 1 else input, other[:, None] if other.dim() == 1 else other
    c = rows_times(kept_op("matmul", backend), a, b)
    c = c.squeeze(-2) if input.dim() == 1 else c
    c = c.squeeze(-1) if other.dim() == 1 else c
    return into("matmul", out, c)


def rows_times(product: Op, a: Tensor, b: Tensor) -> Tensor:
    """(..., m, k) @ (..., k, n). By one matrix, rows along all leading axes are one product of many rows, and make one
    gradient of the matrix, not a batch of them."""
    if a.dim() == 2 or b.dim() != 2 or cut_within(a):
        return product(a, b)
    return product(a.flatten(0, -2), b).view(*a.shape[:-1], b.shape[1])


def cut_within(x: Tensor) -> bool:
    """Whether a tensor is a DTensor that is cut along an axis between the first and the last one: flattened, its rows
    are no longer those of one device."""
    return is_distributed(x) and any(p.is_shard() and 0 < p.dim < x.dim() - 1 for p in x.placements)


def into(name: str, out: Tensor | None, result: Tensor) -> Tensor:
    """The result, written to ``out`` where the caller gives that: of the result's shape, or without an element, which
    makes PyTorch give it the result's shape."""
    if out is None:
        return result
    fits = out.shape == result.shape or out.numel() == 0
    if not fits or out.dtype != result.dtype or out.device != result.device:
        raise SpecError(
            f"{name}: out is {out.dtype} {tuple(out.shape)} on {out.device}; expected {result.dtype} "
            f"{tuple(result.shape)} on {result.device}: make it so, or leave it out"
        )
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise SpecError(f"{name}: out cannot take part in a gradient; leave it out")
    if out.shape != result.shape:
        out.resize_(result.shape)
    elif not torch.compiler.is_compiling():
        readable(name, "out", out)  # not to write to memory that was given back; a traced tensor has none
    return out.copy_(result)


def rotary_tables(
    positions: Tensor, inv_freq: Tensor, *, scaling: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin tables for the rope op, one column per pair: cos(p f) scaling and sin(p f) scaling, rounded once.

    The angle is computed in float64 with a relative error of 2^-53: 10^-11 at position 131072, where float32 would have
    an error of up to 0.008.

    Args:
      positions: (seq,) or (batch, seq), integers; inv_freq: (pairs,), the angle of each pair between adjacent
        tokens, with the model's scaling; on the same device.
      scaling: the attention factor.
      dtype: dtype of the tables: float32, or that of the queries.

    Returns:
      cos, sin: (1 or batch, seq, pairs).
    """
    angle = torch.atleast_2d(positions).double()[..., None] * inv_freq.double()
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """transformers' function of this name, for models that pair the two halves of a head (Llama and most others), on
    the rope op. It takes and returns views and copies nothing.

    Args:
      q, k: (batch, heads, seq, d), or (batch, seq, heads, d) with unsqueeze_dim=2; the numbers of heads may differ.
      cos, sin: (batch or 1, seq, 2 pairs) from transformers' rotary embeddings; the second half repeats the first, and
        is not read. Elements of a head beyond the first 2 pairs are returned unchanged.
      unsqueeze_dim: the axis of the heads in q and k: 1 or 2.

    Returns:
      q, k: rotated, with their axes in the same order. cos and sin get no gradient.

    Raises:
      SpecError: another unsqueeze_dim, or tables with an odd number of columns.
    """
    if unsqueeze_dim not in (1, 2):
        raise SpecError(
            f"apply_rotary_pos_emb: unsqueeze_dim is {unsqueeze_dim!r}; expected 1, for q of (batch, heads, seq, d), "
            "or 2, for (batch, seq, heads, d)"
        )
    if cos.shape[-1] % 2:
        raise SpecError(
            f"apply_rotary_pos_emb: cos has {cos.shape[-1]} columns; expected an even number, two equal halves. Call "
            "the rope op with tables of one column a pair"
        )
    rope, pairs = kept_op("rope", backend), cos.shape[-1] // 2
    cos, sin = cos.narrow(-1, 0, pairs), sin.narrow(-1, 0, pairs)
    if cos.requires_grad or sin.requires_grad:
        cos, sin = cos.detach(), sin.detach()
    if unsqueeze_dim == 2:
        return rope(q, cos, sin), rope(k, cos, sin)
    return rope(q.transpose(1, 2), cos, sin).transpose(1, 2), rope(k.transpose(1, 2), cos, sin).transpose(1, 2)
