"""Device time of every op on a GPU, beside the bound of its memory traffic and arithmetic and beside every peer.

A peer is timed that is installed and takes PyTorch's tensors (``portakern backends`` lists them). Each result is
compared with the first peer's before it is timed. Both sides run under ``triton.testing.do_bench``: random data, the L2
cache cleared before each run, the median of the runs. Of a peer's gradients the backward pass is timed, without the
forward pass that it needs.

    python benchmarks/times.py [OPS] [--dtype bfloat16] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

import portakern as pk
from portakern import results
from portakern.compiling.forms import typical_form
from portakern.core import registry, targets
from portakern.core.call import Call
from portakern.core.gradients import wiring
from portakern.core.observe import Served, observe
from portakern.core.route import pick, routes
from portakern.core.serve import serve
from portakern.errors import UnsupportedError
from portakern.spec import Spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, this folder alone is on the path

from tests.ops import record

Arrays = dict[str, Any]


def calls_of(spec: Spec[Any], dtype: str) -> Iterator[tuple[Arrays, dict[str, Any]]]:
    """Random arrays and the options of each call that is timed."""
    form = typical_form(spec, dtype)
    for given in [{}, *record(spec.name).timed]:
        arrays = {}
        for name, (shape, held, _) in form["arrays"].items():
            shape = given.get(name, [next(iter(given.values()))[-1]] if given and len(shape) == 1 else shape)
            arrays[name] = torch.randn(tuple(shape), device="cuda").to(getattr(torch, held))
        yield arrays, form["options"]


def moved(call: Call) -> int:
    """The fewest bytes: each array read once, each output written once."""
    sizes = [a.numel() * a.element_size() for a in call.arrays.values() if a is not None]
    return sum(sizes) + sum(
        math.prod(shape) * getattr(torch, dtype).itemsize
        for name, (shape, dtype) in call.outputs.items()
        if name in call.wants
    )


def floor_us(call: Call, hardware: targets.Hardware) -> float:
    """The larger of traffic over bandwidth and operations over the peak rate."""
    assert hardware.bandwidth is not None
    return 1e6 * max(moved(call) / hardware.bandwidth, call.flops / (hardware.flops.get(call.dtype) or math.inf))


def median_us(run: Callable[[], Any]) -> float:
    return round(1e3 * float(do_bench(run, warmup=20, rep=80, return_mode="median")), 2)


def gap(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> float:
    """The largest relative distance, in the Frobenius norm."""
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, theirs, strict=True))


def peers_of(
    spec: Spec[Any], arrays: Arrays, options: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]]]]:
    """Every peer over PyTorch's arrays that takes the call, with what it runs: a function without arguments.

    Of gradients that is the backward pass alone.
    """
    for name, peer in registry.peers().items():
        op = pk.op(spec, backend=peer)
        call = op.bind(**arrays, **options)
        if peer.framework != call.framework.name or peer.unavailable():
            continue
        try:
            chosen, _ = pick(routes(call, op.choice) or (), call, {})
        except UnsupportedError:
            continue
        provided: Any = chosen.impl.fn
        yield name, provided.prepared(call)


def row(
    spec: Spec[Any],
    op: Any,
    arrays: Arrays,
    options: dict[str, Any],
    peers: Iterator[tuple[str, Callable[[], Any]]],
    hardware: targets.Hardware,
) -> dict[str, Any]:
    """One call, checked against its first peer, then timed beside all."""
    call = op.bind(**arrays, **options)
    served: list[Served] = []
    with observe(served.append):
        ours = op(**arrays, **options)
    ours = ours if isinstance(ours, tuple) else (ours,)
    times, checked = {}, False
    for name, run in peers:
        if not checked:
            distance = gap(tuple(o for o in ours if o is not None), run())
            assert distance < (1e-4 if call.dtype == "float32" else 1e-2), f"{call!r}: {distance:.1e} from {name}"
            checked = True
        times[name] = median_us(run)
    us = median_us(lambda: op(**arrays, **options))
    found = {
        "op": spec.name,
        "dtype": call.dtype,
        "call": repr(call),
        "tiling": dict(served[0].tiling),
        "us": us,
        "bytes": moved(call),
        "flops": int(call.flops),
        "floor_us": round(floor_us(call, hardware), 2),
        "peers": times,
        "checked": checked,
    }
    print(
        f"{found['call'][:110]:110} {us:9.1f} us, floor {found['floor_us']:8.1f}; "
        + ", ".join(f"{n} {t:.1f}" for n, t in times.items()),
        flush=True,
    )
    return found


def rows_of(name: str, dtype: str, hardware: targets.Hardware) -> Iterator[dict[str, Any]]:
    """An op and its gradients."""
    forward = registry.find_spec(name)
    op = pk.op(name, backend="triton")
    for arrays, options in calls_of(forward, dtype):
        yield row(forward, op, arrays, options, peers_of(forward, arrays, options), hardware)
        if forward.vjp is None:
            continue
        wired = wiring(forward)
        call = wired.training(op.bind(**arrays, **options))
        outputs = dict(zip((o.name for o in forward.outputs), serve(call, routes(call, op.choice), {}), strict=True))
        main = forward.outputs[0].name
        cotangent = torch.randn_like(outputs[main])
        saved = {
            n: {**arrays, **outputs}[n]
            for n in (*wired.inputs, *wired.outputs)
            if {**arrays, **outputs}.get(n) is not None
        }
        saved[wired.cotangents[main]] = cotangent
        kept = {n: v for n, v in options.items() if n in wired.options}
        yield row(
            wired.vjp,
            pk.op(wired.vjp.name, backend="triton"),
            saved,
            kept,
            peers_of(wired.vjp, saved, kept),
            hardware,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="forward ops; all when none is named")
    parser.add_argument("--dtype", action="append", help="may be repeated; bfloat16 and float32 when not given")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    major, minor = torch.cuda.get_device_capability()
    hardware = targets.find(f"sm_{major}{minor}")
    start, rows = time.perf_counter(), []
    for name in args.ops or [n for n in pk.ops() if not registry.find_spec(n).is_vjp]:
        for dtype in args.dtype or ["bfloat16", "float32"]:
            rows += rows_of(name, dtype, hardware)
            if args.json:
                command = results.command_line("python benchmarks/times.py", args.json)
                device, seconds = torch.cuda.get_device_name(), round(time.perf_counter() - start, 1)
                found = results.record("times", rows, command=command, device=device, wall_seconds=seconds)
                results.write(args.json, found)


if __name__ == "__main__":
    main()
