"""What each tile and each launch knob of the Triton kernels means, as ``portakern show`` prints it."""

__all__ = ["MEANING"]

MEANING = {
    # tiles of the specs
    "block_rows": "rows that a program owns",
    "block_n": "columns of a tile: elements of a row that are read at once, or columns of the result of a product",
    "block_m": "rows of the result that a program computes",
    "block_k": "elements along the summed dimension in a step",
    "block_q": "queries in a tile",
    "block_kv": "keys in a tile",
    "block_seq": "tokens in a tile",
    "block_heads": "heads in a tile",
    "chunk_rows": "rows whose logits are in memory at once",
    "chunk_n": "classes whose logits are in memory at once",
    # launch parameters of Triton
    "num_warps": "warps of a program",
    "num_stages": "tiles of the inputs in flight: the depth of the software pipeline",
    "matrix_instr_nonkdim": "AMD: rows and columns of one matrix instruction",
    # products
    "group": "rows of tiles that are finished column by column, so that their operands stay in the L2 cache",
    "swapped": "1: compute the transpose of the result (swap A and B), for few rows",
    "roles": "0: all warps do the same; 1: warp specialization; 2, 3: and a half or a quarter of a tile more columns",
    "halves": "epilogue subtile; 1: store the tile in two halves; 2: through the shared memory of the inputs",
    "steps": "blocks of rows that a program adds up before it writes its partial sum",
    # attention
    "chunk": "split KV: the least number of keys in a split",
    "whole": "split KV: up to so many keys are one split",
    "most": "split KV: the largest number of splits of a row",
    "few_q": "queries in a tile where there are few",
    "few_stages": "tiles of keys in flight where there are few queries",
    "threefold": "1: float32 products as three products of the matrix unit",
    "consumers": "warp groups that multiply, with 64 rows each; one more loads",
    "stay": "1: persistent programs that take tiles in pairs, where some see more keys than others and that is faster",
    "shares": "few queries; 0: the portable kernel; 1: the faster of a program for each split and for each group of "
    "heads; 2: for each split; 3: for each group of heads",
    "dq_block_q": "queries in a tile of the kernel of d_q",
    "dq_block_kv": "keys in a tile of the kernel of d_q",
    "dq_consumers": "warp groups that multiply in the kernel of d_q",
    "dq_stages": "tiles in flight in the kernel of d_q",
    "ahead": "1: compute the scores of the next tile beside the gradients of this one",
    "behind": "1: compute d_q of a tile beside the weights of the next",
}
