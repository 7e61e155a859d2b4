"""The result of compiling one call: its kernels, their registers and memory, and whether they fit the chip."""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from portakern.core import targets
from portakern.core.machine_code import Compiled, Kernel
from portakern.core.targets import Hardware

__all__ = ["CYCLES", "Build"]

CYCLES = "for each kernel the larger of the cycles of its program and those in which memory moves its bytes"


@dataclass
class Build:
    """One call compiled for one target, or the reason why it was not.

    ``final``: the reason is the compiler's or the backend's, so that another attempt would end the same way.
    """

    op: str
    direction: str
    dtype: str
    target: str
    backend: str
    variant: str = ""
    call: str = ""
    tiling: dict[str, int] = field(default_factory=dict)
    ok: bool = False
    reason: str | None = None
    final: bool = True
    kernels: list[Kernel] = field(default_factory=list)
    code_bytes: int | None = None
    seconds: float = 0.0

    def to_dict(self, assembly: bool = False) -> dict[str, Any]:
        """As plain data, without the assembly unless asked."""
        data = asdict(self)
        for kernel in data["kernels"] if not assembly else ():
            del kernel["assembly"]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Build:
        """What :meth:`to_dict` gave; TypeError where the data are of another form."""
        known = {f.name for f in fields(Kernel)}
        kernels = [Kernel(**{n: v for n, v in k.items() if n in known}) for k in data["kernels"]]
        made = cls(**{**{f.name: data[f.name] for f in fields(cls) if f.name in data}, "kernels": kernels})
        for part, declared in (
            (made, typing.get_type_hints(cls)),
            *((k, typing.get_type_hints(Kernel)) for k in kernels),
        ):
            for name, kind in declared.items():
                if not _is(getattr(part, name), kind):
                    raise TypeError(f"{name} is {getattr(part, name)!r}; expected {kind}")
        return made

    def judge(self, compiled: Compiled, hardware: Hardware) -> None:
        """Take in what the compiler made."""
        self.kernels = compiled.kernels
        self.code_bytes = compiled.code_bytes or sum(k.code_bytes or 0 for k in compiled.kernels)
        self.reason = next((r for r in (k.over(hardware) for k in self.kernels) if r), None)
        self.ok = self.reason is None

    @property
    def least(self) -> float | None:
        """Cycles of all kernels, one after another, each the larger of its program's and of memory's; None where they
        are not known of each."""
        hardware = targets.HARDWARE.get(self.target)
        found = [k.least(hardware) for k in self.kernels] if hardware else []
        known = [f for f in found if f is not None]
        return sum(known) if known and len(known) == len(found) else None

    @property
    def assembly(self) -> str:
        """The machine code of every kernel, as text."""
        return "\n".join(f"// {k.name}\n{k.assembly}" for k in self.kernels)

    def __str__(self) -> str:
        tiles = ", ".join(f"{n}={v}" for n, v in self.tiling.items())
        lines = [
            f"{self.call or self.op} for {self.target} by {self.backend}, variant {self.variant}: "
            f"{'ok' if self.ok else self.reason}",
            f"  tiling: {tiles or 'none'}",
        ]
        for k in self.kernels:
            parts = [f"{k.registers} registers a thread"] if k.registers is not None else []
            parts += [f"{k.spills} spilled"] if k.spills else []
            parts += [f"{used} bytes of {memory}" for memory, used in k.on_chip.items()]
            parts += [f"occupancy {k.occupancy:.0%}"] if k.occupancy is not None else []
            parts += [", ".join(f"{n} x{count}" for n, count in k.matrix.items()) or "no matrix instruction"]
            parts += [f"{k.cycles} cycles estimated"] if k.cycles is not None else []
            parts += [f"{k.issued} cycles issued"] if k.issued is not None else []
            parts += [f"{k.moved} bytes moved"] if k.moved is not None else []
            lines.append(f"  {k.name}{f' x{k.launches}' if k.launches > 1 else ''}: {', '.join(parts)}")
            lines += [f"    counted at most: {k.assumed}"] if k.assumed else []
            lines += [f"    its matrix instructions wait for each other: {why}" for why in k.serialised]
        lines += [f"  {self.least:.0f} cycles, not run: {CYCLES}"] if self.least else []
        return "\n".join(lines)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value of JSON has an annotated type, looking into lists and objects."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return any(_is(value, k) for k in inner)
    if origin is list:
        return isinstance(value, list) and all(_is(v, inner[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(v, inner[1]) for v in value.values())
    return type(value) is kind or (kind is float and type(value) is int)
