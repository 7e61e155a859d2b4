"""What a judged kernel can try against the machine, and which protection stops it: every try succeeds where none of the
protections that the page names is in force, and fails otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from portakern.cli import app

if sys.platform != "linux":
    pytest.skip("the judge isolates candidates with features of Linux", allow_module_level=True)

from portakern.core.failing import Ended
from portakern.judging import ProcessLimits, judge
from portakern.tools.judge import calls
from portakern.tools.judge.groups import ControlGroup
from portakern.tools.judge.process import Process, empty
from portakern.tools.judge.sandbox import PROTECTIONS
from tests.test_judge_protocol import RIGHT, RIGHT_REPLY, X, called, framed

PAGE = Path(__file__).parent.parent / "docs/how-to/is-it-right.md"


class Try(NamedTuple):
    """``code``: the body of a function of ``at``, a folder of the asker's, and ``own``, the candidate's; it returns
    whether it succeeded. ``stopped``: the protections of which any one stops it; ``fails``: a system may stop it."""

    code: str
    stopped: tuple[str, ...]
    fails: bool = False


ABSTRACT, PORT, TERMINAL, SHARED = "@ABSTRACT@", "@PORT@", "@TERMINAL@", "@SHARED@"
TRIES = {
    "connect to a Unix socket by its path (`docker.sock`, the session's bus, `ssh-agent`)": Try(
        "s = socket.socket(socket.AF_UNIX); s.connect(at + '/s'); return True", ("calls",)
    ),
    "connect to an abstract Unix socket": Try(
        f"s = socket.socket(socket.AF_UNIX); s.connect('\\0{ABSTRACT}'); return True", ("calls", "network"), True
    ),
    "connect to a port": Try(
        f"s = socket.socket(); s.connect(('127.0.0.1', {PORT})); return True", ("calls", "network")
    ),
    "open a netlink or raw socket": Try("socket.socket(16, socket.SOCK_RAW, 0); return True", ("calls",)),
    "change modes, times or attributes of your files": Try(
        "os.chmod(at + '/file', 0o640); os.utime(at + '/file', (1, 1)); return True", ("mounts",)
    ),
    "write, create, rename or remove your files": Try(
        "open(at + '/file', 'a').close(); os.mkdir(at + '/made'); os.rmdir(at + '/made'); return True",
        ("mounts", "files"),
    ),
    "change somebody's shared memory in `/dev/shm`": Try(
        f"open('{SHARED}', 'r+b').write(b'changed'); return True", ("mounts", "files")
    ),
    "write to your terminal, or to another device": Try(
        f"open('{TERMINAL}', 'w').write('right: forged'); return True", ("mounts", "files")
    ),
    "have more files than its memory holds": Try(
        "v = os.statvfs(own); return v.f_blocks * v.f_frsize > 1 << 28", ("mounts",)
    ),
    "use capabilities in a namespace of its own": Try(
        "pid = os.fork() or os._exit(libc.unshare(0x10000000) or libc.unshare(0x20000)); "
        "return os.waitpid(pid, 0)[1] == 0",
        ("calls",),
    ),
    "hide memory in memfds or System V segments": Try(
        "os.memfd_create('hidden'); return libc.shmget(0, 4096, 0o1600) >= 0", ("calls",)
    ),
    "make calls by io_uring, which no filter sees": Try(
        "b = ctypes.create_string_buffer(120); return libc.syscall(425, 1, b) >= 0", ("calls",), True
    ),
    "read what you can read": Try("return open(at + '/file').read() == 'mine'", ()),
    "lock your files": Try(
        "fcntl.flock(os.open(at + '/file', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB); return True", ()
    ),
}


def candidate(at: Path, own: str = "os.getcwd()") -> str:
    """A right kernel that tries all first, and prints the numbers of what succeeded."""
    text = "import ctypes, fcntl, os, socket\nlibc = ctypes.CDLL(None)\nat, own = " + f"{str(at)!r}, {own}\n"
    for i, t in enumerate(TRIES.values()):
        body = textwrap.indent("\n".join(t.code.split("; ")), " " * 8)
        text += f"def try_{i}():\n    try:\n{body}\n    except OSError:\n        return False\n\n"
    tried = ", ".join(f"try_{i}" for i in range(len(TRIES)))
    first = "    print('tried', *(i for i, t in enumerate(tries) if t()), flush=True) if not seen else 0\n"
    first += "    seen.append(1)\n"
    return text + f"tries, seen = [{tried}], []\n" + RIGHT.replace("def softmax(x):\n", "def softmax(x):\n" + first)


@pytest.fixture
def outside(tmp_path):
    """The asker's things: a file, two sockets that listen, a port, a terminal, shared memory."""
    (tmp_path / "file").write_text("mine")
    name = f"portakern-{os.getpid()}"
    with contextlib.ExitStack() as opened:
        for address in (str(tmp_path / "s"), f"\0{name}"):
            listening = opened.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        port = opened.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        terminal, other = os.openpty()
        opened.callback(os.close, terminal)
        opened.callback(os.close, other)
        shared = opened.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm"))
        given = {ABSTRACT: name, PORT: str(port), TERMINAL: os.ttyname(other), SHARED: shared.name}
        yield tmp_path, given


def tried(outside, without=()):
    at, given = outside
    text = candidate(at)
    for word, value in given.items():
        text = text.replace(word, value)
    file = at / "kernel" / "mine.py"
    file.parent.mkdir()
    file.write_text(text)
    limits = ProcessLimits(memory=1 << 29, load_seconds=60.0, without=without)
    result = judge(file, "softmax", shapes=[{"x": (8, 100)}], dtypes=["float32"], max_examples=1, process_limits=limits)
    assert result.report.outcome == "right", (result.report.failures, result.printed)
    numbers = re.search(r"tried([ \d]*)", result.printed)[1].split()
    return {[*TRIES][int(i)] for i in numbers}, {*result.protections}


@pytest.mark.parametrize("without", [(), ("calls",), ("mounts", "files"), ("calls", "network")])
def test_a_try_succeeds_where_nothing_that_stops_it_is_in_force(without, outside):
    done, in_force = tried(outside, without)
    assert not in_force & {*without}
    impossible = {name for name, t in TRIES.items() if t.fails}
    expected = {name for name, t in TRIES.items() if not in_force & {*t.stopped}}
    assert done - impossible == expected - impossible and done <= expected
    if "mounts" in in_force:
        assert stat.S_IMODE((outside[0] / "file").stat().st_mode) != 0o640


def test_the_page_has_each_try_and_what_stops_it():
    text = PAGE.read_text()
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))
    said = {name: " or ".join(f"*{p}*" for p in t.stopped) or "nothing" for name, t in TRIES.items()}
    assert said.items() <= rows.items()
    first = text.partition("```")[0]
    assert all(name.partition(" (")[0] in first for name, t in TRIES.items() if not t.stopped)


CAPABILITIES = """
def capabilities():
    lines = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    return [lines[n].strip() for n in ("CapEff", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")]

print(*capabilities(), *sorted(os.listdir("/dev")), flush=True)
"""


def test_its_process_has_no_capabilities_and_few_devices(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\n" + CAPABILITIES + RIGHT)
    result = judge(file, "softmax", shapes=[{"x": (8, 100)}], dtypes=["float32"], max_examples=1)
    if {"privileges", "calls", "mounts"} - {*result.protections}:
        pytest.skip("this system does not grant the protections")
    none = "0" * 16
    devices = ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]
    assert result.printed.split() == [none, none, none, none, "1", "2", *devices]


# --- what the candidate leaves, and what it takes ---


def test_folders_as_deep_as_a_candidate_likes_are_gone_afterwards(tmp_path):
    deep = tmp_path / "deep"
    deep.mkdir()
    at = os.open(deep, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=at)
        os.close(os.open("f", os.O_CREAT, dir_fd=at))
        beneath = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = beneath
    os.close(at)
    (deep / "link").symlink_to(tmp_path)
    (deep / "shut").mkdir(mode=0)
    empty(str(deep))
    assert [*deep.iterdir()] == [] and tmp_path.is_dir()


class Dripping(Process):
    """The judge's side of a process that sends a byte now and then."""

    def __init__(self) -> None:
        self.watched, self.seen = 0.0, 0
        self.replies, self.theirs = os.pipe()
        os.set_blocking(self.replies, False)

    def _watch(self) -> None:
        self.seen += 1
        raise Ended("memory", "it used too much")


def test_a_reply_byte_by_byte_does_not_hide_memory():
    process = Dripping()
    os.write(process.theirs, b"1")  # there is always something to read
    with pytest.raises(Ended, match="it used too much"):
        process._take(8, 1e18, 5.0)
    os.close(process.replies)
    os.close(process.theirs)
    assert called(framed({"outputs": [RIGHT_REPLY]}, X.tobytes()))[0].tolist() == X.tolist()


def test_files_in_memory_are_counted_by_the_judge_where_no_control_group_does():
    from portakern.tools.judge import process

    held, ours = os.memfd_create("hidden"), os.memfd_create("inputs")
    before = process._unmapped([os.getpid()], os.fstat(ours))
    os.write(held, bytes(1 << 20))
    os.write(ours, bytes(1 << 20))
    assert process._unmapped([os.getpid()], os.fstat(ours)) - before == 1 << 20
    os.close(held)
    os.close(ours)


def test_a_control_group_is_made_where_its_controllers_are_there(tmp_path, monkeypatch):
    """Of version 2, as the kernel shows it: a folder with files."""
    base, made = tmp_path / "user" / "app", Path.mkdir
    base.mkdir(parents=True)

    def mkdir(self, *args, **named):
        made(self, *args, **named)
        for name in ("memory.max", "pids.max", "memory.swap.max", "cgroup.procs", "cgroup.kill"):
            (self / name).write_text("")
        (self / "memory.events").write_text("low 0\noom 1\noom_kill 0\n")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    how = {"memory": 1 << 30, "processes": 4, "root": tmp_path, "own": "/user/app/judge.scope"}
    assert ControlGroup.made("of_mine", **how) is None  # no controllers
    (base / "cgroup.subtree_control").write_text("cpu memory")
    assert ControlGroup.made("of_mine", **how) is None
    (base / "cgroup.subtree_control").write_text("cpu memory pids")
    group = ControlGroup.made("of_mine", **how)
    assert group is not None and group.folder == base / "of_mine" and group.holds(77)
    written = {name: (group.folder / name).read_text() for name in ("memory.max", "pids.max", "cgroup.procs")}
    assert written == {"memory.max": str(1 << 30), "pids.max": "64", "cgroup.procs": "77"} and not group.ran_out
    (group.folder / "memory.events").write_text("oom_kill 2\n")
    assert group.ran_out


def test_the_filter_has_its_numbers_from_the_kernels_headers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    generic = Path("/usr/include/asm-generic/unistd.h")
    if not header.is_file() or not generic.is_file():
        pytest.skip("the kernel's headers are not installed")
    for column, file in enumerate((header, generic)):
        found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text()))
        for name, numbers in {**calls.REFUSED, **calls.LOOKED_AT}.items():
            assert int(found.get(name, numbers[column] if int(numbers[column]) > 430 else -1)) == numbers[column], name


def test_a_filter_for_drivers_admits_one_kind_of_socket():
    for machine in calls.MACHINES:
        plain, wide = (calls.program(machine, drivers) for drivers in (False, True))
        assert len(plain) < 4096 and all(0 <= skip < 256 for s in (*plain, *wide) for skip in s[1:3])
        asks = (calls.EQUAL, 1, 0, calls.SOCK_SEQPACKET)
        assert asks in wide and asks not in plain


def test_doctor_says_which_protections_stand_here():
    rows = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["judge"]
    assert {r["protection"]: r["what"] for r in rows} == PROTECTIONS
    assert {r["protection"]: r["granted"] for r in rows}["session"] is True
