"""Faults planted in the shipped kernels: what people get wrong, one replacement of source text each.

``<op>.py`` in this folder holds those of an op, found by walking: ``FAULTS``, a list of :class:`Planted` for each
backend, or for a variant that is interpreted where it is named, ``<backend>/<variant>``. A fault says how often its
text stands in the kernel today, so that a change to the kernel breaks this table loudly instead of emptying it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, replace

from portakern.core import registry
from portakern.core.backend import Family

__all__ = ["FAULTS", "ON_HOST", "Fault", "Planted"]

ON_HOST = {
    ("triton/hopper", "attention_vjp"): "tests.test_hopper_gradients",
    ("triton/hopper", "paged_attention"): "tests.test_hopper_paged",
    ("triton/hopper", "scaled_matmul"): "tests.test_hopper_scaled",
    ("triton/hopper", "varlen_attention"): "tests.test_hopper_varlen",
    ("triton/unordered", "attention_vjp"): "tests.test_unordered",
}
"""(home, op) -> the tests whose ``finds_on_host`` runs a module of Gluon's kernels on a case of theirs."""


@dataclass(frozen=True)
class Planted:
    """One mutation of a kernel, as the op's file holds it.

    Attributes:
      name: unique among those of the kernel.
      what: the mistake in words.
      old, new: the text and its replacement; times: how often ``old`` occurs there.
      small: it adds less than 1e-2 to any element on ordinary N(0, 1) data (``python -m tests.mutants`` measures it).
      gpu: it may also run compiled on a GPU: it touches no memory outside its arguments there.
      sample: it is among those that the test suite plants; ``python -m tests.mutants`` plants all.
      edge: that shows it, where few others do: the test suite visits no other to find it.
      at: the seed and the number of examples with which the test suite finds it; laws come after the last example.
      case: of a kernel whose threads the host runs, the call that shows it there; the test suite plants all of these,
        and ``python -m tests.mutants``, which draws its calls, none.
      within: the module that holds the text, and from which the op's own imports it: one beside that, or of what the
        families of the backend share, ``lib.<name>``.
    """

    name: str
    what: str
    old: str
    new: str
    small: bool = False
    times: int = 1
    gpu: bool = True
    sample: bool = False
    edge: str | None = None
    at: tuple[int, int] = (0, 200)
    case: str | None = None
    within: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fault(Planted):
    """The same with the kernel in its name: ``backend``, ``variant`` and ``op`` say whose source is changed.
    ``variant``: None for the one that is interpreted unnamed."""

    backend: str
    op: str
    variant: str | None = None

    @property
    def home(self) -> str:
        """Where its kernel is, as ``FAULTS`` says it."""
        return f"{self.backend}/{self.variant}" if self.variant else self.backend

    @property
    def family(self) -> Family:
        """The one whose kernel is changed."""
        declared = registry.backend(self.backend).declared
        named = (f for f in declared if f.name == self.variant)
        return next(named if self.variant else (f for f in declared if f.interprets and not f.targets))

    @property
    def module(self) -> str:
        """The module that holds the text."""
        package = self.family.package
        if self.within is None:
            return self.op_module
        return f"{package.rpartition('.')[0] if self.within.startswith('lib.') else package}.{self.within}"

    @property
    def op_module(self) -> str:
        """The module that holds the op."""
        found = registry.backend(self.backend).module_of(self.op, self.family)
        assert found is not None, f"{self.name}: {self.family.package} has no {self.op}"
        return found

    def lacks(self) -> str | None:
        """None, or what must be installed before the kernel can be imported."""
        return registry.backend(self.backend).unavailable() or self.family.missing_packages()


def _walk() -> Iterator[Fault]:
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
        for home, planted in importlib.import_module(f"{__name__}.{module}").FAULTS.items():
            backend, _, variant = home.partition("/")
            for p in planted:
                fields = vars(p) | {"name": f"{home.replace('/', '-')}-{module}-{p.name}"}
                fault = Fault(**fields, backend=backend, op=module, variant=variant or None)
                on_gpus = not {"cuda", "rocm"}.isdisjoint(fault.family.platforms)
                yield replace(fault, gpu=p.gpu and on_gpus)


FAULTS = tuple(_walk())
