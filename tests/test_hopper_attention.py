"""Attention on Hopper where there is no GPU: on the host, compiled, and what is compiled anew."""

from __future__ import annotations

import functools
import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core import dispatch, registry, targets, tilings
from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.explain import explain

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import compiler, interpreter  # noqa: E402
from portakern.backends.triton.hopper import _flash, _shares  # noqa: E402
from portakern.backends.triton.hopper import attention as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon, tma  # noqa: E402
from portakern.backends.triton.lib.split_kv import chunk_length  # noqa: E402
from portakern.tools.tune.space import space_of  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.gluon_on_host import compiles  # noqa: E402
from tests.packing import ids_of  # noqa: E402

BACKEND = registry.backend("triton")
VARIANT, UNSPLIT = (
    BACKEND.implementation("attention", next(f for f in BACKEND.families if f.name == name))
    for name in ("hopper", "unsplit")
)
MODULES = {
    "attention_flash_kernel": [_flash, gluon],
    "attention_flash_pieces_kernel": [_flash, gluon],
    "attention_shares_kernel": [_shares, _flash, gluon],
}


def bound(
    batch: int, q_len: int, kv_heads: int, group: int, kv_len: int, d: int, dv: int | None = None, *,
    dtype: Any = torch.bfloat16, device: str = "cpu", segments: str | None = None, **options: Any,
) -> Call:  # fmt: skip
    """A call as on a Hopper GPU, whose arrays are the host's or have no memory (meta). segments: of
    ``tests.packing``."""
    made, dv = torch.Generator().manual_seed(q_len + kv_len), dv or d

    def normal(*shape: int) -> Any:
        return torch.empty(shape, dtype=dtype, device=device) if device == "meta" else torch.randn(
            shape, generator=made).to(dtype)  # fmt: skip

    arrays = (
        normal(batch, q_len, kv_heads * group, d), normal(batch, kv_len, kv_heads, d),
        normal(batch, kv_len, kv_heads, dv),
    )  # fmt: skip
    if segments is not None:
        options |= {n: torch.tensor(x) for n, x in ids_of(segments, batch, q_len, kv_len).items()}
    call: Call = unchecked(registry.find_spec("attention"), *arrays, return_lse=True, **options)
    return call.replace(target=targets.find("sm_90").target, interpret=False)


def tiling_of(call: Call, **named: int) -> Any:
    return tilings.resolve(VARIANT, call, named).tiling


def run(call: Call, tiling: Any, variant: Any = VARIANT) -> Any:
    """The outputs of whoever serves the call in the end."""
    serving, tiling = variant.resolve(call, tiling)
    return serving.run(call, tiling)


def on_the_host(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any], ran: list[str]) -> None:
    """What a launch does, on the host: kernels of ``tl`` interpreted, the others by threads."""
    ran.append(kernel.__name__)
    if kernel.__name__ not in MODULES:
        constexprs = {n: v for n, v in constexprs.items() if n not in ("launch_pdl", "maxnreg")}
        if hasattr(constexprs.get("tile"), "follows"):
            constexprs["tile"] = constexprs["tile"]._replace(follows=False)
        interpreter.run(kernel, grid, *args, **constexprs)
        return
    host.launched(kernel, MODULES[kernel.__name__], grid, args, plan=constexprs["plan"])


SHARES = ["attention_shares_kernel", "attention_combine_kernel"]
FLASH = ["attention_flash_kernel"]
PIECES = ["attention_flash_pieces_kernel"]
RANGES = ["attention_segment_ranges_kernel"]
PACKED = [*RANGES, "attention_segment_order_kernel", *FLASH]
CASES = {
    "full": ((1, 200, 2, 1, 300, 64), {}, {}, FLASH),
    "causal": ((1, 300, 2, 2, 300, 64), {"is_causal": True}, {}, FLASH),
    "causal pairs": ((2, 300, 2, 2, 300, 64), {"is_causal": True}, {"persistent": 1}, FLASH),
    "pairs and one": ((1, 300, 1, 3, 300, 64), {"is_causal": True}, {"persistent": 1}, FLASH),
    "pairs of a band": ((1, 400, 1, 4, 500, 72, 40), {"window": (90, 30), "softcap": 5.0}, {"persistent": 1}, PIECES),
    "two pieces": ((1, 200, 2, 1, 300, 96), {}, {}, PIECES),
    "two pieces, causal pairs": ((2, 300, 1, 2, 300, 88), {"is_causal": True}, {"persistent": 1}, PIECES),
    "two pieces, one tile each": ((2, 300, 1, 2, 300, 80), {"is_causal": True}, {"persistent": 0}, PIECES),
    "two pieces, values of one": ((1, 300, 1, 2, 300, 192, 128), {"is_causal": True}, {}, PIECES),
    "two pieces of values alone": ((1, 200, 2, 1, 300, 64, 160), {"dtype": torch.float16}, {}, PIECES),
    "two pieces, o in the memory of q": ((1, 300, 1, 1, 300, 192), {}, {}, PIECES),
    "two pieces in several chunks": ((1, 200, 1, 2, 1300, 96), {"window": (900, 0)}, {"min_split_keys": 512}, PIECES),
    "two pieces of documents": ((1, 300, 2, 1, 300, 144), {"segments": "shuffled", "is_causal": True}, {},
        [*PACKED[:2], *PIECES]),
    "wide pairs": ((1, 300, 2, 2, 300, 256), {"is_causal": True, "dtype": torch.float16}, {"persistent": 1}, FLASH),
    "chunks": ((1, 300, 1, 1, 1300, 64), {"is_causal": True}, {"persistent": 1}, FLASH),
    "three groups in turns": ((1, 400, 1, 2, 400, 64), {"is_causal": True}, {"consumers": 3}, FLASH),
    "several chunks": ((1, 200, 1, 2, 1300, 128), {}, {"min_split_keys": 512}, FLASH),
    "shares": ((2, 1, 2, 4, 1300, 64), {}, {"few_queries": 2}, SHARES),
    "shares of several queries": ((1, 3, 2, 5, 1100, 128), {"is_causal": True}, {"few_queries": 2}, SHARES),
    "shares of a band": ((1, 40, 2, 1, 2100, 64, 72), {"window": (700, 10), "softcap": 4.0},
        {"few_queries": 2}, SHARES),
    "shares of rows of which a thread has two": ((1, 9, 2, 4, 1300, 64), {"is_causal": True},
        {"few_queries": 2}, SHARES),
    "one share": ((2, 1, 2, 3, 700, 64, 40), {"dtype": torch.float16}, {"few_queries": 2}, SHARES[:1]),
    "one share of several queries": ((1, 40, 2, 1, 300, 128), {"window": (70, 10), "softcap": 4.0}, {}, SHARES[:1]),
    "one share of queries of which some see nothing": ((2, 30, 1, 1, 20, 64), {"is_causal": True}, {}, SHARES[:1]),
    "walks": ((3, 2, 1, 4, 1300, 128), {"is_causal": True}, {"few_queries": 3}, SHARES[:1]),
    "walks of a band": ((1, 20, 3, 1, 2100, 64, 72), {"window": (700, 10), "softcap": 4.0}, {"few_queries": 3},
        SHARES[:1]),
    "walks of a band, some chunks of it empty": ((1, 2, 3, 5, 2000, 64), {"window": (300, 0)},
                                                 {"min_split_keys": 256, "unsplit_keys": 16, "few_queries": 3},
                                                 SHARES[:1]),
    "no walk of rows of which a thread has two": ((1, 64, 1, 1, 1300, 64), {},
        {"few_queries": 3, "min_split_keys": 128},
                                                  ["attention_kernel"]),
    "none": ((3, 1, 1, 4, 300, 64), {}, {"few_queries": 0}, ["attention_kernel"]),
    "documents": ((2, 300, 1, 2, 300, 64), {"is_causal": True, "segments": "documents"}, {}, PACKED),
    "documents, more keys": ((1, 200, 2, 1, 500, 128), {"segments": "documents", "dtype": torch.float16}, {}, PACKED),
    "documents in several chunks": ((1, 200, 1, 2, 1300, 128), {"window": (700, None), "softcap": 4.0,
        "segments": "documents"}, {"min_split_keys": 512}, PACKED),
    "segments in any order": ((1, 300, 2, 1, 300, 64), {"segments": "shuffled", "is_causal": True}, {"persistent": 1},
        PACKED),
    "segments of nobody": ((1, 200, 1, 1, 200, 64), {"segments": "scattered"}, {}, PACKED),
    "few queries of documents": ((1, 9, 2, 4, 1300, 64), {"segments": "documents"}, {"few_queries": 2},
        [*RANGES, "attention_kernel", SHARES[1]]),
    "a part of the keys": ((1, 300, 1, 2, 200, 64), {"is_causal": True, "q_start": 90, "kv_start": 130}, {}, FLASH),
    "keys that queries have passed": ((1, 200, 2, 1, 300, 64), {"window": (40, 3), "q_start": 200}, {}, FLASH),
    "a part of the keys in shares": ((1, 3, 2, 4, 1300, 64), {"is_causal": True, "q_start": 1700, "kv_start": 900},
        {"few_queries": 2}, SHARES),
    "a part that nobody sees": ((1, 3, 2, 4, 1300, 64), {"is_causal": True, "q_start": 0, "kv_start": 900},
        {"few_queries": 3}, SHARES[:1]),
    "too many rows to share": ((1, 20, 1, 5, 1100, 64), {}, {"few_queries": 2}, ["attention_kernel", SHARES[1]]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda device: 2)


@pytest.fixture(autouse=True)
def _heads_in_pieces(monkeypatch):
    monkeypatch.setitem(tma.MEASURED, "forward", tuple(tma.SUMS))


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name):
    """Barriers that are waited for, buffers that are handed back, rows that are masked: see ``gluon_on_host`` for what
    is not looked at."""
    shape, options, named, kernels = CASES[name]
    call, ran = bound(*shape, **options), []
    with recording(partial(on_the_host, ran=ran)):
        outputs = run(call, tiling_of(call, **named))
    shares = testing.compare_call(call, [call.framework.to_numpy(x) for x in outputs if x is not None])
    assert max(shares.values()) <= 1
    assert ran == kernels


def test_tiles_of_other_documents_are_not_visited():
    """A weight of 0 times NaN is NaN: a key of a tile that is visited would show."""
    call = bound(1, 256, 1, 1, 256, 64, segments="documents")
    ids = torch.arange(256)[None] // 128
    arrays = dict(call.arrays) | {"q_segment_ids": ids, "kv_segment_ids": ids}
    for name in ("k", "v"):
        arrays[name][:, 128:] = float("nan")
    with recording(partial(on_the_host, ran=[])):
        o, *_ = run(call.replace(arrays=arrays), tiling_of(call, block_kv=64))
    assert torch.isfinite(o[:, :128]).all() and torch.isnan(o[:, 128:]).all()


@pytest.mark.parametrize("tiling, keys, few, shares, dtype", [
    ({}, 2100, 14, 2, torch.bfloat16), ({"min_split_keys": 256}, 2100, 8, 2, torch.float16),
    ({}, 900, 14, 2, torch.float16),
    ({}, 900, 5, 3, torch.bfloat16), ({"min_split_keys": 256}, 2100, 8, 3, torch.bfloat16),
])  # fmt: skip
def test_a_query_alone_has_the_bits_that_it_has_among_others(tiling, keys, few, shares, dtype):
    """In chunks that have programs of their own those of a walk over all chunks, and in one that is the whole. Rows are
    as many as may be shared: 16 bits of one in some thousands tell which product of a merger was fused."""
    shape, options = (1, 130, 2, 4, keys, 128), {"is_causal": True, "softcap": 20.0, "dtype": dtype}
    call, ran = bound(*shape, **options), []
    arrays = {**call.arrays, "q": call.arrays["q"][:, -few:].contiguous()}
    last = call.replace(arrays=arrays, dims={**call.dims, "q_len": few})
    with recording(partial(on_the_host, ran=ran)):
        o, lse, _ = run(call, tiling_of(call, **tiling))
        o_alone, lse_alone, _ = run(last, tiling_of(last, few_queries=shares, **tiling))
    assert ran == [*FLASH, *(SHARES if keys > 1024 and shares == 2 else SHARES[:1])]
    assert torch.equal(o_alone, o[:, -few:]) and torch.equal(lse_alone, lse[:, :, -few:])


@pytest.mark.parametrize("d, q_len", [(64, 380), (128, 200)])
def test_unsplit_has_one_softmax_state_a_row(d, q_len):
    """By groups of warps in turns and in none; also among few queries: rows have their bits in any company, and these
    are not hopper's."""
    few = 9
    call, ran = bound(1, q_len, 1, 2, 1300, d, is_causal=True, dtype=torch.float16), []
    arrays = {**call.arrays, "q": call.arrays["q"][:, -few:].contiguous()}
    last = call.replace(arrays=arrays, dims={**call.dims, "q_len": few})
    tiling = tilings.default(UNSPLIT, call).tiling
    assert chunk_length(call, tiling_of(call)) == 512 and chunk_length(call, tiling) is None
    with recording(partial(on_the_host, ran=ran)):
        found, alone, split = run(call, tiling, UNSPLIT), run(last, tiling, UNSPLIT), run(call, tiling_of(call))
    assert ran == [*FLASH, *SHARES[:1], *FLASH]
    shares = testing.compare_call(call, [call.framework.to_numpy(x) for x in found if x is not None])
    assert max(shares.values()) <= 1
    assert torch.equal(alone[0], found[0][:, -few:]) and torch.equal(alone[1], found[1][:, :, -few:])
    assert not torch.equal(found[0], split[0])


def test_unsplit_computes_few_rows_that_nobody_asks_for():
    for length, consumers in ((197, 2), (384, 3), (577, 2), (1024, 2), (2048, 3), (4096, 3)):
        call = bound(1, length, 2, 1, length, 64, device="meta")
        tiling = tilings.resolve(UNSPLIT, call, {}).tiling
        assert tiling.consumers == consumers
        assert tilings.resolve(UNSPLIT, call, {"consumers": 3}).tiling.consumers == 3, "the user's own"


def test_unsplit_has_a_third_stage_for_long_rows():
    for length, d, causal, stages in (
        (16384, 128, True, 3), (8192, 128, True, 2), (16384, 128, False, 2), (16384, 256, True, 2)
    ):  # fmt: skip
        call = bound(1, length, 2, 1, length, d, device="meta", is_causal=causal)
        assert tilings.resolve(UNSPLIT, call, {}).tiling.num_stages == stages


def test_unsplit_serves_calls_that_name_it(monkeypatch):
    """Its gradients are hopper's; it refuses what hopper refuses, so that an unnamed call goes where it went before."""
    call = bound(1, 300, 2, 2, 3 << 20, 128, device="meta", is_causal=True)
    monkeypatch.setattr(type(call.framework), "target", lambda self, device: call.target)

    def told(variant: str | None, call: Call = call) -> str:
        return explain(call, dispatch.Choice.from_names(call.spec, "triton", variant, None))

    assert "variant unsplit: delegates this call to hopper (named)" in told("unsplit")
    assert "split" not in told("unsplit").partition("  tiling: ")[2]
    assert "variant unsplit: hopper comes first" in told(None)
    bias = torch.empty(1, 4, 300, 3 << 20, dtype=torch.bfloat16, device="meta")
    biased = call.replace(arrays={**call.arrays, "bias": bias})
    assert "variant gpu: serves this call\n" in told(None, biased)
    assert "bias is given" in told("unsplit", biased)
    vjp = registry.find_spec("attention_vjp")
    of = dispatch.gradient_choice(BACKEND, vjp, dispatch.Choice.from_names(call.spec, "triton", "unsplit", None))
    assert of.backend is BACKEND and of.variant is None
    with pytest.raises(pk.SpecError, match="tiling has no 'min_split_keys'"):
        tilings.resolve(UNSPLIT, call, {"min_split_keys": 512})


def kernels_of(*calls: tuple[Call, Any]) -> dict[str, set[str]]:
    """The kernels that calls launch -> what of each is compiled."""
    found: dict[str, set[str]] = {}

    def note(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
        source, options = compiler.specialised(kernel, args, constexprs, targets.find("sm_90"))
        found.setdefault(kernel.__name__, set()).add(f"{source.hash()} {sorted(map(str, options.items()))}")

    with recording(note):
        for call, tiling in calls:
            run(call, tiling)
    return found


def test_what_is_faster_is_the_default(monkeypatch):
    """Pairs where the last round's rest costs less than beginnings; a program for each chunk where all run at once."""
    monkeypatch.setattr(hopper, "processors", lambda device: 132)

    def launched(*shape: int, **options: Any) -> tuple[str, int]:
        found: list[tuple[str, int]] = []
        call = bound(*shape, device="meta", **options)
        with recording(lambda kernel, grid, args, constexprs: found.append((kernel.__name__, grid))):
            run(call, tiling_of(call))
        return found[0]

    for batch, length in (32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192):
        assert launched(batch, length, 16, 1, length, 128, is_causal=True) == (*FLASH, 132)
    assert launched(1, 16384, 16, 1, 16384, 128, is_causal=True) == (*FLASH, 2048)  # 3 % idle, 2 % gained
    assert launched(4, 4096, 8, 1, 4096, 256, is_causal=True) == (*FLASH, 1024)  # seen slower
    assert launched(4, 3000, 4, 5, 3000, 96, is_causal=True) == (*PIECES, 132)
    assert launched(1, 3000, 3, 5, 3000, 96, is_causal=True) == (*PIECES, 360)  # two rounds for 1.4
    assert launched(4, 4096, 16, 1, 4096, 128, window=(1023, 0)) == (*FLASH, 132)
    assert launched(1, 1, 8, 4, 8192, 128) == ("attention_shares_kernel", 128)
    assert launched(1, 1, 8, 4, 131072, 128) == ("attention_shares_kernel", 128)
    for d in 64, 128:
        assert launched(1, 1, 8, 4, 1024, d) == ("attention_shares_kernel", 8)
    assert launched(1, 1, 8, 4, 1024, 256)[0] == "attention_kernel"
    assert launched(1, 1, 1, 4, 3328, 64) == ("attention_shares_kernel", 7)
    assert launched(16, 1, 2, 4, 1920, 128) == ("attention_shares_kernel", 128)
    assert launched(16, 1, 4, 4, 1152, 128) == ("attention_shares_kernel", 64)  # walks: memory has no more to give
    assert launched(1, 1, 8, 4, 17938, 128) == ("attention_shares_kernel", 72)  # 144 chunks: each program has two
    assert launched(32, 1, 8, 4, 8192, 128) == ("attention_shares_kernel", 128)
    lengths = {
        128: ((1000, None), (1024, None), (1025, 512), (16384, 512), (16385, 1024), (131072, 4096)),
        64: ((1024, None), (1025, 512), (16384, 512), (16385, 1024), (131072, 4096)),
    }
    for d, expected in lengths.items():
        for keys, chunks in expected:
            call = bound(1, 1, 8, 4, keys, d, device="meta")
            assert chunk_length(call, tiling_of(call)) == chunks


def test_heads_of_long_rows_take_turns_by_fewer():
    """Keys and values of the heads whose tiles are taken by turns stay in the L2 cache."""
    for length, group, together in ((4096, 1, 8), (16384, 1, 4), (16384, 4, 8), (1 << 20, 1, 1)):
        call = bound(1, length, 16 // group, group, length, 128, device="meta", is_causal=True)
        work, _ = hopper.work_of(call, tiling_of(call), 128, (None, 0), 132)
        assert work.interleaved_heads == together


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_tuner_tries_what_the_tables_do_not_ship(d):
    call = bound(1, 1, 8, 4, 900, d, device="meta")
    space = space_of(call.spec, VARIANT, [call], tiling_of(call))
    assert space.values["few_queries"] == (0, 1, 2, 3)
    assert all(space.legal({**tiling_of(call), "few_queries": shares}) for shares in (2, 3))


def test_another_length_is_no_reason_to_compile():
    lengths = (640, 700, 1000, 1025, 4096, 33), (1028, 1701, 1600, 1025, 8191, 3000)
    long = [bound(batch, length, 8, 2, keys, 64, device="meta", is_causal=True)
            for batch in (1, 16) for length, keys in zip(*lengths, strict=True) if length > 64]  # fmt: skip
    whole = [bound(1, length, 8, 2, length, 64, device="meta", is_causal=True) for length in (100, 512, 701, 1024)]
    few = [bound(batch, 1, 8, 4, keys, 128, device="meta")
           for batch in (1, 16) for keys in (1025, 1100, 4096, 8191, 8192, 100000)]  # fmt: skip
    one = [bound(batch, 1, 8, 4, keys, 128, device="meta") for batch in (1, 16) for keys in (3, 17, 512, 1000, 1024)]
    for alike in long, whole:
        assert len(kernels_of(*((call, tiling_of(call)) for call in alike))[FLASH[0]]) == 1
    found = kernels_of(*((call, tiling_of(call, few_queries=2)) for call in few))
    assert {name: len(anew) for name, anew in found.items()} == dict.fromkeys(SHARES, 1)
    found = kernels_of(*((call, tiling_of(call, few_queries=2)) for call in one))
    assert {name: len(anew) for name, anew in found.items()} == {SHARES[0]: 1}


def fed_by(assembly: str) -> Counter[str]:
    """Of the exponentials of a kernel's machine code, the instructions that computed what they are of."""
    computed, found = {}, Counter[str]()
    for text in re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?\w+ +)?([^;]*);", assembly):
        name, *operands = re.split(r"[ ,]+", text.strip().replace(".reuse", ""))
        if name == "MUFU.EX2":
            found[computed[operands[1].lstrip("-")].split(".")[0]] += 1
        if operands:
            computed[operands[0]] = name
    return found


@functools.cache
def compiled(q_len: int, causal: bool) -> list[Any]:
    """The kernels of attention to 16384 keys, of which they make chunks."""
    q = torch.empty(1, q_len, 8, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 16384, 8, 128, dtype=torch.bfloat16, device="meta")
    built = pk.op("attention", backend="triton", variant="hopper").lower(q, k, k, is_causal=causal, target="sm_90")
    assert built.ok, built.reason
    return built.kernels


@compiles
@pytest.mark.parametrize("q_len", [4096, 1])
def test_factors_between_maxima_are_differences_of_rounded_products(q_len):
    """A weight, of which a tile has many, is 2 to a fused sum; a factor between maxima never is: a merger has the
    offset of the new maximum rounded, and a product that was fused would not be that which others rounded."""
    for kernel in compiled(q_len, q_len > 1):
        found = fed_by(kernel.assembly)
        assert found["FADD"] >= 2 and found["FFMA"] % 32 == 0, (kernel.name, found)


@compiles
def test_no_division_stands_before_products():
    """One by a number that the kernel learns when it runs takes 200 cycles, of some 3000 that a tile of keys takes."""
    walks = walks_of(compiled(4096, True)[0].assembly, 128 // 16 + 128 // 16)
    assert len(walks) == 2 and not [y for x in walks for y in x if "F2I" in y or "I2F" in y]


def walks_of(assembly: str, products: int) -> list[list[str]]:
    """The loops over tiles of 128 keys, of each group, by how many instructions of the matrix unit they have."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", assembly)
    places = {int(at, 16): i for i, (at, _) in enumerate(code)}
    ends = [(places.get(int(m[1], 16), i), i) for i, (_, x) in enumerate(code) if (m := re.search(r"BRA.*(0x\w+)", x))]
    loops = [[x for _, x in code[a:b]] for a, b in ends if a < b]
    return [x for x in loops if sum("HGMMA" in y for y in x) == products and sum("MUFU.EX2" in y for y in x) >= 64]


@compiles
@pytest.mark.parametrize(("d", "dv"), [(96, 96), (80, 80), (192, 128)])
def test_heads_in_two_pieces_are_multiplied_by_their_columns_alone(d, dv):
    """q k^T in steps of 16 columns, p v in steps of 16 keys for each piece; no product waits for another, and what
    registers have no room for is numbers of a tile of queries, which no loop over keys reads."""
    call = bound(1, 600, 1, 1, 600, d, dv, device="meta", is_causal=True)
    (kernel,) = compiler.build(VARIANT, call, tiling_of(call)).kernels
    pieces = 2 if dv & (dv - 1) else 1
    walks = walks_of(kernel.assembly, d // 16 + pieces * 128 // 16)
    assert kernel.name == PIECES[0] and not kernel.serialised and (kernel.spills or 0) <= 32
    assert len(walks) == 2 and not [y for x in walks for y in x if "STL" in y or "LDL" in y]


def test_what_tanh_errs_by_leaves_room_in_the_bound():
    """With each instruction as far off as it may be, in the direction that is worse."""
    u, worst = 2.0**-24, 0.0
    x = np.concatenate([np.linspace(-20, 20, 400_001), np.geomspace(1e-12, 1, 2001)]).astype(np.float32)
    for sign in (-1, 1):
        y = x * np.float32(2.8853900817779268)
        e = (np.exp2(y.astype(np.float64)) * (1 + sign * 2.0**-22)).astype(np.float32)
        r = 1 / (np.float32(1) + e).astype(np.float64) * (1 - sign * 2.0**-23)
        t = np.float32(1) - np.float32(2) * r.astype(np.float32)
        worst = max(worst, np.abs(t - np.tanh(x.astype(np.float64))).max())
    assert 4 * u < worst <= 8 * u


def test_the_dispatch_names_the_portable_kernel_where_it_serves_few_queries():
    """20 queries of 5 heads are more rows than are shared out. The tiling stays this variant's, and so do all bits."""
    few, many = bound(1, 20, 1, 5, 1100, 64), bound(1, 200, 1, 5, 1100, 64)
    for named in (None, "hopper"):
        candidates = dispatch.find_routes(BACKEND, few, few.target, named)
        found, tiling = dispatch.pick(candidates, few, {})
        assert (found.impl.family.name, tiling) == ("gpu", tiling_of(few))
        assert dispatch.pick(candidates, many, {})[0].impl is VARIANT
    of_gpu, _ = dispatch.pick(dispatch.find_routes(BACKEND, few, few.target, "gpu"), few, {})
    assert tilings.resolve(of_gpu.impl, few, {}).tiling != tiling, "who names gpu has its own tiles"
    ran: list[str] = []
    with recording(partial(on_the_host, ran=ran)):
        alone, among = found.run(few, tiling), [run(few, tiling_of(few)), of_gpu.impl.run(few, tiling)]
    assert ran == ["attention_kernel", "attention_combine_kernel"] * 3
    assert all(torch.equal(x, y) for other in among for x, y in zip(alone, other, strict=True) if x is not None)


def test_who_asks_is_told_which_variant_leaves_a_call_to_which(monkeypatch):
    call = bound(1, 20, 1, 5, 1100, 64, device="meta")
    monkeypatch.setattr(type(call.framework), "target", lambda self, device: call.target)
    for variant in (None, "hopper"):
        told = explain(call, dispatch.Choice(BACKEND, variant))
        assert "implementation: portakern.backends.triton.gpu.attention" in told
        named = " (named)" if variant else ""
        assert f"variant hopper: delegates this call to gpu{named}\n" in told
        assert "variant gpu: serves this call, delegated by hopper\n" in told
        assert "consumers=2 (shipped sm_90: d to 64)" in told
        assert "kernels: gpu.attention.attention_kernel, lib.attention.attention_combine_kernel" in told


@compiles
def test_what_is_compiled_is_what_serves():
    arrays = [torch.empty(s, dtype=torch.bfloat16) for s in ((1, 20, 5, 64), (1, 1100, 1, 64), (1, 1100, 1, 64))]
    built = pk.op("attention", backend="triton", variant="hopper").lower(*arrays, target="sm_90")
    assert built.ok and built.variant == "gpu" and built.tiling["consumers"] == 2
    assert [k.name for k in built.kernels] == ["attention_kernel", "attention_combine_kernel"]
