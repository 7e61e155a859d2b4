"""A character model trained on portakern ops and on PyTorch's own, from the same seeds."""
