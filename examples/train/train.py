"""Train a small Llama of transformers from the same seeds on portakern, on Liger and on PyTorch's own functions.

    python -m portakern.examples.train.train --json losses.json --plot losses.svg
    python -m portakern.examples.train.train --size reach --compile --json reach.json
    python -m portakern.examples.train.train --size tiny --device cpu --on portakern --on torch --steps 2

The text is the documentation of this checkout, a byte a token. ``portakern.torch.apply`` puts portakern under a model,
Liger's own patch Liger; weights, batches and optimizer are the same. What is compared is where the losses go, the time
of a step and the peak of the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import portakern.torch
from portakern import results
from portakern.examples.train import text

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """Extents of a model and of its batches. ``optimizer``: a class of torch.optim; one without state leaves the peak
    in the memory to the model."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    words: int
    batch: int
    length: int
    steps: int
    optimizer: str = "AdamW"
    rate: float = 1e-3

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.words,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length,
            attn_implementation="sdpa",
        )


SIZES = {
    "tiny": Size(1, 32, 48, 4, 2, 256, 2, 16, 2, rate=1e-2),
    "small": Size(4, 512, 1536, 8, 4, 256, 16, 512, 200),
    "reach": Size(8, 2048, 8192, 32, 8, 128256, 2, 4096, 20, "SGD", 1e-2),
}


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


def runs_here(who: str, device: str) -> str | None:
    """Why a contender cannot run here; None where it can."""
    if who != "liger":
        return None
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    return "Liger's kernels need a GPU" if device == "cpu" else None


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


@dataclass
class Run:
    """What one training run gave: the loss of every step, milliseconds of forward and backward of each, the peak of
    the memory in GiB, and what served it."""

    losses: list[float]
    times: list[float]
    memory: float | None
    served: str

    def step_ms(self) -> float:
        """The median, without the first fifth: what compiles, and what warms up."""
        return statistics.median(self.times[len(self.times) // 5 :])


def train(who: str, size: Size, seed: int, device: str, compiled: bool, backend: str | None, corpus: Any) -> Run:
    """One contender from one seed."""
    gc.collect()  # a model whose forwards are bound to its modules is a circle: the last one would count in the peak
    torch.manual_seed(seed)
    with torch.device(device):
        model = LlamaForCausalLM(size.config()).to(torch.bfloat16 if device == "cuda" else torch.float32).train()
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


def row(who: str, seed: int, compiled: bool, run: Run) -> dict[str, Any]:
    """A run, as results keep it."""
    return {
        "ops": who,
        "seed": seed,
        "compiled": compiled,
        "step_ms": round(run.step_ms(), 3),
        "memory_gib": None if run.memory is None else round(run.memory, 3),
        "final": round(statistics.mean(run.losses[-max(1, len(run.losses) // 10) :]), 5),
        "losses": [round(x, 5) for x in run.losses],
        "served": run.served.splitlines(),
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Losses by step, how far each lies from PyTorch's of the same seed, and time and memory of a step."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "portakern"
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    styles = {"portakern": ("C0", "-", 3.5), "liger": ("C1", "-", 1.8), "torch": ("C2", "--", 1.0)}
    theirs = {r["seed"]: r["losses"] for r in rows if r["ops"] == "torch"}
    for r in rows:
        color, line, width = styles.get(r["ops"], ("C3", ":", 1.5))
        first = r["seed"] == min(other["seed"] for other in rows if other["ops"] == r["ops"])
        drawn = {"color": color, "linestyle": line, "linewidth": width, "alpha": 0.7}
        left.plot(r["losses"], label=r["ops"] if first else None, **drawn)
        if r["seed"] in theirs and r["ops"] != "torch":
            apart = [a - b for a, b in zip(r["losses"], theirs[r["seed"]], strict=True)]
            middle.plot(apart, label=r["ops"] if first else None, **drawn | {"linewidth": 1.0})
    names = [*dict.fromkeys(r["ops"] for r in rows)]
    times = [statistics.median(r["step_ms"] for r in rows if r["ops"] == name) for name in names]
    right.bar(names, times, color=[styles.get(name, ("C3",))[0] for name in names])
    for i, name in enumerate(names):
        memory = next(r["memory_gib"] for r in rows if r["ops"] == name)
        right.text(i, times[i], "" if memory is None else f"{memory:.2f} GiB", ha="center", va="bottom")
    left.set(xlabel="step", ylabel="loss (nats a byte)", title="The same seeds on each")
    middle.set(xlabel="step", ylabel="loss - PyTorch's", title="The difference, seed by seed")
    right.set(ylabel="ms", title="Forward and backward, peak memory")
    for axes in (left, middle):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--on", action="append", choices=CONTENDERS, help="whom to train on; may be repeated (all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="who serves portakern's ops (default: chosen from the arrays)")
    parser.add_argument("--steps", type=int, help="how many (default: the size's)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to learn (default: the documentation)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--plot", type=Path, help="where to draw it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    size, corpus = SIZES[args.size], text.read(args.text)
    if args.steps:
        size = Size(**{**vars(size), "steps": args.steps})
    rows = []
    for who in args.on or CONTENDERS:
        why = runs_here(who, args.device)
        if why is not None:
            print(f"{who:10} left out: {why}", file=sys.stderr)
            continue
        for seed in range(args.seeds):
            run = train(who, size, seed, args.device, args.compile, args.backend, corpus)
            rows.append(row(who, seed, args.compile, run))
            memory = "" if run.memory is None else f", {run.memory:.2f} GiB"
            print(f"{who:10} seed {seed}: loss {run.losses[0]:.4f} to {rows[-1]['final']:.4f}, "
                  f"{run.step_ms():.2f} ms a step{memory}", flush=True)  # fmt: skip
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else results.HOST_CPU
        command = results.command_line("python -m portakern.examples.train.train", args.json)
        kept = results.record("train", rows, command=command, device=device, size=args.size, steps=size.steps)
        results.write(args.json, kept)
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
