"""Judge a candidate: which file, called how, on which calls, and what came out."""

from __future__ import annotations

import ast
import hashlib
import os
import shlex
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from portakern.core import registry
from portakern.core.failing import Ended
from portakern.core.framework import advised, frameworks
from portakern.core.targets import HOST, Target
from portakern.errors import SpecError, UnavailableError
from portakern.judging.mapping import Place, parse
from portakern.judging.process import Bounds, Process
from portakern.judging.remote import Remote, signature_of
from portakern.spec import Spec
from portakern.testing.fixed import cut_to, given_optional
from portakern.testing.report import Failure, Report
from portakern.testing.runner import Asked, check_subject, replay_subject
from portakern.testing.subject import Subject, environment, function_subject

__all__ = ["PROMISES", "Judged", "judge"]

PROMISES = ("inputs", "outside", "own_memory", "kept")
"""What every kernel is held to, whoever wrote it; the others are asked by name."""

LAYOUTS = ("contiguous", "shifted")
ELEMENTS = {"cpu": 1 << 20, "accelerator": 1 << 21}
"""Elements of the largest array that a call is cut to. On an accelerator it is the judge that takes the time: each case
is drawn, copied there and back and compared by a core of the host, a second for 2^24 elements, where 60 cases are to be
met in 15."""

FLOPS = {"cpu": 2e9, "accelerator": 1e13}


@dataclass
class Judged:
    """What came out.

    Attributes:
      report: the verdict (``report.outcome``), what was asked, what was conceded, and the failures.
      file, name, sha256: what was judged; device: on what.
      walls: names of the walls that stood (:data:`portakern.judging.walls.WALLS`).
      printed: the end of what the candidate printed.
      seconds: wall time, of which ``load_seconds`` to start its process and import it.
    """

    report: Report
    file: str
    name: str
    sha256: str
    device: str
    walls: list[str] = field(default_factory=list)
    printed: str = ""
    seconds: float = 0.0
    load_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        own = {n: getattr(self, n) for n in self.__dataclass_fields__ if n not in ("report", "seconds")}
        return {**self.report.to_dict(), **own, "judge_seconds": round(self.seconds, 2)}


def judge(
    file: str | Path,
    op: str | Spec[Any] | None = None,
    *,
    name: str | None = None,
    map: str | None = None,
    problem: str | Path | None = None,
    framework: str | None = None,
    device: str = "cpu",
    shapes: Sequence[Mapping[str, Sequence[int]]] | None = None,
    whole: bool = False,
    dtypes: Sequence[str] | None = None,
    layouts: str | Sequence[str] | None = LAYOUTS,
    options: Mapping[str, Any] | None = None,
    edges: bool = True,
    promises: bool | Collection[str] = PROMISES,
    max_examples: int = 150,
    seed: int = 0,
    seconds: float = 15.0,
    bounds: Bounds | None = None,
    case: str | None = None,
) -> Judged:
    """Hold a candidate to an op's contract, in a process of its own that cannot touch the verdict.

    Args:
      file: a Python file, or an extension that was built (``.so``); name: of the function, of the ``torch.nn.Module``
        in KernelBench's form, or ``namespace::op`` of an extension; None: what its file names as such.
      op: the op's name or spec; map: how its arguments become the candidate's (:mod:`portakern.judging.mapping`). None:
        those of the problem, where that is one of KernelBench's (``problems.toml``).
      problem: the file with ``get_inputs`` and ``get_init_inputs``; None: the candidate's own, which may name small
        ones.
      framework: numpy, torch or jax; None: what the file imports. device: cpu, cuda, rocm or tpu.
      shapes: of the calls; None: those of ``get_inputs``, or any. whole: False cuts calls along what does not matter to
        a kernel's sums until they are quick; the report says to what.
      dtypes, layouts, options, edges, promises, max_examples, seed: as of :func:`portakern.check`. No layout named:
        contiguous and shifted arrays; no shifted ones on an accelerator where a problem's own reference takes none.
      seconds: from the first case on, after which no further one begins; a start has a limit of its own, in ``bounds``:
        what the candidate may take; case: this one alone.

    Raises:
      SpecError: what was asked for is not there, or cannot be called so. UnavailableError: no Linux, or no such device.
    """
    path, source = _file(file), _file(problem) if problem else None
    op, map, terms = _of_a_problem((source or path).stem, op, map)
    spec = registry.find_spec(op) if isinstance(op, str) else op
    names = [[a.name for a in spec.arrays], [o.name for o in spec.outputs], [o.name for o in spec.options]]
    places, fixed = parse(map, *names)
    which, form, library = _identify(path, name, spec, framework)
    _check_walls(bounds or Bounds())
    line = _line(str(file), which, spec, map, problem, library, device)
    fixed = {**fixed, **(options or {})}
    asked = Asked(
        dtypes, None, max_examples, seed, None, shapes, layouts, fixed, False, True, edges, promises, seconds,
        shrink=False,
    )  # fmt: skip
    judged = Judged(Report(spec.name, "", seed), str(file), which, _digest(path), device)
    start, process = time.perf_counter(), Process(bounds or Bounds(), library, device)
    called = f"{path.name}:{which} on {device}"
    try:
        target = _target(library, device)
        candidate = _Candidate(spec, path, source, which, form, library, target, places, fixed, line)
        judged.device, called = str(target), candidate.called
        _begin(process, library, target)
        subject, told = candidate.loaded(process)
        judged.load_seconds = round(time.perf_counter() - start, 2)
        if case is not None:
            judged.report = replay_subject(subject, case, edges=edges, promises=promises)
        else:
            asked, words = _on_its_terms(*candidate.on_its_shapes(asked, told, whole), terms, target)
            judged.report = check_subject(subject, asked)
            judged.report.concessions += words
    except Ended as e:
        failure = Failure(
            spec.name, f"before any case: {advised(str(e))}", "", line("").partition(" --case")[0], e.kind
        )
        judged.report = Report(spec.name, called, seed, failures=[failure])
    finally:
        process.end()
        judged.walls, judged.printed = process.walls, process.printed()
        os.close(process.log)
    judged.seconds = time.perf_counter() - start
    return judged


@dataclass(frozen=True)
class _Candidate:
    """A candidate that was found: where, in which form, on what, how it is called (``places``, and the options that are
    ``fixed``), and the ``line`` that judges a case of it again."""

    spec: Spec[Any]
    path: Path
    problem: Path | None
    name: str
    form: str
    library: str
    target: Target
    places: Mapping[str, Place]
    fixed: Mapping[str, Any]
    line: Callable[[str], str]

    @property
    def called(self) -> str:
        return f"{self.path.name}:{self.name} on {self.target}"

    def loaded(self, process: Process) -> tuple[Subject, dict[str, Any]]:
        """What the checker checks, and what its process told of it."""
        spec, places = self.spec, self.places
        told = process.load({
            "file": str(self.path), "name": self.name, "form": self.form, "problem": str(self.problem or ""),
            "required": [a.name for a in spec.arrays if not a.optional],
            "places": {n: {"position": p.position, "keyword": p.keyword, "parameter": p.parameter}
                       for n, p in places.items()},
        })  # fmt: skip
        try:
            signature = signature_of(spec, told.get("parameters"), places, self.name)
            theirs = _inputs(spec, told.get("inputs"), places)
        except (TypeError, ValueError, KeyError, AttributeError) as e:
            if isinstance(e, SpecError):
                raise
            raise Ended("crashed", f"its process told of itself what is none of it: {type(e).__name__}") from None
        remote = Remote(process, spec, places, self.fixed, theirs, signature)
        subject = function_subject(spec, remote, "numpy", None)
        return replace(subject, target=self.target, remote=True, name=self.called, reproduce=self.line), told

    def on_its_shapes(self, asked: Asked, told: Mapping[str, Any], whole: bool) -> tuple[Asked, tuple[str, ...]]:
        """What is asked on the shapes that somebody named, or else those of its file, cut to quick calls; and what a
        report says of the cut."""
        spec, inputs = self.spec, told.get("inputs")
        shapes = _shapes(spec, asked.shapes, _inputs(spec, inputs, self.places), self.places, self.fixed)
        shapes, words = (shapes, ()) if whole or not shapes else _cut(spec, shapes, self.fixed, self.target)
        return replace(asked, dtypes=asked.dtypes or _dtype(inputs, spec), shapes=shapes or None), words


def _file(file: str | Path) -> Path:
    path = Path(file).resolve()
    if not path.is_file():
        raise SpecError(f"judge: {str(file)!r} is no file; expected a Python file or an extension that was built")
    return path


def _of_a_problem(
    stem: str, op: str | Spec[Any] | None, map: str | None
) -> tuple[str | Spec[Any], str, Mapping[str, str]]:
    """The op and the mapping, those of a known problem where nobody says others, and what that problem's own reference
    does not do on an accelerator: ``aligned`` or ``edges`` -> why (:func:`_on_its_terms`)."""
    known = tomllib.loads(Path(__file__).with_name("problems.toml").read_text()).get(stem, {})
    if op is None and not known:
        raise SpecError(f"judge: {stem} is no problem that is known here; say with --op what it should compute")
    same = op is None or op == known.get("op") or getattr(op, "name", op) == known.get("op")
    known = known if same else {}
    return op or known["op"], map if map is not None else known.get("map", ""), known


def _on_its_terms(
    asked: Asked, words: tuple[str, ...], terms: Mapping[str, str], target: Target
) -> tuple[Asked, tuple[str, ...]]:
    """What is asked, and what a report says of it, of a problem whose own reference, on an accelerator, takes no
    shifted arrays (``aligned``; unless somebody named a layout) or leads infinities elsewhere than the formula
    (``edges``)."""
    if target.platform == HOST.platform:
        return asked, words
    if (why := terms.get("aligned")) and asked.layouts is LAYOUTS:
        asked, words = replace(asked, layouts="contiguous"), (*words, f"no array is shifted: {why}")
    if (why := terms.get("edges")) and asked.edges:
        asked, words = replace(asked, edges=False), (*words, f"NaN and infinities may lead elsewhere: {why}")
    return asked, words


def _check_walls(bounds: Bounds) -> None:
    """SpecError where a wall that is to be left out is none, or always stands."""
    if not bounds.without:
        return
    from portakern.judging.walls import WALLS  # of Linux alone

    optional = [w for w in WALLS if w != "session"]
    for name in bounds.without:
        if name not in optional:
            raise SpecError(f"judge: {name!r} is no wall to leave out; expected some of {', '.join(optional)}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _target(library: str, device: str) -> Target:
    """What the candidate runs on: the judge asks its own machine, not the candidate."""
    if device == HOST.platform:
        return HOST
    fw = frameworks()[library]
    fw.load()
    found = next((fw.target(d) for d in fw.devices() if fw.target(d).platform == device), None)
    if found is None:
        raise UnavailableError(f"judge: {library} has no {device} device here")
    return found


def _begin(process: Process, library: str, target: Target) -> None:
    """Have the process import the array library; UnavailableError where a device that the judge reaches begins behind
    no such wall."""
    if process.begun():
        return
    walls = [w for w in process.walls if w != "session"]
    raise UnavailableError(
        f"judge: {library} reaches the {target.platform} device here, and not behind the walls that the candidate gets "
        f"({', '.join(walls)}). A driver that does not begin behind the wall 'files' begins with --without files; the "
        "verdict then says that it did not stand. Trust such a candidate, or give it a machine of its own"
        + (f". Its driver said: {process.why}" if process.why else "")
    )


FORMS = ("ModelNew", "Model")
"""What KernelBench calls a candidate's module, and a reference's."""


def _identify(path: Path, name: str | None, spec: Spec[Any], framework: str | None) -> tuple[str, str, str]:
    """(the candidate's name, function or module, the array library), read off the file without running it."""
    if framework is not None and framework not in frameworks():
        raise SpecError(f"judge: framework is {framework!r}; expected one of {', '.join(frameworks())}")
    if path.suffix != ".py":
        if name is None:
            raise SpecError(f"judge: {path.name} is built; expected its function too: {path.name}:name, or :ns::op")
        return name, "function", framework or "torch"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise SpecError(f"judge: {path.name} is no Python: {e}") from None
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    defined += [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    classes = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
    lone = [f for f in functions if f not in ("get_inputs", "get_init_inputs")]
    likely = [n for n in (*FORMS, spec.name, f"my_{spec.name}", "custom_kernel", "launch") if n in defined] or lone[-1:]
    if name is None and not likely:
        raise SpecError(f"judge: {path.name} defines no function; expected one, or its name: {path.name}:name")
    which = name or likely[0]
    if "." not in which and which not in defined and not _imports(tree, which):
        raise SpecError(f"judge: {path.name} has no {which!r}; it defines {', '.join(defined) or 'nothing'}")
    imported = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {(n.module or "").partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    found = "torch" if imported & {"torch", "triton"} else "jax" if "jax" in imported else "numpy"
    return which, "module" if which in classes else "function", framework or found


def _imports(tree: ast.Module, name: str) -> bool:
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return any(name == (a.asname or a.name) for n in nodes for a in n.names)


def _inputs(spec: Spec[Any], told: Any, places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Array -> the candidate's shape of it, of those that ``get_inputs`` names."""
    shapes = [tuple(int(n) for n in i["shape"]) for i in told or ()]
    required = [a.name for a in spec.arrays if not a.optional]
    found = {}
    for i, name in enumerate(required):
        place = places.get(name)
        at = i if place is None else place.position
        if at is not None and at < len(shapes):
            found[name] = shapes[at]
    if found and places:  # an output that is flattened has the shape of the first array
        for o in spec.outputs:
            found.setdefault(o.name, found[next(iter(found))])
    return found


def _dtype(told: Any, spec: Spec[Any]) -> list[str] | None:
    names = [str(i["dtype"]) for i in told or ()]
    return [names[0]] if names and names[0] in spec.dtypes else None


def _shapes(
    spec: Spec[Any],
    shapes: Sequence[Mapping[str, Sequence[int]]] | None,
    theirs: Mapping[str, Sequence[int]],
    places: Mapping[str, Place],
    fixed: Mapping[str, Any],
) -> Sequence[Mapping[str, Sequence[int]]]:
    """The calls' shapes in the op's terms, with the optional arrays that were mapped."""
    required = [a.name for a in spec.arrays if not a.optional]
    if shapes is None:
        if not all(n in theirs for n in required):
            return []
        views = {n: places[n].views.of_shape(theirs[n]) if n in places else tuple(theirs[n]) for n in required}
        shapes = [views]
    mapped = [a.name for a in spec.arrays if a.optional and a.name in places]
    return [given_optional(spec, s, mapped, fixed) for s in shapes]


def _cut(
    spec: Spec[Any], shapes: Sequence[Mapping[str, Sequence[int]]], fixed: Mapping[str, Any], target: Target
) -> tuple[Sequence[Mapping[str, Sequence[int]]], tuple[str, ...]]:
    """The shapes cut to calls that are quick, and what a report says of it."""
    kind = "cpu" if target.platform == HOST.platform else "accelerator"
    found = [cut_to(spec, s, fixed, ELEMENTS[kind], FLOPS[kind]) for s in shapes]
    words = tuple(
        f"cut from {', '.join(f'{n} {[*s]}' for n, s in was.items())} along what no sum runs over"
        for was, now in zip(shapes, found, strict=True)
        if {n: tuple(s) for n, s in was.items()} != now
    )
    return found, words


def _line(
    file: str, name: str, spec: Spec[Any], mapped: str, problem: str | Path | None, framework: str, device: str
) -> Callable[[str], str]:
    """The line for a shell that judges a case again."""
    given = {"map": mapped, "problem": str(problem or ""), "framework": framework, "device": device}
    command = f"{environment(frameworks()[framework])}portakern judge {shlex.quote(f'{file}:{name}')} --op {spec.name}"
    command += "".join(f" --{k} {shlex.quote(v)}" for k, v in given.items() if v)
    return lambda case: f"{command} --case {shlex.quote(case)}"
