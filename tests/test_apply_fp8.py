"""8-bit projections under models of transformers: which are replaced, what comes back, losses beside bfloat16's."""

import copy
import io
from collections import Counter

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")

import portakern.torch  # noqa: E402
from portakern.frameworks.torch.float8 import RECIPES  # noqa: E402
from portakern.frameworks.torch.models.applied import DEFAULT_PARTS, PARTS  # noqa: E402
from tests.test_apply import FAMILIES, build, inputs, step  # noqa: E402

Float8Linear = portakern.torch.Float8Linear
TRAINED = [name for name, kind in RECIPES.items() if kind.trains]
SIZE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}

PRODUCT_APART, TRAINED_APART = 0.0375, 0.059
"""The root mean square of the relative error of a product of random signs, of two float8_e4m3fn arrays, and of one
beside a float8_e5m2 one: sqrt(2) ulp / sqrt 12 over mantissas of 1 to 2 (tests/test_float8_linear.py)."""

LOGITS_APART = 2 * 3**0.5 * PRODUCT_APART
"""The most by which logits may differ from bfloat16's, as a share of their norm: twice what a feed-forward layer adds,
whose three products err each by themselves; attention has two in a row, and the residuals before carry no more."""

GRADIENTS_APART = 28**0.5 * TRAINED_APART
"""The same of a gradient, of 14 projections forward and 14 backward."""


def loss_apart(logits, tokens):
    """The most by which a mean loss may differ, in nats: three standard deviations of a mean of that many errors."""
    return 3 * LOGITS_APART * float(logits.float().std()) / tokens**0.5


def tokens_in(given):
    labels = given["labels"]
    return int((labels[..., 1:] != -100).sum()) if labels.dim() > 1 else len(labels)


def small_llama(train=False):
    """In bfloat16, with weights whose logits tell words apart."""
    model = build("Llama", **SIZE, initializer_range=0.05).to(torch.bfloat16)
    return model.train(train)


def with_fp8(model, recipe="rows", parts=("fp8",), **options):
    return portakern.torch.apply(model, parts=parts, fp8_recipe=recipe, **options)


def places(model):
    return {name for name, m in model.named_modules() if isinstance(m, Float8Linear)}


def linears(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def apart(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def fp8_rows(applied):
    return [(row.module, row.number, row.op, row.by) for row in applied.rows if row.part == "fp8"]


LLAMAS = {f"model.layers.0.{name}_proj" for name in
          ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")}  # fmt: skip
REPLACED = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma"), LLAMAS),
    **dict.fromkeys(("Gemma2", "Gemma3Text"), LLAMAS | {name.replace("0", "1") for name in LLAMAS}),
    "GPT2": set(),
    "Bert": {f"bert.encoder.layer.0.{name}" for name in
             ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
              "intermediate.dense", "output.dense")},
    "ViT": {f"vit.layers.0.{name}" for name in
            ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_of_each_family_are_replaced_and_come_back(family):
    model = build(family).eval()
    before, state = linears(model), {name: x.clone() for name, x in model.state_dict().items()}
    given = inputs(model)
    with torch.no_grad():
        expected = model(**given)
        with with_fp8(model) as applied:
            assert places(model) == REPLACED[family]
            rows = fp8_rows(applied)
            assert sum(n for _, n, op, _ in rows if op == "scaled_matmul") == len(REPLACED[family])
            assert sum(n for kind, n, op, _ in rows if not op and kind == "Linear") == len(before) - len(places(model))
            actual = model(**given)
        assert abs(actual.loss - expected.loss) < loss_apart(expected.logits, tokens_in(given))
        assert torch.equal(model(**given).logits, expected.logits)
    assert not REPLACED[family] or not torch.equal(actual.logits, expected.logits)
    assert linears(model) == before
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_it_is_no_part_unless_it_is_named():
    assert {*PARTS} - {*DEFAULT_PARTS} == {"embeddings", "fp8"}
    model = build().eval()
    with portakern.torch.apply(model) as applied:
        assert not places(model) and not fp8_rows(applied)


def test_what_stays_has_its_reason():
    model = build(num_hidden_layers=4).eval()
    layers = [layer.self_attn for layer in model.model.layers]
    layers[1].k_proj.weight = layers[0].k_proj.weight
    layers[0].q_proj.register_forward_hook(lambda *_: None)
    layers[0].o_proj.forward = layers[0].o_proj.forward
    layers[1].q_proj = type("Adapted", (torch.nn.Linear,), {})(16, 16)
    layers[2].v_proj = torch.nn.Linear(16, 8, dtype=torch.float64).eval()
    layers[2].q_proj = torch.nn.Sequential(layers[2].q_proj)
    layers[3].o_proj.train()
    torch.nn.utils.parametrizations.weight_norm(layers[3].k_proj)
    with with_fp8(model) as applied:
        rows = fp8_rows(applied)
    stays = dict.fromkeys(
        ("it has hooks", "it has a forward of its own", "it is a Adapted; expected a torch.nn.Linear",
         "its weight is torch.float64; expected bfloat16, float16 or float32",
         "Sequential, which has it, is no attention or feed-forward layer that is known",
         "it is in training, and recipe 'rows' is for inference", "it is the model's last projection",
         "it is a ParametrizedLinear; expected a torch.nn.Linear"),
        1,
    )  # fmt: skip
    stays["its weight is tied to another module's"] = 2
    assert {by: n for _, n, op, by in rows if not op} == stays
    assert sum(n for _, n, op, _ in rows if op) == 4 * 7 + 1 - sum(stays.values())


def test_other_parts_may_follow_and_tell_who_has_the_projections():
    model = small_llama()
    with_fp8(model)
    with portakern.torch.apply(model, parts=["norm"]) as norms:
        rows = {row.module: (row.number, row.by) for row in norms.rows if row.part == "other"}
        assert rows["Float8Linear"] == (14, "portakern's already")


def test_blocks_leave_what_they_do_not_divide():
    model = small_llama()
    model.model.layers[0].mlp.down_proj = torch.nn.Linear(200, 256).eval()
    with with_fp8(model, "blocks") as applied:
        (row,) = (row for row in fp8_rows(applied) if "multiple of 128" in row[3])
        assert row[1] == 1 and len(places(model)) == 13


def test_a_layer_of_two_owners_is_one():
    model = build(num_hidden_layers=2).eval()
    model.model.layers[1].self_attn.o_proj = model.model.layers[0].self_attn.o_proj
    with with_fp8(model) as applied:
        first, second = (layer.self_attn.o_proj for layer in model.model.layers)
        assert first is second and isinstance(first, Float8Linear)
        assert sum(n for _, n, op, _ in fp8_rows(applied) if op) == 13
    assert isinstance(model.model.layers[1].self_attn.o_proj, torch.nn.Linear)


def test_adapters_of_others_are_not_looked_through():
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install -e '.[demo]'")
    model = peft.get_peft_model(build().eval(), peft.LoraConfig(target_modules=["q_proj", "down_proj"])).eval()
    with with_fp8(model) as applied:
        assert len(places(model)) == 5
        assert sum(n for _, n, op, by in fp8_rows(applied) if not op and "no attention" in by) == 6


def test_a_model_in_training_is_refused_before_anything_changes():
    model = build()
    with pytest.raises(pk.SpecError, match=r"model is in training.*call model.eval\(\) first, or pass fp8_recipe='dyn"):
        with_fp8(model)
    assert not places(model)
    with with_fp8(model.eval()):
        model.train()
        with pytest.raises(pk.UnsupportedError, match="the module is in training, and recipe 'rows'"):
            step(model)
    with pytest.raises(pk.SpecError, match="fp8_recipe is 'tensor'; expected one of rows, blocks, dynamic, delayed"):
        with_fp8(model, "tensor")


def test_undo_follows_where_the_model_went():
    model = build("Qwen2").eval()
    weight = model.model.layers[0].self_attn.q_proj.weight.clone()
    applied = with_fp8(model)
    model.to(torch.bfloat16)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        assert model(**inputs(model)).logits.dtype == torch.bfloat16
    model.train()
    applied.undo()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, weight.bfloat16())
    assert all(m.training for m in model.modules())
    step(model)


def test_what_stands_for_a_projection_and_was_replaced_is_not_undone_in_silence():
    model = build().eval()
    applied, mlp = with_fp8(model), model.model.layers[0].mlp
    served, mlp.up_proj = mlp.up_proj, torch.nn.Identity()
    assert "its replacement was replaced again later" in str(applied)
    with pytest.raises(pk.SpecError, match="up_proj of LlamaMLP was replaced after apply"):
        applied.undo()
    mlp.up_proj = served
    applied.undo(), applied.undo()
    assert type(mlp.up_proj) is torch.nn.Linear


def test_it_is_copied_saved_and_taken_back_with_its_model():
    model = build().eval()
    applied = with_fp8(model, parts=[*PARTS])
    given = inputs(model)
    with torch.no_grad():
        expected = model(**given).logits
        twin, taken = copy.deepcopy((model, applied))
        assert torch.equal(twin(**given).logits, expected)
        taken.undo()
        assert not places(twin) and len(places(model)) == 7
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(**given).logits, expected)
        other = build().eval()
        with_fp8(other, parts=[*PARTS])
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(**given).logits, expected)


def ops_in(run):
    seen = []
    with pk.observe(lambda call: seen.append(call.call.spec.name)):
        found = run()
    return found, Counter(seen)


@pytest.mark.parametrize(("recipe", "codes"), [("rows", 4), ("blocks", 4), ("dynamic", 4 + 7), ("delayed", 14)])
def test_projections_of_one_input_share_its_codes(recipe, codes):
    """Four inputs of seven projections; the weights of the recipes that train become codes too, and their histories,
    which are each layer's own, count each input."""
    model = build(**{**SIZE, "num_hidden_layers": 1}).train(recipe in TRAINED)
    with torch.no_grad(), with_fp8(model, recipe):
        found, counts = ops_in(lambda: model(**inputs(model)).logits)
        assert counts["quantize"] == codes and counts["scaled_matmul"] == 7
        for m in model.modules():
            if isinstance(m, Float8Linear):
                assert m.shared.last is None, "codes live no longer than what they are of"
                m.shared = None
        assert torch.equal(model(**inputs(model)).logits, found)


@pytest.mark.parametrize("recipe", ["rows", "blocks"])
def test_a_gate_gives_codes_to_the_projection_behind_it(recipe):
    """Where nobody would see the product between them, and no gradient is wanted."""
    model = build(**{**SIZE, "num_hidden_layers": 1}).eval()
    given, mlp = inputs(model), model.model.layers[0].mlp
    joined, apart_ = Counter(swiglu_quantize=1, quantize=3), Counter(swiglu=1, quantize=4)

    def counted(expected):
        found, counts = ops_in(lambda: model(**given).logits)
        gates = {name: counts[name] for name in expected}
        assert gates == expected and sum(counts[name] for name in joined | apart_) == sum(expected.values())
        return found

    with with_fp8(model, recipe, ["gate", "fp8"]):
        with torch.no_grad():
            found = counted(joined)
            handle = mlp.down_proj.register_forward_hook(lambda *seen: None)
            watched = counted(apart_)
            handle.remove()
            assert torch.equal(counted(joined), found)
            x = torch.randn(3, 5, SIZE["hidden_size"], dtype=torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                assert mlp(x).dtype is mlp(x.float()).dtype is torch.bfloat16
            assert mlp(x.float()).dtype is torch.float32 and mlp(x[:0]).shape == (0, 5, SIZE["hidden_size"])
        assert torch.equal(counted(apart_), watched)
    assert 0 < apart(found, watched) < PRODUCT_APART  # codes of one rounding, and of two


def test_codes_that_are_shared_are_of_what_is_there():
    model = build().eval()
    with torch.no_grad(), with_fp8(model):
        first, second = (getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj"))
        assert first.shared is second.shared and first.shared is not model.model.layers[0].mlp.up_proj.shared
        x = torch.randn(3, 16)
        counts = [ops_in(lambda layer=layer: layer(x))[1]["quantize"] for layer in (first, second, second, first)]
        assert counts == [1, 0, 1, 0]  # a layer that comes again begins anew
        first(x)
        first(x)
        x.mul_(-1)
        found, counts = ops_in(lambda: second(x))
        assert counts["quantize"] == 1 and torch.equal(found, second(x.clone()))
        twin = copy.deepcopy(model).model.layers[0].self_attn
        assert twin.q_proj.shared is twin.k_proj.shared is not first.shared and twin.q_proj.shared.last is None
    with torch.inference_mode(), with_fp8(model):
        first, second = (getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj"))
        x = torch.randn(3, 16)
        first(x)
        assert ops_in(lambda: second(x))[1]["quantize"] == 1


# ----------------------------------------------------------------------------------------------------- beside bfloat16


@pytest.mark.parametrize("parts", [("fp8",), tuple(PARTS)], ids=["alone", "with all parts"])
@pytest.mark.parametrize("recipe", ["rows", "blocks"])
def test_the_loss_of_a_forward_pass_is_bfloat16s(recipe, parts):
    model = small_llama()
    given = inputs(model)
    with torch.no_grad():
        expected = model(**given)
        with with_fp8(model, recipe, parts):
            assert len(places(model)) == 14
            actual = model(**given)
    assert abs(float(actual.loss - expected.loss)) < loss_apart(expected.logits, tokens_in(given))
    assert PRODUCT_APART < apart(actual.logits, expected.logits) < LOGITS_APART  # less would be no codes


@pytest.mark.parametrize("recipe", ["rows", "blocks"])
def test_generated_tokens_are_as_probable_as_bfloat16s(recipe):
    model = small_llama()
    ids = inputs(model, padded=False)["input_ids"][:, :4]
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    with with_fp8(model, recipe, [*PARTS]):
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert found.shape == (2, 14)
    with torch.no_grad():
        logits = model(found).logits[:, 3:-1].float()
    scores = logits.log_softmax(-1)
    scores[..., model.generation_config.eos_token_id] = -torch.inf  # min_new_tokens forbids it
    # three standard deviations of the difference of two logits; the best of 40 random words leads by two of a logit
    most = 3 * 2**0.5 * LOGITS_APART * float(logits.std())
    behind = scores.amax(-1) - scores.gather(-1, found[:, 4:, None])[..., 0]
    assert behind.max() < most < scores.amax(-1).mean() - scores.median(-1).values.mean()


@pytest.mark.parametrize("parts", [("fp8",), tuple(PARTS)], ids=["alone", "with all parts"])
@pytest.mark.parametrize("recipe", TRAINED)
def test_training_loses_as_bfloat16_does(recipe, parts):
    """Six steps of AdamW: each loss beside bfloat16's, and the weights trained are the model's own."""
    losses = {}
    for name in ("bfloat16", "fp8"):
        model = small_llama(train=True)
        owned = [*model.parameters()]
        optimizer = torch.optim.AdamW(owned, lr=1e-3)
        applied = with_fp8(model, recipe, parts) if name == "fp8" else None
        given, losses[name] = inputs(model), []
        if applied is None:
            with torch.no_grad():
                logits = model(**given).logits
        for _ in range(6):
            loss = model(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        if applied is not None:
            assert len(places(model)) == 14
            trained = model.model.layers[0].mlp.up_proj.weight
            applied.undo()
            assert model.model.layers[0].mlp.up_proj.weight is trained
        assert all(p is q for p, q in zip(model.parameters(), owned, strict=True))
    fp8, bf16 = (torch.tensor(losses[name]) for name in ("fp8", "bfloat16"))
    assert bf16[-1] < 0.8 * bf16[0]
    assert ((fp8 - bf16).abs() < loss_apart(logits, tokens_in(given))).all(), losses


@pytest.mark.parametrize("recipe", TRAINED)
def test_gradients_of_a_step_point_where_bfloat16s_do(recipe):
    model = small_llama(train=True)
    expected = step(model)
    with with_fp8(model, recipe):
        actual = step(model)
        model.gradient_checkpointing_enable()
        again = step(model)
    for g, e in zip(actual[1:], expected[1:], strict=True):
        assert apart(g, e) < GRADIENTS_APART
    if recipe == "dynamic":
        assert all(torch.equal(g, a) for g, a in zip(again, actual, strict=True))


@pytest.mark.parametrize("recipe", ["dynamic", "rows"])
def test_shards_that_come_later_are_gathered_and_earlier_ones_stay(recipe):
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, sharded = (build().train(recipe in TRAINED) for _ in range(2))
        given = inputs(model)
        with with_fp8(model, recipe):
            with_fp8(sharded, recipe)
            fully_shard(sharded.model.layers[0]), fully_shard(sharded)
            if recipe in TRAINED:
                for g, e in zip(step(sharded), step(model), strict=True):
                    assert torch.equal(g.full_tensor() if hasattr(g, "full_tensor") else g, e)
            else:
                with torch.no_grad():
                    assert torch.equal(sharded(**given).logits, model(**given).logits)
        other = build().train(recipe in TRAINED)
        fully_shard(other.model.layers[0]), fully_shard(other)
        with with_fp8(other, recipe) as applied:
            assert any("DTensor" in by and not op and n == 7 for _, n, op, by in fp8_rows(applied))
    finally:
        distributed.destroy_process_group()


def test_a_step_is_warmed_before_it_runs():
    model = build().eval()
    with with_fp8(model, parts=["norm", "fp8"]) as applied:
        warmed = applied.warm(batch=1, seq=16, train=False, target="sm_90")
    # three norms of one form; a projection's codes and product are of two widths, and the product of four shapes
    assert not warmed.failures and warmed.calls == 7


@pytest.mark.parametrize("recipe", ["rows", "dynamic"])
def test_a_model_is_one_graph(recipe):
    model = build(tie_word_embeddings=False).train(recipe in TRAINED)
    with with_fp8(model, recipe, [*PARTS]):
        given = inputs(model, padded=False)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        if recipe in TRAINED:
            for g, e in zip(step(model, given, compiled), step(model, given), strict=True):
                torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)
        else:
            with torch.no_grad():
                assert torch.equal(compiled(**given).logits, model(**given).logits)
