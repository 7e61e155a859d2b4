"""Triton's kernels inside JAX's programs: what a program carries, and, launched by a stand-in for jaxlib's plug-in
(custom_calls.py), that it is right on JAX's arrays and under its transforms. On a GPU nothing stands in.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="jax is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")
import jax.numpy as jnp  # noqa: E402
import triton.language as tl  # noqa: E402
from jax import export as jax_export  # noqa: E402

import portakern as pk  # noqa: E402
import portakern.jax  # noqa: E402
from portakern import testing  # noqa: E402
from portakern.backends.triton import chunked, lowering, trace  # noqa: E402
from portakern.backends.triton.capture import capturing  # noqa: E402
from portakern.backends.triton.compiler import specialised  # noqa: E402
from portakern.backends.triton.launch import launch  # noqa: E402
from portakern.backends.triton.layout import contiguous_strides  # noqa: E402
from portakern.core import backend, batching, registry, targets  # noqa: E402
from portakern.core.framework import frameworks  # noqa: E402
from portakern.core.program import Code, DescribedArray, Launch, Loop, Program, ScalarArgument, TileFormat  # noqa: E402
from portakern.frameworks.jax import embedding, tracing  # noqa: E402
from portakern.testing.verdict import PROMISES  # noqa: E402
from tests.custom_calls import Plugin, decode, plugged_in  # noqa: E402

TRITON = registry.backend("triton")
FAMILY = next(f for f in TRITON.families if f.name == "gpu")
OPS = [op for op in registry.ops() if TRITON.module_of(op, FAMILY)]
LIMITS = testing.Limits(elements=2048, typical_elements=0)
RNG = np.random.default_rng(0)
CARRIES = embedding.jaxlib.version.__version_info__ >= embedding.CARRIES_CODE
SM_90 = targets.find("sm_90")


pytestmark = pytest.mark.usefixtures("jax_on_the_host")


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def on_triton(op, **options):
    return pk.op(op, backend="triton", **options)


def close(actual, want, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=tolerance)


KEPT = {*PROMISES} - {"laws"}  # which tests/test_conformance.py asks of the same kernels


# ------------------------------------------------------------------------------------------------- right, and in jit


@pytest.mark.parametrize("op", OPS)
def test_within_bounds(op):
    how = {"framework": "jax", "device": "cpu", "limits": LIMITS, "promises": KEPT}
    with plugged_in("sm_89") as plugin:  # the oldest chip on which Triton reads float8_e4m3fn
        report = pk.check(op, fn=on_triton(op), max_examples=3, shrink=False, **how)
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples == 3 and not report.refused and plugin.calls


def test_transforms_see_a_step_of_their_program():
    softmax, x = on_triton("softmax"), normal(4, 3, 70)
    want = jax.nn.softmax(x)
    with plugged_in() as plugin:
        close(softmax(x), want)
        close(jax.jit(lambda x: softmax(softmax(x * 1)))(x), jax.nn.softmax(want))
        close(jax.lax.scan(lambda carry, row: (carry, softmax(row)), 0, x)[1], want)
        close(jax.jit(lambda x: jax.lax.cond(x[0, 0, 0] > 99, lambda x: x, softmax, x))(x), want)
        assert len(plugin.calls) == 1 + 2 + 4 + 1
        mapped = jax.jit(jax.vmap(softmax, in_axes=1, out_axes=1))
        close(mapped(x), want)
        close(jax.vmap(jax.vmap(lambda x: softmax(x)))(x), want)
        assert len(plugin.calls) == 8 + 2, "the samples of a vmap are one call"


@pytest.fixture
def takes_descriptors(monkeypatch):
    """A jaxlib that makes tensor descriptors at a launch."""
    monkeypatch.setattr(embedding, "CARRIES_CODE", (0,))


def products_on_hopper(precision):
    """A matrix product with its gradients and a linear layer, by kernels for Hopper that the interpreter runs."""
    how = {"variant": "hopper", "tiling": {"warp_specialized": 0}}
    matmul, linear = on_triton("matmul", **how), on_triton("linear", **how)
    a, b, d, x, w, bias = (normal(*s) for s in ((3, 70, 64), (64, 72), (3, 70, 72), (70, 65), (40, 65), (40,)))
    with plugged_in("sm_90") as plugin:
        product = functools.partial(matmul, precision=precision)
        close(product(a, b), a @ b, 0.1)
        close(jax.vjp(product, a, b)[1](d), jax.vjp(jnp.matmul, a, b)[1](d), 0.1)
        close(linear(x, w, bias, activation="relu", precision=precision), jax.nn.relu(x @ w.T + bias), 0.1)
    multiply = [c for c in plugin.calls if c.name in ("matmul_kernel", "linear_kernel")]
    assert len(multiply) == 5 and all([k for k, _ in c.parameters].count("described") >= 2 for c in multiply)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_kernels_for_hopper_take_described_arrays(precision):
    products_on_hopper(precision)


def test_samples_that_share_an_array():
    x, w = normal(3, 5, 40), normal(40)
    with plugged_in() as plugin:
        layernorm = on_triton("layernorm")
        want = pk.op("layernorm", backend="reference")(x, w, w)
        close(jax.vmap(layernorm, in_axes=(0, None, None))(x, w, w), want)
        assert len(plugin.calls) == 1
        a, b = normal(3, 8, 24), normal(24, 9)
        close(jax.vmap(on_triton("matmul"), in_axes=(0, None))(a, b), a @ b, 1e-4)
        assert len(plugin.calls) == 2
        per_sample = jax.vmap(jax.grad(lambda w, x: (layernorm(x, w, w) ** 2).sum()), in_axes=(None, 0))(w, x)
        theirs = jax.vmap(
            jax.grad(lambda w, x: (((x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * w + w) ** 2).sum()),
            in_axes=(None, 0),
        )
        close(per_sample, theirs(w, x), 1e-2)
        assert len(plugin.calls) == 2 + 1 + 3 * 2, "a gradient that each sample has of its own is made sample by sample"


def test_gradients_save_and_make_nothing_twice():
    """Of softmax: one launch forward, one backward, and no copy of an array between them."""
    x, d = normal(6, 70), normal(6, 70)
    with plugged_in() as plugin:
        close(jax.vjp(on_triton("softmax"), x)[1](d), jax.vjp(jax.nn.softmax, x)[1](d))
        plugin.calls.clear()
        text = str(jax.make_jaxpr(lambda x, d: jax.vjp(on_triton("softmax"), x)[1](d))(x, d))
        assert text.count("portakern_op") == 2 and "copy" not in text
        grads = jax.jit(jax.grad(lambda *qkv: (on_triton("attention")(*qkv, is_causal=True) ** 2).sum(), (0, 1, 2)))
        q, k, v = normal(1, 9, 4, 16), normal(1, 9, 2, 16), normal(1, 9, 2, 16)
        theirs = jax.grad(lambda *qkv: (jax.nn.dot_product_attention(*qkv, is_causal=True) ** 2).sum(), (0, 1, 2))
        close(grads(q, k, v), theirs(q, k, v), 1e-3)


def test_an_eager_call_is_traced_once():
    x = normal(3, 40)
    with plugged_in() as plugin:
        for _ in range(2):
            on_triton("softmax")(x)
        assert tracing._program("softmax", False)._cache_size() == 1 and len(plugin.calls) == 2
        impl = TRITON.implementation("softmax", FAMILY)
        assert FAMILY.staged(impl, frameworks()["jax"]) is FAMILY.staged(impl, frameworks()["jax"])


# ----------------------------------------------------------------------------------------------- programs of launches


@triton.jit
def add_up(x, total, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(total + i, tl.load(total + i) + tl.load(x + i))


@triton.jit
def twice(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, 2 * tl.load(x + i))


GPU_CALL = SimpleNamespace(interpret=False)


def program(run, *shapes, written=()):
    """What ``run(trace, *arrays)`` does; it returns an abstract array."""
    traced = trace.Trace()
    arrays = [traced.allocate(s, "float32") for s in shapes]
    with capturing(traced):
        out = run(traced, *arrays)
    steps = lowering.finished(SM_90.target, traced.steps)
    names = tuple(f"a{i}" for i in range(len(shapes)))
    return Program(names, tuple(traced.places), steps, ((out.number, out.seen),), frozenset(written))


def embedded(made, *arrays):
    return jax.jit(lambda *a: embedding.embed(made, dict(zip(made.inputs, a, strict=True))))(*arrays)[0]


def filled_twice(traced, x):
    made = traced.fresh((16,), np.dtype("float32"))
    launch(twice, 1, GPU_CALL, x, made, n=16)
    for _ in range(2):
        launch(add_up, 1, GPU_CALL, x, made, n=16)
    return made


def test_a_kernel_goes_on_writing_to_what_an_earlier_one_made():
    x = normal(16)
    with plugged_in() as plugin:
        close(embedded(program(filled_twice, (16,)), x), 4 * x)
        assert [c.name for c in plugin.calls] == ["twice", "add_up", "add_up"]


def transposed(traced, x):
    made = traced.fresh((16,), np.dtype("float32"))
    launch(twice, 1, GPU_CALL, x.permute(1, 0).reshape(16), made, n=16)
    return made.reshape(2, 8).permute(1, 0)


def test_copies_and_outputs_are_seen_as_the_program_says():
    x = normal(4, 4)
    with plugged_in():
        close(embedded(program(transposed, (4, 4)), x), 2 * x.T.reshape(2, 8).T)


def into_an_input(traced, x, total):
    launch(add_up, 1, GPU_CALL, x, total, n=16)
    return total


def test_an_input_is_written_to_where_the_op_may_and_its_holder_keeps_his():
    x, total = normal(16), normal(16)
    before = np.array(total)
    with plugged_in():
        close(embedded(program(into_an_input, (16,), (16,), written={1}), x, total), x + before)
        np.testing.assert_array_equal(np.asarray(total), before)
        with pytest.raises(pk.UnsupportedError, match="add_up writes to an input that its op may not write to"):
            embedded(program(into_an_input, (16,), (16,)), x, total)


def test_no_array_is_narrower_than_what_a_kernel_writes():
    """Without x64 JAX has no integers of 64 bits."""

    def run(traced, x):
        made = traced.fresh((16,), np.dtype("int64"))
        launch(twice, 1, GPU_CALL, x, made, n=16)
        return made

    with plugged_in(), pytest.raises(pk.UnsupportedError, match="an array of int64, which JAX holds as int32 here"):
        embedded(program(run, (16,)), normal(16))


def test_new_arrays_come_last():
    def run(traced, x):
        made = traced.fresh((16,), np.dtype("float32"))
        launch(twice, 1, GPU_CALL, made, x, n=16)
        return made

    with plugged_in(), pytest.raises(pk.UnsupportedError, match="twice takes a new array before one that holds"):
        embedded(program(run, (16,)), normal(16))


def test_rows_of_a_new_array_are_arrays_until_a_launch_takes_the_whole():
    def run(traced, x):
        both, found = (traced.fresh(shape, np.dtype("float32")) for shape in ((2, 8), (16,)))
        for row in both:
            launch(twice, 1, GPU_CALL, x, row, n=8)
            x = row
        launch(twice, 1, GPU_CALL, both, found, n=16)
        return found

    x = normal(8)
    with plugged_in():
        close(embedded(program(run, (8,)), x), jnp.concatenate([4 * x, 8 * x]))


def row_by_row(traced, x, w):
    """Of each row of x, twice it and w; rows come two at a time, and what is left of them alone."""
    made, twofold = traced.fresh(x.shape, np.dtype("float32")), traced.fresh((16,), np.dtype("float32"))
    launch(twice, 1, GPU_CALL, w, twofold, n=16)

    def piece(first, start, part, own):
        for array in (part.reshape(part.numel()), twofold):
            again = traced.fresh((part.numel(),), np.dtype("float32"))
            launch(twice, 1, GPU_CALL, array, again, n=16)
        launch(add_rows, 1, GPU_CALL, part, twofold, start, own, rows=part.shape[0], n=16, first=first)

    chunked.in_parts(x.shape[0], 2, piece, (x,), (made,))
    return made


@triton.jit
def add_rows(x, w, start, y, rows: tl.constexpr, n: tl.constexpr, first: tl.constexpr):
    """y = x + w, and where each row stands."""
    for i in tl.static_range(rows):
        at = tl.arange(0, n)
        place = (first + i + tl.load(start)).to(tl.float32)
        tl.store(y + i * n + at, tl.load(x + i * n + at) + tl.load(w + at) + place)


def test_a_loop_does_for_each_part_what_is_done_for_one():
    x, w = normal(7, 16), normal(16)
    with plugged_in() as plugin:
        made = program(row_by_row, (7, 16), (16,))
        loops = [s for s in made.steps if isinstance(s, Loop)]
        assert [(s.first, s.times, s.length) for s in loops] == [(0, 3, 2), (6, 1, 1)]
        close(embedded(made, x, w), x + 2 * w + jnp.arange(7.0)[:, None])
        assert [c.name for c in plugin.calls].count("add_rows") == 4
        vmapped = jax.vmap(lambda x: embedding.embed(made, {"a0": x, "a1": w})[0])
        close(vmapped(jnp.stack([x, 2 * x])), jnp.stack([x, 2 * x]) + 2 * w + jnp.arange(7.0)[:, None])


def test_in_a_loop_nothing_from_before_is_written_to():
    def run(traced, x, w):
        made, outside = (traced.fresh(shape, np.dtype("float32")) for shape in (x.shape, (16,)))
        launch(twice, 1, GPU_CALL, w, outside, n=16)

        def piece(first, start, part, own):
            launch(twice, 1, GPU_CALL, part, own, n=16)
            launch(add_up, 1, GPU_CALL, part, outside, n=16)

        chunked.in_parts(x.shape[0], 1, piece, (x,), (made,))
        return made

    said = ""
    with plugged_in():
        try:
            embedded(program(run, (2, 16), (16,)), normal(2, 16), normal(16))
        except pk.UnsupportedError as e:
            said = str(e)
    assert "add_up writes to an input that its op may not write to" in said


STEPS = st.lists(
    st.sampled_from(["permute", "mT", "expand", "split", "merge", "new axis", "clone", "bits"]), max_size=4
)


def seen_by(how, x, pick):
    """One step, of a tensor or of an abstract array."""
    if how == "permute":
        return x.permute(*range(1, x.ndim), 0) if pick(2) else x.permute(*range(x.ndim - 1, -1, -1))
    if how == "mT":
        return x.mT if x.ndim > 1 else x
    if how == "expand":
        return x.expand(2, *(-1,) * x.ndim)
    if how == "split":
        return x.reshape(*x.shape[:-1], -1, 2) if x.shape[-1] % 2 == 0 else x
    if how == "merge":
        return x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else x
    if how == "new axis":
        return x[None, None]
    if how == "bits":
        torch_has = isinstance(x, torch.Tensor)
        kind = "int32" if x.dtype == (torch.float32 if torch_has else np.float32) else "float32"
        return x.view(getattr(torch, kind) if torch_has else np.dtype(kind))
    return x.contiguous() if pick(2) else x.clone(memory_format=torch.contiguous_format)


@settings(max_examples=60, deadline=None, derandomize=True, report_multiple_bugs=False)
@given(shape=st.sampled_from([(4,), (1, 4), (3, 2), (2, 3, 4)]), steps=STEPS, seed=st.integers(0, 9))
def test_abstract_arrays_are_seen_as_tensors_are(shape, steps, seed):
    """Shapes and strides are PyTorch's, it copies where PyTorch does, and JAX's array has the tensor's values."""
    traced = trace.Trace()
    x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    o = traced.allocate(shape, "float32")
    held = {0: jnp.asarray(x.numpy())}

    def pick(n):
        return (seed >> len(traced.steps)) % n

    for how in steps:
        before, x = (x.data_ptr(), o.number), seen_by(how, x, pick)
        o = seen_by(how, o, pick)
        assert (x.data_ptr() == before[0]) == (o.number == before[1])
        assert tuple(x.shape) == tuple(o.shape) and x.is_contiguous() == o.is_contiguous()
        assert all(n == 1 or s == t for n, s, t in zip(x.shape, x.stride(), o.stride(), strict=True))
    for step in traced.steps:
        held[step.to] = embedding.apply_view(held[step.source], step.view)
    np.testing.assert_array_equal(np.asarray(embedding.apply_view(held[o.number], o.seen)), x.numpy())


# ------------------------------------------------------------------------------------------------ what a call carries

NUMBERS = {
    "bool": st.booleans(), "i32": st.integers(-(2**31), 2**31 - 1), "i64": st.integers(-(2**63), 2**63 - 1),
    "u64": st.integers(0, 2**64 - 1), "f32": st.floats(width=32, allow_nan=False), "f64": st.floats(allow_nan=False),
}  # fmt: skip
CODE = Code("kernel", "cuda", "sm_90", "text", b"\x7fELF\x00", 8, 32, 70000)


def step_of(*arguments, code=CODE, grid=2**31 - 1):
    return Launch(code, grid, arguments)


def carried(step):
    return decode(embedding.zlib.compress(embedding.message(step)))


@settings(max_examples=60, deadline=None, report_multiple_bugs=False)
@given(numbers=st.lists(st.sampled_from([*NUMBERS]).flatmap(lambda k: st.tuples(st.just(k), NUMBERS[k]))))
def test_numbers_arrive_as_they_were(numbers):
    found = carried(step_of(0, *(ScalarArgument(k, v) for k, v in numbers), 1))
    assert found.parameters[1:-1] == numbers
    assert found.parameters[0] == found.parameters[-1] == ("array", {2: embedding.ALIGNED})
    assert found.grid == (2**31 - 1, 1, 1)


THEIRS = {"bool": "i1", "f32": "fp32", "f64": "fp64"}  # names that jaxlib has for numbers


TILES = TileFormat(9, 3, (1, 64, 1, 64))
DESCRIBED = DescribedArray(0, (2, 4096, 16, 128), (2**23, 2048, 128, 1), TILES)


def test_a_described_array_arrives_as_it_was():
    (kind, found), after = carried(step_of(DESCRIBED, 1)).parameters
    assert (kind, after) == ("described", ("array", {2: embedding.ALIGNED}))
    assert found.pop("beyond") == 0, "what lies beyond the extents is read as 0"
    assert (*found.values(),) == (TILES.element, TILES.swizzle, DESCRIBED.shape, DESCRIBED.strides, TILES.block)


def test_a_message_is_what_jaxlib_writes():
    from jax._src.lib import gpu_triton

    if not CARRIES or gpu_triton._cuda_triton is None:
        pytest.skip("no plug-in of jaxlib's for NVIDIA GPUs that makes tensor descriptors is installed")
    numbers = [("bool", True), ("i32", -3), ("i64", -(2**40)), ("u64", 2**63), ("f32", 0.5), ("f64", -1e300)]
    theirs = gpu_triton.TritonKernelCall(
        gpu_triton.TritonKernel("kernel", 8, 1, 70000, "text", "", 90), 5, 1, 1,
        [
            gpu_triton.create_array_parameter(0, 16),
            *(gpu_triton.create_scalar_parameter(v, THEIRS.get(k, k)) for k, v in numbers),
            gpu_triton.create_tma_descriptor_parameter(
                TILES.element, TILES.swizzle, [*DESCRIBED.shape], [*DESCRIBED.strides], [*TILES.block], 0
            ),
        ],
    )  # fmt: skip
    portable = Code("kernel", "cuda", "sm_90", "text", b"", 8, 32, 70000)
    ours = carried(step_of(0, *(ScalarArgument(k, v) for k, v in numbers), DESCRIBED, code=portable, grid=5))
    want = decode(embedding.zlib.compress(theirs.to_proto("kernel", b"")))
    want.parameters[0][1].pop(1, None)  # bytes to be zeroed: none, said or left out
    assert vars(ours) == vars(want)


def lowered(f, *arrays, arch, platform="cuda"):
    """The text of what is lowered for a chip, and the launches that it carries."""
    steps, real = [], embedding.message
    with pytest.MonkeyPatch.context() as patched, portakern.jax.lowered_for(arch):
        patched.setattr(embedding, "message", lambda step: steps.append(step) or real(step))
        text = jax.jit(lambda *a: f(*a)).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"@{embedding.CUSTOM_CALL}") == len(steps)
    return text, steps


def test_a_program_carries_code_for_the_chip_that_is_named():
    found = {}
    for arch in ("sm_90", "sm_80"):
        _, (step,) = lowered(on_triton("softmax"), normal(8, 1024), arch=arch)
        found[arch] = call = carried(step)
        assert call.image[1][:4] == b"\x7fELF" and call.image[2].decode() == call.name == "softmax_kernel"
        assert f".target {arch}" in call.text and call.capability == int(arch[3:])
        assert (call.warps, call.ctas, call.shared) == (step.code.warps, 1, call.image[3])
    assert found["sm_90"].image[1] != found["sm_80"].image[1]
    with pytest.raises(pk.SpecError, match="target 'sm_91' is unknown"), portakern.jax.lowered_for("sm_91"):
        pass


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_code_for_amd_gpus_travels_with_the_program(arch, monkeypatch):
    monkeypatch.setattr(embedding, "CARRIES_CODE", (0,))
    _, (step,) = lowered(on_triton("softmax"), normal(8, 1024), arch=arch, platform="rocm")
    call = carried(step)
    assert call.image[1][:4] == b"\x7fELF" and call.capability == 0
    assert call.warps * embedding.AMD_LANES == step.code.warps * targets.find(arch).lanes


BF16, F32 = jnp.bfloat16, jnp.float32
QKV = tuple(jax.ShapeDtypeStruct((2, 192, heads, 64), BF16) for heads in (4, 2, 2))
IDS = jax.ShapeDtypeStruct((2, 192), jnp.int32)
A_AND_B = (jax.ShapeDtypeStruct((256, 256), F32),) * 2
CAUSAL = functools.partial(on_triton("attention"), is_causal=True)
FLASH, RANGES, ORDER = "attention_flash_kernel", "attention_segment_ranges_kernel", "attention_segment_order_kernel"
GRADIENTS = ["attention_vjp_statistics_kernel", *["attention_vjp_gradients_kernel"] * 2]
ON_HOPPER = {
    "attention": (CAUSAL, QKV, [FLASH]),
    "of packed sequences": (
        lambda q, k, v, ids: CAUSAL(q, k, v, q_segment_ids=ids, kv_segment_ids=ids), (*QKV, IDS),
        [RANGES, ORDER, FLASH]),
    "of few queries": (
        on_triton("attention"), [jax.ShapeDtypeStruct((2, n, h, 64), BF16) for n, h in ((1, 8), (4096, 2), (4096, 2))],
        ["attention_shares_kernel", "attention_combine_kernel"]),
    "gradients of attention": (
        jax.grad(lambda *qkv: CAUSAL(*qkv).astype(F32).sum(), (0, 1, 2)), QKV, [FLASH, *GRADIENTS]),
    "product": (
        on_triton("matmul"), [jax.ShapeDtypeStruct((2048, 2048), BF16)] * 2, ["matmul_by_roles"]),
    "product in tf32": (
        functools.partial(on_triton("matmul"), precision="tf32"), A_AND_B, ["matmul_gather_tiles", "matmul_kernel"]),
    "linear layer": (
        functools.partial(on_triton("linear"), activation="gelu"),
        [jax.ShapeDtypeStruct(s, BF16) for s in ((2048, 1024), (2048, 1024), (2048,))], ["linear_by_roles"]),
}  # fmt: skip


@pytest.mark.usefixtures("takes_descriptors")
@pytest.mark.parametrize("what", ON_HOPPER)
def test_hoppers_kernels_are_part_of_a_program(what, monkeypatch):
    """Which they are, and that the tensor descriptors are those of which Triton's launcher makes maps."""
    from triton.backends.nvidia import driver

    made, maps, real = [], [], lowering.formats
    monkeypatch.setattr(lowering, "formats", lambda *args: made.append(args) or real(*args))
    utils = SimpleNamespace(fill_tma_descriptor_tiled=lambda *args: maps.append(args))
    utils.fill_tma_descriptor = utils.fill_tma_descriptor_tiled  # what release 3.6 calls it
    monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace(utils=utils))
    function, arrays, names = ON_HOPPER[what]
    _, steps = lowered(function, *arrays, arch="sm_90")
    assert [s.code.name for s in steps] == names
    for compiled, descriptors in made:
        for descriptor, of in zip(descriptors, compiled.metadata.tensordesc_meta or (), strict=True):
            more = [None] * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)
            driver.make_tensordesc_arg(descriptor, of, *more)
    described = [a for s in steps for a in s.arguments if isinstance(a, DescribedArray)]
    assert len(described) == len(maps) > 0
    for found, (_, swizzle, _, element, block, shape, strides, padding) in zip(described, maps, strict=True):
        rounds = found.tiles.element == 11 and element == 7  # releases before 3.9 are told elsewhere
        assert found.tiles == TileFormat(11 if rounds else element, swizzle, tuple(block)) and not padding
        assert (found.shape, found.strides) == (tuple(shape), tuple(strides))
        assert not rounds or "tf32" in what


def test_arrays_are_promised_aligned_only_where_they_are_held_to_it():
    """Triton compiled for pointers at multiples of 16 bytes; jaxlib launches on no others, if it is told."""
    traced = trace.Trace()
    x, y = traced.allocate((16,), "float32"), traced.allocate((16,), "float32")
    source, _ = specialised(twice, (x, y), {"n": 16}, SM_90)
    promised = max(n for attrs in source.attrs.values() for what, n in attrs if what == "tt.divisibility")
    assert carried(step_of(0)).parameters[0][1][2] % promised == 0


def test_buffer_instructions_of_amd_reach_what_is_small():
    """As on tensors, of which Triton asks PyTorch; an array of 2 GiB is out of their reach."""
    traced, hardware = trace.Trace(), targets.find("gfx942")
    small, large = traced.allocate((16,), "float32"), traced.allocate((2**29,), "float32")
    source, _ = lowering.specialised_for(twice, (small, large), {"n": 16}, hardware)
    tensors, _ = specialised(twice, (torch.zeros(16), torch.zeros(16)), {"n": 16}, hardware)
    assert sorted(source.attrs[0,]) == sorted(tensors.attrs[0,]) and ["tt.pointer_range", 32] in source.attrs[0,]
    assert ["tt.pointer_range", 32] not in source.attrs[1,]


def test_a_program_is_exported_with_leave():
    x, leave = normal(8, 1024), jax_export.DisabledSafetyCheck.custom_call(embedding.CUSTOM_CALL)
    export = functools.partial(jax_export.export, jax.jit(on_triton("softmax")), platforms=["cuda"])
    with portakern.jax.lowered_for("sm_90"):
        assert len(export(disabled_checks=[leave])(x).serialize()) > 4000
        with pytest.raises(ValueError, match=embedding.CUSTOM_CALL):
            export()(x)


WITHOUT_TORCH = """
import importlib.util, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("no torch here", name="torch")
sys.meta_path.insert(0, Missing())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] == "torch" else find(name, package)
import jax, jax.numpy as jnp
import portakern as pk, portakern.jax
from portakern.frameworks.jax import embedding
embedding.CARRIES_CODE = (0,)
x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 512), (512,)))
q, d = jax.ShapeDtypeStruct((1, 64, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
on = lambda op: pk.op(op, backend="triton")
for f, arrays in (
    (jax.grad(lambda x, w: on("layernorm")(x, w, w).sum()), (x, w)),
    (jax.grad(lambda x, d: on("linear")(x, d).sum(), (0, 1)), (x, d)),
    (jax.grad(lambda q: on("attention")(q, q, q).sum()), (q,)),
):
    with portakern.jax.lowered_for("sm_90"):
        print(jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text().count("@triton_kernel_call_ffi"))
"""


def test_without_pytorch():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["1", "2", "4"], "nobody reads what the forward calls make, but of attention"


# ------------------------------------------------------------------------------------------------- logits in chunks

ENTROPY = "linear_cross_entropy"


def of_entropy(dtype, rows=75, n=83, d=24):
    hidden, weight = normal(rows, d, dtype=dtype), normal(n, d, dtype=dtype) / 4
    labels = jnp.asarray(RNG.integers(0, n, rows)).at[3].set(-100)
    return hidden, weight, labels, jnp.asarray(RNG.standard_normal(rows), jnp.float32)


def same(actual, want):
    for ours, theirs in zip(actual, want, strict=True):
        assert np.asarray(ours).tobytes() == frameworks()["torch"].to_numpy(theirs).tobytes()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [32, 128])
def test_chunks_have_the_bits_of_a_loop_on_the_host(chunk, dtype):
    """Losses, slopes and gradients under jit, in chunks of rows and of classes, the last of which is shorter."""
    hidden, weight, labels, d_loss = of_entropy(dtype)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    forward = {"return_lse": True, "return_slope": True, **options}
    op, vjp = (on_triton(ENTROPY, tiling={"chunk_rows": chunk}), on_triton(f"{ENTROPY}_vjp", tiling={"chunk_n": chunk}))
    tensors = [frameworks()["torch"].from_numpy(np.array(x), None) for x in (hidden, weight, labels, d_loss)]
    want = op(*tensors[:3], **forward)
    theirs = vjp(*tensors[:3], *want[1:3], tensors[3], **options)
    with plugged_in() as plugin:
        loss = jax.jit(lambda *a: op(*a, **forward))(hidden, weight, labels)
        launches = len(plugin.calls)
        same(loss[:3], want[:3])
        same(jax.jit(lambda *a: vjp(*a, **options))(hidden, weight, labels, *loss[1:3], d_loss), theirs)
        assert launches == 4 * -(-75 // chunk)


def test_a_gradient_under_jit_goes_in_chunks():
    hidden, weight, labels, d_loss = of_entropy(jnp.float32, n=2500, d=8)
    op = on_triton(ENTROPY, tiling={"chunk_rows": 32})

    def theirs(hidden, weight):
        x = hidden @ weight.T
        losses = jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
        return (jnp.where(labels == -100, 0.0, losses) * d_loss).sum()

    want = jax.value_and_grad(theirs, (0, 1))(hidden, weight)
    with plugged_in() as plugin:
        ours = jax.jit(jax.value_and_grad(lambda h, w: (op(h, w, labels) * d_loss).sum(), (0, 1)))
        close(ours(hidden, weight), want, 1e-4)
        assert [c.name for c in plugin.calls].count("cross_entropy_vjp_kernel") == 3 + 2


@pytest.mark.parametrize("backend, platform, arch", [("triton", "cuda", "sm_90"), ("pallas", "tpu", "v6e")])
def test_no_array_of_a_program_is_as_large_as_all_logits(backend, platform, arch):
    rows, n, d = 4100, 10000, 64
    arrays = [
        jax.ShapeDtypeStruct(s, t) for s, t in (((rows, d), "bfloat16"), ((n, d), "bfloat16"), ((rows,), "int32"))
    ]
    op = pk.op(ENTROPY, backend=backend)
    step = jax.jit(jax.value_and_grad(lambda h, w, t: op(h, w, t).sum(), (0, 1)))
    with portakern.jax.lowered_for(arch):
        text = step.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    sizes = [math.prod(map(int, m.split("x"))) for m in re.findall(r"tensor<(\d+(?:x\d+)*)x[a-z]", text)]
    assert 2 * max(sizes) <= rows * n + n and "stablehlo.while" in text


# ----------------------------------------------------------------------------------------------------------- refusals


def told_of_matmul(arch):
    """What is said of a matrix product, of values and while JAX traces."""
    x, told, matmul = normal(32, 64), [], on_triton("matmul")
    with plugged_in(arch):
        told.append(matmul.explain(x, x.T))
    with portakern.jax.lowered_for(arch), pytest.MonkeyPatch.context() as patched:
        patched.setattr(embedding, "CARRIES_CODE", (0,))
        jax.jit(lambda x: told.append(matmul.explain(x, x.T)) or x).trace(x)
    return told


def test_the_plan_is_said():
    for arch, variant in (("sm_80", "gpu"), ("sm_90", "hopper")):
        for told in told_of_matmul(arch):
            assert "embedded: its machine code is part of JAX's program, without torch" in told
            assert f"variant {variant}: serves this call" in told
            assert f"kernels: {variant}.matmul.matmul_kernel" in told
    assert "lowered: later, by JAX; if for cuda sm_90:" in told


def test_an_older_jaxlib_makes_no_tensor_descriptors():
    x = normal(32, 64)
    with plugged_in("sm_90"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(embedding, "CARRIES_CODE", (99,))
        told = on_triton("matmul").explain(x, x.T)
        assert "variant gpu: serves this call" in told
        assert "variant hopper: its kernels take tensor descriptors, which jaxlib" in told
        with pytest.raises(pk.UnsupportedError, match="does not make at a launch; install jax 99 or later"):
            jax.jit(on_triton("matmul", variant="hopper"))(x, x.T)


def test_an_array_that_a_kernel_fills_is_passed_once():
    """Of heads in two pieces the result would be described twice, and XLA has one place for it: they are padded."""
    x = jax.ShapeDtypeStruct((1, 192, 2, 96), BF16)
    with plugged_in("sm_90"):
        told = on_triton("attention").explain(x, x, x)
    assert "variant hopper: serves this call" in told and "attention_flash_kernel" in told


def test_gradients_of_heads_in_two_pieces_are_embedded():
    """Their inputs are described twice, and what they write is not described."""
    x, lse = jax.ShapeDtypeStruct((1, 192, 2, 192), BF16), jax.ShapeDtypeStruct((1, 2, 192), F32)
    with plugged_in("sm_90"):
        told = on_triton("attention_vjp").explain(x, x, x, x, lse, x)
    assert "variant hopper: serves this call" in told and "attention_vjp_pieces_kernel" in told


def test_descriptors_of_parts_are_not_taken_in_loops():
    """What goes through a weight's rows in a loop is served by kernels that take pointers, and says why."""
    hidden, weight = (jax.ShapeDtypeStruct((2048, 512), BF16), jax.ShapeDtypeStruct((8192, 512), BF16))
    labels, number = jax.ShapeDtypeStruct((2048,), jnp.int32), jax.ShapeDtypeStruct((2048,), F32)
    given = {"hidden": hidden, "weight": weight, "labels": labels, "lse": number, "slope": hidden, "d_loss": number}
    with plugged_in("sm_90"):
        told = on_triton(f"{ENTROPY}_vjp").explain(**given)
        alone = on_triton(f"{ENTROPY}_vjp", tiling={"chunk_n": 8192}).explain(**given)
    assert f"variant hopper: {lowering.LOOPED}" in told and "variant gpu: serves this call" in told
    assert "variant hopper: serves this call" in alone


def test_a_traced_call_that_cannot_be_staged_is_explained():
    said = []
    jax.jit(lambda x: said.append(on_triton("softmax").explain(x)) or x).trace(normal(4))
    assert "refused: backend 'triton' runs torch kernels, which JAX cannot stage into a traced function" in said[0]


OLD = (0, 11, 0)
UNLAUNCHED = {
    "an unnamed NVIDIA GPU": ("cuda", "", "nothing here says for which NVIDIA GPU kernel is lowered.*lowered_for"),
    "an AMD GPU": ("rocm", "gfx942", "takes the machine code of kernel for AMD GPUs from a file; install jax 0.11.1"),
}


@pytest.mark.parametrize("what", UNLAUNCHED)
def test_what_an_older_jaxlib_cannot_launch(what, monkeypatch):
    platform, arch, message = UNLAUNCHED[what]
    code = Code("kernel", platform, arch, "text", b"", 8, 64, 0)
    monkeypatch.setattr(embedding.jaxlib.version, "__version_info__", OLD)
    with pytest.raises(pk.UnsupportedError, match=message):
        embedding.embed_launch(Program((), (), (), ()), step_of(code=code), {}, frozenset())
    embedding.check_carried(CODE)
    monkeypatch.setattr(embedding.jaxlib.version, "__version_info__", embedding.CARRIES_CODE)
    embedding.check_carried(code)


def test_for_which_chip_has_to_be_said():
    x, softmax = normal(8, 1024), on_triton("softmax")
    lower = jax.jit(lambda x: softmax(x)).trace(x).lower
    with pytest.raises(pk.UnsupportedError, match="machine code for AMD GPUs is of one architecture"):
        lower(lowering_platforms=("rocm",))
    if CARRIES:
        assert embedding.CUSTOM_CALL in lower(lowering_platforms=("cuda",)).as_text()
    else:
        with pytest.raises(pk.UnsupportedError, match=r"lowered_for\('sm_90'\)"):
            lower(lowering_platforms=("cuda",))


def test_what_a_launcher_does_on_the_host_is_refused(monkeypatch):
    traced = trace.Trace()
    x = traced.allocate((16,), "float32")
    source, options = specialised(twice, (x, x), {"n": 16}, SM_90)
    for meta, message in (
        ({"num_ctas": 2}, "runs programs in step"),
        ({"launch_cooperative_grid": True}, "runs programs in step"),
        ({"global_scratch_size": 8}, "asks for device memory of its own"),
    ):
        made = SimpleNamespace(metadata=SimpleNamespace(**{"name": "twice", "num_ctas": 1, **meta}))
        monkeypatch.setattr(triton, "compile", lambda *args, made=made, **options: made)
        with pytest.raises(pk.UnsupportedError, match=message):
            lowering.compiled(source, options, SM_90.target)
    with pytest.raises(pk.UnsupportedError, match="takes a fp8"):
        lowering.argument(twice, "fp8", 1.0)


def test_a_wave_of_rdna_alone_is_refused():
    code = Code("kernel", "rocm", "gfx1100", "", b"code", 1, 32, 0)
    with pytest.raises(pk.UnsupportedError, match="kernel runs 32 threads a program.*num_warps=2"):
        embedding.message(step_of(code=code))


# ------------------------------------------------------------------------------------------------------------- faults


def without_aliases(real):
    return lambda plugin, name, results, **how: real(plugin, name, results, **{**how, "input_output_aliases": {}})


FAULTS = {
    "a view of a copy is left out": (
        embedding, "apply_view", lambda real: lambda array, view: array,
        test_copies_and_outputs_are_seen_as_the_program_says),
    "results take no operand's memory": (
        Plugin, "ffi_call", without_aliases, test_a_kernel_goes_on_writing_to_what_an_earlier_one_made),
    "every part is taken from the beginning": (
        embedding, "embed_loop", lambda real: lambda program, step, held: real(
            program, dataclasses.replace(step, first=0), held),
        test_a_loop_does_for_each_part_what_is_done_for_one),
    "a loop leaves what is left over out": (
        embedding, "embed_loop",
        lambda real: lambda program, step, held: real(program, step, held) if step.times > 1 else 0,
        test_a_loop_does_for_each_part_what_is_done_for_one),
    "in a loop kernels may write to what was there": (
        embedding, "embed_steps",
        lambda real: lambda program, steps, held, fixed: real(program, steps, held, frozenset()),
        test_in_a_loop_nothing_from_before_is_written_to),
    "a loop over classes counts labels anew": (
        trace.Trace, "repeat", lambda real: lambda traced, first, times, length, piece, reads, writes: real(
            traced, first, times, length, lambda first, start, *parts: piece(first, None, *parts), reads, writes),
        test_a_gradient_under_jit_goes_in_chunks),
    "samples join the batch from behind": (
        batching, "Into", lambda real: lambda wide, shape: real(wide, (*shape[1:], shape[0])),
        test_transforms_see_a_step_of_their_program),
    "samples join no batch": (
        tracing, "fold", lambda real: lambda *args: None, test_transforms_see_a_step_of_their_program),
    "the batch is taken to lead every array": (
        batching, "_leads", lambda real: lambda *args: True, test_samples_that_share_an_array),
    "an implementation is made for each call": (
        backend, "_staged", lambda real: real.__wrapped__, test_an_eager_call_is_traced_once),
    "every array is called small": (
        trace.AbstractArray, "ptr_range", lambda real: lambda array: 0,
        test_buffer_instructions_of_amd_reach_what_is_small),
    "jaxlib is told of no alignment": (
        embedding, "ALIGNED", lambda real: 1, test_arrays_are_promised_aligned_only_where_they_are_held_to_it),
    "the chip that is named is not asked": (
        lowering, "gpu_target", lambda real: lambda hardware: real(targets.find("sm_80")),
        test_a_program_carries_code_for_the_chip_that_is_named),
    "numbers have no sign": (
        embedding, "varint", lambda real: lambda number: real(abs(int(number))), test_numbers_arrive_as_they_were),
    "arrays are described as if they lay otherwise": (
        embedding, "descriptor", lambda real: lambda array: real(array._replace(strides=array.strides[::-1])),
        functools.partial(products_on_hopper, "ieee")),
    "rows of an array are not put together": (
        trace, "Stack", lambda real: lambda to, rows: real(to, rows[:1] * len(rows)),
        test_rows_of_a_new_array_are_arrays_until_a_launch_takes_the_whole),
    "numbers of 64 bits are called 32": (
        embedding, "NUMBER", lambda real: {**real, "i64": real["i32"]}, test_numbers_arrive_as_they_were),
    "views of any strides are views": (
        trace, "viewed", lambda real: lambda shape, strides, wanted: contiguous_strides(wanted),
        test_abstract_arrays_are_seen_as_tensors_are),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault):
    where, name, planted, fails = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(where, name, planted(getattr(where, name)))
        with pytest.raises((AssertionError, pk.SpecError, jax.errors.JaxRuntimeError)):
            fails()
