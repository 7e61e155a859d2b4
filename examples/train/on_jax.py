"""The Llama of transformers written out in JAX, on portakern's ops and on XLA's own.

Its weights are those that the same seed gives transformers' model, where PyTorch is here to draw them, and draws of the
same distribution by NumPy elsewhere; the optimizers are torch.optim's formulas. So losses can be laid over each other.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import portakern as pk
import portakern.jax as twins
from portakern.examples.train import text
from portakern.examples.train.run import GIB, Run, Size

__all__ = ["device_name", "runs_here", "train"]

EPS, THETA = 1e-6, 10000.0
"""Of the norms and of the rotary frequencies, as LlamaConfig has them where nothing is said."""

Weights = dict[str, jax.Array]
Ops = Mapping[str, Callable[..., Any]]


# -------------------------------------------------------------------------------------------------------- XLA's own ops
def rmsnorm(x: Any, weight: Any) -> Any:
    square = jnp.mean(wide(x) ** 2, -1, keepdims=True)
    return weight * (wide(x) * jax.lax.rsqrt(square + EPS)).astype(x.dtype)


def rope(x: Any, cos: Any, sin: Any) -> Any:
    """The halves of a head are the pairs."""
    cos, sin = (jnp.tile(table, 2)[:, :, None].astype(x.dtype) for table in (cos, sin))
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def attention(q: Any, k: Any, v: Any) -> Any:
    """By cuDNN on a GPU."""
    implementation = "cudnn" if place() == "gpu" else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def swiglu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def cross_entropy(logits: Any, labels: Any) -> Any:
    return jax.nn.logsumexp(wide(logits), -1) - jnp.take_along_axis(wide(logits), labels[:, None], 1)[:, 0]


def add_rmsnorm(ops: Ops, x: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
    summed = x + residual
    return ops["rmsnorm"](summed, weight), summed


def linear_cross_entropy(ops: Ops, hidden: Any, weight: Any, labels: Any) -> Any:
    return ops["cross_entropy"](hidden @ weight.T, labels)


XLA = {f.__name__: f for f in (rmsnorm, rope, attention, swiglu, cross_entropy)}
COMPOSED = {f.__name__: f for f in (add_rmsnorm, linear_cross_entropy)}
"""What is made of another op where it is none itself."""


def on_xla() -> Ops:
    return XLA | {name: functools.partial(f, XLA) for name, f in COMPOSED.items()}


# ------------------------------------------------------------------------------------------------------ portakern's ops
def on_backend(backend: str) -> Ops:
    """The same on portakern, all by one backend."""

    def op(name: str, **options: Any) -> Callable[..., Any]:
        return functools.partial(pk.op(name, backend=backend), **options)

    return {
        "rmsnorm": op("rmsnorm", eps=EPS),
        "add_rmsnorm": op("add_rmsnorm", eps=EPS),
        "rope": op("rope"),
        "attention": functools.partial(twins.dot_product_attention, is_causal=True, implementation=backend),
        "swiglu": op("swiglu"),
        "cross_entropy": op("cross_entropy"),
        "linear_cross_entropy": op("linear_cross_entropy"),
    }


ORDER = {"gpu": ("pallas", "triton"), "tpu": ("pallas",), "cpu": ("reference",)}
"""Platform -> the backends that an op is looked for in. On a CPU kernels are interpreted: there the oracle serves."""


def place() -> str:
    """The platform that is trained on: cpu, gpu or tpu."""
    return str(jax.config.jax_default_device.platform)


def served(size: Size, backend: str | None, dtype: Any) -> tuple[Ops, str]:
    """Each op by the first backend that takes the model's calls of it, forward and backward, and where none does by
    another op and what XLA adds, or by XLA; and what serves what, in words."""
    among = (backend,) if backend else ORDER[place()]
    ops: dict[str, Callable[..., Any]] = {}
    said = []
    for name, shapes in calls(size, dtype).items():
        by, why = "XLA", []
        for candidate in among:
            mine = on_backend(candidate)[name]
            try:
                jax.jit(jax.grad(lambda *a, f=mine: total(f(*a)))).lower(*shapes)
            except (pk.UnsupportedError, pk.UnavailableError) as e:
                why.append(str(e))
                continue
            ops[name], by = mine, candidate
            break
        else:
            ops[name] = functools.partial(COMPOSED[name], ops) if name in COMPOSED else XLA[name]
        said.append(f"{name}: {by}" + "".join(f"; {reason}" for reason in why))
    return ops, "\n".join(said)


def total(result: Any) -> jax.Array:
    return sum(jnp.sum(wide(x)) for x in jax.tree.leaves(result))


def calls(size: Size, dtype: Any) -> dict[str, tuple[Any, ...]]:
    """What the model hands to each op, without arrays; an op before what is made of it."""

    def of(*shape: int, kind: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, kind)

    batch, length, rows = size.batch, size.length, size.batch * size.length
    x, weight = of(batch, length, size.width), of(size.width)
    q, kv = (of(batch, length, heads, size.head) for heads in (size.heads, size.kv_heads))
    table, inner = of(1, length, size.head // 2, kind=jnp.float32), of(batch, length, size.inner)
    hidden, words, labels = of(rows, size.width), of(size.words, size.width), of(rows, kind=jnp.int32)
    return {
        "rmsnorm": (x, weight), "rope": (q, table, table), "attention": (q, kv, kv), "swiglu": (inner, inner),
        "cross_entropy": (of(rows, size.words), labels), "add_rmsnorm": (x, x, weight),
        "linear_cross_entropy": (hidden, words, labels),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the model
def loss(weights: Weights, ids: jax.Array, size: Size, ops: Ops) -> jax.Array:
    """The mean of -log p of each token after those before it; ids: (batch, length)."""
    (batch, length), head = ids.shape, size.head
    frequencies = THETA ** -(np.arange(0, head, 2, dtype=np.float64) / head)
    cos, sin = twins.rotary_tables(jnp.arange(length), frequencies)

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T

    summed = weights["model.embed_tokens.weight"][ids]
    x = ops["rmsnorm"](summed, weights["model.layers.0.input_layernorm.weight"])
    for i in range(size.layers):
        at = f"model.layers.{i}"
        q, k, v = (linear(x, f"{at}.self_attn.{n}_proj").reshape(batch, length, -1, head) for n in "qkv")
        o = ops["attention"](ops["rope"](q, cos, sin), ops["rope"](k, cos, sin), v)
        o = linear(o.reshape(batch, length, -1), f"{at}.self_attn.o_proj")
        x, summed = ops["add_rmsnorm"](o, summed, weights[f"{at}.post_attention_layernorm.weight"])
        x = ops["swiglu"](linear(x, f"{at}.mlp.gate_proj"), linear(x, f"{at}.mlp.up_proj"))
        after = f"model.layers.{i + 1}.input_layernorm" if i + 1 < size.layers else "model.norm"
        x, summed = ops["add_rmsnorm"](linear(x, f"{at}.mlp.down_proj"), summed, weights[f"{after}.weight"])
    hidden, labels = x[:, :-1].reshape(-1, size.width), ids[:, 1:].reshape(-1)
    return jnp.mean(ops["linear_cross_entropy"](hidden, weights["lm_head.weight"], labels))


def initial(size: Size, seed: int, dtype: Any) -> tuple[Weights, str]:
    """The weights, under transformers' names, and where they come from."""
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        from portakern.examples.train import on_torch

        model = on_torch.made(size, seed, "cuda" if place() == "gpu" else "cpu")
        held = {n: p.detach().float().cpu().numpy() for n, p in model.named_parameters()}
        return {n: jnp.asarray(p, dtype) for n, p in held.items()}, "transformers' of the seed"
    rng, heads = np.random.default_rng(seed), {"q": size.heads, "k": size.kv_heads, "v": size.kv_heads}
    shapes = {"model.embed_tokens": (size.words, size.width), "lm_head": (size.words, size.width)}
    norms = ["model.norm"]
    for i in range(size.layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{n}_proj": (count * size.head, size.width) for n, count in heads.items()}
        shapes[f"{at}.self_attn.o_proj"] = (size.width, size.heads * size.head)
        shapes |= {f"{at}.mlp.{n}_proj": (size.inner, size.width) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = (size.width, size.inner)
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
    drawn = {n: 0.02 * rng.standard_normal(shape, np.float32) for n, shape in shapes.items()}
    drawn |= {n: np.ones(size.width, np.float32) for n in norms}
    return {f"{n}.weight": jnp.asarray(p, dtype) for n, p in drawn.items()}, "NumPy's, as PyTorch is not here"


# ------------------------------------------------------------------------------------------------------- the optimizers
def sgd(weights: Weights, grads: Weights, state: Any, rate: float) -> tuple[Weights, Any]:
    """As torch.optim.SGD has it."""
    return {n: (wide(w) - rate * wide(grads[n])).astype(w.dtype) for n, w in weights.items()}, state


def adamw(weights: Weights, grads: Weights, state: Any, rate: float) -> tuple[Weights, Any]:
    """As torch.optim.AdamW has it where nothing is said: betas 0.9 and 0.999, eps 1e-8, decay 0.01. Moments are kept in
    the weights' dtype, and reckoned with in float32."""
    step, first, second = state
    step += 1
    first = {n: (0.9 * wide(m) + 0.1 * wide(grads[n])).astype(m.dtype) for n, m in first.items()}
    second = {n: (0.999 * wide(v) + 0.001 * wide(grads[n]) ** 2).astype(v.dtype) for n, v in second.items()}
    scale, root = rate / (1 - 0.9**step), jnp.sqrt(1 - 0.999**step)

    def moved(n: str, w: jax.Array) -> jax.Array:
        change = wide(first[n]) / (jnp.sqrt(wide(second[n])) / root + 1e-8)
        return (wide(w) * (1 - rate * 0.01) - scale * change).astype(w.dtype)

    return {n: moved(n, w) for n, w in weights.items()}, (step, first, second)


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def started(optimizer: str, weights: Weights) -> tuple[Callable[..., Any], Any]:
    """The optimizer and its state before the first step."""
    if optimizer == "SGD":
        return sgd, ()
    first, second = ({n: jnp.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    return adamw, (jnp.zeros((), jnp.float32), first, second)


# ------------------------------------------------------------------------------------------------------------- training
def platform(device: str | None) -> str:
    return str(jax.default_backend()) if device is None else {"cuda": "gpu"}.get(device, device)


def device_name(device: str | None) -> str | None:
    """The accelerator's name; None for the host."""
    return None if platform(device) == "cpu" else jax.devices(platform(device))[0].device_kind


def runs_here(who: str, device: str | None) -> str | None:
    """Why a contender cannot run here; None where it can."""
    try:
        jax.devices(platform(device))
    except RuntimeError as e:
        return f"JAX has no such device: {e}"
    return None


def train(who: str, size: Size, seed: int, device: str | None, compiled: bool, backend: str | None, corpus: Any) -> Run:
    """One contender from one seed. What ``compiled`` asks for is always so: forward and backward are one program."""
    with jax.default_device(jax.devices(platform(device))[0]):
        return _trained(who, size, seed, backend, corpus)


def _trained(who: str, size: Size, seed: int, backend: str | None, corpus: Any) -> Run:
    on_cpu = place() == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    ops, words = (on_xla(), "jax.numpy, as XLA compiles it") if who == "jax" else served(size, backend, dtype)
    weights, source = initial(size, seed, dtype)
    optimizer, state = started(size.optimizer, weights)
    ids = jnp.asarray(text.batches(corpus, seed, size.steps, size.batch, size.length), jnp.int32)
    step = jax.jit(jax.value_and_grad(functools.partial(loss, size=size, ops=ops))).lower(weights, ids[0]).compile()
    update = jax.jit(functools.partial(optimizer, rate=size.rate), donate_argnums=(0, 2))
    losses, times = [], []
    for batch in ids:
        begin = time.perf_counter()
        found, grads = jax.block_until_ready(step(weights, batch))
        times.append(1e3 * (time.perf_counter() - begin))
        weights, state = jax.block_until_ready(update(weights, grads, state))
        losses.append(float(found))
    return Run(losses, times, None if on_cpu else planned(step, state), f"weights: {source}\n{words}")


def planned(step: Any, state: Any) -> float:
    """GiB that a step takes at most, as XLA planned its program, with the optimizer's state beside it: what JAX's
    allocator reports is of a whole process, and so of the run before too."""
    plan = step.memory_analysis()
    own = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes - plan.alias_size_in_bytes
    return (own + sum(a.nbytes for a in jax.tree.leaves(state))) / GIB
