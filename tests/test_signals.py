"""A command that is told to end ends, with the status that a shell gives to that, whatever dropped it on the way."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

COMMANDS = """
import time
from portakern.cli import app, main

@app.command()
def swallows():
    try:
        print("begun", flush=True)
        time.sleep(30)
    except BaseException:  # as a library's import may
        pass
    time.sleep(30)

@app.command()
def tidies():
    try:
        print("begun", flush=True)
        time.sleep(30)
    finally:
        time.sleep(1.2)  # longer than until it is asked again
        print("tidy", flush=True)

main()
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process could handle")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
@pytest.mark.parametrize("command", ["swallows", "tidies"])
def test_a_command_ends_when_it_is_told_to(command, number, status, tmp_path):
    file = tmp_path / "commands.py"
    file.write_text(COMMANDS)
    ran = subprocess.Popen([sys.executable, file, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert ran.stdout.readline() == "begun\n"
        time.sleep(0.2)
        ran.send_signal(number)
        out, err = ran.communicate(timeout=15)
    finally:
        ran.kill()
    assert ran.returncode == status and "Traceback" not in err, err
    assert out == ("tidy\n" if command == "tidies" else "")


def test_a_command_that_is_told_to_end_while_it_is_imported_has_no_traceback(tmp_path):
    program = "import portakern.__main__ as m, os, signal, sys, threading; "
    program += "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start(); m.main()"
    ran = subprocess.run([sys.executable, "-c", program, "ops"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 130 and "Traceback" not in ran.stderr, ran.stderr
