"""Docstrings as the site shows them: roles become code, a list of names is one line, a star in prose is a star."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":\w+:`~?([^`]+)`")
NAMES = re.compile(r"^( +[\w, ]+,)\n +(?=[\w, ]+: )", re.MULTILINE)
SHAPE = re.compile(r"(?<=[\w(, ])\*(?=[a-z]\w*[, )])")


class Docstrings(Extension):
    """Read by mkdocstrings before it renders anything."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            text = NAMES.sub(r"\1 ", ROLE.sub(r"`\1`", obj.docstring.value))
            obj.docstring.value = "\n".join(map(_escaped, text.split("\n")))


def _escaped(line: str) -> str:
    """A line whose shapes, such as (*batch, n), are no emphasis."""
    pieces = re.split(r"(`+[^`]*`+)", line)
    return "".join(p if p.startswith("`") else SHAPE.sub(r"\\*", p) for p in pieces)
