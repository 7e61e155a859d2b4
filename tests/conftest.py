"""Hypothesis profiles and a quiet, offline environment for every test.

HYPOTHESIS_PROFILE=deep draws many more cases, and new ones every time.
"""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version

from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU for itself
# What XLA compiles for the host runs once or a few times: unoptimised, in one piece, and without the emitters of fused
# loops, whose code takes long to compile, it is ready in half of the time. jaxlib 0.11 has those emitters alone, and
# ends the process at a flag that it does not know.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.util.find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # one thread a worker: two workers with a thread pool each would fight over the cores
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

CI = bool(os.environ.get("CI"))
SLOW_ON_PURPOSE = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.function_scoped_fixture,
]  # interpreters, and fixtures that hold no state

settings.register_profile(
    "fast", max_examples=25, deadline=None, derandomize=CI, print_blob=True, suppress_health_check=SLOW_ON_PURPOSE
)
settings.register_profile(
    "deep", max_examples=1000, deadline=None, derandomize=False, print_blob=True, suppress_health_check=SLOW_ON_PURPOSE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
