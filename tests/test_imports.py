"""Importing portakern is cheap and brings in no accelerator framework."""

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
