"""Make the notebooks of notebooks/cells.py, which says each cell once for every place where they run.

Of a place whose file is a script, that script runs the cells: rocm_gpu.py.

    python notebooks/make.py            # writes what is stale
    python notebooks/make.py --check    # writes nothing; exit status 1 if a notebook is stale or was changed by hand

cells.py is in the percent format: ``# %%`` begins a cell of code, ``# %% [markdown]`` one of text, and platforms
behind it (``# %% cuda rocm``) one that only what is made for those platforms has. ``$name`` is a field of
:class:`Place`, and ``"$wanted"`` the object of that name.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).resolve().parent
PYPROJECT = HERE.parent / "pyproject.toml"


@dataclass(frozen=True)
class Place:
    """What differs from one notebook to the next: words for readers, and names for code.

    Attributes:
      file: the notebook, or the script.
      title, kind, a_kind, peers, choose, needs, installs, upload, offline, download: words.
      platform, framework, library, backend: what is measured. interpreted_peer: who it is held against on a CPU.
      extras: of portakern. wanted: package -> its oldest version.
      metadata: of the notebook, as its host reads it.
    """

    file: str
    title: str
    kind: str
    a_kind: str
    peers: str
    choose: str
    needs: str
    installs: str
    upload: str
    offline: str
    download: str
    platform: str
    framework: str
    library: str
    backend: str
    interpreted_peer: str
    extras: str
    wanted: dict[str, list[int]]
    metadata: dict[str, Any]


CHECKING = {"portakern": [0], "typer": [0], "rich": [13], "matplotlib": [3]}
JAX = {"jax": [0, 10], "jaxlib": [0, 10]}
COLAB = {
    "upload": "upload a wheel by the folder sign on the left",
    "offline": "Without a network: Runtime > Disconnect and delete runtime, and begin again.",
    "download": "the folder sign on the left, and its Download",
}
TPU = {
    "kind": "TPU",
    "a_kind": "a TPU",
    "peers": "XLA's and JAX's own kernels",
    "needs": "jax 0.10 or newer, with its libtpu",
    "installs": "jax, libtpu and portakern",
    "platform": "tpu",
    "framework": "jax",
    "library": "JAX",
    "backend": "pallas",
    "interpreted_peer": "jax",
    "extras": "tpu,cli,plots",
    "wanted": CHECKING | JAX,
}
PLACES = (
    Place(
        file="tpu_colab.ipynb",
        title="a TPU of Colab",
        choose="Runtime > Change runtime type > v5e-1 TPU or v6e-1 TPU",
        metadata={"accelerator": "TPU", "colab": {"gpuType": "V5E1", "provenance": []}},
        **TPU,
        **COLAB,
    ),
    Place(
        file="tpu_kaggle.ipynb",
        title="a TPU of Kaggle",
        choose="Settings > Accelerator > TPU v5e-8",
        upload="upload a wheel as a dataset, Input > Upload",
        offline="Without a network: Settings > Turn on internet. Kaggle asks for a verified phone number first.",
        download="the Output of the saved version",
        metadata={"kaggle": {"accelerator": "tpuV5e8", "isInternetEnabled": True, "language": "python"}},
        **TPU,
    ),
    Place(
        file="gpu_colab.ipynb",
        title="a GPU of Colab",
        kind="GPU",
        a_kind="a GPU",
        peers="torch's, XLA's and JAX's own kernels",
        choose="Runtime > Change runtime type > L4, A100 or H100 GPU (portakern was not tried on a T4, which is older)",
        needs="torch 2.11, triton 3.6 and, for JAX's kernels beside its own, jax 0.10 or newer",
        installs="portakern and JAX, and uses the runtime's torch and triton",
        platform="cuda",
        framework="torch",
        library="torch",
        backend="triton",
        interpreted_peer="torch",
        extras="triton,pallas,cli,plots",
        wanted=CHECKING | JAX | {"torch": [2, 11], "triton": [3, 6]},
        metadata={"accelerator": "GPU", "colab": {"gpuType": "L4", "provenance": []}},
        **COLAB,
    ),
    Place(
        file="rocm_gpu.py",
        title="an AMD GPU",
        kind="AMD GPU",
        a_kind="an AMD GPU",
        peers="torch's own kernels",
        choose="a machine with an Instinct or a Radeon, its driver, and you in the groups render and video (/dev/kfd)",
        needs="torch 2.11 or newer for ROCm, which brings Triton",
        installs="portakern, and torch for ROCm where this Python has none",
        upload="run this program in a checkout",
        offline="TORCH_INDEX names another index of torch for ROCm than PyTorch's.",
        download="send this file, or each of those",
        platform="rocm",
        framework="torch",
        library="torch",
        backend="triton",
        interpreted_peer="torch",
        extras="cli,plots",
        wanted=CHECKING | {"torch": [2, 11]},
        metadata={},
    ),
)


def cells(text: str, platform: str) -> Iterator[tuple[str, str]]:
    """("code" or "markdown", source) of each cell that a platform has."""
    for part in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        kind, only = re.fullmatch(r"(?: \[(\w+)\])?((?: \w+)*)", head).groups()  # type: ignore[union-attr]
        if not only or platform in only.split():
            body = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind else body
            yield kind or "code", body.strip("\n")


def filled(place: Place, text: str, repository: str) -> Iterator[tuple[str, str]]:
    """The cells of a place, with its words."""
    values = {**asdict(place), "repository": repository}
    wanted = repr(values.pop("wanted"))
    for kind, source in cells(text, place.platform):
        yield kind, Template(source.replace('"$wanted"', wanted)).substitute(values)


def notebook(place: Place, text: str, repository: str) -> dict[str, Any]:
    """The notebook of a place, in version 4.5 of the format, with no outputs."""
    made = []
    for i, (kind, source) in enumerate(filled(place, text, repository)):
        cell = {"cell_type": kind, "id": hashlib.sha256(f"{i} {place.file}".encode()).hexdigest()[:8], "metadata": {}}
        code = {"execution_count": None, "outputs": []} if kind == "code" else {}
        made.append({**cell, **code, "source": source.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}, **place.metadata}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def source() -> tuple[str, str]:
    """The text of cells.py, and where the project lives."""
    text = (HERE / "cells.py").read_text(encoding="utf-8")
    return text, tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["portakern"]["repository"]


def notebooks() -> dict[Path, str]:
    """Path -> what stands there."""
    text, repository = source()
    made = {HERE / p.file: notebook(p, text, repository) for p in PLACES if p.file.endswith(".ipynb")}
    return {path: json.dumps(nb, indent=1, ensure_ascii=False) + "\n" for path, nb in made.items()}


def stale() -> dict[Path, str]:
    """Those that are not what cells.py says."""
    return {p: t for p, t in notebooks().items() if not p.exists() or p.read_text(encoding="utf-8") != t}


def main() -> int:
    found = stale()
    for path, text in found.items():
        if "--check" in sys.argv[1:]:
            print(f"{path.name} is stale or was changed by hand; run: python notebooks/make.py")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return int(bool(found) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
