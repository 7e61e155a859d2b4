"""Static cycles of the TPU kernels beside XLA's for the same maths and JAX's own flash attention, with no TPU.

Every figure is the larger of what a program takes and of what memory takes for the bytes that it moves; nothing is run.
Two figures of a program are kept apart: ``issued``, its bundles times the steps of its grid, which Pallas kernels alone
have, and ``estimated``, libtpu's own, which XLA's programs have too. A ratio compares two of a kind: the kernel's
estimate with XLA's, its issued cycles with those of JAX's kernel, whose blocks are the best of a few. XLA's program is
compiled twice, with operands that come from device memory and with operands wherever libtpu likes them; the lower
counts.

    python benchmarks/tpu_cycles.py --target v5e --target v6e [--only matmul] [--json FILE]

Each case is compiled in a process of its own, since libtpu's estimates may end it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from portakern import results
from portakern.benchmarking.suites import parse_shape
from portakern.compiling import forms
from portakern.core import registry, targets
from portakern.tuning.asked import of_op

HEAD = "batch=1,kv_heads=1,group=1,d=128,dv=128"
ROWS = ((8192, 4096), (8192, 8192), (4096, 1000), (1024, 50257))
CASES = {
    "matmul 2048^3": ("matmul", "bfloat16", "m=2048,k=2048,n=2048"),
    "matmul 4096^3": ("matmul", "bfloat16", "m=4096,k=4096,n=4096"),
    "matmul 4096x14336x4096": ("matmul", "bfloat16", "m=4096,k=14336,n=4096"),
    "matmul 4000x4096x3000": ("matmul", "bfloat16", "m=4000,k=4096,n=3000"),
    "matmul 2048^3 float32": ("matmul", "float32", "m=2048,k=2048,n=2048"),
    "attention full": ("attention", "bfloat16", f"{HEAD},q_len=4096,kv_len=4096,is_causal=false"),
    "attention causal": ("attention", "bfloat16", f"{HEAD},q_len=4096,kv_len=4096,is_causal=true"),
    "attention GQA 4 S 8192": (
        "attention", "bfloat16", "batch=1,kv_heads=1,group=4,d=128,dv=128,q_len=8192,kv_len=8192,is_causal=true"
    ),
    "attention d 64": (
        "attention", "bfloat16", "batch=1,kv_heads=1,group=1,d=64,dv=64,q_len=4096,kv_len=4096,is_causal=true"
    ),
    "attention S=4000": ("attention", "bfloat16", f"{HEAD},q_len=4000,kv_len=4000,is_causal=true"),
    "attention window 1024": (
        "attention", "bfloat16", f"{HEAD},q_len=4096,kv_len=4096,is_causal=true,window=1024x0"
    ),
    "decode GQA 4": (
        "attention", "bfloat16", "batch=1,kv_heads=8,group=4,d=128,dv=128,q_len=1,kv_len=8192,is_causal=false"
    ),
    "attention backward": ("attention_vjp", "bfloat16", f"{HEAD},q_len=4096,kv_len=4096,is_causal=true"),
    **{
        f"{op} {m}x{n}": (op, "bfloat16", f"shape={m}x{n}" if op.startswith("softmax") else f"batch={m},n={n}")
        for op in ("softmax", "layernorm", "rmsnorm", "softmax_vjp", "layernorm_vjp", "rmsnorm_vjp")
        for m, n in ROWS
    },
}  # fmt: skip
"""Name -> op, dtype, dimensions and options."""

BLOCKS = (1024, 512)
"""Of JAX's flash attention: its default of 128 takes several times as long."""

LIKED = ("hbm", "anywhere")
"""Where operands of XLA's programs lie."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", required=True, help="v4, v5e, v5p, v6e; may be repeated")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one program may take")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_one(args.target[0], *json.loads(args.one))))
        return
    start, rows = time.perf_counter(), []
    for target in args.target:
        for name in (n for n in CASES if any(part in n for part in args.only)):
            rows.append(_row(target, name, args.timeout))
            print(_line(rows[-1]), flush=True)
            seconds = round(time.perf_counter() - start, 1)
            if args.json:
                command = results.command_line("python benchmarks/tpu_cycles.py", args.json)
                found = results.record(
                    "tpu-cycles", rows, command=command, device=results.HOST_CPU, wall_seconds=seconds
                )
                results.write(args.json, found)
    print(f"{len(rows)} calls in {time.perf_counter() - start:.0f} s")


def _row(target: str, name: str, timeout: float) -> dict[str, Any]:
    """A case: its kernels, and what others make of the same maths."""
    op, dtype, _ = CASES[name]
    ours = _asked(target, [name, "ours", 0], timeout)
    xla = [f for where in LIKED if (f := _asked(target, [name, where, 0], timeout))]
    flash = [f for block in BLOCKS if op == "attention" and (f := _asked(target, [name, "flash", block], timeout))]
    row = {
        "case": name, "op": op, "dtype": dtype, "target": target, "ours": ours,
        "xla": min(xla, key=lambda f: f["estimated"] or math.inf, default={}),
        "flash": min(flash, key=lambda f: f["issued"] or math.inf, default={}),
    }  # fmt: skip
    for other, figure in (("xla", "estimated"), ("flash", "issued")):
        mine, theirs = row["ours"].get(figure), row[other].get(figure)
        row[f"over_{other}"] = round(mine / theirs, 3) if mine and theirs else None
    return row


def _line(row: Mapping[str, Any]) -> str:
    def shown(found: Mapping[str, Any]) -> str:
        return "/".join("-" if found.get(n) is None else f"{found[n]:.0f}" for n in ("issued", "estimated", "memory"))

    ratios = ", ".join(f"{row[n]:.2f} of {n[5:]}" for n in ("over_xla", "over_flash") if row[n])
    return (
        f"{row['target']} {row['case']}: {shown(row['ours'])} (issued/estimated/of memory), XLA {shown(row['xla'])}"
        f"{', flash ' + shown(row['flash']) if row['flash'] else ''}: {ratios or row['ours'].get('why', '-')}"
    )


def _asked(target: str, one: list[Any], timeout: float) -> dict[str, Any]:
    """What a process of its own finds of one program; empty where it ends without an answer."""
    from portakern.backends.pallas.tpu.toolchain import compiler

    with tempfile.TemporaryDirectory() as folder:
        variables = compiler.environment(targets.find(target), quick=True)
        variables = {n: v.replace("{scratch}", folder) for n, v in variables.items()}
        if one[1] == "anywhere":
            variables["LIBTPU_INIT_ARGS"] = variables["LIBTPU_INIT_ARGS"].replace(compiler.FROM_HBM, "")
        if target not in compiler.NO_ESTIMATE:
            variables["LIBTPU_INIT_ARGS"] += f" --xla_jf_dump_static_llo_profile_to={folder}"
        command = [sys.executable, __file__, "--target", target, "--one", json.dumps([*one, folder])]
        try:
            ran = subprocess.run(
                command, env=os.environ | variables, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return {}
        lines = ran.stdout.strip().splitlines()
        return json.loads(lines[-1]) if ran.returncode == 0 and lines else {}


def _one(target: str, name: str, who: str, block: int, folder: str) -> dict[str, Any]:
    """Compile one program here."""
    from portakern.backends.pallas.tpu.toolchain import compiler

    hardware, (op, dtype, dims) = targets.find(target), CASES[name]
    spec, asked = registry.find_spec(op), of_op(registry.find_spec(op), dtype, parse_shape(dims))
    b = registry.backend("pallas")
    impl = b.implementation(op, b.families[0])
    assert impl is not None
    call, tiling = forms.abstract_call(spec, impl, asked.form, hardware, {})
    if who == "ours":
        traced = compiler._traced(impl, call, tiling)
    else:
        traced = _flash(call, block) if who == "flash" else _xla(call)
    found: dict[str, Any] = {"tiling": dict(tiling) if who == "ours" else {"block": block} if block else {}}
    a_cycle = (hardware.clock or math.nan) * (hardware.cores or 1)
    if who in ("ours", "flash"):
        compiled, walks, codes = compiler._build(traced, call, tiling)
        if len(walks) == len(compiled.kernels):  # in order: JAX's kernel has another name in the program
            walks = [w._replace(name=k.name) for w, k in zip(walks, compiled.kernels, strict=True)]
        kernels = compiler._counted(compiled.kernels, walks, codes, call.target)
        memory = sum(k.memory(hardware) or 0.0 for k in kernels)
        issued = sum(max(k.issued or math.nan, k.memory(hardware) or 0.0) for k in kernels)
        found |= {"issued": round(issued), "spills": sum(k.spills or 0 for k in kernels)}
    else:
        cost = traced.lower().compile().cost_analysis()
        memory = cost["bytes accessed"] / ((hardware.bandwidth or math.nan) / a_cycle)
        found["issued"] = None
    estimated = sum(_estimates(Path(folder)))
    return found | {"memory": round(memory), "estimated": round(max(estimated, memory)) if estimated else None}


def _estimates(folder: Path) -> Iterator[int]:
    """libtpu's, of every operation of the program that was compiled in this process."""
    for path in folder.glob("*static_llo_profile.textproto"):
        yield sum(map(int, re.findall(r"estimated_cycles: (\d+)\n", path.read_text())))


def _placed(call: Any) -> Any:
    """A function that gives arrays without memory their place, on the first chip of a topology."""
    import jax
    from jax.experimental import topologies

    from portakern.backends.pallas.tpu.toolchain.compiler import TOPOLOGY

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[call.target.arch])
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _flash(call: Any, block: int) -> Any:
    """JAX's own kernel on the call's arrays, heads first as it wants them."""
    import jax
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    if call.options["window"] or call.dims["q_len"] % block:
        raise ValueError("the kernel has no window, and takes whole blocks")
    batch, q_len, heads, d = call.arrays["q"].shape
    form = _placed(call)((batch, heads, q_len, d), call.arrays["q"].dtype)
    sizes = BlockSizes(block, block, block, 1)

    def program(q: Any, k: Any, v: Any) -> Any:
        causal, scale = call.options["is_causal"], d**-0.5
        return flash_attention(q, k, v, causal=causal, sm_scale=scale, block_sizes=sizes)

    return jax.jit(program).trace(form, form, form)


def _xla(call: Any) -> Any:
    """The op's formula for XLA, or of a gradient op its derivative."""
    import jax

    name, _, gradient = call.spec.name.partition("_")
    formula = FORMULAS[name]
    arrays = [call.arrays[n] for n in INPUTS[name] if call.arrays.get(n) is not None]
    if name == "layernorm" and len(arrays) == 2:
        arrays.append(arrays[-1])  # a gradient does not read the bias
    placed = _placed(call)
    forms_of = [placed(a.shape, a.dtype) for a in arrays]
    if not gradient:
        return jax.jit(lambda *xs: formula(call, *xs)).trace(*forms_of)
    y = jax.eval_shape(lambda *xs: formula(call, *xs), *forms_of)

    def backward(d_y: Any, *xs: Any) -> Any:
        return jax.vjp(lambda *inner: formula(call, *inner), *xs)[1](d_y)

    return jax.jit(backward).trace(placed(y.shape, y.dtype), *forms_of)


def _matmul(call: Any, a: Any, b: Any) -> Any:
    import jax

    precision = jax.lax.Precision.HIGHEST if a.dtype == "float32" else None
    return jax.numpy.matmul(a, b, precision=precision)


def _softmax(call: Any, x: Any) -> Any:
    import jax

    return jax.nn.softmax(x.astype("float32"), call.options.get("axis", -1)).astype(x.dtype)


def _layernorm(call: Any, x: Any, weight: Any, bias: Any) -> Any:
    import jax

    wide = x.astype("float32")
    centred = wide - wide.mean(-1, keepdims=True)
    r = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + call.options.get("eps", 1e-5))
    return (centred * r * weight.astype("float32") + bias.astype("float32")).astype(x.dtype)


def _rmsnorm(call: Any, x: Any, weight: Any) -> Any:
    import jax

    wide = x.astype("float32")
    r = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + call.options.get("eps", 1e-6))
    return (wide * r * weight.astype("float32")).astype(x.dtype)


def _attention(call: Any, q: Any, k: Any, v: Any) -> Any:
    import jax

    causal, window = call.options["is_causal"], call.options.get("window")
    local = tuple(window) if window else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, local_window_size=local, implementation="xla")


FORMULAS = {
    "matmul": _matmul, "softmax": _softmax, "layernorm": _layernorm, "rmsnorm": _rmsnorm, "attention": _attention
}  # fmt: skip
INPUTS = {
    "matmul": ("a", "b"), "softmax": ("x", "y"), "layernorm": ("x", "weight", "bias"), "rmsnorm": ("x", "weight"),
    "attention": ("q", "k", "v"),
}  # fmt: skip


if __name__ == "__main__":
    main()
