"""Rows that lie side by side, which Triton's kernels take in strips."""

import json

import pytest

import portakern as pk
from portakern import testing
from portakern.backends.triton import BACKEND
from portakern.core import registry, targets
from portakern.tools.compile import abstract

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib.columns import PARTS, side_by_side, tile_columns  # noqa: E402
from tests.launched import named  # noqa: E402

(PORTABLE,) = (f for f in BACKEND.families if f.name == "gpu")
LONG = 1100  # more than one tile, and a part that ends within its second
SMALL = {"block_rows": 4, "block_n": 128, "num_warps": 1}


def with_an_axis():
    """The ops that reduce an axis of the caller's choice."""
    found = []
    for name in sorted(registry.ops()):
        options = {o.name for o in registry.find_spec(name).options}
        if "axis" in options and BACKEND.module_of(name, PORTABLE):
            found.append(name)
    return found


OPS = with_an_axis()


def shapes(name, shape, axis):
    spec = registry.find_spec(name)
    rest = [*shape[:axis], *shape[axis + 1 :]]
    return {a.name: rest if a.dims[0].factors == ("rest",) else list(shape) for a in spec.arrays}


def launches(name, shape, axis, strides=None, dtype="bfloat16", arch="sm_90", tiling=None):
    """What a call launches for a target: the constants of its kernels, by their names, and their grids."""
    spec, impl = registry.find_spec(name), BACKEND.implementation(name, PORTABLE)
    form = {"arrays": {}, "options": {"axis": axis}, "wants": None}
    for array, extents in shapes(name, shape, axis).items():
        form["arrays"][array] = [extents, dtype, list(strides) if strides and len(extents) == len(shape) else None]
    call, used = abstract.abstract_call(spec, impl, form, targets.find(arch), tiling or {})
    found = {}
    with recording(
        lambda kernel, grid, args, constants: found.update({kernel.__name__: named(constants) | {"grid": grid}})
    ):
        impl.run(call, used)
    return found


def randoms(name, shape, axis, dtype=None):
    generator = torch.Generator().manual_seed(len(shape))
    return {
        a: torch.randn(*extents, generator=generator).to(dtype or torch.bfloat16)
        for a, extents in shapes(name, shape, axis).items()
    }


def result(name, arrays, axis, **tiling):
    found = pk.op(name, backend="triton", tiling=tiling)(**arrays, axis=axis)
    return found if isinstance(found, torch.Tensor) else found[0]


def test_every_op_with_an_axis_is_here():
    assert len(OPS) == 4 and {registry.find_spec(name).vjp for name in OPS} == {None, *OPS[1::2]}


@pytest.mark.parametrize("name", OPS)
def test_rows_side_by_side_are_read_along_memory(name):
    """In strips, with vectors where all of them are aligned, whole while they are short and else in parts."""
    whole, long = launches(name, (1000, 4096), 0), launches(name, (4096, 4096), 0)
    assert [*whole] == [f"{name}_columns_kernel"] and [*long] == ["softmax_part_sums_kernel", f"{name}_columns_kernel"]
    assert all(c["unit"] == 8 for c in (*whole.values(), *long.values()))
    assert all(c["unit"] == 1 for c in launches(name, (4096, 4095), 0).values())
    assert long["softmax_part_sums_kernel"]["parts"] == PARTS
    assert long["softmax_part_sums_kernel"]["grid"] == 128 * PARTS
    assert launches(name, (4096, 4096), 1).keys() == {f"{name}_kernel"}


@pytest.mark.parametrize("name", OPS)
def test_so_are_those_of_a_turned_array(name):
    """The last axis of a matrix whose columns lie one after another."""
    assert f"{name}_columns_kernel" in launches(name, (4096, 4096), 1, (1, 4096))
    assert f"{name}_columns_kernel" in launches(name, (8, 64, 2048), 1)
    assert f"{name}_kernel" in launches(name, (8, 2048, 64), 2)


def test_how_many_there_are_does_not_say_how_they_are_read():
    """Strides do, as long as the row is one of a strip."""
    x = torch.empty(100, 40)
    assert side_by_side(x, 0) and side_by_side(x[:, :1], 0) and not side_by_side(x, 1)
    assert not side_by_side(x[:, ::2], 1) and not side_by_side(x[:1], 1) and not side_by_side(torch.empty(5), 0)


CASES = [
    ((LONG, 5), 0, "bfloat16", {}),
    ((LONG, 16), 0, "float32", SMALL),
    ((3, 140, 33), 1, "bfloat16", {}),
    ((3, 140, 33), 1, "float32", SMALL),
    ((2, 3), 0, "bfloat16", {}),
    ((3, 300, 2), 1, "float16", SMALL | {"block_rows": 64}),
]


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("call", CASES, ids=lambda c: f"{c[0]}-{c[2]}-{len(c[3])}")
@pytest.mark.parametrize("name", OPS)
def test_they_are_right_and_nothing_beside_them_is_touched(name, call, layout):
    """The checker's run of one case: values within the bound, memory that was poisoned before, arrays with canaries
    around them, inputs as they were, and the same bits twice."""
    shape, axis, dtype, tiling = call
    given = shapes(name, shape, axis)
    case = {"dtype": dtype, "shapes": given, "options": {"axis": axis}, "regime": "normal", "seed": 3}
    case["tiling"] = dict(tiling or tile_columns(shape[axis], "cpu"))
    if layout == "sliced":
        case["layouts"] = dict.fromkeys(given, "sliced")
    report = testing.replay(name, json.dumps(case), backend="triton")
    assert report.passed, report.failures


@pytest.mark.parametrize("n", [140, LONG])
@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_in_strips_of_any_width(name, n):
    """Beside any number of others, and in an array of its own with few of them."""
    arrays = randoms(name, (n, 37), 0, torch.float32)
    whole = result(name, arrays, 0)
    for block_rows, warps in ((1, 1), (8, 4), (128, 8)):
        tile = dict(tile_columns(n, "cpu")) | {"block_rows": block_rows, "num_warps": warps}
        assert torch.equal(result(name, arrays, 0, **tile), whole)
    for some in (slice(0, 1), slice(5, 8), slice(20, 37)):
        view = {k: a[..., some] for k, a in arrays.items()}
        assert torch.equal(result(name, view, 0), whole[..., some])
        if some.stop - some.start > 1:
            assert torch.equal(result(name, {k: a.contiguous() for k, a in view.items()}, 0), whole[..., some])


@pytest.mark.parametrize("place", [0, 130, LONG - 1])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_in_a_part(place, value):
    """In the first one, in one that is neither first nor last, and at the end of the last."""
    x = torch.randn(LONG, 3, generator=torch.Generator().manual_seed(0))
    x[place, 1] = value
    for other in (x, x * 100):
        got = result("softmax", {"x": other}, 0)
        assert got[:, 1].isnan().all() if value != -torch.inf else (got[place, 1] == 0 and not got.isnan().any())
        assert torch.allclose(got[:, ::2], torch.softmax(other, 0)[:, ::2])
        sums = result("logsumexp", {"x": other}, 0)
        assert torch.allclose(sums, torch.logsumexp(other.double(), 0).float(), equal_nan=True)


def test_parts_of_nothing_but_minus_infinity():
    x = torch.full((LONG, 4), -torch.inf)
    x[700, 0], x[3, 1], x[LONG - 1, 2] = -5e3, 5e3, 0.0
    got = result("softmax", {"x": x}, 0)
    assert got[:, :3].nonzero().tolist() == [[3, 1], [700, 0], [LONG - 1, 2]] and got[:, 3].isnan().all()
    assert result("logsumexp", {"x": x}, 0).tolist() == [-5e3, 5e3, 0.0, -torch.inf]


def test_a_result_may_be_written_over_what_is_read():
    """The walk that writes reads each tile before it writes it, and what it needs of others was summed before."""
    arrays = randoms("softmax_vjp", (LONG, 6), 0, torch.float32)
    want = result("softmax_vjp", arrays, 0)
    op = pk.op("softmax_vjp", backend="triton")
    got = op(**arrays, axis=0, overwrite="d_y")
    got = got if isinstance(got, torch.Tensor) else got[0]
    assert got.data_ptr() == arrays["d_y"].data_ptr() and torch.equal(got, want)


def test_tiles_are_of_what_a_program_can_hold():
    for n in (1, 21, 128, 1000, 1024, 1025, 4096, 131072):
        for arch in ("sm_90", "sm_80", "gfx942"):
            tile = tile_columns(n, arch)
            numbers = tile["block_rows"] * min(tile["block_n"], 2 ** (n - 1).bit_length())
            assert tile["num_warps"] * targets.family(arch).lanes <= 1024
            assert numbers <= 32 * tile["num_warps"] * targets.family(arch).lanes
            assert min(tile["block_n"], tile["block_rows"]) >= 16
