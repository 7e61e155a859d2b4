"""Mixtures of experts in PyTorch: ``moe``, and transformers' models with their experts on the ops."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

import portakern.torch as pt
from portakern.errors import SpecError, UnsupportedError

TOKENS, D, F, EXPERTS, K = 7, 6, 4, 5, 2


def drawn(dtype=torch.float64, seed=0):
    """x, gate_up, down, indices of which some are no expert, and weights."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS, D), (EXPERTS, 2 * F, D), (EXPERTS, D, F), (TOKENS, K))
    x, gate_up, down, weights = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
    indices = torch.randint(0, EXPERTS - 1, (TOKENS, K), generator=g)  # the last expert has no token
    indices[0, 0], indices[1, 1], indices[2] = -1, EXPERTS, -1
    return [a.requires_grad_() for a in (x, gate_up, down)] + [indices, weights.requires_grad_()]


def one_after_the_other(x, gate_up, down, indices, weights):
    rows = []
    for t in range(len(x)):
        y = torch.zeros(D, dtype=x.dtype)
        for j in range(indices.shape[1]):
            e = int(indices[t, j])
            if 0 <= e < len(down):
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                y = y + weights[t, j] * (down[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows)


def gradients(fn, arrays):
    y = fn(*arrays)
    cotangent = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return y, *torch.autograd.grad(y, [a for a in arrays if a.requires_grad], cotangent)


def test_a_mixture_and_its_gradients():
    """Experts without tokens, and indices that are no expert, among them."""
    arrays = drawn()
    for found, wanted in zip(gradients(pt.moe, arrays), gradients(one_after_the_other, arrays), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_token_alone_has_its_bits():
    x, gate_up, down, indices, weights = drawn(torch.float32)
    among = pt.moe(x, gate_up, down, indices, weights)
    for t in range(TOKENS):
        row = slice(t, t + 1)
        assert torch.equal(pt.moe(x[row], gate_up, down, indices[row], weights[row]), among[row])


def test_shapes_that_do_not_agree():
    x, gate_up, down, indices, weights = drawn()
    with pytest.raises(SpecError, match=r"moe: gate_up and down have shapes .* expected \(experts, 2 f, d\)"):
        pt.moe(x, gate_up[:3], down, indices, weights)
    with pytest.raises(SpecError, match=r"moe: gate_up has 4 rows of each expert, and down 4 columns"):
        pt.moe(x, gate_up[:, :F], down, indices, weights)


# --------------------------------------------------------------------------------------------------------- transformers
SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 12, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 5,
    "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "Mixtral": {},
    "Qwen3Moe": {"num_experts": 5, "decoder_sparse_step": 1},
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
        "head_dim": 4,
    },
    "GptOss": {"layer_types": ["full_attention", "full_attention"]},
}  # fmt: skip


def tiny(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = getattr(transformers, f"{name}ForCausalLM", None)
    if kind is None or not hasattr(kind, "set_experts_implementation"):
        pytest.skip(f"this transformers has no experts implementations of {name}")
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    torch.manual_seed(0)
    model = kind(config).train()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name):
    """Logits and gradients of all parameters are those of the experts one after the other."""
    pt.register_experts()
    ids = torch.arange(12).reshape(2, 6) * 3 % 39 + 1
    model = tiny(name)
    found = {}
    for implementation in ("eager", "portakern"):
        own = copy.deepcopy(model)
        own.set_experts_implementation(implementation)
        out = own(input_ids=ids, labels=ids)
        out.loss.backward()
        found[implementation] = {n: p.grad for n, p in own.named_parameters() if p.grad is not None} | {"": out.logits}
    assert found["eager"].keys() == found["portakern"].keys()
    assert any("experts" in n for n in found["eager"])
    for n, wanted in found["eager"].items():
        torch.testing.assert_close(
            found["portakern"][n], wanted.detach(), rtol=2e-4, atol=2e-5, msg=lambda m, n=n: n + m
        )


def test_a_norm_of_each_expert_is_refused():
    pt.register_experts()
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    module = torch.nn.Module()
    module.has_post_expert_norm = True
    with pytest.raises(UnsupportedError, match="portakern: Module norms what each expert gives"):
        ALL_EXPERTS_FUNCTIONS["portakern"](module, *(None,) * 3)
