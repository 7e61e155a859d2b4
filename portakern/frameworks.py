"""NumPy, PyTorch and JAX arrays behind one face: whose array is it, where does it live, how does it cross to another framework.

On the host every crossing goes through NumPy without a copy (bfloat16 as ml_dtypes); between PyTorch and JAX on a GPU it is
DLPack. Nothing here imports torch or jax until an array of theirs has been seen or asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from portakern.errors import SpecError, UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from portakern.call import Call

__all__ = ["DTYPE_NAME", "FRAMEWORKS", "Framework", "Target", "convert", "framework_of", "numpy_dtype"]


class Target(NamedTuple):
    """What runs the kernel: ``platform`` is cpu, cuda, rocm or tpu (``traced`` while JAX has not chosen one); ``arch`` like sm_90, gfx942, v5e, or empty."""

    platform: str
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.platform} {self.arch}".strip()


_NUMPY_DTYPES = {
    n: np.dtype(n) for n in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}
_NUMPY_DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)

DTYPE_NAME: dict[Any, str] = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}
"""dtype objects of every framework seen so far -> their name."""

HOST = Target("cpu")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype object for a name; bfloat16 is ml_dtypes'."""
    return _NUMPY_DTYPES[name]


class Framework:
    """One array library. Subclasses are stateless; there is one instance of each in ``FRAMEWORKS``."""

    name: str

    device: Callable[[Any], Any]
    """A hashable that is equal for two arrays that live together."""

    def load(self) -> Any:
        """Import the library and learn its dtypes; UnavailableError where it is not installed."""
        raise NotImplementedError

    def target(self, device: Any) -> Target:
        """The hardware behind a device."""
        raise NotImplementedError

    def devices(self) -> list[Any]:
        """The devices here, accelerators first."""
        raise NotImplementedError

    def owns(self, array: Any) -> bool:
        """Whether ``array`` is one of this library's."""
        try:
            return framework_of("", "", array) is self
        except SpecError:
            return False

    def poisoned(self) -> AbstractContextManager[None]:
        """While inside, fresh uninitialised arrays hold NaN, where the library can do that."""
        return nullcontext()

    def contiguous(self, array: Any) -> bool:
        """Whether elements lie in row-major order without gaps."""
        return True

    def check(self, call: Call) -> bool:
        """Refuse arrays of this library that no kernel can read as they are. Says whether the library differentiates or maps over any of them."""
        return False

    def to_numpy(self, array: Any) -> np.ndarray:
        """The values on the host; a view where the memory is the host's. The caller does not write to it."""
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray, device: Any) -> Any:
        """An array on ``device``; it may share memory with ``array``. device None is the host."""
        raise NotImplementedError

    def strided(
        self, memory: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, device: Any
    ) -> Any:
        """A view of ``memory`` (one axis) with strides and offset in elements, or its values where the library has no strides."""
        view = np.lib.stride_tricks.as_strided(memory[offset:], shape, tuple(s * memory.itemsize for s in strides))
        return self.from_numpy(view, device)

    def strides(self, array: Any) -> list[int] | None:
        """Strides in elements, None where the library has no strides."""
        return None

    def abstract(self, shape: tuple[int, ...], dtype: str, strides: Sequence[int] | None = None) -> Any:
        """An array of this form without memory, to compile for."""
        raise UnsupportedError(f"{self.name} has no arrays without memory")

    def full(self, shape: tuple[int, ...], dtype: str, value: float, device: Any) -> Any:
        return self.from_numpy(np.full(shape, value, numpy_dtype(dtype)), device)


class NumPy(Framework):
    name = "numpy"
    device = staticmethod(lambda array: "cpu")

    def load(self) -> Any:
        return np

    def target(self, device: Any) -> Target:
        return HOST

    def devices(self) -> list[Any]:
        return ["cpu"]

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def check(self, call: Call) -> bool:
        for name, array in call.arrays.items():
            if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
                raise SpecError(
                    f"{call.spec.name}: {name} is a numpy.ma.MaskedArray, whose mask no kernel sees; pass {name}.filled(...) instead"
                )
            if array is not None and type(array) is not np.ndarray:
                call.arrays[name] = array.view(
                    np.ndarray
                )  # a subclass may give operators another meaning: numpy.matrix does
        return False

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def strides(self, array: Any) -> list[int]:
        return [s // array.itemsize for s in array.strides]

    def from_numpy(self, array: np.ndarray, device: Any) -> np.ndarray:
        return array if array.flags.writeable else array.copy()


class Torch(Framework):
    name = "torch"
    device = staticmethod(lambda array: array.device)

    def load(self) -> Any:
        torch = _import("torch", "triton")
        DTYPE_NAME.update({getattr(torch, n): n for n in _NUMPY_DTYPES})
        return torch

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
    def poisoned(self) -> Iterator[None]:
        torch = self.load()
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(
            True, warn_only=True
        )  # torch.empty then fills with NaN (torch.utils.deterministic.fill_uninitialized_memory)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def contiguous(self, array: Any) -> bool:
        return bool(array.is_contiguous())

    def strides(self, array: Any) -> list[int]:
        return list(array.stride())

    def abstract(self, shape: tuple[int, ...], dtype: str, strides: Sequence[int] | None = None) -> Any:
        torch = self.load()
        kind = getattr(torch, dtype)
        return (
            torch.empty(shape, dtype=kind, device="meta")
            if strides is None
            else torch.empty_strided(shape, strides, dtype=kind, device="meta")
        )

    def check(self, call: Call) -> bool:
        torch = sys.modules["torch"]
        name = call.spec.arrays[0].name
        if call.arrays[name].is_meta:
            raise SpecError(
                f"{call.spec.name}: {name} is on meta, where there are no values; expected one on a device: torch.empty_like({name}, device='cpu')"
            )
        plain, strided, functorch = torch.Tensor, torch.strided, torch._C._functorch
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
                raise SpecError(
                    f"{call.spec.name}: {name} has layout {array.layout}; expected a strided tensor: pass {name}.to_dense()"
                )
            if array.is_neg():
                raise SpecError(f"{call.spec.name}: {name} is a lazily negated view; pass {name}.resolve_neg()")
            if inside_func and functorch.is_functorch_wrapped_tensor(array):
                watched = True
            if type(array) is not plain and type(array).__torch_dispatch__ is not plain.__torch_dispatch__:
                raise UnsupportedError(
                    f"{call.spec.name}: {name} is a {type(array).__name__}, which has no memory of its own; pass a plain torch.Tensor"
                )
        return watched

    def to_numpy(self, array: Any) -> np.ndarray:
        torch = sys.modules["torch"]
        host = array.detach().cpu()
        if host.dtype == torch.bfloat16:
            return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()

    def from_numpy(self, array: np.ndarray, device: Any) -> Any:
        torch = self.load()
        if array.dtype == ml_dtypes.bfloat16:
            tensor = torch.from_numpy(_for_torch(array.view(np.int16))).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(_for_torch(array))
        return tensor if device is None else tensor.to(device)

    def strided(
        self, memory: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, device: Any
    ) -> Any:
        return self.from_numpy(memory, device).as_strided(shape, strides, offset)


class Jax(Framework):
    name = "jax"

    @staticmethod
    def device(array: Any) -> Any:
        jax = sys.modules["jax"]
        if isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct)):  # its device is chosen at lowering
            return None
        devices = array.sharding.device_set
        return next(iter(devices)) if len(devices) == 1 else frozenset(devices)

    def load(self) -> Any:
        return _import("jax", "pallas")

    def target(self, device: Any) -> Target:
        if device is None:
            return Target("traced")
        if not hasattr(device, "platform"):
            n = len(device)
            raise UnsupportedError(
                f"the arrays are sharded over {n} devices; portakern runs on one: call it inside jax.shard_map, or gather with jax.device_put(x, device)"
            )
        if device.platform == "gpu":
            rocm = "rocm" in device.client.platform_version.lower()
            return (
                Target("rocm", "")
                if rocm
                else Target("cuda", "sm_" + str(getattr(device, "compute_capability", "")).replace(".", ""))
            )
        if device.platform == "tpu":
            return Target("tpu", device.device_kind.lower().removeprefix("tpu").strip().replace(" lite", "e"))
        return Target(device.platform)

    def abstract(self, shape: tuple[int, ...], dtype: str, strides: Sequence[int] | None = None) -> Any:
        return self.load().ShapeDtypeStruct(shape, numpy_dtype(dtype))

    def devices(self) -> list[Any]:
        jax = self.load()
        return list(dict.fromkeys([*jax.local_devices(), *jax.local_devices(backend="cpu")]))

    def check(self, call: Call) -> bool:
        for name, array in call.arrays.items():
            if array is not None and call.device is not None and array.is_deleted():
                raise SpecError(
                    f"{call.spec.name}: {name} was deleted, or donated to another computation; pass an array that still has its values"
                )
        return False

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray, device: Any) -> Any:
        jax = self.load()
        if array.dtype.itemsize == 8 and not jax.config.jax_enable_x64:
            if array.dtype.kind == "f":
                raise UnsupportedError(
                    "JAX would narrow this float64 array to float32; cast it first, or enable jax_enable_x64"
                )
            if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
                raise UnsupportedError(
                    "JAX would wrap this int64 array to int32 and its values do not fit; enable jax_enable_x64, or use smaller ids"
                )
        return jax.device_put(array, device if device is not None else jax.local_devices(backend="cpu")[0])


FRAMEWORKS: dict[str, Framework] = {f.name: f for f in (NumPy(), Torch(), Jax())}
_BY_TYPE: dict[type, Framework] = {np.ndarray: FRAMEWORKS["numpy"]}


def framework_of(op: str, name: str, array: Any) -> Framework:
    """The framework that ``array`` belongs to; SpecError where it is not an array."""
    found = _BY_TYPE.get(type(array))
    if found is None:
        found = _BY_TYPE[type(array)] = _find_framework(op, name, array)
        found.load()
    return found


def _find_framework(op: str, name: str, array: Any) -> Framework:
    if isinstance(array, np.ndarray):
        return FRAMEWORKS["numpy"]
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(array, torch.Tensor):
        return FRAMEWORKS["torch"]
    if jax is not None and isinstance(array, (jax.Array, jax.ShapeDtypeStruct)):
        return FRAMEWORKS["jax"]
    kind = type(array)
    what = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise SpecError(
        f"{op}: {name} has type {what}; expected a NumPy, PyTorch or JAX array: wrap it with numpy.asarray({name}), torch.tensor({name}) or jax.numpy.asarray({name})"
    )


def convert(array: Any, src: Framework, dst: Framework, device: Any = None, copy: bool = False) -> Any:
    """``array`` of ``src`` as one of ``dst``, zero-copy where both can see the memory unless ``copy`` asks for memory of its own.

    ``device`` (dst's own): where the result must live; None: where it is. A tensor that shares a JAX array's memory must not be written to.
    """
    if src is dst:
        return array
    on_gpu = src.name != "numpy" and src.target(src.device(array)).platform in ("cuda", "rocm")
    if on_gpu and dst.name != "numpy":
        dst_lib = dst.load()
        if src.name == "jax":
            tensor = dst_lib.from_dlpack(array)
            return tensor.clone() if copy else tensor
        tensor = array.detach().contiguous()
        return dst_lib.dlpack.from_dlpack(tensor.clone() if copy else tensor)
    host = src.to_numpy(array)
    return dst.from_numpy(np.array(host, order="C") if copy else host, device)


def _for_torch(array: np.ndarray) -> np.ndarray:
    """The same memory in a form that torch takes without a word: it has no negative strides, and warns on read-only arrays (which no backend writes to)."""
    if any(s < 0 for s in array.strides):
        return array.copy()
    return array if array.flags.writeable else np.asarray(_Writable(array))


class _Writable:
    """NumPy's array interface over a read-only array's memory, without the read-only flag."""

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        face = array.__array_interface__
        self.__array_interface__ = {**face, "data": (face["data"][0], False)}


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UnavailableError(
            f"{module} cannot be imported ({e}); install it with: pip install 'portakern[{extra}]'"
        ) from e
