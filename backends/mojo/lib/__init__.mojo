"""What the kernels share: arrays as they come from Python, strips of numbers, and the exponential."""
