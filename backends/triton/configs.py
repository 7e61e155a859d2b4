"""What the Triton kernels take beside a call. Tiles have their values in the specs."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from portakern.core.config import Config
from portakern.spec import Count, Tile


class WarpsConfig(Config):
    """What every kernel is compiled for."""

    num_warps: Annotated[int, Tile(1, 32), "warps of a program"]


class PipelineConfig(Config):
    """Of kernels whose loops have loads on their way."""

    num_stages: Annotated[int, Count(1, 8), "tiles of the inputs in flight: the depth of the software pipeline"]


class RowsConfig(WarpsConfig):
    """Of ops on rows."""

    block_rows: Annotated[int, "rows that a program owns"]
    block_n: Annotated[int, "columns of a tile: elements of a row that are read at once"]


class CodedRowsConfig(RowsConfig):
    """Of ops on rows that end in codes, of which other backends read rows whole."""

    block_n: Annotated[int, Tile(128, 65536), "columns of a tile: elements of a row that are read at once"]


class TopKConfig(RowsConfig):
    """Of the greatest numbers of rows, which other backends read whole."""

    block_n: Annotated[int, Tile(16, 4096), "columns of a tile: elements of a row that are read at once"]


class WholeRowsConfig(WarpsConfig):
    """Of ops that hold a row in registers, however long."""

    block_rows: Annotated[int, "rows that a program owns"]


class RowGradientsConfig(RowsConfig, PipelineConfig):
    """Of gradients of norms, which sum over rows."""

    num_stages: Annotated[int, Tile(1, 8)]
    blocks_per_program: Annotated[
        int, Tile(1, 1024), "blocks of rows that a program adds up before it writes its partial sum"
    ]


class RopeConfig(WarpsConfig):
    """Of rotary embeddings."""

    block_seq: Annotated[int, "tokens in a tile"]
    block_heads: Annotated[int, "heads in a tile"]


class SequenceConfig(WarpsConfig):
    """Of convolutions along sequences."""

    block_length: Annotated[int, "positions of a sequence in a tile"]
    block_channels: Annotated[int, "channels in a tile"]


class SequenceGradientsConfig(SequenceConfig):
    """Of their gradients, which sum over positions."""

    blocks_per_program: Annotated[int, Tile(1, 1024), "tiles of a sequence that a program adds up"]


class AppendConfig(WarpsConfig):
    """Of rows that are copied into a cache."""

    block_n: Annotated[int, Tile(128, 8192), "numbers of a row that are copied at once"]


class EmbeddingConfig(WarpsConfig):
    """Of rows of a table."""

    block_n: Annotated[int, Tile(128, 16384), "numbers that a program owns, of one row or of several short ones"]


class EmbeddingGradientConfig(EmbeddingConfig):
    """Of the gradient of a table."""

    block_tokens: Annotated[int, Tile(16, 1024), "tokens that a program sorts by their rows"]


class TokenRowsConfig(WarpsConfig):
    """Of ops on the tokens of one head."""

    block_rows: Annotated[int, "tokens of a head that a program owns"]


class LogitsConfig(Config):
    """Of a loss whose logits are made a chunk of rows at a time."""

    chunk_rows: Annotated[int, "rows whose logits are in memory at once"]


class LogitGradientsConfig(Config):
    """Of the gradients of such a loss, a chunk of classes at a time."""

    chunk_n: Annotated[int, "classes whose logits are in memory at once"]


# ------------------------------------------------------------------------------------------------------------ products


class ProductConfig(WarpsConfig, PipelineConfig):
    """Of matrix products."""

    block_m: Annotated[int, "rows of the result that a program computes"]
    block_n: Annotated[int, "columns of the result that a program computes"]
    block_k: Annotated[int, "elements along the summed dimension in a step"]
    group: Annotated[
        int,
        Tile(1, 64),
        "rows of tiles that are finished column by column, so that their operands stay in the L2 cache",
    ]


class WarpSpecialized(IntEnum):
    """Whether one warp copies and others multiply, and how many columns a tile then has beside its ``block_n``."""

    NO = 0
    YES = 1
    HALF_MORE = 2
    QUARTER_MORE = 3


class EpilogueSubtile(IntEnum):
    """How a tile of c leaves, of warps that have roles. By halves, or, where a program has one tile, through a's
    stages, which nobody needs any more, it leaves room for one more stage."""

    WHOLE = 0
    HALVES = 1
    IN_STAGES = 2


class HopperProductConfig(ProductConfig):
    """Of matrix products on Hopper."""

    num_warps: Annotated[int, Tile(4, 8)]
    num_stages: Annotated[int, Count(2, 8)]
    group: Annotated[int, Tile(1, 32)]
    swap_ab: Annotated[bool, "1: compute the transpose of the result (swap A and B), for few rows"]
    warp_specialized: Annotated[
        WarpSpecialized,
        "0: all warps do the same; 1: warp specialization; 2, 3: and a half or a quarter of a tile more columns",
    ]
    epilogue_subtile: Annotated[
        EpilogueSubtile,
        "epilogue subtile; 1: store the tile in two halves; 2: through the shared memory of the inputs",
    ] = EpilogueSubtile.WHOLE
    direct_loads: Annotated[
        bool,
        "1, without swap_ab and warp_specialized: read the operands through registers, as they lie; 0: by the copy "
        "engine, after a copy if need be",
    ] = False


class HopperGroupedConfig(ProductConfig):
    """Of products of groups of rows on Hopper."""

    num_warps: Annotated[int, Tile(8, 8)]
    num_stages: Annotated[int, Count(2, 8)]
    group: Annotated[int, Tile(1, 32)]
    epilogue_subtile: Annotated[bool, "epilogue subtile; 1: store the tile in two halves"]


class MoreColumns(IntEnum):
    """Columns that a tile has beside its ``block_n``, in accumulators of their own."""

    NONE = 0
    HALF = 1
    SAME = 2


class WeightOnlyConfig(ProductConfig):
    """Of products with weights in codes of few bits."""

    swap_ab: Annotated[bool, "1: codes are the left operand, and the transpose of the result is computed"]
    split_programs: Annotated[
        int, Tile(1, 4096), "programs that k is cut into chunks for, where the columns of the result give fewer"
    ]


class HopperScaledConfig(ProductConfig):
    """Of products of 8-bit numbers on Hopper."""

    num_warps: Annotated[int, Tile(4, 8), "warps that multiply, 4 for 64 rows of a tile; one more loads"]
    num_stages: Annotated[int, Count(2, 12)]
    group: Annotated[int, Tile(1, 32)]
    swap_ab: Annotated[bool, "1: compute the transpose of the result (swap A and B), for few rows"]
    overlap: Annotated[
        bool, "1: sums that leave the matrix unit take turns, one added while it makes the other; 0: one at a time"
    ] = True
    more_columns: Annotated[MoreColumns, "columns of a tile beside block_n; 1: half as many more, 2: as many"] = (
        MoreColumns.NONE
    )


# ----------------------------------------------------------------------------------------------------------- attention


class TilesConfig(PipelineConfig):
    """Of attention, forward and backward."""

    block_q: Annotated[int, "queries in a tile"]
    block_kv: Annotated[int, "keys in a tile"]


class PortableTilesConfig(TilesConfig, WarpsConfig):
    """Of its kernels for every GPU."""

    num_warps: Annotated[int, Tile(1, 16)]
    threefold: Annotated[bool, "1: float32 products as three products of the matrix unit"] = False
    matrix_instr_nonkdim: Annotated[int, Tile(16, 32), "AMD: rows and columns of one matrix instruction"]


class FewQueriesTilesConfig(PortableTilesConfig):
    """Of attention, whose tiles are others where there are few queries."""

    block_q_few: Annotated[int, Tile(16, 128), "queries in a tile where there are few"]
    num_stages_few: Annotated[int, Count(1, 8), "tiles of keys in flight where there are few queries"]


class AttentionConfig(FewQueriesTilesConfig):
    """Of attention whose long rows of keys are split. A tiling without ``min_split_keys`` has one split."""

    min_split_keys: Annotated[int, Tile(16, 1 << 20), "split KV: the least number of keys in a split"]
    unsplit_keys: Annotated[int, Tile(16, 1 << 20), "split KV: up to so many keys are one split"] = 0
    max_splits: Annotated[int, Tile(1, 128), "split KV: the largest number of splits of a row"]


class PagedAttentionConfig(PortableTilesConfig):
    """Of attention over pages."""

    block_q: Annotated[int, "rows of a tile: queries of the heads that share a key head"]
    split_keys: Annotated[int, Tile(64, 1 << 20), "split KV: the number of keys in a split"]


class FewQueries(IntEnum):
    """What becomes of few queries. No bit of a result depends on it."""

    PORTABLE = 0
    """They are the portable kernel's."""
    FASTER = 1
    """Split or walked, whichever is faster (``times`` of hopper/attention.py)."""
    SPLIT = 2
    """A program takes a chunk of keys (split-KV)."""
    WALKED = 3
    """A program takes a group of heads, and all its chunks."""


class ConsumersConfig(Config):
    """Of warp-specialized kernels of attention."""

    consumers: Annotated[int, Count(2, 3), "warp groups that multiply, with 64 rows each; one more loads"]


class UnsplitConfig(FewQueriesTilesConfig, ConsumersConfig):
    """Of attention on Hopper in one split."""

    persistent: Annotated[
        bool,
        "1: persistent programs that take tiles in pairs, where some see more keys than others and that is faster; no "
        "bit of a result depends on it",
    ] = False
    pingpong: Annotated[
        bool, "1: warp groups take turns to issue products (warpgroup ping-pong); no bit of a result depends on it"
    ] = True
    few_queries: Annotated[
        FewQueries,
        "few queries; 0: the portable kernel; 1: the faster of a program for each split and for each group of heads; "
        "2: for each split; 3: for each group of heads",
    ]


class VarlenFlashConfig(FewQueriesTilesConfig, ConsumersConfig):
    """Of attention of packed sequences on Hopper."""

    persistent: Annotated[
        bool,
        "1: persistent programs, each of which takes the next tile when it is done with one; no bit of a result "
        "depends on it",
    ] = True
    pingpong: Annotated[
        bool, "1: warp groups take turns to issue products (warpgroup ping-pong); no bit of a result depends on it"
    ] = True


class PagedFlashConfig(PagedAttentionConfig):
    """Of attention over pages on Hopper."""

    pingpong: Annotated[
        bool, "1: warp groups take turns to issue products (warpgroup ping-pong); no bit of a result depends on it"
    ] = False


class FlashConfig(AttentionConfig, UnsplitConfig):
    """Of attention on Hopper."""


class AttentionGradientsConfig(PortableTilesConfig):
    """Of attention's gradients."""

    dq_block_q: Annotated[int, Tile(16, 1024), "queries in a tile of the kernel of d_q"]
    dq_block_kv: Annotated[int, Tile(16, 1024), "keys in a tile of the kernel of d_q"]


class FlashGradientsConfig(AttentionGradientsConfig, ConsumersConfig):
    """Of attention's gradients on Hopper."""

    dq_consumers: Annotated[int, Count(2, 3), "warp groups that multiply in the kernel of d_q"]
    dq_num_stages: Annotated[int, Count(1, 8), "tiles in flight in the kernel of d_q"]
    ahead: Annotated[bool, "1: compute the scores of the next tile beside the gradients of this one"]


class UnorderedGradientsConfig(TilesConfig):
    """Of attention's gradients on Hopper whose d_q many programs add to."""

    behind: Annotated[bool, "1: compute d_q of a tile beside the weights of the next"]
