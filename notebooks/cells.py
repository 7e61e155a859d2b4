# %% [markdown]
# # portakern on $title
#
# Installs portakern beside what this runtime has, runs a first op, holds every kernel to its error bounds on the $kind,
# times the kernels beside $peers, draws the times, and leaves files of results that `portakern report --add` takes into
# a checkout.
#
# Choose the machine first: **$choose**. Then run all cells. The check and the benchmark take what the next cell gives
# them.
#
# Without $a_kind the cells run a few cases in interpreters on the CPU, and say so. Such results say nothing about
# $a_kind.

# %%
SOURCE = "$repository"  # portakern's wheel, sdist or folder, or the address of a wheel or of a repository
# If SOURCE is empty, $upload (`pip wheel . --no-deps` in a checkout builds it).
EXAMPLES = 100  # cases of each op that the check draws
SECONDS = 900  # what the benchmark may take
OPS = []  # all, or some: ["softmax", "attention"]

# %% [markdown]
# ## What is here
#
# portakern runs in processes of its own, never in this notebook's: the process that loads JAX first owns a TPU until it
# ends, and a process that has loaded one version of JAX cannot change to another.

# %%
import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# a folder of this run's own: no result of another is taken for its
WORK = Path(tempfile.mkdtemp(prefix=time.strftime("portakern-%Y-%m-%d-"), dir=Path.cwd()))
# A notebook's plotting backend is a module of its own packages, and its colours are for terminals.
ENVIRONMENT = {**os.environ, "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120", "MPLBACKEND": "agg"}
for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
    ENVIRONMENT.pop(name, None)
FAILED = []  # the steps that failed, told at the end: what the others found is kept


def run(*command):
    """Run a command in a process of its own, show what it says as it comes, and give its exit status."""
    print("$$", shlex.join("..." if len(part) > 100 else part for part in command), flush=True)
    process = subprocess.Popen(
        command, cwd=WORK, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    reader = threading.Thread(target=lambda: [print(line, end="", flush=True) for line in process.stdout])
    reader.start()
    minutes = 0
    try:
        while reader.is_alive():
            reader.join(60)
            if reader.is_alive():
                minutes += 1
                print(f"  ... {minutes} min", flush=True)
        return process.wait()
    except BaseException:  # an interrupted cell leaves no process that holds the device
        process.terminate()
        process.wait()
        raise


def loudly(text):
    """Print a text that nobody overlooks."""
    line = "*" * 100
    print(line, *text.strip().splitlines(), line, sep="\n")


def installed(package):
    """The version of a package of this runtime, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices():
    """The kinds of accelerator that this machine shows: "tpu", "cuda", "rocm"."""
    tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")
    smi = shutil.which("nvidia-smi")
    gpu = smi and subprocess.run([smi, "-L"], capture_output=True, text=True).stdout.startswith("GPU")
    return {kind for kind, there in {"tpu": tpu, "cuda": gpu, "rocm": os.path.exists("/dev/kfd")}.items() if there}


def advice(shown):
    """What to do about a runtime that shows these kinds of accelerator; None where it is the right one."""
    if "$platform" in shown:
        return None
    wrong = {
        "tpu": "a TPU: tpu_colab.ipynb or tpu_kaggle.ipynb is for it",
        "cuda": "an NVIDIA GPU: gpu_colab.ipynb is for it",
        "rocm": "an AMD GPU: rocm_gpu.py is for it",
    }
    others = "".join(f"It has {wrong[kind]}.\n" for kind in sorted(shown))
    return (
        f"This runtime shows no $kind. {others}To have one: $choose, and run all cells again.\n"
        "WITHOUT IT EVERYTHING BELOW RUNS IN AN INTERPRETER ON THE CPU:\n"
        "exact semantics, slow, and its times mean nothing."
    )


if sys.version_info < (3, 11):
    raise RuntimeError(f"portakern needs Python 3.11 or newer; this runtime has {platform.python_version()}: $choose")
packages = {p: installed(p) or "-" for p in ("portakern", "jax", "libtpu", "torch", "triton")}
print(f"Python {platform.python_version()}, " + ", ".join(f"{p} {v}" for p, v in packages.items()))
if advice(devices()):
    loudly(advice(devices()))
if "$platform" == "tpu" and {"jax", "torch_xla"} & set(sys.modules):
    loudly("This notebook's own process has loaded JAX or torch_xla and may hold the TPU: restart the session first.")

# %% [markdown]
# ## Install
#
# portakern needs $needs. The runtime's own packages stay as they are: a virtual environment beside them gets
# $installs.

# %%
WANTED = "$wanted"  # package -> its oldest version
FLOORS = """
import json, re, sys
from importlib.metadata import PackageNotFoundError, version
def number(package):
    try:
        return [int(n) for n in re.findall("[0-9]+", version(package))[:3]]
    except PackageNotFoundError:
        return []
wanted = json.loads(sys.argv[1])
print(json.dumps([p if w == [0] else f"{p} >= {'.'.join(map(str, w))}" for p, w in wanted.items() if number(p) < w]))
"""


def lacks(python):
    """What an interpreter lacks of what this notebook wants, by its packages' versions: nothing is loaded."""
    done = subprocess.run([python, "-c", FLOORS, json.dumps(WANTED)], env=ENVIRONMENT, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else [f"a Python that runs: {done.stderr[-300:]}"]


def requirement(source, extras):
    """What pip installs for SOURCE."""
    if re.match(r"\w+://.*\.(whl|tar\.gz|zip)$$", source):
        return f"portakern[{extras}] @ {source}"
    if re.match(r"(git\+)?\w+://", source):
        return f"portakern[{extras}] @ git+{source.removeprefix('git+')}"
    if not Path(source).exists():
        raise RuntimeError(
            f"SOURCE in the first cell is {source!r}, which is no address and no file here: correct it, or $upload"
        )
    return f"{Path(source).resolve()}[{extras}]"


def found_here():
    """A checkout around this notebook, or the newest wheel or sdist beside it or, on Kaggle, in its datasets."""
    checkouts = [str(p) for p in (Path.cwd(), *Path.cwd().parents) if (p / "portakern" / "__init__.py").exists()]
    folders = ["", *("/kaggle/input/" + "*/" * depth for depth in range(5))]
    uploads = [f for folder in folders for end in ("whl", "tar.gz") for f in glob.glob(f"{folder}portakern-*.{end}")]
    return next(iter(checkouts), max(uploads, key=os.path.getmtime, default=""))


def digest(source):
    """A hash of what a source holds; of an address, of its text and of the commit that git finds there."""
    path = Path(source)
    if path.is_file():
        content = path.read_bytes()
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*.py") if not {".git", "build"} & set(f.relative_to(path).parts))
        content = b"".join(f.read_bytes() for f in [*files, path / "pyproject.toml"] if f.exists())
    else:
        address = source.removeprefix("git+").partition("@")[0]
        asked = ["git", "ls-remote", address, "HEAD"]
        git = shutil.which("git") and subprocess.run(asked, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
        content = source.encode() + (git.stdout if git else b"")
    return hashlib.sha256(content).hexdigest()[:12]


def is_of(source):
    """Whether the runtime's own portakern lies in a source: a checkout that was installed as it stands."""
    found = importlib.util.find_spec("portakern")
    return bool(found and found.origin and Path(source).resolve() in Path(found.origin).parents)


ORIGIN = SOURCE or found_here()
# an environment of another source is another one: none that holds an older portakern is taken for it
VENV = Path(tempfile.gettempdir()) / f"portakern-venv-{digest(ORIGIN) if ORIGIN else 'none'}"


def install():
    """The virtual environment's Python, with everything in it."""
    source = SOURCE or found_here()
    if not source:
        raise RuntimeError(
            "SOURCE in the first cell is empty, and no wheel of portakern was found: $upload. In a checkout, "
            "`pip wheel . --no-deps --wheel-dir dist` builds it. Or set SOURCE to the address of a wheel or of a "
            "repository."
        )
    python = str(VENV / "bin" / "python")
    print(f"{VENV} gets {source} and what it needs. This takes minutes.", flush=True)
    # without pip's warnings of conflicts: those of the runtime's packages are none, since these stay as they are
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-warn-conflicts"]
    for command in (
        # no pip of its own: Debian's Python cannot make one
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)],
        *SEEN_TOO,
        [*pip, requirement(source, "$extras"), *MORE],
    ):
        if run(*command) != 0:
            raise RuntimeError("The install failed, as the lines above say. $offline")
    if lacks(python):
        raise RuntimeError(f"{python} still lacks {', '.join(lacks(python))} after the install: see the lines above")
    return python


# %% cuda rocm
# The environment sees the runtime's packages behind its own: torch and triton are there, with the CUDA that they want.
# (--system-site-packages would show the packages of the system's Python, which need not be this one's.)
SEE_TOO = """
import sys, sysconfig
from pathlib import Path
(Path(sysconfig.get_path("purelib")) / "runtime.pth").write_text("\\n".join(sys.argv[1:]) + "\\n")
"""
HERE_TOO = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
SEEN_TOO = [[str(VENV / "bin" / "python"), "-c", SEE_TOO, *HERE_TOO]]


# %% cuda
def jax_for_gpu():
    """JAX with the CUDA of the runtime's own JAX; where it has none, with CUDA 13 from driver 580 on, else with 12.

    The environment sees the runtime's CUDA plugin of JAX. A plugin for the same CUDA hides it; beside one for another
    CUDA it is loaded too, and JAX keeps whichever it loads first.
    """
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout if "cuda" in devices() else ""
    major = int(driver.partition(".")[0]) if driver[:1].isdigit() else 0
    here = [f"cuda{n}" for n in (13, 12) if installed(f"jax-cuda{n}-plugin")]
    return f"jax[{next(iter(here), 'cuda13' if major >= 580 else 'cuda12')}]>=0.10" if major else "jax>=0.10"


MORE = [jax_for_gpu()]


def capability():
    """The compute capability of the first GPU, such as (9, 0); None where no driver tells."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True).stdout if "cuda" in devices() else ""
    found = re.match(r"(\d+)\.(\d+)", told)
    return (int(found[1]), int(found[2])) if found else None


LIMITS = []  # of what is checked and timed
if capability() and capability() < (8, 0):
    LIMITS = ["--dtype", "float16", "--dtype", "float32"]
    loudly(
        f"This GPU has compute capability {'.'.join(map(str, capability()))}, as a T4 has. portakern was tried on 8.0 "
        "and later.\nbfloat16 is left out below: the GPU has no instructions for it. float16 and float32 may fail to "
        "compile.\nWhat was tried: $choose."
    )


# %% rocm
# PyTorch for ROCm lies on PyTorch's own index, a folder a release of ROCm, and brings a Triton of its own.
def rocm():
    """The release of ROCm that is installed, such as "7.0"; "" where none is found."""
    files = [Path(root) / ".info" / "version" for root in (os.environ.get("ROCM_PATH", "/opt/rocm"), "/opt/rocm")]
    found = next((f.read_text() for f in files if f.exists()), "")
    return ".".join(re.findall("[0-9]+", found)[:2])


INDEX = os.environ.get("TORCH_INDEX", f"https://download.pytorch.org/whl/rocm{rocm() or '7.0'}")
MORE = []
if "rocm" not in (installed("torch") or ""):  # none here that it could see
    print(f"PyTorch for ROCm comes from {INDEX} (TORCH_INDEX names another)")
    to = ["--python", str(VENV / "bin" / "python"), "install", "-q", "--index-url", INDEX, "torch>=2.11"]
    SEEN_TOO = [[sys.executable, "-m", "pip", *to]]

# %% tpu
SEEN_TOO, MORE = [], []
if "tpu" in devices():
    WANTED["libtpu"] = [0, 0, 40]  # that of jax 0.10: an older one, such as torch_xla's, runs nothing of a newer JAX

# %% tpu rocm
LIMITS = []

# %%
missing = lacks(sys.executable)
if missing or (ORIGIN and not is_of(ORIGIN)):
    print(f"This runtime lacks {', '.join(missing) or f'portakern of {ORIGIN}'}.")
    PYTHON = str(VENV / "bin" / "python")
    if not Path(PYTHON).exists() or lacks(PYTHON):
        PYTHON = install()
    ENVIRONMENT.pop("TPU_LIBRARY_PATH", None)  # it would bring the runtime's libtpu under the new JAX
else:
    PYTHON = sys.executable
    print("This runtime has all that is needed: nothing to install.")
PORTAKERN = [PYTHON, "-m", "portakern"]

# %% [markdown]
# ## What portakern sees

# %%
seen = subprocess.run([*PORTAKERN, "doctor", "--json"], env=ENVIRONMENT, cwd=WORK, capture_output=True, text=True)
if seen.returncode != 0:
    raise RuntimeError(
        "portakern's process cannot look at the devices, as the lines below say. If another process holds the device, "
        f"restart the session, and load no JAX in the notebook itself.\n{seen.stderr[-2000:]}"
    )
doctor = json.loads(seen.stdout)
print(", ".join(f"{package} {v}" for package, v in doctor["environment"].items() if v))
for b in doctor["backends"]:
    print(f"{b['backend']}: {b['status']}" + (f" (next: {b['next_step']})" if b["backend"] == "$backend" else ""))
for d in doctor["devices"]:
    print(f"{d['framework']}: {d['device']}")
chips = [d["device"] for d in doctor["devices"] if d["framework"] == "$framework" and d["platform"] == "$platform"]
if "$platform" in devices() and not chips:
    raise RuntimeError(
        "This machine has $a_kind, and $library in portakern's process sees none. Its versions are "
        f"{', '.join(f'{p} {v}' for p, v in doctor['environment'].items() if v)}. Either the driver or libtpu is too "
        "old for them, or another process holds the device: restart the session and run all cells again."
    )
DEVICE = "$platform" if chips else "cpu"
NAME = re.sub(r"[^a-z0-9]+", "-", chips[0].lower()).strip("-") if chips else "cpu"
if chips:
    print(f"On {len(chips)} x {chips[0]}; one is used.")
else:
    loudly(advice(set()))
    EXAMPLES, SECONDS, OPS = 2, 60, ["softmax"]
    ENVIRONMENT["JAX_PLATFORMS"] = "cpu"  # else libtpu and CUDA say at length that they find no device

# %% [markdown]
# ## A first op
#
# The arrays choose the backend; `explain` says who serves a call, with which tiling, and why not the others.

# %% tpu
FIRST = """
import jax, jax.numpy as jnp, numpy as np
import portakern as pk

q, k, v = (jax.random.normal(key, (1, 64, 2, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
attention = pk.op("attention", backend="pallas")
print(attention.explain(q, k, v, is_causal=True))
out = attention(q, k, v, is_causal=True)
exact = pk.op("attention", backend="reference")(*(np.asarray(a, np.float32) for a in (q, k, v)), is_causal=True)
print("on", out.devices(), "largest difference from the oracle:", np.abs(np.asarray(out, np.float32) - exact).max())
"""

# %% cuda rocm
FIRST = """
import torch
import portakern as pk

device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
attention = pk.op("attention", backend="triton")
print(attention.explain(q, k, v, is_causal=True))
out = attention(q, k, v, is_causal=True)
exact = pk.op("attention", backend="reference")(*(a.float().cpu().numpy() for a in (q, k, v)), is_causal=True)
print("on", out.device, "largest difference from the oracle:", abs(out.float().cpu().numpy() - exact).max())
"""

# %%
if run(PYTHON, "-c", FIRST) != 0:
    FAILED.append("the first op")

# %% [markdown]
# ## Every kernel, held to its bounds
#
# Cases drawn from each op's signature, its gradients' too, against the float64 oracle. A failure is one line that
# reproduces it; exit status 1 says that there was one.

# %%
conformance = f"conformance-$backend-{NAME}.json"
check = ["--backend", "$backend", "--device", DEVICE, "--max-examples", str(EXAMPLES), "--json", conformance, *LIMITS]
if DEVICE in ("cuda", "rocm"):
    check += ["--jobs", str(min(os.cpu_count() or 1, 8))]  # compiling is most of it
if run(*PORTAKERN, "check", *OPS, *check) != 0:
    FAILED.append("the check")

# %% [markdown]
# ## Times beside $peers
#
# Device time alone, the contenders taking turns, each result held to its bound before its time counts, beside a roof
# that is measured in the same run.

# %%
times = f"bench-$backend-{NAME}.json"
bench = ["--backend", "$backend", "--device", DEVICE, "--budget", str(SECONDS), "--json", times, "--plot", "plots"]
if DEVICE == "cpu":
    bench += ["--against", "$interpreted_peer", "--rounds", "2", "--dtype", "float32", "--no-gradients"]
else:
    bench += LIMITS
if DEVICE not in ("cuda", "rocm"):
    bench += ["--jobs", "0"]  # one process owns the device
if run(*PORTAKERN, "bench", *OPS, *bench) != 0:
    FAILED.append("the benchmark")

# %% tpu cuda
from IPython.display import SVG, display

for plot in sorted((WORK / "plots").glob("*.svg")):
    display(SVG(filename=str(plot)))

# %%
plots = sorted((WORK / "plots").glob("*.svg"))
names = ", ".join(plot.name for plot in plots) or "none, since what was timed makes no curve"
print(f"plots in {WORK / 'plots'}: {names}")

# %% [markdown]
# ## The results
#
# In a checkout, `portakern report --add FILE` takes each file in and makes the tables and plots of the documentation
# anew.

# %%
READ = """
import sys
from pathlib import Path
from portakern import results
for file in map(Path, sys.argv[1:]):
    found = results.read(file)
    versions = ", ".join(f"{package} {v}" for package, v in found.environment.items() if v)
    print(f"{file}: {found.benchmark} on {found.device}, rows: {len(found.rows)}, with {versions}")
"""
kept = [file for file in (conformance, times) if (WORK / file).exists()]
if len(kept) < 2:
    FAILED.append("writing results")
if run(PYTHON, "-c", READ, *kept) != 0:
    FAILED.append("reading the results")
with zipfile.ZipFile(WORK / "portakern-results.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    for path in [*(WORK / file for file in kept), *plots]:
        archive.write(path, path.relative_to(WORK))
if DEVICE == "cpu":
    loudly("These results are an interpreter's on a CPU. They say nothing about $a_kind: add them to no checkout.")
else:
    print("In a checkout:", *(f"portakern report --add {file}" for file in kept), sep="\n  ")
print(f"All of it: {WORK / 'portakern-results.zip'} ($download)")
if FAILED:
    raise RuntimeError(f"{', '.join(FAILED)} failed, as the cells above say; the files hold what was found")
