"""Which op computes an op's gradients, and which arrays pass between the two. The connection is by name, the same for
all ops and frameworks.

A spec that says ``vjp="x_vjp"`` is differentiated by the op ``x_vjp``. An input of that op that is called like an input
or an output of the forward op is saved from the forward call; an input ``d_y`` is the cotangent of the output y; an
output ``d_x`` is the gradient with respect to the input x, and to those that the vjp's spec names beside it (``also``).
The gradient of an input may be a cotangent as it is (``passes``), and what is saved may hang on options (``reads``).
Options of the same name are passed on. A gradient that the vjp op does not give is refused by name, never zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from portakern.core import registry
from portakern.core.call import Call
from portakern.errors import SpecError, UnsupportedError
from portakern.spec import Spec

__all__ = ["Wiring", "wiring"]


@dataclass(frozen=True, eq=False)
class Wiring:
    """The connection of a forward op and the op of its gradients.

    Attributes:
      forward, vjp: the two specs.
      inputs, outputs: names of the forward call's arrays and outputs that the vjp takes.
      cotangents: output of the forward -> argument of the vjp that is its cotangent.
      gradients: input of the forward -> output of the vjp that is its gradient, or the argument: a cotangent that is
        passed on.
      options: names of the options that both have.
    """

    forward: Spec[Any]
    vjp: Spec[Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    cotangents: Mapping[str, str]
    gradients: Mapping[str, str]
    options: tuple[str, ...]

    def training(self, call: Call) -> Call:
        """The forward call that also gives what the vjp wants saved."""
        saved = self.saves(call.options)
        return call.replace(wants=tuple(o.name for o in self.forward.outputs if o.name in (*call.wants, *saved)))

    def saves(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The outputs of the forward call that the vjp reads under these options of it."""
        return tuple(name for name in self.outputs if self.vjp.reads_under(name, options, True))

    def wants(self, differentiated: Any) -> tuple[str, ...]:
        """The outputs of the vjp that are gradients of the inputs named in ``differentiated``; UnsupportedError where
        there is no gradient."""
        for name in differentiated:
            if name not in self.gradients:
                given = ", ".join(self.gradients)
                raise UnsupportedError(
                    f"{self.forward.name}: {self.vjp.name} gives no gradient with respect to {name}, only to {given}; "
                    f"detach {name}"
                )
        passed = self.vjp.passes
        return tuple(dict.fromkeys(o for n, o in self.gradients.items() if n in differentiated and n not in passed))

    def spent(self, call: Call, spends: Sequence[str]) -> tuple[str, ...]:
        """What the vjp reads of a forward call over which gradients may be written: of the arrays those that the
        caller ``spends``, of the outputs those that only the vjp sees."""
        hidden = (n for n in self.outputs if n not in call.wants)
        return tuple(n for n in (*spends, *hidden) if n in self.vjp.aliases.values())

    def passed(self, name: str, cotangents: Mapping[str, Any]) -> Any:
        """The cotangent that is the gradient of the input ``name`` as it is; None where there is none."""
        return cotangents.get(self.vjp.passes.get(name, ""))


@functools.cache
def wiring(spec: Spec[Any]) -> Wiring:
    """The wiring of an op.

    Raises:
      UnsupportedError: the op has no gradient. SpecError: its vjp takes what the forward op does not have.
    """
    if spec.vjp is None:
        what = (
            "is a gradient itself, and no op differentiates it: gradients are of first order"
            if spec.is_vjp
            else "has no gradient"
        )
        raise UnsupportedError(
            f"{spec.name} {what}; cut the graph before its inputs (torch: .detach() or torch.no_grad(), JAX: "
            "jax.lax.stop_gradient)"
        )
    vjp = registry.find_spec(spec.vjp)
    mine, outputs = {a.name for a in spec.arrays}, {o.name for o in spec.outputs}
    taken = {a.name: a.optional for a in vjp.arrays}
    for name, optional in taken.items():
        if name not in mine | outputs and name.removeprefix("d_") not in outputs:
            raise SpecError(
                f"{vjp.name}: {name} is neither an input nor an output of {spec.name}, nor the cotangent (d_...) of "
                "an output; rename it"
            )
        if not optional and any(a.name == name and a.optional for a in spec.arrays):
            raise SpecError(f"{vjp.name}: {name} is optional in {spec.name}; give it the default None here too")
    gradients = {of: o.name for o in vjp.outputs for of in (o.gradient_of, *vjp.also.get(o.name, ())) if of}
    for output, others in vjp.also.items():
        if output not in gradients.values() or not mine.issuperset(others):
            raise SpecError(
                f"{vjp.name}: also declares {output} as the gradient of {', '.join(others)} too; expected a gradient "
                f"among its outputs, and inputs of {spec.name}: {', '.join(a.name for a in spec.arrays)}"
            )
    for name, cotangent in vjp.passes.items():
        if name not in mine or cotangent not in taken or cotangent.removeprefix("d_") not in outputs:
            raise SpecError(
                f"{vjp.name}: passes declares {cotangent} as the gradient of {name}; expected an input of {spec.name} "
                f"and a cotangent among the arguments: {', '.join(taken)}"
            )
        gradients[name] = cotangent
    return Wiring(
        spec,
        vjp,
        tuple(n for n in taken if n in mine),
        tuple(n for n in taken if n in outputs and n not in mine),
        {o: f"d_{o}" for o in outputs if f"d_{o}" in taken},
        {name: o for name, o in gradients.items() if name in mine},
        tuple(o.name for o in vjp.options if o.name in {p.name for p in spec.options}),
    )
