"""The error bound of several ops in a row: a layer, a block, a model.

Each op's own bound is a proof for the arrays that it is given. What it is given is off too, by the bounds of the ops
before it, and that carries on. With B_s the own bound of a step s, and J_s the derivative of a result by what the step
gives, the result may be off by

    E = sum over steps, sum over elements of |J_s| B_s.

J_s leads through all steps behind s, with signs: what cancels in the function cancels here. It comes from the gradient
ops in float64, backwards from one element of the result at a time. Only then absolute values are taken, so that no two
errors are taken to cancel. No smaller first-order bound holds for all errors within the bounds of the steps.

* Of one op with exact inputs, E is its own bound, a proof (``orders``: "proof"), also where its elements are moved.
* Of everything behind, E is of first order ("first order"): what is left out are products of two errors, E / |x| times
  smaller than what is counted.

The typical error is that of the function itself: it is computed several times in float64, with a random error of the
typical size of each step added to its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from portakern.bounds import OutputBound, OutputBounds, stored
from portakern.core import targets
from portakern.core.binder import bind
from portakern.core.call import Call
from portakern.core.gradients import wiring
from portakern.core.oracle import as_float64, degenerate_outputs, oracle, rounded
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.spec.dtypes import DTYPES
from portakern.spec.tolerance import format_of, permitted_error, round_to, store_spread
from portakern.testing.threads import one_thread
from portakern.testing.whole_gradients import backward_call, exact_rests

__all__ = ["ComposedBound", "TrackedArray", "bound"]

PROOF, FIRST_ORDER = "proof", "first order"
"""What a bound is."""


@dataclass(frozen=True)
class ComposedBound(OutputBounds):
    """The bounds of a function's results: by their position, "0", "1", or by the keys of a dict.

    Attributes:
      outputs: name -> :class:`portakern.bounds.OutputBound`, with an infinite error of elements that were left out.
      orders: name -> "proof" or "first order".
    """

    outputs: Mapping[str, OutputBound]
    orders: Mapping[str, str]

    def first_wrong(self, *actual: Any, typical: float | None = None) -> str | None:
        """The first result, in order, with an element that is out of bounds; None where all are within.

        ``typical``: or with errors of more than so many times the typical error, in RMS; 2 is far for random rounding.
        """
        for o, x in self.paired(actual):
            if o.compare(x).bad.any() or (typical is not None and o.typical_share(x) > typical):
                return o.name
        return None


@dataclass
class Tracing:
    """What all arrays of one function share: where it runs, and the steps that were made, in order."""

    target: targets.Target
    any_order: bool
    samples: int
    rng: np.random.Generator
    steps: list[TracedStep] = field(default_factory=list)


class TrackedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in place of which a function is traced: its exact value, and how far the step that makes it may be off
    by itself. Ops take it, and NumPy's sums, products, quotients and functions that only move elements."""

    def __init__(
        self, tracing: Tracing, value: np.ndarray, dtype: str, own: np.ndarray, samples: np.ndarray, order: str
    ) -> None:
        self.tracing, self.value, self.stored_dtype = tracing, value, dtype
        self.own, self.samples, self.order = own, samples, order

    @property
    def off(self) -> bool:
        """Whether it may be off at all; inputs are not."""
        return self.order != EXACT

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def size(self) -> int:
        return self.value.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(DTYPES[self.stored_dtype].numpy)

    @property
    def T(self) -> Any:
        return self._moved(np.transpose, self)

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"TrackedArray({self.shape}, {self.stored_dtype}, {self.order})"

    def __getitem__(self, index: Any) -> Any:
        return self._moved(lambda x: x[index], self)

    def reshape(self, *shape: Any) -> Any:
        extents = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._moved(np.reshape, self, extents)

    def transpose(self, *axes: Any) -> Any:
        return self._moved(
            np.transpose, self, axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes or None
        )

    def swapaxes(self, one: int, other: int) -> Any:
        return self._moved(np.swapaxes, self, one, other)

    def astype(self, dtype: Any) -> TrackedArray:
        """Rounded to another dtype."""
        return ElementwiseStep(np.positive, (self,), np.dtype(dtype).name).result

    def _moved(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = MoveStep(self.tracing, function, args, kwargs)
        return step.results if step.several else step.results[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in MOVES:
            names = ", ".join(sorted(f.__name__ for f in MOVES))
            raise SpecError(
                f"bound: np.{function.__name__} of an array that may be off has no bound; expected an op of portakern, "
                f"+, -, *, /, or one of {names}"
            )
        return self._moved(function, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if ufunc not in SLOPES or method != "__call__" or kwargs:
            names = ", ".join(f.__name__ for f in SLOPES)
            raise SpecError(
                f"bound: np.{ufunc.__name__} of an array that may be off has no bound; expected an op of portakern, or "
                f"one of {names}, without keywords"
            )
        return ElementwiseStep(ufunc, args).result

    @staticmethod
    def __portakern_op__(
        spec: Spec[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, tuple[Any, ...]]:
        """A call of an op (see ``Op.__call__``), and for each output a tracked array."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, TrackedArray)]
        stands = {id(x): rounded(x.value, x.stored_dtype) for x in given}
        named = {n: stands.get(id(x), x) for n, x in kwargs.items()}
        call = bind(spec, *(stands.get(id(x), x) for x in args), **named)
        tracing = given[0].tracing
        call.target, call.any_order = tracing.target, tracing.any_order
        tracked = {id(stands[id(x)]): x for x in given}
        step = OpStep(tracing, call, {n: tracked[id(a)] for n, a in call.arrays.items() if id(a) in tracked})
        return call, tuple(step.by_output)


EXACT = "exact"

SLOPES: Mapping[Any, Callable[..., tuple[Any, ...]]] = {
    np.add: lambda a, b: (1.0, 1.0),
    np.subtract: lambda a, b: (1.0, -1.0),
    np.multiply: lambda a, b: (b, a),
    np.true_divide: lambda a, b: (1 / b, -a / b**2),
    np.negative: lambda a: (-1.0,),
    np.positive: lambda a: (1.0,),
    np.absolute: lambda a: (np.sign(a),),
}
"""NumPy's function -> its derivatives by its arguments."""

MOVES = frozenset({
    np.reshape, np.transpose, np.swapaxes, np.moveaxis, np.concatenate, np.stack, np.split, np.expand_dims, np.squeeze,
    np.broadcast_to, np.take, np.repeat, np.tile, np.flip, np.roll,
})  # fmt: skip
"""NumPy's functions that move elements, and compute none."""


# ------------------------------------------------------------------------------------------------------------ the steps
class TracedStep:
    """A step of a traced function. ``parents``: the arrays that it takes; ``results``: those that it gives."""

    parents: Sequence[TrackedArray]
    results: list[TrackedArray]

    def __init__(self, tracing: Tracing, parents: Sequence[TrackedArray]) -> None:
        self.tracing, self.parents, self.results = tracing, parents, []
        tracing.steps.append(self)

    def gives(self, value: np.ndarray, dtype: str, own: Any, samples: np.ndarray, order: str) -> TrackedArray:
        """A result; behind what may be off it is of first order."""
        order = FIRST_ORDER if order == PROOF and any(p.off for p in self.parents) else order
        own = np.broadcast_to(np.nan_to_num(own, nan=0.0, posinf=np.inf), value.shape)
        self.results.append(TrackedArray(self.tracing, value, dtype, own, samples, order))
        return self.results[-1]

    def pulled(self, cotangents: Mapping[int, np.ndarray]) -> Iterator[tuple[TrackedArray, np.ndarray]]:
        """Parents with the derivatives of a number by them, from its derivatives by the results, by their position."""
        raise NotImplementedError


class ElementwiseStep(TracedStep):
    """A sum, product or quotient, computed in float32 or more and stored."""

    def __init__(self, ufunc: Any, args: tuple[Any, ...], dtype: str | None = None) -> None:
        tracked = [x for x in args if isinstance(x, TrackedArray)]
        super().__init__(tracked[0].tracing, tracked)
        self.args, self.ufunc = args, ufunc
        self.values = [x.value if isinstance(x, TrackedArray) else np.asarray(x, np.float64) for x in args]
        dtype = dtype or _common([x.dtype for x in args if isinstance(x, TrackedArray | np.ndarray)])
        rank = max(v.ndim for v in self.values)
        samples = [_ranked(x.samples, rank) if isinstance(x, TrackedArray) else x for x in args]
        unit = format_of("float64" if dtype == "float64" else "float32").U
        with np.errstate(all="ignore"):
            value = ufunc(*self.values)
            rounds = ufunc is not np.positive or dtype != tracked[0].stored_dtype
            own = round_to(unit * np.abs(value), value, dtype) if rounds else np.zeros(value.shape)
            found = ufunc(*samples)
            found = found + rounds * store_spread(value, dtype) * self.tracing.rng.standard_normal(found.shape)
        self.result = self.gives(value, dtype, own, found, PROOF)

    def pulled(self, cotangents: Mapping[int, np.ndarray]) -> Iterator[tuple[TrackedArray, np.ndarray]]:
        with np.errstate(all="ignore"):
            slopes = SLOPES[self.ufunc](*self.values)
            for x, slope in zip(self.args, slopes, strict=True):
                if isinstance(x, TrackedArray):
                    yield x, _unbroadcast(np.where(cotangents[0] == 0, 0.0, cotangents[0] * slope), x.shape)


class MoveStep(TracedStep):
    """A function that moves elements: where each goes, it shows on an array of their numbers."""

    def __init__(
        self, tracing: Tracing, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        leaves = list(_leaves((args, kwargs)))
        super().__init__(tracing, list({id(x): x for x in leaves if isinstance(x, TrackedArray)}.values()))
        starts = np.cumsum([0, *(x.size for x in self.parents)])
        first = {id(x): int(n) for x, n in zip(self.parents, starts, strict=False)}
        dtype = _common([x.dtype for x in leaves if isinstance(x, TrackedArray | np.ndarray)])

        def on(pick: Callable[[TrackedArray], Any], exact: Callable[[Any], Any] = lambda x: x) -> Any:
            given, named = _mapped((args, kwargs), lambda x: pick(x) if isinstance(x, TrackedArray) else exact(x))
            return function(*given, **named)

        def numbers(x: TrackedArray) -> np.ndarray:
            return first[id(x)] + np.arange(x.size).reshape(x.shape)

        def none(x: Any) -> Any:
            return np.full(x.shape, -1) if isinstance(x, np.ndarray) and x.dtype.kind not in "iub" else x

        values, self.sources = on(lambda x: x.value), on(numbers, none)
        each = [on(lambda x, t=t: x.samples[t]) for t in range(tracing.samples)]  # type: ignore[misc]
        self.several = isinstance(values, list | tuple)
        if not self.several:
            values, self.sources, each = [values], [self.sources], [[e] for e in each]
        order = FIRST_ORDER if any(x.order == FIRST_ORDER for x in self.parents) else self.parents[0].order
        order = PROOF if order == EXACT and any(x.off for x in self.parents) else order
        for i, value in enumerate(values):
            samples = np.stack([e[i] for e in each])
            found = TrackedArray(tracing, np.asarray(value), dtype, np.zeros(np.shape(value)), samples, order)
            self.results.append(found)

    def pulled(self, cotangents: Mapping[int, np.ndarray]) -> Iterator[tuple[TrackedArray, np.ndarray]]:
        flat = np.zeros(sum(x.size for x in self.parents) + 1)  # the last one takes what comes from exact arrays
        for i, g in cotangents.items():
            np.add.at(flat, np.ravel(self.sources[i]), np.ravel(g))
        start = 0
        for x in self.parents:
            yield x, flat[start : start + x.size].reshape(x.shape)
            start += x.size


class OpStep(TracedStep):
    """One call of an op. ``arrays``: those of its arrays that are tracked."""

    def __init__(self, tracing: Tracing, call: Call, arrays: Mapping[str, TrackedArray]) -> None:
        super().__init__(tracing, list(arrays.values()))
        spec = call.spec
        if spec.bound is None:
            raise SpecError(f"{spec.name} declares no tolerance; give its spec one with @{spec.name}.tolerance")
        self.call, self.arrays = call, arrays
        wide = as_float64(call)
        self.exact = {n: x.value for n, x in arrays.items()}
        self.wide = wide.replace(arrays={**wide.arrays, **self.exact})
        self.backward: Call | None = None
        self.by_output: list[TrackedArray | None] = []
        with one_thread(), np.errstate(all="ignore"):
            found = self.computed(self.exact)
            none: tuple[Any, ...] = (None,) * len(found)
            errors = none if call.degenerate else spec.bound(self.wide, found)
            typical = none if call.degenerate or spec.spread is None else spec.spread(self.wide, found)
            off = any(x.off for x in arrays.values())
            each = [
                self.computed({n: x.samples[t] for n, x in arrays.items()}) if off else found
                for t in range(tracing.samples)
            ]
            for i, y in enumerate(found):
                made = None if y is None else self.output(i, y, errors[i], typical[i], np.stack([e[i] for e in each]))
                self.by_output.append(made)

    def output(self, i: int, exact: Any, error: Any, typical: Any, samples: np.ndarray) -> TrackedArray:
        """One output with its own bound."""
        o = self.call.spec.outputs[i]
        shape, dtype = self.call.outputs[o.name]
        value = np.asarray(exact, np.float64)
        own = np.zeros(shape) if error is None else permitted_error(np.asarray(error), value, dtype, o.codes)
        noise = np.zeros(()) if typical is None else np.where(np.isfinite(typical), typical, 0.0)
        samples = samples + noise * self.tracing.rng.standard_normal(samples.shape)
        return self.gives(value, dtype, own, samples, PROOF)

    def computed(self, others: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
        """The exact outputs, of some values of the tracked arrays."""
        wide = self.wide.replace(arrays={**self.wide.arrays, **others})
        return degenerate_outputs(wide) if wide.degenerate else oracle(wide)

    def gradient_call(self) -> Call:
        """The call of the gradient op, in float64, on exact arrays; without cotangents."""
        if self.backward is None:
            wired, spec = wiring(self.call.spec), self.call.spec
            forward = wired.training(self.call)
            wide = wired.training(self.wide)
            exact = dict(zip([o.name for o in spec.outputs], oracle(wide), strict=True))
            if any(o.saved and exact[o.name] is not None for o in spec.outputs):
                exact |= exact_rests(self.call, wide)
            saved = [n for n in wired.saves(self.call.options) if exact.get(n) is not None]
            zeros = {
                n: rounded(np.zeros(forward.outputs[n][0]), forward.outputs[n][1])
                for n in wired.cotangents
                if n in self.call.wants
            }
            made = backward_call(wired, self.call, forward, exact, saved, zeros)
            inputs = {n: x for n, x in self.exact.items() if made.arrays.get(n) is not None and n not in saved}
            self.backward = made.replace(arrays={**made.arrays, **inputs})
        return self.backward

    def pulled(self, cotangents: Mapping[int, np.ndarray]) -> Iterator[tuple[TrackedArray, np.ndarray]]:
        if self.call.degenerate:
            return
        wired, call = wiring(self.call.spec), self.gradient_call()
        names = [o.name for o, y in zip(self.call.spec.outputs, self.by_output, strict=True) if y is not None]
        by_name = {wired.cotangents[names[i]]: g for i, g in cotangents.items() if names[i] in wired.cotangents}
        off = [n for n, x in self.arrays.items() if x.off]
        wants = wired.wants(off)
        with one_thread(), np.errstate(all="ignore"):
            found = oracle(call.replace(arrays={**call.arrays, **by_name}, wants=wants)) if wants else ()
        gradients = dict(zip([o.name for o in wired.vjp.outputs], found, strict=False))
        for n in off:
            passed = wired.passed(n, by_name)
            g = passed if n in wired.vjp.passes else gradients[wired.gradients[n]]
            if g is not None:
                yield self.arrays[n], np.asarray(g).reshape(self.arrays[n].shape)


def errors_of(result: TrackedArray, chosen: np.ndarray) -> np.ndarray:
    """sum |J| B of some elements of a result, by their numbers; infinite of the others, and of indices that may be
    others where what they follow is off."""
    found = np.full(result.size, np.inf)
    if result.order == FIRST_ORDER and not DTYPES[result.stored_dtype].floating:
        return found.reshape(result.shape)
    for number in chosen:
        seed = np.zeros(result.size)
        seed[number] = 1.0
        cotangents = {id(result): seed.reshape(result.shape)}
        total = 0.0
        for step in reversed(result.tracing.steps):
            own = {i: cotangents[id(y)] for i, y in enumerate(step.results) if y.off and id(y) in cotangents}
            if not own:
                continue
            for i, g in own.items():
                with np.errstate(invalid="ignore"):
                    total += float(np.where(g == 0, 0.0, np.abs(g) * step.results[i].own).sum())
            if any(p.off for p in step.parents):
                for parent, g in step.pulled(own):
                    cotangents[id(parent)] = cotangents.get(id(parent), 0.0) + g
        found[number] = np.inf if np.isnan(total) else total
    return found.reshape(result.shape)


def _ranked(samples: np.ndarray, rank: int) -> np.ndarray:
    """Samples with axes of 1 behind the first, so that they broadcast as their arrays do."""
    return samples.reshape(len(samples), *[1] * (rank + 1 - samples.ndim), *samples.shape[1:])


def _unbroadcast(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sum over the axes along which an array of this shape was broadcast."""
    g = g.sum(tuple(range(g.ndim - len(shape))))
    return g.sum(tuple(i for i, n in enumerate(shape) if n == 1 and g.shape[i] > 1), keepdims=True)


def _common(dtypes: Sequence[np.dtype[Any]]) -> str:
    floats = [d for d in dtypes if d.kind not in "iub"] or list(dtypes)
    return str(np.result_type(*floats).name)


def _leaves(given: Any) -> Iterator[Any]:
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for each in given:
            yield from _leaves(each)
    else:
        yield given


def _mapped(given: Any, change: Callable[[Any], Any]) -> Any:
    """Lists, tuples and dicts with each of what they hold changed."""
    if isinstance(given, Mapping):
        return {n: _mapped(x, change) for n, x in given.items()}
    if isinstance(given, list | tuple):
        found = [_mapped(x, change) for x in given]
        return type(given)(*found) if hasattr(given, "_fields") else type(given)(found)
    return change(given)


def _named(results: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(results, Mapping):
        results = list(results.items())
    elif isinstance(results, list | tuple):
        results = list(enumerate(results))
    else:
        yield path or "0", results
        return
    for name, each in results:
        yield from _named(each, f"{path}.{name}" if path else str(name))


def bound(
    function: Callable[..., Any],
    *inputs: Any,
    dtype: str | None = None,
    target: str | None = None,
    any_order: bool = True,
    samples: int = 16,
    elements: int = 256,
    seed: int = 0,
) -> ComposedBound:
    """The exact results of a function that calls ops, and how far those of right kernels may be off.

    >>> def mlp(x, w):
    ...     return matmul(swiglu(matmul(x, w["gate"]), matmul(x, w["up"])), w["down"])
    >>> found = pk.bound(mlp, x, weights, dtype="bfloat16")
    >>> found.accepts(fused_mlp(x, weights)), found.share(fused_mlp(x, weights))

    Args:
      function: it calls ops of :func:`portakern.op`, NumPy's +, -, * and /, and functions that move elements; its
        results are arrays, or lists and dicts of them. inputs: its NumPy arrays, or lists and dicts of them: exact.
      dtype: what float32 and float64 inputs stand for (:func:`portakern.bounds.of`); results of ops have the dtypes
        that kernels would give them.
      target, any_order: as for :func:`portakern.bounds.of`.
      samples: how often the function is computed for the typical error.
      elements: of a result with more elements, the bound of so many is computed, drawn at random, each with a backward
        pass of its own; the others have the bound infinity, and are not compared.
      seed: of what is drawn.

    Returns:
      The bounds of the results. Behind the first op they are of first order (:mod:`portakern.composed`).

    Raises:
      SpecError: a call is wrong, or a NumPy function has no bound here. UnsupportedError: an op has no gradient, and
        its inputs may be off.
    """
    where = targets.HOST if target is None else targets.find(target).target
    rng = np.random.default_rng(seed)
    tracing = Tracing(where, any_order, samples, np.random.default_rng([seed, 1]))

    def tracked(x: Any) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind in "iub":
            return x
        array = stored("an input", x, dtype)
        value = array.astype(np.float64)
        each = np.broadcast_to(value, (samples, *value.shape))
        return TrackedArray(tracing, value, array.dtype.name, np.zeros(value.shape), each, EXACT)

    results = function(*_mapped(inputs, tracked))
    outputs, orders = {}, {}
    for name, x in _named(results):
        if not isinstance(x, TrackedArray):
            raise SpecError(f"bound: result {name} is a {type(x).__name__}; expected an array that the ops gave")
        chosen = np.arange(x.size) if x.size <= elements else rng.choice(x.size, elements, replace=False)
        typical = np.sqrt(np.mean(np.square(x.samples - x.value), 0))
        outputs[name] = OutputBound(name, x.stored_dtype, x.value, errors_of(x, chosen), typical)
        orders[name] = x.order
    return ComposedBound(outputs, orders)
