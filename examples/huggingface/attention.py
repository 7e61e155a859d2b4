"""portakern as an attention implementation of Hugging Face transformers, forward and backward.

    python -m portakern.examples.huggingface.attention

``register()`` makes ``attn_implementation="portakern"`` known to every model of transformers; masks come as for its
"sdpa". It is tried on a small Llama (grouped heads) and a small GPT-2. Both models are initialised at random, and are
compared with transformers' own SDPA path on a padded batch: logits, and the gradient of every parameter.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import portakern
from portakern import UnsupportedError

IN_THE_MASK = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments that a mask speaks of too, where there is one: they are not needed beside it."""
ELSEWHERE = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "target_dtype",
        "use_cache",
    }
)
"""Arguments that models hand through to attention and that do not change what it computes."""


def register(name: str = "portakern", backend: str | None = None) -> None:
    """Let models be built with ``attn_implementation=name``.

    ``backend``: who must serve them, None: chosen from the arrays.
    """
    op = portakern.op("attention", backend=backend)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query: (batch, heads, length, head dim); key, value with fewer heads -> (batch, length, heads, head dim)."""
        refuse(name, dropout, attention_mask, others)
        length, keys = query.shape[2], key.shape[2]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(causal) and attention_mask is None and length > 1
        window: tuple[int | None, int | None] | None = None
        if causal:  # aligned at the top left, where the op aligns at the bottom right; later keys are past every query
            keys = min(keys, length)
            key, value, window = key[:, :, :keys], value[:, :, :keys], (None, length - keys)
            position_bias = None if position_bias is None else position_bias[..., :keys]
        if attention_mask is None and sliding_window is not None and keys > sliding_window:
            if not causal or keys != length:
                raise UnsupportedError(
                    f"{name}: sliding_window is {sliding_window} beside {keys} keys and no attention_mask; expected a "
                    "mask that says which keys a query sees, as the models of transformers make it"
                )
            window = (sliding_window - 1, 0)
        if query.shape[0] != key.shape[0]:  # learned queries, one for the whole batch
            query = query.expand(key.shape[0], -1, -1, -1)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        bias = additive(attention_mask, position_bias, query.dtype)
        return op(q, k, v, bias, window=window, scale=scaling, softcap=softcap), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)


def refuse(name: str, dropout: float, mask: torch.Tensor | None, others: Mapping[str, Any]) -> None:
    """Refuse by name every argument that would change the result and that the op does not have."""
    if dropout > 0.0:
        raise UnsupportedError(
            f"{name}: dropout is {dropout}; expected 0.0: no kernel draws random numbers; set the model's "
            "attention_dropout (GPT-2: attn_pdrop) to 0"
        )
    for argument, given in others.items():
        if argument in ELSEWHERE or given is None or given is False:
            continue
        if argument in IN_THE_MASK:
            if mask is None:
                raise UnsupportedError(
                    f"{name}: {argument} is given and no attention_mask; expected packed sequences as a mask: pass "
                    "position_ids, of which the model makes it"
                )
            continue
        shown = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
        raise UnsupportedError(
            f"{name}: {argument} is {shown}; the attention op does not have it, and without it the result would be "
            'another; build this model with attn_implementation="eager"'
        )


def additive(mask: torch.Tensor | None, position_bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask (bool: True where a pair takes part; or to add) and a bias of positions as one array to add to scores."""
    if mask is None or position_bias is None:
        added = position_bias if mask is None else mask
        if added is None or added.dtype != torch.bool:
            return added
        return torch.zeros((), dtype=dtype, device=added.device).where(added, -math.inf)
    return position_bias.where(mask, -math.inf) if mask.dtype == torch.bool else position_bias + mask


def models(implementation: str) -> dict[str, PreTrainedModel]:
    """The two models; the same seed gives the same weights whatever the implementation."""
    torch.manual_seed(0)
    shared = {"vocab_size": 101, "attn_implementation": implementation}
    llama = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **shared,
    )
    gpt2 = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared
    )
    return {"llama": LlamaForCausalLM(llama), "gpt2": GPT2LMHeadModel(gpt2)}


def run(model: PreTrainedModel, device: str) -> dict[str, torch.Tensor]:
    """Logits of the tokens that are there, and every parameter's gradient.

    The first row of the batch is padded on the left.
    """
    model = model.to(device)
    ids = torch.arange(2 * 23, device=device).reshape(2, 23) * 7 % 101
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    out.loss.backward()
    return {
        "logits": out.logits[mask.bool()].detach(),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def differences(device: str, backend: str | None) -> dict[str, float]:
    """Model -> the largest difference from SDPA, relative to the largest value of each array."""
    register(backend=backend)
    found = {}
    for (name, mine), theirs in zip(models("portakern").items(), models("sdpa").values(), strict=True):
        got, want = run(mine, device), run(theirs, device)
        found[name] = max(float((got[k] - want[k]).abs().max() / want[k].abs().max()) for k in want)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="who serves the attention (default: chosen from the arrays)")
    args = parser.parse_args(argv)
    for name, difference in differences(args.device, args.backend).items():
        print(f"{name:6} logits and gradients differ from SDPA's by at most {difference:.1e} of their largest value")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
