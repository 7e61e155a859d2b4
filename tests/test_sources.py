"""The hash of the sources that decide a result: what it follows, and what it does not."""

import json
import re
import shutil
from pathlib import Path

import pytest

from portakern import sources, syntax
from portakern.core import registry, tilings
from portakern.core.targets import Target

ROOT = Path(__file__).resolve().parents[1]

HOPPER = Target("cuda", "sm_90")
BACKENDS = "portakern/backends"


def test_sources_are_read_of_what_cannot_be_imported_here_too():
    """Else a result of Hopper's Pallas kernels would not be told from one of others by a process with an older JAX."""
    pallas, hopper = registry.backend("pallas"), Target("cuda", "sm_90")
    assert sources.fingerprint("matmul", pallas, "gpu", hopper) is not None
    assert sources.fingerprint("softmax", pallas, None, hopper) is not None
    assert sources.fingerprint("softmax", pallas, "decode", hopper) is None


class Checkout:
    """A copy of the sources, and the hash of an op's results there."""

    def __init__(self, root):
        self.root = root
        for name in ("portakern",):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))

    def now(self, op="softmax", backend="triton", variant="gpu", target=HOPPER):
        return sources.fingerprint(op, registry.backend(backend), variant, target, self.root)

    def edit(self, file, *changes):
        """Texts in place of others, each of which is there."""
        path = self.root / file
        text = path.read_text()
        for pattern, new in changes:
            assert re.search(pattern, text), f"{file} has no {pattern}"
            text = re.sub(pattern, new, text)
        path.write_text(text)

    def restored(self):
        for file in (BACKENDS, "portakern/specs"):
            shutil.copytree(ROOT / file, self.root / file, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("copy"))


@pytest.fixture
def checkout(copied):
    yield copied
    copied.restored()
    tilings.forget()


KERNEL = f"{BACKENDS}/triton/gpu/softmax.py"
RMSNORM = f"{BACKENDS}/triton/gpu/rmsnorm.py"


@pytest.mark.parametrize(
    "file, changes",
    [
        (
            KERNEL,
            [('"""Softmax over', '"""Another\n\nsoftmax over'), (r"\n    return ", "\n    # a word\n    return ")],
        ),
        (KERNEL, [(r"\Z", "\n\nUNUSED = 1\n")]),
        (KERNEL, [(r"\bsoftmax_kernel\b", "rows_kernel"), (r"\bexponentials\b", "powers")]),
        (KERNEL, [(r"\brow_ok\b", "in_rows"), (r"\bx_row\b", "at")]),
        (RMSNORM, [(r"\bnarrow\b", "thin")]),
        ("portakern/specs/softmax.py", [(r"\bsigma\(call", "typical(call"), (r"\bref\b", "exact")]),
    ],
    ids=["comments", "what nobody names", "functions", "variables", "a parameter", "a bound"],
)
def test_names_and_comments_do_not_count(checkout, file, changes):
    before = checkout.now(), checkout.now("rmsnorm")
    assert before[0] == sources.fingerprint("softmax", registry.backend("triton"), "gpu", HOPPER) != before[1]
    checkout.edit(file, *changes)
    assert (checkout.now(), checkout.now("rmsnorm")) == before


def test_where_a_function_lies_does_not_count(checkout):
    """A module gets another name, and a function moves from it into its caller's."""
    before = checkout.now("rmsnorm"), checkout.now("layernorm"), checkout.now("softmax")
    folder = checkout.root / BACKENDS / "triton" / "gpu"
    (folder.parent / "lib" / "rows.py").rename(folder / "_lines.py")
    for path in (checkout.root / BACKENDS / "triton").rglob("*.py"):
        path.write_text(path.read_text().replace("triton.lib.rows", "triton.gpu._lines"))
    assert (checkout.now("rmsnorm"), checkout.now("layernorm"), checkout.now("softmax")) == before
    helpers, kernel = folder / "_lines.py", folder / "rmsnorm.py"
    moved = re.search(r"@triton\.jit\ndef row_sum\(.*?(?=\n\n\n)", helpers.read_text(), re.S)
    helpers.write_text(
        helpers.read_text().replace(moved[0], "from portakern.backends.triton.gpu.rmsnorm import row_sum")
    )
    kernel.write_text(kernel.read_text().replace(", row_sum", "") + f"\n\n{moved[0]}\n")
    assert (checkout.now("rmsnorm"), checkout.now("layernorm"), checkout.now("softmax")) == before
    (folder / "_lines.py").unlink()


def test_how_often_a_statement_is_written_does_not_count(checkout):
    """A helper, or a type variable, that two modules have may become one that they share."""
    before, spec = checkout.now("rmsnorm"), "portakern/specs/rmsnorm.py"
    plant = re.search(r"def plant\((.|\n)*?\n\n\n", (ROOT / "portakern/specs/_rows.py").read_text())[0]
    own = plant.replace("def plant(", "def planted(")
    checkout.edit(
        spec, (r"\nclass RmsnormOut", f"\n{own}class RmsnormOut"), (r"\bplant\(rng, arrays", "planted(rng, arrays")
    )
    assert checkout.now("rmsnorm") == before
    checkout.edit(
        spec, (r"\bplanted\((.*) np\.nan\)", r"plant(\1 np.nan)")
    )  # one edge has another helper than the next
    assert checkout.now("rmsnorm") == before


@pytest.mark.parametrize(
    "file, change, op",
    [
        (KERNEL, (r"tl\.store\(", "tl.atomic_add("), "softmax"),
        (RMSNORM, (r"/ n \+ eps", "/ n - eps"), "rmsnorm"),
        (RMSNORM, (r"static_range\(2\)", "static_range(3)"), "rmsnorm"),
        (RMSNORM, (r"x_strides.n, n, row_ok, tile\)", "n, x_strides.n, row_ok, tile)"), "rmsnorm"),
        (f"{BACKENDS}/triton/lib/rows.py", (r"(def row_sum\(.*\n)", r"\1    tl.debug_barrier()\n"), "softmax"),
        (f"{BACKENDS}/triton/launch.py", (r"(def cdiv\(.*\n)", r"\1    a = 2\n"), "softmax"),
        (f"{BACKENDS}/triton/plan.py", (r"(def _placement\(.*\n)", r"\1    a = 2\n"), "softmax"),
        ("portakern/specs/_rows.py", (r"(def plant\((.|\n)*?:\n)", r"\1    a = 2\n"), "softmax"),
        ("portakern/specs/rmsnorm.py", (r"] = 1e-6", "] = 1e-5"), "rmsnorm"),
        ("portakern/specs/rmsnorm.py", ("before_weight", "after_weight"), "rmsnorm"),
        ("portakern/specs/rmsnorm.py", (r"(def rmsnorm\(\n.*\n    )weight:", r"\1scale:"), "rmsnorm"),
        ("portakern/specs/rmsnorm.py", (r"\Z", '\nrmsnorm.sample("more", dims={"batch": (2,), "n": 3})\n'), "rmsnorm"),
    ],
)  # fmt: skip
def test_what_is_computed_counts(checkout, file, change, op):
    before, other = checkout.now(op), checkout.now("swiglu")
    checkout.edit(file, change)
    assert checkout.now(op) != before
    assert (checkout.now("swiglu") == other) == (
        file not in (f"{BACKENDS}/triton/launch.py", f"{BACKENDS}/triton/plan.py")
    )


def test_a_gradient_does_not_count_for_its_forward_op_which_is_declared_beside_it(checkout):
    forward, gradient = checkout.now("add_rmsnorm"), checkout.now("add_rmsnorm_vjp")
    checkout.edit("portakern/specs/add_rmsnorm.py", (r"\ninherit\(add_rmsnorm_vjp, .*\n", "\n"), ("13.0 \\*", "14.0 *"))
    assert checkout.now("add_rmsnorm") == forward and checkout.now("add_rmsnorm_vjp") != gradient
    checkout.edit("portakern/specs/add_rmsnorm.py", (r"\ninherit\(add_rmsnorm, .*\n", "\n"))
    assert checkout.now("add_rmsnorm") != forward


def test_a_row_of_a_table_counts(checkout):
    before, other = checkout.now("matmul"), checkout.now()
    table = checkout.root / BACKENDS / "triton" / "tuned" / "sm_90.json"
    data = json.loads(table.read_text())
    for rows in data["ops"]["matmul"].values():  # of each variant
        tiled = next(r for r in rows if "tiling" in r)
        tiled["tiling"] = {n: 2 * v for n, v in tiled["tiling"].items()}
    table.write_text(json.dumps(data))
    tilings.forget()
    assert checkout.now("matmul") != before and checkout.now() == other


def test_a_report_reads_a_source_once(checkout):
    before = checkout.now("rmsnorm")
    change = r"/ n \+ eps", "/ n - eps"
    with sources.unchanging():
        assert checkout.now("rmsnorm") == before
        checkout.edit(RMSNORM, change)
        assert checkout.now("rmsnorm") == before
    assert checkout.now("rmsnorm") != before


FIRST = """
import numpy as np
from portakern.spec import Tile

def helper(x, *, scale=1.0):
    return np.exp(x) * scale

def main(x, y):
    def inner(z): return z + x
    def other(z): return z - x
    return helper(inner(x), scale=2.0), [other(v) for v in y], lambda v: v, Tile(1)
"""


@pytest.mark.parametrize(
    "old, new, same",
    [
        (r"\bhelper\b", "aid", True),
        (r"\bscale\b", "by", True),
        (r"\bx\b", "first", True),
        (r"\binner\b", "within", True),
        (r"\bv\b", "each", True),
        ("import numpy as np", "import numpy as np  # the array library", True),
        (r"np\.exp", "np.log", False),
        (r"scale=1\.0", "scale=1.5", False),
        (r"scale=1\.0", "scale=1", False),
        (r"\*, scale", "scale", False),
        (r"return z \+ x", "return z + z", False),
        (r"inner\(x\), scale", "other(x), scale", False),
        (r"Tile\(1\)", "Tile(2)", False),
        (r"np\.exp\(x\)", "np.exp(x).real", False),
    ],
)
def test_the_tokens_of_a_statement(old, new, same):
    def hashes(text):
        module = syntax.read("portakern.specs.a", text)
        tree = sources._Tree(ROOT)
        tree.file = lambda name: ROOT if name == "portakern.specs.a" else sources._Tree(ROOT)._file(name)
        tree.module = lambda name: module
        return sorted(tree.hashed(at, sources.ROUNDS + 1) for at in tree.find("portakern.specs.a")[0])

    changed = re.sub(old, new, FIRST)
    assert changed != FIRST
    assert (hashes(changed) == hashes(FIRST)) == same


def test_functions_called_in_each_others_place_are_told_apart():
    def hashes(text):
        module = syntax.read("portakern.specs.a", f"{text}\ndef one(x): return x + 1\ndef two(x): return x - 1\n")
        tree = sources._Tree(ROOT)
        tree.file, tree.module = (lambda name: ROOT if name == "portakern.specs.a" else None), (lambda name: module)
        return sorted(tree.hashed(at, sources.ROUNDS + 1) for at in tree.find("portakern.specs.a")[0])

    assert hashes("def f(x): return one(two(x))") != hashes("def f(x): return two(one(x))")
    assert hashes("A, B = 1, 2\ndef f(x): return A") != hashes("A, B = 1, 2\ndef f(x): return B")
