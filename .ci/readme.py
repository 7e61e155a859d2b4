"""Print a command block of README.md, so that CI runs what readers are told to run.

``readme.py demo`` prints the block under ``<!-- ci: demo -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def command(name: str, text: str | None = None) -> str:
    """The fenced bash block right under the marker ``name``; LookupError if there is not exactly one."""
    found = re.findall(
        rf"^<!-- ci: {re.escape(name)} -->\n```bash\n(.*?)^```$",
        text or README.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    if len(found) != 1:
        raise LookupError(f"README.md has {len(found)} bash blocks under <!-- ci: {name} -->; expected one")
    return str(found[0])


if __name__ == "__main__":
    sys.stdout.write(command(sys.argv[1]))
