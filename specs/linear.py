"""The linear layer of a network with what follows it, bias, activation and residual, and its gradients.

With z = x weight^T + bias and d_z = d_y f'(z): y = f(z) + residual, and d_x = d_z weight, d_weight = d_z^T x,
d_bias = sum of d_z.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from portakern.spec import Sum, Tile, When, spec
from portakern.spec.tolerance import KAPPA, Units, format_of, magnitude, round_to, rounded, store_spread, units
from portakern.specs._gradients import doubled, each_alone
from portakern.specs._rows import mean_variance, plant
from portakern.specs.geglu import Share
from portakern.specs.linear_cross_entropy import as_product, lost, measured, of_brackets, of_matmul, variance_factor
from portakern.specs.swiglu import Gate, Slope

if TYPE_CHECKING:
    from portakern.core.call import Call

A = TypeVar("A")


GELUS = {"gelu": "none", "gelu_tanh": "tanh"}
"""Activation -> the form of geglu's gate that it is."""

STEEPEST, BENT = 1.13, 0.85
"""No activation rises or falls faster than this, or changes its slope faster: gelu and its tanh form do by 1.13 and
0.81 at most, silu by 1.1 and 0.5. relu, whose slope jumps, is apart."""


NO_ACTIVATION = When(lambda options: options["activation"] == "none", "where there is no activation")


class LinearOut(NamedTuple):
    y: Float[A, "*batch n"]
    pre: Float[A, "*batch n"]


@spec(
    tiling={"block_m": Tile(16, 2048), "block_n": Tile(16, 2048, of="n"), "block_k": Tile(16, 4096, of="k")},
    positive=("k",),
    returns={"pre": "return_pre"},
    apart=("batch", "n"),
    sums={"k": (Sum("y", ("bias", "residual"), NO_ACTIVATION), Sum("pre", ("bias",), NO_ACTIVATION))},
    vjp="linear_vjp",
    autocast="lower",
    typical={
        "batch": (4096,),
        "n": 4096,
        "k": 4096,
        "bias": True,
        "residual": True,
        "activation": "gelu_tanh",
    },
    flops=lambda call: 2.0 * prod(call.dims["batch"]) * call.dims["n"] * call.dims["k"],
)
def linear(
    x: Float[A, "*batch k"],
    weight: Float[A, "n k"],
    bias: Float[A, "n"] | None = None,
    residual: Float[A, "*batch n"] | None = None,
    *,
    activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
    precision: Literal["ieee", "tf32"] = "ieee",
    return_pre: bool = False,
) -> LinearOut:
    """y = f(z) + residual with z = x weight^T + bias, in float32 (float64 for float64), rounded once, at the end.

    The bias comes after the sum, and is rounded with it once; so does the residual with f(z).

    f is the activation: relu(z) = max(z, 0), silu(z) = z / (1 + exp(-z)), gelu(z) = z (1 + erf(z / sqrt 2)) / 2,
    gelu_tanh its tanh form, as swiglu and geglu have them; "none" is z itself. The sum over k, what bias adds, f and
    what residual adds are float32: nothing is rounded to x's dtype between them, as it is where each is a function of
    its own.

    For its gradient one array is kept beside x and weight: z as it was before the activation, ``pre``, in x's dtype.
    Where there is no activation nothing is kept, and the forward call does not make it. The gradient of the residual is
    the cotangent of y itself, which is passed on. See linear_vjp.

    The sources are Hendrycks and Gimpel 2016, "Gaussian error linear units", for gelu, and Elfwing et al. 2018,
    "Sigmoid-weighted linear units", for silu.

    Args:
      x: (*batch, k); weight: (n, k), a row for each output, as ``torch.nn.Linear`` has it; bias: (n,); residual:
        (*batch, n), added last. All of one dtype.
      precision: of products of float32, as in matmul.
      return_pre: whether z comes with y.

    Returns:
      y, pre: (*batch, n), x's dtype. k = 0 is refused. NaN and infinities go where plain arithmetic leads them: a NaN
      in a row of x makes its row NaN, gelu and silu of -inf are NaN (-inf 0), relu of it is 0.
    """
    raise NotImplementedError


def rows_of(call: Call, name: str) -> np.ndarray:
    """An array as (rows, its last axis)."""
    x = call.arrays[name]
    return np.asarray(x.reshape(-1, x.shape[-1]))


class Activated(NamedTuple):
    """An activation of numbers z, and how far rounding may move what a kernel makes of them.

    Attributes:
      value: f(z), of finite z; err: the bound of its absolute error; spread: its RMS error.
      slope: f'(z), the limit where z is infinite, but NaN of silu; d_slope: the bound of its absolute error;
        slope_spread: its RMS error.
    """

    value: np.ndarray
    err: np.ndarray
    spread: np.ndarray
    slope: np.ndarray
    d_slope: np.ndarray
    slope_spread: np.ndarray

    @classmethod
    def of(cls, call: Call, z: np.ndarray, unit: Units) -> Activated:
        """What geglu's and swiglu's specs know of their gates. What is selected (relu) does not round."""
        name, nothing = call.options["activation"], np.zeros(z.shape)
        known = np.where(np.isfinite(z), z, 0.0)
        if name == "none":
            return cls(known, nothing, nothing, nothing + 1, nothing, nothing)
        if name == "relu":
            return cls(np.maximum(known, 0.0), nothing, nothing, ~(z <= 0) * 1.0, nothing, nothing)
        if name == "silu":
            at = Gate.of(z, unit)
            slope = Slope.of(at, unit.u, unit.tau)
            lean = (unit.u * at.g) ** 2 + (unit.ex / 4) ** 2
            k2 = (KAPPA * unit.u) ** 2
            share = at.q**2 * (lean + k2 * at.g**2) + 6 * k2
            together = (lean + k2 * at.g**2) * (slope.gq * at.s - at.q * (1 + slope.gq)) ** 2
            of_slope = at.s * np.sqrt(together + k2 * (6 * slope.gq**2 + 8 * (1 + slope.gq) ** 2))
            spread = np.abs(at.silu) * np.sqrt(share)
            return cls(at.silu, at.d_silu, spread, np.where(np.isfinite(z), slope.t, np.nan), slope.dt, of_slope)
        gate = Share.of(call.replace(arrays={"gate": z}, options={"approximate": GELUS[name]}), unit)
        spread = np.abs(gate.g) * np.hypot(gate.spread, KAPPA * unit.u * gate.p)
        limits = np.where(np.isfinite(z), gate.slope, np.where(np.isinf(z), z > 0, np.nan))
        return cls(gate.value, gate.error, spread, limits, gate.d_slope, gate.slope_spread)

    def moved(self, call: Call, z: np.ndarray, err: np.ndarray) -> np.ndarray:
        """How far f moves where z does by ``err``: in proportion to its slope, and by how that changes on the way."""
        if call.options["activation"] == "none":
            return err
        if call.options["activation"] == "relu":
            return np.where(z < 0, np.maximum(err - np.abs(z), 0.0), err)
        return err * np.minimum(np.abs(self.slope) + BENT / 2 * err, STEEPEST)


class Sums(NamedTuple):
    """z of all rows, (rows, n): exact, the bound of a kernel's error before it is stored, and its RMS error."""

    z: np.ndarray
    err: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Sums:
        unit, bias = units(call), call.arrays["bias"]
        x, w = rows_of(call, "x"), call.arrays["weight"].T
        z = x @ w
        of = as_product(call, x, w, "float64" if call.dtype == "float64" else "float32")
        (err,), (spread,) = (measured(of, measure, z) for measure in ("bound", "spread"))
        if bias is not None:
            far = magnitude(z) + err + magnitude(bias) >= unit.huge
            z, (early, early_spread) = z + bias, began_at(call, bias)
            err = err + early
            err = err + unit.u * (magnitude(z) + err) + 2 * unit.tau
            # what overflows on the way to a finite sum; an exact infinity stays one
            err = np.where(far & np.isfinite(bias), inf, err)
            spread = np.hypot(np.hypot(spread, early_spread), KAPPA * unit.u * magnitude(z))
        return cls(z, np.where(np.isfinite(z) | np.isposinf(err), err, 0.0), spread)


def began_at(call: Call, term: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What it costs, as a bound and as an RMS error, that the sum over k begins at a term which was to come after it:
    each partial sum rounds that too. 0, unless what ran may add in any order."""
    unit, k = units(call), call.dims["k"] if units(call).any_order else 0
    return k * unit.u * magnitude(term), np.sqrt(k) * KAPPA * unit.u * magnitude(term)


@linear.tolerance
def bound(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, with matmul's of a product kept in float32 (B_c, K = k) and :class:`portakern.spec.tolerance.Units`:

        pre: E_z (1 + U) + U |z| + eta          E_z = B_c + u (|z| + B_c) + 2 tau, the latter with a bias
        y:   E (1 + U) + U |y| + eta            E = E_f + M + u (|f + residual| + E_f + M) + 2 tau
        M = E_z min(|f'(z)| + 0.425 E_z, 1.13), how far f moves as z does

    E_f, the error of f at a z that is exact, is that of geglu's or swiglu's gate. The terms in residual are there where
    it is. Nothing is promised where a sum reaches 2^127 on its way. Of what may add in any order the sum over k may
    begin at the bias, or with no activation at the residual: then K u of either comes to the error (``began_at``).
    """
    unit, residual = units(call), call.arrays["residual"]
    with np.errstate(all="ignore"):
        sums = Sums.of(call)
        at = Activated.of(call, sums.z, unit)
        err = at.err + at.moved(call, sums.z, np.where(np.isposinf(sums.err), 0.0, sums.err))
        if residual is not None:
            other = rows_of(call, "residual")
            whole = magnitude(at.value + other)
            unsure = (np.abs(at.value) + magnitude(other) >= unit.huge) & np.isfinite(other)
            if call.options["activation"] == "none":
                err = err + began_at(call, other)[0]
            err = np.where(unsure, inf, err + unit.u * (whole + err) + 2 * unit.tau)
        err = np.where(np.isposinf(sums.err), inf, err)
    found = (err, sums.err)
    return tuple(
        None if y is None else round_to(e.reshape(y.shape), y, call.dtype) for y, e in zip(ref, found, strict=True)
    )


@linear.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with s_z that of z, s_f of f at an exact z, k = KAPPA u:

        pre: store^2 + s_z^2
        y:   store^2 + s_f^2 + (f'(z) s_z)^2 + 3/4 (0.85 s_z^2)^2 + (k y)^2

    store is that of storing (``store_spread``). The fourth term is what f's bend makes of z's error where it is flat;
    the last is there with a residual. What flushes is added whole.
    """
    unit = units(call)
    with np.errstate(all="ignore"):
        sums = Sums.of(call)
        at = Activated.of(call, sums.z, unit)
        bend = 0.0 if call.options["activation"] in ("none", "relu") else BENT * sums.spread**2
        slope = at.slope
        if call.options["activation"] == "relu":  # beside the kink, errors of one sign are left
            slope = np.where(np.abs(sums.z) <= 4 * sums.spread, 1.0, slope)
        variance = at.spread**2 + (slope * sums.spread) ** 2 + 0.75 * bend**2
        if call.arrays["residual"] is not None:
            variance = variance + (KAPPA * unit.u * magnitude(ref[0]).reshape(sums.z.shape)) ** 2
            if call.options["activation"] == "none":
                variance = variance + began_at(call, rows_of(call, "residual"))[1] ** 2
        lost = unit.tau * (np.abs(at.value) + 4)
    found = (np.hypot(np.sqrt(variance), lost), np.hypot(sums.spread, unit.tau))
    return tuple(
        None if y is None else np.hypot(store_spread(y, call.dtype), s.reshape(y.shape))
        for y, s in zip(ref, found, strict=True)
    )


@linear.exact
def exact(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Rows and columns of integers whose sums the accumulator holds, with nothing after them that rounds."""
    unit = units(call)
    x, w = rows_of(call, "x"), call.arrays["weight"].T
    with np.errstate(all="ignore"):
        scale = magnitude(x) @ magnitude(w)
        (whole,) = measured(as_product(call, x, w), "forced", x @ w)
        found, terms = [], [call.arrays["bias"], None]
        if call.arrays["residual"] is not None:
            terms[1] = rows_of(call, "residual")
        for term in terms:
            if term is not None:
                scale = scale + magnitude(term)
                whole = whole & np.isfinite(term) & (term == np.trunc(term))
            found.append(whole & (scale < 1 / unit.u))
    plain = call.options["activation"] in ("none", "relu")
    forced = (found[1] & plain, found[0])
    return tuple(None if y is None else f.reshape(y.shape) for y, f in zip(ref, forced, strict=True))


@linear.edge(dims={"batch": (1, 40), "k": (1, 140), "n": (1, 40)}, options={"return_pre": True})
def nan_and_inf_in_a_row(arrays, rng, options):
    """NaN and inf in a row of x reach that row of y alone."""
    plant(rng, arrays["x"], rng.choice([np.nan, inf]))


@linear.edge(dims={"batch": (1, 40), "k": (1, 40), "n": (1, 40)}, given=("bias",))
def infinite_biases(arrays, rng, options):
    """A bias of -inf: relu gives 0, gelu and silu NaN; one of +inf stays infinite."""
    arrays["bias"][rng.random(arrays["bias"].shape) < 0.4] = rng.choice([inf, -inf, np.nan])


@linear.edge(dims={"batch": (1, 40), "k": (1, 40), "n": (1, 40)}, given=("residual",))
def infinite_residuals(arrays, rng, options):
    """An infinity or NaN in the residual reaches its own element, past the activation."""
    arrays["residual"][rng.random(arrays["residual"].shape) < 0.3] = rng.choice([inf, -inf, np.nan])


@linear.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, given=("bias",), options={"activation": "gelu"})
def faint_gelus(arrays, rng, options):
    """z of -3 to -8, where next to nothing is left."""
    arrays["x"] /= 16
    arrays["bias"][...] = -rng.uniform(3, 8, arrays["bias"].shape)


@linear.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, options={"activation": "gelu_tanh"})
def around_0(arrays, rng, options):
    """z of about 1, where the two forms of gelu differ most."""
    arrays["x"] /= 4


@linear.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, given=("bias",))
def saturated(arrays, rng, options):
    """Far from 0 an activation is z itself or next to nothing, and never NaN: cubes overflow."""
    arrays["bias"] *= 10.0 ** rng.uniform(1, 30 if arrays["bias"].size % 2 else 3)


@linear.edge(dims={"batch": (1, 20), "k": (1, 40), "n": (1, 40)}, given=("residual",))
def a_residual_that_cancels(arrays, rng, options):
    """A residual of about -z: what is left has few digits, all of them right."""
    z = arrays["x"] @ arrays["weight"].T
    arrays["residual"][...] = -z * (1 + 2.0**-6 * rng.standard_normal(z.shape))


@linear.edge(dims={"batch": (1, 20), "k": (8, 16), "n": (1, 40)}, given=("bias",))
def a_bias_far_above_the_products(arrays, rng, options):
    """It is rounded once, with the whole sum, and not with each part of it; k is one step of most tiles."""
    arrays["bias"] *= 2.0**10


@linear.edge(dims={"batch": (1, 20), "k": (8, 16), "n": (1, 40)}, given=("residual",), options={"activation": "none"})
def a_residual_far_above_the_products(arrays, rng, options):
    """It too comes after the sum, where no activation lies between them."""
    arrays["residual"] *= 2.0**10


@linear.edge(dims={"batch": (1, 40), "k": (129, 300), "n": (2, 20)}, regime="integers", given=("bias", "residual"))
def exact_integers(arrays, rng, options):
    """Sums of small integers are exact; each bias and each residual is added once."""


@linear.edge(dims={"batch": (9, 12), "k": (1, 20), "n": (129, 150)}, smallest_tiles=True, given=("bias", "residual"))
def many_tiles_both_ways(arrays, rng, options):
    """However tiles are numbered, each is computed once, with its own biases."""


@linear.edge(dims={"batch": (1, 3), "k": (1, 1), "n": (1, 40)})
def one_product(arrays, rng, options):
    """k = 1."""


@linear.edge(dims={"batch": (1, 9), "k": (1, 40), "n": (1, 40)}, options={"precision": "tf32"})
def products_of_10_bits(arrays, rng, options):
    """precision counts where products are of float32."""


def drawn(draw):
    """x, weight, bias and residual of a call."""
    rows, k, n = draw.extent(2, 70), draw.extent(1, 140), draw.extent(1, 140)
    return draw.normal(rows, k), draw.normal(n, k), draw.normal(n), draw.normal(rows, n)


@linear.law
def rows_are_independent(run, draw):
    """A row alone gives the same bits as among others."""
    x, weight, bias, residual = drawn(draw)
    first = draw.extent(0, len(x) - 1)
    row = slice(first, first + 1)
    for activation in ("none", "gelu_tanh"):
        alone = run(x[row], weight, bias, residual[row], activation=activation)
        whole = run(x, weight, bias, residual, activation=activation)
        draw.same_bits(alone, whole[row], "a row alone")


@linear.law
def what_is_absent_adds_nothing(run, draw):
    """A bias and a residual of zeros are none, but for the sign of a zero."""
    x, weight, bias, residual = drawn(draw)
    none = run(x, weight, activation="silu")
    draw.same_bits(run(x, weight, bias * 0, residual * 0, activation="silu") + 0, none + 0, "zeros")


@linear.law
def what_is_kept_changes_nothing(run, draw):
    """y has the same bits where pre comes with it, and pre those of y without an activation."""
    x, weight, bias, _ = drawn(draw)
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        y, pre = run(x, weight, bias, activation=activation, return_pre=True)
        draw.same_bits(run(x, weight, bias, activation=activation), y, f"{activation} alone")
        draw.same_bits(run(x, weight, bias), pre, "z")


@linear.law
def identity(run, draw):
    """x I + residual is their sum, rounded once: of integers to the bit."""
    x = draw.integers(-8, 8, draw.extent(1, 40), draw.extent(1, 70))
    residual = draw.integers(-8, 8, *x.shape)
    y = run(x, np.eye(x.shape[1]).astype(x.dtype), None, residual, activation="relu")
    draw.same_bits(y + 0, np.maximum(x, 0) + residual + 0, "x times the identity")


linear.sample("plain", dims={"batch": (3,), "k": 5, "n": 4})
linear.sample(
    "with_all", dims={"batch": (2, 3), "k": 5, "n": 4}, given=("bias", "residual"), options={"activation": "gelu"}
)
linear.sample(
    "tanh_and_bias", dims={"batch": (3,), "k": 5, "n": 4}, given=("bias",), options={"activation": "gelu_tanh"}
)
linear.sample(
    "silu_and_residual", dims={"batch": (3,), "k": 5, "n": 4}, given=("residual",), options={"activation": "silu"}
)


# ---------------------------------------------------------------------------------------------------------- gradient
class LinearVjpOut(NamedTuple):
    d_x: Float[A, "*batch k"]
    d_weight: Float[A, "n k"]
    d_bias: Float[A, "n"]


@spec(
    tiling={},
    gradient_dtype=("d_x", "d_weight", "d_bias"),
    positive=("k",),
    passes={"residual": "d_y"},
    reads={"pre": When(lambda options: options["activation"] != "none", "where there is an activation")},
    apart=lambda options, wants: (
        "k",
        *(["batch"] if set(wants) == {"d_x"} else []),
        *(["n"] if "d_x" not in wants else []),
    ),
    typical={"batch": (4096,), "n": 4096, "k": 4096, "pre": True, "bias": True, "activation": "gelu_tanh"},
    flops=lambda call: (
        (2.0 * call.dims["k"] * len({"d_x", "d_weight"} & {*call.wants}) + 1)
        * prod(call.dims["batch"])
        * call.dims["n"]
    ),
)
def linear_vjp(
    x: Float[A, "*batch k"],
    weight: Float[A, "n k"],
    d_y: Float[A, "*batch n"],
    pre: Float[A, "*batch n"] | None = None,
    bias: Float[A, "n"] | None = None,
    *,
    activation: Literal["none", "relu", "gelu", "gelu_tanh", "silu"] = "none",
    precision: Literal["ieee", "tf32"] = "ieee",
) -> LinearVjpOut:
    """d_x = d_z weight, d_weight = d_z^T x and d_bias = the sum of d_z over all rows, with d_z = d_y f'(pre).

    Products and sums are float32 (float64 for float64) and rounded once; d_z may be rounded to x's dtype before them,
    once. f' of relu is 0 up to 0 and 1 beyond, and selects: what it leaves out is 0 whatever d_y holds. The gradient of
    the residual is d_y and is not computed.

    Args:
      x, weight, activation, precision: what linear was given.
      d_y: (*batch, n), the cotangent of its y.
      pre: (*batch, n), what it found; None where there is no activation, and d_z is d_y.
      bias: (n,), as in linear. Its values are not read: it says that d_bias exists.

    Returns:
      d_x, d_weight, d_bias: the shape and dtype of x, weight and bias, None where that was not given. The slope at an
      infinite pre is its limit, 1 or 0, but NaN for silu (inf 0).
    """
    raise NotImplementedError


CURVE = 0.81
"""No |f''| of an activation is more: it is largest in 0, 2 phi(0) = .798 for gelu, a little more for its tanh form
(.801), and 1/2 for silu."""


class Cotangent(NamedTuple):
    """d_z of all rows, (rows, n), as a kernel multiplies it.

    Attributes:
      value: exact; err: how far a kernel's may be off, +inf where it is not known; spread: the RMS of that.
    """

    value: np.ndarray
    err: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, call: Call) -> Cotangent:
        d_y, unit = rows_of(call, "d_y"), units(call)
        if call.options["activation"] == "none":
            return cls(d_y, np.zeros(d_y.shape), np.zeros(d_y.shape))
        z, off = rows_of(call, "pre"), np.broadcast_to(call.off.get("pre", 0.0), call.arrays["pre"].shape)
        off = off.reshape(d_y.shape)
        if call.options["activation"] == "relu":
            # selected and not multiplied: what is stored is d_y itself, and what is subnormal may be lost
            err = np.where(np.isfinite(d_y) & (np.abs(d_y) < unit.eta), unit.eta, 0.0)
            err = np.where(np.abs(z) <= off, magnitude(d_y), err) if "pre" in call.off else err
            return cls(np.where(z <= 0, 0.0, d_y), err, np.zeros(d_y.shape))
        at, size = Activated.of(call, z, unit), magnitude(d_y)
        value = d_y * at.slope
        d_slope = at.d_slope + CURVE * off
        err = size * (d_slope + unit.u * np.abs(at.slope)) + unit.tau * (size + np.abs(at.slope) + 1)
        unsure = np.isinf(d_y) & (np.abs(at.slope) <= d_slope)
        err = round_to(np.where(unsure, inf, err), value, call.dtype)
        own = size * np.hypot(at.slope_spread, KAPPA * unit.u * at.slope)
        return cls(value, err, np.hypot(store_spread(value, call.dtype), own))


@linear_vjp.tolerance
def bound_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The bounds, each E (1 + U) + U |value| + eta, with E_d how far a kernel's d_z may be off, M the number of rows:

        d_x, d_weight: matmul's of d_z as large as it may be, and sum E_d |weight| or sum E_d |x| beside it
        d_bias: E = (M + 1) u sum (|d_z| + E_d) + sum E_d + M tau
        E_d = [|d_y| (E_f' + u |f'|) + tau (|d_y| + |f'| + 1)] (1 + U) + U |d_z| + eta

    E_f' is that of the slope of geglu's or swiglu's gate; U is what storing d_z costs. Without an activation, and for
    relu, E_d is 0 but for what flushes. Where pre may be off by o, E_f' has ``CURVE`` o more, and relu may select
    either where |pre| <= o. Nothing is promised where an infinite d_y meets a slope that may be 0.
    """
    unit, m = units(call), prod(call.dims["batch"])
    with np.errstate(all="ignore"):
        d_z = Cotangent.of(call)
        found: list[Any] = [None, None, None]
        stored = [dtype for _, dtype in call.outputs.values()]
        for i, (a, b, err) in enumerate(products(call, d_z)):
            if ref[i] is not None:
                y = ref[i].reshape(a.shape[0], b.shape[1])
                found[i] = of_brackets(call, a, err, b, y, stored[i]).reshape(ref[i].shape)
        if ref[2] is not None:
            sizes = (magnitude(d_z.value) + d_z.err).sum(0)
            err = (m + 1) * unit.u * sizes + d_z.err.sum(0) + m * unit.tau
            beyond = (magnitude(d_z.value) + d_z.err >= format_of(call.dtype).overflow).any(0)
            found[2] = round_to(np.where(beyond | (sizes >= unit.huge), inf, err), ref[2], stored[2])
    return tuple(found)


def products(call: Call, d_z: Cotangent) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    """The two products of d_z: its factors and how far the first may be off."""
    return (
        (d_z.value, np.asarray(call.arrays["weight"]), d_z.err),
        (d_z.value.T, rows_of(call, "x"), d_z.err.T),
    )


def finite(x: np.ndarray) -> np.ndarray:
    """x, with 0 for infinities and NaN."""
    return np.where(np.isfinite(x), x, 0.0)


@linear_vjp.sigma
def sigma_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """The RMS errors, with s_d that of d_z as it is stored, s_c of a product alone, M the number of rows:

        d_x, d_weight: s_c^2 + R sum s_d^2 weight^2, or x^2
        d_bias: store^2 + M^2 s^2 + sum s_d^2          s^2: of a mean (``mean_variance``)

    R is the ``variance_factor`` for what numbers of d_z draw. An error is not known where d_z is ``lost``, or where
    what storing
    it costs adds up instead of being random: of many that are alike.
    """
    m = prod(call.dims["batch"])
    with np.errstate(all="ignore"):
        d_z = Cotangent.of(call)
        rounding = d_z.spread.any()
        known = finite(d_z.value)
        off = finite(rounded(known, call.dtype).astype(np.float64) - known) if rounding else np.zeros(known.shape)
        found: list[Any] = [None, None, None]
        stored = [dtype for _, dtype in call.outputs.values()]
        for i, ((a, b, _), s, o) in enumerate(
            zip(products(call, d_z), (d_z.spread, d_z.spread.T), (off, off.T), strict=True)
        ):
            if ref[i] is not None:
                y = ref[i].reshape(a.shape[0], b.shape[1])
                product = of_matmul(call, "spread", a, b, y, stored[i])
                gone = rounding & lost(call, a, -1)
                met = variance_factor(call, np.where(gone, 0.0, a)) * (magnitude(s) ** 2 @ magnitude(b) ** 2)
                unknown = (np.abs(o @ finite(b)) > 4 * np.sqrt(met)) | gone
                found[i] = np.where(unknown, inf, np.sqrt(product**2 + met)).reshape(ref[i].shape)
        if ref[2] is not None:
            met = (magnitude(d_z.spread) ** 2).sum(0)
            variance = m**2 * mean_variance(known, 0, m, (KAPPA * units(call).u) ** 2)[0]
            spread = np.hypot(store_spread(ref[2], stored[2]), np.sqrt(variance + met))
            unknown = (np.abs(off.sum(0)) > 4 * np.sqrt(met)) | (rounding & lost(call, known, 0)[0])
            found[2] = np.where(unknown, inf, spread)
    return tuple(found)


@linear_vjp.exact
def exact_vjp(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """Integers whose sums the accumulator holds, where d_z is d_y or 0."""
    if call.options["activation"] not in ("none", "relu"):
        return tuple(None if y is None else np.zeros(y.shape, bool) for y in ref)
    found: list[Any] = [None, None, None]
    with np.errstate(all="ignore"):
        d_z = Cotangent.of(call)
        for i, (a, b, _) in enumerate(products(call, d_z)):
            if ref[i] is not None:
                (whole,) = measured(as_product(call, a, b), "forced", ref[i].reshape(a.shape[0], b.shape[1]))
                found[i] = whole.reshape(ref[i].shape)
        if ref[2] is not None:
            whole = np.isfinite(d_z.value) & (d_z.value == np.trunc(d_z.value))
            found[2] = whole.all(0) & (magnitude(d_z.value).sum(0) < 1 / units(call).u)
    return tuple(found)


@linear_vjp.edge(dims={"batch": (1, 40), "k": (1, 40), "n": (1, 40)})
def nan_and_inf_in_a_cotangent(arrays, rng, options):
    """NaN in d_y reaches a row of d_x, a row of d_weight and an element of d_bias."""
    d_y = arrays["d_y"].reshape(-1, arrays["d_y"].shape[-1])
    d_y[rng.integers(len(d_y)), rng.integers(d_y.shape[-1])] = rng.choice([np.nan, inf, -inf])


@linear_vjp.edge(dims={"batch": (1, 40), "k": (1, 40), "n": (1, 40)})
def infinite_rows(arrays, rng, options):
    """An infinite or NaN x makes an infinite or NaN pre, whose slope is its limit: 1 or 0, or NaN."""
    x = arrays["x"].reshape(-1, arrays["x"].shape[-1])
    x[rng.integers(len(x)), rng.integers(x.shape[-1])] = rng.choice([inf, np.nan])


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, options={"activation": "gelu_tanh"})
def around_0_vjp(arrays, rng, options):
    """z of about 1, where the slopes of the two forms of gelu differ most."""
    arrays["x"] /= 4


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, options={"activation": "silu"})
def silus_around_0(arrays, rng, options):
    """silu is least at -1.28, where its slope changes its sign."""
    arrays["x"] /= 4


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)})
def saturated_vjp(arrays, rng, options):
    """Far from 0 the slope is 1 or next to nothing, and never NaN: cubes overflow."""
    arrays["x"] *= 10.0 ** rng.uniform(1, 15 if arrays["x"].size % 2 else 3)


@linear_vjp.edge(dims={"batch": (1, 20), "k": (1, 20), "n": (1, 40)}, regime="integers", options={"activation": "relu"})
def the_kink(arrays, rng, options):
    """Sums that are 0 have a slope of 0, and what relu leaves out is 0 beside any cotangent."""
    arrays["x"][rng.random(arrays["x"].shape) < 0.5] = 0


@linear_vjp.edge(dims={"batch": (129, 300), "k": (1, 20), "n": (1, 40)}, regime="integers")
def many_rows_of_integers(arrays, rng, options):
    """Sums over rows are exact: one that is dropped or counted twice shows."""


@linear_vjp.edge(dims={"batch": (17, 40), "k": (1, 20), "n": (1025, 1100)})
def several_ragged_tiles(arrays, rng, options):
    """The last column of the last tile counts as any other."""


@linear_vjp.edge(dims={"batch": (1, 1), "k": (1, 40), "n": (1, 40)})
def one_row(arrays, rng, options):
    """Each element of d_weight is one product."""


linear_vjp.edge(dims={"batch": (1, 9), "k": (1, 40), "n": (1, 40)}, options={"precision": "tf32"})(products_of_10_bits)


NAMES = ("d_x", "d_weight", "d_bias")


def drawn_vjp(draw):
    """x, weight, d_y, pre and bias of a call."""
    rows, k, n = draw.extent(2, 70), draw.extent(1, 70), draw.extent(1, 140)
    return draw.normal(rows, k), draw.normal(n, k), draw.normal(rows, n), draw.normal(rows, n), draw.normal(n)


@linear_vjp.law
def rows_are_independent_vjp(run, draw):
    """A row of d_x alone has the same bits as among others."""
    x, weight, d_y, pre, _ = drawn_vjp(draw)
    first = draw.extent(0, len(x) - 1)
    row = slice(first, first + 1)
    alone = run(x[row], weight, d_y[row], pre[row], activation="silu")[0]
    draw.same_bits(alone, run(x, weight, d_y, pre, activation="silu")[0][row], "a row alone")


@linear_vjp.law
def gradients_do_not_depend_on_which_are_wanted(run, draw):
    """Each gradient, asked for alone, has the same bits."""
    arrays = drawn_vjp(draw)
    each_alone(lambda *a, **o: run(*a, activation="gelu_tanh", **o), draw, NAMES, arrays)


@linear_vjp.law
def powers_of_two_scale_exactly(run, draw):
    """A cotangent that is doubled doubles every gradient, to the bit."""
    x, weight, d_y, pre, bias = drawn_vjp(draw)
    pre = np.abs(pre)  # where no slope is so small that the product is subnormal
    doubled(lambda d_y: run(x, weight, d_y, pre, bias, activation="gelu"), draw, NAMES, d_y)


@linear_vjp.law
def an_open_activation_is_none(run, draw):
    """From 100 on every slope is 1, and every gradient that of the layer without an activation, to the bit."""
    x, weight, d_y, pre, bias = drawn_vjp(draw)
    bare = run(x, weight, d_y, None, bias)
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        opened = run(x, weight, d_y, np.abs(pre) + pre.dtype.type(100), bias, activation=activation)
        for name, one, other in zip(NAMES, opened, bare, strict=True):
            draw.same_bits(one, other, f"{name} of {activation}")


linear_vjp.sample("plain", dims={"batch": (3,), "k": 5, "n": 4})
linear_vjp.sample("gelu", dims={"batch": (2, 3), "k": 5, "n": 4}, given=("bias",), options={"activation": "gelu"})
linear_vjp.sample("silu", dims={"batch": (3,), "k": 5, "n": 4}, options={"activation": "silu"})
