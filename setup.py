"""What pyproject.toml cannot say: the addresses, all made of one, and the README as an index shows it.

There a link to a file of the repository leads to the repository, and is its words alone while nobody said where that
lies: the files are in the source distribution. A picture comes from there, or is left out. ``PORTAKERN_REPOSITORY``
stands in for ``[tool.portakern] repository``.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = os.environ.get("PORTAKERN_REPOSITORY", PYPROJECT["tool"]["portakern"]["repository"]).rstrip("/")
PAGES = {
    "Source": "",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Documentation": "/blob/HEAD/README.md",
    "Issues": "/issues",
}


def named(link: re.Match[str]) -> str:
    """A Markdown link to a file of the repository, as one to the repository, or as its words alone; a picture as its
    file there, or as nothing.
    """
    mark, words, path = link.groups()
    if not REPOSITORY:
        return "" if mark else words
    return f"{mark}[{words}]({REPOSITORY}/{'raw' if mark else 'blob'}/HEAD/{path})"


setup(
    long_description=re.sub(
        r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]*)\)", named, (ROOT / "README.md").read_text(encoding="utf-8")
    ),
    long_description_content_type="text/markdown",
    project_urls={name: REPOSITORY + page for name, page in PAGES.items()} if REPOSITORY else {},
)
