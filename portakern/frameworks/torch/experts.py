"""A mixture of experts as one function on the permute, grouped_matmul, swiglu and unpermute ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from portakern.errors import SpecError
from portakern.frameworks.torch.functions import kept_op

__all__ = ["moe", "sent_to_experts"]

NAME = "moe"


def moe(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, *, backend: str | None = None
) -> Tensor:
    """The feed-forward layer of a mixture of experts, as in Mixtral: of each token the weighted sum of what its experts
    give, down_e (silu(gate_e x) * up_e x).

    Rows of tokens are sorted by their experts (permute), multiplied with the matrices of each (grouped_matmul), gated
    (swiglu), multiplied again and brought back (unpermute). No token is dropped, whatever experts are chosen, no value
    is read on the host, and a token's bits depend on its own experts alone. Gradients of x, gate_up, down and weights
    are those of the ops.

    The backward pass keeps tokens * k rows of each: x, the products with gate and up, their gated product, and what
    experts give: 2 d + 3 f numbers a row in x's dtype. It keeps no array of tokens by experts.

    Args:
      x: (tokens, d).
      gate_up: (experts, 2 f, d), of each expert the gate's rows and behind them those of up; down: (experts, d, f). x's
        dtype, of any strides: the parameters of transformers' layers as they are.
      indices: (tokens, k), int32 or int64, the experts of each token. One that is no expert of these, such as -1 or one
        of an expert on another device, adds nothing.
      weights: (tokens, k), any float dtype: what each expert counts, such as a router's probabilities.
      backend: the backend that must run it; None: chosen from the arrays.

    Returns:
      (tokens, d), in x's dtype. What experts give is rounded to that dtype before it is weighted and summed in float32.

    Raises:
      SpecError: shapes or dtypes that do not agree.
    """
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[0] != down.shape[0]:
        raise SpecError(
            f"{NAME}: gate_up and down have shapes {tuple(gate_up.shape)} and {tuple(down.shape)}; expected (experts, "
            "2 f, d) and (experts, d, f) of as many experts: stack the weights of all"
        )
    if gate_up.shape[1] != 2 * down.shape[2]:
        raise SpecError(
            f"{NAME}: gate_up has {gate_up.shape[1]} rows of each expert, and down {down.shape[2]} columns; expected "
            "twice as many: the gate's rows and behind them those of up"
        )
    product, gated = kept_op("grouped_matmul", backend), kept_op("swiglu", backend)

    def experts(rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = product(rows, gate_up.mT, ends).chunk(2, -1)
        found: Tensor = product(gated(gate, up), down.mT, ends)
        return found

    return sent_to_experts(x, indices, weights, gate_up.shape[0], experts, backend)


def sent_to_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    number: int,
    experts: Callable[[Tensor, Tensor], Tensor],
    backend: str | None,
) -> Tensor:
    """``experts(rows, ends)`` of rows sorted by expert, weighted and summed for each token of x."""
    rows, positions, ends = kept_op("permute", backend)(x, indices, experts=number)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y: Tensor = kept_op("unpermute", backend)(experts(rows, ends), positions, weights.to(wide))
    return y
