"""Compiled calls on CPU tensors: all of the way to a launch but the driver, which counts launches and runs none."""

from __future__ import annotations

import contextlib
import importlib
import math
from types import SimpleNamespace

import torch
import triton
from triton.runtime.jit import JITFunction

from portakern.backends.triton import launch, launcher, plan
from portakern.backends.triton.descriptors import is_descriptor
from portakern.core import cache, registry, targets

EMPTY = torch.empty_strided
DRIVER = importlib.import_module("triton.backends.nvidia.driver")


def addressed(value):
    """What a launcher's C function takes, the address of a tensor in its place, as the function reads it."""
    if isinstance(value, (tuple, list)):
        return tuple(map(addressed, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


class Driver:
    """Attributes: compiled: kernels that Triton itself launched, by name. launches: arguments of the C functions."""

    def __init__(self):
        self.compiled, self.launches, self.memory, self.turns, self.on_launch = [], [], {}, {}, lambda: None

    def allocate(self, shape, strides, dtype, device=None):
        """An array where that of the same turn in the last call lay, as a caching allocator gives it (:meth:`call`)."""
        kind = (math.prod(shape), dtype)  # an output may be made in its own shape, or seen in it
        turn = self.turns[kind] = self.turns.get(kind, 0) + 1
        if (kind, turn) not in self.memory:
            self.memory[kind, turn] = EMPTY(shape, strides, dtype=dtype)
        storage = self.memory[kind, turn].untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

    def call(self, function):
        """Calls a function; the arguments of the launches that it made, addresses in what was allocated as distances
        from where it begins: ("new0", 32) of what is used first."""
        self.turns.clear()
        before, names = len(self.launches), dict[int, str]()
        function()
        return [self.placed(args, names) for args in self.launches[before:]]

    def placed(self, value, names):
        if isinstance(value, tuple):
            return tuple(self.placed(v, names) for v in value)
        for memory in self.memory.values() if type(value) is int else ():
            begin, size = memory.data_ptr(), memory.untyped_storage().nbytes()
            if begin <= value < begin + size:
                return names.setdefault(begin, f"new{len(names)}"), value - begin
        return value

    def launch(self, *args):
        self.on_launch()
        self.launches.append(addressed(args))

    def first(self, kernel):
        def run(*args, **constexprs):
            self.compiled.append(kernel.__name__)
            return SimpleNamespace(run=self.launcher(args), function=5, packed_metadata=(4, 1, 0), asm={})

        return run

    def launcher(self, args):
        """A launcher of the Triton that is installed, without what it would ask a driver."""
        run = DRIVER.CudaLauncher.__new__(DRIVER.CudaLauncher)
        run.launch = self.launch
        described = {i: "tensordesc<fp32[1,4,16]>" if is_descriptor(a) else "*fp32" for i, a in enumerate(args)}
        metas = [{"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 4, 16], "fp4_padded": False}
                 for a in args if is_descriptor(a)]  # fmt: skip
        if metas:
            run.launch = DRIVER.wrap_handle_tensordesc(self.launch, described, metas)
        sizes = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
        others = ("launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")
        vars(run).update(dict.fromkeys(sizes, 0), num_ctas=1, gsan_enabled=False, **{n: n for n in others})
        return run


@contextlib.contextmanager
def fake_gpu(monkeypatch, arch="sm_90"):
    """While inside, calls of the backend triton on CPU tensors are compiled ones for ``arch``."""
    driver, utils = Driver(), SimpleNamespace(
        fill_tma_descriptor=lambda *args: ("map", args[0]), fill_tma_descriptor_tiled=lambda *args: ("map", args[0])
    )  # fmt: skip
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: driver.first(self))
    warmed = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[]))
    monkeypatch.setattr(JITFunction, "warmup", lambda self, *args, grid, **constexprs: warmed)
    monkeypatch.setattr(launcher, "current_device", lambda: -1)
    monkeypatch.setattr(launcher, "current_stream", lambda index: 77)
    monkeypatch.setattr(launch, "_launchers", {})
    monkeypatch.setattr(plan, "quick_on", lambda device: driver.allocate)
    monkeypatch.setattr(torch, "empty_strided", driver.allocate)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(registry.backend("triton"), "standing_for", targets.find(arch).target)
    cache.forget()
    try:
        yield driver
    finally:
        cache.forget()
