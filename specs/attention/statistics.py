"""How far random rounding typically moves the results of attention."""

from __future__ import annotations

from math import inf, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.spec.tolerance import KAPPA, dot_spread, store_spread, units
from portakern.specs.attention.bounds import Rows
from portakern.specs.attention.contract import attention
from portakern.specs.attention.scores import scale_of

if TYPE_CHECKING:
    from portakern.core.call import Call


@attention.sigma
def sigma(call: Call, ref: tuple[Any, ...]) -> tuple[Any, ...]:
    """RMS errors of o and lse; of lse_low nothing is said. The symbols are those of the bound; kappa = KAPPA u, P = p
    / l.

    f is the RMS error of one score apart from its neighbours, and (x, y) are a dot's coefficients (``dot_spread``):

        f^2 = J^2 (x t^2 + y scale^2 q^2 @ k^2 + 2 (kappa t)^2) + (2uc)^2 + kappa^2 (2 s^2 + 6 d^2) + (ex/4)^2

    where t is the score before the softcap c, J = 1 - tanh(t/c)^2 the softcap's slope (1 without one), and q^2 @ k^2
    the sum of the dot's squared products. In order: the dot, two products, tanh; m and the bias, which round at the
    size of s; m - s in up to 6 parts (a running maximum's); exp.

        sigma_o^2 = store^2 + sum P^2 f^2 (v - o)^2 + (KAPPA U)^2 sum P^2 v^2 [v of 16 bits]
                    + x o^2 + y sum P^2 v^2 + (R + (ex/4)^2) o^2 + eta^2 sum v^2 / 3 l^2

    In order: storing o (``store_spread``); an error of P moves o along v - o, since l takes part; P is rounded beside
    l; the product over N keys; the rest R; underflow of P.

        sigma_lse^2 = store^2 + sum P^2 f^2 + x (sum P J t)^2 + u^2 (m^2 + H^2) + R,  H = sum P d

    What leans one way in every score adds up on average: a dot that is cut off by x, and the rounded constants scale
    and scale log2(e) by u m and u H. A constant is one draw for all rows: its largest error stands for the RMS.

        R = kappa^2 (c_N / 3 + 8) + (ex/4)^2,  c_N = chain(N)

    is the sum l, log or division, and the exp of a rise of the maximum, by which accumulator and l are rescaled.

    +inf where the first order fails: rows with an f of 2^-4 or more at a key that counts, and elements without a bound.
    """
    o, lse, low = ref
    unit, group = units(call), call.dims["group"]
    rest = (KAPPA * unit.u) ** 2 * (unit.chain(call.dims["kv_len"]) / 3 + 8) + (unit.ex / 4) ** 2
    sigma_o, sigma_lse = np.empty_like(o), None if lse is None else np.empty_like(lse)
    with np.errstate(all="ignore"):
        for b, h in np.ndindex(o.shape[0], o.shape[2]):
            row = Rows.of(call, unit, b, h)
            share, (f2, lean) = row.p / row.l, _row_spread(call, unit, row, b, h)
            unknown = row.overflows | (np.where(row.d < 100, f2, 0.0).max(1, keepdims=True) >= 2.0**-8)
            moved = np.where(row.p > 0, np.square(share) * f2, 0.0)
            v = call.arrays["v"][b, :, h // group]
            of_o = _o_spread(call, unit, row, share, moved, rest, v, o[b, :, h])
            sigma_o[b, :, h] = np.where(unknown, inf, of_o)
            if sigma_lse is not None:
                of_lse = _lse_spread(call, unit, row, share, moved, lean, rest, lse[b, h])
                sigma_lse[b, h] = np.where(unknown[:, 0], inf, of_lse)
    return sigma_o, sigma_lse, None if low is None else np.full_like(low, inf)


def _row_spread(call, unit, row, b, h):
    """f^2, the variance of each score, and sqrt(x) J t, by which the dot's error leans the same way in every key."""
    f2, lean = score_spread(call, unit, b, h)
    f2 = f2 + (KAPPA * unit.u) ** 2 * (2 * (row.m - row.d) ** 2 + 6 * row.d**2) + (unit.ex / 4) ** 2
    return np.where(row.seen, f2, 0.0), np.where(row.seen, lean, 0.0)


def score_spread(call, unit, b, h):
    """Of one head, (q_len, kv_len): the variance of its scores up to the softcap, and what leans one way in all."""
    q, k = call.arrays["q"][b, :, h], call.arrays["k"][b, :, h // call.dims["group"]]
    q, k = (np.where(np.isfinite(a), a, 0.0) for a in (q, k))
    x, y = dot_spread(call, call.dims["d"])
    scale, softcap, kappa_u = scale_of(call), call.options["softcap"], KAPPA * unit.u
    t, squares = scale * (q @ k.T), scale**2 * (np.square(q) @ np.square(k).T)
    slope = 1.0 if softcap is None else 1 - np.tanh(t / softcap) ** 2
    f2 = slope**2 * (x * t**2 + y * squares + 2 * (kappa_u * t) ** 2) + (2 * unit.u * (softcap or 0.0)) ** 2
    return f2, sqrt(x) * slope * t


def _o_spread(call, unit, row, share, moved, rest, v, o):
    """sigma_o of one head, from P (``share``), P^2 f^2 (``moved``) and R (``rest``)."""
    v, o = (np.where(np.isfinite(a), a, 0.0) for a in (v, o))
    x, y = dot_spread(call, call.dims["kv_len"])
    products = np.square(share) @ np.square(v)
    rounded_p = (KAPPA * unit.U) ** 2 if call.dtype in ("float16", "bfloat16") else 0.0
    along = moved @ np.square(v) - 2 * o * (moved @ v) + np.square(o) * moved.sum(1, keepdims=True)
    variance = np.maximum(along, 0) + (y + rounded_p) * products + np.square(o) * (x + rest + (unit.ex / 4) ** 2)
    underflow = unit.eta**2 / 3 * (row.seen @ np.square(v)) / row.l**2
    return np.hypot(store_spread(o, call.dtype), np.sqrt(variance + underflow))


def _lse_spread(call, unit, row, share, moved, lean, rest, lse):
    """sigma_lse of one head, from P (``share``), P^2 f^2 (``moved``), sqrt(x) J t (``lean``) and R (``rest``)."""
    entropy = np.where(row.p > 0, share * row.d, 0.0).sum(1)
    constants = unit.u**2 * (row.m[:, 0] ** 2 + entropy**2)
    variance = moved.sum(1) + (share * lean).sum(1) ** 2 + constants + rest
    return np.hypot(store_spread(lse, call.outputs["lse"][1]), np.sqrt(variance))
