"""all-MiniLM-L6-v2, a sentence-embedding model, on a portakern backend of choice.

Every matmul, softmax, layernorm and attention is served by it.
"""
