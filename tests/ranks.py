"""Processes of gloo for tests: one body, run on each of several ranks.

A server that has imported what ranks need is forked for each rank, so that the imports are done once.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IMPORTED = (
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "portakern.torch",
    *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen3", "gemma")),
)
"""What the server imports, of what is installed."""
HOST = "127.0.0.1"
COLLECTIVE = timedelta(seconds=60)
"""How long a rank waits for others in one collective operation."""


def on_ranks(body: Callable[..., None], world: int, *args: Any, limit: float = 240.0) -> None:
    """Run ``body(*args)`` in as many processes as ``world`` says. One that raises ends the others; all end after
    ``limit`` seconds."""
    meeting = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # holds its port while it lives
    multiprocessing.set_forkserver_preload([*IMPORTED])
    ranks: Any = mp.start_processes(
        _entry, (body, world, meeting.port, args), nprocs=world, join=False, start_method="forkserver"
    )
    end = time.monotonic() + limit
    try:
        while not ranks.join(timeout=max(0.1, end - time.monotonic())):
            if time.monotonic() > end:
                pytest.fail(f"ranks {[i for i, p in enumerate(ranks.processes) if p.is_alive()]} run after {limit} s")
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()


def _entry(rank: int, body: Callable[..., None], world: int, port: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting = dist.TCPStore(HOST, port, world, is_master=False)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world, timeout=COLLECTIVE)
    try:
        body(*args)
    finally:
        dist.destroy_process_group()


def whole(x: Any) -> Any:
    """The values of a tensor on all devices."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
