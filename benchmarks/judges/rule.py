"""What rules share: tasks, references in a framework's own arithmetic, comparisons, and how a verdict comes about."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.judges.subject import Candidate, Raised, Subject, Trial
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.framework import frameworks
from portakern.core.gradients import wiring
from portakern.spec.dtypes import numpy_dtype
from portakern.testing import Broken, compare_call
from tests.ops import record

__all__ = [
    "COMMON",
    "Given",
    "NotJudged",
    "Rejected",
    "Rule",
    "Source",
    "Task",
    "Verdict",
    "allclose",
    "constant",
    "eager",
    "normal",
    "tensor",
    "uniform",
]

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


class Rejected(Exception):
    """The rule rejects a candidate; the message says why, in its terms."""


class NotJudged(Exception):
    """The rule has nothing to say about a candidate; the message says why."""


@dataclass(frozen=True)
class Source:
    """Where a rule is published. ``at``: a commit, or the date of what has none."""

    repository: str
    path: str
    at: str


# ---------------------------------------------------------------------------------------------------------------- tasks
def normal(scale: float = 1.0, shift: float = 0.0) -> Draw:
    return lambda rng, shape: shift + scale * rng.standard_normal(shape)


def uniform(low: float = 0.0, high: float = 1.0) -> Draw:
    return lambda rng, shape: rng.uniform(low, high, shape)


def constant(value: float) -> Draw:
    return lambda rng, shape: np.full(shape, value)


@dataclass(frozen=True)
class Task:
    """A call that a harness makes.

    Attributes:
      op: of a forward op; shapes: argument -> shape.
      dtype: of all arrays.
      draw: how values are drawn; special: argument -> the same for that one.
      options: of the call.
      own: the harness's name for it; empty where it has no such task, and its rule is applied to a common shape.
      cut: which extents were made smaller so that a CPU computes it.
    """

    op: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    draw: Draw
    special: Mapping[str, Draw] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    own: str = ""
    cut: str = ""

    def arrays(self, rng: np.random.Generator, names: Sequence[str] | None = None) -> dict[str, np.ndarray]:
        """New values for the arguments, or for those that are named."""
        kind = numpy_dtype(self.dtype)
        return {
            n: np.asarray(self.special.get(n, self.draw)(rng, s)).astype(kind)
            for n, s in self.shapes.items()
            if names is None or n in names
        }


COMMON: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "softmax": {"x": (8, 4096)},
    "logsumexp": {"x": (8, 4096)},
    "rmsnorm": {"x": (8, 4096), "weight": (4096,)},
    "layernorm": {"x": (8, 4096), "weight": (4096,), "bias": (4096,)},
    "swiglu": {"gate": (8, 4096), "up": (8, 4096)},
    "matmul": {"a": (32, 2048), "b": (2048, 32)},
    "attention": {"q": (1, 16, 2, 64), "k": (1, 1280, 2, 64), "v": (1, 1280, 2, 64)},
}
"""Shapes for an op that a harness has no task for."""


def tasks_of(own: Sequence[Task], dtype: str, draw: Draw) -> Mapping[str, tuple[Task, ...]]:
    """Op -> tasks: the harness's own, and for other ops the common shape with its dtype and distribution."""
    found: dict[str, tuple[Task, ...]] = {op: (Task(op, shapes, dtype, draw),) for op, shapes in COMMON.items()}
    return found | {t.op: tuple(o for o in own if o.op == t.op) for t in own}


# ----------------------------------------------------------------------------------------------------------- references
def tensor(array: np.ndarray) -> Any:
    """A PyTorch tensor over an array's memory, or over a copy where that cannot be written to."""
    return frameworks()["torch"].from_numpy(array if array.flags.writeable else array.copy(), None)


def forward_in_torch(op: str, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Output -> tensor of a forward op in PyTorch's own arithmetic."""
    spec = registry.find_spec(op)
    result = record(op).in_torch(*(tensors.get(a.name) for a in spec.arrays), **options)
    given = result if isinstance(result, tuple) else (result,)
    names = [o.name for o in spec.outputs if not o.wanted_by or options.get(o.wanted_by)]
    return dict(zip(names, (y for y in given if y is not None), strict=True))


def wide(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Tensors in float32 for 16-bit arrays: GPUs add up in float32 what PyTorch adds up in 16 bits on a CPU."""
    return {n: tensor(a).float() if a.dtype.itemsize < 4 else tensor(a) for n, a in arrays.items()}


def eager(given: Given, options: Mapping[str, Any]) -> list[Any]:
    """What PyTorch computes, rounded to the dtypes of the op's outputs: the tensors that the wanted outputs are
    compared with. Of a gradient op, PyTorch's own derivative of its forward."""
    import torch

    spec, call = given.spec, bind(given.spec, **given.arrays, **options)
    if spec.is_vjp:
        forward = registry.forward_of(spec)
        assert forward is not None
        wired = wiring(forward)
        inputs = {n: t.clone().requires_grad_() for n, t in wide(given.first).items()}
        outputs = forward_in_torch(forward.name, inputs, options)
        cotangents = wide({n: given.arrays[wired.cotangents[n]] for n in outputs})
        sought = [inputs[n.removeprefix("d_")] for n in call.wants]
        results = list(torch.autograd.grad(list(outputs.values()), sought, list(cotangents.values())))
    else:
        results = list(forward_in_torch(spec.name, wide(given.arrays), options).values())
    return [y.detach().to(getattr(torch, call.outputs[n][1])) for n, y in zip(call.wants, results, strict=True)]


@dataclass(frozen=True)
class Given:
    """The arrays of a call. ``first``: of a gradient op, those of its forward's call."""

    spec: Any
    arrays: Mapping[str, np.ndarray]
    first: Mapping[str, np.ndarray]


def allclose(want: Any, value: np.ndarray, tolerance: float) -> bool:
    """``torch.allclose``, which raises where dtypes differ: a harness counts that as a failure."""
    import torch

    try:
        return torch.allclose(want, tensor(value), rtol=tolerance, atol=tolerance)
    except RuntimeError as e:
        raise Rejected(str(e)) from None


def arguments(task: Task, candidate: Candidate, rng: np.random.Generator) -> Given:
    """New arrays for a candidate's call of a task. For a gradient: the forward's arguments and what its reference
    saved, and cotangents drawn as the task's values are."""
    spec, drawn = candidate.spec, task.arrays(rng)
    if not spec.is_vjp:
        arrays = candidate.taken(drawn)
        return Given(spec, arrays, arrays)
    forward = registry.forward_of(spec)
    assert forward is not None
    wired = wiring(forward)
    known = {a.name: a for a in spec.arrays}
    spared = drawn.keys() - candidate.taken({n: a for n, a in drawn.items() if n in known}).keys() & known.keys()
    first = {n: a for n, a in drawn.items() if n not in spared or n not in known}
    saving = {o.wanted_by: True for o in forward.outputs if o.wanted_by and o.name in wired.outputs}
    call = bind(forward, **first, **task.options, **saving)
    made = forward_in_torch(forward.name, wide(first), {**task.options, **saving})
    saved = {n: y.numpy().astype(numpy_dtype(call.outputs[n][1])) for n, y in made.items()}
    cotangents = {
        argument: np.asarray(task.draw(rng, saved[n].shape)).astype(saved[n].dtype)
        for n, argument in wired.cotangents.items()
        if not known[argument].optional
    }
    return Given(spec, {n: a for n, a in {**first, **saved, **cotangents}.items() if n in known}, first)


def options_of(task: Task, candidate: Candidate) -> dict[str, Any]:
    known = {o.name for o in candidate.spec.options}
    return {n: v for n, v in task.options.items() if n in known}


# ---------------------------------------------------------------------------------------------------------------- rules
@dataclass(frozen=True)
class Verdict:
    """What a rule said.

    Attributes:
      rejected: None where it did not judge; why: in its terms.
      shown: of a wrong candidate that passed: some value that the rule looked at lies beyond the error that rounding
        can cause. None where that is not asked.
      seconds: that the rule took.
    """

    rejected: bool | None
    why: str
    seconds: float
    shown: bool | None = None


class Rule(ABC):
    """How one harness judges.

    Attributes:
      name: short and unique; title: the harness's name.
      sources: where it is published.
      rule: what decides, in a sentence or two; inputs: what the candidate is called with; blind: what is not looked at.
      gradients: the harness judges gradients of its own; otherwise its comparison is applied to them all the same.
    """

    name: str
    title: str
    sources: tuple[Source, ...]
    rule: str
    inputs: str
    gradients = False
    tasks: Mapping[str, tuple[Task, ...]]

    def own(self, op: str) -> bool:
        """Whether the harness has a task for an op."""
        return any(t.own for t in self.tasks.get(op, ()))

    def tasks_for(self, candidate: Candidate) -> tuple[Task, ...]:
        forward = registry.forward_of(candidate.spec) if candidate.spec.is_vjp else candidate.spec
        found = self.tasks.get(forward.name if forward else "", ())
        if not found:
            raise NotJudged(f"no task for {candidate.spec.name}")
        posed = tuple(t for t in found if self.takes(candidate, t))
        first = found[0]  # a function without a task's options is asked what it can be asked
        return posed or (Task(first.op, COMMON[first.op], first.dtype, first.draw),)

    def takes(self, candidate: Candidate, task: Task) -> bool:
        """Whether a function has the options of a task: without a causal mask it is right to compute another."""
        return candidate.known is None or options_of(task, candidate).keys() <= candidate.known

    @abstractmethod
    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        """Judge: the calls that passed, one after the other; Rejected ends it."""

    def judge(self, subject: Subject) -> Verdict:
        """The verdict on a subject in the state of a new process. What a candidate raises rejects it; what the rule
        itself raises is an error here, and no verdict."""
        start = time.perf_counter()

        def said(rejected: bool | None, why: str) -> Verdict:
            return Verdict(rejected, " ".join(why.split())[:200], round(time.perf_counter() - start, 4))

        passed: list[Trial] = []
        try:
            passed.extend(self.trials(Candidate(subject)))
        except NotJudged as e:
            return said(None, str(e))
        except (Rejected, Raised) as e:
            return said(True, str(e))
        verdict = said(False, "")
        return verdict if subject.right else replace(verdict, shown=beyond(subject, passed))


def beyond(subject: Subject, trials: Sequence[Trial]) -> bool:
    """Whether a value among those that a rule let pass lies beyond the derived bound."""
    for trial in trials:
        call = bind(subject.spec, **trial.arrays, **trial.options)
        try:
            compare_call(call, [np.asarray(v) for v in trial.values], {}, "")
        except Broken:  # a wrong shape too, and typical errors that rounding does not explain
            return True
    return False
