"""What only a GPU can show: compiled and interpreted calls side by side, DLPack between frameworks, more than 2^31
elements, strides past 2^31.
"""

import threading
import time

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry, tilings
from portakern.core.framework import frameworks
from portakern.tools.bench.contenders import one_clock
from portakern.tools.bench.plan import BenchPlan
from portakern.tools.bench.session import run
from portakern.tools.bench.suites import TimedCase
from portakern.tools.bench.timing import device_times, interleaved
from tests.ops import records

torch = pytest.importorskip("torch", reason="torch is not installed")

from tests import gpu  # noqa: E402
from tests.gpu import Gpu, tuned_beside_a_wrong_kernel, within_bound  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA or AMD GPU")
large = pytest.mark.xdist_group("large")  # tens of GiB each: `--dist loadgroup` runs them one after another


def normal(*shape, dtype=torch.float32, device="cuda"):
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)


def test_gpu_tensors_are_compiled_and_cpu_tensors_interpreted_in_one_process():
    served = []
    with pk.observe(served.append):
        for device in ("cuda", "cpu", "cuda", "cpu"):
            x = normal(5, 300, dtype=torch.bfloat16, device=device)
            y = pk.op("softmax", backend="triton")(x)
            assert y.device == x.device and within_bound("softmax", y, x) <= 1
    assert [s.interpret for s in served] == [False, True, False, True]
    assert pk.op("softmax")(normal(3, 4)).is_cuda


def test_a_jax_gpu_array_goes_to_the_kernels_of_its_chip_and_where_there_are_none_to_those_named():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax has no GPU support")
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((4, 200)), jax.numpy.bfloat16)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for named, serving in ((None, "pallas"), ("pallas", "pallas"), ("triton", "triton")):
        op = pk.op("softmax", backend=named)
        if serving == "pallas" and not hopper:
            with pytest.raises(pk.UnsupportedError, match="only for sm_90.*triton"):
                op(x)
            continue
        served = []
        with pk.observe(served.append):
            y = op(x)
        assert [s.backend for s in served] == [serving]
        assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.devices() == x.devices()
        assert within_bound("softmax", y, x) <= 1


def test_the_oracle_takes_gpu_tensors_when_named():
    x = normal(4, 9)
    y = pk.op("softmax", backend="reference")(x)
    assert y.is_cuda and within_bound("softmax", y, x) <= 1


def test_float64_is_refused_when_compiled():
    with pytest.raises(pk.UnsupportedError, match="float64"):
        pk.op("softmax")(normal(3, 4).double())


@large
def test_grids_beyond_65535():
    x = normal(70000 * 16, 8)
    pick = torch.tensor([0, 65534, 65535, 65536, 70000 * 16 - 1], device="cuda")
    assert within_bound("softmax", pk.op("softmax", tiling={"block_rows": 1})(x)[pick], x[pick]) <= 1
    a, b = normal(70000, 2, 3), normal(70000, 3, 2)
    assert within_bound("matmul", pk.op("matmul")(a, b)[-3:], a[-3:], b[-3:]) <= 1
    q = normal(70000, 2, 1, 16)
    assert within_bound("attention", pk.op("attention")(q, q, q)[-3:], *[q[-3:]] * 3) <= 1


@large
@pytest.mark.parametrize("r", records().values(), ids=lambda r: r.op)
def test_past_two_to_the_31_elements(r):
    assert 0 < gpu.worst_past_2_31(r, Gpu()) <= 1


@large
@pytest.mark.parametrize("r", records().values(), ids=lambda r: r.op)
def test_strides_past_two_to_the_31(r):
    assert 0 < gpu.worst_of_far_strides(r, Gpu()) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d, dv", [(19, 13), (64, 16), (100, 7), (13, 64)])
@pytest.mark.parametrize("tiling", [None, {"block_q": 128, "block_kv": 64, "num_warps": 4, "num_stages": 1}])
def test_value_heads_unlike_query_heads(d, dv, dtype, tiling):
    """Code of ptxas 12.8 for them read the wrong values past the 16th key, or left shared memory."""
    q, k, v = normal(2, 70, 4, d, dtype=dtype), normal(2, 300, 2, d, dtype=dtype), normal(2, 300, 2, dv, dtype=dtype)
    for options in (
        {},
        {"is_causal": True, "window": (30, 0)},
        {"softcap": 3.0, "bias": normal(2, 1, 1, 600)[..., ::2]},
    ):
        o = pk.op("attention", backend="triton", tiling=tiling)(q, k, v, **options)
        assert within_bound("attention", o, q, k, v, **options) <= 1


def test_inference_of_dispatch_is_per_device():
    op, served = pk.op("softmax"), []
    with pk.observe(served.append):
        for device in ("cuda", "cpu", "cuda"):
            assert op(normal(2, 3, device=device)).device.type == device
    assert [s.backend for s in served] == ["triton", "reference", "triton"]
    assert op.backend is None


def test_the_dtype_that_softmax_is_asked_for_holds_under_autocast():
    from portakern.torch import softmax

    x = torch.randn(4, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for dtype in (None, torch.float16, torch.bfloat16):
            got, want = (f(x, -1, dtype=dtype) for f in (softmax, torch.nn.functional.softmax))
            assert got.dtype == want.dtype


def test_device_time_is_the_devices_alone():
    """A host that comes late does not show; a call that waits for the device says so."""
    x = normal(8192, 4096, dtype=torch.bfloat16)
    y = torch.empty_like(x)

    def late():
        time.sleep(0.001)
        y.copy_(x)

    def waits():
        y.copy_(x)
        torch.cuda.synchronize()

    runs = {"copy": lambda: y.copy_(x), "late": late, "waits": waits}
    found = device_times(runs, frameworks()["torch"], x.device, rounds=5)
    assert found["late"].median_us == pytest.approx(found["copy"].median_us, rel=0.2)
    assert found["late"].host_us > 1000 and found["copy"].clock == found["late"].clock == "events"
    assert found["waits"].clock == "events, with waits of the host"
    rate = 2e6 * x.nbytes / found["copy"].median_us
    assert 0.5e12 < rate < 20e12  # of bytes a second: of memory, not of a cache or of the host


def test_contenders_of_two_libraries_are_timed_beside_each_other():
    """And a wrong one has no time. All read each element once and write it once."""
    case = TimedCase("mine", "softmax", "bfloat16", {"shape": (8192, 4096)})
    wrong = pk.Backend("wrong", framework="torch", peer=True, platforms=("cuda", "rocm"))
    wrong.implements("softmax")(lambda call, tiling: (torch.softmax(call.arrays["x"] * 1.02, -1),))
    peers = [registry.backend("torch"), wrong]
    if registry.backend("jax").unavailable() is None and jax_has_a_gpu():
        peers.append(registry.backend("jax"))
    plan = BenchPlan([case], [registry.backend("triton")], peers, rounds=5)
    clock = one_clock((*plan.subjects, *plan.against), plan.device)
    outcome = run(plan, lambda found, case: None)
    rows = {r["contender"]: r for r in outcome.rows}
    assert rows["wrong"]["verdict"] == "wrong" and rows["wrong"]["error"] > 1 and "median_us" not in rows["wrong"]
    right = {name: r for name, r in rows.items() if r["verdict"] == "right"}
    assert any(r["subject"] for r in right.values()) and "torch" in right
    for r in right.values():
        assert 0.05 < r["roof_share"] < 1.3, r
        assert r["peak_bytes"] is None or r["peak_bytes"] >= case.dims["shape"][0] * case.dims["shape"][1] * 2
    assert {r["clock"] for r in right.values()} == {clock.name if clock else "events"}
    assert outcome.rates["bfloat16"] > outcome.rates["float32"] > 1e12 and outcome.rates["copy"] > 1e11


def test_a_wrong_kernel_is_never_chosen_by_the_tuner(tmp_path, monkeypatch):
    """A copy is no softmax, however fast it is on the device."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    finding = tuned_beside_a_wrong_kernel("cuda", (8192, 4096))
    assert finding.best == {"rows_at_once": 64} and list(finding.wrong) == [(("rows_at_once", 128),)]
    assert finding.rows[0]["best_tiling"] == {"rows_at_once": 64} and finding.rows[0]["wrong"] == 1
    table = tilings.own_table("seeded", finding.group.on.target)
    assert table.is_relative_to(tmp_path) and '"rows_at_once": 64' in table.read_text()


def test_two_clocks_tell_the_same_of_one_kernel():
    """But for what the device takes to begin and to note an event, some microseconds, where that does not hide behind
    what the device does anyway: an H100 showed 182.50 us between events and 182.56 by CUPTI. Each clock has calls of
    its own, in turns, which differ by a percent of themselves, so that either may be the shorter by so much."""
    instruments = frameworks()["torch"].instruments(torch.device("cuda:0"))
    if registry.backend("jax").unavailable() is not None or not jax_has_a_gpu():
        pytest.skip("needs JAX on an NVIDIA GPU, which can read CUPTI")
    cupti = frameworks()["jax"].instruments(frameworks()["jax"].devices()[0]).recorder
    x = normal(16384, 8192, dtype=torch.bfloat16)
    watches = {c: instruments.stopwatch(lambda: torch.sin(x), r) for c, r in (("cupti", cupti), ("events", None))}
    found = interleaved(watches, rounds=5)
    assert all(found[clock].clock == clock for clock in watches)
    cupti_us, events_us = found["cupti"].median_us, found["events"].median_us
    assert cupti_us * 0.99 <= events_us < cupti_us + 10


def jax_has_a_gpu():
    import jax

    return jax.default_backend() == "gpu"


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_a_thread_may_call_the_driver_first(precision):
    """A map of memory is made in a thread that has not called CUDA's runtime, as of autograd: it has no context."""
    a, b, c, d = (normal(256, 256, dtype=torch.float32 if precision == "tf32" else torch.bfloat16) for _ in range(4))
    matmul = pk.op("matmul", backend="triton", variant="hopper")
    whole = matmul(a, b, precision=precision).clone()
    matmul(b, a, precision=precision)  # the memory of its result is kept for the next
    threaded = []
    thread = threading.Thread(target=lambda: threaded.append(matmul(c, d, precision=precision)))
    thread.start()
    thread.join()
    assert torch.equal(threaded[0], matmul(c, d, precision=precision)) and not torch.equal(threaded[0], whole)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("extents", [(300, 264, 200), (1000, 3000, 520), (333, 261, 203), (600, 512, 16384)])
def test_on_hopper_an_element_has_the_same_bits_in_every_tiling_and_company(extents, precision):
    """Which is why the tile may follow rows and the batch there."""
    m, n, k = extents
    dtype = torch.bfloat16 if precision == "ieee" else torch.float32
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    matmul = pk.op("matmul", backend="triton", variant="hopper")
    served = []
    with pk.observe(served.append):
        whole = matmul(a, b, precision=precision)
    at_once = {"epilogue_subtile": 0} if "epilogue_subtile" in served[0].tiling else {}
    for rows in (1, 17, 40, 65, 150, 299):
        assert torch.equal(matmul(a[7 : 7 + rows], b, precision=precision), whole[7 : 7 + rows]), rows
    assert torch.equal(matmul(torch.stack([a, a]), torch.stack([b, b]), precision=precision)[1], whole)
    depth = 64 if precision == "ieee" else 32
    tilings = [(64, 64, 0, 0), (32, 64, 0, 1)]
    if k < 16384:  # warps with roles take whole sums, and 16 bits where they add columns
        tilings += [(128, 256, 1, 0)] + [(128, 128, 2, 0), (128, 128, 3, 0)] * (precision == "ieee")
    for block_m, block_n, roles, swapped in tilings:
        tiling = {"block_m": block_m, "block_n": block_n, "block_k": depth, "num_warps": 8 if block_n > 64 else 4,
                  "num_stages": 3, "warp_specialized": roles, "swap_ab": swapped, **at_once}  # fmt: skip
        tiled = pk.op("matmul", backend="triton", variant="hopper", tiling=tiling)
        assert torch.equal(tiled(a, b, precision=precision), whole), tiling
    if precision == "ieee" and k < 16384:  # the portable kernel sums k in one chain too
        assert torch.equal(pk.op("matmul", backend="triton", variant="gpu")(a, b), whole)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("m, n", [(2048, 2048), (2000, 2008), (1999, 2007)])
def test_on_hopper_a_product_that_leaves_by_halves_is_the_same(m, n):
    a, b = normal(m, 520, dtype=torch.bfloat16), normal(520, n, dtype=torch.bfloat16)
    by_halves, whole = ({"epilogue_subtile": halves, "num_stages": 3} for halves in (1, 0))
    results = [pk.op("matmul", backend="triton", variant="hopper", tiling=t)(a, b) for t in (by_halves, whole)]
    assert torch.equal(*results)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("m, n, batch", [(1000, 3000, ()), (1000, 3001, ()), (600, 1200, (3,))])
def test_on_hopper_a_product_that_leaves_through_stages_is_the_same(m, n, batch, turned):
    a, b = normal(*batch, m, 776, dtype=torch.bfloat16), normal(*batch, 776, n, dtype=torch.bfloat16)
    a = a.mT.contiguous().mT if turned else a
    ways = [
        {"block_n": 128, "warp_specialized": 2, "epilogue_subtile": halves, "num_stages": 4} for halves in (0, 1, 2)
    ]
    matmul = [pk.op("matmul", backend="triton", variant="hopper", tiling=way) for way in ways]
    whole, *others = [product(a, b) for product in matmul]
    assert all(torch.equal(other, whole) for other in others)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("m, n, k, batch", [(2000, 3000, 520, ()), (2001, 2999, 333, ()), (700, 900, 264, (4,))])
def test_on_hopper_float32_has_the_same_bits_by_warps_with_roles(m, n, k, batch, precision):
    """Of b as it lies, and in tf32 of b that lies turned."""
    a, b = normal(*batch, m, k, dtype=torch.float32), normal(*batch, k, n, dtype=torch.float32)
    tile = {"block_m": 128, "block_n": 128, "block_k": 32, "num_warps": 8, "num_stages": 3, "swap_ab": 0}

    def by(roles, b):
        op = pk.op("matmul", backend="triton", variant="hopper", tiling={**tile, "warp_specialized": roles})
        return op(a, b, precision=precision)

    found = by(1, b)
    assert torch.equal(by(0, b), found)
    assert torch.equal(by(1, b.mT.contiguous().mT), found)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (900, 10), "softcap": 20.0}])
@pytest.mark.parametrize("keys, group, d", [(700, 4, 64), (2500, 5, 128), (9000, 1, 72)])
def test_on_hopper_a_query_alone_has_the_bits_that_it_has_among_others(keys, group, d, options):
    """By whatever kernel, in chunks and in one."""
    q, k, v = (normal(2, keys, heads, d, dtype=torch.bfloat16) for heads in (2 * group, 2, 2))
    few = slice(-3, None)

    def attend(q, variant="hopper", **tiling):
        op = pk.op("attention", backend="triton", variant=variant, tiling=tiling or None)
        return op(q, k, v, return_lse=True, **options)

    def same(here, there):
        return torch.equal(here[0], there[0][:, few]) and torch.equal(here[1], there[1][:, :, few])

    for one in {}, {"min_split_keys": 512}, {"min_split_keys": 1 << 14}:
        whole = attend(q, **one)
        assert all(map(torch.equal, attend(q, **one, persistent=0), whole))
        for shares in 0, 1, 2, 3:
            assert same(attend(q[:, few], **one, few_queries=shares), whole), (one, shares)
    unsplit = attend(q, "unsplit")
    assert all(map(torch.equal, attend(q, "unsplit", consumers=2), unsplit))
    assert same(attend(q[:, few], "unsplit"), unsplit)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "sizes, k, n", [([300, 0, 77, 512, 1, 40], 264, 520), ([0, 3, 1] * 100, 136, 200), ([5000, 700], 1032, 776)]
)
def test_on_hopper_groups_of_rows_have_the_same_bits_in_every_tiling_and_company(sizes, k, n, turned):
    """And by the portable kernel. Rows of no group hold NaN."""
    rows, ends = sum(sizes), torch.tensor(sizes, device="cuda").cumsum(0)
    a, d_c = (normal(rows + 150, width, dtype=torch.bfloat16) for width in (k, n))
    b = normal(len(sizes), k, n, dtype=torch.bfloat16)
    b = b.mT.contiguous().mT if turned else b
    a[rows:], d_c[rows:] = torch.nan, torch.nan

    def results(variant, *arrays, **tiling):
        forward, backward = (
            pk.op(name, backend="triton", variant=variant, tiling=tiling or None)
            for name in ("grouped_matmul", registry.find_spec("grouped_matmul").vjp)
        )
        return forward(*arrays[:3]), *backward(*arrays)

    whole = results("hopper", a, b, ends, d_c)
    assert not any(x[rows:].any() for x in whole[:2]) and not whole[2][torch.tensor(sizes) == 0].any()
    for block_n, stages, halves in ((256, 4, 1), (256, 3, 0), (128, 6, 0), (128, 4, 1), (64, 8, 0)):
        tiling = {"block_n": block_n, "num_stages": stages, "epilogue_subtile": halves, "group": 4}
        assert all(map(torch.equal, results("hopper", a, b, ends, d_c, **tiling), whole)), tiling
    assert all(map(torch.equal, results("gpu", a, b, ends, d_c), whole))
    last = slice(int(ends[-1]) - sizes[-1], rows)
    alone = results("hopper", a[last], b[-1:], torch.tensor(sizes[-1:], device="cuda"), d_c[last])
    assert torch.equal(alone[0], whole[0][last]) and torch.equal(alone[1], whole[1][last])
    assert torch.equal(alone[2][0], whole[2][-1])


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("precision", ["promoted", "fast"])
@pytest.mark.parametrize("scales", ["tensors", "rows", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_on_hopper_8_bit_products_have_the_same_bits_in_every_tiling_and_company(dtype, scales, precision):
    """Of c and of c^T, of sums that leave the matrix unit and of ones that stay; of b that lies the other way too."""
    m, n, k = 1000, 776, 1168
    a, b = ((normal(*s, dtype=torch.float32) * 20).to(dtype) for s in ((m, k), (n, k)))
    shapes = {"tensors": ((1, 1), (1, 1)), "rows": ((m, 1), (1, 7)), "blocks": ((m, 10), (10, 7))}[scales]
    of_a, of_b = (normal(*s, dtype=torch.float32) for s in shapes)

    def product(rows=m, b=b, **tiling):
        op = pk.op("scaled_matmul", backend="triton", variant="hopper", tiling=tiling or None)
        return op(a[:rows], b.t(), of_a[:rows], of_b, n_width=128, precision=precision, out_dtype="float32")

    whole = product()
    for rows in (1, 17, 64, 65, 200):
        assert torch.equal(product(rows), whole[:rows]), rows
    few = product(40, block_n=128, num_warps=8, num_stages=4, overlap=0)
    assert torch.equal(few, whole[:40]) and torch.equal(product(b=b.t().contiguous().t()), whole)
    stays = scales != "blocks" and (precision == "fast" or dtype == torch.int8)
    tilings = [{"block_n": 64, "more_columns": 0}, {"block_n": 128, "more_columns": 0, "group": 1}]
    if stays and dtype != torch.int8:
        tilings += [{"block_n": 256, "more_columns": 0}]
    if not stays:
        tilings += [{"block_n": 128, "more_columns": 0, "overlap": 0}, {"block_n": 64, "more_columns": 0, "overlap": 0}]
        tilings += [{"block_n": 128, "more_columns": 2, "overlap": 0}]
    if not stays and scales != "blocks":
        tilings += [{"block_n": 128, "more_columns": 1, "overlap": 1}]
    for tiling in tilings:
        assert torch.equal(product(**tiling, num_stages=3), whole), tiling
