"""Which calls are timed: suites, which are data, and calls made of what specs and users say.

A suite is a TOML file of the folder ``suites``, named like it::

    about = "what the calls have in common"
    x = "q_len"                             # optional: the dimension along which they make a curve

    [[case]]
    op = "attention"
    dims = { kv_heads = 16, group = 1, d = 128, dv = 128 }      # a list of extents for a run of axes
    options = { is_causal = true }
    given = ["bias"]                        # optional arrays that are passed
    layouts = { q = "swapped" }             # portakern.testing.layouts; contiguous where nothing is said
    runs = { q_segment_ids = 700 }          # integers that grow by 1 after so many positions: packed documents
    values = { kv_lens = 4096 }             # integers as they are, a number for all or a list: lengths, offsets
    array_dtypes = { k_pages = "float8_e4m3fn" }    # of arrays that may have another than the call's
    overwrite = ["k_pages", "v_pages"]      # arrays over which results are written; of the forward op alone
    sweep = { batch = [4, 1], q_len = [4096, 16384], kv_len = [4096, 16384] }    # a case for each position
    dtypes = ["bfloat16"]                   # the dtypes that were asked for where nothing is said
    gradients = true                        # the gradients too; "only": them alone
    rank = 1                                # 1 to 3: what is timed first, and left out last
    rounds = 4                              # at most so many samples, where a call takes long
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from portakern.core import registry
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.testing.layouts import LAYOUTS
from portakern.testing.samples import samples
from portakern.tools.compile.abstract import CallSignature, extents, named_signature, typical

__all__ = [
    "SAMPLES",
    "TYPICAL",
    "Suite",
    "TimedCase",
    "cases_of",
    "each",
    "in_order",
    "names",
    "parse_shape",
    "read",
    "requested_cases",
    "shaped",
]  # fmt: skip

FOLDER = Path(__file__).parent / "suites"
TYPICAL, SAMPLES = "typical", "samples"
"""Suites that are no files: each op's typical call, and the small calls that specs declare."""

RANKS = (1, 2, 3)
KNOWN = {
    "op",
    "dims",
    "options",
    "given",
    "layouts",
    "runs",
    "values",
    "array_dtypes",
    "overwrite",
    "sweep",
    "dtypes",
    "gradients",
    "rank",
    "rounds",
}


@dataclass(frozen=True)
class TimedCase:
    """A call to time.

    Attributes:
      suite: where it stands. op, dtype, dims, options, given, layouts, runs, values, overwrite, array_dtypes: the
      call, of the forward op.
      gradient: time the op of its gradients instead, of all its inputs.
      rank: 1 is timed first. rounds: samples of each contender, where those are fewer than a plan has.
    """

    suite: str
    op: str
    dtype: str
    dims: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    overwrite: tuple[str, ...] = ()
    array_dtypes: Mapping[str, str] = field(default_factory=dict)
    gradient: bool = False
    rank: int = 2
    rounds: int | None = None

    @property
    def forward(self) -> Spec[Any]:
        return registry.find_spec(self.op)

    @property
    def timed(self) -> str:
        """The name of the op that is timed."""
        vjp = self.forward.vjp
        return vjp if self.gradient and vjp else self.op

    @property
    def spec(self) -> Spec[Any]:
        """Of the op that is timed."""
        return registry.find_spec(self.timed)

    @property
    def text(self) -> str:
        """The same for the same call, in any process."""
        parts = [self.timed, self.dtype, self.dims, self.options, self.given, self.layouts]
        parts += [self.runs] if self.runs else []
        parts += [{"values": self.values}] if self.values else []
        parts += [{"overwrite": self.overwrite}] if self.overwrite else []
        parts += [{"array_dtypes": self.array_dtypes}] if self.array_dtypes else []
        return json.dumps(parts, sort_keys=True, default=str)

    @cached_property
    def signature(self) -> CallSignature:
        """The call that is timed, without arrays; every array is contiguous in it."""
        spec = self.spec
        options = {n: v for n, v in self.options.items() if n in {o.name for o in spec.options}}
        optional = {a.name: a.name in self.given for a in self.forward.arrays if a.optional}
        given = {
            a.name: optional.get(a.name, spec.reads_under(a.name, options, False)) for a in spec.arrays if a.optional
        }
        dims = {n: extent for n, extent in self.dims.items() if n in spec.dims}
        found = named_signature(spec, self.dtype, {**dims, **options, **given})
        for name, dtype in self.array_dtypes.items():
            if name in found["arrays"]:
                found["arrays"][name][1] = dtype
        return found


@dataclass(frozen=True)
class Suite:
    """A file of cases. ``x``: the dimension along which its cases make a curve, if they do."""

    name: str
    about: str
    x: str | None
    cases: Sequence[Mapping[str, Any]]


def names() -> list[str]:
    """The suites that there are, those that are no files last."""
    return [*sorted(p.stem for p in FOLDER.glob("*.toml")), TYPICAL, SAMPLES]


def read(name: str) -> Suite:
    """A suite's file; SpecError where there is none of that name, or something is wrong with it."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        raise SpecError(f"suite {name!r} is unknown; expected one of {', '.join(names())}")
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    for i, case in enumerate(data["case"]):
        unknown = set(case) - KNOWN
        if unknown:
            raise SpecError(
                f"{path.name}, case {i}: {min(unknown)!r} is unknown; expected some of {', '.join(sorted(KNOWN))}"
            )
        wrong = [layout for layout in case.get("layouts", {}).values() if layout not in LAYOUTS]
        if wrong:
            raise SpecError(f"{path.name}, case {i}: layout {wrong[0]!r} is none of {', '.join(LAYOUTS)}")
        if short := {n: length for n, length in case.get("runs", {}).items() if length < 1}:
            raise SpecError(f"{path.name}, case {i}: runs are {short}; expected at least 1 position each")
        if case.get("rank", 2) not in RANKS:
            raise SpecError(f"{path.name}, case {i}: rank is {case['rank']!r}; expected one of {RANKS}")
        if (rounds := case.get("rounds", 2)) < 2:
            raise SpecError(f"{path.name}, case {i}: rounds is {rounds}; expected at least 2")
        if case.get("overwrite") and case.get("gradients"):
            raise SpecError(
                f"{path.name}, case {i}: gradients are asked of a call with overwrite; expected a case of its own"
            )
    return Suite(name, data["about"], data.get("x"), data["case"])


def cases_of(name: str, dtypes: Sequence[str] | None = None, gradients: bool = True) -> Iterator[TimedCase]:
    """The cases of a suite.

    Args:
      name: one of :func:`names`.
      dtypes: only these; None: those that each case says, else each op's usual ones.
      gradients: whether cases of gradients are among them.
    """
    made = {TYPICAL: _typical, SAMPLES: _samples}.get(name, _from_file)(name, dtypes)
    return (case for case in made if gradients or not case.gradient)


def _from_file(name: str, dtypes: Sequence[str] | None) -> Iterator[TimedCase]:
    for entry in read(name).cases:
        sweep = entry.get("sweep", {})
        counts = {len(values) for values in sweep.values()} or {1}
        if len(counts) > 1:
            raise SpecError(f"{name}.toml: the lists of a sweep differ in length: {sweep}")
        for i in range(counts.pop()):
            dims = entry.get("dims", {}) | {n: values[i] for n, values in sweep.items()}
            case = TimedCase(
                name, entry["op"], "", _extents(dims), _options(entry.get("options", {})),
                (*entry.get("given", ()), *entry.get("runs", {}), *entry.get("values", {})), entry.get("layouts", {}),
                entry.get("runs", {}), entry.get("values", {}), (*entry.get("overwrite", ()),),
                entry.get("array_dtypes", {}),
                rank=entry.get("rank", 2),
                rounds=entry.get("rounds"),
            )  # fmt: skip
            own = entry.get("dtypes", case.forward.usual_dtypes if dtypes is None else dtypes)
            yield from each(case, [d for d in own if dtypes is None or d in dtypes], entry.get("gradients", False))


def _typical(name: str, dtypes: Sequence[str] | None) -> Iterator[TimedCase]:
    for op in registry.loadable():
        spec = registry.find_spec(op)
        if not spec.is_vjp and spec.typical:
            yield from each(shaped(spec, {}), dtypes or spec.usual_dtypes, True)


def _samples(name: str, dtypes: Sequence[str] | None) -> Iterator[TimedCase]:
    """Those that no array of is stretched, or wider than the others: these are corners of a contract."""
    for op in registry.loadable():
        spec = registry.find_spec(op)
        if spec.is_vjp or not spec.samples:
            continue
        for sample in samples(spec).values():
            if not sample.stretched and not sample.wider:
                case = TimedCase(SAMPLES, op, "", sample.dims, sample.options, sample.given, rank=1)
                yield from each(case, dtypes or spec.usual_dtypes, True)


def each(case: TimedCase, dtypes: Sequence[str], gradients: bool | str) -> Iterator[TimedCase]:
    """The case in each dtype that its op has, and its gradients."""
    spec = case.forward
    case = replace(case, options={**spec.extent_options(case.dims), **case.options})
    backward = bool(gradients) and spec.vjp is not None
    for dtype in (d for d in dtypes if d in spec.dtypes):
        if gradients != "only":
            yield replace(case, dtype=dtype)
        if backward:
            yield replace(case, dtype=dtype, gradient=True)


def shaped(spec: Spec[Any], given: Mapping[str, Any]) -> TimedCase:
    """The typical call of an op with some dimensions and options of the user's.

    Raises:
      SpecError: a name that the op does not have, or a dimension without an extent, or with what is none.
    """
    usual = dict(typical(spec))
    options = {o.name for o in spec.options}
    for name in given:
        if name not in spec.dims and name not in options:
            known = ", ".join((*spec.dims, *sorted(options)))
            raise SpecError(f"{spec.name}: --shape names {name!r}; expected some of {known}")
    usual |= given
    dims = extents(spec, usual)
    passed = tuple(a.name for a in spec.arrays if a.optional and usual.get(a.name))
    return TimedCase(TYPICAL, spec.name, "", dims, {n: usual[n] for n in usual if n in options}, passed, rank=1)


def requested_cases(
    name: str, given: Mapping[str, Any], dtypes: Sequence[str] | None, gradients: bool = True
) -> Iterator[TimedCase]:
    """The typical call of a named op with a user's extents and options, and its gradients; of an op of gradients these
    alone."""
    spec = registry.find_spec(name)
    forward = (registry.forward_of(spec) or spec) if spec.is_vjp else spec
    return each(shaped(forward, given), dtypes or forward.usual_dtypes, "only" if spec.is_vjp else gradients)


def parse_shape(
    text: str, option: str = "--shape", example: str = "m=4096,shape=8x1024,is_causal=true"
) -> dict[str, Any]:
    """``m=4096,shape=8x1024,is_causal=true`` as names and values. ``option``: whose value it is, with an example."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign or not name or not value:
            raise SpecError(f"{option} has {part!r}; expected name=value, as in {example}")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        extents = tuple(int(e) for e in text.split("x"))
        return extents if len(extents) > 1 else extents[0]
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _extents(dims: Mapping[str, Any]) -> dict[str, Any]:
    return {n: tuple(e) if isinstance(e, list) else e for n, e in dims.items()}


_options = _extents  # a list stands for a tuple there too


def in_order(cases: Sequence[TimedCase]) -> list[TimedCase]:
    """Without those that stand twice; by rank, and among equals an op after another, so that a run which is cut short
    has some of each."""
    unique: dict[str, TimedCase] = {}
    for c in cases:
        unique.setdefault(c.text, c)
    ranked = sorted(unique.values(), key=lambda c: c.rank)
    found: list[TimedCase] = []
    for _, equal in itertools.groupby(ranked, key=lambda c: c.rank):
        queues: dict[str, list[TimedCase]] = {}
        for case in equal:
            queues.setdefault(case.timed, []).append(case)
        found += [case for turn in itertools.zip_longest(*queues.values()) for case in turn if case is not None]
    return found
