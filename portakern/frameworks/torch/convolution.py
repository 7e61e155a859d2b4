"""Convolutions on portakern ops, with the arguments of the functions that models call."""

from __future__ import annotations

from torch import Tensor

from portakern.errors import SpecError, UnsupportedError
from portakern.frameworks.torch.functions import kept_op

__all__ = ["causal_conv1d"]

ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}
"""Of the package causal_conv1d -> of the op."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``causal_conv1d_fn`` of the package causal_conv1d on the causal_conv1d op.

    Args:
      x: (batch, channels, length), of any strides: channels may be adjacent, as a projection leaves them, or positions.
      weight: (channels, width), 2 <= width <= 16, of x's dtype or float32; bias: (channels,), likewise.
      seq_idx: (batch, length), int32 or int64: inputs of another sequence than the output's count as 0.
        A state is that of the first sequence, or of the last.
      initial_states: (batch, channels, width - 1), the inputs before the first.
      return_final_states: whether the last width - 1 inputs are returned too.
      final_states_out: None: states are new arrays.
      activation: None, "silu" or "swish", which is silu.

    Returns:
      (batch, channels, length), of x's dtype, with channels adjacent; and with return_final_states the state.

    Raises:
      UnsupportedError: final_states_out. SpecError: shapes or dtypes that do not agree, or another activation.
    """
    if final_states_out is not None:
        raise UnsupportedError(
            "causal_conv1d: final_states_out is given; expected None: use the state that is returned"
        )
    if activation not in ACTIVATIONS:
        raise SpecError(f"causal_conv1d: activation is {activation!r}; expected None, 'silu' or 'swish'")
    if x.dim() != 3:
        raise SpecError(f"causal_conv1d: x has {x.dim()} axes; expected 3: (batch, channels, length)")
    try:
        found = kept_op("causal_conv1d", backend)(
            x.transpose(1, 2), weight, bias, initial_states, seq_idx,
            activation=ACTIVATIONS[activation], return_final_state=return_final_states,
        )  # fmt: skip
    except SpecError as e:
        raise SpecError(f"{e} (segment_ids is seq_idx, x is given as (batch, length, channels))") from e
    if return_final_states:
        return found[0].transpose(1, 2), found[1]
    return found.transpose(1, 2)
