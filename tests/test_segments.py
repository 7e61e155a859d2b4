"""Attention of packed sequences: tiles outside of the ranges of segment ids are not visited, and no bit tells."""

from __future__ import annotations

import itertools
import platform
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import portakern as pk
from portakern import testing

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton.gpu import attention as forward  # noqa: E402
from portakern.backends.triton.gpu import attention_vjp as backward  # noqa: E402
from portakern.backends.triton.lib import segments  # noqa: E402
from portakern.core import registry, targets  # noqa: E402
from portakern.core.binder import unchecked  # noqa: E402
from tests.packing import IDS, ids_of, packed_arrays  # noqa: E402

DRAWN_IDS = st.lists(st.integers(-3, 3), min_size=1, max_size=300)


def ranges_of(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    call = unchecked(registry.find_spec("attention"), *(torch.zeros(1, 1, 1, 1) for _ in range(3)))
    found = segments.segment_ranges(call.replace(interpret=True), torch.tensor(own), torch.tensor(other))
    return found.numpy()


@given(own=DRAWN_IDS, other=DRAWN_IDS, sort=st.booleans(), wide=st.booleans())
def test_a_range_ends_at_the_first_and_the_last_position_of_its_id(own, other, sort, wide):
    dtype = np.int64 if wide else np.int32
    ids, met = (np.array(sorted(x) if sort else x, dtype)[None] + (dtype(2**40) if wide else 0) for x in (own, other))
    for id_, (lo, hi) in zip(ids[0], ranges_of(ids, met)[0], strict=True):
        at = np.flatnonzero(met[0] == id_)
        assert (lo, hi) == ((at[0], at[-1] + 1) if len(at) else (met.shape[1], 0))


def test_ranges_of_more_positions_than_are_read_at_once_and_of_several_batch_entries():
    rng = np.random.default_rng(0)
    own, other = rng.integers(0, 40, (3, 70)), np.sort(rng.integers(0, 40, (3, 9000)), 1)[:, ::-1].copy()
    found = ranges_of(own, other)
    for b, i in itertools.product(range(3), range(70)):
        at = np.flatnonzero(other[b] == own[b, i])
        assert tuple(found[b, i]) == (at[0], at[-1] + 1)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (90, 20)], ids=str)
@pytest.mark.parametrize("kind", ["documents", "shuffled", "scattered"])
@pytest.mark.parametrize("rows", [64, 128])
def test_tiles_that_see_most_come_first(kind, window, rows):
    batch, q_len, kv_len = 2, 400, 450
    ids = ids_of(kind, batch, q_len, kv_len)
    own, other = (torch.tensor(ids[f"{side}_segment_ids"]) for side in ("q", "kv"))
    arrays = (torch.zeros(batch, n, heads, 1) for n, heads in ((q_len, 2), (kv_len, 2), (kv_len, 2)))
    call = unchecked(registry.find_spec("attention"), *arrays).replace(interpret=True)
    ranges, summaries, own_firsts, firsts = segments.segment_tables(call, own, other)
    assert torch.equal(own_firsts, ranges[:, :, 0])
    assert all(firsts[b, j] == (other[b] == other[b, j]).int().argmax() for b in range(batch) for j in range(kv_len))
    order = segments.longest_first(call, summaries, rows, window).tolist()
    tiles = -(-q_len // rows)
    assert sorted(order) == list(range(batch * tiles))
    seen = []
    for entry in order:
        first = entry % tiles * rows
        mine = ranges[entry // tiles, first : first + rows]
        start, end, place = int(mine[:, 0].min()), int(mine[:, 1].max()), first + kv_len - q_len
        start = start if window[0] is None else max(start, place - window[0])
        end = end if window[1] is None else min(end, place + rows + window[1])
        seen.append((-max(end - start, 0), entry))
    assert seen == sorted(seen)


CASES = {
    "documents": ((2, 150, 2, 150), "documents", {"is_causal": True}),
    "documents, more keys than queries": ((1, 90, 1, 300), "documents", {}),
    "documents in a window": ((1, 200, 1, 200), "documents", {"window": (70, 10), "softcap": 3.0}),
    "any order": ((1, 130, 2, 170), "shuffled", {"is_causal": True}),
    "nobody's": ((1, 70, 1, 200), "scattered", {}),
    "few queries": ((2, 3, 2, 400), "documents", {}),
}


def arrays_of(shape: tuple[int, ...], kind: str, bias: bool) -> dict[str, Any]:
    """PyTorch's arrays with two key heads, float32 and int64."""
    batch, q_len, group, kv_len = shape
    arrays = packed_arrays(kind, batch, q_len, 2, group, kv_len, (1, 1, q_len, kv_len) if bias else None)
    return {n: torch.tensor(x, dtype=torch.int64 if n in IDS else torch.float32) for n, x in arrays.items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_results_have_the_bits_that_they_have_without_ranges(name, bias, monkeypatch):
    shape, kind, options = CASES[name]
    arrays = arrays_of(shape, kind, bias)
    attend = pk.op("attention", backend="triton", tiling={"min_split_keys": 64})
    gradient = pk.op("attention_vjp", backend="triton")

    def results() -> list[np.ndarray]:
        o, lse = attend(**arrays, **options, return_lse=True)
        given = arrays | {"o": o, "lse": lse, "d_o": torch.cos(o)}
        return [x.numpy() for x in (o, lse, *gradient(**given, **options)) if x is not None]

    within = results()
    for module in (forward, backward):
        monkeypatch.setattr(module, "segment_ranges", lambda *_: None)
    for a, b in zip(within, results(), strict=True):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


SMALL = dict.fromkeys(("block_q", "block_kv"), 32)


def test_tiles_of_other_documents_are_not_visited():
    """A weight of 0 times NaN is NaN: a row of a tile that is visited would show, forward and backward."""
    arrays = arrays_of((1, 256, 1, 256), "documents", True)
    ids = torch.arange(256)[None] // 128
    arrays |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    attend = pk.op("attention", backend="triton", tiling=SMALL)
    saved = dict(zip(("o", "lse"), attend(**arrays, return_lse=True), strict=True)) | {"d_o": torch.ones(1, 256, 2, 16)}
    for x in (arrays["k"], arrays["v"], arrays["q"], saved["d_o"]):
        x[:, 128:] = float("nan")
    o = attend(**arrays)
    assert torch.isfinite(o[:, :128]).all() and torch.isnan(o[:, 128:]).all()
    tiling = SMALL | {f"dq_{name}": size for name, size in SMALL.items()}
    d_q, d_k, d_v, *_ = pk.op("attention_vjp", backend="triton", tiling=tiling)(**arrays, **saved)
    assert all(torch.isfinite(x[:, :128]).all() for x in (d_q, d_k, d_v))


@pytest.mark.skipif(platform.system() != "Linux", reason="triton is made for Linux alone")
@pytest.mark.parametrize(("variant", "gradients"), [("hopper", False), ("unordered", True)])
def test_packed_calls_compile_for_hopper(variant, gradients):
    def meta(*extents: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.empty(extents, dtype=dtype, device="meta")

    q, ids = meta(2, 2048, 4, 128), meta(2, 2048, dtype=torch.int32)
    arrays = {"q": q, "k": q, "v": q, "q_segment_ids": ids, "kv_segment_ids": ids}
    if gradients:
        arrays |= {"o": q, "d_o": q, "lse": meta(2, 4, 2048, dtype=torch.float32)}
    op = pk.op("attention_vjp" if gradients else "attention", backend="triton", variant=variant)
    built = op.lower(**arrays, is_causal=True, target="sm_90")
    assert built.ok and built.variant == variant
    assert "attention_segment_ranges_kernel" in [kernel.name for kernel in built.kernels]
    for kernel in built.kernels:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised, kernel.name


def test_a_wrong_result_of_tensors_is_described():
    """Where a pair lies among masks is read from ids, of which an oracle has arrays of NumPy."""
    arrays = arrays_of((1, 20, 1, 30), "shuffled", False)
    call = pk.op("attention").bind(**arrays, is_causal=True)
    wrong = np.full(call.outputs["o"][0], 7, np.float32)
    with pytest.raises(testing.Broken, match="o.* is 7; the oracle says"):
        testing.compare_call(call, [wrong])
