"""Kernels in Gluon on the host, as far as their roles, barriers and numbers go: each group of warps is a thread.

Triton's interpreter does not know Gluon. Here a kernel's functions run as the Python that they are, on PyTorch's
tensors, and what Hopper does asynchronously happens as late as it may: a product reads shared memory when it is waited
for, a copy into shared memory spoils its tile at once and fills it later, a store reads its tile when it is waited for.
So a buffer that is handed back too early, a wait for too few products, and bytes that no barrier expects give NaN, an
error, or a thread that does not end; and a fence that is missing between what threads themselves and what copies or
products do in shared memory is an error. Layouts and registers are not looked at.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import pathlib
import platform
import random
import re
import threading
import time
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from portakern.backends.triton.descriptors import is_descriptor

compiles = pytest.mark.skipif(
    not (platform.system() == "Linux" and importlib.util.find_spec("triton")), reason="triton is made for Linux alone"
)
"""Of tests that compile what else runs on the host."""

PATIENCE = 20.0  # seconds that a thread waits at a barrier before it counts as hanging

LATE: dict[int, float] = {}
"""Role -> seconds that it takes for whatever it does in shared memory. Who does not wait for it meets what is there
before; otherwise that depends on which thread the host lets run."""

LAZY = False
"""Whether copies into shared memory come when somebody waits for them, as late as may be. Else they come soon, whoever
waits, and who does not may meet what they bring."""


ROLES = 5  # threads of a kernel at most: the one that begins it, and those with roles


class Touched:
    """What threads of a kernel have read and written of shared memory themselves, each since its last fence. Copies and
    products go by another way to it, which nothing else orders with theirs, not even a barrier: see "Async proxy" in
    PTX's ISA."""

    everywhere: ClassVar[list[torch.Tensor]] = []  # of the program that runs

    def __init__(self, elements: torch.Tensor) -> None:
        self.elements = elements  # (read or written, thread, ...)

    @classmethod
    def fresh(cls, shape: Sequence[int]) -> Touched:
        cls.everywhere.append(torch.zeros(2, ROLES, *shape, dtype=torch.bool))
        return cls(cls.everywhere[-1])

    @classmethod
    def fence(cls) -> None:
        for elements in cls.everywhere:
            elements[:, local().number] = False

    def add(self, written: bool) -> None:
        self.elements[int(written), local().number] = True

    def check(self, what: str, writes: bool) -> None:
        """What reads must not follow a thread's writes without a fence, and what writes its reads neither."""
        assert not self.elements[0 if writes else 1 :].any(), f"{what} where a thread has been, and no fence between"


def spoiled(dtype: torch.dtype) -> float:
    """What stands for memory that nobody may read: NaN, or of integers one that others' products do not have."""
    return math.nan if dtype.is_floating_point else -113


class Memory:
    """Shared memory, or a part of it; spoiled until something is written."""

    def __init__(self, data: torch.Tensor, touched: Touched) -> None:
        self.data, self.touched = data, touched

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))

    def index(self, i: Any) -> Any:
        return Memory(self.data[int(i)], Touched(self.touched.elements[:, :, int(i)]))

    def slice(self, start: Any, length: int, dim: int = 0) -> Memory:
        part = Touched(self.touched.elements.narrow(dim + 2, int(start), length))
        return Memory(self.data.narrow(dim, int(start), length), part)

    def permute(self, order: tuple[int, ...]) -> Memory:
        turned = Touched(self.touched.elements.permute((0, 1, *(o + 2 for o in order))))
        return Memory(self.data.permute(order), turned)

    def load(self, layout: Any) -> torch.Tensor:
        take_time()
        self.touched.add(written=False)
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        take_time()
        assert value.shape == self.data.shape and value.dtype == self.data.dtype
        self.touched.add(written=True)
        self.data.copy_(value)


class Tiles:
    """Shared memory as other tiles: parts of so many rows and columns, those of a line of memory one after the other
    as the copy engine lays them."""

    def __init__(self, memory: Memory, count: int, rows: int, columns: int) -> None:
        def parts(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-1, (-1, columns)).transpose(-2, -3).unflatten(-2, (-1, rows))

        data, touched = parts(memory.data), parts(memory.touched.elements)
        self.parts = [
            Memory(data[stage, beside, below], Touched(touched[:, :, stage, beside, below]))
            for stage, beside, below in itertools.product(*map(range, data.shape[:3]))
        ]
        assert len(self.parts) == count
        self.shape = [count, rows, columns]

    def index(self, i: Any) -> Memory:
        return self.parts[int(i)]


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that it expects have come."""

    def __init__(self) -> None:
        self.changed, self.phase, self.count = threading.Condition(), 0, 0
        self.pending = self.bytes = 0
        self.failed: AssertionError | None = None  # what a copy met that arrived
        self.waiting = 0
        self.copies: list[threading.Thread] = []  # that come when somebody waits

    def _step(self, arrivals: int, expected: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than a phase has"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if self.phase % 2 != parity:
                return
            self.waiting += 1
            while self.copies:
                self.copies.pop(0).start()
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE):
                raise self.failed or TimeoutError("nobody arrives at a barrier")
            self.waiting -= 1

    def await_copy(self, copy: threading.Thread) -> None:
        """Let a copy come that this barrier is told of."""
        with self.changed:
            if LAZY and not self.waiting:
                self.copies.append(copy)
            else:
                copy.start()


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]
        self.shape = [count, 1]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Described:
    """A tensor descriptor: of the memory of ``base``, from its first element on."""

    def __init__(self, base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        self.base, self.extents, self.strides, self.block = base, tuple(shape), tuple(strides), tuple(block)
        self.dtype, self.shape = base.dtype, [Scalar(n) for n in shape]
        self.block_type = types.SimpleNamespace(shape=self.block)

    def _parts(self, at: list[Any], tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The part of the array that a box covers, and of the tile. Addresses are sums that wrap at 64 bits. A box
        begins at a multiple of 16 bytes along the last axis: elsewhere Hopper's copy engine traps."""
        starts, tile = [int(i) for i in at], tile.view(self.block)
        assert starts[-1] * self.base.itemsize % 16 == 0, f"a box begins at element {starts[-1]} of a row"
        firsts = [max(i, 0) for i in starts]
        ends = [min(i + n, extent) for i, n, extent in zip(starts, self.block, self.extents, strict=True)]
        sizes = [max(0, end - first) for first, end in zip(firsts, ends, strict=True)]
        inner = tile[
            tuple(slice(f - i, f - i + n) if n else slice(0) for f, i, n in zip(firsts, starts, sizes, strict=True))
        ]
        if not all(sizes):
            return inner, inner
        size = self.base.itemsize
        apart = sum(i * s * size for i, s in zip(firsts, self.strides, strict=True)) % (1 << 64)
        apart -= (apart >> 63) << 64
        steps = [s if n > 1 else 0 for s, n in zip(self.strides, sizes, strict=True)]
        return self.base.as_strided(sizes, steps, self.base.storage_offset() + apart // size), inner

    def load(self, at: list[Any], barrier: Barrier, memory: Memory) -> None:
        memory.touched.check("a copy writes", writes=True)
        memory.data.fill_(spoiled(memory.data.dtype))

        def arrive() -> None:
            time.sleep(random.random() * 2e-3)
            memory.data.zero_()
            there, tile = self._parts(at, memory.data)
            tile.copy_(there)
            try:
                barrier._step(0, -memory.data.numel() * memory.data.element_size())
            except AssertionError as e:
                barrier.failed = e

        barrier.await_copy(threading.Thread(target=arrive))

    def store(self, at: list[Any], memory: Memory, adds: bool = False) -> None:
        memory.touched.check("a copy reads", writes=False)
        there, tile = self._parts(at, memory.data)
        local().stores.append((there, tile, adds))


class Product:
    """A product on its way; its sum may be that of one before, which is done before."""

    def __init__(self, a: Any, b: Memory, acc: torch.Tensor | Product | None, summed: torch.dtype) -> None:
        self.a, self.b, self.acc, self.summed, self.result = a, b, acc, summed, None

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("waited for too few products: one is taken that is on its way")

    def __mul__(self, other: Any) -> Any:
        return self.taken

    __rmul__ = __sub__ = __add__ = __mul__

    def finish(self) -> None:
        a = self.a.data if isinstance(self.a, Memory) else self.a
        assert a.dtype == self.b.data.dtype or a.dtype.itemsize == self.b.data.dtype.itemsize == 1
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        # As on the matrix unit, an element is the same however many rows and columns there are: float32 has no room for
        # what the order of these sums changes.
        self.result = (a.double() @ self.b.data.double() + (0.0 if acc is None else acc)).to(self.summed)


_local = threading.local()


def local() -> Any:
    if not hasattr(_local, "products"):
        _local.products, _local.stores, _local.late, _local.number = [], [], 0.0, 0
    return _local


def take_time() -> None:
    if local().late:
        time.sleep(local().late)


def warpgroup_mma(a: Any, b: Memory, acc: Any, use_acc: Any = True, is_async: bool = False) -> Product:
    assert is_async
    for memory in (a, b):
        if isinstance(memory, Memory):
            memory.touched.check("a product reads", writes=False)
    summed = acc.summed if isinstance(acc, Product) else acc.dtype
    made = Product(a, b, acc if use_acc else None, summed)
    local().products.append(made)
    return made


def warpgroup_mma_wait(outstanding: int, deps: list[Product]) -> Any:
    products = local().products
    take_time()
    while len(products) > outstanding:
        products.pop(0).finish()
    results = tuple(d.result if isinstance(d, Product) and d.result is not None else d for d in deps)
    return results if len(results) > 1 else results[0]


_adding = threading.Lock()


def store_wait(outstanding: int) -> None:
    assert outstanding == 0
    for there, tile, adds in local().stores:
        with _adding:
            there.copy_(there + tile if adds else tile)
    local().stores.clear()


class Pointer:
    """``several``: how many elements beside each other are read as one number, which is 0 where all are."""

    def __init__(self, flat: torch.Tensor, at: Any = 0, several: int = 1) -> None:
        self.flat, self.at, self.several = flat, at, several
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.flat, self.at + step)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.flat, self.at[key])

    def to(self, dtype: torch.dtype) -> Pointer:
        return Pointer(self.flat, self.at, dtype.itemsize // self.flat.itemsize)


def load(pointer: Pointer, mask: Any = True, other: float = 0) -> Any:
    if not isinstance(mask, torch.Tensor):  # one number
        here = pointer.flat[pointer.at : pointer.at + pointer.several]
        assert not mask or len(here) == pointer.several, "read behind the end"
        if not mask:
            return Scalar(other)
        if pointer.flat.is_floating_point():
            return here[0]
        return Scalar(here[0] if pointer.several == 1 else here.any())
    return torch.where(mask, pointer.flat[torch.where(mask, pointer.at, 0)], other)


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, value, mask = torch.broadcast_tensors(_tensor(pointer.at), _tensor(value), _tensor(mask))
    pointer.flat[at[mask]] = value[mask].to(pointer.flat.dtype)


def atomic_add(pointer: Pointer, number: int, sem: str) -> Scalar:
    with _adding:
        before = Scalar(pointer.flat[pointer.at])
        pointer.flat[pointer.at] += number
    return before


class Scalar(int):
    """A number that is known when the kernel runs; unlike a tensor of PyTorch's it never changes."""

    def to(self, dtype: Any) -> Scalar:
        return self


def _lifted(name: str) -> Any:
    whole = getattr(int, name)

    def operate(self: int, other: Any) -> Any:
        result = whole(self, other)
        return Scalar(result) if type(result) is int else result

    return operate


def _towards_0(turned: bool, rest: bool) -> Any:
    """Quotients and remainders as a GPU has them: those of numbers below 0 are not Python's."""

    def operate(self: int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        a, b = (int(other), int(self)) if turned else (int(self), int(other))
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return Scalar(a - quotient * b if rest else quotient)

    return operate


for _name in ("add", "sub", "mul", "and", "xor"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(Scalar, _form, _lifted(_form))
for _turned in (False, True):
    setattr(Scalar, f"__{'r' * _turned}floordiv__", _towards_0(_turned, False))
    setattr(Scalar, f"__{'r' * _turned}mod__", _towards_0(_turned, True))


def _of_scalars(plain: Any, of_tensors: Any) -> Any:
    def operate(*args: Any) -> Any:
        if not any(isinstance(x, torch.Tensor) for x in args):
            return Scalar(plain(*args))
        return of_tensors(*map(_tensor, args))

    return operate


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if dtype == torch.int64:
        return Barriers(shape[0])
    return Memory(torch.full(shape, spoiled(dtype), dtype=dtype), Touched.fresh(shape))


def _of_numpy(function: np.ufunc) -> Any:
    """A function of elements with the bits that it has in interpreted kernels of ``tl``, of which one merges what
    kernels here leave."""

    def of_tensor(x: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):
            return torch.from_numpy(function(x.numpy()))

    return of_tensor


def _language(program: int, programs: int) -> types.SimpleNamespace:
    def specialize(functions: list[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        failed: list[BaseException] = []

        def role(number: int, function: Any, args: tuple[Any, ...]) -> None:
            local().late, local().number = LATE.get(number, 0.0), number + 1
            try:
                function(*args)
                assert not local().products and not local().stores
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=role, args=(i, *f), daemon=True) for i, f in enumerate(functions)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failed:
            raise failed[0]

    nothing = lambda *a, **k: None  # noqa: E731
    return types.SimpleNamespace(
        NVMMADistributedLayout=nothing, NVMMASharedLayout=nothing, DotOperandLayout=nothing, SliceLayout=nothing,
        BlockedLayout=nothing, DistributedLinearLayout=nothing, to_tensor=Scalar,
        float32=torch.float32, int64=torch.int64, int32=torch.int32, int16=torch.int16, constexpr=lambda x: x,
        pointer_type=lambda dtype: dtype,
        program_id=lambda axis: Scalar(program), num_programs=lambda axis: programs,
        arange=lambda a, b, layout: torch.arange(a, b), static_range=range, cdiv=lambda a, b: (a + b - 1) // b,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype), log=_of_numpy(np.log),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), reshape=torch.reshape,
        permute=torch.permute, split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack((a, b), -1),
        zeros_like=torch.zeros_like, convert_layout=lambda x, layout, assert_trivial=False: x,
        exp2=_of_numpy(np.exp2), abs=torch.abs, load=load, store=store, atomic_add=atomic_add,
        inline_asm_elementwise=_in_assembly,
        fma=lambda a, b, c: (a.double() * b + c).float(),
        where=_of_scalars(lambda c, a, b: a if c else b, torch.where),
        minimum=_of_scalars(min, torch.minimum), maximum=_of_scalars(max, torch.maximum),
        allocate_shared_memory=_allocate, warp_specialize=specialize,
    )  # fmt: skip


ASSEMBLY = {
    "rcp.approx.ftz.f32 $0, $1;": (lambda x: 1.0 / x, "=f,f"),
    "mul.rn.f32 $0, $1, $2;": (lambda a, b: a * b, "=f,f,f"),
}
"""Instruction -> what it computes, and its operands."""


def _in_assembly(code: str, constraints: str, args: list[torch.Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:
    operation, operands = ASSEMBLY[code]
    assert (constraints, pack) == (operands, 1)
    return operation(*args)


def _initialise(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


MBARRIER = types.SimpleNamespace(
    MBarrierLayout=lambda: None,
    init=lambda barrier, count: _initialise(barrier, count),
    wait=lambda barrier, parity: barrier.wait(int(parity)),
    arrive=lambda barrier, count=1, pred=True: barrier._step(count, 0) if pred else None,
    expect=lambda barrier, bytes: barrier._step(1, bytes),
)


def on_host(module: Any, folder: pathlib.Path) -> Any:
    """The module, where dtypes say how wide they are in other words, and layouts are nothing."""
    source = re.sub(r"([\w.]*\bdtype)\.primitive_bitwidth", r"(\1.itemsize * 8)", inspect.getsource(module))
    file = folder / f"on_host{module.__name__.rpartition('.')[2]}.py"
    file.write_text(re.sub(r"\w+\.type\.layout", "None", source))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def launched(kernel: Any, modules: list[Any], grid: int, args: Sequence[Any], **constexprs: Any) -> None:
    """:func:`run` on what a launch is given: tensors, descriptors of them, and numbers."""

    def told(x: Any) -> Any:
        if is_descriptor(x):
            return Described(x.base, x.shape, x.strides, x.block_shape)
        if isinstance(x, tuple) and hasattr(x, "_fields"):
            return type(x)(*map(told, x))
        return Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x

    run(kernel, modules, grid, *map(told, args), **constexprs)


def _known(value: Any) -> Any:
    """What a compiled kernel knows as a constexpr."""
    return getattr(value, "value", value)


def run(kernel: Any, modules: list[Any], grid: int, *args: Any, **constexprs: Any) -> None:
    """Run each program of ``kernel``, one after the other, on Described, Pointers and numbers. modules: where the
    functions that it calls stand, the first one's names winning."""
    for program in range(grid):
        Touched.everywhere.clear()
        names: dict[str, Any] = {}
        for module in reversed(modules):
            for name, value in vars(module).items():
                code = getattr(getattr(value, "fn", None), "__code__", None)
                names[name] = (
                    types.FunctionType(code, names, name, tuple(map(_known, value.fn.__defaults__ or ())))
                    if code
                    else _known(value)
                )
        names |= {
            "gl": _language(program, grid), "mbarrier": MBARRIER, "fence_async_shared": Touched.fence,
            "tma": types.SimpleNamespace(store_wait=store_wait), "warpgroup_mma": warpgroup_mma,
            "warpgroup_mma_init": lambda acc: acc,
            "warpgroup_mma_wait": warpgroup_mma_wait, "boxed": lambda tile, layout=None: tile,
            "halves": lambda tile: tile.chunk(2, -1), "together": lambda: None,
            "as_tiles": lambda tiles, count, rows, columns, layout: Tiles(tiles, count, rows, columns),
            "multiply_add": lambda a, b, acc: (a.double() @ b.double() + acc).float(),
            "load_tile": lambda d, at, barrier, tile: d.load(at, barrier, tile),
            "store_tile": lambda d, at, tile: d.store(at, tile),
            "add_tile": lambda d, at, tile: d.store(at, tile, adds=True), "rows_boxed": lambda tile, heads: tile,
            "beside": lambda alpha, l: alpha[:, None], "column_of": lambda alpha, tile: alpha[:, None],
            "gdc_launch_dependents": lambda: None, "gdc_wait": lambda: None,
        }  # fmt: skip
        names[kernel.fn.__name__](*args, **constexprs)
