"""The parts of a declaration: shapes and dtypes as a signature writes them, tiles, rules, calls that it names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = [
    "ArrayArg",
    "Count",
    "Dim",
    "Edge",
    "Origin",
    "Output",
    "Rule",
    "Sample",
    "Sum",
    "Tile",
    "ValuesFn",
    "WeightedMean",
    "When",
]

ValuesFn = Callable[..., Any]
"""``values(rng, shape, dims, options, *seen)``: an array of that shape for one argument. ``rng`` is a NumPy generator,
``dims`` and ``options`` are those of the bound call that it is for, ``seen`` the values of other arguments."""


@dataclass(frozen=True)
class Tile:
    """The values of a tile size or launch parameter: powers of two from ``lo`` to ``hi``, both included. ``of``: the
    dimension that the tile divides, or the option that names the axis."""

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
    """The integers from ``lo`` to ``hi``: the values of a launch parameter such as num_stages."""

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(range(self.lo, self.hi + 1))


@dataclass(frozen=True)
class Edge:
    """A named special case that the checker visits several times: the calls that have it, and the values planted in
    their arrays.

    Attributes:
      name; doc: what must hold.
      dims: dimension -> (least, largest) extent; an axis that an option names is listed under the option's name. Other
        dimensions, layouts and tilings are drawn freely.
      options: option -> value; the others are drawn freely.
      given, absent: optional arrays that must, or must not, be passed.
      stretched: array -> dimensions along which it has an extent of 1, and is broadcast.
      regime: how float values are drawn before planting.
      smallest_tiles: run with the smallest legal tiling, so that few elements make many tiles, and in turn with twice
        that.
      aliased: arguments that are passed as one and the same array.
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
    aliased: tuple[str, ...] = ()
    plant: Callable[[dict[str, Any], Any, Mapping[str, Any]], None] | None = None


@dataclass(frozen=True)
class Sample:
    """A small named call for tests and benchmarks (:mod:`portakern.testing.samples`).

    Attributes:
      name: its name, unique within the op.
      dims: dimension -> extent, of every dimension of the signature; a tuple of extents for a variadic one.
      options: option -> value, for options that are not at their default. A result's dtype is left out where the op's
        is wider.
      given: optional arrays that are passed.
      stretched: array -> dimensions along which it has an extent of 1, and is broadcast.
      wider: arrays that are float32 where the op's dtype has 16 bits.
    """

    name: str
    dims: Mapping[str, int | tuple[int, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    stretched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wider: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A condition across arguments: ``holds(call)`` must be true, else the call is refused with ``message``.

    ``values``: the rule reads values of arrays, e.g. "offsets rise". Binding does not check such a rule: this would
    synchronize with the accelerator on every call, and a traced call has no values. The behavior of a kernel is
    undefined if the caller breaks the rule. The oracle, which has the values on the host, checks it and refuses the
    call. The checker draws no case that breaks it. ``holds`` gets NumPy arrays, floats as float64.

    ``mends``: a function from the extents of all dimensions to new extents of some, with which the rule holds. The
    checker applies it to drawn extents. Without it, cases are drawn until one obeys the rule.
    """

    holds: Callable[[Call], bool]
    message: str
    values: bool = False
    mends: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class When:
    """A condition on options; ``words``: the same for a message, as in "it is read where ..."."""

    holds: Callable[[Mapping[str, Any]], bool]
    words: str


@dataclass(frozen=True)
class Sum:
    """An output that is the sum of what the op gives of each part along a dimension.

    Attributes:
      output: its name.
      once: optional arrays without the dimension that are added once: the first part alone has them.
      when: the options under which it is a sum; None: always.
    """

    output: str
    once: tuple[str, ...] = ()
    when: When | None = None


@dataclass(frozen=True)
class WeightedMean:
    """An output of parts along a dimension that is merged: the mean of what the parts give, each weighted by exp(lse).

    Attributes:
      output: its name.
      by: the output that is the natural logarithm of a part's weight. That of the merged output is the log-sum-exp of
        theirs. A part without weight (-inf) counts for nothing, whatever its output is.
      once: optional arrays without the dimension that count once, such as a further term of the weights' sum: the first
        part alone has them.
      when: the options under which it is merged; None: always.
    """

    output: str
    by: str
    once: tuple[str, ...] = ()
    when: When | None = None


def _begins_at_zero(dims: Mapping[str, Any]) -> int:
    return 0


@dataclass(frozen=True)
class Origin:
    """A dimension whose indices an op compares with others, as a causal mask does: a part along it must be told where
    in the whole it begins.

    Attributes:
      option: the option that says so; None: the op has none, and such calls are not cut along the dimension.
      when: the options under which it matters; None: always.
      default: the start of a call in which the option is None, from the call's dimensions.
      beside: optional arrays beside which it matters whatever the options are.
      total: the option that is the extent of the whole, where an op needs that too; None in a call that is the whole.
      in_gradient: the gradient alone has these options, and the op itself is not cut.
    """

    option: str | None = None
    when: When | None = None
    default: Callable[[Mapping[str, Any]], int] = _begins_at_zero
    beside: tuple[str, ...] = ()
    total: str | None = None
    in_gradient: bool = False

    def matters(self, options: Mapping[str, Any], given: Collection[str]) -> bool:
        """Whether it does under these options, all of them, in a call that has these arrays."""
        return self.when is None or self.when.holds(options) or any(name in given for name in self.beside)


@dataclass(frozen=True)
class Dim:
    """One axis of a shape in the signature: the product of ``factors``, and ``plus`` more; ``broadcast``: an extent of
    1 stretches; ``variadic``: any number of axes; ``per``: the only factor is cut into blocks of that dimension, and
    the axis has one index for each of them, the last of which may be short."""

    factors: tuple[str, ...]
    broadcast: bool = False
    variadic: bool = False
    plus: int = 0
    per: str | None = None

    @classmethod
    def parse(cls, text: str) -> Dim:
        body = text.lstrip("*#")
        prefix = text[: len(text) - len(body)]
        product, sign, plus = body.partition("+")
        product, cut, per = product.partition("/")
        factors = tuple(product.split("*"))
        if (
            not all(f.isidentifier() for f in factors)
            or len(set(prefix)) != len(prefix)
            or ("*" in prefix and len(factors) > 1)
            or (sign and (prefix or not plus.isdecimal() or int(plus) < 1))
            or (cut and (sign or "*" in prefix or len(factors) > 1 or not per.isidentifier()))
        ):
            raise ValueError(
                f"shape notation {text!r} is not one of: name, a*b, name+1, name/width, "
                "#name, #name/width, *name, *#name"
            )
        return cls(factors, "#" in prefix, "*" in prefix, int(plus or 0), per or None)

    @property
    def name(self) -> str:
        """The notation without its marks: a name, ``a*b``, ``name+1`` or ``name/width``."""
        return "*".join(self.factors) + (f"+{self.plus}" if self.plus else f"/{self.per}" if self.per else "")

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions that the notation names."""
        return (*self.factors, self.per) if self.per else self.factors

    @property
    def alone(self) -> bool:
        """Whether the extent is one dimension's, and neither a product, a sum nor a number of blocks."""
        return len(self.factors) == 1 and not self.plus and not self.per

    def __str__(self) -> str:
        return ("*" if self.variadic else "") + ("#" if self.broadcast else "") + self.name


@dataclass(frozen=True)
class ArrayArg:
    """An array argument: ``dtypes`` it may have; ``follows``: it must have the op's dtype (that of :attr:`Spec.lead`),
    or one of ``or_dtypes``.

    ``statistic``: it is float32, and float64 beside arrays of float64, as such outputs are."""

    name: str
    dims: tuple[Dim, ...]
    dtypes: tuple[str, ...]
    optional: bool
    follows: bool
    or_dtypes: tuple[str, ...]
    statistic: bool

    @property
    def shape(self) -> str:
        return " ".join(map(str, self.dims))


@dataclass(frozen=True)
class Output:
    """An output: ``dtype`` None follows the op's dtype unless the option ``dtype_option`` names another; ``wanted_by``:
    the bool option that asks for it.

    ``gradient_of``: the input of the forward op whose gradient it is (an output called ``d_x`` is that of x);
    ``alias_of``: the input over which it may be written, and whose shape and dtype it has; ``saved``: only the gradient
    op reads it, no caller is shown it, and an implementation that has none of it gives None; ``codes``: it is judged as
    a set of codes (:func:`portakern.spec.tolerance.compare`)."""

    name: str
    dims: tuple[Dim, ...]
    dtype: str | None
    dtype_option: str | None
    wanted_by: str | None
    gradient_of: str | None
    alias_of: str | None = None
    saved: bool = False
    codes: bool = False

    @property
    def shape(self) -> str:
        return " ".join(map(str, self.dims))
