"""portakern inside Hugging Face transformers: models against transformers' own eager code, at small sizes."""

import importlib
import re
from types import SimpleNamespace

import pytest

import portakern as pk
from portakern.core import cache, registry

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")

import portakern.torch  # noqa: E402
from portakern.examples.huggingface import norms  # noqa: E402

LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0}
FAMILIES = {  # (config, its model, what differs): each hands attention something that a Llama does not
    "T5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "Gemma2": (
        "Gemma2ForCausalLM",
        {**LLAMA_LIKE, "attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 8, "sliding_window": 4},
    ),
    "Mistral": ("MistralForCausalLM", {**LLAMA_LIKE, "sliding_window": 4}),
    "GptOss": (
        "GptOssForCausalLM",  # its sinks are drawn
        {**LLAMA_LIKE, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def build(family, implementation, **changed):
    name, config = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(vocab_size=101, **config, **changed)
    return getattr(transformers, name)._from_config(config, attn_implementation=implementation)


def step(model):
    """Logits of the tokens that are there, and every gradient: the first row ends in padding."""
    ids = torch.arange(2 * 11).reshape(2, 11) * 7 % 97 + 1
    mask = torch.ones_like(ids)
    mask[0, 8:] = 0
    out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    out.loss.backward()
    return {"logits": out.logits[mask.bool()].detach()} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bias_of_positions_a_softcap_a_window_and_sinks_are_served(family):
    portakern.torch.register_attention()
    got, want = (step(build(family, implementation)) for implementation in ("portakern", "eager"))
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def attend(**given):
    portakern.torch.register_attention()
    function = transformers.AttentionInterface._global_mapping["portakern"]
    module = SimpleNamespace(is_causal=given.pop("causal", True))
    length, keys = given.pop("length", 5), given.pop("keys", 5)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8) for h, n in ((4, length), (2, keys), (2, keys)))
    given.setdefault("attention_mask", None)
    return (q, k, v), function(module, q, k, v, **given)[0]


@pytest.mark.parametrize(
    "message, given",
    {
        r"indices is a tensor of shape \(2, 5, 3\).*eager": {"indices": torch.zeros(2, 5, 3, dtype=torch.int64)},
        "output_attentions is True": {"output_attentions": True},
        "cache is 'paged'": {"cache": "paged"},
        "an_argument_of_tomorrow is 1": {"an_argument_of_tomorrow": 1},
        "dropout is 0.1; expected 0.0": {"dropout": 0.1},
        "cu_seq_lens_q is given and no attention_mask": {"cu_seq_lens_q": torch.tensor([0, 2, 5])},
        "sliding_window is 3 beside 5 keys": {"sliding_window": 3, "causal": False},
    }.items(),
)
def test_what_would_change_the_result_and_is_not_served_is_refused_by_name(message, given):
    with pytest.raises(pk.UnsupportedError, match=message):
        attend(**given)


def test_what_does_not_change_the_result_passes():
    (q, k, v), got = attend(
        position_ids=torch.arange(5),
        use_cache=True,
        deterministic=True,
        output_attentions=False,
        output_router_logits=None,
        cu_seq_lens_q=torch.tensor([0, 5]),
        attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril(),
    )
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length, keys", [(5, 5), (3, 5), (5, 3), (1, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_causal_attention_without_a_mask_is_aligned_at_the_top_left(length, keys, biased):
    torch.manual_seed(1)
    bias = torch.randn(1, 4, length, keys) if biased else None
    (q, k, v), got = attend(length=length, keys=keys, position_bias=bias)
    mask = torch.ones(length, keys, dtype=torch.bool).tril() if length > 1 else torch.ones(length, keys).bool()
    added = torch.zeros(1, 4, length, keys).masked_fill(~mask, -torch.inf) + (0 if bias is None else bias)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, added, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_a_window_without_a_mask_is_served_where_it_is_causal():
    (q, k, v), got = attend(sliding_window=2)
    mask = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_queries_learned_for_the_whole_batch_broadcast():
    portakern.torch.register_attention()
    function = transformers.AttentionInterface._global_mapping["portakern"]
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    got = function(SimpleNamespace(is_causal=False), q, k, v, None)[0]
    want = torch.nn.functional.scaled_dot_product_attention(q.expand(2, -1, -1, -1), k, v)
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-5, atol=1e-6)


def norm(name, dtype):
    """A layer of transformers' with a weight of its own."""
    words = re.sub(r"(RMS|Layer)Norm$", "", name)
    flat = {"SmolLM3": "smollm3", "Qwen3_5": "qwen3_5"}.get(words) or re.sub(
        r"(?<=[a-z0-9])(?=[A-Z])", "_", words
    ).lower()
    kind = getattr(importlib.import_module(f"transformers.models.{flat}.modeling_{flat}"), name)
    torch.manual_seed(0)
    layer = kind(48, eps=1e-5).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(48))
    return layer


ONCE = "FlexOlmo GptOss NemotronH Olmo2 Olmo3"
LESS_ONE = "Gemma Gemma2 Gemma3 Qwen3_5"
BEFORE_WEIGHT = "Llama Glm4 Granite Ministral Mistral Mixtral Phi3 Qwen2 Qwen3 Qwen3Moe SmolLM3"
NORMS = {f"{name}RMSNorm": ("once", 0) for name in ONCE.split()}
NORMS |= {f"{name}RMSNorm": ("once", 1) for name in LESS_ONE.split()}
NORMS |= {f"{name}RMSNorm": ("before_weight", 0) for name in BEFORE_WEIGHT.split()} | {
    "T5LayerNorm": ("before_weight", 0)
}
"""Layers of transformers: where they round in 16 bits, and what they add to their weight."""


def formula(layer, x, rounding):
    """What a layer computes that rounds there, in PyTorch's words."""
    xh = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    if rounding == "before_weight":
        return layer.weight * xh.to(x.dtype)
    return ((NORMS[type(layer).__name__][1] + layer.weight.float()) * xh).to(x.dtype)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_rounds_where_transformers_does(name):
    torch.manual_seed(1)
    layer, (rounding, added) = norm(name, torch.bfloat16), NORMS[name]
    x = torch.randn(64, 48, dtype=torch.bfloat16)
    other = {"once": "before_weight", "before_weight": "once"}[rounding]
    want = layer(x)
    assert torch.equal(want, formula(layer, x, rounding))
    assert added or not torch.equal(want, formula(layer, x, other))
    with portakern.torch.apply(layer) as applied:
        assert [row.op for row in applied.rows] == ["rmsnorm"]
        torch.testing.assert_close(layer(x), want, rtol=2**-7, atol=0)
    layer, x = norm(name, torch.float32), torch.randn(5, 48, requires_grad=True)
    results, served = [], []
    for change in (lambda: None, lambda: portakern.torch.apply(layer)):
        change()
        with pk.observe(lambda s: served.append(s.call.spec.name)), torch.autocast("cpu", enabled=len(results) == 1):
            y = layer(x)
            results.append([y, *torch.autograd.grad(y.sin().sum(), (x, layer.weight))])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert " ".join(served) == "rmsnorm rmsnorm_vjp"


def test_the_mapping_is_what_the_kernels_package_takes():
    kernels = pytest.importorskip("kernels", reason="kernels is not installed")
    assert norms.Layer("reference") == norms.Layer("reference") and hash(norms.Layer()) == hash(norms.Layer())
    for training in (False, True):
        for compiled in (False, True):
            layer = norm("LlamaRMSNorm", torch.float32)
            kernels.replace_kernel_forward_from_hub(type(layer), "RMSNorm")  # what a decorator that works does
            x, served = torch.randn(2, 48), []
            want = layer(x)
            mode = kernels.Mode.TRAINING if training else kernels.Mode.INFERENCE
            with kernels.use_kernel_mapping(norms.mapping("reference")):
                kernels.kernelize(
                    layer, mode=mode | kernels.Mode.TORCH_COMPILE if compiled else mode, use_fallback=False
                )
            with pk.observe(lambda s, served=served: served.append(s.backend)):
                torch.testing.assert_close(layer(x), want)
            assert served == ["reference"]


TINY = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""Extents of a model of any family, which takes of them what it knows."""
MODELS = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "gemma": {}, "phi": {}, "olmo2": {}, "granite": {},
    "stablelm": {}, "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {}, "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
}  # fmt: skip


def small(family):
    """A random model of two layers that drops nothing."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**TINY, **MODELS[family]})
    for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_training_step_works_no_call_out_anew(family, monkeypatch):
    """What a plan cannot account for takes the host a hundred times as long, in each of the chunks of a loss."""
    pytest.importorskip("triton", reason="triton is not installed")
    plans, learned = importlib.import_module("portakern.backends.triton.plan"), {}
    planned = plans.planned

    def noted(impl, *others):
        plan = planned(impl, *others)
        learned.setdefault(impl.op, []).append(plan is not None)
        return plan

    monkeypatch.setattr(plans, "planned", noted)
    cache.forget()  # what other tests learned of the same forms
    model, ids = small(family).train(), torch.randint(3, 40, (2, 9))
    with portakern.torch.apply(model, backend="triton"):
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
    assert sum(registry.find_spec(op).is_vjp for op in learned) >= 3
    assert [op for op, found in learned.items() if not all(found)] == []


@pytest.mark.parametrize("family", MODELS)
def test_models_train_and_generate_as_on_pytorchs_own_functions(family):
    """Random models of two layers, forward, backward and generating; ids of the second sample are padded."""
    model = small(family)
    ids, mask = torch.randint(3, 40, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0

    def run():
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=ids)
        out.loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        return out.logits.detach(), gradients, made

    logits, gradients, made = run()
    with portakern.torch.swapped() as swapped:
        found = run()
    assert swapped.served[torch.nn.functional.scaled_dot_product_attention] >= 4
    seen = mask.bool()
    torch.testing.assert_close(found[0][seen], logits[seen], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found[1], gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert torch.equal(found[2], made)


# --- routers ---


def routers():
    """Model -> (its router, its configuration, the options of the op)."""
    deepseek = {"n_group": 4, "topk_group": 2, "num_local_experts": 32, "norm_topk_prob": True}
    grouped = {"k": 4, "scoring": "sigmoid", "groups": 4, "groups_kept": 2, "normalize": True, "scale": 2.5}
    return {
        "mixtral": ("MixtralTopKRouter", {"num_local_experts": 8}, {"k": 4, "normalize": True}),
        "qwen3_moe": ("Qwen3MoeTopKRouter", {"num_experts": 16, "norm_topk_prob": False}, {"k": 4}),
        "gpt_oss": ("GptOssTopKRouter", {"num_local_experts": 16}, {"k": 4, "normalize": True}),
        "deepseek_v3": ("DeepseekV3TopkRouter", {**deepseek, "routed_scaling_factor": 2.5}, grouped),
    }


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("model", routers())
def test_it_is_the_router_of_transformers(model, backend):
    """The same experts, in any order, with the same weights; and the same gradient of the logits."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    name, sizes, options = routers()[model]
    config = transformers.AutoConfig.for_model(model, hidden_size=24, num_experts_per_tok=4, **sizes)
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    theirs, draw = getattr(module, name)(config), torch.Generator().manual_seed(1)
    for parameter in (*theirs.parameters(), *theirs.buffers()):
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    logits, weights, indices = theirs(torch.randn(50, 24, generator=draw))
    logits.retain_grad()

    bias = getattr(theirs, "e_score_correction_bias", None)
    x = logits.detach().requires_grad_()
    ours, places = pk.op("router", backend=backend)(x, bias if bias is None else bias.detach(), **options)
    order, same = indices.argsort(-1), places.argsort(-1)
    assert torch.equal(indices.gather(-1, order), places.gather(-1, same).long())
    torch.testing.assert_close(ours.gather(-1, same), weights.gather(-1, order).float())

    g = torch.randn(weights.shape, generator=draw)
    weights.gather(-1, order).backward(g)
    ours.gather(-1, same).backward(g)
    torch.testing.assert_close(x.grad, logits.grad)
