"""What is declared, installed and reachable in this process, as plain data for the command line and for result
files.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from portakern.core import partitions, registry
from portakern.core.backend import Backend, Family
from portakern.core.config import fields_of
from portakern.core.framework import frameworks
from portakern.errors import UnavailableError
from portakern.install import installed
from portakern.spec import Count, Spec

__all__ = ["backends", "backends_with", "doctor", "environment", "ops", "peers", "show"]

HOST_CPU = "host CPU"  # the device of a run that used no accelerator
PACKAGES = ("numpy", "ml_dtypes", "jaxtyping", "torch", "triton", "jax", "jaxlib", "libtpu")


def ops() -> list[dict[str, Any]]:
    """Each op with its arguments, outputs and the backends and peers that implement it."""
    rows = []
    for name in registry.loadable():
        s = registry.find_spec(name)
        arguments = [a.name + ("?" if a.optional else "") for a in s.arrays] + [
            f"{o.name}={o.default!r}" for o in s.options
        ]
        rows.append(
            {
                "op": name,
                "arguments": ", ".join(arguments),
                "outputs": ", ".join(o.name for o in s.outputs),
                "backends": backends_with(name),
                "peers": [b.name for b in registry.peers().values() if any(True for _ in b.families_with(name))],
            }
        )
    return rows


def backends_with(op: str) -> list[str]:
    """The backends that implement an op somewhere."""
    return [b.name for b in registry.backends().values() if any(True for _ in b.families_with(op))]


def backends() -> list[dict[str, Any]]:
    """Each backend with where it runs and whether it can here."""
    return [_row(b) for b in registry.backends().values()]


def peers() -> list[dict[str, Any]]:
    """The same of each peer: other people's kernels, which serve nothing unless they are named."""
    return [_row(b) for b in registry.peers().values()]


def _row(b: Backend) -> dict[str, Any]:
    missing = b.unavailable()
    lacking = () if missing else b.missing_kernels()
    return {
        "backend": b.name,
        "framework": b.framework,
        "compiles": [*b.compiled_platforms()],
        "interprets": b.can_interpret(),
        "available": missing is None,
        "status": missing or "; ".join(("available", *lacking)),
        "peer": b.peer,
    }


def show(op: str) -> dict[str, Any]:
    """One op's declaration."""
    s = registry.find_spec(op)
    return {
        "op": s.name,
        "doc": s.doc,
        "arrays": [{"name": a.name, "shape": a.shape, "dtypes": list(a.dtypes),
        "optional": a.optional} for a in s.arrays],
        "options": [{"name": o.name, "default": o.default, "expected": o.expected} for o in s.options],
        "outputs": [
            {
                "name": o.name,
                "shape": o.shape,
                "dtype": o.dtype or o.dtype_option or f"that of {o.alias_of or s.lead.name}",
                "returned": f"with {o.wanted_by}" if o.wanted_by else "to the gradient only" if o.saved else "always",
                "memory": f"new, or that of {o.alias_of} with overwrite" if o.alias_of else "new",
            }
            for o in s.outputs
        ],
        "dimensions": {d: f"{whole} without the axis {option}" for d, whole, option in _drops(s)},
        "parts": partitions.described(s),
        "value_rules": [r.message for r in s.require if r.values],
        "samples": [*s.samples],
        "tiling": {n: [t.lo, t.hi] for n, t in s.tiling.items()},
        "tilings": [row for b in registry.backends().values() for row in _tilings(s, b)],
        "empty": {d: {k: str(v) for k, v in values.items()} for d, values in s.empty.items()},
        "implementations": _implementations(op, registry.backends().values()),
        "peers": _implementations(op, registry.peers().values()),
    }  # fmt: skip


def _implementations(op: str, among: Iterable[Backend]) -> list[dict[str, Any]]:
    rows = []
    for b in among:
        for family in b.declared:
            module = b.module_of(op, family)
            if module is None:
                continue
            found = None if module == "__main__" else importlib.util.find_spec(module)
            lines = len(Path(found.origin).read_text().splitlines()) if found and found.origin else 0
            rows.append({"backend": b.name, "variant": family.name, "module": module, "lines": lines} | _waits(family))
    return rows


def _tilings(s: Spec[Any], b: Backend) -> list[dict[str, Any]]:
    """The tiles and launch knobs that each variant of a backend takes, where it can be imported here."""
    rows = []
    for family in () if b.oracle else b.families_with(s.name):
        try:
            impl = b.implementation(s.name, family)
        except UnavailableError:
            continue
        if impl is None:
            continue
        known = fields_of(impl.config)
        for name, tile in {**s.tiling, **impl.knobs}.items():
            kind = "whole numbers" if isinstance(tile, Count) else "powers of two"
            values = f"{kind} {tile.lo} to {tile.hi}" if tile.hi - tile.lo > 3 else ", ".join(map(str, tile.values))
            rows.append({"backend": b.name, "variant": family.name, "name": name, "values": values,
                         "meaning": known[name].meaning if name in known else ""})  # fmt: skip
    return rows


def _waits(family: Family) -> dict[str, str]:
    why = family.missing_packages()
    return {"requires": why} if why else {}


def _drops(s: Spec[Any]) -> list[tuple[str, str, str]]:
    """(dimension, the one that it is but for an axis, the option that names the axis)."""
    found = ((d, s.dropped(d)) for d in s.drops)
    return [(d, dropped[0], dropped[1].name) for d, dropped in found if dropped]


def environment() -> dict[str, str | None]:
    """Versions of what matters, None where it is not installed."""
    found: dict[str, str | None] = {
        "portakern": installed("portakern"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    return found | {p: installed(p) for p in PACKAGES}


def devices() -> list[dict[str, str]]:
    """Every device of every installed framework."""
    rows = []
    for fw in frameworks().values():
        try:
            rows += [
                {"framework": fw.name, "device": str(fw.target(d)), "platform": fw.target(d).platform}
                for d in fw.devices()
            ]
        except UnavailableError:
            rows.append({"framework": fw.name, "device": "not installed", "platform": ""})
    return rows


def device_name() -> str:
    """The accelerators by their makers' names, several of a kind as one; HOST_CPU where there are none."""
    names = next((found for f in frameworks().values() if (found := f.accelerator_names())), [])
    return ", ".join(dict.fromkeys(names)) or HOST_CPU


def doctor() -> dict[str, Any]:
    """Versions, devices, and for each backend what it does here and what would make it do more."""
    found = devices()
    rows = []
    for b in registry.backends().values():
        here, advice = _diagnose(b, {d["platform"] for d in found if d["framework"] == b.framework})
        rows.append({"backend": b.name, "status": here, "next_step": advice})
    return {"environment": environment(), "devices": found, "backends": rows}


def _diagnose(b: Backend, platforms: set[str]) -> tuple[str, str]:
    """(what the backend can do here, what to install or do next)."""
    missing = b.unavailable()
    if missing:
        if "triton" in b.requires and platform.system() != "Linux":
            return (
                "cannot run",
                f"triton publishes no wheel for {platform.system()}: use Linux (or WSL2), or another backend",
            )
        return "cannot run", missing
    compiled = sorted(platforms & set(b.compiled_platforms()))
    later = b.missing_kernels()
    if b.oracle:
        return "runs on the host, in float64", "none: this is the oracle"
    if compiled:
        return f"compiles for {', '.join(compiled)}", "; ".join(later) or "none"
    can = "interpreter on cpu: exact, slow" if b.can_interpret() else "cannot run: no device that it compiles for"
    speed = f"for speed: use a machine with {' or '.join(b.compiled_platforms())}, and a build of {b.framework} for it"
    return can, "; ".join((speed, *later))
