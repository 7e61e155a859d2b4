"""Make untrusted text printable, such as the output of a judged kernel, on a terminal or in a log."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["printable"]

UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Categories of what a terminal obeys, hides or turns round: controls, formats (directions of text, zero widths),
halves
of characters, characters that are none, and separators of lines."""

COMMAND = re.compile(r"(?:^|(?<=\s)):(?=:)|#(?=#\w*\[)", re.MULTILINE)
"""The beginning of what a log of GitHub ("::error::", "##[error]"), Azure or TeamCity obeys."""


def printable(text: object, lines: bool = False) -> str:
    """The text with all that a terminal or a CI service would obey written as an escape; ``lines``: it may have
    several."""
    kept = "\n\t" if lines else ""
    plain = "".join(c if c in kept or unicodedata.category(c) not in UNSAFE else _escaped(c) for c in str(text))
    return COMMAND.sub(lambda m: _escaped(m[0]), plain)


def _escaped(c: str) -> str:
    code = ord(c)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
