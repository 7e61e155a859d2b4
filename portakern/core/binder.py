"""Binding: the arguments of one call, checked against the spec and solved for its dimensions.

:func:`bind` runs one straight-line Python function per spec that :func:`binder` writes and compiles (as ``dataclasses``
and ``attrs`` do): the same checks through a generic ``*args`` binder cost 15-19 us for attention against about 4 us
here. No shape is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from portakern.core import codegen, refusals
from portakern.core.call import Call
from portakern.core.framework import BY_TYPE, DTYPE_NAME, framework_of
from portakern.core.observe import doubt
from portakern.errors import SpecError
from portakern.spec import ArrayArg, Dim, Output, Spec

__all__ = ["bind", "binder", "misfit", "sibling", "unbound", "unchecked"]


def bind(spec: Spec[Any], /, *args: Any, **kwargs: Any) -> Call:
    """Check the arguments of a call and solve for its dimensions, without running anything.

    Raises:
      SpecError: the call is wrong on every backend. UnsupportedError: arrays that no kernel can read.
    """
    call = unchecked(spec, *args, **kwargs)
    call.framework.check(call)
    return call


def unchecked(spec: Spec[Any], /, *args: Any, **kwargs: Any) -> Call:
    """:func:`bind` for arrays of any standing: abstract ones, or ones that want a gradient."""
    try:
        return binder(spec)(*args, **kwargs)
    except (TypeError, RuntimeError) as e:
        raise unbound(spec, e, args, kwargs) from None


def sibling(call: Call, spec: Spec[Any], /, *arrays: Any, **options: Any) -> Call:
    """A call of another op on arrays that live where this call's do, for its target: what an implementation hands to
    another op's."""
    found = unchecked(spec, *arrays, **options)
    return found.replace(target=call.target, interpret=call.interpret, concrete=call.concrete)


def unbound(spec: Spec[Any], error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception:
    """What a failed binding means to the caller: ``error``, or one that says it in the op's words."""
    if isinstance(error, RuntimeError):
        return _unreadable(spec, args, kwargs, error)
    if isinstance(error, SpecError) or (
        error.__traceback__ and error.__traceback__.tb_next
    ):  # raised within the binder
        return error
    return misfit(spec, str(error).replace("bind()", spec.name + "()"))


def misfit(spec: Spec[Any], what: str) -> SpecError:
    """The error for arguments that the signature does not have."""
    arrays = ", ".join(a.name for a in spec.arrays)
    options = ", ".join(o.name for o in spec.options)
    return SpecError(f"{what}; arrays: {arrays}; keyword options: {options}")


def _unreadable(spec: Spec[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> Exception:
    """The error for an array that cannot even say its shape (a nested or uninitialised tensor); ``error`` itself where
    there is none."""
    for name, value in [*zip((a.name for a in spec.arrays), args, strict=False), *kwargs.items()]:
        try:
            _ = getattr(value, "shape", None)
        except Exception as e:
            why = str(e).partition("\n")[0]
            return SpecError(
                f"{spec.name}: {name} is a {type(value).__name__} without a shape ({why}); expected a dense array with "
                "values in it"
            )
    return error


@functools.cache
def binder(spec: Spec[Any]) -> Callable[..., Call]:
    """Compile ``spec``'s signature into a function from its arguments to a :class:`Call`."""
    source, env = _Writer(spec).write()
    bind: Callable[..., Call] = codegen.written(f"binder of {spec.name}", source, env, "bind")
    bind.__doc__ = spec.doc
    return bind


class _Writer:
    """Writes the source of one binder. ``known`` holds the dimensions solved up to this line; a product with an unknown
    dimension is solved after whatever may say more of its dimensions.

    ``stretching`` are those of which only axes that broadcast have been seen: a later one may have more than 1. Those
    of ``uncertain`` stand in optional arrays alone, and are None until one is given.

    The required arguments come first, beginning with the one whose dtype is the op's, then the optional arguments, then
    options. If an option names an axis that a dimension lacks, options come before the arrays with this dimension.

    Every name that it writes begins with an underscore, beside those of the signature, which never do.
    """

    def __init__(self, spec: Spec[Any]) -> None:
        self.spec = spec
        self.known: dict[str, str] = {}  # dimension -> "argument, axis" that defined it, for messages
        self.waiting: list[tuple[ArrayArg, int, Dim, str]] = []
        self.stretching: set[str] = set()
        required = [d for a in spec.arrays if not a.optional for d in a.dims]
        certain = {f for d in required for f in d.factors} | {o.name for o in spec.extents} | set(spec.drops)
        self.alone = {d.factors[0] for d in required if len(d.factors) == 1 and not (d.broadcast or d.per)}
        self.uncertain = {f for a in spec.arrays for d in a.dims for f in d.factors} - certain
        self.given: set[str] = set()  # of these, what the array at hand has said
        self.lines: list[str] = []
        self.env: dict[str, Any] = {
            "_SPEC": spec,
            "_Call": Call,
            "_DTYPE_NAME": DTYPE_NAME,
            "_BY_TYPE": BY_TYPE,
            "_framework_of": framework_of,
            "_SpecError": SpecError,
            "_len": len,
            "_tuple": tuple,
            "_int": int,
            **{f"_{name}": getattr(refusals, name) for name in refusals.__all__},
        }

    def emit(self, text: str, indent: int = 1) -> None:
        self.lines.append("    " * indent + text)

    def write(self) -> tuple[str, dict[str, Any]]:
        s = self.spec
        required = sorted((a for a in s.arrays if not a.optional), key=lambda a: a is not s.lead)
        for o in s.extents:
            self.option(o.name, None)
            self.emit(f"{_extent(o.name)} = {o.name}")
            self.known[o.name] = f"the option {o.name}"
        for a in required:
            self.array(a)
        self.settle()
        if s.drops:
            self.options()
            for dim in s.drops:
                self.drop(dim)
            for a in required:
                if self.hangs(a):
                    self.shape(a, 1)
            self.settle()
        for dim in sorted(self.uncertain):
            self.emit(f"{_extent(dim)} = None")
        for a in s.arrays:  # last: the required arguments solve the dimensions that optional ones are held to
            if a.optional:
                self.array(a)
        if not s.drops:
            self.options()
        self.finish()
        params = [a.name + ("=None" if a.optional else "") for a in s.arrays]
        keywords = [f"{o.name}=_DEFAULT_{o.name}" for o in s.options] + ["wants=None"] * s.is_vjp
        keywords += ["overwrite=None"] * bool(s.aliases)
        params += ["*"] * bool(keywords) + keywords
        self.env.update(
            {f"_DEFAULT_{o.name}": o.default for o in s.options} | {f"_OPTION_{o.name}": o for o in s.options}
        )
        return f"def bind({', '.join(params)}):\n" + "\n".join(self.lines), self.env

    def array(self, a: ArrayArg) -> None:
        n, indent = a.name, 1
        first = a is self.spec.lead
        if a.optional:
            self.emit(f"if {n} is not None:")
            indent = 2
        if first:
            self.emit(f"_framework = _BY_TYPE.get({n}.__class__) or _framework_of(_SPEC.name, {n!r}, {n})")
            self.emit(f"_device = _framework.device({n})")
        else:
            self.emit(
                f"if _BY_TYPE.get({n}.__class__) is not _framework: _bad_framework(_SPEC, {n!r}, {n}, _framework)",
                indent,
            )
            at = f"_framework.device({n})"
            self.emit(f"if {at} != _device: _device = _other_device(_SPEC, {n!r}, {at}, _device)", indent)
        dtype = "_dtype" if first else "_own_dtype"
        self.env[f"_DTYPES_{n}"] = frozenset(a.dtypes)
        self.emit(f"{dtype} = _DTYPE_NAME.get({n}.dtype)", indent)
        if a.statistic:
            wanted = "('float64' if _dtype == 'float64' else 'float32')"
            self.emit(f"if _own_dtype != {wanted}: _bad_dtype(_SPEC, {n!r}, {n}.dtype, _dtype)", indent)
        else:
            self.dtype(a, dtype, indent)
        if a.optional or not self.hangs(a):
            self.shape(a, indent)
        if a.optional:
            self.settle(indent)
            self.given.clear()

    def dtype(self, a: ArrayArg, dtype: str, indent: int) -> None:
        n, first = a.name, a is self.spec.lead
        allowed = (
            f"({dtype} != _dtype{f' and _own_dtype not in {a.or_dtypes!r}' if a.or_dtypes else ''})"
            if a.follows and not first
            else f"{dtype} not in _DTYPES_{n}"
        )
        self.emit(f"if {allowed}: _bad_dtype(_SPEC, {n!r}, {n}.dtype, _dtype)", indent)

    def hangs(self, a: ArrayArg) -> bool:
        """Whether an option must be known before the shape can be checked."""
        return any(f in self.spec.drops for d in a.dims for f in d.factors)

    def settle(self, indent: int = 1) -> None:
        """Solve what waited for other axes, first that of which least is unknown."""
        self.stretching -= {f for *_, dim, _ in self.waiting for f in dim.factors}
        while self.waiting:
            a, axis, dim, var = min(self.waiting, key=lambda w: len(self.unknown(w[2])))
            self.waiting.remove((a, axis, dim, var))
            self.axis(a, axis, dim, var, indent, last=True)

    def unknown(self, d: Dim) -> list[str]:
        """The factors of an axis of which no line up to this has said the extent."""
        return [f for f in d.factors if f not in self.known or (f in self.uncertain and f not in self.given)]

    def drop(self, dim: str) -> None:
        """A run of axes without the one that an option names, and the extent of that one."""
        found = self.spec.dropped(dim)
        assert found
        whole, option = found
        axis, extent, of, run = option.name, f"_dropped_{option.name}", str(option.axis_of), _extent(whole)
        self.emit(f"{_extent(dim)} = {run}[:{axis}] + {run}[{axis} + 1:]")
        self.emit(f"{extent} = {run}[{axis}]")
        self.known[dim] = f"{of} and {axis}"
        if axis in self.spec.positive:
            self.emit(
                f"if {extent} < 1: _bad_zero(_SPEC, 'the extent along {axis}', {extent}, f'{of} axis {{{axis}}}')"
            )

    def shape(self, a: ArrayArg, indent: int) -> None:
        n = a.name
        variadic = next((i for i, d in enumerate(a.dims) if d.variadic), None)
        fixed = len(a.dims) - (variadic is not None)
        self.emit(f"_shape = {n}.shape", indent)
        if fixed or variadic is None:
            self.emit(
                f"if _len(_shape) {'!=' if variadic is None else '<'} {fixed}: _bad_rank(_SPEC, {n!r}, _shape)", indent
            )
        if variadic is not None:
            end, name = len(a.dims) - variadic - 1, a.dims[variadic].factors[0]
            run = f"_shape[{variadic or ''}:{-end if end else ''}]" if fixed else "_shape"
            if name in self.uncertain:
                self.emit(f"if {_extent(name)} is None: {_extent(name)} = _tuple({run})", indent)
            elif name not in self.known:
                self.emit(f"{_extent(name)} = _tuple({run})", indent)
            if name not in self.known:
                self.known[name] = n
            elif a.dims[variadic].broadcast:
                whole = f"_broadcast(_SPEC, {n!r}, _tuple({run}), {_extent(name)}, {self.known[name]!r})"
                self.emit(f"if {run} != {_extent(name)}: {_extent(name)} = {whole}", indent)
            else:
                self.emit(
                    f"if {run} != {_extent(name)}: _bad_axis(_SPEC, {n!r}, 0, _tuple({run}), {_extent(name)}, "
                    f"{name!r}, {self.known[name]!r})",
                    indent,
                )
        for i, d in enumerate(a.dims):
            if not d.variadic:
                index = i if variadic is None or i < variadic else i - len(a.dims)
                self.axis(a, index, d, f"_shape[{index}]", indent)

    def axis(self, a: ArrayArg, axis: int, d: Dim, value: str, indent: int, last: bool = False) -> None:
        """Solve or check one axis."""
        unknown = self.unknown(d)
        where = f"{a.name} axis {axis}" + f" ({d.name})" * bool(d.plus)
        if d.plus:
            told = f"{a.name!r}, {axis}, {value}, {d.plus}, {str(d)!r}"
            self.emit(f"if {value} < {d.plus}: _bad_least(_SPEC, {told})", indent)
        if not last and (bool(unknown) if d.per else self.waits(d, unknown)):
            var = f"_axis_{a.name}_{axis % len(a.dims)}"
            self.emit(f"{var} = {value}", indent)
            self.waiting.append((a, axis, d, var))
        elif not unknown:
            self.check(a, axis, d, value, indent)
        elif len(unknown) > 1:
            raise TypeError(
                f"spec {self.spec.name}: cannot solve {d} of {a.name}: {' and '.join(unknown)} appear nowhere alone"
            )
        elif unknown[0] in self.uncertain and unknown[0] in self.known:
            (name,) = unknown
            self.emit(f"if {_extent(name)} is None:", indent)
            self.solve(a, axis, d, value, indent + 1, name, where)
            self.emit("else:", indent)
            self.check(a, axis, d, value, indent + 1)
        else:
            self.solve(a, axis, d, value, indent, unknown[0], where)
        if d.broadcast and d.alone and unknown and d.factors[0] not in self.alone:
            self.stretching.add(d.factors[0])
        self.given |= {*unknown} & self.uncertain & self.known.keys()

    def waits(self, d: Dim, unknown: list[str]) -> bool:
        """Whether an axis is solved after others: one that another says for certain, or of which two others are to."""
        if len(d.factors) == 1:
            return d.broadcast and bool(unknown) and d.factors[0] in self.alone
        return bool(unknown) and (len(unknown) > 1 or unknown[0] in self.alone or bool(self.stretching & {*d.factors}))

    def check(self, a: ArrayArg, axis: int, d: Dim, value: str, indent: int) -> None:
        """Hold an axis to what is known of its factors."""
        source = self.known[d.factors[0]]
        product = "*".join(map(_extent, d.factors)) + f" + {d.plus}" * bool(d.plus)
        if d.per:
            product = f"({product} + {_extent(d.per)} - 1) // {_extent(d.per)}"
            source += f" and {self.known[d.per]}"
        also = f"{value} != 1 and " if d.broadcast else ""
        told = f"{a.name!r}, {axis}, {value}, {product}, {str(d)!r}, {source!r}"
        if d.alone and d.factors[0] in self.stretching:
            extent = _extent(d.factors[0])
            self.emit(f"if {extent} == 1: {extent} = {value}", indent)
            self.learn(d.factors[0], f"{a.name} axis {axis}", indent)
        self.emit(f"if {also}{value} != {product}: _bad_axis(_SPEC, {told})", indent)

    def solve(self, a: ArrayArg, axis: int, d: Dim, value: str, indent: int, name: str, where: str) -> None:
        """Learn from an axis its only unknown factor."""
        value = f"({value} - {d.plus})" if d.plus else value
        others = [f for f in d.factors if f != name]
        if others:  # no divmod: torch's symbolic integers have none
            rest = "*".join(map(_extent, others))
            may_be_0 = not {*others} <= {*self.spec.positive}
            told = f"{a.name!r}, {axis}, {value}, {str(d)!r}, {'*'.join(others)!r}, {rest}"
            self.emit(f"{_extent(name)} = {value} // ({rest})" + f" if {rest} else 0" * may_be_0, indent)
            remainder = f"{value} % ({rest})" + f" if {rest} else {value}" * may_be_0
            self.emit(f"if {remainder}: _bad_division(_SPEC, {told})", indent)
        else:
            self.emit(f"{_extent(name)} = {value}", indent)
        self.learn(name, where, indent)

    def learn(self, name: str, where: str, indent: int) -> None:
        self.known.setdefault(name, where)
        if name in self.spec.positive:
            self.emit(f"if {_extent(name)} < 1: _bad_zero(_SPEC, {name!r}, {_extent(name)}, {where!r})", indent)

    def options(self) -> None:
        for o in self.spec.options:
            if not o.extent:
                self.option(o.name, o.axis_of)

    def option(self, name: str, axis_of: str | None) -> None:
        if axis_of:  # negative axes become what they mean, so even the default is worked out
            check = f"_check_axis(_SPEC, _OPTION_{name}, {name}, {axis_of}.shape)"
            self.emit(f"_rank = _len({axis_of}.shape)")
            whole = f"{name}.__class__ is _int and -_rank <= {name} < _rank"
            self.emit(f"{name} = {name} % _rank if {whole} else {check}")
        else:
            self.emit(f"if {name} is not _DEFAULT_{name}: {name} = _check_option(_SPEC, _OPTION_{name}, {name})")

    def finish(self) -> None:
        s = self.spec
        dims = [d for d in s.dims if d in self.known]
        variadic = {d.factors[0] for a in s.arrays for d in a.dims if d.variadic} | set(s.drops)
        decisive = {f for o in s.outputs for d in o.dims for f in d.factors} | set(s.empty)
        gone = {option: f"_dropped_{option}" for option in s.drops.values()}
        solved = {d: _extent(d) for d in [*dims, *s.drops]} | gone  # dimension -> the variable that holds it
        tests = [
            f"0 in {v}{' or ()' * (d in self.uncertain)}"
            if d in variadic
            else f"{v} == 0"
            if d in self.uncertain
            else f"not {v}"
            for d, v in solved.items()
            if d in decisive
        ]
        for d in self.uncertain:
            solved[d] = f"{'()' if d in variadic else 0} if {_extent(d)} is None else {_extent(d)}"
        zero = " or ".join(tests) or "False"
        wants = (
            "("
            + "".join(
                f"*((({o.name!r},) if {self.when(o)} else ())), " if self.when(o) else f"{o.name!r}, "
                for o in s.outputs
            )
            + ")"
        )
        if s.is_vjp:
            self.emit(f"wants = _check_wants(_SPEC, wants, {wants})")
            wants = "wants"
        named = [{a.name: a.name for a in s.arrays}, {o.name: o.name for o in s.options}, solved]
        arrays, options, extents = ("{" + ", ".join(f"{n!r}: {v}" for n, v in names.items()) + "}" for names in named)
        self.emit(f"_call = _Call(_SPEC, {arrays}, {options}, {extents}, _dtype, {wants}, _framework, _device, {zero})")
        if s.aliases:
            self.emit("if overwrite is not None: _call.over = _check_overwrite(_call, overwrite)")
        for i, rule in enumerate(r for r in s.require if not r.values):
            self.env[f"_RULE_{i}"] = rule
            self.emit(f"if not _RULE_{i}.holds(_call): raise _SpecError(f'{{_SPEC.name}}: {{_RULE_{i}.message}}')")
        for i, rule in enumerate(s.doubts):
            self.env |= {f"_DOUBT_{i}": rule, "_doubt": doubt}
            self.emit(f"if not _DOUBT_{i}.holds(_call): _doubt(_SPEC, _DOUBT_{i})")
        self.emit("return _call")

    def when(self, o: Output) -> str | None:
        """The condition on which an output is wanted; None for always."""
        if o.saved:
            return "False"
        if o.wanted_by:
            return o.wanted_by
        optional = {a.name for a in self.spec.arrays if a.optional}
        return f"{o.gradient_of} is not None" if o.gradient_of in optional else None


def _extent(dim: str) -> str:
    """The variable that holds a dimension."""
    return f"_extent_{dim}"
