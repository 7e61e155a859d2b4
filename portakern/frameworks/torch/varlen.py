"""The drop-in twin of PyTorch's ``varlen_attn``: on packed keys the varlen_attention op, on keys in pages the
paged_attention op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from portakern.errors import SpecError
from portakern.frameworks.torch.functions import kept_op

__all__ = ["varlen_attn"]

NAME = "varlen_attn"
IN_PAGES = (
    "q_starts is cu_seq_q, kv_lens is seqused_k, page_table is block_table, k_pages and v_pages are key and value"
)
IN_ONE_ARRAY = "q_starts is cu_seq_q, kv_starts is cu_seq_k, and where keys end that seqused_k counts"
ENDLESS = -1
"""What PyTorch writes for a side on which a window has no end."""


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
    *,
    scale: float | None = None,
    window_size: Sequence[int] = (ENDLESS, ENDLESS),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``torch.nn.attention.varlen.varlen_attn`` on the varlen_attention op, and with ``block_table`` on the
    paged_attention op.

    It takes the arguments of PyTorch's releases from 2.10 to 2.13, whichever is installed. A sequence has the same bits
    alone and in any batch. PyTorch's own runs on GPUs alone, in 16 bits.

    Args:
      query: (T_q, H_q, D), the queries of one sequence behind those of the other.
      key, value: (T_k, H_kv, D), likewise; with ``block_table`` (pages, page_size, H_kv, D), a cache of pages. The
        width of value may be another than D.
      cu_seq_q: (N + 1,), int32 or int64: where the queries of each of N sequences begin, and where the last one's end.
      cu_seq_k: (N + 1,), the same of keys. Not read beside ``block_table``, where it may be None.
      max_q, max_k: not read: kernels follow from what arrays have room for. Longer sequences are served whole.
      is_causal: as in PyTorch 2.10, where it was no keyword: the same as window_size=(-1, 0).
      return_aux: an ``AuxRequest``; with lse=True the log-sum-exp is returned too.
      scale: None is 1/sqrt(D).
      window_size: (left, right): query i of a sequence of q queries and k keys sees keys from i + k - q - left to
        i + k - q + right, aligned at the bottom right; -1 is no end. (-1, 0) is causal, (W, 0) a causal window of the
        W keys before a query's own, and that.
      enable_gqa: key and value may have fewer heads, which divide query's.
      seqused_k: (N,), int32 or int64: of a sequence the first so many keys count, and the mask is aligned at the last
        of them. In PyTorch it has no gradients; here it has, without ``block_table``.
      block_table: (N, pages_each), the pages of each sequence in the order of its keys; needs ``seqused_k``. Forward
        only, as in PyTorch.
      num_splits: not read: bits are those of 1, which is the number for which PyTorch says that they do not depend on
        the batch.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (T_q, H_q, D), and with return_aux.lse a pair with the log-sum-exp, (H_q, T_q) in float32, which is the shape that
      PyTorch's kernels return (its documentation says (T_q, H_q)). A query that sees no key is zeros, its lse -inf.
      The lse has a gradient, which PyTorch leaves out.

    Raises:
      SpecError: shapes that do not agree, arguments that exclude each other or need another, a window_size that is no
        pair of numbers from -1 up. UnsupportedError: a gradient through ``block_table``.
    """
    window = _window(window_size, is_causal)
    paged = block_table is not None
    _check_heads(query, key, value, enable_gqa, paged)
    _check_hints(num_splits, return_aux)
    want_lse = return_aux is not None and return_aux.lse
    arrays: tuple[Tensor, ...]
    options: dict[str, Any] = {"window": window, "scale": scale, "return_lse": want_lse}
    sequences = _sequences("cu_seq_q", cu_seq_q)
    if seqused_k is not None:
        _check_integers("seqused_k", seqused_k, (sequences,), cu_seq_q)
    if block_table is not None:
        if seqused_k is None:
            raise SpecError(
                f"{NAME}: block_table is given and seqused_k is None; expected the number of keys of each sequence, "
                f"shape {(sequences,)}: pass seqused_k"
            )
        _check_integers("block_table", block_table, (sequences, None), cu_seq_q)
        arrays, options["is_causal"] = (query, key, value, block_table, seqused_k, cu_seq_q), False
    else:
        if cu_seq_k is None:
            raise SpecError(
                f"{NAME}: cu_seq_k is None without block_table; expected the cumulative lengths of keys, shape "
                f"{(sequences + 1,)}"
            )
        _check_integers("cu_seq_k", cu_seq_k, (sequences + 1,), cu_seq_q)
        starts = (cu_seq_q, cu_seq_k) if seqused_k is None else _with_rests(cu_seq_q, cu_seq_k, seqused_k)
        arrays = query, key, value, *starts
    try:
        found = kept_op("paged_attention" if paged else "varlen_attention", backend)(*arrays, **options)
    except SpecError as e:
        raise SpecError(f"{NAME}: {e} ({IN_PAGES if paged else IN_ONE_ARRAY})") from e
    return (found.o, found.lse) if want_lse else found


def _window(size: Any, is_causal: bool) -> tuple[int | None, int | None] | None:
    """PyTorch's window as the op's; None: every key is seen."""
    pair = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else ()
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int | torch.SymInt) or n < -1 for n in pair):
        raise SpecError(
            f"{NAME}: window_size is {size!r}; expected (left, right), two integers, -1 for a side without an end: "
            "(-1, 0) for a causal mask"
        )
    left, right = (None if n == ENDLESS else n for n in pair)
    if is_causal:
        if (left, right) != (None, None):
            raise SpecError(
                f"{NAME}: is_causal=True and window_size={pair} exclude each other; expected one of them: pass "
                f"window_size=({pair[0]}, 0) alone"
            )
        right = 0
    return None if left is None and right is None else (left, right)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, paged: bool) -> None:
    """SpecError unless the axes of the arrays, and their heads, are as the call says."""
    form = "(pages, page_size, H_kv, D) beside block_table" if paged else "(T_k, H_kv, D) without block_table"
    for name, x, rank, axes in (
        ("query", query, 3, "(T_q, H_q, D)"), ("key", key, 3 + paged, form), ("value", value, 3 + paged, form),
    ):  # fmt: skip
        if x.dim() != rank:
            raise SpecError(f"{NAME}: {name} has shape {tuple(x.shape)}; expected {rank} axes, {axes}; reshape it")
    heads, kv_heads = query.shape[1], key.shape[-2]
    if key.shape[:-1] != value.shape[:-1]:
        raise SpecError(
            f"{NAME}: value has shape {tuple(value.shape)} and key {tuple(key.shape)}; expected all axes but the last "
            "alike"
        )
    if key.shape[-1] != query.shape[2]:
        raise SpecError(
            f"{NAME}: key has heads of {key.shape[-1]} elements and query of {query.shape[2]}; expected as many"
        )
    if heads != kv_heads and not enable_gqa:
        raise SpecError(
            f"{NAME}: query has {heads} heads and key {kv_heads}; expected as many: pass enable_gqa=True for fewer "
            "heads of keys"
        )
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise SpecError(f"{NAME}: query has {heads} heads and key {kv_heads}; expected key's to divide query's")


def _check_hints(num_splits: Any, return_aux: Any) -> None:
    """SpecError unless what does not change a result is what PyTorch takes."""
    whole = isinstance(num_splits, int) and not isinstance(num_splits, bool)
    if num_splits is not None and not (whole and num_splits >= 0):
        raise SpecError(
            f"{NAME}: num_splits is {num_splits!r}; expected None or a number of splits: pass None, or 1, for results "
            "that do not depend on the batch"
        )
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise SpecError(
            f"{NAME}: return_aux is {return_aux!r}; expected None or torch.nn.attention.varlen.AuxRequest(lse=True)"
        )


def _sequences(name: str, starts: Tensor) -> int:
    """How many sequences cumulative lengths are of."""
    _check_integers(name, starts, (None,), starts)
    if not len(starts):
        raise SpecError(f"{NAME}: {name} is empty; expected the starts of N sequences and the end of the last, N + 1")
    return len(starts) - 1


def _check_integers(name: str, x: Any, shape: tuple[int | None, ...], beside: Tensor) -> None:
    """SpecError unless an argument is a tensor of integers of a shape, None for any extent, where ``beside`` is."""
    if not isinstance(x, Tensor):
        raise SpecError(f"{NAME}: {name} is a {type(x).__name__}; expected a tensor of int32 or int64")
    if x.dtype not in (torch.int32, torch.int64):
        raise SpecError(f"{NAME}: {name} is {x.dtype}; expected int32 or int64: cast it")
    if x.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape, strict=True)):
        expected = ", ".join("any" if n is None else str(n) for n in shape)
        raise SpecError(
            f"{NAME}: {name} has shape {tuple(x.shape)}; expected ({expected}{',' * (len(shape) == 1)}), as many "
            "sequences as cu_seq_q says"
        )
    if x.device != beside.device:
        raise SpecError(f"{NAME}: {name} is on {x.device}; expected {beside.device}, where cu_seq_q is: move it")


def _with_rests(cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor) -> tuple[Tensor, Tensor]:
    """Starts of the sequences with the keys that count, and behind each one more, which has its other keys and no
    query."""
    starts = cu_seq_k[:-1]
    kv_starts = torch.cat([torch.stack([starts, starts + seqused_k], 1).flatten(), cu_seq_k[-1:]])
    return torch.cat([cu_seq_q[:1], cu_seq_q[1:].repeat_interleave(2)]), kv_starts
