"""Results in a small checkout, as they are kept, without a run's own file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maint import store
from portakern.results import HEADER, Result


def keep(root: Path, name: str, data: Mapping[str, Any]) -> None:
    """Put what a run's file says among the results of a checkout, in place of a run of that name."""
    head = {n: data[n] for n in ("benchmark", "command", "date", "device", "environment", "rows")}
    extra = {n: v for n, v in data.items() if n not in HEADER}
    run = Result(file=Path(name), **head, extra=extra, commit=data.get("commit"), name=name)
    folder = root / store.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    others = [r for r in store.read(folder) if r.benchmark == run.benchmark and r.name != name]
    store.write(folder, run.benchmark, [*others, store.shown(run)])
