"""TRITON_INTERPRET=1, by which people run kernels of their own on a CPU, changes nothing of portakern's: which call is
interpreted is decided by its arrays."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

PROGRAM = """
import os, sys
when = sys.argv[1]

def now(stage):
    if when == stage:
        os.environ["TRITON_INTERPRET"] = "1"

now("at first")
import torch, triton, triton.language as tl
now("after triton")
import portakern as pk, portakern.torch as twins
from portakern import testing

def all_close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4, equal_nan=True)

x = torch.randn(3, 5, requires_grad=True)
twins.softmax(x, -1, backend="triton")[:, 0].sum().backward()
all_close(x.grad, torch.autograd.grad(torch.softmax(x, -1)[:, 0].sum(), x)[0])
now("after a call")
for op in ("attention", "cross_entropy_vjp", "layernorm", "matmul", "rope"):  # some call functions of Triton's library
    arrays, options = testing.sample_arrays(op, next(iter(testing.samples(op))), dtype="float32", framework="torch")
    found = [pk.op(op, backend="triton")(**arrays, **options) for _ in range(3)]
    theirs = pk.op(op, backend="reference")(**arrays, **options)
    for ours in found:
        for a, b in zip(*(y if isinstance(y, tuple) else (y,) for y in (ours, theirs)), strict=True):
            a is None or all_close(a, b)

assert os.environ["TRITON_INTERPRET"] == "1"

@triton.jit
def own(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, n), tl.arange(0, n))

y = torch.zeros(4, dtype=torch.int32)
own[(1,)](y, 4)
assert y.tolist() == [0, 1, 2, 3], y

from portakern.backends.triton.imports import check_compiled
try:
    check_compiled()
    print("compiles")
except pk.UnavailableError as e:
    assert "unset TRITON_INTERPRET" in str(e)
    print("refuses to compile")
"""


@pytest.mark.parametrize(
    ("when", "says"), [("at first", "refuses to compile"), ("after triton", "compiles"), ("after a call", "compiles")]
)
def test_the_variable_changes_no_call(when, says, tmp_path):
    """Triton's own functions are interpreted ones where it is set before they are made, and nothing compiles there."""
    file = tmp_path / "program.py"  # Triton reads the source of a kernel
    file.write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, str(file), when], capture_output=True, text=True, env=env, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == says
