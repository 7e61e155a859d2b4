"""The interface to array libraries: which library an array belongs to, its device, conversion to another library, and
tracing of calls.

On the host every conversion goes through NumPy without a copy (bfloat16 as ml_dtypes); between two libraries on a GPU
it is DLPack. Each library has an adapter in :mod:`portakern.frameworks`, which is found by walking that package.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern import install
from portakern.core.instruments import Instruments
from portakern.core.targets import Target
from portakern.errors import SpecError, UnavailableError, UnsupportedError
from portakern.spec.dtypes import DTYPES, numpy_dtype

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call
    from portakern.core.config import Config
    from portakern.core.dispatch import Choice
    from portakern.core.program import Program

__all__ = [
    "BY_TYPE",
    "DTYPE_NAME",
    "Framework",
    "convert",
    "distinct",
    "framework_of",
    "frameworks",
    "host_framework",
    "load_library",
    "strided_view",
]

WINGS = "portakern.frameworks"

DTYPE_NAME: dict[Any, str] = {d.numpy: name for name, d in DTYPES.items()}
"""dtype objects of every framework seen so far -> their name."""


class Framework:
    """One array library. Subclasses are stateless; there is one instance of each (see :func:`frameworks`).

    Attributes:
      name: what users and backends call the library. title: the name as its makers write it.
      wrapper: the function that makes an array of anything.
      hallmark: an attribute that only arrays of this library have. Type checkers tell arrays apart by it.
      twins: functions of the library, by name, that ``portakern.<name>`` replaces, and the op behind each.
      host_only: arrays live in host memory, wherever other libraries' arrays live.
      immutable: arrays never change, so no array may share memory that somebody else may write to.
      donates: how users give an array's memory to a result where arrays are immutable, in words.
      signature: Python source: of an array ``{x}`` everything that decides how a call is served, as the elements of a
        tuple (:mod:`portakern.core.signatures`). Empty: nothing does.
      watched: Python source: whether an array may want a gradient.
      there: Python source: whether the memory of an array holds its values; the source may name the ``{framework}``.
        Empty: the memory always does.
      compiles_ahead: where kernels become parts of the library's own programs, how these are compiled before their
        first call, in words.
      resizes: arrays can be given other memory in place, which they must own alone.
      embeds: platforms for which the library's programs can contain machine code (:meth:`embed`).
      environment: variables that change what is computed, or by what. The line that reproduces a call names those that
        are set.
      advice: text of an error that a library of kernels raises -> what to do about the error.
      reverses: strides of arrays may be negative.
      records: calls may be recorded instead of run (:meth:`interposes`). Every op asks for this before it binds its
        arguments.
    """

    name: str
    title: str
    wrapper: str
    reverses = False
    hallmark = ""
    twins: Mapping[str, str] = MappingProxyType({})
    host_only = False
    immutable = False
    compiles_ahead = ""
    donates = ""
    embeds: tuple[str, ...] = ()
    signature = ""
    watched = "False"
    there = ""
    resizes = False
    environment: tuple[str, ...] = ()
    advice: Mapping[str, str] = MappingProxyType({})
    records = False

    device: Callable[[Any], Any]
    """A hashable that is equal for two arrays that live together."""

    def load(self) -> Any:
        """Import the library and learn its dtypes; UnavailableError where it is not installed."""
        raise NotImplementedError

    def is_array(self, value: Any) -> bool:
        """Whether ``value`` is one of this library's arrays. Imports nothing: before the library is imported there is
        none.
        """
        raise NotImplementedError

    def plain(self, kind: type) -> bool:
        """Whether arrays of a class are what their memory is, so that they may be asked for their signature."""
        return True

    def comparison(self, arrays: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Python source that is true of other arrays under these names if they agree with these in all that
        ``signature`` and ``watched`` read, their memory holds their values and nobody steps in, and what else the
        source names. It may be false of arrays that agree. None: the library has nothing that says so sooner than their
        signature."""
        return None

    def settled(self, kind: type) -> bool:
        """Whether arrays of a class are the library's own, with values that were computed when a call returned: a
        subclass may compute them when they are read."""
        return kind.__module__.partition(".")[0] in (self.name, f"{self.name}lib")

    def target(self, device: Any) -> Target:
        """The hardware behind a device."""
        raise NotImplementedError

    def devices(self) -> list[Any]:
        """The devices here, accelerators first."""
        raise NotImplementedError

    def accelerator_names(self) -> list[str]:
        """The makers' names of the accelerators that the library sees here; none where it is not installed."""
        return []

    def owns(self, array: Any) -> bool:
        """Whether ``array`` is one of this library's."""
        try:
            return framework_of("", "", array) is self
        except SpecError:
            return False

    def poisoned(self, caller: object = None) -> AbstractContextManager[None]:
        """While inside, fresh uninitialised arrays hold NaN, where the library can do that.

        Args:
          caller: what is called inside, again and again: of a function that the library compiles, memory is poisoned in
            a way that does not have it compiled once more. An object that can be hashed and weakly referenced.
        """
        return nullcontext()

    def compiled_each(self) -> AbstractContextManager[None]:
        """While inside, a function that the library compiles as it is called is compiled for every form of call: no
        number of forms makes it run uncompiled, in silence."""
        return nullcontext()

    def call_variants(self) -> Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
        """Other ways in which people call a function, in words: what makes of it one that is called so."""
        return {"on another thread": _on_another_thread}

    def contiguous(self, array: Any) -> bool:
        """Whether elements lie in row-major order without gaps."""
        return True

    def may_write(self, array: Any, others: Sequence[Any]) -> bool:
        """Whether a kernel may write to an array: it is no constant, no two of its elements share memory, and none of
        ``others`` shares any with it."""
        return False

    def may_overwrite(self, array: Any, others: Sequence[Any]) -> bool:
        """Whether a result may be written over an array while a kernel reads it and ``others``."""
        return self.may_write(array, others) and self.contiguous(array)

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether two arrays may share memory."""
        return np.may_share_memory(self.to_numpy(a), self.to_numpy(b))

    def memory(self, array: Any) -> np.ndarray | None:
        """The bytes of all the memory that an array is a view of; None where the library cannot tell."""
        return None

    def copy(self, array: Any) -> Any:
        """The values in memory of their own, in row-major order; of arrays that never change, the array itself."""
        return array

    def write(self, array: Any, values: Any) -> None:
        """Write an array's values over another of its form."""
        raise NotImplementedError

    def wrote(self, arrays: Sequence[Any]) -> None:
        """Tell the library that a kernel has written to these arrays."""

    def stored_dtype(self, dtype: str) -> str:
        """The dtype in which the library holds what NumPy holds in ``dtype``."""
        return dtype

    def check(self, call: Call) -> bool:
        """Refuse arrays of this library that no kernel can read as they are. Says whether the library differentiates or
        maps over any of them.
        """
        return False

    def to_numpy(self, array: Any) -> np.ndarray:
        """The values on the host; a view where the memory is the host's. The caller does not write to it."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray, device: Any) -> Any:
        """An array on ``device``; it may share memory with ``array``. device None is the host."""
        raise NotImplementedError

    def copied(self, array: np.ndarray, device: Any) -> Any:
        """An array on ``device`` in memory that it shares with nobody."""
        return self.from_numpy(np.array(array, order="C"), device)

    def for_dlpack(self, array: Any, copy: bool) -> Any:
        """The array, or with ``copy`` one in memory of its own, as DLPack takes it."""
        raise NotImplementedError

    def from_dlpack(self, array: Any) -> Any:
        """An array over the memory of another library's."""
        raise NotImplementedError

    def strided(
        self, memory: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, device: Any
    ) -> Any:
        """A view of ``memory`` (one axis) with strides and offset in elements, or its values where the library has no
        strides.
        """
        return self.from_numpy(strided_view(memory, shape, strides, offset), device)

    def strides(self, array: Any) -> list[int] | None:
        """Strides in elements, None where the library has no strides."""
        return None

    def past_alignment(self, array: Any) -> int:
        """Bytes from the last multiple of 16 to where an array begins in its memory, which begins at one."""
        return 0

    def wants_gradient(self, array: Any) -> bool:
        """Whether an array says by itself that its gradient is wanted."""
        return False

    def abstract(
        self, shape: tuple[int, ...], dtype: str, strides: Sequence[int] | None = None, past_alignment: int = 0
    ) -> Any:
        """An array of this form without memory, to compile for."""
        raise UnsupportedError(f"{self.name} has no abstract arrays; pass arrays of PyTorch or JAX")

    def full(self, shape: tuple[int, ...], dtype: str, value: float, device: Any) -> Any:
        """An array filled with one value."""
        return self.from_numpy(np.full(shape, value, numpy_dtype(dtype)), device)

    def instruments(self, device: Any) -> Instruments:
        """What can be measured of calls on a device of the library."""
        return Instruments(self, device)

    # --- calls that the library watches, records, or runs in a way of its own ---

    def run(self, impl: Implementation, call: Call, config: Config) -> tuple[Any, ...]:
        """Run an implementation on arrays that are here: every output in the spec's order."""
        return impl.run(call, config)

    def outside(self) -> AbstractContextManager[Any]:
        """While inside, arrays that are made here have values, also where the library traces what runs now."""
        return nullcontext()

    def refuses_descriptors(self) -> str | None:
        """None, or why no program of the library passes a kernel a tensor descriptor
        (:class:`portakern.core.program.DescribedArray`)."""
        return None

    def embed(self, program: Program, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs of a program of machine code on the library's arrays, as a part of its own program."""
        raise NotImplementedError

    def differentiate(self, call: Call, choice: Choice) -> tuple[tuple[Any, ...], Any]:
        """The outputs of a call that :meth:`check` says is watched, and what was decided for it, to keep for calls of
        its signature: ``call`` and ``serve`` as :class:`portakern.core.plan.CallPlan` has them; None where something is
        left to decide each time."""
        raise NotImplementedError

    def lowering_target(self) -> Target | None:
        """For what a traced call is lowered where nothing else is said; None where that is not known."""
        return None

    def in_parts(self, call: Call, choice: Choice, target: Target, oracle: bool) -> tuple[list[str], Call]:
        """How a call is served whose arrays several devices hold, what would move between these and why, in lines of
        :func:`portakern.core.explain.explain`, and the call of one of them; no lines where one device holds all.
        Nothing runs. ``oracle``: whether the oracle serves it.

        Raises:
          UnsupportedError: it is not served.
        """
        return [], call

    def trace(self, call: Call, choice: Choice) -> tuple[Any, ...]:
        """The outputs of a call whose arrays have no device yet: their target's platform is ``traced``."""
        raise NotImplementedError

    def interposes(self, casts: bool) -> str | None:
        """Whether the library steps in before an op's arguments are bound.

        "records" where it records calls, or has arrays without memory; "profiles" where it wants to name the call in a
        profile (:meth:`profiled`), which then asks again; "casts" where it casts the arguments of ops for which
        ``casts`` is said; else None.
        """
        return None

    def distributes(self, spec: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether arguments of a call are arrays that the library distributes over devices. It then knows how an op
        runs on their shards, and :meth:`record` serves the call.

        Raises:
          SpecError: others of its arrays are not distributed.
        """
        return False

    def undisturbed(self, casts: bool) -> bool:
        """Whether nobody steps in (:meth:`interposes`) or looks through the library's arrays, so that an array's
        signature says all about it. Not asked under :meth:`recording_python`."""
        return True

    def watching(self) -> bool:
        """Whether arrays that want a gradient get one."""
        return False

    def profiled(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call ``op(*args, **kwargs)`` under the op's name in the library's profile."""
        raise NotImplementedError

    def recording_python(self) -> bool:
        """Whether the library records the very Python that runs now."""
        return False

    def recorder(self) -> Callable[[], bool]:
        """:meth:`recording_python`, or a function of the library that says the same sooner, where it is imported."""
        return self.recording_python

    def keep(self, op: Any) -> Any:
        """What an op keeps for the recorder of its calls: made once, handed back as ``op.kept[name]``."""
        return None

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op call that the library records."""
        raise NotImplementedError

    def recorded_op(self, make: Callable[..., Any], *args: Any) -> Any:
        """The op ``make(*args)``, asked for under :meth:`recording_python`."""
        raise NotImplementedError

    def cast(self, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the library casts them."""
        return args, kwargs


def _on_another_thread(fn: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(fn, *args, **kwargs).result()

    return called


def strided_view(memory: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> np.ndarray:
    """A view of ``memory`` (one axis, without gaps) with strides and offset in elements, whatever its dtype."""
    size = memory.itemsize  # NumPy's as_strided goes by a dtype's letter and size, which ml_dtypes' do not all have
    return np.ndarray(shape, memory.dtype, memory.view(np.uint8), offset * size, tuple(s * size for s in strides))


def distinct(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share memory, as far as axes that do not interleave show it."""
    reach = 0
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (n - 1)
    return True


@functools.cache
def frameworks() -> Mapping[str, Framework]:
    """Every framework by name, the host's first."""
    modules = [
        importlib.import_module(f"{WINGS}.{m.name}")
        for m in pkgutil.iter_modules(importlib.import_module(WINGS).__path__)
    ]
    found = sorted((m.FRAMEWORK for m in modules), key=lambda f: (not f.host_only, f.immutable, f.name))
    return MappingProxyType({f.name: f for f in found})


def advised(text: str) -> str:
    """What an error says, with what to do about it where a library is known to say no more."""
    known = (advice for f in frameworks().values() for said, advice in f.advice.items() if said in text)
    return "; ".join((text, *dict.fromkeys(known)))


def host_framework() -> Framework:
    """The framework whose arrays the oracle takes."""
    return next(f for f in frameworks().values() if f.host_only)


BY_TYPE: dict[type, Framework] = {}
"""Type of an array -> its framework, of the plain types seen so far."""


def framework_of(op: str, name: str, array: Any) -> Framework:
    """The framework that ``array`` belongs to; SpecError where it is not an array."""
    found = BY_TYPE.get(type(array))
    if found is None:
        found = _find_framework(op, name, array)
        found.load()
        if found.plain(type(array)):
            BY_TYPE[type(array)] = found
    return found


def _find_framework(op: str, name: str, array: Any) -> Framework:
    for framework in frameworks().values():
        if framework.is_array(array):
            return framework
    kind = type(array)
    what = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    *some, last = frameworks().values()
    titles = f"{', '.join(f.title for f in some)} or {last.title}"
    wrapped = f"{', '.join(f'{f.wrapper}({name})' for f in some)} or {last.wrapper}({name})"
    raise SpecError(f"{op}: {name} has type {what}; expected a {titles} array: wrap it with {wrapped}")


def convert(array: Any, src: Framework, dst: Framework, device: Any = None, copy: bool = False) -> Any:
    """``array`` of ``src`` as one of ``dst``, zero-copy where both can see the memory unless ``copy`` asks for memory
    of its own.

    ``device`` (dst's own): where the result must live; None: where it is. An array that shares an immutable one's
    memory must not be written to.
    """
    if src is dst:
        return array
    if not (src.host_only or dst.host_only) and src.target(src.device(array)).platform in ("cuda", "rocm"):
        return dst.from_dlpack(src.for_dlpack(array, copy))
    host = src.to_numpy(array)
    return dst.copied(host, device) if copy else dst.from_numpy(host, device)


def load_library(module: str, extra: str) -> Any:
    """Import an array library; UnavailableError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UnavailableError(f"{module} cannot be imported ({e}); {install.command(extra)}") from e
