"""Pallas's simulated TPU as a check profile.

Every interpreted call runs on two cores, with the memories, DMAs and races of a chip. Buffers that nothing wrote hold
NaN; a block or an index beyond a buffer raises; so does a race, when its kernel ends. Calls alternate between the two
times at which a DMA may move its data: when somebody waits for it, so that whoever reads too early sees the old memory,
and at once, so that whoever issues it too early destroys what was still to be read. The checker makes each call twice
and compares bits, so that each case meets both.

The simulator is Pallas's own (``pltpu.InterpretParams``). What it has no parameter for is told to it through functions
that jax keeps to itself: alone it prints races and keeps those of the last kernel only, stays broken after an
exception, and (until jax 0.11) compiles a kernel again for each core and each call, which is nine tenths of its time.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, thread_map
from jax.experimental.pallas import tpu as pltpu

from portakern.core.observe import Served, observe

PARAMS = pltpu.InterpretParams(
    detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan", out_of_bounds_reads="raise"
)

_initialize, _clean_up = interpret_pallas_call._initialize_shared_memory, interpret_pallas_call._clean_up_shared_memory
_dma_mode = "on_wait"
_programs: OrderedDict[Any, Any] = OrderedDict()  # of the last few kernels
_compiling = threading.Lock()


@contextmanager
def simulated() -> Iterator[None]:
    """Within this context interpreted calls run on the simulator.

    They share its memory, so only one thread may make them.
    """
    modes = itertools.cycle(("eager", "on_wait"))

    def next_mode(served: Served) -> None:
        global _dma_mode
        _dma_mode = next(modes)

    with (
        patch.object(interpret_pallas_call, "_initialize_shared_memory", _begin),
        patch.object(interpret_pallas_call, "_clean_up_shared_memory", _end),
        patch.object(thread_map, "_run_jaxpr", _on_a_core),
        pltpu.force_tpu_interpret_mode(PARAMS),
        observe(next_mode),
    ):
        yield


def _begin(token: Any, *sizes: Any, interpret_params: pltpu.InterpretParams) -> Any:
    """As a kernel begins: forget one that raised."""
    pltpu.reset_tpu_interpret_mode_state()
    return _initialize(token, *sizes, interpret_params=replace(interpret_params, dma_execution_mode=_dma_mode))


def _end(token: Any, device: Any) -> Any:
    """As a kernel ends: raise if it raced."""
    races = interpret_pallas_call.races
    if races is not None and races.races_found:
        raise RuntimeError("two cores of the simulated TPU raced for memory; the simulator printed where")
    return _clean_up(token, device)


def _on_a_core(jaxpr: Any, consts: Any, *args: Any) -> None:
    """Run one core's share of a kernel. Both cores run one program, compiled like other interpreted calls."""
    with _compiling:
        program = _programs.get(jaxpr)
        if program is None:
            steps = jax.jit(
                lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args),
                compiler_options={"xla_backend_optimization_level": 0},
            )
            program = _programs[jaxpr] = steps.lower(consts, *args).compile()
            if len(_programs) > 16:
                _programs.popitem(last=False)
    jax.block_until_ready(program(consts, *args))
