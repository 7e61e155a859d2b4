"""Which verdicts were given by or on other sources than those that lie here.

A verdict is a rule's on a subject. A rule is its module and what all rules share; portakern's is its checker too. A
subject is the module that makes it, the record and the planted faults of its op, the op's spec and its formula, and of
a fault in a shipped kernel the op's kernels. Comments, docstrings and the names of files do not count.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from benchmarks.judges.rules import rules
from benchmarks.judges.subject import Subject
from portakern import sources
from portakern.core import registry
from portakern.core.targets import HOST

__all__ = ["of_rule", "of_subject"]

SHARED = ("benchmarks/judges/rule.py", "benchmarks/judges/subject.py")
CHECKER = ("portakern/core", "portakern/spec", "portakern/testing")
PLANTED = "benchmarks/judges/corpus/planted.py"
BASES = "benchmarks/judges/corpus/bases.py"
MADE_BY = {
    "functions": (PLANTED, "tests/mutants/functions.py"),
    "simulated": (PLANTED,),
    "kernels": (PLANTED,),
    "cheats": (BASES, "benchmarks/judges/corpus/cheats.py"),
    "unusual": (BASES, PLANTED, "benchmarks/judges/corpus/right.py"),
    "level 1": ("benchmarks/judges/corpus/level_1.py",),
}
"""Group of subjects -> the files that make them."""


def of_rule(name: str, place: Path | None = None) -> str:
    """The hash of a rule in a checkout; None: the one that runs."""
    own = Path(*type(rules()[name]).__module__.split(".")).with_suffix(".py")
    return _hash([own, *SHARED, *(CHECKER if name == "portakern" else ())], place or sources.root())


def of_subject(s: Subject, place: Path | None = None) -> str:
    """The hash of a subject in a checkout; None: the one that runs."""
    return _of(s.group, s.op, place or sources.root())


@functools.cache
def _of(group: str, op: str, place: Path) -> str:
    record = registry.own_modules()[op].rpartition(".")[2]  # of a gradient op, that of its forward op
    files = [*MADE_BY[group], "tests/ops/_shared.py", f"tests/ops/{record}.py"]
    files += [f"tests/mutants/faults/{op}.py"] if group == "kernels" else []
    kernels = [b for b in registry.backends().values() if b.families_for(HOST)] if group == "kernels" else []
    found = [sources.fingerprint(op, b, None, HOST, place) for b in (registry.oracle_backend(), *kernels)]
    return hashlib.sha256(f"{_hash(files, place)}{found}".encode()).hexdigest()[:16]


def _hash(paths: Iterable[str | Path], place: Path) -> str:
    """The hash of files, and of all Python in folders."""
    return sources.trees(
        f for p in paths for f in (sorted((place / p).rglob("*.py")) if (place / p).is_dir() else [place / p])
    )
