"""portakern under one model object: :func:`apply`, and what it says of itself."""

from __future__ import annotations

import copy
import inspect
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from portakern.api import build_kernels
from portakern.core import registry
from portakern.core.dispatch import Choice, choose
from portakern.core.framework import frameworks
from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.float8 import RECIPES, Float8Linear
from portakern.frameworks.torch.functions import check_memory_limit
from portakern.frameworks.torch.models.attention import Registered, somebodys
from portakern.frameworks.torch.models.blocks import served_block
from portakern.frameworks.torch.models.embeddings import served_embedding
from portakern.frameworks.torch.models.gates import served_gate
from portakern.frameworks.torch.models.heads import served_head
from portakern.frameworks.torch.models.losses import served_loss, with_own_loss
from portakern.frameworks.torch.models.masks import served_mask
from portakern.frameworks.torch.models.mlps import ServedMlp, served_mlp
from portakern.frameworks.torch.models.norms import served_norm
from portakern.frameworks.torch.models.paged import ENTRY, PagedBatching, paged_name
from portakern.frameworks.torch.models.projections import projections
from portakern.frameworks.torch.models.prototypes import names_in
from portakern.frameworks.torch.models.rotary import served_rotary
from portakern.frameworks.torch.models.served import REPLICATE, Recipe, Replicate, ServedForward, place_of

if TYPE_CHECKING:
    from portakern.tools.compile.warming import Warmed

__all__ = ["DEFAULT_PARTS", "PARTS", "Applied", "ServedPart", "apply"]

PARTS = {
    "embeddings": "the rows of tables that tokens name",
    "norm": "RMSNorm and LayerNorm",
    "add_norm": "a residual, added and normed in one pass",
    "attention": "attention, of models that take an attn_implementation",
    "rope": "rotary embedding of queries and keys",
    "gate": "the gated product of a feed-forward layer",
    "mlp": "a feed-forward layer's projections with an activation behind them, or a residual",
    "loss": "the loss of a model that is given labels",
    "linear_loss": "a language model's last projection with its loss, in training; no logits come out",
    "fp8": "projections of attention and of feed-forward layers, as products of 8-bit floats; changes results",
}
"""What a model is served, by the names that ``parts`` takes."""

DEFAULT_PARTS = tuple(part for part in PARTS if part not in ("embeddings", "fp8"))
"""What it is served where ``parts`` is left out: what changes no result, and was measured on a GPU."""

NORM = re.compile(r"Norm(\dd)?$")
FEED_FORWARD = re.compile(r"(MLP|FeedForward|FFN|Experts)$")
ATTENTION = re.compile(r"Attention$")


class Absent(Enum):
    """What an attribute was that a module did not have; itself in copies and pickles."""

    ABSENT = "absent"


@dataclass(frozen=True)
class ServedPart:
    """What serves the modules of a class in one part of their work, now.

    Attributes:
      part: a key of PARTS, or "other". module: the name of their class; number: how many there are.
      op: the op that serves them, None where PyTorch does. by: the backend of that op, or why there is none.
    """

    part: str
    module: str
    number: int
    op: str | None
    by: str


class Patch:
    """An attribute of one module, set; ``undo`` gives it what it was."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value
        self.before = vars(module).get(name, Absent.ABSENT)
        vars(module)[name] = value

    def attribute(self) -> str | None:
        """The attribute in which the value stands: accelerate's hooks, put on since, keep a forward beside theirs, and
        put it back when they go. None where it was replaced."""
        places = FORWARDS if self.name in FORWARDS else (self.name,)
        own = vars(self.module)
        return next((name for name in places if own.get(name, Absent.ABSENT) is self.value), None)

    def undo(self) -> None:
        place, own = self.attribute(), vars(self.module)
        if self.before is not Absent.ABSENT and place is not None:
            own[place] = self.before
        elif place == FORWARDS[1]:
            own[place] = MethodType(type(self.module).forward, self.module)
        elif place is not None:
            del own[place]


class ProjectionPatch(Patch):
    """A linear layer of a module, for which an 8-bit one stands; ``undo`` puts it back, where the model is by then."""

    def __init__(self, module: nn.Module, name: str, value: Float8Linear) -> None:
        self.module, self.name, self.value = module, name, value
        self.before = module._modules[name]
        module._modules[name] = value

    def attribute(self) -> str | None:
        return self.name if self.module._modules.get(self.name) is self.value else None

    def undo(self) -> None:
        if self.attribute() is not None:
            self.value.give_back(self.before)
            self.module._modules[self.name] = self.before


FORWARDS = ("forward", "_old_forward")
"""Where a module may have the forward that it is called with."""


class ServedModule(NamedTuple):
    """A module that is served in one part of its work."""

    part: str
    module: nn.Module
    op: str
    value: Any
    """What stands in the module, or for it in its owner."""
    owner: nn.Module | None = None

    def why_not(self) -> str:
        """Why PyTorch serves it now, in words; "" where the op does."""
        if self.owner is not None:
            there = any(child is self.value for child in self.owner._modules.values())
            return "" if there else "its replacement was replaced again later"
        if isinstance(self.value, str):
            now = self.module.config._attn_implementation
            return "" if now in (self.value, paged_name(self.value)) else f"its attention is {now!r} now"
        own = vars(self.module)
        if not any(value is self.value for value in own.values()):
            return "its replaced forward was replaced again later"
        return self.value.why_not() if isinstance(self.value, ServedForward) else ""


class Applied:
    """The result of :func:`apply`: ``print`` shows the table of replaced modules; ``undo`` restores the model.

    As a context manager it restores the model at the end.

    Attributes:
      model: the model.
    """

    def __init__(self, model: nn.Module, plan: _ModelRewrite) -> None:
        self.model, self._backend = model, plan.backend
        self._by = {entry.op: plan.by(entry.op) for entry in plan.served}
        self._left, self._served, self._patches = Counter(plan.left), plan.served, plan.carry_out()

    @property
    def rows(self) -> tuple[ServedPart, ...]:
        """What serves what, served parts first, in the order of PARTS: modules whose hooks would notice that they, or
        what they call, are passed over are PyTorch's while they have such hooks."""
        served: Counter[tuple[str, str, str]] = Counter()
        left = Counter(self._left)
        for entry in self._served:
            why, name = entry.why_not(), type(entry.module).__name__
            if why:
                left[entry.part, name, why] += 1
            else:
                served[entry.part, name, entry.op] += 1
        order = [*PARTS, "other"]
        rows = [ServedPart(part, name, n, op, self._by[op]) for (part, name, op), n in served.items()]
        rows += [ServedPart(part, name, n, None, why) for (part, name, why), n in left.items()]
        return tuple(sorted(rows, key=lambda row: (row.op is None, order.index(row.part))))

    def warm(
        self,
        batch: int | None = None,
        seq: int | None = None,
        *,
        inputs: Mapping[str, Any] | None = None,
        train: bool = True,
        target: str | None = None,
        processes: int | None = None,
        progress: bool | None = None,
    ) -> Warmed:
        """Compile the kernels of a step of the model beside each other, before the first step, as
        :func:`portakern.warm` does for single calls.

        The step is found by running the model on tensors without memory: nothing is allocated, and the model does not
        change. A step under ``torch.compile`` finds the same kernels. Call it under ``torch.autocast`` where the step
        runs under that.

        >>> applied = portakern.torch.apply(model)
        >>> print(applied.warm(batch=2, seq=2048))

        Args:
          batch, seq: sequences of a step and tokens of each, of a transformers model that takes ``input_ids``.
          inputs: instead of them the keyword arguments of the model's forward: tensors, of which only shape, strides
            and dtype count, so that they may be on ``device="meta"``.
          train: forward and gradients, of the loss that the model returns, or of all that it returns. False: the
            forward of inference.
          target: the architecture to compile for, such as "sm_90"; None: that of the model's parameters.
          processes, progress: see :func:`portakern.warm`.

        Returns:
          The numbers of calls and kernels, the seconds, and ``failures``.

        Raises:
          SpecError: an argument is wrong. UnsupportedError: the model's parameters are sharded.
        """
        from portakern.frameworks.torch.models.recording import recorded_calls, token_inputs

        if inputs is not None and (batch is not None or seq is not None):
            raise SpecError("warm: inputs is given beside batch or seq; pass one of both")
        start = time.perf_counter()
        given = token_inputs(self.model, batch, seq, train) if inputs is None else inputs
        calls = recorded_calls(self.model, given, train)
        if target is not None:
            calls = [(call, self._without_backend(choice)) for call, choice in calls]
        warmed = build_kernels(calls, train=False, target=target, processes=processes, progress=progress)
        return replace(warmed, seconds=round(time.perf_counter() - start, 2))

    def _without_backend(self, choice: Choice) -> Choice:
        """The choice for another device: gradients name the backend that serves them on this one."""
        return choice if self._backend is not None else Choice(None, None, choice.tiling)

    def undo(self) -> None:
        """Restore every module of the model. A second call does nothing.

        Raises:
          SpecError: other code replaced a forward after apply.
        """
        changed = [p for p in self._patches if p.attribute() is None]
        if changed:
            p = changed[0]
            raise SpecError(
                f"undo: {p.name} of {type(p.module).__name__} was replaced after apply; expected it unchanged: first "
                "undo that later change"
            )
        while self._patches:
            self._patches.pop().undo()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        table = [("part", "module", "number", "op", "by")]
        table += [(r.part, r.module, str(r.number), r.op or "-", r.by) for r in self.rows]
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in table]
        return "\n".join([f"{type(self.model).__name__} on portakern", *lines])

    def __repr__(self) -> str:
        served = sum(r.number for r in self.rows if r.op)
        return f"<portakern applied to {type(self.model).__name__}: {served} parts served>"


def apply(
    model: nn.Module,
    *,
    backend: str | None = None,
    parts: Iterable[str] | None = None,
    otherwise: Literal["raise", "torch"] = "raise",
    memory_limit: int = 0,
    fp8_recipe: str = "rows",
) -> Applied:
    """Run parts of one model on portakern: embeddings, norms with the residuals before them, attention, feed-forward
    layers, loss.

    A language model in training with labels returns None for logits: the loss is computed from the hidden states. If
    you need the logits, leave "linear_loss" out of ``parts``, or call ``model.eval()``.

    >>> applied = portakern.torch.apply(model)
    >>> print(applied)
    >>> model(input_ids=ids, labels=ids).loss.backward()
    >>> applied.undo()

    Only the forwards of this model's modules are replaced; other models of the same classes or config do not change.
    Parameters, buffers, ``state_dict`` keys, hooks and wrappers (FSDP, checkpointing, PEFT adapters, accelerate's
    hooks) keep working, added before or after. A module stays with PyTorch while it has hooks that would get another
    result or none, or a user's forward; ``print(applied)`` shows this. Copies and pickles of the model keep the
    replaced forwards.

    ``model.generate_batch``, transformers' continuous batching, reads keys and values in the pages of its cache, by
    paged_attention.

    A module is recognized by the computation of its forward (:mod:`portakern.frameworks.torch.models.prototypes`), in
    any model family of transformers. In other models, PyTorch's own norms are replaced.

    Args:
      model: changed in place; a transformers model, or any module that contains PyTorch's norms.
      backend: the backend that must run it; None: chosen from the arrays of each call.
      parts: the parts to replace ("embeddings", "norm", "add_norm", "attention", "rope", "gate", "mlp", "loss",
        "linear_loss", "fp8"); None: all but "embeddings", which was not measured yet, and "fp8", which changes
        results. "add_norm" needs "norm".
      otherwise: for an unknown norm, feed-forward layer or attention: "raise": an error names its class; "torch": the
        module stays with PyTorch, and the table gives the reason.
      memory_limit: bytes that the loss of a language model may keep for its backward pass. Where the logits in the
        hidden states' dtype take no more, the loss keeps its gradient by them and takes three matrix products for four
        (:func:`linear_cross_entropy`).
      fp8_recipe: of "fp8": how projections become :class:`Float8Linear` layers. "rows" or "blocks": for inference, by a
        model in ``eval()``, whose weights are codes then; the result keeps those of before for ``undo``: drop it to
        free their memory. "dynamic" or "delayed": in training; the weights are the same parameters. Attention and
        feed-forward layers have such projections; the last projection, tied weights, layers with hooks or a forward of
        their own, and those that no op serves stay, and the table gives the reason.

    Returns:
      An object with the table of replaced modules and ``undo()``.

    Raises:
      UnsupportedError: an unknown module (the model is unchanged); a device that no backend serves.
      SpecError: an unknown part, recipe or backend; a model whose forwards apply has replaced already; "fp8" with a
        recipe for inference of a model in training.
    """
    wanted = _checked(model, parts, otherwise, memory_limit)
    if backend is not None:
        registry.backend(backend)
    _check_recipe(model, fp8_recipe, "fp8" in wanted)
    plan = _ModelRewrite(model, backend, wanted, memory_limit, fp8_recipe)
    plan.read()
    if plan.unknown and otherwise == "raise":
        raise UnsupportedError(
            "apply: " + "; ".join(dict.fromkeys(plan.unknown)) + ". Leave its part out of parts, or pass "
            "otherwise='torch' to keep such modules on PyTorch"
        )
    return Applied(model, plan)


def _checked(model: Any, parts: Iterable[str] | None, otherwise: str, memory_limit: Any) -> frozenset[str]:
    """The parts that are wanted, of arguments that are right."""
    if not isinstance(model, nn.Module):
        raise SpecError(f"apply: model is a {type(model).__name__}; expected a torch.nn.Module")
    if otherwise not in ("raise", "torch"):
        raise SpecError(f"apply: otherwise is {otherwise!r}; expected 'raise' or 'torch'")
    check_memory_limit("apply", memory_limit)
    if isinstance(parts, str):
        raise SpecError(f"apply: parts is the text {parts!r}; expected a list of names: pass [{parts!r}]")
    wanted = frozenset(DEFAULT_PARTS if parts is None else parts)
    if not wanted <= PARTS.keys():
        raise SpecError(f"apply: parts has {sorted(wanted - PARTS.keys())}; expected some of {', '.join(PARTS)}")
    if "add_norm" in wanted and "norm" not in wanted:
        raise SpecError("apply: parts has 'add_norm' without 'norm', which adds the residual; pass both")
    for module in model.modules():
        if any(isinstance(vars(module).get(name), ServedForward) for name in FORWARDS):
            raise SpecError(
                f"apply: the forward of {type(module).__name__} is replaced by portakern already; call undo() of "
                "the earlier result of apply (for a copy: copy.deepcopy((model, applied)))"
            )
    return wanted


def _check_recipe(model: nn.Module, recipe: Any, wanted: bool) -> None:
    """Refuse a recipe that is unknown or, where it is wanted, does not go with the model's mode."""
    if recipe not in RECIPES:
        raise SpecError(f"apply: fp8_recipe is {recipe!r}; expected one of {', '.join(RECIPES)}")
    if wanted and model.training and not RECIPES[recipe].trains:
        trained = " or ".join(f"fp8_recipe={name!r}" for name, kind in RECIPES.items() if kind.trains)
        raise SpecError(
            f"apply: the model is in training, and fp8_recipe {recipe!r}, for inference, keeps no weight that could "
            f"get a gradient; call model.eval() first, or pass {trained}"
        )


class _ModelRewrite:
    """What is to be done to a model, before anything is."""

    def __init__(
        self, model: nn.Module, backend: str | None, wanted: frozenset[str], memory_limit: int, recipe: str
    ) -> None:
        self.model, self.backend, self.wanted, self.memory_limit = model, backend, wanted, memory_limit
        self.recipe = recipe
        self.served: list[ServedModule] = []
        self.left: Counter[tuple[str, str, str]] = Counter()
        self.unknown: list[str] = []
        self.values: list[tuple[nn.Module, str, Any]] = []
        self.projections: list[tuple[nn.Module, str, Float8Linear]] = []
        self.attends: list[nn.Module] = []
        self.known: set[nn.Module] = set()
        self.replicated: set[nn.Module] = set()
        self.only: dict[str, str] = {}
        self.implementation = "portakern" if backend is None else f"portakern_{backend}"

    def read(self) -> None:
        """Look at every module once."""
        norms = set()
        for module in self.model.modules():
            norm = served_norm(module, self.backend)
            if self._put("norm", module, norm):
                norms.add(module)
            elif norm is None and self._is_like(module, NORM):
                self._leave("norm", module, "a norm that no prototype is like")
            table = served_embedding(module, self.backend)
            if isinstance(table, str):
                self._leave("embeddings", module, table, known=True)
            else:
                self._put("embeddings", module, table)
            self._read_feed_forward(module)
            rotary = served_rotary(module, self.backend)
            if isinstance(rotary, str):
                self._leave("rope", module, rotary, known=True)
            else:
                self._put("rope", module, rotary)
        for module in self.model.modules():
            block = served_block(module)
            norm = None if block is None else getattr(module, block[0])
            if block is not None and (norm in norms or "add_norm" not in self.wanted):
                op = "add_layernorm" if isinstance(norm, nn.LayerNorm) else "add_rmsnorm"
                self._put("add_norm", module, (op, block[1]))
            elif block is not None:
                self._leave("add_norm", module, f"its {block[0]}, a {type(norm).__name__}, is not served", known=True)
        for pretrained in self._pretrained():
            self._read_attention(pretrained)
        self._read_loss()
        if "fp8" in self.wanted:
            self._read_projections()
        for module in self.model.modules():
            leaf = next(module.children(), None) is None
            if leaf and module not in self.known and not self._is_like(module, NORM):
                by = "portakern's already" if isinstance(module, Float8Linear) else "PyTorch's own"
                self.left["other", type(module).__name__, by] += 1

    def _put(self, part: str, module: nn.Module, found: tuple[str, Recipe] | None) -> bool:
        """Plan a forward for a module, if there is one and it is wanted."""
        if found is None:
            return False
        name = type(module).__name__
        if part not in self.wanted:
            self.left[part, name, f"not asked for: parts lacks {part!r}"] += 1
            return False
        self.known.update(m for m in (module, *module.children()) if next(m.parameters(), None) is None)
        self.known.add(module)
        there = self._replace(module, found[1])
        if isinstance(there, str):
            self.left[part, name, there] += 1
            return False
        self.served.append(ServedModule(part, module, found[0], there))
        return True

    def _replace(self, module: nn.Module, recipe: Recipe) -> ServedForward | str:
        """Plan a forward of a module; why there is none, in words."""
        place = place_of(module)
        if place is None:
            theirs = vars(module)["forward"]
            owner = getattr(inspect.unwrap(theirs), "__module__", type(theirs).__module__)
            return f"it has a forward already, of {owner}, which stays"
        served = ServedForward(module, recipe)
        self.values.append((module, place, served))
        if module not in self.replicated:
            self.replicated.add(module)
            self.values.append((module, REPLICATE, Replicate(module)))
        return served

    def _leave(self, part: str, module: nn.Module, why: str, known: bool = False) -> None:
        name = type(module).__name__
        self.left[part, name, why] += 1
        if part in self.wanted and not known:
            self.unknown.append(f"{name} is {why}")

    def _is_like(self, module: nn.Module, pattern: re.Pattern[str]) -> bool:
        """Whether a module that is not PyTorch's own has such a name."""
        kind = type(module)
        return not kind.__module__.startswith("torch.nn") and bool(pattern.search(kind.__name__))

    def _read_feed_forward(self, module: nn.Module) -> None:
        gate, mlp = served_gate(module, self.backend), served_mlp(module, self.backend)
        for part, found in (("gate", gate), ("mlp", mlp)):
            if isinstance(found, str):
                self._leave(part, module, found, known=True)
            elif isinstance(found, ServedMlp):
                if self._put(part, module, ("linear", found.forward)):
                    self.known.add(found.projection)
                    self.only["linear"] = found.only
            else:
                self._put(part, module, found)
        if gate is None and mlp is None and self._is_like(module, FEED_FORWARD):
            part = "gate" if "gate" in self.wanted else "mlp"
            self._leave(part, module, "a feed-forward layer that no prototype is like")

    def _pretrained(self) -> Iterator[Any]:
        """The outermost models of transformers inside the model."""
        inside: set[int] = set()
        for module in self.model.modules():
            of_transformers = any(c.__name__ == "PreTrainedModel" for c in type(module).__mro__)
            if of_transformers and hasattr(module, "set_attn_implementation") and id(module) not in inside:
                inside.update(id(m) for m in module.modules())
                yield module

    def _read_attention(self, pretrained: Any) -> None:
        """Attention goes by transformers' interface, which the modules of the model ask."""
        asking = [m for m in pretrained.modules() if "ALL_ATTENTION_FUNCTIONS" in names_in(m)]
        if "attention" not in self.wanted:
            for module in asking:
                self.left["attention", type(module).__name__, "not asked for: parts lacks 'attention'"] += 1
            return
        others = {name for m in asking if (name := somebodys(m))}
        if others:
            for module in asking:
                why = f"it is {sorted(others)[0]!r}, which is not transformers' own, and stays"
                self.left["attention", type(module).__name__, why] += 1
        elif asking and pretrained._can_set_attn_implementation():
            self.attends.append(pretrained)
            self.served += [ServedModule("attention", m, "attention", self.implementation) for m in asking]
            for module in pretrained.modules():
                recipe = served_mask(module, self.implementation)
                if recipe is not None:
                    self._replace(module, recipe)
        else:
            for module in pretrained.modules():
                if self._is_like(module, ATTENTION):
                    self._leave("attention", module, "attention that does not ask transformers' attention interface")

    def _read_loss(self) -> None:
        for pretrained in self._pretrained():
            name, asks = type(pretrained).__name__, "loss_function" in names_in(pretrained)
            loss = served_loss(pretrained.loss_function, self.backend) if asks else None
            if asks and "loss" not in self.wanted:
                self.left["loss", name, "not asked for: parts lacks 'loss'"] += 1
            elif loss is not None:
                self.served.append(ServedModule("loss", pretrained, "cross_entropy", loss))
                self.values.append((pretrained, "_loss_function", loss))
            elif asks:
                self.left["loss", name, f"no op is {getattr(pretrained.loss_function, '__name__', 'its loss')}"] += 1
            else:
                own = with_own_loss(pretrained, self.backend)
                self._put("loss", pretrained, None if own is None else ("cross_entropy", own))

            head = served_head(pretrained, self.backend, self.memory_limit)
            if isinstance(head, str):
                self._leave("linear_loss", pretrained, head, known=True)
            elif head is not None:
                self._put("linear_loss", pretrained, ("linear_cross_entropy", head))

    def _read_projections(self) -> None:
        def by_name(module: nn.Module) -> bool:
            return self._is_like(module, ATTENTION) or self._is_like(module, FEED_FORWARD)

        for module, owners, served in projections(self.model, self.recipe, self.backend, by_name):
            self.known.add(module)
            if isinstance(served, str):
                self.left["fp8", type(module).__name__, served] += 1
                continue
            self.projections += [(owner, name, served) for owner, name in owners]
            self.served.append(ServedModule("fp8", module, "scaled_matmul", served, owners[0][0]))

    def by(self, op: str) -> str:
        """Who serves an op where the model's parameters are."""
        return self._backend_of(op) + self.only.get(op, "")

    def _backend_of(self, op: str) -> str:
        if self.backend is not None:
            return self.backend
        where = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if where.type == "meta":
            return "chosen from the arrays"
        framework = frameworks()["torch"]
        return choose(registry.find_spec(op), framework, framework.target(where)).name

    def carry_out(self) -> list[Patch]:
        """Do it; what was done, in order."""
        done = [Patch(module, name, value) for module, name, value in self.values]
        done += [ProjectionPatch(*projection) for projection in self.projections]
        for pretrained in self.attends:
            done.append(Patch(pretrained, "_attention_of_portakern", Registered(self.implementation, self.backend)))
            if hasattr(type(pretrained), ENTRY):
                done.append(Patch(pretrained, ENTRY, PagedBatching(pretrained, self.implementation)))
            done += _own_config(pretrained)
            pretrained.set_attn_implementation(self.implementation)
        return done


class OwnConfig(Patch):
    """A copy of a config, put in the place of one that other models may share. Where the copy was changed since, as by
    ``resize_token_embeddings``, it stays, with the attention that there was."""

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        super().__init__(module, name, value)
        self.said = value.to_dict()

    def undo(self) -> None:
        if self.value.to_dict() == self.said:
            super().undo()
        else:
            _attend_as(self.value, self.before)


def _attend_as(config: Any, before: Any) -> None:
    """Give a config, and those in it, the attention of another."""
    config._attn_implementation_internal = before._attn_implementation_internal
    for name in config.sub_configs:
        if getattr(config, name, None) is not None and getattr(before, name, None) is not None:
            _attend_as(getattr(config, name), getattr(before, name))


def _own_config(pretrained: Any) -> list[Patch]:
    """Give a model a copy of its config, which other models may share, and every module of it the same copy."""
    copies: dict[int, Any] = {}
    copy.deepcopy(pretrained.config, copies)
    return [
        OwnConfig(module, name, copies[id(value)])
        for module in pretrained.modules()
        for name, value in list(vars(module).items())
        if hasattr(value, "_attn_implementation") and id(value) in copies
    ]
