"""Run every notebook of notebooks/ as a reader without an accelerator does: on the CPU, through the interpreters.

``notebooks.py SCRATCH`` leaves each notebook with its outputs, and what it wrote, in a folder of SCRATCH. This
environment must have all that a notebook wants, so that none installs anything.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from portakern import results

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
LOUD = "EVERYTHING BELOW RUNS IN AN INTERPRETER ON THE CPU"


def main(scratch: Path) -> int:
    faults = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        start = time.perf_counter()
        found = list(executed(path, scratch / path.stem))
        print(f"{path.name}: {'; '.join(found) or 'ran'} in {time.perf_counter() - start:.0f} s", flush=True)
        faults += found
    return int(bool(faults))


def executed(path: Path, folder: Path) -> list[str]:
    """Run one notebook in a folder of its own; what is wrong with what came out."""
    folder.mkdir(parents=True)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    try:
        client.execute()
    except CellExecutionError as e:
        return [f"FAILED: {str(e)[-3000:]}"]
    finally:
        nbformat.write(notebook, folder / path.name)
    said = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    faults = [] if LOUD in said else [f"FAILED: does not say that {LOUD.lower()}"]
    kept = sorted(folder.glob("portakern-*/*.json"))
    if [results.read(file).benchmark for file in kept] != ["bench", "conformance"]:
        faults.append(f"FAILED: left {[file.name for file in kept]}; expected a benchmark's and a check's results")
    return faults


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
