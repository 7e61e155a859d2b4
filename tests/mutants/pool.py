"""Worker processes that can be replaced one by one: a task that hangs or dies takes no other with it."""

from __future__ import annotations

import logging
import multiprocessing as mp
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .faults import Fault

__all__ = ["Task", "run"]


@dataclass(frozen=True)
class Task:
    """``kind``: "catch" one fault on one seed; "flat": one fault on one seed under a flat tolerance; "error": one fault
    on ordinary data; "right": on one seed the shipped kernel that a fault stands for."""

    kind: str
    fault: Fault
    seed: int
    device: str
    examples: int

    def __str__(self) -> str:
        f = self.fault
        return f"{self.kind} {f'{f.home} {f.op}' if self.kind == 'right' else f.name} seed {self.seed}"


def work(task: Task) -> dict[str, Any]:
    from . import harness  # frameworks are imported in workers only

    f = task.fault
    if task.kind == "error":
        return {"max_error": harness.error_on_ordinary_data(f, task.device)}
    if task.kind in ("right", "flat"):
        return harness.beside_flat(
            f.op, f.backend, f if task.kind == "flat" else None, task.seed, task.device, task.examples, f.variant
        )
    return harness.catch(f, task.seed, task.device, task.examples)


Work = Callable[[Any], dict[str, Any]]
"""A task's result, in a worker: a function of a module, which workers import."""


MOST = 20_000
"""Mappings of memory beyond which a worker forgets what JAX compiled: a process may hold 65,530, and each compiled case
is some."""


def mappings() -> int:
    """Of this process; as many as there may be where nobody says."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return MOST + 1


def worker(pipe: Connection, work: Work) -> None:
    logging.getLogger("portakern").setLevel(logging.ERROR)  # not a word about each interpreter
    while True:
        task = pipe.recv()
        try:
            pipe.send(work(task))
        except Exception as e:
            pipe.send({"error": f"{type(e).__name__}: {e}"[:500]})
        if (jax := sys.modules.get("jax")) and mappings() > MOST:
            jax.clear_caches()


class Worker:
    """A process that can be given tasks, and replaced."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.start()

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=worker, args=(child, self.work), daemon=True)
        self.process.start()
        child.close()
        self.task: Any = None

    def give(self, task: Any, limit: float) -> None:
        self.task, self.deadline = task, time.monotonic() + limit
        self.pipe.send(task)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def result(self) -> dict[str, Any] | None:
        """What came back; an error where the process died or ran out of time; None while it runs."""
        if self.pipe.poll():
            try:
                return dict(self.pipe.recv())
            except (EOFError, OSError):
                self.process.join(10)
                return {"error": f"the process died with code {self.process.exitcode}"}
        return {"error": "timeout"} if time.monotonic() > self.deadline else None


def run(
    tasks: Sequence[Any], jobs: int, limit: float, done: Callable[[Any, dict[str, Any]], None], work: Work = work
) -> None:
    """Carry tasks out, each by ``work`` in a worker process, and tell what came of it. ``limit``: seconds a task."""
    waiting, workers = list(reversed(tasks)), [Worker(work) for _ in range(min(jobs, len(tasks)))]
    try:
        while waiting or any(w.task for w in workers):
            for w in workers:
                if w.task is None and waiting:
                    w.give(waiting.pop(), limit)
            wait([w.pipe for w in workers if w.task], timeout=1)
            for w in workers:
                task, result = w.task, w.result() if w.task else None
                if task is None or result is None:
                    continue
                w.task = None
                if result.get("error") == "timeout" or not w.process.is_alive():
                    w.stop()
                    w.start()
                done(task, result)
    finally:
        for w in workers:
            w.stop()
