"""The profiled call, in this process or in a process that a profiler starts: ``python -m
portakern.tools.profile.subject JSON``."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from portakern.core import registry
from portakern.core.backend import Backend
from portakern.core.targets import Target
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.testing import backend_variants
from portakern.tools.bench.contenders import ELSE, CallNotTaken, Contender, ReadyCall, here, ready
from portakern.tools.bench.inputs import make
from portakern.tools.bench.suites import TimedCase, requested_cases
from portakern.tools.bench.trial import of_gradient

__all__ = ["ProfileRequest", "command", "main", "marked"]


@dataclass(frozen=True)
class ProfileRequest:
    """A call to profile: the typical call of an op in a dtype, with other extents and options in ``shape``. Without a
    backend: the first that compiles the op for a device here."""

    op: str
    dtype: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    variant: str | None = None

    @property
    def case(self) -> TimedCase:
        """The call without arrays.

        Raises:
          SpecError: the op has no such dtype, dimension or option.
        """
        spec = registry.find_spec(self.op)
        if self.dtype not in spec.dtypes:
            raise SpecError(f"{self.op}: dtype {self.dtype!r} is none of {', '.join(spec.dtypes)}")
        return next(c for c in requested_cases(self.op, self.shape, [self.dtype], True) if c.timed == self.op)

    def made(self) -> tuple[ReadyCall, Target]:
        """The call on arrays of a device here, by whoever serves it.

        Raises:
          UnavailableError, UnsupportedError: there is no such device, or the call is refused.
        """
        case, lead = self.case, self._lead()
        framework, device, target = here(lead, None)
        inputs = make(case, framework, device)
        if case.gradient:
            inputs = of_gradient(inputs, lead, lambda inputs: True)
        try:
            return ready(Contender(lead, self.variant, True), inputs), target
        except CallNotTaken as e:
            raise UnsupportedError(f"profile: {lead.name} does not take {inputs.call!r}: {e}") from e

    def _lead(self) -> Backend:
        """Who serves the call."""
        named = [registry.backend(self.backend)] if self.backend else []
        why = []
        for b in named or [b for b in registry.backends().values() if not b.oracle and b.auto]:
            try:
                target = here(b, None)[2]
                backend_variants(registry.find_spec(self.op), b, target.platform)
                return b
            except (UnsupportedError, UnavailableError) as e:  # what else a benchmark could do is not said
                why.append(str(e).partition(f"; {ELSE}")[0].removeprefix("bench: "))
        raise UnsupportedError(f"profile: {'; '.join(why)}")


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """What a profiler that waits for marks is to look at. A library's context is the device's primary one, which this
    thread may not have as its current one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver: a stand-in of the profiler counts without marks
        yield
        return
    context = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        device = ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), 0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        driver.cuCtxSetCurrent(context)
    driver.cuProfilerStart()
    try:
        yield
    finally:
        driver.cuProfilerStop()


def command(request: ProfileRequest) -> list[str]:
    """What runs the call in a process of its own."""
    return [sys.executable, "-m", "portakern.tools.profile.subject", json.dumps(asdict(request))]


def main(text: str) -> None:
    """Make the call twice: once unseen, as compilers run and memory is handed out in it, and once between marks."""
    asked_for = json.loads(text)
    shape = {n: tuple(v) if isinstance(v, list) else v for n, v in asked_for.pop("shape").items()}
    entry, _ = ProfileRequest(**asked_for, shape=shape).made()
    entry.instruments.wait(entry.run())
    with marked():
        entry.instruments.wait(entry.run())


if __name__ == "__main__":
    main(sys.argv[1])
