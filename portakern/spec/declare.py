"""What an op is: one typed Python signature, from which everything else is derived.

A spec is an annotated function under the :func:`spec` decorator. Array arguments are annotated in jaxtyping's notation
(https://docs.kidger.site/jaxtyping), of which this module reads: names (``d``), products (``kv_heads*group``), broadcast
axes (``#batch``) and one variadic run of axes (``*batch``). A leading ``batch`` or ``*batch`` counts
samples that do not see each other. Keyword-only arguments are options. The return annotation is
a ``NamedTuple`` whose fields are the outputs.

>>> class DotOut(NamedTuple):
...     c: Float[A, "m"]
>>> @spec(tiling={"block_m": Tile(16, 256)}, empty={"k": {"c": 0.0}})
... def dot(a: Float[A, "m k"], b: Float[A, "k"], *, precision: Literal["ieee", "tf32"] = "ieee") -> DotOut: ...
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

from portakern.spec.options import Option, option_from_annotation

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = ["ArrayArg", "Count", "Dim", "Edge", "Output", "Rule", "Spec", "Tile", "spec"]

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
PerOutput = tuple[Any, ...]
ErrorFn = Callable[["Call", PerOutput], PerOutput]
"""(call in float64 NumPy, reference outputs) -> an array per output, None for one that is unwanted or has no such thing."""

DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class Tile:
    """The powers of two from ``lo`` to ``hi``, both included: the values that a tile extent or a launch knob may take. ``of``: the dimension it divides."""

    lo: int
    hi: int
    of: str | None = None

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(1 << e for e in range(self.lo.bit_length() - 1, self.hi.bit_length()))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value in self.values


@dataclass(frozen=True)
class Count(Tile):
    """The whole numbers from ``lo`` to ``hi``: a knob that is no extent, such as a number of stages."""

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(range(self.lo, self.hi + 1))


@dataclass(frozen=True)
class Edge:
    """A named corner of the contract, that the checker visits several times: which calls reach it, and what is planted in their arrays.

    Attributes:
      name, doc: what must hold there.
      dims: dimension -> (least, largest) extent; the others are drawn freely, as are layouts and tilings.
      options: option -> value; the others are drawn freely.
      given, absent: optional arrays that must, or must not, be passed.
      stretched: array -> dimensions along which it has an extent of 1, and is broadcast.
      regime: how float values are drawn before planting.
      smallest_tiles: run with the smallest tiling that is legal, so that few elements make many tiles.
      plant: ``plant(arrays, rng, options)`` changes values in place (float64 and integer NumPy arrays by name).
    """

    name: str
    doc: str = ""
    dims: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    stretched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regime: str = "normal"
    smallest_tiles: bool = False
    plant: Callable[[dict[str, Any], Any, Mapping[str, Any]], None] | None = None


@dataclass(frozen=True)
class Rule:
    """A condition across arguments: ``holds(call)`` must be true, else the call is refused with ``message``."""

    holds: Callable[[Call], bool]
    message: str


@dataclass(frozen=True)
class Dim:
    """One axis of a shape in the signature: the product of ``factors``; ``broadcast``: an extent of 1 stretches; ``variadic``: any number of axes."""

    factors: tuple[str, ...]
    broadcast: bool = False
    variadic: bool = False

    @classmethod
    def parse(cls, text: str) -> Dim:
        body = text.lstrip("*#")
        prefix = text[: len(text) - len(body)]
        factors = tuple(body.split("*"))
        if (
            not all(f.isidentifier() for f in factors)
            or len(set(prefix)) != len(prefix)
            or ("*" in prefix and len(factors) > 1)
        ):
            raise ValueError(f"shape notation {text!r} is not one of: name, a*b, #name, *name, *#name")
        return cls(factors, "#" in prefix, "*" in prefix)

    def __str__(self) -> str:
        return ("*" if self.variadic else "") + ("#" if self.broadcast else "") + "*".join(self.factors)


@dataclass(frozen=True)
class ArrayArg:
    """An array argument: ``dtypes`` it may have; ``follows``: it must have the op's dtype (that of its first float array), or float32 where ``or_float32``.

    ``statistic``: it is float32, and float64 beside arrays of float64, as such outputs are."""

    name: str
    dims: tuple[Dim, ...]
    dtypes: tuple[str, ...]
    optional: bool
    follows: bool
    or_float32: bool
    statistic: bool

    @property
    def shape(self) -> str:
        return " ".join(map(str, self.dims))


@dataclass(frozen=True)
class Output:
    """An output: ``dtype`` None follows the op's dtype unless the option ``dtype_option`` names another; ``wanted_by``: the bool option that asks for it.

    ``gradient_of``: the input of the forward op whose gradient it is (an output called ``d_x`` is that of x)."""

    name: str
    dims: tuple[Dim, ...]
    dtype: str | None
    dtype_option: str | None
    wanted_by: str | None
    gradient_of: str | None

    @property
    def shape(self) -> str:
        return " ".join(map(str, self.dims))


@dataclass(eq=False)
class Spec(Generic[P]):
    """An op's declaration. Built by :func:`spec`; read by binding, dispatch, the checker and the command line."""

    name: str
    fn: Callable[P, Any]
    arrays: tuple[ArrayArg, ...]
    options: tuple[Option, ...]
    outputs: tuple[Output, ...]
    result: type
    dtypes: tuple[str, ...]
    tiling: Mapping[str, Tile]
    require: tuple[Rule, ...]
    positive: tuple[str, ...]
    empty: Mapping[str, Mapping[str, float]]
    flops: Callable[[Call], float]
    vjp: str | None
    masks: tuple[str, ...]
    autocast: str | None = None
    typical: Mapping[str, Any] = field(default_factory=dict)
    bound: ErrorFn | None = None
    spread: ErrorFn | None = None
    forced: ErrorFn | None = None
    region: Callable[[Call, str, tuple[int, ...]], str] | None = None
    edges: dict[str, Edge] = field(default_factory=dict)
    laws: dict[str, Callable[..., None]] = field(default_factory=dict)

    @property
    def doc(self) -> str:
        return inspect.cleandoc(self.fn.__doc__ or "")

    @property
    def dims(self) -> tuple[str, ...]:
        """Every dimension name of the signature, in order of first appearance."""
        shapes = [*(a.dims for a in self.arrays), *(o.dims for o in self.outputs)]
        return tuple(dict.fromkeys(f for dims in shapes for d in dims for f in d.factors))

    @property
    def batch(self) -> str | None:
        """The dimension along which an op's samples lie, which do not see each other; None where the signature shows none.

        It is the leading dimension of the first array, if that is called batch, or is the variadic run of an array along one axis of which the op works."""
        first = self.arrays[0]
        lead = first.dims[0] if first.dims else None
        if lead is None or not (
            lead.factors == ("batch",) or (lead.variadic and any(o.axis_of == first.name for o in self.options))
        ):
            return None
        return lead.factors[0]

    @property
    def is_vjp(self) -> bool:
        """Whether this op computes another's gradients: its outputs are called ``d_x``."""
        return any(o.gradient_of for o in self.outputs)

    def option(self, name: str) -> Option:
        return next(o for o in self.options if o.name == name)

    def tolerance(self, fn: ErrorFn) -> ErrorFn:
        """Decorator: ``fn(call, ref)`` gives, per output, the elementwise permitted absolute error (float64; +inf: anything goes)."""
        self.bound = fn
        return fn

    def sigma(self, fn: ErrorFn) -> ErrorFn:
        """Decorator: ``fn(call, ref)`` gives, per output, the RMS error that random rounding leaves at each element (float64; +inf: not known there).

        Kept as :attr:`spread`; :mod:`portakern.testing.statistics` holds typical errors to it."""
        self.spread = fn
        return fn

    def exact(self, fn: ErrorFn) -> ErrorFn:
        """Decorator: ``fn(call, ref)`` gives, per output, which elements (bool) must equal the reference rounded once, because no step of any right kernel
        can round them. Kept as :attr:`forced`."""
        self.forced = fn
        return fn

    def edge(self, **where: Any) -> Callable[[F], F]:
        """Decorator: an :class:`Edge` named like the function, which plants its values; ``where`` holds Edge's other attributes."""

        def declare(plant: F) -> F:
            self.edges[plant.__name__] = Edge(
                plant.__name__, inspect.cleandoc(plant.__doc__ or ""), plant=plant, **where
            )
            return plant

        return declare

    def law(self, fn: F) -> F:
        """Decorator: ``fn(run, draw)`` asserts what any implementation obeys across calls. ``run(*arrays, **options)`` calls it on NumPy arrays with its default
        tiling and gives NumPy arrays; ``draw`` is a :class:`portakern.testing.laws.Draw`."""
        self.laws[fn.__name__] = fn
        return fn

    def locate(self, fn: Callable[[Call, str, tuple[int, ...]], str]) -> Callable[[Call, str, tuple[int, ...]], str]:
        """Decorator: ``fn(call, output, index)`` says in words in which region of the masks an output's element lies, for failure messages."""
        self.region = fn
        return fn

    def __repr__(self) -> str:
        return f"<spec {self.name}({', '.join(a.name for a in self.arrays)})>"


def spec(
    *,
    tiling: Mapping[str, Tile],
    flops: Callable[[Call], float],
    dtypes: Sequence[str] = DTYPES,
    or_float32: Sequence[str] = (),
    own_dtype: Sequence[str] = (),
    result_dtype: Mapping[str, str] | None = None,
    returns: Mapping[str, str] | None = None,
    require: Sequence[Rule] = (),
    positive: Sequence[str] = (),
    empty: Mapping[str, Mapping[str, float]] | None = None,
    masks: Sequence[str] = (),
    vjp: str | None = None,
    autocast: Literal["lower", "float32"] | None = None,
    typical: Mapping[str, Any] | None = None,
) -> Callable[[Callable[P, Any]], Spec[P]]:
    """Declare an op from a typed signature (see the module's text).

    Args:
      tiling: tile names and the powers of two that each may take.
      flops: floating-point operations of a bound call (options included: a causal mask halves them).
      dtypes: dtypes that ``Float`` arguments may have; they all share one within a call.
      or_float32: float arguments that may be float32 beside 16-bit ones.
      own_dtype: float arguments whose dtype is any of ``dtypes``, whatever the others'.
      result_dtype: output name -> option that overrides its dtype.
      returns: output name -> bool option that asks for it; the others are always given.
      require: rules across arguments.
      positive: dimensions whose extent 0 is refused.
      empty: reduced dimension -> the value of each output when its extent is 0.
      masks: additive masks among the arrays, whose -inf hides a pair.
      vjp: the name of the op that computes gradients (see :mod:`portakern.core.gradients`).
      autocast: what torch.autocast makes of the float arguments, float64 apart: "lower" casts them to its dtype, as it does for matrix products, "float32" to
        that, as for reductions; None leaves them alone.
      typical: a call as users make it, for what compiles or measures without one of theirs: dimension -> extent, option -> value, optional array -> True where
        it is passed. A gradient op without one takes its forward's.
    """

    def declare(fn: Callable[P, Any]) -> Spec[P]:
        hints = typing.get_type_hints(fn, include_extras=True)
        arrays: list[ArrayArg] = []
        options: list[Option] = []
        for p in inspect.signature(fn).parameters.values():
            if p.kind is p.KEYWORD_ONLY:
                options.append(option_from_annotation(p.name, hints[p.name], p.default))
            else:
                arrays.append(_array_arg(p, hints[p.name], tuple(dtypes), p.name in or_float32, p.name in own_dtype))
        result = hints["return"]
        outputs = tuple(
            _output(name, hint, (result_dtype or {}).get(name), (returns or {}).get(name))
            for name, hint in typing.get_type_hints(result, include_extras=True).items()
        )
        return Spec(
            name=fn.__name__, fn=fn, arrays=tuple(arrays), options=tuple(options), outputs=outputs, result=result, dtypes=tuple(dtypes),
            tiling=types.MappingProxyType(dict(tiling)), require=tuple(require), positive=tuple(positive),
            empty=types.MappingProxyType(dict(empty or {})), flops=flops, vjp=vjp, masks=tuple(masks), autocast=autocast,
            typical=types.MappingProxyType(dict(typical or {})),
        )  # fmt: skip

    return declare


def _array_arg(
    p: inspect.Parameter, hint: Any, float_dtypes: tuple[str, ...], or_float32: bool, own_dtype: bool
) -> ArrayArg:
    optional = p.default is None
    if optional:
        hint = next(a for a in typing.get_args(hint) if a is not types.NoneType)
    floating = len(hint.dtypes) > 1 and "float32" in hint.dtypes
    dtypes = (
        tuple(d for d in float_dtypes if d in hint.dtypes)
        if floating
        else tuple(d for d in ("int32", "int64", "float32", "bool") if d in hint.dtypes)
    )
    return ArrayArg(
        p.name,
        _dims(hint),
        dtypes,
        optional,
        floating and not own_dtype,
        or_float32,
        statistic=dtypes == ("float32",) and not floating,
    )


def _output(name: str, hint: Any, dtype_option: str | None, wanted_by: str | None) -> Output:
    return Output(
        name,
        _dims(hint),
        hint.dtypes[0] if len(hint.dtypes) == 1 else None,
        dtype_option,
        wanted_by,
        name[2:] if name.startswith("d_") else None,
    )


def _dims(hint: Any) -> tuple[Dim, ...]:
    return tuple(Dim.parse(t) for t in hint.dim_str.split())
