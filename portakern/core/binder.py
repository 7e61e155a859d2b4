"""Binding: the arguments of one call, checked against the spec and solved for its dimensions.

:func:`bind` runs one straight-line Python function per spec that :func:`binder` writes and compiles (as ``dataclasses`` and ``attrs`` do): the same checks
through a generic ``*args`` binder cost 15-19 us for attention against about 4 us here. No shape is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from portakern.core.call import Call
from portakern.core.framework import BY_TYPE, DTYPE_NAME, Framework, framework_of
from portakern.errors import SpecError
from portakern.spec import ArrayArg, Dim, Output, Spec
from portakern.spec.options import shown

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
    """A call of another op on arrays that live where this call's do, for its target: what an implementation hands to another op's."""
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
    """The error for an array that cannot even say its shape (a nested or uninitialised tensor); ``error`` itself where there is none."""
    for name, value in [*zip((a.name for a in spec.arrays), args, strict=False), *kwargs.items()]:
        try:
            _ = getattr(value, "shape", None)
        except Exception as e:
            why = str(e).partition("\n")[0]
            return SpecError(
                f"{spec.name}: {name} is a {type(value).__name__} without a shape ({why}); expected a dense array with values in it"
            )
    return error


@functools.cache
def binder(spec: Spec[Any]) -> Callable[..., Call]:
    """Compile ``spec``'s signature into a function from its arguments to a :class:`Call`."""
    source, env = _Writer(spec).write()
    exec(compile(source, f"<binder of {spec.name}>", "exec"), env)  # the text derives from the spec alone
    bind: Callable[..., Call] = env["bind"]
    bind.__doc__ = spec.doc
    return bind


class _Writer:
    """Writes one binder. ``known`` holds the dimensions solved so far; products with two unknowns wait until one is."""

    def __init__(self, spec: Spec[Any]) -> None:
        self.spec = spec
        self.known: dict[str, str] = {}  # dimension -> "argument, axis" that defined it, for messages
        self.waiting: list[tuple[ArrayArg, int, Dim, str]] = []
        self.lines: list[str] = []
        self.env: dict[str, Any] = {
            "SPEC": spec, "Call": Call, "DTYPE_NAME": DTYPE_NAME, "BY_TYPE": BY_TYPE, "framework_of": framework_of,
            "bad_framework": _bad_framework, "bad_dtype": _bad_dtype, "bad_rank": _bad_rank, "bad_axis": _bad_axis, "bad_division": _bad_division,
            "bad_zero": _bad_zero, "other_device": _other_device, "check_option": _check_option, "check_axis": _check_axis, "broadcast": _broadcast, "check_wants": _check_wants, "SpecError": SpecError,
        }  # fmt: skip

    def emit(self, text: str, indent: int = 1) -> None:
        self.lines.append("    " * indent + text)

    def write(self) -> tuple[str, dict[str, Any]]:
        s = self.spec
        for a in s.arrays:
            if not a.optional:
                self.array(a)
        for a, axis, dim, var in self.waiting:
            self.axis(a, axis, dim, var, 1, last=True)
        for a in s.arrays:  # last: the required arguments solve the dimensions that optional ones are held to
            if a.optional:
                self.array(a)
        for o in s.options:
            self.option(o.name, o.axis_of)
        self.finish()
        params = [a.name + ("=None" if a.optional else "") for a in s.arrays]
        keywords = [f"{o.name}=DEFAULT_{o.name}" for o in s.options] + ["wants=None"] * s.is_vjp
        params += ["*"] * bool(keywords) + keywords
        self.env.update(
            {f"DEFAULT_{o.name}": o.default for o in s.options} | {f"OPTION_{o.name}": o for o in s.options}
        )
        return f"def bind({', '.join(params)}):\n" + "\n".join(self.lines), self.env

    def array(self, a: ArrayArg) -> None:
        n, indent = a.name, 1
        first = a is self.spec.arrays[0]
        if a.optional:
            self.emit(f"if {n} is not None:")
            indent = 2
        if first:
            self.emit(f"fw = BY_TYPE.get({n}.__class__) or framework_of(SPEC.name, {n!r}, {n})")
            self.emit(f"device = fw.device({n})")
        else:
            self.emit(f"if BY_TYPE.get({n}.__class__) is not fw: bad_framework(SPEC, {n!r}, {n}, fw)", indent)
            self.emit(
                f"if fw.device({n}) != device: device = other_device(SPEC, {n!r}, fw.device({n}), device)", indent
            )
        dtype = "dtype" if first else "dt"
        self.env[f"DTYPES_{n}"] = frozenset(a.dtypes)
        self.emit(f"{dtype} = DTYPE_NAME.get({n}.dtype)", indent)
        if a.statistic:
            self.emit(
                f"if dt != ('float64' if dtype == 'float64' else 'float32'): bad_dtype(SPEC, {n!r}, {n}.dtype, dtype)",
                indent,
            )
            return self.shape(a, indent)
        allowed = (
            f"({dtype} != dtype{' and dt != ' + repr('float32') if a.or_float32 else ''})"
            if a.follows and not first
            else f"{dtype} not in DTYPES_{n}"
        )
        self.emit(f"if {allowed}: bad_dtype(SPEC, {n!r}, {n}.dtype, dtype)", indent)
        self.shape(a, indent)

    def shape(self, a: ArrayArg, indent: int) -> None:
        n = a.name
        variadic = next((i for i, d in enumerate(a.dims) if d.variadic), None)
        fixed = len(a.dims) - (variadic is not None)
        self.emit(f"shape = {n}.shape", indent)
        if fixed or variadic is None:
            self.emit(
                f"if len(shape) {'!=' if variadic is None else '<'} {fixed}: bad_rank(SPEC, {n!r}, shape)", indent
            )
        if variadic is not None:
            end = len(a.dims) - variadic - 1
            run, name = (
                f"shape[{variadic or ''}:{-end if end else ''}]" if fixed else "shape",
                a.dims[variadic].factors[0],
            )
            if name not in self.known:
                self.emit(f"{name} = tuple({run})", indent)
                self.known[name] = n
            elif a.dims[variadic].broadcast:
                self.emit(
                    f"if {run} != {name}: {name} = broadcast(SPEC, {n!r}, tuple({run}), {name}, {self.known[name]!r})",
                    indent,
                )
            else:
                self.emit(
                    f"if {run} != {name}: bad_axis(SPEC, {n!r}, 0, tuple({run}), {name}, {name!r}, {self.known[name]!r})",
                    indent,
                )
        for i, d in enumerate(a.dims):
            if not d.variadic:
                index = i if variadic is None or i < variadic else i - len(a.dims)
                self.axis(a, index, d, f"shape[{index}]", indent)

    def axis(self, a: ArrayArg, axis: int, d: Dim, value: str, indent: int, last: bool = False) -> None:
        """Solve or check one axis."""
        unknown = [f for f in d.factors if f not in self.known]
        where = f"{a.name} axis {axis}"
        if not unknown:
            product = "*".join(d.factors)
            also = " != 1 and " if d.broadcast else ""
            test = f"{value}{also}{value if also else ''} != {product}"
            self.emit(
                f"if {test}: bad_axis(SPEC, {a.name!r}, {axis}, {value}, {product}, {str(d)!r}, {self.known[d.factors[0]]!r})",
                indent,
            )
        elif len(d.factors) == 1:
            self.emit(f"{unknown[0]} = {value}", indent)
            self.learn(unknown[0], where, indent)
        elif len(unknown) == 1:
            rest = "*".join(f for f in d.factors if f in self.known)
            self.emit(f"{unknown[0]} = {value} // ({rest})", indent)  # no divmod: torch's symbolic integers have none
            self.emit(
                f"if {value} % ({rest}): bad_division(SPEC, {a.name!r}, {axis}, {value}, {str(d)!r}, {rest!r}, {rest})",
                indent,
            )
            self.learn(unknown[0], where, indent)
        elif last:
            raise TypeError(
                f"spec {self.spec.name}: cannot solve {d} of {a.name}: {' and '.join(unknown)} appear nowhere alone"
            )
        else:
            var = f"extent_{a.name}_{axis % len(a.dims)}"
            self.emit(f"{var} = {value}", indent)
            self.waiting.append((a, axis, d, var))

    def learn(self, name: str, where: str, indent: int) -> None:
        self.known[name] = where
        if name in self.spec.positive:
            self.emit(f"if {name} < 1: bad_zero(SPEC, {name!r}, {name}, {where!r})", indent)

    def option(self, name: str, axis_of: str | None) -> None:
        if axis_of:  # negative axes become what they mean, so even the default is worked out
            check = f"check_axis(SPEC, OPTION_{name}, {name}, {axis_of}.shape)"
            self.emit(f"rank = len({axis_of}.shape)")
            self.emit(f"{name} = {name} % rank if {name}.__class__ is int and -rank <= {name} < rank else {check}")
        else:
            self.emit(f"if {name} is not DEFAULT_{name}: {name} = check_option(SPEC, OPTION_{name}, {name})")

    def finish(self) -> None:
        s = self.spec
        dims = [d for d in s.dims if d in self.known]
        variadic = {d.factors[0] for a in s.arrays for d in a.dims if d.variadic}
        decisive = {f for o in s.outputs for d in o.dims for f in d.factors} | set(s.empty)
        zero = " or ".join(f"0 in {d}" if d in variadic else f"not {d}" for d in dims if d in decisive) or "False"
        wants = (
            "("
            + "".join(
                f"*((({o.name!r},) if {self.when(o)} else ())), " if self.when(o) else f"{o.name!r}, "
                for o in s.outputs
            )
            + ")"
        )
        if s.is_vjp:
            self.emit(f"wants = check_wants(SPEC, wants, {wants})")
            wants = "wants"
        mapping = lambda names: "{" + ", ".join(f"{n!r}: {n}" for n in names) + "}"  # noqa: E731
        self.emit(
            f"call = Call(SPEC, {mapping(a.name for a in s.arrays)}, {mapping(o.name for o in s.options)}, {mapping(dims)}, dtype, {wants}, fw, device, {zero})"
        )
        for i, rule in enumerate(s.require):
            self.env[f"RULE_{i}"] = rule
            self.emit(f"if not RULE_{i}.holds(call): raise SpecError(f'{{SPEC.name}}: {{RULE_{i}.message}}')")
        self.emit("return call")

    def when(self, o: Output) -> str | None:
        """The condition on which an output is wanted; None for always."""
        if o.wanted_by:
            return o.wanted_by
        optional = {a.name for a in self.spec.arrays if a.optional}
        return f"{o.gradient_of} is not None" if o.gradient_of in optional else None


def _argument(spec: Spec[Any], name: str) -> ArrayArg:
    return next(a for a in spec.arrays if a.name == name)


def _bad_framework(spec: Spec[Any], name: str, array: Any, first: Framework) -> None:
    found = framework_of(spec.name, name, array)
    if found is not first:
        raise SpecError(
            f"{spec.name}: {name} is a {found.name} array but {spec.arrays[0].name} is a {first.name} array; convert one so that all arrays are of one framework"
        )


def _other_device(spec: Spec[Any], name: str, got: Any, first: Any) -> None:
    if got is None or first is None:  # a JAX tracer beside a constant: the whole call is traced
        return
    raise SpecError(
        f"{spec.name}: {name} is on {got} but {spec.arrays[0].name} is on {first}; move one so that all arrays are on one device"
    )


def _bad_dtype(spec: Spec[Any], name: str, got: Any, dtype: str | None) -> NoReturn:
    a = _argument(spec, name)
    text = DTYPE_NAME.get(got, str(got))
    if a.follows and name != spec.arrays[0].name:
        also = " or float32" if a.or_float32 and dtype != "float32" else ""
        raise SpecError(
            f"{spec.name}: {name} is {text} but {spec.arrays[0].name} is {dtype}; expected {dtype}{also}: cast one of them"
        )
    if a.statistic:
        expected = "float64, as its arrays are" if dtype == "float64" else "float32"
        raise SpecError(f"{spec.name}: {name} is {text}; expected {expected}: cast it")
    if getattr(got, "isnative", True) is False:
        raise SpecError(
            f"{spec.name}: {name} is {text}, which is not this machine's byte order; pass {name}.astype({name}.dtype.newbyteorder('='))"
        )
    raise SpecError(f"{spec.name}: {name} is {text}; expected one of {', '.join(a.dtypes)}: cast it")


def _bad_rank(spec: Spec[Any], name: str, shape: tuple[int, ...]) -> NoReturn:
    a = _argument(spec, name)
    least = "at least " if any(d.variadic for d in a.dims) else ""
    need = sum(not d.variadic for d in a.dims)
    axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
    raise SpecError(
        f"{spec.name}: {name} has {axes}, shape {tuple(shape)}; expected {least}{need}: ({a.shape.replace(' ', ', ')}); reshape it"
    )


def _bad_axis(spec: Spec[Any], name: str, axis: int, got: Any, want: Any, dim: str, source: str) -> NoReturn:
    a = _argument(spec, name)
    axis = axis if axis >= 0 or any(d.variadic for d in a.dims) else axis + len(a.dims)
    one = " or 1" if dim.startswith("#") else ""
    raise SpecError(
        f"{spec.name}: {name} axis {axis} ({dim.lstrip('#*')}) is {got}; expected {want}{one}, as set by {source}; make them agree: {name} is ({a.shape.replace(' ', ', ')})"
    )


def _bad_division(spec: Spec[Any], name: str, axis: int, got: int, dim: str, divisor: str, value: int) -> NoReturn:
    raise SpecError(
        f"{spec.name}: {name} axis {axis} ({dim}) is {got}, which {divisor} = {value} does not divide; make it a multiple of {value}"
    )


def _bad_zero(spec: Spec[Any], dim: str, got: int, where: str) -> NoReturn:
    raise SpecError(f"{spec.name}: {dim} is {got} ({where}); expected at least 1: an array without any has no result")


def _broadcast(
    spec: Spec[Any], name: str, got: tuple[int, ...], sofar: tuple[int, ...], source: str
) -> tuple[int, ...]:
    n = max(len(got), len(sofar))
    a, b = (1,) * (n - len(got)) + got, (1,) * (n - len(sofar)) + sofar
    if any(x != y and x != 1 and y != 1 for x, y in zip(a, b, strict=True)):
        raise SpecError(
            f"{spec.name}: the leading axes {got} of {name} do not broadcast with {sofar} of {source}; make them equal, or 1"
        )
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def _check_option(spec: Spec[Any], option: Any, value: Any) -> Any:
    try:
        return option.check(value)
    except Exception:  # a caller's object may raise anything when it is looked at
        raise SpecError(
            f"{spec.name}: {option.name} is {shown(value)}; expected {option.expected}: leave it out for {option.default!r}"
        ) from None


def _check_wants(spec: Spec[Any], wants: Any, possible: tuple[str, ...]) -> tuple[str, ...]:
    """The outputs of a gradient op that are wanted, in the spec's order: ``possible`` unless some are named."""
    if wants is None:
        return possible
    if isinstance(wants, str) or not isinstance(wants, (tuple, list, set, frozenset)) or not wants:
        raise SpecError(
            f"{spec.name}: wants is {shown(wants)}; expected names among {', '.join(possible)}: leave it out for all of them"
        )
    for name in wants:
        if name not in possible:
            absent = next((o.gradient_of for o in spec.outputs if o.name == name), None)
            why = f"a gradient with respect to {absent}, which is not given" if absent else "no output"
            raise SpecError(
                f"{spec.name}: wants names {shown(name)}, {why}; expected names among {', '.join(possible)}"
            )
    return tuple(name for name in possible if name in wants)


def _check_axis(spec: Spec[Any], option: Any, value: Any, shape: tuple[int, ...]) -> int:
    axis: int = _check_option(spec, option, value)
    ndim = len(shape)
    if not -ndim <= axis < ndim:
        name = option.axis_of
        span = f"from {-ndim} to {ndim - 1}" if ndim else "but the array has no axes"
        raise SpecError(
            f"{spec.name}: {option.name} is {axis}; expected an integer {span}: {name} has shape {tuple(shape)}"
        )
    return axis % ndim
