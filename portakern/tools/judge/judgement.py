"""The judge: find the candidate in its file, draw its calls, run them in its process, and report the verdict."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import secrets
import shlex
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from portakern.tools.judge.process import Process, ProcessLimits, within
from portakern.tools.judge.remote import Remote, signature_of
from portakern.tools.judge.wire import Input, Problem

__all__ = ["PROMISES", "Judgement", "candidate_subject", "judge"]

PROMISES = ("inputs", "outside", "own_memory", "kept")
"""The promises that are checked by default; others are checked if they are named."""

LAYOUTS = ("contiguous", "shifted")
ELEMENTS = {"cpu": 1 << 20, "accelerator": 1 << 21}
"""Elements of the largest array of a reduced call. On an accelerator the judge's own work limits the cases: the host
draws, copies and compares each case, a second for 2^24 elements, and 60 cases should fit into 15 seconds."""

FLOPS = {"cpu": 2e9, "accelerator": 1e13}


@dataclass
class Judgement:
    """The result of :func:`judge`.

    Attributes:
      report: the verdict (``report.outcome``), what was checked, what was not required, and the failures.
      file, name, sha256: the judged file, the name in it, and the file's hash; device: where it ran.
      hashes: hashes of the file, of the other files of its folder, of the problem and of what that imports.
      problem: the file whose inputs gave the shapes; "" if the caller gave shapes, or none.
      protections: names of the protections in force (:data:`portakern.tools.judge.sandbox.PROTECTIONS`).
      printed: the end of the output of the candidate's process.
      seconds: wall time; load_seconds: its share for the start of the process and the import of the candidate.
    """

    report: Report
    file: str
    name: str
    sha256: str = ""
    device: str = ""
    hashes: Hashes = field(default_factory=Hashes)
    problem: str = ""
    protections: list[str] = field(default_factory=list)
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
    full_shapes: bool = False,
    dtypes: Sequence[str] | None = None,
    layouts: str | Sequence[str] | None = LAYOUTS,
    options: Mapping[str, Any] | None = None,
    edges: bool = True,
    promises: bool | Collection[str] = PROMISES,
    max_examples: int = EXAMPLES,
    seed: int | None = None,
    seconds: float = 15.0,
    process_limits: ProcessLimits | None = None,
    case: str | None = None,
) -> Judgement:
    """Check a candidate against an op's spec, in a process of its own that cannot change the verdict.

    Args:
      file: a Python file, or a compiled extension (``.so``); name: the name of a function, of a ``torch.nn.Module`` in
        KernelBench's form, or ``namespace::op`` in an extension; None: the only one in the file.
      op: the op's name or spec; map: how its arguments map to the candidate's (:mod:`portakern.tools.judge.mapping`).
        None: those of a known problem of KernelBench (``problems.toml``).
      problem: the file with ``get_inputs`` and ``get_init_inputs``. Its inputs are read in a process without the
        candidate, whose own ``get_inputs`` is not read: a module that needs one is refused without a problem or shapes.
      framework: numpy, torch or jax; None: the one that the file imports. device: cpu, cuda, rocm or tpu.
      shapes: shapes of all calls; None: those of the problem, or any.
      full_shapes: False: large calls are reduced along dimensions that no sum runs over, until they are quick; the
        report has both shapes.
      dtypes, layouts, options, edges, promises, max_examples, seed: as for :func:`portakern.check`. Without a seed a
        random one is drawn. Default layouts: contiguous and shifted, or contiguous alone on an accelerator if the
        problem's own reference refuses shifted arrays.
      seconds: time after the first case at which no further case is started.
      process_limits: limits of the candidate's process; case: run this case alone.

    Raises:
      SpecError: an argument is unknown, or the candidate cannot be called this way. UnavailableError: not on Linux, or
        no such device.
    """
    path, source, spec, map, terms = _requested(file, op, map, problem)
    places, fixed = _slots(spec, map)
    which, form, library = _identify(path, name, spec, framework)
    limits, seed = process_limits or ProcessLimits(), _checked_numbers(max_examples, seconds, seed)
    _check_protections(limits)
    if form == "module" and not (source or shapes or case):
        _check_inputs(path)
    line = _line(str(file), which, spec, map, problem, library, device, seed)
    fixed = {**fixed, **(options or {})}
    checks = CheckOptions(
        dtypes=dtypes, max_examples=max_examples, seed=seed, shapes=shapes, layouts=layouts, options=fixed, empty=False,
        one_dtype=True, edges=edges, promises=promises, seconds=seconds, shrink=False,
    )  # fmt: skip
    judged = Judgement(Report(spec.name, "", seed), str(file), which, device=device, problem=str(problem or ""))
    start, process = time.perf_counter(), Process(limits, library, device)
    try:
        target = _target(library, device)
        asked = _inputs_of(source, limits) if source else Problem()
        files = path, source, [Path(b) for b in asked.beside]
        judged.hashes = hashed = hashes(*files)
        judged.sha256 = next(iter(hashed.files.values()))
        candidate = _Candidate(spec, path, source, which, form, library, target, places, fixed, line, asked.inputs)
        judged.device = str(target)
        judged.report = _judged(
            candidate, process, checks, terms, full_shapes, case, lambda: _note_start(judged, start)
        )
    finally:
        process.end()
        judged.protections, judged.printed = process.protections, process.printed()
        os.close(process.log)
    judged.report.not_required += _changed(hashed, hashes(*files))
    judged.seconds = time.perf_counter() - start
    return judged


@contextlib.contextmanager
def candidate_subject(
    file: str | Path,
    op: str | Spec[Any] | None = None,
    *,
    name: str | None = None,
    map: str | None = None,
    problem: str | Path | None = None,
    framework: str | None = None,
    device: str = "cpu",
    process_limits: ProcessLimits | None = None,
) -> Iterator[tuple[Subject, Mapping[str, Any]]]:
    """(a candidate in a process of its own, the options that are built into it), for checks other than the judge's.
    Arguments as for :func:`judge`.

    Raises:
      SpecError: an argument is unknown, the candidate cannot be called this way, or ends before its first call.
    """
    path, source, spec, map, _ = _requested(file, op, map, problem)
    places, fixed = _slots(spec, map)
    which, form, library = _identify(path, name, spec, framework)
    limits = process_limits or ProcessLimits()
    _check_protections(limits)
    process = Process(limits, library, device)
    try:
        target = _target(library, device)
        asked = _inputs_of(source, limits) if source else Problem()
        line = _line(str(file), which, spec, map, problem, library, device, 0)
        made = _Candidate(spec, path, source, which, form, library, target, places, fixed, line, asked.inputs)
        try:
            _begin(process, library, target)
            subject = made.loaded(process)
        except Ended as e:
            raise SpecError(f"{made.called} ended before its first call: {advised(str(e))}") from None
        yield subject, fixed
    finally:
        process.end()
        os.close(process.log)


def _note_start(judged: Judgement, start: float) -> None:
    judged.load_seconds = round(time.perf_counter() - start, 2)


def _judged(
    candidate: _Candidate,
    process: Process,
    check_options: CheckOptions,
    terms: Mapping[str, str],
    full_shapes: bool,
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
        check_options, words = _on_its_terms(
            *candidate.on_its_shapes(check_options, full_shapes), terms, candidate.target
        )
        report = check_subject(subject, check_options)
        report.not_required += words
    except Ended as e:
        line = candidate.line("").partition(" --case")[0]
        failure = Failure(spec.name, f"before any case: {advised(str(e))}", "", line, e.kind)
        report = Report(spec.name, candidate.called, check_options.seed, failures=[failure])
    except MemoryError:
        raise UnavailableError("judge: the judge ran out of memory; pass smaller --shapes, or free memory") from None
    return report


@dataclass(frozen=True)
class _Candidate:
    """A candidate: its file and name, kind (function or module), array library and target; ``slots`` and ``fixed``:
    how it is called, and its built-in options; ``line``: the command that judges a case of it again; ``inputs``: the
    inputs that the problem defines."""

    spec: Spec[Any]
    path: Path
    problem: Path | None
    name: str
    kind: str
    library: str
    target: Target
    slots: Mapping[str, Slot]
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
            slot = self.slots.get(name)
            at = i if slot is None else slot.position
            if at is not None and at < len(shapes):
                found[name] = shapes[at]
        if found and self.slots:  # an output that is flattened has the shape of the first array
            for o in self.spec.outputs:
                found.setdefault(o.name, found[next(iter(found))])
        return found

    def loaded(self, process: Process) -> Subject:
        """What the checker checks."""
        spec, slots = self.spec, self.slots
        parameters = process.load({
            "file": str(self.path), "name": self.name, "form": self.kind, "problem": str(self.problem or ""),
            "required": [a.name for a in spec.arrays if not a.optional],
            "places": {n: {"position": p.position, "keyword": p.keyword, "parameter": p.parameter}
                       for n, p in slots.items()},
        })  # fmt: skip
        signature = signature_of(spec, parameters, slots, self.name)
        remote = Remote(process, spec, slots, self.fixed, self.candidate_shapes, signature)
        subject = function_subject(spec, remote, "numpy", None)
        return replace(subject, target=self.target, remote=True, name=self.called, reproduce=self.line)

    def on_its_shapes(self, check_options: CheckOptions, full_shapes: bool) -> tuple[CheckOptions, tuple[str, ...]]:
        """(the check's options with the caller's shapes or the problem's, reduced to quick calls; the report's words on
        what that leaves out)."""
        spec, words = self.spec, tuple[str, ...]()
        if check_options.shapes is not None:
            _check_extents(check_options.shapes)
            checked_shapes(spec, check_options.shapes, self.fixed)
        shapes = _shapes(spec, check_options.shapes, self.candidate_shapes, self.slots, self.fixed)
        if shapes and not full_shapes:
            shapes, words = _cut(spec, shapes, self.fixed, self.target)
        _check_memory(shapes)
        dtypes = check_options.dtypes
        if dtypes is None and self.inputs and self.inputs[0].dtype in spec.dtypes:
            dtypes = [self.inputs[0].dtype]
            words = (*words, f"dtypes other than {dtypes[0]}, that of the problem's inputs")
        if self.problem == self.path:
            words = (*words, "inputs other than those of the candidate's own file, which may be easy")
        return replace(check_options, dtypes=dtypes, shapes=shapes or None), words


def _checked_numbers(max_examples: int, seconds: float, seed: int | None) -> int:
    """The seed: one that nobody knows before, where none is named. A table of results by the hashes of inputs would be
    right on a seed that is always the same."""
    within("max_examples", max_examples, 1, 100_000, integer=True)
    within("seconds", seconds, 1e-3, 1e6)
    if seed is None:
        return secrets.randbits(32)
    within("seed", seed, 0, 2**63, integer=True)
    return seed


def _check_inputs(path: Path) -> None:
    """SpecError if the candidate's own file defines its inputs: it would choose its own calls."""
    defined = [n.name for n in ast.parse(path.read_bytes()).body if isinstance(n, ast.FunctionDef)]
    if "get_inputs" in defined:
        raise SpecError(
            f"judge: {path.name} has its own get_inputs, which is not used: a candidate does not choose its inputs. "
            f"Give the problem's file with --problem, or shapes with --shapes. --problem {path.name} uses its own "
            "inputs, and the verdict says so"
        )


def _inputs_of(problem: Path, limits: ProcessLimits) -> Problem:
    """The inputs that a problem defines, read in a process of its own under the same protections."""
    process = Process(limits, "torch", HOST.platform)
    try:
        process.begun()
        return process.problem(str(problem))
    except Ended as e:
        raise SpecError(f"judge: the inputs of --problem {problem.name} cannot be read: {e}") from None
    finally:
        process.end()
        os.close(process.log)


def _changed(before: Hashes, after: Hashes) -> tuple[str, ...]:
    """The report's words on files that changed during the check.

    Raises:
      UnavailableError: a file that the candidate imports changed: the hashes are not those of the judged files.
    """
    changed = before.changed(after)
    judged = [n for n in changed if n in [*before.files][:1] or Path(n).suffix in set(IMPORTED) - {".pyc"}]
    if judged:
        raise UnavailableError(f"judge: {', '.join(judged)} changed during the check; run it again")
    return (f"unchanged files (changed during the check): {', '.join(changed)}",) if changed else ()


BYTES_OF_AN_ELEMENT = 128
"""What the judge takes at its height for each element of the inputs: as they are drawn, as the oracle has them, its
steps and the bound's. 100 were seen of one row of softmax, layernorm and rmsnorm."""


def _shapes_of_a_case(spec: Spec[Any], case: str) -> Mapping[str, Sequence[int]]:
    try:
        return getattr(printed.read(spec, case), "shapes", {})
    except (ValueError, OverflowError, MemoryError) as e:
        if isinstance(e, SpecError):
            raise
        raise SpecError(
            f"judge: --case is not a call of {spec.name}: {e}; pass the JSON text that a failure printed"
        ) from None


MOST = 1 << 48
"""Elements of an array, at most: of more NumPy makes not even a view."""


def _check_extents(shapes: Any) -> None:
    """SpecError if a given shape is empty or too large. Values that are no shapes are refused where they are used."""
    for one in shapes if isinstance(shapes, Sequence) else ():
        for name, shape in one.items() if isinstance(one, Mapping) else ():
            found = [n for n in shape if type(n) is int] if isinstance(shape, Sequence) else []
            if any(n < 1 for n in found) or math.prod(found) > MOST:
                extents = ", ".join(str(n) if n.bit_length() < 99 else "a longer number" for n in found)
                raise SpecError(
                    f"judge: shapes give {name} [{extents}]; expected extents of at least 1, with at most 2^48 elements"
                )


def _check_memory(shapes: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """SpecError if a call of these shapes needs more memory than this process can have: nothing else limits it."""
    for one in shapes:
        available, wanted = _memory(), BYTES_OF_AN_ELEMENT * sum(math.prod(shape) for shape in one.values())
        if wanted > available:
            raise SpecError(
                f"judge: a call of {', '.join(f'{n} {[*s]}' for n, s in one.items())} needs about "
                f"{wanted / 2**30:,.0f} GiB of the judge's memory, and {available / 2**30:.1f} GiB are available; pass "
                "smaller shapes with --shapes"
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


def _requested(
    file: str | Path, op: str | Spec[Any] | None, map: str | None, problem: str | Path | None
) -> tuple[Path, Path | None, Spec[Any], str, Mapping[str, str]]:
    """The candidate's file and the problem's, the op, the mapping, and what :func:`_of_a_problem` says of the problem's
    own reference."""
    path, source = _file(file), _file(problem) if problem else None
    op, map, terms = _of_a_problem((source or path).stem, op, map)
    return path, source, registry.find_spec(op) if isinstance(op, str) else op, map, terms


def _slots(spec: Spec[Any], map: str) -> tuple[Mapping[str, Slot], Mapping[str, Any]]:
    """What a mapping says of the op's names."""
    return parse(map, [a.name for a in spec.arrays], [o.name for o in spec.outputs], [o.name for o in spec.options])


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
        check_options, words = replace(check_options, layouts="contiguous"), (*words, f"shifted arrays: {why}")
    if (why := terms.get("edges")) and check_options.edges:
        check_options, words = (
            replace(check_options, edges=False),
            (*words, f"the formula's results for NaN and infinities: {why}"),
        )
    return check_options, words


def _check_protections(limits: ProcessLimits) -> None:
    """SpecError if a protection to be omitted is unknown, or cannot be omitted."""
    if not limits.without:
        return
    from portakern.tools.judge.sandbox import PROTECTIONS  # of Linux alone

    optional = [p for p in PROTECTIONS if p != "session"]
    for name in limits.without:
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
    """Have the process import the array library; UnavailableError if the device, which this process reaches, does
    not start under the protections."""
    if process.begun():
        return
    names = [p for p in process.protections if p != "session"]
    raise UnavailableError(
        f"judge: {library} finds the {target.platform} device, but its driver does not start under the candidate's "
        f"protections ({', '.join(names)}). Omit the one that is the cause, as in --without files or --without calls: "
        "the verdict then says that it is missing. Do this only with a trusted candidate, or on a separate machine"
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
            raise SpecError(
                f"judge: {path.name} is compiled; name its function too: {path.name}:name or {path.name}:ns::op"
            )
        return name, "function", framework or "torch"
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise SpecError(f"judge: {path.name} is not valid Python: {e}") from None
    defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    defined += [t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    classes = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
    lone = [f for f in functions if f not in ("get_inputs", "get_init_inputs")]
    likely = [n for n in (*FORMS, spec.name, f"my_{spec.name}", "custom_kernel", "launch") if n in defined] or lone[-1:]
    if name is None and not likely:
        raise SpecError(f"judge: {path.name} defines no function; name one: {path.name}:name")
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
        f"the full shapes {', '.join(f'{n} {[*s]}' for n, s in was.items())} (reduced along independent dimensions)"
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
