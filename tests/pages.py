"""The code of a page of Markdown: its Python blocks run as printed, top to bottom in one session, and a block of text
right under one is what it prints.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FENCE = re.compile(r"^```(?P<head>\w+)(?P<more>[^\n]*)\n(?P<body>.*?)^```$(?P<gap>\n*)", re.DOTALL | re.MULTILINE)


ON_A_GPU = ('device="cuda"', 'device="cpu"')
"""How a page makes a tensor on a GPU, and what its test makes of it."""


class Block(NamedTuple):
    """A block of Python: the line on which it starts, and what the page says that it prints; None: nothing."""

    line: int
    code: str
    printed: str | None


def blocks(text: str) -> Iterator[Block]:
    """The Python blocks of a page; those with more on their first line show a file, and are none."""
    found = [*FENCE.finditer(text), None]
    for match, after in itertools.pairwise(found):
        assert match is not None  # only the last of them is None
        if match["head"] == "python" and not match["more"]:
            under = after is not None and after.start() == match.end() and after["head"] == "text" and not after["more"]
            yield Block(text[: match.start()].count("\n") + 2, match["body"], after["body"] if under else None)


def run(page: Path, session: dict[str, Any] | None = None, text: str | None = None, alone: bool = False) -> int:
    """Run a page as a reader without an accelerator does, tensors of ``device="cuda"`` on the CPU; how many blocks it
    has. ``text``: what the page says, where that is not what its file does. ``alone``: each block in a session of its
    own.
    """
    jax = pytest.importorskip("jax", reason="jax is not installed")
    session, count = {"__name__": page.stem} if session is None else session, 0
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for block in blocks((page.read_text(encoding="utf-8") if text is None else text).replace(*ON_A_GPU)):
            printed, session = io.StringIO(), {"__name__": page.stem} if alone else session
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), session)
            if block.printed is not None:
                check_printed(block.printed, printed.getvalue(), f"{page.name}, line {block.line}")
            count += 1
    return count


def check_printed(want: str, actual: str, where: str) -> None:
    """Hold what was printed to what a page says, where ... stands for anything."""
    checker = doctest.OutputChecker()
    assert checker.check_output(want, actual, doctest.ELLIPSIS), f"{where} prints\n{actual}\nand the page says\n{want}"
