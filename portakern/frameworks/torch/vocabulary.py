"""Losses of classes that the processes of a group hold in parts: logits never leave the process that has them, and
three numbers a row are what others need of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from portakern.api import Op, op
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.casting import lowered
from portakern.frameworks.torch.custom_ops import define
from portakern.frameworks.torch.memory import is_distributed

__all__ = [
    "mesh_axis_of_classes",
    "row_losses",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_linear_cross_entropy",
]

NONE = -1
"""The label of a row that is ignored, where those of others are 0."""
CHUNK_ROWS, CHUNK_CLASSES = 2048, 4096
"""Of a linear layer: the rows whose logits are in memory at a time in the forward pass, and the classes in the backward
pass."""


@functools.cache
def _op(name: str, backend: str | None) -> Op:
    return op(name, backend=backend)


def vocabulary_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    classes: Sequence[int] | None = None,
    backend: str | None = None,
) -> Tensor:
    """The op ``cross_entropy`` of logits whose classes the processes of a group hold in parts, with its gradient.

    Each process takes the log-sum-exp of its own classes. Of these (to twice float32's precision) and of the label's
    logit every process gets those of all, three numbers a row and process, and puts the loss together in the order of
    the processes: two runs have the same bits. The gradient by a process's logits needs no other process.

    The source is Shoeybi et al. 2019, "Megatron-LM", section 3.

    Args:
      logits: (..., n), of the n classes behind those of the process before; labels: (...), int32 or int64, from 0 to
        the number of all classes - 1, the same on all processes.
      group: the processes, every one of which makes the call; None: all.
      ignore_index, label_smoothing, z_loss: as in the op.
      classes: how many classes each process holds; None: as many as this one.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (...), float32 (float64 for float64), the same on all processes.

    Raises:
      SpecError: shapes that do not agree, or classes that are not those of the call. UnsupportedError: DTensors, or no
        torch.distributed.
    """
    name = "vocabulary_parallel_cross_entropy"
    part = ClassesHere.of(name, logits.shape[-1], group, classes, ignore_index, label_smoothing, z_loss, backend)
    _check(name, labels, logits=logits)
    loss: Tensor = CrossEntropy.apply(logits, labels, part)
    return loss


def vocabulary_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    precision: str = "ieee",
    classes: Sequence[int] | None = None,
    backend: str | None = None,
) -> Tensor:
    """The op ``linear_cross_entropy`` of a weight whose rows, the classes, the processes of a group hold in parts, with
    its gradients.

    As :func:`vocabulary_parallel_cross_entropy` of the logits hidden weight^T, of which a process has those of its own
    classes, of some rows or classes at a time, and takes them again in the backward pass. The gradient of hidden is the
    sum of what all processes find, added in float32 and rounded once; that of weight needs no other process.

    Args:
      hidden: (..., d), the same on all processes; weight: (n, d), the rows of the n classes behind those of the process
        before, hidden's dtype; labels: (...), int32 or int64.
      precision: of products of float32, as in the op. The rest: as in :func:`vocabulary_parallel_cross_entropy`.

    Returns:
      (...), float32 (float64 for float64), the same on all processes.

    Raises:
      SpecError: shapes or dtypes that do not agree, or classes that are not those of the call. UnsupportedError:
        DTensors, or no torch.distributed.
    """
    name = "vocabulary_parallel_linear_cross_entropy"
    part = ClassesHere.of(name, weight.shape[0], group, classes, ignore_index, label_smoothing, z_loss, backend)
    _check(name, labels, hidden=hidden, weight=weight)
    hidden, weight = lowered(hidden), lowered(weight)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        raise SpecError(
            f"{name}: weight is {weight.dtype} {tuple(weight.shape)} beside hidden, {hidden.dtype} "
            f"{tuple(hidden.shape)}; expected (classes, {hidden.shape[-1]}) of hidden's dtype"
        )
    loss: Tensor = LinearCrossEntropy.apply(hidden, weight, labels, part, precision)
    return loss


# ------------------------------------------------------------------------------------------------------------- DTensors
def mesh_axis_of_classes(logits: Any, axis: int = -1) -> int | None:
    """The axis of the mesh over which logits are cut along their classes, ``axis``, where their loss is taken of what
    each device holds; None: they are no DTensor, are cut otherwise, over several axes of the mesh or so that a device
    has no class, or PyTorch compiles the call, in which it sees no process."""
    if not is_distributed(logits) or torch.compiler.is_compiling():
        return None
    from torch.distributed.tensor import Shard

    axis %= logits.dim()
    over = [i for i, p in enumerate(logits.placements) if getattr(p, "dim", None) == axis]
    if len(over) != 1 or type(logits.placements[over[0]]) is not Shard:
        return None
    found = over[0]
    return None if min(_shares(logits.shape[axis], logits.device_mesh.size(found))) < 1 else found


def _shares(count: int, devices: int) -> list[int]:
    """How many of so many classes each device holds of a DTensor that is cut."""
    most = -(-count // devices)
    return [max(0, min(most, count - rank * most)) for rank in range(devices)]


def row_losses(entropy: Op, logits: Tensor, labels: Tensor, backend: str | None, **options: Any) -> Tensor:
    """``entropy``, the op cross_entropy, of (..., n) logits; of DTensors that are cut along their classes as
    :func:`vocabulary_parallel_cross_entropy` has it, and then a DTensor, cut as rows are.

    ``labels``: placed beside logits. ``options``: of both."""
    over = mesh_axis_of_classes(logits)
    if over is None:
        found: Tensor = entropy(logits, labels, **options)
        return found
    from torch.distributed.tensor import DTensor, Replicate

    x: Any = logits
    aims: Any = labels
    mesh, last = x.device_mesh, x.dim() - 1
    whole = [Replicate() if p.is_partial() else p for p in x.placements]
    rows = [p if p.is_shard() and i != over and p.dim < last else Replicate() for i, p in enumerate(whole)]
    loss = vocabulary_parallel_cross_entropy(
        x.redistribute(placements=whole).to_local(grad_placements=whole),
        aims.redistribute(placements=rows).to_local(),
        mesh.get_group(over),
        classes=_shares(x.shape[last], mesh.size(over)),
        backend=backend,
        **options,
    )
    placed: Tensor = DTensor.from_local(loss, mesh, rows, run_check=False, shape=aims.shape, stride=aims.stride())
    return placed


# ---------------------------------------------------------------------------------------------------------- one process
def _check(name: str, labels: Tensor, **arrays: Tensor) -> None:
    for argument, x in {"labels": labels, **arrays}.items():
        if hasattr(x, "placements"):
            raise UnsupportedError(
                f"{name}: {argument} is a DTensor; expected what this process holds: pass {argument}.to_local(), and "
                "the mesh's get_group() as group"
            )
    rows, x = next(iter(arrays.items()))
    if labels.shape != x.shape[:-1] or labels.dtype not in (torch.int32, torch.int64):
        raise SpecError(
            f"{name}: labels is {labels.dtype} {tuple(labels.shape)} beside {rows} of {tuple(x.shape)}; expected int32 "
            f"or int64 {tuple(x.shape[:-1])}"
        )


class ClassesHere(NamedTuple):
    """The classes of this process among those of all, and the options of the loss.

    Attributes:
      first: the first of its ``own`` classes; total: the number of all.
    """

    first: int
    own: int
    total: int
    group: dist.ProcessGroup | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    backend: str | None

    @classmethod
    def of(cls, name: str, count: int, group: Any, classes: Sequence[int] | None, *options: Any) -> ClassesHere:
        if not dist.is_available() or not dist.is_initialized():
            raise UnsupportedError(
                f"{name}: no processes are known; expected torch.distributed.init_process_group before, or call the "
                "op on one device"
            )
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise SpecError(f"{name}: this process is not in group; expected a group of which every caller is one")
        try:
            every = [count] * world if classes is None else [operator.index(n) for n in classes]
        except TypeError:
            every = []
        if len(every) != world or every[rank] != count or min(every) < 1:
            raise SpecError(
                f"{name}: classes is {classes if classes is not None else every} and process {rank} of {world} holds "
                f"{count}; expected the number of classes of each process, an integer from 1 up"
            )
        found = cls(sum(every[:rank]), count, sum(every), group, *options)
        row, label = torch.zeros(1, 1, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")
        _op("cross_entropy", found.backend).bind(row, label, **found.options)
        return found

    @property
    def options(self) -> dict[str, Any]:
        """The options of the op that are the loss's."""
        return {n: getattr(self, n) for n in ("ignore_index", "label_smoothing", "z_loss")}

    def found(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(3, rows) of logits (rows, n) of these classes: lse, lse_low, and what the label and the mean take off."""
        counted, wide = labels != self.ignore_index, _wide(logits)
        run = define(_op("cross_entropy", self.backend).spec)
        shown = torch.where(counted, 0, NONE)
        how = {"ignore_index": NONE, "wants": "lse,lse_low", "backend": self.backend or ""}
        _, lse, low = run(logits, shown, **how)
        here = labels - self.first
        is_here = counted & (here >= 0) & (here < self.own)
        at = logits.gather(-1, here.clamp(0, self.own - 1)[:, None])[:, 0].to(wide)
        taken = torch.where(is_here, (1 - self.label_smoothing) * at, 0)
        if self.label_smoothing:
            mean = logits.sum(-1, dtype=wide) / self.total
            taken = taken + torch.where(counted, self.label_smoothing * mean, 0)
        return torch.stack([lse, low, taken])

    def joined(self, own: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """loss, lse and lse_low of all classes, of what every process found.

        With M the largest lse of a part, loss = (M - taken) + log sum exp(lse_p - M + low_p): as exact near 0 as that
        of one device, which takes differences from the largest logit.
        """
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, own, group=self.group)
        lse, low, taken = torch.stack(every, 1)
        top = lse.amax(0)
        top = torch.where(top.isinf(), 0, top)
        log = ((lse - top) + low).exp().sum(0).log()
        total = top + log
        loss = log + (top - taken.sum(0))
        if self.z_loss:
            loss = loss + self.z_loss * total * total
        added = total - top
        rest = torch.where(total.isfinite(), (top - (total - added)) + (log - added), 0)
        counted = labels != self.ignore_index
        loss, total, rest = (torch.where(counted, x, 0) for x in (loss, total, rest))
        return loss, total, rest

    def gradient(self, logits: Tensor, labels: Tensor, saved: tuple[Tensor, ...], offset: int = 0) -> Tensor:
        """d_logits of logits from the class ``offset`` of these on; saved: lse, lse_low, d_loss."""
        lse, low, d_loss = saved
        options = {**self.options, "first_class": self.first + offset, "classes": self.total}
        d_logits: Tensor = _op("cross_entropy_vjp", self.backend)(logits, labels, lse, d_loss, low, **options)[0]
        return d_logits


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class CrossEntropy(torch.autograd.Function):
    """The loss of logits of some classes, and their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: ClassesHere) -> Tensor:
        flat = labels.reshape(-1)
        loss, lse, low = part.joined(part.found(logits.reshape(-1, part.own), flat), flat)
        ctx.part = part
        ctx.save_for_backward(logits, labels, lse, low)
        return loss.reshape(labels.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, lse, low = ctx.saved_tensors
        x, saved = logits.reshape(-1, ctx.part.own), (lse, low, d_loss.reshape(-1).contiguous())
        return ctx.part.gradient(x, labels.reshape(-1), saved).reshape(logits.shape), None, None


class LinearCrossEntropy(torch.autograd.Function):
    """The loss of the logits of some rows of weight, and its gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, part: ClassesHere, precision: str) -> Tensor:
        rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        matmul = _op("matmul", part.backend)
        own = [
            part.found(matmul(h, weight.mT, precision=precision), t)
            for h, t in zip(rows.split(CHUNK_ROWS), flat.split(CHUNK_ROWS), strict=True)
        ]
        loss, lse, low = part.joined(torch.cat(own, 1), flat)
        ctx.part, ctx.precision = part, precision
        ctx.save_for_backward(hidden, weight, labels, lse, low)
        return loss.reshape(labels.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse, low = ctx.saved_tensors
        rows, flat, wide = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), _wide(hidden)
        product = functools.partial(_op("matmul", ctx.part.backend), precision=ctx.precision)
        saved = lse, low, d_loss.reshape(-1).contiguous()
        d_hidden, d_weight = torch.zeros(rows.shape, dtype=wide, device=rows.device), torch.empty_like(weight)
        for first in range(0, len(weight), CHUNK_CLASSES):
            own = slice(first, first + CHUNK_CLASSES)
            b = ctx.part.gradient(product(rows, weight[own].mT), flat, saved, first)
            d_weight[own] = product(b.mT, rows)
            d_hidden += product(b, weight[own], out_dtype=wide if wide != rows.dtype else None)
        dist.all_reduce(d_hidden, group=ctx.part.group)
        return d_hidden.to(hidden.dtype).reshape(hidden.shape), d_weight, None, None, None
