"""Markdown: tables, folds, and generated parts of a page, between ``<!-- portakern report: NAME -->`` and ``<!-- end:
NAME -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from portakern.results import Result, ResultError

__all__ = ["NONE", "by_device", "fold", "link", "pieces", "replace", "table"]

NONE = "–"  # a cell about which nothing is known
MARK = re.compile(r"^<!-- (portakern report|end): (.*?) -->$", re.MULTILINE)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table; the first ``words`` columns hold words, the others figures, aligned right."""
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in (columns, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    rule = "|" + "|".join("---" if i < words else "--:" for i in range(len(columns))) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def fold(summary: str, text: str) -> str:
    """Text that a reader opens."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def by_device(
    rows: Sequence[tuple[Mapping[str, Any], Result]], render: Callable[[list[Mapping[str, Any]]], str]
) -> str:
    """One rendering for each device, with its name above it."""
    devices = dict.fromkeys(r.device for _, r in rows)
    return "\n\n".join(f"**{d}**\n\n{render([row for row, r in rows if r.device == d])}" for d in devices)


def link(path: str) -> str:
    return f"[{path.rpartition('/')[2]}]({path})"


def _spans(text: str, page: Path) -> list[tuple[str, int, int]]:
    """(name, start, end) of the text between each pair of marks."""
    found, opened = [], None
    for mark in MARK.finditer(text):
        line = text[: mark.start()].count("\n") + 1
        kind, name = mark.groups()
        if kind == "end":
            if opened is None or opened[0] != name:
                expected = f"expected <!-- end: {opened[0]} -->" if opened else "no mark is open there"
                raise ResultError(f"{page.name}, line {line}: {mark[0]} ends nothing; {expected}")
            found.append((name, opened[1], mark.start()))
            opened = None
        elif opened is not None:
            raise ResultError(
                f"{page.name}, line {line}: {mark[0]} stands inside {opened[0]!r}; expected <!-- end: {opened[0]} --> "
                "before it"
            )
        else:
            opened = (name, mark.end() + 1, line)
    if opened is not None:
        raise ResultError(
            f"{page.name}, line {opened[2]}: <!-- portakern report: {opened[0]} --> has no end; expected <!-- end: "
            f"{opened[0]} --> below it"
        )
    return found


def pieces(text: str, page: Path) -> dict[str, str]:
    """What stands between the marks of a page, by name; ResultError where they do not pair."""
    return {name: text[start:end] for name, start, end in _spans(text, page)}


def replace(text: str, new: Mapping[str, str], page: Path) -> str:
    """The page with ``new`` between its marks."""
    for name, start, end in reversed(_spans(text, page)):
        text = text[:start] + new[name] + text[end:]
    return text
