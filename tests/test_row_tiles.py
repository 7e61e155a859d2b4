"""Rows that stay in registers, in one tile and in two, by Triton's kernels."""

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
from portakern.backends.triton.lib.rows import first_tile, kept, tile_rows  # noqa: E402
from tests.launched import named  # noqa: E402

(PORTABLE,) = (f for f in BACKEND.families if f.name == "gpu")
ROWS = 3


def shapes(name, n):
    """The shapes of an op's arrays for a few rows of n: rows, one number a row, or one row beside all."""

    def extents(dim):
        if len(dim.factors) > 1:
            raise KeyError(f"{name} has an axis of {'*'.join(dim.factors)}: blocks, not rows")
        (extent,) = dim.factors
        return {"shape": [ROWS, n], "batch": [ROWS], "rest": [ROWS]}[extent] if dim.variadic else [n]

    return {a.name: [e for dim in a.dims for e in extents(dim)] for a in registry.find_spec(name).arrays}


def launches(name, n, arch="sm_90", dtype="bfloat16", tiling=None):
    """The constants of the kernels that a call on rows of n launches for a target, by the kernel's name."""
    spec, hardware = registry.find_spec(name), targets.find(arch)
    impl = BACKEND.implementation(name, PORTABLE)
    form = {"arrays": {}, "options": {}, "wants": None}
    for a in spec.arrays:
        shape = shapes(name, n)[a.name]
        steps = [n, 1] if len(shape) == 2 else [1]
        form["arrays"][a.name] = [shape, a.dtypes[0] if dtype not in a.dtypes else dtype, steps]
    call, used = abstract.abstract_call(spec, impl, form, hardware, tiling or {})
    found = {}
    with recording(lambda kernel, grid, args, constexprs: found.update({kernel.__name__: named(constexprs)})):
        impl.run(call, used)
    return found | {"tiling": used}


def two_tiles(n):
    """A tiling in which rows of n lie in two, also of ops whose default it is for longer rows alone."""
    return {"block_rows": 1, "block_n": 2 ** (n - 1).bit_length() // 2}


def over_rows():
    """The ops whose kernels keep rows in registers: those whose launches say in how many tiles."""
    found = []
    for name in sorted(registry.ops()):
        spec = registry.find_spec(name)
        if {*spec.tiling} == {"block_rows", "block_n"} and BACKEND.module_of(name, PORTABLE):
            try:
                if any(c.get("tiles") for c in launches(name, 1024).values()):
                    found.append(name)
            except (pk.SpecError, pk.UnsupportedError, KeyError):
                continue  # its arrays are no rows
    return found


OPS = over_rows()


def test_every_op_over_rows_is_here():
    """Softmax, logsumexp, four norms with their gradients, and cross entropy, whose gradient has no sum over a row."""
    assert len(OPS) >= 13, OPS


@pytest.mark.parametrize("name", OPS)
def test_rows_that_are_not_aligned_lie_in_two_tiles(name):
    """The first is full, and no element of it is masked by its column; together they have fewer than a power of two
    that covers the row, and every thread has a number of the second."""
    for arch in ("sm_90", "gfx942"):
        told = next(c for c in launches(name, 4097, arch).values() if c.get("tiles"))
        threads = told["num_warps"] * targets.family(arch).lanes
        assert (told["tiles"], told["block_n"], told["tail"]) == (2, 4096, threads), arch
    assert next(c for c in launches(name, 4096).values() if c.get("tiles"))["tiles"] == 1
    assert next(c for c in launches(name, 40961).values() if "tiles" in c)["tail"] == 0  # read in blocks


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("n", [515, 1283])
@pytest.mark.parametrize("name", OPS)
def test_rows_in_two_tiles_are_right_and_nothing_beside_them_is_touched(name, n, layout):
    """The checker's run of one case: values within the bound, memory that was poisoned before, arrays with canaries
    around them, inputs as they were, the same bits twice, and every output of the call."""
    given = shapes(name, n)
    dtype = "bfloat16" if n == 515 else "float32"
    case = {"dtype": dtype, "shapes": given, "regime": "normal", "seed": n, "tiling": two_tiles(n)}
    told = next(c for c in launches(name, n, dtype=dtype, tiling=two_tiles(n)).values() if c.get("tiles"))
    assert told["tiles"] == 2
    if layout == "sliced":
        case["layouts"] = {a: "sliced" for a, shape in given.items() if len(shape) == 2}
    report = testing.replay(name, json.dumps(case), backend="triton")
    assert report.passed, report.failures


@pytest.mark.parametrize("name", OPS)
def test_a_row_has_the_same_bits_alone_as_among_others(name):
    generator, op = torch.Generator().manual_seed(0), pk.op(name, backend="triton", tiling=two_tiles(1283))
    arrays = {
        a.name: torch.arange(ROWS)
        if a.dtypes == ("int32", "int64")
        else torch.randn(*shapes(name, 1283)[a.name], generator=generator).bfloat16()
        for a in op.spec.arrays
    }

    def first(given):
        found = op(**given)
        return found if isinstance(found, torch.Tensor) else found[0]

    together = first(arrays)
    for row in range(ROWS):
        alone = first({k: a[row : row + 1] if a.shape[0] == ROWS else a for k, a in arrays.items()})
        assert torch.equal(alone, together[row : row + 1])


def test_a_row_of_nothing_but_minus_infinity_before_its_second_tile():
    x = torch.full((2, 700), -torch.inf)
    x[0, 600], x[1, 3] = 0.5, 0.5
    found = pk.op("softmax", backend="triton")(x[:, :699])
    assert found[0].nonzero().flatten().tolist() == [600] and found[1].nonzero().flatten().tolist() == [3]
    assert found[:, [600, 3]].diagonal().tolist() == [1.0, 1.0]


FASTEST = {  # of those that were timed on an H100 or H200 in bfloat16: rows a program, tiles of a row, warps
    ("softmax", 1001): (1, [1024], 4),
    ("softmax", 4097): (1, [4096, 128], 4),
    ("softmax", 5000): (1, [4096, 1024], 4),
    ("softmax", 5001): (1, [4096, 1024], 8),
    ("softmax", 8195): (1, [8192, 256], 8),
    ("softmax", 12288): (1, [8192, 4096], 8),
    ("logsumexp", 6927): (1, [8192], 8),
    ("logsumexp_vjp", 8195): (1, [8192, 256], 8),
    ("layernorm", 1001): (2, [1024], 4),
    ("layernorm", 5001): (2, [4096, 1024], 8),
    ("layernorm", 6927): (2, [4096, 4096], 8),
    ("layernorm", 8195): (1, [8192, 256], 8),
    ("layernorm", 205): (4, [256], 1),
    ("layernorm", 448): (2, [512], 1),
    ("layernorm", 582): (2, [512, 128], 1),
    ("layernorm", 1198): (1, [1024, 256], 1),
    ("layernorm", 1919): (2, [1024, 1024], 2),
    ("layernorm", 16384): (1, [16384], 16),
    ("layernorm", 23488): (2, [16384, 8192], 32),
    ("softmax", 333): (2, [512], 2),
    ("softmax", 640): (2, [1024], 2),
    ("softmax", 13001): (1, [8192, 8192], 16),
    ("rmsnorm", 10186): (1, [8192, 2048], 8),
    ("rmsnorm", 23488): (2, [16384, 8192], 32),
    ("layernorm", 12288): (1, [8192, 4096], 8),
    ("rmsnorm", 6927): (2, [4096, 4096], 8),
    ("rmsnorm", 8195): (1, [8192, 256], 8),
    ("layernorm_vjp", 1001): (2, [1024], 4),
    ("layernorm_vjp", 4097): (1, [4096, 128], 4),
    ("layernorm_vjp", 5000): (1, [4096, 1024], 4),
    ("layernorm_vjp", 5001): (1, [8192], 16),
    ("layernorm_vjp", 6927): (1, [8192], 16),
    ("layernorm_vjp", 12288): (1, [8192, 4096], 8),
    ("rmsnorm_vjp", 5001): (1, [8192], 16),
}


@pytest.mark.parametrize(("name", "n"), FASTEST, ids=str)
def test_defaults_are_what_was_fastest(name, n):
    told = next(c for c in launches(name, n).values() if c.get("tiles"))
    tiles = [told["block_n"], told["tail"]][: told["tiles"]]
    assert (told["block_rows"], tiles, told["num_warps"]) == FASTEST[name, n]


@pytest.mark.parametrize("name", ["cross_entropy", "logsumexp"])
def test_long_rows_that_are_read_once_go_by_small_programs(name):
    """128 threads in blocks of 4096; what a thread loads as one vector shares a maximum."""
    for n, dtype, adjacent in ((8200, "bfloat16", 8), (32000, "bfloat16", 8), (128256, "float32", 4)):
        told = launches(name, n, dtype=dtype)[f"{name}_kernel"]
        assert (told["block_rows"], told["block_n"], told["num_warps"], told["tiles"]) == (1, 4096, 4, 0)
        assert told["adjacent"] == adjacent and told["deep"] == 32 // adjacent
    assert launches(name, 50257)[f"{name}_kernel"]["adjacent"] == 1
    assert launches("softmax", 128256)["softmax_kernel"]["num_warps"] == 32  # read twice: few rows stay near


def test_gradients_of_norms_read_longer_rows_in_blocks():
    """Those that lost in two tiles, and those whose sums take more registers than a thread has."""
    for n, dtype in ((8195, "bfloat16"), (12296, "bfloat16"), (12288, "float32")):
        assert "layernorm_vjp_statistics_kernel" in launches("layernorm_vjp", n, dtype=dtype), n
    assert "layernorm_vjp_statistics_kernel" not in launches("layernorm_vjp", 12288)


def test_gradients_of_norms_over_rows_that_cannot_be_copied_ahead_have_twice_the_programs():
    """Where two programs fit a multiprocessor: one waits for its rows while the other computes."""
    of = {n: launches("rmsnorm_vjp", n)["tiling"]["blocks_per_program"] for n in (4097, 5001, 4096, 5000)}
    assert of == {4097: 16, 5001: 32, 4096: 32, 5000: 32}
    assert launches("rmsnorm_vjp", 4097, dtype="float32")["tiling"]["blocks_per_program"] == 32


@pytest.mark.parametrize(("n", "rows"), [(100, 64), (128, 64), (200, 64), (512, 64), (513, 32), (1001, 32), (1024, 32)])
def test_gradients_of_norms_over_few_short_rows_fill_a_gpu(n, rows):
    """Each program sums so many rows that 6000 of them are programs for nearly all multiprocessors."""
    for op in ("layernorm_vjp", "rmsnorm_vjp", "add_layernorm_vjp", "add_rmsnorm_vjp"):
        tiling = launches(op, n)["tiling"]
        assert tiling["block_rows"] * tiling["blocks_per_program"] == rows, op


@pytest.mark.parametrize("norm", [False, True])
def test_two_tiles_are_no_longer_than_one(norm):
    for n in range(1, 40000, 7):
        first = first_tile(n, 1024 if norm else 8192)
        assert first >= n or first < n <= 2 * first
        tiling = tile_rows(n, "sm_90", norm)
        tail, tiles = kept(n, *tiling.values(), tiling["num_warps"] * 32)
        assert (tiles == 0) == (n > (20480 if n % 8 else 32768))
        whole = max(128, 2 ** (n - 1).bit_length())
        assert tiles == 0 or n <= tiling["block_n"] + tail <= whole
        assert norm or tiles < 2 or n > 8192 or 4 * (tiling["block_n"] + tail) <= 3 * whole


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
        abstract.abstract_call(spec, impl, form | {"over": ["d_y"]}, targets.find("sm_90"), call)
    abstract.abstract_call(spec, impl, form, targets.find("sm_90"), call)
