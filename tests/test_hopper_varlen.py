"""Attention of packed sequences on Hopper where there is no GPU: on the host, and what is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from portakern import testing
from portakern.core import registry, targets, tilings
from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.framework import frameworks

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import compiler, interpreter, plan  # noqa: E402
from portakern.backends.triton.hopper import _flash  # noqa: E402
from portakern.backends.triton.hopper import varlen_attention as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon, gluon_sequences, tma  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.gluon_on_host import compiles  # noqa: E402

BACKEND = registry.backend("triton")
(FAMILY,) = (f for f in BACKEND.families if f.name == "hopper")
VARIANT = BACKEND.implementation("varlen_attention", FAMILY)
PORTABLE = BACKEND.implementation("varlen_attention", next(f for f in BACKEND.families if f.name == "gpu"))
MODULES = {"varlen_attention_flash_kernel": [_flash, gluon_sequences, gluon]}
FLASH = ["varlen_attention_schedule_kernel", "varlen_attention_flash_kernel"]


def starts_of(lengths: list[int], device: str, first: int = 0) -> Any:
    return torch.tensor(np.cumsum([first, *lengths]), dtype=torch.int32, device=device)


def bound(
    q_lens: list[int], kv_lens: list[int] | None, kv_heads: int, group: int, d: int, dv: int | None = None, *,
    dtype: Any = torch.bfloat16, device: str = "cpu", around: int = 0, seed: int = 0, **options: Any,
) -> Call:  # fmt: skip
    """A call as on a Hopper GPU, whose arrays are the host's or have no memory (meta). around: tokens of no sequence
    before the first and behind the last, which hold NaN."""
    kv_lens, dv, made = q_lens if kv_lens is None else kv_lens, dv or d, torch.Generator().manual_seed(seed)

    def normal(tokens: int, *shape: int) -> Any:
        shape = (tokens + 2 * around, *shape)
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        x = torch.randn(shape, generator=made)
        x[:around] = x[tokens + around :] = float("nan")
        return x.to(dtype)

    q, k, v = (
        normal(sum(q_lens), kv_heads * group, d), normal(sum(kv_lens), kv_heads, d), normal(sum(kv_lens), kv_heads, dv)
    )  # fmt: skip
    starts = (starts_of(lens, device, around) for lens in (q_lens, kv_lens))
    call: Call = unchecked(registry.find_spec("varlen_attention"), q, k, v, *starts, return_lse=True, **options)
    return call.replace(target=targets.find("sm_90").target, interpret=False)


def tiling_of(call: Call, **named: int) -> Any:
    return tilings.resolve(VARIANT, call, named).tiling


def on_the_host(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any], ran: list[str]) -> None:
    """What a launch does, on the host: kernels of ``tl`` interpreted, the others by threads."""
    ran.append(kernel.__name__)
    if kernel.__name__ not in MODULES:
        interpreter.run(kernel, grid, *args, **constexprs)
        return
    host.launched(kernel, MODULES[kernel.__name__], grid, args, plan=constexprs["plan"])


def run(call: Call, tiling: Any, ran: list[str] | None = None) -> Any:
    """The outputs of whoever serves the call in the end, on the host."""
    serving, tiling = VARIANT.resolve(call, tiling)
    with recording(partial(on_the_host, ran=[] if ran is None else ran)):
        return serving.run(call, tiling)


def worst_share(call: Call, outputs: Any) -> float:
    arrays = [call.framework.to_numpy(x) for x in outputs if x is not None]
    return max(testing.compare_call(call, arrays).values())


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]] = {
    "full": (([200, 90, 131], [150, 300, 40], 2, 1, 64), {}, {}),
    "causal": (([200, 150, 300], None, 1, 2, 64), {"is_causal": True}, {}),
    "causal, two consumers": (([200, 257], None, 1, 2, 64), {"is_causal": True}, {"consumers": 2}),
    "in turns": (([257, 140], None, 2, 1, 128), {"is_causal": True}, {"pingpong": 1}),
    "a program for each tile": (([200, 150, 300], None, 1, 2, 64), {"is_causal": True}, {"persistent": 0}),
    "a sequence without keys": (([100, 130, 90], [80, 0, 200], 1, 1, 64), {"is_causal": True}, {}),
    "a sequence without queries": (([130, 0, 190], [80, 300, 200], 2, 1, 64), {}, {}),
    "no sequence has a key but one": (([130, 100, 190], [0, 3, 0], 1, 2, 64), {}, {}),
    "more queries than keys": (([250, 130], [60, 131], 1, 1, 128), {"is_causal": True}, {}),
    "a band": (([300, 130], [290, 400], 1, 2, 72, 40), {"window": (90, 30), "softcap": 5.0}, {}),
    "a band on one side": (([300, 130], [290, 400], 1, 1, 64), {"window": (60, None)}, {}),
    "tokens of no sequence": (([130, 90], [140, 200], 1, 1, 64), {"around": 5, "is_causal": True}, {}),
    "one token more than a tile": (([129, 128, 127], [129, 128, 127], 1, 1, 128), {}, {}),
    "short sequences among one that is long": (([1, 3, 500, 2, 1], [2, 3, 700, 90, 1], 1, 1, 64), {"is_causal": True},
        {}),
    "two pieces": (([200, 150], [150, 310], 2, 1, 96), {}, {}),
    "two pieces, causal": (([300, 70], None, 1, 2, 80), {"is_causal": True, "dtype": torch.float16}, {}),
    "two pieces, o in the memory of q": (([150, 80], None, 1, 1, 192), {}, {}),
    "two pieces, values of one": (([150, 120], [90, 150], 1, 2, 192, 128), {"is_causal": True}, {}),
    "wide": (([150, 90], [200, 150], 1, 1, 256), {"is_causal": True, "dtype": torch.float16}, {}),
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
    shape, options, named = CASES[name]
    call, ran = bound(*shape, **options), []
    assert worst_share(call, run(call, tiling_of(call, **named), ran)) <= 1
    assert ran == FLASH


def finds_on_host(module: Any, case: str) -> bool:
    """Whether a kernel's module with a fault in it shows that on the host: see tests/mutants/faults."""
    shape, options, named = CASES[case]
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(hopper, "processors", lambda device: 2)
            patched.setitem(tma.MEASURED, "forward", tuple(tma.SUMS))
            patched.setattr(host, "PATIENCE", 2.0)
            patched.setattr(host, "LAZY", True)
            patched.setitem(MODULES, FLASH[1], [module, *MODULES[FLASH[1]]])
            call = bound(*shape, **options)
            return worst_share(call, run(call, tiling_of(call, **named))) > 1
    except (testing.Broken, AssertionError, TimeoutError, IndexError):  # the last: beyond an array
        return True


def alone(call: Call, s: int) -> Call:
    """The call of its ``s``-th sequence."""
    arrays = dict(call.arrays)
    for names, starts in ((("q",), "q_starts"), (("k", "v"), "kv_starts")):
        first, end = call.arrays[starts][s : s + 2].tolist()
        arrays |= {n: arrays[n][first:end] for n in names}
        arrays[starts] = starts_of([end - first], "cpu")
    made: Call = unchecked(call.spec, *(arrays[n] for n in ("q", "k", "v", "q_starts", "kv_starts")), **call.options)
    return made.replace(target=call.target, interpret=False)


@pytest.mark.parametrize("d, options", [(64, {"is_causal": True}), (96, {"window": (150, 20), "softcap": 20.0})])
def test_a_sequence_has_the_bits_that_it_has_alone(d, options):
    """Of lengths that no tile divides, in any company, with other tiles of queries, and by programs of one tile."""
    q_lens, kv_lens = [200, 61, 333, 130], [310, 160, 333, 64]
    call = bound(q_lens, kv_lens, 1, 2, d, dtype=torch.float16, **options)
    starts = call.arrays["q_starts"].tolist()
    with recording(partial(on_the_host, ran=[])):
        o, lse, _ = VARIANT.run(call, tiling_of(call))
        for s, named in enumerate(({}, {"persistent": 0}, {"consumers": 2}, {"pingpong": 0})):
            one, mine = alone(call, s), slice(*starts[s : s + 2])
            o_alone, lse_alone, _ = VARIANT.run(one, tiling_of(one, **named))
            assert torch.equal(o_alone, o[mine]) and torch.equal(lse_alone, lse[:, mine])


def test_what_other_sequences_hold_reaches_nothing():
    """Tiles reach over a sequence's end, where the next one has NaN: 0 times NaN is NaN."""
    call = bound([130, 70, 150], [150, 90, 160], 1, 1, 64, is_causal=True)
    for names, starts in ((("q",), "q_starts"), (("k", "v"), "kv_starts")):
        for name in names:
            call.arrays[name][slice(*call.arrays[starts][1:3])] = float("nan")
    for consumers in (2, 3):
        o, lse, _ = run(call, tiling_of(call, consumers=consumers))
        dirty = torch.zeros(len(o), dtype=torch.bool)
        dirty[130:200] = True
        assert torch.isfinite(o[~dirty]).all() and torch.isfinite(lse[:, ~dirty]).all() and torch.isnan(o[dirty]).all()


@pytest.mark.parametrize("late", [{0: 3e-3}, {1: 3e-3}, {2: 3e-3}], ids=["first group", "second group", "producer"])
def test_who_is_late_finds_the_tile_that_is_meant(monkeypatch, late):
    """Of the two numbers of a program that say which tile is next none is written before all have read it."""
    for role, seconds in late.items():
        monkeypatch.setitem(host.LATE, role, seconds)
    call = bound([129] * 4 + [20] * 5, None, 1, 2, 64, is_causal=True)
    assert worst_share(call, run(call, tiling_of(call, consumers=2))) <= 1


def launches_of(call: Call, **named: int) -> list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]]:
    found: list[tuple[Any, int, tuple[Any, ...], dict[str, Any]]] = []
    with recording(lambda *launch: found.append(launch)):
        VARIANT.run(call, tiling_of(call, **named))
    return found


def test_tiles_are_scheduled_from_those_that_see_most():
    """Rows of the schedule: each tile of each sequence once, sequences with most keys first, and what takes turns."""
    call = bound([300, 0, 130, 64], [100, 50, 700, 0], 2, 2, 64, around=3, is_causal=True)
    (kernel, grid, args, constexprs), (_, programs, *_) = launches_of(call, consumers=2)
    interpreter.run(kernel, grid, *args, **constexprs)
    (total, taken, *_), *rows = args[2].tolist()
    found = [tuple(row[:6]) for row in rows[:total]]
    assert taken == 0 and programs == 2
    first = [(0, 2, 303, 130, 153, 700)] * 2 + [(2, 3, 3, 300, 3, 100)] * 3
    # Behind these stand tokens that see nothing, in their order: before the first sequence, its last, behind it.
    assert found == [*first, (5, 1, 0, 3, 0, 0), (6, 1, 433, 64, 853, 0), (7, 1, 497, 3, 853, 0)]
    assert {row[6] for row in rows[:total]} == {4}  # heads of a group, and of two, whose keys L2 holds

    call = bound([300, 130], [100, 1 << 16], 4, 1, 128, device="meta", is_causal=True)
    extents = launches_of(call)[0][2][3]
    assert extents.cached == tma.IN_L2 // 512 and extents.seen == 100 + (1 << 16)
    assert launches_of(call.replace(options={**call.options, "is_causal": False}))[0][2][3].cached == 0


def test_another_length_is_no_reason_to_compile():
    compiled = set()
    for lens in ([640, 700], [1000, 1025, 4096], [3000] * 16, [129]):
        for kernel, _, args, constexprs in launches_of(bound(lens, None, 8, 2, 64, device="meta", is_causal=True),
                                                       consumers=2):  # fmt: skip
            source, options = compiler.specialised(kernel, args, constexprs, targets.find("sm_90"))
            if kernel.__name__ == FLASH[1]:
                compiled.add((source.hash(), *sorted(map(str, options.items()))))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"dtype": torch.float32}, "dtype float32: this kernel takes"),
        ({"d": 12}, "head dimensions 12 and 12: this kernel takes multiples of 8 up to 256"),
        ({"d": 264}, "up to 256"),
        ({"d": 128, "softcap": 3.0, "window": (9, 0)}, None),
    ],
    ids=str,
)
def test_what_is_left_to_the_portable_kernel(more, why):
    call = bound([300, 200], None, 1, 2, **{"d": 64, **more}, device="meta")
    found = hopper.supports(call, tilings.default(VARIANT, call).tiling)
    assert found is None if why is None else why in found


def test_arrays_of_another_library_are_the_portable_kernels():
    call = bound([300, 200], None, 1, 2, 64, device="meta")
    found = hopper.supports(call.replace(framework=frameworks()["jax"]), tilings.default(VARIANT, call).tiling)
    assert found is not None and "not tried in programs of jax" in found


def test_few_queries_are_the_portable_kernels():
    for lens, name in ([60] * 4, "gpu"), ([100] * 4, "gpu"), ([200] * 4, "hopper"), ([65] * (1 << 15), "gpu"):
        call = bound(lens, None, 2, 2, 64, device="meta")
        assert VARIANT.resolve(call, tiling_of(call))[0].family.name == name
    ungrouped = bound([100] * 4, None, 2, 1, 64, device="meta")
    assert VARIANT.resolve(ungrouped, tiling_of(ungrouped))[0] is VARIANT


def test_calls_of_a_signature_are_planned():
    call = bound([130, 200], None, 2, 1, 64, is_causal=True)
    launches: list[tuple[str, int]] = []
    with recording(lambda kernel, grid, args, constexprs: launches.append((kernel.__name__, grid))):
        _, again = plan.learn(VARIANT, call, tiling_of(call))
        first = list(launches)
        launches.clear()
        assert again is not None
        again(call.arrays)
    assert launches == first == [(FLASH[0], 4), (FLASH[1], 2)]


@compiles
@pytest.mark.parametrize("d", [64, 128, 96])
def test_they_compile_for_hopper_and_products_do_not_wait(d):
    call = bound([4096] * 4, None, 8, 4, d, device="meta", is_causal=True)
    built = FAMILY.load_compiler().build(VARIANT, call, tiling_of(call))
    assert [k.name for k in built.kernels] == FLASH
    for kernel in built.kernels:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised and not kernel.undefined
        assert (kernel.spills or 0) <= (32 if d == 96 else 0)
    assert any("GMMA" in i for i in kernel.matrix)


def drawn(seed: int) -> tuple[Call, dict[str, int]]:
    """A call of any sequences, some of them without queries or keys, or with less keys than queries."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 6))
    q_lens, more = rng.integers(0, 280, number), rng.integers(-90, 200, number)
    kv_lens = np.maximum(q_lens + more, 0) * (rng.random(number) > 0.15)
    d, dv = rng.choice([64, 64, 72, 96, 128]), rng.choice([64, 64, 40, 96])
    window = [None, None, (int(rng.integers(0, 150)), int(rng.integers(0, 50))), (int(rng.integers(0, 90)), None)]
    options = {"is_causal": bool(rng.integers(2)), "window": window[rng.integers(4)],
               "softcap": rng.choice([None, None, 4.0]), "around": int(rng.integers(0, 3))}  # fmt: skip
    dtype = [torch.bfloat16, torch.float16][rng.integers(2)]
    heads = ((1, 2), (2, 1), (1, 3))[rng.integers(3)]
    named = ({}, {"consumers": 2}, {"persistent": 0}, {"block_kv": 64})[rng.integers(4)]
    lens = [max(1, int(q_lens[0])), *q_lens[1:].tolist()], [max(1, int(kv_lens[0])), *kv_lens[1:].tolist()]
    return bound(*lens, *heads, int(d), int(dv), dtype=dtype, seed=seed, **options), named


@pytest.mark.parametrize("seed", range(8))
def test_drawn_sequences_meet_the_bound(seed):
    call, named = drawn(seed)
    with recording(partial(on_the_host, ran=[])):
        assert worst_share(call, VARIANT.run(call, tiling_of(call, **named))) <= 1
