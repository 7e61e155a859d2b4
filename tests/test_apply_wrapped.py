"""What stands on the modules of a model, before portakern.torch.apply and after it: hooks, forwards of somebody's,
wrappers, copies and pickles. apply changes nothing that it does not serve.
"""

import copy
import functools
import inspect
import io
import pickle

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")

import portakern.torch  # noqa: E402
from portakern.frameworks.torch.models.applied import PARTS  # noqa: E402
from tests.test_apply import FAMILIES, LLAMA, build, close, inputs, step  # noqa: E402

apply = functools.partial(portakern.torch.apply, backend="reference", parts=[p for p in PARTS if p != "fp8"])
SOME = ["Llama", "GPT2", "Bert"]


def left(applied):
    """Why modules are not served, by part, but for those that no op serves."""
    return {row.part: row.by for row in applied.rows if row.op is None and row.part != "other"}


def ops_in(run):
    found = []
    with pk.observe(lambda s: found.append(s.call.spec.name)):
        result = run()
    return result, found


# ------------------------------------------------------------------------------------------------- forwards that are
# there
def scaled(module):
    theirs = module.forward
    module.forward = lambda *args, **kwargs: 1.5 * theirs(*args, **kwargs)


@pytest.mark.parametrize("place", ["model.norm", "model.layers.0.post_attention_layernorm", "model.layers.0.mlp"])
def test_a_forward_that_is_there_stays_and_the_table_says_so(place):
    model = build()
    scaled(model.get_submodule(place))
    want, kept = step(model), vars(model.get_submodule(place))["forward"]
    with apply(model) as applied:
        close(step(model), want)
        assert f"it has a forward already, of {__name__}, which stays" in left(applied).values()
    assert vars(model.get_submodule(place))["forward"] is kept


@pytest.mark.parametrize("place", ["model.norm", "model.layers.0.post_attention_layernorm", "lm_head"])
def test_a_forward_that_comes_later_is_called(place):
    model, other = build(), build()
    scaled(other.get_submodule(place))
    want = step(other)
    with apply(model) as applied:
        module = model.get_submodule(place)
        before = vars(module).get("forward")
        scaled(module)
        close(step(model), want)
        assert left(applied)
        vars(module).pop("forward")
        if before is not None:
            module.forward = before
        assert not left(applied)


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")


def hang(hooks, module):
    class Scales(hooks.ModelHook):
        def post_forward(self, module, output):
            return 1.5 * output

    hooks.add_hook_to_module(module, Scales())


def test_accelerates_hooks_are_called_through_and_their_modules_served(hooks):
    model = build()
    plain = step(model)
    hang(hooks, model.model.norm)
    want = step(model)
    with apply(model) as applied:
        found, ops = ops_in(lambda: step(model))
        close(found, want)
        assert ops.count("rmsnorm") == 2 and not left(applied)
    close(step(model), want)
    with apply(model):
        hooks.remove_hook_from_module(model.model.norm)
        close(step(model), plain)
    close(step(model), plain)
    applied = apply(model)
    hang(hooks, model.model.norm)
    close(step(model), want)
    applied.undo()
    assert all(torch.equal(a, b) for a, b in zip(step(model), want, strict=True))
    hooks.remove_hook_from_module(model.model.norm)
    assert all(torch.equal(a, b) for a, b in zip(step(model), plain, strict=True))


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("first", [True, False])
def test_weights_that_accelerate_keeps_elsewhere_are_used(hooks, family, first):
    from accelerate import cpu_offload

    model = build(family).eval()
    given = {k: v for k, v in inputs(model).items() if k != "labels"}
    with torch.no_grad():
        want = model(**given).logits
        if first:
            cpu_offload(model, execution_device=torch.device("cpu"))
        with apply(model) as applied:
            if not first:
                cpu_offload(model, execution_device=torch.device("cpu"))
            found, ops = ops_in(lambda: model(**given).logits)
            close(found, want)
            assert "attention" in ops and {"rmsnorm", "layernorm"} & {*ops}
            assert "has a forward of its own" in left(applied)["add_norm"]
        close(model(**given).logits, want)


def test_a_class_that_gets_another_forward_later_is_served_by_it(monkeypatch):
    model, kind = build(), type(build().model.norm)
    theirs = kind.forward
    with apply(model) as applied:
        monkeypatch.setattr(kind, "forward", lambda self, x: 1.5 * theirs(self, x))
        found, want = step(model), step(build())
        close(found, want)
        assert "LlamaRMSNorm.forward was replaced since" in left(applied)["norm"]


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "create_causal_mask"])
def test_a_function_of_a_models_file_that_is_replaced_later_is_called(monkeypatch, name):
    from transformers.models.llama import modeling_llama

    model, called, theirs = build(), [], getattr(modeling_llama, name)
    with apply(model) as applied:
        monkeypatch.setattr(modeling_llama, name, lambda *a, **k: called.append(name) or theirs(*a, **k))
        step(model, inputs(model, padded=False))
        assert called
        assert name != "apply_rotary_pos_emb" or "replaced since" in left(applied)["rope"]


# ------------------------------------------------------------------------------------------------- hooks
def flat(x):
    """Tensors and names in what a hook is given, in order."""
    if isinstance(x, torch.Tensor):
        return [x.detach().clone()]
    if isinstance(x, (tuple, list)):
        return [y for each in x for y in flat(each)]
    if isinstance(x, dict):
        return [y for k in sorted(x) for y in (k, *flat(x[k]))]
    return [type(x).__name__]


KINDS = {
    "forward": lambda m, see: m.register_forward_hook(see, with_kwargs=True),
    "always": lambda m, see: m.register_forward_hook(see, with_kwargs=True, always_call=True),
    "pre": lambda m, see: m.register_forward_pre_hook(see, with_kwargs=True),
    "backward": lambda m, see: m.register_full_backward_hook(see),
    "backward pre": lambda m, see: m.register_full_backward_pre_hook(see),
}
EVERYWHERE = {
    "forward": torch.nn.modules.module.register_module_forward_hook,
    "pre": torch.nn.modules.module.register_module_forward_pre_hook,
    "backward": torch.nn.modules.module.register_module_full_backward_hook,
}


def watch(model, kind, places):
    """What hooks of a kind see in modules of a model while it learns, with what it learns."""
    seen = []

    def see(place, module, *given):
        seen.append((place, *(y for x in given for y in flat(x))))

    handles = [KINDS[kind](model.get_submodule(place), functools.partial(see, place)) for place in places]
    try:
        return step(model, inputs(model, padded=False)), seen
    finally:
        for handle in handles:
            handle.remove()


def same(actual, expected):
    assert [(x[0], len(x)) for x in actual] == [(x[0], len(x)) for x in expected]
    for x, y in zip(actual, expected, strict=True):
        for a, b in zip(x, y, strict=True):
            if isinstance(a, torch.Tensor):
                close(a, b)
            else:
                assert a == b, x[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [*SOME, "ViT"])
def test_every_module_hands_its_hooks_what_it_handed_them(family, kind):
    model = build(family)
    model.set_attn_implementation("sdpa")  # as eager attention it returns its weights, which the op has not
    places = [name for name, m in model.named_modules() if not isinstance(m, torch.nn.ModuleList)]
    want, seen = watch(model, kind, places)
    with apply(model) as applied:
        found, ours = watch(model, kind, places)
        close(found, want)
        same(ours, seen)
        for place in places:
            found, ours = watch(model, kind, [place])
            close(found, want)
            same(ours, [x for x in seen if x[0] == place])
        assert not left(applied)
        found, ops = ops_in(lambda: step(model))
        assert {row.op for row in applied.rows if row.op} <= {*ops, "cross_entropy"}


SCALED = {  # a module whose result is scaled by a hook -> the part that is not fused meanwhile
    "lm_head": "linear_loss",
    "model.layers.0.mlp.act_fn": "gate",
    "model.layers.0.post_attention_layernorm": "add_norm",
    "": "linear_loss",
    "model.layers.0": None,
    "model.layers.0.self_attn.q_proj": None,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("place, part", SCALED.items())
def test_a_hook_that_changes_a_result_changes_it_and_the_table_names_what_waits(place, part, first):
    def scale(module, args, output):
        if hasattr(output, "logits"):
            output["loss"] = output.logits.square().mean()
            return output
        return 1.5 * output

    model, other = build(), build()
    other.get_submodule(place).register_forward_hook(scale)
    want = step(other)
    hung = model.get_submodule(place).register_forward_hook(scale) if first else None
    with apply(model) as applied:
        hung = hung or model.get_submodule(place).register_forward_hook(scale)
        close(step(model), want)
        assert {*left(applied)} == ({part} if part else set())
        assert part is None or ("has hooks" in left(applied)[part] and "has hooks" in str(applied))
        hung.remove()
        assert not left(applied) and "has hooks" not in str(applied)
        close(step(model), step(build()))


@pytest.mark.parametrize("kind", EVERYWHERE)
def test_hooks_on_all_modules_see_those_that_are_fused(kind):
    model = build()
    model.set_attn_implementation("sdpa")

    def watched():
        seen = []
        handle = EVERYWHERE[kind](lambda module, *given: seen.append(type(module).__name__))
        try:
            return step(model), seen
        finally:
            handle.remove()

    want, seen = watched()
    with apply(model):
        found, ours = watched()
    close(found, want)
    assert ours == seen and "SiLUActivation" in seen


def test_hooks_of_state_dicts_stay():
    model, called = build(), []
    model.model.norm.register_state_dict_post_hook(lambda *a: called.append("saved"))
    model.model.norm.register_load_state_dict_pre_hook(lambda *a: called.append("loaded"))
    keys = [*model.state_dict()]
    with apply(model):
        state = model.state_dict()
        assert [*state] == keys
        model.load_state_dict(state)
    assert called == ["saved", "saved", "loaded"]


# ------------------------------------------------------------------------------------------------- what is replaced
# later
class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


def on_place(place, change):
    def changed(model):
        parent, _, name = place.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, change(getattr(owner, name)))

    return changed


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def with_bias(head):
    torch.manual_seed(3)
    return torch.nn.Linear(head.in_features, head.out_features)


REPLACED = {
    "another function of the gate": (on_place("model.layers.0.mlp.act_fn", lambda _: Doubled()), "gate"),
    "another norm": (on_place("model.layers.0.post_attention_layernorm", lambda _: Doubled()), "add_norm"),
    "another head": (on_place("lm_head", with_bias), "linear_loss"),
    "tied weights": (tied, None),
    "another loss": (lambda m: setattr(m, "loss_function", lambda logits, **_: logits.square().mean()), "linear_loss"),
    "parametrized": (
        lambda m: torch.nn.utils.parametrize.register_parametrization(m.model.norm, "weight", Doubled()),
        None,
    ),
    "a parametrized head": (
        lambda m: torch.nn.utils.parametrize.register_parametrization(m.lm_head, "weight", Doubled()),
        None,
    ),
    "weight norm by a hook": (lambda m: torch.nn.utils.weight_norm(m.lm_head), "linear_loss"),
    "spectral norm": (lambda m: torch.nn.utils.parametrizations.weight_norm(m.model.layers[0].mlp.up_proj), None),
    "another dtype": (lambda m: m.double(), None),
    "another attention": (lambda m: m.set_attn_implementation("sdpa"), "attention"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_before_or_later_is_what_runs(name, first):
    change, part = REPLACED[name]
    model, other = build(), build()
    change(other)
    want = step(other)
    if first:
        change(model)
    applied = apply(model, otherwise="torch")
    if not first:
        change(model)
    found = step(model)
    assert found[0].dtype == want[0].dtype
    close(found, want)
    if part is None or (name, first) == ("another attention", True):
        assert not left(applied)
    else:
        assert part in left(applied), str(applied)


def test_an_attention_of_somebodys_stays():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def halved(module, query, key, value, mask, **others):
        theirs = AttentionInterface._global_mapping["sdpa"]
        return theirs(module, query, key, value / 2, mask, **others)

    AttentionInterface.register("halved", halved), AttentionMaskInterface.register("halved", sdpa_mask)
    model = build()
    model.set_attn_implementation("halved")
    want = step(model)
    with apply(model) as applied:
        close(step(model), want)
        assert "'halved', which is not transformers' own, and stays" in left(applied)["attention"]


def test_a_config_that_was_changed_meanwhile_stays_changed():
    model = build()
    theirs = model.config
    with apply(model):
        model.resize_token_embeddings(48)
    assert model.config.vocab_size == 48 and theirs.vocab_size == 40
    assert model.config._attn_implementation == "eager"
    step(model)
    with apply(model):
        kept = model.config
    assert model.config is not kept and model.model.layers[0].self_attn.config is model.config


# ------------------------------------------------------------------------------------------------- copies
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_saved_and_copied_with_what_serves_it(family):
    model = build(family)
    want = step(model)
    with apply(model) as applied:
        text, file = str(applied), io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            found, ops = ops_in(lambda other=other: step(other))
            close(found, want)
            assert "attention" in ops
            with torch.no_grad():
                for p in other.parameters():
                    p.zero_()
        close(step(model), want)
        for other, of_it in (copy.deepcopy((model, applied)), pickle.loads(pickle.dumps((model, applied)))):
            assert str(of_it) == text
            of_it.undo()
            assert not any("forward" in vars(m) for m in other.modules())
            assert all(torch.equal(a, b) for a, b in zip(step(other), want, strict=True))
        found, ops = ops_in(lambda: step(model))
        assert "attention" in ops


def test_a_saved_model_is_loaded_where_nothing_was_imported(tmp_path):
    import subprocess
    import sys

    model = build()
    with apply(model):
        torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch; m = torch.load(sys.argv[1], weights_only=False).eval(); "
        "print(float(m(input_ids=torch.arange(5)[None]).logits.sum()), 'portakern' in sys.modules)"
    )
    model.eval()
    want = float(model(input_ids=torch.arange(5)[None]).logits.sum())
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.pt")], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    got, imported = run.stdout.split()
    assert abs(float(got) - want) < 1e-4 and imported == "True"


def test_a_class_that_changed_since_it_was_saved_is_refused(monkeypatch):
    model = build()
    with apply(model):
        saved = pickle.dumps(model)
    kind = type(model.model.norm)
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * x)
    with pytest.raises(pk.UnsupportedError, match="LlamaRMSNorm computes something else"):
        pickle.loads(saved)


PATCHES = {  # what is patched in the file of a family, and the part that is not served then
    "LlamaRMSNorm.forward": "norm",
    "LlamaMLP.forward": "gate",
    "LlamaDecoderLayer.forward": None,
    "LlamaForCausalLM.forward": None,
    "apply_rotary_pos_emb": "rope",
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_family_that_was_patched_before_is_no_prototype(monkeypatch, name):
    from transformers.models.llama import modeling_llama

    owner, _, method = name.rpartition(".")
    place = getattr(modeling_llama, owner) if owner else modeling_llama
    theirs = getattr(place, method)

    @functools.wraps(theirs)
    def same_but(*args, **kwargs):
        called.append(name)
        return theirs(*args, **kwargs)

    def other(*args, **kwargs):
        called.append(name)
        return theirs(*args, **kwargs)

    model, called = build(), []
    want = step(model)
    for patch in (same_but, other):
        with monkeypatch.context() as patched:
            patched.setattr(place, method, patch)
            with apply(model, otherwise="torch") as applied:
                close(step(model), want)
                assert called, str(applied)
                assert patch is same_but or PATCHES[name] is None or PATCHES[name] in left(applied)
        called.clear()
    with apply(model) as applied:
        assert not left(applied)


def test_a_replica_reads_its_own_parameters():
    model = build()
    x = torch.randn(3, 16)
    with apply(model):
        norm = model.model.norm
        want = 3 * norm(x)
        replica = norm._replicate_for_data_parallel()
        replica.weight = 3 * norm.weight
        again = replica._replicate_for_data_parallel()
        again.weight = 9 * norm.weight
        close([replica(x), again(x)], [want, 3 * want])
        close(3 * norm(x), want)
    assert "_replicate_for_data_parallel" not in vars(norm)


def test_a_forward_tells_its_arguments():
    model = build()
    want = inspect.signature(model.forward)
    with apply(model):
        assert inspect.signature(model.forward) == want and "input_ids" in want.parameters
        assert model.forward.__self__ is model and model.forward.__name__ == "forward"


# ------------------------------------------------------------------------------------------------- wrappers
def lora(**more):
    def wrap(model):
        peft = pytest.importorskip("peft", reason="peft is not installed")
        torch.manual_seed(5)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **more))

    return wrap


def reentrant(yes):
    return lambda model: model.gradient_checkpointing_enable({"use_reentrant": yes})


def wrapped_in_checkpoints(*kinds):
    def wrap(model):
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

        chosen = lambda m: type(m).__name__ in kinds  # noqa: E731
        wrapper.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper.checkpoint_wrapper, check_fn=chosen)

    return wrap


WRAPPERS = {
    "adapters on projections and norms": (
        "Llama",
        lora(target_modules=["q_proj", "gate_proj"], modules_to_save=["norm", "post_attention_layernorm", "lm_head"]),
    ),
    "adapters on a head": ("Llama", lora(target_modules=["lm_head", "down_proj"])),
    "adapters of GPT-2": ("GPT2", lora(target_modules=["c_fc", "c_proj"], modules_to_save=["ln_2"])),
    "adapters of BERT": ("Bert", lora(target_modules=["dense", "query"], modules_to_save=["LayerNorm"])),
    "checkpoints, reentrant": ("Llama", reentrant(True)),
    "checkpoints": ("GPT2", reentrant(False)),
    "checkpoints, reentrant, of BERT": ("Bert", reentrant(True)),
    "checkpoints around layers": ("Llama", wrapped_in_checkpoints("LlamaDecoderLayer")),
    "checkpoints around what is fused": ("Llama", wrapped_in_checkpoints("LlamaRMSNorm", "SiLUActivation", "Linear")),
    "checkpoints around GPT-2's": ("GPT2", wrapped_in_checkpoints("LayerNorm", "GPT2MLP", "Dropout")),
    "DataParallel": ("Llama", torch.nn.DataParallel),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_what_wraps_modules_stays_as_it_is(name, first):
    family, wrap = WRAPPERS[name]
    given = {**inputs(build(family)), "use_cache": False} if family != "Bert" else inputs(build(family))
    other, model = build(family), build(family)
    want = step(wrap(other) or other, given)
    if first:
        model = wrap(model) or model
    applied = apply(model)
    if not first:
        model = wrap(model) or model
    found, ops = ops_in(lambda: step(model, given))
    close(found, want)
    assert "attention" in ops
    str(applied)


@pytest.fixture
def group():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


SHARDED = {
    "layers": ("Llama", ["LlamaDecoderLayer"], {"embeddings"}),
    "all": ("Llama", ["LlamaDecoderLayer", "Linear", "LlamaRMSNorm"], {"embeddings", "add_norm", "linear_loss"}),
    "norms": ("Bert", ["LayerNorm", "BertIntermediate"], {"embeddings", "add_norm"}),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_kept_with_the_checkpoints_of_their_layers(group, name, first):
    from torch.distributed.fsdp import fully_shard

    family, kinds, parts = SHARDED[name]

    def shard(model):
        for module in [*model.modules()][::-1]:
            if type(module).__name__ in kinds:
                fully_shard(module)
        fully_shard(model)

    model = build(family)
    want = step(model)
    model.gradient_checkpointing_enable()
    if first:
        shard(model)
    applied = apply(model)
    if not first:
        shard(model)
    found, ops = ops_in(lambda: step(model))
    close([x.full_tensor() if hasattr(x, "full_tensor") else x for x in found], want)
    assert ops.count("attention") == 2, "once more for the gradients"
    assert {*left(applied)} == parts, str(applied)


@pytest.mark.parametrize("first", [True, False])
def test_ddp_is_kept(group, first):
    model = build()
    want = step(model)
    if first:
        model = torch.nn.parallel.DistributedDataParallel(model)
    applied = apply(model)
    if not first:
        model = torch.nn.parallel.DistributedDataParallel(model)
    close(step(model, inputs(applied.model)), want)
    assert not left(applied)


@pytest.mark.parametrize("family", SOME)
def test_a_functional_call_uses_what_it_is_given(family):
    model = build(family)
    given = inputs(model)
    weights = {k: 1.1 * v.detach() for k, v in model.named_parameters()}

    def gradients():
        call = lambda w: torch.func.functional_call(model, w, (), given).loss  # noqa: E731
        return [*torch.func.grad(call)(weights).values()]

    want = gradients()
    with apply(model):
        close(gradients(), want)


def test_stacked_models_are_mapped_over():
    models = [build().eval(), build().eval()]
    with torch.no_grad():
        for p in models[1].parameters():
            p.add_(0.1)
    ids = torch.arange(5)[None] + 3
    want = torch.stack([m(input_ids=ids, use_cache=False).logits for m in models])
    for model in models:
        apply(model)
    weights, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(w, b):
        return torch.func.functional_call(base, (w, b), (), {"input_ids": ids, "use_cache": False}).logits

    close(torch.func.vmap(call)(weights, buffers), want)


@pytest.mark.parametrize("warm", [True, False])
def test_a_model_that_was_compiled_before_is_served_and_taken_back(warm):
    model = build()
    given = inputs(model, padded=False)
    want = step(model, given)
    compiled = torch.compile(model, backend="aot_eager")
    if warm:
        close(step(model, given, compiled), want)
    with apply(compiled):
        found, ops = ops_in(lambda: step(model, given, compiled))
        close(found, want)
        assert "attention" in ops and "add_rmsnorm" in ops
    found, ops = ops_in(lambda: step(model, given, compiled))
    close(found, want)
    assert not ops


# ------------------------------------------------------------------------------------------------- arguments of losses
def asked(name):
    torch.manual_seed(2)
    aims = torch.randint(3, 40, (2, 9))
    return {
        "shift_labels": {"shift_labels": aims},
        "shift_labels with ignored ones": {"shift_labels": aims.masked_fill(aims % 3 == 0, -100)},
        "num_items_in_batch": {"num_items_in_batch": 5},
        "num_items_in_batch, a tensor": {"num_items_in_batch": torch.tensor(7)},
        "ignore_index": {"ignore_index": 7},
        "logits_to_keep": {"logits_to_keep": 3},
        "logits_to_keep, a tensor": {"logits_to_keep": torch.tensor([0, 2, 5])},
        "return_dict": {"return_dict": False},
        "output_hidden_states": {"output_hidden_states": True},
        "use_cache": {"use_cache": True},
    }[name]


ARGUMENTS = {
    "shift_labels", "shift_labels with ignored ones", "num_items_in_batch", "num_items_in_batch, a tensor",
    "ignore_index", "logits_to_keep", "logits_to_keep, a tensor", "return_dict", "output_hidden_states", "use_cache",
}  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_what_a_loss_is_told_counts(family, name, training):
    if family == "Bert" and name.startswith(("logits_to_keep", "shift", "ignore", "num_items", "use_cache")):
        family = "Gemma2"  # BERT's forward makes its loss itself, of none of these
    model, given = build(family).train(training), {**inputs(build(family), padded=False), **asked(name)}
    if name.startswith("logits_to_keep"):
        given["labels"] = given["labels"][:, :3]

    def loss_of():
        model.zero_grad()
        out = model(**given)
        loss = out[0] if isinstance(out, tuple) else out.loss
        loss.backward()
        states = () if name != "output_hidden_states" else out.hidden_states
        return [loss.detach(), *(s.detach() for s in states), *(p.grad for p in model.parameters())]

    want = loss_of()
    with apply(model):
        close(loss_of(), want)


def test_what_no_loss_and_no_attention_knows_is_refused_by_name():
    model = build()
    for name, value in {"label_smoothing": 0.1, "reduction": "sum", "weight": torch.ones(40)}.items():
        with apply(model), pytest.raises(pk.UnsupportedError, match=f"{name} is"):
            model(**inputs(model), **{name: value})


@pytest.mark.parametrize("problem", ["ForCausalLMLoss", "ForMaskedLMLoss", "ForSequenceClassificationLoss"])
def test_a_loss_hands_what_it_does_not_know_to_transformers(problem):
    from transformers.loss import loss_utils

    from portakern.frameworks.torch.models.losses import served_loss

    theirs, told = getattr(loss_utils, problem), {}

    def spied(*args, **others):
        told.update(others)
        return theirs(*args, **others)

    spied.__name__ = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_utils, problem, spied)
        loss = served_loss(spied, "reference")
    config = transformers.LlamaConfig(**LLAMA, num_labels=4)
    logits, labels = torch.randn(3, 4), torch.tensor([0, 2, 1])
    given = (labels, logits, config) if "Sequence" in problem else (logits, labels, 4)
    loss(*given, use_cache=True)
    assert not told
    close(loss(*given, label_smoothing=0.1), theirs(*given, label_smoothing=0.1))
    assert told["label_smoothing"] == 0.1


def test_every_argument_of_the_losses_that_are_served_is_known():
    from transformers.loss import loss_utils

    from portakern.frameworks.torch.models.arguments import OF_LOSSES
    from portakern.frameworks.torch.models.losses import LOSSES

    for name in (*LOSSES, "fixed_cross_entropy"):
        function = getattr(loss_utils, name)
        names = {p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD}
        tensors = {"logits", "pooled_logits", "labels", "source", "target", "vocab_size", "config"}
        assert names - tensors <= OF_LOSSES, name
