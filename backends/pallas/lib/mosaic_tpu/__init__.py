"""What kernels for TPUs share: the chip's grid and memory, layouts that XLA chooses, and the walk over rows."""
