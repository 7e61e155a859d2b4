"""Other people's kernels as backends: right where the library is, refused in words where it lacks something, and never
asked unless they are named."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import testing
from portakern.cli import app
from portakern.core import registry
from portakern.errors import UnsupportedError
from portakern.testing import Limits
from tests.places import DEEP

ROOT = Path(__file__).parent.parent
X = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
Q = np.random.default_rng(1).standard_normal((1, 6, 2, 8)).astype(np.float32)
ALL = ("float32", "float16", "bfloat16")


def needs(peer):
    reason = registry.backend(peer).unavailable()
    if reason:
        pytest.skip(reason)


def test_peers_stand_apart():
    peers = registry.peers()
    assert {"torch", "torch_compile", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "liger", "jax", "jax_cudnn",
            "jax_rows", "pallas_flash", "pallas_mgpu", "flex_attention", "flash_cute", "flashinfer", "quack",
            "tokamax"} <= set(peers)  # fmt: skip
    assert not set(peers) & set(pk.backends())
    assert all(b.peer and not b.own for b in peers.values())
    for call in (pk.op("softmax").explain(X), pk.op("softmax", backend="triton").explain(X)):
        assert not re.search(r"not (torch|jax|sdpa_\w+|liger|quack|tokamax)\b", call)
    with pytest.raises(pk.SpecError, match="expected one of mojo, pallas, reference, triton, a peer .*, or a Backend"):
        pk.op("softmax", backend="torhc")
    with pytest.raises(pk.SpecError, match="backend name 'torch' is taken"):
        pk.register(pk.Backend("torch", framework="torch"))


def test_every_module_of_peers_is_found_by_name():
    package = importlib.import_module("portakern.backends.peers")
    named = {m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")}
    modules = {f"{package.__name__}.{name}" for name in named}
    found = {
        b.module_of(op, family) for b in registry.peers().values() for op in pk.ops() for family in b.families_with(op)
    }
    assert found == modules - {f"{package.__name__}.provide"}


def test_a_peer_is_named_and_explained():
    needs("torch")
    softmax = pk.op("softmax", backend="torch")
    np.testing.assert_allclose(softmax(X), pk.op("softmax")(X), atol=1e-6)
    said = softmax.explain(X)
    assert "backend: torch (named), compiled for cpu" in said
    assert "implementation: portakern.backends.peers.torch_eager" in said
    assert "conversion: numpy -> torch and back" in said


def test_a_backend_registered_as_a_peer_is_one():
    mine = pk.Backend("my_peer", framework="numpy", peer=True)
    mine.implements("softmax")(lambda call, tiling: (call.arrays["x"],))
    assert pk.register(mine) is registry.peers()["my_peer"]
    assert "my_peer" not in pk.backends() and registry.backend("my_peer") is mine


def test_the_command_line_lists_them_apart_and_checks_those_that_are_named():
    run = CliRunner().invoke
    rows = {r["backend"]: r for r in json.loads(run(app, ["backends", "--json"]).stdout)}
    assert rows["torch"]["peer"] and not rows["triton"]["peer"] and [*rows][: len(pk.backends())] == [*pk.backends()]
    assert "Peers" in run(app, ["backends"]).stdout
    softmax = next(r for r in json.loads(run(app, ["ops", "--json"]).stdout) if r["op"] == "softmax")
    assert "torch" in softmax["peers"] and "torch" not in softmax["backends"]
    few = ["check", "softmax", "--max-examples", "2", "--dtype", "float32"]
    assert "torch on" not in run(app, few).stdout
    needs("torch")
    named = run(app, [*few, "--backend", "torch"])
    assert named.exit_code == 0 and "torch on cpu" in named.stdout
    assert run(app, ["check", "--backend", "liger", "--max-examples", "2"]).exit_code != 0  # no GPU, or not installed


# What is right: every element within its bound, on cases of every kind and edges that its arguments reach.
RIGHT = [
    ("torch", "softmax", ("float32",)),
    ("torch", "softmax_vjp", ALL),
    ("torch", "logsumexp", ("float32",)),
    ("torch", "swiglu", ("float32",)),
    ("torch", "rope", ("float32",)),
    ("torch", "rope_vjp", ("float32",)),
    ("torch", "merge_states", ALL),
    ("torch", "layernorm", ALL),
    ("torch", "layernorm_vjp", ("float32",)),
    ("torch", "rmsnorm", ALL),
    ("torch", "rmsnorm_vjp", ALL),
    ("torch", "add_layernorm", ALL),
    ("torch", "add_layernorm_vjp", ("float32",)),  # also of calls whose sum no wanted gradient reaches
    ("torch", "add_rmsnorm", ALL),
    ("torch", "add_rmsnorm_vjp", ("float32",)),
    ("torch", "matmul", ALL),
    ("torch", "matmul_vjp", ("float32",)),
    ("torch", "paged_attention", ("float32",)),
    ("torch", "kv_append", ALL),
    ("torch", "causal_conv1d", ("float32",)),
    ("torch", "embedding", ALL),
    ("torch", "embedding_vjp", ("float32",)),  # 16-bit sums are rounded at each step on a CPU
    ("torch", "quantize", ("float32", "bfloat16")),
    ("torch", "top_k_vjp", ALL),
    ("torch", "rmsnorm_quantize", ("float32", "bfloat16")),
    ("torch", "add_rmsnorm_quantize", ("float32", "bfloat16")),
    ("torch", "swiglu_quantize", ("float32", "bfloat16")),
    ("torch", "scaled_matmul", ("float8_e4m3fn", "float8_e5m2", "int8")),
    ("torch", "scaled_grouped_matmul", ("float8_e4m3fn", "int8")),
    ("torch", "weight_only_matmul", ("float32",)),
    ("sdpa_flash", "attention", ("float32", "bfloat16")),
    ("flex_attention", "attention", ("float32",)),
    ("jax", "softmax", ("float32",)),
    ("jax", "kv_append", ALL),
    ("jax", "embedding", ALL),
    ("jax", "embedding_vjp", ("float32",)),
    ("jax", "quantize", ("float32", "bfloat16")),
    ("jax", "top_k_vjp", ("float32",)),
    ("jax", "matmul", ("float32",)),
    ("jax", "matmul_vjp", ("float32",)),
    ("jax_rows", "softmax", ALL),
    ("jax_rows", "softmax_vjp", ALL),
    ("jax_rows", "merge_states", ALL),
    ("jax_rows", "layernorm", ALL),
    ("jax_rows", "rmsnorm", ALL),
]


@pytest.mark.parametrize(("peer", "op", "dtypes"), RIGHT, ids=[f"{p}-{o}" for p, o, _ in RIGHT])
def test_peers_are_within_the_bounds(peer, op, dtypes, monkeypatch):
    needs(peer)
    if peer == "flex_attention":  # the same formula, which PyTorch would trace anew for each call
        monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    count = 60 if registry.backend(peer).framework != "jax" else 16 if DEEP else 8
    seed = 2 if (peer, op) == ("torch", "matmul") else 0  # others find NaN of PyTorch's own for finite 16-bit products
    report = pk.check(op, backend=peer, device="cpu", dtypes=dtypes, max_examples=count, shrink=False, seed=seed)
    assert report.passed and report.examples >= count // 8, (report.failures, report.refused)
    assert not report.laws  # bits that do not depend on what else is in a call: portakern's promise, not theirs


SEED = 1  # of which no scale overflows in JAX's gradient


@pytest.mark.parametrize(
    ("peer", "options"),
    [("torch", {"is_causal", "scale"}), ("sdpa_flash", {"is_causal", "scale"}), ("jax", {"scale"})],
)
def test_gradients_of_attention_by_the_librarys_autograd(peer, options):
    """On contiguous arrays: an expanded lse is not what the forward op gives, and autograd reads its own. In JAX a row
    that a causal mask leaves no key is the mean of v, and has its gradient."""
    needs(peer)
    limits = Limits(layouts=("contiguous",), arguments=frozenset(options))
    edges = ["several_block_q", "several_block_kv"]
    report = pk.check("attention_vjp", backend=peer, device="cpu", dtypes=["float32"], only_edges=edges,
                      max_examples=8, limits=limits, shrink=False, seed=SEED)  # fmt: skip
    assert report.passed and report.examples, (report.failures, report.refused)


# What is not: a case that shows it, and which result is out of bounds; by how much is the processor's own. Attention's
# are the findings of examples/conformance.
OUTSIDE = {
    "16-bit sums over rows": (  # the gradient of a weight adds 864 rows up in bfloat16
        "torch", "layernorm_vjp", "d_weight[",
        '{"dtype":"bfloat16","shapes":{"x":[16,9,6,4],"d_y":[16,9,6,4],"weight":[4],"bias":[4]},'
        '"regime":"normal","seed":585555,'
        '"options":{"eps":0.01},"edge":"nan_in_weight_and_bias"}',
    ),
    "16-bit, not the last axis": (  # rounded twice
        "torch", "softmax", "y[",
        '{"dtype":"float16","shapes":{"x":[9,17,17]},"regime":"normal","seed":10383116,"options":{"axis":-2},'
        '"layouts":{"x":"expanded"}}',
    ),
    "exp(x - y)": (  # of a y that was rounded: at 40000 by a thousandth
        "torch", "logsumexp_vjp", "d_x[",
        '{"dtype":"float32","shapes":{"x":[2],"d_y":[]},"regime":"large_mean","seed":0}',
    ),
    "the norm's gradient rounded before the sum": (
        "torch", "add_rmsnorm_vjp", "d_x[",
        '{"dtype":"bfloat16","shapes":{"residual_out":[281],"d_y":[281],"weight":[281],"d_residual_out":[281]},'
        '"regime":"normal","seed":1040}',
    ),
    "inf - inf beside an infinite logit": (  # which is subtracted as the row's maximum; the formula's loss is inf
        "torch", "cross_entropy", "loss[",
        '{"dtype":"float32","shapes":{"logits":[33,33],"labels":[33]},"regime":"special","seed":2655213,'
        '"edge":"planted_nan_and_inf"}',
    ),
    "a slope of its own": (  # the gradient of what it computes, not of the slope that was saved, in 16 bits
        "torch", "linear_cross_entropy_vjp", "d_hidden[",
        '{"dtype":"float16","shapes":{"hidden":[31,1],"weight":[257,1],"labels":[31],"lse":[31],"slope":[31,1],'
        '"d_loss":[31]},"regime":"normal","seed":0,"options":{"wants":["d_hidden"]},"edge":"several_chunk_n"}',
    ),
    "silu rounded before the product": (
        "torch", "swiglu", "y[",
        '{"dtype":"float16","shapes":{"gate":[257],"up":[257]},"regime":"normal","seed":0,"edge":"several_block_n"}',
    ),
    "16-bit sums over a batch": (  # each product of the batch is rounded before the sum
        "torch", "matmul_vjp", "d_a[",
        '{"dtype":"bfloat16","shapes":{"a":[4,1,1,1,6],"b":[4,6,6,6,4],"d_c":[4,6,6,1,4]},"regime":"normal",'
        '"seed":1268,'
        '"layouts":{"a":"sliced","d_c":"strided"},"edge":"one_row"}',
    ),
    "from one 16-bit dtype to another": (  # by way of the first
        "jax", "matmul", "c[",
        '{"dtype":"bfloat16","shapes":{"a":[1,1,1,1],"b":[1,1,1,1]},"regime":"normal","seed":7771,'
        '"options":{"precision":"tf32","out_dtype":"float16"},"edge":"extents_of_1"}',
    ),
    "any of equal numbers": (  # whose order PyTorch does not promise
        "torch", "top_k", "indices[",
        '{"dtype":"float32","shapes":{"x":[1,127]},"regime":"normal","seed":1346214112,"options":{"k":2},'
        '"tiling":{"block_rows":1,"block_n":16},"edge":"ties_in_several_tiles"}',
    ),
    "scores that are equal where logits are not": (  # both 0, beside a logit far above
        "torch", "router", "indices[",
        '{"dtype":"bfloat16","shapes":{"logits":[3]},"regime":"near_overflow","seed":1165703677,"options":{"k":2},'
        '"edge":"beyond_the_dtype"}',
    ),
    "1 - s": (  # of a sigmoid next to 1
        "torch", "router_vjp", "d_logits[",
        '{"dtype":"float32","shapes":{"logits":[1,64],"indices":[1,1],"d_weights":[1,1]},"regime":"normal",'
        '"seed":1346214112,"options":{"scoring":"sigmoid"},"tiling":{"block_rows":1},"edge":"ragged_rows"}',
    ),
    "-0 below 0": (
        "jax", "top_k", "indices[",
        '{"dtype":"float32","shapes":{"x":[1,2]},"regime":"normal","seed":1496918125,"edge":"both_zeros"}',
    ),
    "16-bit arithmetic": (  # exp, sum and quotient in bfloat16
        "jax", "softmax", "y[",
        '{"dtype":"bfloat16","shapes":{"x":[293]},"regime":"normal","seed":37524,"edge":"several_block_n"}',
    ),
}  # fmt: skip
SEEN_WITH = {"torch": "2.13", "jax": "0.10"}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_is_outside_is_still_there(what):
    peer, op, words, case = OUTSIDE[what]
    needs(peer)
    if not importlib.import_module(peer).__version__.startswith(SEEN_WITH[peer]):
        pytest.skip(f"seen with {peer} {SEEN_WITH[peer]}")
    failures = testing.replay(op, case, backend=peer, device="cpu").failures
    assert failures and words in failures[0].what


IDS = np.zeros((1, 6), np.int32)
LACKING = {
    "window": (("attention", "torch"), {"window": (3, 0)}, "its attention has no window; leave it at None"),
    "segments": (("attention", "jax"), {"q_segment_ids": IDS, "kv_segment_ids": IDS},
                 "its attention has no q_segment_ids; leave it out"),
    "softcap": (("attention", "sdpa_flash"), {"softcap": 2.0}, "its attention has no softcap"),
    "lse": (("attention", "torch"), {"return_lse": True}, "its attention has no return_lse"),
    "out_dtype": (("matmul", "torch"), {"out_dtype": "float16"}, "its matmul has no out_dtype"),
    "kernel": (("attention", "sdpa_flash"), {"v": Q[..., :4]},
               "torch says: Flash attention requires q,k,v to have the same last dimension"),
    "heads": (("attention", "pallas_flash"), {"q": Q.repeat(17, 3), "k": Q.repeat(17, 3)},
              "the kernel takes heads up to 128 wide and multiples of 128; these are 136 wide"),
    "platform": (("attention", "sdpa_cudnn"), {}, "it compiles for cuda, and has no kernels for cpu"),
    "op": (("softmax", "sdpa_flash"), {}, "it has no softmax"),
}  # fmt: skip
ARRAYS = {"attention": {"q": Q, "k": Q, "v": Q}, "matmul": {"a": X, "b": X.T}, "softmax": {"x": X}}


@pytest.mark.parametrize("what", LACKING)
def test_what_a_library_lacks_is_refused_by_name(what):
    (op, peer), asked, words = LACKING[what]
    needs(peer)
    with pytest.raises(pk.UnsupportedError) as caught:
        pk.op(op, backend=peer)(**{**ARRAYS[op], **asked})
    assert f"backend {peer!r} cannot: " in str(caught.value) and words in str(caught.value)


def test_dtypes_that_a_library_does_not_mix_are_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4)
    with pytest.raises(
        pk.UnsupportedError, match=r"torch wants weight in the dtype of x: cast it, weight.to\(x.dtype\)"
    ):
        pk.op("rmsnorm", backend="torch")(x, weight)
    with pytest.raises(pk.UnsupportedError, match="its matmul gives no d_a of a d_c in another dtype than a; cast it"):
        pk.op("matmul_vjp", backend="torch")(x, x.T, torch.ones(2, 2))


def test_float32_products_are_as_precise_as_asked():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a, before = torch.ones(2, 2), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with pytest.raises(pk.UnsupportedError, match="torch is set to multiply float32 as tf32"):
            pk.op("matmul", backend="torch")(a, a)
        assert pk.op("matmul", backend="torch")(a, a, precision="tf32").tolist() == [[2, 2], [2, 2]]
    finally:
        torch.set_float32_matmul_precision(before)


def test_autograd_goes_through_a_peers_gradients():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, weight = torch.from_numpy(X).requires_grad_(), torch.ones(40, requires_grad=True)
    (pk.op("layernorm", backend="torch")(x, weight) ** 2).sum().backward()
    mine = x.grad, weight.grad
    x.grad = weight.grad = None
    (torch.nn.functional.layer_norm(x, (40,), weight) ** 2).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(mine, (x.grad, weight.grad), strict=True))
    q = torch.from_numpy(Q).requires_grad_()
    with pytest.raises(pk.UnsupportedError, match="its attention gives no lse, which was asked for or is saved"):
        pk.op("attention", backend="torch")(q, q, q)


def test_compiled_functions_are_the_eager_ones():
    needs("torch_compile")
    np.testing.assert_allclose(pk.op("softmax", backend="torch_compile")(X), pk.op("softmax")(X), atol=1e-6)


# --- the benchmarks ask the registry: no list of peers is written anywhere else ---


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (False, {"sdpa_flash", "torch", "flex_attention", "jax"}),
        (True, {"sdpa_flash", "torch", "jax"}),
    ],
)
def test_whatever_peer_takes_a_call_is_a_contender(gradient, expected):
    """And what it runs is the op's own work: of gradients the backward pass alone."""
    for name in ("triton", "torch", "jax"):
        needs(name)
    from portakern.tools.bench import contenders as among
    from portakern.tools.bench.plan import BenchPlan
    from portakern.tools.bench.suites import TimedCase
    from portakern.tools.bench.trial import TimingContext, Trial

    dims = {"batch": 1, "q_len": 6, "kv_len": 6, "kv_heads": 2, "group": 1, "d": 8, "dv": 8}
    case = TimedCase("mine", "attention", "float32", dims, gradient=gradient)
    asked = among.against_named(["torch", "sdpa_flash", "flex_attention", "jax", "jax_cudnn", "quack"])
    trial = Trial(TimingContext(BenchPlan([case], [registry.backend("triton")], asked, "cpu")), case)
    entries = {}
    for c in trial.among:
        try:
            entries[c.name] = among.ready(c, trial.inputs)
        except among.CallNotTaken as e:
            assert c.name not in expected, e
    assert set(entries) == expected | {"triton"}
    for name in ("triton", "sdpa_flash", "jax"):
        e = entries[name]
        assert trial.judge.verdict(e.framework, e.run(), e.call.target, e.call.interpret).right, name


def test_launch_times_the_function_that_the_peer_calls():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks import launch

    function, args, options = launch.torch_call("layernorm", {"x": torch.from_numpy(X)})
    assert function is torch.nn.functional.layer_norm
    assert torch.equal(function(*args, **options), pk.op("layernorm", backend="torch")(torch.from_numpy(X)))
    function, args, _ = launch.torch_call("attention", dict.fromkeys("qkv", torch.from_numpy(Q)))
    assert function is torch.nn.functional.scaled_dot_product_attention and args[0].shape == (1, 2, 6, 8)


def test_no_list_of_peers_is_written_elsewhere():
    theirs = re.compile(r"sdpa_kernel|SDPBackend|torch\.(softmax|matmul)|nn import functional|jax\.nn\.\w+\(|liger")
    for file in (ROOT / "benchmarks").glob("*.py"):
        # What one compiles are formulas on arrays without memory, which no peer takes; the other is of whole models.
        if file.stem in ("tpu_programs", "model_step"):
            continue
        assert not theirs.search(file.read_text(encoding="utf-8")), file


# Libraries that are not installed here: what our functions hand to theirs, whose place the formula takes.
def fake(monkeypatch, name, **functions):
    import sys
    import types

    module = types.ModuleType(name)
    vars(module).update(functions)
    for part in name.split(".")[:-1]:
        monkeypatch.setitem(sys.modules, part, sys.modules.get(part, types.ModuleType(part)))
    monkeypatch.setitem(sys.modules, name, module)


def peer_function(name, op):
    return getattr(importlib.import_module(f"portakern.backends.peers.{name}"), op)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "softcap": 2.0}, {"window": (3, 1), "scale": 0.3}, {"sinks": np.float32([0.5, -1])}],
    ids=str,
)
def test_flash_cute_hands_over_what_the_op_says(monkeypatch, options):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0,
                        learnable_sink=None):  # fmt: skip
        given = {"scale": softmax_scale, "is_causal": causal, "softcap": softcap or None, "sinks": learnable_sink}
        given["window"] = None if window_size == (None, None) else window_size
        return pk.op("attention", backend="reference")(q, k, v, **given), None

    fake(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func)
    q = torch.from_numpy(Q)
    given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    found = peer_function("flash_cute", "attention")(q, q, q, **given)
    np.testing.assert_allclose(found, pk.op("attention")(Q, Q, Q, **options), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"is_causal": False}, {"window": (2, None), "scale": 0.3}], ids=str)
def test_torchs_flash_kernel_gets_pages_by_their_table(monkeypatch, options):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.nn.attention import varlen

    def varlen_attn(q, k, v, starts, none, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table):
        assert none is None and enable_gqa and (max_q, max_k) == (5, 12)
        window = tuple(None if edge == -1 else edge for edge in window_size)
        arrays = q, k, v, block_table, seqused_k, starts
        return pk.op("paged_attention", backend="reference")(*arrays, is_causal=False, window=window, scale=scale)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    rng = np.random.default_rng(0)
    shapes = (5, 4, 8), (7, 4, 2, 8), (7, 4, 2, 8)
    table, lens, starts = ([6, 2, 1], [0, 3, 5]), [11, 5], [0, 3, 5]
    arrays = [*(rng.standard_normal(s).astype(np.float32) for s in shapes), *map(np.int32, (table, lens, starts))]
    found = peer_function("torch_sdpa", "paged_attention")(*map(torch.from_numpy, arrays), **options)
    np.testing.assert_allclose(found, pk.op("paged_attention")(*arrays, **options), atol=1e-6)


def test_torchs_flash_kernel_says_which_pages_it_takes():
    needs("sdpa_flash")
    with pytest.raises(UnsupportedError, match="torch wants (float16 or bfloat16 on a CUDA GPU|a release whose)"):
        pk.op("paged_attention", backend="sdpa_flash")(
            *(np.zeros(s, np.float32) for s in ((1, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8))),
            *map(np.int32, ([[0]], [1], [0, 1])),
        )


def of_each_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False, **rest):
    """FlashAttention's function for sequences of up to 5 tokens."""
    import torch

    assert max_seqlen_q == max_seqlen_k == 5 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for (first, last), (key, end) in zip(*(itertools.pairwise(x) for x in starts), strict=True):
        part = q[None, first:last], k[None, key:end], v[None, key:end]
        parts.append(pk.op("attention", backend="reference")(*part, is_causal=causal)[0])
    return torch.cat(parts), None


def test_flash_cute_gets_documents_by_their_ends(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    fake(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=of_each_sequence)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 8, 4, d)).astype(np.float32) for d in (16, 16, 24))
    ids = np.array([[1, 1, 1, 1, 1, 0, 0, 0], [3, 3, 3, 2, 2, 2, 2, 1]])
    found = peer_function("flash_cute", "attention")(
        *map(torch.from_numpy, (q, k, v)), q_segment_ids=torch.from_numpy(ids), kv_segment_ids=torch.from_numpy(ids),
        is_causal=True,
    )  # fmt: skip
    want = pk.op("attention")(q, k, v, q_segment_ids=ids, kv_segment_ids=ids, is_causal=True)
    np.testing.assert_allclose(found, want, atol=1e-6)


def test_flash_cute_gets_sequences_that_fill_their_arrays(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    fake(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=of_each_sequence)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((9, 4, 16), (8, 2, 16), (8, 2, 24)))
    starts = np.array([0, 4, 9]), np.array([0, 5, 8])
    call = peer_function("flash_cute", "varlen_attention")
    found = call(*map(torch.from_numpy, (q, k, v, *starts)), is_causal=True)
    np.testing.assert_allclose(found, pk.op("varlen_attention")(q, k, v, *starts, is_causal=True), atol=1e-6)
    with pytest.raises(UnsupportedError, match="sequences that fill their array; these lie from 1 to 9 of 9 tokens"):
        call(*map(torch.from_numpy, (q, k, v, np.array([1, 4, 9]), starts[1])))


class FlashInferWrapper:
    """Either of FlashInfer's wrappers: it has only what its planner was told, in lists of pages, and logarithms to
    base 2."""

    def __init__(self, memory, layout, **how):
        assert layout == "NHD"
        self.torch = pytest.importorskip("torch", reason="torch is not installed")
        self.decodes = "use_tensor_cores" in how

    def plan(self, *args, causal=True, sm_scale, window_left, logits_soft_cap, q_data_type, kv_data_type):
        if self.decodes:
            args = (self.torch.arange(len(args[0])).int(), *args)
        self.starts, self.indptr, self.indices, self.last, *_, self.page_size = args
        options = {"is_causal": causal, "scale": sm_scale, "softcap": logits_soft_cap or None}
        options["window"] = None if window_left < 0 else (window_left, None)
        self.options = options

    def run(self, q, pages, return_lse=False):
        used = self.indptr.diff()
        o, lse = self.torch.zeros_like(q), self.torch.full(q.shape[:2], -np.inf)
        for s in range(len(used)):
            own = self.indices[self.indptr[s] : self.indptr[s + 1]].long()
            keys = int((used[s] - 1) * self.page_size + self.last[s]) if used[s] else 0
            at = slice(int(self.starts[s]), int(self.starts[s + 1]))
            if keys and at.start < at.stop:
                k, v = (p[own].flatten(0, 1)[None, :keys] for p in pages)
                attention = pk.op("attention", backend="reference")
                o_part, lse_part = attention(q[None, at], k, v, return_lse=True, **self.options)
                o[at], lse[at] = o_part[0], lse_part[0].T / np.log(2)
        return (o, lse) if return_lse else o


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"window": (2, 0), "softcap": 2.0}, {"scale": 0.3, "return_lse": True}], ids=str
)
def test_flashinfer_gets_lists_of_pages(monkeypatch, options, decodes):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    wrappers = dict.fromkeys(("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"))
    fake(monkeypatch, "flashinfer", **dict.fromkeys(wrappers, FlashInferWrapper))
    rng = np.random.default_rng(0)
    lens, starts = np.array([5, 0, 9], np.int32), np.arange(4) if decodes else np.array([0, 2, 3, 7])
    table = np.array([[4, 1, -1], [-1, -1, -1], [0, 5, 2]], np.int32)
    q = rng.standard_normal((starts[-1], 4, 8)).astype(np.float32)
    k, v = (rng.standard_normal((6, 4, 2, 8)).astype(np.float32) for _ in "kv")
    arrays = (q, k, v, table, lens, starts.astype(np.int32))
    found = peer_function("flashinfer", "paged_attention")(*map(torch.from_numpy, arrays), **options)
    want = pk.op("paged_attention")(*arrays, **options)
    for actual, expected in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, want)), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_flashinfer_plans_once_for_unchanged_lengths(monkeypatch):
    from portakern.backends.peers._packed import kept

    torch = pytest.importorskip("torch", reason="torch is not installed")
    planned = []
    plan = kept(lambda x, y, more: planned.append(more))
    a, b = torch.zeros(2), torch.zeros(2)
    for tensors, more in (((a, b), 1), ((a, b), 1), ((a, b), 2), ((b, a), 2), ((b, a), 2)):
        plan(*tensors, more)
    a += 1
    plan(b, a, 2)
    assert planned == [1, 2, 2, 2]


def test_quack_gets_rows(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    functional = torch.nn.functional

    def softmax_bwd(d_y, y):
        assert d_y.ndim == y.ndim == 2
        return y * (d_y - (d_y * y).sum(-1, keepdim=True))

    def layernorm_fwd(x, weight, bias=None, eps=1e-6):
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def rmsnorm(x, weight=None, bias=None, eps=1e-6):
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    fake(monkeypatch, "quack", softmax=lambda x: x.softmax(1), rmsnorm=rmsnorm)
    fake(monkeypatch, "quack.softmax", softmax_bwd=softmax_bwd)
    fake(monkeypatch, "quack.rmsnorm", layernorm_fwd=layernorm_fwd)
    x, weight = np.stack([X, -X]), X[0] + 1
    mine = functools.partial(peer_function, "quack")
    given = {n: torch.from_numpy(a) for n, a in {"x": x, "weight": weight}.items()}
    np.testing.assert_allclose(mine("rmsnorm")(**given, eps=1e-3), pk.op("rmsnorm")(x, weight, eps=1e-3), atol=1e-5)
    np.testing.assert_allclose(mine("layernorm")(**given), pk.op("layernorm")(x, weight), atol=1e-5)
    y = mine("softmax")(given["x"])
    np.testing.assert_allclose(y, pk.op("softmax")(x), atol=1e-6)
    d_x = mine("softmax_vjp")(y, given["x"])
    np.testing.assert_allclose(d_x, pk.op("softmax_vjp")(y.numpy(), x).d_x, atol=1e-6)


@pytest.mark.parametrize("q_len", [6, 2])
def test_tokamax_gets_the_specs_mask(monkeypatch, q_len):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jnp = jax.numpy

    def dot_product_attention(q, k, v, bias, mask, *, scale, is_causal, logits_soft_cap, precision):
        assert precision == "highest" and logits_soft_cap is None
        return jax.nn.dot_product_attention(q, k, v, bias, mask, scale=scale, is_causal=is_causal)

    def layer_norm(x, scale, offset, *, epsilon, subtract_mean=True):
        x = x - x.mean(-1, keepdims=True) * subtract_mean
        y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + epsilon)
        return y * (1 if scale is None else scale) + (0 if offset is None else offset)

    fake(monkeypatch, "tokamax", dot_product_attention=dot_product_attention, layer_norm=layer_norm)
    mine = functools.partial(peer_function, "tokamax")
    q, k = jnp.asarray(Q[:, -q_len:]), jnp.asarray(Q)
    found = mine("attention")(q, k, k, is_causal=True)
    np.testing.assert_allclose(found, pk.op("attention")(Q[:, -q_len:], Q, Q, is_causal=True), atol=1e-5)
    x = jnp.asarray(X)
    np.testing.assert_allclose(mine("layernorm")(x, x[0]), pk.op("layernorm")(X, X[0]), atol=1e-4)
    np.testing.assert_allclose(mine("rmsnorm")(x, x[0], eps=0.1), pk.op("rmsnorm")(X, X[0], eps=0.1), atol=1e-4)


def test_the_hopper_kernels_of_jax_get_tiles_that_they_take(monkeypatch):
    """Their own configurations check themselves; what they would refuse on a GPU is refused in words before."""
    pytest.importorskip("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu", reason="this jax has no such kernels")
    import jax
    from jax.experimental.pallas.ops.gpu import attention_mgpu, hopper_matmul_mgpu

    from portakern.core.binder import unchecked
    from portakern.core.targets import Target

    seen = []
    monkeypatch.setattr(hopper_matmul_mgpu, "matmul", lambda a, b, c, config: seen.append(config))
    monkeypatch.setattr(attention_mgpu, "attention", lambda q, k, v, config: seen.append(config))
    peers = importlib.import_module("portakern.backends.peers.pallas_mgpu")
    peers.matmul(None, None)
    peers.attention(jax.numpy.asarray(Q[..., :1].repeat(64, 3)), None, None, is_causal=True)
    assert (seen[0].tile_m, seen[0].tile_n, seen[1].block_kv, seen[1].causal) == (128, 128, 256, True)

    def call(op, dtype, *shapes, **options):
        arrays = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
        return unchecked(registry.find_spec(op), *arrays, **options).replace(target=Target("cuda", "sm_90"))

    square, heads = (512, 512), (2, 512, 4, 64)
    assert peers.product_takes(call("matmul", "bfloat16", square, square)) is None
    assert "not m = 500" in peers.product_takes(call("matmul", "bfloat16", (500, 512), square))
    assert "not float32" in peers.product_takes(call("matmul", "float32", square, square))
    assert peers.attention_takes(call("attention", "bfloat16", heads, heads, heads)) is None
    wide = (2, 512, 4, 128)
    assert "powers of two alone" in peers.attention_takes(call("attention", "bfloat16", wide, wide, wide))
    assert peers.attention_takes(call("attention", "bfloat16", wide, wide, wide, scale=0.125)) is None


@pytest.mark.parametrize("window", [(None, 0), (100, 50), (255, None), (1000, 0)], ids=str)
def test_flex_attentions_blocks_are_those_of_its_whole_mask(window):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from portakern.backends.peers.torch_flex import _blocks

    for q_len, kv_len in ((256, 256), (1, 512), (300, 700), (700, 300), (129, 128)):
        found = _blocks(*window, q_len, kv_len, torch.device("cpu"))
        whole = create_block_mask(found.mask_mod, None, None, q_len, kv_len, device="cpu")
        assert torch.equal(found.to_dense(), whole.to_dense())
        assert torch.equal(found.full_kv_num_blocks, whole.full_kv_num_blocks)
        assert found.seq_lengths == whole.seq_lengths and found.BLOCK_SIZE == whole.BLOCK_SIZE


@pytest.mark.parametrize("window", [(None, None), (None, 0), (100, 50)], ids=str)
@pytest.mark.parametrize("kind", ["in order", "in none", "one", "of queries alone"])
def test_flex_attentions_blocks_of_segments_are_those_of_the_whole_mask(window, kind):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from portakern.backends.peers.torch_flex import _packed

    q_len, kv_len = (700, 700) if kind != "of queries alone" else (300, 700)
    ids = torch.arange(2 * kv_len).view(2, -1) // 150
    q_ids, kv_ids = {
        "in order": (ids, ids), "in none": (ids.flip(1) % 3, ids % 3), "one": (ids * 0, ids * 0),
        "of queries alone": (ids[:, :q_len], ids),
    }[kind]  # fmt: skip
    found = _packed(q_ids, kv_ids, *window)
    whole = create_block_mask(found.mask_mod, 2, None, q_len, kv_len, device="cpu")
    assert torch.equal(found.to_dense().bool(), found.to_dense().bool() | whole.to_dense().bool())  # none is left out
    exact = kind != "in none"  # ranges that meet although no ids do
    assert not exact or torch.equal(found.to_dense(), whole.to_dense())
    assert torch.equal(found.full_kv_num_blocks, whole.full_kv_num_blocks)


def test_documents_of_neighbouring_rows_are_known_by_their_ends():
    import torch

    from portakern.backends.peers._packed import documents

    ids = torch.tensor([[5, 5, 5, 2], [7, 7, 2, 2]])  # an id of one sequence says nothing of another's
    found = documents(ids, ids, "it")
    assert found.starts.tolist() == [0, 3, 4, 6, 8] and found.longest == 3
    assert documents(ids, ids, "it") is found
    ids[0, 1] = 9  # the same tensor with other values
    with pytest.raises(UnsupportedError, match="come again behind others"):
        documents(ids, ids, "it")
    with pytest.raises(UnsupportedError, match="have in common"):
        documents(ids, ids[:, :3], "it")
