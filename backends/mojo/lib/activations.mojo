"""What follows a linear layer: f(z), by the codes of ``ACTIVATIONS`` in cpu/linear.py."""

from std.math import erfc

from .exponential import exp
from .strips import Strip

comptime NONE = 0
comptime RELU = 1
comptime GELU = 2
comptime GELU_TANH = 3
comptime SILU = 4


@always_inline
def share_of_gelu[acc: DType](z: Strip[acc], tanh: Bool) -> Strip[acc]:
    """gelu(z) / z: the normal distribution's, or 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (z + 0.044715 z^3)."""
    if tanh:
        return 1 / (1 + exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    var w = -0.70710678118654752 * z
    comptime if acc == DType.float64:
        return 0.5 * rebind[Strip[acc]](erfc(rebind[Strip[DType.float64]](w)))
    else:
        return 0.5 * rebind[Strip[acc]](erfc(rebind[Strip[DType.float32]](w)))


@always_inline
def activated[acc: DType](z: Strip[acc], activation: Int) -> Strip[acc]:
    """f(z); gelu and silu of -inf are NaN by plain arithmetic."""
    if activation == RELU:
        return z.lt(0).select(Strip[acc](0), z)
    if activation == SILU:
        return z / (1 + exp(-z))
    if activation == NONE:
        return z
    return z * share_of_gelu(z, activation == GELU_TANH)
