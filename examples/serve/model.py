"""A step of a Llama over the packed tokens of several sequences, and who computes it.

The model is transformers' own, for its weights and for the results to compare with; a step is written out here. What
differs between contenders is ``Kernels``: the functions of a layer, and the cache.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import portakern as pk
from portakern.examples.serve.batching import Capacity, Step
from portakern.torch import rotary_tables

__all__ = ["CONTENDERS", "Kernels", "Llama", "Packed", "Size", "made"]


@dataclass(frozen=True)
class Size:
    """Extents of a model."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    words: int

    @property
    def head(self) -> int:
        """Numbers of one head."""
        return self.width // self.heads


def made(size: Size, longest: int, device: str, dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
    """transformers' model with random weights."""
    config = LlamaConfig(
        vocab_size=size.words, hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, max_position_embeddings=longest,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


@dataclass(frozen=True)
class Packed:
    """A step's arrays on the device. Tokens behind the step's last one are padding, of no sequence. Their slot is -1:
    ``kv_append`` skips them, and for an index of PyTorch's it is the last slot of the cache, in a page of nobody.

    Attributes:
      step: what they hold, for contenders that need lengths on the host.
      tokens, positions, slots: (tokens). q_starts: (sequences + 1). kv_lens: (sequences).
      page_table: (sequences, pages_each). last: (sequences), the token that each drawn one comes from.
    """

    step: Step
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    q_starts: Tensor
    kv_lens: Tensor
    page_table: Tensor
    last: Tensor

    @classmethod
    def of(cls, step: Step, capacity: Capacity, device: str) -> Packed:
        """As many tokens as the next power of two, so that few forms of arrays come up."""
        count = min(1 << max(len(step.tokens) - 1, 0).bit_length(), capacity.tokens)
        beyond = count - len(step.tokens)
        last = [at for _, at in step.draws] + [0] * (capacity.sequences - len(step.draws))

        def held(values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            step,
            held(step.tokens + [0] * beyond),
            held(step.positions + [0] * beyond),
            held(step.slots + [-1] * beyond, torch.int64),
            held(step.q_starts),
            held(step.kv_lens),
            held(step.page_table),
            held(last),
        )


@dataclass(frozen=True)
class Kernels:
    """The functions of a step, with the shapes of one layer.

    Attributes:
      rmsnorm(x, weight, eps): x and the result (tokens, width).
      linear(x, weight, residual): x weight^T, and residual added unless it is None.
      rope(x, cos, sin): x (tokens, heads, d) turned by (tokens, d / 2) tables.
      swiglu(gate, up): silu(gate) up.
      append(k, v, k_pages, v_pages, packed, cos, sin): writes k, turned by the tables, and v, (tokens, kv_heads, d)
        each, into pages.
      attention(q, k_pages, v_pages, packed): q (tokens, heads, d), results of its shape.
      begins(packed): called before the first layer of a step.
    """

    rmsnorm: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    append: Callable[..., None]
    attention: Callable[..., Tensor]
    begins: Callable[[Packed], None] = lambda packed: None


class Llama:
    """The weights of transformers' model, a cache of pages for each layer, and a step."""

    def __init__(self, model: LlamaForCausalLM, kernels: Kernels, capacity: Capacity) -> None:
        config, state = model.config, model.state_dict()
        self.kernels, self.capacity, self.eps = kernels, capacity, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head = config.hidden_size // self.heads
        self.words, self.norm, self.out = (
            state[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        )
        self.device = str(self.words.device)
        self.frequencies = model.model.rotary_emb.inv_freq
        self.layers = [_layer(state, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        shape = (capacity.pages + 1, capacity.page_size, self.kv_heads, self.head)  # the last one takes padding
        # pages of nobody are never read, whatever they hold
        self.cache = [
            tuple(torch.full(shape, torch.nan, dtype=self.words.dtype, device=self.device) for _ in "kv")
            for _ in self.layers
        ]

    @torch.no_grad()
    def step(self, packed: Packed) -> Tensor:
        """The token that follows each of ``packed.last``, (sequences); greedy."""
        of, eps = self.kernels, self.eps
        of.begins(packed)
        cos, sin = (t[0] for t in rotary_tables(packed.positions, self.frequencies, dtype=torch.float32))
        h = F.embedding(packed.tokens, self.words)
        for weights, (k_pages, v_pages) in zip(self.layers, self.cache, strict=True):
            x = of.linear(of.rmsnorm(h, weights["attention_norm"], eps), weights["qkv"], None)
            q, k, v = x.view(len(x), -1, self.head).split((self.heads, self.kv_heads, self.kv_heads), 1)
            of.append(k, v, k_pages, v_pages, packed, cos, sin)
            o = of.attention(of.rope(q, cos, sin), k_pages, v_pages, packed)
            h = of.linear(o.reshape(len(x), -1), weights["o"], h)
            gate, up = of.linear(of.rmsnorm(h, weights["mlp_norm"], eps), weights["gate_up"], None).chunk(2, 1)
            h = of.linear(of.swiglu(gate, up), weights["down"], h)
        logits = of.linear(of.rmsnorm(h[packed.last], self.norm, eps), self.out, None)
        return logits.argmax(-1)


def _layer(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A layer's weights, of products that have one operand in one matrix."""

    def of(*names: str) -> Tensor:
        return torch.cat([state[f"{prefix}{name}.weight"] for name in names])

    return {
        "attention_norm": of("input_layernorm"),
        "qkv": of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": of("self_attn.o_proj"),
        "mlp_norm": of("post_attention_layernorm"),
        "gate_up": of("mlp.gate_proj", "mlp.up_proj"),
        "down": of("mlp.down_proj"),
    }


# ------------------------------------------------------------------------------------------------------- contenders
def on_portakern(size: Size, capacity: Capacity, backend: str | None) -> Kernels:
    """Every function of a layer by portakern."""
    names = ("rmsnorm", "linear", "rope", "swiglu", "kv_append", "paged_attention")
    ops = {name: pk.op(name, backend=backend) for name in names}

    def append(
        k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, packed: Packed, cos: Tensor, sin: Tensor
    ) -> None:
        ops["kv_append"](k, v, k_pages, v_pages, packed.slots, cos, sin, overwrite=("k_pages", "v_pages"))

    def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, packed: Packed) -> Tensor:
        found = ops["paged_attention"](q, k_pages, v_pages, packed.page_table, packed.kv_lens, packed.q_starts)
        return found if isinstance(found, Tensor) else found[0]

    return Kernels(
        rmsnorm=lambda x, weight, eps: ops["rmsnorm"](x, weight, eps=eps),
        linear=lambda x, weight, residual: ops["linear"](x, weight, residual=residual),
        rope=lambda x, cos, sin: ops["rope"](x[None], cos[None], sin[None])[0],
        swiglu=ops["swiglu"],
        append=append,
        attention=attention,
    )


def on_torch(size: Size, capacity: Capacity, backend: str | None) -> Kernels:
    """PyTorch's functions; attention sequence by sequence, over keys that are gathered from their pages."""

    def linear(x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        return F.linear(x, weight) if residual is None else torch.addmm(residual, x, weight.T)

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    def append(
        k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, packed: Packed, cos: Tensor, sin: Tensor
    ) -> None:
        """By index: -1 is the last slot of the cache."""
        for new, pages in ((rope(k, cos, sin), k_pages), (v, v_pages)):
            pages.view(-1, *new.shape[1:])[packed.slots] = new

    def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, packed: Packed) -> Tensor:
        o, starts, table = torch.zeros_like(q), packed.step.q_starts, packed.page_table.long()
        for i, keys in enumerate(packed.step.kv_lens):
            if keys:
                begin, end = starts[i], starts[i + 1]
                used = table[i, : -(-keys // k_pages.shape[1])]
                k, v = (p[used].flatten(0, 1)[:keys].transpose(0, 1)[None] for p in (k_pages, v_pages))
                rows = torch.arange(keys - (end - begin), keys, device=q.device)
                seen = torch.arange(keys, device=q.device) <= rows[:, None]
                found = F.scaled_dot_product_attention(
                    q[begin:end].transpose(0, 1)[None], k, v, None if end - begin == 1 else seen, enable_gqa=True
                )
                o[begin:end] = found[0].transpose(0, 1)
        return o

    return Kernels(
        rmsnorm=lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
        linear=linear,
        rope=rope,
        swiglu=lambda gate, up: F.silu(gate) * up,
        append=append,
        attention=attention,
    )


def on_flashinfer(size: Size, capacity: Capacity, backend: str | None) -> Kernels:
    """FlashInfer's attention, cache and norms; the rest is PyTorch's."""
    import flashinfer

    own = on_torch(size, capacity, None)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    places: list[Any] = []

    def begins(packed: Packed) -> None:
        """Lengths go to the device once a step, as its planner asks."""
        step, size_of = packed.step, capacity.page_size
        indptr, indices, last = [0], list[int](), list[int]()
        for keys, pages in zip(step.kv_lens, step.page_table, strict=True):
            used = -(-keys // size_of)
            indices += pages[:used]
            indptr.append(len(indices))
            last.append((keys - 1) % size_of + 1 if keys else 0)
        cuda: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        csr = [torch.tensor(x, **cuda) for x in (indices, indptr, last)]
        wrapper.plan(
            packed.q_starts, csr[1], csr[0], csr[2], size.heads, size.kv_heads, size.head, size_of, causal=True,
            q_data_type=torch.bfloat16,
        )  # fmt: skip
        rows = [i for i in range(capacity.sequences) for _ in range(step.q_starts[i + 1] - step.q_starts[i])]
        places[:] = [torch.tensor(rows, **cuda), *csr]

    def append(
        k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, packed: Packed, cos: Tensor, sin: Tensor
    ) -> None:
        rows, indices, indptr, last = places
        count = len(packed.step.tokens)
        flashinfer.append_paged_kv_cache(
            own.rope(k, cos, sin)[:count],
            v[:count],
            rows,
            packed.positions[:count],
            (k_pages, v_pages),
            indices,
            indptr,
            last,
            "NHD",
        )

    def attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, packed: Packed) -> Tensor:
        o, count = torch.zeros_like(q), len(packed.step.tokens)
        o[:count] = wrapper.run(q[:count].contiguous(), (k_pages, v_pages))
        return o

    return Kernels(
        rmsnorm=lambda x, weight, eps: flashinfer.norm.rmsnorm(x, weight, eps),
        linear=own.linear,
        rope=own.rope,
        swiglu=own.swiglu,
        append=append,
        attention=attention,
        begins=begins,
    )


CONTENDERS: Mapping[str, Callable[[Size, Capacity, str | None], Kernels]] = {
    "portakern": on_portakern,
    "torch": on_torch,
    "flashinfer": on_flashinfer,
}
"""Who computes a step -> its functions."""


def missing(who: str, device: str) -> str | None:
    """Why a contender cannot run here; None if it can."""
    if who != "flashinfer":
        return None
    if device != "cuda":
        return "FlashInfer needs an NVIDIA GPU"
    return None if importlib.util.find_spec("flashinfer") else "not installed: pip install flashinfer-python"
