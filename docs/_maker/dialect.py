"""GitHub's Markdown, as Python-Markdown reads it: lists nested by four columns, a blank line before a list, and
Markdown inside what a reader opens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MARKER = re.compile(r"(?P<mark>[*+-]|\d+[.)])(?P<space> +)\S")
FENCE = re.compile(r"(`{3,}|~{3,})")


def adapted(text: str) -> str:
    """The text with its lists laid out for Python-Markdown, which counts a nested list in steps of four columns."""
    return "\n".join(_lines(text.replace("<details><summary>", '<details markdown="1"><summary>').split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    columns: list[int] = []  # where the text of each open list item starts
    fence, blank, in_list, after_code = "", True, False, False
    for line in lines:
        body = line.lstrip(" ")
        if not body:
            yield ""
            blank, after_code = True, False
            continue
        indent = len(line) - len(body)
        while not fence and columns and indent < columns[-1]:
            if not blank and not MARKER.match(body) and not FENCE.match(body):
                break  # a paragraph's line that hangs over to the left
            columns.pop()
        item = None if fence else MARKER.match(body)
        deeper = 4 * len(columns) + max(indent - (columns[-1] if columns else 0), 0)
        if item and deeper < 4 * len(columns) + 4:
            if after_code or not (blank or in_list):
                yield ""
            yield " " * (4 * len(columns)) + body
            columns.append(indent + len(item["mark"]) + len(item["space"]))
        else:
            yield " " * deeper + body
        opened = FENCE.match(body)
        after_code = bool(opened and fence and body.startswith(fence))
        if opened and (not fence or after_code):
            fence = "" if fence else opened[1]
        blank, in_list = False, bool(columns)
