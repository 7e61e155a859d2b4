"""Attention over transformers' cache of pages, as its continuous batching calls it: paged_attention reads keys and
values where they lie.

transformers itself gathers the keys of all sequences into one array at each step. Layers with a sliding window keep
theirs in a ring, whose order is no table's: of these alone the gathered keys go to varlen_attention. The cache is one
array, in which keys and values of all layers take turns: PyTorch writes to it, for kv_append writes to arrays of their
own alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from portakern.errors import UnsupportedError
from portakern.frameworks.torch.functions import kept_op

__all__ = ["ENTRY", "PagedBatching", "attends_pages", "paged_name"]

ENTRY = "init_continuous_batching"
"""The method by which all that transformers has for continuous batching begins."""

BESIDE_PAGES = frozenset({"logits_indices", "logits_processor_args", "max_length_k", "max_length_q", "is_causal"})
"""Arguments of a step that attention over pages need not read, beside those of every model."""


def paged_name(name: str) -> str:
    """The name under which an attention is registered for pages. transformers takes a name with "flash" in it for an
    attention that needs no mask, and serves continuous batching by such ones and by its own alone; with a number behind
    it, it would look for that release of FlashAttention."""
    return f"{name}_flash"


def attends_pages(name: str, backend: str | None, refuse: Callable[..., None]) -> Callable[..., Any]:
    """The function that transformers calls for a layer's attention under ``paged_name(name)``.

    Args:
      refuse: of models.attention, which refuses by name what changes a result.
    """
    shown = paged_name(name)

    @torch.compiler.disable  # as transformers' own: views of the cache, written to, would be copies of it
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cache: Any = None,
        cu_seq_lens_q: Any = None,
        **step: Any,
    ) -> tuple[Tensor, None]:
        """query: (1, heads, tokens, head dim), of all sequences of a step; key, value with fewer heads -> (1, tokens,
        heads, head dim). s_aux: (heads,), a sink of each head, as GPT-OSS has."""
        if not hasattr(cache, "layer_to_allocator"):
            given = "None" if cache is None else f"a {type(cache).__name__}"
            raise UnsupportedError(
                f"{shown}: cache is {given}; expected the PagedAttentionCache of transformers' continuous batching "
                f'(tried with transformers 5.23): for other calls set the attention implementation "{name}"'
            )
        for argument, unwanted in (("attention_mask", attention_mask), ("block_table", step.pop("block_table", None))):
            if unwanted is not None:
                raise UnsupportedError(
                    f"{shown}: {argument} is a tensor of shape {tuple(unwanted.shape)}; expected None, as transformers "
                    "calls an attention that needs no mask, of no numbered release of FlashAttention"
                )
        others = {n: v for n, v in step.items() if n not in BESIDE_PAGES | {"read_index", "write_index"}}
        refuse(shown, dropout, None, {n: v for n, v in others.items() if n != "cu_seq_lens_k"})
        window = None if sliding_window is None else (sliding_window - 1, 0)
        options = {"is_causal": True, "window": window, "scale": scaling, "softcap": softcap, "sinks": s_aux}
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        layer: Any = module.layer_idx
        allocator = cache.layer_to_allocator[layer]
        if allocator.supports_block_table:
            o = _over_pages(backend, (q, k, v), allocator, layer, (cu_seq_lens_q, step), options)
        else:
            keys, values = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=step)
            packed = (x[0].transpose(0, 1) for x in (keys, values))
            o = kept_op("varlen_attention", backend)(q, *packed, cu_seq_lens_q, step["cu_seq_lens_k"], **options)
        return o[None], None

    return attend


def _over_pages(
    backend: str | None, qkv: tuple[Tensor, Tensor, Tensor], allocator: Any, layer: int, batch: tuple[Tensor, Any],
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Write a step's keys and values to the pages of a layer, and attend to what its sequences have there.

    A row of the cache is a token's keys or values in one layer. Blocks follow each other, and each has a page of every
    layer: what transformers calls an index of a token is that of its row from the layer's first page on.
    """
    q, k, v = qkv
    starts, step = batch
    size, apart = allocator.tokens_per_page, allocator.block_physical_stride
    write, read = (step[name][allocator.index] for name in ("write_index", "read_index"))
    pages = allocator.get_cache_for_block_table(layer)
    for cache, new in zip(pages, (k, v), strict=True):
        cache.flatten(0, 1).index_copy_(0, write, new)
    lens = step["cu_seq_lens_k"][allocator.layer_type]
    index = read if len(read) else write  # a step that only begins prompts reads what it writes
    longest = step["max_length_k"][allocator.layer_type]
    first = lens[:-1, None] + torch.arange(0, max(longest, 1), size, device=lens.device)
    table = index[first.clamp(max=len(index) - 1)] // apart
    blocks = (cache[:: apart // size] for cache in pages)
    found: Tensor = kept_op("paged_attention", backend)(q, *blocks, table, lens.diff(), starts, **options)
    return found


class PagedBatching:
    """Stands as ``init_continuous_batching`` in a model whose attention is portakern's: while transformers batches
    continuously, the model's attention is the one that is registered for pages."""

    __slots__ = ("implementation", "module")

    def __init__(self, module: nn.Module, implementation: str) -> None:
        self.module, self.implementation = module, implementation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.module
        theirs = getattr(type(model), ENTRY)
        if model.config._attn_implementation != self.implementation:
            return theirs(model, *args, **kwargs)
        model.config._attn_implementation = paged_name(self.implementation)
        try:
            manager = theirs(model, *args, **kwargs)
        except BaseException:
            model.config._attn_implementation = self.implementation
            raise
        manager._original_attn_impl = self.implementation  # to which it returns when it stops
        return manager
