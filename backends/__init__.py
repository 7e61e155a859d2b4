"""The backends: one package each, found through the ``portakern.backends`` entry-point group.

Importing a submodule binds it in its parent, so this package takes the name that ``portakern.backends()`` answers to:
it is callable.
"""

import sys
from collections.abc import Mapping
from types import ModuleType

from portakern.core import registry
from portakern.core.backend import Backend

if __name__ != "portakern.backends":
    raise ImportError(
        f"import this package as portakern.backends, not {__name__!r}: under another name its triton folder would "
        "hide the real triton"
    )


class _Backends(ModuleType):
    def __call__(self) -> Mapping[str, Backend]:
        """Every registered backend by name."""
        return registry.backends()


sys.modules[__name__].__class__ = _Backends
