"""A few thousand random calls, right and wrong, as benchmarks/fuzz.py makes them by the hundred thousand."""

import logging
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.filterwarnings("ignore")
def test_calls_are_right_or_refused(caplog):
    for framework in ("torch", "jax"):
        pytest.importorskip(framework, reason=f"{framework} is not installed")
    fuzz = runpy.run_path(str(ROOT / "benchmarks" / "fuzz.py"), run_name="portakern_fuzz")["fuzz"]
    caplog.set_level(logging.ERROR, "portakern")
    result = fuzz(3000, seed=1)
    assert not result.broken, result.broken[:5]
    assert min(result.verdicts[v] for v in ("SpecError", "dressed", "accepted")) >= 100 and result.worst <= 1
