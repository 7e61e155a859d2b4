"""Reading a spec's signature: annotations become arguments and outputs, and what contradicts itself is told at once."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

from portakern.errors import SpecError
from portakern.spec.dtypes import ANY_INDEX, DTYPES
from portakern.spec.fields import ArrayArg, Dim, Origin, Output, Sample, Sum, WeightedMean
from portakern.spec.options import GRADIENT_DTYPE, Option, option_from_annotation

if TYPE_CHECKING:
    from portakern.spec.declare import Spec

__all__ = ["arguments", "check_aliases", "check_declaration", "check_sample", "leader", "outputs"]

P = ParamSpec("P")


def arguments(
    fn: Callable[..., Any],
    hints: Mapping[str, Any],
    dtypes: tuple[str, ...],
    or_dtypes: Mapping[str, Sequence[str]],
    own_dtype: Sequence[str],
) -> tuple[tuple[ArrayArg, ...], tuple[Option, ...]]:
    """The array arguments and the options of a signature; the others are as of :func:`portakern.spec.spec`."""
    _check_dtypes(fn.__name__, dtypes)
    arrays: list[ArrayArg] = []
    options: list[Option] = []
    for p in inspect.signature(fn).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            options.append(option_from_annotation(p.name, hints[p.name], p.default))
        else:
            optional = p.default is None
            hint = _without_none(hints[p.name]) if optional else hints[p.name]
            named = _named(fn.__name__, p.name, hint)
            others, own = tuple(or_dtypes.get(p.name, ())), p.name in own_dtype
            if _is_float(named):
                _check_holds(fn.__name__, p.name, named, dtypes)
            arrays.append(_array_argument(p.name, hint, named, optional, dtypes, others, own))
    _check_others(fn.__name__, or_dtypes, arrays)
    if not any(a.follows for a in arrays):  # no Float argument: the first array's dtype is the op's
        arrays[0] = replace(arrays[0], follows=True, statistic=False)
    return tuple(arrays), tuple(options)


def _array_argument(
    name: str,
    hint: Any,
    named: tuple[str, ...],
    optional: bool,
    float_dtypes: tuple[str, ...],
    or_dtypes: tuple[str, ...],
    own_dtype: bool,
) -> ArrayArg:
    """An argument from the dtypes that its annotation names; ``float_dtypes``: what a Float one may be."""
    floating = _is_float(named)
    if floating:
        dtypes = float_dtypes
    else:
        dtypes = tuple(d for d in ANY_INDEX if d in named) if len(named) > 1 else named
    statistic = dtypes == ("float32",) and not floating
    return ArrayArg(name, _dims(hint), dtypes, optional, floating and not own_dtype, or_dtypes, statistic)


def outputs(
    op: str,
    results: Mapping[str, Any],
    dtype_options: Mapping[str, str],
    wanted_by: Mapping[str, str],
    aliases: Mapping[str, str],
    dtypes: Sequence[str],
    saved: type | None = None,
    codes: Sequence[str] = (),
) -> tuple[Output, ...]:
    """The outputs from the annotations of their fields, and behind them those of ``saved``; the others are as of
    :func:`portakern.spec.spec`."""
    found = []
    for name, hint in results.items():
        named = _named(op, name, hint)
        if _is_float(named) and name not in dtype_options:
            _check_holds(op, name, named, dtypes)
        if not (_is_float(named) or len(named) == 1 or name in aliases):
            raise SpecError(
                f"{op}: the output {name} may be {' or '.join(named)}; expected one dtype: name it, as in Int32"
            )
        dtype = named[0] if len(named) == 1 else None
        gradient_of = name[2:] if name.startswith("d_") else None
        found.append(
            Output(
                name, _dims(hint), dtype, dtype_options.get(name), wanted_by.get(name), gradient_of, aliases.get(name),
                codes=name in codes,
            )
        )  # fmt: skip
    _check_summed(op, dtype_options, found)
    unknown = [name for name in codes if name not in results]
    if unknown:
        raise SpecError(f"{op}: codes names {unknown[0]}; expected some of the outputs {', '.join(results)}")
    if saved is not None:
        more = outputs(op, typing.get_type_hints(saved, include_extras=True), {}, {}, {}, dtypes)
        found += [replace(o, saved=True) for o in more]
    return tuple(found)


def leader(arrays: Sequence[ArrayArg]) -> ArrayArg:
    """The array whose dtype is the op's."""
    return next((a for a in arrays if a.follows and not a.optional), arrays[0])


def _named(op: str, name: str, hint: Any) -> tuple[str, ...]:
    """The dtypes among those of the table that an annotation names."""
    names = getattr(hint, "dtypes", None)
    if not isinstance(names, (tuple, list)):
        raise SpecError(
            f"{op}: {name} is annotated {hint!r}; expected one of jaxtyping's with a shape: Float[A, 'm n'] or "
            "Int32[A, 'n'], and '| None' if the default is None"
        )
    found = tuple(d for d in DTYPES if d in names)
    if not found:
        raise SpecError(
            f"{op}: {name} is {' or '.join(map(str, names))}; expected a dtype that a spec can name: "
            f"{', '.join(DTYPES)}"
        )
    return found


def _is_float(named: tuple[str, ...]) -> bool:
    """Whether these are the dtypes of ``Float``, which stands for the op's own."""
    return len(named) > 1 and "float32" in named


def _without_none(hint: Any) -> Any:
    return next((a for a in typing.get_args(hint) if a is not types.NoneType), hint)


def _dims(hint: Any) -> tuple[Dim, ...]:
    return tuple(Dim.parse(t) for t in hint.dim_str.split())


def _check_dtypes(op: str, dtypes: Sequence[str]) -> None:
    """SpecError where the op's dtype would be none of the table, or no number's."""
    for name in dtypes:
        if name not in DTYPES or name == "bool":
            known = ", ".join(d for d in DTYPES if d != "bool")
            raise SpecError(f"{op}: dtypes names {name!r}; expected dtypes among {known}")


def _check_others(op: str, or_dtypes: Mapping[str, Sequence[str]], arrays: Sequence[ArrayArg]) -> None:
    """SpecError where another dtype is no float's, or of an array that does not have the op's own."""
    follow = [a.name for a in arrays if a.follows]
    for name, dtypes in or_dtypes.items():
        if name not in follow:
            raise SpecError(f"{op}: or_dtypes names {name}; expected Float arguments among {', '.join(follow)}")
        for dtype in dtypes:
            if dtype not in DTYPES or not DTYPES[dtype].floating:
                raise SpecError(f"{op}: or_dtypes gives {name} the dtype {dtype!r}; expected floating-point dtypes")


def _check_holds(op: str, name: str, named: Sequence[str], dtypes: Sequence[str]) -> None:
    """SpecError where an array that has the op's dtype is annotated as what cannot be each of these."""
    for dtype in dtypes:
        if dtype not in named:
            raise SpecError(
                f"{op}: {name} has the op's dtype, which may be {dtype}, and its annotation has none such; annotate it "
                "Num in place of Float, or name its dtype"
            )


def check_aliases(
    op: str, aliases: Mapping[str, str], arguments: Mapping[str, Any], results: Mapping[str, Any]
) -> None:
    """SpecError where an output that may take an input's memory is not of its form.

    Args:
      aliases: output -> input; arguments, results: name -> annotation.
    """
    for out, name in aliases.items():
        if out not in results or name not in arguments:
            raise SpecError(
                f"{op}: aliases has {out} over {name}; expected an output among "
                f"{', '.join(results)} and an array argument among {', '.join(arguments)}"
            )
        ours, theirs = results[out], _without_none(arguments[name])
        same = _dims(ours) == _dims(theirs) and _named(op, out, ours) == _named(op, name, theirs)
        if not same or any(d.broadcast for d in _dims(theirs)):
            raise SpecError(
                f"{op}: {out} cannot overwrite {name}: it is {_written(ours)} and {name} is "
                f"{_written(theirs)}; declare both with one annotation, without axes that broadcast"
            )
    if len(set(aliases.values())) < len(aliases):
        raise SpecError(f"{op}: aliases has two outputs over one input; expected one output for each")


def _check_summed(op: str, dtype_options: Mapping[str, str], outputs: Sequence[Output]) -> None:
    """SpecError where ``gradient_dtype`` names what is no gradient of the op's dtype."""
    known = [o.name for o in outputs if o.gradient_of and o.dtype is None and o.alias_of is None]
    for name, option in dtype_options.items():
        if option == GRADIENT_DTYPE.name and name not in known:
            raise SpecError(
                f"{op}: gradient_dtype names {name!r}; expected gradients that follow the op's dtype and are written "
                f"over no input: {', '.join(known) or '(none)'}"
            )


def _written(hint: Any) -> str:
    """An annotation as a signature has it."""
    return f"{hint.__name__.partition('[')[0]}[..., {hint.dim_str!r}]"


def check_declaration(spec: Spec[P]) -> Spec[P]:
    """The spec; SpecError where its parts contradict each other."""
    _check_lead(spec)
    for name in spec.reads:
        if name not in {a.name for a in spec.arrays if a.optional}:
            raise SpecError(
                f"{spec.name}: reads names {name}; expected an optional array argument: give it the default None"
            )
    for dim in spec.drops:
        _check_drop(spec, dim)
    _check_extents(spec)
    _check_names(spec)
    _check_outputs(spec)
    _check_partitions(spec)
    return spec


def _check_partitions(spec: Spec[Any]) -> None:
    """What becomes of parts: ``sums``, ``merges`` and ``starts``."""
    words = {"sums": spec.sums, "merges": spec.merges, "starts": spec.starts}
    for word, declared in words.items():
        if declared and spec.is_vjp:
            raise SpecError(
                f"{spec.name}: {word} names {', '.join(declared)} in an op of gradients; leave it out: what becomes of "
                "parts of gradients follows from the forward op"
            )
        for dim in declared:
            _check_partitioned(spec, word, dim)
    for dim in {*spec.sums} & {*spec.merges}:
        raise SpecError(f"{spec.name}: sums and merges both name {dim}; expected a dimension in one of them")
    for dim, sums in spec.sums.items():
        for s in sums:
            _check_kind(spec, "sums", dim, s, Sum, "a name of an output or Sum(output)")
            _check_combined(spec, "sums", dim, s.output, s.once)
    for dim, merges in spec.merges.items():
        for m in merges:
            _check_kind(spec, "merges", dim, m, WeightedMean, "WeightedMean(output, by=output)")
            _check_combined(spec, "merges", dim, m.output, m.once)
            _check_combined(spec, "merges", dim, m.by, ())
            dims = {o.name: {d.name for d in o.dims} for o in spec.outputs}
            if not dims[m.by] <= dims[m.output]:
                raise SpecError(
                    f"{spec.name}: merges[{dim!r}] weighs {m.output} by {m.by}, which has dimensions that {m.output} "
                    "lacks; expected an output with some of its dimensions"
                )
            if m.by == m.output:
                raise SpecError(
                    f"{spec.name}: merges[{dim!r}] weighs {m.output} by itself; expected another output, the logarithm "
                    "of its weight"
                )
    for dim, start in spec.starts.items():
        _check_start(spec, dim, start)


def _check_kind(spec: Spec[Any], word: str, dim: str, given: Any, kind: type, expected: str) -> None:
    if not isinstance(given, kind):
        raise SpecError(f"{spec.name}: {word}[{dim!r}] has {given!r}; expected {expected}")


def _check_partitioned(spec: Spec[Any], word: str, dim: str) -> None:
    """A dimension along which parts are taken is the arguments', and alone on each axis or the first of a product."""
    axes = [d for a in spec.arrays for d in a.dims if dim in d.factors]
    if not axes:
        known = ", ".join(dict.fromkeys(f for a in spec.arrays for d in a.dims for f in d.factors))
        raise SpecError(f"{spec.name}: {word} names the dimension {dim!r}; expected one of the arguments': {known}")
    wrong = next((d for d in axes if d.variadic or d.plus or d.factors[0] != dim), None)
    if wrong is not None:
        raise SpecError(
            f"{spec.name}: {word} names {dim!r}, which is {str(wrong)!r} in an argument; expected a dimension of one "
            "axis, alone or the first of a product"
        )


def _check_combined(spec: Spec[Any], word: str, dim: str, name: str, once: Sequence[str]) -> None:
    """What is summed or merged is an output without the dimension, and what counts once an optional array without."""
    o = next((o for o in spec.outputs if o.name == name), None)
    if o is None:
        outs = ", ".join(o.name for o in spec.outputs)
        raise SpecError(f"{spec.name}: {word}[{dim!r}] names {name!r}; expected outputs among {outs}")
    if any(dim in d.factors for d in o.dims):
        raise SpecError(
            f"{spec.name}: {word}[{dim!r}] names {name}, which is ({o.shape}); what has the dimension lies side by "
            "side: expected an output without it"
        )
    free = [a.name for a in spec.arrays if a.optional and not any(dim in d.factors for d in a.dims)]
    for each in once:
        if each not in free:
            raise SpecError(
                f"{spec.name}: once of {word}[{dim!r}] names {each!r}; expected optional arrays without {dim}: "
                f"{', '.join(free) or '(none)'}"
            )


def _check_start(spec: Spec[Any], dim: str, start: Any) -> None:
    _check_kind(spec, "starts", dim, start, Origin, "the name of an option or Origin(option)")
    for name in start.beside:
        optional = [a.name for a in spec.arrays if a.optional]
        if name not in optional:
            raise SpecError(
                f"{spec.name}: beside of starts[{dim!r}] names {name!r}; expected optional arrays: "
                f"{', '.join(optional) or '(none)'}"
            )
    if start.option is None or start.in_gradient:
        return
    ints = [o.name for o in spec.options if o.kind == "int" and not o.axis_of and not o.extent]
    if start.option not in ints:
        raise SpecError(
            f"{spec.name}: starts[{dim!r}] names {start.option!r}; expected an option that is an integer: "
            f"{', '.join(ints) or '(none)'}"
        )


def _check_outputs(spec: Spec[Any]) -> None:
    """Each output has a shape in every call."""
    optional = {a.name for a in spec.arrays if a.optional}
    for o in spec.outputs:
        like = o.gradient_of if o.gradient_of in optional else o.alias_of
        solved = {f for a in spec.arrays if a.name == like or not a.optional for d in a.dims for f in d.factors}
        missing = {f for d in o.dims for f in d.factors} - solved - set(spec.drops) - {o.name for o in spec.extents}
        late = missing & {f for a in spec.arrays for d in a.dims for f in d.factors}
        if late:
            raise SpecError(
                f"{spec.name}: {min(late)!r} of {o.name} is a dimension of optional arrays alone, and without them "
                f"{o.name} has no shape; declare it as an axis of an argument that is required"
            )
        for name in missing:
            raise SpecError(
                f"{spec.name}: {name!r} of {o.name} is not an argument's dimension; declare it as an axis of an "
                f"argument, or as drops={{{name!r}: option}} (a shape without the axis that the option names)"
            )


def _check_extents(spec: Spec[Any]) -> None:
    """Options that are extents, and axes that count blocks of such an extent."""
    dims = [(a.name, d, a.optional) for a in spec.arrays for d in a.dims] + [
        (o.name, d, False) for o in spec.outputs for d in o.dims
    ]
    alone = {d.factors[0] for _, d, optional in dims if d.alone and not (d.broadcast or d.variadic or optional)}
    for name, d, _ in dims:
        if d.per and not (d.per in {o.name for o in spec.extents} and d.factors[0] in alone):
            raise SpecError(
                f"{spec.name}: {d} of {name} counts blocks of {d.factors[0]}; expected an axis {d.factors[0]!r} of a "
                f"required argument and an option {d.per}: Annotated[int, Extent()]"
            )
    for o in spec.extents:
        if o.kind != "int" or o.optional or o.range is None or o.range.lo < 0 or o.axis_of:
            raise SpecError(
                f"{spec.name}: the option {o.name} is an extent; expected Annotated[int, Extent()], and with a Range "
                "numbers of at least 0"
            )
        axes = [d for dims in (*(a.dims for a in spec.arrays), *(r.dims for r in spec.outputs)) for d in dims]
        if o.name not in spec.dims or any(d.variadic for d in axes if o.name in d.factors):
            raise SpecError(
                f"{spec.name}: the option {o.name} is the extent of no axis; write {o.name!r} in the shape of an "
                f"argument or output, alone or in a product: 'blocks*{o.name}'"
            )


RESERVED = {
    "wants": "a call of a gradient op names its outputs with it",
    "overwrite": "a call names with it the arrays that results are written over",
    "backend": "torch.ops.portakern has it",
    "variant": "torch.ops.portakern has it",
    "tiling": "torch.ops.portakern has it",
}
"""Keywords of calls that no spec declares -> what they are for."""


def _check_names(spec: Spec[Any]) -> None:
    """Whatever a typical call, a sample or the command line names is one thing, and no keyword of every op."""
    kinds = {a.name: "array" for a in spec.arrays} | {o.name: "option" for o in spec.options}
    for name, kind in kinds.items():
        if name in RESERVED:
            raise SpecError(
                f"{spec.name}: {kind} {name!r} has the name of a keyword that calls have beside the spec's own "
                f"({RESERVED[name]}); rename it"
            )
        if name.startswith("_"):
            raise SpecError(
                f"{spec.name}: {kind} {name!r} begins with an underscore, as names of generated code do; rename it"
            )
    for name in (*(o.name for o in spec.options), *(a.name for a in spec.arrays if a.optional)):
        if name in spec.dims and name not in {o.name for o in spec.extents}:
            is_option = kinds[name] == "option"
            raise SpecError(
                f"{spec.name}: {name!r} is an {'option' if is_option else 'optional array'} and a "
                "dimension; rename one: a typical call and the command line give values to both by name"
                + (", or annotate it Annotated[int, Extent()] if it is that dimension's extent" if is_option else "")
            )


def _check_lead(spec: Spec[Any]) -> None:
    """The op's dtype must be known wherever something follows it."""
    lead = spec.lead
    if lead.optional:
        raise SpecError(f"{spec.name}: {lead.name} is optional, and no array is required; make one required")
    late = [a.name for a in spec.arrays if a.follows and a.optional and not lead.follows]
    if late:
        raise SpecError(
            f"{spec.name}: {late[0]} is an optional Float, and no Float argument is required, therefore the op "
            f"has no dtype; make one required, name {late[0]}'s dtype (Float32), or list it in own_dtype"
        )
    floating = any(DTYPES[d].floating for d in lead.dtypes)
    for o in spec.outputs:
        if o.dtype is None and o.alias_of is None and o.gradient_of is None and not floating:
            raise SpecError(f"{spec.name}: the output {o.name} is Float, but no argument is; name its dtype: Float32")


def _check_drop(spec: Spec[Any], dim: str) -> None:
    """A dimension that is another but for one axis."""
    name = spec.drops[dim]
    option = next((o for o in spec.options if o.name == name and o.axis_of), None)
    if option is None:
        raise SpecError(
            f"{spec.name}: drops[{dim!r}] is {name!r}; expected the name of an option that is an axis: "
            "Annotated[int, Axis(argument)]"
        )
    of = spec.argument(str(option.axis_of))
    if (
        of.optional
        or len(of.dims) != 1
        or not of.dims[0].variadic
        or of.dims[0].broadcast
        or of.dims[0].factors == (dim,)
    ):
        raise SpecError(
            f"{spec.name}: drops[{dim!r}] leaves out an axis of {of.name}, which is ({of.shape}); expected a required "
            "argument of one run of axes, '*shape'"
        )
    shapes = [*(a.dims for a in spec.arrays), *(o.dims for o in spec.outputs)]
    uses = [d for dims in shapes for d in dims if dim in d.factors]
    if any(not d.variadic or d.broadcast for d in uses) or not uses:
        raise SpecError(f"{spec.name}: {dim!r} is any number of axes; write it '*{dim}' in an argument or an output")
    if name in spec.dims:
        raise SpecError(
            f"{spec.name}: {name!r} is an option and a dimension; rename one: it is the dropped axis's extent"
        )
    whole = of.dims[0].factors[0]
    shown = {f for o in spec.outputs for d in o.dims for f in d.factors}
    if whole not in shown and name not in spec.empty and name not in spec.positive:
        raise SpecError(
            f"{spec.name}: no output has the axis that {name} names; declare the result for extent 0, "
            f"empty={{{name!r}: {{output: value}}}}, or refuse it, positive=({name!r},)"
        )


def check_sample(spec: Spec[Any], sample: Sample) -> None:
    """SpecError where a sample is no call of the op."""
    where = f"{spec.name}: sample {sample.name!r}"
    if set(sample.dims) != set(spec.dims):
        got, expected = ", ".join(sample.dims) or "nothing", ", ".join(spec.dims)
        raise SpecError(f"{where} gives an extent to {got}; expected every dimension: {expected}")
    optional = [a.name for a in spec.arrays if a.optional]
    lists = {
        "given": (sample.given, optional),
        "stretched": (sample.stretched, [a.name for a in spec.arrays]),
        "wider": (sample.wider, [a.name for a in spec.arrays if "float32" in a.or_dtypes]),
        "options": (sample.options, [o.name for o in spec.options]),
    }
    for part, (names, known) in lists.items():
        for name in names:
            if name not in known:
                raise SpecError(f"{where}: {part} names {name!r}; expected some of: {', '.join(known) or '(none)'}")
    for name, value in sample.options.items():
        option = spec.option(name)
        if option.extent:
            raise SpecError(f"{where}: the option {name} is an extent; give it among dims alone")
        try:
            option.check(value)
        except ValueError:
            raise SpecError(f"{where}: {name} is {value!r}; expected {option.expected}") from None
