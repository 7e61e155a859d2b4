"""Models of transformers under PyTorch's parallel plans, with portakern.torch.apply: equal to one device."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter

import pytest

import portakern as pk

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.tensor import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import loss_parallel  # noqa: E402

import portakern.torch  # noqa: E402
from portakern.examples.parallel.plans import shard, split  # noqa: E402
from tests.ranks import on_ranks, whole  # noqa: E402

CONFIG = {
    "vocab_size": 49, "hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
"""Classes and columns that the devices do not divide."""


def build(family):
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**CONFIG)
    return getattr(transformers, family + "ForCausalLM")._from_config(config, attn_implementation="eager").train()


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
    assert ops["cross_entropy"] == bool(plan), (name, ops)
    why = {row.by for row in applied.rows if row.part == "add_norm" and row.op is None}
    assert why == ({"its post_attention_layernorm has hooks"} if plan.get("sequence") else set()), why


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma"])
def test_a_model_under_each_plan_is_that_of_one_device(family):
    on_ranks(equal_to_one_device, 4, family)


def one_graph_under_a_plan():
    ids = torch.randint(3, 48, (4, 12), generator=torch.Generator().manual_seed(1))
    one, model = build("Llama"), build("Llama")
    step(one, ids)
    portakern.torch.apply(model, backend="reference")
    split(model, init_device_mesh("cpu", (2,)), sequence=True)
    step(torch.compile(model, fullgraph=True, backend="aot_eager"), ids)
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=2e-7)


def test_a_model_under_a_plan_is_compiled_in_one_graph():
    on_ranks(one_graph_under_a_plan, 2)


def test_the_example_trains_under_torchrun_as_on_pytorch():
    def run(on):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "portakern.examples.parallel.train", "--steps=2", f"--on={on}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=130, check=True).stdout

    ours, theirs = run("portakern"), run("torch")
    losses = [[float(x) for x in text.splitlines()[-1].removeprefix("losses: ").split()] for text in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4) and len(losses[0]) == 2
    assert "its post_attention_layernorm has hooks" in ours
