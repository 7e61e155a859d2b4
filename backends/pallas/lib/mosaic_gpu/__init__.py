"""What the families for Hopper GPUs share: the chip, sums in registers, walks over rows and columns, and attention."""
