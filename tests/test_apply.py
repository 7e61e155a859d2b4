"""portakern under whole models of transformers: against the same models before, and after it was taken back."""

import copy
import socket

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'portakern[demo]'"
)

import portakern.torch  # noqa: E402

LLAMA = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOWS = {"num_hidden_layers": 2, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
BERT = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
PRE_NORM = {"norm", "add_norm", "attention", "loss", "linear_loss"}
GATED = PRE_NORM | {"rope", "gate"}
FAMILIES = {  # the model, its config, and the parts that are served
    "Llama": ("LlamaForCausalLM", LLAMA, GATED),
    "Mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 4}, GATED),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA, GATED),
    "Qwen3": ("Qwen3ForCausalLM", LLAMA, GATED),
    "Gemma": ("GemmaForCausalLM", LLAMA, GATED),
    "Gemma2": ("Gemma2ForCausalLM", {**LLAMA, **WINDOWS, "query_pre_attn_scalar": 4}, GATED - {"linear_loss"}),
    "Gemma3Text": ("Gemma3ForCausalLM", {**LLAMA, **WINDOWS, "query_pre_attn_scalar": 4}, GATED),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        PRE_NORM,
    ),
    "Bert": ("BertForMaskedLM", BERT, {"norm", "add_norm", "attention", "loss"}),
    "ViT": (
        "ViTForImageClassification",
        {**{k: v for k, v in BERT.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4, "num_channels": 1,
         "num_labels": 3},
        {"norm", "add_norm", "attention", "loss"},
    ),
}  # fmt: skip


def build(family="Llama", **changed):
    name, config, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**{**config, **changed})
    return getattr(transformers, name)._from_config(config, attn_implementation="eager").train()


def inputs(model, padded=True):
    torch.manual_seed(1)
    if hasattr(model, "vit"):
        return {"pixel_values": torch.randn(2, 1, 8, 8), "labels": torch.tensor([0, 2])}
    ids = torch.randint(3, 40, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    if not padded:
        return {"input_ids": ids, "labels": ids}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model, given=None, call=None):
    """The loss and the gradient of every parameter."""
    model.zero_grad()
    loss = (model if call is None else call)(**(given or inputs(model))).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def logits(model):
    """Of the tokens that are there."""
    given = inputs(model)
    given.pop("labels")
    with torch.no_grad():
        found = model(**given).logits
    return found[given["attention_mask"].bool()] if "attention_mask" in given else found


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_learns_and_speaks_as_before(family):
    model, parts = build(family), FAMILIES[family][2]
    want, said, keys, before = step(model), logits(model), [*model.state_dict()], dict(vars(model))
    with portakern.torch.apply(model, backend="reference") as applied:
        assert {row.part for row in applied.rows if row.op} == parts, str(applied)
        called = []
        with pk.observe(lambda s: called.append(s.call.spec.name)):
            close(step(model), want)
            close(logits(model), said)
        idle = {"cross_entropy"} if "linear_loss" in parts else set()  # what takes logits, of which there are none
        assert {row.op for row in applied.rows if row.op} - idle <= {*called}
        assert [*model.state_dict()] == keys
    assert vars(model).keys() == before.keys()
    assert all(torch.equal(a, b) for a, b in zip(step(model), want, strict=True))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_without_padding_no_mask_is_made(family):
    model, calls = build(family), []
    given = {**inputs(model, padded=False), "use_cache": False}
    want = step(model, given)
    with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: calls.append(s.call)):
        close(step(model, given), want)
    attended = [c for c in calls if c.spec.name == "attention"]
    assert attended and all(c.arrays["bias"] is None for c in attended)


def test_a_compiled_model_is_one_graph_without_a_mask():
    model, graphs = build("Mistral"), []
    given = {**inputs(model, padded=False), "use_cache": False}
    want = step(model, given)

    def backend(graph, examples):
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    with portakern.torch.apply(model, backend="reference"):
        close(step(model, given, torch.compile(model, backend=backend, fullgraph=True)), want)
    (graph,) = graphs
    assert "cumsum" not in graph and "rotate" not in graph


def test_packed_sequences_do_not_see_each_other():
    model = build()
    given = inputs(model, padded=False) | {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])}
    given["use_cache"] = False
    want = step(model, given)
    with portakern.torch.apply(model, backend="reference"):
        close(step(model, given), want)


def test_generated_tokens_are_the_same():
    model = build(num_hidden_layers=2).eval()
    given = {k: v for k, v in inputs(model, padded=False).items() if k != "labels"}
    want = model.generate(**given, max_new_tokens=4, do_sample=False)
    with portakern.torch.apply(model, backend="reference"):
        assert torch.equal(model.generate(**given, max_new_tokens=4, do_sample=False), want)


def test_another_model_of_the_same_config_stays_as_it_was():
    model = build()
    other = transformers.LlamaForCausalLM(model.config)
    forwards = {name: vars(m).get("forward") for name, m in other.named_modules()}
    with portakern.torch.apply(model):
        assert model.config is not other.config and other.config._attn_implementation == "eager"
        assert not any(forwards.values()) and not any("forward" in vars(m) for m in other.modules())
        again = copy.deepcopy(model)
        close(step(again), step(model))
    assert model.config is other.config


def test_checkpoints_are_kept():
    model = build(num_hidden_layers=2)
    want, called = step(model), []
    model.gradient_checkpointing_enable()
    with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: called.append(s.call.spec.name)):
        close(step(model), want)
    assert called.count("attention") == 4  # each layer once again for its gradients


def test_adapters_are_kept():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build(), config)
    want = step(model)
    with portakern.torch.apply(model, backend="reference") as applied:
        assert {row.part for row in applied.rows if row.op} == GATED
        close(step(model), want)
    with portakern.torch.apply(model.base_model.model, backend="reference"):
        close(step(model), want)


def test_shards_of_fsdp_are_kept():
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        model = build()
        want, called = step(model), []
        fully_shard(model.model.layers[0]), fully_shard(model)
        with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: called.append(s.call.spec.name)):
            close([x.full_tensor() if hasattr(x, "full_tensor") else x for x in step(model)], want)
        assert "linear_cross_entropy" in called and "attention" in called
    finally:
        distributed.destroy_process_group()


class MysteryRMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * self.weight


class MysteryMLP(torch.nn.Module):
    def forward(self, x):
        return x


def with_mystery(kind):
    model = build()
    if kind is MysteryRMSNorm:
        model.model.norm = kind()
    else:
        model.model.layers[0].mlp = kind()
    return model


@pytest.mark.parametrize("kind", [MysteryRMSNorm, MysteryMLP])
def test_what_is_not_known_is_refused_by_name_before_anything_changes(kind):
    model = with_mystery(kind)
    with pytest.raises(pk.UnsupportedError, match=f"{kind.__name__} is a .* that no prototype is like"):
        portakern.torch.apply(model)
    assert not any("forward" in vars(m) for m in model.modules())
    want = step(model)
    with portakern.torch.apply(model, backend="reference", otherwise="torch") as applied:
        (row,) = (row for row in applied.rows if row.module == kind.__name__)
        assert row.op is None and "no prototype" in row.by
        close(step(model), want)


@pytest.mark.parametrize(
    "message, change",
    {
        "parts is the text 'norm'": {"parts": "norm"},
        r"parts has \['nrom'\]": {"parts": ["nrom"]},
        "'add_norm' without 'norm'": {"parts": ["add_norm"]},
        "otherwise is 'ignore'": {"otherwise": "ignore"},
        "model is a int": {"model": 3},
        "cudann": {"backend": "cudann"},
    }.items(),
)
def test_wrong_arguments_are_refused_by_name(message, change):
    with pytest.raises(pk.SpecError, match=message):
        portakern.torch.apply(**{"model": torch.nn.LayerNorm(4)} | change)


def test_what_was_changed_since_is_not_undone_in_silence():
    model = build()
    applied = portakern.torch.apply(model)
    with pytest.raises(pk.SpecError, match="portakern's already"):
        portakern.torch.apply(model)
    ours, model.model.norm.forward = model.model.norm.forward, lambda x: x
    with pytest.raises(pk.SpecError, match="forward of LlamaRMSNorm is not what apply set"):
        applied.undo()
    model.model.norm.forward = ours
    applied.undo(), applied.undo()
    assert "forward" not in vars(model.model.norm)


def test_parts_that_are_not_asked_for_stay_pytorchs():
    model = build()
    with portakern.torch.apply(model, parts=["norm", "loss"], backend="reference") as applied:
        assert {row.part for row in applied.rows if row.op} == {"norm", "loss"}
        assert model.config._attn_implementation == "eager"
        assert model(**inputs(model)).logits is not None
        assert "not asked for: parts lacks 'gate'" in str(applied)
