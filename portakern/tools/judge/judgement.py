"""Judge a candidate: which file, called how, on which calls, and what came out."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import secrets
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
from portakern.defaults import EXAMPLES
from portakern.errors import SpecError, UnavailableError
from portakern.spec import Spec
from portakern.testing import printed
from portakern.testing.check_options import CheckOptions
from portakern.testing.fixed import checked_shapes, cut_to, given_optional
from portakern.testing.report import Failure, Report
from portakern.testing.runner import check_subject, replay_subject
from portakern.testing.subject import Subject, environment, function_subject
from portakern.tools.judge.hashing import IMPORTED, Hashes, hashes
from portakern.tools.judge.mapping import Slot, parse
from portakern.tools.judge.process import Bounds, Process, within
from portakern.tools.judge.remote import Remote, signature_of
from portakern.tools.judge.wire import Input

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
      file, name, sha256: what was judged; hashes: of that file, of its folder's and of the problem's; device: on what.
      problem: whose inputs it was judged on, "" where the shapes are the asker's or any.
      walls: names of the walls that stood (:data:`portakern.tools.judge.walls.WALLS`).
      printed: the end of what the candidate printed.
      seconds: wall time, of which ``load_seconds`` to start its process and import it.
    """

    report: Report
    file: str
    name: str
    sha256: str
    device: str
    hashes: Hashes = field(default_factory=Hashes)
    problem: str = ""
    walls: list[str] = field(default_factory=list)
    printed: str = ""
    seconds: float = 0.0
    load_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        own = {n: getattr(self, n) for n in self.__dataclass_fields__ if n not in ("report", "seconds", "hashes")}
        hashed = {"files": dict(self.hashes.files), "all": self.hashes.all, "unhashed": self.hashes.unhashed}
        return {**self.report.to_dict(), **own, "hashes": hashed, "judge_seconds": round(self.seconds, 2)}


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
    fully: bool = False,
    dtypes: Sequence[str] | None = None,
    layouts: str | Sequence[str] | None = LAYOUTS,
    options: Mapping[str, Any] | None = None,
    edges: bool = True,
    promises: bool | Collection[str] = PROMISES,
    max_examples: int = EXAMPLES,
    seed: int | None = None,
    seconds: float = 15.0,
    bounds: Bounds | None = None,
    case: str | None = None,
) -> Judged:
    """Hold a candidate to an op's contract, in a process of its own that cannot touch the verdict.

    Args:
      file: a Python file, or an extension that was built (``.so``); name: of the function, of the ``torch.nn.Module``
        in KernelBench's form, or ``namespace::op`` of an extension; None: what its file names as such.
      op: the op's name or spec; map: how its arguments become the candidate's (:mod:`portakern.tools.judge.mapping`).
        None: those of the problem, where that is one of KernelBench's (``problems.toml``).
      problem: the file with ``get_inputs`` and ``get_init_inputs``. Its inputs are read in a process without the
        candidate, whose own file names none: a module that needs them is refused without a problem or shapes.
      framework: numpy, torch or jax; None: what the file imports. device: cpu, cuda, rocm or tpu.
      shapes: of the calls; None: those of the problem, or any. fully: False cuts calls along what does not matter to
        a kernel's sums until they are quick; the report says to what.
      dtypes, layouts, options, edges, promises, max_examples, seed: as of :func:`portakern.check`; no seed: one that
        nobody knows before. No layout named: contiguous and shifted arrays; no shifted ones on an accelerator where a
        problem's own reference takes none.
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
    bounds, seed = bounds or Bounds(), _checked_numbers(max_examples, seconds, seed)
    _check_walls(bounds)
    if form == "module" and not (source or shapes or case):
        _check_inputs(path)
    line = _line(str(file), which, spec, map, problem, library, device, seed)
    fixed = {**fixed, **(options or {})}
    asked = CheckOptions(
        dtypes=dtypes, max_examples=max_examples, seed=seed, shapes=shapes, layouts=layouts, options=fixed, empty=False,
        one_dtype=True, edges=edges, promises=promises, seconds=seconds, shrink=False,
    )  # fmt: skip
    hashed = hashes(path, source)
    judged = Judged(Report(spec.name, "", seed), str(file), which, next(iter(hashed.files.values())), device, hashed)
    judged.problem = str(problem or "")
    start, process = time.perf_counter(), Process(bounds, library, device)
    try:
        target = _target(library, device)
        theirs = _inputs_of(source, bounds) if source else []
        candidate = _Candidate(spec, path, source, which, form, library, target, places, fixed, line, theirs)
        judged.device = str(target)
        judged.report = _judged(candidate, process, asked, terms, fully, case, lambda: _note_start(judged, start))
    finally:
        process.end()
        judged.walls, judged.printed = process.walls, process.printed()
        os.close(process.log)
    judged.report.concessions += _changed(hashed, hashes(path, source))
    judged.seconds = time.perf_counter() - start
    return judged


def _note_start(judged: Judged, start: float) -> None:
    judged.load_seconds = round(time.perf_counter() - start, 2)


def _judged(
    candidate: _Candidate,
    process: Process,
    check_options: CheckOptions,
    terms: Mapping[str, str],
    fully: bool,
    case: str | None,
    started: Callable[[], None],
) -> Report:
    """The report on a candidate whose process was started; ``started`` is called when the candidate is loaded."""
    spec = candidate.spec
    try:
        _begin(process, candidate.library, candidate.target)
        subject = candidate.loaded(process)
        started()
        if case is not None:
            _check_memory([_shapes_of_a_case(spec, case)])
            return replay_subject(subject, case, edges=check_options.edges, promises=check_options.promises)
        check_options, words = _on_its_terms(*candidate.on_its_shapes(check_options, fully), terms, candidate.target)
        report = check_subject(subject, check_options)
        report.concessions += words
    except Ended as e:
        line = candidate.line("").partition(" --case")[0]
        failure = Failure(spec.name, f"before any case: {advised(str(e))}", "", line, e.kind)
        report = Report(spec.name, candidate.called, check_options.seed, failures=[failure])
    except MemoryError:
        raise UnavailableError("judge: the judge ran out of memory; pass smaller --shapes, or free memory") from None
    return report


@dataclass(frozen=True)
class _Candidate:
    """A candidate that was found: where, in which form, on what, how it is called (``places``, and the options that are
    ``fixed``), the ``line`` that judges a case of it again, and the ``inputs`` that the problem names."""

    spec: Spec[Any]
    path: Path
    problem: Path | None
    name: str
    form: str
    library: str
    target: Target
    places: Mapping[str, Slot]
    fixed: Mapping[str, Any]
    line: Callable[[str], str]
    inputs: Sequence[Input] = ()

    @property
    def called(self) -> str:
        return f"{self.path.name}:{self.name} on {self.target}"

    @property
    def candidate_shapes(self) -> dict[str, tuple[int, ...]]:
        """Array -> the candidate's shape of it, of those that the problem names."""
        shapes = [i.shape for i in self.inputs]
        required = [a.name for a in self.spec.arrays if not a.optional]
        found = {}
        for i, name in enumerate(required):
            place = self.places.get(name)
            at = i if place is None else place.position
            if at is not None and at < len(shapes):
                found[name] = shapes[at]
        if found and self.places:  # an output that is flattened has the shape of the first array
            for o in self.spec.outputs:
                found.setdefault(o.name, found[next(iter(found))])
        return found

    def loaded(self, process: Process) -> Subject:
        """What the checker checks."""
        spec, places = self.spec, self.places
        parameters = process.load({
            "file": str(self.path), "name": self.name, "form": self.form, "problem": str(self.problem or ""),
            "required": [a.name for a in spec.arrays if not a.optional],
            "places": {n: {"position": p.position, "keyword": p.keyword, "parameter": p.parameter}
                       for n, p in places.items()},
        })  # fmt: skip
        signature = signature_of(spec, parameters, places, self.name)
        remote = Remote(process, spec, places, self.fixed, self.candidate_shapes, signature)
        subject = function_subject(spec, remote, "numpy", None)
        return replace(subject, target=self.target, remote=True, name=self.called, reproduce=self.line)

    def on_its_shapes(self, check_options: CheckOptions, fully: bool) -> tuple[CheckOptions, tuple[str, ...]]:
        """What is asked on the shapes that somebody named, or else those of the problem, cut to quick calls; and what a
        report says of what that leaves out."""
        spec, words = self.spec, tuple[str, ...]()
        if check_options.shapes is not None:
            _check_extents(check_options.shapes)
            checked_shapes(spec, check_options.shapes, self.fixed)
        shapes = _shapes(spec, check_options.shapes, self.candidate_shapes, self.places, self.fixed)
        if shapes and not fully:
            shapes, words = _cut(spec, shapes, self.fixed, self.target)
        _check_memory(shapes)
        dtypes = check_options.dtypes
        if dtypes is None and self.inputs and self.inputs[0].dtype in spec.dtypes:
            dtypes = [self.inputs[0].dtype]
            words = (*words, f"only the dtype of the problem's inputs is called: {dtypes[0]}")
        if self.problem == self.path:
            words = (*words, "its inputs are what the candidate's own file names, and may be easy ones")
        return replace(check_options, dtypes=dtypes, shapes=shapes or None), words


def _checked_numbers(max_examples: int, seconds: float, seed: int | None) -> int:
    """The seed: one that nobody knows before, where none is named. A table of results by the hashes of inputs would be
    right on a seed that is always the same."""
    within("max_examples", max_examples, 1, 100_000, fully=True)
    within("seconds", seconds, 1e-3, 1e6)
    if seed is None:
        return secrets.randbits(32)
    within("seed", seed, 0, 2**63, fully=True)
    return seed


def _check_inputs(path: Path) -> None:
    """SpecError where a module's own file names the inputs, which would decide what it is asked."""
    defined = [n.name for n in ast.parse(path.read_bytes()).body if isinstance(n, ast.FunctionDef)]
    if "get_inputs" in defined:
        raise SpecError(
            f"judge: {path.name} has a get_inputs of its own, and a candidate does not choose what it is asked: give "
            f"the problem's file with --problem, or shapes with --shapes. --problem {path.name} trusts its own, and "
            "the verdict says so"
        )


def _inputs_of(problem: Path, bounds: Bounds) -> list[Input]:
    """The inputs that a problem names, read in a process of its own behind the same walls."""
    process = Process(bounds, "torch", HOST.platform)
    try:
        process.begun()
        return process.inputs(str(problem))
    except Ended as e:
        raise SpecError(f"judge: the inputs of --problem {problem.name} cannot be read: {e}") from None
    finally:
        process.end()
        os.close(process.log)


def _changed(before: Hashes, after: Hashes) -> tuple[str, ...]:
    """What a report says of files that changed meanwhile.

    Raises:
      UnavailableError: of what is imported: the hashes are those of other bytes than what was judged.
    """
    changed = before.changed(after)
    judged = [n for n in changed if n in [*before.files][:1] or Path(n).suffix in set(IMPORTED) - {".pyc"}]
    if judged:
        raise UnavailableError(f"judge: {', '.join(judged)} changed during the check; run it again")
    return (f"changed while it was judged: {', '.join(changed)}",) if changed else ()


BYTES_OF_AN_ELEMENT = 128
"""What the judge takes at its height for each element of the inputs: as they are drawn, as the oracle has them, its
steps and the bound's. 100 were seen of one row of softmax, layernorm and rmsnorm."""


def _shapes_of_a_case(spec: Spec[Any], case: str) -> Mapping[str, Sequence[int]]:
    try:
        return getattr(printed.read(spec, case), "shapes", {})
    except (ValueError, OverflowError, MemoryError) as e:
        if isinstance(e, SpecError):
            raise
        raise SpecError(f"judge: --case is no call of {spec.name}: {e}; expected the line that was printed") from None


MOST = 1 << 48
"""Elements of an array, at most: of more NumPy makes not even a view."""


def _check_extents(shapes: Any) -> None:
    """SpecError where a call that somebody named is empty, or of more elements than there are; what is no shape is told
    by whoever takes it."""
    for one in shapes if isinstance(shapes, Sequence) else ():
        for name, shape in one.items() if isinstance(one, Mapping) else ():
            found = [n for n in shape if type(n) is int] if isinstance(shape, Sequence) else []
            if any(n < 1 for n in found) or math.prod(found) > MOST:
                said = ", ".join(str(n) if n.bit_length() < 99 else "a longer number" for n in found)
                raise SpecError(f"judge: shapes give {name} [{said}]; expected extents from 1 up, of 2^48 in all")


def _check_memory(shapes: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """SpecError where a call of these shapes would take the judge more memory than there is: nothing else limits what
    the asker's own process takes."""
    for one in shapes:
        there, wanted = _memory(), BYTES_OF_AN_ELEMENT * sum(math.prod(shape) for shape in one.values())
        if wanted > there:
            raise SpecError(
                f"judge: a call of {', '.join(f'{n} {[*s]}' for n, s in one.items())} takes the judge about "
                f"{wanted / 2**30:,.0f} GiB, and {there / 2**30:.1f} GiB are there; expected smaller ones: --shapes "
                "names them"
            )


def _memory() -> int:
    """Bytes that a process can have here: what the system has left, or its control group."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            group = Path("/sys/fs/cgroup")
            found.append(int((group / most).read_text()) - int((group / used).read_text()))
    return min(found)


def _file(file: str | Path) -> Path:
    path = Path(file).resolve()
    if not path.is_file():
        raise SpecError(f"judge: {str(file)!r} is not a file; expected a Python file or a compiled extension")
    return path


def _of_a_problem(
    stem: str, op: str | Spec[Any] | None, map: str | None
) -> tuple[str | Spec[Any], str, Mapping[str, str]]:
    """The op and the mapping, those of a known problem where nobody says others, and what that problem's own reference
    does not do on an accelerator: ``aligned`` or ``edges`` -> why (:func:`_on_its_terms`)."""
    known = tomllib.loads(Path(__file__).with_name("problems.toml").read_text()).get(stem, {})
    if op is None and not known:
        raise SpecError(f"judge: {stem} is not a known problem; name the op that it should compute with --op")
    same = op is None or op == known.get("op") or getattr(op, "name", op) == known.get("op")
    known = known if same else {}
    return op or known["op"], map if map is not None else known.get("map", ""), known


def _on_its_terms(
    check_options: CheckOptions, words: tuple[str, ...], terms: Mapping[str, str], target: Target
) -> tuple[CheckOptions, tuple[str, ...]]:
    """What is asked, and what a report says of it, of a problem whose own reference, on an accelerator, takes no
    shifted arrays (``aligned``; unless somebody named a layout) or leads infinities elsewhere than the formula
    (``edges``)."""
    if target.platform == HOST.platform:
        return check_options, words
    if (why := terms.get("aligned")) and check_options.layouts is LAYOUTS:
        check_options, words = replace(check_options, layouts="contiguous"), (*words, f"no array is shifted: {why}")
    if (why := terms.get("edges")) and check_options.edges:
        check_options, words = (
            replace(check_options, edges=False),
            (*words, f"NaN and infinities may lead elsewhere: {why}"),
        )
    return check_options, words


def _check_walls(bounds: Bounds) -> None:
    """SpecError where a wall that is to be left out is none, or always stands."""
    if not bounds.without:
        return
    from portakern.tools.judge.walls import WALLS  # of Linux alone

    optional = [w for w in WALLS if w != "session"]
    for name in bounds.without:
        if name not in optional:
            raise SpecError(f"judge: {name!r} cannot be omitted; expected some of {', '.join(optional)}")


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
        f"judge: {library} finds the {target.platform} device, but its driver does not start under the candidate's "
        f"protections ({', '.join(walls)}). If 'files' is the cause, omit it with --without files: the verdict then "
        "says that it is missing. Do this only with a trusted candidate, or on a separate machine"
        + (f". The driver's message: {process.why}" if process.why else "")
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


def _shapes(
    spec: Spec[Any],
    shapes: Sequence[Mapping[str, Sequence[int]]] | None,
    candidate_shapes: Mapping[str, Sequence[int]],
    slots: Mapping[str, Slot],
    fixed: Mapping[str, Any],
) -> Sequence[Mapping[str, Sequence[int]]]:
    """The calls' shapes in the op's terms, with the optional arrays that were mapped."""
    required = [a.name for a in spec.arrays if not a.optional]
    if shapes is None:
        if not all(n in candidate_shapes for n in required):
            return []
        views = {
            n: slots[n].views.of_shape(candidate_shapes[n]) if n in slots else tuple(candidate_shapes[n])
            for n in required
        }
        shapes = [views]
    mapped = [a.name for a in spec.arrays if a.optional and a.name in slots]
    return [given_optional(spec, s, mapped, fixed) for s in shapes]


def _cut(
    spec: Spec[Any], shapes: Sequence[Mapping[str, Sequence[int]]], fixed: Mapping[str, Any], target: Target
) -> tuple[Sequence[Mapping[str, Sequence[int]]], tuple[str, ...]]:
    """The shapes cut to calls that are quick, and what a report says of it."""
    kind = "cpu" if target.platform == HOST.platform else "accelerator"
    found = [cut_to(spec, s, fixed, ELEMENTS[kind], FLOPS[kind]) for s in shapes]
    words = tuple(
        f"reduced from {', '.join(f'{n} {[*s]}' for n, s in was.items())} along independent dimensions"
        for was, now in zip(shapes, found, strict=True)
        if {n: tuple(s) for n, s in was.items()} != now
    )
    return found, words


def _line(
    file: str,
    name: str,
    spec: Spec[Any],
    mapped: str,
    problem: str | Path | None,
    framework: str,
    device: str,
    seed: int,
) -> Callable[[str], str]:
    """The line for a shell that judges a case again, or without it the cases of this seed."""
    given = {"map": mapped, "problem": str(problem or ""), "framework": framework, "device": device}
    command = f"{environment(frameworks()[framework])}portakern judge {shlex.quote(f'{file}:{name}')} --op {spec.name}"
    command += "".join(f" --{k} {shlex.quote(v)}" for k, v in given.items() if v)
    command += f" --seed {seed}"
    return lambda case: f"{command} --case {shlex.quote(case)}"
