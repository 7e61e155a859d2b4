"""What pyproject.toml cannot say: the README as an index shows it, where a link to a file of the repository would lead
nowhere. The files are in the source distribution."""

import re
from pathlib import Path

from setuptools import setup

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
NAMED = re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)[^)]*\)", r"\2", README)  # the link's words alone

setup(long_description=NAMED, long_description_content_type="text/markdown")
