"""Models of transformers under PyTorch's parallel plans, with portakern.torch.apply: equal to one device."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import portakern.torch  # noqa: E402
from tests.ranks import on_ranks, whole  # noqa: E402

CONFIG = {
    "vocab_size": 49, "hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
"""Classes and columns that the devices do not divide."""
ALL, TOKENS = Replicate(), Shard(1)


def build(family):
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**CONFIG)
    return getattr(transformers, family + "ForCausalLM")._from_config(config, attn_implementation="eager").train()


def plan_of_a_layer(layer, sequence):
    """Heads and columns of a layer lie apart; with ``sequence`` the tokens of what comes between do."""
    between = TOKENS if sequence else ALL
    plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
    plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
    plan |= {n: RowwiseParallel(output_layouts=between) for n in ("self_attn.o_proj", "mlp.down_proj")}
    if hasattr(layer.self_attn, "q_norm"):  # of each head: its weight's gradient is a sum over the devices
        plan |= {f"self_attn.{n}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for n in "qk"}
    if sequence:
        norms = ("input_layernorm", "post_attention_layernorm")
        plan |= {n: SequenceParallel(use_local_output=True) for n in norms}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": TOKENS}, desired_input_kwarg_layouts={"hidden_states": ALL}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=ALL)
    return plan


def split(model, mesh, sequence=False, losses=False):
    """Tensor parallelism as PyTorch's tutorials have it, for transformers' models."""
    last = Shard(-1) if losses else ALL
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=ALL),
        "lm_head": ColwiseParallel(
            input_layouts=TOKENS if sequence else ALL, output_layouts=last, use_local_output=not losses
        ),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel(use_local_output=True)
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=ALL, desired_input_layouts=TOKENS, use_local_output=True
        )
    parallelize_module(model, mesh, plan)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan_of_a_layer(layer, sequence))


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


PLANS = {
    "FSDP2": {},
    "TP": {"sequence": False},
    "TP and SP": {"sequence": True},
    "TP and loss_parallel": {"sequence": False, "losses": True},
    "TP, SP and loss_parallel": {"sequence": True, "losses": True},
}


def step(model, ids, losses=False):
    """The op calls of a step, whose gradients are the model's."""
    served = []
    with pk.observe(lambda s: served.append(s.call)), loss_parallel() if losses else contextlib.nullcontext():
        model(input_ids=ids, labels=ids).loss.backward()
    return served


def parallel(family, name, first, ids):
    """A model of which plans have taken hold, before apply did or after it; its step."""
    plan, model = PLANS[name], build(family)
    tensor = bool(plan)
    mesh = init_device_mesh("cpu", (2, 2) if tensor else (4, 1), mesh_dim_names=("data", "tensor"))
    applied = portakern.torch.apply(model, backend="reference") if first else None
    if tensor:
        split(model, mesh["tensor"], **plan)
    shard(model, mesh["data"])
    applied = applied or portakern.torch.apply(model, backend="reference")
    mine = ids.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    return model, applied, step(model, mine, plan.get("losses", False))


def equal_to_one_device(family):
    ids = torch.randint(3, 48, (4, 12), generator=torch.Generator().manual_seed(1))
    one = build(family)
    step(one, ids)
    want = {name: p.grad for name, p in one.named_parameters()}
    for name, plan in PLANS.items():
        for first in (True, False) if name in ("FSDP2", "TP and SP") else (True,):
            model, applied, served = parallel(family, name, first, ids)
            for of, p in model.named_parameters():
                at = f"{name}, apply {'first' if first else 'last'}, {of}: "
                torch.testing.assert_close(whole(p.grad), want[of], rtol=1e-5, atol=2e-7, msg=lambda m, at=at: at + m)
            check_served(name, plan, applied, served)


def check_served(name, plan, applied, served):
    """The ops of a step are those of the plan, on this device's part of the heads."""
    ops = Counter(call.spec.name for call in served)
    heads = {call.arrays["q"].shape[2] for call in served if call.spec.name.startswith("attention")}
    assert heads == {2 if plan else 4}, (name, heads)
    # who hooks a norm sees it called as it was: its residual is added before
    assert ops["add_rmsnorm"] == (0 if plan.get("sequence") else 2), (name, ops)
    assert ops["attention"] == 2 and ops["swiglu"] + ops["geglu"] == 2, (name, ops)
    assert ops["linear_cross_entropy"] == (not plan), (name, ops)
    assert ops["cross_entropy"] == (bool(plan) and not plan.get("losses")), (name, ops)
    why = {row.by for row in applied.rows if row.part == "add_norm" and row.op is None}
    assert why == ({"its post_attention_layernorm has hooks"} if plan.get("sequence") else set()), why


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_a_model_under_each_plan_is_that_of_one_device(family):
    on_ranks(equal_to_one_device, 4, family)
