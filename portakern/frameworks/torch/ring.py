"""Attention over a sequence that is cut among the processes of a group: keys and values travel around their ring while
each process attends to those that it has."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from portakern.api import Op, op
from portakern.core.ring import Layout, Pair, Visible, check_shapes, checked_lengths, chunks, pairs, steps, zigzag_order
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.casting import lowered

__all__ = ["across_devices", "from_zigzag", "ring_attention", "ring_of_devices", "to_zigzag"]

NAME = "ring_attention"
NARROW = (torch.float16, torch.bfloat16)
"""Dtypes in which partial results would be rounded before they are added."""


@functools.cache
def _op(name: str, backend: str | None) -> Op:
    return op(name, backend=backend)


def to_zigzag(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """A full sequence in the order in which ``count`` processes hold it: of the result's ``count`` equal parts along
    ``dim`` part r is what process r passes to :func:`ring_attention`. A copy.

    Process r holds chunks r and 2 count - 1 - r of 2 count equal chunks, so that all have equal work under a causal
    mask. Labels and positions (``torch.arange``) are cut in the same way.

    Args:
      x: (..., length, ...), of which ``dim`` is the sequence; count: the processes.

    Raises:
      SpecError: a length that 2 count does not divide.
    """
    order = torch.tensor(zigzag_order(x.shape[dim], count), device=x.device)
    return x.index_select(dim, order)


def from_zigzag(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """The sequence whose order :func:`to_zigzag` changed, of all parts one behind the other along ``dim``.

    Raises:
      SpecError: a length that 2 count does not divide.
    """
    order = torch.tensor(zigzag_order(x.shape[dim], count), device=x.device)
    return x.index_select(dim, order.argsort())


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    precision: str = "ieee",
    order: str = "zigzag",
    lengths: Sequence[int] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the queries of this process to the keys of all processes of a group, with gradients.

    Each process passes what it holds of one sequence, and gets the rows of its own queries. Keys and values go around
    the ring of processes, and the next ones are under way while the attention op runs on those at hand. Partial
    results are float32, merged by their log-sum-exp, and rounded once (float64 for float64). In the backward pass the
    gradients of keys and values travel with them, in float32, and each process computes the pairs that it computed in
    the forward pass, given the full o and log-sum-exp. The order of sums is fixed: two runs have the same bits. Where
    a window leaves pairs of processes without a pair of tokens, the ring stops early.

    The sources are Liu, Zaharia, Abbeel 2023, "Ring attention with blockwise transformers", and the zigzag order of
    Zhu 2024, "ring-flash-attention".

    Args:
      query: (batch, tokens, heads, d), in the op's layout, which is not that of scaled_dot_product_attention; key:
        (batch, tokens, kv_heads, d); value: (batch, tokens, kv_heads, dv). kv_heads divides heads. All of the same
        tokens. Float16, bfloat16, float32 or float64.
      group: the processes, of any backend that sends and receives tensors of this device; None: all. Every process of
        it makes the call, with the same options, batch, heads and widths, and where one runs the backward pass all do:
        a process whose rows count in no loss adds ``0 * o.sum()`` to its own. Of a device mesh, ``mesh.get_group()``.
      is_causal: a token sees those before it in the sequence, and itself.
      window: (left, right): a token sees those from left before it to right behind it, None on a side without an end.
      scale, softcap, precision: as in the op ``attention``.
      order: "zigzag": processes hold what :func:`to_zigzag` gives them; "contiguous": process r holds the tokens behind
        those of process r - 1.
      lengths: how many tokens each process holds, in "contiguous" order; None: as many as this one.
      return_lse: whether the log-sum-exp comes with the result.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (batch, tokens, heads, dv), query's dtype; with return_lse a pair with lse, (batch, heads, tokens), float32
      (float64 for float64). Both have gradients, of first order.

    Raises:
      SpecError: shapes that do not agree, an unknown order, lengths that are not those of the call, or that are odd or
        differ in zigzag. UnsupportedError: DTensors, or processes without torch.distributed.
    """
    query, key, value = _checked(query, key, value, group)
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = checked_lengths(lengths, query.shape[1], count)
    if sizes[rank] != query.shape[1]:
        raise SpecError(
            f"{NAME}: lengths is {sizes} and process {rank} of {count} holds {query.shape[1]} tokens; expected the "
            "tokens of each process"
        )
    mask = {"is_causal": is_causal, "window": window}
    options = {"scale": scale, "softcap": softcap, "precision": precision}
    # all processes refuse what the op refuses, those too that make no call
    _op("attention", backend).bind(query, key, value, **mask, **options)
    visible = Visible.of(is_causal, window)
    ring = RingCall(group, rank, chunks(order, sizes), visible, mask, options, backend)
    o, lse = Attention.apply(query, key, value, ring)
    return (o, lse) if return_lse else o


def _checked(query: Tensor, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as torch.autocast hands them on, of which the shapes and dtypes agree."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise SpecError(f"{NAME}: {name} is a {type(x).__name__}; expected a torch.Tensor")
        if hasattr(x, "placements"):
            raise UnsupportedError(
                f"{NAME}: {name} is a DTensor; expected what this process holds: pass {name}.to_local(), and the "
                "mesh's get_group() as group"
            )
    check_shapes(query=tuple(query.shape), key=tuple(key.shape), value=tuple(value.shape))
    query, key, value = lowered(query), lowered(key), lowered(value)
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype or x.device != query.device:
            raise SpecError(
                f"{NAME}: {name} is {x.dtype} on {x.device}; expected {query.dtype} on {query.device}, as query is"
            )
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError(
            f"{NAME}: no processes are known; expected torch.distributed.init_process_group before, or call "
            "portakern.op('attention') on one device"
        )
    if dist.get_rank(group) < 0:
        raise SpecError(f"{NAME}: this process is not in group; expected a group of which every caller is one")
    return query, key, value


class RingCall(NamedTuple):
    """The processes of a call, and the options of its parts.

    Attributes:
      group; rank: of this process in it. layout: of each process the chunks of the sequence that it holds. visible:
        the keys that a query sees, as the options ``mask`` say it. options: of all calls.
    """

    group: dist.ProcessGroup | None
    rank: int
    layout: Layout
    visible: Visible
    mask: Mapping[str, Any]
    options: Mapping[str, Any]
    backend: str | None

    @property
    def steps(self) -> int:
        return steps(self.layout, self.visible)

    def source(self, step: int) -> int:
        """The process whose keys are here at a step."""
        return (self.rank - step) % len(self.layout)

    def calls(self, step: int) -> tuple[Pair, ...]:
        return pairs(self.layout, self.visible, self.rank, self.source(step))

    def sent(self, far: int, tensors: Sequence[Tensor], source: int) -> Transfer:
        """Send tensors to the process that is ``far`` behind this one on the ring, and receive such as belong to
        ``source`` from the one as far before it: all that has elements."""
        count = len(self.layout)
        tokens = sum(p.end - p.first for p in self.layout[source])
        found = [t.new_empty(t.shape[0], tokens, *t.shape[2:]) for t in tensors]
        to, come = (self._peer((self.rank + by) % count) for by in (far, -far))
        sends = [dist.P2POp(dist.isend, t, to, self.group) for t in tensors if t.numel()]
        receives = [dist.P2POp(dist.irecv, t, come, self.group) for t in found if t.numel()]
        posted = sends + receives
        return Transfer(found, list(tensors), dist.batch_isend_irecv(posted) if posted else [])

    def _peer(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class Transfer(NamedTuple):
    """Tensors under way: those that come, those that leave, and what to wait for before either is touched."""

    found: list[Tensor]
    sent: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.found


class Attention(torch.autograd.Function):
    """o and lse of the queries of a process; its backward pass is the ring again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingCall) -> tuple[Tensor, Tensor]:
        o, lse = _forward(ring, q, k.contiguous(), v.contiguous())
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        d_o = torch.zeros_like(o) if d_o is None else d_o
        return *_backward(ctx.ring, q, k.contiguous(), v.contiguous(), (o, lse, d_o, d_lse)), None


def _forward(ring: RingCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    attention, merge = _op("attention", ring.backend), _op("merge_states", ring.backend)
    wide = torch.float32 if q.dtype in NARROW else q.dtype
    o = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
    untouched = True
    for step in range(ring.steps):
        last = step == ring.steps - 1
        coming = None if last else ring.sent(1, (k, v), ring.source(step + 1))
        for pair in ring.calls(step):
            rows, keys = slice(pair.q_first, pair.q_end), slice(pair.kv_first, pair.kv_end)
            found = attention(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                return_lse=True,
                out_dtype=wide if q.dtype != wide else None,
                **pair.options(ring.options, ring.mask),
            )
            if not untouched:
                found = merge(o[:, rows], lse[:, :, rows], *found)
            if rows == slice(0, q.shape[1]):
                o, lse, untouched = found[0], found[1], False
            else:
                o[:, rows], lse[:, :, rows] = found
                untouched = False
        if coming is not None:
            k, v = coming.wait()
    return o.to(q.dtype), lse


def _backward(
    ring: RingCall, q: Tensor, k: Tensor, v: Tensor, given: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, Tensor]:
    """d_q, d_k, d_v. What a process adds to d_k and d_v follows the keys by a step: while it computes, the sums of
    those before it come."""
    vjp, (o, lse, d_o, d_lse) = _op("attention_vjp", ring.backend), given
    wide = torch.float32 if q.dtype in NARROW else q.dtype
    d_q = torch.zeros(q.shape, dtype=wide, device=q.device)
    sums: list[Tensor] = []
    for step in range(ring.steps):
        last = step == ring.steps - 1
        summed = ring.sent(1, sums, ring.source(step)) if sums else None
        coming = None if last else ring.sent(1, (k, v), ring.source(step + 1))
        own = [torch.zeros(x.shape, dtype=wide, device=q.device) for x in (k, v)]
        for pair in ring.calls(step):
            rows, keys = slice(pair.q_first, pair.q_end), slice(pair.kv_first, pair.kv_end)
            by_q, by_k, by_v = vjp(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                o[:, rows],
                lse[:, :, rows],
                d_o[:, rows],
                d_lse=None if d_lse is None else d_lse[:, :, rows],
                wants=("d_q", "d_k", "d_v"),
                gradient_dtype=wide if q.dtype != wide else None,
                **pair.options(ring.options, ring.mask),
            )[:3]
            d_q[:, rows] += by_q
            own[0][:, keys] += by_k
            own[1][:, keys] += by_v
        sums = own if summed is None else [a.add_(b) for a, b in zip(summed.wait(), own, strict=True)]
        if coming is not None:
            k, v = coming.wait()
    if ring.steps > 1:  # home, over the rest of the ring
        sums = ring.sent(1 - ring.steps, sums, ring.rank).wait()
    d_k, d_v = sums
    return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype)


# ---------------------------------------------------------------------------------------------------- context_parallel
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"
OLDER = "torch.distributed.tensor.experimental._attention"


def across_devices(query: Tensor) -> bool:
    """Whether PyTorch's context_parallel made a tensor of the chunks of a sequence that devices hold.

    Raises:
      UnsupportedError: it did not, where PyTorch's function is replaced by one that does: a twin that is called past
        that would see the keys of one device.
    """
    module = _context_parallel()
    if hasattr(query, "placements"):
        dispatcher = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
        served = getattr(dispatcher, "_custom_op_handlers", {})
        return module is not None and torch.ops.aten._scaled_dot_product_flash_attention.default in served
    if torch.nn.functional.scaled_dot_product_attention in getattr(module, "_replaced_functions", ()):
        raise UnsupportedError(
            "scaled_dot_product_attention under context_parallel is given what one device holds; expected a call that "
            "reaches the others: call torch.nn.functional.scaled_dot_product_attention inside portakern.torch.swapped"
            "(), or portakern.torch.ring_attention"
        )
    return False


def _context_parallel() -> Any:
    """PyTorch's module of context_parallel, if somebody imported it. It has no public word for what follows."""
    return sys.modules.get(CONTEXT_PARALLEL) or sys.modules.get(OLDER)


def ring_of_devices(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    backend: str | None,
) -> Any:
    """scaled_dot_product_attention of DTensors under context_parallel: (batch, heads, length, d), cut along the
    length in the order that context_parallel gave its buffers."""
    name, mesh = "scaled_dot_product_attention under context_parallel", query.device_mesh
    if attn_mask is not None:
        raise UnsupportedError(
            f"{name}: attn_mask is a {type(attn_mask).__name__}; expected None: keys of other devices have no mask "
            "here; pass is_causal, or call portakern.torch.ring_attention, which has windows"
        )
    if query.dim() != 4:
        raise SpecError(f"{name}: query has shape {tuple(query.shape)}; expected (batch, heads, length, d)")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise SpecError(
            f"{name}: query has {query.shape[1]} heads and key {key.shape[1]}; expected as many: pass enable_gqa=True"
        )
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if mesh.ndim != 1 or not getattr(x, "placements", (None,))[0] == _cut_along(2):
            raise UnsupportedError(
                f"{name}: {argument} is placed {getattr(x, 'placements', 'on one device')}; expected (Shard(2),) on a "
                "mesh of one axis, as context_parallel places it"
            )
    q, k, v = (x.to_local().transpose(1, 2) for x in (query, key, value))
    order = "zigzag" if _context_parallel()._cp_options.enable_load_balance else "contiguous"
    o: Any = ring_attention(q, k, v, mesh.get_group(), is_causal=is_causal, scale=scale, order=order, backend=backend)
    return type(query).from_local(o.transpose(1, 2), mesh, query.placements, run_check=False)


def _cut_along(axis: int) -> Any:
    return sys.modules["torch.distributed.tensor"].Shard(axis)
