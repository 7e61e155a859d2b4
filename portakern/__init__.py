"""portakern: GPU and TPU kernels in Triton and Pallas, each checked against an error bound derived from rounding.

>>> import portakern as pk
>>> attention = pk.op("attention")             # backend chosen per call, from the arrays
>>> out = attention(q, k, v, is_causal=True)   # torch in, torch out; jax in, jax out; NumPy in, NumPy out
"""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # Python puts the folder that somebody is in before all libraries. Of ``python -m portakern`` it goes, before
    # anything is imported: a typer.py of a candidate that is to be judged would run there. The script has no such
    # place.
    _target = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
    if (_target.partition("m")[2] if _target.startswith("-") else _target) in ("portakern", "portakern.cli"):
        del sys.path[0]

from typing import TYPE_CHECKING, Any

from portakern.errors import SpecError, UnavailableError, UnsupportedError

if TYPE_CHECKING:
    from portakern._typed import op as op  # a stub: op by op, what api.op returns and what its calls take
    from portakern.api import Op as Op
    from portakern.api import warm as warm
    from portakern.composed import bound as bound
    from portakern.core.backend import Backend as Backend
    from portakern.core.call import Call as Call
    from portakern.core.config import Config as Config
    from portakern.core.observe import observe as observe
    from portakern.core.registry import backends as backends
    from portakern.core.registry import ops as ops
    from portakern.core.registry import register as register
    from portakern.testing import Report as Report
    from portakern.testing import check as check
    from portakern.testing.invariances import invariance as invariance

__version__ = "0.1.0"

_LAZY = {
    "Backend": "core.backend",
    "Call": "core.call",
    "Config": "core.config",
    "Op": "api",
    "Report": "testing",
    "backends": "core.registry",
    "bound": "composed",
    "check": "testing",
    "invariance": "testing.invariances",
    "observe": "core.observe",
    "op": "api",
    "ops": "core.registry",
    "register": "core.registry",
    "warm": "api",
}

__all__ = [
    "Backend",
    "Call",
    "Config",
    "Op",
    "Report",
    "SpecError",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "backends",
    "bound",
    "check",
    "invariance",
    "observe",
    "op",
    "ops",
    "register",
    "warm",
]


if not TYPE_CHECKING:  # to a type checker a module with __getattr__ has every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'portakern' has no attribute {name!r}")
        import importlib

        module = importlib.import_module(f"portakern.{_LAZY[name]}")
        # importing may have bound the name already: portakern.backends is a package too
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    """The public names, and those faces of array libraries that somebody imported."""
    return sorted([*__all__, *(face for face in ("jax", "torch") if face in globals())])
