"""Hypothesis profiles and a quiet, offline environment for every test.

HYPOTHESIS_PROFILE=deep draws many more cases, and new ones every time.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Generator
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU for itself
# Pallas's interpreter for GPUs takes a thread of XLA's for each warpgroup, and these wait for each other: with fewer
# threads than warpgroups, as on two cores, they may do so for ever.
os.environ.setdefault("NPROC", "8")
# What XLA compiles for the host runs once or a few times: unoptimised, in one piece, and without the emitters of fused
# loops, whose code takes long to compile, it is ready in half of the time. jaxlib 0.11 has those emitters alone, and
# ends the process at a flag that it does not know.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # products on several threads add in an order that varies: a row alone then has other bits at times
    "--xla_cpu_multi_thread_eigen=false",
]
if importlib.util.find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
# JAX's plugin for CUDA, without which nothing compiles for Hopper, does not load where there is no GPU, unless it is
# told that none is meant.
PLUGIN = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")
if PLUGIN and not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What Inductor writes in C++ is compiled once for each shape: without vector instructions, whose every kind it tries
# out with a compiler first, without headers that are compiled ahead, and without processes that import torch again.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # one thread a worker: two workers with a thread pool each would fight over the cores
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

# Compilers of kernels and graphs make objects by the million that nothing holds in a ring: looking for rings after each
# 700 of them, and through all that was ever imported, took a tenth of the time of tests/test_jax.py.
gc.set_threshold(100_000, 50, 100)

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

SHARE = 1 / 3
"""Of a test's time limit, what it may take of the processor: machines that run the suite are busy with other things
too, and take three times as long."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that would reach its limit on a busy machine fails on an idle one, where its author sees it."""
    before = time.process_time()
    result = yield
    used, marker = time.process_time() - before, item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout") or 0)
    if 0 < SHARE * limit < used and os.environ.get("HYPOTHESIS_PROFILE") != "deep":
        pytest.fail(
            f"{used:.0f} s of processor time, and its limit is {limit:.0f} s; expected a third: make it shorter"
        )
    return result


@pytest.fixture(autouse=True)
def _backends_are_registered_for_one_test() -> Generator[None]:
    """What a test registers, also by code of the documentation or a file that a command reads, is gone after it."""
    from portakern.core import registry

    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


@pytest.fixture
def jax_on_the_host() -> Generator[None]:
    """JAX's arrays live on the CPU, also on a machine with a GPU."""
    import jax

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
