"""What is judged: planted faults, cheats, right kernels of unusual kinds, and references of a public benchmark."""

from __future__ import annotations

import functools

from benchmarks.judges.subject import Subject

__all__ = ["GROUPS", "subjects"]

GROUPS = ("functions", "cheats", "kernels", "level 1", "unusual", "simulated")


@functools.cache
def subjects() -> dict[tuple[str, str], Subject]:
    """(group, name) -> subject."""
    from benchmarks.judges.corpus import cheats, level_1, planted, right

    every = [*planted.planted(), *cheats.cheats(), *right.unusual(), *level_1.references()]
    found = {(s.group, s.name): s for s in every}
    assert len(found) == len(every), "two subjects have one name"
    return dict(sorted(found.items(), key=lambda item: GROUPS.index(item[0][0])))
