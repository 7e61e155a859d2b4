"""Code that portakern did not write: backends registered in a few lines, ops and backends from installed packages, and
other people's attention kernels.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry
from portakern.core.backend import Family
from portakern.testing import Limits

X = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)


def numpy_softmax(call, tiling):
    x, axis = call.arrays["x"], call.options["axis"]
    x = x.astype(np.result_type(x.dtype, np.float32) if x.dtype.kind == "f" else np.float32)
    with np.errstate(all="ignore"):
        e = np.exp(x - x.max(axis, keepdims=True))
        total = e.sum(axis, keepdims=True, dtype=np.float64).astype(x.dtype)
        return (np.ascontiguousarray(e / total).astype(call.arrays["x"].dtype),)


def torch_softmax(call, tiling):
    import torch

    x = call.arrays["x"]  # of 16 bits, along another axis than the last, torch rounds twice
    return (torch.softmax(x.double(), call.options["axis"]).to(x.dtype).contiguous(),)


def jax_softmax(call, tiling):
    import jax

    x = call.arrays["x"]
    return (jax.nn.softmax(x.astype("float32"), call.options["axis"]).astype(x.dtype),)


SOFTMAX = {"numpy": numpy_softmax, "torch": torch_softmax, "jax": jax_softmax}


def mine(framework="numpy", fn=None, **kwargs):
    backend = pk.Backend("mine", framework=framework, **kwargs)
    backend.implements("softmax")(fn or SOFTMAX[framework])
    return pk.register(backend)


@pytest.mark.parametrize("framework", SOFTMAX)
def test_a_function_becomes_a_backend(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    mine(framework)
    softmax = pk.op("softmax", backend="mine")
    np.testing.assert_allclose(softmax(X), pk.op("softmax")(X), atol=1e-6)
    assert f"backend: mine (named), compiled for cpu\n  implementation: {__name__}" in softmax.explain(X)
    report = pk.check(
        "softmax", backend="mine", device="cpu", max_examples=40, limits=Limits(arguments=frozenset({"axis"})),
        promises=framework != "jax",  # XLA adds a row alone up in another order
    )  # fmt: skip
    assert report.passed, report.failures


def test_laws_hold_of_functions_too():
    mine()
    report = pk.check("softmax", backend="mine", max_examples=60)
    assert report.passed, report.failures


def test_a_jax_function_is_staged():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    mine("jax")
    softmax = pk.op("softmax", backend="mine")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        np.testing.assert_allclose(jax.jit(softmax)(X), softmax(X), atol=1e-6)
        np.testing.assert_allclose(jax.vmap(softmax)(jax.numpy.asarray(X)), softmax(X), atol=1e-6)
        registry._registered.clear()
        mine("numpy")
        with pytest.raises(pk.UnsupportedError, match="backend 'mine' runs numpy kernels, which JAX cannot stage"):
            jax.jit(pk.op("softmax", backend="mine"))(X)


def test_nothing_changes_for_calls_that_name_no_backend():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    before = pk.op("softmax").explain(X)
    mine("torch", platforms=["cpu", "cuda"])
    assert pk.op("softmax").explain(X) == before + "\n  not mine: used for these arrays only when named"
    assert "backend: reference (chosen" in pk.op("softmax").explain(torch.zeros(3))
    assert [b.name for b in pk.backends().values() if b.own] == [*pk.backends()][:-1]


@pytest.mark.parametrize("named_only", [False, True])
def test_a_backend_of_portakern_may_serve_the_calls_alone_that_name_it(named_only):
    backend = mine("numpy", named_only=named_only)
    backend.own = True  # as the registry says of those that portakern brings
    served = "reference" if named_only else "mine"
    assert f"backend: {served} (chosen" in pk.op("softmax").explain(X)
    np.testing.assert_allclose(pk.op("softmax", backend="mine")(X), pk.op("softmax")(X), rtol=1e-6)


@pytest.mark.parametrize("tiles", [{}, {"block_rows": 1, "block_n": 128}])
def test_only_of_a_backend_that_has_tiles_are_tilings_to_be_covered(tiles):
    backend = pk.Backend("mine", framework="numpy")
    backend.implements("softmax", **({"tiling": lambda call: tiles} if tiles else {}))(numpy_softmax)
    report = pk.check("softmax", backend=backend, max_examples=1, only_edges=["nan_elements"])
    assert ("tilings" in report.not_covered) == bool(tiles)


def test_names_are_taken_once():
    exec('pk.register(pk.Backend("mine", framework="numpy"))', {"__name__": "their_package", "pk": pk})
    with pytest.raises(
        pk.SpecError,
        match="backend name 'mine' is taken by their_package, and tests.test_third_party registers another; choose "
        "another name, or pass the Backend object itself",
    ):
        pk.register(pk.Backend("mine", framework="numpy"))
    with pytest.raises(pk.SpecError, match="backend name 'triton' is taken"):
        pk.register(pk.Backend("triton", framework="torch"))
    with pytest.raises(pk.SpecError, match="'second' has oracle=True, but 'reference' is the oracle already"):
        pk.register(pk.Backend("second", framework="numpy", oracle=True))
    with pytest.raises(
        pk.SpecError, match="softmax on backend 'reference' is implemented by portakern.backends.reference.softmax"
    ):
        pk.backends()["reference"].implements("softmax")(numpy_softmax)
    with pytest.raises(pk.SpecError, match="expected a portakern.Backend"):
        pk.register("mine")


def test_a_notebook_cell_may_run_again_but_another_function_may_not_take_its_place():
    backend = mine()
    backend.implements("softmax")(numpy_softmax)
    with pytest.raises(pk.SpecError, match="softmax on backend 'mine' is implemented by"):
        backend.implements("softmax")(torch_softmax)


def test_the_same_module_registers_a_backend_anew():
    """As a notebook's cell does that runs again."""
    first = mine("numpy")
    softmax = pk.op("softmax", backend="mine")
    assert softmax(X).sum() > 0
    again = pk.Backend("mine", framework="numpy")
    again.implements("softmax")(lambda call, tiling: (np.full_like(call.arrays["x"], 7),))
    assert pk.register(again) is again and pk.backends()["mine"] is again is not first
    assert (pk.op("softmax", backend="mine")(X) == 7).all() and (softmax(X) < 1).all()


def test_an_op_from_elsewhere_is_registered_once_for_a_machine():
    """With a backend whose families are for other chips too."""
    for backend in [b for b in pk.backends().values() if b.package]:
        backend.implements("from_elsewhere")(lambda call, tiling: None)
        try:
            having = [*backend.families_with("from_elsewhere")]
            platforms = [p for f in having for p in f.platforms]
            assert sorted(platforms) == sorted({*backend.compiled_platforms()}), having
            if backend.can_interpret():
                assert any(f.interprets for f in having)
        finally:
            for family in backend.families:
                backend._found.pop((family.package, "from_elsewhere"), None)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """``write(name, text)``: a module that the package of an op from elsewhere has."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name, text: (tmp_path / f"{name}.py").write_text(text)
    for name in [p.stem for p in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)


def test_a_module_that_is_named_for_an_op_is_imported_when_a_call_needs_it(elsewhere):
    backend = pk.Backend("mine", framework="numpy")
    elsewhere("holds_softmax", """
import builtins
import numpy as np
def softmax(call, tiling):
    e = np.exp(call.arrays["x"] - call.arrays["x"].max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True),)
builtins.backend_of_the_test.implements("softmax")(softmax)
""")  # fmt: skip
    backend.implemented_in("softmax", "holds_softmax")
    assert [backend.module_of("softmax", f) for f in backend.families] == ["holds_softmax"]
    assert "holds_softmax" not in sys.modules
    builtins.backend_of_the_test = backend
    try:
        assert np.allclose(pk.op("softmax", backend=backend)(np.zeros((2, 4), np.float32)), 0.25)
    finally:
        del builtins.backend_of_the_test
    with pytest.raises(pk.SpecError, match="softmax on backend 'mine' is implemented by holds_softmax already"):
        backend.implemented_in("softmax", "other")
    with pytest.raises(
        pk.SpecError,
        match=r"implemented by portakern.backends.triton.gpu.softmax already; remove one",
    ):
        pk.backends()["triton"].implemented_in("softmax", "mine")


def test_the_gradient_of_an_op_may_lie_in_the_module_of_the_op(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "their_kernels").mkdir()
    both = '@BACKEND.implements("spin", config=SPIN)\n@BACKEND.implements(\n    "spin_vjp", config=SPIN\n)\n'
    texts = {"__init__": "", "spin": both, "tilt": '"""tilt_vjp is the tilt_vjp of fold."""', "tilt_vjp": ""}
    texts["fold"] = 'other = "fold_vjp"'
    for name, text in texts.items():
        (tmp_path / "their_kernels" / f"{name}.py").write_text(text)
    family = Family("their_kernels", ("cpu",))
    ops = ("spin", "spin_vjp", "tilt", "tilt_vjp", "fold", "fold_vjp", "bend_vjp")
    found = [(family.module_of(op) or "").removeprefix("their_kernels.") for op in ops]
    assert found == ["spin", "spin", "tilt", "tilt_vjp", "fold", "", ""]
    assert "their_kernels.spin" not in sys.modules


def test_a_module_that_is_named_for_an_op_and_registers_none_is_refused(elsewhere):
    backend = pk.Backend("mine", framework="numpy")
    elsewhere("holds_nothing", "")
    backend.implemented_in("softmax", "holds_nothing")
    with pytest.raises(
        pk.SpecError, match=r"holds_nothing, declared to implement softmax on backend 'mine', does not register it"
    ):
        pk.op("softmax", backend=backend)(np.zeros((2, 4), np.float32))


def test_backends_are_declared_right():
    with pytest.raises(pk.SpecError, match="framework is 'cupy'; expected one of numpy, torch, jax"):
        pk.Backend("x", framework="cupy")
    with pytest.raises(pk.SpecError, match=r"platforms is 'cuda'; expected a list of names: \['cuda'\]"):
        pk.Backend("x", framework="torch", platforms="cuda")
    mine(platforms=["cuda"])
    with pytest.raises(pk.UnsupportedError, match="it compiles for cuda, and has no kernels for cpu"):
        pk.op("softmax", backend="mine")(X)
    with pytest.raises(pk.UnsupportedError, match="backend 'mine' cannot: it has no layernorm in nowhere"):
        pk.op("layernorm", backend=pk.Backend("mine", framework="numpy", compiles={"cpu": "nowhere"}))(X)


@pytest.mark.parametrize(
    ("result", "words"),
    [(X, "returned a ndarray; expected a tuple with every output of the spec: (y,)"), ((X, X), "returned 2 outputs")],
)
def test_a_function_that_forgets_the_tuple_is_told(result, words):
    mine(fn=lambda call, tiling: result)
    with pytest.raises(TypeError) as caught:
        pk.op("softmax", backend="mine")(X)
    assert words in str(caught.value)


def returning(result, op="softmax", framework="numpy"):
    """An op on a backend whose function returns what ``result(its call)`` gives."""
    backend = pk.Backend("theirs", framework=framework)
    backend.implements(op)(lambda call, tiling: result(call))
    return pk.op(op, backend=backend)


SHARED = np.zeros((2, 3, 40), np.float32)
WRONG_OUTPUTS = {
    "nothing": (lambda x: None, r"y as None; expected an array of shape \(3, 40\) and dtype float32"),
    "a list": (lambda x: x.tolist(), r"y as a list; expected a NumPy array"),
    "NumPy's scalar": (lambda x: x.sum(), r"y as a float32; expected a NumPy array"),
    "a shape": (lambda x: x[:, :1], r"y of shape \(3, 1\); expected shape \(3, 40\)"),
    "a dtype": (lambda x: x.astype(np.float64), r"y of dtype float64; expected dtype float32: round the result once"),
    "a dtype that nobody has": (lambda x: x.astype(complex), r"y of dtype complex128; expected dtype float32"),
    "another order": (lambda x: x.copy(order="F"), r"y with gaps or in another order of axes; expected a contiguous"),
    "the caller's array": (lambda x: x, r"y in memory that it shares with the call's x; expected memory of its own"),
    "a view of it": (lambda x: x.ravel().reshape(x.shape), r"y in memory that it shares with the call's x"),
    "a constant": (lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape), "y in memory that nobody may"),
}


@pytest.mark.parametrize("name", WRONG_OUTPUTS)
def test_wrong_outputs_are_named_when_they_come(name):
    result, words = WRONG_OUTPUTS[name]
    softmax = returning(lambda call: (result(call.arrays["x"]),))
    with pytest.raises(TypeError, match=rf"^softmax on backend 'theirs' returned {words}.*softmax\(float32; shape="):
        softmax(X)


def test_wrong_outputs_of_other_libraries_are_named():
    pytest.importorskip("torch", reason="torch is not installed")
    jax = pytest.importorskip("jax", reason="jax is not installed")
    for wrong, words in {
        (lambda x: x): "shares with the call's x",
        (lambda x: x.double()): "of dtype float64",
        (lambda x: x.new_empty(3, device="meta").expand(3)[:, None].expand(3, 40)): "on meta; expected .* on cpu",
        (lambda x: x.numpy()): "as a ndarray; expected a PyTorch array",
    }.items():
        with pytest.raises(TypeError, match=words):
            returning(lambda call, wrong=wrong: (wrong(call.arrays["x"]),), framework="torch")(X)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        short = returning(lambda call: (call.arrays["x"][:1],), framework="jax")
        for call in (short, jax.jit(short), jax.vmap(short)):
            with pytest.raises(TypeError, match=r"softmax on backend 'theirs' returned y of shape \((1, 40|1,)\)"):
                call(jax.numpy.asarray(X))
        same = returning(lambda call: (call.arrays["x"],), framework="jax")
        np.testing.assert_array_equal(same(X), X)  # no array of JAX's changes, whoever has it too


def test_what_a_call_does_not_want_is_left_out_and_what_is_shared_is_named():
    q = np.zeros((1, 3, 1, 8), np.float32)

    def both(call):
        return call.arrays["q"].copy(), np.zeros((1, 1, 3), np.float32)

    attention = returning(both, "attention")
    assert attention(q, q, q, return_lse=True).lse.shape == (1, 1, 3)
    for _ in range(3):  # the first call of a form is looked at, later ones take a shorter way
        assert attention(q, q, q).shape == q.shape
    one = np.zeros((1, 3, 1, 8), np.float32)
    with pytest.raises(TypeError, match="returned d_k in memory that it shares with the output d_q"):
        lse = np.zeros((1, 1, 3), np.float32)
        returning(lambda call: (one, one, None, None, None), "attention_vjp")(q, q, q, q, lse, q, wants=("d_q", "d_k"))


def test_oracles_are_held_to_their_shapes():
    from portakern.core.oracle import oracle

    call, reference = pk.op("softmax").bind(X), pk.backends()["reference"]
    impl = reference.implementation("softmax", reference.families[0])
    before = impl.fn
    for wrong, words in {
        (lambda call, tiling: (call.arrays["x"].sum(),)): r"y as float64 of shape \(\); expected .* of shape \(3, 40\)",
        (lambda call, tiling: (None,)): "y as None",
    }.items():
        object.__setattr__(impl, "fn", wrong)
        try:
            with pytest.raises(TypeError, match=f"softmax on backend 'reference' returned {words}"):
                oracle(call)
        finally:
            object.__setattr__(impl, "fn", before)


def test_our_own_kernels_are_not_looked_at_when_they_run(monkeypatch):
    from portakern.core import outputs

    monkeypatch.setattr(outputs, "look", None)
    pk.op("softmax", backend="pallas" if "pallas" in pk.backends() else None)(X)
    with pytest.raises(TypeError, match="not callable"):
        returning(lambda call: (call.arrays["x"].copy(),))(X)


def test_outputs_are_looked_at_once_a_form(monkeypatch):
    from portakern.core import cache, outputs

    seen, look = [], outputs.look
    monkeypatch.setattr(outputs, "look", lambda impl, call, out: (seen.append(call), look(impl, call, out)))
    monkeypatch.setattr(cache.BoundedCache.__init__, "__defaults__", (4,))
    softmax = returning(lambda call: (np.ascontiguousarray(call.arrays["x"]) + 0,))
    for x in (X, X, X[:2], X.T, X.astype(np.float16)):
        softmax(x)
    assert len(seen) == 4
    softmax(X, axis=0)
    softmax(X, axis=0)
    assert len(seen) == 5
    softmax(X)  # no more than so many are remembered
    assert len(seen) == 6
    contiguous_alone = returning(lambda call: (np.ascontiguousarray(call.arrays["x"]),))
    contiguous_alone(X.T)
    with pytest.raises(TypeError, match="shares with the call's x"):
        contiguous_alone(np.ascontiguousarray(X.T))


@pytest.mark.parametrize("source", ["numpy", "jax"])
def test_a_kernel_that_writes_to_its_input_reaches_no_memory_that_is_read_only(source):
    pytest.importorskip("torch", reason="torch is not installed")
    given = X.copy()
    given.flags.writeable = False
    if source == "jax":
        jax = pytest.importorskip("jax", reason="jax is not installed")
        given = jax.device_put(given, jax.local_devices(backend="cpu")[0])

    def in_place(call):
        return (call.arrays["x"].add_(1).clone(),)

    np.testing.assert_array_equal(returning(in_place, framework="torch")(given), X + 1)
    np.testing.assert_array_equal(given, X)

    def in_numpy(call):
        with contextlib.suppress(ValueError):  # NumPy itself refuses to write
            call.arrays["x"][...] = 0
        return (np.zeros_like(X),)

    returning(in_numpy)(given)
    np.testing.assert_array_equal(given, X)


def test_a_spec_object_of_a_known_name_keeps_its_own_signature():
    ours = registry.find_spec("softmax")
    theirs = type(ours)(**{**vars(ours), "arrays": (), "name": "softmax"})
    with pytest.raises(pk.SpecError, match="positional argument"):
        pk.op(theirs)(X)
    assert pk.op("softmax")(X).shape == X.shape


PLUG_IN = {
    "their_ops.py": """
        from typing import Annotated, NamedTuple, TypeVar
        import numpy as np
        from jaxtyping import Float
        import portakern as pk
        from portakern.spec.options import Range
        from portakern.spec import spec
        from portakern.spec.tolerance import round_to, units

        A = TypeVar("A")

        class Out(NamedTuple):
            y: Float[A, "*shape"]

        @spec(tiling={}, flops=lambda call: 2.0)
        def scale_up(x: Float[A, "*shape"], *, by: Annotated[float, Range(0.0, typical=(2.0, 0.3))] = 2.0) -> Out:
            \"\"\"y = by x.\"\"\"
            raise NotImplementedError

        @scale_up.tolerance
        def bound(call, ref):
            return (round_to(2 * units(call).u * np.abs(ref[0]) + units(call).tau, ref[0], call.dtype),)

        @pk.backends()["reference"].implements("scale_up")
        def oracle(call, tiling):
            return (call.arrays["x"] * call.options["by"],)
    """,
    "their_backend.py": """
        import numpy as np
        import portakern as pk

        BACKEND = pk.Backend("theirs", framework="numpy")

        @BACKEND.implements("scale_up")
        def scale_up(call, tiling):
            x = call.arrays["x"]
            with np.errstate(all="ignore"):
                return (np.ascontiguousarray(x.astype(np.float64) * call.options["by"]).astype(x.dtype),)
    """,
    "theirs-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.2\n",
    "theirs-1.2.dist-info/entry_points.txt": (
        "[portakern.specs]\nscale_up = their_ops:scale_up\n[portakern.backends]\ntheirs = their_backend:BACKEND\n"
    ),
}
RIVAL = {
    "rival-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: rival\nVersion: 0.1\n",
    "rival-0.1.dist-info/entry_points.txt": (
        "[portakern.specs]\nscale_up = rival:op\nsoftmax = rival:op\nlost = rival:op\nwrong = their_ops:oracle\n"
    ),
}


@pytest.fixture
def shell(tmp_path):
    """Runs Python beside an installed plug-in: its modules and its dist-info lie on the path."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_text(textwrap.dedent(text).replace('\\"', '"'))

    def run(code, *args):
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )

    write(PLUG_IN)
    run.write = write
    return run


CLI = "from portakern.cli import main; main()"


def test_an_installed_package_brings_ops_and_backends(shell):
    rows = {r["op"]: r for r in json.loads(shell(CLI, "ops", "--json").stdout)}
    assert rows["scale_up"]["backends"] == ["reference", "theirs"] and "softmax" in rows
    shown = json.loads(shell(CLI, "show", "scale_up", "--json").stdout)
    assert shown["doc"] == "y = by x." and [(i["backend"], i["module"]) for i in shown["implementations"]] == [
        ("reference", "their_ops"),
        ("theirs", "their_backend"),
    ]
    checked = shell(CLI, "check", "scale_up", "--max-examples", "40")
    assert checked.returncode == 0 and checked.stdout.count("passed") == 2, checked.stdout + checked.stderr
    assert shell(CLI, "check", "--backend", "theirs", "--max-examples", "20").returncode == 0  # the ops that it has
    called = shell(
        "import portakern as pk, numpy as np; print('scale_up' in pk.ops(), pk.op('scale_up', "
        "backend='theirs')(np.ones(2)), pk.op('scale_up')(np.ones(2), by=3))"
    )
    assert called.stdout == "True [2. 2.] [3. 3.]\n", called.stderr


def test_names_that_clash_or_lead_nowhere_are_named_with_their_sources(shell):
    shell.write(RIVAL)
    ran = shell(
        "import portakern as pk\nfor name in ('scale_up', 'softmax', 'lost', 'wrong', 'matmul'):\n"
        "    try: print(pk.op(name))\n    except (pk.SpecError, pk.UnavailableError) as e: print(e)"
    )
    assert "op 'softmax': rival:op (rival 0.1) left out: portakern's own has that name; rename" in ran.stderr
    assert ran.stdout.splitlines() == [
        (
            "op 'scale_up' comes from 2 places: rival:op (rival 0.1) and their_ops:scale_up (theirs 1.2); "
            "uninstall one, or rename its entry point"
        ),
        "<portakern op softmax on auto>",
        "op 'lost' cannot be loaded from rival:op (rival 0.1): ModuleNotFoundError: No module named 'rival'",
        ("op 'wrong': their_ops:oracle (rival 0.1) is a function; expected a spec with the function name 'wrong'"),
        "<portakern op matmul on auto>",
    ]


def test_installed_backends_that_clash_are_named_and_broken_ones_left_out(shell):
    shell.write(
        {
            "rival-0.1.dist-info/METADATA": RIVAL["rival-0.1.dist-info/METADATA"],
            "rival-0.1.dist-info/entry_points.txt": (
                "[portakern.backends]\nother = their_backend:BACKEND\nfunction = their_backend:scale_up\n"
            ),
        }
    )
    listed = shell("import portakern as pk; print(*pk.backends())")
    assert listed.stdout.split() == ["mojo", "pallas", "reference", "triton", "theirs"]
    assert (
        "backend 'other': their_backend:BACKEND (rival 0.1) left out: cannot be loaded: its entry point is named "
        "'other', but the backend 'theirs'"
    ) in listed.stderr
    assert (
        "'function': their_backend:scale_up (rival 0.1) left out: cannot be loaded: it is a function" in listed.stderr
    )
    shell.write({"rival-0.1.dist-info/entry_points.txt": "[portakern.backends]\ntheirs = their_backend:BACKEND\n"})
    clash = shell("import portakern as pk; print(*pk.backends()); pk.op('softmax', backend='theirs')")
    assert clash.stdout.split() == ["mojo", "pallas", "reference", "triton"]
    both = {f"their_backend:BACKEND ({who})" for who in ("rival 0.1", "theirs 1.2")}
    first, _, second = clash.stderr.partition("backend 'theirs': ")[2].partition(" left out")[0].partition(" and ")
    assert {first, second} == both
    assert "backend 'theirs' is unknown (" in clash.stderr and "two packages have this name" in clash.stderr


HOSTILE = {  # no plug-in should do any of this
    "rival-0.1.dist-info/METADATA": RIVAL["rival-0.1.dist-info/METADATA"],
    "rival-0.1.dist-info/entry_points.txt": """
        [portakern.backends]
        triton = their_backend:BACKEND
        exits = exits:BACKEND
        raises = raises:BACKEND
        no_family = no_family:BACKEND
        no_order = no_order:BACKEND
        no_package = no_package:BACKEND
        no_module = no_module:BACKEND
        [portakern.specs]
        matmul = rival:op
        raises = raises:op
        exits = exits:op
    """,
    "exits.py": "import sys; sys.exit(3)",
    "raises.py": "1 / 0",
    "no_family.py": "import portakern as pk; BACKEND = pk.Backend('no_family', framework='numpy', package='families')",
    "families/__init__.py": "",
    "families/gpu/__init__.py": "",
    "families/gpu/family.py": "raise OSError('no driver')",
    "no_order.py": "import portakern as pk; BACKEND = pk.Backend('no_order', framework='numpy', package='tied')",
    "tied/__init__.py": "",
    **{
        f"tied/{name}/{file}.py": text.format(name)
        for name in ("one", "two")
        for file, text in {
            "__init__": "",
            "family": "from portakern.core.backend import Family; FAMILY = Family('tied.{}', platforms=('cpu',))",
        }.items()
    },
    "no_package.py": """
        import portakern as pk
        BACKEND = pk.Backend("no_package", framework="numpy", compiles={"cpu": "raises.ops"})
    """,
    "no_module.py": """
        import portakern as pk
        BACKEND = pk.Backend("no_module", framework="numpy", compiles={"cpu": "modules"})
    """,
    "modules/__init__.py": "",
    "modules/scale_up.py": "raise SystemExit",
}
SAID = [
    "backend 'triton': their_backend:BACKEND (rival 0.1) left out: portakern's own has that name; rename its entry",
    "backend 'exits': exits:BACKEND (rival 0.1) left out: cannot be loaded: its module called sys.exit(3)",
    "backend 'raises': raises:BACKEND (rival 0.1) left out: cannot be loaded: ZeroDivisionError: division by zero",
    "backend 'no_family': no_family:BACKEND (rival 0.1) left out: cannot be loaded: OSError: no driver",
    "backend 'no_order': no_order:BACKEND (rival 0.1) left out: cannot be loaded: backend 'no_order': the "
    "order of its families 'one' and 'two' is not declared",
    "backend 'no_package': raises.ops is left out, it cannot be imported: ZeroDivisionError",
    "not checked: scale_up on no_module: UnavailableError: backend 'no_module' cannot run here: modules.scale_up",
    "op 'matmul': rival:op (rival 0.1) left out: portakern's own has that name; rename its entry point",
    "op 'raises' cannot be loaded from raises:op (rival 0.1): ZeroDivisionError: division by zero",
    "op 'exits' cannot be loaded from exits:op (rival 0.1): its module called sys.exit(3)",
]
UNHARMED = """
import sys
import numpy as np, portakern as pk
from typer.testing import CliRunner
from portakern.cli import app
assert pk.op("softmax")(np.ones((2, 3), np.float32)).shape == (2, 3)
assert pk.op("scale_up", backend="theirs")(np.ones(2)).tolist() == [2, 2]
pk.op("softmax").explain(np.ones((2, 3), np.float32))
assert {"reference", "triton", "theirs"} <= set(pk.backends()), pk.backends()
once = ["--max-examples", "1", "--edge", "extents_of_1"]
commands = ["ops"], ["backends"], ["doctor"], ["check", "scale_up", *once], ["check", "--backend", "theirs", *once]
for command in commands:
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, (command, ran.output, ran.exception)
    sys.stderr.write(" ".join(ran.stderr.split()))
"""


def test_no_plug_in_takes_anything_else_down(shell):
    shell.write(HOSTILE)
    ran = shell(UNHARMED)
    assert ran.returncode == 0, ran.stderr
    for words in SAID:
        assert ran.stderr.count(words) == 1, (words, ran.stderr)


KERNELS = {  # module -> (framework, dtypes, examples)
    "torch_sdpa": ("torch", ("float32", "float16", "bfloat16"), 100),
    "jax_nn": ("jax", ("float32", "bfloat16"), 16),
    "pallas_flash": ("jax", ("float32",), 6),
}
SEEN_WITH = {"torch": "2.13", "jax": "0.10"}
SEEN = {
    ("torch_sdpa", "a negative scale"): "is nan; the oracle says",
    ("torch_sdpa", "no keys"): "is nan; the oracle says 0",
    ("torch_sdpa", "NaN lost"): "is 0; the oracle says nan",
    ("torch_sdpa", "NaN behind a mask"): "sees 2 of 4 keys, keys 0 to 1) is nan",
    ("jax_nn", "float16 under jit"): "raised ValueError: The precision 'F16_F16_F32' is not supported",
    ("jax_nn", "one number in bfloat16"): "Algorithm not supported by the ElementalIrEmitter",
    ("jax_nn", "huge scores under jit"): "is nan; the oracle says -99999",
    ("jax_nn", "a row that sees no key"): "sees 0 of 2 keys) is 0.34",
    ("jax_nn", "a row of -inf"): "is nan; the oracle says 0",
    ("pallas_flash", "the diagonal in a block's corner"): "o[0, 128, 0, 0] (query 128 of 129 sees 129 of 129 keys",
    ("pallas_flash", "a row that sees no key"): "sees 0 of 2 keys) is 0.005",
    ("pallas_flash", "NaN behind a mask"): "sees 1 of 4 keys, keys 0 to 0) is nan",
    ("pallas_flash", "a row of -inf"): "is nan; the oracle says 0",
}


def kernel(name):
    framework, dtypes, examples = KERNELS[name]
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    module = importlib.import_module(f"portakern.examples.conformance.{name}")
    return module.PEER, module.FINDINGS, framework, dtypes, examples


@pytest.mark.parametrize(("name", "finding"), SEEN)
def test_what_was_found_is_still_there(name, finding):
    from portakern.examples.conformance.findings import replay

    peer, findings, framework, _, _ = kernel(name)
    if not importlib.import_module(framework).__version__.startswith(SEEN_WITH[framework]):
        pytest.skip(f"seen with {framework} {SEEN_WITH[framework]}")
    assert {n for n, f in findings.items() if f.case} == {f for n, f in SEEN if n == name}
    failures = replay(peer, findings[finding]).failures
    assert failures and SEEN[name, finding] in failures[0].what


@pytest.mark.parametrize("name", KERNELS)
def test_the_rest_is_within_its_bounds(name):
    from portakern.examples.conformance.findings import apart_from

    peer, findings, framework, dtypes, examples = kernel(name)
    report = pk.check(
        "attention",
        fn=apart_from(peer, findings),
        framework=framework,
        device="cpu",
        dtypes=dtypes,
        max_examples=examples,
        shrink=False,
        promises=False,
        limits=Limits(elements=2048, flops=1e6),
    )
    assert report.passed and report.examples >= examples // 8, (report.failures, report.refused)
