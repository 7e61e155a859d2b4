"""The judge: a kernel that somebody else, or a program, wrote, held to an op's contract from outside of its process.

>>> from portakern.judging import judge
>>> judge("candidate.py", "softmax", shapes=[{"x": (64, 39321)}]).report.outcome
'wrong'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portakern.judging.judgement import Judged as Judged
    from portakern.judging.judgement import judge as judge
    from portakern.judging.process import Bounds as Bounds

__all__ = ["Bounds", "Judged", "judge"]


def __getattr__(name: str) -> Any:
    """The names of the judge's own side are imported when they are asked for: a candidate's process has none of it."""
    if name == "Bounds":
        from portakern.judging.process import Bounds

        return Bounds
    if name in ("Judged", "judge"):
        import importlib

        return getattr(importlib.import_module("portakern.judging.judgement"), name)
    raise AttributeError(f"module 'portakern.judging' has no attribute {name!r}")
