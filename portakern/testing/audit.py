"""Compare every op call of a running program with its error bound."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from portakern.core.observe import Served, observe
from portakern.testing.verdict import Broken, compare_call

__all__ = ["Audit", "audit"]


@dataclass
class Audit:
    """The result of an audit.

    Attributes:
      calls: (op, backend) -> number of calls served.
      worst: op -> largest error / error bound of any element.
      broken: descriptions of outputs that exceed their bound.
      seconds: time of the audit itself.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def see(self, served: Served) -> None:
        start = time.perf_counter()
        call = served.call
        self.calls[call.spec.name, served.backend] += 1
        try:
            outputs = [call.framework.to_numpy(o) for o in served.outputs if o is not None]
            fractions = compare_call(call, outputs)
            self.worst[call.spec.name] = max(self.worst[call.spec.name], *fractions.values())
        except Broken as e:
            self.broken.append(f"{call!r} on {served.backend}: {e}")
        self.seconds += time.perf_counter() - start


@contextmanager
def audit() -> Iterator[Audit]:
    """A context in which every eager op call is compared with the oracle.

    >>> with audit() as seen:
    ...     model(x)
    >>> seen.worst, seen.broken
    """
    result = Audit()
    with observe(result.see):
        yield result
