"""Dispatch: who serves a call, what happens at extents of 0, and that nothing falls back in silence."""

import contextlib
import itertools
import logging
import math
import re
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import portakern as pk
from portakern.core import backend as backend_module
from portakern.core import cache, dispatch, registry
from portakern.core import observe as watching
from portakern.core.backend import Family, in_order
from portakern.core.framework import frameworks
from portakern.core.oracle import rounded as to_nearest
from portakern.core.targets import HOST, Target
from portakern.testing import sample_arrays
from tests.ops import records

X = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)


def test_host_arrays_go_to_the_oracle_and_say_so_once(caplog):
    cache.forget()  # another test's op may know its route already
    watching._said.clear()
    with caplog.at_level(logging.WARNING, "portakern"):
        y = pk.op("softmax")(X)
        pk.op("softmax")(X)
    assert isinstance(y, np.ndarray) and y.dtype == np.float32
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-6)
    assert [r.getMessage() for r in caplog.records] == [
        "portakern: CPU arrays run on reference, the float64 oracle: exact, slow; backend= names another"
    ]


def test_explain_names_the_choice_and_the_rest():
    text = pk.op("softmax").explain(X, axis=0)
    assert "softmax(float32; shape=(3, 5), axis=0)" in text and "backend: reference (chosen from the arrays)" in text
    for other in ("triton", "pallas"):
        assert f"not {other}: " in text


def test_explain_says_where_a_tiling_came_from():
    pytest.importorskip("triton", reason="triton is not installed")
    text = pk.op("softmax", backend="triton", tiling={"block_n": 256}).explain(X)
    assert "block_n=256 (yours)" in text and "(heuristic)" in text and "conversion: numpy -> torch and back" in text


def test_extents_of_zero_need_no_kernel():
    assert pk.op("softmax")(np.zeros((0, 4), np.float32)).shape == (0, 4)
    c = pk.op("matmul")(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32))
    assert c.shape == (2, 3) and not c.any()
    q, k = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 0, 2, 8), np.float32)
    o, lse = pk.op("attention")(q, k, k, return_lse=True)
    assert o.shape == (2, 3, 4, 8) and not o.any()
    assert lse.shape == (2, 4, 3) and (lse == -math.inf).all()


def test_observers_see_who_served():
    seen = []
    with pk.observe(seen.append):
        pk.op("softmax", backend="reference")(X)
    pk.op("softmax")(X)
    assert [(s.backend, s.call.spec.name, s.interpret) for s in seen] == [("reference", "softmax", False)]


def test_the_oracle_takes_no_tiling():
    with pytest.raises(pk.SpecError, match="tiling has no 'block_n' on reference"):
        pk.op("softmax", backend="reference", tiling={"block_n": 128})(X)


def test_the_oracle_rounds_once():
    tie = 1 + 2.0**-8  # half way between two bfloat16 numbers; the even one is 1
    exact = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40, np.nan, np.inf])
    rounded = to_nearest(exact, "bfloat16").astype(float)
    np.testing.assert_array_equal(rounded, [1, 1 + 2.0**-7, 1, -1 - 2.0**-7, np.nan, np.inf])


def refused_by_choice(target):
    with pytest.raises(pk.UnsupportedError) as refused:
        dispatch.choose(registry.find_spec("softmax"), frameworks()["jax"], target)
    return str(refused.value)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_a_gpu_without_a_native_backend_names_what_serves_it(arch):
    pytest.importorskip("jax", reason="jax is not installed")
    told = refused_by_choice(Target("cuda", arch))
    assert f"no backend serves jax arrays on cuda {arch} by default" in told
    assert "pallas: its kernels for cuda are only for sm_90" in told
    assert "Backends that can be named: backend='reference'" in told


def test_a_gpu_that_nobody_names_is_not_taken_for_hopper():
    pytest.importorskip("jax", reason="jax is not installed")
    told = refused_by_choice(Target("cuda"))
    assert "are only for sm_90, and the chip to lower for is unknown" in told


def test_arrays_on_hopper_go_to_pallas_where_its_kernels_can_be_imported():
    """Their jax is newer than that of Python 3.11, and what is missing is said."""
    pytest.importorskip("jax", reason="jax is not installed")
    hopper, pallas = Target("cuda", "sm_90"), registry.backend("pallas")
    missing = next(f for f in pallas.declared if f.name == "gpu").missing_packages()
    if missing is None:
        assert dispatch.choose(registry.find_spec("softmax"), frameworks()["jax"], hopper) is pallas
        return
    assert re.fullmatch(
        r"jax >= 0\.11 \(which takes Python 3\.12 or newer\), and jax 0\.\d+\.\d+ is installed", missing
    )
    assert f"pallas: its kernels for sm_90 need {missing}" in refused_by_choice(hopper)
    with pytest.raises(pk.UnavailableError, match="variant 'gpu' of backend 'pallas' cannot run here: it needs jax >="):
        pk.op("softmax", backend="pallas", variant="gpu")


@pytest.mark.parametrize(("here", "needed", "there"), [("0.10.2", "0.11", False), ("0.9", "0.10", False),
    ("0.11", "0.11", True), ("0.11.0.dev3", "0.11", True), ("1.0", "0.11", True), (None, "0.11", False)])  # fmt: skip
def test_what_a_family_needs_is_a_version_or_later(monkeypatch, here, needed, there):
    monkeypatch.setattr(backend_module.install, "installed", lambda package: here)
    said = backend_module.Need("thing", needed, "a note").missing()
    assert (said is None) is there
    if not there:
        assert said == f"thing >= {needed} (a note), and {f'thing {here}' if here else 'none'} is installed"


def test_a_backend_that_is_named_runs_there_or_raises():
    pytest.importorskip("triton", reason="triton is not installed")
    call = pk.op("softmax").bind(X)
    with pytest.raises(
        pk.UnsupportedError, match="softmax on tpu v5e: backend 'triton' cannot: .*Backends that can: .*reference"
    ):
        dispatch.find_routes(registry.backend("triton"), call, Target("tpu", "v5e"))


SERVED = [HOST, Target("cuda", "sm_80"), Target("cuda", "sm_90"), Target("rocm", "gfx942"), Target("tpu", "v5e")]


@pytest.mark.parametrize("name", ["triton", "pallas"])
def test_a_name_decides_nothing_about_which_variant_is_tried_first(name):
    """Each family in turn gets the first and the last name there is."""
    shipped = registry.backend(name).declared
    for old, new in itertools.product((f.name for f in shipped), ("a", "zz")):

        def named(family, old=old, new=new):
            before = tuple(new if n == old else n for n in family.before)
            package = f"{family.package.rpartition('.')[0]}.{new}" if family.name == old else family.package
            return replace(family, package=package, before=before)

        renamed = in_order(name, [named(f) for f in shipped])
        for target in SERVED:
            of = [new if f.name == old else f.name for f in shipped if f.compiles_for(target)]
            assert [f.name for f in renamed if f.compiles_for(target)] == of, (old, new, target)
    assert [f.name for f in shipped if f.compiles_for(Target("cuda", "sm_90"))] == {
        "triton": ["hopper", "unordered", "unsplit", "gpu"], "pallas": ["decode", "fused", "gpu", "unordered"]
    }[name]  # fmt: skip


def families(**known):
    return [Family(f"lib.{name}", ("cuda",), **more) for name, more in known.items()]


SM90 = {"targets": ("sm_90",)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (families(one=SM90, two=SM90), "the order of its families 'one' and 'two' is not declared; "),
        (families(one={}, two={}), "the order of its families 'one' and 'two'"),
        (families(one={"targets": ("sm_80", "sm_90")}, two={"targets": ("sm_90", "sm_100")}), "the order of its"),
        (families(one=SM90 | {"before": ("zwei",)}, two={}), "'one' declares before='zwei'; expected one of two"),
        (families(one=SM90 | {"before": ("two",)}, two=SM90 | {"before": ("one",)}), "'one', 'two' form a cycle"),
        ([*families(one=SM90), Family("other.one")], "has two families called 'one'"),
    ],
)
def test_two_variants_without_an_order_are_refused(given, said):
    for order in (given, given[::-1]):
        with pytest.raises(pk.SpecError, match="backend 'mine'") as refused:
            in_order("mine", order)
        assert said in str(refused.value)


def test_the_order_is_what_was_declared_and_what_follows_from_it():
    some = {"targets": ("sm_80", "sm_90")}
    chain = families(c=SM90, b=SM90 | {"before": ("c",)}, a=SM90 | {"before": ("b",)}, all={}, some=some)
    assert [f.name for f in in_order("mine", chain)] == ["a", "b", "c", "some", "all"]
    first = families(one=SM90, all={"before": ("one",)})  # said aloud, it precedes what is for one chip
    assert [f.name for f in in_order("mine", first)] == ["all", "one"]
    listed = pk.Backend("mine", framework="numpy", compiles={"cuda": ["lib.z", "lib.a"], "rocm": "lib.m"})
    assert [f.name for f in listed.families if "cuda" in f.platforms] == ["z", "a"]
    with pytest.raises(pk.SpecError, match="form a cycle"):
        pk.Backend("mine", framework="numpy", compiles={"cuda": ["lib.z", "lib.a"], "rocm": ["lib.a", "lib.z"]})


def test_a_missing_framework_says_what_to_install():
    ghost = pk.Backend(
        "ghost", framework="torch", compiles={"cuda": "nowhere"}, requires=("no_such_module",), extra="ghost"
    )
    with pytest.raises(
        pk.UnavailableError,
        match=r"backend 'ghost' cannot run here: no_such_module not installed; in a checkout of portakern "
        r"run: pip install -e '\.\[ghost\]'",
    ):
        ghost.check_available()


def test_backends_and_specs_are_found_by_name():
    assert {"reference", "triton", "pallas"} <= set(pk.backends())
    assert set(records()) <= set(pk.ops())
    with pytest.raises(TypeError):
        registry.backends()["x"] = None


def test_a_broken_plug_in_is_left_out_aloud(monkeypatch, caplog):
    class Broken:
        name, value = "broken", "nowhere:BACKEND"

        def load(self):
            raise ImportError("nowhere")

    real = registry.entry_points
    monkeypatch.setattr(registry, "entry_points", lambda group: [*real(group=group), Broken()])
    monkeypatch.setattr(registry, "_left_out", {})
    with caplog.at_level(logging.WARNING, "portakern"):
        assert "broken" not in registry._installed.__wrapped__()
    assert "backend 'broken': nowhere:BACKEND left out: cannot be loaded: ImportError: nowhere" in caplog.text
    with pytest.raises(pk.SpecError, match="backend 'broken' is unknown .nowhere:BACKEND left out: cannot be loaded"):
        pk.op("softmax", backend="broken")


def test_a_backend_imported_under_another_name_refuses(tmp_path):
    import subprocess
    import sys
    from pathlib import Path

    root = Path(registry.__file__).resolve().parent.parent
    ran = subprocess.run([sys.executable, "-c", "import backends"], cwd=root, capture_output=True, text=True)
    assert ran.returncode and "import this package as portakern.backends" in ran.stderr


def test_an_observer_that_leaves_takes_no_event_from_the_next():
    """As one does in another thread, at any moment."""
    first, seen = contextlib.ExitStack(), []
    with first:
        first.enter_context(pk.observe(lambda served: first.close()))
        with pk.observe(seen.append):
            pk.op("softmax")(X)
    assert len(seen) == 1


def test_observers_in_threads_see_every_call_of_theirs():
    lost = []

    def work():
        seen, x = [], X.copy()
        for n in range(60):
            with pk.observe(seen.append):
                pk.op("softmax")(x)
            mine = sum(s.call.arrays["x"] is x for s in seen)
            if mine < n + 1:
                lost.append(n)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not lost and not watching.OBSERVERS


@pytest.mark.parametrize("name", [None, "", " ", "a b", "a/b", "../x", "-x", 3, ("a",), "a,b"])
def test_a_backend_has_a_name_that_files_and_options_can_have(name):
    with pytest.raises(pk.SpecError, match="backend name is .*; expected letters, digits"):
        pk.Backend(name, framework="numpy")
    assert pk.Backend("a.b-c_1", framework="numpy").name == "a.b-c_1"


def test_explain_says_what_options_keep_for_gradients():
    hidden, weight, labels = np.zeros((1024, 8), "f4"), np.zeros((512, 8), "f4"), np.zeros(1024, "i4")
    loss = pk.op("linear_cross_entropy")
    assert "logit_gradients" not in loss.explain(hidden, weight, labels)
    text = loss.explain(hidden, weight, labels, keep_logit_gradients=True)
    assert "kept for gradients: lse (0.0 MiB), slope (0.0 MiB), lse_low (0.0 MiB), logit_gradients (2.0 MiB)" in text
    assert "kept for gradients" not in pk.op("softmax").explain(X)


def test_explain_says_how_each_axis_is_read():
    attention = pk.op("attention", backend="reference")
    q, k, bias = np.zeros((2, 10, 8, 64), "f4"), np.zeros((2, 12, 4, 64), "f4"), np.zeros((1, 8, 1, 12), "f4")
    said = attention.explain(q, k, k, bias=bias)
    assert "\n    q: batch=2 q_len=10 kv_heads*group=8 d=64\n    k: batch=2 kv_len=12 kv_heads=4 d=64\n" in said
    assert "\n    bias: batch=1 kv_heads*group=8 q_len=1 kv_len=12\n" in said and "segment_ids:" not in said
    assert "\n    x: *batch=(2, 10, 8) n=64\n" in pk.op("layernorm").explain(q)
    assert "\n    x: *batch=() n=7\n" in pk.op("layernorm").explain(np.zeros(7, "f4"))
    for op in map(pk.op, pk.ops()):
        for name in op.spec.samples:
            arrays, options = sample_arrays(op.spec, name)
            said = op.explain(**arrays, **options)
            assert all(f"\n    {a}: " in said for a in arrays), said


def test_a_call_in_pytorchs_layout_is_named_once(caplog):
    attention = pk.op("attention", backend="reference")
    theirs = np.zeros((1, 8, 130, 4), "f4")  # batch, heads, sequence, d
    for _ in range(2):
        attention(theirs, theirs, theirs)
    assert sum("look like PyTorch's layout" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize(
    ("q", "k"),
    [((1, 1, 64, 4), (1, 300, 8, 4)), ((1, 8, 128, 4), (1, 8, 128, 4)), ((2, 130, 8, 4), (2, 130, 2, 4)),
     ((1, 1, 128, 4), (1, 5, 128, 4)), ((1, 129, 200, 4), (1, 129, 200, 4))],
)  # fmt: skip
def test_ordinary_calls_are_not_doubted(q, k, caplog):
    pk.op("attention", backend="reference").explain(np.zeros(q, "f4"), np.zeros(k, "f4"), np.zeros(k, "f4"))
    assert "layout" not in caplog.text
