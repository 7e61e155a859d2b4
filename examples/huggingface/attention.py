"""portakern as an attention implementation of Hugging Face transformers, forward and backward.

    python -m portakern.examples.huggingface.attention

``portakern.torch.register_attention()`` makes ``attn_implementation="portakern"`` known to every model of
transformers; masks come as for its "sdpa". It is tried on a small Llama (grouped heads) and a small GPT-2. Both models
are initialised at random, and are compared with transformers' own SDPA path on a padded batch: logits, and the gradient
of every parameter.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from portakern.torch import register_attention


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
    register_attention(backend=backend)
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
