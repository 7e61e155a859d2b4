"""Attention over pages for Hopper: its kernels on the host, what they are compiled to, and what is left to others."""

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
from portakern.backends.triton.hopper import _flash, _pages, _shares  # noqa: E402
from portakern.backends.triton.hopper import paged_attention as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon  # noqa: E402
from portakern.backends.triton.lib import paged_attention as paged  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.gluon_on_host import compiles  # noqa: E402

BACKEND = registry.backend("triton")
(FAMILY,) = (f for f in BACKEND.families if f.name == "hopper")
VARIANT = BACKEND.implementation("paged_attention", FAMILY)
PORTABLE = BACKEND.implementation("paged_attention", next(f for f in BACKEND.families if f.name == "gpu"))
MODULES = {"paged_attention_pages_kernel": [_shares, _flash, gluon]}
WHOLE = ["paged_attention_schedule_kernel", "paged_attention_pages_kernel"]
APART = [*WHOLE, "paged_attention_combine_kernel"]


def bound(
    q_lens: list[int], kv_lens: list[int], kv_heads: int, group: int, d: int, dv: int | None = None, *,
    page: int = 64, room: int = 0, behind: int = 0, dtype: Any = torch.bfloat16, device: str = "cpu", seed: int = 0,
    **more: Any,
) -> Call:  # fmt: skip
    """A call as on a Hopper GPU, whose arrays are the host's or have no memory (meta). Slots that hold no key and pages
    of nobody hold NaN, entries behind the last page -1. room: entries of the table beyond those that are needed;
    behind: tokens of no sequence behind the last one."""
    rng, made, dv = np.random.default_rng(seed), torch.Generator().manual_seed(seed), dv or d
    each = max(1, *(-(-n // page) for n in kv_lens)) + room
    pages = len(kv_lens) * each + 1
    ints = {"dtype": torch.int32, "device": device}
    if device == "meta":
        shapes = (pages, page, kv_heads, d), (pages, page, kv_heads, dv)
        k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        q = torch.empty((sum(q_lens) + behind, kv_heads * group, d), dtype=dtype, device=device)
        integers = (torch.empty(s, **ints) for s in ((len(kv_lens), each), len(kv_lens), len(kv_lens) + 1))
    else:
        q = torch.randn((sum(q_lens) + behind, kv_heads * group, d), generator=made).to(dtype)
        table = rng.permutation(pages)[:-1].reshape(len(kv_lens), each)
        k, v = (torch.full((pages, page, kv_heads, of), float("nan"), dtype=dtype) for of in (d, dv))
        for s, length in enumerate(kv_lens):
            at = np.arange(length)
            for x in (k, v):
                new = torch.randn((length, kv_heads, x.shape[-1]), generator=made).to(dtype)
                x[table[s, at // page], at % page] = new
            table[s, -(-length // page) :] = -1
        starts = np.cumsum([0, *q_lens])
        integers = (torch.tensor(x, **ints) for x in (table, kv_lens, starts))
    spec = registry.find_spec("paged_attention")
    call: Call = unchecked(spec, q, k, v, *integers, return_lse=True, **more)
    return call.replace(target=targets.find("sm_90").target, interpret=False)


def tiling_of(call: Call, **named: int) -> Any:
    return tilings.resolve(VARIANT, call, named).tiling


def on_the_host(
    kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any], ran: list[str], module: Any = _pages
) -> None:  # fmt: skip
    """What a launch does, on the host: kernels of ``tl`` interpreted, the others by threads. module: the kernel's, or
    one with a fault in it."""
    ran.append(kernel.__name__)
    if kernel.__name__ in MODULES:
        host.launched(kernel, [module, *MODULES[kernel.__name__]], grid, args, plan=constexprs["plan"])
        return
    constexprs = {n: v for n, v in constexprs.items() if n != "launch_pdl"}
    if hasattr(constexprs.get("tile"), "follows"):
        constexprs["tile"] = constexprs["tile"]._replace(follows=False)
    interpreter.run(kernel, grid, *args, **constexprs)


def run(call: Call, tiling: Any, ran: list[str] | None = None, module: Any = _pages) -> Any:
    """The outputs of whoever serves the call in the end, on the host."""
    serving, tiling = VARIANT.resolve(call, tiling)
    with recording(partial(on_the_host, ran=[] if ran is None else ran, module=module)):
        return serving.run(call, tiling)


def worst_share(call: Call, outputs: Any) -> float:
    arrays = [call.framework.to_numpy(x) for x in outputs if x is not None]
    return max(testing.compare_call(call, arrays).values())


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, int], list[str]]] = {
    "decoding": (([1, 1, 1], [300, 64, 129], 2, 4, 64), {}, {}, WHOLE),
    "decoding in chunks": (([1, 1, 1], [700, 64, 1030], 2, 4, 128), {}, {"split_keys": 256}, APART),
    "decoding in chunks that are walked": (([1] * 3, [700, 64, 530], 1, 32, 64, 128), {"room": 9},
        {"split_keys": 128}, WHOLE),
    "short pages": (([1, 1], [333, 70], 2, 3, 64), {"page": 16}, {}, WHOLE),
    "pages of 8": (([2, 1], [133, 9], 1, 2, 64), {"page": 8}, {}, WHOLE),
    "long pages": (([1, 2], [700, 280], 1, 5, 72, 40), {"page": 256}, {"split_keys": 256}, APART),
    "a table with room": (([1, 1], [90, 200], 1, 4, 64), {"room": 40}, {"split_keys": 128}, APART),
    "several queries": (([3, 8, 1], [300, 8, 129], 1, 4, 64), {}, {"split_keys": 128}, APART),
    "no keys": (([1, 1, 1], [0, 200, 0], 1, 4, 64), {}, {}, WHOLE),
    "tokens of nobody": (([1, 1, 1], [100, 200, 0], 1, 4, 64), {"behind": 3}, {"split_keys": 128}, APART),
    "a sequence without queries": (([1, 0, 1], [100, 200, 50], 1, 4, 64), {}, {}, WHOLE),
    "a window": (([1, 1, 1], [600, 500, 40], 2, 2, 64), {"window": (150, 0), "softcap": 5.0},
        {"split_keys": 128}, APART),
    "a window that is walked": (([1] * 3, [600, 500, 40], 1, 32, 64, 128), {"window": (300, 0)},
        {"split_keys": 128}, WHOLE),
    "sinks": (([1, 1, 1], [700, 0, 130], 2, 4, 64), {"sinks": True}, {"split_keys": 256}, APART),
    "a chunk of a prompt": (([200], [500], 1, 4, 64), {}, {}, WHOLE),
    "prompts": (([100, 37, 0, 130], [100, 137, 20, 500], 2, 2, 128), {"behind": 2}, {"split_keys": 256}, WHOLE),
    "prompts by turns": (([150, 90], [300, 90], 1, 3, 64), {}, {"pingpong": 1}, WHOLE),
    "prompts apart": (([40, 20], [300, 768], 1, 2, 64), {"page": 32}, {"split_keys": 256}, APART),
    "prompts of more queries than keys": (([70, 40], [50, 512], 1, 1, 64), {}, {"split_keys": 256}, APART),
    "a window of prompts": (([150, 90], [700, 400], 1, 2, 72, 64), {"window": (200, 40), "is_causal": False},
        {"split_keys": 256}, WHOLE),
    "wide": (([60, 1], [150, 90], 1, 2, 256), {"dtype": torch.float16}, {}, WHOLE),
    "wide, few": (([1, 1], [350, 90], 1, 2, 256, 128), {"dtype": torch.float16}, {"split_keys": 128}, APART),
}  # fmt: skip


def case(name: str) -> tuple[Call, dict[str, int], list[str]]:
    shape, options, named, kernels = CASES[name]
    if options.get("sinks"):
        made = torch.Generator().manual_seed(3)
        options = options | {"sinks": torch.randn(shape[2] * shape[3], generator=made).to(torch.bfloat16)}
    return bound(*shape, **options), named, kernels


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda device: 2)


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name):
    """Barriers that are waited for, buffers that are handed back, rows that are masked: see ``gluon_on_host`` for what
    is not looked at."""
    call, named, kernels = case(name)
    ran: list[str] = []
    assert worst_share(call, run(call, tiling_of(call, **named), ran)) <= 1
    assert ran == kernels


def finds_on_host(module: Any, name: str) -> bool:
    """Whether the kernels' module with a fault in it shows that on the host: see tests/mutants/faults."""
    call, named, _ = case(name)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(hopper, "processors", lambda device: 2)
            patched.setattr(host, "PATIENCE", 2.0)
            patched.setattr(host, "LAZY", True)
            patched.setitem(host.LATE, 0, 3e-3)  # who computes, while copies run ahead
            return worst_share(call, run(call, tiling_of(call, **named), module=module)) > 1
    except (testing.Broken, AssertionError, IndexError, TimeoutError, RuntimeError):
        return True


def again(call: Call, s: int, queries: int, room: int, seed: int) -> Call:
    """The last ``queries`` of the ``s``-th sequence by themselves, its keys in other pages, with a wider table."""
    arrays, page = call.arrays, call.dims["page_size"]
    end, length = int(arrays["q_starts"][s + 1]), int(arrays["kv_lens"][s])
    used = -(-length // page)
    table = np.random.default_rng(seed).permutation(used + room + 3)[: used + room]
    k, v = (torch.full((used + room + 3, *arrays[n].shape[1:]), float("nan"), dtype=arrays[n].dtype)
            for n in ("k_pages", "v_pages"))  # fmt: skip
    for x, name in ((k, "k_pages"), (v, "v_pages")):
        x[table[:used]] = arrays[name][arrays["page_table"][s, :used].long()]
    table[used:] = -1
    integers = (torch.tensor(x, dtype=torch.int64) for x in (table[None], [length], [0, queries]))
    made: Call = unchecked(call.spec, arrays["q"][end - queries : end], k, v, *integers, **call.options)
    return made.replace(target=call.target, interpret=False)


@pytest.mark.parametrize(("group", "d", "page", "options"), [
    (4, 128, 64, {}), (3, 64, 16, {"window": (300, 0), "softcap": 20.0}), (8, 64, 256, {"window": (200, 0)}),
])  # fmt: skip
def test_a_query_alone_has_the_bits_that_it_has_in_a_prompt(group, d, page, options):
    """By tiles of few rows and of many, with chunks apart and walked, in other pages, with more room in the table."""
    call = bound([130, 1, 60], [700, 300, 560], 2, group, d, page=page, dtype=torch.float16, **options)
    named, ends, found = {"split_keys": 256}, call.arrays["q_starts"][1:].tolist(), set()
    o, lse = run(call, tiling_of(call, **named))
    for s, queries, room in ((0, 1, 0), (0, 4, 1000), (1, 1, 9), (2, 60, 0), (2, 2, 40)):
        one = again(call, s, queries, room, s)
        plan_one = hopper.plan_of(one, tiling_of(one, **named))
        found.add((plan_one.consumers, plan_one.apart))
        o_alone, lse_alone = run(one, tiling_of(one, **named))
        mine = slice(ends[s] - queries, ends[s])
        assert torch.equal(o_alone, o[mine]) and torch.equal(lse_alone, lse[:, mine])
    assert {(1, True), (2, False)} <= found


@pytest.mark.parametrize("few", [True, False])
def test_chunks_have_the_bits_apart_that_they_have_in_a_walk(monkeypatch, few):
    """Whoever merges them, in tiles of few rows and of many."""
    monkeypatch.setattr(hopper, "FEW", 32 if few else 0)
    call = bound([1, 2, 1, 1], [700, 64, 129, 0], 1, 4, 64, 72, dtype=torch.float16, softcap=10.0)
    ran: list[str] = []
    o, lse = run(call, tiling_of(call, split_keys=128), ran)
    monkeypatch.setattr(paged, "ENOUGH", 0)
    o_walked, lse_walked = run(call, tiling_of(call, split_keys=128), ran)
    assert ran == [*APART, *WHOLE]
    assert torch.equal(o, o_walked) and torch.equal(lse, lse_walked)


def test_calls_of_a_signature_are_planned():
    launches: list[tuple[str, int]] = []
    for call, names, grids in (
        (bound([1, 1], [130, 1100], 2, 4, 64), APART, (3, 2, 16)),
        (bound([130, 200], [130, 200], 2, 1, 64), WHOLE, (3, 2)),
    ):  # fmt: skip
        with recording(lambda kernel, grid, args, constexprs: launches.append((kernel.__name__, grid))):
            _, again_ = plan.learn(VARIANT, call, tiling_of(call))
            first = list(launches)
            launches.clear()
            assert again_ is not None
            again_(call.arrays)
        assert launches == first == list(zip(names, grids, strict=True))
        launches.clear()


def compiled_of(*calls: Call) -> set[str]:
    """What of the kernel over pages these calls have compiled."""
    found: set[str] = set()

    def note(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any]) -> None:
        if kernel.__name__ in MODULES:
            source, options = compiler.specialised(kernel, args, constexprs, targets.find("sm_90"))
            found.add(f"{source.hash()} {sorted(map(str, options.items()))}")

    with recording(note):
        for call in calls:
            VARIANT.run(call, tiling_of(call))
    return found


def test_another_length_is_no_reason_to_compile():
    few = [bound([1] * n, [keys] * n, 8, 4, 128, device="meta") for n in (1, 3, 16, 40) for keys in (1100, 4096, 9000)]
    many = [bound([q], [keys], 8, 4, 128, device="meta") for q in (300, 2048, 2049) for keys in (2100, 4096, 9000)]
    assert len(compiled_of(*few)) == 1 and len(compiled_of(*many)) == 1


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
def test_what_it_refuses(more, why):
    call = bound([1, 1], [300, 200], 1, 2, **{"d": 64, **more}, device="meta")
    found = hopper.supports(call, tilings.default(VARIANT, call).tiling)
    assert found is None if why is None else why in found


def test_what_it_says_of_tilings_and_arrays_that_do_not_fit():
    call = bound([1, 1], [300, 200], 1, 2, 128, device="meta")
    tiling = tilings.default(VARIANT, call).tiling
    for named, why in (({"num_stages": 1}, "use 2 or more"), ({"block_kv": 512}, "up to 256 keys"),
                       ({"split_keys": 64}, None), ({"num_stages": 4}, "bytes of shared memory"),
                       ({"block_kv": 256, "split_keys": 1024}, "registers a thread")):  # fmt: skip
        found = hopper.supports(call, tiling.replace(**named))
        assert found is None if why is None else why in found
    narrow = {n: call.arrays[n].to(torch.float8_e5m2) for n in ("k_pages", "v_pages")}
    assert "pages of q's dtype" in hopper.supports(call.replace(arrays={**call.arrays, **narrow}), tiling)
    assert "not tried in programs of jax" in hopper.supports(call.replace(framework=frameworks()["jax"]), tiling)


def test_what_is_left_to_the_portable_kernel():
    """With the tiling of here: pages that tiles of keys do not divide or are divided by, wide groups, scales, sinks
    where nobody merges chunks, and caches that the copy engine cannot move."""

    def served(**more: Any) -> str:
        arrays = more.pop("arrays", {})
        call = bound(
            **{"q_lens": [1, 1], "kv_lens": [300, 3000], "kv_heads": 2, "group": 4, "d": 64, **more}, device="meta"
        )
        call = call.replace(arrays={**call.arrays, **{n: f(call.arrays[n]) for n, f in arrays.items()}})
        serving, tiling = VARIANT.resolve(call, tiling_of(call))
        assert tiling.block_kv == 128
        return serving.family.name

    numbers = torch.empty(2, device="meta")
    for more, name in (
        ({}, "hopper"), ({"page": 48}, "gpu"), ({"page": 4}, "gpu"), ({"page": 512}, "hopper"),
        ({"group": 64, "kv_heads": 1}, "hopper"), ({"group": 65, "kv_heads": 1}, "gpu"), ({"k_scale": numbers}, "gpu"),
        ({"sinks": torch.empty(8, device="meta")}, "hopper"),
        ({"sinks": torch.empty(8, device="meta"), "kv_lens": [300, 900]}, "gpu"),
        ({"arrays": {"k_pages": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}}, "gpu"),
        ({"arrays": {"v_pages": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}}, "hopper"),
        ({"arrays": {"k_pages": lambda x: torch.empty(len(x), 3, *x.shape[1:], device="meta", dtype=x.dtype)[:, 1]}},
         "hopper"),
    ):  # fmt: skip
        assert served(**more) == name, more


def test_views_of_a_cache_are_read_where_they_lie():
    """Heads before slots, and keys beside values in one array, as caches of others have them."""
    call = bound([1, 3], [300, 90], 2, 4, 64, dtype=torch.float16)
    want = run(call, tiling_of(call))
    k, v = call.arrays["k_pages"], call.arrays["v_pages"]
    both = torch.stack([k, v], 1)
    for arrays in (
        {"k_pages": k.transpose(1, 2).contiguous().transpose(1, 2), "v_pages": v},
        {"k_pages": both[:, 0], "v_pages": both[:, 1]},
    ):
        view = call.replace(arrays={**call.arrays, **arrays})
        assert VARIANT.resolve(view, tiling_of(view))[0] is VARIANT
        assert all(torch.equal(a, b) for a, b in zip(run(view, tiling_of(view)), want, strict=True))


@compiles
@pytest.mark.parametrize(
    ("queries", "d", "page"), [(1, 128, 64), (1, 128, 16), (1, 64, 16), (512, 64, 64), (512, 128, 64)]
)
def test_they_compile_for_hopper_and_products_do_not_wait(queries, d, page):
    """Of prompts at d 128 registers have no room for some numbers of a tile of queries, and of a border of chunks."""
    call = bound([queries] * 4, [4096] * 4, 8, 4, d, page=page, device="meta")
    built = FAMILY.load_compiler().build(VARIANT, call, tiling_of(call))
    assert [k.name for k in built.kernels] == (APART if queries == 1 else WHOLE)
    for kernel in built.kernels:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised and not kernel.undefined
        assert (kernel.spills or 0) <= (112 if queries > 1 and d == 128 else 0)
    assert any("GMMA" in i for i in built.kernels[1].matrix)


def drawn(seed: int) -> tuple[Call, dict[str, int]]:
    """A call of any sequences, some of them without queries or keys, or with less keys than queries."""
    rng = np.random.default_rng(seed)
    number, long = int(rng.integers(1, 6)), int(rng.choice([2, 2, 90, 200]))
    q_lens = rng.integers(0, long, number)
    kv_lens = np.maximum(q_lens + rng.integers(-40, 500, number), 0) * (rng.random(number) > 0.15)
    q_lens[0], kv_lens[0] = max(1, q_lens[0]), max(1, kv_lens[0])
    d, dv = (int(x) for x in (rng.choice([64, 64, 72, 96, 128]), rng.choice([64, 64, 40, 96])))
    window = [None, None, (int(rng.integers(0, 250)), int(rng.integers(0, 50))), (int(rng.integers(0, 90)), None)]
    more = {"is_causal": bool(rng.integers(2)), "window": window[rng.integers(4)],
            "softcap": rng.choice([None, None, 4.0]), "behind": int(rng.integers(0, 3)),
            "room": int(rng.integers(0, 5)), "page": int(rng.choice([8, 16, 64, 128, 256])),
            "dtype": [torch.bfloat16, torch.float16][rng.integers(2)]}  # fmt: skip
    heads = ((1, 2), (2, 1), (1, 5), (1, 16))[rng.integers(4)]
    named = ({}, {"split_keys": 128}, {"split_keys": 256}, {"block_kv": 64, "split_keys": 128})[rng.integers(4)]
    return bound(q_lens.tolist(), kv_lens.tolist(), *heads, d, dv, seed=seed, **more), named


@pytest.mark.parametrize("seed", range(12))
def test_drawn_sequences_meet_the_bound(seed):
    call, named = drawn(seed)
    with recording(partial(on_the_host, ran=[])):
        assert worst_share(call, VARIANT.run(call, tiling_of(call, **named))) <= 1


@pytest.mark.parametrize("lazy", [False, True], ids=["copies soon", "copies late"])
@pytest.mark.parametrize("late", [{0: 3e-3}, {1: 3e-3}], ids=["consumer", "producer"])
def test_who_is_late_meets_what_is_meant(monkeypatch, late, lazy):
    """Queries of a unit lie in the buffer of the unit before the last, keys where earlier ones were."""
    monkeypatch.setattr(host, "LAZY", lazy)
    for role, seconds in late.items():
        monkeypatch.setitem(host.LATE, role, seconds)
    call = bound([1, 2, 1, 1, 2, 1], [300, 20, 129, 400, 7, 33], 2, 4, 64, page=32)
    assert worst_share(call, run(call, tiling_of(call, split_keys=128))) <= 1
