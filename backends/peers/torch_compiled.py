"""PyTorch's own functions through ``torch.compile``: kernels that Inductor writes for each shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from portakern.backends.peers import torch_eager
from portakern.backends.peers.provide import LACKS, provides
from portakern.core.backend import Backend

BACKEND = Backend(
    "torch_compile",
    framework="torch",
    peer=True,
    platforms=("cpu", "cuda", "rocm"),
    requires=("torch",),
    extra="triton",
    refusals=(LACKS, "torch wants", "torch is set"),
)
SHAPES = 10_000  # of one function; past torch's own limit it would run uncompiled


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` compiled whole, anew for each shape."""

    @functools.cache
    def made() -> Callable[..., Any]:
        import torch

        found: Callable[..., Any] = torch.compile(fn, fullgraph=True, dynamic=False, recompile_limit=SHAPES)
        return found

    @functools.wraps(fn)
    def run(**arguments: Any) -> Any:
        return made()(**arguments)

    run.__module__ = __name__
    return run


provides(BACKEND, gradients=False)(compiled(torch_eager.softmax))
provides(BACKEND, gradients=False)(compiled(torch_eager.softmax_vjp))
provides(BACKEND, refuses=torch_eager.one_dtype)(compiled(torch_eager.layernorm))
provides(BACKEND, refuses=torch_eager.one_dtype)(compiled(torch_eager.rmsnorm))
provides(BACKEND, refuses=torch_eager.as_precise, around=torch_eager.as_asked)(compiled(torch_eager.matmul))
provides(BACKEND, refuses=torch_eager.attention_wants, around=torch_eager.as_asked)(compiled(torch_eager.attention))
