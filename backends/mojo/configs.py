"""What the Mojo kernels take beside a call. Tiles have their values in the specs."""

from __future__ import annotations

from typing import Annotated

from portakern.core.config import Config
from portakern.spec import Tile


class ProductConfig(Config):
    """Of matrix products. No bit of a result depends on it."""

    block_m: Annotated[int, "rows of the result that a thread computes at a time"]
    block_n: Annotated[int, "columns of the result that a thread computes at a time"]
    block_k: Annotated[int, "products of each element before the next tile: panels of them stay in the first cache"]


class LinearGradientsConfig(ProductConfig):
    """Of a linear layer's gradients, whose products have no tiles in the spec."""

    block_m: Annotated[int, Tile(16, 2048)]
    block_n: Annotated[int, Tile(16, 2048)]
    block_k: Annotated[int, Tile(16, 4096)]


class AttentionConfig(Config):
    """Of attention. No bit of a result depends on it."""

    block_q: Annotated[int, "queries of a head that a thread takes at a time, with all keys that they see"]
    block_kv: Annotated[int, "keys whose values are added before the next: they stay in the first cache"]
