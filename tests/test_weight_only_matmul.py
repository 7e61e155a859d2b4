"""weight_only_matmul: partial sums of k in either kind of launch, and the layouts of other libraries."""

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry, targets, tilings
from portakern.core.binder import unchecked
from tests.gluon_on_host import compiles

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

TILES = {"block_m": 16, "block_n": 64, "block_k": 32, "swap_ab": 0, "num_warps": 4, "num_stages": 2, "group": 8}


def drawn(m, k, n, packed, zeros=True, seed=0):
    rng = np.random.default_rng(seed)
    groups = -(-k // 32)
    a, scale = (torch.tensor(rng.standard_normal(s), dtype=torch.bfloat16) for s in ((m, k), (groups, n)))
    b = torch.tensor(rng.integers(-128, 128, (-(-k // packed), n)), dtype=torch.int8)
    zero = torch.tensor(rng.uniform(0, 15, (groups, n)), dtype=torch.bfloat16) if zeros else None
    return a, b, scale, zero, torch.tensor(rng.standard_normal(n), dtype=torch.bfloat16)


@pytest.mark.parametrize("packed", [1, 2])
def test_a_row_has_the_bits_that_it_has_among_others_in_chunks_of_k_too(packed, monkeypatch):
    """Of one row each chunk has a program; of 70 rows a program adds up all chunks."""
    from portakern.backends.triton.gpu import weight_only_matmul as module

    launched = []
    monkeypatch.setattr(
        module,
        "launch",
        lambda kernel, grid, *a, run=module.launch, **k: (launched.append(kernel), run(kernel, grid, *a, **k)),
    )
    a, *rest = drawn(70, 700, 40, packed)
    options = {"k_width": 32, "codes_per_byte": packed, "out_dtype": "float32"}
    op = pk.op("weight_only_matmul", backend="triton", tiling={**TILES, "split_programs": 4})
    among = op(a, *rest, **options)
    assert launched == [module.weight_only_matmul_kernel]
    for row in (0, 33, 69):
        alone = op(a[row : row + 1], *rest, **options)
        assert torch.equal(alone, among[row : row + 1])
    assert launched[1:3] == [module.weight_only_matmul_kernel, module.weight_only_matmul_sum_kernel]


def test_chunks_follow_n_and_k_alone():
    from portakern.backends.triton import BACKEND
    from portakern.backends.triton.gpu.weight_only_matmul import chunks_of

    (family,) = (f for f in BACKEND.families if f.name == "gpu")
    impl = BACKEND.implementation("weight_only_matmul", family)
    found = {}
    for m in (1, 16, 4096):
        for n, k in ((14336, 4096), (4096, 14336), (4096, 4096)):
            call = on_chip(m, k, n)
            tiling = tilings.resolve(impl, call, {}).tiling
            found.setdefault((n, k), set()).add((tiling.block_k, *chunks_of(call, tiling)))
    assert {name: len(f) for name, f in found.items()} == dict.fromkeys(found, 1)
    assert found[4096, 14336] == {(128, 28, 4)} and found[14336, 4096] == {(128, 32, 1)}


def on_chip(m, k, n, packed=2, zeros=False, arch="sm_90", dtype=torch.bfloat16):
    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    arrays = [empty(m, k), empty(n, k // packed, dtype=torch.int8).t(), empty(k // 128, n)]
    arrays += [empty(k // 128, n)] if zeros else []
    call = unchecked(registry.find_spec("weight_only_matmul"), *arrays, codes_per_byte=packed)
    return call.replace(target=targets.find(arch).target, interpret=False)


COMPILED = {
    "few rows": ((16, 4096, 14336), {}, "HGMMA.64x16x16.F32.BF16"),
    "few rows, 8 bits": ((16, 4096, 14336), {"packed": 1}, "HGMMA.64x16x16.F32.BF16"),
    "few rows and zeros": ((16, 4096, 14336), {"zeros": True}, "HGMMA.64x16x16.F32.BF16"),
    "many rows": ((4096, 4096, 14336), {}, "HGMMA.64x64x16.F32.BF16"),
}


@compiles
@pytest.mark.parametrize("name", COMPILED)
def test_codes_are_the_left_operand_of_wgmma(name):
    from portakern.backends.triton import BACKEND

    (family,) = (f for f in BACKEND.families if f.name == "gpu")
    impl = BACKEND.implementation("weight_only_matmul", family)
    shape, more, instruction = COMPILED[name]
    call = on_chip(*shape, **more)
    kernel = family.load_compiler().build(impl, call, tilings.resolve(impl, call, {}).tiling).kernels[0]
    assert kernel.name == "weight_only_matmul_kernel" and kernel.over(targets.find("sm_90")) is None
    assert not kernel.spills and not kernel.leaking
    assert any(instruction in i for i in kernel.matrix), kernel.matrix


@compiles
def test_products_of_float32_are_not_tf32_on_blackwell():
    """Of a left operand that is made in registers Triton would take them so, whatever input_precision says."""
    from portakern.backends.triton import BACKEND

    (family,) = (f for f in BACKEND.families if f.name == "gpu")
    impl = BACKEND.implementation("weight_only_matmul", family)
    call = on_chip(64, 256, 256, arch="sm_100", dtype=torch.float32)
    tiling = tilings.resolve(impl, call, {}).tiling
    assert impl.supports(call, tiling) is None
    assert not family.load_compiler().build(impl, call, tiling).kernels[0].matrix
    assert "in tf32" in impl.supports(call, tiling.replace(swap_ab=1))


# ------------------------------------------------------------------------------------------------------------- layouts
M, K, N, WIDTH = 3, 64, 16, 32


@pytest.fixture
def call():
    rng = np.random.default_rng(1)
    codes = torch.tensor(rng.integers(0, 16, (K, N)))
    scale, zero = torch.tensor(rng.random((2, 2, N)) + 0.5, dtype=torch.float32)
    zero = (zero * 10).round()
    a = torch.tensor(rng.standard_normal((M, K)), dtype=torch.float32)
    weight = scale.repeat_interleave(WIDTH, 0) * (codes - zero.repeat_interleave(WIDTH, 0))
    return codes, a, scale, zero, a.double() @ weight.double()


def product(a, b, scale, zero):
    return pk.op("weight_only_matmul", backend="reference")(a, b, scale, zero, k_width=WIDTH, codes_per_byte=2)


def test_gptq_packs_8_codes_along_k(call):
    codes, a, scale, zero, want = call
    qweight = sum(codes[i::8] << 4 * i for i in range(8)).to(torch.int32)
    b = qweight.view(torch.int8).view(K // 8, N, 4).transpose(1, 2).reshape(K // 2, N)
    torch.testing.assert_close(product(a, b, scale, zero).double(), want, rtol=1e-6, atol=1e-4)


def test_awq_packs_8_codes_along_n_in_another_order(call):
    codes, a, scale, zero, want = call
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    columns = codes.view(K, N // 8, 8)
    qweight = sum(columns[..., column] << 4 * i for i, column in enumerate(order)).to(torch.int32)
    unpacked = torch.empty(K, N // 8, 8, dtype=torch.int64)
    for i, column in enumerate(order):
        unpacked[..., column] = qweight >> 4 * i & 15
    q = unpacked.view(K, N)
    b = (q[0::2] | q[1::2] << 4).to(torch.int8)
    torch.testing.assert_close(product(a, b, scale, zero).double(), want, rtol=1e-6, atol=1e-4)


def test_pytorch_has_even_codes_in_high_halves_and_zeros_in_units_of_the_weight(call):
    codes, a, scale, zero, want = call
    w = (codes.t()[:, ::2] << 4 | codes.t()[:, 1::2]).to(torch.uint8)
    z = (8 - zero) * scale  # its weight: (q - 8) s + z
    b = (w << 4 | w >> 4).view(torch.int8).t()
    found = product(a, b, scale, 8 - z / scale)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-4)
    weight = torch._convert_weight_to_int4pack_for_cpu(codes.t().to(torch.int32), 1)
    both = torch.stack((scale, z), -1)
    theirs = torch._weight_int4pack_mm_for_cpu(a.bfloat16(), weight, WIDTH, both.bfloat16())
    torch.testing.assert_close(theirs.double(), want, rtol=0.05, atol=1.5)


def test_codes_kept_as_their_value_more_8(call):
    codes, a, scale, _, _ = call
    b = (codes[0::2] | codes[1::2] << 4).to(torch.int8)
    with_zeros = product(a, b, scale, torch.full((1, N), 8.0))
    torch.testing.assert_close(product(a, b ^ -120, scale, None), with_zeros, rtol=1e-5, atol=1e-4)
