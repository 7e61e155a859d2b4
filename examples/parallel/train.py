"""Train a small Llama of transformers on several devices: FSDP2, tensor and sequence parallelism, ops of portakern.

torchrun --nproc-per-node 4 -m portakern.examples.parallel.train
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import portakern.torch
from portakern.examples.parallel.plans import shard, split

CONFIG = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False}


def train(steps: int, on: str, tensor: int, length: int = 16) -> list[float]:
    """The mean loss of each step over all data, on tokens that repeat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, **HEADS)).to(device).train()
    applied = portakern.torch.apply(model) if on == "portakern" else None
    split(model, mesh["tensor"])
    shard(model, mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    ids = (torch.arange(length, device=device) % 5 + torch.arange(4, device=device)[:, None]) % 64
    mine = ids.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    losses = []
    for _ in range(steps):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["data"].get_group())
        losses.append(mean.item() / mesh["data"].size())
    if applied is not None and dist.get_rank() == 0:
        print(applied, flush=True)
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--on", choices=("portakern", "torch"), default="portakern", help="whose norms, attention, ...")
    parser.add_argument("--tensor", type=int, default=2, help="devices that share a layer; the others have other data")
    args = parser.parse_args(argv)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        losses = train(args.steps, args.on, args.tensor)
        if dist.get_rank() == 0:
            print("losses:", " ".join(f"{x:.4f}" for x in losses), flush=True)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
