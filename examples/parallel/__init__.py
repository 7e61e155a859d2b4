"""A Llama under PyTorch's parallel plans, on portakern."""
