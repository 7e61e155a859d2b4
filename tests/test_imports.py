"""Importing portakern is cheap and brings in no accelerator framework."""

import importlib.util
import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import portakern
end = time.perf_counter()
loaded = [m for m in ("torch", "triton", "jax", "jaxtyping", "hypothesis", "rich") if m in sys.modules]
portakern.ops(), portakern.backends()
later = [m for m in ("torch", "triton", "jax") if m in sys.modules]
print(json.dumps([end - middle, loaded, later]))
"""


def test_import_is_light():
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert runs[0][1:] == [[], []]
    assert min(r[0] for r in runs) <= 0.25


def test_public_names_resolve():
    import portakern as pk

    for name in pk.__all__:
        assert getattr(pk, name) is not None
    assert set(pk.__all__) <= set(dir(pk))


CALLED = """
import json, sys
import numpy as np
import portakern as pk
pk.op("softmax", backend="reference")(np.ones((2, 3), "float32"))
print(json.dumps(sorted(m for m in sys.modules if m.partition(".")[0] == "portakern")))
"""
TOOLS = (
    "cli", "core.explain", "examples", "inventory", "judging", "processes", "results", "sources",
    "testing", "tools",
)  # fmt: skip
"""What a call needs none of, under ``portakern``."""


def test_a_call_loads_no_tool():
    done = subprocess.run([sys.executable, "-c", CALLED], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    tools = [f"portakern.{name}" for name in TOOLS]
    assert all(importlib.util.find_spec(tool) for tool in tools), "a tool of the list is gone"
    assert [m for m in loaded if any(m == tool or m.startswith(tool + ".") for tool in tools)] == []
    core = [m for m in loaded if not m.startswith("portakern.backends.")]  # each backend's own are loaded to ask it
    assert len(core) <= 46, "more modules for one call: is each of them needed for it?"
