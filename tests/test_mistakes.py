"""What wrong results look like: each mistake is planted in a right function, and named by the checker; rounding and
small evidence are not taken for one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.oracle import as_float64, oracle
from portakern.spec.tolerance import rounded
from portakern.testing.likeness import Likeness
from portakern.testing.mistakes import supposed, suppositions
from portakern.testing.verdict import Broken, compare_bounds
from tests.mutants.functions import attention as right_attention
from tests.mutants.functions import wide
from tests.ops import records

LOG2_E = 1 / np.log(2)


def drawn(*shape, seed=3, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def looks(op, results, *arrays, **options):
    """What these results of a call look like; None where they are right."""
    call = bind(registry.find_spec(op), *arrays, **options)
    outputs = [o for o in call.outputs if o in call.wants]
    results = results if isinstance(results, tuple) else (results,)
    stored = [rounded(wide(r), call.outputs[o][1]) for o, r in zip(outputs, results, strict=True)]
    try:
        compare_bounds(call, stored)
    except Broken as e:
        return supposed(e.wrong, Likeness(e.cause, e.explanation))
    return None


def oracle_of(op, *arrays, **options):
    return tuple(o for o in oracle(bind(registry.find_spec(op), *arrays, **options)) if o is not None)


A, B, SQUARE = drawn(9, 70), drawn(70, 11, seed=4), drawn(70, 70, seed=5)
X, WEIGHT = drawn(8, 300), drawn(300, seed=6)
Q, K, V = drawn(1, 12, 2, 16), drawn(1, 20, 2, 16, seed=7), drawn(1, 20, 2, 16, seed=8)


def lse(x, low=np.float64):
    e = np.exp(x - x.max(-1, keepdims=True)).astype(low)
    total = np.zeros(e.shape[:-1], low)
    for i in range(e.shape[-1]):
        total = (total + e[..., i]).astype(low)
    return wide(x.max(-1)) + np.log(wide(total))


def halves(x, y):
    """Sums in 16 bits."""
    total = np.zeros((x.shape[0], y.shape[1]), np.float16)
    for i in range(x.shape[1]):
        total = (total + (x[:, i : i + 1] * y[i]).astype(np.float16)).astype(np.float16)
    return total


def softmax(x, n=None):
    e = np.exp(wide(x) - wide(x).max(-1, keepdims=True))
    return e / e[..., :n].sum(-1, keepdims=True)


def naive_softmax(x):
    with np.errstate(all="ignore"):
        e = np.exp(x)
        return e / e.sum(-1, keepdims=True)


def rms(x, total=False, n=None):
    squares = np.square(wide(x))[..., :n]
    return wide(x) / np.sqrt((squares.sum(-1, keepdims=True) if total else squares.mean(-1, keepdims=True)) + 1e-6)


CAUSAL = {"is_causal": True}
WINDOW = {"window": (4, 0), "is_causal": True}


def attended(**options):
    return oracle_of("attention", Q, K, V, **options)


PLANTED = {
    "a logarithm of base 2": ("logsumexp", lambda: lse(wide(X)) * LOG2_E, (X,), {}, "log2 e: base 2 for base e"),
    "an exponential of base 2": (
        "softmax", lambda: softmax(wide(X) / LOG2_E), (X,), {}, "times ln 2: base 2 for base e",
    ),
    "a constant factor": ("matmul", lambda: 1.25 * wide(A) @ B, (A, B), {}, "right elements times 1.25"),
    "a missing scale": ("attention", lambda: attended(scale=1.0), (Q, K, V), {}, "times sqrt 16, an extent of its own"),
    "a scale of base 2": (
        "attention", lambda: attended(scale=0.2 * LOG2_E), (Q, K, V), {"scale": 0.2}, "scale were 0.288",
    ),
    "a missing weight": ("rmsnorm", lambda: rms(X), (X, WEIGHT), {}, "as if weight were not there"),
    "a transposed operand": ("matmul", lambda: wide(A) @ SQUARE.T, (A, SQUARE), {}, "as if b were transposed"),
    "an operand in the other order": (
        "matmul", lambda: wide(A) @ B.reshape(11, 70).T, (A, B), {}, "b lay transposed in memory",
    ),
    "a window shifted by one": (
        "attention", lambda: attended(window=(5, 0), is_causal=True), (Q, K, V), WINDOW,
        "window were (5, 0), not (4, 0)",
    ),
    "a mask off by one": (
        "attention", lambda: attended(is_causal=True, q_start=9), (Q, K, V), CAUSAL, "one key more at the diagonal",
    ),
    "a mask aligned at the top": (
        "attention", lambda: attended(is_causal=True, q_start=0), (Q, K, V), CAUSAL, "aligned at the top left",
    ),
    "a dropped last tile": (
        "matmul", lambda: wide(A[:, :64]) @ B[:64], (A, B), {}, "the last 6 of 70 elements along k were left out",
    ),
    "a dropped tile of a denominator": (
        "softmax", lambda: softmax(X, 256), (X,), {}, "a factor of each row along axis 1",
    ),
    "no maximum subtracted": ("softmax", lambda: naive_softmax(X + 200), (X + 200,), {}, "a maximum not subtracted"),
    "a sum for a mean": ("rmsnorm", lambda: rms(X, total=True), (X,), {}, "1 / the root of 300"),
    "n - 1 for n": (
        "layernorm", lambda: oracle_of("layernorm", X)[0] * np.sqrt(299 / 300), (X,), {}, "n - 1 for n",
    ),
    "sums in 16 bits": ("matmul", lambda: halves(A, B), (A, B), {}, "a float16 number"),
    "operands in 16 bits": (
        "matmul", lambda: wide(A.astype(np.float16)) @ wide(B.astype(np.float16)), (A, B), {},
        "rounded to float16 first",
    ),
    "a row further": ("matmul", lambda: wide(A) @ np.roll(B, -1, 0), (A, B), {}, "one place further along its axis"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_is_named(what):
    op, results, arrays, options, words = PLANTED[what]
    found = looks(op, results(), *arrays, **options)
    assert found is not None and words in found.words, found


def test_the_page_has_each_mistake_and_its_words():
    page = (Path(__file__).parent.parent / "docs/how-to/read-a-failure.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE))
    assert {what: row[-1] for what, row in PLANTED.items()}.items() <= rows.items() and len(PLANTED) >= 10


def test_the_words_of_a_check_are_those_of_the_case_before_it_was_made_smaller():
    def transposed(a, b):
        return (a.astype(np.float64) @ (np.swapaxes(b, -1, -2) if b.shape[-1] == b.shape[-2] else b)).astype(a.dtype)

    how = {"dtypes": ["float32"], "max_examples": 12, "promises": False, "seed": 0}
    report = pk.check("matmul", fn=transposed, shapes=[{"a": (9, 24), "b": (24, 24)}], **how)
    assert "as if b were transposed" in str(report.failures[0]), report.failures


def test_noise_and_little_evidence_look_like_no_mistake():
    rng = np.random.default_rng(0)
    noisy = wide(A) @ B + rng.standard_normal((9, 11))
    assert not (looks("matmul", noisy, A, B) or Likeness()).words
    one = drawn(1, 1), drawn(1, 1, seed=2)
    assert not (looks("matmul", -wide(one[0]) * one[1], *one) or Likeness()).words


def test_a_right_result_looks_like_nothing():
    assert looks("attention", right_attention(Q, K, V, is_causal=True), Q, K, V, **CAUSAL) is None


def test_suppositions_of_every_op_are_calls_or_none():
    """Whatever a spec has: each is made, and those that no oracle takes are passed over."""
    for op, known in records().items():
        small = next(iter(known.small.values()))
        call = bind(known.spec, **small.arrays(op, "float32"), **small.options)
        made = list(suppositions(as_float64(call), known.spec.outputs[0].name))
        assert made and all(s.words and s.call is not call for s in made), op


def test_generic_code_names_no_op():
    from portakern.testing import likeness, mistakes

    names = {spec.name for spec in map(registry.find_spec, pk.ops())}
    for module in (likeness, mistakes):
        text = Path(module.__file__).read_text(encoding="utf-8")
        nodes = [*ast.walk(ast.parse(text))]
        found = {n.id for n in nodes if isinstance(n, ast.Name)} | {
            n.value for n in nodes if isinstance(n, ast.Constant)
        }
        assert not names & found
