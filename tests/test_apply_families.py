"""portakern.torch.apply on many families of transformers, with what people hang on the modules of a model drawn at
random, before it or after it: the model learns what it learnt without portakern, and is given back as it was.
"""

import contextlib
import copy
import functools
import pickle

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")

import portakern.torch  # noqa: E402

SMALL = {  # what configs call their sizes
    "vocab_size": 40, "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3,
    "hidden_size": 16, "n_embd": 16, "d_model": 16, "dim": 16, "embedding_size": 16, "word_embed_proj_dim": 16,
    "num_hidden_layers": 1, "n_layer": 1, "n_layers": 1, "num_layers": 1, "num_decoder_layers": 1, "encoder_layers": 1,
    "decoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "d_kv": 4, "rotary_dim": 4,
    "intermediate_size": 24, "n_inner": 24, "d_ff": 24, "ffn_dim": 24, "hidden_dim": 24, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 16, "n_positions": 16, "sliding_window": 4,
    "query_pre_attn_scalar": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
}  # fmt: skip
FAMILIES = {
    name.split()[0]: name.split()[1]
    for name in (
        "apertus ApertusForCausalLM", "arcee ArceeForCausalLM", "bigbird_pegasus BigBirdPegasusForCausalLM",
        "biogpt BioGptForCausalLM", "bitnet BitNetForCausalLM", "bloom BloomForCausalLM", "cohere2 Cohere2ForCausalLM",
        "diffllama DiffLlamaForCausalLM", "ernie4_5 Ernie4_5ForCausalLM", "exaone4 Exaone4ForCausalLM",
        "gemma GemmaForCausalLM", "gemma2 Gemma2ForCausalLM", "gemma3_text Gemma3ForCausalLM", "glm GlmForCausalLM",
        "glm4 Glm4ForCausalLM", "gpt2 GPT2LMHeadModel", "gpt_bigcode GPTBigCodeForCausalLM",
        "gpt_neox GPTNeoXForCausalLM", "granite GraniteForCausalLM", "helium HeliumForCausalLM",
        "hyperclovax HyperCLOVAXForCausalLM", "jais2 Jais2ForCausalLM", "llama LlamaForCausalLM",
        "mistral MistralForCausalLM", "modernbert ModernBertForMaskedLM", "nemotron NemotronForCausalLM",
        "olmo OlmoForCausalLM", "olmo2 Olmo2ForCausalLM", "opt OPTForCausalLM", "persimmon PersimmonForCausalLM",
        "phi PhiForCausalLM", "phi3 Phi3ForCausalLM", "qwen2 Qwen2ForCausalLM", "qwen3 Qwen3ForCausalLM",
        "seed_oss SeedOssForCausalLM", "smollm3 SmolLM3ForCausalLM", "starcoder2 Starcoder2ForCausalLM",
        "bert BertForMaskedLM", "roberta RobertaForMaskedLM", "electra ElectraForMaskedLM", "albert AlbertForMaskedLM",
        "distilbert DistilBertForMaskedLM", "eurobert EuroBertForMaskedLM", "nomic_bert NomicBertForMaskedLM",
        "vit ViTForImageClassification", "deit DeiTForImageClassification", "dinov2 Dinov2ForImageClassification",
        "bart BartForConditionalGeneration", "mt5 MT5ForConditionalGeneration",
        "pegasus_x PegasusXForConditionalGeneration", "nllb-moe NllbMoeForConditionalGeneration",
    )
}  # fmt: skip


@functools.cache
def made(family):
    """A small model in float64; every draw takes a copy."""
    kind = transformers.CONFIG_MAPPING[family]
    default = kind()
    config = {k: v for k, v in SMALL.items() if hasattr(default, k)}
    for name in ("head_dim", "sliding_window"):
        if getattr(default, name, None) is None:
            config.pop(name, None)
    config |= {k: 0.0 for k, v in vars(default).items() if "drop" in k and isinstance(v, float)}
    torch.manual_seed(0)
    config = kind(**config)
    model = getattr(transformers, FAMILIES[family])._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():  # norms' weights are ones, biases zeros
            p.add_(0.05 * torch.randn(p.shape))
    return model.double().train()


def inputs(family):
    torch.manual_seed(1)
    if "Image" in FAMILIES[family]:
        return {"pixel_values": torch.randn(2, 1, 8, 8, dtype=torch.float64), "labels": torch.tensor([0, 2])}
    ids = torch.randint(3, 40, (2, 7))
    return {"input_ids": ids, "labels": ids}


def step(model, given):
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# What is drawn: (model, name of a module, log) -> nothing, or what takes it back.
def scaled(x, by=1.25):
    """The first tensor of what a module gave, larger; what else it gave, as it is."""
    if isinstance(x, torch.Tensor):
        return x * by if x.is_floating_point() else x
    if isinstance(x, tuple) and x:
        return (scaled(x[0], by), *x[1:])
    return x


def forward_hook(model, name, log):
    model.get_submodule(name).register_forward_hook(lambda m, args, y: scaled(y))


def hook_with_names(model, name, log):
    def hook(module, args, kwargs, y):
        log.append((name, len(args), sorted(kwargs)))
        return scaled(y, 0.75)

    model.get_submodule(name).register_forward_hook(hook, with_kwargs=True, always_call=True)


def pre_hook(model, name, log):
    model.get_submodule(name).register_forward_pre_hook(lambda m, args: (log.append(name), scaled(args))[1])


def backward_hook(model, name, log):
    def hook(module, inner, outer):
        """Of all inputs but masks (batch, 1, queries, keys): the hook itself makes one ask for a gradient, and where
        portakern attends none may be made."""
        log.append((name, *(tuple(g.shape) for g in inner if g is not None and g.dim() < 4)))
        return tuple(g if g is None or not g.is_floating_point() else 1.25 * g for g in inner)

    model.get_submodule(name).register_full_backward_hook(hook)


def backward_pre_hook(model, name, log):
    model.get_submodule(name).register_full_backward_pre_hook(
        lambda m, outer: tuple(None if g is None else 1.25 * g for g in outer)
    )


def everywhere(model, name, log):
    def hook(module, args, y):
        log.append(type(module).__name__)
        return scaled(y) if module is chosen else y

    chosen = model.get_submodule(name)
    return torch.nn.modules.module.register_module_forward_hook(hook).remove


def own_forward(model, name, log):
    module = model.get_submodule(name)
    theirs = module.forward
    module.forward = lambda *args, **kwargs: scaled(theirs(*args, **kwargs))


def accelerates_hook(model, name, log):
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Scales(hooks.ModelHook):
        def post_forward(self, module, output):
            return scaled(output)

    hooks.add_hook_to_module(model.get_submodule(name), Scales(), append=True)


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return scaled(self.inner(*args, **kwargs))


def put(model, name, module):
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, module)


def wrapped(model, name, log):
    put(model, name, Wrapped(model.get_submodule(name)))


def checkpointed(model, name, log):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    put(model, name, checkpoint_wrapper(model.get_submodule(name)))


class Larger(torch.nn.Module):
    def forward(self, x):
        return 1.25 * x


def parametrized(model, name, log):
    module = model.get_submodule(name)
    assume(isinstance(getattr(module, "weight", None), torch.nn.Parameter))
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Larger(), unsafe=True)


def another_class(model, name, log):
    module = model.get_submodule(name)
    theirs = type(module).forward
    module.__class__ = type(
        "Another", (type(module),), {"forward": lambda self, *args, **kwargs: scaled(theirs(self, *args, **kwargs))}
    )


def checkpoints(model, name, log):
    assume(model.supports_gradient_checkpointing)
    model.gradient_checkpointing_enable({"use_reentrant": False})


CHANGES = [
    forward_hook, hook_with_names, pre_hook, backward_hook, backward_pre_hook, everywhere, own_forward,
    accelerates_hook, wrapped, checkpointed, parametrized, another_class, checkpoints,
]  # fmt: skip


def places(model):
    """Modules that are called for a tensor: not the lists of them, and not the attention whose weights are not made."""
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return [name for name, m in model.named_modules() if name and not isinstance(m, lists)]


def all_hung(model, changes, log, stack):
    for change, name in changes:
        back = change(model, name, log)
        if back is not None:
            stack.callback(back)


def close(actual, expected):
    """Losses take logits in float32: gradients of these are off by a few 2^-24 of the largest, everything else is of
    float64."""
    room = 2**-17 * max(float(x.abs().max()) for x in expected)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-17, atol=room)


ENOUGH = settings(
    max_examples=max(4, settings().max_examples // 40),
    suppress_health_check=[*HealthCheck],
    deadline=None,
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@ENOUGH
@given(data=st.data())
def test_a_family_learns_as_before_whatever_hangs_on_its_modules(family, data):
    plain = copy.deepcopy(made(family))
    change = st.tuples(st.sampled_from(CHANGES), st.sampled_from(places(plain)))
    before, after = data.draw(st.lists(change, max_size=2), "before"), data.draw(st.lists(change, max_size=2), "after")
    copied = data.draw(st.sampled_from([None, copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]), "copied")
    fed, theirs, ours = inputs(family), [], []
    with contextlib.ExitStack() as stack:
        try:
            all_hung(plain, [*before, *after], theirs, stack)
            want = step(plain, fed)
        except (RuntimeError, TypeError, AttributeError, ValueError):  # PyTorch itself cannot do what was drawn
            assume(False)
        assume(all(x.isfinite().all() for x in want))
    model = copy.deepcopy(made(family))
    with contextlib.ExitStack() as stack:
        all_hung(model, before, ours, stack)
        applied = portakern.torch.apply(model, backend="reference", otherwise="torch")
        if copied is not None and not before:
            model, applied = copied((model, applied))
        all_hung(model, after, ours, stack)
        called = []
        with pk.observe(lambda s: called.append(s.call.spec.name)):
            close(step(model, fed), want)
        assert str(applied)
        assert called or any(change is everywhere for change, _ in (*before, *after)) or not served(applied)
        assert sorted(map(str, ours)) == sorted(map(str, theirs))
        if not after:
            applied.undo()
            close(step(model, fed), want)
            assert not any("portakern" in str(value) for m in model.modules() for value in vars(m).values())


def served(applied):
    return [row for row in applied.rows if row.op and row.part != "loss"]
