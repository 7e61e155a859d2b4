"""portakern's attention op as an attention implementation of transformers, by transformers' own interface."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from portakern.errors import UnsupportedError
from portakern.frameworks.torch.functions import CAUSAL, kept_op
from portakern.frameworks.torch.models.arguments import ELSEWHERE, IN_THE_MASK, OF_LOSSES
from portakern.frameworks.torch.models.paged import attends_pages, paged_name

__all__ = ["Registered", "register_attention", "somebodys"]


def register_attention(name: str = "portakern", backend: str | None = None) -> None:
    """Register the attention op with transformers, for models built with ``attn_implementation=name``.

    Masks are those of transformers' "sdpa", and are always created, even if a model passes none. Arguments that the op
    does not support are refused by name.

    ``f"{name}_flash"`` is registered too, for continuous batching alone: transformers takes it for an attention that
    needs no mask. Its op is paged_attention, in layers with a sliding window varlen_attention.
    :func:`apply` sets it while it is needed; without apply set it before, for ``set_attn_implementation`` would look
    for a package of that name:

    >>> model.config._attn_implementation = "portakern_flash"
    >>> model.generate_batch(prompts)

    Args:
      name: the name to register; an existing registration of this name is replaced.
      backend: the backend that must run it; None: chosen from the arrays.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    op = kept_op("attention", backend)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query: (batch, heads, length, head dim); key, value with fewer heads -> (batch, length, heads, head dim).

        attention_mask: transformers' mask for "sdpa", or (batch, length) integers, the sequence of each token.
        s_aux: (heads,), a sink of each head, as GPT-OSS has."""
        refuse(name, dropout, attention_mask, others)
        sequences = None
        if attention_mask is not None and attention_mask.dtype == torch.int32:
            sequences, attention_mask = attention_mask, None
        length, keys = query.shape[2], key.shape[2]
        causal: Any = False
        if attention_mask is None and length > 1:
            causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
            causal = leaves_out_masks(module) if causal is None and not hasattr(module, "is_causal") else bool(causal)
        window: tuple[int | None, int | None] | None = None
        if causal:  # aligned at the top left, where the op aligns at the bottom right; later keys are past every query
            if keys > length:
                keys, key, value = length, key[:, :, :length], value[:, :, :length]
            window = CAUSAL if keys == length else (None, length - keys)
            position_bias = None if position_bias is None else position_bias[..., :keys]
        if attention_mask is None and sliding_window is not None and keys > sliding_window:
            if not causal or keys != length:
                raise UnsupportedError(
                    f"{name}: sliding_window is {sliding_window} beside {keys} keys and no attention_mask; expected a "
                    "mask of the keys that each query sees, as transformers' models make it"
                )
            window = (sliding_window - 1, 0)
        if query.shape[0] != key.shape[0]:  # learned queries, one for the whole batch
            query = query.expand(key.shape[0], -1, -1, -1)
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        bias = additive(attention_mask, position_bias, query.dtype)
        options = {"window": window, "scale": scaling, "softcap": softcap}
        return op(q, k, v, bias, sequences, sequences, s_aux, **options), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, made_mask)
    AttentionInterface.register(paged_name(name), attends_pages(name, backend, refuse))
    AttentionMaskInterface.register(paged_name(name), flash_attention_mask)


def leaves_out_masks(module: Any) -> bool:
    """Whether a module that gets no mask may be meant to see what came before alone: so are those of models for which
    transformers' "sdpa" is served, and no others. One that has no config is taken at its word."""
    config = getattr(module, "config", None)
    return config is None or has_sdpa(type(config))


@torch.compiler.assume_constant_result
def has_sdpa(kind: type) -> bool:
    """Whether transformers has its attention "sdpa" for models of a class of configs: attention of these says itself
    whether it is causal, so that a mask that says no more is left out. Others are only right with their masks."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        found = MODEL_MAPPING[kind]
    except KeyError:
        return False
    models = found if isinstance(found, (tuple, list)) else (found,)
    return all(model._supports_sdpa for model in models)


def made_mask(*args: Any, config: Any = None, **others: Any) -> torch.Tensor | None:
    """transformers' mask for "sdpa", of models without which it is never left out."""
    from transformers.masking_utils import sdpa_mask

    if not has_sdpa(type(config)):
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, config=config, **others)


class Registered:
    """What a model keeps that asks for an attention of portakern's: a model that is unpickled, in whichever process,
    finds it registered."""

    def __init__(self, name: str, backend: str | None) -> None:
        self.__setstate__((name, backend))

    def __getstate__(self) -> Any:
        return self.name, self.backend

    def __setstate__(self, state: Any) -> None:
        self.name, self.backend = state
        register_attention(self.name, self.backend)


def somebodys(module: torch.nn.Module) -> str:
    """The name of the attention that a module asks for, where it is not transformers' own or portakern's, and may
    compute anything; "" otherwise."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name: str = getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return ""
    owner = str(ALL_ATTENTION_FUNCTIONS[name].__module__)
    return "" if owner.startswith(("transformers.", "portakern.")) else name


def refuse(name: str, dropout: float, mask: torch.Tensor | None, others: Mapping[str, Any]) -> None:
    """Refuse by name every argument that would change the result and that the op does not have."""
    if dropout > 0.0:
        raise UnsupportedError(
            f"{name}: dropout is {dropout}; expected 0.0: no kernel draws random numbers; set the model's "
            "attention_dropout (GPT-2: attn_pdrop) to 0"
        )
    for argument, given in others.items():
        if argument in ELSEWHERE or argument in OF_LOSSES or given is None or given is False:
            continue
        if argument in IN_THE_MASK:
            if mask is None:
                raise UnsupportedError(
                    f"{name}: {argument} is given and no attention_mask; expected packed sequences as a mask: pass "
                    "position_ids, from which the model makes it"
                )
            continue
        shown = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
        raise UnsupportedError(
            f"{name}: {argument} is {shown}; expected None: the attention op does not support it; "
            'build this model with attn_implementation="eager"'
        )


def additive(mask: torch.Tensor | None, position_bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask (bool: True where a pair takes part; or to add) and a bias of positions as one array to add to scores."""
    if mask is None or position_bias is None:
        added = position_bias if mask is None else mask
        if added is None or added.dtype != torch.bool:
            return added
        return torch.zeros((), dtype=dtype, device=added.device).where(added, -math.inf)
    return position_bias.where(mask, -math.inf) if mask.dtype == torch.bool else position_bias + mask
