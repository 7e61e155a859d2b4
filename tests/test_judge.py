"""The judge: candidates of every form get their verdict, and none of them reaches it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import textwrap
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner

import portakern as pk
from portakern.cli import app
from portakern.core import registry
from tests import pages

if sys.platform != "linux":
    pytest.skip("the judge isolates candidates with features of Linux", allow_module_level=True)

from portakern.core.targets import Target
from portakern.judging import ProcessLimits, judge
from portakern.testing.fixed import cut_to
from portakern.tools.judge import hashing, judgement
from portakern.tools.judge.mapping import parse
from portakern.tools.judge.sandbox import PROTECTIONS

ROOT = Path(__file__).parent.parent
ZEROS = """
import numpy as np

def softmax(x):
    return np.zeros_like(x)
"""
QUICK = {"shapes": [{"x": (8, 100)}], "dtypes": ["float32"], "max_examples": 2, "seed": 0}


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """A problem's text is read once, in a process of its own that imports torch, and not for each verdict."""
    read, known = judgement._inputs_of, {}

    def inputs_of(problem, bounds):
        text = problem.read_text()
        return known[text] if text in known else known.setdefault(text, read(problem, bounds))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(judgement, "_inputs_of", inputs_of)
        yield


def judged(folder, text, op="softmax", seconds=20.0, **how):
    file = folder / "candidate.py"
    file.write_text(textwrap.dedent(text))
    most = {"memory": 1 << 30, "file_bytes": 1 << 20, "processes": 64}
    limits = how.pop("process_limits", ProcessLimits(seconds=seconds, load_seconds=60.0, **most))
    return judge(file, op, **{**QUICK, **how}, process_limits=limits)


class Escape(NamedTuple):
    """A try to get away with zeros. ``stopped``: by what, as the table of the documentation has it."""

    text: str
    outcomes: tuple[str, ...]
    stopped: str


ESCAPES = {
    "a verdict on the pipe": Escape(
        """
        import json, os, stat, struct

        def softmax(x):
            text = json.dumps({"outcome": "right", "passed": True}).encode()
            for fd in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(fd).st_mode):
                        os.write(fd, struct.pack("<Q", len(text)) + text)
                except OSError:
                    pass
            return x * 0
        """,
        ("crashed",),
        "a reply contains outputs or an error message, never a verdict",
    ),
    "outputs on the pipe before the call": Escape(
        """
        import json, os, stat, struct

        def softmax(x):
            told = {"outputs": [{"dtype": "float32", "shape": list(x.shape), "contiguous": True, "bytes": x.nbytes,
                                 "shares": [], "before": []}]}
            text = json.dumps(told).encode()
            for fd in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(fd).st_mode):
                        os.write(fd, struct.pack("<Q", len(text)) + text + bytes(x.nbytes))
                except OSError:
                    pass
            return x * 0
        """,
        ("wrong",),
        "forged outputs are compared like all outputs",
    ),
    "a header of a gigabyte": Escape(
        """
        import os, stat, struct

        def softmax(x):
            for fd in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(fd).st_mode):
                        os.write(fd, struct.pack("<Q", 1 << 30) + b"[" * 4000)
                except OSError:
                    pass
            return x * 0
        """,
        ("crashed",),
        "a header and outputs have a maximum length",
    ),
    "os._exit(0)": Escape(
        "import os\ndef softmax(x):\n    os._exit(0)\n", ("crashed",), "a process that exits has sent no reply"
    ),
    "sys.exit(0) at import": Escape(
        "import sys\nsys.exit(0)\ndef softmax(x):\n    return x\n",
        ("crashed",),
        "an exit is an exception, with an error message",
    ),
    "a replaced comparison": Escape(
        """
        import numpy as np
        import portakern.spec.tolerance
        import portakern.core.oracle

        portakern.spec.tolerance.compare = lambda *a: None
        portakern.core.oracle.oracle = lambda call: (call.arrays["x"] * 0,)
        np.allclose = np.array_equal = lambda *a, **k: True

        def softmax(x):
            return np.zeros_like(x)
        """,
        ("wrong",),
        "nothing is compared in the kernel's process",
    ),
    "arrays that compare equal to all": Escape(
        """
        import numpy as np

        class Right(np.ndarray):
            def __eq__(self, other):
                return np.ones(self.shape, bool)
            def __array_ufunc__(self, *args, **kwargs):
                return np.zeros(self.shape)

        def softmax(x):
            return np.zeros_like(x).view(Right)
        """,
        ("wrong",),
        "outputs are sent as bytes",
    ),
    "a stopped clock": Escape(
        """
        import select, time

        time.monotonic = time.perf_counter = time.time = lambda: 0.0
        select.select = lambda *a: a[:3]

        def softmax(x):
            while True:
                pass
        """,
        ("hung",),
        "the judge has its own clock",
    ),
    "unlimited memory": Escape(
        """
        def softmax(x):
            kept = []
            while True:
                kept.append(bytearray(1 << 28))
        """,
        ("ran out of memory",),
        "a limit on its address space, and on the memory of all its processes",
    ),
    "unlimited printing": Escape(
        """
        import os

        def softmax(x):
            for _ in range(1 << 12):
                os.write(1, b"right " * 4096)
            return x * 0
        """,
        ("crashed",),
        "a limit on the size of files; its output is a file",
    ),
    "signals to the judge": Escape(
        """
        import os, signal

        def softmax(x):
            for pid in (os.getppid(), 1, -1, *(int(p) for p in os.listdir("/proc") if p.isdigit())):
                for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
                    try:
                        if pid != os.getpid():
                            os.kill(pid, number)
                    except OSError:
                        pass
            return x * 0
        """,
        ("wrong", "crashed"),
        "a process namespace: the judge has no process id in it",
    ),
    "the judge's memory": Escape(
        """
        import ctypes, os

        def softmax(x):
            for pid in (p for p in os.listdir("/proc") if p.isdigit()):
                if int(pid) not in (os.getpid(), 1):
                    try:
                        open(f"/proc/{pid}/mem", "r+b").close()
                        os._exit(42)
                    except OSError:
                        pass
                    if ctypes.CDLL(None).ptrace(16, int(pid), 0, 0) == 0:
                        os._exit(43)
            return x * 0
        """,
        ("wrong",),
        "a user namespace in which it has no rights over other processes",
    ),
    "a process that outlives the verdict": Escape(
        """
        import os, subprocess, sys

        def softmax(x):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(77)"], start_new_session=True,
                             preexec_fn=lambda: os.fork() and os._exit(0))
            return x * 0
        """,
        ("wrong",),
        "the kernel ends a process namespace with its first process",
    ),
    "unlimited processes": Escape(
        """
        import os, time

        def softmax(x):
            for _ in range(1000):
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
            time.sleep(30)
        """,
        ("crashed", "hung", "ran out of memory"),
        "a limit on its processes and on their memory",
    ),
    "files of the judge": Escape(
        """
        import pathlib
        import portakern.spec.tolerance as judge

        def softmax(x):
            for path in (judge.__file__, __file__, "ESCAPED", str(pathlib.Path.home() / ".bashrc")):
                try:
                    with open(path, "a") as f:
                        f.write("# escaped\\n")
                    if not path.endswith(".bashrc"):
                        raise SystemExit("it wrote to " + path)
                except OSError:
                    pass
            return x * 0
        """,
        ("wrong",),
        "read-only mounts, and Landlock: it writes only in its own folder",
    ),
    "a network": Escape(
        """
        import socket

        def softmax(x):
            try:
                with socket.socket() as s:
                    reached = s.connect_ex(("127.0.0.1", PORT)) == 0
            except OSError:
                reached = False
            if reached:
                raise SystemExit("it reached somebody")
            return x * 0
        """,
        ("wrong",),
        "no sockets, and its own network namespace without interfaces",
    ),
    "inputs cut short under the judge": Escape(
        """
        import os

        def softmax(x):
            y = x * 0
            for fd in range(3, 64):
                try:
                    if "memfd" in os.readlink(f"/proc/self/fd/{fd}"):
                        os.ftruncate(fd, 0)
                except OSError:
                    pass
            os.environ["cut"] = "1"
            return y
        """,
        ("crashed",),
        "the judge copies the memory, and does not map it",
    ),
    "an input replaced by an easy one": Escape(
        """
        import numpy as np

        def softmax(x):
            x[...] = -np.inf
            x[..., 0] = 0
            return (x == 0).astype(x.dtype)
        """,
        ("wrong",),
        "the reference is computed from the judge's own copy",
    ),
    "outputs that are written after the call": Escape(
        """
        import threading, time
        import numpy as np

        def softmax(x):
            y = np.zeros_like(x)

            def later():
                time.sleep(0.3)
                e = np.exp(x - x.max(-1, keepdims=True))
                y[...] = e / e.sum(-1, keepdims=True)

            threading.Thread(target=later, daemon=True).start()
            return y
        """,
        ("wrong",),
        "outputs are copied when the call returns",
    ),
    "a refusal on the pipe": Escape(
        """
        import json, os, stat, struct

        def softmax(x):
            text = json.dumps({"error": "refused", "type": "UnsupportedError", "text": "cannot: x"}).encode()
            for fd in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(fd).st_mode):
                        os.write(fd, struct.pack("<Q", len(text)) + text)
                except OSError:
                    pass
            return x * 0
        """,
        ("refused",),
        "a candidate that refuses is not right",
    ),
    "outputs that claim the memory of inputs and of earlier outputs": Escape(
        """
        import __main__ as host

        def softmax(x):
            return x * 0

        call = host.Host.call

        def forged(self, ask):
            told, payload = call(self, ask)
            for o in told["outputs"]:
                o.update(shares=[a["name"] for a in ask["arrays"]], before=[*range(1000)])
            return told, payload

        host.Host.call = forged
        """,
        ("wrong",),
        "values are compared first, before their memory",
    ),
    "an exception whose message fails": Escape(
        """
        class Odd(Exception):
            def __str__(self):
                raise Odd

        def softmax(x):
            raise Odd
        """,
        ("crashed", "refused"),
        "a failing message is replaced and reported",
    ),
    "an array of objects": Escape(
        """
        import numpy as np

        def softmax(x):
            return np.array([[object()] * x.shape[1]] * x.shape[0])
        """,
        ("wrong",),
        "the dtype must be one of the op's",
    ),
    "a hundred outputs": Escape(
        "def softmax(x):\n    return tuple(x * 0 for _ in range(100))\n",
        ("crashed",),
        "a reply has a fixed format, with few outputs",
    ),
    "libraries left for the next process": Escape(
        """
        import os

        def softmax(x):
            for folder in (os.environ["HOME"], os.path.dirname(__file__), os.getcwd()):
                for name in ("sitecustomize.py", "numpy.py", "typer.py"):
                    try:
                        open(os.path.join(folder, name), "w").write("open('ESCAPED', 'w')")
                    except OSError:
                        pass
            return x * 0
        """,
        ("wrong",),
        "its home is a temporary folder, from which the judge imports nothing",
    ),
    "an array too large to look at": Escape(
        """
        import numpy as np

        def softmax(x):
            return np.broadcast_to(np.float32(0), (1 << 40,))
        """,
        ("ran out of memory", "wrong"),
        "shape and size are compared before values are read",
    ),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_no_try_to_break_out_reaches_the_verdict(name, tmp_path):
    escape = ESCAPES[name]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        outside = tmp_path / "escaped"
        text = escape.text.replace("PORT", str(listening.getsockname()[1])).replace("ESCAPED", str(outside))
        result = judged(tmp_path, text, seconds=0.8 if "hung" in escape.outcomes[0] else 20.0)
    assert result.report.outcome in escape.outcomes, (result.report.outcome, result.report.failures, result.printed)
    assert len(result.printed) <= 600
    assert not outside.exists()


PAGE = ROOT / "docs/how-to/is-it-right.md"


def test_the_pages_tables_of_walls_and_of_tries_are_those_of_the_code():
    rows = {r[0]: r[1:] for r in re.findall(r"^\| (.+?) \| (.+?) (?:\| (.+?) )?\|$", PAGE.read_text(), re.MULTILINE)}
    assert {n: (" or ".join(e.outcomes), e.stopped) for n, e in ESCAPES.items()}.items() <= rows.items()
    assert {n: (words, "") for n, words in PROTECTIONS.items()}.items() <= rows.items()
    assert len(ESCAPES) >= 12


def test_the_page_runs_as_printed(tmp_path, monkeypatch):
    """The files that it shows, the commands that it judges them by, and what those print; on fewer rows than there."""
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setitem(judgement.ELEMENTS, "cpu", 1 << 16)
    monkeypatch.chdir(tmp_path)
    printed, ran = "", 0
    for block in pages.FENCE.finditer(PAGE.read_text()):
        title = re.fullmatch(r' title="(.+)"', block["more"])
        if block["head"] == "python" and title and "my_kernels" not in block["body"]:
            (tmp_path / title[1]).write_text(block["body"])
        for line in block["body"].splitlines() if block["head"] == "bash" else ():
            if line.startswith("portakern judge"):
                printed = CliRunner().invoke(app, shlex.split(line)[1:]).stdout
        if block["head"] == "text":
            pages.check_printed(block["body"], printed, title[1])
            ran += 1
    assert ran == 3 and json.loads((tmp_path / "verdict.json").read_text())["outcome"] == "right"
    workflow = next(b["body"] for b in pages.FENCE.finditer(PAGE.read_text()) if b["head"] == "yaml")
    for line in re.findall(r"run: portakern (.*)", workflow):
        name, *words = shlex.split(line)
        typer.main.get_command(app).commands[name].make_context(name, words)


def test_what_it_started_ends_with_it(tmp_path):
    judged(tmp_path, ESCAPES["a process that outlives the verdict"].text)
    time.sleep(0.1)
    running = [Path(f"/proc/{p}/cmdline") for p in os.listdir("/proc") if p.isdigit()]
    for file in running:
        try:
            assert b"time.sleep(77)" not in file.read_bytes()
        except OSError:
            continue  # it ended meanwhile


# --- candidates of every form ---

NUMPY_RIGHT = """
import numpy as np

def softmax(x):
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
"""


def test_a_function_is_right_and_what_was_conceded_is_told(tmp_path):
    result = judged(tmp_path, NUMPY_RIGHT, max_examples=12)
    assert result.report.outcome == "right" and result.report.examples == 12, result.report.failures
    assert "shapes other than x [8, 100]" in result.report.not_required
    assert [*result.protections, *(["counted"] * ("counted" not in result.protections))] == [*PROTECTIONS]
    assert len(result.sha256) == 64
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["outcome"] == "right" and plain["protections"] == result.protections and plain["name"] == "softmax"


def test_a_device_that_does_not_begin_behind_the_walls_ends_with_their_names_and_what_to_do(tmp_path, monkeypatch):
    """The judge reaches it; the candidate's process has none here."""
    monkeypatch.setattr("portakern.tools.judge.judgement._target", lambda library, device: Target("cuda", "sm_90"))
    with pytest.raises(pk.UnavailableError, match=r"numpy finds the cuda .*, files, calls.*\).* --without files"):
        judged(tmp_path, NUMPY_RIGHT, device="cuda")


def test_walls_are_left_out_by_name_and_the_verdict_says_so(tmp_path):
    left = {"processes", "files", "counted"}
    result = judged(tmp_path, NUMPY_RIGHT, process_limits=ProcessLimits(without=tuple(left)))
    assert result.report.outcome == "right" and {*PROTECTIONS} - {*result.protections} == left
    for name in ("moat", "session"):
        with pytest.raises(pk.SpecError, match=f"'{name}' cannot be omitted; expected some of limits, "):
            judged(tmp_path, NUMPY_RIGHT, process_limits=ProcessLimits(without=(name,)))


KEEPS = {
    "an input": ("x[0, 0] = 7", "inputs"),
    "memory beside it": ("np.lib.stride_tricks.as_strided(x, (x.size + 60,), (4,))[x.size :] = 0", "outside"),
    "a buffer": ("kept.setdefault(x.shape, y)[...] = y; y = kept[x.shape]", "kept"),
    "its input's memory": ("x[...] = y; y = x", "own_memory"),
}


@pytest.mark.parametrize("what", KEEPS)
def test_promises_are_held_to_over_there(what, tmp_path):
    body, which = KEEPS[what]
    text = NUMPY_RIGHT.replace(
        "return e / e.sum(-1, keepdims=True)", f"y = e / e.sum(-1, keepdims=True)\n    {body}\n    return y"
    )
    result = judged(tmp_path, "kept = {}\n" + text, layouts=["shifted"], max_examples=8)
    assert (result.report.outcome, result.report.failures[0].cause) == ("broke a promise", which), (
        result.report.failures
    )


BY_ADDRESS = """
import numpy as np
kept = {}

def softmax(x):
    at = x.__array_interface__["data"][0]
    if at not in kept:
        e = np.exp(x - x.max(-1, keepdims=True))
        kept[at] = e / e.sum(-1, keepdims=True)
    return kept[at].copy()
"""


def test_results_that_are_kept_by_address_are_found(tmp_path):
    assert judged(tmp_path, BY_ADDRESS, max_examples=4).report.outcome == "wrong"


def test_a_launcher_writes_to_what_it_is_handed(tmp_path):
    text = NUMPY_RIGHT.replace(
        "def softmax(x):", "def launch(out, x, axis):\n    assert axis == 1 and np.isnan(out).all()"
    )
    text = text.replace("return e / ", "out[...] = e / ")
    result = judged(tmp_path, text, map="x=1,y=0,axis=@axis", options={"axis": 1}, max_examples=4)
    assert result.report.outcome == "right", result.report.failures
    forgets = text.replace(" and np.isnan(out).all()", "").replace(  # to tell why, it is called on numbers too
        "out[...] = e / e.sum(-1, keepdims=True)", "out[:, 1:] = (e / e.sum(-1, keepdims=True))[:, 1:]"
    )
    result = judged(tmp_path, forgets, map="x=1,y=0,axis=@axis", options={"axis": 1}, max_examples=4)
    assert (result.report.outcome, result.report.failures[0].cause) == ("wrong", "unwritten")


def test_an_array_that_lies_transposed_is_handed_over_so(tmp_path):
    text = "import numpy as np\n\ndef matmul(a, b):\n    assert a.flags.c_contiguous and a.shape == (30, 7)\n    "
    text += "return (a.T.astype(np.float64) @ b).astype(a.dtype)\n"
    how = {"map": "a=0.mT,b=1", "shapes": [{"a": (7, 30), "b": (30, 5)}], "layouts": ["contiguous"], "max_examples": 6}
    result = judged(tmp_path, text, "matmul", **how)
    assert result.report.outcome == "right", result.report.failures
    assert judged(tmp_path, text.replace("a.T", "a.T[::-1]"), "matmul", **how).report.outcome == "wrong"


def test_calls_are_cut_along_what_no_sum_runs_over():
    spec = registry.find_spec("matmul")
    large = {"a": (70, 1 << 20), "b": (1 << 20, 30)}
    assert cut_to(spec, large, {}, 1 << 20, 1e12) == {"a": (1, 1 << 20), "b": (1 << 20, 1)}
    assert cut_to(spec, large, {}, 1 << 40, 1e15) == large
    rows, one = {"x": (16, 1 << 22)}, {"x": (1, 1 << 22)}  # the oracle of two such rows takes too long
    assert cut_to(registry.find_spec("layernorm"), rows, {}, 1 << 40, 1e15) == one
    batched = {"x": (12, 64, 50, 40)}
    assert cut_to(registry.find_spec("softmax"), batched, {"axis": 2}, 4000, 1e12)["x"][2] == 50


MODULE = """
import torch

class Norm(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features))

    def forward(self, x):
        x = x.movedim(1, -1).double()
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return (x * r * self.weight).float().movedim(-1, 1)

def get_init_inputs():
    return [6]
"""


def test_parameters_of_a_module_take_the_ops_values_and_axes_move(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    how = {"name": "Norm", "map": "x=0.movedim(1,-1),y=.movedim(1,-1),weight=@weight,eps=1e-5", "max_examples": 6}
    how |= {
        "shapes": [{"x": (3, 5, 6), "weight": (6,)}],
        "layouts": ["contiguous"],
        "process_limits": ProcessLimits(load_seconds=60),
    }
    result = judged(tmp_path, MODULE, "rmsnorm", **how)
    assert result.report.outcome == "right", result.report.failures


TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * n + at, e / tl.sum(e, 0), mask=at < n)

def launch(x, y):
    kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=128)
"""
JAX = """
import jax

def softmax(x):
    return jax.nn.softmax(x, -1)
"""


def test_a_launcher_of_triton_is_interpreted_where_there_is_no_gpu(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = judged(
        tmp_path, TRITON, map="x=0,y=1", process_limits=ProcessLimits(load_seconds=60, seconds=30), max_examples=3
    )
    assert result.report.outcome == "right", result.report.failures


def test_a_function_of_jax_takes_its_arrays(tmp_path):
    pytest.importorskip("jax", reason="jax is not installed")
    result = judged(tmp_path, JAX, process_limits=ProcessLimits(load_seconds=60, seconds=30), max_examples=3)
    assert result.report.outcome == "right", result.report.failures


EXTENSION = r"""
#include <Python.h>
#include <math.h>

static PyObject *softmax(PyObject *self, PyObject *args) {
    Py_buffer x, y;
    if (!PyArg_ParseTuple(args, "y*w*", &x, &y)) return NULL;
    const float *in = x.buf;
    float *out = y.buf;
    for (long row = 0; row < 8; row++, in += 100, out += 100) {
        float top = -INFINITY, sum = 0;
        for (long i = 0; i < 100; i++) top = in[i] > top || isnan(in[i]) ? in[i] : top;
        for (long i = 0; i < 100; i++) sum += out[i] = expf(in[i] - top);
        for (long i = 0; i < 100; i++) out[i] /= sum;
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&y);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"softmax", softmax, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "built", "", -1, methods};
PyMODINIT_FUNC PyInit_built(void) { return PyModule_Create(&module); }
"""


def test_an_extension_that_was_built_is_imported(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if compiler is None or not header.is_file():
        pytest.skip("no C compiler, or no headers of Python")
    (tmp_path / "built.c").write_text(EXTENSION)
    built = tmp_path / "built.so"
    flags = ["-O1", "-shared", "-fPIC", f"-I{header.parent}", "built.c", "-o", str(built), "-lm"]
    subprocess.run([compiler, *flags], cwd=tmp_path, check=True)
    how = {**QUICK, "layouts": ["contiguous"], "map": "x=0,y=1", "framework": "numpy"}
    result = judge(built, "softmax", name="softmax", **how)
    assert result.report.outcome == "right", result.report.failures
    with pytest.raises(pk.SpecError, match=r"built.so is compiled; name its function too: built.so:name"):
        judge(built, "softmax")


# --- bad use, the command line ---

BAD_MAPS = [
    ("x", "--map is 'x'; expected name=place"),
    ("z=0", "--map names 'z'; expected some of x, y, axis"),
    ("x=0.view(3)", "expected a position, a name, or @parameter"),
    ("x=0.movedim(1)", r"expected .mT, .movedim\(from,to\) or .flatten\(first\)"),
    ("y=1", "--map lacks x"),
]


@pytest.mark.parametrize(("text", "words"), BAD_MAPS)
def test_mappings_that_are_none_are_named(text, words, tmp_path):
    with pytest.raises(pk.SpecError, match=words):
        judged(tmp_path, ZEROS, map=text)


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(pk.SpecError, match="is not a file"):
        judge(tmp_path / "nothing.py", "softmax")
    with pytest.raises(pk.SpecError, match="candidate is not a known problem; name the op"):
        judged(tmp_path, ZEROS, None)
    with pytest.raises(pk.SpecError, match="has no 'other'; it defines softmax"):
        judged(tmp_path, ZEROS, name="other")
    with pytest.raises(pk.SpecError, match="candidate.py is not valid Python"):
        judged(tmp_path, "def softmax(:")
    with pytest.raises(
        pk.SpecError, match="needs out, which softmax does not have; say with --map what it is, as in y=out"
    ):
        judged(tmp_path, "def softmax(x, out):\n    pass\n")


def test_the_command_says_the_verdict_and_runs_a_case_again(tmp_path):
    (tmp_path / "mine.py").write_text(ZEROS)
    file, out = f"{tmp_path}/mine.py", tmp_path / "out.json"
    run = CliRunner().invoke
    shapes = ["--shapes", "x=8x100", "--dtype", "float32", "--json", str(out)]
    done = run(app, ["judge", f"{file}:softmax", "--op", "softmax", *shapes])
    assert done.exit_code == 1 and "wrong: mine.py:softmax as softmax on cpu" in done.stdout, done.output
    assert "looks like: every element is 0" in done.stdout and json.loads(out.read_text())["outcome"] == "wrong"
    case = json.loads(out.read_text())["failures"][0]["case"]
    seed = json.loads(out.read_text())["seed"]
    line = f"portakern judge {file}:softmax --op softmax --framework numpy --device cpu --seed {seed} --case '{case}'"
    assert line in done.stdout and f"cases of seed {seed} in" in done.stdout
    again = run(app, ["judge", file, "--op", "softmax", "--case", case])
    assert again.exit_code == 1 and "looks like: every element is 0" in again.stdout
    (tmp_path / "mine.py").write_text(NUMPY_RIGHT)
    assert run(app, ["judge", file, "--op", "softmax", "--case", case]).exit_code == 0


def test_problems_that_are_known_bring_their_op_and_mapping(tmp_path):
    from portakern.tools.judge.judgement import _of_a_problem

    assert _of_a_problem("36_RMSNorm_", None, None)[0] == "rmsnorm"
    assert _of_a_problem("36_RMSNorm_", "softmax", None) == ("softmax", "", {})
    known = tomllib.loads((ROOT / "portakern/tools/judge/problems.toml").read_text())
    for row in known.values():
        spec = registry.find_spec(row["op"])
        names = ([a.name for a in spec.arrays], [o.name for o in spec.outputs], [o.name for o in spec.options])
        parse(row.get("map", ""), *names)


ALIGNED = """
    import torch

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            assert all(x.data_ptr() % 64 == 0 for x in (q, k, v)), "misaligned address"
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def get_inputs():
        return [torch.rand(1, 2, 8, 64) for _ in range(3)]
"""


def test_a_reference_that_takes_no_shifted_arrays_on_an_accelerator_gets_none_there(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    file = tmp_path / "97_ScaledDotProductAttention.py"
    file.write_text(textwrap.dedent(ALIGNED))
    assert "misaligned" in judge(file, problem=file, max_examples=20, edges=False).report.failures[0].what
    monkeypatch.setattr(judgement, "HOST", Target("nowhere", ""))  # so that this one is no host
    report = judge(file, problem=file, max_examples=20, edges=False).report
    assert not report.failures and any(c.startswith("shifted arrays: PyTorch's") for c in report.not_required)
    assert (
        "misaligned"
        in judge(file, problem=file, max_examples=20, edges=False, layouts=("contiguous", "shifted"))
        .report.failures[0]
        .what
    )


INFINITE = """
    import torch

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return o if k.isfinite().all() else torch.full_like(o, torch.nan)

    def get_inputs():
        return [torch.rand(1, 2, 8, 64) for _ in range(3)]
"""


def test_a_reference_that_leads_infinities_elsewhere_on_an_accelerator_may_do_so_there(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    file = tmp_path / "97_ScaledDotProductAttention.py"
    file.write_text(textwrap.dedent(INFINITE))
    how = {"problem": file, "max_examples": 40}
    assert judge(file, layouts="contiguous", **how).report.outcome == "other edges"
    monkeypatch.setattr(judgement, "HOST", Target("nowhere", ""))  # so that this one is no host
    report = judge(file, **how).report
    assert report.outcome == "right" and any(
        c.startswith("the formula's results for NaN and infinities") for c in report.not_required
    )
    file.write_text(textwrap.dedent(INFINITE.replace("o if k", "o * 1.01 if k")))
    assert judge(file, **how).report.outcome == "wrong"


def test_a_candidate_starts_while_the_judge_begins_the_device(tmp_path, monkeypatch):
    """Both import the array library, and begin a driver: seconds each."""

    def children():
        return {pid for p in Path("/proc/self/task").glob("*/children") for pid in p.read_text().split()}

    order, start, before = [], judgement.Process, children()
    monkeypatch.setattr(judgement, "Process", lambda *args: order.append("process") or start(*args))
    target = judgement._target
    monkeypatch.setattr(judgement, "_target", lambda *args: order.append("device") or target(*args))
    assert judged(tmp_path, NUMPY_RIGHT).report.outcome == "right" and order == ["process", "device"]
    with pytest.raises(pk.UnavailableError, match="numpy has no cuda device here"):
        judged(tmp_path, NUMPY_RIGHT, device="cuda")
    assert children() <= before, "none was left behind"


def test_the_command_keeps_the_memory_that_it_has():
    """An array that is mapped anew costs a fault for each of its pages."""
    code = """
        import resource
        import numpy as np
        from portakern.cli.judge import _keep_memory
        _keep_memory()
        def faults(times):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(times):
                x = np.full(1 << 20, 1.0)
                (x + x).sum()
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        faults(3)
        print(faults(20))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 50, done.stdout + done.stderr


def test_a_device_whose_first_array_fails_is_not_reached_and_its_words_are_told(monkeypatch):
    from portakern.core.framework import host_framework
    from portakern.tools.judge.host import Host

    def fails(*args):
        raise RuntimeError("OS call failed")

    assert Host(0).begin({"framework": "numpy", "device": "cpu"})[0] == {"reached": True}
    monkeypatch.setattr(type(host_framework()), "full", fails)
    told, _ = Host(0).begin({"framework": "numpy", "device": "cpu"})
    assert told == {"reached": False, "why": "RuntimeError: OS call failed"}


def test_poisoned_memory_costs_no_compiler():
    """torch.use_deterministic_algorithms would import torch's, in every candidate's process."""
    code = """
        import sys
        from portakern.core.framework import frameworks
        fw = frameworks()["torch"]
        torch = fw.load()
        with fw.poisoned():
            assert torch.empty(9).isnan().all()
        assert torch.get_deterministic_debug_mode() == 0
        print([m for m in ("torch._inductor", "torch._dynamo") if m in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# --- what a candidate cannot decide: what it is asked ---

EASY = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.ones_like(x)  # right of one class

def get_inputs():
    return [torch.rand(1, 1)]
"""
PROBLEM = """
import torch

def get_inputs():
    return [torch.rand(6, 100)]
"""


def test_a_module_does_not_name_what_it_is_asked(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    file, problem = tmp_path / "23_Softmax.py", tmp_path / "problem" / "23_Softmax.py"
    file.write_text(EASY)
    problem.parent.mkdir()
    problem.write_text(PROBLEM)
    with pytest.raises(pk.SpecError, match=r"a candidate does not choose its inputs\. Give .* --problem"):
        judge(file)
    result = judge(file, problem=problem, max_examples=2)
    assert result.report.outcome == "wrong" and result.problem == str(problem)
    trusted = judge(file, problem=file, max_examples=2, seconds=60.0)
    assert "inputs other than those of the candidate's own file, which may be easy" in trusted.report.not_required
    assert "dtypes other than float32, that of the problem's inputs" in trusted.report.not_required


TAKES_OVER = """
import sys
import torch

_rand = torch.rand
torch.rand = lambda *s, **k: _rand(1, 1, **k)

import portakern.tools.judge.adapters as adapters
adapters.CalledCandidate.described = lambda self: {
    "parameters": None, "inputs": [{"shape": [1, 1], "dtype": "float16"}]
}
adapters.inputs_of = lambda path: [{"shape": [1, 1], "dtype": "float16"}]

def softmax(x):
    return torch.ones_like(x)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.ones_like(x)
"""


@pytest.mark.parametrize("name", ["softmax", "ModelNew"])
def test_what_its_process_says_of_inputs_is_not_asked(name, tmp_path):
    """One line over there makes every random array small; and the process may name shapes that nobody asked for."""
    pytest.importorskip("torch", reason="torch is not installed")
    problem = tmp_path / "problem.py"
    problem.write_text(PROBLEM)
    how = {"name": name, "shapes": None, "dtypes": None, "problem": problem, "max_examples": 4}
    result = judged(tmp_path, TAKES_OVER, **how)
    assert result.report.outcome == "wrong", result.report
    assert '"shapes":{"x":[6,100]}' in result.report.failures[0].case and '"dtype":"float32"' in str(result.report)


def test_files_beside_a_problem_are_no_libraries(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    problem = tmp_path / "problem.py"
    problem.write_text(
        PROBLEM.replace("import torch", "import colorsys, sizes\nimport torch\nassert colorsys.rgb_to_hls")
    )
    (tmp_path / "colorsys.py").write_text("raise SystemExit('of the candidate')")
    (tmp_path / "sizes.py").write_text("rows = 6\n")
    kernel = tmp_path / "kernel"
    kernel.mkdir()
    result = judged(kernel, NUMPY_RIGHT, shapes=None, dtypes=None, problem=problem, max_examples=2)
    assert not result.report.failures and "shapes other than x [6, 100]" in result.report.not_required
    assert [*result.hashes.files] == ["candidate.py", str(problem), str(tmp_path / "sizes.py")], "what it imported"


def test_other_checks_take_a_problems_inputs_too(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    file, problem = tmp_path / "mine.py", tmp_path / "problem.py"
    file.write_text(NUMPY_RIGHT)
    problem.write_text(PROBLEM)
    with judgement.candidate_subject(file, "softmax", problem=problem) as (subject, fixed):
        assert subject.name == "mine.py:softmax on cpu" and fixed == {}


def test_a_problem_that_names_no_inputs_is_named(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    problem = tmp_path / "problem.py"
    for text, words in (("x = 1", "has no get_inputs"), ("raise ValueError('\\x1b[2Jx')", r"\\x1b\[2Jx")):
        problem.write_text(text)
        with pytest.raises(pk.SpecError, match=f"the inputs of --problem problem.py cannot be read: .*{words}"):
            judged(tmp_path, NUMPY_RIGHT, shapes=None, problem=problem)


def test_nobody_knows_the_cases_before(tmp_path):
    """A table of results by the hashes of the inputs is right on a seed that is always the same."""
    text = NUMPY_RIGHT.replace(
        "def softmax(x):", "import zlib\n\ndef softmax(x):\n    print(zlib.crc32(x.tobytes()), flush=True)"
    )
    first, other = (judged(tmp_path, text, max_examples=6, seed=None) for _ in range(2))
    again = judged(tmp_path, text, max_examples=6, seed=first.report.seed)
    assert first.report.seed != other.report.seed and again.report.seed == first.report.seed
    inputs = [set(r.printed.split()) for r in (first, other, again)]
    assert len(inputs[0]) >= 6 and inputs[0] == inputs[2] and not inputs[0] & inputs[1]


# --- the hash is of all that was judged ---


def test_the_hash_is_of_what_lies_beside_it_and_of_the_problem(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    folder, problem = tmp_path / "kernel", tmp_path / "problem.py"
    (folder / "parts").mkdir(parents=True)
    problem.write_text(PROBLEM)
    (folder / "parts" / "scale.py").write_text("factor = 1.0\n")
    (folder / "table\x1b[2J.bin").write_bytes(b"1")
    os.mkfifo(folder / "pipe")
    text = NUMPY_RIGHT.replace("import numpy", "from parts.scale import factor\nimport numpy")

    first = judged(folder, text, problem=problem, max_examples=1)

    def hashes():
        return hashing.hashes(folder / "candidate.py", problem)

    assert [*first.hashes.files] == ["candidate.py", str(problem), "parts/scale.py", "table\\x1b[2J.bin"]
    assert first.hashes == hashes() and first.hashes.unhashed == 1
    (folder / "parts" / "scale.py").write_text("factor = 2.0\n")
    later = hashes()
    assert later.files["candidate.py"] == first.sha256 and later.all != first.hashes.all
    assert later.changed(first.hashes) == ["parts/scale.py"]
    problem.write_text(PROBLEM + "\n")
    assert hashes().changed(later) == [str(problem)]
    told = json.loads(json.dumps(first.to_dict()))["hashes"]
    assert told == {"files": first.hashes.files, "all": first.hashes.all, "unhashed": 1}


def test_what_changes_while_it_is_judged_has_no_verdict(tmp_path, monkeypatch):
    seen = []

    def meanwhile(path, problem, imported):
        seen.append(hashing.hashes(path, problem))
        (tmp_path / ("helper.py" if len(seen) == 1 else "later")).write_text("x = 1\n")
        return seen[-1]

    monkeypatch.setattr(judgement, "hashes", meanwhile)
    with pytest.raises(pk.UnavailableError, match=r"helper\.py changed during the check; run it again"):
        judged(tmp_path, NUMPY_RIGHT)


def test_a_large_folder_is_hashed_in_part_and_that_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "FILES", 3)
    for i in range(6):
        (tmp_path / f"note{i}.txt").write_text(str(i))
    (tmp_path / "used.py").write_text("x = 1\n")
    result = judged(tmp_path, NUMPY_RIGHT)
    assert [*result.hashes.files] == ["candidate.py", "used.py", "note0.txt"] and result.hashes.unhashed == 5
    monkeypatch.setattr(hashing, "ENTRIES", 4)
    assert judged(tmp_path, NUMPY_RIGHT).hashes.unhashed == -1
