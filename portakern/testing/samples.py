"""The small named calls that specs declare (``op.sample``), as arrays: what lists in tests and benchmarks are made
of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portakern.core import registry
from portakern.core.call import dropped_dims, shape_of
from portakern.core.framework import frameworks
from portakern.errors import SpecError
from portakern.spec import Sample, Spec
from portakern.spec.dtypes import DTYPES
from portakern.testing.cases import Case

__all__ = ["sample_arrays", "sample_case", "samples"]


def samples(op: str | Spec[Any]) -> Mapping[str, Sample]:
    """Name -> sample of an op; a gradient op that declares none has those of its forward op.

    Raises:
      SpecError: it has none.
    """
    spec = registry.find_spec(op) if isinstance(op, str) else op
    found = spec.samples
    if not found and spec.is_vjp:
        forward = registry.forward_of(spec)
        found = {n: _for_gradient(spec, s) for n, s in forward.samples.items()} if forward else {}
    if not found:
        raise SpecError(f"{spec.name} declares no sample; add one: {spec.name}.sample('name', dims={{...}})")
    return found


def _for_gradient(spec: Spec[Any], sample: Sample) -> Sample:
    """A forward op's sample for its gradient op, without the arguments that the gradient op lacks."""
    options, arrays = {o.name for o in spec.options}, {a.name for a in spec.arrays}
    return Sample(
        sample.name,
        {n: extent for n, extent in sample.dims.items() if n in spec.dims},
        {n: value for n, value in sample.options.items() if n in options},
        tuple(n for n in sample.given if n in arrays),
        {n: dims for n, dims in sample.stretched.items() if n in arrays},
        tuple(n for n in sample.wider if n in arrays),
    )


def sample_case(op: str | Spec[Any], name: str | None = None, *, dtype: str | None = None, seed: int = 0) -> Case:
    """A sample as a case of the checker, e.g. for :func:`portakern.testing.replay`.

    Args:
      op: the op's name or spec; name: the sample's name; None: the first sample.
      dtype: the op's dtype; None: the first of its spec.
      seed: seed of the values.

    Raises:
      SpecError: no such sample or dtype, or a sample that lacks a dimension.
    """
    spec = registry.find_spec(op) if isinstance(op, str) else op
    known = samples(spec)
    if name is not None and name not in known:
        raise SpecError(f"{spec.name} has no sample {name!r}; expected one of {', '.join(known)}")
    sample = known[name] if name is not None else next(iter(known.values()))
    dtype = spec.dtypes[0] if dtype is None else dtype
    if dtype not in spec.dtypes:
        raise SpecError(f"{spec.name}: dtype {dtype!r} is none of {', '.join(spec.dtypes)}")
    missing = [d for d in spec.dims if d not in sample.dims]
    if missing:
        raise SpecError(f"{spec.name}: sample {sample.name!r} of its forward op has no {missing[0]}; declare one here")
    dims = {**sample.dims, **dropped_dims(spec, sample.dims, sample.options)}
    narrow = DTYPES[dtype].floating and DTYPES[dtype].bits < 32
    shapes = {
        a.name: tuple(
            1 if d.broadcast and set(d.factors) & set(sample.stretched.get(a.name, ())) else extent
            for d in a.dims
            for extent in shape_of((d,), dims)
        )
        for a in spec.arrays
        if not a.optional or a.name in sample.given or spec.reads_under(a.name, sample.options, False)
    }
    wider = tuple(n for n in sample.wider if narrow and n in shapes)
    own = {a.name: dtype for a in spec.arrays if a.name in shapes and not a.follows and dtype in a.dtypes}
    options = {**_as_wide(spec, sample.options, dtype), **spec.extent_options(sample.dims)}
    return Case(dtype, shapes, seed=seed, options=options, wider=wider, dtypes=own)


def _as_wide(spec: Spec[Any], options: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A sample's options, without those that would give results a narrower dtype than the op's: the op may refuse
    them."""
    named = {o.dtype_option for o in spec.outputs if o.dtype_option and not o.codes}
    results = {n: spec.option(n).check(value) for n, value in options.items() if n in named}
    narrower = {n for n, result in results.items() if result and DTYPES[result].bits < DTYPES[dtype].bits}
    return {n: value for n, value in options.items() if n not in narrower}


def sample_arrays(
    op: str | Spec[Any],
    name: str | None = None,
    *,
    dtype: str | None = None,
    seed: int = 0,
    framework: str = "numpy",
    device: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays and options of a sample: ``pk.op(name)(**arrays, **options)``.

    Values are standard normal, or from the argument's generator. Saved outputs of the forward op are computed by the
    oracle.

    Args:
      op, name, dtype, seed: as in :func:`sample_case`.
      framework: framework of the arrays: numpy, torch or jax.
      device: a device of that framework; None: the host.

    Returns:
      (argument -> contiguous array, for the sample's arrays; option -> value, for options not at their default).
    """
    spec = registry.find_spec(op) if isinstance(op, str) else op
    if framework not in frameworks():
        raise SpecError(f"framework is {framework!r}; expected one of {', '.join(frameworks())}")
    library = frameworks()[framework]
    library.load()
    case = sample_case(spec, name, dtype=dtype, seed=seed)
    arrays = {n: library.from_numpy(b.view(), device) for n, b in case.buffers(spec).items()}
    return arrays, dict(case.options)
