"""What an op is: one typed Python signature, from which everything else is derived.

A spec is an annotated function under the :func:`spec` decorator. Array arguments are annotated in jaxtyping's notation
(https://docs.kidger.site/jaxtyping), of which this module reads: names (``d``), products (``kv_heads*group``), sums
with a number (``sequences+1``), numbers of blocks (``k/width``, rounded up), broadcast axes (``#batch``) and one
variadic run of axes (``*batch``). A leading
``batch`` or ``*batch`` counts samples that do not see each other. A run of axes may be another one without the axis
that an option names (``drops``). Keyword-only arguments are options, of which one may be an extent. The return
annotation is a ``NamedTuple`` whose fields are the outputs. Which dtypes an annotation stands for:
:mod:`portakern.spec.dtypes`.

>>> class DotOut(NamedTuple):
...     c: Float[A, "m"]
>>> @spec(tiling={"block_m": Tile(16, 256)}, empty={"k": {"c": 0.0}})
... def dot(a: Float[A, "m k"], b: Float[A, "k"], *, precision: Literal["ieee", "tf32"] = "ieee") -> DotOut: ...
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import numpy as np

from portakern.errors import SpecError
from portakern.spec.annotations import (
    arguments,
    check_aliases,
    check_declaration,
    check_sample,
    leader,
    outputs,
)
from portakern.spec.dtypes import FLOATS, USUAL
from portakern.spec.fields import ArrayArg, Edge, Origin, Output, Rule, Sample, Sum, Tile, ValuesFn, WeightedMean, When
from portakern.spec.options import GRADIENT_DTYPE, Option

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = ["Spec", "no_narrower", "spec"]

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
PerOutput = tuple[Any, ...]
ErrorFn = Callable[["Call", PerOutput], PerOutput]
"""(call in float64 NumPy, reference outputs) -> an array per output, None for one that is unwanted or has no such
thing."""
StretchFn = Callable[["Call", np.random.Generator], Iterable[tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]]
""":meth:`Spec.stretch`."""
RewriteFn = Callable[["Call", Mapping[str, Any]], tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]]
""":meth:`Spec.rewrite`."""


@dataclass(eq=False)
class Spec(Generic[P]):
    """The declaration of an op, made by :func:`spec`; binding, dispatch, checker and command line read it."""

    name: str
    fn: Callable[P, Any]
    arrays: tuple[ArrayArg, ...]
    options: tuple[Option, ...]
    outputs: tuple[Output, ...]
    result: type
    dtypes: tuple[str, ...]
    tiling: Mapping[str, Tile]
    require: tuple[Rule, ...]
    doubts: tuple[Rule, ...]
    positive: tuple[str, ...]
    empty: Mapping[str, Mapping[str, float]]
    flops: Callable[[Call], float]
    vjp: str | None
    masks: tuple[str, ...]
    apart: tuple[str, ...] | Callable[[Mapping[str, Any], Sequence[str]], Sequence[str]] = ()
    sums: Mapping[str, tuple[Sum, ...]] = field(default_factory=dict)
    merges: Mapping[str, tuple[WeightedMean, ...]] = field(default_factory=dict)
    starts: Mapping[str, Origin] = field(default_factory=dict)
    autocast: str | None = None
    typical: Mapping[str, Any] = field(default_factory=dict)
    bound: ErrorFn | None = None
    spread: ErrorFn | None = None
    forced: ErrorFn | None = None
    region: Callable[[Call, str, tuple[int, ...]], str] | None = None
    stretches: StretchFn | None = None
    edges: dict[str, Edge] = field(default_factory=dict)
    laws: dict[str, Callable[..., None]] = field(default_factory=dict)
    drops: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    passes: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, When] = field(default_factory=dict)
    generators: dict[str, ValuesFn] = field(default_factory=dict)
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    measured: dict[str, ValuesFn] = field(default_factory=dict)
    measured_seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    budget: str = "extents"
    bytes_moved: Callable[[Call], float] | None = None
    rewriter: RewriteFn | None = None
    samples: dict[str, Sample] = field(default_factory=dict)
    mistakes: dict[str, Callable[[Call], Call | None]] = field(default_factory=dict)

    @property
    def lead(self) -> ArrayArg:
        """The array whose dtype is the op's: the first that is Float and always there, else the first of all."""
        return leader(self.arrays)

    @property
    def usual_dtypes(self) -> tuple[str, ...]:
        """The op's dtypes that are compiled and measured where nobody names one: bfloat16 and float32, or all that it
        has where it has neither."""
        return tuple(d for d in USUAL if d in self.dtypes) or self.dtypes

    def dropped(self, dim: str) -> tuple[str, Option] | None:
        """(the dimension that ``dim`` is but for one axis, the option that names this axis); None for any other."""
        if dim not in self.drops:
            return None
        option = self.option(self.drops[dim])
        return self.argument(str(option.axis_of)).dims[0].factors[0], option

    @property
    def extents(self) -> tuple[Option, ...]:
        """The options that are a dimension's extent (:class:`portakern.spec.Extent`)."""
        return tuple(o for o in self.options if o.extent)

    def extent_options(self, dims: Mapping[str, Any]) -> dict[str, Any]:
        """The options that are extents, of which dimensions are not at the default."""
        return {o.name: dims[o.name] for o in self.extents if o.name in dims and dims[o.name] != o.default}

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.fn.__doc__ or "")

    @property
    def shown(self) -> tuple[Output, ...]:
        """The outputs that callers are shown: all but those that are saved for the gradient alone."""
        return tuple(o for o in self.outputs if not o.saved)

    @property
    def dims(self) -> tuple[str, ...]:
        """Every dimension name of the signature but those that follow from others (``drops``), in order of first
        appearance."""
        shapes = [*(a.dims for a in self.arrays), *(o.dims for o in self.outputs)]
        return tuple(dict.fromkeys(f for dims in shapes for d in dims for f in d.names if f not in self.drops))

    @property
    def batch(self) -> str | None:
        """The dimension along which an op's samples lie, which do not see each other; None where the signature shows
        none.

        It is the leading dimension of the first array, if that is called batch, or is the variadic run of an array
        along one axis of which the op works."""
        first = self.arrays[0]
        lead = first.dims[0] if first.dims else None
        if lead is None or not (
            (lead.factors == ("batch",) and lead.alone)
            or (lead.variadic and any(o.axis_of == first.name for o in self.options))
        ):
            return None
        return lead.factors[0]

    def reads_under(self, name: str, options: Mapping[str, Any], otherwise: bool) -> bool:
        """Whether an argument is read under these options, the others at their defaults; ``otherwise``: of an argument
        that is not among ``reads``."""
        when = self.reads.get(name)
        return otherwise if when is None else when.holds({o.name: o.default for o in self.options} | dict(options))

    def apart_in(self, options: Mapping[str, Any], wants: Sequence[str], given: Collection[str]) -> tuple[str, ...]:
        """The dimensions whose indices are independent of each other under these options, the others at their defaults,
        for these outputs and with these arrays: those of ``apart``, but where an index counts from a start."""
        known = {o.name: o.default for o in self.options} | dict(options)
        found = self.apart(known, wants) if callable(self.apart) else self.apart
        return tuple(d for d in found if d not in self.starts or not self.starts[d].matters(known, given))

    @property
    def is_vjp(self) -> bool:
        """Whether this op computes another's gradients: its outputs are called ``d_x``."""
        return any(o.gradient_of for o in self.outputs)

    def option(self, name: str) -> Option:
        return next(o for o in self.options if o.name == name)

    def output(self, name: str) -> Output:
        return next(o for o in self.outputs if o.name == name)

    def argument(self, name: str) -> ArrayArg:
        return next(a for a in self.arrays if a.name == name)

    def tolerance(self, fn: ErrorFn) -> ErrorFn:
        """Decorator: ``fn(call, ref)`` gives the permitted absolute error of each element of each output (float64;
        +inf: any value is permitted)."""
        self.bound = fn
        return fn

    def sigma(self, fn: ErrorFn) -> ErrorFn:
        """Decorator: ``fn(call, ref)`` gives the RMS error from random rounding of each element of each output
        (float64; +inf: unknown).

        Stored as :attr:`spread`; :mod:`portakern.testing.statistics` compares typical errors with it."""
        self.spread = fn
        return fn

    def exact(self, fn: ErrorFn) -> ErrorFn:
        """Decorator: ``fn(call, ref)`` gives for each output a bool array of the elements that must equal the
        reference rounded once: no step of a right kernel rounds them. Stored as :attr:`forced`."""
        self.forced = fn
        return fn

    def edge(self, **where: Any) -> Callable[[F], F]:
        """Decorator: declare an :class:`Edge` with the name of the function, which plants its values; ``where``: Edge's
        other attributes. For a gradient op, the ending ``_vjp`` of the function's name is dropped."""

        def declare(plant: F) -> F:
            name = self._short(plant)
            self.edges[name] = Edge(name, inspect.cleandoc(plant.__doc__ or ""), plant=plant, **where)
            return plant

        return declare

    def law(self, fn: F) -> F:
        """Decorator: ``fn(run, draw)`` asserts a law between calls of an implementation. ``run(*arrays, **options)``
        calls it on NumPy arrays with the default tiling and returns NumPy arrays; ``draw`` is a
        :class:`portakern.testing.laws.Draw`."""
        self.laws[self._short(fn)] = fn
        return fn

    def _short(self, fn: Callable[..., Any]) -> str:
        """A function's name, of a gradient op's without ``_vjp``."""
        return fn.__name__.removesuffix("_vjp") if self.is_vjp else fn.__name__

    def values(self, name: str, *seen: str, measured: bool = False) -> Callable[[ValuesFn], ValuesFn]:
        """Decorator: ``fn(rng, shape, dims, options, *seen)`` makes the values of the array argument ``name``, for the
        checker and for samples: sorted offsets, a permutation, labels of which some are ignored.

        ``seen`` are names of arguments whose values are drawn before and handed to the function, in this order:
        lengths, say, that depend on offsets. They are float64 or int64 arrays, not to be written to, and None where
        the call has no such argument. Those that have a function of their own are declared first.

        ``rng`` is a NumPy generator, ``shape`` the array's shape; ``dims`` and ``options`` are those of the bound call.
        ``measured``: the function makes what the argument holds in a benchmark, such as sequences as long as a cache
        allows, and not what the checker draws. It sees the values that others hold there.

        The result has this shape, and values of the argument's dtype kind that obey the op's rules. Without a
        generator, integers are a few small numbers (int8, int16, uint8 and bool: all values) and floats come from a
        regime. A gradient op uses the generators of the forward op's arrays of the same names, unless it declares one.
        """
        for each in (name, *seen):
            if each not in {a.name for a in self.arrays}:
                names = ", ".join(a.name for a in self.arrays)
                raise SpecError(f"{self.name}: values are declared for {each!r}; expected one of {names}")
        made, sees = (self.measured, self.measured_seen) if measured else (self.generators, self.seen)
        late = [n for n, theirs in sees.items() if name in theirs]
        if late or name in seen:
            raise SpecError(
                f"{self.name}: the values of {(late or [name])[0]} see those of {name}; declare the values of {name} "
                "before, and without those that see them"
            )

        def declare(fn: ValuesFn) -> ValuesFn:
            made[name], sees[name] = fn, seen
            return fn

        return declare

    def stretch(self, fn: StretchFn) -> StretchFn:
        """Decorator: ``fn(call, rng)`` gives stretches of a large call along dimensions whose results see each other,
        and which ``apart`` therefore does not name: (dimension -> the indices of arguments and outputs, the options
        that the op has there).

        The op on such a stretch, under those options, gives what the call gives there, and no looser bound. It is asked
        of a call that wants one output. Kept as :attr:`stretches`.
        """
        self.stretches = fn
        return fn

    def rewrite(self, fn: RewriteFn) -> RewriteFn:
        """Decorator: ``fn(call, chosen)`` says what becomes of a call of which some indices are taken, by ``apart`` or
        ``stretch``, where values of arrays are places in others, such as offsets.

        ``chosen``: dimension -> the indices taken along it, of a run of axes a list of them. The function returns the
        indices along further dimensions that come along (dimension -> indices: the rows of the chosen sequences), and
        the new values of arrays (argument -> values: offsets of these rows alone). Integer arrays of the call are
        NumPy's. It is asked again with its own indices among ``chosen``, and then says the same. Of a large call of
        such an op the checker compares what is taken, and nothing else. Kept as :attr:`rewriter`.
        """
        self.rewriter = fn
        return fn

    def mistake(self, words: str) -> Callable[[F], F]:
        """Decorator: ``fn(call)`` gives the call in float64 that a kernel with a likely mistake computes in place of
        ``call``, by :meth:`portakern.core.call.Call.replace`; None where it would not differ. ``words``: the mistake,
        as a failure names it behind "looks like:". Kept in :attr:`mistakes`."""

        def declare(fn: F) -> F:
            self.mistakes[words] = fn
            return fn

        return declare

    def sample(self, name: str, **call: Any) -> Sample:
        """Declare a :class:`Sample`: a small named call for tests and benchmarks.

        >>> softmax.sample("rows", dims={"shape": (3, 5)})
        """
        if name in self.samples:
            raise SpecError(f"{self.name}: two samples are called {name!r}; rename one")
        made = Sample(name, **call)
        check_sample(self, made)
        self.samples[name] = made
        return made

    def locate(self, fn: Callable[[Call, str, tuple[int, ...]], str]) -> Callable[[Call, str, tuple[int, ...]], str]:
        """Decorator: ``fn(call, output, index)`` describes the region of the masks of an output's element, for failure
        messages."""
        self.region = fn
        return fn

    def __repr__(self) -> str:
        return f"<spec {self.name}({', '.join(a.name for a in self.arrays)})>"


def spec(
    *,
    tiling: Mapping[str, Tile],
    flops: Callable[[Call], float],
    dtypes: Sequence[str] = FLOATS,
    or_float32: Sequence[str] = (),
    or_dtypes: Mapping[str, Sequence[str]] | None = None,
    own_dtype: Sequence[str] = (),
    result_dtype: Mapping[str, str] | None = None,
    gradient_dtype: Sequence[str] = (),
    codes: Sequence[str] = (),
    returns: Mapping[str, str] | None = None,
    require: Sequence[Rule] = (),
    doubts: Sequence[Rule] = (),
    positive: Sequence[str] = (),
    empty: Mapping[str, Mapping[str, float]] | None = None,
    drops: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    also: Mapping[str, Sequence[str]] | None = None,
    passes: Mapping[str, str] | None = None,
    reads: Mapping[str, When] | None = None,
    masks: Sequence[str] = (),
    apart: Sequence[str] | Callable[[Mapping[str, Any], Sequence[str]], Sequence[str]] = (),
    sums: Mapping[str, str | Sum | Sequence[str | Sum]] | None = None,
    merges: Mapping[str, WeightedMean | Sequence[WeightedMean]] | None = None,
    starts: Mapping[str, str | Origin] | None = None,
    vjp: str | None = None,
    saved: type | None = None,
    autocast: Literal["lower", "float32"] | None = None,
    typical: Mapping[str, Any] | None = None,
    budget: Literal["extents", "flops"] = "extents",
    bytes_moved: Callable[[Call], float] | None = None,
) -> Callable[[Callable[P, Any]], Spec[P]]:
    """Declare an op from a typed signature (see the module's docstring).

    Args:
      tiling: tile name -> the powers of two that it may be.
      flops: floating-point operations of a bound call (options included: a causal mask halves them). They may depend on
        the values of integer arrays where these are known (:meth:`portakern.core.call.Call.integers`); of other calls
        it counts the most that there can be.
      dtypes: dtypes of ``Float`` arguments; within a call all have the same, the op's dtype. An op without a ``Float``
        argument has the dtype of its first array. An argument that may also hold integers, as in a product of int8, is
        annotated ``Num``.
      or_float32: float arguments that may be float32 in a 16-bit call: ``or_dtypes`` of float32.
      or_dtypes: float argument -> further dtypes that it may have beside the op's, such as keys of 8 bits in a cache
        beside queries of 16. A wider one is drawn in 16-bit calls alone.
      own_dtype: float arguments with any dtype of ``dtypes``, independent of the others.
      result_dtype: output name -> option that overrides its dtype.
      gradient_dtype: outputs of a gradient op that are sums, where the op is cut into parts. They are float32 under the
        option ``gradient_dtype="float32"``, which the op then has: so that parts are added before they are rounded.
      codes: outputs each number of which is right or wrong, such as codes of few bits. Their bound is that of the value
        before it is rounded, and right is each number to which a value within the bound rounds: one, but beside a tie.
      returns: output name -> bool option that requests it; other outputs are always returned.
      require: rules across arguments.
      doubts: rules that intended calls obey, such as the order of two extents. A call that breaks one runs, and the
        message is logged once per process.
      positive: dimensions whose extent 0 is refused.
      empty: reduced dimension, or option that names a dropped axis -> the value of each output when its extent is 0.
      drops: dimension -> the option whose axis it lacks: in ``drops={"rest": "axis"}``, with x of ``*shape`` and the
        option ``axis`` an axis of x, ``*rest`` is ``*shape`` without that axis. ``call.dims`` then holds ``rest``, and
        as ``axis`` the extent that is gone.
      aliases: output -> the input that it may overwrite, if a call names the input in ``overwrite=``. The output has
        its shape and dtype in every call, also one of ``or_dtypes`` that is not the op's. No other input is written to.
        An implementation that supports this declares it (``implements(..., overwrites=True)``) and reads
        :meth:`portakern.core.call.Call.overwritten`; others refuse such a call.
      also: output of a gradient op -> further inputs of the forward op with the same gradient, as in a sum of terms.
      passes: input of the forward op -> the cotangent that equals its gradient; the gradient op has no output for it.
      reads: optional argument of a gradient op, saved by the forward call -> the options under which it is read.
        Otherwise it must be absent, and the forward call neither computes nor saves it.
      masks: the arrays that are additive masks, where -inf masks a pair.
      apart: independent dimensions: the op on some indices of the arguments gives the results of these indices. An axis
        that an option names is not one. Or a function of the options and the wanted outputs that returns them. Large
        calls are compared in part along these dimensions. A dimension on an axis such as ``sequences+1``
        is one only with :meth:`Spec.rewrite`.
      sums: dimension -> the outputs that are sums over its parts: names, or :class:`portakern.spec.Sum`. Outputs that
        have the dimension lie side by side. A gradient op declares none of ``sums``, ``merges`` and ``starts``: what
        becomes of its parts follows from the forward op's (:mod:`portakern.core.partitions`).
      merges: dimension -> the outputs that are merged by the log-sum-exp of its parts
        (:class:`portakern.spec.WeightedMean`).
      starts: dimension -> the option that says where the indices of a call begin in a longer one, or a
        :class:`portakern.spec.Origin`, where a result depends on that.
      vjp: the name of the op that computes gradients (see :mod:`portakern.core.gradients`).
      saved: a named tuple of further outputs that only the gradient op reads, as optional arguments.
      autocast: the cast of float arguments (except float64) under torch.autocast: "lower": to its dtype, as for matrix
        products; "float32": to float32, as for reductions on accelerators (on CPUs they are not cast); None: no cast.
      typical: a typical call, for compiling and measuring without a given call: dimension -> extent, option -> value,
        optional array -> True if it is passed. A gradient op without one uses the forward op's.
      budget: what limits the extents that the checker draws: the product of all of them, or ``flops``, of a call with
        drawn integers and default options. The product is too strict for an op with many dimensions that no step works
        on together, such as pages and the keys of a sequence: most of its cases would be tiny.
      bytes_moved: the fewest bytes that a bound call reads and writes, of integer arrays as ``flops``; None: each array
        is read once, and each wanted output written once. For an op that leaves some of an array unread, such as
        pages of no sequence.
    """
    kept: dict[str, Any] = {"flops": flops, "vjp": vjp, "autocast": autocast, "budget": budget, "masks": tuple(masks)}
    kept |= {"bytes_moved": bytes_moved, "doubts": tuple(doubts), **_combined(apart, sums, merges, starts)}
    kept |= _frozen(tiling=tiling, empty=empty, typical=typical, drops=drops, aliases=aliases, passes=passes)
    kept |= _frozen(reads=reads, also=also and {name: tuple(of) for name, of in also.items()})

    def declare(fn: Callable[P, Any]) -> Spec[P]:
        hints = typing.get_type_hints(fn, include_extras=True)
        results = typing.get_type_hints(hints["return"], include_extras=True)
        arrays, options = arguments(fn, hints, tuple(dtypes), _others(or_float32, or_dtypes), own_dtype)
        check_aliases(fn.__name__, aliases or {}, {a.name: hints[a.name] for a in arrays}, results)
        named = {**(result_dtype or {}), **dict.fromkeys(gradient_dtype, GRADIENT_DTYPE.name)}
        found = outputs(fn.__name__, results, named, returns or {}, aliases or {}, dtypes, saved, codes)
        made: Spec[P] = Spec(
            name=fn.__name__,
            fn=fn,
            arrays=arrays,
            options=(*options, GRADIENT_DTYPE) if gradient_dtype else options,
            outputs=found,
            result=hints["return"],
            dtypes=leader(arrays).dtypes,
            require=_rules(require, reads or {}, leader(arrays).name if gradient_dtype else None),
            positive=(*positive, *(o.name for o in options if o.extent and o.range and o.range.lo >= 1)),
            **kept,
        )
        return check_declaration(made)

    return declare


def _others(or_float32: Sequence[str], or_dtypes: Mapping[str, Sequence[str]] | None) -> dict[str, Sequence[str]]:
    """The further dtypes of each argument that has some."""
    return {**dict.fromkeys(or_float32, ("float32",)), **(or_dtypes or {})}


def _combined(
    apart: Any, sums: Mapping[str, Any] | None, merges: Mapping[str, Any] | None, starts: Mapping[str, Any] | None
) -> dict[str, Any]:
    """``apart``, ``sums``, ``merges`` and ``starts`` as a spec holds them, of what they may be declared as."""
    several = {dim: [given] if isinstance(given, str | Sum) else [*given] for dim, given in (sums or {}).items()}
    found = {dim: tuple(Sum(s) if isinstance(s, str) else s for s in given) for dim, given in several.items()}
    merged = {
        dim: (given,) if isinstance(given, WeightedMean) else tuple(given) for dim, given in (merges or {}).items()
    }
    begin = {dim: Origin(given) if isinstance(given, str) else given for dim, given in (starts or {}).items()}
    return {"apart": apart if callable(apart) else tuple(apart), **_frozen(sums=found, merges=merged, starts=begin)}


def _frozen(**mappings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copies of mappings that nobody changes, empty for None."""
    return {name: types.MappingProxyType(dict(mapping or {})) for name, mapping in mappings.items()}


def _rules(require: Sequence[Rule], reads: Mapping[str, When], lead: str | None) -> tuple[Rule, ...]:
    """All rules of an op; ``lead``: its first array where gradients of it may be float32, else None."""
    wide = () if lead is None else (no_narrower(GRADIENT_DTYPE.name, lead),)
    return (*require, *(_given_when(name, when) for name, when in reads.items()), *wide)


def no_narrower(option: str, lead: str) -> Rule:
    """The rule that a call of float64, of which ``lead`` is the first array, asks for no results of float32."""
    return Rule(
        lambda call: call.options[option] is None or call.dtype != "float64",
        f"{option} is float32 and {lead} is float64: results would be narrower than what they are made of; leave it "
        "out",
    )


def _given_when(name: str, when: When) -> Rule:
    """The rule that an array is given where it is read, and nowhere else."""
    return Rule(
        lambda call: (call.arrays[name] is not None) == when.holds(call.options),
        f"{name} is read {when.words}: pass it then, and leave it out otherwise",
    )
