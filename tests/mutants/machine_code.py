"""Faults in compiled kernels: one instruction of AMD machine code changed, or two arguments exchanged, and the checks
of the emulator and of the results must see it.

    python -m tests.mutants.machine_code [OP ...] [--targets gfx1100 gfx942] [--json FILE]

* barrier: an ``s_barrier`` does nothing. wait: an ``s_waitcnt`` does nothing.
* mask: a comparison of integers is always true: rows and columns beyond an extent are taken for real.
* strides: two neighbouring numbers among the arguments, such as two strides, change places.

Each is planted at every place that a case runs through, one at a time. Needs PORTAKERN_TINYGRAD.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portakern import results, testing
from portakern.backends.triton.emulator import profile
from portakern.backends.triton.emulator.machine import EmulatedKernel

__all__ = ["CASES", "Site", "caught", "faults", "sites"]

NOTHING = 0xBF800000  # s_nop 0, in every instruction set
ALWAYS = 7  # the last three bits of a comparison's number say which: 7 is always true
KINDS = ("barrier", "wait", "mask", "strides")
TARGETS = ("gfx1100", "gfx942")

# Ragged everywhere: masks matter, and several waves share each tile.
CASES = {
    "softmax": '{"dtype":"float32","shapes":{"x":[5,300]},"regime":"normal","seed":1,"layouts":{"x":"sliced"}}',
    "layernorm_vjp": '{"dtype":"float32","shapes":{"x":[5,300],"d_y":[5,300],"weight":[300]},"regime":"normal",'
    '"seed":1,"layouts":{"x":"sliced"}}',
    "matmul": '{"dtype":"float16","shapes":{"a":[2,37,70],"b":[2,70,45]},"regime":"normal","seed":1,'
    '"layouts":{"a":"strided","b":"transposed"}}',
    "attention": '{"dtype":"bfloat16","shapes":{"q":[2,37,4,24],"k":[2,41,2,24],"v":[2,41,2,16],"bias":[2,4,37,41]},'
    '"regime":"normal","seed":1,"options":{"is_causal":true},"layouts":{"k":"swapped"}}',
    "attention_vjp": '{"dtype":"float16","shapes":{"q":[2,21,2,16],"k":[2,35,1,16],"v":[2,35,1,16],"o":[2,21,2,16],'
    '"lse":[2,2,21],"d_o":[2,21,2,16]},"regime":"normal","seed":1,"options":{"is_causal":true}}',
}


@dataclass(frozen=True)
class Site:
    """Where a fault is planted: a word of a kernel's code, or the first of two arguments."""

    kernel: str
    kind: str
    at: int
    what: str


class Found:
    """What a case runs through: the kernels' instructions, and their arguments."""

    def __init__(self) -> None:
        self.programs: dict[str, EmulatedKernel] = {}
        self.values: dict[str, list[Any]] = {}

    def __call__(self, program: EmulatedKernel, values: list[Any]) -> None:
        self.programs[program.name], self.values[program.name] = program, values


def sites(op: str, target: str) -> list[Site]:
    """Every place of the op's case where a fault can be planted; the case itself must be right."""
    found = Found()
    with profile.planted(found):
        report = testing.replay(op, CASES[op], backend="triton", profile="emulated", target=target)
    assert report.passed and not report.not_emulated, (report.failures, report.not_emulated)
    return [site for name, program in found.programs.items() for site in _sites(program, found.values[name])]


def _sites(program: EmulatedKernel, values: list[Any]) -> Iterator[Site]:
    for at, name in sorted(program.names.items()):
        kind = _kind(name)
        # a comparison that was true of every lane, and a wait for what was there, may as well not be
        if kind and (kind == "barrier" or program.steps[at].falses):
            yield Site(program.name, kind, at, name)
    whole = [i for i, (_, kind, _) in enumerate(values) if kind in ("i32", "i64")]
    for i, j in itertools.pairwise(whole):
        if values[i][1] == values[j][1] and values[i][2] != values[j][2]:
            yield Site(program.name, "strides", i, f"{values[i][0]} and {values[j][0]}")


def _kind(name: str) -> str | None:
    if name in ("S_BARRIER", "S_BARRIER_WAIT"):
        return "barrier"
    if name.startswith(("S_WAITCNT", "S_WAIT_")) and "DEPCTR" not in name and "ALU" not in name:
        return "wait"
    compares = name.startswith("V_CMP_") and any(t in name for t in ("_I32", "_U32", "_I64", "_U64"))
    return "mask" if compares and not name.startswith(("V_CMP_T_", "V_CMP_F_")) else None


def plant(site: Site) -> Any:
    """What plants a fault before its kernel runs."""

    def change(program: EmulatedKernel, values: list[Any]) -> list[Any] | None:
        if program.name != site.kernel:
            return None
        if site.kind == "strides":
            i, j = site.at, next(k for k in range(site.at + 1, len(values)) if values[k][1] == values[site.at][1])
            other = list(values)
            other[i], other[j] = (*values[i][:2], values[j][2]), (*values[j][:2], values[i][2])
            return other
        word = program.code.word(4 * site.at)
        if site.kind == "mask":  # a short comparison has its number from bit 17 on, a long one from bit 16 on
            word |= ALWAYS << (17 if word >> 25 == 0b0111110 else 16)
        program.code.word(4 * site.at, NOTHING if site.kind in ("barrier", "wait") else word)
        return None

    return change


def caught(op: str, target: str, site: Site) -> str | None:
    """What was seen of a fault, None where nothing was."""
    with profile.planted(plant(site)):
        report = testing.replay(op, CASES[op], backend="triton", profile="emulated", target=target)
    if not report.failures:
        return None
    what = report.failures[0].what
    return what.partition("raised ")[2].partition(":")[0] or f"wrong {report.failures[0].kind}"


def faults(op: str, target: str) -> Iterator[dict[str, Any]]:
    """A row for each fault of an op's case on an architecture."""
    for site in sites(op, target):
        how = caught(op, target, site)
        yield {"name": f"{op} {target} {site.kernel}+{4 * site.at:#x} {site.kind}", "op": op, "target": target,
               "kind": site.kind, "what": site.what, "caught": how is not None, "detected_by": how or ""}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", default=list(CASES))
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    start, rows = time.perf_counter(), []
    for op in asked.ops:
        for target in asked.targets:
            mine = list(faults(op, target))
            rows += mine
            for kind in KINDS:
                of = [r for r in mine if r["kind"] == kind]
                how = Counter(r["detected_by"] or f"NOT SEEN ({r['name']}: {r['what']})" for r in of)
                print(f"{op} {target} {kind}: {sum(r['caught'] for r in of)} of {len(of)}; {dict(how)}", flush=True)
    if asked.json:
        seconds = round(time.perf_counter() - start, 1)
        command = results.command_line("python -m tests.mutants.machine_code", asked.json)
        results.write(asked.json, results.record("machine_faults", rows, command=command, device=results.EMULATED,
                                                 wall_seconds=seconds))  # fmt: skip


if __name__ == "__main__":
    main()
