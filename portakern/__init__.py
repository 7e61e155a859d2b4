"""portakern: declare a kernel once, run it on any accelerator, prove that every implementation agrees.

>>> import portakern as pk
>>> attention = pk.op("attention")             # backend chosen per call, from the arrays
>>> out = attention(q, k, v, is_causal=True)   # torch in, torch out; jax in, jax out; NumPy in, NumPy out
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portakern.errors import SpecError, UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from portakern.api import Op as Op
    from portakern.api import op as op
    from portakern.core.backend import Backend as Backend
    from portakern.core.observe import observe as observe
    from portakern.core.registry import backends as backends
    from portakern.core.registry import ops as ops
    from portakern.core.registry import register as register
    from portakern.testing import Report as Report
    from portakern.testing import check as check

__version__ = "0.1.0"

_LAZY = {
    "Backend": "core.backend",
    "Op": "api",
    "Report": "testing",
    "backends": "core.registry",
    "check": "testing",
    "observe": "core.observe",
    "op": "api",
    "ops": "core.registry",
    "register": "core.registry",
}

__all__ = [
    "Backend",
    "Op",
    "Report",
    "SpecError",
    "UnavailableError",
    "UnsupportedError",
    "backends",
    "check",
    "observe",
    "op",
    "ops",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'portakern' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"portakern.{_LAZY[name]}")
    value = globals().setdefault(
        name, getattr(module, name)
    )  # importing may have bound the name already: portakern.backends is a package too
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
