"""Right kernels of the ops in :mod:`tests.word_ops` in three array libraries, and how they are checked."""

from __future__ import annotations

import inspect
from typing import NamedTuple, get_args

import numpy as np

import portakern as pk
from portakern import testing
from portakern.spec import spec
from portakern.testing import Limits
from tests.word_ops import sums

SMALL = Limits(elements=512)


def backend(name, fn, framework="numpy"):
    made = pk.Backend("mine", framework=framework, platforms=["cpu"])
    made.implements(name, overwrites=getattr(fn, "overwrites", False))(fn)
    return made


def failure(op, fn, **more):
    report = testing.check(op, backend=backend(op.name, fn), max_examples=60, limits=SMALL, shrink=False, **more)
    return report.failures[0].what if report.failures else ""


def failure_case(op, fn):
    """The case of the first failure of a wrong kernel, as JSON."""
    report = testing.check(op, backend=backend(op.name, fn), max_examples=100, limits=SMALL, shrink=False)
    return report.failures[0].case


def passes(op, made, examples=60):
    report = testing.check(op, backend=made, max_examples=examples, limits=SMALL, device="cpu")
    assert report.passed, report.failures
    return report


def segment_sums(call, tiling, starts=None):
    """The right kernel in NumPy, which adds in float32."""
    q, scales, total = (call.arrays[n] for n in ("q", "scales", "total"))
    wide = np.float64 if call.dtype == "float64" else np.float32
    if starts is not None:
        call = call.replace(arrays={**call.arrays, "starts": starts(call.arrays["starts"])})
    with np.errstate(all="ignore"):
        products = q.astype(wide) * scales.astype(wide)[:, None]
        return ((total.astype(wide) + sums(call, products)).astype(total.dtype),)


def in_torch(call, tiling):
    """The same in PyTorch."""
    import torch

    q, scales, starts, total = (call.arrays[n] for n in ("q", "scales", "starts", "total"))
    rows = torch.arange(q.shape[0])
    segment = torch.searchsorted(starts.to(torch.int64).contiguous(), rows, right=True) - 1
    wide = torch.float64 if total.dtype == torch.float64 else torch.float32
    sums = total.to(wide).index_add(0, segment, q.to(wide) * scales.to(wide)[:, None])
    over = call.overwritten("out")
    return (sums.to(total.dtype) if over is None else over.copy_(sums),)


def in_jax(call, tiling):
    import jax
    import jax.numpy as jnp

    q, scales, starts, total = (call.arrays[n] for n in ("q", "scales", "starts", "total"))
    segment = jnp.searchsorted(starts, jnp.arange(q.shape[0]), side="right") - 1
    products = q.astype(jnp.float32) * scales.astype(jnp.float32)[:, None]
    sums = jax.ops.segment_sum(products, segment, num_segments=total.shape[0])
    return ((total.astype(jnp.float32) + sums).astype(total.dtype),)


KERNELS = {"numpy": segment_sums, "torch": in_torch, "jax": in_jax}


def in_place(call, tiling):
    """The one in NumPy, over its input where the call asks."""
    (out,), over = segment_sums(call, tiling), call.overwritten("out")
    if over is None:
        return (out,)
    over[...] = out
    return (over,)


in_place.overwrites = in_torch.overwrites = True
IN_PLACE = {"numpy": in_place, "torch": in_torch}


def masked_sum(call, accumulator):
    a, b, keep = call.arrays.values()
    total = a.astype(accumulator) + b.astype(accumulator)
    return np.where(keep, total, 0).astype(np.int32), keep.copy(), a.astype(np.int64) * 65536


def masked_sum_in_jax(call, tiling):
    import jax.numpy as jnp

    a, b, keep = (x.astype("int32") for x in call.arrays.values())
    return jnp.where(keep, a + b, 0), keep.astype(bool), a * 65536  # JAX holds int64 as int32


def peak_of(call, tiling):
    x, floor, axis = call.arrays["x"], call.arrays["floor"], call.options["axis"]
    y = np.asarray(x.max(axis)) if floor is None else np.maximum(x.max(axis), floor)
    at = np.asarray(x.astype(np.float64).argmax(axis), np.int32) if "at" in call.wants else None
    return np.asarray(y).astype(x.dtype, order="C"), at


def peak_in_jax(call, tiling):
    import jax.numpy as jnp

    x, floor, axis = call.arrays["x"], call.arrays["floor"], call.options["axis"]
    y = x.max(axis) if floor is None else jnp.maximum(x.max(axis), floor)
    return y, jnp.argmax(x, axis).astype("int32") if "at" in call.wants else None


def peak_in_torch(call, tiling):
    import torch

    x, floor, axis = call.arrays["x"], call.arrays["floor"], call.options["axis"]
    top = x.amax(axis)
    n = x.shape[axis]
    place = torch.arange(n).reshape([-1 if i == axis else 1 for i in range(x.dim())])
    found = torch.where((x == top.unsqueeze(axis)) | x.isnan(), place, n).amin(axis).to(torch.int32)
    return top if floor is None else torch.maximum(top, floor), found if "at" in call.wants else None


PEAKS = {"numpy": peak_of, "torch": peak_in_torch, "jax": peak_in_jax}


def declared(arrays, result, options=None, **more):
    """A spec from annotations: ``| None`` makes an argument optional, options are integers with the default -1."""
    kinds = inspect.Parameter
    parameters = [
        kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=None if type(None) in get_args(h) else kinds.empty)
        for n, h in arrays.items()
    ]
    parameters += [kinds(n, kinds.KEYWORD_ONLY, default=-1) for n in options or {}]

    def odd(): ...

    odd.__signature__ = inspect.Signature(parameters)
    odd.__annotations__ = {**arrays, **(options or {}), "return": NamedTuple("Out", list(result.items()))}
    return spec(tiling={}, flops=lambda call: 0.0, **more)(odd)


def product_of_8_bits(call, tiling):
    a, b, scale = call.arrays.values()
    with np.errstate(all="ignore"):
        return (np.ascontiguousarray((a.astype(np.float32) @ b.astype(np.float32)) * scale[:, None]),)


def product_of_8_bits_in_torch(call, tiling):
    a, b, scale = call.arrays.values()
    return ((a.float() @ b.float()).mul_(scale[:, None]),)


def product_of_8_bits_in_jax(call, tiling):
    a, b, scale = call.arrays.values()
    return ((a.astype("float32") @ b.astype("float32")) * scale[:, None],)


PRODUCTS = {"numpy": product_of_8_bits, "torch": product_of_8_bits_in_torch, "jax": product_of_8_bits_in_jax}
