"""Host time of an eager call on a GPU, from the bare launch up, beside PyTorch's own op; and every op in a CUDA graph.

Calls come in batches of 100 with a synchronisation between them, so that the queue to the device never fills and a
call's time is the host's alone. The ways of calling take turns, batch by batch. The graphs are captured from a call,
and replayed on other inputs.

    bare       the kept kernel's launcher, its arguments prepared
    launch     the same through ``launch``: key, look-up and launcher
    triton     the same through Triton's ``kernel[grid](...)``
    op         ``pk.op(name, backend="triton")(...)``: binding, routing, tiling, allocation, launch
    op, made each time: ``pk.op(name, backend="triton")`` too, in each call; no backend named: ``pk.op(name)``
    portakern.torch, torch: the drop-in twin, and what it stands for: the function that the peer ``torch`` calls

Where transformers is installed, so are forward passes of a small Llama: with PyTorch's SDPA, with portakern as its
attention implementation, under ``portakern.torch.apply``, and with all that ``portakern.torch.swapped`` serves of it.

    python benchmarks/launch.py [--batches 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import portakern as pk
import portakern.torch as twins
from portakern import results
from portakern.core import cache, registry
from portakern.core.call import dropped_dims, shape_of
from portakern.core.gradients import wiring
from portakern.spec import Spec
from portakern.testing.cases import Case, generators

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, this folder alone is on the path

from tests.ops import forward_records, record

A_BATCH = 100


def small_inputs(
    spec: Spec[Any],
    device: str,
    dtype: str = "float32",
    seed: int = 0,
    optional: bool = False,
    extents: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Random arrays for any op, the optional ones too if asked: what an argument's generator makes, where it has one.

    Every dimension has a small extent, a variadic one stands for two axes; or each has that of ``extents``.
    """
    g, arrays, dims = torch.Generator().manual_seed(seed), {}, dict(extents or record(spec.name).extents)
    variadic = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic and d.factors[0] in dims}
    dims |= {n: (3, dims[n]) for n in variadic if isinstance(dims[n], int)}
    dims |= dropped_dims(spec, dims, {})
    given = [a for a in spec.arrays if not a.optional or spec.reads_under(a.name, {}, optional)]
    dtypes = {a.name: dtype if dtype in a.dtypes else a.dtypes[0] for a in given}
    case = Case(dtype if dtype in spec.dtypes else spec.dtypes[0], {a.name: shape_of(a.dims, dims) for a in given},
                seed=seed, dtypes={a.name: dtypes[a.name] for a in given if not a.follows})  # fmt: skip
    made = generators(spec, registry.forward_of(spec) if spec.is_vjp else None)
    for a in given:
        shape = case.shapes[a.name]
        drawn = torch.as_tensor(case.drawn(spec, a.name)) if a.name in made else torch.randn(shape, generator=g)
        arrays[a.name] = drawn.to(getattr(torch, dtypes[a.name])).to(device)
    return arrays


def served_ops() -> list[str]:
    return [name for name in pk.ops() if any(f.name == "gpu" for f in pk.backends()["triton"].families_with(name))]


def _same_bits(a: Any, b: Any) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def with_lengths() -> list[str]:
    """The ops that ``served_ops`` has whose arrays say where sequences are, or how long."""
    return [name for name in served_ops() if pk.op(name).spec.rewriter]


def extents_of_lengths(name: str) -> dict[str, Any]:
    """The extents of an op's typical call, of its gradient the forward op's: kernels for many keys serve it."""
    spec = pk.op(name).spec
    typical = (registry.forward_of(spec) or spec).typical if spec.is_vjp else spec.typical
    return {n: e for n, e in typical.items() if n in spec.dims}


def replay_differs(
    name: str, dtype: str, optional: bool = False, extents: Mapping[str, Any] | None = None, times: int = 1
) -> list[str]:
    """Capture one call; so many times change its inputs in place, lengths and tables too, and replay: what is not as
    an eager call gives it, to the bit."""
    op = pk.op(name, backend="triton")
    arrays = small_inputs(op.spec, "cuda", dtype, 0, optional, extents)

    def call() -> dict[str, Any]:
        out = op(**arrays)
        return {
            o.name: t
            for o, t in zip(op.spec.outputs, out if isinstance(out, tuple) else (out,), strict=False)
            if t is not None
        }

    before = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    wrong: list[str] = []
    for seed in range(1, times + 1):
        for n, a in small_inputs(op.spec, "cuda", dtype, seed, optional, extents).items():
            arrays[n].copy_(a)
        for out in replayed.values():
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        eager = call()
        wrong += [n for n, t in eager.items() if not _same_bits(t, replayed[n])]
        wrong += [f"{n}, which did not follow the inputs" for n, t in before.items() if _same_bits(t, replayed[n])]
        before = eager
    return wrong


class _Calls(TorchFunctionMode):
    """Writes down the functions of torch that are called inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Idle(TorchFunctionMode):
    """Sees every function of torch's, as ``swapped`` does, and calls it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_torch(name: str) -> bool:
    """Whether PyTorch has a function for an op, with a twin, and the peer calls it on any device."""
    twin = record(name).twin
    return twin is not None and twin.package == "torch" and any(registry.backend("torch").families_with(name))


def torch_call(name: str, arrays: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function of torch that the peer calls for an op, and its arguments: one that ``portakern.torch`` twins."""
    with _Calls() as calls:
        pk.op(name, backend="torch")(**arrays)
    return next(seen for seen in calls.seen if twin_name(seen[0]) in twins.__all__)


def twin_name(function: Callable[..., Any]) -> str:
    """What ``portakern.torch`` calls a function of torch's: one that only its public name calls has that with a line
    before it, as ``torch._grouped_mm``."""
    return str(function.__name__).lstrip("_")


class Compiled:
    """What ``launch`` asks of a call: to compile."""

    interpret = False


def launched(call: Callable[[], Any]) -> tuple[Any, int, tuple[Any, ...], dict[str, Any]]:
    """The kernel that a call launches last, its grid, its positional arguments and its constexprs."""
    from portakern.backends.triton.capture import Capture, capturing

    cache.forget()  # the first call of a form asks the op's own function
    capture = Capture()
    with capturing(capture):
        call()
    return capture.launches[-1][:4]


def arrays_of(name: str, device: str) -> dict[str, torch.Tensor]:
    """Random arrays in bfloat16 for the call of an op that is launched, statistics in float32; labels are 0."""
    spec, made = pk.op(name).spec, {}
    for n, shape in record(name).launched.shapes.items():
        if "bfloat16" in spec.argument(n).dtypes:
            made[n] = torch.randn(*shape, device=device, dtype=torch.bfloat16)
        elif spec.argument(n).statistic:
            made[n] = torch.randn(*shape, device=device)
        else:
            made[n] = torch.zeros(*shape, device=device, dtype=torch.int64)
    return made


def timed_calls(name: str, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """What to time for one op: a name and a call without arguments."""
    from portakern.backends.triton import launch as launching
    from portakern.backends.triton import launcher as launchers

    call_of, op = record(name).launched, pk.op(name, backend="triton")
    arrays = arrays_of(name, device)
    ours: Callable[[], Any] = lambda: op(*arrays.values(), **call_of.options)  # noqa: E731
    ours()
    kernel, grid, args, constexprs = launched(ours)
    kept: dict[Any, Any] = {}
    launcher = launchers.write_launcher(
        kernel, [type(a) for a in args], {n: type(v) for n, v in constexprs.items()}, kept, bool(torch.version.hip)
    )
    launcher(grid, *args, **constexprs)
    ((run, function, metadata),) = kept.values()
    values = dict(zip(kernel.arg_names, args, strict=False)) | constexprs
    prepared = [values[n] for n in kernel.arg_names]
    stream = torch.cuda.current_stream().cuda_stream
    by_triton = kernel[(grid,)]
    found: dict[str, Callable[[], Any]] = {
        "bare": lambda: run(grid, 1, 1, stream, function, metadata, None, None, None, *prepared),
        "launch": lambda: launching.launch(kernel, grid, Compiled, *args, **constexprs),
        "triton": lambda: by_triton(*args, **constexprs),
        "op": ours,
        "op, made each time": lambda: pk.op(name, backend="triton")(*arrays.values(), **call_of.options),
        "op, no backend named": lambda: pk.op(name)(*arrays.values(), **call_of.options),
    }
    if not in_torch(name):
        return found
    theirs, args_of_theirs, options_of_theirs = torch_call(name, arrays)
    twin = getattr(twins, twin_name(theirs))
    return found | {
        "portakern.torch": lambda: twin(*args_of_theirs, **options_of_theirs),
        "torch": lambda: theirs(*args_of_theirs, **options_of_theirs),
    }


def training(name: str, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """What to time for one op forward and backward, gradients of all its arrays."""
    call_of, op = record(name).launched, pk.op(name, backend="triton")
    arrays = arrays_of(name, device)
    gradients = wiring(op.spec).gradients
    ours = [a.clone().requires_grad_(n in gradients) for n, a in arrays.items()]

    def several(out: Any) -> list[torch.Tensor]:
        """The results that have gradients: integers have none."""
        return [y for y in (out if isinstance(out, tuple) else (out,)) if y is not None and y.is_floating_point()]

    def step(call: Callable[[], Any], among: list[Any]) -> Callable[[], Any]:
        leaves = [x for x in among if isinstance(x, torch.Tensor) and x.requires_grad]
        cotangents = [torch.randn_like(y) for y in several(call())]

        def both() -> None:
            with torch.enable_grad():
                torch.autograd.grad(several(call()), leaves, cotangents)

        return both

    found = {"op, forward and backward": step(lambda: op(*ours, **call_of.options), ours)}
    if not in_torch(name):
        return found
    theirs, given, options = torch_call(name, arrays)
    twin = getattr(twins, twin_name(theirs))
    args = [
        a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in given
    ]
    return found | {
        "portakern.torch, forward and backward": step(lambda: twin(*args, **options), args),
        "torch, forward and backward": step(lambda: theirs(*args, **options), args),
    }


def llama_forwards(layers: int = 8, tokens: int = 16) -> dict[str, Callable[[], Any]]:
    """Forward passes of a Llama so small that the host decides their time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from portakern.torch import register_attention

    register_attention()
    shape: dict[str, Any] = {
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
    }
    models = {}
    for name, implementation in (("sdpa", "sdpa"), ("portakern", "portakern"), ("applied", "sdpa")):
        torch.manual_seed(0)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "attn_implementation": implementation}
        models[name] = LlamaForCausalLM(LlamaConfig(**shape, **heads)).to("cuda", torch.bfloat16).eval()
    twins.apply(models["applied"])
    ids = torch.arange(tokens, device="cuda")[None] * 7 % 1000

    def swapped() -> None:
        with twins.swapped():
            models["sdpa"](input_ids=ids, use_cache=False)

    def seen_by_a_mode() -> None:
        with _Idle():
            models["sdpa"](input_ids=ids, use_cache=False)

    return {
        "attn_implementation=portakern": lambda: models["portakern"](input_ids=ids, use_cache=False),
        "apply()": lambda: models["applied"](input_ids=ids, use_cache=False),
        "swapped()": swapped,
        "sdpa, under a mode that does nothing": seen_by_a_mode,
        "sdpa": lambda: models["sdpa"](input_ids=ids, use_cache=False),
    }


def measure(
    name: str, calls: dict[str, Callable[[], Any]], batches: int, a_batch: int = A_BATCH
) -> list[dict[str, Any]]:
    """A row for each interface: microseconds of a call, median and extremes of the batches."""
    times: dict[str, list[float]] = {}
    for i in range(batches + 5):
        for interface, call in calls.items():
            torch.cuda.synchronize()
            t = time.perf_counter()
            for _ in range(a_batch):
                call()
            if i >= 5:
                times.setdefault(interface, []).append((time.perf_counter() - t) / a_batch * 1e6)
    return [
        {
            "op": name,
            "interface": interface,
            "median_us": round(statistics.median(t), 2),
            "best_us": round(min(t), 2),
            "worst_us": round(max(t), 2),
        }
        for interface, t in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs an NVIDIA or AMD GPU")
    rows: list[dict[str, Any]] = []
    graphs: list[dict[str, Any]] = []

    def keep(title: str, mine: list[dict[str, Any]]) -> None:
        rows.extend(mine)
        print(f"{title:10}", "  ".join(f"{r['interface']} {r['median_us']:.1f}" for r in mine), "us", flush=True)
        write(args.json, rows, graphs)

    with torch.no_grad():
        for name in (r.op for r in forward_records()):
            keep(
                name, measure(name, timed_calls(name), args.batches) + measure(name, training(name), args.batches // 2)
            )
        if importlib.util.find_spec("transformers"):
            keep("Llama", measure("Llama, 8 layers, 16 tokens", llama_forwards(), args.batches, 5))
        for name in served_ops():
            for dtype in ("float32", "float16", "bfloat16"):
                for optional in sorted({False, any(a.optional for a in pk.op(name).spec.arrays)}):
                    wrong = replay_differs(name, dtype, optional)
                    given = "all" if optional else "required"
                    verdict = "; ".join(wrong) or "the bits of the eager call"
                    print(f"{name:14} {dtype:9} {given:9} captured, its inputs changed and replayed: {verdict}")
                    graphs.append({"op": name, "dtype": dtype, "arrays": given, "wrong": wrong})
        for name in with_lengths():
            wrong = replay_differs(name, "bfloat16", extents=extents_of_lengths(name), times=4)
            print(f"{name:14} bfloat16  captured once, replayed with 4 other lengths: {'; '.join(wrong) or 'the bits'}")
            graphs.append({"op": name, "dtype": "bfloat16", "arrays": "required, typical extents", "wrong": wrong})
    write(args.json, rows, graphs)
    if any(g["wrong"] for g in graphs):
        sys.exit(1)


def write(file: Path | None, rows: list[dict[str, Any]], graphs: list[dict[str, Any]]) -> None:
    """Keep what was measured so far."""
    if file:
        command, device = results.command_line("python benchmarks/launch.py", file), torch.cuda.get_device_name()
        results.write(file, results.record("launch", rows, command=command, device=device, graphs=graphs))


if __name__ == "__main__":
    main()
