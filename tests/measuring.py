"""How far a kernel is from the oracle: fractions of the bound, and what statistics say of typical errors."""

from __future__ import annotations

import numpy as np

from portakern.api import op
from portakern.core.gradients import wiring
from portakern.core.oracle import as_float64, oracle
from portakern.spec.dtypes import DTYPES, numpy_dtype
from portakern.spec.tolerance import compare, rounded
from portakern.testing.statistics import examine
from tests.ops import record
from tests.ops._shared import truncate


def measure(record, arrays, options=None, actual=None, **how):
    """Output -> the worst fraction of the bound that a simulated kernel reaches; inf where an element breaks it by NaN
    or inf. ``how``: keywords of the kernel.
    """
    options = options or {}
    call = op(record.op).bind(*arrays, **options)
    ref = oracle(call)
    bounds = call.spec.bound(as_float64(call), ref)
    actual = record.simulate(*arrays, **{**options, **how}) if actual is None else actual
    worst = {}
    for (output, (shape, dtype)), y, exact, limit in zip(
        call.outputs.items(), every(call, actual), ref, bounds, strict=True
    ):
        assert (exact is None) == (limit is None) == (output not in call.wants)
        if exact is not None:
            assert limit.shape == exact.shape == shape and limit.dtype == exact.dtype == np.float64
            codes = record.spec.output(output).codes
            stored = rounded(y, dtype) if codes else y.astype(numpy_dtype(dtype))
            c = compare(stored, exact, limit, dtype, codes)
            worst[output] = max(c.worst, np.inf if c.bad.any() and c.worst <= 1 else 0)
    return worst


def every(call, actual):
    """What a simulated kernel gives, with None for what is saved for gradients alone, which these do not compute."""
    return (*actual, *[None] * (len(call.spec.outputs) - len(actual)))


def simulated(name, arrays, options, truncates=False, **how):
    """What a simulated kernel stores; float32 results, and those that truncation is no fault of, as they are."""
    call = op(name).bind(*arrays, **options)
    store = truncate if truncates else lambda y, dtype: y.astype(numpy_dtype(dtype))
    got = record(name).simulate(*arrays, **{**options, **how})
    kept = zip(every(call, got), call.outputs.items(), strict=True)
    return [store(y, dtype) if dtype != "float32" else y for y, (n, (_, dtype)) in kept if n in call.wants]


def evidence(name, arrays, options, kernel, regime="normal", target=None, interpret=True):
    """Output name -> (what the statistics say, the worst fraction of the bound)."""
    return next(evidences(name, arrays, options, [kernel], regime, target, interpret))


def evidences(name, arrays, options, kernels, regime="normal", target=None, interpret=True):
    """:func:`evidence` of several kernels on one call."""
    call = op(name).bind(*arrays, **options)
    call = call.replace(target=target or call.target, interpret=interpret)
    refs = oracle(call)
    wide = as_float64(call)
    bounds = call.spec.bound(wide, refs)
    for kernel in kernels:
        got = kernel(name, arrays, options)
        found = examine(wide, got, refs, bounds, regime)
        outputs = dict(zip(call.wants, got, strict=True))
        yield {
            n: (e, compare(outputs[n], refs[i], bounds[i], call.outputs[n][1], call.spec.output(n).codes).worst)
            for i, (n, e) in enumerate(found.items())
        }


def differentiated(r, sample, dtype="float64"):
    """A forward record's sample with every output wanted: arrays, options and cotangents by name, and the bound call of
    its gradient.
    """
    wired, rng = wiring(r.spec), np.random.default_rng(1)
    arrays = sample.arrays(r.op, dtype)
    options = {n: v for n, v in sample.options.items() if r.spec.option(n).kind != "dtype"}
    options |= {o.wanted_by: True for o in r.spec.outputs if o.wanted_by}
    call = wired.training(op(r.op).bind(**arrays, **options))
    outputs = dict(zip((o.name for o in r.spec.outputs), oracle(call), strict=True))
    whole = {n: d for n, (_, d) in call.outputs.items() if not DTYPES[d].floating}
    outputs |= {n: rounded(outputs[n], d) for n, d in whole.items() if outputs[n] is not None}
    cotangents = {n: rng.standard_normal(outputs[n].shape) for n in wired.cotangents}
    given = {n: (arrays | outputs)[n] for n in (*wired.inputs, *wired.saves(options)) if n in arrays or n in outputs}
    given |= {argument: cotangents[n] for n, argument in wired.cotangents.items()}
    return (
        arrays,
        options,
        cotangents,
        op(wired.vjp).bind(**given, **{n: options[n] for n in wired.options if n in options}),
    )


class InOrder(np.ndarray):
    """An array whose sums, means and products, and those of all that is computed from it, add one term after the
    other."""

    def sum(self, axis=None, dtype=None, out=None, keepdims=False, **_):
        x = np.asarray(self)
        axes = range(x.ndim) if axis is None else np.atleast_1d(axis)
        for i in axes:
            last = [slice(None)] * x.ndim
            last[i] = slice(-1, None)
            x = np.add.accumulate(x, i, dtype=dtype)[tuple(last)] if x.shape[i] else x.sum(i, dtype, keepdims=True)
        return (x if keepdims else x.squeeze(tuple(axes))).view(InOrder)

    def mean(self, axis=None, dtype=None, out=None, keepdims=False, **_):
        terms = self.size if axis is None else np.prod([self.shape[i] for i in np.atleast_1d(axis)])
        return self.sum(axis, dtype, keepdims=keepdims) / self.dtype.type(terms)

    def __matmul__(self, other):
        a, b = np.asarray(self), np.asarray(other)
        if b.ndim < 2:
            return (a * b).view(InOrder).sum(-1)
        total = np.zeros((), np.result_type(a, b))
        for k in range(b.shape[-2]):
            total = total + a[..., :, k, None] * b[..., k, None, :]
        return np.asarray(total).view(InOrder)

    def __rmatmul__(self, other):
        return np.asarray(other).view(InOrder) @ self


def in_order(name, arrays, options, **how):
    """:func:`simulated`, but that every sum runs one term after the other."""
    return [
        np.asarray(y) for y in simulated(name, [a if a is None else a.view(InOrder) for a in arrays], options, **how)
    ]
