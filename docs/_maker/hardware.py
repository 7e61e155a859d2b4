"""The table of hardware that tilings, compile matrix and rooflines read, as a page."""

from __future__ import annotations

from maint.markdown import NONE, table
from portakern.core.targets import HARDWARE, Hardware

SAYS = """# Hardware

What a kernel may use on each target, and what the chip can do, as `portakern.core.targets` has it: nothing else in
portakern states such a number. A dash is a figure that no document of the maker's settles; the notes say why.
"""


def _figure(value: object) -> str:
    if value is None:
        return NONE
    if isinstance(value, tuple):
        return ", ".join(value) or NONE
    return (
        f"{value:,.4g}"
        if isinstance(value, float) and value < 1e6
        else f"{value:.4g}"
        if value >= 1e6
        else f"{value:,}"
    )  # type: ignore[operator]


def page() -> str:
    """A section a target: figures with their sources, and notes."""
    return "\n\n".join([SAYS, *map(_section, HARDWARE.values())]) + "\n"


def _section(chip: Hardware) -> str:
    rows = [[f"`{n}`", _figure(v), chip.sources.get(n, NONE)] for n, v in chip.figures.items() if n not in chip.notes]
    notes = "\n".join(f"* `{name}`: {text}" for name, text in chip.notes.items())
    return f"## {chip.name}: {chip.product}\n\n{table(['figure', 'value', 'source'], rows, words=3)}\n\n{notes}"
