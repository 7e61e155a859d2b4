"""The judge against what comes over the pipe, and against what is asked wrongly: it never falls over, and prints
nothing
that a terminal or a log obeys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import portakern as pk
from portakern.cli import app
from portakern.core import registry
from portakern.core.failing import Ended
from portakern.printable import printable

if sys.platform != "linux":
    pytest.skip("the judge isolates candidates with features of Linux", allow_module_level=True)

from portakern.judging import ProcessLimits, judge
from portakern.testing.verdict import Broken
from portakern.tools.judge import wire
from portakern.tools.judge.process import Process
from portakern.tools.judge.remote import Remote, signature_of

ROOT = Path(__file__).parent.parent
RIGHT = """
import numpy as np

def softmax(x):
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
"""


# --- replies ---


class Forged(Process):
    """The judge's side of a process that answers every request with these bytes, and closes its pipe."""

    def __init__(self, answer: bytes) -> None:
        self.limits, self.protections, self.why = ProcessLimits(seconds=5.0, load_seconds=5.0), [], ""
        self.popen = SimpleNamespace(pid=os.getpid(), wait=lambda timeout=None: 0)
        self.folder = tempfile.TemporaryDirectory()
        self.log = os.open(Path(self.folder.name, "printed"), os.O_RDWR | os.O_CREAT)
        self.memory, self.group, self.watched = os.memfd_create("inputs"), None, 0.0
        self.replies, theirs = os.pipe()
        taken, self.requests = os.pipe()
        os.set_blocking(self.replies, False)
        self.writer = threading.Thread(target=self.write, args=(theirs, taken, answer), daemon=True)
        self.writer.start()

    def write(self, theirs: int, taken: int, answer: bytes) -> None:
        with contextlib.suppress(OSError):
            os.read(taken, 1 << 16)
            while answer:
                answer = answer[os.write(theirs, answer) :]
        os.close(theirs)
        self.taken = taken

    def end(self) -> None:
        for fd in (self.replies, self.requests, self.memory, self.log):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.writer.join(5.0)
        os.close(self.taken)
        self.folder.cleanup()


def framed(message: object, payload: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return struct.pack("<Q", len(text)) + text + payload


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def called(answer: bytes) -> object:
    """What the judge makes of an answer to a call of softmax: outputs, or Broken, or Ended."""
    spec, process = registry.find_spec("softmax"), Forged(answer)
    remote = Remote(process, spec, {}, {}, {}, signature_of(spec, None, {}, "forged"))
    try:
        return remote(X.copy())
    except (Ended, Broken) as e:
        assert str(e) == printable(e, lines=True), repr(str(e))
        return e
    finally:
        with contextlib.suppress(OSError, AttributeError):
            process.end()


RIGHT_REPLY = {"dtype": "float32", "shape": [2, 3], "contiguous": True, "bytes": 24, "shares": [], "before": []}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["float32", "crashed", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*RIGHT_REPLY, "type"]), inner),
    max_leaves=12,
)
TOLD = st.fixed_dictionaries(
    {},
    optional={
        "outputs": ANY | st.lists(st.fixed_dictionaries({}, optional={n: st.just(v) | ANY for n,
        v in RIGHT_REPLY.items()})),
        "error": ANY, "type": ANY, "text": ANY, "parameters": ANY, "inputs": ANY, "protections": ANY,
    },
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(TOLD | ANY, st.binary(max_size=64))
@example({"outputs": [{**RIGHT_REPLY, "bytes": float("inf")}]}, b"")
@example({"outputs": [{**RIGHT_REPLY, "shape": [0, 1 << 48, 1 << 48], "bytes": 0}]}, b"")
@example({"outputs": [{"type": "\x1b[2J\x00"}]}, b"")
@example({"outputs": [RIGHT_REPLY] * 65}, b"")
@example({"error": "crashed", "type": "E", "text": "\x1b]0;x\x07\n::error::forged"}, b"")
def test_a_reply_of_any_values_is_outputs_or_an_end(message, payload):
    found = called(framed(message, payload))
    assert isinstance(found, tuple | Ended | Broken)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
@example(struct.pack("<Q", 1 << 63))
@example(struct.pack("<Q", 100_000) + b"[" * 100_000)
@example(struct.pack("<Q", 6000) + b"1" * 6000)
@example(framed({"outputs": [RIGHT_REPLY]}, b"short"))
@example(framed({"outputs": [RIGHT_REPLY]})[:-3])
@example(b"")
def test_a_reply_of_any_bytes_is_an_end(raw):
    assert isinstance(called(raw), Ended | Broken)


def test_a_right_reply_is_the_outputs():
    (out,) = called(framed({"outputs": [RIGHT_REPLY]}, X.tobytes()))
    assert out.tolist() == X.tolist() and out.dtype == X.dtype


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["parameters", "inputs", "beside", "outputs"]), ANY))
@example({"parameters": [["x\x1b", "POSITIONAL_ONLY", True]]})
@example({"inputs": [{"shape": [True], "dtype": "float32"}]})
def test_what_a_header_tells_is_of_its_form_or_refused(message):
    for read in (wire.parameters, wire.problem, wire.outputs):
        with contextlib.suppress(ValueError):
            read(message)
    with pytest.raises(ValueError, match=r"Infinity|NaN"):
        wire.header(json.dumps({"a": float("nan"), "b": float("inf")}).encode())


# --- words ---

SHOWS_OFF = r"""
import numpy as np

print("\x1b[2J\x1b[Hright: forged\n::error title=forged::forged\n##[error]forged\u202e", flush=True)

class Odd(Exception):
    pass

Odd.__name__ = "\x1b[31m[bold]Odd[/bold]\n::warning::forged"

def softmax(x):
    raise Odd("[red]\x1b]8;;http://a\x07 said\r\n::set-output name=a::b\n  ::notice::forged ::debug::x")
"""


def lines_of(text):
    return [line.strip() for line in text.splitlines()]


def obeys(text):
    """What of a text a terminal or a log would obey."""
    return [line for line in lines_of(text) if line.startswith("::") or "##[" in line] + re.findall(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", text
    )


def test_nothing_of_a_candidate_is_obeyed_by_a_terminal_or_a_log(tmp_path):
    file, told = tmp_path / "mine\x1b[2J.py", tmp_path / "told.json"
    file.write_text(SHOWS_OFF)
    (tmp_path / "::error::x.txt").write_text("")
    words = ["judge", str(file), "--op", "softmax", "--dtype", "float32", "--shapes", "x=8x10", "--max-examples", "1"]
    done = CliRunner().invoke(app, [*words, "--json", str(told)])
    assert done.exit_code == 1 and "[bold]Odd[/bold]" in done.output and "[red]" in done.output, done.output
    assert not obeys(done.output) and "\\x1b[2J" in done.output and "forged" in done.output
    assert not obeys(told.read_text()) and "::error::x.txt" not in lines_of(done.output)
    file.write_text("def softmax(x, ::\x1b[2J")
    done = subprocess.run(
        [sys.executable, "-m", "portakern", *words], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2 and not obeys(done.stderr + done.stdout), done.stderr


@settings(max_examples=300, deadline=None)
@given(st.text() | st.lists(st.sampled_from(["::", "error", " ", "\n", "##", "[", "vso[", "\x1b", "a"])).map("".join))
def test_a_text_that_is_printable_is_obeyed_nowhere(text):
    several, one = printable(text, lines=True), printable(text)
    assert not obeys(several) and not obeys(one) and len(one.splitlines()) <= 1
    for line in textwrap.wrap(one, 40, break_long_words=False, break_on_hyphens=False):
        assert not line.strip().startswith("::")
    assert printable("torch::jit of x[0], 3 µs: ≥ 1") == "torch::jit of x[0], 3 µs: ≥ 1"


# --- where it is started, and what is asked wrongly ---


@pytest.mark.parametrize("how", ["module", "script"])
def test_files_in_the_candidates_folder_are_no_libraries_of_the_judge(how, tmp_path):
    for name in ("typer", "numpy", "rich", "click", "portakern_", "typing_extensions", "hypothesis", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text(f"open('HIJACKED', 'a').write({name!r})\n")
    (tmp_path / "mine.py").write_text(RIGHT)
    script = shutil.which("portakern", path=str(Path(sys.executable).parent))
    if how == "script" and script is None:
        pytest.skip("the script portakern is not installed beside this Python")
    command = [sys.executable, "-m", "portakern"] if how == "module" else [script]
    words = ["judge", "mine.py", "--op", "softmax", "--shapes", "x=8x10", "--dtype", "float32", "--max-examples", "1"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert not (tmp_path / "HIJACKED").exists(), (tmp_path / "HIJACKED").read_text()
    assert done.returncode == 0 and done.stdout.startswith("right: mine.py:softmax"), done.stderr


WRONG = [
    (["--shapes", "x=0x0"], r"shapes give x \[0, 0\]; expected extents of at least 1"),
    (["--shapes", "x=-3x5"], r"shapes give x \[-3, 5\]; expected extents of at least 1"),
    (
        ["--shapes", "x=1x300000000000"],
        r"a call of x \[1, 300000000000\] needs about .* GiB of the judge's memory, and .* GiB are available",
    ),
    (["--shapes", "x=1x9999999999999999999999"], r"shapes give x \[1, 9999999999999999999999\]; expected"),
    (["--shapes", "x=281474976710656x281474976710656"], r"expected extents of at least 1, with at most 2\^48 elements"),
    (["--shapes", "y=3x5"], r"shapes name 'y'; softmax has x"),
    (["--memory", "1e300"], r"--memory, GiB: 1e\+300; expected a number from 0.1 to 1.04858e\+06"),
    (["--call-seconds", "inf"], r"seconds of a call: inf; expected a number"),
    (["--max-examples", "99999999999999999999"], r"max_examples: 99999999999999999999; expected a whole number from 1"),
    (["--seed", "99999999999999999999"], r"seed: 99999999999999999999; expected a whole number from 0"),
    (["--case", '{"dtype":"float32","shapes":{"x":[1,300000000000]}}'], r"needs about .* GiB"),
    (["--case", '{"dtype":"float32","shapes":{"x":[1,99999999999999999999999]}}'], r"--case is not a call of softmax"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(w)[:40] for w, _ in WRONG])
def test_what_is_asked_wrongly_is_told_in_a_line(words, said, tmp_path):
    (tmp_path / "mine.py").write_text(RIGHT)
    done = CliRunner().invoke(app, ["judge", str(tmp_path / "mine.py"), "--op", "softmax", *words])
    assert isinstance(done.exception, pk.SpecError), done.exception  # of which main() makes a line, and status 2
    assert re.search(said, str(done.exception)) and "\n" not in str(done.exception)


def test_inputs_larger_than_the_judges_memory_are_refused_before_they_are_made(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    file = tmp_path / "23_Softmax.py"
    file.write_text("import torch\n\ndef get_inputs():\n    return [torch.rand(1, 300_000_000_000)]\n" + RIGHT)
    with pytest.raises(pk.SpecError, match="needs about"):
        judge(file, problem=file, name="softmax")


def test_what_the_judge_takes_for_an_element_is_enough():
    """The estimate that calls are refused by, against what a call of a long row takes."""
    code = """
        import re, tempfile, pathlib
        from portakern.judging import judge
        from portakern.tools.judge import judgement
        file = pathlib.Path(tempfile.mkdtemp(), "mine.py")
        file.write_text({right!r})
        status = pathlib.Path("/proc/self/status")
        peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", status.read_text())[1])
        how = dict(dtypes=["float32"], max_examples=3, seconds=60.0)
        judge(file, "softmax", shapes=[{{"x": (1, 1000)}}], **how)
        before = peak()
        assert judge(file, "softmax", shapes=[{{"x": (1, 1 << 21)}}], **how).report.outcome in ("right", "wrong")
        print((peak() - before) / (1 << 21) / judgement.BYTES_OF_AN_ELEMENT)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code).format(right=RIGHT)], capture_output=True, text=True, timeout=120
    )
    assert 0.2 < float(done.stdout) <= 1.0, done.stdout + done.stderr
