"""The judge's side of the candidate's process: start it, send requests, enforce its limits, and end it.

The candidate can write any bytes to the pipe. Replies are read as outputs of the expected form, or as the text of a
failure, and as nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from portakern.core.failing import Ended
from portakern.core.targets import HOST
from portakern.errors import SpecError, UnavailableError
from portakern.printable import printable
from portakern.processes import SHARING
from portakern.tools.judge import wire
from portakern.tools.judge.groups import ControlGroup
from portakern.tools.judge.wire import HEADER, WireOutput

__all__ = ["Process", "ProcessLimits", "empty", "protections_here", "within"]

PIPE = 1 << 20
"""Bytes that a reply's pipe holds: Linux gives 65536, of which a large output needs hundreds."""

WATCH = 0.2
"""Seconds after which its processes and their memory are counted again, where no control group does."""

ROOM = 4
"""What its folder may hold, and /dev/shm: the memory that is allowed, divided by this."""

KINDS = ("refused", "memory", "crashed")


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of the candidate's process.

    Attributes:
      seconds: time of one call; load_seconds: time of the start and the import.
      memory: bytes of memory of all its processes; processes: number of its processes.
      file_bytes: size of one file, its printed output included.
      without: names of protections to omit (:data:`portakern.tools.judge.sandbox.PROTECTIONS`), if the device does not
        work with them.
    """

    seconds: float = 30.0
    load_seconds: float = 120.0
    memory: int = 8 << 30
    processes: int = 256
    file_bytes: int = 64 << 20
    without: Collection[str] = ()

    def __post_init__(self) -> None:
        within("seconds of a call", self.seconds, 1e-3, 1e6)
        within("load_seconds", self.load_seconds, 1e-3, 1e6)
        within("bytes of memory", self.memory, 1 << 20, 1 << 50, integer=True)
        within("processes", self.processes, 1, 1 << 22, integer=True)
        within("file_bytes", self.file_bytes, 1 << 10, 1 << 50, integer=True)


def within(what: str, value: Any, least: float, most: float, integer: bool = False) -> None:
    """SpecError if a user's value is no number of this range."""
    number = type(value) is int or (type(value) is float and not integer and math.isfinite(value))
    if not number or not least <= value <= most:
        kind = "a whole number" if integer else "a number"
        shown = printable(repr(value) if type(value) is not int or value.bit_length() < 999 else "a longer number")[:60]
        raise SpecError(f"judge: {what}: {shown}; expected {kind} from {least:g} to {most:g}")


class Process:
    """The candidate's process, with one array library on one device. It starts in the background, while the judge
    prepares its cases: importing a library and starting a driver take seconds."""

    def __init__(self, limits: ProcessLimits, framework: str, platform: str) -> None:
        if sys.platform != "linux":
            raise UnavailableError("portakern judge isolates a candidate with features of Linux; run it on Linux")
        self.limits = limits
        self.folder = tempfile.TemporaryDirectory(prefix="portakern-judge-", ignore_cleanup_errors=True)
        self.log = os.open(Path(self.folder.name, "printed"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.memory = os.memfd_create("portakern-inputs")
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        self.replies, self.requests = ours_in, ours_out
        with contextlib.suppress(OSError):  # as much as the system lets a user have
            fcntl.fcntl(ours_in, fcntl.F_SETPIPE_SZ, PIPE)
        command = [sys.executable, "-P", "-m", "portakern.tools.judge.host", str(theirs_in), str(theirs_out),
                   str(self.memory), self._sandbox(platform != HOST.platform)]  # fmt: skip
        self.popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, cwd=self.folder.name,
            env=_environment(self.folder.name), start_new_session=True, pass_fds=(theirs_in, theirs_out, self.memory),
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self.replies, False)
        self.protections: list[str] = []
        self.why = ""  # the device that it was to begin did not
        self.watched = time.monotonic()
        self.group = self._grouped()
        with contextlib.suppress(OSError):  # what has ended already is told by :meth:`begun`
            os.write(self.requests, b"\n")  # it waits for its group
            self._send({"do": "begin", "framework": framework, "device": platform})  # the pipe holds it till it is read

    def _sandbox(self, drivers: bool) -> str:
        """What :class:`portakern.tools.judge.sandbox.Sandbox` is made of, as text."""
        limits = self.limits
        space = 0 if drivers else limits.memory + (8 << 30)  # a driver maps more than there is
        cpu = int(limits.load_seconds + 3600)
        given = [self.folder.name, limits.memory // ROOM, space, cpu, limits.file_bytes, drivers, [*limits.without]]
        return json.dumps(given)

    def _grouped(self) -> ControlGroup | None:
        """The control group that the process is in, where there can be one."""
        if "counted" in self.limits.without:
            return None
        name = f"portakern-judge-{self.popen.pid}"
        group = ControlGroup.made(name, self.limits.memory, self.limits.processes)
        if group is not None and not group.holds(self.popen.pid):
            group.end()
            return None
        return group

    def begun(self) -> bool:
        """Wait until the process has its protections and has imported the library, before the candidate; whether it
        reaches the device under them."""
        with self.or_ended():
            self.protections = [str(p) for p in self._reply(self.limits.load_seconds).get("protections", ())]
            self.protections += ["counted"] if self.group else []
            told = self._reply(self.limits.load_seconds)
            self.why = wire.words(told, "why", 300)
            return told.get("reached") is True

    def load(self, ask: Mapping[str, Any]) -> list[tuple[str, str, bool]] | None:
        """Import the candidate; its parameters (:func:`portakern.tools.judge.wire.parameters`)."""
        with self.or_ended():
            self._send({"do": "load", **ask})
            return wire.parameters(self._reply(self.limits.load_seconds))

    def problem(self, file: str) -> wire.Problem:
        """What ``get_inputs`` of a file names. A process that is asked this never has a candidate."""
        with self.or_ended():
            self._send({"do": "inputs", "file": file})
            return wire.problem(self._reply(self.limits.load_seconds))

    def call(
        self, ask: Mapping[str, Any], memories: Sequence[np.ndarray], most: int
    ) -> tuple[list[WireOutput], list[np.ndarray] | None]:
        """One call on these memories, of which each lies at a multiple of 64 bytes. They hold afterwards what the
        candidate left there. ``most``: bytes of outputs.

        Returns:
          what is told of each output, and its bytes; None where they are of another form, which needs no values.
        """
        at, places = 0, []
        with self.or_ended():
            for m in memories:
                places.append(at)
                at += -(-m.nbytes // 64) * 64
            os.ftruncate(self.memory, max(at, 1))
            for place, m in zip(places, memories, strict=True):
                _write(self.memory, m, place)
            self._send({"do": "call", **ask, "bytes": at})
            until = time.monotonic() + self.limits.seconds
            told = wire.outputs(self._reply(self.limits.seconds))
            sizes = [o.size for o in told if not o.kind]
            payload = None
            if sum(sizes) <= most:
                payload = [self._take(n, until, self.limits.seconds) for n in sizes]
            for place, m in zip(places, memories, strict=True):
                _read(self.memory, m, place)
            return told, payload

    def end(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        if self.group:
            self.group.end()
        for fd in (self.replies, self.requests, self.memory):
            with contextlib.suppress(OSError):
                os.close(fd)
        empty(self.folder.name)
        self.folder.cleanup()

    @contextlib.contextmanager
    def or_ended(self) -> Iterator[None]:
        """Whatever a reply is not, is an end of the process: Ended says which."""
        try:
            yield
        except (Ended, MemoryError):  # the memory is the judge's own: a reply takes no more than was asked for
            raise
        except Exception as e:
            raise Ended("crashed", self._how(e)) from None

    def printed(self, limit: int = 600) -> str:
        """The end of what the candidate printed, of the file that was opened before it ran: by its name another may lie
        there."""
        size = os.fstat(self.log).st_size
        said = os.pread(self.log, limit, max(0, size - limit)).decode(errors="replace").strip()
        return printable(said, lines=True)

    def _how(self, error: Exception) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.popen.wait(1.0)
            if self.group and self.group.ran_out:
                raise Ended("memory", f"it used all of the {self.limits.memory / 2**30:g} GiB that are allowed")
            number = -code if code < 0 else code - 128
            name = f"signal {signal.Signals(number).name}" if number in {*signal.Signals} else f"status {code}"
            said = self.printed()
            return f"its process ended with {name}" + (f"; the end of its output: {said}" if said else "")
        return f"its process sent an invalid reply: {type(error).__name__}: {printable(error)[:200]}"

    def _send(self, ask: Mapping[str, Any]) -> None:
        text = json.dumps(ask).encode()
        whole, until = memoryview(struct.pack("<Q", len(text)) + text), time.monotonic() + self.limits.seconds
        os.set_blocking(self.requests, False)
        while whole:
            if not select.select((), (self.requests,), (), max(until - time.monotonic(), 0))[1]:
                raise Ended("hung", f"it read no request for {self.limits.seconds:g} s")
            whole = whole[os.write(self.requests, whole) :]

    def _reply(self, seconds: float) -> dict[str, Any]:
        """The header of a reply. Ended where it tells of an exception."""
        until = time.monotonic() + seconds
        size = struct.unpack("<Q", self._take(8, until, seconds).data)[0]
        if size > HEADER:
            raise ValueError(f"a header of {size} bytes")
        told = wire.header(self._take(size, until, seconds).tobytes())
        if "error" in told:
            kind = told["error"] if told["error"] in KINDS else "crashed"
            raise Ended(kind, f"raised {wire.words(told, 'type', 80)}: {wire.words(told, 'text', 2000)}")
        return told

    def _take(self, count: int, until: float, seconds: float) -> np.ndarray:
        """So many bytes of a reply, while the process stays within its bounds."""
        found, at = np.empty(count, np.uint8), 0
        while at < count:
            left = until - time.monotonic()
            if left <= 0:
                raise Ended("hung", f"no result within {seconds:g} s")
            there = select.select((self.replies,), (), (), min(left, WATCH))[0]
            if time.monotonic() - self.watched > WATCH:  # also of one that sends its reply byte by byte
                self._watch()
            if not there:
                continue
            some = os.readv(self.replies, [found[at : at + PIPE].data])
            if not some:
                raise EOFError
            at += some
        return found

    def _watch(self) -> None:
        tree = list(_tree(self.popen.pid))
        self.watched = time.monotonic()
        if len(tree) > self.limits.processes:
            raise Ended("crashed", f"it started {len(tree)} processes; {self.limits.processes} are allowed")
        used = sum(map(_resident, tree)) + _unmapped(tree, os.fstat(self.memory))
        if used > self.limits.memory:
            raise Ended(
                "memory", f"it used {used / 2**30:.1f} GiB of memory; {self.limits.memory / 2**30:g} are allowed"
            )


def protections_here() -> list[str]:
    """The names of the protections that this system grants; none if a process does not start under them."""
    process = Process(ProcessLimits(load_seconds=30.0), "numpy", HOST.platform)
    try:
        with contextlib.suppress(Ended):
            process.begun()
    finally:
        process.end()
        os.close(process.log)
    return process.protections


def _environment(folder: str) -> dict[str, str]:
    """What a candidate's process needs of portakern's, with all folders to write to in its own."""
    kept = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "CUDA_HOME", "CUDA_VISIBLE_DEVICES",
            "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "JAX_PLATFORMS", "TRITON_INTERPRET",
            "SYSTEMROOT")  # fmt: skip
    own = ("HOME", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME",
           "CUDA_CACHE_PATH", "PORTAKERN_CACHE")  # fmt: skip
    given = {name: os.environ[name] for name in kept if name in os.environ}
    return {**given, **dict.fromkeys(own, folder), **SHARING, "PYTHONDONTWRITEBYTECODE": "1"}


def _write(fd: int, m: np.ndarray, at: int) -> None:
    raw = memoryview(m.view(np.uint8).reshape(-1).data)
    while raw:
        done = os.pwrite(fd, raw[: 1 << 26], at)
        raw, at = raw[done:], at + done


def _read(fd: int, m: np.ndarray, at: int) -> None:
    """The bytes are copied: memory that a candidate may cut short is not mapped here."""
    raw = memoryview(m.view(np.uint8).reshape(-1).data)
    while raw:
        done = os.preadv(fd, [raw[: 1 << 26]], at)
        if not done:
            raise ValueError("the inputs' memory was cut")
        raw, at = raw[done:], at + done


def _tree(root: int) -> Iterator[int]:
    """A process and all below it."""
    yield root
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{root}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{root}/task/{thread}/children").read_text().split():
                    yield from _tree(int(child))


def _unmapped(tree: Collection[int], own: os.stat_result) -> int:
    """Bytes of the files in memory that processes hold open, but for the one that the judge made."""
    found: dict[int, int] = {}
    for pid in tree:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    about = os.stat(f"/proc/{pid}/fd/{name}")
                    if about.st_dev == own.st_dev and about.st_ino != own.st_ino:
                        found[about.st_ino] = 512 * about.st_blocks
    return sum(found.values())


def empty(folder: str) -> None:
    """Remove what lies in a folder, as deep as it may lie: what lies below is moved up first, since a path, and a
    function that calls itself, have an end."""
    with contextlib.suppress(OSError):
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names, count = os.listdir(top), 0
            while names:
                count = _emptied(top, names.pop(), names, count)
        finally:
            os.close(top)


def _emptied(top: int, name: str, names: list[str], count: int) -> int:
    """Remove one thing of a folder; the folders in it become the folder's own, under numbers, and are added to
    ``names``. Returns the next number."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=top)
            return count
        at = _opened(name, top)
        try:
            for inner in os.listdir(at):
                if not stat.S_ISDIR(os.stat(inner, dir_fd=at, follow_symlinks=False).st_mode):
                    os.unlink(inner, dir_fd=at)
                    continue
                os.close(_opened(inner, at))  # a folder that cannot be written to cannot be moved either
                count += 1
                names.append(f".portakern-{count}")
                os.rename(inner, names[-1], src_dir_fd=at, dst_dir_fd=top)
        finally:
            os.close(at)
        os.rmdir(name, dir_fd=top)
    return count


def _opened(name: str, within: int) -> int:
    """A folder, made one that can be read and written to; no link is followed, whoever else is at work there."""
    where = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        os.chmod(f"/proc/self/fd/{where}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where)
    finally:
        os.close(where)


def _resident(pid: int) -> int:
    """Bytes of a process's own, with its share of what it shares."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0
