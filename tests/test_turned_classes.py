"""Cross entropy where the classes are not the last axis of memory, as in PyTorch's (N, C, H, W): rows that lie side by
side."""

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
from tests.launched import named  # noqa: E402

(PORTABLE,) = (f for f in BACKEND.families if f.name == "gpu")
LOSS = registry.find_spec("cross_entropy")
LONG = 1100  # more than one tile, and a part that ends within its second
SMALL = {"block_rows": 4, "block_n": 128, "num_warps": 1}


def moved(n, c, h, w):
    """The shape and the strides of logits of (N, C, H, W) whose classes were moved to the end."""
    return [n, h, w, c], [c * h * w, w, 1, h * w]


def called(name, shape, strides=None, dtype="bfloat16", arch="sm_90"):
    """An implementation, a call for a target and its tiling."""
    spec, impl = registry.find_spec(name), BACKEND.implementation(name, PORTABLE)
    arrays = {a.name: [shape[:-1], "float32", None] for a in spec.arrays}
    arrays |= {"logits": [shape, dtype, strides], "labels": [shape[:-1], "int64", None]}
    form = {"arrays": arrays, "options": {}, "wants": None}
    return impl, *abstract.abstract_call(spec, impl, form, targets.find(arch), {})


def launches(*args):
    """What a call launches: the constants of its kernels, by their names, and their grids."""
    (impl, call, used), found = called(*args), {}
    with recording(
        lambda kernel, grid, args, constants: found.update({kernel.__name__: named(constants) | {"grid": grid}})
    ):
        impl.run(call, used)
    return found


def test_they_are_read_along_memory():
    """In strips, whole while they are short and else in parts; a gradient's tiles have a line of memory either way."""
    whole, long = launches("cross_entropy", *moved(8, 150, 64, 64)), launches("cross_entropy", *moved(2, 4096, 8, 512))
    assert {k: c["unit"] for k, c in whole.items()} == {"cross_entropy_columns_kernel": 8}
    assert {k: c["unit"] for k, c in long.items()} == {"softmax_part_sums_kernel": 8, "cross_entropy_columns_kernel": 8}
    assert launches("cross_entropy", [8, 64, 64, 150]).keys() == {"cross_entropy_kernel"}
    for dtype, block_rows in (("bfloat16", 64), ("float32", 32)):
        (tile,) = launches("cross_entropy_vjp", *moved(8, 150, 64, 64), dtype).values()
        assert (tile["block_rows"], tile["block_n"], tile["reads_ignored"]) == (block_rows, 128, True)
    (few,) = launches("cross_entropy_vjp", *moved(8, 19, 64, 64)).values()
    assert (few["block_rows"], few["block_n"], few["num_warps"]) == (64, 32, 4)
    (rows,) = launches("cross_entropy_vjp", [8, 64, 64, 4096]).values()
    assert rows["width"] == 4096


@pytest.mark.parametrize("target, vector", [("sm_90", "LDG.E.128"), ("gfx942", "buffer_load_dwordx4")])
def test_they_are_loaded_16_bytes_at_a_time(target, vector):
    """A mask of ignored rows would leave a thread one number at a time. The label's own logit is one."""
    impl, *call = called("cross_entropy", *moved(8, 19, 64, 64), arch=target)
    (kernel,) = PORTABLE.load_compiler().build(impl, *call).kernels
    narrow = kernel.assembly.count({"sm_90": "LDG.E.U16", "gfx942": "buffer_load_ushort"}[target])
    assert vector in kernel.assembly and narrow == 1
    impl, *call = called("cross_entropy_vjp", *moved(8, 19, 64, 64), arch=target)
    (kernel,) = PORTABLE.load_compiler().build(impl, *call).kernels
    assert vector in kernel.assembly and not kernel.spills


CASES = [
    ((3, 7, 5, 21), "bfloat16", {"label_smoothing": 0.1}, {}),
    ((2, 40, 130), "float32", {"z_loss": 0.1, "ignore_index": 0}, SMALL),
    ((5, LONG), "float16", {}, {}),
    ((37, LONG), "float32", {"label_smoothing": 1.0, "z_loss": 1e-4}, SMALL),
    ((2, 3, LONG), "bfloat16", {"label_smoothing": 0.1, "ignore_index": 0}, SMALL | {"block_rows": 1}),
]


@pytest.mark.parametrize("regime", ["normal", "special"])
@pytest.mark.parametrize("name", [LOSS.name, LOSS.vjp])
@pytest.mark.parametrize("call", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_they_are_right_and_nothing_beside_them_is_touched(name, call, regime):
    shape, dtype, options, tiling = call
    given = {"logits": shape, "labels": shape[:-1]}
    if name == LOSS.name:
        options = options | {"return_lse": True}
    else:
        given |= dict.fromkeys(("lse", "d_loss"), shape[:-1])
    case = {"dtype": dtype, "shapes": given, "options": options, "regime": regime, "seed": 3, "tiling": tiling}
    report = testing.replay(name, json.dumps(case | {"layouts": {"logits": "transposed"}}), backend="triton")
    assert report.passed, report.failures


@pytest.mark.parametrize("n", [140, LONG])
def test_a_row_has_the_same_bits_in_strips_of_any_width(n):
    generator = torch.Generator().manual_seed(n)
    x, labels = torch.randn(n, 37, generator=generator).mT, torch.arange(37)
    options = {"label_smoothing": 0.1, "z_loss": 0.1}

    def losses(x, labels, **tiling):
        return pk.op("cross_entropy", backend="triton", tiling=tiling)(x, labels, **options)

    whole = losses(x, labels)
    for block_rows, warps in ((1, 1), (8, 4), (128, 8)):
        assert torch.equal(losses(x, labels, block_rows=block_rows, num_warps=warps), whole)
    for some in (slice(0, 1), slice(5, 8), slice(20, 37)):
        assert torch.equal(losses(x[some], labels[some]), whole[some])


def test_what_pytorch_gives():
    """Classes in the second of four axes, and what an ignored pixel holds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 19, 6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 19, (2, 6, 5), generator=generator)
    labels[0, :2], x[0, :, 0] = -100, torch.nan
    x.requires_grad_()
    given = {"label_smoothing": 0.1, "ignore_index": -100}
    want = torch.nn.functional.cross_entropy(x, labels, reduction="none", **given)
    got = pk.op("cross_entropy", backend="triton")(x.movedim(1, -1), labels, **given)
    assert torch.allclose(got, want) and not got[0, :2].any()
    (d_got,), (d_want,) = (torch.autograd.grad((y * y).sum(), x) for y in (got, want))
    assert torch.allclose(d_got[:, :, 2:], d_want[:, :, 2:]) and not d_got[0, :, :2].any()
