"""What tests ask of a launch that was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def named(constants: Mapping[str, Any]) -> dict[str, Any]:
    """A launch's constants by name, those within groups too."""
    groups = [c._asdict() for c in constants.values() if hasattr(c, "_asdict")]
    return {name: value for group in (constants, *groups) for name, value in group.items()}
