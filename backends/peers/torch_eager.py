"""PyTorch's own functions, run eagerly: what a model calls that knows nothing of portakern."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend
from portakern.core.call import Call
from portakern.spec.dtypes import numpy_dtype

BACKEND = Backend(
    "torch",
    framework="torch",
    peer=True,
    platforms=("cpu", "cuda", "rocm"),
    requires=("torch",),
    extra="triton",
    refusals=(LACKS, "torch wants", "torch is set"),
)


def one_dtype(call: Call) -> str | None:
    """Beside 16-bit arrays the spec allows float32 ones: torch refuses them, or lets them decide the result's dtype."""
    first = call.spec.arrays[0].name
    for a in call.spec.arrays:
        array = call.arrays[a.name]
        if a.or_dtypes and array is not None and array.dtype != call.arrays[first].dtype:
            return f"torch wants {a.name} in the dtype of {first}: cast it, {a.name}.to({first}.dtype)"
    return None


def as_precise(call: Call) -> str | None:
    """torch says once for the process whether float32 products may be tf32; the spec says it for each call."""
    import torch

    tf32 = torch.get_float32_matmul_precision() != "highest"
    if tf32 and call.dtype == "float32" and call.options["precision"] == "ieee":
        asked = "torch.set_float32_matmul_precision('highest'), or precision='tf32'"
        return f"torch is set to multiply float32 as tf32; pass what you want: {asked}"
    return None


@provides(BACKEND, gradients=False)
def softmax(x: Any, *, axis: int = -1) -> Any:
    import torch

    return torch.softmax(x, axis)


@provides(BACKEND, gradients=False)
def softmax_vjp(y: Any, d_y: Any, *, axis: int = -1) -> Any:
    """What autograd runs for softmax: it saves y, as the spec does."""
    import torch

    return torch._softmax_backward_data(d_y, y, axis, y.dtype)


@provides(BACKEND)
def logsumexp(x: Any, *, axis: int = -1) -> Any:
    import torch

    return torch.logsumexp(x, axis)


@provides(BACKEND)
def swiglu(gate: Any, up: Any) -> Any:
    """As models write it: two functions, of which the first rounds its result."""
    from torch.nn import functional

    return functional.silu(gate) * up


@provides(BACKEND)
def geglu(gate: Any, up: Any, *, approximate: str = "none") -> Any:
    """As models write it: two functions, of which the first rounds its result."""
    from torch.nn import functional

    return functional.gelu(gate, approximate=approximate) * up


def any_x(call: Call) -> dict[str, Any]:
    """What rope's gradients may be taken at: they are the same everywhere."""
    return {"x": call.arrays["d_y"].clone()}


@provides(BACKEND, refuses=one_dtype, before=any_x)
def rope(x: Any, cos: Any, sin: Any) -> Any:
    """As models write it, of halves: the tables twice beside each other, and the half that is turned made anew."""
    import torch

    pairs = cos.shape[-1]
    cos, sin = (torch.cat((t, t), -1)[:, :, None] for t in (cos, sin))
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    y = turned * cos + torch.cat((-turned[..., pairs:], turned[..., :pairs]), -1) * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


@provides(BACKEND, outputs=2)
def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> Any:
    """As engines that split keys write it, each part without keys left out."""
    import torch

    def weighed(o: Any, lse: Any, other: Any) -> Any:
        weight, empty = torch.sigmoid(lse - other), lse == -torch.inf
        weight, empty = (x.transpose(-1, -2)[..., None] for x in (weight, empty))
        return torch.where(empty, 0.0, weight * o)

    o = weighed(o_a, lse_a, lse_b) + weighed(o_b, lse_b, lse_a)
    return o.to(o_a.dtype), torch.logaddexp(lse_a, lse_b)


@provides(BACKEND, refuses=one_dtype)
def layernorm(x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    from torch.nn import functional

    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@provides(BACKEND, refuses=one_dtype)
def rmsnorm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    from torch.nn import functional

    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def two_terms(call: Call) -> dict[str, Any]:
    """Two terms of the sum that a call of the gradients has: itself and zeros."""
    import torch

    total = call.arrays["residual_out"]
    return {"x": total, "residual": torch.zeros_like(total)}


@provides(BACKEND, refuses=one_dtype, outputs=2, before=two_terms)
def add_layernorm(x: Any, residual: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
    """As models write it: an addition and a norm."""
    total = x + residual
    return layernorm(total, weight, bias, eps=eps), total


@provides(BACKEND, refuses=one_dtype, outputs=2, before=two_terms)
def add_rmsnorm(x: Any, residual: Any, weight: Any = None, *, eps: float = 1e-6) -> Any:
    """As models write it: an addition and a norm."""
    total = x + residual
    return rmsnorm(total, weight, eps=eps), total


@provides(BACKEND)
def cross_entropy(logits: Any, labels: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> Any:
    """As models call it: on logits that are widened to float32, which all of them then are in memory."""
    import torch
    from torch.nn import functional

    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = functional.cross_entropy(
        wide.reshape(-1, logits.shape[-1]),
        labels.reshape(-1).long(),
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return loss.reshape(labels.shape)


@contextmanager
def as_asked(call: Call) -> Iterator[None]:
    """While inside, torch multiplies float32 as the call's ``precision`` says, where it takes that from the process."""
    import torch

    before = torch.get_float32_matmul_precision()
    cut = call.dtype == "float32" and call.options["precision"] == "tf32" and before == "highest"
    if cut:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if cut:
            torch.set_float32_matmul_precision(before)


@provides(BACKEND, refuses=as_precise, around=as_asked)
def matmul(a: Any, b: Any, *, precision: str = "ieee") -> Any:
    import torch

    return torch.matmul(a, b)


def in_whole_copies(call: Call) -> str | None:
    """What torch's grouped_mm asks of operands: strides of 16 bytes, and products that no option changes."""
    refused = as_precise(call)
    if refused or call.dtype == "float64":
        return refused or "torch wants grouped products of float32, float16 or bfloat16: name another backend"
    if call.spec.is_vjp and call.dtype_of("d_c") != call.dtype:
        return "torch wants d_c in the dtype of a: cast it, d_c.to(a.dtype)"
    grain = 16 // numpy_dtype(call.dtype).itemsize
    for name in ("k", "n"):
        if call.dims[name] % grain:
            return f"torch wants {name} to be a multiple of {grain}, not {call.dims[name]}: pad a and b"
    return None


@provides(BACKEND, refuses=in_whole_copies, around=as_asked)
def grouped_matmul(a: Any, b: Any, group_ends: Any, *, precision: str = "ieee") -> Any:
    """torch leaves rows of no group as they were in memory: zeros are put there, and in their gradient."""
    import torch
    from torch.nn import functional

    inside = torch.arange(len(a), device=a.device)[:, None] < group_ends[-1]
    c = functional.grouped_mm(torch.where(inside, a, 0), b, offs=group_ends.to(torch.int32))
    return torch.where(inside, c, 0)


@provides(BACKEND, gradients=False)
def embedding(weight: Any, ids: Any, *, padding_index: int | None = None) -> Any:
    """torch refuses ids that are no row, on a GPU by an end of the process: on a CPU they are set apart, which would
    take another pass over y."""
    import torch
    from torch.nn import functional

    if ids.device.type != "cpu":
        return functional.embedding(ids, weight, padding_idx=padding_index)
    there = (ids >= 0) & (ids < len(weight))
    y = functional.embedding(torch.where(there, ids, 0), weight, padding_idx=padding_index)
    return torch.where(there[..., None], y, torch.nan).to(y.dtype)


@provides(BACKEND, gradients=False)
def embedding_vjp(weight: Any, ids: Any, d_y: Any, *, padding_index: int | None = None) -> Any:
    """What autograd runs for embedding, under whatever ``torch.use_deterministic_algorithms`` says."""
    import torch

    padding = -1 if padding_index is None else padding_index
    if ids.device.type == "cpu":
        there = (ids >= 0) & (ids < len(weight))
        ids, d_y = torch.where(there, ids, 0), torch.where(there[..., None], d_y, 0).to(d_y.dtype)
    return torch.ops.aten.embedding_dense_backward(d_y, ids, len(weight), padding, False)


def activations() -> Mapping[str, Callable[[Any], Any]]:
    """What models call between two layers, by the spec's names."""
    import torch
    from torch.nn import functional

    return {
        "none": lambda z: z,
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
    }


@provides(BACKEND, refuses=one_dtype)
def causal_conv1d(x: Any, weight: Any, bias: Any = None, *, activation: str = "none") -> Any:
    """As models write it where they lack a kernel: a convolution of as many groups as channels, and a function."""
    from torch.nn import functional

    before = functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    y = functional.conv1d(before, weight[:, None], bias, groups=weight.shape[0])
    return activations()[activation](y).transpose(1, 2)


@provides(BACKEND, refuses=as_precise, around=as_asked)
def linear(
    x: Any, weight: Any, bias: Any = None, residual: Any = None, *, activation: str = "none", precision: str = "ieee"
) -> Any:
    """As models write it: a layer, a function and a sum, each of which rounds its result."""
    from torch.nn import functional

    y = activations()[activation](functional.linear(x, weight, bias))
    return y if residual is None else y + residual


@provides(BACKEND, refuses=as_precise, around=as_asked)
def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    precision: str = "ieee",
) -> Any:
    """As models call it: all logits are in memory, in hidden's dtype and in float32."""
    import torch

    logits = torch.matmul(hidden, weight.mT)
    return cross_entropy(logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)


def attention_wants(call: Call) -> str | None:
    """Why torch's function would not take a call."""
    return one_dtype(call) or as_precise(call)


def arranged(
    q: Any, k: Any, v: Any, bias: Any, is_causal: bool, scale: float | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``scaled_dot_product_attention`` that say the same.

    It has heads before the sequence, and its causal mask is aligned at the top left where the spec's is at the bottom
    right: unless there are as many queries as keys and no bias, the spec's goes in as a mask, added to the bias.
    """
    import torch

    q_len, kv_len = q.shape[1], k.shape[1]
    mask = bias
    if is_causal and (q_len != kv_len or bias is not None):
        hidden = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - q_len + 1)
        mask, is_causal = ~hidden if bias is None else bias.masked_fill(hidden, -torch.inf), False
    heads_first = tuple(x.transpose(1, 2) for x in (q, k, v))
    return (*heads_first, mask, 0.0, is_causal), {"scale": scale, "enable_gqa": q.shape[2] != k.shape[2]}


@provides(BACKEND, refuses=attention_wants, around=as_asked)
def attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    precision: str = "ieee",
) -> Any:
    """By whichever kernel torch chooses."""
    from torch.nn import functional

    args, kwargs = arranged(q, k, v, bias, is_causal, scale)
    return functional.scaled_dot_product_attention(*args, **kwargs).transpose(1, 2)


@provides(BACKEND, refuses=attention_wants, around=as_asked, gradients=False)
def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    kv_lens: Any,
    q_starts: Any,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    precision: str = "ieee",
) -> Any:
    """As models without a kernel for it do: the pages of each sequence are gathered, and torch's attention has it by
    itself. Lengths are read on the host, which waits for the device."""
    o = q.new_zeros((*q.shape[:2], v_pages.shape[-1]))
    starts = q_starts.tolist()
    for s, length in enumerate(kv_lens.tolist()):
        tokens = slice(starts[s], starts[s + 1])
        if not length or tokens.start == tokens.stop:
            continue
        pages = page_table[s, : -(-length // k_pages.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[None, :length] for x in (k_pages, v_pages))
        unseen = max(tokens.stop - tokens.start - length, 0) if is_causal else 0
        some = slice(tokens.start + unseen, tokens.stop)  # queries that stand before the first key see nothing
        o[some] = attention(q[None, some], k, v, is_causal=is_causal, scale=scale, precision=precision)[0]
    return o


@provides(BACKEND, gradients=False, outputs=2)
def quantize(x: Any, *, height: int = 1, width: int = 128, to: str = "float8_e4m3fn") -> Any:
    """As models write it. A NaN has no int8 here, as nowhere."""
    import torch

    dtype = getattr(torch, to)
    most = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    (m, n), a = x.shape, x if x.dtype == torch.float64 else x.float()
    a = a.reshape(m // height, height, n // width, width)
    top = a.abs().amax((1, 3))
    scale = torch.where(top == 0, 1.0, (top / most).clamp(min=2.0**-126))
    q = (a / scale[:, None, :, None]).clamp(-most, most).reshape(x.shape)
    return (q if dtype.is_floating_point else q.round()).to(dtype), scale


@provides(BACKEND, gradients=False, refuses=one_dtype, outputs=2)
def rmsnorm_quantize(
    x: Any, weight: Any = None, *, width: int = 128, eps: float = 1e-6, to: str = "float8_e4m3fn"
) -> Any:
    """As models write it, but for the norm's result, which stays in float32."""
    import torch

    wide = x if x.dtype == torch.float64 else x.float()
    y = torch.nn.functional.rms_norm(wide, x.shape[-1:], None if weight is None else weight.to(wide.dtype), eps)
    return in_groups(y, width, to)


@provides(BACKEND, gradients=False, refuses=one_dtype, outputs=3)
def add_rmsnorm_quantize(
    x: Any, residual: Any, weight: Any = None, *, width: int = 128, eps: float = 1e-6, to: str = "float8_e4m3fn"
) -> Any:
    total = x + residual
    return *rmsnorm_quantize(total, weight, width=width, eps=eps, to=to), total


@provides(BACKEND, gradients=False, outputs=2)
def swiglu_quantize(gate: Any, up: Any, *, width: int = 128, to: str = "float8_e4m3fn") -> Any:
    """As models write it, but for y, which stays in float32."""
    import torch

    gate, up = (a if a.dtype == torch.float64 else a.float() for a in (gate, up))
    return in_groups(torch.nn.functional.silu(gate) * up, width, to)


def in_groups(y: Any, width: int, to: str) -> Any:
    """The codes of y, and the scales of its groups; the last of a row is filled up with zeros."""
    import torch

    n = y.shape[-1]
    width = min(width, n)
    rows = torch.nn.functional.pad(y.reshape(-1, n), (0, -n % width))
    q, scale = quantize(rows, height=1, width=width, to=to)
    return q[:, :n].reshape(y.shape), scale.reshape(*y.shape[:-1], -1)


@provides(BACKEND, gradients=False, outputs=2)
def top_k(x: Any, *, k: int = 1, largest: bool = True) -> Any:
    """Which of equal numbers is chosen PyTorch does not say."""
    import torch

    values, indices = torch.topk(x, k, -1, largest)
    return values, indices.int()


@provides(BACKEND, gradients=False)
def top_k_vjp(x: Any, indices: Any, d_values: Any, *, k: int = 1) -> Any:
    """What autograd runs for topk."""
    import torch

    return torch.zeros_like(x).scatter_(-1, indices.long(), d_values)


@provides(BACKEND, gradients=False, outputs=2)
def kv_append(
    k: Any, v: Any, k_pages: Any, v_pages: Any, slots: Any, *, k_scale: Any = None, v_scale: Any = None
) -> Any:
    """The cache is copied, with one more slot, which takes the tokens that are skipped: no length is read on the host.
    Of 8 bits PyTorch's indices move bytes."""
    import torch

    found = []
    for x, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        new, rows = x if scale is None else x / scale[:, None], pages
        if pages.element_size() == 1:
            most = torch.finfo(pages.dtype).max
            new, rows = new.clamp(-most, most).to(pages.dtype).view(torch.uint8), pages.view(torch.uint8)
        rows = rows.reshape(-1, *new.shape[1:])
        out = torch.cat((rows, rows[:1]))
        at = torch.where(slots < 0, len(rows), slots)
        found.append(out.index_put_((at.long(),), new.to(rows.dtype))[:-1].reshape(pages.shape).view(pages.dtype))
    return tuple(found)


WIDTHS = {(1, 128, 128): ("BlockWise1x128", "BlockWise128x128"), (1, 1, 128): ("BlockWise1x128", "BlockWise1x128")}
"""The widths (m, n, k) of scales of blocks -> PyTorch's recipes of a and of b."""


def recipes(a: Any, b: Any, scale_a: Any, scale_b: Any, widths: tuple[int, int, int]) -> tuple[str, str] | None:
    """PyTorch's names for the scales of a and of b, on a GPU; None where it has none for both, or other alignments."""
    (m, k), n = a.shape, b.shape[1]
    if not a.is_cuda or not a.is_floating_point() or k % 16 or n % 16:
        return None
    scales = tuple(scale_a.shape), tuple(scale_b.shape)
    if scales == ((1, 1), (1, 1)):
        return "TensorWise", "TensorWise"
    if scales == ((m, 1), (1, n)):
        return "RowWise", "RowWise"
    blocks = tuple(-(-extent // width) for extent, width in zip((m, n, k), widths, strict=True))
    whole = scales == ((blocks[0], blocks[2]), (blocks[2], blocks[1])) and k % 128 == 0
    return WIDTHS.get(widths) if whole else None


def strided(scale: Any, recipe: str) -> Any:
    """A scale as ``scaled_mm`` wants it in memory: that of blocks with its first axis innermost, of squares of 128
    filled up to multiples of 4."""
    from torch.nn import functional

    if recipe == "BlockWise128x128":
        scale = functional.pad(scale, (0, 0, 0, -scale.shape[0] % 4))
    return scale.t().contiguous().t() if recipe.startswith("Block") else scale


@provides(BACKEND, gradients=False)
def scaled_matmul(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    *,
    m_width: int = 1,
    n_width: int = 1,
    k_width: int = 128,
    precision: str = "promoted",
    out_dtype: str = "bfloat16",
) -> Any:
    """``scaled_mm`` where it has the recipe, ``_int_mm`` where a GPU has one block of k of int8, else the product of
    each block of k in float32, times its scales."""
    import torch
    from torch.nn import functional

    dtype = getattr(torch, out_dtype)
    names = recipes(a, b, scale_a, scale_b, (m_width, n_width, k_width)) if precision != "ieee" else None
    if names and bias is None and dtype == torch.bfloat16:
        kinds = [getattr(functional.ScalingType, name) for name in names]
        of_a, of_b = (strided(s, name) for s, name in zip((scale_a, scale_b), names, strict=True))
        columns = b if b.stride(0) == 1 else b.t().contiguous().t()
        return functional.scaled_mm(
            a.contiguous(), columns, of_a, kinds[0], of_b, kinds[1], output_dtype=dtype,
            use_fast_accum=precision == "fast",
        )  # fmt: skip

    def each(scale: Any, axis: int, width: int, extent: int) -> Any:
        return scale if scale.shape[axis] == 1 else scale.repeat_interleave(width, axis).narrow(axis, 0, extent)

    (m, k), n = a.shape, b.shape[1]
    of_a, of_b = each(scale_a, 0, m_width, m), each(scale_b, 1, n_width, n)
    count = max(of_a.shape[1], of_b.shape[0])
    width, c = k_width if count > 1 else k, torch.zeros(m, n, device=a.device)
    for p in range(count):
        own = slice(p * width, (p + 1) * width)
        if count == 1 and a.is_cuda and a.dtype == torch.int8 and m > 16 and k % 8 == n % 8 == 0:
            part = torch._int_mm(a, b).float()
        elif a.dtype == torch.int8:
            part = (a[:, own].double() @ b[own].double()).float()
        else:
            part = a[:, own].float() @ b[own].float()
        scale = of_a[:, min(p, of_a.shape[1] - 1), None] * of_b[min(p, of_b.shape[0] - 1)]
        c = c + part * scale
    return (c if bias is None else c + bias).to(dtype)


@provides(BACKEND, gradients=False)
def scaled_grouped_matmul(
    a: Any,
    b: Any,
    group_ends: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    *,
    n_width: int = 1,
    k_width: int = 128,
    precision: str = "promoted",
    out_dtype: str = "bfloat16",
) -> Any:
    """``scaled_grouped_mm`` where a GPU has the recipe, else each group as a call of scaled_matmul, behind a wait for
    the ends. Rows of no group, which torch leaves as they were in memory, are made zeros."""
    import torch
    from torch.nn import functional

    (rows, k), (groups, _, n), one = a.shape, b.shape, len(scale_a) == 1
    by_rows = tuple(scale_a.shape) == (rows, 1) and tuple(scale_b.shape) == (groups, 1, n)
    kinds = {a.dtype, b.dtype} == {torch.float8_e4m3fn} and k % 16 == n % 16 == 0
    if a.is_cuda and by_rows and kinds and bias is None and out_dtype == "bfloat16" and precision != "ieee":
        recipe = functional.ScalingType.RowWise
        columns = b if b.stride(1) == 1 else b.mT.contiguous().mT
        c = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
            a.contiguous(), columns, scale_a[:, 0].contiguous(), recipe, scale_b[:, 0].contiguous(), recipe,
            offs=group_ends.to(torch.int32), use_fast_accum=precision == "fast",
        )  # fmt: skip
        return torch.where(torch.arange(rows, device=a.device)[:, None] < group_ends[-1], c, 0)
    c, start = torch.zeros(rows, n, dtype=getattr(torch, out_dtype), device=a.device), 0
    options: dict[str, Any] = {"n_width": n_width, "k_width": k_width, "precision": precision, "out_dtype": out_dtype}
    for g, end in enumerate(group_ends.tolist()):
        own = slice(start, end)
        if start < end:
            of_a, of_b = scale_a if one else scale_a[own], scale_b[g % len(scale_b)]
            c[own] = scaled_matmul(a[own], b[g], of_a, of_b, None if bias is None else bias[g], **options)
        start = end
    return c


@provides(BACKEND, gradients=False)
def weight_only_matmul(
    a: Any,
    b: Any,
    scale_b: Any,
    zeros: Any = None,
    bias: Any = None,
    *,
    k_width: int = 128,
    codes_per_byte: int = 1,
    out_dtype: str | None = None,
) -> Any:
    """``_weight_int8pack_mm`` where codes of 8 bits beside bfloat16 rows have a scale for each column, else the product
    with weights that are made in a's dtype before. ``_weight_int4pack_mm`` reads a layout of its own, which would be
    made in each call."""
    import torch

    (_, k), dtype = a.shape, a.dtype if out_dtype is None else getattr(torch, out_dtype)
    plain = codes_per_byte == 1 and zeros is None and a.dtype == dtype == torch.bfloat16 == scale_b.dtype
    if plain and len(scale_b) == 1:
        c = torch._weight_int8pack_mm(a.contiguous(), b.t().contiguous(), scale_b[0].contiguous())
        return c if bias is None else (c + bias).to(dtype)
    q = b
    if codes_per_byte == 2:
        q = torch.stack([b & 15, b >> 4 & 15], 1).flatten(0, 1)[:k]
        q = q if zeros is not None else (q ^ 8) - 8

    def each(x: Any) -> Any:
        return x if len(x) == 1 else x.repeat_interleave(k_width, 0)[:k]

    weight = q if zeros is None else q - each(zeros)
    c = a @ (weight * each(scale_b)).to(a.dtype)
    return (c if bias is None else c + bias).to(dtype)


def scores(logits: Any, scoring: str) -> Any:
    import torch

    x = logits if logits.dtype == torch.float64 else logits.float()
    return torch.softmax(x, -1) if scoring == "softmax" else torch.sigmoid(x)


@provides(BACKEND, gradients=False, outputs=2)
def router(
    logits: Any,
    bias: Any = None,
    *,
    k: int = 1,
    scoring: str = "softmax",
    groups: int = 1,
    groups_kept: int | None = None,
    normalize: bool = False,
    scale: float = 1.0,
) -> Any:
    """As transformers writes DeepSeek-V3's. Which of equal scores is chosen PyTorch does not say."""
    import torch

    s = scores(logits, scoring)
    by = s if bias is None else s + bias
    if groups_kept is not None and groups_kept < groups:
        parts = by.unflatten(-1, (groups, -1))
        kept = parts.topk(2, -1)[0].sum(-1).topk(groups_kept, -1)[1]
        out = torch.ones(parts.shape[:-1], dtype=torch.bool, device=by.device).scatter(-1, kept, False)
        by = parts.masked_fill(out[..., None], -torch.inf).flatten(-2)
    indices = torch.topk(by, k, -1)[1]
    weights = s.gather(-1, indices)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if normalize else weights) * scale, indices.int()


@provides(BACKEND, gradients=False)
def router_vjp(
    logits: Any,
    indices: Any,
    d_weights: Any,
    *,
    k: int = 1,
    scoring: str = "softmax",
    groups: int = 1,
    normalize: bool = False,
    scale: float = 1.0,
) -> Any:
    """What autograd runs for that."""
    import torch

    s, at, g = scores(logits, scoring), indices.long(), d_weights * scale
    if normalize:
        weights = s.gather(-1, at)
        total = weights.sum(-1, keepdim=True) + 1e-20
        g = (g - (g * weights).sum(-1, keepdim=True) / total) / total
    d_s = torch.zeros_like(s).scatter_(-1, at, g)
    d = s * (d_s - (s * d_s).sum(-1, keepdim=True)) if scoring == "softmax" else d_s * s * (1 - s)
    return d.to(logits.dtype)
