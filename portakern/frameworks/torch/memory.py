"""Whether a tensor's memory holds its values, as a kernel would read them. Nothing here imports torch by itself.

A tensor may have no memory at all (PyTorch's ZeroTensor, which is zeros without any), memory of other values than its
own (a lazily negated view), or memory that was given back while the tensor stayed (as FSDP does with parameters).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from portakern.errors import SpecError, UnsupportedError

__all__ = [
    "OFFSETS",
    "READABLE",
    "assumed",
    "begins",
    "is_distributed",
    "is_under_way",
    "materialised",
    "readable",
    "unreadable",
]

OFFSETS = 1 << 40
"""Bytes that no offset into a storage reaches: an address beyond is in memory that is there."""


F = TypeVar("F", bound=Callable[..., Any])


def assumed(fn: F) -> F:
    """What torch.compiler.assume_constant_result does, for a module that must not import torch: dynamo calls ``fn``
    while it traces, and takes the result for a constant."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def begins(array: Any) -> int:
    """Where a tensor's storage begins; 0 where it has none."""
    try:
        return int(array.untyped_storage().data_ptr())
    except RuntimeError:  # also NotImplementedError, of layouts that have no storage
        return 0


def readable(op: str, name: str, array: Any) -> Any:
    """A strided tensor whose memory holds the values of ``array``: itself, or where PyTorch keeps values elsewhere a
    copy that autograd follows.

    Raises:
      SpecError: it has no memory, or less than its elements take. UnsupportedError: a class whose values may be
        anywhere.
    """
    kind = type(array)
    if stands_in(kind):  # asked for its address, it warns
        raise UnsupportedError(
            f"{op}: {name} is a {kind.__name__}, which has no memory of its own; pass a plain torch.Tensor"
        )
    if kind not in READABLE:
        if (waited := _waited(array)) is not None:
            return readable(op, name, waited)
        if (why := unreadable(kind)) is not None:
            raise UnsupportedError(f"{op}: {name} {why}")
    torch = sys.modules["torch"]
    if torch._C._functorch.is_functorch_wrapped_tensor(array):
        return _outlived(op, name, array)
    plain = materialised(array)
    if plain is array and array.numel():
        last = sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True))
        needed = (array.storage_offset() + last + 1) * array.element_size()
        held = array.untyped_storage().nbytes() if begins(array) else 0
        if held < needed:
            raise SpecError(f"{op}: {name} {_lost(array, held, needed)}")
    return plain


def materialised(array: Any) -> Any:
    """A tensor with its values in memory: itself, or a copy of what PyTorch knows without memory or negates lazily."""
    return array.clone() if array._is_zerotensor() else array.resolve_conj().resolve_neg()


def _lost(array: Any, held_bytes: int, needed: int) -> str:
    """What is wrong with a tensor that has less memory than its elements take."""
    if array.is_meta or sys.modules["torch"]._is_functional_tensor(array):
        return (
            "has no memory: it stands for a tensor in a program that PyTorch records; call the op inside "
            "torch.compile, torch.export or make_fx, or pass a tensor that has its values"
        )
    return (
        f"needs {needed} bytes and its storage holds {held_bytes}: the memory was given back "
        "(untyped_storage().resize_), as FSDP does with parameters between their uses; pass a tensor that has its "
        "values: of FSDP, call module.unshard() first (fully_shard), or enter FullyShardedDataParallel."
        "summon_full_params"
    )


def _outlived(op: str, name: str, array: Any) -> Any:
    """What a tensor of torch.func holds that its transform is over for, as PyTorch's functions take it."""
    functorch = sys.modules["torch"]._C._functorch
    within = functorch.unwrap_if_dead(array)
    if within is array or functorch.is_functorch_wrapped_tensor(within):
        raise SpecError(
            f"{op}: {name} is one sample of a torch.func transform that is over; return it from the function that is "
            "transformed, and pass what the transform returns"
        )
    return readable(op, name, within)


def _waited(array: Any) -> Any:
    """The result of a collective operation that may still be under way, once it is there; None for any other tensor."""
    if not is_under_way(array):
        return None
    # a view that its class does not know for one, and waits before; autograd follows it
    return sys.modules["torch"].ops.aten._unsafe_view.default(array, array.shape)


@assumed  # traced, torch.Tensor's own methods are not what they are
def unreadable(kind: type) -> str | None:
    """Why the memory of tensors of a class may not be what they are, in words; None where it is.

    A class that answers torch functions or dispatched operations itself may keep its values elsewhere, or nowhere:
    ``CausalBias`` is a mask by its attributes alone."""
    torch = sys.modules["torch"]
    plain = torch.Tensor
    if stands_in(kind):  # for a tensor whose memory is that; who wants to read it says that there is none
        return None
    if kind.__torch_dispatch__ is not plain.__torch_dispatch__:  # type: ignore[attr-defined]
        return f"is a {kind.__name__}, which has no memory of its own; pass a plain torch.Tensor"
    answers = kind.__torch_function__  # type: ignore[attr-defined]
    inherited = getattr(answers, "__func__", None) is plain.__torch_function__.__func__
    if not inherited and answers is not torch._C._disabled_torch_function_impl:
        return (
            f"is a {kind.__name__}, a class that answers PyTorch's functions itself, so that its memory may not hold "
            "its values; pass .as_subclass(torch.Tensor) where it does, a plain torch.Tensor where it does not"
        )
    READABLE.add(kind)
    return None


def is_distributed(array: Any) -> bool:
    """Whether a tensor is a DTensor: PyTorch's dispatcher runs ops on its parts. The name tells, since its module takes
    long to import, and torch.compile does not trace a look into ``sys.modules``."""
    return type(array).__name__ == "DTensor"


def is_under_way(array: Any) -> bool:
    """Whether a tensor is the result of a collective operation, for which PyTorch's dispatcher waits."""
    return type(array).__name__ == "AsyncCollectiveTensor"


def stands_in(kind: type) -> bool:
    """Whether tensors of a class have shapes and devices and no values: those of a model that runs without memory."""
    return kind.__name__ == "FakeTensor" and kind.__module__ == "torch._subclasses.fake_tensor"


READABLE: set[type] = set()
"""Classes of tensors that were looked at and found plain: tensors, parameters, subclasses that change nothing."""
