"""Drop-in twins of JAX's own functions on portakern ops."""

from portakern.frameworks.jax.functions import dot_product_attention

__all__ = ["dot_product_attention"]
