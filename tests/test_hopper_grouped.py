"""Products of groups of rows on Hopper where there is no GPU: on the host, and what is compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry, targets, tilings
from portakern.core.binder import unchecked
from portakern.core.call import Call
from portakern.core.framework import frameworks

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import compiler, interpreter, plan  # noqa: E402
from portakern.backends.triton.hopper import _grouped, _warps  # noqa: E402
from portakern.backends.triton.hopper import grouped_matmul as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon  # noqa: E402
from portakern.backends.triton.lib import matmul as order_of_tiles  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.gluon_on_host import compiles  # noqa: E402

BACKEND = registry.backend("triton")
(FAMILY,) = (f for f in BACKEND.families if f.name == "hopper")
MODULES = [_grouped, _warps, gluon, order_of_tiles]
FORWARD, BACKWARD = OPS = "grouped_matmul", registry.find_spec("grouped_matmul").vjp
BY_ROLES = {FORWARD: [f"{FORWARD}_by_roles"], BACKWARD: [f"{FORWARD}_by_roles", f"{BACKWARD}_by_roles"]}
WIDE, MIDDLE, NARROW = (
    {"block_n": n, "num_stages": stages, "epilogue_subtile": halves, "group": group}
    for n, stages, halves, group in ((256, 4, 1, 8), (128, 3, 1, 1), (64, 4, 0, 2))
)
WHOLE = {**WIDE, "num_stages": 2, "epilogue_subtile": 0}


def variant(op: str) -> Any:
    return BACKEND.implementation(op, FAMILY)


def bound(
    op: str, sizes: list[int], k: int, n: int, *, rest: int = 0, dtype: Any = torch.bfloat16, device: str = "cpu",
    seed: int = 0, transposed: bool = False, ends: Any = None, **options: Any,
) -> Call:  # fmt: skip
    """A call as on a Hopper GPU, whose arrays are the host's or have no memory (meta). rest: rows of no group, which
    hold NaN. transposed: matrices lie so."""
    made, rows = torch.Generator().manual_seed(seed), sum(sizes) + rest

    def normal(*shape: int) -> Any:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=made).to(dtype)

    a, d_c, b = normal(rows, k), normal(rows, n), normal(len(sizes), *((n, k) if transposed else (k, n)))
    for x in (a, d_c):
        x[sum(sizes) :] = float("nan")
    if ends is None:
        ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)
    arrays = (a, b.mT if transposed else b, ends, *([d_c] if op.endswith("vjp") else []))
    call: Call = unchecked(registry.find_spec(op), *arrays, **options)
    return call.replace(target=targets.find("sm_90").target, interpret=False)


def tiling_of(call: Call, **named: int) -> Any:
    return tilings.resolve(variant(call.spec.name), call, named).tiling


def on_the_host(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any], ran: list[str]) -> None:
    """What a launch does, on the host: kernels of ``tl`` interpreted, the others by threads."""
    ran.append(kernel.__name__)
    if not kernel.is_gluon():
        interpreter.run(kernel, grid, *args, **constexprs)
        return
    host.launched(kernel, MODULES, grid, args, plan=constexprs["plan"])


def run(call: Call, named: dict[str, int], ran: list[str] | None = None) -> Any:
    with recording(partial(on_the_host, ran=[] if ran is None else ran)):
        return variant(call.spec.name).run(call, tiling_of(call, **named))


def worst_share(call: Call, outputs: Any) -> float:
    arrays = [call.framework.to_numpy(x) for x in outputs if x is not None]
    return max(testing.compare_call(call, arrays).values())


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda device: 2)


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]] = {
    "tiles in two halves": (([200, 90, 131], 136, 264), {}, WIDE),
    "whole tiles": (([200, 90, 131], 136, 520), {}, WHOLE),
    "matrices transposed": (([130, 257], 72, 264), {"transposed": True}, WIDE),
    "128 columns": (([200, 1, 131], 200, 264), {"dtype": torch.float16}, MIDDLE),
    "64 columns": (([200, 90, 131], 64, 136), {"transposed": True}, NARROW),
    "groups without rows": (([0, 0, 70, 0, 129, 0, 0], 72, 72), {}, NARROW),
    "no group has a row": (([0, 0, 0], 64, 72), {"rest": 150}, NARROW),
    "rows of no group": (([100, 0, 30], 72, 136), {"rest": 140}, MIDDLE),
    "groups end at tiles": (([128, 127, 129, 256, 64, 65], 64, 64), {}, NARROW),
    "groups of one row": (([1] * 20, 72, 72), {}, NARROW),
    "one group": (([300], 136, 136), {}, MIDDLE),
    "one row": (([1], 8, 8), {}, NARROW),
    "hundreds of groups": (([0, 2, 0, 0, 1] * 60, 8, 8), {"rest": 3}, NARROW),
    "many rows of tiles": (([700, 40], 64, 200), {}, NARROW),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name, op):
    """Barriers that are waited for, buffers that are handed back, rows that are cut off: see ``gluon_on_host`` for what
    is not looked at."""
    shape, options, named = CASES[name]
    call, ran = bound(op, *shape, **options), []
    assert worst_share(call, run(call, named, ran)) <= 1
    assert ran == BY_ROLES[op]


@pytest.mark.parametrize("named", [WIDE, NARROW], ids=["256 columns", "64 columns"])
def test_a_group_has_the_bits_that_it_has_alone(named):
    """In any company, of sizes that no tile divides, and in other tiles."""
    sizes, k, n = [70, 0, 190, 33], 136, 136
    call = bound("grouped_matmul_vjp", sizes, k, n, rest=9, dtype=torch.float16)
    a, b, ends, d_c = (call.arrays[name] for name in ("a", "b", "group_ends", "d_c"))
    forward = bound("grouped_matmul", sizes, k, n, rest=9, dtype=torch.float16)
    (c,), (d_a, d_b) = run(forward, named), run(call, named)
    for g, size in enumerate(sizes):
        if not size:
            continue
        rows = slice(int(ends[g]) - size, int(ends[g]))
        alone = [call.replace(arrays={"a": a[rows], "b": b[g : g + 1], "group_ends": torch.tensor([size]),
                                      "d_c": d_c[rows]}, dims={**call.dims, "rows": size, "groups": 1})]  # fmt: skip
        arrays = {name: alone[0].arrays[name] for name in ("a", "b", "group_ends")}
        alone.append(forward.replace(arrays=arrays, dims=alone[0].dims))
        (d_a_alone, d_b_alone), (c_alone,) = (run(one, MIDDLE) for one in alone)
        assert torch.equal(c_alone, c[rows]) and torch.equal(d_a_alone, d_a[rows])
        assert torch.equal(d_b_alone[0], d_b[g])


@pytest.mark.parametrize("op", OPS)
def test_what_other_groups_hold_reaches_nothing(op):
    """Tiles reach over a group's end, where the next one has NaN: 0 times NaN is NaN."""
    call = bound(op, [70, 40, 100], 72, 72)
    for name in ("a", "d_c"):
        if name in call.arrays:
            call.arrays[name][70:110] = float("nan")
    first, *rest = run(call, NARROW)
    clean = torch.ones(210, dtype=torch.bool)
    clean[70:110] = False
    assert torch.isfinite(first[clean]).all() and torch.isnan(first[~clean]).all()
    for d_b in rest:
        assert torch.isfinite(d_b[[0, 2]]).all() and torch.isnan(d_b[1]).all()


@pytest.mark.parametrize("late", [{0: 3e-3}, {1: 3e-3}, {2: 3e-3}], ids=["first group", "second group", "producer"])
def test_who_is_late_multiplies_the_tile_that_is_meant(monkeypatch, late):
    """A group's last tile may have no rows for the second group of warps, which hands back what it does not read."""
    for role, seconds in late.items():
        monkeypatch.setitem(host.LATE, role, seconds)
    call = bound("grouped_matmul", [140, 20, 0, 64, 200, 3], 264, 72)
    assert worst_share(call, run(call, {**NARROW, "num_stages": 2})) <= 1


@pytest.mark.parametrize("ends", [[3, 40, 9, 10], [-7, 3, 9, 12], [9, 3, 3, 12], [5, 2**31 - 1, -(2**31), 4]], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_ends_that_break_the_rule_reach_no_memory_beyond_the_rows(op, ends):
    whole = [torch.full((36, width), torch.nan) for width in (8, 16)]
    a, d_c = (x[12:24].fill_(7.0) for x in whole)
    for kind in (torch.int32, torch.int64):
        arrays = a.bfloat16(), torch.ones(4, 8, 16).bfloat16(), torch.tensor(ends, dtype=kind)
        call = unchecked(registry.find_spec(op), *arrays, *([d_c.bfloat16()] if op.endswith("vjp") else []))
        found = run(call.replace(target=targets.find("sm_90").target, interpret=False), NARROW)
        assert not any(torch.isnan(x).any() for x in found)


def test_arrays_that_cannot_be_described_are_copied():
    a, b, d_c = torch.randn(60, 81)[:, 1:], torch.randn(3, 80, 73)[:, :, 1:], torch.randn(60, 1).expand(60, 72)
    arrays = a.bfloat16().expand(60, 80), b.bfloat16(), torch.tensor([20, 20, 55]), d_c.bfloat16()
    odd = torch.zeros(60 * 81 + 1, dtype=torch.bfloat16)[1:].view(60, 81)[:, :80].copy_(arrays[0])
    wide = torch.zeros(3, 80, 73, dtype=torch.bfloat16)[:, :, 1:].copy_(arrays[1])
    call = unchecked(registry.find_spec("grouped_matmul_vjp"), odd, wide, arrays[2], arrays[3].expand(60, 72))
    ran: list[str] = []
    call = call.replace(target=targets.find("sm_90").target, interpret=False)
    assert worst_share(call, run(call, NARROW, ran)) <= 1
    assert ran[0] == "matmul_gather_tiles" or ran[0] == "matmul_shift_rows"


@pytest.mark.parametrize("op", OPS)
def test_other_sizes_are_no_reason_to_compile(op):
    compiled = set()
    for sizes in ([640, 700], [1000, 1025, 4096], [30] * 64, [0, 129]):
        call, found = bound(op, sizes, 512, 1408, device="meta"), []
        with recording(lambda *launch, found=found: found.append(launch)):
            variant(op).run(call, tiling_of(call, **WHOLE))
        for kernel, _, args, constexprs in found:
            source, options = compiler.specialised(kernel, args, constexprs, targets.find("sm_90"))
            compiled.add((kernel.__name__, source.hash(), *sorted(map(str, options.items()))))
    assert len(compiled) == len(BY_ROLES[op])


def test_the_tile_follows_how_many_rows_groups_have(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda device: 132)

    def tile(op, rows, groups, k, n, *wants):
        call = bound(op, [rows // groups] * groups, k, n, device="meta")
        found = variant(op).key(call.replace(wants=wants or call.wants))
        return found["tile"] if found["rounds"] < 4 else f"{found['tile']}, many rounds"

    assert tile("grouped_matmul", 4096, 8, 2048, 2048) == "128 x 256"
    assert tile("grouped_matmul", 8192, 64, 2048, 1408) == "128 x 256"
    assert tile("grouped_matmul", 64, 8, 2048, 2048) == "128 x 128"
    assert tile("grouped_matmul", 8, 4, 2048, 2048) == "128 x 64"
    assert tile("grouped_matmul", 8, 8, 4096, 14336) == "128 x 256"  # memory needs longer than either tile
    assert tile("grouped_matmul_vjp", 8192, 8, 4096, 14336) == "128 x 256, many rounds"
    assert tile("grouped_matmul_vjp", 512, 128, 2048, 768, "d_a") == "128 x 256"
    assert tile("grouped_matmul_vjp", 512, 128, 2048, 768, "d_b") == "128 x 128, many rounds"


def test_each_gradient_has_the_tile_that_suits_it_unless_one_is_named(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda device: 132)
    call = bound("grouped_matmul_vjp", [4] * 128, 2048, 768, device="meta")

    def columns(tiling):
        found: list[int] = []
        with recording(lambda kernel, grid, args, constexprs: found.append(constexprs["plan"].columns)):
            variant("grouped_matmul_vjp").run(call, tiling)
        return found

    assert columns(tiling_of(call)) == [256, 128]
    assert tiling_of(bound("grouped_matmul", [512] * 8, 2048, 2048, device="meta"))["num_stages"] == 4
    assert tiling_of(bound("grouped_matmul", [1024] * 8, 4096, 14336, device="meta"))["num_stages"] == 3
    assert columns(tiling_of(call, **NARROW)) == [64, 64]


REFUSED = {
    "float32": ({"dtype": torch.float32}, {}, "of float32: this kernel takes one of float16 and bfloat16"),
    "another result": ({"out_dtype": "float32"}, {}, "of bfloat16 and float32: this kernel takes one"),
    "odd rows": ({"k": 60}, {}, "n = 72 and k = 60: the copy engine takes rows of multiples of 8"),
    "other tiles": ({}, {"block_m": 64}, "tiles of 64 x 64 x 64; this kernel takes 128 x 64, 128 or 256 x 64"),
    "halves of 64": ({}, {"epilogue_subtile": 1}, "tiles of 64 columns leave in one; use epilogue_subtile=0"),
    "shared memory": ({}, {"block_n": 256, "num_stages": 5}, "use a smaller num_stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_the_portable_kernel(name):
    options, named, reason = REFUSED[name]
    call = bound("grouped_matmul", [100, 30], options.pop("k", 64), 72, device="meta", **options)
    config = tilings.default(variant("grouped_matmul"), call).tiling.replace(**{**NARROW, **named})
    assert reason in hopper.supports(call, config)


def test_arrays_of_another_library_are_the_portable_kernels():
    call = bound("grouped_matmul", [100, 30], 64, 72, device="meta")
    found = hopper.supports(call.replace(framework=frameworks()["jax"]), tiling_of(call))
    assert found is not None and "not tried in programs of jax" in found


def test_cotangents_of_another_dtype_are_the_portable_kernels():
    call = bound("grouped_matmul_vjp", [100, 30], 64, 72, device="meta")
    wide = unchecked(call.spec, *(call.arrays[n] for n in ("a", "b", "group_ends")), call.arrays["d_c"].float())
    assert "of bfloat16 and float32" in hopper.supports(wide.replace(target=call.target, interpret=False),
                                                        tiling_of(call))  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_calls_of_a_signature_are_planned(op):
    call = bound(op, [130, 200], 64, 72)
    launches: list[tuple[str, int]] = []
    with recording(lambda kernel, grid, args, constexprs: launches.append((kernel.__name__, grid))):
        _, again = plan.learn(variant(op), call, tiling_of(call))
        first = list(launches)
        launches.clear()
        assert again is not None
        again(call.arrays)
    assert launches == first == [(name, 2) for name in BY_ROLES[op]]


def test_explain_names_the_variant():
    told = pk.op("grouped_matmul", backend="triton").explain(
        torch.zeros(8, 16), torch.zeros(2, 16, 8), torch.tensor([3, 8])
    )
    assert "variant gpu: serves this call" in told and "variant hopper: not for cpu" in told


@compiles
@pytest.mark.parametrize("named", [{}, WHOLE, {**MIDDLE, "num_stages": 6, "epilogue_subtile": 0}], ids=str)
def test_they_compile_for_hopper_and_products_do_not_wait(named):
    built = []
    for op, transposed in zip(OPS, (True, False), strict=True):
        call = bound(op, [512] * 8, 2048, 2048, device="meta", transposed=transposed)
        built += FAMILY.load_compiler().build(variant(op), call, tiling_of(call, **named)).kernels
    assert [k.name for k in built] == [name for op in OPS for name in BY_ROLES[op]]
    for kernel in built:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised and not kernel.undefined
        assert not kernel.spills and any("GMMA" in i for i in kernel.matrix), kernel.name


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("op", OPS)
def test_drawn_groups_meet_the_bound(op, seed):
    """Groups of any sizes, some of them empty, in any tiles."""
    rng = np.random.default_rng(seed)
    sizes = (rng.integers(0, 260, rng.integers(1, 7)) * (rng.random() > 0.2)).tolist()
    k, n = 8 * rng.integers(1, 30, 2)
    options = {"rest": int(rng.integers(0, 3)) * 60 + (not any(sizes)), "transposed": bool(rng.integers(2))}
    dtype = [torch.bfloat16, torch.float16][rng.integers(2)]
    call = bound(op, sizes, int(k), int(n), seed=seed, dtype=dtype, **options)
    assert worst_share(call, run(call, [WIDE, WHOLE, MIDDLE, NARROW][seed % 4])) <= 1
