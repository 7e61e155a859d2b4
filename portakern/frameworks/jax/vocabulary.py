"""Losses of classes that the devices of a mesh hold in parts: logits never leave the device that has them, and three
numbers a row are what others need of it.

Inside ``jax.shard_map`` an axis of the mesh is named. Arrays with Explicit axes say themselves how they lie, and the
function makes that call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from portakern.api import op
from portakern.core import registry
from portakern.core.dispatch import Choice
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.jax.partitioned import explicit_axes, explicit_mesh, spec_axes
from portakern.frameworks.jax.tracing import axes_of, to_varying, trace

__all__ = ["vocabulary_parallel_cross_entropy", "vocabulary_parallel_linear_cross_entropy"]

NONE = -1
"""The label of a row that is ignored, where those of others are 0 or more."""
CHUNK_ROWS, CHUNK_CLASSES = 2048, 4096
"""Of a linear layer: the rows whose logits are in memory at a time in the forward pass, and the classes in the backward
pass."""


def vocabulary_parallel_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    backend: str | None = None,
) -> jax.Array:
    """The op ``cross_entropy`` of logits whose classes the devices of a mesh hold in equal parts, with its gradient.

    Each device takes the log-sum-exp of its own classes. Of these (to twice float32's precision) and of the label's
    logit the devices take the maximum and the sums, three numbers a row, and each has the loss. The gradient by a
    device's logits needs no other device.

    The source is Shoeybi et al. 2019, "Megatron-LM", section 3.

    Args:
      logits: (..., n). Inside ``jax.shard_map`` with ``axis_name`` the n classes of this device, behind those of the
        device before; else all, cut along the last axis over Explicit axes of a mesh.
      labels: (...), int32 or int64, from 0 to the number of all classes - 1, the same on all devices that share rows.
      axis_name: the axis of the mesh along which classes lie, or several; None: as the type of logits says.
      ignore_index, label_smoothing, z_loss: as in the op.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (...), float32 (float64 for float64), the same on all devices along the axis.

    Raises:
      SpecError: shapes that do not agree. UnsupportedError: logits that are not cut along their classes.
    """
    name = "vocabulary_parallel_cross_entropy"
    _check(name, labels, logits=logits)
    how = functools.partial(LossOptions.of, name, ignore_index, label_smoothing, z_loss, "ieee", backend)
    if axis_name is None:
        over = _explicit(name, "logits", logits, logits.ndim - 1)
        rows = _rows(logits, over)
        return _mapped(
            lambda x, t: _cross_entropy(how(over, x, "logits"), x, t),
            logits,
            rows,
            (logits, (*rows, over)),
            (labels, rows),
        )
    return _cross_entropy(how(axis_name, logits, "logits"), logits, labels)


def vocabulary_parallel_linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    axis_name: str | tuple[str, ...] | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    precision: str = "ieee",
    backend: str | None = None,
) -> jax.Array:
    """The op ``linear_cross_entropy`` of a weight whose rows, the classes, the devices of a mesh hold in equal parts,
    with its gradients.

    As :func:`vocabulary_parallel_cross_entropy` of the logits hidden weight^T, of which a device has those of its own
    classes, of some rows or classes at a time, and takes them again in the backward pass. The gradient of hidden is the
    sum of what all devices find, added in float32 and rounded once; that of weight needs no other device along the
    axis, and is added so over the axes that cut rows.

    Args:
      hidden: (..., d), the same on all devices along the axis; weight: (n, d), hidden's dtype, inside ``jax.shard_map``
        with ``axis_name`` the rows of this device's classes, else all, cut over Explicit axes of a mesh; labels: (...),
        int32 or int64.
      precision: of products of float32, as in the op. The rest: as in :func:`vocabulary_parallel_cross_entropy`.

    Returns:
      (...), float32 (float64 for float64), the same on all devices along the axis.

    Raises:
      SpecError: shapes or dtypes that do not agree. UnsupportedError: a weight that is not cut along its classes, or
        rows of hidden that are another device's.
    """
    name = "vocabulary_parallel_linear_cross_entropy"
    _check(name, labels, hidden=hidden, weight=weight)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype:
        raise SpecError(
            f"{name}: weight is {weight.dtype} {weight.shape} beside hidden, {hidden.dtype} {hidden.shape}; expected "
            f"(classes, {hidden.shape[-1]}) of hidden's dtype"
        )
    how = functools.partial(LossOptions.of, name, ignore_index, label_smoothing, z_loss, precision, backend)
    if axis_name is None:
        over = _explicit(name, "weight", weight, 0)
        rows = _rows(hidden, over)
        return _mapped(
            lambda h, w, t: _linear_cross_entropy(how(over, w, "weight"), h, w, t), weight, rows,
            (hidden, (*rows, ())), (weight, (over, ())), (labels, rows),
        )  # fmt: skip
    part = how(axis_name, weight, "weight")
    if axes_of(jax.typeof(hidden)) & {*part.over}:
        raise UnsupportedError(
            f"{name}: hidden varies along {axis_name!r}, the axis of the classes; expected the same rows on all "
            "devices along it: leave that axis out of its in_specs"
        )
    return _linear_cross_entropy(part, hidden, weight, labels)


# -------------------------------------------------------------------------------------------------------- Explicit axes
def _explicit(name: str, argument: str, x: Any, axis: int) -> tuple[str, ...]:
    """The axes of the mesh over which an axis of an array is cut, by its type."""
    mesh = explicit_mesh([jax.typeof(x)])
    over = () if mesh is None else spec_axes(jax.typeof(x).sharding.spec, x.ndim, [*explicit_axes(mesh)])[axis]
    if not over:
        raise UnsupportedError(
            f"{name}: axis_name is None and {argument} is not cut along its classes over Explicit axes of a mesh; call "
            "it inside jax.shard_map with the name of the axis, or place the array so, with jax.sharding.reshard"
        )
    return over


def _rows(x: Any, over: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Over which axes of the mesh rows are cut, but for those of the classes."""
    mesh = explicit_mesh([jax.typeof(x)])
    axes = ((),) * x.ndim if mesh is None else spec_axes(jax.typeof(x).sharding.spec, x.ndim, [*explicit_axes(mesh)])
    return tuple(tuple(a for a in each if a not in over) for each in axes[:-1])


def _mapped(function: Callable[..., Any], cut: Any, rows: Any, *placed: tuple[Any, Any]) -> jax.Array:
    """``function`` of what each device holds of arrays that are placed so, on the mesh of one that is ``cut``."""
    mesh = explicit_mesh([jax.typeof(cut)])
    specs = [PartitionSpec(*axes) for _, axes in placed]
    arrays = [jax.sharding.reshard(x, NamedSharding(mesh, s)) for (x, _), s in zip(placed, specs, strict=True)]
    call = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(*rows),
        axis_names={*explicit_axes(mesh)},
    )
    found: jax.Array = call(*arrays)
    return found


# ----------------------------------------------------------------------------------------------------------- one device
def _check(name: str, labels: Any, **arrays: Any) -> None:
    rows, x = next(iter(arrays.items()))
    if labels.shape != x.shape[:-1] or labels.dtype not in (jnp.int32, jnp.int64):
        raise SpecError(
            f"{name}: labels is {labels.dtype} {labels.shape} beside {rows} of {x.shape}; expected int32 or int64 "
            f"{x.shape[:-1]}"
        )


class LossOptions(NamedTuple):
    """The devices of a call, and the options of the loss.

    Attributes:
      over: the axes of the mesh along which classes lie; own: the classes of each device; total: of all.
    """

    over: tuple[str, ...]
    own: int
    total: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    precision: str
    backend: str | None

    @classmethod
    def of(
        cls, name: str, ignore_index: int, label_smoothing: float, z_loss: float, precision: str, backend: str | None,
        axis_name: Any, x: Any, argument: str,
    ) -> LossOptions:  # fmt: skip
        over = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        if not {*over} <= axes_of(jax.typeof(x)):
            raise UnsupportedError(
                f"{name}: axis_name is {axis_name!r}, along which {argument} does not vary; expected an axis of an "
                "enclosing jax.shard_map (check_vma=True) whose in_specs cut the classes over it"
            )
        own = x.shape[-1] if argument == "logits" else x.shape[0]
        found = cls(
            over, own, own * math.prod(lax.axis_size(a) for a in over), ignore_index, label_smoothing, z_loss,
            precision, backend,
        )  # fmt: skip
        op("cross_entropy", backend=backend).bind(jnp.zeros((1, 1)), jnp.zeros(1, jnp.int32), **found.options)
        return found

    @property
    def options(self) -> dict[str, Any]:
        """The options of the op that are the loss's."""
        return {n: getattr(self, n) for n in ("ignore_index", "label_smoothing", "z_loss")}

    @property
    def first(self) -> Any:
        """The first class of this device."""
        return lax.axis_index(self.over) * self.own

    def found(self, logits: Any, labels: Any) -> tuple[Any, Any, Any]:
        """Of logits (rows, n) of these classes: lse, lse_low, and what the label and the mean take off."""
        counted, wide = labels != self.ignore_index, _wide(logits)
        of = op("cross_entropy", backend=self.backend)
        call = of.bind(logits, jnp.where(counted, 0, NONE), ignore_index=NONE).replace(wants=("lse", "lse_low"))
        named = None if self.backend is None else registry.backend(self.backend)
        _, lse, low = trace(call, Choice.from_names(of.spec, named, None, {}))
        here = labels - self.first
        is_here = counted & (here >= 0) & (here < self.own)
        at = jnp.take_along_axis(logits, jnp.clip(here, 0, self.own - 1)[:, None], -1)[:, 0].astype(wide)
        taken = jnp.where(is_here, (1 - self.label_smoothing) * at, 0)
        if self.label_smoothing:
            taken = taken + jnp.where(counted, self.label_smoothing * logits.astype(wide).sum(-1) / self.total, 0)
        return lse, low, taken

    def joined(self, lse: Any, low: Any, taken: Any, labels: Any) -> tuple[Any, Any, Any]:
        """loss, lse and lse_low of all classes, of what each device found.

        With M the largest lse of a part, loss = (M - taken) + log sum exp(lse_p - M + low_p): as exact near 0 as that
        of one device, which takes differences from the largest logit.
        """
        top = lax.pmax(lse, self.over)
        top = jnp.where(jnp.isinf(top), 0, top)
        log = jnp.log(lax.psum(jnp.exp((lse - top) + low), self.over))
        total = top + log
        loss = log + (top - lax.psum(taken, self.over))
        if self.z_loss:
            loss = loss + self.z_loss * total * total
        added = total - top
        rest = jnp.where(jnp.isfinite(total), (top - (total - added)) + (log - added), 0)
        counted = labels != self.ignore_index
        return tuple(jnp.where(counted, x, 0) for x in (loss, total, rest))

    def gradient(self, logits: Any, labels: Any, saved: tuple[Any, ...], offset: Any = 0) -> Any:
        """d_logits of logits from the class ``offset`` of these on; saved: lse, lse_low, d_loss.

        Where a device's classes begin is no constant of its program: labels count from there, and one that lies
        elsewhere is any class that is not among these."""
        lse, low, d_loss = saved
        own, here = logits.shape[-1], labels - self.first - offset
        shown = jnp.where((here >= 0) & (here < own), here, own if own < self.total else NONE)
        shown = jnp.where(labels == self.ignore_index, NONE, shown)
        options = {**self.options, "ignore_index": NONE, "classes": self.total}
        return op("cross_entropy_vjp", backend=self.backend)(logits, shown, lse, d_loss, low, **options)[0]


def _wide(x: Any) -> Any:
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _like(wide: Any, primal: Any) -> Any:
    """The gradient of an array, from that of its copies on the devices that share it: their sum, rounded once."""
    mine, theirs = axes_of(jax.typeof(primal)), axes_of(jax.typeof(wide))
    shared = tuple(sorted(theirs - mine))
    found = (lax.psum(wide, shared) if shared else wide).astype(primal.dtype)
    lacking = tuple(sorted(mine - theirs))
    return to_varying(found, lacking) if lacking else found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(part: LossOptions, logits: Any, labels: Any) -> Any:
    return _loss(part, logits, labels)[0]


def _loss(part: LossOptions, logits: Any, labels: Any) -> tuple[Any, tuple[Any, ...]]:
    flat = labels.reshape(-1)
    loss, lse, low = part.joined(*part.found(logits.reshape(-1, part.own), flat), flat)
    return loss.reshape(labels.shape), (logits, labels, lse, low)


def _loss_gradient(part: LossOptions, saved: tuple[Any, ...], d_loss: Any) -> tuple[Any, Any]:
    logits, labels, lse, low = saved
    d_logits = part.gradient(logits.reshape(-1, part.own), labels.reshape(-1), (lse, low, d_loss.reshape(-1)))
    return _like(d_logits.reshape(logits.shape), logits), None


_cross_entropy.defvjp(_loss, _loss_gradient)


def _in_chunks(function: Callable[..., Any], size: int, *arrays: Any) -> Any:
    """``function`` of so many rows of arrays at a time, its results behind each other."""
    count = arrays[0].shape[0]
    whole = count // size
    if whole < 2 and count <= size:
        return function(*arrays)
    parts = [x[: whole * size].reshape(whole, size, *x.shape[1:]) for x in arrays]
    found = jax.tree.map(
        lambda y: y.reshape(whole * size, *y.shape[2:]), lax.map(lambda part: function(*part), tuple(parts))
    )
    if whole * size == count:
        return found
    rest = function(*(x[whole * size :] for x in arrays))
    return jax.tree.map(lambda y, z: jnp.concatenate([y, z]), found, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_cross_entropy(part: LossOptions, hidden: Any, weight: Any, labels: Any) -> Any:
    return _linear_loss(part, hidden, weight, labels)[0]


def _linear_loss(part: LossOptions, hidden: Any, weight: Any, labels: Any) -> tuple[Any, tuple[Any, ...]]:
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    product = functools.partial(op("matmul", backend=part.backend), precision=part.precision)
    own, low, taken = _in_chunks(lambda h, t: part.found(product(h, weight.T), t), CHUNK_ROWS, rows, flat)
    loss, lse, low = part.joined(own, low, taken, flat)
    return loss.reshape(labels.shape), (hidden, weight, labels, lse, low)


def _linear_gradient(part: LossOptions, saved: tuple[Any, ...], d_loss: Any) -> tuple[Any, Any, Any]:
    hidden, weight, labels, lse, low = saved
    rows, flat, wide = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), _wide(hidden)
    product = functools.partial(op("matmul", backend=part.backend), precision=part.precision)
    of_rows, stored = (lse, low, d_loss.reshape(-1)), None if wide == hidden.dtype else wide
    alone = axes_of(jax.typeof(lse)) <= axes_of(jax.typeof(weight))  # no other device has rows for these classes

    def piece(w: Any, offset: Any) -> tuple[Any, Any]:
        b = part.gradient(product(rows, w.T), flat, of_rows, offset)
        return product(b, w, out_dtype=stored), product(b.T, rows, out_dtype=None if alone else stored)

    length, d_weight = min(CHUNK_CLASSES, part.own), []
    whole = part.own // length
    d_hidden, first = piece(weight[:length], 0)
    d_weight.append(first)
    if whole > 1:
        chunks = weight[length : whole * length].reshape(whole - 1, length, weight.shape[1])

        def step(total: Any, chunk: tuple[Any, Any]) -> tuple[Any, Any]:
            more, of_weight = piece(*chunk)
            return total + more, of_weight

        d_hidden, others = lax.scan(step, d_hidden, (chunks, length * jnp.arange(1, whole)))
        d_weight.append(others.reshape(-1, weight.shape[1]))
    if whole * length < part.own:
        more, last = piece(weight[whole * length :], whole * length)
        d_hidden = d_hidden + more
        d_weight.append(last)
    return _like(d_hidden.reshape(hidden.shape), hidden), _like(jnp.concatenate(d_weight), weight), None


_linear_cross_entropy.defvjp(_linear_loss, _linear_gradient)
