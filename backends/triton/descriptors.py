"""Tensor descriptors on the way to a launch: what NVIDIA's copy engine (TMA) moves tiles by.

A kernel's parameter that is described, and no pointer, is a 128-byte map that the driver makes of an address, extents,
strides and a tile. Triton makes it anew at each launch, in Python, which for three of them takes 20 us. Of a launch
that is made again and again only addresses change, so that :class:`Maps` keeps maps by address.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from triton.tools.tensor_descriptor import TensorDescriptor

from portakern.core.program import TileFormat

if TYPE_CHECKING:
    import torch

__all__ = [
    "ArrayAddress", "Maps", "bare", "base_of", "bind_thread", "describe", "describes", "elsewhere", "formats",
    "is_descriptor", "mend_rounding", "raw",
]  # fmt: skip

TFLOAT32 = 11
"""What CUDA's driver calls a map that rounds float32 numbers to the nearest of 10 bits as it copies them."""

OF_DRIVER = {8: 10, 9: 8, 10: 9}
"""What CUDA's driver calls the elements to which Triton's compiler gives other numbers, those of PTX."""

KEPT = 256  # maps of one parameter; a network's calls of a form see some tens of addresses


def describe(
    tensor: torch.Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    block: Sequence[int],
    layout: Any = None,
    tf32: bool = False,
) -> Any:
    """A descriptor of ``tensor``'s memory as an array of these extents and strides (in elements), in tiles ``block``.

    Its last stride is 1, and the others and the address are multiples of 16 bytes. What lies beyond the extents is read
    as 0 and not written.

    Args:
      layout: the tile's in shared memory, for a kernel in Gluon. tf32: numbers of float32 are rounded to 10 bits.
    """
    if layout is None:
        made = TensorDescriptor(tensor, list(shape), list(strides), list(block))
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        made = GluonDescriptor(tensor, list(shape), list(strides), list(block), layout)
    if tf32:
        made.round_f32_to_tf32 = True  # releases before 3.9 have no such field: see mend_rounding
    return made


def describes(kind: type) -> bool:
    """Whether values of this type are descriptors: Triton's or Gluon's."""
    return kind.__name__ == "TensorDescriptor" and kind.__module__.startswith("triton.")


def is_descriptor(value: Any) -> bool:
    return describes(type(value))


def base_of(value: Any) -> Any:
    """The tensor that a descriptor describes; anything else as it is."""
    return value.base if is_descriptor(value) else value


def elsewhere(descriptor: Any, base: Any) -> Any:
    """The same descriptor of memory that begins somewhere else."""
    made = copy.copy(descriptor)
    made.base = base
    return made


def bare(descriptor: Any) -> Any:
    """The same descriptor of no memory, to keep."""
    return elsewhere(descriptor, None)


class ArrayAddress:
    """Stands for a tensor of which nobody asks more than where it begins."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Thread(threading.local):
    bound = False


_thread = _Thread()


def bind_thread() -> None:
    """Make the device's context current in this thread, in which a map is about to be made.

    The driver needs a current context to make a map. PyTorch's autograd threads have none until their first call of
    CUDA's runtime, and that may come after the first backward kernel: memory comes from the allocator's cache.
    """
    if not _thread.bound:
        sys.modules[
            "torch"
        ].cuda.Event().record()  # the runtime's first call in a thread; allowed while a graph is captured too
        _thread.bound = True


class Maps(dict[int, Any]):
    """Address -> the map of a descriptor's array that begins there, made when it is first asked for.

    Attributes:
      rest: what a launcher is passed after the map: extents and strides.
    """

    def __init__(self, descriptor: Any, encode: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self.descriptor, self.encode = bare(descriptor), encode
        self.rest = [*descriptor.shape, *descriptor.strides]

    def __missing__(self, address: int) -> Any:
        if len(self) >= KEPT:
            self.clear()
        bind_thread()
        made, *rest = self.encode(elsewhere(self.descriptor, ArrayAddress(address)))
        if rest != self.rest:
            raise RuntimeError(f"Triton passes {rest} of a descriptor after its map; expected {self.rest}")
        self[address] = made
        return made


def raw(run: Any, descriptors: Sequence[Any]) -> tuple[Callable[..., None], list[Maps]] | None:
    """Triton's launching function below the one that makes maps, and the maps of each descriptor in the order of the
    parameters; None where this release is built in another way."""
    make = getattr(sys.modules[type(run).__module__], "make_tensordesc_arg", None)
    if make is None or not inspect.isfunction(run.launch):
        return None
    around = inspect.getclosurevars(run.launch).nonlocals
    launch, metadata = around.get("launcher"), around.get("tensordesc_meta")
    if launch is None or not metadata or len(metadata) != len(descriptors):
        return None
    others = [None] * (len(inspect.signature(make).parameters) - 2)
    return launch, [
        Maps(d, lambda described, of=of: make(described, of, *others))  # type: ignore[misc]
        for d, of in zip(descriptors, metadata, strict=True)
    ]


def formats(compiled: Any, described: Sequence[Any]) -> tuple[TileFormat, ...]:
    """What a compiled kernel's code fixes of these descriptors, which are all of its arguments'."""
    return tuple(
        TileFormat(
            TFLOAT32 if getattr(d, "round_f32_to_tf32", False) else OF_DRIVER.get(of["elem_type"], of["elem_type"]),
            of["swizzle"],
            tuple(of["block_size"]),
        )
        for d, of in zip(described, getattr(compiled.metadata, "tensordesc_meta", None) or (), strict=True)
    )


def mend_rounding(kernel: Any, grid: int, args: Sequence[Any], constexprs: dict[str, Any]) -> None:
    """Have maps round to tf32 where a descriptor asks for it and Triton (before 3.9) does not know of that.

    The kind of numbers in a map stands in what Triton's compiler says of a kernel, which every launch of it reads.
    """
    described = [a for a in args if is_descriptor(a)]
    asks = [getattr(d, "round_f32_to_tf32", False) for d in described]
    if not any(asks) or "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__:
        return
    compiled = kernel.warmup(*args, grid=(grid,), **constexprs)
    for of, rounds in zip(compiled.metadata.tensordesc_meta, asks, strict=True):
        if rounds:
            of["elem_type"] = TFLOAT32
