"""Versions of installed packages, and the command that installs what is missing, for all error messages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata, version

__all__ = ["command", "installed"]


def command(*extras: str) -> str:
    """What to run for extras of portakern: ``"run: pip install ..."``.

    portakern is on no index. It comes from the address that its metadata names (``[tool.portakern] repository`` of
    pyproject.toml, from which setup.py makes it); while that is empty, from a checkout."""
    which = f"[{','.join(extras)}]" if extras else ""
    address = _address()
    if address:
        return f"run: pip install 'portakern{which} @ git+{address}'"
    what = f"'.{which}'" if which else "."
    return f"in a checkout of portakern run: pip install -e {what}"


def installed(package: str) -> str | None:
    """The version of a package, as pip names it; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _address() -> str:
    """Where portakern lies, as the metadata says it; empty where nobody said."""
    try:
        urls = metadata("portakern").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    return next((url.strip() for name, _, url in (u.partition(",") for u in urls) if name.strip() == "Source"), "")
