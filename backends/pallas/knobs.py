"""What each tile and each launch knob of the Pallas kernels means, as ``portakern show`` prints it."""

__all__ = ["MEANING"]

MEANING = {
    # tiles of the specs
    "block_rows": "rows of a block",
    "block_n": "columns of a block: elements of a row that are read at once, or columns of the result of a product",
    "block_m": "rows of the result in a block",
    "block_k": "elements along the summed dimension in a step",
    "block_q": "queries in a block",
    "block_kv": "keys in a block",
    "block_seq": "tokens in a block",
    "block_heads": "heads in a block",
    "chunk_rows": "rows whose logits are in memory at once",
    "chunk_n": "classes whose logits are in memory at once",
    # TPUs
    "kernels": "1: all gradients by one kernel; 2: d_q by one, d_k and d_v by another",
    # GPUs
    "stages": "blocks of the inputs in flight: the depth of the software pipeline",
    "splits": "split KV: the largest number of splits of the keys that a query sees",
    "chunk": "split KV: the least number of keys in a split",
    "last": "1: the products with d_k are the last of a step",
    "row_warps": "warps that share a row",
    "cluster": "thread blocks of a cluster that share a row",
    "ring": "rows in flight in shared memory",
    "band": "rows of tiles that are finished column by column, so that their operands stay in the L2 cache",
    "beside": "block_n columns that a tile has, as a multiple",
    "pair": "thread blocks of a cluster that share an operand; 0: none; 1: two tiles below each other; 2: side by side",
}
