"""Triton kernels that take their numbers in groups, and pass them on in others, in the interpreter."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from portakern.backends.triton import interpreter  # noqa: E402
from portakern.backends.triton.launch import launch  # noqa: E402


class Matrix(NamedTuple):
    at: Any
    strides: Any
    height: Any


class Terms(NamedTuple):
    scale: Any
    shift: Any = None


class Plan(NamedTuple):
    block: int
    negated: bool
    dtype: Any


@triton.jit
def plain(x, terms, plan: tl.constexpr):
    return x.to(plan.dtype) * terms.scale


@triton.jit
def shifted(x, terms, plan: tl.constexpr):
    y = x.to(plan.dtype) * terms.scale
    if terms.shift is not None:
        y = y + terms.shift
    return y


@triton.jit
def column_of(x, column):
    row_stride, column_stride = x.strides
    return Matrix(x.at + column * column_stride, (row_stride, column_stride), x.height)


@triton.jit
def map_kernel(x, y, column, f: tl.constexpr, terms, plan: tl.constexpr):
    """y = f of one column of x."""
    x = column_of(x, column)
    row = tl.arange(0, plan.block)
    values = f(tl.load(x.at + row * x.strides[0], mask=row < x.height, other=0.0), terms, plan)
    if plan.negated:
        values = -values
    group = Matrix(y, (1,), x.height)
    tl.store(group.at + row * group.strides[0], values.to(y.dtype.element_ty), mask=row < group.height)


@pytest.mark.parametrize("f", [plain, shifted])
@pytest.mark.parametrize("terms", [Terms(0.1), Terms(0.1, 3.0), Terms(2.0, 1)])
@pytest.mark.parametrize("negated", [False, True])
def test_groups_arrive_by_their_names(f, terms, negated):
    x = torch.arange(12, dtype=torch.float64).reshape(3, 4) / 7
    y = torch.full((3,), torch.nan, dtype=torch.float64)
    plan = Plan(4, negated, tl.float64)
    interpreter.run(map_kernel, 1, Matrix(x, x.stride(), 3), y, 2, f, terms, plan, num_warps=4)
    shift = terms.shift if f is shifted and terms.shift is not None else 0
    expected = x[:, 2] * terms.scale + shift  # numbers in groups stay float64 here, as they do outside
    assert torch.equal(y, -expected if negated else expected)


def test_memory_of_tensors_in_groups_is_theirs_alone():
    x, y = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    with pytest.raises(IndexError, match="outside its arguments' storages"):
        interpreter.run(map_kernel, 1, Matrix(x, x.stride(), 4), y, 2, plain, Terms(1.0), Plan(4, False, tl.float64))


@triton.jit
def grouped_first_kernel(x, y):
    tl.store(y, tl.load(x.at))


def test_a_kernel_whose_first_argument_is_no_array_is_refused():
    """A compiled one finds its device there."""
    x, y = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    with pytest.raises(TypeError, match="the first argument of grouped_first_kernel is Matrix; expected an array"):
        launch(grouped_first_kernel, 1, SimpleNamespace(interpret=True), Matrix(x, x.stride(), 3), y)
