"""The values of interpreted kernels: NumPy arrays behind ``triton.language.tensor``'s interface.

``InterpretedTensor`` subclasses ``tl.tensor`` and carries its own semantic object, so nothing in Triton is patched.
What kernels do most has a direct NumPy path here, taken only where no promotion is needed; everything else goes through
Triton's own type rules (``TritonSemantic``) onto its NumPy builder, mended for bfloat16 and floats of 8 bits, which
live in bit patterns there.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from portakern.spec.dtypes import DTYPES
from portakern.spec.tolerance import rounded

__all__ = [
    "FLOATS",
    "FLOATS8",
    "INTS",
    "NUMPY",
    "PROGRAM",
    "SEMANTIC",
    "InterpretedTensor",
    "bound",
    "check_addresses",
    "convert",
    "direct",
    "in_patterns",
    "made",
    "pointer",
    "scalar",
]

FLOATS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
FLOATS8 = {"fp8e4nv": DTYPES["float8_e4m3fn"], "fp8e5": DTYPES["float8_e5m2"]}
INTS = {"int32": np.int32, "int64": np.int64}
NUMPY = (
    FLOATS
    | INTS
    | {
        "bf16": np.uint16,
        **dict.fromkeys(FLOATS8, np.uint8),
        "int1": np.bool_,
        "int8": np.int8,
        "int16": np.int16,
        "uint8": np.uint8,
        "uint16": np.uint16,
        "uint32": np.uint32,
        "uint64": np.uint64,
    }
)
SCALARS = {
    np.dtype(n): t
    for n, t in [
        ("f2", tl.float16),
        ("f4", tl.float32),
        ("f8", tl.float64),
        ("i4", tl.int32),
        ("i8", tl.int64),
        ("?", tl.int1),
    ]
}


class RunningProgram(threading.local):
    """The program that this thread interprets: its index, the grid, and the address ranges it may touch."""

    index: int = 0
    grid: int = 1
    spans: tuple[tuple[int, int], ...] = ()


PROGRAM = RunningProgram()


class Handle(upstream.TensorHandle):
    """Triton's handle without its dataclass start-up cost."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype) -> None:
        self.data = data
        self.dtype = dtype

    @property
    def attr(self) -> dict[str, Any]:
        return {}

    def set_attr(self, key: str, value: Any) -> None:
        """Compiler hints mean nothing here."""


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even; a float64 is rounded once, not through float32's ties."""
    f = np.ascontiguousarray(values, np.float32)
    bits = f.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    if values.dtype == np.float64:
        tie = (bits & 0xFFFF) == 0x8000
        above, below = np.abs(values) > np.abs(f), np.abs(values) < np.abs(f)
        rounded = np.where(tie & (above | below), (bits >> 16).astype(np.uint16) + above, rounded).astype(np.uint16)
    nan = np.isnan(f)
    return np.where(nan, np.uint16(0x7FC0), rounded) if nan.any() else rounded


def from_float8(bits: np.ndarray, name: str) -> np.ndarray:
    return np.ascontiguousarray(bits).view(FLOATS8[name].numpy).astype(np.float32)


def to_float8(values: np.ndarray, name: str) -> np.ndarray:
    """Round to nearest even, once, and stop at the largest number, as NVIDIA's conversion does; a NaN stays one."""
    kind = FLOATS8[name]
    return rounded(np.clip(values, -kind.largest, kind.largest), kind.name).view(np.uint8)


def in_patterns(dtype: tl.dtype) -> bool:
    """Whether NumPy lacks a float's dtype, so that its values lie in bit patterns here."""
    return dtype.name == "bf16" or dtype.name in FLOATS8


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """Elementwise cast between scalar dtypes."""
    if source.name == target.name:
        return data
    if source.name == "bf16":
        data = from_bfloat16(data)
    elif source.name in FLOATS8:
        data = from_float8(data, source.name)
    if target.name == "bf16":
        return to_bfloat16(data)
    if target.name in FLOATS8:
        return to_float8(data, target.name)
    return data.astype(NUMPY[target.name])


def _widen(h: upstream.TensorHandle) -> upstream.TensorHandle:
    source = h.dtype.scalar
    return Handle(convert(h.data, source, tl.float32), tl.float32) if in_patterns(source) else h


class Builder(upstream.InterpreterBuilder):
    """Triton's NumPy builder with right bfloat16 and with this thread's program index."""

    grid_idx = property(lambda self: (PROGRAM.index, 0, 0), lambda self, value: None)
    grid_dim = property(lambda self: (PROGRAM.grid, 1, 1), lambda self, value: None)

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        if lhs.dtype.scalar.name != "bf16":
            return super().binary_op(lhs, rhs, op)
        out = op(from_bfloat16(lhs.data), from_bfloat16(rhs.data))
        return Handle(out, tl.int1) if out.dtype == bool else Handle(to_bfloat16(out), tl.bfloat16)

    def unary_op(self, arg: Any, op: Callable[..., Any]) -> Any:
        if arg.dtype.scalar.name != "bf16":
            return super().unary_op(arg, op)
        return Handle(to_bfloat16(op(from_bfloat16(arg.data))), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if (in_patterns(source) or in_patterns(target)) and source.name in NUMPY and target.name in NUMPY:
            return Handle(convert(src.data, source, target), target)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if {src.dtype.scalar.name, dst_type.scalar.name} <= {"bf16", *FLOATS, *FLOATS8}:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(_widen(src), dst_type, rounding_mode)

    def create_fneg(self, arg: Any) -> Any:
        return self.unary_op(arg, np.negative)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        check_addresses(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8)
        return super().create_masked_load(ptrs, mask, other, *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_addresses(ptrs.data, mask.data, ptrs.get_element_ty().primitive_bitwidth // 8)
        return super().create_masked_store(ptrs, value, mask, *rest)


def check_addresses(address: np.ndarray, mask: np.ndarray | None, size: int) -> None:
    live = address if mask is None or mask.all() else address[mask]
    if not live.size:
        return
    lo, hi = int(live.min()), int(live.max()) + max(size, 1)
    if any(a <= lo and hi <= b for a, b in PROGRAM.spans):
        return
    inside = np.zeros(live.shape, bool)
    for a, b in PROGRAM.spans:
        inside |= (live >= a) & (live + max(size, 1) <= b)
    if not inside.all():
        raise IndexError(
            f"program {PROGRAM.index} touches memory outside its arguments' storages: "
            f"{int((~inside).sum())} of {live.size} addresses"
        )


class InterpretedTensor(tl.tensor):
    """A scalar or block of an interpreted kernel. Its operators are filled in below."""

    def __init__(self, handle: upstream.TensorHandle, type: tl.dtype) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.is_block = type.__class__ is tl.block_type

    @property
    def shape(self) -> tl.tuple:
        return tl.tuple([tl.constexpr(s) for s in self.type.shape] if self.is_block else [])

    @property
    def numel(self) -> tl.constexpr:
        return tl.constexpr(self.handle.data.size)

    @property
    def T(self) -> Any:
        return made(np.swapaxes(self.handle.data, -1, -2), self.dtype)

    def __bool__(self) -> bool:
        if self.is_block:
            raise TypeError("a block has no truth value: use tl.where, or & and | between masks")
        return bool(self.handle.data[0])

    def __index__(self) -> int:
        return operator.index(self.handle.data.item())

    __int__ = __index__

    def __neg__(self) -> Any:
        return self * -1.0 if self.dtype.name in ("fp32", "fp64") else tl.tensor.__neg__(self, _semantic=SEMANTIC)

    def __float__(self) -> float:
        return float(self.handle.data.item())

    def __repr__(self) -> str:
        return f"{self.dtype}{self.handle.data}"

    __str__ = __repr__
    __hash__ = object.__hash__

    def __getitem__(self, index: Any) -> InterpretedTensor:
        index = index if isinstance(index, tuple) else (index,)
        if any(i is not None and i != slice(None) for i in index) or not self.is_block:
            raise ValueError(f"unsupported index {index}: only None and : index a block")
        return made(self.handle.data[index], self.dtype)

    def to(self, dtype: tl.dtype, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> InterpretedTensor:
        source, target = self.dtype.name, dtype.scalar.name
        if fp_downcast_rounding or bitcast or source not in NUMPY or target not in ("bf16", *FLOATS, *FLOATS8, *INTS):
            return tl.tensor.to(self, dtype, fp_downcast_rounding, bitcast, _semantic=SEMANTIC)
        return made(convert(self.handle.data, self.dtype, dtype.scalar), dtype.scalar, self.is_block)


class Semantic(TritonSemantic):
    tensor = InterpretedTensor


SEMANTIC: Any = Semantic(Builder())
SEMANTIC.builder.options = upstream.InterpreterOptions(
    sanitize_overflow=False, allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
)

_new: Any = object.__new__
_block_types: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}


def made(data: np.ndarray, dtype: tl.dtype, is_block: bool = True) -> InterpretedTensor:
    """A block, or a scalar, of ``data``; written for speed, since every operation ends here."""
    block, handle = _new(InterpretedTensor), _new(Handle)
    handle.data, handle.dtype = data, dtype
    block.handle, block.dtype, block.is_block = handle, dtype, is_block
    if is_block:
        key = (dtype.name, data.shape)
        block.type = _block_types.get(key) or _block_types.setdefault(key, tl.block_type(dtype, list(data.shape)))
    else:
        block.type = dtype
    return block


def scalar(value: int | bool, dtype: tl.dtype | None = None) -> InterpretedTensor:
    dtype = dtype or (tl.int1 if isinstance(value, bool) else tl.int32 if -(2**31) <= value < 2**31 else tl.int64)
    return made(np.array([value], NUMPY[dtype.name]), dtype, False)


def pointer(address: int, dtype: tl.dtype) -> InterpretedTensor:
    return made(np.array([address], np.uint64), dtype, False)


def bound(member: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = SEMANTIC
        return member(*args, **kwargs)

    return call


def direct(
    ufunc: Callable[..., Any], slow: Callable[..., Any], kinds: str, result: tl.dtype | None = None, swap: bool = False
) -> Callable[..., Any]:
    """``slow`` with a shortcut for operands that share a dtype of ``kinds``, or are int32 and int64, or one a Python
    number of the same kind."""
    names = {n for n in NUMPY if np.dtype(NUMPY[n]).kind in kinds and n in (*FLOATS, *INTS, "int1")}
    ints = set(INTS) & names

    def op(x: Any, y: Any) -> Any:
        tx, kind = x.dtype.name, y.__class__
        if kind is InterpretedTensor:
            ty = y.dtype.name
            if (ty == tx and tx in names) or (tx in ints and ty in ints):
                data = ufunc(y.handle.data, x.handle.data) if swap else ufunc(x.handle.data, y.handle.data)
                return made(data, result or SCALARS[data.dtype], x.is_block or y.is_block)
        elif tx in names and (
            (kind is float and tx in FLOATS)
            or (kind is int and tx != "int1" and (tx in FLOATS or -(2**31) <= y < 2**31))
        ):
            data = ufunc(y, x.handle.data) if swap else ufunc(x.handle.data, y)
            return made(data, result or SCALARS[data.dtype], x.is_block)
        return slow(x, y)

    return op


def quotient(a: Any, b: Any) -> Any:
    """Integer division as hardware does it: towards zero."""
    return (a - np.fmod(a, b)) // b


def _add(slow: Callable[..., Any]) -> Callable[..., Any]:
    plain = direct(np.add, slow, "if")

    def op(x: Any, y: Any) -> Any:
        if y.__class__ is InterpretedTensor and x.dtype.is_ptr() and y.dtype.name in INTS:  # address + offset
            size = max(1, x.dtype.element_ty.primitive_bitwidth // 8)
            offset = (y.handle.data.astype(np.int64) * size).view(np.uint64)
            return made(x.handle.data + offset, x.dtype, x.is_block or y.is_block)
        return plain(x, y)

    return op


def _fill_operators() -> None:
    for name in dir(tl.tensor):
        member = getattr(tl.tensor, name)
        if tl.core.is_builtin(member) and name not in vars(InterpretedTensor):
            setattr(InterpretedTensor, name, bound(member))
    shortcuts: list[tuple[str, Callable[..., Any], str, tl.dtype | None]] = [
        ("add", np.add, "if", None), ("sub", np.subtract, "if", None), ("mul", np.multiply, "if", None),
        ("truediv", np.divide, "f", None), ("floordiv", quotient, "i", None), ("mod", np.fmod, "i", None),
        ("and", np.bitwise_and, "ib", None), ("or", np.bitwise_or, "ib", None), ("xor", np.bitwise_xor, "ib", None),
        ("lt", np.less, "if", tl.int1), ("le", np.less_equal, "if", tl.int1), ("gt", np.greater, "if", tl.int1),
        ("ge", np.greater_equal, "if", tl.int1), ("eq", np.equal, "if", tl.int1), ("ne", np.not_equal, "if", tl.int1),
    ]  # fmt: skip
    for name, ufunc, kinds, result in shortcuts:
        setattr(
            InterpretedTensor, f"__{name}__", direct(ufunc, getattr(InterpretedTensor, f"__{name}__"), kinds, result)
        )
        if result is None:
            setattr(
                InterpretedTensor,
                f"__r{name}__",
                direct(ufunc, getattr(InterpretedTensor, f"__r{name}__"), kinds, swap=True),
            )
    InterpretedTensor.__add__ = _add(InterpretedTensor.__add__)


_fill_operators()
