"""portakern on an AMD GPU, in one command: what the notebooks do elsewhere, as a program.

    python notebooks/rocm_gpu.py [OP ...] [--examples 100] [--seconds 900]

It looks at the machine, installs portakern and PyTorch for ROCm into a virtual environment where this Python lacks
them, asks `portakern doctor`, runs a first op, holds every kernel to its bounds, times them beside PyTorch's own, and
leaves a folder with two files of results, plots, and a zip file of both. Without an AMD GPU it says so and runs a few
cases in the interpreter. The cells are those of cells.py.
"""

import argparse
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("portakern needs Python 3.11 or newer; this is " + sys.version.split()[0])

from make import PLACES, filled, source

HERE = Path(__file__).resolve().parents[1]  # the checkout that is installed
CHOICES = "SOURCE = "  # of the cell that holds what a user chooses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help="all ops when none is named")
    parser.add_argument("--examples", type=int, default=100, help="cases of each op that the check draws")
    parser.add_argument("--seconds", type=int, default=900, help="what the benchmark may take")
    asked = parser.parse_args()
    (place,) = [p for p in PLACES if p.file == "rocm_gpu.py"]
    names = {"__name__": "__main__"}
    for number, (kind, text) in enumerate(filled(place, *source())):
        if kind == "markdown":
            print(f"\n==== {text.splitlines()[0].lstrip('# ')}", flush=True)
            continue
        exec(compile(text, f"<cell {number} of cells.py>", "exec"), names)
        if text.startswith(CHOICES):
            chosen = {"EXAMPLES": asked.examples, "SECONDS": asked.seconds, "OPS": asked.ops}
            names |= {**chosen, "SOURCE": names["SOURCE"] or str(HERE)}


if __name__ == "__main__":
    main()
