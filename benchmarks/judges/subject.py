"""What is judged, and how a rule calls it: with arrays in the framework of its own, each in memory of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.framework import frameworks
from portakern.spec import Spec
from portakern.testing.verdict import PROMISES

__all__ = ["EXPECTED", "OWN", "Candidate", "Raised", "Subject", "Trial"]


class Raised(Exception):
    """The candidate raised an error, or what came back is no result at all."""


EXPECTED = ("inputs", "outside", "own_memory", "kept")
"""What is promised without a word: nothing is written to but results, and those stay as they are."""

OWN = tuple(name for name in PROMISES if name != "sums")
"""What faults in portakern's own kernels are held to: all that those promise, but for the bounds, which are those that
anybody's kernel gets, of sums in any order."""


@dataclass(frozen=True)
class Subject:
    """A function with an op's arguments, or some of them.

    Attributes:
      group: where it comes from; name: unique in its group.
      op: what it says it computes.
      make: the function, in the state of a new process.
      framework: whose arrays it takes.
      right: nothing is wrong with it: a rule that rejects it raises a false alarm.
      kind: of a cheat, which one.
      asked: how portakern's checker is asked, beside ``fn``: concessions, shapes, or the backend that runs it. Unless
        it says otherwise, a subject is held to EXPECTED.
    """

    group: str
    name: str
    op: str
    make: Callable[[], Callable[..., Any]]
    framework: str = "numpy"
    right: bool = False
    kind: str = ""
    asked: Callable[[], Mapping[str, Any]] = field(default=dict)

    @property
    def spec(self) -> Spec[Any]:
        return registry.find_spec(self.op)


@dataclass(frozen=True)
class Trial:
    """One call that a rule made and let pass, with the values that came back."""

    arrays: Mapping[str, np.ndarray]
    options: Mapping[str, Any]
    values: Sequence[np.ndarray]


class Candidate:
    """A subject under a rule, in one state from the first call to the last."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.spec = subject, subject.spec
        self.fn = subject.make()
        self.framework = frameworks()[subject.framework]
        self.framework.load()
        parameters = inspect.signature(self.fn).parameters.values()
        every = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.known = None if every else {p.name for p in parameters}

    def taken(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Without the optional arrays that the function does not have: a harness would have no task with them."""
        optional = {a.name for a in self.spec.arrays if a.optional}
        return {n: a for n, a in arrays.items() if n not in optional or self.known is None or n in self.known}

    def given(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The arrays in the function's framework, in memory that they share with nobody."""
        return {n: self.framework.copied(a, None) for n, a in arrays.items()}

    def __call__(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
        """The wanted outputs as they come back. Required arrays go by position, the others by name.

        Raises:
          Raised: whatever the candidate did.
        """
        positional = [given[a.name] for a in self.spec.arrays if not a.optional]
        named = {a.name: given[a.name] for a in self.spec.arrays if a.optional and a.name in given}
        told = {n: v for n, v in options.items() if self.known is None or n in self.known}
        wants = bind(self.spec, *positional, **named, **told).wants
        try:
            with np.errstate(all="ignore"):
                result = self.fn(*positional, **named, **told)
        except Exception as e:
            raise Raised(f"raised {type(e).__name__}: {e}") from e
        outputs = tuple(o for o in result if o is not None) if isinstance(result, tuple) else (result,)
        if len(outputs) != len(wants) or not all(map(self.framework.owns, outputs)):
            told_of = ", ".join(type(o).__name__ for o in outputs)
            raise Raised(f"{told_of} came back; expected {len(wants)} {self.framework.name} arrays")
        return outputs

    def shown(self, outputs: Sequence[Any]) -> list[np.ndarray]:
        """Outputs as NumPy sees them; views, where the memory is the host's."""
        return [self.framework.to_numpy(o) for o in outputs]
