"""all-MiniLM-L6-v2, a sentence-embedding model, with every matmul, softmax, layernorm and attention served by a portakern backend of choice."""
