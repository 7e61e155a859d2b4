"""Faults of Gluon's kernels, whose threads the host runs."""

from __future__ import annotations

from typing import Any

from tests.mutants.faults import Planted


def on_host(within: str, faults: dict[str, tuple[Any, ...]]) -> list[Planted]:
    """What it is -> the case that shows it, text and replacement, and how often the text occurs where that is more than
    once."""
    return [
        Planted(
            what.replace(" ", "-"), what, old, new, times=int(*times or (1,)), sample=True, case=case, within=within
        )
        for what, (case, old, new, *times) in faults.items()
    ]
