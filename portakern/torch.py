"""Twins of PyTorch's functions on portakern ops, and functions that put them into existing models."""

from portakern.frameworks.torch.convolution import causal_conv1d
from portakern.frameworks.torch.experts import moe
from portakern.frameworks.torch.float8 import Float8Linear
from portakern.frameworks.torch.functions import (
    apply_rotary_pos_emb,
    cross_entropy,
    embedding,
    layer_norm,
    linear_cross_entropy,
    logsumexp,
    matmul,
    rms_norm,
    rotary_tables,
    scaled_dot_product_attention,
    softmax,
)
from portakern.frameworks.torch.grouped import grouped_mm
from portakern.frameworks.torch.models.applied import apply
from portakern.frameworks.torch.models.attention import register_attention
from portakern.frameworks.torch.models.experts import register_experts
from portakern.frameworks.torch.ring import from_zigzag, ring_attention, to_zigzag
from portakern.frameworks.torch.scaled import scaled_grouped_mm, scaled_mm
from portakern.frameworks.torch.swapping import swapped
from portakern.frameworks.torch.varlen import varlen_attn
from portakern.frameworks.torch.vocabulary import (
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_linear_cross_entropy,
)

__all__ = [
    "Float8Linear",
    "apply",
    "apply_rotary_pos_emb",
    "causal_conv1d",
    "cross_entropy",
    "embedding",
    "from_zigzag",
    "grouped_mm",
    "layer_norm",
    "linear_cross_entropy",
    "logsumexp",
    "matmul",
    "moe",
    "register_attention",
    "register_experts",
    "ring_attention",
    "rms_norm",
    "rotary_tables",
    "scaled_dot_product_attention",
    "scaled_grouped_mm",
    "scaled_mm",
    "softmax",
    "swapped",
    "to_zigzag",
    "varlen_attn",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_linear_cross_entropy",
]
