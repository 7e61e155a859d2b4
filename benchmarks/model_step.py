"""A forward and backward pass of a Llama, and of the loss over its vocabulary, beside Liger and PyTorch.

    python -m benchmarks.model_step --json model-step.json                      # a GPU with 48 GiB; two to four minutes
    python -m benchmarks.model_step --device cpu --stages eager loss --rounds 2 # small: that all of it runs

Stages, each in a process of its own, one after another, so that none shares the device or what another compiled:

    eager     transformers' Llama of examples/train's size "reach" in bfloat16: PyTorch's functions, Liger's patch,
              ``portakern.torch.apply``, that without the loss that never has all logits in memory, and its attention
              alone, beside PyTorch's scaled_dot_product_attention
    compiled  the same under torch.compile: PyTorch's functions, portakern.torch.apply, and its attention alone
    loss      linear_cross_entropy of 8192 rows of 4096 over 128256 words: portakern, and Liger's function
    fp8       as "eager": PyTorch's functions, portakern.torch.apply, and that with projections in 8-bit floats, by the
              recipes that train
    forward   a forward pass without gradients of a Llama that is 4096 wide, as before generation: logits of the last
              token; PyTorch's functions and portakern.torch.apply in bfloat16, and that with projections in 8-bit
              floats, by the recipes for inference
    forward-compiled  the same under torch.compile

Contenders take turns, round by round, and a row holds the median, best and worst of their times by the device's clock,
and the most memory that a pass takes: of a model with its parameters, of the loss beyond its arguments. Gradients are
compared before anything is timed: a model's with PyTorch's own, the loss's of some rows and words with float64. A
forward pass without gradients has the loss of all tokens, and ``errors`` of it and of the last tokens' logits beside
PyTorch's. Who is not installed, or fails, has a row with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import portakern as pk
from portakern import inventory, results
from portakern.examples.train.run import GIB, SIZES, Size

__all__ = ["STAGES", "main", "measured"]

LOSS = {"cuda": (8192, 4096, 128256), "cpu": (96, 32, 500)}
"""Rows, width and words of the loss, on a GPU and where only its paths are tried."""
SMALL = replace(SIZES["tiny"], layers=2, width=64, inner=96)
WIDE = {"cuda": replace(SIZES["reach"], width=4096, inner=14336), "cpu": replace(SMALL, width=128, inner=256)}
"""Models of forward passes."""
LAST = 16
"""Tokens whose logits are compared."""
KEPT, ALONE = "portakern, logits kept", "portakern, attention alone"
RECIPES = {f"portakern, fp8 {recipe}": recipe for recipe in ("rows", "blocks", "dynamic", "delayed")}
INFERRED, TRAINED = list(RECIPES)[:2], list(RECIPES)[2:]
TURNS = {
    "eager": ("torch", "liger", "portakern", KEPT, ALONE),
    "compiled": ("torch", "portakern", ALONE),
    "fp8": ("torch", "portakern", *TRAINED),
    "forward": ("torch", "portakern", *INFERRED),
    "forward-compiled": ("torch", "portakern", *INFERRED),
}
Row = dict[str, Any]


class Contender:
    """Who takes turns: ``step`` gives its loss and leaves gradients, ``leaves`` holds what they are of."""

    def __init__(self, step: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        self.step, self.leaves = step, leaves

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def first(self) -> Row:
        """The first step's seconds, in which kernels are compiled, and its loss; its gradients stay."""
        begin = time.perf_counter()
        loss = float(self.step())
        return {"first_s": round(time.perf_counter() - begin, 1), "loss": loss}

    def peak(self, device: str, own: int) -> float | None:
        """GiB that a step takes at most beyond what is there before it, with ``own`` bytes of that."""
        if device == "cpu":
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        self.clear()
        return round((torch.cuda.max_memory_allocated() - before + own) / GIB, 4)

    def timed(self, device: str) -> float:
        """Milliseconds of one step."""
        if device == "cpu":
            begin = time.perf_counter()
            self.step()
            ms = 1e3 * (time.perf_counter() - begin)
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            self.step()
            end.record()
            end.synchronize()
            ms = start.elapsed_time(end)
        self.clear()
        return ms


@contextlib.contextmanager
def failures_recorded(rows: dict[str, Row], who: str) -> Iterator[None]:
    """What fails becomes the reason in its contender's row, and the others go on."""
    try:
        yield
    except Exception as e:
        rows[who] = {"why": f"{type(e).__name__}: {e}"[:500]}
        print(f"{who}: {rows[who]['why']}", flush=True)


def able(rows: Mapping[str, Row], contenders: Mapping[str, Contender]) -> list[tuple[str, Contender]]:
    """Those that have no reason why not."""
    return [(who, mine) for who, mine in contenders.items() if "why" not in rows[who]]


def take_turns(rows: dict[str, Row], contenders: Mapping[str, Contender], rounds: int, device: str) -> None:
    """The times of those that are able, in turns; each one's first round is not counted."""
    times: dict[str, list[float]] = {who: [] for who, _ in able(rows, contenders)}
    for turn in range(rounds + 1):
        names = list(times)
        for who in names[turn % len(names) :] + names[: turn % len(names)] if names else ():
            times[who].append(contenders[who].timed(device))
    for who, all_of in times.items():
        ms = all_of[1:]
        rows[who] |= {
            "ms": round(statistics.median(ms), 3),
            "best_ms": round(min(ms), 3),
            "worst_ms": round(max(ms), 3),
            "rounds": len(ms),
        }


# ------------------------------------------------------------------------------------------------------- a model's step


def placed(stack: contextlib.ExitStack, who: str, model: Any, backend: str | None) -> tuple[list[str], Any]:
    """Put a contender under a model: what serves what, in lines, and the rotary embedding of its steps, which Liger's
    patch puts in transformers' module, for every model."""
    from transformers.models.llama import modeling_llama

    import portakern.torch
    from portakern.examples.train.on_torch import on_liger
    from portakern.frameworks.torch.models.applied import DEFAULT_PARTS

    if who == "liger":
        with on_liger(model, None):  # the model keeps the patch when the module gets back what it had
            return ["Liger's patch"], modeling_llama.apply_rotary_pos_emb
    if who != "torch":
        parts = ["attention"] if who == ALONE else [p for p in DEFAULT_PARTS if who != KEPT or p != "linear_loss"]
        recipe = {"fp8_recipe": RECIPES[who]} if who in RECIPES else {}
        parts += ["fp8"] if recipe else []
        applied = stack.enter_context(portakern.torch.apply(model, backend=backend, parts=parts, **recipe))
        return str(applied).splitlines(), modeling_llama.apply_rotary_pos_emb
    return ["PyTorch's own functions, attention by sdpa"], modeling_llama.apply_rotary_pos_emb


def contender(model: Any, forward: Any, rotary: Any, ids: torch.Tensor) -> Contender:
    from transformers.models.llama import modeling_llama

    def step() -> torch.Tensor:
        theirs = modeling_llama.apply_rotary_pos_emb
        modeling_llama.apply_rotary_pos_emb = rotary
        try:
            loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        finally:
            modeling_llama.apply_rotary_pos_emb = theirs
        return loss.detach()

    return Contender(step, list(model.parameters()))


def model_step(stage: str, device: str, rounds: int, compiler: str) -> dict[str, Row]:
    """The rows of "eager" or "compiled". ``gradients_apart``: the norm of the difference from PyTorch's gradients, as a
    share of theirs."""
    from portakern.examples.train.on_torch import made, runs_here

    size, backend = (SIZES["reach"], None) if device == "cuda" else (SMALL, "reference")
    rows: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    theirs: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        for who in TURNS[stage]:
            why = runs_here(who, device)
            if why:
                rows[who] = {"why": why}
                continue
            with failures_recorded(rows, who):
                model = made(size, 0, device)
                served, rotary = placed(stack, who, model, backend)
                forward = torch.compile(model, backend=compiler) if stage == "compiled" else model
                mine = contenders[who] = contender(model, forward, rotary, words_of(size, device))
                rows[who] = {"served": served, **mine.first(), **gradients_beside(theirs, mine.leaves)}
                if who == "torch":
                    theirs = [leaf.grad for leaf in mine.leaves if leaf.grad is not None]
                mine.clear()
                for _ in range(2):  # the call that is learned, and its replay
                    mine.timed(device)
                print(stage, who, {k: v for k, v in rows[who].items() if k != "served"}, flush=True)
        theirs.clear()
        for who, mine in able(rows, contenders):
            with failures_recorded(rows, who):
                own = sum(leaf.numel() * leaf.element_size() for leaf in mine.leaves)
                rows[who]["peak_gib"] = mine.peak(device, own)
        take_turns(rows, contenders, rounds, device)
        for who, mine in able(rows, contenders) if device == "cuda" else ():
            failed: dict[str, Row] = {}
            with failures_recorded(failed, who):  # its times are there
                rows[who]["kernels"] = kernels(mine)
            for row in failed.values():
                print(stage, who, "has no table of kernels:", row["why"], flush=True)
    return rows


def forward_step(stage: str, device: str, rounds: int, compiler: str) -> dict[str, Row]:
    """The rows of "forward" or "forward-compiled". ``errors``: of the loss of all tokens, its difference from that of
    PyTorch's functions; of the last tokens' logits, the norm of the difference as a share of theirs."""
    from portakern.examples.train.on_torch import made, runs_here

    size, backend = WIDE[device], None if device == "cuda" else "reference"
    rows: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    ids, expected = words_of(size, device), None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for who in TURNS[stage]:
            why = runs_here(who, device)
            if why:
                rows[who] = {"why": why}
                continue
            with failures_recorded(rows, who):
                model = made(size, 0, device).eval()
                served, _ = placed(stack, who, model, backend)
                forward = torch.compile(model, backend=compiler) if stage != "forward" else model
                mine = contenders[who] = forward_contender(forward, model, ids)
                found = seen_of(model, ids)
                expected = found if who == "torch" else expected
                rows[who] = {"served": served, **mine.first(), "loss": found[0]}
                if expected is not None and who != "torch":
                    apart = beside(found[1], expected[1].double())
                    rows[who]["errors"] = {"loss": abs(found[0] - expected[0]), "logits": apart}
                for _ in range(2):
                    mine.timed(device)
                print(stage, who, {k: v for k, v in rows[who].items() if k != "served"}, flush=True)
        for who, mine in able(rows, contenders):
            with failures_recorded(rows, who):
                own = sum(leaf.numel() * leaf.element_size() for leaf in mine.leaves)
                rows[who]["peak_gib"] = mine.peak(device, own)
        take_turns(rows, contenders, rounds, device)
        for who, mine in able(rows, contenders) if device == "cuda" else ():
            with failures_recorded({}, who):
                rows[who]["kernels"] = kernels(mine)
    return rows


def forward_contender(forward: Any, model: Any, ids: torch.Tensor) -> Contender:
    """A forward pass of all tokens, and the logits of the last one of each sequence."""

    def step() -> torch.Tensor:
        logits: torch.Tensor = forward(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits.sum()

    return Contender(step, [*model.parameters(), *model.buffers()])


def seen_of(model: Any, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The loss of the tokens of each sequence after those before, and the logits of the last tokens."""
    found = [model(input_ids=one, labels=one, use_cache=False) for one in ids.split(1)]
    return sum(float(out.loss) for out in found) / len(found), torch.cat([out.logits[:, -LAST:] for out in found])


def words_of(size: Size, device: str) -> torch.Tensor:
    """The batch, the same for all."""
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, size.words, (size.batch, size.length), generator=draw).to(device)


def gradients_beside(theirs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> Row:
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    norm = sum(float(g.float().norm()) ** 2 for g in grads) ** 0.5
    found: Row = {"grad_norm": norm}
    if theirs:
        apart = sum(float((g.float() - o.float()).norm()) ** 2 for g, o in zip(grads, theirs, strict=True)) ** 0.5
        found["gradients_apart"] = apart / norm
    return found


def kernels(mine: Contender) -> Row:
    """Milliseconds of a step by kernel, the largest first, and of all."""
    from torch.profiler import ProfilerActivity, profile

    steps = 2
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            mine.step()
            mine.clear()
        torch.cuda.synchronize()
    took: dict[str, float] = {}
    for event in seen.events() or ():
        if str(event.device_type).endswith("CUDA"):
            took[event.name[:90]] = took.get(event.name[:90], 0.0) + event.device_time / 1e3 / steps
    largest = sorted(took.items(), key=lambda item: -item[1])[:30]
    return {"all": round(sum(took.values()), 3), **{name: round(ms, 3) for name, ms in largest}}


# ------------------------------------------------------------------------------------------------------------- the loss


def portakerns_loss(device: str) -> Callable[..., torch.Tensor]:
    op = pk.op("linear_cross_entropy", backend=None if device == "cuda" else "reference")
    return lambda h, w, t: op(h, w, t).mean()


def ligers_loss(device: str) -> Callable[..., torch.Tensor]:
    """Its mean, whose gradients it makes in the forward pass."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda h, w, t: LigerFusedLinearCrossEntropyFunction.apply(h, w, t)[0]


def loss_step(stage: str, device: str, rounds: int, compiler: str) -> dict[str, Row]:
    """The rows of "loss". ``errors``: of the loss, its difference from float64; of the gradients of some rows and
    words, the norm of the difference as a share of their own."""
    from portakern.examples.train.on_torch import runs_here

    n_rows, width, words = LOSS[device]
    draw, dtype = torch.Generator(device).manual_seed(0), torch.bfloat16 if device == "cuda" else torch.float32
    h = torch.randn(n_rows, width, device=device, dtype=dtype, generator=draw)
    w = torch.randn(words, width, device=device, dtype=dtype, generator=draw) / width**0.5
    t = torch.randint(0, words, (n_rows,), device=device, generator=draw)
    some = torch.arange(0, n_rows, max(1, n_rows // 64), device=device)
    classes = torch.cat([t[some[:32]], torch.arange(0, words, max(1, words // 64), device=device)]).unique()
    want = exact(h, w, t, some, classes)
    rows: dict[str, Row] = {}
    contenders: dict[str, Contender] = {}
    for who, made in (("portakern", portakerns_loss), ("liger", ligers_loss)):
        why = runs_here(who, device)
        if why:
            rows[who] = {"why": why}
            continue
        with failures_recorded(rows, who):
            mine = contenders[who] = over_copies(made(device), h, w, t)
            rows[who] = mine.first()
            d_h, d_w = (leaf.grad for leaf in mine.leaves)
            assert d_h is not None and d_w is not None
            rows[who]["errors"] = {
                "loss": abs(rows[who]["loss"] - want[0]),
                "d_hidden": beside(d_h[some], want[1]),
                "d_weight": beside(d_w[classes], want[2]),
            }
            mine.clear()
            for _ in range(3):
                mine.timed(device)
            print(stage, who, rows[who], flush=True)
    for who, mine in able(rows, contenders):
        with failures_recorded(rows, who):
            rows[who]["peak_gib"] = mine.peak(device, 0)
    take_turns(rows, contenders, rounds, device)
    return rows


def over_copies(loss: Callable[..., torch.Tensor], h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> Contender:
    leaves = [x.detach().requires_grad_() for x in (h, w)]

    def step() -> torch.Tensor:
        found = loss(*leaves, t)
        found.backward()
        return found.detach()

    return Contender(step, leaves)


def beside(actual: torch.Tensor, want: torch.Tensor) -> float:
    return float((actual.double() - want).norm() / want.norm())


def exact(
    h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, some: torch.Tensor, classes: torch.Tensor, at_once: int = 1024
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The mean loss, its gradient of some rows of h and that of some classes of w, in float64, ``at_once`` rows at a
    time."""
    wide, loss = w.double(), 0.0
    d_w = torch.zeros(len(classes), h.shape[1], dtype=torch.float64, device=h.device)
    for part, labels in zip(h.double().split(at_once), t.split(at_once), strict=True):
        x = part @ wide.T
        lse = x.logsumexp(-1, keepdim=True)
        loss += float((lse - x.gather(1, labels[:, None])).sum())
        d_w += ((x[:, classes] - lse).exp() - (labels[:, None] == classes).double()).T @ part
    p = (h[some].double() @ wide.T).softmax(-1)
    p[torch.arange(len(some), device=h.device), t[some]] -= 1
    return loss / len(h), p @ wide / len(h), d_w / len(h)


# ------------------------------------------------------------------------------------------------------- the processes

STAGES: Mapping[str, Callable[[str, str, int, str], dict[str, Row]]] = {
    "eager": model_step,
    "compiled": model_step,
    "loss": loss_step,
    "fp8": model_step,
    "forward": forward_step,
    "forward-compiled": forward_step,
}


def measured(stage: str, args: argparse.Namespace) -> list[Row]:
    """The rows of a stage, which a process of its own measures in at most ``args.limit`` seconds; what ends it is the
    reason of its one row."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [
            sys.executable, "-m", "benchmarks.model_step", "--stage", stage, "--device", args.device,
            "--rounds", str(args.rounds), "--compiler", args.compiler, "--json", str(file),
        ]  # fmt: skip
        why = f"did not end within {args.limit:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            why = f"ended with {subprocess.run(command, timeout=args.limit).returncode}"
        found = json.loads(file.read_text()) if file.is_file() else {"portakern": {"why": why}}
    return [{"stage": stage, "contender": who, **row} for who, row in found.items()]


def line(row: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A row's times, and how often it is done while PyTorch's functions do it once."""
    name = f"{row['stage']:17}{row['contender']:27}"
    if row.get("ms") is None:
        return f"{name}{row['why']}"
    memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:9.4f} GiB"
    torchs = [r["ms"] for r in rows if (r["stage"], r["contender"]) == (row["stage"], "torch") and r.get("ms")]
    rate = f"  {torchs[0] / row['ms']:.2f} x torch" if torchs else ""
    return f"{name}{row['ms']:9.2f} ms ({row['best_ms']:.2f} to {row['worst_ms']:.2f}){memory}{rate}"


def versions() -> dict[str, str | None]:
    """The run's environment, with the libraries that it measures."""
    found = dict(inventory.environment())
    for package in ("transformers", "liger_kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def sizes(device: str) -> dict[str, str]:
    """What the stages ran, in words."""
    rows, width, words = LOSS[device]
    return {
        "model": in_words(SIZES["reach"] if device == "cuda" else SMALL),
        "loss": f"{rows} x {width} x {words}",
        "forward": in_words(WIDE[device]),
    }


def in_words(s: Size) -> str:
    return (
        f"{s.layers} layers, {s.width} wide, {s.heads} heads and {s.kv_heads} of keys, {s.batch} x {s.length} tokens, "
        f"{s.words} words"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model_step", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--stage", choices=list(STAGES), help="measure this one here, and write its rows alone")
    parser.add_argument("--device", choices=list(LOSS), default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiler", default="inductor", help="torch.compile's backend")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that a stage may take")
    parser.add_argument("--json", type=Path, help="where the results go")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here; --device cpu tries the paths, small")
    if args.stage:
        found = STAGES[args.stage](args.stage, args.device, args.rounds, args.compiler)
        args.json.write_text(json.dumps(found))
        return 0
    begin, rows = time.perf_counter(), []
    for stage in args.stages:
        rows += measured(stage, args)
    print(*(line(row, rows) for row in rows), sep="\n")
    if args.json:
        data = results.record(
            "model-step", rows, command=results.command_line("python -m benchmarks.model_step", args.json),
            device=inventory.HOST_CPU if args.device == "cpu" else None, sizes=sizes(args.device),
            wall_seconds=round(time.perf_counter() - begin, 1),
        )  # fmt: skip
        results.write(args.json, data | {"environment": versions()})
    return 0 if all(row.get("ms") is not None for row in rows if row["contender"].startswith("portakern")) else 1


if __name__ == "__main__":
    sys.exit(main())
