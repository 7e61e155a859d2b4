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
SHAPES = 10_000
"""Of how many forms of arguments a function is compiled; past torch's own limit it would run uncompiled."""


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` compiled whole, anew for each form of its arguments."""
    known: set[tuple[Any, ...]] = set()

    @functools.cache
    def made() -> Callable[..., Any]:
        import torch

        found: Callable[..., Any] = torch.compile(fn, fullgraph=True, dynamic=False)
        return found

    @functools.wraps(fn)
    def run(**arguments: Any) -> Any:
        import torch

        form = (torch.is_grad_enabled(), *(_signature(x) for x in arguments.values()))
        if form in known:
            return made()(**arguments)
        # torch.compile takes a limit in later releases; here all of them read it, when they compile
        with torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES):
            result = made()(**arguments)
        known.add(form)
        return result

    run.__module__ = __name__
    return run


def _signature(x: Any) -> Any:
    """What of an argument decides which code runs."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.requires_grad
    return x if isinstance(x, int | float | str | tuple | None) else id(x)


provides(BACKEND, gradients=False)(compiled(torch_eager.softmax))
provides(BACKEND, gradients=False)(compiled(torch_eager.softmax_vjp))
provides(BACKEND)(compiled(torch_eager.logsumexp))
provides(BACKEND)(compiled(torch_eager.swiglu))
provides(BACKEND)(compiled(torch_eager.geglu))
provides(BACKEND, refuses=torch_eager.one_dtype, before=torch_eager.any_x)(compiled(torch_eager.rope))
provides(BACKEND, outputs=2)(compiled(torch_eager.merge_states))
provides(BACKEND, refuses=torch_eager.one_dtype)(compiled(torch_eager.layernorm))
provides(BACKEND, refuses=torch_eager.one_dtype)(compiled(torch_eager.rmsnorm))
provides(BACKEND, refuses=torch_eager.one_dtype, outputs=2, before=torch_eager.two_terms)(
    compiled(torch_eager.add_layernorm)
)
provides(BACKEND, refuses=torch_eager.one_dtype, outputs=2, before=torch_eager.two_terms)(
    compiled(torch_eager.add_rmsnorm)
)
provides(BACKEND)(compiled(torch_eager.cross_entropy))
provides(BACKEND, gradients=False, outputs=2)(compiled(torch_eager.quantize))
provides(BACKEND, gradients=False, outputs=2)(compiled(torch_eager.top_k))
provides(BACKEND, gradients=False)(compiled(torch_eager.top_k_vjp))
provides(BACKEND, gradients=False, outputs=2)(compiled(torch_eager.router))
provides(BACKEND, gradients=False)(compiled(torch_eager.router_vjp))
provides(BACKEND, gradients=False, refuses=torch_eager.one_dtype, outputs=2)(compiled(torch_eager.rmsnorm_quantize))
provides(BACKEND, gradients=False, outputs=2)(compiled(torch_eager.swiglu_quantize))
provides(BACKEND, gradients=False, refuses=torch_eager.one_dtype, outputs=3)(compiled(torch_eager.add_rmsnorm_quantize))
provides(BACKEND, refuses=torch_eager.as_precise, around=torch_eager.as_asked)(compiled(torch_eager.matmul))
provides(BACKEND, refuses=torch_eager.as_precise, around=torch_eager.as_asked)(compiled(torch_eager.linear))
provides(BACKEND, refuses=torch_eager.as_precise, around=torch_eager.as_asked)(
    compiled(torch_eager.linear_cross_entropy)
)
provides(BACKEND, refuses=torch_eager.attention_wants, around=torch_eager.as_asked)(compiled(torch_eager.attention))
