"""One rule on one subject, in a process of its own."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.judges import corpus
from benchmarks.judges.rules import rules

__all__ = ["Task", "work"]


@dataclass(frozen=True)
class Task:
    """One rule on one subject."""

    group: str
    name: str
    rule: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.name}"


def work(task: Task) -> dict[str, Any]:
    """A verdict as plain data, in a worker process."""
    warnings.simplefilter("ignore")
    logging.getLogger("portakern").setLevel(logging.ERROR)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    return asdict(rules()[task.rule].judge(corpus.subjects()[task.group, task.name]))
