"""Scaled dot-product attention with grouped queries.

* ``contract``: the signature, the rules and the work.
* ``scores``: which pairs of a query and a key are seen, and how a score is made of them.
* ``bounds``: the error that is permitted; ``statistics``: the error that is typical.
* ``stretches``: the parts of a long call that are compared where all of it is too much.
* ``corners``, and the ``planting`` of values in them; ``laws``: what the checker visits by name.
"""

import portakern.specs.attention.bounds
import portakern.specs.attention.corners
import portakern.specs.attention.laws
import portakern.specs.attention.statistics
import portakern.specs.attention.stretches  # noqa: F401  these declare what the spec consists of
from portakern.specs.attention.contract import AttentionOut, attention
from portakern.specs.attention.scores import allowed, allowed_pairs, head_of_bias, over_cap, scale_of, score_unit

__all__ = [
    "AttentionOut",
    "allowed",
    "allowed_pairs",
    "attention",
    "head_of_bias",
    "over_cap",
    "scale_of",
    "score_unit",
]
