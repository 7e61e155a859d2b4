"""Functions that the library writes: tracebacks show their lines, and the lines go when the functions do."""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import traceback
from pathlib import Path

import numpy as np
import pytest

from portakern.core import codegen
from portakern.core.binder import binder
from portakern.core.framework import framework_of
from portakern.core.registry import find_spec
from portakern.core.signatures import reader

ROOT = Path(__file__).parent.parent


def of_binder():
    return lambda: binder(find_spec("softmax"))(np.ones(3, np.int32)), "<binder of softmax", "_bad_dtype(_SPEC, 'x', "


def of_reader():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.ones(3)
    framework_of(find_spec("softmax"), "x", x)  # tensors have been seen
    return lambda: reader(find_spec("softmax"))(x, axis=object()), "<signature of softmax", "_option_key(axis)"


def of_staged():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from portakern.core.dispatch import Choice
    from portakern.frameworks.torch.custom_ops import staged

    spec = find_spec("softmax")
    function = staged(spec, Choice.from_names(spec, "reference", None, None))
    return lambda: function(torch.ones(3, dtype=torch.int32)), "<staged softmax", "raise _SpecError(f'softmax: x is "


def of_gradients():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import portakern as pk

    pytest.importorskip("triton", reason="triton is not installed")
    op = pk.op("softmax", backend="triton")
    for _ in range(3):
        y = op(torch.ones(2, 3, requires_grad=True))
        step = y.grad_fn.step
        y.backward(torch.ones(2, 3))
    (way,) = step.backwards.values()
    return lambda: way((), ()), "<gradients of softmax", "y,  = _saved"


def of_plan():
    """The function of a warm call, which is called like the call that it serves."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    import portakern as pk
    from portakern.backends.triton.plan import LaunchPlan, written

    call = pk.op("softmax").bind(torch.ones(2, 3))
    serve = written(LaunchPlan(call, -1, ("x",), [], {}, [], (), None, None), (True,), [])
    return lambda: serve({}), "<launch of softmax(float32; shape=(2, 3)", "at_x = arrays['x'].data_ptr()"


def of_launcher():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from portakern.backends.triton.launcher import write_launcher

    def kernel(x, block: triton.language.constexpr):
        pass

    go = write_launcher(triton.runtime.jit.JITFunction(kernel), [torch.Tensor], {"block": int}, {}, False)
    return lambda: go(1, "no tensor", block=16), "<launcher of kernel", "_device = x.get_device()"


WRITERS = [of_binder, of_reader, of_staged, of_gradients, of_plan, of_launcher]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: w.__name__)
def test_a_traceback_shows_the_line_of_a_written_function(writer):
    call, file, line = writer()
    with pytest.raises(Exception) as caught:
        call()
    linecache.checkcache()
    frames = [f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename.startswith(file)]
    assert len(frames) == 1 and line in frames[0].line
    assert line in "".join(traceback.format_exception(caught.value))


def test_every_writer_of_functions_is_tried_here():
    users = set()
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        users |= {path.stem for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == WRITTEN}
    assert users == {"binder", "signatures", "custom_ops", "eager", "plan", "launcher"}
    assert len(users) == len(WRITERS)


WRITTEN = "codegen.written"


def sources():
    for folder in ("portakern", "backends", "specs", "benchmarks", "examples"):
        yield from (p for p in (ROOT / folder).rglob("*.py") if p != ROOT / "portakern/core/codegen.py")


def test_nobody_else_runs_text():
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("exec", "eval", "builtins.exec"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "use portakern.core.codegen, whose functions show their lines in tracebacks"


@pytest.fixture
def title(request):
    """What a test calls its functions; at the end none of them has lines any more."""
    yield request.node.name
    gc.collect()
    assert not known(request.node.name)


def known(title):
    return [file for file in linecache.cache if title in file]


def write(title, source="def f(n):\n    return n / 0\n"):
    return codegen.written(title, source, {}, "f")


def test_inspect_reads_a_written_function(title):
    f = write(title)
    linecache.checkcache()
    assert inspect.getsource(f) == "def f(n):\n    return n / 0\n"


def test_functions_of_one_text_share_its_lines_and_take_them_along(title):
    first, second = write(title), write(title)
    assert first.__code__.co_filename == second.__code__.co_filename == f"<{title}>" and len(known(title)) == 1
    assert first.__code__ is not second.__code__
    del first
    gc.collect()
    assert len(known(title)) == 1 and "n / 0" in inspect.getsource(second)
    del second
    gc.collect()
    assert not known(title)


def test_what_a_written_function_makes_keeps_its_lines(title):
    made = codegen.written(title, "def f():\n    def g():\n        return 1 / 0\n    return g\n", {}, "f")()
    gc.collect()
    assert "1 / 0" in inspect.getsource(made)


def test_functions_of_other_text_have_other_files(title):
    first, second = write(title), write(title, "def f(n):\n    return -n / 0\n")
    assert {f.__code__.co_filename for f in (first, second)} == {f"<{title}>", f"<{title}-1>"}
    linecache.clearcache()  # somebody's: the file of lines that are gone is not another's
    third = write(title, "def f(n):\n    return +n / 0\n")
    assert third.__code__.co_filename == f"<{title}-2>" and "+n / 0" in inspect.getsource(third)
    again = write(title)
    assert again.__code__.co_filename == f"<{title}>" and "return n / 0" in inspect.getsource(first)


def test_calls_of_more_forms_leave_no_more_lines_behind():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    import portakern as pk

    op, counts = pk.op("softmax", backend="triton"), []
    for n in range(2, 12):
        for _ in range(3):
            op(torch.ones(2, n, requires_grad=True)).sum().backward()
        counts.append(len([f for f in linecache.cache if f.startswith("<")]))
    assert counts[0] == counts[-1]
