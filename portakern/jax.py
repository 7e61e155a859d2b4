"""Twins of JAX's functions on portakern ops, and the choice of a chip for lowering."""

from portakern.frameworks.jax.functions import dot_product_attention, rotary_tables
from portakern.frameworks.jax.paged import ragged_paged_attention
from portakern.frameworks.jax.products import dot_general, ragged_dot
from portakern.frameworks.jax.ring import from_zigzag, ring_attention, to_zigzag
from portakern.frameworks.jax.scaled import scaled_matmul
from portakern.frameworks.jax.tables import take
from portakern.frameworks.jax.tracing import lowered_for
from portakern.frameworks.jax.vocabulary import (
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_linear_cross_entropy,
)

__all__ = [
    "dot_general",
    "dot_product_attention",
    "from_zigzag",
    "lowered_for",
    "ragged_dot",
    "ragged_paged_attention",
    "ring_attention",
    "rotary_tables",
    "scaled_matmul",
    "take",
    "to_zigzag",
    "vocabulary_parallel_cross_entropy",
    "vocabulary_parallel_linear_cross_entropy",
]
