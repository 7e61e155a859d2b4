"""Products of 8-bit numbers on Hopper where there is no GPU: on the host, and what is compiled."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry, targets, tilings
from portakern.core.binder import unchecked
from portakern.core.call import Call

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import interpreter  # noqa: E402
from portakern.backends.triton.hopper import _scaled, _tiles, _warps  # noqa: E402
from portakern.backends.triton.hopper import scaled_matmul as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon  # noqa: E402
from portakern.backends.triton.lib import matmul as order_of_tiles  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.gluon_on_host import compiles  # noqa: E402

BACKEND = registry.backend("triton")
(FAMILY,) = (f for f in BACKEND.families if f.name == "hopper")
VARIANT = BACKEND.implementation("scaled_matmul", FAMILY)
SM_90 = targets.find("sm_90")
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

SCALES: dict[str, tuple[tuple[str, str, str, str], dict[str, int]]] = {
    "tensors": (("1", "1", "1", "1"), {}),
    "rows": (("m", "1", "1", "n"), {}),
    "blocks": (("m", "k", "k", "n"), {"n_width": 128}),
    "blocks of columns": (("m", "k", "k", "n"), {}),
    "rows beside blocks": (("m", "1", "k", "n"), {"n_width": 128}),
    "squares": (("m", "k", "k", "n"), {"m_width": 128, "n_width": 128}),
    "odd rows": (("m", "1", "1", "n"), {"m_width": 3, "n_width": 5}),
}
"""Name -> along which axes scale_a and scale_b have blocks, and of what widths."""


def bound(
    m: int, n: int, k: int, scales: str = "tensors", dtypes: tuple[Any, Any] = (E4M3, E4M3), bias: bool = False,
    device: str = "cpu", **options: Any,
) -> Call:  # fmt: skip
    """A call as on a Hopper GPU, whose arrays are the host's or have no memory (meta)."""
    made = torch.Generator().manual_seed(m + n + k)
    axes, widths = SCALES[scales]
    width = {"m_width": 1, "n_width": 1, "k_width": 128} | widths
    width["k_width"] = options.get("k_width", 128)
    extents = {"1": 1} | {
        axis: -(-extent // width[f"{axis}_width"]) for axis, extent in zip("mnk", (m, n, k), strict=True)
    }

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        x = torch.randn(shape, generator=made)
        return x.to(dtype) if dtype.is_floating_point else (x * 40).clamp(-128, 127).to(dtype)

    of_a, of_b = ((extents[axes[i]], extents[axes[i + 1]]) for i in (0, 2))
    arrays = [
        array((m, k), dtypes[0]), array((n, k), dtypes[1]).t(), array(of_a, torch.float32), array(of_b, torch.float32),
        array((n,), torch.float32) if bias else None,
    ]  # fmt: skip
    call: Call = unchecked(registry.find_spec("scaled_matmul"), *arrays, **widths, **options)
    return call.replace(target=SM_90.target, interpret=False)


def tiling_of(call: Call, **named: int) -> Any:
    return tilings.resolve(VARIANT, call, named).tiling


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(_tiles, "MULTIPROCESSORS", 2)


def runs_with(module: Any, folder: pathlib.Path) -> Any:
    """What gives c of a call, on the host, and the plan of its kernel, which stands in ``module``."""
    modules = [host.on_host(module, folder), host.on_host(_warps, folder), gluon, order_of_tiles]

    def run(call: Call, **named: int) -> tuple[Any, Any]:
        plans = []

        def on_the_host(kernel: Any, grid: int, args: Any, constexprs: Any) -> None:
            if not kernel.is_gluon():
                interpreter.run(kernel, grid, *args, **constexprs)
                return
            plans.append(constexprs["plan"])
            host.launched(kernel, modules, grid, args, plan=constexprs["plan"])

        tiling = tiling_of(call, **named)
        assert VARIANT.supports(call, tiling) is None
        with recording(on_the_host):
            (c,) = VARIANT.run(call, tiling)
        (plan,) = plans
        return c, plan

    return run


@pytest.fixture
def run(tmp_path):
    return runs_with(_scaled, tmp_path)


def worst_share(call: Call, c: Any) -> float:
    return max(testing.compare_call(call, [call.framework.to_numpy(c)]).values())


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]] = {
    "promoted, an even number of steps": ((200, 264, 512), {}, {"more_columns": 0}),
    "promoted, an odd number": ((130, 136, 368), {"bias": True}, {"more_columns": 0}),
    "promoted, one step": ((70, 72, 48), {}, {}),
    "promoted, one sum at a time": ((200, 264, 512, "rows"), {}, {"overlap": 0}),
    "promoted, 128 x 192": ((200, 392, 400, "rows"), {"bias": True}, {"more_columns": 1, "num_stages": 3}),
    "promoted, 128 x 256": ((140, 520, 400), {}, {"more_columns": 2, "overlap": 0, "num_stages": 4}),
    "promoted, 128 x 64": ((200, 120, 300 // 16 * 16, "odd rows"), {}, {"block_n": 64, "more_columns": 0}),
    "fast": ((200, 520, 512, "rows"), {"precision": "fast", "bias": True}, {"block_n": 256, "num_stages": 3}),
    "fast, float32": ((140, 300, 512), {"precision": "fast", "out_dtype": "float32"}, {"block_n": 128}),
    "both floats": ((130, 136, 368, "rows", (E4M3, E5M2)), {"out_dtype": "float16"}, {}),
    "int8": ((200, 520, 512, "rows", (INT8, INT8)), {"bias": True}, {}),
    "int8, blocks": ((130, 264, 400, "blocks", (INT8, INT8)), {}, {}),
    "blocks": ((200, 264, 528, "blocks"), {"bias": True}, {}),
    "blocks, one sum at a time": ((200, 264, 528, "blocks"), {}, {"overlap": 0}),
    "blocks, 128 x 256": ((140, 520, 400, "blocks"), {}, {"more_columns": 2, "overlap": 0, "num_stages": 3}),
    "rows beside blocks": ((130, 136, 400, "rows beside blocks"), {}, {}),
    "squares": ((260, 264, 400, "squares"), {}, {}),
    "c in rows that begin anywhere": ((130, 137, 256, "rows"), {"bias": True}, {}),
    "few rows": ((7, 200, 400, "rows"), {"bias": True}, {}),
    "few rows, two groups": ((33, 200, 660), {"bias": True}, {"block_n": 128, "num_warps": 8, "num_stages": 6}),
    "few rows, blocks": ((64, 200, 400, "blocks"), {}, {}),
    "few rows, fast": ((1, 130, 400), {"precision": "fast"}, {}),
    "few rows, int8": ((16, 130, 400, "rows", (INT8, INT8)), {"out_dtype": "float32"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name, run):
    """Barriers that are waited for, buffers that are handed back, scales, rows that are masked: see ``gluon_on_host``
    for what is not looked at."""
    shape, options, named = CASES[name]
    call = bound(*shape, **options)
    c, plan = run(call, **named)
    assert plan.turned == name.startswith("few") and plan.blocks == ("block" in name or name == "squares")
    assert worst_share(call, c) <= 1


def finds_on_host(module: Any, name: str) -> bool:
    """Whether the kernel's module with a fault in it shows that on the host: see tests/mutants/faults."""
    shape, options, named = CASES[name]
    call = bound(*shape, **options)
    try:
        with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as folder:
            patched.setattr(_tiles, "MULTIPROCESSORS", 2)
            patched.setattr(host, "PATIENCE", 2.0)
            patched.setattr(host, "LAZY", True)
            patched.setitem(host.LATE, 0, 3e-3)  # who multiplies, while copies run ahead
            return worst_share(call, runs_with(module, pathlib.Path(folder))(call, **named)[0]) > 1
    except (testing.Broken, AssertionError, IndexError, TimeoutError, RuntimeError):
        return True


@pytest.mark.parametrize("precision", ["promoted", "fast"])
def test_sums_leave_the_unit_after_128_products(precision, run, monkeypatch):
    began: list[bool] = []
    begin = host.warpgroup_mma

    def noted(a, b, acc, use_acc=True, is_async=False):
        assert a.shape[1] == 128
        began.append(not use_acc)
        return begin(a, b, acc, use_acc, is_async)

    monkeypatch.setattr(host, "warpgroup_mma", noted)
    run(bound(70, 64, 400, precision=precision))
    assert len(began) == 8 and all(began) == (precision == "promoted")


@pytest.mark.parametrize("scales", ["rows", "blocks"])
@pytest.mark.parametrize("precision", ["promoted", "fast"])
def test_bits_do_not_tell_the_tile(scales, precision, run):
    """Of c^T or of c, of one group or two, with whatever beside: the same products and scales in the same order."""
    call = bound(64, 136, 528, scales, bias=True, precision=precision, out_dtype="float32")
    want, _ = run(call)
    plain = {"swap_ab": 0, "block_m": 128, "num_warps": 8, "num_stages": 3}
    others = [{"block_n": 128, "num_warps": 8, "num_stages": 4, "overlap": o} for o in (0, 1)]
    if precision == "fast" and scales == "rows":
        others += [plain | {"block_n": n} for n in (64, 128, 256)]
    else:
        others += [plain | {"block_n": 128, "overlap": o} for o in (0, 1)]
        others += [plain | {"block_n": 128, "overlap": 0, "more_columns": 2}]
    for named in others:
        found, _ = run(call, **named)
        assert torch.equal(found, want), named
    rows = (slice(5, 6), slice(0, 30))
    for own in rows:
        arrays = call.arrays | {name: call.arrays[name][own] for name in ("a", "scale_a")}
        part = unchecked(call.spec, *(arrays[n] for n in ("a", "b", "scale_a", "scale_b", "bias")), **call.options)
        found, _ = run(part.replace(target=call.target, interpret=False))
        assert torch.equal(found, want[own])


@pytest.mark.parametrize("k", [256, 250])
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (INT8, INT8)])
def test_operands_that_lie_otherwise_are_copied(k, dtypes, run):
    call = bound(130, 72, k, "rows", dtypes)
    want, _ = run(call)
    b, a = call.arrays["b"].contiguous(), call.arrays["a"].t().contiguous().t()
    for arrays in ({"b": b}, {"a": a}, {"a": a, "b": b}):
        found, _ = run(call.replace(arrays=call.arrays | arrays))
        assert torch.equal(found, want)


def test_what_it_leaves_to_the_portable_kernel():
    served = bound(200, 264, 512)
    assert VARIANT.supports(served, tiling_of(served)) is None
    for call, why in (
        (bound(200, 264, 512, precision="ieee"), "precision 'ieee'"),
        (bound(200, 264, 512, "blocks", k_width=256), "must be 128 long"),
        (bound(200, 264, 512, "blocks of columns"), "a multiple of 128"),
    ):
        assert why in (hopper.refuse_call(call) or "")


@pytest.mark.parametrize(
    ("call", "named", "why"),
    [
        (bound(200, 264, 512), {"block_n": 256}, "columns of sums in registers"),
        (bound(200, 264, 512), {"more_columns": 2}, "columns of sums in registers"),
        (bound(200, 264, 512), {"block_k": 64}, "expected block_k=128"),
        (bound(200, 264, 512), {"num_warps": 4}, "num_warps=4 or 8"),
        (bound(200, 264, 512, precision="fast"), {"more_columns": 1}, "stay in the matrix unit"),
        (bound(200, 264, 512, dtypes=(INT8, INT8)), {"block_n": 256}, "at most 128 columns"),
        (bound(20, 264, 512), {"more_columns": 1}, "swap_ab=1 has at most 64 rows"),
        (bound(200, 264, 512, "blocks"), {"more_columns": 1, "num_stages": 4}, "no block of 128 divides"),
    ],
)
def test_tilings_that_cannot_serve_are_refused(call, named, why):
    tiling = tiling_of(call).replace(**named)
    assert why in (VARIANT.supports(call, tiling) or "")


def test_explain_says_why_a_cpu_has_another_kernel():
    a, b = torch.zeros(4, 32).to(E4M3), torch.zeros(16, 32).to(E4M3).t()
    told = pk.op("scaled_matmul", backend="triton").explain(a, b, torch.ones(1, 1), torch.ones(1, 1))
    assert "variant hopper: not for cpu" in told and "variant gpu: serves this call" in told


COMPILED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "promoted": ((8192, 8192, 8192), {}, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    "fast": ((8192, 8192, 8192, "rows"), {"precision": "fast"}, "QGMMA.64x256x32.F32.E4M3.E4M3"),
    "both floats": ((4096, 1024, 4096, "rows", (E4M3, E5M2)), {"bias": True}, "E4M3.E5M2"),
    "blocks": ((4096, 4096, 4096, "blocks"), {}, "QGMMA.64x128x32.F32.E4M3.E4M3"),
    "int8": ((4096, 4096, 4096, "rows", (INT8, INT8)), {"bias": True}, "IGMMA.64x128x32.S8.S8"),
    "few rows": ((16, 14336, 4096), {}, "QGMMA.64x16x32.F32.E4M3.E4M3"),
    "few rows, blocks": ((64, 4096, 4096, "blocks"), {}, "QGMMA.64x64x32.F32.E4M3.E4M3"),
    "c in rows that begin anywhere": ((1000, 3001, 4096, "rows"), {"out_dtype": "float32"}, "QGMMA"),
}


@compiles
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills_and_products_do_not_wait(name, monkeypatch):
    monkeypatch.setattr(_tiles, "MULTIPROCESSORS", 132)
    shape, options, instruction = COMPILED[name]
    call = bound(*shape, **options, device="meta")
    tiling = tiling_of(call)
    assert VARIANT.supports(call, tiling) is None
    (kernel,) = VARIANT.family.load_compiler().build(VARIANT, call, tiling).kernels
    assert kernel.name == "scaled_matmul_by_roles" and kernel.over(SM_90) is None
    assert not kernel.serialised and not kernel.spills and not kernel.leaking
    assert any(instruction in i for i in kernel.matrix), kernel.matrix
