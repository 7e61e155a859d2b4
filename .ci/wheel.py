"""Build the sdist and from it the wheel.

The wheel must hold every Python file and table of the package, and work where there is no checkout.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = (".py", ".pyi", "py.typed", ".json", ".toml", ".mojo")
SCRIPT = """
import sys
sys.modules.update(dict.fromkeys(["typer", "rich"]))  # as where no extra was asked for
import portakern as pk, numpy as np
assert pk.__file__.startswith(sys.argv[1]), pk.__file__
assert not {"torch", "triton", "jax"} & set(sys.modules), "import portakern imported a framework"
assert set(pk.ops()) == set(sys.argv[2].split(",")), pk.ops()
assert {"reference", "triton", "pallas"} <= set(pk.backends()), pk.backends()
x = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
assert np.allclose(pk.op("softmax")(x).sum(-1), 1)
import portakern.examples.minilm.demo
"""


def main(scratch: Path) -> int:
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", scratch / "dist", ROOT], check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = (scratch / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        inside = {n for n in z.namelist() if n.startswith("portakern/") and n.endswith(KINDS)}
        z.extractall(scratch / "site")
        with_entry_points = [n for n in z.namelist() if n.endswith("entry_points.txt")]
    walked = (
        os.path.relpath(Path(folder) / n, ROOT)
        for folder, _, names in os.walk(ROOT / "portakern", followlinks=True)
        for n in names
    )
    on_disk = {path for path in walked if path.endswith(KINDS)}
    print(f"the wheel holds {len(inside & on_disk)} of {len(on_disk)} files")
    if on_disk - inside or not with_entry_points:
        print(f"FAILED: missing from the wheel: {sorted(on_disk - inside)}")
        return 1
    site = str(scratch / "site")
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, site, ",".join(declared())],
        cwd=scratch,
        env={**os.environ, "PYTHONPATH": site},
        check=False,
    ).returncode


def declared() -> list[str]:
    """The ops of the checkout: functions under ``@spec(...)``."""
    trees = [ast.parse(f.read_text(encoding="utf-8")) for f in (ROOT / "specs").rglob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if any(ast.unparse(d).startswith("spec(") for d in f.decorator_list)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
