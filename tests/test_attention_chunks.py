"""Long rows of keys: their chunks follow from lengths alone, and whoever computes them computes the same bits."""

from __future__ import annotations

from typing import Any

import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry, tilings
from portakern.core.call import Call
from portakern.core.targets import Target

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton.configs import AttentionConfig  # noqa: E402
from portakern.backends.triton.gpu import attention as kernels  # noqa: E402
from portakern.backends.triton.hopper import attention as hopper  # noqa: E402
from portakern.backends.triton.lib import attention as portable  # noqa: E402
from portakern.backends.triton.lib import split_kv as split  # noqa: E402
from portakern.backends.triton.lib import tma  # noqa: E402

SM_90 = Target("cuda", "sm_90")
SMALL = {"min_split_keys": 32, "block_q": 32, "block_kv": 16}


def qkv(batch: int, q_len: int, kv_heads: int, group: int, kv_len: int, d: int, dv: int, dtype: Any = None) -> Any:
    made = torch.Generator().manual_seed(q_len + kv_len)
    dtype = dtype or torch.float32

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=made).to(dtype)

    return (
        normal(batch, q_len, kv_heads * group, d),
        normal(batch, kv_len, kv_heads, d),
        normal(batch, kv_len, kv_heads, dv),
    )


def bound(*shape: int, target: Target = SM_90, dtype: Any = None, **options: Any) -> Call:
    call = pk.op("attention", backend="triton").bind(*qkv(*shape, dtype=dtype or torch.bfloat16), **options)
    return call.replace(target=target, interpret=False)


def variant(name: str) -> Any:
    b = registry.backend("triton")
    return b.implementation("attention", next(f for f in b.families if f.name == name))


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"window": (40, 3)}, {"window": (30, None), "softcap": 2.0}, {"window": (None, 5)}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(2, 1, 2, 4, 300, 16, 16), (1, 5, 1, 3, 270, 16, 24), (2, 40, 2, 2, 200, 8, 8)])
def test_a_program_a_chunk_or_one_for_all(shape, options, monkeypatch):
    q, k, v = qkv(*shape)
    launched: list[int] = []
    real = portable.launch

    def counted(kernel: Any, *args: Any, **more: Any) -> Any:
        launched.append(kernel is portable.attention_combine_kernel)
        return real(kernel, *args, **more)

    for module in portable, kernels:
        monkeypatch.setattr(module, "launch", counted)
    monkeypatch.setattr(portable, "worth_spreading", lambda *_: True)
    spread = pk.op("attention", backend="triton", tiling=SMALL)(q, k, v, return_lse=True, **options)
    assert any(launched), "no chunk had a program of its own"
    monkeypatch.setattr(portable, "worth_spreading", lambda *_: False)
    launched.clear()
    op = pk.op("attention", backend="triton", tiling={**SMALL, "num_stages": 1})
    whole = op(q, k, v, return_lse=True, **options)
    assert launched and not any(launched)
    assert all(torch.equal(a, b) for a, b in zip(spread, whole, strict=True))


def test_a_chunk_sees_neither_queries_nor_heads_nor_samples():
    tiling = AttentionConfig(min_split_keys=512, block_kv=64)
    lengths = {
        split.chunk_length(bound(b, q, h, g, 5000, 64, 64, **options), tiling)
        for options in ({}, {"is_causal": True})
        for b, q, h, g in ((1, 1, 1, 1), (3, 1, 2, 1), (1, 70, 1, 3))
    }
    assert lengths == {512}
    assert split.chunk_length(bound(1, 1, 1, 1, 512, 64, 64), tiling) is None
    assert split.chunk_length(bound(1, 1, 1, 1, 40000, 8, 8), tiling) == 4096  # no more than MOST of them
    assert split.chunk_length(bound(1, 1, 1, 1, 40000, 8, 8, window=(99, 0)), tiling) == 512


def test_a_table_says_how_many_keys_are_one_chunk_and_how_many_chunks_there_are():
    def length(keys: int, **more: Any) -> int | None:
        window = more.pop("window", None)
        tiling = AttentionConfig(
            **{"min_split_keys": 512, "block_kv": 64, "unsplit_keys": 2048, "max_splits": 4, **more}
        )
        return split.chunk_length(bound(1, 1, 1, 1, keys, 8, 8, window=window), tiling)

    assert length(2048) is None and length(2049) == 1024 and length(2049, max_splits=8) == 512
    assert length(4096) == 1024 and length(4097) == 2048 and length(40000) == 16384
    # what a window shows of more keys is as many keys
    assert length(40000, window=(2047, 0)) == 2048 and length(40000, window=(2048, 0)) == 1024


@pytest.mark.parametrize(("left", "right"), [(0, 0), (31, 0), (32, 0), (33, 5), (100, 0)])
@pytest.mark.parametrize("queries", [1, 2, 40])
def test_no_tile_sees_more_chunks_than_have_programs(queries, left, right):
    call, chunk = bound(1, queries, 1, 1, 700, 8, 8, window=(left, right)), 32
    most = split.chunks_of_a_tile(call, chunk, queries)
    for top in range(left, 700 - right - queries + 1):
        seen = (top + queries - 1 + right) // chunk - (top - left) // chunk + 1
        assert seen <= most
    assert most <= -(-(queries + left + right) // chunk) + 1


def test_what_is_written_of_parts_is_little_beside_what_is_read():
    few, many = bound(1, 1, 2, 4, 8192, 8, 8), bound(1, 700, 2, 4, 8192, 8, 8)
    assert split.worth_spreading(few, 2, 16) and not split.worth_spreading(many, 2, 16)
    assert not split.worth_spreading(few, split.ENOUGH, 16)
    some = bound(1, 150, 1, 1, 8192, 64, 64)
    assert split.worth_spreading(some, split.FEW, 16) and not split.worth_spreading(some, split.FEW + 1, 16)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dtype": torch.float32}, "dtype float32: this kernel takes"),
        ({"bias": True}, "bias is given"),
        ({"segments": True}, None),
        ({"d": 12}, "head dimensions 12 and 12: this kernel takes multiples of 8 up to 256"),
        ({"d": 264}, "up to 256"),
        ({"d": 136}, None),
        ({"window": (9, 0)}, None),
        ({"d": 128}, None),
        ({}, None),
    ],
    ids=str,
)
def test_what_hopper_leaves_to_the_portable_kernel(more, why):
    d = more.get("d", 64)
    given = {n: v for n, v in more.items() if n == "window"}
    if "bias" in more:
        given["bias"] = torch.zeros(1, 1, 1, 100)
    if "segments" in more:
        given |= {
            "q_segment_ids": torch.zeros(1, 90, dtype=torch.int32),
            "kv_segment_ids": torch.zeros(1, 100, dtype=torch.int32),
        }
    call = bound(1, 90, 1, 1, 100, d, d, dtype=more.get("dtype"), **given)
    found = hopper.supports(call, tilings.default(variant("hopper"), call).tiling)
    assert found is None if why is None else why in found


def test_hopper_refuses_what_has_no_room():
    call = bound(1, 90, 1, 1, 1000, 256, 256)
    tiling = tilings.default(variant("hopper"), call).tiling
    assert hopper.supports(call, tiling) is None
    assert "registers a thread" in hopper.supports(call, tiling.replace(block_kv=256))
    assert "bytes of shared memory" in hopper.supports(call, tiling.replace(num_stages=4))
    assert "up to 256 keys" in hopper.supports(call, tiling.replace(block_kv=512))
    # a group waits for the next keys before it hands the place of these back: an H100 waited for ever
    assert "use 2 or more" in hopper.supports(call, tiling.replace(num_stages=1))


@pytest.mark.parametrize(("d", "kv_len"), [(64, 1100), (128, 1100), (128, 600), (256, 1100)])
def test_hopper_has_room_for_what_it_plans(d, kv_len):
    call = bound(1, 90, 1, 1, kv_len, d, d)
    plan = hopper.plan_of(call, tilings.default(variant("hopper"), call).tiling)
    assert plan.chunked == (kv_len > 1024 and d <= 128) and plan.o_in_q == (d == 256)
    assert hopper.shared_bytes(plan) <= 232448


def test_hopper_has_room_for_heads_in_two_pieces(monkeypatch):
    monkeypatch.setitem(tma.MEASURED, "forward", tuple(tma.SUMS))
    for d, dv, planned in (
        (40, 40, (64, 0, 64, 0, 128, False)), (72, 72, (64, 16, 64, 16, 128, False)),
        (88, 96, (64, 32, 64, 32, 128, False)), (104, 128, (128, 0, 128, 0, 128, False)),
        (160, 160, (128, 32, 128, 32, 128, True)), (192, 128, (128, 64, 128, 0, 128, True)),
        (192, 192, (128, 64, 128, 64, 64, False)), (200, 72, (256, 0, 64, 16, 64, False)),
    ):  # fmt: skip
        call = bound(1, 90, 1, 1, 600, d, dv)
        tiling = tilings.default(variant("hopper"), call).tiling
        plan = hopper.plan_of(call, tiling)
        found = plan.block_d, plan.more_d, plan.block_dv, plan.more_dv, plan.block_kv, plan.o_in_q
        assert found == planned, (d, dv, found)
        assert hopper.supports(call, tiling) is None and hopper.shared_bytes(plan) <= 232448
        few = call.replace(dims={**call.dims, "q_len": 20, "group": 5})
        serving, theirs = variant("hopper").resolve(few, tiling)
        assert serving.family.name == "gpu" and theirs.block_kv == tiling.block_kv
        assert portable.shared_bytes(few, theirs) <= 232448
    call = bound(1, 90, 1, 1, 600, 160, 160)
    tiling = tilings.default(variant("hopper"), call).tiling.replace(few_queries=2)
    assert "where queries are few" in hopper.supports(call, tiling)


@pytest.mark.parametrize(("d", "q_len", "stages"), [(128, 1, 3), (64, 1, 3), (256, 1, 3), (128, 200, 2), (256, 200, 2)])
def test_few_queries_have_more_keys_on_their_way(d, q_len, stages):
    call = bound(1, q_len, 1, 1, 600, d, d)
    tiling = tilings.default(variant("hopper"), call).tiling
    plan, how = portable.rows_plan(call, tiling)
    assert how["num_stages"] == stages and plan.block_q == (64 if q_len == 1 else 128)
    rows = tiling.replace(block_q=plan.block_q, num_stages=stages)
    assert portable.shared_bytes(call, rows) <= 232448
    _, how = portable.rows_plan(call, tiling.replace(num_stages_few=8))
    most = rows.replace(num_stages=how["num_stages"])
    assert portable.shared_bytes(call, most) <= 232448, "more than there is room for"


@pytest.mark.parametrize(("name", "d", "chunk"), [("gpu", 64, 1024), ("hopper", 128, 512), ("hopper", 64, 512)])
def test_more_keys_than_1024_are_cut(name, d, chunk):
    calls = [bound(1, 1, 1, 1, keys, d, d) for keys in (1024, 1025, 8192)]
    found = [split.chunk_length(call, tilings.default(variant(name), call).tiling) for call in calls]
    assert found == [None, chunk, chunk]


@pytest.mark.parametrize(("d", "spilled"), [(64, 0), (128, 400)])
def test_hopper_walks_all_chunks_in_one_loop(d, spilled):
    """Scores of the first tile and of the loop, products of the loop and of the last tile: chunks that had loops of
    their own would have twice as many. Two accumulators stand beside a tile of scores, and no product waits."""
    impl, call = variant("hopper"), bound(1, 1100, 1, 1, 1100, d, d, is_causal=True)
    tiling = tilings.default(impl, call).tiling
    assert split.chunk_length(call, tiling) == 512
    (kernel,) = impl.family.load_compiler().build(impl, call, tiling).kernels
    assert sum(kernel.matrix.values()) == 2 * 2 * (d // 16 + 128 // 16)
    assert not kernel.serialised and (kernel.spills or 0) <= spilled


@pytest.mark.parametrize(
    ("q_len", "shares", "weights", "d"), [(1, 2, 32, 64), (1, 3, 32, 128), (12, 2, 64, 64), (12, 2, 64, 128)]
)
def test_few_rows_are_one_a_thread_and_no_product_waits(d, q_len, shares, weights):
    """A thread has half as many weights of a tile where a group has up to 32 rows: of the loop's and of the last one.
    Beside them stand factors of what was summed before, one or two a tile, and two of a merger."""
    impl, call = variant("hopper"), bound(1, q_len, 8, 4, 1100, d, d, is_causal=True)
    tiling = tilings.default(impl, call).tiling.replace(few_queries=shares)
    kernel = impl.family.load_compiler().build(impl, call, tiling).kernels[0]
    assert kernel.name == "attention_shares_kernel" and not kernel.serialised and (kernel.spills or 0) <= 32
    assert 2 * weights < kernel.assembly.count("MUFU.EX2") < 2 * weights + 8


def test_rows_that_the_copy_engine_cannot_move_are_copied():
    x = torch.zeros(2, 5, 3, 16, dtype=torch.bfloat16)
    assert hopper.movable(x) is x
    wide = torch.zeros(2, 5, 3, 20, dtype=torch.bfloat16)[..., :16]
    assert hopper.movable(wide).stride() == x.stride()  # rows of 40 bytes
    assert hopper.movable(x.expand(2, 5, 3, 16)[:1].expand(4, 5, 3, 16)).stride() == x.stride()
    assert hopper.movable(torch.zeros(490, dtype=torch.bfloat16)[1:481].view(2, 5, 3, 16)).data_ptr() % 16 == 0
    assert hopper.movable(x.transpose(2, 3).contiguous().transpose(2, 3)).stride() == x.stride()


@pytest.mark.parametrize("size", [1e3, 3e3, 1e5])
def test_scores_of_float64_beyond_what_float32_counts_are_no_coarser(size):
    """From 2^24 on a row's offset is rounded to a power of two in float32, whose scores are no finer; here they are."""
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, n, 1, 16, generator=made, dtype=torch.float64) for n in (3, 50, 50))
    k = size * k[:, :1] + k / size  # all keys alike, but for what float64 sees
    q = size * q
    call = pk.op("attention", backend="triton").bind(q, k, v, scale=0.3, return_lse=True)
    found = pk.op("attention", backend="triton")(q, k, v, scale=0.3, return_lse=True)
    assert max(testing.compare_call(call, [x.numpy() for x in found]).values()) <= 1


@pytest.mark.parametrize("scale", [1e38, 2.5e38, 3.3e38, -3.3e38])
@pytest.mark.parametrize("size", [0.0, 1e-20])
def test_a_scale_whose_product_with_log2_e_overflows(scale, size):
    """It was inf there, and 0 times inf NaN."""
    q, k, v = qkv(1, 3, 1, 1, 5, 8, 8)
    call = pk.op("attention", backend="triton").bind(size * q, size * k, v, scale=scale, return_lse=True)
    found = pk.op("attention", backend="triton")(size * q, size * k, v, scale=scale, return_lse=True)
    assert max(testing.compare_call(call, [x.numpy() for x in found]).values()) <= 1
