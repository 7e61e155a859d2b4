"""A short causal convolution of each channel along a sequence, and its gradients.

With X the initial state before x, past = width - 1 and d_z = d_y f'(z): z[t] = bias + sum over j of weight[j] X[t + j],
y = f(z), d_X[e] = sum over j of weight[j] d_z[e - j], d_weight[j] = sum of d_z[t] X[t + j] and d_bias = sum of d_z.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float, Int

from portakern.spec import Rule, Tile, spec
from portakern.spec.tolerance import KAPPA, Units, format_of, magnitude, units
from portakern.specs._gradients import doubled, each_alone, stored_bounds, stored_spreads
from portakern.specs._rows import mean_variance
from portakern.specs.linear import CURVE, Activated

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")

MOST_PAST = 15
"""Inputs before its own that an output may see. A longer filter is a product or a Fourier transform."""


class CausalConv1dOut(NamedTuple):
    y: Float[A, "batch length channels"]
    final_state: Float[A, "batch channels past"]


SHORT = Rule(
    lambda call: call.dims["past"] <= MOST_PAST,
    f"weight has more than {MOST_PAST + 1} taps; this op is for short filters: pass width <= {MOST_PAST + 1}",
    mends=lambda dims: {"past": min(dims["past"], 1 + dims["past"] % MOST_PAST)},
)

TILING = {"block_length": Tile(16, 1024, of="length"), "block_channels": Tile(16, 1024, of="channels")}


@spec(
    tiling=TILING,
    require=(SHORT,),
    or_float32=("weight", "bias"),
    positive=("length", "past"),
    returns={"final_state": "return_final_state"},
    apart=("batch", "channels"),
    vjp="causal_conv1d_vjp",
    typical={"batch": 2, "length": 4096, "channels": 4096, "past": 3, "bias": True, "activation": "silu"},
    flops=lambda call: 2.0 * (call.dims["past"] + 1) * call.dims["batch"] * call.dims["length"] * call.dims["channels"],
)
def causal_conv1d(
    x: Float[A, "batch length channels"],
    weight: Float[A, "channels past+1"],
    bias: Float[A, "channels"] | None = None,
    initial_state: Float[A, "batch channels past"] | None = None,
    segment_ids: Int[A, "batch length"] | None = None,
    *,
    activation: Literal["none", "silu"] = "none",
    return_final_state: bool = False,
) -> CausalConv1dOut:
    """y[t] = f(bias + sum over j < width of weight[j] x[t - past + j]) for each channel, past = width - 1, in float32.

    The last tap is that of the output's own input. What lies before the first input is the initial state, or 0, and 0
    is multiplied as any other number. In float64 for float64, and rounded once, at the end. f is silu(z) = z / (1 +
    exp(-z)), or "none".

    The convolution is that of Mamba, Gu and Dao 2023, "Mamba: linear-time sequence modeling with selective state
    spaces", section 3.4, and of gated delta networks; arguments and states are those of the package causal_conv1d.

    Args:
      x: (batch, length, channels), any strides: the view x.transpose(1, 2) of an array that keeps channels first costs
        nothing.
      weight: (channels, width), 2 <= width <= 16, x's dtype or float32; bias: (channels,), likewise.
      initial_state: (batch, channels, past), the inputs before the first, the latest last.
      segment_ids: (batch, length). Inputs of another segment than the output's count as 0. The initial state is of the
        first input's segment.
      return_final_state: whether the state after the last input comes with y.

    Returns:
      y: the shape of x, contiguous. final_state: (batch, channels, past), the last inputs, which are the initial state
      of what follows in the last segment: 0 for inputs of another. Of fewer inputs than past it begins with the end of
      the initial state. length = 0 is refused. NaN
      and infinities go where plain arithmetic leads them, and 0 times infinity is NaN.
    """
    raise NotImplementedError


# -------------------------------------------------------------------------------------------------------------- bounds
def whole_inputs(call: Call) -> np.ndarray:
    """X: (batch, past + length, channels), the initial state, or zeros, before x."""
    x, state, past = call.arrays["x"], call.arrays["initial_state"], call.dims["past"]
    before = np.zeros((x.shape[0], past, x.shape[2])) if state is None else np.swapaxes(state, 1, 2)
    return np.concatenate((before, x), 1)


def unmasked(call: Call, lag: int) -> np.ndarray:
    """(batch, length, 1): where the input that lies so far before an output is of its segment. What lies before the
    first is of that one's."""
    ids, length = call.arrays["segment_ids"], call.dims["length"]
    if ids is None:
        return np.ones((call.dims["batch"], length, 1), bool)
    return np.asarray(ids == ids[:, np.maximum(np.arange(length) - lag, 0)])[..., None]


def final_cotangent(call: Call) -> np.ndarray:
    """What the final state's cotangent adds to that of the inputs, (batch, past + length, channels)."""
    batch, length, channels, past = (call.dims[name] for name in ("batch", "length", "channels", "past"))
    end, last, ids = (
        np.zeros((batch, past + length, channels)),
        call.arrays["d_final_state"],
        call.arrays["segment_ids"],
    )
    if last is not None:
        end[:, length:] = np.swapaxes(last, 1, 2)
    if ids is not None:
        own = ids[:, np.maximum(np.arange(length - past, length), 0)] == ids[:, -1:]
        end[:, length:] = np.where(own[..., None], end[:, length:], 0.0)
    return end


def taps(call: Call) -> list[np.ndarray]:
    """For each tap the input that each output sees through it, (batch, length, channels), 0 where it is masked."""
    x, past, length = whole_inputs(call), call.dims["past"], call.dims["length"]
    return [np.where(unmasked(call, past - j), x[:, j : j + length], 0.0) for j in range(past + 1)]


def product_size(a: np.ndarray, b: np.ndarray, unit: Units) -> np.ndarray:
    """|a b|, +inf where an infinity meets what may be read as 0."""
    size = magnitude(a) * magnitude(b)
    small = [(x != 0) & (np.abs(x) < unit.tau) for x in (a, b)]
    return np.where((np.isinf(a) & small[1]) | (np.isinf(b) & small[0]), inf, size)


class ShortSums(NamedTuple):
    """Sums of few terms in a fixed order: exact, the bound of a kernel's error, and the variance of it."""

    value: np.ndarray
    err: np.ndarray
    variance: np.ndarray

    @classmethod
    def of(cls, call: Call, pairs: list[tuple[np.ndarray, np.ndarray]], first: Any = None) -> ShortSums:
        """sum a b over the pairs, after ``first``. Each product and each sum rounds, and each factor may flush."""
        unit, count = units(call), len(pairs) + 2
        shape = np.broadcast_shapes(*(a.shape for a in pairs[0]))
        value = np.zeros(shape) if first is None else np.broadcast_to(first, shape)
        sizes, lost, squares = magnitude(value), np.full(shape, 2 * unit.tau), np.zeros(shape)
        for a, b in pairs:
            product = a * b
            added = (product != 0) & (value != 0)
            value = value + product
            sizes = sizes + product_size(a, b, unit)
            lost = lost + unit.tau * (magnitude(a) + magnitude(b) + 2)
            squares = squares + np.square(magnitude(product)) + np.square(magnitude(value)) * added
        err = np.where(sizes >= unit.huge, inf, count * unit.u * sizes + lost)
        return cls(value, err, (KAPPA * unit.u) ** 2 * squares + np.square(lost))


def before_activation(call: Call) -> ShortSums:
    """z, (batch, length, channels)."""
    return ShortSums.of(call, [(x, call.arrays["weight"][:, j]) for j, x in enumerate(taps(call))], call.arrays["bias"])


@causal_conv1d.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bound of y, with w = weight, X the inputs of the taps and :class:`portakern.spec.tolerance.Units`:

        B = E (1 + U) + U |y| + eta          E = E_f + E_z min(|f'(z)| + 0.425 E_z, 1.13)
        E_z = (width + 2) u (|bias| + sum |w X|) + tau (2 + sum (|w| + |X| + 2))

    E_f, the error of f at a z that is exact, is that of swiglu's gate, and 0 without an activation. The final state is
    copied. Nothing is promised where a sum reaches 2^127, nor where an infinity meets a subnormal factor.
    """
    with np.errstate(all="ignore"):
        z, unit = before_activation(call), units(call)
        at = Activated.of(call, z.value, unit)
        err = at.err + at.moved(call, z.value, np.where(np.isposinf(z.err), 0.0, z.err))
        err = np.where(np.isposinf(z.err), inf, err)
        return stored_bounds(call, ref, (err, 0.0))


@causal_conv1d.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS error of y, with s_z^2 = k^2 sum (product^2 + partial sum^2), k = KAPPA u, and s_f that of f alone:

        sigma^2 = store^2 + s_f^2 + (f'(z) s_z)^2 + 3/4 (0.85 s_z^2)^2

    store is that of storing y (``store_spread``); the last term is f's bend. What flushes is added whole.
    """
    with np.errstate(all="ignore"):
        z, unit = before_activation(call), units(call)
        at = Activated.of(call, z.value, unit)
        bend = 0.0 if call.options["activation"] == "none" else 0.75 * (0.85 * z.variance) ** 2
        variance = at.spread**2 + at.slope**2 * z.variance + bend + (unit.tau * (np.abs(at.value) + 4)) ** 2
        return stored_spreads(call, ref, (variance, 0.0))


@causal_conv1d.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sums of integers that the accumulator holds, without an activation; and states, which are copied."""
    unit, state = units(call), ref[1]
    with np.errstate(all="ignore"):
        pairs = [(x, call.arrays["weight"][:, j]) for j, x in enumerate(taps(call))]
        terms = [a * b for a, b in pairs] + ([] if call.arrays["bias"] is None else [call.arrays["bias"]])
        plain = call.options["activation"] == "none"
        whole = np.full(ref[0].shape, plain) & whole_factors([a for pair in pairs for a in pair], terms, unit)
    stays = max(unit.tau, format_of(call.dtype).eta)
    return whole, None if state is None else (np.abs(state) >= stays) | (state == 0)


def whole_factors(factors: list[np.ndarray], terms: list[np.ndarray], unit: Units) -> np.ndarray:
    """Where all factors and terms are integers, and sums of terms are below what the accumulator holds."""
    found: Any = True
    for x in (*factors, *terms):
        found = found & np.isfinite(x) & (x == np.trunc(x))
    return np.asarray(found & (sum(magnitude(x) for x in terms) < 1 / unit.u))


# --------------------------------------------------------------------------------------------------------------- edges
SHAPES = {"batch": (1, 3), "length": (1, 40), "channels": (1, 40), "past": (1, 4)}


@causal_conv1d.edge(dims=SHAPES)
def nan_and_inf_in_an_input(arrays, rng, options):
    """NaN and inf in an input reach the outputs of its channel that see it, and no other."""
    x = arrays["x"]
    x[tuple(rng.integers(extent) for extent in x.shape)] = rng.choice([np.nan, inf, -inf])


@causal_conv1d.edge(dims=SHAPES)
def nan_in_a_weight(arrays, rng, options):
    """NaN in weight reaches its channel alone."""
    arrays["weight"][rng.integers(len(arrays["weight"])), -1] = np.nan


@causal_conv1d.edge(dims=SHAPES, given=("initial_state",), options={"return_final_state": True})
def nan_and_inf_in_a_state(arrays, rng, options):
    """NaN and inf in a state reach the first outputs of their channel, and no later one."""
    state = arrays["initial_state"]
    state[rng.random(state.shape) < 0.2] = rng.choice([np.nan, inf, -inf])


@causal_conv1d.edge(
    dims={**SHAPES, "length": (1, 3), "past": (3, 6)}, given=("initial_state",), options={"return_final_state": True}
)
def fewer_inputs_than_taps(arrays, rng, options):
    """The final state begins with what is left of the initial one."""


@causal_conv1d.edge(dims={**SHAPES, "length": (17, 60)}, smallest_tiles=True, regime="integers")
def several_ragged_tiles(arrays, rng, options):
    """Outputs at the start of a tile see the end of the tile before, and the last output counts as any other."""


@causal_conv1d.edge(dims={**SHAPES, "length": (5, 60)}, given=("segment_ids",), regime="integers")
def segments_of_few_inputs(arrays, rng, options):
    """An output sees the inputs of its own segment alone, however short that is."""
    ids = arrays["segment_ids"]
    ids[...] = np.cumsum(rng.random(ids.shape) < 0.4, 1)


@causal_conv1d.edge(dims={**SHAPES, "length": (5, 60)}, given=("segment_ids",))
def nan_in_another_segment(arrays, rng, options):
    """NaN and inf of another segment reach nothing."""
    ids = arrays["segment_ids"]
    ids[...] = np.arange(ids.shape[1]) >= ids.shape[1] // 2
    arrays["x"][:, : ids.shape[1] // 2] = rng.choice([np.nan, inf])


@causal_conv1d.edge(dims=SHAPES, given=("bias",), options={"activation": "silu"})
def faint_silus(arrays, rng, options):
    """z of -10 to -25, where silu is small and as exact as anywhere."""
    arrays["x"] /= 16
    arrays["bias"][...] = -rng.uniform(10, 25, arrays["bias"].shape)


@causal_conv1d.edge(dims=SHAPES, options={"activation": "silu"})
def saturated(arrays, rng, options):
    """Far from 0 silu is z itself or next to nothing, and never NaN: exp(-z) overflows."""
    arrays["x"] *= 200


@causal_conv1d.edge(dims={**SHAPES, "past": (8, 15)})
def the_widest_filters(arrays, rng, options):
    """16 taps are as right as 2."""


# ---------------------------------------------------------------------------------------------------------------- laws
def drawn(draw):
    """x, weight and bias of a call."""
    batch, length, channels, width = draw.extent(2, 4), draw.extent(2, 70), draw.extent(2, 70), draw.extent(2, 5)
    return draw.normal(batch, length, channels), draw.normal(channels, width), draw.normal(channels)


@causal_conv1d.law
def samples_and_channels_are_independent(run, draw):
    """A sample alone, and a channel alone, give the same bits as among others."""
    x, weight, bias = drawn(draw)
    whole, b, c = run(x, weight, bias, activation="silu"), draw.extent(0, len(x) - 1), draw.extent(0, len(weight) - 1)
    draw.same_bits(run(x[b : b + 1], weight, bias, activation="silu"), whole[b : b + 1], "a sample alone")
    c = slice(c, c + 1)
    draw.same_bits(run(x[..., c], weight[c], bias[c], activation="silu"), whole[..., c], "a channel alone")


@causal_conv1d.law
def the_future_is_not_seen(run, draw):
    """The first outputs have the same bits without the inputs that follow."""
    x, weight, bias = drawn(draw)
    first = draw.extent(1, x.shape[1])
    draw.same_bits(run(x[:, :first], weight, bias), run(x, weight, bias)[:, :first], "the first outputs")


@causal_conv1d.law
def a_state_continues(run, draw):
    """A sequence in two calls, the second of which is given the state after the first, is the sequence, to the bit."""
    x, weight, bias = drawn(draw)
    first = draw.extent(1, x.shape[1] - 1)
    whole, end = run(x, weight, bias, return_final_state=True)
    head, state = run(x[:, :first], weight, bias, return_final_state=True)
    tail, last = run(x[:, first:], weight, bias, state, return_final_state=True)
    draw.same_bits(np.concatenate((head, tail), 1), whole, "two calls")
    draw.same_bits(last, end, "the final state")


@causal_conv1d.law
def segments_are_sequences(run, draw):
    """A segment among others gives the bits of that sequence alone."""
    x, weight, bias = drawn(draw)
    cut = draw.extent(1, x.shape[1] - 1)
    ids = np.broadcast_to((np.arange(x.shape[1]) >= cut).astype(np.int32), x.shape[:2]).copy()
    packed = run(x, weight, bias, None, ids)
    draw.same_bits(packed[:, cut:], run(np.ascontiguousarray(x[:, cut:]), weight, bias), "the second segment")


@causal_conv1d.law
def a_state_continues_the_last_segment(run, draw):
    """Of a packed row in two calls the second goes on with the last segment of the first, to the bit."""
    x, weight, bias = drawn(draw)
    ids = np.cumsum(draw.rng.random(x.shape[:2]) < 0.3, 1).astype(np.int32)
    first = draw.extent(1, x.shape[1] - 1)
    ids[:, first] = ids[:, first - 1]
    whole, end = run(x, weight, bias, None, ids, return_final_state=True)
    _, state = run(x[:, :first], weight, bias, None, ids[:, :first], return_final_state=True)
    tail, last = run(x[:, first:], weight, bias, state, ids[:, first:], return_final_state=True)
    draw.same_bits(tail, whole[:, first:], "the second call")
    draw.same_bits(last, end, "the final state")


@causal_conv1d.law
def one_tap_moves(run, draw):
    """A filter whose only tap is 1 moves the inputs by its place, and one whose last tap is 1 gives x, to the bit."""
    x, weight, _ = drawn(draw)
    lag = draw.extent(0, weight.shape[1] - 1)
    only = np.zeros_like(weight)
    only[:, weight.shape[1] - 1 - lag] = 1
    moved = np.zeros_like(x)
    moved[:, lag:] = x[:, : x.shape[1] - lag]
    draw.same_bits(run(x, only) + 0, moved + 0, "one tap")  # a zero of either sign


causal_conv1d.sample("plain", dims={"batch": 2, "length": 5, "channels": 3, "past": 3})
causal_conv1d.sample(
    "silu_from_a_state",
    dims={"batch": 2, "length": 5, "channels": 4, "past": 2},
    given=("bias", "initial_state"),
    options={"activation": "silu", "return_final_state": True},
)
causal_conv1d.sample(
    "segments",
    dims={"batch": 2, "length": 7, "channels": 3, "past": 3},
    given=("bias", "segment_ids"),
    wider=("weight",),
)


# ---------------------------------------------------------------------------------------------------------- gradient
class CausalConv1dVjpOut(NamedTuple):
    d_x: Float[A, "batch length channels"]
    d_weight: Float[A, "channels past+1"]
    d_bias: Float[A, "channels"]
    d_initial_state: Float[A, "batch channels past"]


@spec(
    tiling=TILING,
    require=(SHORT,),
    or_float32=("weight", "bias"),
    gradient_dtype=("d_weight", "d_bias"),
    positive=("length", "past"),
    apart=lambda options, wants: ("batch", "channels") if not {"d_weight", "d_bias"} & {*wants} else ("channels",),
    typical={"batch": 2, "length": 4096, "channels": 4096, "past": 3, "bias": True, "activation": "silu"},
    flops=lambda call: (
        (4.0 * (call.dims["past"] + 1) + 8) * call.dims["batch"] * call.dims["length"] * call.dims["channels"]
    ),
)
def causal_conv1d_vjp(
    x: Float[A, "batch length channels"],
    weight: Float[A, "channels past+1"],
    d_y: Float[A, "batch length channels"],
    bias: Float[A, "channels"] | None = None,
    initial_state: Float[A, "batch channels past"] | None = None,
    segment_ids: Int[A, "batch length"] | None = None,
    d_final_state: Float[A, "batch channels past"] | None = None,
    *,
    activation: Literal["none", "silu"] = "none",
) -> CausalConv1dVjpOut:
    """With d_z = d_y f'(z), of a z that is computed again, and X the inputs, the initial state first:

    d_X[e] = sum over j of weight[j] d_z[e - j], which is d_initial_state and then d_x, d_weight[j] = sum of d_z[t]
    X[t + j] and d_bias = sum of d_z over all samples and positions. In float32 (float64 for float64), rounded once.

    Args:
      x, weight, bias, initial_state, segment_ids, activation: what causal_conv1d was given.
      d_y: (batch, length, channels), the cotangent of its y; d_final_state: (batch, channels, past), that of the state
        after the last input, which is added to the gradients of the inputs that it holds. None is 0.

    Returns:
      d_x, d_weight, d_bias, d_initial_state: the shape and dtype of what they are gradients of, None where that was not
      given. What lies beyond the sequence, or in another segment, counts as 0 and is multiplied as any other number.
    """
    raise NotImplementedError


class Cotangents(NamedTuple):
    """d_z, (batch, length, channels): exact, how far a kernel's may be off, and the variance of that."""

    value: np.ndarray
    err: np.ndarray
    variance: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Cotangents:
        d_y, unit = call.arrays["d_y"], units(call)
        if call.options["activation"] == "none":
            flushes = np.where((d_y != 0) & (np.abs(d_y) < unit.tau), unit.tau, 0.0)
            return cls(d_y, flushes, np.square(flushes))
        z, size = before_activation(call), magnitude(d_y)
        at = Activated.of(call, z.value, unit)
        d_slope = at.d_slope + CURVE * z.err
        err = size * (d_slope + unit.u * np.abs(at.slope)) + unit.tau * (size + magnitude(at.slope) + 1)
        err = np.where(np.isinf(d_y) & (np.abs(at.slope) <= d_slope), inf, err)
        err = np.where(np.isposinf(z.err), inf, err)
        own = at.slope_spread**2 + (KAPPA * unit.u * at.slope) ** 2 + 0.25 * z.variance
        return cls(d_y * at.slope, np.where(np.isnan(err), 0.0, err), np.square(size) * own + unit.tau**2)


class Scattered(NamedTuple):
    """What a tap leads from the outputs back to the inputs, (batch, past + length, channels)."""

    d_z: Cotangents

    def through(self, call: Call, j: int) -> Cotangents:
        """d_z as the inputs meet it through tap j, 0 where they do not."""
        past, length = call.dims["past"], call.dims["length"]
        found = []
        for of in self.d_z:
            spread = np.zeros((of.shape[0], past + length, of.shape[2]))
            spread[:, j : j + length] = np.where(unmasked(call, past - j), of, 0.0)
            found.append(spread)
        return Cotangents(*found)


def of_inputs(call: Call, d_z: Cotangents) -> ShortSums:
    """d_X with its error, (batch, past + length, channels)."""
    weight, past = call.arrays["weight"], call.dims["past"]
    met = [Scattered(d_z).through(call, j) for j in range(past + 1)]
    pairs = [(of.value, weight[:, j]) for j, of in enumerate(met)]
    sums = ShortSums.of(call, pairs, final_cotangent(call))
    more = sum(magnitude(weight[:, j]) * of.err for j, of in enumerate(met))
    spread = sum(np.square(magnitude(weight[:, j])) * of.variance for j, of in enumerate(met))
    return ShortSums(sums.value, sums.err + 2 * np.where(np.isnan(more), inf, more), sums.variance + spread)


def of_sums(call: Call, d_z: Cotangents) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The terms of the sums over samples and positions, their errors and variances: of each tap's, and of the bias's.

    (batch * length, channels) each.
    """
    found = []
    for x in (*taps(call), np.ones(d_z.value.shape)):
        size = magnitude(x)
        terms, err = d_z.value * x, d_z.err * size + units(call).tau * (size + magnitude(d_z.value) + 1)
        err = np.where(np.isposinf(product_size(d_z.value, x, units(call))) | np.isnan(err), inf, err)
        flat, off, variance = (a.reshape(-1, a.shape[-1]) for a in (terms, err, d_z.variance * size**2))
        found.append((flat, off, variance))
    return found


@causal_conv1d_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, each E (1 + U) + U |value| + eta, with E_d how far a kernel's d_z may be off, N = batch length:

        d_x, d_initial_state: E = (width + 2) u (|d_final_state| + sum |w d_z|) + 2 sum |w| E_d + tau (...)
        d_weight: E = (N + 2) u sum (|d_z X| + E_d |X|) + sum E_d |X| + tau (...), d_bias the same with X = 1
        E_d = |d_y| (E_f' + 0.81 E_z + u |f'|) + tau (|d_y| + |f'| + 1)

    E_z is that of z, which is computed again, and E_f' that of the slope of swiglu's gate. Without an activation E_d is
    what flushes. Nothing is promised where an infinite d_y meets a slope that may be 0, nor where sums reach 2^127.
    """
    unit, past = units(call), call.dims["past"]
    with np.errstate(all="ignore"):
        d_z = Cotangents.of(call)
        inputs, found = of_inputs(call, d_z), []
        for terms, off, _ in of_sums(call, d_z):
            sizes = (magnitude(terms) + off).sum(0)
            err = (len(terms) + 2) * unit.u * sizes + off.sum(0)
            found.append(np.where(sizes >= unit.huge, inf, err))
        state = np.swapaxes(inputs.err[:, :past], 1, 2)
        return stored_bounds(call, ref, (inputs.err[:, past:], np.stack(found[:-1], -1), found[-1], state))


@causal_conv1d_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with s_d that of d_z: of d_x and d_initial_state store^2 + s^2 + sum (w s_d)^2, s^2 that of a
    short sum, and of sums over N terms store^2 + N^2 s^2 + sum (s_d X)^2, s^2 that of a mean (``mean_variance``).
    """
    past, k2 = call.dims["past"], (KAPPA * units(call).u) ** 2
    with np.errstate(all="ignore"):
        d_z = Cotangents.of(call)
        inputs, found = of_inputs(call, d_z), []
        for terms, _, variance in of_sums(call, d_z):
            known, n = np.where(np.isfinite(terms), terms, 0.0), max(len(terms), 1)
            found.append(n**2 * mean_variance(known, 0, n, k2)[0] + variance.sum(0) if len(terms) else variance.sum(0))
        state = np.swapaxes(inputs.variance[:, :past], 1, 2)
        return stored_spreads(call, ref, (inputs.variance[:, past:], np.stack(found[:-1], -1), found[-1], state))


causal_conv1d_vjp.edge(dims=SHAPES)(nan_in_a_weight)
causal_conv1d_vjp.edge(dims={**SHAPES, "length": (5, 60)}, given=("segment_ids",), regime="integers")(
    segments_of_few_inputs
)
causal_conv1d_vjp.edge(dims={**SHAPES, "length": (17, 60)}, smallest_tiles=True, regime="integers")(
    several_ragged_tiles
)
causal_conv1d_vjp.edge(dims=SHAPES, options={"activation": "silu"})(saturated)
causal_conv1d_vjp.edge(dims=SHAPES, given=("bias",), options={"activation": "silu"})(faint_silus)
causal_conv1d_vjp.edge(dims={**SHAPES, "past": (8, 15)})(the_widest_filters)


@causal_conv1d_vjp.edge(dims=SHAPES)
def nan_and_inf_in_a_cotangent(arrays, rng, options):
    """NaN and inf in d_y reach the inputs of its channel that its output sees, and that channel's sums."""
    d_y = arrays["d_y"]
    d_y[tuple(rng.integers(extent) for extent in d_y.shape)] = rng.choice([np.nan, inf, -inf])


@causal_conv1d_vjp.edge(dims=SHAPES)
def nan_and_inf_in_an_input_vjp(arrays, rng, options):
    """NaN and inf in the last input reach the weight of the last tap, and without an activation no more."""
    x = arrays["x"]
    x[rng.integers(len(x)), -1, rng.integers(x.shape[2])] = rng.choice([np.nan, inf])


@causal_conv1d_vjp.edge(dims={**SHAPES, "length": (1, 3), "past": (3, 6)}, given=("initial_state", "d_final_state"))
def fewer_inputs_than_taps_vjp(arrays, rng, options):
    """The cotangent of the final state reaches the initial one."""


@causal_conv1d_vjp.edge(dims={"batch": (3, 9), "length": (40, 90), "channels": (1, 20)}, regime="integers")
def many_positions_of_integers(arrays, rng, options):
    """Sums over samples and positions are exact: one that is dropped or counted twice shows."""


@causal_conv1d_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers whose sums the accumulator holds, without an activation."""
    if call.options["activation"] != "none":
        return tuple(None if y is None else np.zeros(y.shape, bool) for y in ref)
    unit, past, weight, d_y = units(call), call.dims["past"], call.arrays["weight"], call.arrays["d_y"]
    with np.errstate(all="ignore"):
        d_z = Cotangents.of(call)
        met = [Scattered(d_z).through(call, j).value for j in range(past + 1)]
        inputs = whole_factors(
            [*met, *(weight[:, j] for j in range(past + 1))],
            [final_cotangent(call), *(of * weight[:, j] for j, of in enumerate(met))],
            unit,
        )
        sums = []
        for x in (*taps(call), np.ones(d_y.shape)):
            whole = np.isfinite(x) & (x == np.trunc(x)) & np.isfinite(d_y) & (d_y == np.trunc(d_y))
            sums.append(whole.all((0, 1)) & (magnitude(x * d_y).sum((0, 1)) < 1 / unit.u))
    found = (inputs[:, past:], np.stack(sums[:-1], -1), sums[-1], np.swapaxes(inputs[:, :past], 1, 2))
    return tuple(None if y is None else forced for y, forced in zip(ref, found, strict=True))


NAMES = ("d_x", "d_weight", "d_bias", "d_initial_state")


def drawn_vjp(draw):
    """x, weight, d_y, bias and initial_state of a call."""
    x, weight, bias = drawn(draw)
    state = draw.normal(len(x), len(weight), weight.shape[1] - 1)
    return x, weight, draw.normal(*x.shape), bias, state


@causal_conv1d_vjp.law
def samples_are_independent_vjp(run, draw):
    """A sample of d_x and of d_initial_state alone has the same bits as among others."""
    x, weight, d_y, bias, state = drawn_vjp(draw)
    b = draw.extent(0, len(x) - 1)
    one = slice(b, b + 1)
    whole = run(x, weight, d_y, bias, state, activation="silu")
    alone = run(x[one], weight, d_y[one], bias, state[one], activation="silu")
    for i in (0, 3):
        draw.same_bits(alone[i], whole[i][one], f"{NAMES[i]} of a sample alone")


@causal_conv1d_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    each_alone(lambda *a, **o: run(*a, activation="silu", **o), draw, NAMES, drawn_vjp(draw))


@causal_conv1d_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles every gradient, to the bit."""
    x, weight, d_y, bias, state = drawn_vjp(draw)
    doubled(lambda d_y: run(x, weight, d_y, bias, state), draw, NAMES, d_y)


causal_conv1d_vjp.sample("plain", dims={"batch": 2, "length": 5, "channels": 3, "past": 3})
causal_conv1d_vjp.sample(
    "silu_from_a_state",
    dims={"batch": 2, "length": 5, "channels": 4, "past": 2},
    given=("bias", "initial_state", "d_final_state"),
    options={"activation": "silu"},
)
causal_conv1d_vjp.sample(
    "segments",
    dims={"batch": 2, "length": 7, "channels": 3, "past": 3},
    given=("bias", "segment_ids"),
    wider=("weight",),
)
