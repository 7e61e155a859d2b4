"""Hashes of the judged files: the candidate's file, the files of its folder, which it may import or read, and the
problem's file, with what that imports from beside it.

The judge hashes all files of the folder. It does not ask the candidate which ones it reads, since a candidate could
hide some.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from portakern.errors import SpecError
from portakern.printable import printable

__all__ = ["Hashes", "hashes"]

FILES, BYTES, ENTRIES = 1000, 256 << 20, 20_000
"""At most: files and bytes that are hashed, entries of folders that are looked at. Beyond, files are counted."""

IMPORTED = (".py", ".pyc", ".so", ".pyd", ".pth")


@dataclass(frozen=True)
class Hashes:
    """``files``: path -> SHA-256, the candidate's file first, then the problem's and what that
    imports; a path is relative to the candidate's
    folder if it lies there. ``unhashed``: the number of files in the folder that were not hashed or cannot be read;
    -1: too many to count."""

    files: Mapping[str, str] = field(default_factory=dict)
    unhashed: int = 0

    @property
    def all(self) -> str:
        """One hash of every name and content."""
        text = "".join(f"{digest} {name}\n" for name, digest in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    def changed(self, later: Hashes) -> list[str]:
        """The files that are others now, or came, or went."""
        names = {**self.files, **later.files}
        return [n for n in names if self.files.get(n) != later.files.get(n)]


def hashes(file: Path, problem: Path | None, imported: Sequence[Path] = ()) -> Hashes:
    """Of a candidate as it lies there now; ``imported``: the files that the problem imports."""
    folder, found = file.parent, dict[str, str]()
    for path in [file, *([problem] if problem else []), *imported]:
        digest = _digest(path, 1 << 50)
        if digest is None:
            raise SpecError(f"judge: {printable(path.name)} cannot be read")
        found[_name(path, folder)] = digest[0]
    left, unhashed = BYTES, 0
    others, whole = _beside(folder)
    for path in others:
        if _name(path, folder) in found:
            continue
        digest = _digest(path, left) if len(found) < FILES else None
        if digest is None:
            unhashed += 1
            continue
        found[_name(path, folder)] = digest[0]
        left -= digest[1]
    return Hashes(found, unhashed if whole else -1)


def _name(path: Path, folder: Path) -> str:
    return printable(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _beside(folder: Path) -> tuple[list[Path], bool]:
    """The files of a folder and of those in it, what Python imports first, those on top before those beneath; and
    whether that is all of them."""
    found = list(itertools.islice(_walked(folder), ENTRIES + 1))
    found.sort(key=lambda p: (p.suffix not in IMPORTED, len(p.relative_to(folder).parts), str(p)))
    return found[:ENTRIES], len(found) <= ENTRIES


def _walked(folder: Path) -> Iterator[Path]:
    """Breadth first: what lies far down is imported seldom."""
    level = [folder]
    while level:
        beneath = []
        for at in level:
            try:
                with os.scandir(at) as listed:
                    entries = sorted(itertools.islice(listed, ENTRIES + 1), key=lambda e: e.name)
            except OSError:
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    beneath.append(Path(entry.path))
                else:
                    yield Path(entry.path)
        level = beneath


def _digest(path: Path, most: int) -> tuple[str, int] | None:
    """(SHA-256, bytes) of a file; None of what is none, cannot be read or is longer. A pipe is not waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > most:
            return None
        digest, size = hashlib.sha256(), 0
        while some := os.read(handle, 1 << 20):
            size += len(some)
            if size > most:
                return None
            digest.update(some)
    except OSError:
        return None
    finally:
        os.close(handle)
    return digest.hexdigest(), size
