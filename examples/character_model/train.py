"""Train a small character model twice from the same seeds, on portakern ops and on PyTorch's own; compare the losses.

    python -m portakern.examples.character_model.train --json losses.json
    python -m portakern.examples.character_model.train --draw losses.json losses.svg
    python -m portakern.examples.character_model.train --device cpu --backend triton --steps 2 --seeds 1

What is compared is where the losses end. The text is Shakespeare's sonnets (26 of them, 16 kB, in the public domain).
The model has two layers of width 128 with four heads: embeddings, layernorm, causal attention, layernorm, a perceptron;
matrix products under bfloat16 autocast.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import portakern.torch as twins
from portakern import results

TEXT = Path(__file__).with_name("sonnets.txt")
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 2, 64, 32


@dataclass(frozen=True)
class Ops:
    """The three functions that the model calls; they have PyTorch's signatures."""

    attention: Callable[..., torch.Tensor]
    layer_norm: Callable[..., torch.Tensor]
    matmul: Callable[..., torch.Tensor]


TORCH = Ops(F.scaled_dot_product_attention, F.layer_norm, torch.matmul)


def portakern_ops(backend: str | None) -> Ops:
    def on(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: f(*args, **options, backend=backend)

    return Ops(on(twins.scaled_dot_product_attention), on(twins.layer_norm), on(twins.matmul))


class Layer(nn.Module):
    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        shapes = {
            "qkv": (WIDTH, 3 * WIDTH),
            "out": (WIDTH, WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
        }
        self.weights = nn.ParameterDict({n: nn.Parameter(torch.randn(s) / math.sqrt(s[0])) for n, s in shapes.items()})
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = [lambda x, w=w: self.ops.layer_norm(x, [WIDTH], w) for w in self.norms]
        qkv = self.ops.matmul(norm[0](x), self.weights["qkv"])
        q, k, v = qkv.unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        o = self.ops.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.ops.matmul(o, self.weights["out"])
        return x + self.ops.matmul(F.gelu(self.ops.matmul(norm[1](x), self.weights["up"])), self.weights["down"])


class Model(nn.Module):
    """(batch, length) characters -> (batch, length, vocabulary) logits of the next one."""

    def __init__(self, vocabulary: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.characters, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer(ops) for _ in range(LAYERS)))
        self.head = nn.Parameter(torch.randn(WIDTH, vocabulary) / math.sqrt(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.characters(ids) + self.places.weight[: ids.shape[1]]
        x = self.ops.layer_norm(self.layers(x), [WIDTH])
        return self.ops.matmul(x, self.head)


def train(ops: Ops, seed: int, steps: int, device: str) -> list[float]:
    """The loss at every step."""
    text = TEXT.read_text()
    alphabet = sorted(set(text))
    ids = torch.tensor([alphabet.index(c) for c in text])
    torch.manual_seed(seed)
    model = Model(len(alphabet), ops).to(device)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,), generator=draw)
        batch = torch.stack([ids[s : s + CONTEXT + 1] for s in starts.tolist()]).to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def final(losses: list[float]) -> float:
    """The mean of the last tenth: one batch's loss is noise."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def compare(ends: dict[str, list[float]]) -> dict[str, Any]:
    """Mean final losses, and their difference in standard errors: of the differences seed by seed, since a seed gives
    both sides the same weights and batches.
    """
    apart = [ours - theirs for ours, theirs in zip(ends["portakern"], ends["torch"], strict=True)]
    difference = statistics.mean(apart)
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
    ratio = difference / error if error else math.nan
    return {
        "mean": {who: statistics.mean(e) for who, e in ends.items()},
        "standard_error": error,
        "difference": difference,
        "in_standard_errors": ratio,
    }


def draw_plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Every seed's loss by step, smoothed over 20 steps, and how far the two sides lie apart."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "portakern"
    import matplotlib.pyplot as plt

    def smooth(run: list[float]) -> list[float]:
        return [sum(run[max(0, s - 19) : s + 1]) / len(run[max(0, s - 19) : s + 1]) for s in range(len(run))]

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for who, style in (("portakern", {"linewidth": 4, "alpha": 0.35}), ("torch", {"linewidth": 1, "linestyle": "--"})):
        for i, run in enumerate(curves[who]):
            left.plot(smooth(run), color=f"C{i}", label=who if i == 0 else None, **style)
    for i, (mine, theirs) in enumerate(zip(curves["portakern"], curves["torch"], strict=True)):
        right.plot(
            [a - b for a, b in zip(smooth(mine), smooth(theirs), strict=True)],
            color=f"C{i}",
            linewidth=1,
            label=f"seed {i}",
        )
    left.set(
        xlabel="step",
        ylabel="cross entropy (nats a character)",
        title="On portakern's ops (wide) and PyTorch's own (dashed)",
    )
    right.set(xlabel="step", ylabel="portakern - torch", title="The difference, seed by seed")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="who serves portakern's ops (default: chosen from the arrays)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument(
        "--draw", type=Path, nargs=2, metavar=("JSON", "SVG"), help="plot an earlier result instead of training"
    )
    args = parser.parse_args(argv)
    if args.draw:
        kept: dict[str, list[list[float]]] = {}
        for row in results.read(args.draw[0]).rows:
            kept.setdefault(row["ops"], []).append(row["losses"])
        draw_plot(kept, args.draw[1])
        return 0
    curves: dict[str, list[list[float]]] = {}
    for who, ops in (("portakern", portakern_ops(args.backend)), ("torch", TORCH)):
        curves[who] = [train(ops, seed, args.steps, args.device) for seed in range(args.seeds)]
        print(f"{who:10} final losses {' '.join(f'{final(c):.4f}' for c in curves[who])}")
    ends = {who: [final(c) for c in runs] for who, runs in curves.items()}
    result = compare(ends)
    print(
        f"means differ by {result['difference']:+.1e}, "
        f"{result['in_standard_errors']:+.2f} standard errors of the differences seed by seed"
    )
    if args.json:
        device = torch.cuda.get_device_name() if args.device == "cuda" else results.HOST_CPU
        rounded = {who: [[round(x, 4) for x in c] for c in runs] for who, runs in curves.items()}
        rows = [
            {"ops": who, "seed": i, "final": ends[who][i], "losses": c}
            for who, runs in rounded.items()
            for i, c in enumerate(runs)
        ]
        command = results.command_line("python -m portakern.examples.character_model.train", args.json)
        results.write(
            args.json,
            results.record("character_model", rows, command=command, device=device, steps=args.steps, **result),
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
