"""Rows that stay in registers, in one tile and in two, by Triton's kernels."""

import json

import pytest

import portakern as pk
from portakern import testing
from portakern.backends.triton import BACKEND
from portakern.compiling import forms
from portakern.core import registry, targets

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton.gpu._rows import first_tile, kept, tile_rows  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402

(PORTABLE,) = (f for f in BACKEND.families if f.name == "gpu")
ROWS = 3


def shapes(name, n):
    """Arrays of a few rows of n, for an op over rows: None where the op has no rows to reduce."""
    numbers = ("labels", "lse", "d_loss", "d_lse") + (("d_y",) if name == "logsumexp_vjp" else ())
    spec = registry.find_spec(name)
    return {
        a.name: [n] if a.name in ("weight", "bias") else [ROWS] if a.name in numbers else [ROWS, n] for a in spec.arrays
    }


def launches(name, n, arch="sm_90", dtype="bfloat16", tiling=None):
    """The constants of the kernels that a call on rows of n launches for a target, by the kernel's name."""
    spec, hardware = registry.find_spec(name), targets.find(arch)
    impl = BACKEND.implementation(name, PORTABLE)
    form = {"arrays": {}, "options": {}, "wants": None}
    for a in spec.arrays:
        shape = shapes(name, n)[a.name]
        steps = [n, 1] if len(shape) == 2 else [1]
        form["arrays"][a.name] = [shape, a.dtypes[0] if dtype not in a.dtypes else dtype, steps]
    call, used = forms.abstract_call(spec, impl, form, hardware, tiling or {})
    found = {}
    with recording(lambda kernel, grid, args, constexprs: found.update({kernel.__name__: constexprs})):
        impl.run(call, used)
    return found


def over_rows():
    """The ops whose kernels keep rows in registers: those whose launches say in how many tiles."""
    found = []
    for name in sorted(registry.ops()):
        spec = registry.find_spec(name)
        if {*spec.tiling} == {"block_rows", "block_n"} and BACKEND.where(name, PORTABLE):
            try:
                if any("tiles" in c for c in launches(name, 1024).values()):
                    found.append(name)
            except (pk.SpecError, pk.UnsupportedError, KeyError):
                continue  # its arrays are no rows
    return found


OPS = over_rows()


def test_every_op_over_rows_is_here():
    norms = [f"{add}{norm}{vjp}" for add in ("", "add_") for norm in ("layernorm", "rmsnorm") for vjp in ("", "_vjp")]
    assert {*norms, "softmax", "softmax_vjp", "logsumexp", "logsumexp_vjp", "cross_entropy"} == {*OPS}


@pytest.mark.parametrize("name", OPS)
def test_rows_that_are_not_aligned_lie_in_two_tiles(name):
    """The first is full, and no element of it is masked by its column; together they have fewer than a power of two
    that covers the row, and every thread has a number of the second."""
    for arch in ("sm_90", "gfx942"):
        told = next(c for c in launches(name, 4097, arch).values() if "tiles" in c)
        threads = told["num_warps"] * targets.family(arch).lanes
        assert (told["tiles"], told["block_n"], told["tail"]) == (2, 4096, threads), arch
    assert next(c for c in launches(name, 4096).values() if "tiles" in c)["tiles"] == 1
    assert next(c for c in launches(name, 40961).values() if "tiles" in c)["tail"] == 0  # read in blocks


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("n", [515, 1001])
@pytest.mark.parametrize("name", OPS)
def test_rows_in_two_tiles_are_right_and_nothing_beside_them_is_touched(name, n, layout):
    """The checker's run of one case: values within the bound, memory that was poisoned before, arrays with canaries
    around them, inputs as they were, the same bits twice, and every output of the call."""
    given = shapes(name, n)
    dtype = "bfloat16" if n == 515 else "float32"
    case = {"dtype": dtype, "shapes": given, "regime": "normal", "seed": n}
    if layout == "sliced":
        case["layouts"] = {a: "sliced" for a, shape in given.items() if len(shape) == 2}
    report = testing.replay(name, json.dumps(case), backend="triton")
    assert report.passed, report.failures


@pytest.mark.parametrize("name", ["softmax", "layernorm", "logsumexp", "softmax_vjp"])
def test_a_row_has_the_same_bits_alone_as_among_others(name):
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes(name, 1001).values()]
    op = pk.op(name, backend="triton")

    def first(*given):
        found = op(*given)
        return found if isinstance(found, torch.Tensor) else found[0]

    together = first(*arrays)
    for row in range(ROWS):
        alone = first(*(a[row : row + 1] if a.ndim == 2 else a for a in arrays))
        assert torch.equal(alone, together[row : row + 1])


def test_a_row_of_nothing_but_minus_infinity_before_its_second_tile():
    x = torch.full((2, 700), -torch.inf)
    x[0, 600], x[1, 3] = 0.5, 0.5
    found = pk.op("softmax", backend="triton")(x[:, :699])
    assert found[0].nonzero().flatten().tolist() == [600] and found[1].nonzero().flatten().tolist() == [3]
    assert found[:, [600, 3]].diagonal().tolist() == [1.0, 1.0]


def test_two_tiles_are_shorter_than_one():
    for n in range(1, 40000, 7):
        first = first_tile(n)
        assert first >= n or first < n <= 2 * first
        tiling = tile_rows(n, "sm_90")
        tail, tiles = kept(n, *tiling.values(), tiling["num_warps"] * 32)
        assert (tiles == 0) == (n > (20480 if n % 8 else 32768))
        assert tiles == 0 or n <= tiling["block_n"] + tail <= max(128, 2 ** (n - 1).bit_length())


def test_a_second_tile_that_no_registers_hold_leaves_the_row_in_blocks():
    assert kept(16001, 1, 8192, 4, 128) == (8192, 2)  # 128 elements a thread
    assert kept(16001, 2, 8192, 4, 128) == (0, 0)
    assert kept(16385, 1, 8192, 4, 128) == (0, 0)  # more than two tiles


def test_results_are_not_written_over_a_row_of_which_several_threads_hold_a_number():
    """A second tile that is narrower than a program's threads: an element is read by several and written by one."""
    call = {"block_rows": 1, "block_n": 128, "num_warps": 8}
    spec, impl = registry.find_spec("softmax_vjp"), BACKEND.implementation("softmax_vjp", PORTABLE)
    form = {"arrays": {a: [[4, 200], "bfloat16", [200, 1]] for a in ("y", "d_y")}, "options": {}, "wants": None}
    with pytest.raises(pk.UnsupportedError, match="of a tile of 128 numbers 256 threads hold several copies"):
        forms.abstract_call(spec, impl, form | {"over": ["d_y"]}, targets.find("sm_90"), call)
    forms.abstract_call(spec, impl, form, targets.find("sm_90"), call)
