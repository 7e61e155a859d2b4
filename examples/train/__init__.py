"""A small Llama, trained on portakern, on Liger and on PyTorch from the same seeds."""
