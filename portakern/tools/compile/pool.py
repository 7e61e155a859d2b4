"""Compile in processes of their own: a compiler that crashes or hangs costs its own job and no other."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

from portakern.core.backend import Backend, Family
from portakern.core.targets import Hardware
from portakern.spec import Spec
from portakern.tools.compile.abstract import direction
from portakern.tools.compile.build import Build
from portakern.tools.compile.worker import one_line

__all__ = ["Job", "Pool", "run"]


@dataclass(frozen=True, eq=False)
class Job:
    """One call to compile, with a variant of an op for a target.

    ``tiling``: what the user named of it; ``quick``: nothing that takes longer than the compiler itself, such as
    estimates; ``assembly``: keep the machine code's text; ``way``: the compiler's function that is asked, another than
    ``build`` where it has that one; ``kernel``: of the call's kernels the source of the one that is compiled alone, to
    where launches find it."""

    spec: Spec[Any]
    backend: Backend
    family: Family
    hardware: Hardware
    signature: dict[str, Any]
    tiling: Mapping[str, int] = field(default_factory=dict)
    quick: bool = False
    assembly: bool = False
    mode: str = "build"
    kernel: str = ""

    def failed(self, reason: str, seconds: float) -> Build:
        dtype = next(d for _, d, _ in self.signature["arrays"].values())
        return Build(
            self.spec.name,
            direction(self.spec, self.signature),
            dtype,
            self.hardware.name,
            self.backend.name,
            variant=self.family.name,
            reason=reason,
            final=False,
            seconds=round(seconds, 2),
        )


def environment_of(job: Job) -> tuple[str, str, Mapping[str, str]]:
    """Backend, target and environment of the process that may compile a job."""
    return job.backend.name, job.hardware.name, job.family.load_compiler().environment(job.hardware, job.quick)


class _CompilerWorker:
    """The compiler process of one thread. It serves the jobs of one backend and target whose variants need the same
    environment, and is replaced for others."""

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self.variables = variables
        self.home: tuple[str, str, Mapping[str, str]] | None = None
        self.process: subprocess.Popen[str] | None = None

    def serve(self, job: Job, timeout: float) -> Build:
        start = time.perf_counter()
        backend, target, environment = environment_of(job)
        wanted = backend, target, {**environment, **self.variables}
        if self.process is None or wanted != self.home:
            self.close()
            self.process = self._begun(*wanted)
            self.home = wanted
        answer = self._request(self.process, job, timeout)
        if isinstance(answer, Build):
            return answer
        self.close()
        return job.failed(answer, time.perf_counter() - start)

    def _begun(self, backend: str, target: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        self.scratch = Path(tempfile.mkdtemp(prefix="portakern-compile-"))
        self.log = self.scratch / "log"
        variables = {n: v.replace("{scratch}", str(self.scratch)) for n, v in environment.items()}
        return subprocess.Popen(
            [sys.executable, "-m", "portakern.tools.compile.worker", backend, target], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "PORTAKERN_LOG": str(self.log), **variables}, start_new_session=True,
        )  # fmt: skip

    def _request(self, process: subprocess.Popen[str], job: Job, timeout: float) -> Build | str:
        """The answer, or how the process ended."""
        assert process.stdin is not None and process.stdout is not None
        request = {"op": job.spec.name, "variant": job.family.name, "tiling": dict(job.tiling), "form": job.signature,
                   "assembly": job.assembly, "way": job.mode, "kernel": job.kernel}  # fmt: skip
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._death(process)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                return f"no answer in {timeout:.0f} s"
        answer = process.stdout.readline()
        return Build.from_dict(json.loads(answer)) if answer.endswith("\n") else self._death(process)

    def _death(self, process: subprocess.Popen[str]) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        status = process.poll()
        signalled = status is not None and status < 0
        how = f"died of {signal.Signals(-(status or 0)).name}" if signalled else f"ended with status {status}"
        said = self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""
        return f"the compiler {how}" + (f": {one_line(said[said.find(chr(10)) + 1 :] or said)}" if said.strip() else "")

    def stop(self) -> None:
        """End what runs, from another thread too."""
        process = self.process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the group is this worker's own: it started a session

    def close(self) -> None:
        self.stop()
        process, self.process = self.process, None
        if process is None:
            return
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


class Pool:
    """Compiler processes that stay for later jobs, since importing a compiler is slow. Several threads may share a
    pool.

    ``processes``: at a time; ``timeout``: seconds that one job may take; ``variables``: of the environment, for those
    that the compiler would choose. It is closed by whoever made it.
    """

    def __init__(self, processes: int, timeout: float, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self.timeout = timeout
        self.workers = [_CompilerWorker(variables) for _ in range(max(1, processes))]
        self._free: SimpleQueue[_CompilerWorker] = SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)

    def run(
        self, jobs: Sequence[Job], done: Callable[[Job, Build], None] = lambda job, built: None
    ) -> Iterator[tuple[Job, Build]]:
        """Compile every job; the results as they come. One that is left before its end ends the processes."""

        def serve(job: Job) -> Build:
            worker = self._free.get()
            try:
                return worker.serve(job, self.timeout)
            finally:
                self._free.put(worker)

        executor = ThreadPoolExecutor(len(self.workers))
        finished = False
        try:
            futures = {executor.submit(serve, job): job for job in jobs}
            for future in as_completed(futures):
                built = future.result()
                done(futures[future], built)
                yield futures[future], built
            finished = True
        finally:
            if not finished:
                for worker in self.workers:
                    worker.stop()
            executor.shutdown(cancel_futures=True)
            if not finished:
                self.close()

    def close(self) -> None:
        """End the processes; a later run begins with new ones."""
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run(
    jobs: list[Job], processes: int, timeout: float, done: Callable[[Job, Build], None] = lambda job, built: None
) -> Iterator[tuple[Job, Build]]:
    """Compile every job, ``processes`` at a time; the results as they come."""
    with Pool(min(processes, len(jobs)), timeout) as pool:
        yield from pool.run(jobs, done)
