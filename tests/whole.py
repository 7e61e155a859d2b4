"""Forward and backward together, on drawn calls and every corner of both ops, against what the two may err by.

python -m tests.whole --backend triton --device cuda --cases 100 [--op attention] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import portakern as pk
from portakern.core import registry
from portakern.core.backend import ANY
from portakern.core.binder import bind
from portakern.core.framework import frameworks
from portakern.core.gradients import wiring
from portakern.core.oracle import rounded
from portakern.errors import UnsupportedError
from portakern.spec import Edge, Spec
from portakern.testing.cases import Case, edges
from portakern.testing.layouts import row_major
from portakern.testing.sizes import Limits
from portakern.testing.source import Rejected
from portakern.testing.strategies import drawn
from portakern.testing.whole_gradients import cotangents_of, fraction, whole_gradients

SMALL = Limits(elements=1024, flops=2e5, tile_volume=2**13, typical_elements=0, layouts=("contiguous",))
NARROW = replace(SMALL, dtypes=("float32", "float16", "bfloat16"))
"""For JAX, which has float64 only where it is switched on."""
DRAWN = "drawn"
"""The name under which cases without a corner are counted."""
TRIES = 20
"""How many calls are drawn for one that is served, at most."""


def cases(op: str, count: int, limits: Limits = SMALL, seed: int = 0) -> Iterator[tuple[str, Spec[Any], Case]]:
    """(corner, the op that it is of, case): one of each corner of an op and of its gradient, and ``count`` without."""
    spec = pk.op(op).spec
    vjp = pk.op(str(spec.vjp)).spec
    named = [(spec, e) for e in edges(spec).values()]
    if {a.name for a in vjp.arrays} >= {a.name for a in spec.arrays if not a.optional}:  # it draws the inputs too
        named += [(vjp, e) for n, e in edges(vjp).items() if n not in edges(spec)]
    for i, (of, edge) in enumerate([*named, *((spec, Edge("")) for _ in range(count))]):
        first = zlib.crc32(f"{op} {edge.name}".encode()) + 1000 * seed + i
        try:
            yield edge.name or DRAWN, of, drawn(first, of, limits, {}, edge if edge.name else None)[0]
        except Rejected:
            continue


def limits_of(op: str, backend: str, variant: str | None, framework: str, device: str) -> Limits:
    """Sizes and dtypes of the cases that are drawn: where a variant takes few calls, of those."""
    limits = NARROW if framework == "jax" or device != "cpu" else SMALL
    b = registry.backend(backend)
    named = [f for f in b.families if f.name == variant]
    found = [b.implementation(name, f) for f in named for name in (op, str(pk.op(op).spec.vjp))]
    drawn = next((i.drawn for i in found if i and i.drawn != ANY), ANY)
    return limits if drawn == ANY else replace(limits, elements=2**15, flops=2e7, drawn=drawn)


def called_with(op: str, of: Spec[Any], case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(arrays of the forward call, its options, cotangents by output) of a case of the op or of its gradient."""
    spec = pk.op(op).spec
    held = {n: np.array(b.view()) for n, b in case.buffers(of).items()}
    given = {a.name: held[a.name] for a in spec.arrays if a.name in held}
    names = {o.name for o in spec.options}
    options = {n: v for n, v in case.options.items() if n in names}
    if of is spec:
        return given, options, cotangents_of(spec, np.random.default_rng(case.seed), bind(spec, **given, **options))
    cotangents = {n: held[a] for n, a in wiring(spec).cotangents.items() if a in held}
    options |= {o.wanted_by: True for o in spec.outputs if o.name in cotangents and o.wanted_by}
    outputs = bind(spec, **given, **options).outputs  # whose dtypes autograd's cotangents have
    return given, options, {n: rounded(a.astype(np.float64), outputs[n][1]) for n, a in cotangents.items()}


def gradients(
    op: str, backend: str, framework: str, device: str, given: Mapping[str, np.ndarray], options: Mapping[str, Any],
    cotangents: Mapping[str, np.ndarray], **named: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Gradients by input, of what an op gives its caller, by autograd or by jax.vjp."""
    fw = frameworks()[framework]
    wired, spec = wiring(pk.op(op).spec), pk.op(op).spec
    place = next(d for d in fw.devices() if device in str(getattr(d, "platform", d)))

    def ours(a: np.ndarray) -> Any:
        return fw.strided(np.ascontiguousarray(a).reshape(-1), a.shape, row_major(a.shape), 0, place)

    arrays = {n: ours(a) for n, a in given.items()}
    shown = [o.name for o in spec.shown if o.name in bind(spec, **given, **options).wants]

    def outputs(arrays: Mapping[str, Any]) -> list[Any]:
        out = pk.op(op, backend=backend, **named)(**arrays, **options)
        several = [y for y in (out if isinstance(out, tuple) else (out,)) if y is not None]
        return [y for n, y in zip(shown, several, strict=True) if n in cotangents]

    wanted = [ours(cotangents[n]) for n in shown if n in cotangents]
    leaves = [n for n in arrays if n in wired.gradients]
    if framework == "torch":
        import torch

        for n in leaves:
            arrays[n].requires_grad_()
        torch.autograd.backward(outputs(arrays), wanted)
        return {n: fw.to_numpy(arrays[n].grad) for n in leaves if arrays[n].grad is not None}
    import jax

    _, back = jax.vjp(lambda some: outputs({**arrays, **some}), {n: arrays[n] for n in leaves})
    return {n: fw.to_numpy(a) for n, a in back(wanted)[0].items()}


def worst(op: str, of: Spec[Any], case: Case, **where: Any) -> tuple[float, str] | None:
    """(The largest share of its bound that a gradient is off by, which); None where the call is refused."""
    given, options, cotangents = called_with(op, of, case)
    if not cotangents:
        return None
    try:
        found = gradients(op, given=given, options=options, cotangents=cotangents, **where)
    except UnsupportedError:
        return None
    whole = whole_gradients(op, given, options, cotangents)
    for name in found:
        if found[name].shape != whole[name].exact.shape:
            return float("inf"), f"{name}: {found[name].shape}"
    return max(((fraction(whole[n], a), n) for n, a in found.items()), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append")
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--variant", action="append")
    parser.add_argument("--framework", default="torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", type=int, default=20, help="beside the corners; a call that is refused is no case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    table: dict[str, Any] = {}
    for op in asked.op or [n for n in pk.ops() if pk.op(n).spec.vjp]:
        for variant in asked.variant or [None]:
            row = table.setdefault(
                f"{op} {variant or ''}".strip(), {"cases": 0, "refused": 0, "worst": {}, "wrong": []}
            )
            named, drawn_ones = {"variant": variant} if variant else {}, 0
            limits = limits_of(op, asked.backend, variant, asked.framework, asked.device)
            for edge, of, case in cases(op, TRIES * asked.cases, limits, asked.seed):
                if drawn_ones == asked.cases:
                    break
                try:
                    found = worst(
                        op, of, case, backend=asked.backend, framework=asked.framework, device=asked.device, **named
                    )
                except Exception as e:
                    row["wrong"].append([edge, of.name, f"{type(e).__name__}: {e}"[:300], case.to_json()])
                    continue
                row["refused" if found is None else "cases"] += 1
                drawn_ones += edge == DRAWN and found is not None
                if found is None:
                    continue
                row["worst"][edge] = max(row["worst"].get(edge, 0.0), round(found[0], 4))
                if found[0] > 1:
                    row["wrong"].append([edge, of.name, found, case.to_json()])
            shares = row["worst"]
            print(f"{op:22} {asked.backend} {variant or '':10} {row['cases']:4} cases, {row['refused']} refused, "
                  f"{len(shares)} corners, worst {max(shares.values(), default=0):.3f} "
                  f"({max(shares, key=shares.get, default='')}), wrong {len(row['wrong'])}", flush=True)  # fmt: skip
            for wrong in row["wrong"][:6]:
                print("   ", wrong, flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
