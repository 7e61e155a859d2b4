"""Whether tensors are like others whose signature is known, by the check of torch.compile's guards: one call of C for
all that a signature reads of them, and for most of those who may step in."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from portakern.frameworks.torch.memory import OFFSETS

__all__ = ["comparison"]

log = logging.getLogger("portakern")

NOBODY = "not _compiler._is_compiling_flag and _forward_ad._current_level < 0 and not _profiler._is_profiler_enabled"
"""That those do not step in of whom PyTorch's dispatcher does not know. Modes, transforms of torch.func, tracers and
autocast put keys into the dispatcher, which the guards compare."""

KNOWN: Mapping[str, Any] = {"_compiler": torch.compiler, "_forward_ad": forward_ad, "_profiler": profiler}


def comparison(arrays: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """See :meth:`portakern.core.framework.Framework.comparison`. Guards are false where a tensor is given twice: it is
    given them once."""
    guards = _guards()
    if guards is None:
        return None
    first: dict[int, str] = {}
    again = [f"{n} is {first[id(a)]}" for n, a in arrays.items() if first.setdefault(id(a), n) != n]
    once = {n: arrays[n] for n in first.values()}
    env = {**KNOWN, "_agree": guards(*once.values(), **EXACTLY).check, "_recording": torch.is_grad_enabled}
    env |= {f"_KIND_{n}": a.__class__ for n, a in once.items()}
    # of tensors without strides those without memory say so, and a nested one ends the process if guards ask for them
    there = [f"{n}.__class__ is _KIND_{n} and {n}.data_ptr() > {OFFSETS} and not {n}.is_nested" for n in once]
    recording = []
    if any(a.requires_grad for a in arrays.values()):
        recording = ["_recording()" if torch.is_grad_enabled() else "not _recording()"]
    return " and ".join([NOBODY, *recording, *again, *there, f"_agree({', '.join(once)})"]), env


EXACTLY: Mapping[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}


@functools.cache
def _guards() -> Callable[..., Any] | None:
    """The class of torch.compile's guards of tensors; None where they do not say what is expected, which is logged."""
    try:
        guards: Callable[..., Any] = torch._C._dynamo.guards.TensorGuards
        x, y = (torch.empty(2, 3, device="cpu") for _ in range(2))
        agree = guards(x, y, **EXACTLY).check
        others = [x.T, x[:1], x[:, None], x.double(), x.detach().requires_grad_(), torch.nn.Parameter(x), x.to("meta")]
        said = agree(x, y), agree(y, x), *(agree(other, y) or agree(x, other) for other in others)
        if said == (True, True, *[False] * len(others)):
            return guards
        why = f"of the same they say {said[:2]}, of others {said[2:]}"
    except (AttributeError, TypeError, RuntimeError) as e:
        why = str(e)
    log.warning("portakern: calls are compared by their signatures, right but 3 us slower: %s", why)
    return None
