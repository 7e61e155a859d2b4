"""Sections of the repository's texts, shown on a page of the site where a comment names them:

    <!-- include: README.md#use-it -->
    <!-- include: README.md#use-it from "In JAX" to "Complete programs" -->

    <!-- table: speeds -->

The path starts at the root of the repository. A table is one that ``maint.report`` makes of what is kept. A section is
what stands under its heading, up to the next heading of its level; without ``#`` it is the whole text. ``from`` is
where it starts instead, ``to`` what it ends before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from markdown.extensions.toc import slugify
from repository import CODE

INCLUDE = re.compile(
    r"^<!-- table: (?P<table>\w+) -->$|"
    r'^<!-- include: (?P<path>[^\s#]+)(?:#(?P<anchor>[\w-]+))?(?: from "(?P<start>.+?)")?(?: to "(?P<end>.+?)")? -->$',
    re.MULTILINE,
)
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def included(text: str, root: Path, own: str, relink: Callable[[str, str], str], table: Callable[[str], str]) -> str:
    """The text with sections in the places of the comments that name them. ``relink(text, folder)`` mends the links of
    a text whose links start from a folder of the repository, which is ``own`` for this one. ``table(name)`` is the text
    of a table.

    Raises:
      LookupError: a text has no such section, or a section lacks what it should start from or end before.
    """
    found, last = [], 0
    for match in INCLUDE.finditer(text):
        if match["table"]:
            piece, folder = table(match["table"]), ""
        else:
            whole, folder = (root / match["path"]).read_text(encoding="utf-8"), match["path"].rpartition("/")[0]
            piece = section(whole, match["anchor"], match["path"]) if match["anchor"] else whole
            piece = _cut(piece, match["start"], match["end"], match[0])
        found += [relink(text[last : match.start()], own), relink(piece, folder).strip("\n")]
        last = match.end()
    return "".join([*found, relink(text[last:], own)])


def section(text: str, anchor: str, path: str) -> str:
    """What stands under the heading whose anchor this is."""
    code = [m.span() for m in CODE.finditer(text)]
    headings = [h for h in HEADING.finditer(text) if not any(start <= h.start() < end for start, end in code)]
    known = [slugify(h[2], "-") for h in headings]
    if anchor not in known:
        raise LookupError(f"{path} has no section #{anchor}; expected one of {', '.join(known)}")
    at = known.index(anchor)
    ends = (h.start() for h in headings[at + 1 :] if len(h[1]) <= len(headings[at][1]))
    return text[headings[at].end() : next(ends, len(text))]


def _cut(text: str, start: str | None, end: str | None, said: str) -> str:
    for mark in filter(None, (start, end)):
        if text.count(mark) != 1:
            raise LookupError(f"{said}: {mark!r} stands there {text.count(mark)} times; expected once")
    return text[text.index(start) if start else 0 : text.index(end) if end else len(text)]
