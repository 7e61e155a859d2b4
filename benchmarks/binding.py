"""Host time of one attention call through ``op.__call__``, the kernel stubbed out, with kv_len different in every call;
and memory over many calls.

The stub is a backend of its own whose kernel returns the preallocated output, so that what is left is binding, routing,
the tiling look-up and the result.

    python benchmarks/binding.py [--calls 100000] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

import portakern as pk
from portakern import results
from portakern.core.backend import Implementation
from portakern.core.config import Config
from portakern.core.dispatch import Route
from portakern.core.framework import frameworks
from portakern.core.targets import HOST

LENGTHS = 997  # a prime number of kv lengths, each call another


def stub_op(framework: str, result: Any) -> pk.Op:
    """The op with its route for this framework's host arrays replaced by a kernel that does nothing."""
    op = pk.op("attention")
    outputs = (result, *[None] * (len(op.spec.outputs) - 1))  # all of them, as kernels of this package return
    stub = pk.Backend("stub", framework=framework, compiles={"cpu": __name__})
    impl = Implementation(
        stub,
        stub.families[0],
        "attention",
        lambda call, tiling: outputs,
        lambda call: {"block_q": 128, "block_kv": 64},
        lambda call, tiling: None,
        Config,
    )
    vars(impl)["is_own"] = True  # a kernel that others bring is looked at once a form: not what is measured here
    fw = frameworks()[framework]
    op.choice.found[fw, fw.device(result)] = (Route(impl, False, HOST, fw),)
    return op


def inputs(framework: str) -> tuple[Any, list[Any]]:
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    q, keys = zeros(1, 8, 8, 64), [zeros(1, 64 + i, 2, 64) for i in range(LENGTHS)]
    if framework == "numpy":
        return q, keys
    fw = frameworks()[framework]
    fw.load()
    return fw.from_numpy(q, None), [fw.from_numpy(k, None) for k in keys]


def measure(framework: str, calls: int) -> dict[str, Any]:
    """Microseconds of this thread per call (of 20 batches; a call waits for nothing, and what others do on the core is
    no cost of ours) and growth of traced memory over ``calls`` calls, in bytes."""
    q, keys = inputs(framework)
    op = stub_op(framework, q)

    def batch(n: int, start: int) -> float:
        t = time.thread_time()
        for i in range(start, start + n):
            k = keys[i % LENGTHS]
            op(q, k, k, is_causal=True)
        return (time.thread_time() - t) / n * 1e6

    batch(2000, 0)
    times = [batch(calls // 20, i) for i in range(20)]
    gc.collect()
    tracemalloc.start()
    batch(1000, 0)
    before = tracemalloc.get_traced_memory()[0]
    batch(calls, 1)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {
        "framework": framework,
        "calls": calls,
        "median_us": round(statistics.median(times), 2),
        "best_us": round(min(times), 2),
        "worst_us": round(max(times), 2),
        "grown_bytes": grown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(f, args.calls) for f in ("numpy", "torch")]
    for r in rows:
        print(
            f"{r['framework']:6} {r['median_us']:6.2f} us a call (batches {r['best_us']:.2f} to "
            f"{r['worst_us']:.2f}), memory grown by {r['grown_bytes']} bytes over {r['calls']} calls"
        )
    if args.json:
        command = results.command_line("python benchmarks/binding.py", args.json)
        results.write(args.json, results.record("binding", rows, command=command, device=results.HOST_CPU))


if __name__ == "__main__":
    main()
