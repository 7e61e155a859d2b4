"""What must not change while the house is laid out anew: bits of results, and the kernel and tiles of every sample.

python -m tests.freeze bits triton [--compare] [--cases 200] [--op softmax]     # here, with these versions
python -m tests.freeze choices [--compare]                                      # on any machine
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import portakern as pk
from portakern.core import dispatch, registry
from portakern.core.binder import unchecked
from portakern.core.framework import frameworks
from portakern.core.targets import HARDWARE
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Spec
from portakern.spec.dtypes import numpy_dtype
from portakern.testing.samples import sample_case, samples
from portakern.testing.sizes import Limits
from portakern.testing.source import Rejected
from portakern.testing.strategies import drawn

FOLDER = Path(__file__).parent / "frozen"
SMALL = Limits(elements=512, flops=1e5, tile_volume=2**13, used=0, layouts=("contiguous",))
NARROW = replace(SMALL, dtypes=("float32", "float16", "bfloat16"))  # JAX has float64 only where it is switched on
CASES = {"reference": 200, "triton": 200, "pallas": 40}
"""Cases an op. Pallas's interpreter compiles each for most of a second."""


def ops() -> list[str]:
    return sorted({n for op in pk.ops() for n in (op, pk.op(op).spec.vjp) if n})


def here(backend: str) -> str:
    """What bits depend on beside the sources: the processor, its instructions and how many there are, since NumPy and
    BLAS choose their loops by these; and the versions of what computes."""
    needed = {"reference": ("numpy",), "triton": ("numpy", "triton", "torch"), "pallas": ("numpy", "jax", "jaxlib")}
    told = dict(re.findall(r"^(model name|model|stepping|flags)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    kind = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return " ".join(
        [told.get("model name", ""), kind, f"x {os.cpu_count()}", *(f"{n} {version(n)}" for n in needed[backend])]
    )


def bits_of(spec: Spec[Any], seed: int, backend: str) -> str:
    """Of one drawn call's outputs, eight hexadecimal digits; "-" where the call is refused, "" where none is drawn."""
    fw = frameworks()[registry.backend(backend).framework]
    try:
        case = drawn(seed, spec, SMALL if fw.name != "jax" else NARROW, {})[0]
    except Rejected:
        return ""
    fw.load()
    arrays = {n: fw.from_numpy(b.view(), None) for n, b in case.buffers(spec).items()}
    try:
        out = pk.op(spec.name, backend=backend)(**arrays, **case.options)
    except UnsupportedError:
        return "-"
    found = hashlib.sha256()
    for y in out if isinstance(out, tuple) else (out,):
        found.update(b"none" if y is None else np.ascontiguousarray(fw.to_numpy(y)).tobytes())
    return found.hexdigest()[:8]


def bits(op: str, backend: str, count: int) -> list[str]:
    return [bits_of(registry.find_spec(op), seed, backend) for seed in range(count)]


def choices(op: str) -> dict[str, str]:
    """Target and backend -> eight hexadecimal digits of the kernel and the tiles of each sample in each dtype."""
    spec, found = registry.find_spec(op), dict[str, str]()
    try:
        cases = {f"{n} {dtype}": sample_case(spec, n, dtype=dtype) for n in samples(spec) for dtype in spec.dtypes}
    except SpecError:
        return found
    for h in HARDWARE.values():
        for b in registry.backends().values():
            if not b.oracle and not b.unavailable():
                chosen = [f"{name} {_chosen(spec, case, h, b)}" for name, case in cases.items()]
                found[f"{h.name} {b.name}"] = hashlib.sha256("\n".join(chosen).encode()).hexdigest()[:8]
    return found


def _chosen(spec: Spec[Any], case: Any, h: Any, b: Any) -> str:
    fw = frameworks()[b.framework]
    fw.load()
    given = {a.name: fw.abstract(s, str(numpy_dtype(case.dtype_of(a))), None) for a in spec.arrays
             if (s := case.shapes.get(a.name)) is not None}  # fmt: skip
    call = unchecked(spec, **given, **case.options).replace(target=h.target, interpret=False, concrete=False)
    try:
        found, tiling = dispatch.pick(dispatch.find_routes(b, call, h.target), call, {})
    except (UnsupportedError, SpecError) as e:
        return type(e).__name__
    return f"{found.impl.family.name} " + " ".join(f"{n}={v}" for n, v in sorted(tiling.items()))


def kept(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def write(name: str, content: Mapping[str, Any]) -> None:
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in content.items())
    (FOLDER / f"{name}.json").write_text("{\n" + lines + "\n}\n")


def differ(op: str, before: list[str], now: list[str]) -> list[str]:
    return [f"{op} seed {i}: {x} was {y}" for i, (x, y) in enumerate(zip(now, before, strict=False)) if x != y]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bits", "choices"))
    parser.add_argument("backend", nargs="?", default="reference", choices=CASES)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--cases", type=int)
    parser.add_argument("--op", action="append")
    a = parser.parse_args()
    name = f"bits-{a.backend}" if a.what == "bits" else "choices"
    before, wrong = kept(name) if a.compare or a.op else {}, []
    now: dict[str, Any] = {**before, **({"here": here(a.backend)} if a.what == "bits" else {})}
    if a.compare and now.get("here") != before.get("here"):
        sys.exit(f"frozen with {before['here']}, and here is {now['here']}")
    for op in a.op or ops():
        if a.what == "bits":
            now[op] = bits(op, a.backend, a.cases or CASES[a.backend])
            wrong += differ(op, before[op], now[op]) if a.compare else []
        else:
            now[op] = choices(op)
            wrong += [f"{op} {k}: {v} was {before[op].get(k)}" for k, v in now[op].items()
                      if a.compare and before[op].get(k) != v]  # fmt: skip
        print(op, len(now[op]), len(wrong), flush=True)
    if not a.compare:
        write(name, now)
    print("\n".join(wrong[:40]) or "nothing differs")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
