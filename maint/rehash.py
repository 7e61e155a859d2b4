"""Update the hashes of results whose measured source changed in name alone: an option, a tile or a variant was renamed.

    python -m maint.rehash current.json                                  # before the change: what is current
    python -m maint.rehash current.json --write --variant gpu=portable   # afterwards

The command does not check that the source changed in name alone: the commit must say why.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

from maint import store
from maint.measurements import StoredResults, changed, fingerprint
from maint.report import checkout
from portakern import sources


@sources.unchanging()
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m maint.rehash", description=__doc__)
    parser.add_argument("file", type=Path, help="the rows that are current: written, or with --write read")
    parser.add_argument("--write", action="store_true", help="write today's hash into these rows")
    parser.add_argument("--variant", action="append", default=[], metavar="OLD=NEW", help="a variant's new name")
    asked = parser.parse_args()
    root, renamed = checkout(), dict(v.split("=") for v in asked.variant)
    found = {
        (r.name, n): row for r in StoredResults.load(root).results for n, row in enumerate(r.rows) if row.get("sources")
    }
    if not asked.write:
        current = [key for key, row in found.items() if not changed(row, root)]
        asked.file.write_text(json.dumps(current))
        print(f"{len(current)} of {len(found)} rows are current")
        return 0
    current = [tuple(key) for key in json.loads(asked.file.read_text())]
    kept = store.read(root / store.FOLDER)
    for run in kept:
        for n, row in enumerate(cast(list[dict[str, Any]], run.rows)):
            if row.get("variant") in renamed:
                old, new = row["variant"], renamed[row["variant"]]
                if row.get("contender"):
                    row["contender"] = row["contender"].replace(f"/{old}", f"/{new}")
                row["variant"] = new
            if (run.name, n) in current:
                row["sources"] = fingerprint(row, root)
    for benchmark in {run.benchmark for run in kept}:
        store.write(root / store.FOLDER, benchmark, [run for run in kept if run.benchmark == benchmark])
    print(f"{len(current)} rows have today's hash")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
