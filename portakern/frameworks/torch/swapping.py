"""portakern under code that calls PyTorch's functions: :class:`swapped`, and what it tells of itself."""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, compiler
from torch._ops import HigherOrderOperator
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, resolve_name
from torch.utils import checkpoint

from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch import products
from portakern.frameworks.torch.functions import (
    LOSS_PARALLEL,
    cross_entropy,
    embedding,
    into,
    layer_norm,
    linear_cross_entropy,
    logsumexp,
    loss_is_parallel,
    matmul,
    rms_norm,
    scaled_dot_product_attention,
    softmax,
)
from portakern.frameworks.torch.grouped import grouped_mm
from portakern.frameworks.torch.memory import READABLE, unreadable
from portakern.frameworks.torch.varlen import varlen_attn

__all__ = ["SWAPS", "Swap", "swapped"]

log = logging.getLogger("portakern")


class Swap(NamedTuple):
    """What stands for one of PyTorch's functions: ``twin``, called with its arguments and ``backend``, on ``op``."""

    twin: Callable[..., Any]
    op: str


def _softmax(
    input: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """``torch.softmax``, whose arguments are not those of ``torch.nn.functional.softmax``."""
    return into("softmax", out, softmax(input, dim, dtype=dtype, backend=backend))


def _softmin(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.nn.functional.softmin``: the softmax of -input."""
    return softmax(-input, dim, _stacklevel, dtype, backend=backend)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch.layer_norm``; ``cudnn_enable`` is ignored."""
    return layer_norm(input, normalized_shape, weight, bias, eps, backend=backend)


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """``torch._grouped_mm``, which ``torch.nn.functional.grouped_mm`` calls."""
    return grouped_mm(self, mat2, offs=offs, bias=bias, out_dtype=out_dtype, backend=backend)


@functools.wraps(cross_entropy)
def _cross_entropy(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if loss_is_parallel(input):
        raise products.Elsewhere(f"cross_entropy: {LOSS_PARALLEL}")
    return cross_entropy(input, *args, **kwargs)


def _rmatmul(input: Tensor, other: Tensor, *, backend: str | None = None) -> Tensor:
    return matmul(other, input, backend=backend)


class _WithLse(NamedTuple):
    """What ``varlen_attn`` is asked for beside o."""

    lse: bool = True


def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    *more: Any,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator that ``torch.nn.attention.varlen.varlen_attn`` calls, which modes see where they do not see that:
    (o, lse, state of random numbers, which there are none of). ``is_causal`` beside ``window_size``: the same as (-1,
    0). ``more``: enable_gqa, seqused_k, block_table, num_splits."""
    window = tuple(window_size or (-1, -1))
    names = ("enable_gqa", "seqused_k", "block_table", "num_splits")
    arguments = query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal and window != (-1, 0), _WithLse()
    o, lse = varlen_attn(
        *arguments, scale=scale, window_size=window, **dict(zip(names, more, strict=False)), backend=backend
    )
    return o, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


def _varlen_attn_out(out: Tensor, *arguments: Any, backend: str | None = None) -> Tensor:
    """The same for ``varlen_attn_out``, which writes o to ``out``: lse."""
    o, lse, _ = _varlen_attn(*arguments, backend=backend)
    into("varlen_attn_out", out, o)
    return lse


def _of_varlen() -> dict[Any, Swap]:
    """The operators of PyTorch's attention of packed sequences, of which a release has none, one or both."""
    try:
        import torch.nn.attention.varlen
    except ImportError:
        return {}
    twins: dict[str, Callable[..., Any]] = {"_varlen_attn": _varlen_attn, "_varlen_attn_out": _varlen_attn_out}
    there = {n: getattr(torch.ops.torch_attn, n) for n in twins if hasattr(torch.ops.torch_attn, n)}
    return {theirs: Swap(twins[n], "varlen_attention") for n, theirs in there.items()}


def not_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile traces where its callers are traced and does not compile by itself, as it would
    after a graph break: of a mode's own code it then returns a count for a result.

    ``torch._dynamo.eval_frame.skip_code`` does the same, and takes a second to import."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


SWAPS: Mapping[Any, Swap] = {
    F.scaled_dot_product_attention: Swap(scaled_dot_product_attention, "attention"),
    F.softmax: Swap(softmax, "softmax"),
    F.softmin: Swap(_softmin, "softmax"),
    torch.softmax: Swap(_softmax, "softmax"),
    torch.special.softmax: Swap(_softmax, "softmax"),
    Tensor.softmax: Swap(_softmax, "softmax"),
    torch.logsumexp: Swap(logsumexp, "logsumexp"),
    torch.special.logsumexp: Swap(logsumexp, "logsumexp"),
    Tensor.logsumexp: Swap(logsumexp, "logsumexp"),
    F.cross_entropy: Swap(_cross_entropy, "cross_entropy"),
    F.embedding: Swap(embedding, "embedding"),
    F.layer_norm: Swap(layer_norm, "layernorm"),
    torch.layer_norm: Swap(_layer_norm, "layernorm"),
    F.rms_norm: Swap(rms_norm, "rmsnorm"),
    torch.rms_norm: Swap(rms_norm, "rmsnorm"),
    F.linear: Swap(products.linear, "matmul"),
    torch.matmul: Swap(matmul, "matmul"),
    torch.linalg.matmul: Swap(matmul, "matmul"),
    Tensor.matmul: Swap(matmul, "matmul"),
    Tensor.__matmul__: Swap(matmul, "matmul"),
    Tensor.__rmatmul__: Swap(_rmatmul, "matmul"),
    torch.mm: Swap(products.mm, "matmul"),
    Tensor.mm: Swap(products.mm, "matmul"),
    torch.bmm: Swap(products.bmm, "matmul"),
    Tensor.bmm: Swap(products.bmm, "matmul"),
    torch.addmm: Swap(products.addmm, "matmul"),
    Tensor.addmm: Swap(products.addmm, "matmul"),
    torch.baddbmm: Swap(products.baddbmm, "matmul"),
    Tensor.baddbmm: Swap(products.baddbmm, "matmul"),
    torch.einsum: Swap(products.einsum, "matmul"),
} | {
    theirs: swap
    for theirs, swap in (  # older releases have none
        (getattr(F, "linear_cross_entropy", None), Swap(linear_cross_entropy, "linear_cross_entropy")),
        (getattr(torch, "_grouped_mm", None), Swap(_grouped_mm, "grouped_matmul")),
        *_of_varlen().items(),
    )
    if theirs
}
"""PyTorch's functions that :func:`swapped` replaces."""

OPERATORS = frozenset({Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__})
"""What the operator @ may be by the time that a mode sees it. PyTorch takes a TypeError of an operator's for "try the
other operand", and loses its words."""

ALIASES = {"axis": "dim", "x": "input", "x1": "input", "x2": "other"}
"""NumPy's names, which PyTorch takes for its own where a function is called by keyword."""

MOST = 256
"""How many reasons, and how many functions, a report tells apart."""


class swapped(TorchFunctionMode):
    """Within this context PyTorch's scaled_dot_product_attention, softmax, softmin, logsumexp, cross_entropy and
    linear_cross_entropy (of targets that are classes), embedding, layer_norm, rms_norm, matmul, linear, mm, bmm, addmm,
    baddbmm, grouped_mm, varlen_attn, and einsum where it is a product of two matrices (functions, methods and the
    operator @) run on portakern.

    >>> with portakern.torch.swapped() as s:
    ...     model(x).sum().backward()
    >>> print(s.report())

    The context applies to the thread that entered it, and to backward passes that start inside it, on any thread.
    ``torch.utils.checkpoint`` recomputes on portakern what ran inside it, even in a later backward pass. Other threads
    call PyTorch's functions until they enter their own context. A context may be entered around a function that
    torch.compile compiles, or inside it; but grouped_mm, which torch.compile shows to no context, is then PyTorch's.
    Calls that are traced without it (in ``multi_head_attention_forward`` and
    checkpoints) are refused with fullgraph=True, and otherwise run outside of the graph.

    Args:
      backend: the backend that must run them; None: chosen from the arrays.
      otherwise: for a call that portakern refuses: "raise", or "torch": PyTorch runs it, which is logged once per
        reason. For ``a @ b`` and ``a.matmul(b)`` the error is a plain ValueError with the same message, because PyTorch
        drops the message of a TypeError (and a SpecError is one).
    """

    def __init__(self, backend: str | None = None, otherwise: Literal["raise", "torch"] = "raise") -> None:
        super().__init__()
        if otherwise not in ("raise", "torch"):
            raise SpecError(f"swapped: otherwise is {otherwise!r}; expected 'raise' or 'torch'")
        self.backend, self.otherwise = backend, otherwise
        self.served: dict[Any, int] = {}
        self.refused: dict[tuple[str, str] | None, int] = {}
        self.elsewhere: dict[tuple[str, str] | None, int] = {}
        self.others: dict[Any, int] = {}

    def __enter__(self) -> swapped:
        _follow()
        super().__enter__()
        return self

    @not_alone
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        # what is traced runs later, and may run often; torch.compiler.is_compiling takes twice as long to say so
        compiling = is_dynamo_compiling() or compiler._is_compiling_flag
        if not compiling and func in _passing:  # most calls: every line here is on their path
            try:
                self.others[func] += 1
            except KeyError:
                _count(self.others, func)
            return func(*args, **kwargs) if kwargs else func(*args)
        swap = SWAPS.get(func)
        kwargs = kwargs or {}
        if swap is None:
            if not compiling:
                again = _entered(func)
                # a class of tensors that answers functions itself is asked by the original
                if again is not None and all(k in READABLE or unreadable(k) is None for k in kinds):
                    with self:
                        return again(*args, **kwargs)
                if again is None:
                    _passing.add(func)
                _count(self.others, func)
            elif isinstance(func, HigherOrderOperator) or func in _entering:
                return self._passed_over(func, args, kwargs)
            return func(*args, **kwargs)
        if compiling:  # where a misfit of names, which is mended below, ends the trace
            kwargs = _renamed(kwargs)
        try:
            result = swap.twin(*args, backend=self.backend, **kwargs)
        except (SpecError, UnsupportedError, TypeError, products.Elsewhere) as e:
            return self._unserved(func, swap, e, args, kwargs)
        if not compiling:
            self.served[func] = self.served.get(func, 0) + 1
        return result

    def _unserved(self, func: Any, swap: Swap, e: Exception, args: Any, kwargs: dict[str, Any]) -> Any:
        """What becomes of a call that the twin did not serve."""
        name, why = _name(func), _words(e)
        if isinstance(e, products.Elsewhere):
            _count(self.elsewhere, (name, why))
            return func(*args, **kwargs)
        if isinstance(e, TypeError) and not isinstance(e, SpecError):
            renamed = _renamed(kwargs)
            if renamed.keys() != kwargs.keys():
                return self.__torch_function__(func, (), args, renamed)
            try:
                inspect.signature(swap.twin).bind(*args, **kwargs)
            except TypeError as misfit:
                why = f"{name}: {misfit}; expected arguments of PyTorch's signature: {_parameters(swap.twin)}"
                e = SpecError(why)
            else:
                raise e
        _count(self.refused, (name, why))
        if self.otherwise == "torch":
            if self.refused.get((name, why)) == 1:
                _say(name, why)
            return func(*args, **kwargs)
        if func in OPERATORS and isinstance(e, TypeError):
            raise ValueError(why) from e
        raise e

    def _passed_over(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What becomes of a function that torch.compile traces and that may call what is swapped: no mode is on there,
        and none can be."""
        name = _name(func)
        if name in INNOCENT:
            return func(*args, **kwargs)
        message = (
            f"{name}: torch.compile traces what it calls without swapped(); expected functions that are swapped "
            "themselves: leave out fullgraph=True, with which it is not traced, or pass otherwise='torch'"
        )
        if self.otherwise == "raise":
            raise UnsupportedError(message)
        _say(name, message)
        return func(*args, **kwargs)

    def report(self) -> str:
        """What was served so far, and what was not and why, in lines of text.

        Calls are those of PyTorch's functions: of a backward pass it counts what recomputation calls, and gradients run
        on whoever served the forward call. Calls that ``torch.compile`` traces are not counted.
        """
        lines = [f"portakern served {_calls(sum(self.served.values()))}"]
        by_op: dict[str, dict[str, int]] = {}
        for func, n in self.served.items():
            by_op.setdefault(SWAPS[func].op, {})[_name(func)] = n
        for op, names in sorted(by_op.items(), key=lambda item: -sum(item[1].values())):
            each = ", ".join(f"{name} {n}" for name, n in sorted(names.items(), key=lambda item: -item[1]))
            lines.append(f"  {op} {sum(names.values())}: {each}")
        fate = "PyTorch served them" if self.otherwise == "torch" else "an error was raised"
        for title, counts in (
            (f"refused, {fate}:", self.refused),
            ("not what an op computes, PyTorch served them:", self.elsewhere),
        ):
            if counts:
                lines.append(title)
                lines += [
                    f"  {key[0]} {n}: {key[1]}" if key else f"  {n} for more reasons" for key, n in counts.items()
                ]
        return "\n".join(lines + _others(self.others))


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords by PyTorch's own names."""
    return {ALIASES.get(k, k): v for k, v in kwargs.items()}


def _words(e: Exception) -> str:
    """What an exception says; torch 2.11 traces no ``str`` of one."""
    return str(e.args[0]) if e.args else ""


def _parameters(twin: Callable[..., Any]) -> str:
    return ", ".join(name for name in inspect.signature(twin).parameters if name != "backend")


INNOCENT = frozenset({"flex_attention", "flex_attention_backward"})
"""Operators of functions that call nothing that is swapped."""


@torch.compiler.assume_constant_result
def _say(name: str, why: str) -> None:
    log.warning("portakern: PyTorch serves a swapped call: %s", why)


@torch.compiler.assume_constant_result
def _name(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__name__", str(func))


def _calls(n: int) -> str:
    return f"{n} call" if n == 1 else f"{n} calls"


def _count(counts: dict[Any, int], key: Any) -> None:
    """Count a call; under None where as many as a report tells apart are counted already."""
    if key not in counts and len(counts) >= MOST:
        key = None
    counts[key] = counts.get(key, 0) + 1


def _others(counts: Mapping[Any, int]) -> list[str]:
    """The lines on functions that are not swapped: those that compute, by name, elementwise ones together."""
    computing: dict[str, int] = {}
    elementwise = 0
    for func, n in counts.items():
        kind = _kind(func)
        if kind == "elementwise":
            elementwise += n
        elif kind == "computes":
            computing[_name(func)] = computing.get(_name(func), 0) + n
    listed = [f"{name} {n}" for name, n in sorted(computing.items(), key=lambda item: -item[1])]
    listed += [f"elementwise functions {elementwise}"] * bool(elementwise)
    return ["not swapped, PyTorch's own: " + ", ".join(listed)] if listed else []


def _kind(func: Any) -> str:
    """What a function does, by the ATen operator of its name: "elementwise", "computes", or "looks" at a tensor."""
    name = getattr(func, "__name__", "").strip("_")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return "looks"
    overloads = [getattr(packet, o) for o in packet.overloads()]
    if any(torch.Tag.pointwise in o.tags for o in overloads):
        return "elementwise"
    schema = overloads[0]._schema
    given = any("Tensor" in str(a.type) for a in schema.arguments)
    fresh = any("Tensor" in str(r.type) and r.alias_info is None for r in schema.returns)
    return "computes" if given and fresh and name not in LOOKS else "looks"


LOOKS = frozenset(
    {"cat", "clone", "contiguous", "detach", "ones_like", "reshape", "stack", "to", "type_as", "zeros_like"}
)
"""Names of operators that make, move or cast values."""

CHECKS = frozenset({"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"})


BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""Functions inside which anything may run."""

NAMES = frozenset(func.__name__ for func in SWAPS)


@functools.cache
def _entered(func: Any) -> types.FunctionType | None:
    """The code of a Python function of PyTorch's that asks modes at its beginning, without that question: what
    ``swapped`` runs with itself on, so that what the function calls is swapped too. None for any other function, and
    for one that calls nothing that is swapped.

    While a mode handles a call it is off. Of ``multi_head_attention_forward`` the products inside, and of ``backward``
    the whole backward pass with all that it recomputes, would be PyTorch's and nobody would know. A method of Tensor's
    calls C code by its own name, which a mode cannot tell from another call of the method, and is not entered.
    """
    if not isinstance(func, types.FunctionType):
        return None
    module = func.__globals__.get("__name__")
    if func not in BACKWARD and (module not in ("torch.nn.functional", "torch.functional") or not _reaches(func)):
        return None
    asked = CHECKS.intersection(func.__code__.co_names)
    if not asked or not asked <= func.__globals__.keys():  # another way to ask is not taken out here
        return None
    names = _Globals(dict.fromkeys(asked, lambda *args: False), func.__globals__)
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _reaches(func: types.FunctionType, seen: tuple[Any, ...] = ()) -> bool:
    """Whether a function, or another of its module that it calls, names a swapped function or multiplies matrices."""
    if any(i.opname == "BINARY_OP" and i.argrepr in ("@", "@=") for i in dis.get_instructions(func)):
        return True
    names = set(func.__code__.co_names)
    called = [func.__globals__.get(name) for name in names]
    own = [f for f in called if isinstance(f, types.FunctionType) and f.__globals__ is func.__globals__]
    return bool(names & NAMES) or any(_reaches(f, (*seen, func)) for f in own if f not in seen and f is not func)


class _Globals(dict[str, Any]):
    """A module's names, as they are when they are looked up, but for those that are given another meaning."""

    def __init__(self, changed: Mapping[str, Any], module: Mapping[str, Any]) -> None:
        super().__init__(changed)
        self.module = module

    def __missing__(self, name: str) -> Any:
        return self.module[name]


def _as_entered(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, run under those swapped contexts that are entered now, whenever it is run."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, swapped)]
    if not modes:
        return fn

    @functools.wraps(fn)
    def again(*args: Any, **kwargs: Any) -> Any:
        active = _get_current_function_mode_stack()
        with ExitStack() as stack:
            for mode in modes:
                if not any(mode is other for other in active):
                    stack.enter_context(mode)
            return fn(*args, **kwargs)

    return again


@torch.compiler.assume_constant_result
@not_alone
def _follow() -> None:
    """What is done before anything is swapped, also while torch.compile traces."""
    _follow_checkpoints()
    if not _entering:
        modules = (torch.nn.functional, torch.functional)
        _entering.update(f for m in modules for f in vars(m).values() if _is_function(f) and _entered(f) is not None)


_entering: set[Any] = set()
"""PyTorch's own functions that ``_entered`` knows."""

_passing: set[Any] = set()
"""Functions that were called, are not swapped and call nothing that is."""


def _is_function(f: Any) -> bool:
    return isinstance(f, types.FunctionType) and f not in SWAPS


@functools.cache
def _follow_checkpoints() -> None:
    """Let PyTorch's checkpoints recompute under the contexts under which they ran, once in a process.

    A checkpoint remembers autocast and the generator's state, and of function modes the device alone. Both of its forms
    keep the function that they run again in a class of their own, whose method is told to keep it with its contexts;
    outside of any context it is kept as it is.
    """
    forward, init = checkpoint.CheckpointFunction.forward, checkpoint._CheckpointFrame.__init__

    @functools.wraps(forward)
    def reentrant(ctx: Any, run_function: Any, *args: Any) -> Any:
        return forward(ctx, _as_entered(run_function), *args)

    @functools.wraps(init)
    def frame(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        init(self, _as_entered(recompute_fn), *args, **kwargs)

    checkpoint.CheckpointFunction.forward = staticmethod(reentrant)
    checkpoint._CheckpointFrame.__init__ = frame
