"""What follows a linear layer: f(z) and its slope, by the codes of ``ACTIVATIONS`` in cpu/linear.py."""

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


@always_inline
def slope_of_gelu[acc: DType](z: Strip[acc], tanh: Bool) -> Strip[acc]:
    """The derivative of z P(z): P + z exp(-z^2 / 2) / sqrt(2 pi), or P (1 + z t' (1 - P)) of the tanh form. Beyond 40
    it is 0 or 1, and so at infinities."""
    var g = z.gt(40).select(Strip[acc](40), z.lt(-40).select(Strip[acc](-40), z))
    var p = share_of_gelu(g, tanh)
    if tanh:
        return p * (1 + 1.5957691216057308 * g * (1 + 0.134145 * g * g) * share_of_gelu(-g, tanh))
    return p + g * exp(-0.5 * g * g) * 0.39894228040143268


@always_inline
def slope_of[acc: DType](z: Strip[acc], d: Strip[acc], activation: Int) -> Strip[acc]:
    """d f'(z). relu's selects, up to 0."""
    if activation == RELU:
        return z.le(0).select(Strip[acc](0), d)
    if activation == SILU:
        return d * ((1 + z * (1 / (1 + exp(z)))) * (1 / (1 + exp(-z))))
    if activation == NONE:
        return d
    return d * slope_of_gelu(z, activation == GELU_TANH)
