"""PyTorch's plans for the language models of transformers: tensor and sequence parallelism, FSDP2.

Heads and columns of a layer lie on different devices. With ``sequence`` the tokens between layers do, too, and norms
and residuals are computed for a part of them. Only what ``parallelize_module`` hooks is told of this: portakern's ops
see the part of one device, as PyTorch's would.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["shard", "split"]

ALL, TOKENS = Replicate(), Shard(1)


def split(model: Any, mesh: DeviceMesh, sequence: bool = True, losses: bool = False) -> None:
    """Tensor parallelism over a mesh of one axis.

    Args:
      model: a Llama, Qwen3 or Gemma of transformers, whose key heads the devices divide.
      sequence: sequence parallelism between the layers; the devices must divide the length.
      losses: leave the logits cut along their classes, for ``loss_parallel()``.
    """
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=ALL),
        "lm_head": ColwiseParallel(
            input_layouts=TOKENS if sequence else ALL,
            output_layouts=Shard(-1) if losses else ALL,
            use_local_output=not losses,
        ),
    }
    if sequence:  # the model makes positions and masks of all tokens, and the first layer takes a part of these
        plan["model.norm"] = SequenceParallel(use_local_output=True)
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=ALL, desired_input_layouts=TOKENS, use_local_output=True
        )
    parallelize_module(model, mesh, plan)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _plan_of_layer(layer, sequence))


def _plan_of_layer(layer: Any, sequence: bool) -> dict[str, ParallelStyle]:
    between = TOKENS if sequence else ALL
    plan: dict[str, ParallelStyle] = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
    plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
    plan |= {n: RowwiseParallel(output_layouts=between) for n in ("self_attn.o_proj", "mlp.down_proj")}
    if hasattr(layer.self_attn, "q_norm"):  # Qwen3: norms of heads, whose weights' gradients are sums over devices
        plan |= {f"self_attn.{n}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for n in "qk"}
    if sequence:
        norms = ("input_layernorm", "post_attention_layernorm")
        plan |= {n: SequenceParallel(use_local_output=True) for n in norms}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": TOKENS}, desired_input_kwarg_layouts={"hidden_states": ALL}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=ALL)
    return plan


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over a mesh of one axis: each layer's parameters are gathered while it runs."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded
