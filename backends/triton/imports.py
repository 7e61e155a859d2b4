"""How the modules that hold kernels are imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from portakern.errors import UnavailableError

__all__ = ["check_compiled", "compiled"]


@contextmanager
def compiled() -> Iterator[None]:
    """While inside, ``@triton.jit`` makes kernels that can be compiled, whatever TRITON_INTERPRET says: that variable
    is
    how people run kernels of their own on a CPU. Each call of portakern's chooses by its arrays, and interprets what
    was
    made to be compiled."""
    from triton import knobs

    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        yield


def check_compiled() -> None:
    """UnavailableError where nothing can be compiled in this process: Triton's own functions, of which kernels are
    made, were decorated while TRITON_INTERPRET was set."""
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if not isinstance(tl.sum, JITFunction):
        raise UnavailableError(
            "TRITON_INTERPRET was set when triton was imported: Triton's own functions are interpreted in this "
            "process, "
            "and no kernel that calls them can be compiled; unset TRITON_INTERPRET and start the process anew, or pass "
            "CPU tensors"
        )
