"""The notebooks are what their source says, and their cells say what to do about a runtime that is not the right one.

CI runs them whole (.ci/notebooks.py).
"""

from __future__ import annotations

import glob
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
MAKE = runpy.run_path(str(FOLDER / "make.py"))
PLACES = {place.file: place for place in MAKE["PLACES"]}
NOTEBOOKS = [file for file in PLACES if file.endswith(".ipynb")]


def code(file: str) -> list[str]:
    notebook = json.loads((FOLDER / file).read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def cell(file: str, holds: str) -> str:
    """The one cell with a text in it."""
    (found,) = [source for source in code(file) if holds in source]
    return found


@pytest.fixture
def session(monkeypatch, tmp_path):
    """Runs cells of a notebook as a runtime without an accelerator would; what they leave is a dictionary."""
    monkeypatch.chdir(tmp_path)
    real = glob.glob
    monkeypatch.setattr("glob.glob", lambda pattern: [] if pattern.startswith("/dev") else real(pattern))
    monkeypatch.setattr("shutil.which", lambda name: None)

    def run(file: str, *holding: str, **values: object) -> dict[str, object]:
        names: dict[str, object] = {"__name__": "__main__"}
        for text in ("SOURCE = ", "def advice", *holding):
            exec(compile(cell(file, text), file, "exec"), names)
            names.update(values)
        return names

    return run


def test_they_are_what_their_source_says():
    assert MAKE["stale"]() == {}
    assert {path.name for path in FOLDER.glob("*.ipynb")} == set(NOTEBOOKS)


def test_a_stale_one_is_seen(monkeypatch, tmp_path):
    made = MAKE["notebooks"]()
    monkeypatch.setitem(MAKE["stale"].__globals__, "notebooks", lambda: {tmp_path / p.name: t for p, t in made.items()})
    for path, text in made.items():
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    changed = tmp_path / "gpu_colab.ipynb"
    changed.write_text(changed.read_text(encoding="utf-8").replace("EXAMPLES = 100", "EXAMPLES = 10"), encoding="utf-8")
    assert [path.name for path in MAKE["stale"]()] == ["gpu_colab.ipynb"]


@pytest.mark.parametrize("file", NOTEBOOKS)
def test_they_are_valid_and_hold_no_outputs(file):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install -e '.[test]'")
    notebook = nbformat.read(FOLDER / file, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert all(not c.outputs and c.execution_count is None for c in notebook.cells if c.cell_type == "code")
    assert code(file)[0].startswith('SOURCE = "') and f"# If SOURCE is empty, {PLACES[file].upload}" in code(file)[0]


@pytest.mark.parametrize("file", NOTEBOOKS)
def test_a_runtime_of_another_kind_is_told_apart(file, session, capsys):
    names = session(file)
    place = PLACES[file]
    assert "IN AN INTERPRETER ON THE CPU" in capsys.readouterr().out
    advice = names["advice"]
    assert advice({place.platform}) is None
    other = {"tpu": "cuda", "cuda": "tpu"}[place.platform]
    assert f"shows no {place.kind}" in advice({other}) and place.choose in advice({other})
    assert {"tpu": "tpu_colab.ipynb", "cuda": "gpu_colab.ipynb"}[other] in advice({other})


def test_an_old_python_and_a_process_that_holds_the_tpu_are_told(session, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace())
    session("tpu_colab.ipynb")
    assert "may hold the TPU: restart the session first" in capsys.readouterr().out
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(RuntimeError, match=r"needs Python 3\.11 or newer; .* Runtime > Change runtime type"):
        session("tpu_colab.ipynb")


def test_an_old_jax_is_named(session):
    names = session("tpu_kaggle.ipynb", "def lacks")
    assert names["lacks"](sys.executable) == [] or "portakern" not in str(names["lacks"](sys.executable))
    names["WANTED"].clear()
    names["WANTED"].update({"numpy": [99, 1], "no_such_package": [0], "jaxtyping": [0, 1]})
    assert names["lacks"](sys.executable) == ["numpy >= 99.1", "no_such_package"]


@pytest.mark.parametrize("there", [False, True])
def test_a_tpu_wants_the_libtpu_of_the_new_jax(there, session, monkeypatch, tmp_path):
    """An image may have a new JAX beside an old libtpu, which its torch_xla pins."""
    (tmp_path / "libtpu-0.0.17.dist-info").mkdir()
    (tmp_path / "libtpu-0.0.17.dist-info" / "METADATA").write_text("Name: libtpu\nVersion: 0.0.17\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    shown = {"tpu"} if there else set()
    names = session("tpu_kaggle.ipynb", "def lacks", "MORE = ", devices=lambda: shown)
    assert ("libtpu >= 0.0.40" in names["lacks"](sys.executable)) == there


def test_the_newest_wheel_is_taken(session, monkeypatch, tmp_path):
    names = session("tpu_kaggle.ipynb", "def lacks")
    assert names["found_here"]() == ""
    dataset = tmp_path / "input" / "datasets" / "owner" / "wheels"
    dataset.mkdir(parents=True)
    real = glob.glob
    to_tmp = lambda pattern: real(pattern.replace("/kaggle/input", str(tmp_path / "input")))  # noqa: E731
    monkeypatch.setattr("glob.glob", to_tmp)
    old, new = tmp_path / "portakern-0.1.0-py3-none-any.whl", dataset / "portakern-0.2.0-py3-none-any.whl"
    new.touch()
    assert names["found_here"]() == str(new)
    old.touch()
    os.utime(old, (1, 1))
    assert names["found_here"]() == str(new)
    os.utime(new, (0, 0))
    assert names["found_here"]() == old.name


def test_what_is_there_stays_and_a_virtual_environment_is_made_beside_it(session, monkeypatch, tmp_path):
    commands, status = [], [0]
    names = session("tpu_colab.ipynb", "def lacks", "MORE = ")
    names["run"] = lambda *command: commands.append(command) or status[0]
    names["lacks"] = lambda python: []
    names["SOURCE"] = "https://host.example/owner/portakern"
    assert names["install"]() == str(names["VENV"] / "bin" / "python")
    make, install = commands
    assert make[1:5] == ("-m", "venv", "--clear", "--without-pip") and make[0] == sys.executable
    assert install[-1] == "portakern[tpu,cli,plots] @ git+https://host.example/owner/portakern"
    assert "--no-warn-conflicts" in install  # the runtime's packages are seen, and not touched
    status[0] = 1
    with pytest.raises(RuntimeError, match=r"The install failed.*Without a network"):
        names["install"]()
    status[0], names["lacks"] = 0, lambda python: ["jax >= 0.10"]
    with pytest.raises(RuntimeError, match=r"still lacks jax >= 0\.10"):
        names["install"]()
    names["SOURCE"] = ""
    with pytest.raises(RuntimeError, match="SOURCE in the first cell is empty"):
        names["install"]()
    names["SOURCE"] = "portakern.zip"
    with pytest.raises(RuntimeError, match=r"'portakern\.zip', which is no address and no file"):
        names["install"]()
    wheel = tmp_path / "portakern-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert names["requirement"](names["found_here"](), "cli") == f"{wheel}[cli]"
    address = "https://host.example/portakern-0.1.0-py3-none-any.whl"
    assert names["requirement"](address, "cli") == f"portakern[cli] @ {address}"


def test_an_environment_is_of_one_source(session, tmp_path):
    """Two wheels of the same name, and two addresses, have environments of their own."""
    wheel = tmp_path / "portakern-0.1.0-py3-none-any.whl"
    found = []
    for content in (b"one", b"two", b"one"):
        wheel.write_bytes(content)
        found.append(session("tpu_colab.ipynb", "def lacks")["VENV"])
    assert found[0] == found[2] != found[1]


def test_a_portakern_of_another_source_does_not_serve(session, tmp_path):
    (tmp_path / "portakern-0.1.0-py3-none-any.whl").write_bytes(b"one")
    there = tmp_path / "venv" / "bin" / "python"
    there.parent.mkdir(parents=True)
    there.touch()
    names = session("tpu_colab.ipynb", "def lacks", "PORTAKERN = ", lacks=lambda python: [], VENV=tmp_path / "venv")
    assert names["PYTHON"] == str(there)


@pytest.mark.parametrize(("capability", "limited"), [("7.5", True), ("9.0", False), ("", False)])
def test_a_t4_is_told_what_runs(capability, limited, session, monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: "/bin/true" if name == "nvidia-smi" else None)
    answers = {"-L": "GPU 0: Tesla T4", "--query-gpu=driver_version": "550.54", "--query-gpu=compute_cap": capability}
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(stdout=answers[command[1]]))
    names = session("gpu_colab.ipynb", "def lacks", "def jax_for_gpu")
    assert bool(names["LIMITS"]) == limited == ("bfloat16 is left out" in capsys.readouterr().out)


@pytest.mark.parametrize("lacking", [False, True])
def test_the_runtimes_libtpu_is_for_its_own_jax(lacking, session, monkeypatch, tmp_path):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/of/the/runtime/libtpu.so")
    there = tmp_path / "bin" / "python"
    there.parent.mkdir()
    there.touch()
    lacks = {sys.executable: ["jax >= 0.10"] * lacking, str(there): []}
    names = session("tpu_colab.ipynb", "def lacks", "PORTAKERN = ", lacks=lacks.get, VENV=tmp_path)
    assert names["PYTHON"] == (str(there) if lacking else sys.executable)
    assert ("TPU_LIBRARY_PATH" in names["ENVIRONMENT"]) != lacking and "TPU_LIBRARY_PATH" in os.environ


@pytest.mark.parametrize(
    ("driver", "plugin", "wanted"),
    [
        ("550.54.15", None, "cuda12"),
        ("580.65.06", None, "cuda13"),
        ("580.65.06", "jax-cuda12-plugin", "cuda12"),  # two plugins of CUDA would both be loaded
        ("580.65.06", "jax-cuda13-plugin", "cuda13"),
        ("", "jax-cuda12-plugin", None),
    ],
)
def test_jax_comes_with_the_cuda_of_the_runtimes_jax_or_of_the_driver(driver, plugin, wanted, session, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/bin/true" if driver else None)
    answers = {"-L": "GPU 0: NVIDIA L4", "--query-gpu=driver_version": driver, "--query-gpu=compute_cap": "8.9"}
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(stdout=answers[command[1]]))
    here = {plugin: "0.7.2"}.get
    names = session("gpu_colab.ipynb", "def lacks", "def jax_for_gpu", installed=here)
    assert names["MORE"] == [f"jax[{wanted}]>=0.10" if wanted else "jax>=0.10"]


def doctor(*devices: tuple[str, str, str]) -> str:
    rows = [{"framework": framework, "device": name, "platform": platform} for framework, name, platform in devices]
    return json.dumps({"environment": {"jax": "0.10.2"}, "devices": rows, "backends": []})


def test_the_device_is_the_one_that_a_process_sees(session, monkeypatch, capsys):
    seen = SimpleNamespace(returncode=0, stdout=doctor(("jax", "tpu v5e", "tpu"), ("jax", "tpu v5e", "tpu")), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: seen)
    given = {"PORTAKERN": ["python", "-m", "portakern"]}
    names = session("tpu_colab.ipynb", "doctor = ", **given)
    assert (names["DEVICE"], names["NAME"], names["OPS"], names["EXAMPLES"]) == ("tpu", "tpu-v5e", [], 100)
    assert "On 2 x tpu v5e; one is used." in capsys.readouterr().out and "JAX_PLATFORMS" not in names["ENVIRONMENT"]
    seen.stdout = doctor(("jax", "cpu", "cpu"))
    names = session("tpu_colab.ipynb", "doctor = ", **given)
    assert (names["DEVICE"], names["NAME"], names["OPS"]) == ("cpu", "cpu", ["softmax"])
    assert names["ENVIRONMENT"]["JAX_PLATFORMS"] == "cpu"  # libtpu looks for no TPU
    assert "IN AN INTERPRETER ON THE CPU" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"has a TPU, and JAX in portakern's process sees none.*jax 0\.10\.2"):
        session("tpu_colab.ipynb", "doctor = ", devices=lambda: {"tpu"}, **given)
    seen.returncode, seen.stderr = 1, "The TPU is already in use by process with pid 42."
    with pytest.raises(RuntimeError, match=r"(?s)restart the session.*pid 42"):
        session("tpu_colab.ipynb", "doctor = ", **given)


def test_a_command_that_is_interrupted_leaves_no_process(session, tmp_path):
    names = session("tpu_colab.ipynb")
    assert names["run"](sys.executable, "-c", "import sys; print('said'); sys.exit(3)") == 3
    started = []

    def interrupted(*command, **options):
        process = subprocess.Popen(*command, **options)
        started.append(process)

        def wait():
            process.wait = type(process).wait.__get__(process)
            raise KeyboardInterrupt

        process.wait = wait
        process.stdout.close()
        return process

    names["subprocess"] = SimpleNamespace(Popen=interrupted, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    names["threading"] = SimpleNamespace(Thread=lambda target: SimpleNamespace(start=int, join=int, is_alive=bool))
    with pytest.raises(KeyboardInterrupt):
        names["run"](sys.executable, "-c", "import time; time.sleep(60)")
    assert started[0].poll() is not None


def test_the_environment_beside_a_gpu_runtime_sees_its_packages_behind_its_own(session, tmp_path):
    names = session("gpu_colab.ipynb", "def lacks", VENV=tmp_path / "venv")
    exec(cell("gpu_colab.ipynb", "SEEN_TOO = "), names)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    names["WANTED"].clear()
    names["WANTED"].update({"numpy": [2], "no_such_package": [0]})
    assert names["lacks"](python) == ["numpy >= 2", "no_such_package"]
    for command in names["SEEN_TOO"]:
        subprocess.run(command, check=True)
    assert names["lacks"](python) == ["no_such_package"]
    code = "import sys; print(*sys.path, sep='\\n')"
    path = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    own = [i for i, p in enumerate(path) if p.startswith(str(tmp_path))]
    assert own and max(own) < min(path.index(p) for p in names["HERE_TOO"] if p in path)


# --------------------------------------------------------------------------------------------- the script for AMD GPUs


def rocm_cells(**values: object) -> dict[str, object]:
    """What the cells of rocm_gpu.py leave up to the one that says how to install."""
    names: dict[str, object] = {"__name__": "__main__"}
    for kind, text in MAKE["filled"](PLACES["rocm_gpu.py"], *MAKE["source"]()):
        if kind == "code":
            exec(compile(text, "cells.py", "exec"), names)
            names.update(values)
            if "INDEX = " in text:
                return names
    raise AssertionError("no cell says where torch for ROCm comes from")


def test_an_amd_gpu_is_seen_by_its_driver(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    real = os.path.exists
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/kfd" or real(path))
    names = rocm_cells()
    assert "rocm" in names["devices"]() and names["advice"]({"rocm"}) is None
    assert "rocm_gpu.py is for it" in session_advice("gpu_colab.ipynb")({"rocm"})


def session_advice(file: str):
    names: dict[str, object] = {"__name__": "__main__"}
    for text in ("SOURCE = ", "def advice"):
        exec(compile(cell(file, text), file, "exec"), names)
    return names["advice"]


def test_torch_for_rocm_comes_from_the_index_of_the_release_that_is_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text("6.4.1-83\n")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    install = rocm_cells(installed=lambda package: None)["SEEN_TOO"][-1]
    assert install[-2:] == ["https://download.pytorch.org/whl/rocm6.4", "torch>=2.11"]
    monkeypatch.setenv("TORCH_INDEX", "https://mirror.example/rocm")
    assert "https://mirror.example/rocm" in rocm_cells(installed=lambda package: "2.11.0+cu130")["SEEN_TOO"][-1]
    seen = rocm_cells(installed=lambda package: "2.11.0+rocm7.0")["SEEN_TOO"]
    assert len(seen) == 1 and not any("install" in part for part in seen[0])  # the one that is here is seen
