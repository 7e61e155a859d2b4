"""What the Pallas kernels take beside a call. Tiles have their values in the specs."""

from __future__ import annotations

from typing import Annotated

from portakern.core.config import Config
from portakern.spec import Count, Tile


class RowsConfig(Config):
    """Of ops on rows."""

    block_rows: Annotated[int, "rows of a block"]
    block_n: Annotated[int, "columns of a block: elements of a row that are read at once"]


class WholeRowsConfig(Config):
    """Of ops on rows of which a block holds all."""

    block_rows: Annotated[int, "rows of a block"]


class RopeConfig(Config):
    """Of rotary embeddings."""

    block_seq: Annotated[int, "tokens in a block"]
    block_heads: Annotated[int, "heads in a block"]


class SequenceConfig(Config):
    """Of convolutions along sequences, and their gradients."""

    block_length: Annotated[int, "positions of a sequence in a block"]
    block_channels: Annotated[int, "channels in a block"]


class EmbeddingConfig(Config):
    """Of rows of a table."""

    block_n: Annotated[int, Tile(128, 16384), "numbers of a row in a block"]


class EmbeddingGradientConfig(EmbeddingConfig):
    """Of the gradient of a table."""

    block_rows: Annotated[int, Tile(8, 1024), "rows of the table in a block"]
    block_tokens: Annotated[int, Tile(8, 1024), "tokens, sorted by their rows, in a block"]


class TokenRowsConfig(Config):
    """Of ops on the tokens of one head."""

    block_rows: Annotated[int, "rows of a block, each a token of a head"]


class LogitsConfig(Config):
    """Of a loss whose logits are made a chunk of rows at a time."""

    chunk_rows: Annotated[int, "rows whose logits are in memory at once"]


class LogitGradientsConfig(Config):
    """Of the gradients of such a loss, a chunk of classes at a time."""

    chunk_n: Annotated[int, "classes whose logits are in memory at once"]


class ProductConfig(Config):
    """Of matrix products."""

    block_m: Annotated[int, "rows of the result in a block"]
    block_n: Annotated[int, "columns of the result in a block"]
    block_k: Annotated[int, "elements along the summed dimension in a step"]


class TilesConfig(Config):
    """Of attention, forward and backward."""

    block_q: Annotated[int, "queries in a block"]
    block_kv: Annotated[int, "keys in a block"]


class AttentionGradientsConfig(TilesConfig):
    """Of attention's gradients on TPUs."""

    kernels: Annotated[int, Count(1, 2), "1: all gradients by one kernel; 2: d_q by one, d_k and d_v by another"]


# --------------------------------------------------------------------------------------------------------------- GPUs


class PipelineConfig(Config):
    """Of kernels that send for blocks ahead."""

    stages: Annotated[int, Count(1, 8), "blocks of the inputs in flight: the depth of the software pipeline"]


class HopperRowsConfig(RowsConfig):
    """Of ops on rows on GPUs."""

    row_warps: Annotated[
        int, Tile(1, 4), "warps that share a row; one that is read element by element has all of a block"
    ]
    cluster: Annotated[
        int,
        Tile(1, 8),
        "thread blocks of a cluster that share a row, no more than it has chunks; one that is read element by element "
        "has one",
    ] = 1


class RingConfig(RowsConfig):
    """Of gradients of norms on GPUs. Two rows at least: the next is sent for while one is worked on."""

    ring: Annotated[int, Count(2, 8), "rows in flight in shared memory"]


class HopperProductConfig(ProductConfig, PipelineConfig):
    """Of matrix products on GPUs. Two stages at least: a buffer is in use until the next has arrived."""

    stages: Annotated[int, Count(2, 8)]
    band: Annotated[
        int,
        Count(1, 16),
        "rows of tiles that are finished column by column, so that their operands stay in the L2 cache",
    ]
    beside: Annotated[int, Count(1, 4), "block_n columns that a tile has, as a multiple"]
    pair: Annotated[
        int,
        Count(0, 2),
        "thread blocks of a cluster that share an operand; 0: none; 1: two tiles below each other; 2: side by side",
    ]


class StreamedTilesConfig(TilesConfig, PipelineConfig):
    """Of attention on GPUs. Two stages at least: values are in use until those of the next keys have arrived; one
    buffer waits for ever."""

    stages: Annotated[int, Count(2, 8)]


class FlashConfig(StreamedTilesConfig):
    """Of attention of whole sequences on GPUs, whose keys may have splits."""

    max_splits: Annotated[
        int,
        Count(1, 64),
        "split KV: the largest number of splits of the keys that a query sees, and one more where they begin within "
        "one",
    ]
    min_split_keys: Annotated[int, Tile(64, 1 << 20), "split KV: the least number of keys in a split"]


class FlashGradientsConfig(TilesConfig, PipelineConfig):
    """Of attention's gradients on GPUs. One stage will do: a tile is done with before the next is waited for."""


class UnorderedGradientsConfig(FlashGradientsConfig):
    """Of those whose d_q many blocks add to. Two stages at least: two tiles that came by may be in use together."""

    stages: Annotated[int, Count(2, 8)]
    last: Annotated[bool, "1: the products with d_k are the last of a step"]
