"""Scaled dot-product attention with grouped queries, and its gradients.

* ``contract``: the signatures, the rules and the work.
* ``scores``: which pairs of a query and a key are seen, and how a score is made of them.
* ``pairs``: what rounding does to rows, to scores, and to the pairs that all gradients are sums of.
* ``bounds``: the errors that are permitted; ``statistics``: those that are typical.
* ``mistakes``: what kernels with likely mistakes compute.
* ``stretches``: the parts of a long call that are compared where all of it is too much.
* ``corners``, and the ``planting`` of values in them; ``laws``: what the checker visits by name.
"""

import portakern.specs.attention.bounds
import portakern.specs.attention.corners
import portakern.specs.attention.laws
import portakern.specs.attention.mistakes
import portakern.specs.attention.statistics
import portakern.specs.attention.stretches  # noqa: F401  these declare what the spec consists of
from portakern.specs.attention.contract import AttentionGradients, AttentionOut, attention, attention_vjp
from portakern.specs.attention.scores import (
    allowed,
    allowed_pairs,
    distances,
    far_from,
    first_place,
    head_of_bias,
    options_for,
    over_cap,
    scale_of,
    score_unit,
    sight,
)

__all__ = [
    "AttentionGradients",
    "AttentionOut",
    "allowed",
    "allowed_pairs",
    "attention",
    "attention_vjp",
    "distances",
    "far_from",
    "first_place",
    "head_of_bias",
    "options_for",
    "over_cap",
    "scale_of",
    "score_unit",
    "sight",
]
