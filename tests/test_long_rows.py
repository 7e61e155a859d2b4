"""Rows that no program holds whole, which Triton's kernels read a block at a time, and those that begin anywhere."""

import numpy as np
import pytest

import portakern as pk
from portakern.backends.triton import BACKEND
from portakern.core import registry, targets
from portakern.tools.compile import abstract

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton.launch import recording  # noqa: E402
from tests.launched import named  # noqa: E402

(PORTABLE,) = (f for f in BACKEND.families if f.name == "gpu")
BLOCKS = {"block_rows": 2, "block_n": 512, "num_warps": 4}  # of 128 places, and float32 of 4 tiles each
LONG = 2 * 512 + 300


def softmax(x):
    return pk.op("softmax", backend="triton", tiling=BLOCKS)(x)


def logsumexp(x):
    return pk.op("logsumexp", backend="triton", tiling=BLOCKS)(x)


@pytest.mark.parametrize("place", [0, 511, 512, 1023, 1024, LONG - 1])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_in_a_long_row(place, value):
    """At both ends of whole blocks and of the last, which is cut; rows beside it do not see it."""
    x = torch.randn(3, LONG, generator=torch.Generator().manual_seed(0))
    x[1, place] = value
    for other in (x, x * 100):
        got, want = softmax(other), torch.softmax(other.double(), 1).float()
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-9, equal_nan=True)
        assert torch.allclose(logsumexp(other), torch.logsumexp(other.double(), 1).float(), equal_nan=True)


def test_blocks_of_nothing_but_minus_infinity():
    x = torch.full((4, LONG), -torch.inf)
    x[0, 700], x[1, 3], x[2, LONG - 1] = -5e3, 5e3, 0.0
    got = softmax(x)
    assert got[:3].nonzero().tolist() == [[0, 700], [1, 3], [2, LONG - 1]] and got[3].isnan().all()
    assert logsumexp(x).tolist() == [-5e3, 5e3, 0.0, -torch.inf]


def labelled(rows, n, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(rows, n, generator=generator).to(dtype)
    labels = torch.randint(0, n, (rows,), generator=generator)
    labels[rows // 2] = -100
    return x, labels, torch.logsumexp(x.float(), 1), torch.randn(rows, generator=generator)


def launched(n, dtype="bfloat16", strides=None, **tiling):
    """The constants of the gradient's kernel for a target, of 5 rows of n."""
    spec, impl = registry.find_spec("cross_entropy_vjp"), BACKEND.implementation("cross_entropy_vjp", PORTABLE)
    arrays = {a.name: [[5], "int64" if a.name == "labels" else "float32", [1]] for a in spec.arrays}
    arrays["logits"] = [[5, n], dtype, list(strides or (n, 1))]
    call, used = abstract.abstract_call(
        spec, impl, {"arrays": arrays, "options": {}, "wants": None}, targets.find("sm_90"), tiling
    )
    found = []
    with recording(lambda kernel, grid, args, constants: found.append(named(constants) | {"grid": grid})):
        impl.run(call, used)
    return found[0]


def test_which_rows_are_moved_as_one():
    """Long ones that lie as those of the result do, in vectors wherever they begin."""
    assert launched(50257)["vector"] == launched(50264)["vector"] == 8 and launched(50257, "float32")["vector"] == 4
    assert "vector" not in launched(50257, strides=(50259, 1)) and "vector" not in launched(50257, strides=(1, 5))
    assert "vector" not in launched(1001)  # a tile has several
    assert launched(8191)["grid"] == launched(8192)["grid"] == 5 * 2 and launched(12289)["grid"] == 5 * 3 + 1


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
@pytest.mark.parametrize("n", [129, 263, 513])
def test_an_element_has_the_same_bits_wherever_its_row_begins(n, options):
    """Alone and as one of many, within a vector and beside the last; and written over what is read."""
    op = pk.op("cross_entropy_vjp", backend="triton", tiling={"block_rows": 1, "block_n": 128, "num_warps": 1})
    given = labelled(9, n, torch.bfloat16)
    (whole,) = op(*given, **options)
    wide = torch.empty(9, n + 3, dtype=torch.bfloat16)
    wide[:, :n] = given[0]
    (scalar,) = op(wide[:, :n], *given[1:], **options)
    assert torch.equal(whole, scalar)
    for row in range(9):
        (alone,) = op(*(a[row : row + 1] for a in given), **options)
        assert torch.equal(alone[0], whole[row])
    over = given[0].clone()
    op(over, *given[1:], **options, overwrite="logits")
    assert torch.equal(over, whole)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 130, 136, 137])
def test_a_gradient_on_both_sides_of_a_tile(n):
    """Rows that one tile holds, and those that are cut behind it."""
    op = pk.op("cross_entropy_vjp", backend="triton", tiling={"block_rows": 1, "block_n": 128, "num_warps": 1})
    x, labels, lse, g = labelled(7, n)
    target = torch.nn.functional.one_hot(labels.clamp(min=0), n)
    want = torch.where(labels >= 0, g, 0.0)[:, None] * (torch.exp(x - lse[:, None]) - target)
    assert torch.allclose(op(x, labels, lse, g)[0], want, atol=1e-6)


@pytest.mark.parametrize("label", [0, 127, 128, 255, 256, 383, 384, 498, 499, 500, -1])
def test_a_label_at_the_ends_of_tiles_and_of_rows(label):
    """Of rows of 499, tiles of 128, cut at multiples of 128. Labels beyond a row are not its neighbour's."""
    op = pk.op("cross_entropy_vjp", backend="triton", tiling={"block_rows": 1, "block_n": 128, "num_warps": 1})
    x, labels, lse, g = labelled(5, 499)
    labels[:] = label
    target = torch.nn.functional.one_hot(labels.clamp(0, 500), 501)[:, :499] * (label >= 0)
    want = g[:, None] * (torch.exp(x - lse[:, None]) - target)
    assert torch.allclose(op(x, labels, lse, g)[0], want, atol=1e-6)


def test_rows_that_begin_anywhere_are_moved_16_bytes_at_a_time():
    x, labels, row = np.zeros((64, 5001), np.float16), np.zeros(64, np.int64), np.zeros(64, np.float32)
    built = pk.op("cross_entropy_vjp", backend="triton").lower(x, labels, row, row, target="sm_90")
    assert built.ok, built.reason
    assert built.assembly.count("LDG.E.128") and built.assembly.count("STG.E.128")
    assert built.assembly.count("LDG.E.U16") == built.assembly.count("STG.E.U16") == 1  # the ends of a row
