"""What tests and benchmarks know about one op: a record, modelled on PyTorch's OpInfo.

A forward op's record is a :class:`ForwardRecord`, a gradient's a :class:`GradientRecord`. A field without a default is
required: a record that lacks it cannot be made. Nothing here imports torch or JAX; functions that speak to them import
them when they are called.

Arrays of a call are a tuple in the order of the spec's arguments, None for one that is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.gradients import wiring
from portakern.spec import Spec
from portakern.spec.dtypes import numpy_dtype
from portakern.testing.cases import Case

Rng = np.random.Generator
Shape = tuple[int, ...]
Arrays = tuple[Any, ...]
Drawn = tuple[Arrays, dict[str, Any]]
DTYPES = ("float32", "float16", "bfloat16")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")


def dtype_for(op: str, dtype: str) -> str:
    """The dtype in which an op is tried where others are tried in ``dtype``: that one, or, of an op of 8-bit numbers,
    one of its own for each of theirs."""
    own = registry.find_spec(op).dtypes
    if dtype in own:
        return dtype
    stands = dict(zip(("float32", "bfloat16", "float16", "float64"), (*EIGHT_BITS, EIGHT_BITS[2]), strict=True))
    return stands[dtype]


@dataclass(frozen=True)
class Sample:
    """A call of which the shapes matter and the values do not.

    Attributes:
      shapes: array name -> shape, of the arrays that are given.
      options, tiling: those that are not at their default.
      wider: names of arrays in float32 beside a 16-bit dtype.
      wants: the gradients that are asked for; None: all.
    """

    shapes: Mapping[str, Shape]
    options: Mapping[str, Any] = field(default_factory=dict)
    tiling: Mapping[str, int] = field(default_factory=dict)
    wider: tuple[str, ...] = ()
    wants: tuple[str, ...] | None = None

    def arrays(self, op: str, dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
        """N(0, 1) data, small integers for ids, and for what a forward call saves what its oracle gives; in the spec's
        order.
        """
        spec, dtype = registry.find_spec(op), dtype_for(op, dtype)
        beside = {a.name: dtype for a in spec.arrays if not a.follows and dtype in EIGHT_BITS and dtype in a.dtypes}
        case = Case(dtype, self.shapes, seed=seed, options=self.options, wider=self.wider, dtypes=beside)
        own = {a.name for a in spec.arrays if a.statistic} | set(self.wider)
        drawn = {name: np.asarray(buffer.view(), order="C") for name, buffer in case.buffers(spec).items()}
        return {
            name: x if name in own or x.dtype.kind in "iub" else x.astype(numpy_dtype(dtype))
            for name, x in drawn.items()
        }


@dataclass(frozen=True)
class Mapped:
    """A call under ``vmap``.

    Attributes:
      sample: the call, with one more axis in the arrays that are mapped.
      in_dims: array name -> its mapped axis.
      folds: whether the op takes all samples in one call, instead of one call a sample.
    """

    sample: Sample
    in_dims: Mapping[str, int]
    folds: bool = True

    def arrays(self, op: str, dtype: str) -> dict[str, np.ndarray]:
        """Values as :meth:`Sample.arrays` draws them for each call of which there is one a sample."""
        shapes, mapped = self.sample.shapes, self.in_dims
        alone = {n: tuple(np.delete(s, mapped[n]).tolist()) if n in mapped else s for n, s in shapes.items()}
        number = next(shapes[n][axis] for n, axis in mapped.items())
        each = [replace(self.sample, shapes=alone).arrays(op, dtype, seed) for seed in range(number)]
        return {n: np.stack([x[n] for x in each], mapped[n]) if n in mapped else each[0][n] for n in each[0]}


@dataclass(frozen=True)
class Near:
    """A float32 fault of 1 to 4 bounds, which says that the bound is no more than four times too wide.

    Attributes:
      arrays: of the call, from a generator; options: of the call.
      off: output -> relative error that is added to it; plant: or keywords of the simulated kernel.
    """

    arrays: Callable[[Rng], Arrays]
    options: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, float] = field(default_factory=dict)
    plant: Mapping[str, Any] = field(default_factory=dict)


ANY, EVERY = "any output", "every output"


@dataclass(frozen=True)
class Fault:
    """A fault that breaks the bound.

    Attributes:
      arrays: of the call, from a generator and a dtype.
      plant: keywords of the simulated kernel, or options that it takes for others.
      options: of the call.
      breaks: the output that leaves its bound, ANY or EVERY.
      dtypes: where it shows.
    """

    arrays: Callable[[Rng, str], Arrays]
    plant: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    breaks: str = ANY
    dtypes: tuple[str, ...] = DTYPES


@dataclass(frozen=True)
class Corner:
    """A call that right kernels serve within their bound, although not by much.

    Attributes:
      arrays, options, dtypes: as in :class:`Fault`.
      variant: keywords of the simulated kernel.
      least, most: the fraction of the bound that it reaches.
    """

    arrays: Callable[[Rng, str], Arrays]
    options: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)
    least: float = 0.0
    most: float = 1.0
    dtypes: tuple[str, ...] = DTYPES


@dataclass(frozen=True)
class Hiding:
    """A fault that stays within the bound, and that statistics find.

    Attributes:
      words: what the reason says.
      plant: keywords of the simulated kernel.
      truncates: results are cut towards 0 where they should be rounded.
      dtypes: where it shows.
      options: of the call, which the record's ``typical`` is asked for.
    """

    words: str
    plant: Mapping[str, Any] = field(default_factory=dict)
    truncates: bool = False
    dtypes: tuple[str, ...] = DTYPES
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Twin:
    """A function of PyTorch, or of a package for it, for which ``portakern.torch`` has a stand-in of the same name.

    Attributes:
      name: in ``torch.nn.functional`` or ``torch``, or elsewhere if it has no samples, and in ``portakern.torch``.
      sampled: its name among PyTorch's own sample inputs; None: these lack it, and it has a test file of its own.
      refusals: reasons for which a sample may be refused, as they stand in the message -> in words.
      least: how many samples must run: a share of all, or a number.
      further: parameters that the stand-in has behind the function's own.
      package: whose it is.
    """

    name: str
    sampled: str | None
    refusals: Mapping[str, str] = field(default_factory=dict)
    least: float = 0.9
    further: tuple[str, ...] = ()
    package: str = "torch"


@dataclass(frozen=True)
class Layer:
    """How the op takes part in a model whose hidden state is (batch, length, width).

    Attributes:
      parameters: name -> shape, from the width.
      run: (the op, the hidden state, the parameters by name) -> an array of the hidden state's shape. Written for torch
        and JAX alike.
    """

    run: Callable[[Callable[..., Any], Any, Mapping[str, Any]], Any]
    parameters: Callable[[int], Mapping[str, Shape]] = lambda width: {}


@dataclass(frozen=True, kw_only=True)
class OpRecord:
    """One op.

    Attributes:
      op: its name. The file is called like it, or like its forward op.
      simulate: a kernel in NumPy in the order of the real ones, in the accumulator's type. It takes the call's arrays
        and options and gives a tuple of results before they are stored, None for one that is not wanted; further
        keywords make a right variant of it or plant a fault.
      variants: keywords of right kernels.
      case: (generator, dtype, regime) -> arrays and options of any size and kind; regimes: those it knows.
      telling: regimes in which right kernels have to come near the bound; all when empty. least_float64: how near in
        float64, where it hangs on the order in which a processor's BLAS sums.
      special: like ``case`` with a seed for the regime: arrays with NaN and infinities; None: they are planted at
        random into ``case``.
      near, faults, corners: see the classes. ``near`` is None for an op (``exact``) whose bound is 0, or whose results
        are all codes: no fault is near, and no fault hides in it.
      large_case: like ``case``, with enough elements for statistics: in every output 64 that differ once they are
        stored.
      typical: (generator, dtype, **options) -> arrays and options of an ordinary call, in which faults hide; hiding:
        those faults.
      copies: outputs that hold numbers of the call as they came.
      least_z: output -> how near typical errors come to sigma in 16 bits, of outputs of which some are stored in
        float32.
      small: calls of a few elements: for finite differences and torch's ``opcheck``.
      usual: calls as a test suite would make them, for the mutants.
      extents: dimension -> a small extent, of every dimension of the spec.
      rows: the arrays of a call on rows of one length (None: the op is not of rows, or has one number a row among its
        arrays, which no kernel can move 16 bytes at a time); an array of ``weight`` or ``bias`` is one row.
      matrix_units: whether compiled kernels multiply matrices.
      past_2_31: what a GPU is asked with more than 2^31 elements: yields (outputs, arrays, options) of parts that can
        be compared. Its argument is ``Gpu`` of tests/gpu.py.
      far: yields the arrays of calls whose strides go past 2^31.
    """

    op: str
    simulate: Callable[..., tuple[Any, ...]]
    variants: tuple[Mapping[str, Any], ...]
    case: Callable[[Rng, str, str], Drawn]
    regimes: tuple[str, ...]
    near: Near | None
    faults: Mapping[str, Fault]
    large_case: Callable[[Rng, str, str], Drawn]
    typical: Callable[..., Drawn]
    hiding: Mapping[str, Hiding]
    small: Mapping[str, Sample]
    usual: tuple[Sample, ...]
    extents: Mapping[str, int]
    past_2_31: Callable[[Any], Iterable[tuple[Any, Arrays, Mapping[str, Any]]]]
    far: Callable[[Any], Iterable[Arrays]]
    telling: tuple[str, ...] = ()
    least_float64: float = 0.005
    special: Callable[[Rng, str, int], Drawn] | None = None
    corners: Mapping[str, Corner] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
    least_z: Mapping[str, float] = field(default_factory=dict)
    rows: tuple[str, ...] | None = None
    matrix_units: bool = False

    @property
    def spec(self) -> Spec[Any]:
        return registry.find_spec(self.op)

    @property
    def exact(self) -> bool:
        """Whether the op only copies numbers, or gives codes: rounded results of the oracle are 0 from it."""
        return self.near is None

    def never_off(self, output: str) -> bool:
        """Whether no right kernel's output differs from the rounded reference."""
        return self.exact or output in self.copies


@dataclass(frozen=True, kw_only=True)
class ForwardRecord(OpRecord):
    """An op that is no gradient.

    Attributes:
      formula: the op written another way, one scalar at a time, from float64 arrays and options; formula_calls: name ->
        what to try it on.
      formula_tolerance: (relative, absolute).
      in_torch, in_jax: the op in plain torch and JAX operations, from arrays and options.
      compared: one call of a moderate size, for comparisons with plain torch and JAX.
      derived: more calls for which finite differences tell the gradient, beside ``small``.
      lowered: calls to lower for TPU.
      mapped: calls under ``torch.func.vmap``.
      wrong: what users get wrong -> a call, and what its message says.
      fuzzed: (``Random`` of benchmarks/fuzz.py, dtype) -> arrays by name and options that the spec allows.
      layer: how it takes part in a model.
      launched: the call whose host time benchmarks/launch.py takes.
      twin: what PyTorch has, if it has it.
    """

    formula: Callable[..., tuple[Any, ...]]
    formula_calls: Mapping[str, Callable[[], Drawn]]
    formula_tolerance: tuple[float, float]
    in_torch: Callable[..., Any]
    in_jax: Callable[..., Any]
    compared: Sample
    lowered: Mapping[str, Sample]
    mapped: Mapping[str, Mapped]
    wrong: Mapping[str, tuple[Callable[[], Any], str]]
    fuzzed: Callable[[Any, str], tuple[dict[str, Any], dict[str, Any]]]
    layer: Layer
    launched: Sample
    derived: Mapping[str, Sample] = field(default_factory=dict)
    twin: Twin | None = None

    def differentiable(self, sample: Sample) -> tuple[int, ...]:
        """The places, among the arrays that a sample gives, of those that have gradients."""
        given = (a.name for a in self.spec.arrays if a.name in sample.shapes)
        return tuple(i for i, name in enumerate(given) if name in wiring(self.spec).gradients)


@dataclass(frozen=True, kw_only=True)
class GradientRecord(OpRecord):
    """An op that computes another's gradients."""
