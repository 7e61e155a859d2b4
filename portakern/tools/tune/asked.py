"""The calls that are tuned for: cases of suites as the compilers take them, and what names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from portakern.core import registry
from portakern.spec import Spec
from portakern.tools.bench.suites import TimedCase, shaped
from portakern.tools.compile.forms import Form

__all__ = ["Asked", "of_op"]


@dataclass(frozen=True, eq=False)
class Asked:
    """A call to tune for."""

    case: TimedCase

    @property
    def spec(self) -> Spec[Any]:
        return registry.find_spec(self.case.timed)

    @cached_property
    def form(self) -> Form:
        """The call without arrays."""
        return self.case.form

    @property
    def text(self) -> str:
        """The same for the same call, in any process."""
        case = self.case
        parts = [case.timed, case.dtype, case.dims, case.options, case.given, case.layouts]
        return json.dumps(parts, sort_keys=True, default=str)


def of_op(spec: Spec[Any], dtype: str, given: Mapping[str, Any]) -> Asked:
    """The typical call of an op in a dtype, with some dimensions and options of the user's; of a gradient op the
    gradients of its forward's."""
    forward = registry.forward_of(spec) if spec.is_vjp else None
    case = shaped(forward or spec, given)
    return Asked(replace(case, dtype=dtype, gradient=forward is not None))
