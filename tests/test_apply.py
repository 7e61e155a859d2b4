"""portakern under whole models of transformers: against the same models before, and after it was taken back."""

import copy
from pathlib import Path

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")

import portakern.torch  # noqa: E402
from portakern.frameworks.torch.models.applied import DEFAULT_PARTS  # noqa: E402

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
        PRE_NORM | {"mlp"},
    ),
    "Bert": ("BertForMaskedLM", BERT, {"norm", "add_norm", "attention", "mlp", "loss"}),
    "ViT": (
        "ViTForImageClassification",
        {**{k: v for k, v in BERT.items() if k != "vocab_size"}, "image_size": 8, "patch_size": 4, "num_channels": 1,
         "num_labels": 3},
        {"norm", "add_norm", "attention", "mlp", "loss"},
    ),
}  # fmt: skip


UNGATED = {  # the layer's class, and where it keeps its first projection
    "GPT2": ("GPT2MLP", "transformer.h.0.mlp", "c_fc"),
    "Bert": ("BertIntermediate", "bert.encoder.layer.0.intermediate", "dense"),
    "ViT": ("ViTMLP", "vit.layers.0.mlp", "fc1"),
}


def served_in(run):
    """What a run returns, and the dtypes in which its projections were served that have an activation behind them."""
    calls = []
    with pk.observe(lambda s: calls.append(s.call)):
        found = run()
    return found, [c.dtype for c in calls if c.spec.name == "linear" and c.options["activation"] != "none"]


def sums_in(run):
    """What a run returns, and how many of its projections were served with the residual that they are added to."""
    calls = []
    with pk.observe(lambda s: calls.append(s.call)):
        found = run()
    return found, len([c for c in calls if c.spec.name == "linear" and c.arrays["residual"] is not None])


def row_of(applied, part, module):
    (row,) = (row for row in applied.rows if row.part == part and row.module == module)
    return row


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


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)


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


def test_a_loss_keeps_what_the_memory_limit_has_room_for():
    model = build("Llama")
    want, kept = step(model), []

    def see(served):
        if served.call.spec.name == "linear_cross_entropy":
            kept.append(served.call.options["keep_logit_gradients"])

    for limit in (0, 1 << 30):
        with portakern.torch.apply(model, backend="reference", memory_limit=limit), pk.observe(see):
            close(step(model), want)
    assert kept == [False, True]
    with pytest.raises(pk.SpecError, match="memory_limit is '8GB'; expected a number of bytes"):
        portakern.torch.apply(model, memory_limit="8GB")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_without_padding_no_mask_is_made(family):
    model, calls = build(family), []
    given = {**inputs(model, padded=False), "use_cache": False}
    want = step(model, given)
    with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: calls.append(s.call)):
        close(step(model, given), want)
    attended = [c for c in calls if c.spec.name == "attention"]
    assert attended and all(c.arrays["bias"] is None for c in attended)


@pytest.mark.parametrize("family", UNGATED)
def test_a_compiled_model_has_its_projections_in_one_graph(family):
    model = build(family)
    given = inputs(model, padded=False)
    want = step(model, given)
    with portakern.torch.apply(model, backend="reference"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found, dtypes = served_in(lambda: step(model, given, compiled))
        close(found, want)
    assert dtypes == ["float32"]


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


PACKED = {
    "one row for the batch": [[0, 1, 2, 3, 0, 1, 2, 3, 4]],
    "each its own": [[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 5, 6, 7, 8, 9, 10]],
    "not packed": [[2, 3, 4, 5, 6, 7, 8, 9, 10]],
}


@pytest.mark.parametrize("positions", PACKED)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_packed_sequences_do_not_see_each_other(family, positions):
    """Each token has its sequence's number in place of a mask; Mistral's window is of positions within a sequence."""
    changed = {"sliding_window": 3} if family == "Mistral" else {}
    model, calls = build(family, **changed), []
    given = inputs(model, padded=False) | {"position_ids": torch.tensor(PACKED[positions]), "use_cache": False}
    want = step(model, given)
    # as DataCollatorWithFlattening gives them beside positions
    given |= {f"cu_seq_lens_{of}": torch.tensor([0, 4, 9], dtype=torch.int32) for of in "qk"}
    given |= {"max_length_q": 5, "max_length_k": 5}
    with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: calls.append(s.call)):
        close(step(model, given), want)
    attended = [c for c in calls if c.spec.name == "attention"]
    assert attended and all(c.arrays["bias"] is None and c.arrays["q_segment_ids"] is not None for c in attended)


def test_packed_sequences_are_one_graph_without_a_mask():
    model = build("Mistral")
    given = inputs(model, padded=False) | {"position_ids": torch.tensor(PACKED["each its own"]), "use_cache": False}
    want, calls = step(model, given), []
    with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: calls.append(s.call)):
        close(step(model, given, torch.compile(model, backend="aot_eager", fullgraph=True)), want)
    assert all(c.arrays["bias"] is None for c in calls if c.spec.name == "attention")


def test_positions_beside_a_cache_that_the_model_makes_are_not_packed():
    """As in transformers, which looks for packed sequences where there is no cache."""
    model = build().eval()
    given = {
        "input_ids": inputs(model, padded=False)["input_ids"],
        "position_ids": torch.tensor(PACKED["each its own"]),
    }
    with torch.no_grad():
        want = model(**given).logits
        with portakern.torch.apply(model, backend="reference"):
            close(model(**given).logits, want)


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


@pytest.mark.parametrize(
    "family, layers", {"Llama": "num_hidden_layers", "GPT2": "n_layer", "ViT": "num_hidden_layers"}.items()
)
def test_checkpoints_are_kept(family, layers):
    model = build(family, **{layers: 2})
    want, called = step(model), []
    model.gradient_checkpointing_enable()
    with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: called.append(s.call.spec.name)):
        close(step(model), want)
    assert called.count("attention") == 4  # each layer once again for its gradients
    assert called.count("linear") == {"Llama": 0, "GPT2": 4, "ViT": 8}[family]


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


@pytest.mark.parametrize("family, layer", [("Llama", "model.layers.0"), ("GPT2", "transformer.h.0")])
def test_shards_of_fsdp_are_kept(family, layer):
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = build(family)
        want, called = step(model), []
        fully_shard(model.get_submodule(layer)), fully_shard(model)
        with portakern.torch.apply(model, backend="reference"), pk.observe(lambda s: called.append(s.call.spec.name)):
            close([x.full_tensor() if hasattr(x, "full_tensor") else x for x in step(model)], want)
        assert "linear_cross_entropy" in called and "attention" in called
        assert ("linear" in called) == (family == "GPT2")
    finally:
        distributed.destroy_process_group()


ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "relu": "relu", "silu": "silu",
    "quick_gelu": None, "gelu_10": None, "gelu_fast": None, "relu2": None, "tanh": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_projection_takes_the_activation_behind_it_or_the_table_names_that(name):
    model, calls = build("ViT", hidden_act=name), []
    want = step(model)
    with portakern.torch.apply(model, backend="reference") as applied, pk.observe(lambda s: calls.append(s.call)):
        close(step(model), want)
        row, found = row_of(applied, "mlp", "ViTMLP"), [c for c in calls if c.spec.name == "linear"][:1]
        if ACTIVATIONS[name] is None:
            assert row.op is None and not found
            assert f"with {type(model.vit.layers[0].mlp.activation_fn).__name__} behind it" in row.by
        else:
            assert row.op == "linear"
            assert [c.options["activation"] for c in found] == [ACTIVATIONS[name]]


class GELUActivation(torch.nn.Module):  # not that of transformers
    def forward(self, x):
        return 2 * torch.nn.functional.gelu(x)


def test_an_activation_that_only_has_the_name_is_left():
    model = build("ViT")
    model.vit.layers[0].mlp.activation_fn = GELUActivation()
    want = step(model)
    with portakern.torch.apply(model, backend="reference") as applied:
        assert row_of(applied, "mlp", "ViTMLP").op is None
        close(step(model), want)


@pytest.mark.parametrize("family", UNGATED)
def test_hooks_on_what_would_be_passed_over_see_what_they_saw(family):
    model, (_, place, projection) = build(family), UNGATED[family]
    layer = model.get_submodule(place)
    seen = []

    def look(module, args, output=None):
        seen.append(args[0].detach() if output is None else output.detach())

    with portakern.torch.apply(model, backend="reference"):
        for where in (getattr(layer, projection), layer.get_submodule(act_of(layer))):
            for hang in ("register_forward_hook", "register_forward_pre_hook"):
                with torch.no_grad():
                    assert served_in(lambda: model(**inputs(model)))[1] == ["float32"] and not seen
                    handle = getattr(where, hang)(look)
                    assert served_in(lambda: model(**inputs(model)))[1] == []
                handle.remove()
                (ours,), seen[:] = seen[:], []
                theirs = build(family)
                other = theirs.get_submodule(place)
                name = projection if where is getattr(layer, projection) else act_of(layer)
                getattr(getattr(other, name), hang)(look)
                with torch.no_grad():
                    theirs(**inputs(theirs))
                close(ours, seen.pop())


def act_of(layer):
    return next(name for name, child in layer.named_children() if "act" in name.partition("_")[0] or "act_fn" in name)


BLOCKS = {"GPT2": "transformer.h.0", "ViT": "vit.layers.0"}
DROPS = {"GPT2": "transformer.h.0.mlp.dropout", "ViT": "vit.layers.0.dropout"}
SECOND = {"GPT2": "transformer.h.0.mlp.c_proj", "ViT": "vit.layers.0.mlp.fc2"}


@pytest.mark.parametrize("family", BLOCKS)
def test_a_second_projection_is_served_with_its_residual_where_nothing_comes_between(family):
    model = build(family)
    given = inputs(model)
    want, said = step(model), logits(model)
    with portakern.torch.apply(model, backend="reference"):
        found, sums = sums_in(lambda: step(model))
        close(found, want)
        assert sums == (family == "ViT"), "a gradient of GPT-2's weight would lie across"
        model.eval()
        found, sums = sums_in(lambda: logits(model))
        close(found, said)
        assert sums == 1
        model.get_submodule(DROPS[family]).p = 0.5
        assert sums_in(lambda: logits(model))[1] == 1
        model.train()
        assert sums_in(lambda: logits(model))[1] == 0
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert sums_in(lambda: model(**given))[1] == 0, "the residual is of float32"
    with portakern.torch.apply(model, backend="reference", parts=["norm", "mlp"]):
        found, sums = sums_in(lambda: logits(model))
        close(found, said)
        assert sums == 0, "the block is PyTorch's"


@pytest.mark.parametrize("family", BLOCKS)
def test_hooks_around_a_second_projection_see_what_they_saw(family):
    model = build(family).eval()
    for place in (f"{BLOCKS[family]}.mlp", SECOND[family], DROPS[family]):
        seen = []
        handle = model.get_submodule(place).register_forward_hook(lambda m, args, y, seen=seen: seen.append(y))
        want = logits(model)
        with portakern.torch.apply(model, backend="reference"):
            found, sums = sums_in(lambda: logits(model))
        handle.remove()
        close(found, want)
        assert sums == 0
        half = len(seen) // 2
        close(seen[half:], seen[:half])


@pytest.mark.parametrize("family", UNGATED)
def test_projections_are_served_in_the_dtypes_in_which_that_gains(family, monkeypatch):
    from portakern.frameworks.torch.models import mlps

    module, *_ = UNGATED[family]
    given = inputs(build(family))
    with torch.autocast("cpu", torch.bfloat16):
        want = build(family)(**given).loss
    for only, plain, cast in ((("bfloat16",), [], ["bfloat16"]), (("float32",), ["float32"], []), ((), [], [])):
        monkeypatch.setattr(mlps, "dtypes_served", lambda *_, only=only: frozenset(only))
        model = build(family)
        with portakern.torch.apply(model, backend="reference") as applied:
            assert served_in(lambda model=model: model(**given))[1] == plain
            with torch.autocast("cpu", torch.bfloat16):
                found, dtypes = served_in(lambda model=model: model(**given).loss)
            assert dtypes == cast
            torch.testing.assert_close(found, want, rtol=2e-2, atol=0)
            row = row_of(applied, "mlp", module)
            if only:
                assert row.op == "linear" and row.by == f"reference in {only[0]}, otherwise PyTorch"
            else:
                assert row.op is None and "in one kernel" in row.by


def test_where_a_projection_gains_its_implementation_says():
    pytest.importorskip("triton", reason="triton is not installed")
    from portakern.core import registry
    from portakern.core.dispatch import ahead
    from portakern.core.framework import frameworks
    from portakern.core.targets import HOST, find

    def asked(target, backend=None):
        named = None if backend is None else registry.backend(backend)
        return ahead(registry.find_spec("linear"), frameworks()["torch"], target, named)

    assert asked(find("sm_90").target) == {"float16", "bfloat16"}
    assert asked(find("sm_80").target) == asked(find("gfx942").target) == frozenset()
    assert all("float32" in asked(HOST, b) for b in (None, "triton", "reference"))


def test_a_projection_that_an_adapter_wraps_is_left_and_the_table_says_so():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for family, (module, place, projection) in UNGATED.items():
        config = peft.LoraConfig(r=2, target_modules=[projection], init_lora_weights=False)
        if family == "Bert":
            config.target_modules = [f"{place}.dense"]
        model = peft.get_peft_model(build(family), config)
        want = step(model, inputs(model.base_model.model))
        with portakern.torch.apply(model, backend="reference") as applied:
            row = row_of(applied, "mlp", module)
            assert row.op is None and f"its {projection} is peft's Linear" in row.by
            found, dtypes = served_in(lambda model=model: step(model, inputs(model.base_model.model)))
            close(found, want)
            assert dtypes == []


def test_an_adapter_that_comes_later_is_not_passed_over():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["c_fc"], init_lora_weights=False)
    model = build("GPT2")
    with portakern.torch.apply(model, backend="reference") as applied:
        adapted = peft.get_peft_model(model, config)
        ours, dtypes = served_in(lambda: step(adapted, inputs(model)))
        assert dtypes == []
    applied.undo()
    close(ours, step(adapted, inputs(model)))


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
    with pytest.raises(pk.SpecError, match="is replaced by portakern already"):
        portakern.torch.apply(model)
    ours, model.model.norm.forward = model.model.norm.forward, lambda x: x
    with pytest.raises(pk.SpecError, match="forward of LlamaRMSNorm was replaced after apply"):
        applied.undo()
    model.model.norm.forward = ours
    applied.undo(), applied.undo()
    assert "forward" not in vars(model.model.norm)


def table_of_families():
    """As examples/huggingface/README.md has it."""
    kept = [*DEFAULT_PARTS]
    lines = [["model", *(f"`{part}`" for part in kept)]]
    lines.append(["---"] * len(lines[0]))
    for family, (name, *_) in FAMILIES.items():
        with portakern.torch.apply(build(family), backend="reference") as applied:
            ops = {part: sorted({row.op for row in applied.rows if row.part == part and row.op}) for part in kept}
        lines.append([f"`{name}`", *(", ".join(f"`{op}`" for op in ops[part]) or "–" for part in kept)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_table_of_families_is_what_is_served():
    page = Path(__file__).parent.parent / "examples" / "huggingface" / "README.md"
    table = table_of_families()
    assert table in page.read_text(encoding="utf-8"), f"expected in {page.name}:\n{table}"


def test_parts_that_are_not_asked_for_stay_pytorchs():
    model = build()
    with portakern.torch.apply(model, parts=["norm", "loss"], backend="reference") as applied:
        assert {row.part for row in applied.rows if row.op} == {"norm", "loss"}
        assert model.config._attn_implementation == "eager"
        assert model(**inputs(model)).logits is not None
        assert "not asked for: parts lacks 'gate'" in str(applied)
