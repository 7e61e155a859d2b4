"""The Llama of transformers, in PyTorch: on its own functions, under portakern, and under Liger's patch."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import portakern.torch
from portakern.examples.train import text
from portakern.examples.train.run import GIB, Run, Size

__all__ = ["CONTENDERS", "device_name", "made", "runs_here", "train"]


def made(size: Size, seed: int, device: str) -> LlamaForCausalLM:
    """The model with the weights that a seed gives on a device, in bfloat16 on a GPU."""
    config = LlamaConfig(
        vocab_size=size.words,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16 if device == "cuda" else torch.float32).train()


def best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str | None) -> str | None:
    """The GPU's name; None for the host."""
    return torch.cuda.get_device_name() if (device or best_device()) == "cuda" else None


@contextlib.contextmanager
def on_torch(model: Any, backend: str | None) -> Iterator[str]:
    yield "PyTorch's own functions, attention by sdpa"


@contextlib.contextmanager
def on_portakern(model: Any, backend: str | None) -> Iterator[str]:
    with portakern.torch.apply(model, backend=backend) as applied:
        yield str(applied)


@contextlib.contextmanager
def on_liger(model: Any, backend: str | None) -> Iterator[str]:
    """Liger's patch also changes the module of transformers, which gets back what it had."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    names = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")
    before = {name: getattr(modeling_llama, name) for name in names}
    try:
        apply_liger_kernel_to_llama(model=model)
        yield "Liger's patch"
    finally:
        for name, value in before.items():
            setattr(modeling_llama, name, value)


CONTENDERS: dict[str, Callable[[Any, str | None], Any]] = {
    "portakern": on_portakern,
    "liger": on_liger,
    "torch": on_torch,
}


def runs_here(who: str, device: str | None) -> str | None:
    """Why a contender cannot run here; None where it can."""
    if who != "liger":
        return None
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    return "Liger's kernels need a GPU" if (device or best_device()) == "cpu" else None


class Clock:
    """Milliseconds between ticks, by the device's clock where it has one."""

    def __init__(self, device: str) -> None:
        self.on_device = device == "cuda"

    def tick(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self.on_device else (end - start) * 1e3


def train(who: str, size: Size, seed: int, device: str | None, compiled: bool, backend: str | None, corpus: Any) -> Run:
    """One contender from one seed."""
    device = device or best_device()
    gc.collect()  # a model whose forwards are bound to its modules is a circle: the last one would count in the peak
    model = made(size, seed, device)
    ids = torch.from_numpy(text.batches(corpus, seed, size.steps, size.batch, size.length)).to(device)
    optimizer = getattr(torch.optim, size.optimizer)(model.parameters(), lr=size.rate)
    clock, losses, ticks = Clock(device), [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with CONTENDERS[who](model, backend) as served:
        forward = torch.compile(model) if compiled else model
        for batch in ids:
            start = clock.tick()
            loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            ticks.append((start, clock.tick()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        found = torch.stack(losses).tolist()
        memory = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
        return Run(found, [clock.between(*pair) for pair in ticks], memory, served)
