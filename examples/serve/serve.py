"""Serve sampled requests of mixed lengths, and compare each token with the model without a cache.

    python -m portakern.examples.serve.serve                                  # on a GPU
    python -m portakern.examples.serve.serve --graphs                         # steps of one form are replayed
    python -m portakern.examples.serve.serve --size tiny --device cpu --backend triton    # in the interpreter: slow

A step takes a token of each sequence that draws, and chunks of prompts (``batching.py``); the model is a Llama with
random weights, whose tokens are drawn greedily (``model.py``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from portakern import results
from portakern.examples.serve.batching import Batch, Capacity, Request, sampled
from portakern.examples.serve.model import CONTENDERS, Llama, Packed, Size, made, missing

__all__ = ["SIZES", "Served", "agreement", "main", "serve"]


@dataclass(frozen=True)
class Load:
    """A model, what the server holds, and how many requests come."""

    model: Size
    capacity: Capacity
    requests: int


SIZES = {
    "tiny": Load(Size(2, 32, 48, 4, 2, 97), Capacity(3, 8, 12, 16, 48), 5),
    "small": Load(Size(4, 512, 1536, 8, 4, 4096), Capacity(16, 64, 512, 16, 512), 64),
    "large": Load(Size(16, 2048, 8192, 32, 8, 32000), Capacity(64, 512, 8192, 64, 4096), 256),
}


@dataclass(frozen=True)
class Served:
    """What a loop gave: ``tokens`` of each request, ``steps``, ``seconds``, and the tokens of prompts among them."""

    tokens: list[list[int]]
    steps: int
    seconds: float
    read: int

    def row(self, who: str, agree: int | None, graphs: bool) -> dict[str, Any]:
        drawn = sum(map(len, self.tokens))
        return {
            "ops": who, "graphs": graphs, "steps": self.steps, "seconds": round(self.seconds, 3), "drawn": drawn,
            "read": self.read, "drawn_a_second": round(drawn / self.seconds, 1), "agree": agree,
        }  # fmt: skip


class Graphs:
    """Steps as CUDA graphs, one for each number of tokens: arrays are copied into those that were captured, so that a
    graph serves whatever lengths come."""

    def __init__(self, llama: Llama) -> None:
        self.llama = llama
        self.kept: dict[int, tuple[torch.cuda.CUDAGraph, Packed, torch.Tensor]] = {}

    def step(self, packed: Packed) -> torch.Tensor:
        count = len(packed.tokens)
        if count not in self.kept:
            self.llama.step(packed)  # compiles; and writes the same keys as the replay
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                drawn = self.llama.step(packed)
            self.kept[count] = graph, packed, drawn
        graph, held, drawn = self.kept[count]
        for name in ("tokens", "positions", "slots", "q_starts", "kv_lens", "page_table", "last"):
            getattr(held, name).copy_(getattr(packed, name))
        graph.replay()
        return drawn


def serve(llama: Llama, requests: Sequence[Request], graphs: Graphs | None = None) -> Served:
    """Serve all requests, and return the tokens of each in their order."""
    batch, steps, read = Batch(requests, llama.capacity), 0, 0
    step_of = graphs.step if graphs else llama.step
    begin = time.perf_counter()
    while not batch.ended:
        step = batch.next()
        packed = Packed.of(step, llama.capacity, llama.device)
        drawn = step_of(packed)[: len(step.draws)].tolist()
        batch.take(step, drawn)
        steps, read = steps + 1, read + len(step.tokens)
    seconds = time.perf_counter() - begin
    tokens = [batch.results[i] for i in range(len(requests))]
    return Served(tokens, steps, seconds, read - sum(len(t) - 1 for t in tokens))


@torch.no_grad()
def agreement(model: Any, requests: Sequence[Request], tokens: Sequence[Sequence[int]], slack: float = 0.0) -> int:
    """How many drawn tokens are those that the model without a cache draws after the same tokens: whose logit is the
    largest, or within ``slack`` of it."""
    agree = 0
    for request, drawn in zip(requests, tokens, strict=True):
        whole = torch.tensor([[*request.prompt, *drawn[:-1]]], device=model.device)
        logits = model(whole, use_cache=False).logits[0, len(request.prompt) - 1 :].float()
        of_drawn = logits.gather(1, torch.tensor(drawn, device=model.device)[:, None])[:, 0]
        agree += int((of_drawn >= logits.amax(1) - slack).sum())
    return agree


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--on", action="append", choices=CONTENDERS, help="who computes; may be repeated (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU, if PyTorch sees one")
    parser.add_argument("--backend", help="who serves portakern's ops (default: chosen from the arrays)")
    parser.add_argument("--requests", type=int, help="how many (default: the size's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", action="store_true", help="replay portakern's steps as CUDA graphs")
    parser.add_argument("--rounds", type=int, default=1, help="how often each is timed; the best counts")
    parser.add_argument("--json", type=Path, help="where to write the result")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    load, device = SIZES[args.size], args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype, slack = (torch.bfloat16, 0.25) if device == "cuda" else (torch.float32, 1e-4)
    model = made(load.model, load.capacity.longest, device, dtype, args.seed)
    requests = sampled(args.requests or load.requests, load.model.words, load.capacity.longest, args.seed)
    asked = sum(r.new for r in requests)
    found: dict[str, list[Served]] = {}
    runs: dict[str, tuple[Llama, Graphs | None]] = {}
    for who in args.on or CONTENDERS:
        if why := missing(who, device):
            print(f"{who:12} left out: {why}", file=sys.stderr)
            continue
        llama = Llama(model, CONTENDERS[who](load.model, load.capacity, args.backend), load.capacity)
        runs[who] = llama, Graphs(llama) if args.graphs and who == "portakern" and device == "cuda" else None
        serve(llama, requests[: load.capacity.sequences], runs[who][1])  # what compiles, and what warms up
    for _ in range(args.rounds):
        for who, (llama, graphs) in runs.items():
            found.setdefault(who, []).append(serve(llama, requests, graphs))
    rows = []
    for who, served in found.items():
        best = min(served, key=lambda s: s.seconds)
        rows.append(best.row(who, agreement(model, requests, best.tokens, slack), runs[who][1] is not None))
        print(f"{who:12} {rows[-1]['drawn_a_second']:>10,.0f} tokens a second, {best.steps} steps; {rows[-1]['agree']} "
              f"of {asked} tokens are the model's without a cache", flush=True)  # fmt: skip
    if args.json:
        command = results.command_line("python -m portakern.examples.serve.serve", args.json)
        name = torch.cuda.get_device_name() if device == "cuda" else results.HOST_CPU
        results.write(args.json, results.record("serve", rows, command=command, device=name, size=args.size))
    return 0 if all(row["agree"] == asked for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
