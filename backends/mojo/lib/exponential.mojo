"""exp and log, within 2 ulp: the range is reduced by multiples of log 2 in two parts (Cody and Waite), and the rest is
a polynomial. float32's is Cephes' expf (Moshier), float64's the series of 14 terms, whose rest is below 2^-57.
"""

from std.memory import bitcast

@always_inline
def exp[acc: DType, L: Int](x: SIMD[acc, L]) -> SIMD[acc, L]:
    """e^x: inf of inf, 0 of -inf, NaN of NaN; results below the normal numbers are right to a spacing of these."""
    comptime if acc == DType.float64:
        return rebind[SIMD[acc, L]](_exp64(rebind[SIMD[DType.float64, L]](x)))
    else:
        return rebind[SIMD[acc, L]](_exp32(rebind[SIMD[DType.float32, L]](x)))


@always_inline
def _exp32[L: Int](given: SIMD[DType.float32, L]) -> SIMD[DType.float32, L]:
    comptime V = SIMD[DType.float32, L]
    comptime MAGIC = Float32(12582912.0)  # 1.5 2^23: what is added to it is rounded to a whole number
    var x = given.lt(-104.0).select(V(-104.0), given)
    x = x.gt(89.0).select(V(89.0), x)
    var shifted = x.fma(V(1.44269504088896341), V(MAGIC))
    var k = shifted - MAGIC
    var r = k.fma(V(-0.693359375), x)
    r = k.fma(V(2.12194440e-4), r)
    var p = V(1.9875691500e-4)
    p = p.fma(r, V(1.3981999507e-3))
    p = p.fma(r, V(8.3334519073e-3))
    p = p.fma(r, V(4.1665795894e-2))
    p = p.fma(r, V(1.6666665459e-1))
    p = p.fma(r, V(5.0000001201e-1))
    p = p.fma(r * r, r + 1)
    var whole = bitcast[DType.int32, L](shifted) - bitcast[DType.int32, 1](MAGIC)
    var half = whole >> 1
    return p * bitcast[DType.float32, L]((half + 127) << 23) * bitcast[DType.float32, L]((whole - half + 127) << 23)


@always_inline
def _exp64[L: Int](given: SIMD[DType.float64, L]) -> SIMD[DType.float64, L]:
    comptime V = SIMD[DType.float64, L]
    comptime MAGIC = Float64(6755399441055744.0)  # 1.5 2^52
    var x = given.lt(-746.0).select(V(-746.0), given)
    x = x.gt(710.0).select(V(710.0), x)
    var shifted = x.fma(V(1.4426950408889634074), V(MAGIC))
    var k = shifted - MAGIC
    var r = k.fma(V(-6.93147180369123816490e-01), x)
    r = k.fma(V(-1.90821492927058770002e-10), r)
    var p = V(1)
    comptime for i in range(13, 0, -1):
        p = (p * r).fma(V(Float64(1) / Float64(i)), V(1))
    var whole = bitcast[DType.int64, L](shifted) - bitcast[DType.int64, 1](MAGIC)
    var half = whole >> 1
    return p * bitcast[DType.float64, L]((half + 1023) << 52) * bitcast[DType.float64, L]((whole - half + 1023) << 52)


def log(x: Float64) -> Float64:
    """The natural logarithm of a sum of exponentials: of 0, of normal numbers, of inf and NaN.

    x = 2^k m with m within a factor sqrt 2 of 1, and log m = 2 artanh s, s = (m - 1) / (m + 1).
    """
    if x == 0:
        return Float64.MIN
    if not (x < Float64.MAX):
        return x
    var bits = bitcast[DType.int64, 1](x)
    var k = (bits >> 52) - 1023
    var m = bitcast[DType.float64, 1]((bits & 0xFFFFFFFFFFFFF) | (1023 << 52))
    if m > 1.4142135623730951:
        m *= 0.5
        k += 1
    var s = (m - 1) / (m + 1)
    var z = s * s
    var p = Float64(0)
    comptime for i in range(10, 0, -1):
        p = (p + Float64(1) / Float64(2 * i + 1)) * z
    var e = k.cast[DType.float64]()
    return e * 6.93147180369123816490e-01 + (2 * s + (2 * s * p + e * 1.90821492927058770002e-10))
