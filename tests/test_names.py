"""The names under which op calls stand in profiles: of kernels, in every implementation, and of JAX's programs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import portakern as pk
from portakern.core import registry

BACKENDS = Path(pk.__file__).parent / "backends"
OPS = tuple(registry.loadable())


def jitted(tree: ast.AST) -> set[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {f.name for f in functions if any("jit" in ast.unparse(d) for d in f.decorator_list)}


def launches(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "launch":
            yield node


def trees(backend: str) -> Iterator[tuple[str, ast.AST]]:
    for path in sorted((BACKENDS / backend).glob("*/*.py")):
        yield str(path.relative_to(BACKENDS)), ast.parse(path.read_text(encoding="utf-8"))


def test_kernels_of_triton_are_named_for_their_op():
    """A kernel's symbol is its function's name."""
    found = {}
    for file, tree in trees("triton"):
        called = {ast.unparse(call.args[0]) for call in launches(tree) if call.args}
        found |= {name: file for name in jitted(tree) if name in called or name.endswith("_kernel")}
    assert len(found) > 20
    assert not {n: file for n, file in found.items() if not n.startswith(OPS)}


def test_kernels_of_pallas_are_named_for_their_op():
    """The third argument of what launches them."""
    number, name_of_op = 0, "|".join(OPS)
    right = rf"""f?'(portakern_|\{{call\.spec\.name\}}|{name_of_op})|call\.spec\.name|'_'\.join\(\(call\.spec\.name,"""
    for file, tree in trees("pallas"):
        for call in launches(tree):
            if len(call.args) < 4:  # what hands its own arguments on
                continue
            said = ast.unparse(call.args[2])
            assert re.match(right, said) or said == "name", f"{file}:{call.lineno}: {said}"
            number += said != "name"
    assert number > 10


def op_names(function, *arrays):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    text = jax.jit(function).lower(*arrays).compile().as_text()
    return {name for names in re.findall(r'op_name="([^"]*)"', text) for name in names.split(";")}


@pytest.mark.parametrize("backend", ["reference", "pallas"])
def test_what_jax_compiles_has_the_ops_name_in_its_own(backend):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.device_put(jax.numpy.ones((2, 8)), jax.local_devices(backend="cpu")[0])
    softmax = pk.op("softmax", backend=backend)
    names = op_names(jax.grad(lambda x: jax.numpy.sin(softmax(x)).sum()), x)
    for op in ("softmax", registry.find_spec("softmax").vjp):
        assert any(f"portakern.{op}/" in name for name in names), names
    assert not any("portakern" in name for name in names if name.endswith(("/sin", "/cos")))


def test_a_launch_in_jaxs_program_has_the_ops_name():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    import portakern.jax

    form = jax.ShapeDtypeStruct((64, 128), "bfloat16")
    with portakern.jax.lowered_for("sm_90"):
        traced = jax.jit(pk.op("softmax", backend="triton")).trace(form)
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert re.search(r"module @jit_portakern_softmax", text)
    assert re.search(r'loc\("jit\(portakern_softmax\)/portakern\.softmax/', text), text


def test_an_eager_call_is_a_program_of_the_ops_name():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    from portakern.frameworks.jax import tracing

    x = jax.device_put(jax.numpy.ones((2, 8)), jax.local_devices(backend="cpu")[0])
    before = tracing._program("softmax", True)._cache_size()
    pk.op("softmax", backend="pallas")(x[:, :7])
    assert tracing._program("softmax", True)._cache_size() == before + 1
    assert tracing._program("softmax", True).__name__ == "portakern_softmax" == pk.op("softmax").__name__
