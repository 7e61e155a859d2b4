"""Continuous batching of transformers on portakern's attention, against transformers' own eager one, token by token."""

import copy
import pickle
from types import SimpleNamespace

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")
pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators",
    reason=f"transformers {transformers.__version__} has another cache of pages",
)

import portakern.torch  # noqa: E402

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},  # a ring in every layer
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},  # pages, and a ring
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5},  # likewise, with sinks
}
SHARED = [5, 6, 7, 8, 9, 10, 11, 12, 13]
PROMPTS = [[5, 6, 7], SHARED, [3], [*SHARED, 14, 15]]
NEW = 6


def build(family, implementation):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")
    return model._from_config(config, attn_implementation=implementation).eval()


def batched(model, prompts=PROMPTS, tokens=8, new=NEW, **how):
    """The tokens that continuous batching draws for each prompt, and their log-probabilities; a step has so many tokens
    at most, so that prompts come in chunks."""
    found = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.generation.ContinuousBatchingConfig(
            page_size=4, num_blocks=32, max_batch_tokens=tokens, auto_switch_to_flash=False, return_logprobs=True
        ),
        warmup=False,
        **how,
    )
    assert [r.error for r in found.values()] == [None] * len(prompts)
    return [(r.generated_tokens, torch.tensor(r.logprobs)) for r in found.values()]


def same(found, wanted):
    for (tokens, got), (others, want) in zip(found, wanted, strict=True):
        assert tokens == others and len(tokens) == NEW
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def wanted():
    return {family: batched(build(family, "paged|eager")) for family in FAMILIES}


def served(calls):
    return {s.call.spec.name for s in calls}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_registered_attention_draws_the_tokens_of_transformers_eager_one(family, backend, wanted):
    portakern.torch.register_attention("mine", backend)
    model, calls = build(family, "eager"), []
    model.config._attn_implementation = "mine_flash"
    with pk.observe(calls.append):
        found = batched(model)
    same(found, wanted[family])
    ops = {"Llama": {"paged_attention"}, "Mistral": {"varlen_attention"}}
    assert served(calls) == ops.get(family, {"paged_attention", "varlen_attention"})


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_an_applied_model_batches_and_is_what_it_was_afterwards(family, wanted):
    model, calls = build(family, "eager"), []
    before = dict(vars(model))
    with portakern.torch.apply(model) as applied:
        table = str(applied)
        ids = torch.tensor([SHARED])
        logits = model(ids).logits
        with pk.observe(calls.append):
            found = batched(model)
        assert "paged_attention" in served(calls) and {"rmsnorm", "rope", "swiglu"} <= served(calls)
        assert model.config._attn_implementation == "portakern" and str(applied) == table
        assert torch.equal(model(ids).logits, logits)
    same(found, wanted[family])
    assert vars(model).keys() == before.keys() and model.config._attn_implementation == "eager"
    same(batched(model), wanted[family])  # transformers' own again


def test_copies_and_pickles_of_an_applied_model_batch(wanted):
    model = build("Llama", "eager")
    portakern.torch.apply(model, parts=["attention"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls = []
        with pk.observe(calls.append):
            found = batched(other)
        same(found, wanted["Llama"])
        assert served(calls) == {"paged_attention"}
        assert vars(other)["init_continuous_batching"].module is other


def test_a_manager_that_is_kept_serves_again(wanted):
    model = build("Llama", "eager")
    portakern.torch.apply(model, parts=["attention"])
    for _ in range(2):
        calls = []
        with pk.observe(calls.append):
            same(batched(model, persistent_manager=True), wanted["Llama"])
        assert served(calls) == {"paged_attention"} and model.config._attn_implementation == "portakern"
    model.destroy_cached_continuous_batching_manager()


def test_a_batching_that_cannot_begin_leaves_the_model_as_it_was():
    model = build("Llama", "eager")
    portakern.torch.apply(model, parts=["attention"])
    with pytest.raises(AttributeError):
        model.init_continuous_batching(continuous_batching_config="none")
    assert model.config._attn_implementation == "portakern"


def test_chunks_of_prompts_of_any_length_draw_the_same(wanted):
    portakern.torch.register_attention("mine", "reference")
    model = build("Llama", "eager")
    model.config._attn_implementation = "mine_flash"
    for tokens in (5, 40):  # 40: each prompt at once, and no step reads the cache before its second
        same(batched(model, tokens=tokens), wanted["Llama"])


def recorded(monkeypatch, change, tokens=8):
    """Run a batch of a Llama in which each call of attention is ``change(function, module, arrays, keywords)``."""
    portakern.torch.register_attention("mine", "triton")
    mapping = transformers.AttentionInterface._global_mapping
    function = mapping["mine_flash"]

    def attend(module, *arrays, **keywords):
        return change(function, module, arrays, keywords)

    monkeypatch.setitem(mapping, "mine_flash", attend)
    model = build("Llama", "eager")
    model.config._attn_implementation = "mine_flash"
    return batched(model, tokens=tokens, new=3)


def padded(x, axis, count, value):
    return torch.cat([x, x.new_full((*x.shape[:axis], count, *x.shape[axis + 1 :]), value)], axis)


def test_tokens_and_sequences_that_pad_a_step_change_no_bit(monkeypatch):
    """As transformers pads steps that it captures in graphs: of any tokens, whose keys go to a page of nobody."""
    lengths = set()

    def change(function, module, arrays, keywords):
        cache, (query, key, value, mask) = keywords["cache"], arrays
        allocator = cache.layer_to_allocator[module.layer_idx]
        (write,), (read,) = keywords["write_index"], keywords["read_index"]
        more = {
            "write_index": [padded(write, 0, 3, allocator.write_trash_index)],
            "read_index": [padded(read, 0, 5, allocator.read_trash_index) if len(read) else read],
            "cu_seq_lens_q": padded(keywords["cu_seq_lens_q"], 0, 2, int(keywords["cu_seq_lens_q"][-1])),
            "cu_seq_lens_k": {n: padded(x, 0, 2, int(x[-1])) for n, x in keywords["cu_seq_lens_k"].items()},
            "max_length_k": dict.fromkeys(keywords["max_length_k"], 1024),
        }
        wide = [padded(x, 2, 3, torch.nan) for x in (query, key, value)]
        o, _ = function(module, query, key, value, mask, **keywords)
        wider, _ = function(module, *wide, mask, **keywords | more)
        assert torch.equal(wider[:, : o.shape[1]], o) and not wider[:, o.shape[1] :].any()
        lengths.add(o.shape[1])
        return o, None

    recorded(monkeypatch, change)
    assert len(lengths) > 1


def test_a_sequence_has_the_bits_that_it_has_alone(monkeypatch):
    """Attention of a step's last sequence without the others, over the same pages."""
    seen = []

    def change(function, module, arrays, keywords):
        o, _ = function(module, *arrays, **keywords)
        q_starts, allocator = keywords["cu_seq_lens_q"], keywords["cache"].layer_to_allocator[module.layer_idx]
        kv_starts = keywords["cu_seq_lens_k"][allocator.layer_type]
        (write,), (read,) = keywords["write_index"], keywords["read_index"]
        if len(q_starts) > 2:
            first, key = int(q_starts[-2]), int(kv_starts[-2])
            alone = {
                "write_index": [write[first:]],
                "read_index": [read[key:]],
                "cu_seq_lens_q": q_starts[-2:] - first,
                "cu_seq_lens_k": {allocator.layer_type: kv_starts[-2:] - key},
            }
            own = [None if x is None else x[:, :, first:] for x in arrays]
            got, _ = function(module, *own, **keywords | alone)
            assert torch.equal(got, o[:, first:])
            seen.append(len(read) > 0)
        return o, None

    recorded(monkeypatch, change, tokens=40)
    assert len(set(seen)) == 2  # steps that read the cache, and one that only begins prompts


MODULE = SimpleNamespace(layer_idx=0, is_causal=True)
CACHE = SimpleNamespace(layer_to_allocator={})
REFUSED = {
    'cache is None; expected the PagedAttentionCache .* set the attention implementation "mine"': {"cache": None},
    "cache is a dict; expected": {"cache": {}},
    r"attention_mask is a tensor of shape \(5, 5\); expected None": {"attention_mask": torch.zeros(5, 5)},
    r"block_table is a tensor of shape \(1, 2\); expected None": {"block_table": torch.zeros(1, 2)},
    "dropout is 0.1; expected 0.0": {"dropout": 0.1},
    "an_argument_of_tomorrow is 1": {"an_argument_of_tomorrow": 1},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_served_is_refused_by_name(message):
    portakern.torch.register_attention("mine")
    function = transformers.AttentionInterface._global_mapping["mine_flash"]
    q, k = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8)
    given = {"attention_mask": None, "cache": CACHE, "read_index": [], "write_index": []} | REFUSED[message]
    with pytest.raises(pk.UnsupportedError, match=f"^mine_flash: {message}"):
        function(MODULE, q, k, k, **given)
