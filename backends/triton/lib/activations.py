"""Activations of accumulators and of gates, as functions that kernels call.

    sigmoid(t) = 1 / (1 + exp(-t))        P(z) = (1 + erf(z / sqrt 2)) / 2        silu(z) = z sigmoid(z)
    gelu(z) = z P(z), or z sigmoid(t) with t = 2 sqrt(2 / pi) (z + 0.044715 z^3)

Each is there once for all results, as exact where it is small as anywhere, and once in fewer instructions for results
of 16 bits, which meet a product's accumulator.

Source: Hendrycks and Gimpel, "Gaussian error linear units" (2016).
"""

from __future__ import annotations

from math import e, log2, pi, sqrt

import triton
import triton.language as tl

K, C = tl.constexpr(2 * sqrt(2 / pi)), tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(sqrt(0.5))
ROOT_2PI = tl.constexpr(1 / sqrt(2 * pi))
FAR = tl.constexpr(40.0)
RATE = tl.constexpr(-log2(e))
C1, C3 = tl.constexpr(-log2(e) * K.value), tl.constexpr(-log2(e) * K.value * C.value)
R0, R1, R2, R3, R4, R5, R6, R7 = (
    tl.constexpr(c)
    for c in (
        -1.1511051654815674, -0.4592081904411316, -0.052496179938316345, 0.00706342002376914, -0.00013693644723389298,
        -0.00018618021567817777, 3.93776863347739e-05, -2.834912265825551e-06,
    )
)  # fmt: skip
"""Of 2^(-1 + w R(w)), the normal distribution at -w: least in its largest error from w = 0 to 5.5, which is below
1e-8; found by weighted least squares whose weights follow the error (Lawson 1961). Beyond, it only falls."""


@triton.jit
def open_and_shut(g):
    """s = 1 / (1 + exp(-g)) and q = 1 - s, each as exact where it is small."""
    e = tl.exp(-tl.abs(g))
    high = 1.0 / (1.0 + e)
    low = e * high
    return tl.where(g >= 0, high, low), tl.where(g >= 0, low, high)


@triton.jit
def erf_form(g):
    """The normal distribution of a gate g."""
    return 0.5 * (1.0 + tl.erf(g * ROOT_HALF))


@triton.jit
def sigmoid(t):
    """1 / (1 + 2^t). Where 2^t overflows it is 0, and what it multiplies is of the size of t at most."""
    return 1.0 / (1.0 + tl.exp2(t))


@triton.jit
def normal_below(z):
    """How much of the normal distribution lies below z, for results of 16 bits: within 1e-7, in half as many
    instructions as erf takes, which has two forms."""
    w = tl.abs(z)
    r = tl.fma(w, R7, R6)
    r = tl.fma(w, r, R5)
    r = tl.fma(w, r, R4)
    r = tl.fma(w, r, R3)
    r = tl.fma(w, r, R2)
    r = tl.fma(w, r, R1)
    r = tl.fma(w, r, R0)
    beyond = tl.exp2(tl.fma(w, r, -1.0))
    return tl.where(z < 0, beyond, 1.0 - beyond)


@triton.jit
def activated(z, activation: tl.constexpr, low: tl.constexpr):
    """f(z), which is to be stored in 16 bits if ``low``."""
    if activation == "relu":
        return tl.where(z < 0, 0.0, z)
    elif activation == "gelu":
        if low:
            return z * normal_below(z)
        else:
            return z * erf_form(z)
    elif activation == "gelu_tanh":
        return z * sigmoid(z * tl.fma(z * z, C3, C1))
    elif activation == "silu":
        return z * sigmoid(z * RATE)
    else:
        return z


@triton.jit
def near(g):
    """A gate that is kept within FAR; NaN stays."""
    return tl.where(g > FAR, FAR, tl.where(g < -FAR, -FAR, g))


@triton.jit
def of_tanh_form(g):
    """s(t) of a gate g, and the slope of g s."""
    g = near(g)
    s, q = open_and_shut(K * g * (1.0 + C * g * g))
    return s, (s * (1.0 + K * g * (1.0 + 3.0 * C * g * g) * q))


@triton.jit
def of_erf_form(g):
    """P of a gate g, and the slope of g P."""
    p, g = erf_form(g), near(g)
    return p, (p + g * (tl.exp(-0.5 * g * g) * ROOT_2PI))


@triton.jit
def of_silu(g):
    """s of a gate g, and the slope of g s."""
    s, q = open_and_shut(g)
    return s, (s * (1.0 + g * q))
