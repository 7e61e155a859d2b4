"""The options of a check: which cases are drawn, and what is checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from portakern.defaults import EXAMPLES
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.spec.options import shown
from portakern.testing.fixed import checked_shapes
from portakern.testing.layouts import DRAWN, LAYOUTS
from portakern.testing.sizes import Limits
from portakern.testing.subject import Subject

__all__ = ["CheckOptions"]

FILL = 2**20  # elements of an array that keeps a large GPU busy
INTERPRETED = 256  # programs of a call where one runs after the other, for some of them tens of milliseconds each
INTERPRETED_LENGTH = 4160  # of its longest extent: what no tile holds
INTERPRETED_TYPICAL = 2**14  # elements of its largest array
EMULATED = Limits(elements=2048, flops=5e5, tile_volume=2**13)
MOST_EXAMPLES = 1_000_000
"""Cases of one check, which lists them before it begins."""


@dataclass(frozen=True)
class CheckOptions:
    """The cases of a check, and what is checked: the arguments of :func:`portakern.check` except those that name the
    implementation. They are documented there."""

    dtypes: Sequence[str] | None = None
    only_edges: Sequence[str] | None = None
    max_examples: int = EXAMPLES
    seed: int = 0
    limits: Limits | None = None
    shapes: Sequence[Mapping[str, Sequence[int]]] | None = None
    layouts: str | Sequence[str] | None = None
    options: Mapping[str, Any] | None = None
    empty: bool = True
    one_dtype: bool = False
    edges: bool = True
    promises: bool | Collection[str] = True
    parts: int | None = None
    seconds: float | None = None
    shrink: bool = True
    shard: tuple[int, int] = (0, 1)
    progress: Callable[[int], None] | None = None
    until: float | None = None
    """Time of time.time() after which no case is started."""

    def __post_init__(self) -> None:
        n = self.max_examples
        if type(n) is not int or not 0 <= n <= MOST_EXAMPLES:
            raise SpecError(
                f"check: max_examples is {shown(n)}; expected a whole number up to {MOST_EXAMPLES}; for more, "
                "run again with another seed"
            )

    def limits_of(self, subject: Subject) -> Limits:
        """The limits that fit the subject."""
        compiled = not (subject.interpret or subject.emulated) and subject.target.platform != "cpu"
        limits = self.limits or (EMULATED if subject.emulated else Limits(fill=FILL if compiled else 0))
        fixed = {**limits.options, **_checked(subject.spec, self.options or {})}
        one_by_one = subject.interpret or subject.emulated
        served = [d for d in subject.spec.dtypes if d not in subject.lacks]
        layouts = (*limits.layouts, "reversed") if {*limits.layouts} == {*DRAWN} else limits.layouts
        return replace(
            limits,
            fill=0 if self.parts else limits.fill,  # no device holds more than a part
            dtypes=tuple(self.dtypes or limits.dtypes or served),
            arguments=subject.arguments if limits.arguments is None else limits.arguments,
            always=limits.always | subject.always,
            programs=limits.programs or (0 if compiled else INTERPRETED),
            longest=min(limits.longest, INTERPRETED_LENGTH) if one_by_one else limits.longest,
            typical_elements=min(limits.typical_elements, INTERPRETED_TYPICAL)
            if one_by_one
            else limits.typical_elements,
            drawn=subject.drawn,
            options=fixed,
            empty=limits.empty and self.empty,
            one_dtype=limits.one_dtype or self.one_dtype,
            layouts=("contiguous",)
            if self.parts
            else _layout_names(subject.spec, self.layouts)
            or (layouts if subject.framework.reverses else limits.layouts),
            shapes=limits.shapes if self.shapes is None else checked_shapes(subject.spec, self.shapes, fixed),
        )


def _checked(spec: Spec[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as backends see them; SpecError where one is unknown or cannot have its value."""
    found = {}
    for name, value in options.items():
        o = next((o for o in spec.options if o.name == name), None)
        if o is None:
            names = ", ".join(o.name for o in spec.options)
            raise SpecError(f"check({spec.name!r}): options name {name!r}; expected some of {names or '(none)'}")
        try:
            found[name] = o.check(value)
        except ValueError:
            raise SpecError(f"check({spec.name!r}): {name} is {shown(value)}; expected {o.expected}") from None
    return found


def _layout_names(spec: Spec[Any], layouts: str | Sequence[str] | None) -> tuple[str, ...]:
    """Layouts by name; SpecError for one that is none."""
    names = (layouts,) if isinstance(layouts, str) else tuple(layouts or ())
    for name in names:
        if name not in LAYOUTS:
            raise SpecError(
                f"check({spec.name!r}): layout {shown(name)} is unknown; expected some of {', '.join(LAYOUTS)}"
            )
    return names
