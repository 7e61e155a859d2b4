"""PyTorch tensors. Nothing here imports torch until a tensor has been seen or asked for."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import numpy as np

from portakern.core.framework import DTYPE_NAME, Framework, distinct, load_library
from portakern.core.instruments import Instruments
from portakern.core.targets import Target
from portakern.errors import SpecError
from portakern.frameworks.torch import memory, staging
from portakern.frameworks.torch.memory import OFFSETS, begins
from portakern.spec.dtypes import DTYPES, DTypeInfo

if TYPE_CHECKING:
    from portakern.core.call import Call
    from portakern.core.dispatch import Choice

__all__ = ["Torch"]


FORMS = 1 << 20
"""Of calls of one function: more than any check has."""


def _graphs() -> int:
    """The graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _spoil(torch: Any) -> None:
    """Leave NaN in the memory that was given back last, which is handed out next."""
    kept = [torch.full((1 << e,), float("nan"), dtype=torch.float64) for e in range(3, 18) for _ in range(2)]
    if torch.cuda.is_initialized():
        kept += [torch.full_like(k, float("nan"), device="cuda") for k in kept]
    del kept


def _in_inference_mode(fn: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with sys.modules["torch"].inference_mode():
            return fn(*args, **kwargs)

    return called


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same memory in tensors that autograd watches. A function that reads it through another library says that it
    cannot, and is called as it was."""
    torch = sys.modules["torch"]

    def watched(value: Any) -> Any:
        able = isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype.itemsize > 1
        return value.detach().requires_grad_() if able else value

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            found = fn(*map(watched, args), **{n: watched(v) for n, v in kwargs.items()})
        except RuntimeError as e:
            if "requires grad" not in str(e):
                raise
            return fn(*args, **kwargs)
        several = found if isinstance(found, tuple | list) else (found,)
        outputs = tuple(y.detach() if isinstance(y, torch.Tensor) else y for y in several)
        return outputs if isinstance(found, tuple | list) else outputs[0]

    return called


class Torch(Framework):
    name, title, wrapper = "torch", "PyTorch", "torch.tensor"
    hallmark = "requires_grad"
    twins = MappingProxyType(
        {
            "causal_conv1d": "causal_conv1d",
            "cross_entropy": "cross_entropy",
            "embedding": "embedding",
            "grouped_mm": "grouped_matmul",
            "layer_norm": "layernorm",
            "linear_cross_entropy": "linear_cross_entropy",
            "logsumexp": "logsumexp",
            "matmul": "matmul",
            "rms_norm": "rmsnorm",
            "scaled_dot_product_attention": "attention",
            "scaled_grouped_mm": "scaled_grouped_matmul",
            "scaled_mm": "scaled_matmul",
            "softmax": "softmax",
            "varlen_attn": "varlen_attention",
        }
    )
    # all layouts but strided have no address to ask for, which is an error: no signature says which layout
    signature = "{x}.__class__, {x}.shape, {x}.stride(), {x}.dtype, {x}.device"
    there = f"({{x}}.data_ptr() > {OFFSETS} or {{framework}}.has_memory({{x}})) and not {{x}}.is_neg()"
    watched = "{x}.requires_grad"
    records = resizes = True
    environment = (
        "TRITON_INTERPRET",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "NVIDIA_TF32_OVERRIDE",
        "TORCHDYNAMO_DISABLE",
    )
    advice = MappingProxyType(
        {
            "0 active drivers": "Triton has no GPU here, and compiles for none: set TRITON_INTERPRET=1 in the "
            "environment before triton is imported, and kernels run in its interpreter"
        }
    )
    device = staticmethod(lambda array: array.device)
    _compiled: ClassVar[WeakSet[object]] = WeakSet()
    """What compiled its own functions where memory was poisoned."""

    def load(self) -> Any:
        torch = load_library("torch", "triton")
        DTYPE_NAME.update({getattr(torch, n): n for n in DTYPES})
        return torch

    def is_array(self, value: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)

    def plain(self, kind: type) -> bool:
        return kind in memory.READABLE or (memory.unreadable(kind) is None and not memory.stands_in(kind))

    def comparison(self, arrays: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        from portakern.frameworks.torch import comparing

        return comparing.comparison(arrays)

    def settled(self, kind: type) -> bool:
        torch = sys.modules["torch"]
        return kind is torch.Tensor or kind is torch.nn.Parameter

    def target(self, device: Any) -> Target:
        torch = sys.modules["torch"]
        if device.type == "cuda":
            if torch.version.hip:
                return Target("rocm", torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
            return Target("cuda", "sm_{}{}".format(*torch.cuda.get_device_capability(device)))
        return Target(device.type)

    def devices(self) -> list[Any]:
        torch = self.load()
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] + [torch.device("cpu")]

    @contextmanager
    def poisoned(self, caller: object = None) -> Iterator[None]:
        torch = self.load()
        if caller in self._compiled:
            _spoil(torch)
            yield
            return
        before, graphs = torch.get_deterministic_debug_mode(), _graphs()
        # torch.empty then fills with NaN (torch.utils.deterministic.fill_uninitialized_memory); the function of the
        # documentation, use_deterministic_algorithms, imports all of torch's compiler first, which takes seconds
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            # torch.compile compiles once more for another mode, up to a limit, and then no longer
            if caller is not None and _graphs() > graphs:
                self._compiled.add(caller)

    def compiled_each(self) -> AbstractContextManager[None]:
        config = sys.modules.get("torch._dynamo.config")
        if config is None:
            return nullcontext()
        limits = ("recompile_limit", "accumulated_recompile_limit")
        found: AbstractContextManager[None] = config.patch({n: FORMS for n in limits if hasattr(config, n)})
        return found

    def call_variants(self) -> Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
        return {
            **super().call_variants(),
            "in inference mode": _in_inference_mode,
            "on tensors that require gradients": _with_gradients,
        }

    def contiguous(self, array: Any) -> bool:
        return bool(array.is_contiguous())

    def may_write(self, array: Any, others: Sequence[Any]) -> bool:
        memory = begins(array)
        apart = all(begins(o) != memory for o in others)
        return apart and distinct(array.shape, array.stride())

    def overlap(self, a: Any, b: Any) -> bool:
        if "cpu" in (a.device.type, b.device.type):
            memory = begins(a)
            return (memory != 0 and memory == begins(b)) or super().overlap(a, b)
        (first, size), (second, other) = (
            (begins(x), x.untyped_storage().nbytes()) for x in (a, b)
        )  # of what lies on a device the host would compare copies, which take their time
        return bool(first and second and first < second + other and second < first + size)

    def memory(self, array: Any) -> np.ndarray | None:
        torch = sys.modules["torch"]
        whole = torch.empty(0, dtype=torch.uint8, device=array.device).set_(array.untyped_storage())
        return np.from_dlpack(whole.cpu()).copy()

    def copy(self, array: Any) -> Any:
        torch = sys.modules["torch"]
        return array.detach().clone(memory_format=torch.contiguous_format)

    def write(self, array: Any, values: Any) -> None:
        array.detach().copy_(values)  # which tells autograd

    def strides(self, array: Any) -> list[int]:
        return list(array.stride())

    def past_alignment(self, array: Any) -> int:
        return int(array.storage_offset() * array.element_size() % 16)

    def wants_gradient(self, array: Any) -> bool:
        return bool(array.requires_grad)

    def abstract(
        self, shape: tuple[int, ...], dtype: str, strides: Sequence[int] | None = None, past_alignment: int = 0
    ) -> Any:
        torch = self.load()
        kind = getattr(torch, dtype)
        made = (
            torch.empty(shape, dtype=kind, device="meta")
            if strides is None
            else torch.empty_strided(shape, strides, dtype=kind, device="meta")
        )
        if not past_alignment:
            return made
        before = past_alignment // kind.itemsize
        memory = torch.empty(before + made.untyped_storage().nbytes() // kind.itemsize, dtype=kind, device="meta")
        return memory.as_strided(made.shape, made.stride(), before)

    def has_memory(self, array: Any) -> bool:
        """Whether a tensor whose elements seem to lie near address 0 has memory: an offset into none looks so too."""
        return begins(array) != 0

    def check(self, call: Call) -> bool:
        torch = sys.modules["torch"]
        name = call.spec.arrays[0].name
        if call.arrays[name].is_meta:
            raise SpecError(
                f"{call.spec.name}: {name} is on meta, where there are no values; expected one on a device: "
                f"torch.empty_like({name}, device='cpu')"
            )
        strided, functorch = torch.strided, torch._C._functorch
        inside_func = functorch.peek_interpreter_stack() is not None
        grad, dual = torch.is_grad_enabled(), torch.autograd.forward_ad._current_level >= 0
        watched = False
        for name, array in call.arrays.items():
            if array is None:
                continue
            if (grad and array.requires_grad) or (
                dual and torch.autograd.forward_ad.unpack_dual(array).tangent is not None
            ):
                watched = True
            if array.layout is not strided:
                dense = "to_padded_tensor(0.0)" if array.is_nested else "to_dense()"
                raise SpecError(
                    f"{call.spec.name}: {name} has layout {array.layout}; expected a strided tensor: pass "
                    f"{name}.{dense}"
                )
            if inside_func and functorch.is_functorch_wrapped_tensor(array):
                watched = True  # what lies within comes here again
                continue
            plain = memory.readable(call.spec.name, name, array)
            if plain is not array:
                if name in call.over:
                    raise SpecError(
                        f"{call.spec.name}: overwrite names {name}, whose values are not in its memory as they are: "
                        f"the result would lie over a copy; leave it out, or pass {name}.clone()"
                    )
                call.arrays[name] = plain
        return watched

    def to_numpy(self, array: Any) -> np.ndarray:
        torch = sys.modules["torch"]
        host = memory.materialised(array.detach()).cpu()
        d = DTYPES.get(DTYPE_NAME.get(host.dtype, ""))
        # by DLPack: what a tensor's own numpy() has shown can never be resized again, and sharding and offloading
        # resize the storages of parameters
        if d is None or d.native:
            return np.from_dlpack(host)
        return np.from_dlpack(host.view(getattr(torch, _bits(d)))).view(d.numpy)

    def from_numpy(self, array: np.ndarray, device: Any) -> Any:
        torch = self.load()
        d = DTYPES.get(DTYPE_NAME.get(array.dtype, ""))
        if d is None or d.native:
            tensor = torch.from_numpy(_for_torch(array))
        else:
            tensor = torch.from_numpy(_for_torch(array.view(_bits(d)))).view(getattr(torch, d.name))
        return tensor if device is None else tensor.to(device)

    def copied(self, array: np.ndarray, device: Any) -> Any:
        tensor = self.from_numpy(array, device)  # over NumPy's memory, which PyTorch cannot resize
        return tensor.clone(memory_format=sys.modules["torch"].contiguous_format) if tensor.is_cpu else tensor

    def full(self, shape: tuple[int, ...], dtype: str, value: float, device: Any) -> Any:
        torch = self.load()
        return torch.full(shape, value, dtype=getattr(torch, dtype), device=device)

    def strided(
        self, memory: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, device: Any
    ) -> Any:
        return self.from_numpy(memory, device).as_strided(shape, strides, offset)

    def for_dlpack(self, array: Any, copy: bool) -> Any:
        array = array.detach().contiguous()
        return array.clone() if copy else array

    def from_dlpack(self, array: Any) -> Any:
        return self.load().from_dlpack(array)

    def accelerator_names(self) -> list[str]:
        if not importlib.util.find_spec("torch"):
            return []
        torch = self.load()
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]

    def instruments(self, device: Any) -> Instruments:
        from portakern.frameworks.torch import timing

        return timing.TorchInstruments(self, device)

    def wrote(self, arrays: Sequence[Any]) -> None:
        """They have new versions, as after any operation in place: a graph that saved one then knows."""
        changed = [a for a in arrays if not a.is_inference()]
        sys.modules["torch"].autograd.graph.increment_version(changed)

    # --- who else sees the calls: autograd, torch.func, torch.compile, dispatch modes, autocast ---

    def differentiate(self, call: Call, choice: Choice) -> tuple[tuple[Any, ...], Any]:
        from portakern.frameworks.torch import eager

        return eager.differentiate(call, choice)

    def interposes(self, casts: bool) -> str | None:
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        core = torch._C  # every op call asks this: nothing is called that need not be
        if torch.compiler.is_compiling() or core._len_torch_dispatch_stack() or core._get_tracing_state() is not None:
            return "records"
        if torch.autograd.profiler._is_profiler_enabled:
            from portakern.frameworks.torch import profiling

            if not profiling.begun():
                return "profiles"
        return "casts" if casts and core._is_any_autocast_enabled() else None

    def distributes(self, spec: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if "torch.distributed.tensor" not in sys.modules:
            return False
        from portakern.frameworks.torch import sharded

        if not sharded.are_distributed(spec, args, kwargs):
            return False
        sharded.register(spec)
        return True

    def in_parts(self, call: Call, choice: Choice, target: Target, oracle: bool) -> tuple[list[str], Call]:
        if not any(memory.is_distributed(a) for a in call.arrays.values()):
            return [], call
        from portakern.frameworks.torch import moves

        return moves.explained(call, choice)

    def undisturbed(self, casts: bool) -> bool:
        modes, tracing, transforms, casting, forward_ad, profiler, compiler = self._watchers
        return not (
            modes()
            or compiler._is_compiling_flag  # torch.export may run Python as it is
            or tracing() is not None
            or transforms() is not None
            or forward_ad._current_level >= 0
            or profiler._is_profiler_enabled
            or (casts and casting())
        )

    @functools.cached_property
    def _watchers(self) -> tuple[Any, ...]:
        """Who is asked before every call: functions at hand, since to look each of them up takes as long as to ask."""
        import torch
        from torch.autograd import forward_ad, profiler

        core = torch._C
        modes, tracing = core._len_torch_dispatch_stack, core._get_tracing_state
        return (
            modes, tracing, core._functorch.peek_interpreter_stack, core._is_any_autocast_enabled, forward_ad, profiler,
            torch.compiler,
        )  # fmt: skip

    def watching(self) -> bool:
        return bool(sys.modules["torch"].is_grad_enabled())

    def recording_python(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.compiler.is_dynamo_compiling())

    def recorder(self) -> Callable[[], bool]:
        torch = sys.modules.get("torch")
        found = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", None)
        return found or self.recording_python

    def keep(self, op: Any) -> Any:
        return staging.keep(op)

    def record(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = op.kept["torch"].key
        staging.stage(key, len(args), tuple(kwargs))
        return getattr(staging.FOUND, key)(*args, **kwargs)

    def recorded_op(self, make: Callable[..., Any], *args: Any) -> Any:
        return getattr(staging.FOUND, staging.prepare(make, *[staging.constant(a) for a in args]))

    def profiled(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from portakern.frameworks.torch import profiling

        return profiling.recorded(op, args, kwargs)

    def cast(self, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from portakern.frameworks.torch import autograd

        return autograd.autocast(spec, args, kwargs)


def _bits(d: DTypeInfo) -> str:
    """The dtype as which an array crosses between PyTorch and NumPy where only ml_dtypes knows its own."""
    return f"{'u' * (d.bits == 8)}int{d.bits}"  # PyTorch's uint16 has next to no operations


def _for_torch(array: np.ndarray) -> np.ndarray:
    """The same memory in a form that torch takes without a word: it has no negative strides, nor any between two
    elements, which fields of packed records have, and warns on read-only arrays (which no backend writes to)."""
    if any(s < 0 or s % array.itemsize for s in array.strides):
        return array.copy(order="C")
    return array if array.flags.writeable else np.asarray(_Writable(array))


class _Writable:
    """NumPy's array interface over a read-only array's memory, without the read-only flag."""

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        face = array.__array_interface__
        self.__array_interface__ = {**face, "data": (face["data"][0], False)}
