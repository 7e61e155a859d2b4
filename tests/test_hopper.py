"""Hopper's variants where there is no GPU: interpreted, recorded, and compiled."""

import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry, targets
from portakern.core.binder import unchecked
from portakern.core.tilings import default, resolve

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import interpreter, plan  # noqa: E402
from portakern.backends.triton import launch as launching  # noqa: E402
from portakern.backends.triton.configs import HopperProductConfig  # noqa: E402
from portakern.backends.triton.hopper import _float32, _warps  # noqa: E402
from portakern.backends.triton.hopper import _tiles as products  # noqa: E402
from portakern.backends.triton.lib import gluon  # noqa: E402
from portakern.backends.triton.lib import matmul as order_of_tiles  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402
from tests.gluon_on_host import compiles  # noqa: E402

SM_90 = targets.find("sm_90").target
BACKEND = registry.backend("triton")
(HOPPER,) = (f for f in BACKEND.families if f.name == "hopper")


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


def bound(op, *arrays, **options):
    """The variant, and a call of it as on a Hopper GPU, on arrays of the host."""
    call = unchecked(registry.find_spec(op), *arrays, **options).replace(target=SM_90, interpret=False)
    return BACKEND.implementation(op, HOPPER), call


@pytest.mark.parametrize(("op", "examples"), [("matmul", 12), ("matmul_vjp", 8), ("linear", 12), ("linear_vjp", 8)])
def test_the_interpreted_variant_keeps_the_contract(op, examples):
    # operands that cannot be described are copied by a program a row, and the interpreter runs one after the other
    limits = testing.Limits(elements=2**10)
    report = testing.check(op, backend="triton", variant="hopper", device="cpu", max_examples=examples, limits=limits)
    assert report.passed, report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operands_that_cannot_be_described_are_copied_as_they_are(dtype):
    from portakern.backends.triton.hopper._scratch import operand

    class Call:
        interpret = True

    memory = torch.randn(5000).to(dtype)
    cases = [
        (memory[1:].as_strided((3, 17, 29), (500, 29, 1)), True),
        (memory[2:].as_strided((2, 7, 600), (2001, 33, 1)), True),  # rows that overlap
        (memory[3:].as_strided((2, 9, 40), (400, 1, 41)), True),
        (memory[5:].as_strided((1, 30, 20), (0, 41, 2)), True),
        (memory.as_strided((1, 70, 3), (0, 3, 1)), True),
        (memory.as_strided((2, 16, 64), (1024, 64, 1)), False),
        (memory.as_strided((2, 64, 16), (1024, 1, 64)), False),
        (memory[8:].as_strided((1, 1, 33), (0, 33, 1)), False),  # one row has no stride
    ]
    for x, copied in cases:
        for along in (None, 0, 1):
            entries, rows, columns = x.shape
            found = operand(Call, x, x.stride(0), (entries, rows, columns), along)
            assert along is None or found.across == (along == 0) or (not copied and 1 in (rows, columns))
            assert (found.memory is x) == (not copied and along in (None, int(x.stride(2) == 1)))
            strides = (1, found.row) if found.across else (found.row, 1)
            view = found.memory.as_strided(x.shape, (found.batch, *strides), found.memory.storage_offset())
            assert torch.equal(view, x), (x.stride(), along)
            assert found.row * x.element_size() % 16 == 0 == found.memory.data_ptr() % 16


def product(m, n, k, *batch, dtype=torch.bfloat16, **options):
    """The variant, and a call of its product on arrays without memory."""
    shapes = (*batch, m, k), (*batch, k, n)
    return bound("matmul", *(torch.empty(s, dtype=dtype, device="meta") for s in shapes), **options)


def tiles(m, n, k, *batch, **options):
    impl, call = product(m, n, k, *batch, **options)
    return impl.key(call)["tile"], resolve(impl, call, {}).tiling


def test_what_a_call_has_no_use_for_is_fitted_or_refused():
    # 6 stages of 128 x 128 leave room for a tile of c of 16 bits, not of 32.
    told = {name: tiles(640, 2048, 512, out_dtype=name)[1] for name in ("bfloat16", "float32")}
    assert tiles(640, 2048, 512)[0] == "128 x 128"
    assert told["bfloat16"]["num_stages"] == 6 and told["float32"]["num_stages"] == 5
    assert tiles(512, 512, 512, 64)[1]["warp_specialized"] == 1  # of a batch too
    assert told["bfloat16"]["block_n"] == told["float32"]["block_n"] == 128
    wide = dict(tiles(4096, 4096, 4096)[1])
    impl, call = product(2048, 2048, 65536)
    assert resolve(impl, call, {}).tiling == {**wide, "warp_specialized": 0}  # its sums go in chunks
    for (m, n, k), named, reason in (
        ((2048, 2048, 65536), wide, "sums over k in one chunk"),
        ((4096, 4096, 4096), {**wide, "num_warps": 4}, "num_warps=8"),
        ((4096, 4096, 4096), {**wide, "swap_ab": 1}, "swap_ab=0"),
        ((4096, 4096, 4096), {**wide, "block_k": 32}, "with block_k=64"),
        ((4096, 4096, 4096), {**wide, "warp_specialized": 2}, "block_n=128"),
        ((4096, 4096, 4096), {**wide, "num_stages": 5}, "shared memory"),
    ):
        impl, call = product(m, n, k)
        with pytest.raises(pk.UnsupportedError, match=reason):
            resolve(impl, call, named)


def test_how_c_leaves_follows_how_many_tiles_a_program_has():
    one, several = tiles(1000, 2944, 5120)[1], tiles(3072, 3072, 3072)[1]
    assert (one["epilogue_subtile"], one["num_stages"]) == (2, 5) and (
        several["epilogue_subtile"],
        several["num_stages"],
    ) == (1, 5)
    call = product(3072, 3072, 3072)[1]
    assert (found := products.fit(call, one))["epilogue_subtile"] == 0 and found["num_stages"] == 4
    assert "one tile" in products.supports(call, one.replace(num_stages=4))
    # Rows of c that begin anywhere pass through shared memory on their way to registers.
    assert tiles(3071, 3065, 3072)[1]["num_stages"] == 4
    short, long = tiles(512, 512, 512, 64)[1], tiles(4096, 4096, 4096)[1]
    assert (short["epilogue_subtile"], short["num_stages"]) == (1, 4) and (
        long["epilogue_subtile"],
        long["num_stages"],
    ) == (0, 3)


def test_float32_has_warps_with_roles_where_there_are_rounds_of_tiles():
    def kernels(m, n, k, op="matmul", **options):
        named = ("a", "b") if op == "matmul" else ("x", "weight")
        shapes = ((m, k), (k, n)) if op == "matmul" else ((m, k), (n, k))
        arrays = {x: torch.empty(s, device="meta") for x, s in zip(named, shapes, strict=True)}
        impl, call = bound(op, *arrays.values(), **options)
        launches = []
        with launching.recording(lambda kernel, *rest: launches.append(kernel.__name__)):
            impl.run(call, resolve(impl, call, {}).tiling)
        return launches

    assert kernels(4096, 4096, 4096) == ["matmul_in_slices"] and kernels(1000, 1992, 1040) == ["matmul_kernel"]
    assert kernels(4096, 4096, 4096, precision="tf32") == ["matmul_turned"]
    assert kernels(4096, 4096, 4096, "linear")[-1] == "linear_kernel"
    assert kernels(4096, 4096, 4096, "linear", precision="tf32") == ["linear_by_roles"]
    impl, call = product(4096, 4096, 4096, dtype=torch.float32)
    with pytest.raises(pk.UnsupportedError, match="precision 'ieee' needs block_n=128"):
        resolve(impl, call, {"block_n": 256})


def test_linear_takes_one_row_without_a_batch_and_no_roles_for_float32_in_ieee():
    for shape, dtype in (((257,), torch.float16), ((2,), torch.bfloat16), ((96,), torch.float16)):
        x, weight = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(65, *shape, dtype=dtype, device="meta")
        impl, call = bound("linear", x, weight)
        tiling = resolve(impl, call, {}).tiling
        assert impl.supports(call, tiling.replace(**ROLES, swap_ab=0, warp_specialized=1, epilogue_subtile=0)) is None
    x = torch.empty(300, 64, device="meta")
    roles = HopperProductConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=2, group=1, swap_ab=0)
    impl, call = bound("linear", x, x)
    assert "use warp_specialized=0" in impl.supports(call, roles.replace(warp_specialized=1))
    impl, call = bound("linear", x, x, precision="tf32")
    assert impl.supports(call, roles.replace(warp_specialized=1)) is None


def test_the_tile_follows_rows_and_the_split_of_k_does_not():
    assert tiles(4096, 4096, 4096)[0] == "128 x 256" and tiles(4096, 4096, 4096)[1]["warp_specialized"] == 1
    assert tiles(1000, 2944, 5120)[0] == "128 x 192" and tiles(1000, 2944, 5120)[1]["warp_specialized"] == 2
    # Where one round of tiles is all, rows of tiles go in smaller groups.
    assert tiles(1000, 2944, 5120)[1]["group"] < tiles(4095, 4097, 4093)[1]["group"]
    assert tiles(1, 4096, 4096)[0] == "16 rows x 64" and tiles(40, 4096, 4096)[1]["swap_ab"] == 1
    assert tiles(16, 14336, 4096)[0] == "16 rows x 128"  # as many rounds as 64 columns make
    assert (
        tiles(4096, 4096, 4096, out_dtype="float32")[1]["warp_specialized"] == 0
    )  # c's tile would leave no room for operands
    from portakern.backends.triton.hopper._tiles import chunk_of, split

    assert chunk_of(4096, 4096) == 4096 and chunk_of(512, 65536) == 8192
    assert split(16, 512, 65536) == 8 and split(256, 512, 65536) == 1  # tiles enough: one program after another
    assert split(10**6, 4096, 4096) == 1


def test_a_tile_is_long_where_the_other_operand_begins_off_lines_of_the_cache():
    def chosen(a, b):
        _impl, call = bound("matmul", a, b)
        return products.best_tile(call)[0], products.copied(call)

    def meta(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    assert chosen(meta(4096, 4096), meta(4096, 3008)) == chosen(meta(4096, 4096), meta(3008, 4096).T)
    assert chosen(meta(4096, 4096), meta(4096, 3000)) == ("256 x 128", None)
    assert chosen(meta(4096, 4104), meta(4104, 4096))[0] == "128 x 256"
    # Of two that begin so the smaller one is copied, and the other decides; elements off 16 bytes are copied anyway.
    assert chosen(meta(3000, 3000), meta(3000, 4104)) == ("256 x 128", "a")
    assert chosen(meta(4104, 3000), meta(3000, 3000)) == ("128 x 256", "b")
    assert chosen(meta(1000, 520), meta(520, 1000))[1] is None
    assert chosen(meta(4095, 4093), meta(4093, 4097))[1] is None


def test_a_tile_is_chosen_by_what_rounds_take_with_their_begin_and_end(monkeypatch):
    assert tiles(1536, 1536, 1536)[0] == tiles(3000, 768, 3072)[0] == "128 x 160"  # short sums, and one round
    assert tiles(900, 5120, 13824)[0] == "128 x 192"
    name, several = tiles(3333, 4096, 1024)
    assert (
        name == "128 x 128" and several["warp_specialized"] == 1 and tiles(777, 1536, 512)[1]["warp_specialized"] == 0
    )
    assert tiles(1000, 3000, 5120)[0] == "256 x 128"
    monkeypatch.setattr(products, "on_h200", lambda call: True)  # whose memory delivers rows that begin off lines
    assert tiles(1000, 3000, 5120)[0] == "128 x 192" and tiles(4096, 3000, 4096)[0] == "256 x 128"


CALLS = {
    "both off lines": (
        ("matmul", normal(2040, 1032), normal(1032, 2056)),
        {},
        ["matmul_shift_rows", "matmul_by_roles"],
    ),
    "large": (("matmul", normal(2000, 264), normal(264, 4096)), {}, ["matmul_by_roles"]),
    "odd": (
        ("matmul", normal(300, 261), normal(261, 203)),
        {},
        ["matmul_shift_rows", "matmul_shift_rows", "matmul_kernel"],
    ),
    "tf32": (
        ("matmul", normal(300, 264, dtype=torch.float32), normal(264, 200, dtype=torch.float32)),
        {"precision": "tf32"},
        ["matmul_gather_tiles", "matmul_kernel"],
    ),
    "long": (("matmul", normal(100, 16384), normal(16384, 200)), {}, ["matmul_kernel", "matmul_add_parts_kernel"]),
    "batch": (("matmul", normal(4, 30, 264), normal(4, 264, 200)), {}, ["matmul_kernel"]),
    "large batch": (("matmul", normal(1, 1000, 72), normal(12, 72, 1000)), {}, ["matmul_by_roles"]),
    "batch of odd rows": (("matmul", normal(4, 77, 77), normal(4, 77, 64)), {}, ["matmul_direct_kernel"]),
    "rows of a batch": (("matmul", normal(4, 30, 264), normal(1, 264, 200)), {}, ["matmul_kernel"]),
    "linear": (
        ("linear", normal(2000, 264), normal(4096, 264), normal(4096)),
        {"activation": "gelu", "return_pre": True},
        ["linear_by_roles"],
    ),
    "linear, odd": (
        ("linear", normal(300, 261), normal(203, 261), normal(203), normal(300, 203)),
        {"activation": "gelu_tanh", "return_pre": True},
        ["matmul_shift_rows", "matmul_shift_rows", "linear_kernel"],
    ),
    "linear's gradients": (
        ("linear_vjp", normal(300, 264), normal(200, 264), normal(300, 200), normal(300, 200), normal(200)),
        {"activation": "silu"},
        ["linear_cotangent_kernel", "layernorm_vjp_sum_kernel", "matmul_kernel", "matmul_kernel"],
    ),
    "gradients": (("matmul_vjp", normal(300, 264), normal(264, 200), normal(300, 200)), {}, ["matmul_kernel"] * 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_signature_are_planned_where_arrays_begin_alike(name):
    """What is launched is what the implementation launches; an array that begins elsewhere is left to it."""
    (op, *arrays), options, kernels = CALLS[name]
    impl, call = bound(op, *arrays, **options)
    launches = []
    with launching.recording(lambda kernel, grid, args, constexprs: launches.append(kernel.__name__)):
        _, again = plan.learn(impl, call, resolve(impl, call, {}).tiling)
        assert launches == kernels and again is not None
        launches.clear()
        again(call.arrays)
        assert launches == kernels
        first = next(iter(call.arrays))
        moved = torch.empty(arrays[0].numel() + 1, dtype=arrays[0].dtype)[1:].view(arrays[0].shape)
        launches.clear()
        again({**call.arrays, first: moved})
        copies = {"matmul_shift_rows", "matmul_gather_tiles"}
        others = [k for k in launches if k not in copies]
        assert others == [k for k in kernels if k not in copies]
        assert copies & {*launches} or kernels == ["matmul_direct_kernel"]  # which reads from anywhere


DIRECT = {
    "a odd": (normal(3, 77, 77), normal(3, 77, 64)),
    "a transposed": (normal(2, 77, 70).mT, normal(2, 77, 64)),
    "b transposed, c odd": (normal(2, 33, 64), normal(2, 77, 64).mT),
    "b odd": (normal(2, 70, 40), normal(2, 40, 83)),
    "even rows": (normal(2, 70, 50), normal(2, 50, 34)),
    "one a for all": (normal(1, 70, 51), normal(3, 51, 34)),
    "b of each of two axes": (normal(2, 3, 33, 51), normal(2, 1, 51, 34)),
    "steps of k": (normal(2, 20, 301), normal(2, 301, 130)),
    "columns of wider rows": (normal(2, 33, 100)[:, :, 3:54], normal(2, 51, 34)),
    "heads": (normal(2, 33, 3, 51).permute(0, 2, 1, 3), normal(2, 51, 3, 34).permute(0, 2, 1, 3)),
    "one column": (normal(3, 40, 33), normal(3, 33, 1)),
    "rows of a batch": (normal(3, 2, 30, 45), normal(45, 20)),
    "rows of columns of a batch": (normal(2, 30, 90)[:, :, ::2].mT.contiguous().mT, normal(45, 20)),
    "one matrix": (normal(70, 77), normal(77, 64)),
    "all described": (normal(2, 64, 64), normal(2, 64, 64)),
}


@pytest.mark.parametrize("name", DIRECT)
def test_batches_of_small_matrices_are_read_as_they_lie(name):
    a, b = DIRECT[name]
    nan = torch.full_like(a[..., :1], torch.nan)  # beyond what a row has lies what no sum may meet
    a = torch.cat([a, nan], -1)[..., :-1] if a.stride(-1) == 1 else a
    impl, call = bound("matmul", a, b)
    tiling = resolve(impl, call, {}).tiling
    launches = []

    def interpreted(kernel, grid, args, constexprs):
        launches.append(kernel.__name__)
        interpreter.run(kernel, grid, *args, **constexprs)

    with launching.recording(interpreted):
        (c,) = impl.run(call, tiling)
    assert launches == ["matmul_direct_kernel"]
    assert max(testing.compare_call(call, [call.framework.to_numpy(c)]).values()) <= 1


def test_what_is_read_as_it_lies_is_small_and_odd():
    def reads(a, b, **options):
        return products.loads_directly(bound("matmul", a, b, **options)[1])

    assert reads(normal(2, 197, 197), normal(2, 197, 64)) and reads(normal(2, 77, 64), normal(2, 77, 64).mT)
    assert reads(normal(197, 197), normal(197, 64)) and reads(normal(9, 197, 197), normal(197, 64))
    assert reads(normal(2, 200, 200), normal(2, 200, 64)) and not reads(normal(200, 200), normal(200, 64))
    assert not reads(normal(2, 600, 200), normal(2, 200, 64)) and not reads(normal(2, 200, 200), normal(2, 200, 136))
    # c alone is odd: the copy engine brings a and b
    assert not reads(normal(2, 20, 64), normal(2, 197, 64).mT) and reads(normal(2, 20, 64), normal(2, 64, 197))
    assert not reads(normal(2, 20, 197), normal(2, 197, 264)) and not reads(normal(2, 20, 601), normal(2, 601, 64))
    assert reads(normal(140, 9, 601), normal(140, 601, 16)) and not reads(normal(140, 9, 1025), normal(140, 1025, 16))
    assert not reads(normal(300, 261), normal(261, 203))  # a long sum by few programs
    assert not reads(normal(2, 20, 77, dtype=torch.float32), normal(2, 77, 64, dtype=torch.float32))
    assert reads(normal(2, 20, 77), normal(2, 77, 64), out_dtype="float32")
    tall = torch.empty(2**26, 77, dtype=torch.bfloat16, device="meta")  # 32 bits do not count its elements
    assert not reads(tall, torch.empty(77, 16, dtype=torch.bfloat16, device="meta"))
    impl, call = bound("matmul", normal(2, 77, 77), normal(2, 77, 64))
    for named, reason in (
        ({"block_n": 32}, "all columns"), ({"block_k": 1}, "at most 32 steps"),
        ({"block_m": 256, "block_k": 1024}, "shared memory"), ({"block_m": 256, "block_n": 128}, "registers"),
    ):  # fmt: skip
        tiling = resolve(impl, call, {}).tiling.replace(**named)
        assert reason in impl.supports(call, tiling), named
    impl, call = bound("matmul", normal(2, 77, 40, dtype=torch.float32), normal(2, 40, 64, dtype=torch.float32))
    assert "16-bit operands" in impl.supports(call, default(impl, call).tiling.replace(direct_loads=1))


ROLES = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3, "group": 2}
BY_ROLES = {
    "160 columns": (normal(300, 200), normal(200, 352), 3),
    "160 columns, b transposed": (normal(130, 72), normal(170, 72).T, 3),
    "160 columns, a transposed": (normal(72, 130).T, normal(72, 168), 3),
    "160 columns of a batch": (normal(2, 130, 136), normal(2, 136, 200), 3),
    "160 columns, odd": (normal(130, 136), normal(136, 325), 3),
    "192 columns": (normal(300, 200), normal(200, 400), 2),
    "192 columns, odd": (normal(130, 136), normal(136, 197), 2),
    "128 columns": (normal(300, 200), normal(200, 264), 1),
}
FLOATS = {"block_m": 128, "block_n": 128, "block_k": 32, "warp_specialized": 1}
IN_STAGES = {"warp_specialized": 2, "epilogue_subtile": 2}
IN_OTHER_WAYS = {
    "192 columns, through a's stages": (normal(130, 200), normal(200, 190), IN_STAGES),
    "192 columns, a transposed": (normal(200, 130).T, normal(200, 176), IN_STAGES),
    "192 columns of a batch": (normal(2, 100, 520), normal(2, 520, 192), IN_STAGES),
    "192 columns by parts": (normal(300, 200), normal(200, 400), {"warp_specialized": 2, "epilogue_subtile": 1}),
    "192 columns, odd": (normal(130, 136), normal(136, 191), IN_STAGES),
    "256 rows": (normal(300, 200), normal(200, 264), {"block_m": 256, "epilogue_subtile": 1}),
    "256 rows, b transposed": (normal(257, 72), normal(136, 72).T, {"block_m": 256, "epilogue_subtile": 0}),
    "256 rows, a transposed": (normal(72, 200).T, normal(72, 136), {"block_m": 256, "epilogue_subtile": 0}),
    "256 rows, odd": (normal(300, 200), normal(200, 131), {"block_m": 256, "epilogue_subtile": 0}),
    "256 rows of a batch": (normal(2, 260, 200), normal(2, 200, 136), {"block_m": 256, "epilogue_subtile": 1}),
    "256 columns, through a's stages": (
        normal(200, 40), normal(40, 256), {"block_n": 256, "epilogue_subtile": 2, "num_stages": 4},
    ),
    "float32": (normal(300, 100, dtype=torch.float32), normal(100, 132, dtype=torch.float32), FLOATS),
    "float32, odd, of a batch": (
        normal(2, 130, 37, dtype=torch.float32), normal(1, 37, 133, dtype=torch.float32).expand(2, 37, 133), FLOATS,
    ),
    "tf32": (normal(300, 100, dtype=torch.float32), normal(100, 272, dtype=torch.float32), FLOATS | {"block_n": 256}),
    "tf32, odd, of a batch": (
        normal(2, 140, 37, dtype=torch.float32), normal(2, 37, 133, dtype=torch.float32), FLOATS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_OTHER_WAYS)
def test_warps_with_roles_meet_the_bound_in_other_ways(name, tmp_path, monkeypatch):
    """Where c leaves through the stages of the only tile, and float32 with a and b as they lie."""
    a, b, named = IN_OTHER_WAYS[name]
    modules, launches = [host.on_host(_warps, tmp_path), host.on_host(_float32, tmp_path), gluon, order_of_tiles], []

    def on_the_host(kernel, grid, args, constexprs):
        launches.append(kernel.__name__)
        if not kernel.is_gluon():
            return interpreter.run(kernel, grid, *args, **constexprs)
        return host.launched(kernel, modules, grid, args, plan=constexprs["plan"])

    monkeypatch.setattr(products, "MULTIPROCESSORS", 2)
    if named.get("epilogue_subtile") == 2:  # one group of warps writes c while what the other has written is on its way
        monkeypatch.setattr(host, "LATE", {0: 0.05, 1: 0.055})
    impl, call = bound("matmul", a, b, precision="tf32" if name.startswith("tf32") else "ieee")
    tiling = products.fit(
        call, HopperProductConfig(**{**ROLES, "swap_ab": 0, "warp_specialized": 1, "epilogue_subtile": 0, **named})
    )
    assert products.supports(call, tiling) is None and tiling["epilogue_subtile"] == named.get("epilogue_subtile", 0)
    with launching.recording(on_the_host):
        (c,) = impl.run(call, tiling)
    assert "matmul_gather_tiles" not in launches
    kernels = {"tf32": "matmul_turned", "floa": "matmul_in_slices"}
    assert kernels.get(name[:4], "matmul_by_roles") in launches
    assert max(testing.compare_call(call, [call.framework.to_numpy(c)]).values()) <= 1


@pytest.mark.parametrize("name", BY_ROLES)
def test_warps_with_roles_meet_the_bound(name, tmp_path, monkeypatch):
    a, b, roles = BY_ROLES[name]
    module = host.on_host(_warps, tmp_path)

    def on_the_host(kernel, grid, args, constexprs):
        if kernel.__name__ != "matmul_by_roles":
            return interpreter.run(kernel, grid, *args, **constexprs)
        return host.launched(kernel, [module, gluon, order_of_tiles], grid, args, plan=constexprs["plan"])

    monkeypatch.setattr(products, "MULTIPROCESSORS", 2)
    impl, call = bound("matmul", a, b)
    named = {
        **ROLES,
        "warp_specialized": roles,
        **dict.fromkeys({"epilogue_subtile"} & {*default(impl, call).tiling}, 0),
    }
    with launching.recording(on_the_host):
        (c,) = impl.run(call, resolve(impl, call, named).tiling)
    assert max(testing.compare_call(call, [call.framework.to_numpy(c)]).values()) <= 1


def test_gradients_take_the_tiles_that_suit_each():
    meta = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((16, 4096), (4096, 14336), (16, 14336))]
    impl, call = bound("matmul_vjp", *meta)
    from portakern.backends.triton.hopper.matmul import bare_products, own_tiling

    own = {name: own_tiling(call, of, default(impl, call).tiling) for name, of in bare_products(call).items()}
    assert own["d_a"]["swap_ab"] == 1 and own["d_b"]["warp_specialized"] == 1
    named = default(impl, call).tiling.replace(block_n=128)
    assert own_tiling(call, bare_products(call)["d_b"], named) == named


def test_explain_names_the_variants():
    told = pk.op("matmul", backend="triton", variant="hopper").explain(normal(8, 16), normal(16, 8))
    assert "variant hopper: serves this call (named)" in told
    told = pk.op("matmul", backend="triton").explain(normal(8, 16), normal(16, 8))
    assert "variant gpu: serves this call" in told and "variant hopper: not for cpu" in told


@compiles
@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [(4096, 4096, 4096, {}), (1000, 3001, 5120, {}), (16, 14336, 4096, {}), (512, 512, 65536, {}),
     (4096, 4096, 4096, {"precision": "tf32"}), (512, 512, 512, {"batch": 64}), (512, 575, 512, {"batch": 64}),
     (197, 64, 197, {"batch": 8}), (77, 77, 64, {"batch": 8}), (197, 250, 197, {"batch": 8})],
)  # fmt: skip
def test_products_compile_for_hopper_and_do_not_wait(m, n, k, options):
    options = dict(options)
    batch = [options.pop("batch")] if "batch" in options else []
    impl, call = product(m, n, k, *batch, dtype=torch.float32 if options else torch.bfloat16, **options)
    built = impl.family.load_compiler().build(impl, call, resolve(impl, call, {}).tiling)
    hardware = targets.find("sm_90")
    for kernel in built.kernels:
        assert kernel.over(hardware) is None and not kernel.serialised and (kernel.spills or 0) <= 12, kernel.name
        assert kernel.name not in ("matmul_kernel", "matmul_by_roles") or any("GMMA" in i for i in kernel.matrix)


@compiles
@pytest.mark.parametrize(
    ("m", "n", "k", "given"),
    [
        (4096, 4096, 4096, ("bias", "residual")),
        (1000, 3000, 5120, ("bias", "residual")),
        (1001, 3001, 261, ("bias", "residual")),
        (1001, 3001, 261, ("bias",)),
        (16, 4096, 4096, ("bias", "residual")),
        (200, 301, 520, ("bias", "residual")),
        (200, 301, 520, ("bias",)),
    ],
)
def test_linear_compiles_for_hopper_and_is_what_it_says(m, n, k, given):
    """With pre and rows of y that begin anywhere, the columns of bias and of y once shared a register: see
    :mod:`portakern.backends.triton.leaks`."""
    meta = {"x": (m, k), "weight": (n, k), "bias": (n,), "residual": (m, n)}
    arrays = [
        torch.empty(shape, dtype=torch.bfloat16, device="meta") if name in ("x", "weight", *given) else None
        for name, shape in meta.items()
    ]
    impl, call = bound("linear", *arrays, activation="gelu_tanh", return_pre=True)
    built = impl.family.load_compiler().build(impl, call, resolve(impl, call, {}).tiling)
    for kernel in built.kernels:
        assert kernel.over(targets.find("sm_90")) is None and not kernel.serialised and not kernel.leaking, kernel.name
        assert not kernel.name.startswith("linear") or any("GMMA" in i for i in kernel.matrix)
