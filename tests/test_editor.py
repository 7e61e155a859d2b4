"""What an editor sees: signatures and help of ops, the public names, the types that mypy and pyright make of calls."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from jaxtyping import Float
from typer.testing import CliRunner

import portakern as pk
from maint import report, stub
from portakern.cli import app
from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.spec import spec
from portakern.spec.signature import signature

ROOT = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------------------------------------ signatures and help
@pytest.mark.parametrize("name", pk.ops())
def test_an_op_has_the_signature_of_its_spec(name):
    op = pk.op(name)
    found, spec = inspect.signature(op), op.spec
    arrays = [p.name for p in found.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: p.default for p in found.parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert arrays == [a.name for a in spec.arrays]
    own = ["wants"] * spec.is_vjp + ["overwrite"] * bool(spec.aliases)
    assert keywords == {o.name: o.default for o in spec.options} | dict.fromkeys(own)
    assert all(p.annotation is not p.empty for p in found.parameters.values())


def test_annotations_show_shapes_choices_and_what_comes_back():
    text = str(inspect.signature(pk.op("attention")))
    assert "q: jaxtyping.Float[Any, 'batch q_len kv_heads*group d']" in text
    assert "precision: Literal['ieee', 'tf32'] = 'ieee'" in text and "Range" not in text
    result = r"-> jaxtyping.Float\[Any, '[^']*'\] \| portakern.specs.attention[.]contract[.]AttentionOut$"
    assert re.search(result, text)
    gradient = inspect.signature(pk.op("softmax_vjp"))
    assert str(gradient.parameters["wants"]).endswith("Iterable[typing.Literal['d_x']] | None = None")
    assert "Literal['d_y']" in str(gradient.parameters["overwrite"])
    assert gradient.return_annotation is pk.op("softmax_vjp").spec.result


def test_help_shows_the_call_and_the_spec():
    text = pydoc.render_doc(pk.op("softmax", backend="reference"), renderer=pydoc.plaintext)
    assert "<portakern op softmax on reference>\n    softmax(x, *, axis=-1)\n" in text
    assert "axis: the axis that sums to 1." in text
    assert "A callable op" in pk.Op.__doc__ and "spec" in inspect.signature(pk.Op).parameters


def test_nothing_is_worked_out_until_somebody_asks():
    before = signature.cache_info()
    op = pk.op("softmax", backend="reference")
    op(np.ones((2, 3), np.float32))
    assert signature.cache_info() == before
    assert not {"__doc__", "__signature__"} & set(vars(op))


# --------------------------------------------------------------------------------------------- names, and wrong names
def test_only_public_names_show():
    code = "import portakern as pk, json; print(json.dumps([dir(pk), pk.__all__]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    shown, exported = json.loads(done.stdout)
    assert shown == sorted(exported) and "__version__" in exported
    assert not {"Any", "TYPE_CHECKING", "annotations"} & set(shown)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("layer_norm", "did you mean 'layernorm', or portakern.torch.layer_norm, which takes what PyTorch's function"),
        ("soft_max", "did you mean 'softmax'?"),
        ("Softmax", "did you mean 'softmax'?"),
        ("scaled_dot_product_attention", "did you mean 'attention', or portakern.torch.scaled_dot_product_attention,"),
        ("dot_product_attention", "did you mean 'attention', or portakern.jax.dot_product_attention, which takes"),
    ],
)
def test_a_wrong_name_is_told_the_right_one(name, meant):
    with pytest.raises(
        pk.SpecError, match=f"op '{name}' is unknown; expected one of .*attention, .*, or a spec; {meant}"
    ):
        pk.op(name)


def test_a_name_like_no_other_is_told_all():
    with pytest.raises(pk.SpecError, match="or a spec$"):
        pk.op("conv")


@pytest.mark.parametrize("name", [f.name for f in frameworks().values() if f.twins])
def test_twins_are_what_the_faces_have(name):
    pytest.importorskip(name, reason=f"{name} is not installed")
    face, twins = importlib.import_module(f"portakern.{name}"), frameworks()[name].twins
    besides = {"apply", "register_attention", "swapped", "lowered_for", "apply_rotary_pos_emb", "rotary_tables"}
    besides |= {"ring_attention", "to_zigzag", "from_zigzag", "Float8Linear", "moe", "register_experts"}
    besides |= {"vocabulary_parallel_cross_entropy", "vocabulary_parallel_linear_cross_entropy"}
    assert set(twins) == set(face.__all__) - besides
    assert set(twins.values()) <= set(pk.ops())


def test_the_version_from_a_shell():
    assert CliRunner().invoke(app, ["--version"]).output == f"portakern {pk.__version__}\n"


# ----------------------------------------------------------------------------------------------------------- the stub
def test_the_stub_is_up_to_date():
    text = (ROOT / stub.FILE).read_text(encoding="utf-8")
    assert text == stub.stub(), f"a spec changed; run: {report.COMMAND}"
    assert report.COMMAND in text.splitlines()[0]
    assert max(map(len, text.splitlines())) <= 120


def test_report_tells_of_a_stub_that_was_changed_and_mends_it(tmp_path):
    """Where there are neither pages nor results, the stub is all that there is to make."""
    (tmp_path / report.FOLDER).mkdir(parents=True)
    (tmp_path / "portakern").mkdir()
    (tmp_path / stub.FILE).write_text("# mine\n")
    assert report.update(tmp_path) == [tmp_path / stub.FILE]
    assert (tmp_path / stub.FILE).read_text() == stub.stub()
    assert report.stale(tmp_path) == []


# ------------------------------------------------------------------------------------------------------- type checkers
LIBRARIES = {  # enough of a library for a checker that would take a minute to read the library itself
    "torch": "class Tensor:\n    requires_grad: bool\ndef ones(n: int) -> Tensor: ...\n",
    "jax": "class Array:\n    @property\n    def sharding(self) -> object: ...\n",
    "jax/numpy": "from jax import Array\ndef ones(n: int) -> Array: ...\n",
}
HEAD = """\
from typing import Any
import jax.numpy as jnp
import numpy as np
import torch
import portakern as pk

x, w, ids = np.ones((2, 3), np.float32), np.ones(3, np.float32), np.ones(3, np.int64)
t, j = torch.ones(3), jnp.ones(3)
attention, softmax, matmul = pk.op("attention"), pk.op("softmax", backend="reference"), pk.op("matmul")
gradient = pk.op("layernorm_vjp", variant=None, tiling={"block_n": 128})
flag: bool = bool(x.size)
unknown: Any = x
"""
REVEALED = {  # expression -> its type
    "softmax(x, axis=0)": "NDArray",
    "softmax(t)": "Tensor",
    "softmax(j)": "Array",
    "softmax(unknown)": "Any",
    "matmul(x, w, out_dtype='float64', precision='tf32')": "NDArray",
    "attention(x, x, x, None, ids, ids, window=(3, None), scale=0.5)": "NDArray",
    "attention(t, t, t, return_lse=False)": "Tensor",
    "attention(t, t, t, return_lse=True)": "AttentionOut[Tensor]",
    "attention(x, x, x, return_lse=True).lse": "NDArray",
    "attention(j, j, j, return_lse=flag)": "Array | AttentionOut[Array]",
    "gradient(x, x)": "LayernormVjpOut[NDArray]",
    "gradient(t, t).d_x": "Tensor",
    "gradient(t, t, t).d_weight": "Tensor | None",
    "gradient(t, t, wants=('d_weight',)).d_x": "Tensor | None",
    "attention": "AttentionOp",
    "attention.explain(x, x, x)": "str",
    "attention.bind(x, x, x)": "Call",
    "attention.lower(x, x, x, target='sm_90')": "Build",
    "attention.spec.name": "str",
    "pk.op(str(flag))": "Op",
    "pk.op(attention.spec)": "Op",
}
REFUSED = {  # statement -> what mypy says of it
    "softmax(x, axes=0)": 'Unexpected keyword argument "axes"',
    "attention(x, x, x, causal=True)": 'Unexpected keyword argument "causal"',
    "attention(x, x)": "No overload variant",
    "softmax('a')": "No overload variant",
    "softmax(x, axis='a')": "No overload variant",
    "matmul(x, t)": "No overload variant",
    "matmul(x, x, precision='tf23')": "No overload variant",
    "gradient(x, x, wants=('d_y',))": "incompatible type",
    "pk.op('softmax', tile={})": 'Unexpected keyword argument "tile"',
    "pk.opp('softmax')": 'Module has no attribute "opp"',
}
LINES = [*HEAD.splitlines(), *(f"reveal_type({e})" for e in REVEALED), *REFUSED]
WHERE = {e: i for i, e in enumerate([*HEAD.splitlines(), *REVEALED, *REFUSED], 1)}
Said = dict[int, list[tuple[str, str]]]
"""Line -> (severity, message) of all that a checker says of it."""


def shortened(text: str) -> str:
    """A type in the words of either checker, as the tables above write it."""
    text = re.sub(r"(?:numpy\.)?ndarray\[tuple\[Any, \.\.\.\], (?:numpy\.)?dtype\[Any\]\]", "NDArray", text)
    text = re.sub(r"tuple\[[^=]*, fallback=([^\]]*\[[^\]]*\])\]", r"\1", text)  # mypy's named tuple
    return re.sub(r"[\w.]+\.(\w)", r"\1", text)


@pytest.fixture(scope="module")
def snippet(tmp_path_factory):
    """The file to check, beside what stands for the array libraries."""
    folder = tmp_path_factory.mktemp("editor")
    for name, text in LIBRARIES.items():
        (folder / "libraries" / name).mkdir(parents=True)
        (folder / "libraries" / name / "__init__.pyi").write_text(text)
    (folder / "snippet.py").write_text("\n".join(LINES) + "\n")
    return folder / "snippet.py"


@functools.cache
def said_by_mypy(file: Path) -> Said:
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[test]'")
    config = file.parent / "mypy.ini"
    config.write_text(
        f"[mypy]\nmypy_path = {file.parent / 'libraries'},{ROOT}\nfollow_imports = silent\nstrict = true\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", file.parent / "cache", file]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    said: Said = defaultdict(list)
    for line in done.stdout.splitlines():
        if found := re.match(r".*snippet\.py:(\d+): (\w+): (.*)", line):
            said[int(found[1])].append((found[2], found[3]))
    assert said, done.stdout + done.stderr
    return said


@functools.cache
def said_by_pyright(file: Path) -> Said:
    pytest.importorskip("pyright", reason="pyright is not installed: pip install -e '.[dev]'")
    absent = not all(importlib.util.find_spec(name) for name in ("torch", "jax"))
    config = {
        "extraPaths": [str(ROOT)],
        "stubPath": str(file.parent / "libraries") if absent else "",
        "include": [file.name],
    }
    (file.parent / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", file.parent]
    quiet = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # no word of a newer version among the JSON
    done = subprocess.run(command, cwd=file.parent, env=quiet, capture_output=True, text=True, check=False)
    said: Said = defaultdict(list)
    for d in json.loads(done.stdout)["generalDiagnostics"]:
        severity = {"information": "note"}.get(d["severity"], d["severity"])
        said[d["range"]["start"]["line"] + 1].append((severity, d["message"]))
    assert said, done.stdout + done.stderr
    return said


CHECKERS = {"mypy": (said_by_mypy, r'Revealed type is "(.*)"'), "pyright": (said_by_pyright, r'Type of ".*" is "(.*)"')}


@pytest.mark.parametrize("checker", CHECKERS)
def test_calls_have_types(checker, snippet):
    run, pattern = CHECKERS[checker]
    said = run(snippet)
    revealed = {}
    for expression in REVEALED:
        notes = [re.fullmatch(pattern, m, re.DOTALL) for severity, m in said[WHERE[expression]] if severity == "note"]
        revealed[expression] = shortened(next(n[1] for n in notes if n))
    assert revealed == REVEALED


@pytest.mark.parametrize("checker", CHECKERS)
def test_wrong_calls_are_errors_and_right_ones_are_not(checker, snippet):
    said = CHECKERS[checker][0](snippet)
    wrong = {line: [m for severity, m in found if severity == "error"] for line, found in said.items()}
    wrong = {line: messages for line, messages in wrong.items() if messages}
    assert sorted(wrong) == sorted(WHERE[statement] for statement in REFUSED)
    if checker == "mypy":
        assert [s for s, reason in REFUSED.items() if not any(reason in m for m in wrong[WHERE[s]])] == []


@pytest.mark.parametrize("name", [f.name for f in frameworks().values() if f.hallmark])
def test_the_hallmark_of_a_library_is_its_arrays_alone(name):
    present = {f.name: f.from_numpy(np.ones(3, np.float32), None) for f in frameworks().values() if _loads(f)}
    if name not in present:
        pytest.skip(f"{name} is not installed")
    assert [n for n, array in present.items() if hasattr(array, frameworks()[name].hallmark)] == [name]


def _loads(framework):
    try:
        framework.load()
    except pk.UnavailableError:
        return False
    return True


class TwoOut(NamedTuple):
    y: Float[Any, "n"]
    z: Float[Any, "n"]


class ThreeOut(NamedTuple):
    y: Float[Any, "n"]
    low: Float[Any, "n"]
    high: Float[Any, "n"]


def both(x: Float[Any, "n"], *, size: int = 1) -> TwoOut:
    """Always two outputs."""


def ends(x: Float[Any, "n"], *, low: bool = False, high: bool = True) -> ThreeOut:
    """One output, and others on demand, one of them by default."""


@pytest.mark.parametrize(
    ("declared", "returns", "fields", "ways"),
    [
        (both, {}, ["y: T", "z: T"], {"": "TwoOut[{}]"}),
        (
            ends,
            {"low": "low", "high": "high"},
            ["y: T", "low: T | None", "high: T | None"],
            {
                "low: Literal[False] = False, high: Literal[False]": "{}",
                "low: Literal[True]": "ThreeOut[{}]",
                "high: Literal[True] = True": "ThreeOut[{}]",
                "": "{0} | ThreeOut[{0}]",
            },
        ),
    ],
)
def test_outputs_on_demand(declared, returns, fields, ways):
    made = spec(tiling={}, flops=lambda call: 0.0, returns=returns)(declared)
    (result,) = stub._result(made)
    assert [line.strip() for line in result.splitlines()[1:]] == fields
    assert {", ".join(f"{n}: {t}" for n, t in w.narrowed.items()): w.returns for w in stub._overloads(made)} == ways


def test_only_our_own_ops_stand_in_the_stub():
    named = re.findall(r'which: Literal\["(\w+)"\]', stub.stub())
    assert named == [n for n in registry.ops() if registry.find_spec(n).fn.__module__.startswith("portakern.specs.")]


def test_a_users_file_elsewhere_has_types_of_the_installed_package(tmp_path):
    """With nothing said of where portakern lies: an editable install by a finder, which no type checker runs, gives
    ``import-not-found``."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install -e '.[test]'")
    pytest.importorskip("pyright", reason="pyright is not installed: pip install -e '.[dev]'")
    try:
        version("portakern")
    except PackageNotFoundError:
        pytest.skip("portakern is not installed here, only on the path")
    (tmp_path / "users.py").write_text("import portakern as pk\nnames: int = pk.ops()\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    clean["PYRIGHT_PYTHON_IGNORE_WARNINGS"] = "1"
    for command in (
        ["mypy", "--follow-imports=silent", "--cache-dir", "cache"],
        ["pyright", "--pythonpath", sys.executable],
    ):
        command = [sys.executable, "-m", *command, "users.py"]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert 'tuple[str, ...]"' in done.stdout and "could not be resolved" not in done.stdout, (
            done.stdout + done.stderr
        )
