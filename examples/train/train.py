"""Train a small Llama from the same seeds on portakern, on Liger, on PyTorch's own functions, and in JAX on portakern
and on XLA's own.

    python -m portakern.examples.train.train --json losses.json --plot losses.svg
    python -m portakern.examples.train.train --size reach --compile --json reach.json
    python -m portakern.examples.train.train --on portakern-jax --on jax --backend pallas
    python -m portakern.examples.train.train --size tiny --device cpu --on portakern --on torch --steps 2

The text is the documentation of this checkout, a byte a token. ``portakern.torch.apply`` puts portakern under the model
of transformers, Liger's own patch Liger; in JAX the model is written out. Weights, batches and optimizer are the same.
What is compared is where the losses go, the time of a step and the peak of the memory.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from portakern import results
from portakern.examples.train import text
from portakern.examples.train.run import SIZES, Size

TRAINERS = {
    "portakern": "on_torch", "liger": "on_torch", "torch": "on_torch", "portakern-jax": "on_jax", "jax": "on_jax",
}  # fmt: skip
"""Whom a run is on -> the module here that trains so."""

NEEDS = {"on_torch": ("torch", "transformers"), "on_jax": ("jax",)}

STYLES = {
    "portakern": ("C0", "-", 3.5), "liger": ("C1", "-", 1.8), "torch": ("C2", "--", 1.0),
    "portakern-jax": ("C4", "-", 2.5), "jax": ("C5", "--", 1.0),
}  # fmt: skip
TITLES = {"torch": "PyTorch", "jax": "XLA"}

ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Two libraries share a device here, and JAX takes most of its memory unless it is told not to."""


def trainer(who: str) -> Any:
    """The module that trains on a contender; what is missing for it, as a text."""
    module = TRAINERS[who]
    missing = [name for name in NEEDS[module] if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return importlib.import_module(f"portakern.examples.train.{module}")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Losses by step, how far each lies from PyTorch's of the same seed (XLA's, where PyTorch did not run), and time
    and memory of a step."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "portakern"
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    base = next((name for name in ("torch", "jax") if any(r["ops"] == name for r in rows)), None)
    theirs = {r["seed"]: r["losses"] for r in rows if r["ops"] == base}
    for r in rows:
        color, line, width = STYLES[r["ops"]]
        first = r["seed"] == min(other["seed"] for other in rows if other["ops"] == r["ops"])
        drawn = {"color": color, "linestyle": line, "linewidth": width, "alpha": 0.7}
        left.plot(r["losses"], label=r["ops"] if first else None, **drawn)
        if r["seed"] in theirs and r["ops"] != base:
            apart = [a - b for a, b in zip(r["losses"], theirs[r["seed"]], strict=True)]
            middle.plot(apart, label=r["ops"] if first else None, **drawn | {"linewidth": 1.0})
    names = [*dict.fromkeys(r["ops"] for r in rows)]
    times = [statistics.median(r["step_ms"] for r in rows if r["ops"] == name) for name in names]
    right.bar(names, times, color=[STYLES[name][0] for name in names])
    for i, name in enumerate(names):
        memory = next(r["memory_gib"] for r in rows if r["ops"] == name)
        right.text(i, times[i], "" if memory is None else f"{memory:.2f} GiB", ha="center", va="bottom")
    left.set(xlabel="step", ylabel="loss (nats a byte)", title="The same seeds on each")
    middle.set(xlabel="step", ylabel=f"loss - {TITLES[base]}'s" if base else "", title="The difference, seed by seed")
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
    parser.add_argument("--on", action="append", choices=TRAINERS, help="whom to train on; may be repeated (all)")
    parser.add_argument("--device", choices=("cuda", "tpu", "cpu"), help="default: the best that the library sees")
    parser.add_argument("--backend", help="who serves portakern's ops (default: chosen from the arrays)")
    parser.add_argument("--steps", type=int, help="how many (default: the size's)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--compile", action="store_true", help="PyTorch's under torch.compile; JAX's are compiled always"
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to learn (default: the documentation)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--plot", type=Path, help="where to draw it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    size, corpus, rows, device = SIZES[args.size], text.read(args.text), [], None
    if args.steps:
        size = Size(**{**vars(size), "steps": args.steps})
    for who in args.on or TRAINERS:
        module = trainer(who)
        why = module if isinstance(module, str) else module.runs_here(who, args.device)
        if why is not None:
            print(f"{who:13} left out: {why}", file=sys.stderr)
            continue
        device = device or module.device_name(args.device)
        for seed in range(args.seeds):
            run = module.train(who, size, seed, args.device, args.compile, args.backend, corpus)
            rows.append(run.row(who, seed, args.compile))
            memory = "" if run.memory is None else f", {run.memory:.2f} GiB"
            print(f"{who:13} seed {seed}: loss {run.losses[0]:.4f} to {rows[-1]['final']:.4f}, "
                  f"{run.step_ms():.2f} ms a step{memory}", flush=True)  # fmt: skip
    if args.json:
        command = results.command_line("python -m portakern.examples.train.train", args.json)
        kept = results.record("train", rows, command=command, device=device or results.HOST_CPU, size=args.size,
                              steps=size.steps)  # fmt: skip
        results.write(args.json, kept)
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
