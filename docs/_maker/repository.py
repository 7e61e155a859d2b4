"""Files of the repository in the site: a page with the text of each that some page links to, and the links."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SOURCES = "source/"
"""The folder of the site under which files of the repository lie."""
LANGUAGES = {".py": "python", ".pyi": "python", ".toml": "toml", ".txt": "text", ".yml": "yaml"}
"""What is shown as a page of code; Markdown is a page, and everything else a file that a browser opens."""
LINK = re.compile(
    r"(?P<start>!?\[(?:[^\]\[]|\[[^\]]*\])*\]\()(?P<path>(?!\w+:|#|<)[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))"
)
CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}).*?^(?P=indent)(?P=fence) *$"
    r"|(?<!`)(?P<tick>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=tick)(?!`)",
    re.MULTILINE | re.DOTALL,
)


def _links(text: str) -> Iterator[re.Match[str]]:
    """Links to files, but not those inside code."""
    code = [m.span() for m in CODE.finditer(text)]
    for match in LINK.finditer(text):
        if not any(start < match.start() and match.end() < end for start, end in code):
            yield match


def place(path: str, root: Path, here: Mapping[str, str]) -> str | None:
    """Where a file of the repository lies in the site; None where there is no such file."""
    if path in here:
        return here[path]
    there, inside = root / path, path.removeprefix("docs/") if path.startswith("docs/") else SOURCES + path
    if there.is_dir():
        return f"{inside}/README.md" if (there / "README.md").is_file() else f"{inside}/index.md"
    if not inside.startswith(SOURCES):
        return inside
    if not there.is_file():
        return None
    return f"{SOURCES}{path}.md" if there.suffix in LANGUAGES else SOURCES + path


def relinked(text: str, uri: str, folder: str, root: Path, here: Mapping[str, str]) -> str:
    """The text of page ``uri`` whose links start from a ``folder`` of the repository, with links within the site."""
    found, last = [], 0
    for match in _links(text):
        path = posixpath.normpath(posixpath.join(folder, match["path"]))
        there = place(path, root, here)
        if there is not None:
            new = posixpath.relpath(there, posixpath.dirname(uri) or ".")
            found += [text[last : match.start("path")], new]
            last = match.end("path")
    return "".join([*found, text[last:]])


def pages(root: Path, texts: Iterable[tuple[Path, str]], here: Mapping[str, str]) -> dict[str, str | Path]:
    """A page for every file and folder of the repository that the texts link to, and that those link to: its Markdown,
    or the file itself.
    """
    made: dict[str, str | Path] = {}
    queue = [(posixpath.dirname(file.relative_to(root).as_posix()), text) for file, text in texts]
    while queue:
        folder, text = queue.pop()
        for match in _links(text):
            path = posixpath.normpath(posixpath.join(folder, match["path"]))
            there = place(path, root, here)
            if there is None or there in made or not (there.startswith(SOURCES) or (root / path).is_dir()):
                continue
            made[there] = content = _content(path, root)
            if isinstance(content, str):
                queue.append((path if (root / path).is_dir() else posixpath.dirname(path), content))
    return made


def _content(path: str, root: Path) -> str | Path:
    file = root / path
    if (file / "README.md").is_file():
        file /= "README.md"
    if file.is_dir():
        return _folder(path, file)
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.suffix in LANGUAGES:
        return _page(path, f"``````{LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8')}\n``````\n")
    return file


def _folder(path: str, folder: Path) -> str:
    """The files of a folder, each a link, and the folders in it by name."""
    names = sorted(
        p.name for p in folder.iterdir() if p.is_file() and p.suffix in {*LANGUAGES, ".md", ".json", ".jsonl", ".svg"}
    )
    inner = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(("_", ".")))
    return _page(path, "\n".join([*(f"* `{name}/`" for name in inner), *(f"* [{name}]({name})" for name in names)]))


def _page(path: str, text: str) -> str:
    """A page that search leaves out: readers look for what texts say, and for names by the reference."""
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path.rpartition('/')[2] or path}\n\n`{path}`\n\n{text}\n"
