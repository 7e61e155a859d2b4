"""Error messages for wrong arguments of a call, which binders (:mod:`portakern.core.binder`) raise, and checks that are
longer than one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from portakern.core.framework import DTYPE_NAME, Framework, framework_of
from portakern.errors import SpecError
from portakern.spec import Spec
from portakern.spec.options import shown

if TYPE_CHECKING:
    from portakern.core.call import Call

__all__ = [
    "bad_axis",
    "bad_division",
    "bad_dtype",
    "bad_framework",
    "bad_least",
    "bad_rank",
    "bad_zero",
    "broadcast",
    "check_axis",
    "check_option",
    "check_overwrite",
    "check_room",
    "check_wants",
    "other_device",
]


def bad_framework(spec: Spec[Any], name: str, array: Any, first: Framework) -> None:
    found = framework_of(spec.name, name, array)
    if found is not first:
        raise SpecError(
            f"{spec.name}: {name} is a {found.name} array but {spec.lead.name} is a {first.name} array; convert "
            "one so that all arrays are of one framework"
        )


def other_device(spec: Spec[Any], name: str, actual: Any, first: Any) -> None:
    if actual is None or first is None:  # a JAX tracer beside a constant: the whole call is traced
        return
    raise SpecError(
        f"{spec.name}: {name} is on {actual} but {spec.lead.name} is on {first}; move one so that all arrays are on "
        "one device"
    )


def bad_dtype(spec: Spec[Any], name: str, actual: Any, dtype: str | None) -> NoReturn:
    a = spec.argument(name)
    text = DTYPE_NAME.get(actual, str(actual))
    if a.follows and name != spec.lead.name:
        also = "".join(f" or {other}" for other in a.or_dtypes if other != dtype)
        if name in spec.masks and text.startswith(("bool", "int", "uint")):
            condition = name if text == "bool" else f"{name} != 0"
            raise SpecError(
                f"{spec.name}: {name} is {text} but {spec.lead.name} is {dtype}; expected {dtype}{also}, added to "
                f"the scores (a cast would add ones and zeros); pass where({condition}, 0, -inf) if true means that a "
                "pair is attended"
            )
        raise SpecError(
            f"{spec.name}: {name} is {text} but {spec.lead.name} is {dtype}; expected {dtype}{also}: cast one of them"
        )
    if a.statistic:
        expected = "float64, as its arrays are" if dtype == "float64" else "float32"
        raise SpecError(f"{spec.name}: {name} is {text}; expected {expected}: cast it")
    if getattr(actual, "isnative", True) is False:
        raise SpecError(
            f"{spec.name}: {name} is {text}, not in the native byte order; pass "
            f"{name}.astype({name}.dtype.newbyteorder('='))"
        )
    raise SpecError(f"{spec.name}: {name} is {text}; expected one of {', '.join(a.dtypes)}: cast it")


def bad_rank(spec: Spec[Any], name: str, shape: tuple[int, ...]) -> NoReturn:
    a = spec.argument(name)
    least = "at least " if any(d.variadic for d in a.dims) else ""
    need = sum(not d.variadic for d in a.dims)
    axes = "1 axis" if len(shape) == 1 else f"{len(shape)} axes"
    raise SpecError(
        f"{spec.name}: {name} has {axes}, shape {tuple(shape)}; expected {least}{need}: "
        f"({a.shape.replace(' ', ', ')}); reshape it"
    )


def bad_axis(spec: Spec[Any], name: str, axis: int, actual: Any, want: Any, dim: str, source: str) -> NoReturn:
    a = spec.argument(name)
    axis = axis if axis >= 0 or any(d.variadic for d in a.dims) else axis + len(a.dims)
    one = " or 1" if dim.startswith("#") else ""
    raise SpecError(
        f"{spec.name}: {name} axis {axis} ({dim.lstrip('#*')}) is {actual}; expected {want}{one}, as set by {source}; "
        f"make them agree: {name} is ({a.shape.replace(' ', ', ')})"
    )


def bad_least(spec: Spec[Any], name: str, axis: int, actual: int, least: int, dim: str) -> NoReturn:
    raise SpecError(f"{spec.name}: {name} axis {axis} ({dim}) is {actual}; expected at least {least}")


def bad_division(spec: Spec[Any], name: str, axis: int, actual: int, dim: str, divisor: str, value: int) -> NoReturn:
    raise SpecError(
        f"{spec.name}: {name} axis {axis} ({dim}) is {actual}; expected a multiple of {divisor} = {value}; change one"
    )


def bad_zero(spec: Spec[Any], dim: str, actual: int, where: str) -> NoReturn:
    raise SpecError(f"{spec.name}: {dim} is {actual} ({where}); expected at least 1: an empty axis has no result")


def broadcast(
    spec: Spec[Any], name: str, actual: tuple[int, ...], sofar: tuple[int, ...], source: str
) -> tuple[int, ...]:
    n = max(len(actual), len(sofar))
    a, b = (1,) * (n - len(actual)) + actual, (1,) * (n - len(sofar)) + sofar
    if any(x != y and x != 1 and y != 1 for x, y in zip(a, b, strict=True)):
        raise SpecError(
            f"{spec.name}: the leading axes {actual} of {name} do not broadcast with {sofar} of {source}; make them "
            "equal, or 1"
        )
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def check_option(spec: Spec[Any], option: Any, value: Any) -> Any:
    try:
        return option.check(value)
    except Exception:  # a caller's object may raise anything when it is looked at
        raise SpecError(
            f"{spec.name}: {option.name} is {shown(value)}; expected {option.expected}: leave it out for "
            f"{option.default!r}"
        ) from None


def check_wants(spec: Spec[Any], wants: Any, possible: tuple[str, ...]) -> tuple[str, ...]:
    """The outputs of a gradient op that are wanted, in the spec's order: ``possible`` unless some are named."""
    if wants is None:
        return possible
    if isinstance(wants, str) or not isinstance(wants, (tuple, list, set, frozenset)) or not wants:
        raise SpecError(
            f"{spec.name}: wants is {shown(wants)}; expected names among {', '.join(possible)}: leave it out for all "
            "of them"
        )
    for name in wants:
        if name not in possible:
            absent = next((o.gradient_of for o in spec.outputs if o.name == name), None)
            why = f"the gradient of {absent}, which is not passed" if absent else "which is not an output"
            raise SpecError(
                f"{spec.name}: wants names {shown(name)}, {why}; expected names among {', '.join(possible)}"
            )
    return tuple(name for name in possible if name in wants)


def check_overwrite(call: Call, overwrite: Any) -> tuple[str, ...]:
    """The arguments that a call names in ``overwrite=``, in the spec's order: each is one over which a result may be
    written, and that result is wanted."""
    spec = call.spec
    possible = {name: out for out, name in spec.aliases.items()}
    names = (overwrite,) if isinstance(overwrite, str) else overwrite
    if not isinstance(names, (tuple, list, set, frozenset)):
        raise SpecError(
            f"{spec.name}: overwrite is {shown(overwrite)}; expected names among {', '.join(possible)}: leave it out "
            "to get new arrays"
        )
    for name in names:
        if name not in possible:
            raise SpecError(
                f"{spec.name}: overwrite names {shown(name)}; expected names among {', '.join(possible)} (arguments "
                "that a result may overwrite)"
            )
        if call.arrays[name] is None or possible[name] not in call.wants:
            raise SpecError(
                f"{spec.name}: overwrite names {name}, but this call does not compute {possible[name]}; leave it out"
            )
    return tuple(a.name for a in spec.arrays if a.name in names)


def check_room(call: Call, watched: bool = False) -> None:
    """SpecError unless results can be written over the arrays that a call names for it. ``watched``: its library
    differentiates or maps over some of its arrays."""
    op, framework = call.spec.name, call.framework
    for name in call.over:
        array = call.arrays[name]
        others = {n: a for n, a in call.arrays.items() if n != name and a is not None}
        if framework.immutable:
            raise SpecError(
                f"{op}: overwrite names {name}, but {framework.title} arrays are immutable; leave it out"
                + (f", and {framework.donates}" if framework.donates else "")
            )
        if watched:
            raise SpecError(
                f"{op}: overwrite names {name}, but {framework.title} records this call for gradients or vmap, and may "
                "read the argument again; leave it out, or call without recording, on arrays that need no gradient"
            )
        if 0 in array.shape:
            continue
        if framework.may_overwrite(array, list(others.values())):
            continue
        shared = next((n for n, a in others.items() if not framework.may_write(array, [a])), None)
        if not framework.may_write(array, []):
            why = "is read-only, or has elements that share memory"
        elif shared is not None:
            why = f"shares memory with {shared}, which the call reads"
        else:
            why = "is not contiguous"
        raise SpecError(f"{op}: overwrite names {name}, which {why}; leave it out to get a new array")


def check_axis(spec: Spec[Any], option: Any, value: Any, shape: tuple[int, ...]) -> int:
    axis: int = check_option(spec, option, value)
    ndim = len(shape)
    if not -ndim <= axis < ndim:
        name = option.axis_of
        span = f"from {-ndim} to {ndim - 1}" if ndim else "but the array has no axes"
        raise SpecError(
            f"{spec.name}: {option.name} is {axis}; expected an integer {span}: {name} has shape {tuple(shape)}"
        )
    return axis % ndim
