"""Gradients of scaled dot-product attention with grouped queries.

* ``contract``: the signature, the rules and the work.
* ``pairs``: what rounding does to the pairs of queries and keys, which all gradients are sums of.
* ``bounds``: the error that is permitted; ``statistics``: the error that is typical.
* ``stretches``: the parts of a long call that are compared where all of it is too much.
* ``corners``, ``laws``: what the checker visits by name.
"""

import portakern.specs.attention_vjp.bounds
import portakern.specs.attention_vjp.corners
import portakern.specs.attention_vjp.laws
import portakern.specs.attention_vjp.statistics
import portakern.specs.attention_vjp.stretches  # noqa: F401  these declare what the spec consists of
from portakern.specs.attention_vjp.contract import AttentionGradients, attention_vjp

__all__ = ["AttentionGradients", "attention_vjp"]
