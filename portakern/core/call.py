"""A bound call: checked arguments, and the dimensions computed from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from portakern.core.framework import DTYPE_NAME, Framework
from portakern.core.targets import HOST, Target
from portakern.spec import Dim, Output, Spec

__all__ = ["Call", "dropped_dims", "shape_of"]

EXACT: Mapping[str, Any] = MappingProxyType({})


class Call:
    """A bound call, the argument of implementations.

    Attributes:
      spec: the op.
      arrays: argument name -> array; None for an optional one that was not passed.
      options: option name -> canonical value, defaults filled in.
      dims: dimension name -> extent; a tuple for a variadic one. A dimension of optional arrays alone has the extent 0,
        or no axes, where none of them is given. The extent of a dropped axis is stored under the
        name of the option that names it (see ``drops`` of :func:`portakern.spec.spec`).
      dtype: the op's dtype, that of its first ``Float`` array (``spec.lead``).
      wants: names of the outputs that are needed, in the spec's order.
      framework: the framework of the arrays; device: their device in that framework.
      target: the hardware; interpret: run in the backend's interpreter; concrete: False if the arrays have no values
        (JAX tracing, ahead-of-time compilation).
      any_order: the implementation may sum in any order; bounds allow for this.
      given: array name -> dtype name before widening for the oracle; None: the arrays were not widened.
      degenerate: an output extent or a reduced extent is 0; no kernel runs.
      over: names of the arrays in ``overwrite=`` (:meth:`overwritten`).
      off: argument name -> error of its values, for the bound of a gradient whose forward call computed them; other
        arguments are exact.
    """

    __slots__ = (
        "any_order",
        "arrays",
        "concrete",
        "degenerate",
        "device",
        "dims",
        "dtype",
        "framework",
        "given",
        "interpret",
        "off",
        "options",
        "over",
        "spec",
        "target",
        "wants",
    )

    def __init__(
        self,
        spec: Spec[Any],
        arrays: dict[str, Any],
        options: dict[str, Any],
        dims: dict[str, Any],
        dtype: str,
        wants: tuple[str, ...],
        framework: Framework,
        device: Any,
        degenerate: bool,
    ) -> None:
        self.spec = spec
        self.arrays = arrays
        self.options = options
        self.dims = dims
        self.dtype = dtype
        self.wants = wants
        self.framework = framework
        self.device = device
        self.degenerate = degenerate
        self.target: Target = HOST
        self.interpret = False
        self.any_order = False
        self.concrete = True
        self.given: dict[str, str] | None = None
        self.over: tuple[str, ...] = ()
        self.off: Mapping[str, Any] = EXACT

    def overwritten(self, output: str) -> Any:
        """The array over which an output is written: contiguous, and in memory that no other argument shares. None:
        the output is a new array."""
        name = self.spec.aliases.get(output)
        return self.arrays[name] if name is not None and name in self.over else None

    @property
    def outputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Output name -> (shape, dtype name), of all outputs, wanted or not. A gradient is like the input whose
        gradient it is, where that is an argument, but for a dtype that an option names, and what may be written over an
        input like that input."""
        return {o.name: self._form_of(o) for o in self.spec.outputs}

    def _form_of(self, o: Output) -> tuple[tuple[int, ...], str]:
        of = o.gradient_of or o.alias_of
        if of is not None and self.arrays.get(of) is not None:
            named = o.dtype_option and self.options[o.dtype_option]
            return tuple(self.arrays[of].shape), named or self.dtype_of(of)
        return shape_of(o.dims, self.dims), self._dtype_of(o)

    def dtype_of(self, name: str) -> str:
        """The dtype name that an array was given in."""
        return self.given[name] if self.given else DTYPE_NAME[self.arrays[name].dtype]

    def _dtype_of(self, o: Output) -> str:
        if o.dtype_option and self.options[o.dtype_option]:
            return self.options[o.dtype_option]
        if (
            o.dtype == "float32" and self.dtype == "float64"
        ):  # a float32 statistic of a float64 call would throw away what was asked for
            return "float64"
        return o.dtype or self.dtype

    @property
    def present(self) -> tuple[str, ...]:
        """The names of the arrays that were passed."""
        return tuple(name for name, array in self.arrays.items() if array is not None)

    @property
    def flops(self) -> float:
        return self.spec.flops(self)

    def integers(self, name: str) -> np.ndarray | None:
        """The values of an integer array where they are on the host, as in a benchmark and in the checker: what a
        spec's ``flops`` and ``bytes_moved`` may count from. None of any other call, one without values among them."""
        array = self.arrays[name]
        known = self.concrete and isinstance(array, np.ndarray) and array.dtype.kind in "iub"
        return array if known else None

    def replace(self, **changes: Any) -> Call:
        """A copy with some attributes changed."""
        new = object.__new__(Call)
        for name in Call.__slots__:
            setattr(new, name, changes.get(name, getattr(self, name)))
        return new

    def __repr__(self) -> str:
        dims = ", ".join(f"{k}={tuple(v) if isinstance(v, tuple) else v}" for k, v in self.dims.items())
        apart = [o for o in self.spec.options if o.name not in self.dims and self.options[o.name] != o.default]
        opts = "".join(f", {o.name}={self.options[o.name]!r}" for o in apart)
        over = f", overwrite={self.over}" if self.over else ""
        return f"{self.spec.name}({self.dtype}; {dims}{opts}{over})"


def dropped_dims(spec: Spec[Any], dims: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The dimensions that lack an axis, from those that have it and the options that are not at their default."""
    found = {}
    for dim in spec.drops:
        dropped = spec.dropped(dim)
        assert dropped
        whole, option = dims[dropped[0]], dropped[1]
        axis = options.get(option.name, option.default) % len(whole)
        found[dim] = (*whole[:axis], *whole[axis + 1 :])
    return found


def shape_of(notation: tuple[Dim, ...], dims: dict[str, Any]) -> tuple[int, ...]:
    """The shape that a notation has under solved dimensions (a broadcast axis at full extent)."""
    shape: list[int] = []
    for d in notation:
        if d.variadic:
            shape.extend(dims[d.factors[0]])
        else:
            extent = math.prod(dims[f] for f in d.factors) + d.plus
            shape.append(-(-extent // dims[d.per]) if d.per else extent)
    return tuple(shape)
