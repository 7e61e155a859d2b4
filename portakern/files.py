"""Write files atomically, and the cache folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "write_atomically"]


def cache_folder() -> Path:
    """Where portakern keeps what it can make again: ``PORTAKERN_CACHE``, or the user's cache folder."""
    if os.environ.get("PORTAKERN_CACHE"):
        return Path(os.environ["PORTAKERN_CACHE"])
    import platformdirs  # here: writing a file needs none of it

    return platformdirs.user_cache_path("portakern", appauthor=False)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a crash, sees the old file or the new one and nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
