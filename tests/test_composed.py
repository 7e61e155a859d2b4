"""Composed bounds: derivatives of every op, a transformer block in kernels and in NumPy, and a model with a wrong
layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import portakern as pk
from portakern import bounds
from portakern.composed import TrackedArray
from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.gradients import wiring
from portakern.core.oracle import as_float64, oracle
from portakern.errors import UnsupportedError
from portakern.spec import Spec
from portakern.spec.tolerance import permitted_error
from portakern.testing import sample_arrays

TOKENS, HEADS, DEPTH, WIDTH, HIDDEN = 6, 2, 8, 16, 24
OPS = ("rmsnorm", "matmul", "attention", "swiglu")
Weights = Mapping[str, np.ndarray]


def layer(ops: Mapping[str, Callable[..., Any]], x: Any, w: Mapping[str, Any], scale: float | None = None) -> Any:
    """A layer of a transformer in any array library."""
    h = ops["rmsnorm"](x, w["norm"])
    q, k, v = (ops["matmul"](h, w[n]).reshape(1, TOKENS, HEADS, DEPTH) for n in ("q", "k", "v"))
    o = ops["attention"](q, k, v, is_causal=True, scale=scale)
    x = x + ops["matmul"](o.reshape(TOKENS, WIDTH), w["o"])
    h = ops["rmsnorm"](x, w["norm"])
    return x + ops["matmul"](ops["swiglu"](ops["matmul"](h, w["gate"]), ops["matmul"](h, w["up"])), w["down"])


def fused(x: np.ndarray, w: Weights) -> np.ndarray:
    """The same layer in one piece, in float32 without a rounding between."""

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(1e-6)) * w32["norm"]

    w32, x = {n: a.astype(np.float32) for n, a in w.items()}, x.astype(np.float32)
    h = norm(x)
    q, k, v = ((h @ w32[n]).reshape(TOKENS, HEADS, DEPTH).swapaxes(0, 1) for n in ("q", "k", "v"))
    scores = np.where(np.tri(TOKENS, dtype=bool), q @ k.swapaxes(1, 2) / np.float32(DEPTH**0.5), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    o = (p / p.sum(-1, keepdims=True)) @ v
    x = x + o.swapaxes(0, 1).reshape(TOKENS, WIDTH) @ w32["o"]
    h = norm(x)
    gate = h @ w32["gate"]
    out: np.ndarray = x + (gate / (1 + np.exp(-gate)) * (h @ w32["up"])) @ w32["down"]
    return out


def drawn(seed: int, dtype: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    shapes = {**dict.fromkeys("qkvo", (WIDTH, WIDTH)), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN)}
    shapes |= {"down": (HIDDEN, WIDTH)}
    w = {n: bounds.rounded(rng.normal(size=s) / s[0] ** 0.5, dtype) for n, s in shapes.items()}
    w["norm"] = bounds.rounded(1 + rng.normal(size=WIDTH) / 4, dtype)
    return bounds.rounded(rng.normal(size=(TOKENS, WIDTH)), dtype), w


@functools.cache
def block(seed: int, dtype: str) -> tuple[Any, Any, Any]:
    x, w = drawn(seed, dtype)
    return x, w, pk.bound(functools.partial(layer, {n: pk.op(n) for n in OPS}), x, w)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(3))
def test_a_block_of_kernels_is_within_its_bound(seed: int, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    x, w, found = block(seed, dtype)
    made = {n: torch.tensor(a.astype(np.float32)).to(getattr(torch, dtype)) for n, a in {**w, "x": x}.items()}
    y = layer({n: pk.op(n, backend="triton") for n in OPS}, made.pop("x"), made).float().numpy()
    assert found.accepts(y) and found.orders == {"0": "first order"}
    least = 0.02 if dtype == "bfloat16" else 0.0005
    assert least < found.share(y) < 0.5, found.share(y)  # worst cases add up, and chance does not
    assert 0.2 < found.output().typical_share(y) < 1.6
    assert not found.accepts(y + 2 * found.error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(3))
def test_a_fused_block_is_within_it_too(seed: int, dtype: str) -> None:
    x, w, found = block(seed, dtype)
    y = bounds.rounded(fused(x, w), dtype)
    assert found.accepts(y) and 0 < found.share(y) < 0.3
    assert found.output().typical_share(y) < 1.2  # it rounds less often


def test_the_first_wrong_layer_is_named() -> None:
    ops, (x, w) = {n: pk.op(n, backend="reference") for n in OPS}, drawn(0, "float32")

    def model(x: Any, w: Any, wrong: int | None = None) -> list[Any]:
        states = []
        for i in range(3):
            x = layer(ops, x, w, DEPTH**-0.5 * (1.01 if i == wrong else 1.0))
            states.append(x)
        return states

    found = pk.bound(model, x, w, elements=24)
    assert found.first_wrong(*model(x, w)) is None
    assert [found.first_wrong(*model(x, w, wrong)) for wrong in range(3)] == ["0", "1", "2"]
    assert np.isfinite(found.output("2").error).sum() == 24
    assert found.output("2").error.min() > 0
    narrow = [y.astype(np.float16).astype(np.float32) if i == 1 else y for i, y in enumerate(model(x, w))]
    assert found.first_wrong(*narrow, typical=2) == "1" and found.first_wrong(*model(x, w), typical=2) is None


@pytest.mark.parametrize("op", [s.name for s in map(registry.find_spec, registry.loadable()) if s.vjp])
def test_errors_carry_on_by_the_derivative(op: str) -> None:
    """As central differences of the oracle say it, of two elements of each output."""
    spec: Spec[Any] = registry.find_spec(op)
    arrays, options = sample_arrays(op, dtype="float32")
    moving = [n for n in wiring(spec).gradients if n in arrays]

    def function(**given: Any) -> Any:
        return pk.op(spec)(**{n: given[n] * 1.5 if n in moving else given[n] for n in given}, **options)

    found = pk.bound(lambda a: function(**a), arrays, elements=2)
    call = bind(spec, **arrays, **options)
    wide = as_float64(call)
    wide = wide.replace(arrays={n: a * 1.5 if n in moving else a for n, a in wide.arrays.items()})
    outputs = [i for i, o in enumerate(spec.outputs) if o.name in call.wants and o in spec.shown]
    wide.any_order = True
    assert spec.bound is not None
    exact = oracle(wide)
    own = spec.bound(wide, exact)
    for i, bounded in zip(outputs, found.outputs.values(), strict=True):
        carried = np.zeros(bounded.reference.shape)
        for name in moving:
            array = wide.arrays[name]
            errors = 2.0**-24 * np.abs(array) * (2 + 2.0**-24) + 2.0**-126  # of a product that is stored
            for at in np.ndindex(array.shape):
                step = 1e-4 * max(1.0, abs(float(array[at])))
                ends = []
                for sign in (1, -1):
                    moved = array.copy()
                    moved[at] += sign * step
                    ends.append(np.asarray(oracle(wide.replace(arrays={**wide.arrays, name: moved}))[i], np.float64))
                carried += np.abs(ends[0] - ends[1]) / (2 * step) * errors[at]
        chosen = np.isfinite(bounded.error)
        assert chosen.any() or bounded.dtype.startswith("int")  # an index may be any other
        first = permitted_error(own[i], np.float64(exact[i]), bounded.dtype, spec.outputs[i].codes)
        np.testing.assert_allclose(bounded.error[chosen], (first + carried)[chosen], rtol=3e-3, atol=1e-12)


def test_one_op_is_a_proof_and_what_is_behind_it_is_not() -> None:
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    softmax, rmsnorm = pk.op("softmax"), pk.op("rmsnorm")
    found = pk.bound(lambda x: {"y": softmax(x), "turned": softmax(x).T[1:], "z": rmsnorm(softmax(x))}, x)
    assert found.orders == {"y": "proof", "turned": "proof", "z": "first order"}
    assert np.array_equal(found.output("y").error, bounds.softmax(x).error)
    assert np.array_equal(found.output("turned").error, bounds.softmax(x).error.T[1:])


def test_what_moves_elements_moves_their_errors() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6)).astype(np.float32)
    softmax, error = pk.op("softmax"), bounds.softmax(x).error
    moves: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
        "reshape": (lambda y: y.reshape(6, 4), error.reshape(6, 4)),
        "concatenate": (lambda y: np.concatenate([y, x, y]), np.concatenate([error, 0 * error, error])),
        "split": (lambda y: np.split(y, 2, axis=1)[1], error[:, 3:]),
        "index": (lambda y: y[[0, 0, 2], None], error[[0, 0, 2], None]),
        "transposed": (lambda y: np.transpose(y)[::-1], error.T[::-1]),
        "swapped": (lambda y: np.stack([y, y]).swapaxes(0, 2), np.stack([error, error]).swapaxes(0, 2)),
    }
    for name, (move, expected) in moves.items():
        found = pk.bound(lambda x, move=move: move(softmax(x)), x)
        np.testing.assert_allclose(found.error, expected, err_msg=name)
        assert found.accepts(move(bounds.softmax(x).reference))


def test_numpys_arithmetic_is_rounded_and_carried_on() -> None:
    x = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    softmax, row, u = pk.op("softmax"), bounds.softmax(x).error, 2.0**-24
    weight = np.float32([2, 3, 4, 5, 6])
    y = bounds.softmax(x).reference
    for name, function, value, carried in (
        ("difference", lambda x: softmax(x) - softmax(x) * weight, y * (1 - weight), row * np.abs(1 - weight)),
        ("quotient", lambda x: softmax(x) / weight, y / weight, row / weight),
        ("square", lambda x: softmax(x) * softmax(x), y * y, None),
        ("negative", lambda x: -abs(softmax(x)), -y, row),
    ):
        found = pk.bound(function, x)
        np.testing.assert_allclose(found.reference, value, err_msg=name)
        if carried is not None:
            assert (found.error >= carried).all() and (found.error <= carried * 2 + 10 * u * (1 + 8 * np.abs(y))).all()
    once = pk.bound(lambda x: softmax(x).astype("bfloat16"), x)
    assert once.output().dtype == "bfloat16" and (once.error >= 2.0**-8 * y).all()
    assert pk.bound(lambda x: (softmax(x) * x).reshape(10), x, dtype="float32").output().dtype == "float32"


def test_what_cancels_in_the_function_cancels_in_its_bound() -> None:
    """Two paths of one error: y - y has none."""
    x = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)

    def twice(x: Any) -> Any:
        y = pk.op("softmax")(x)
        return y - y

    assert pk.bound(twice, x).error.max() <= 2.0**-125


def test_what_has_no_bound_is_told() -> None:
    x = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    softmax = pk.op("softmax")
    for function, words in (
        (lambda x: np.exp(softmax(x)), "np.exp of an array that may be off has no bound; expected an op"),
        (lambda x: np.sort(softmax(x)), "np.sort of an array that may be off has no bound"),
        (lambda x: 3, "result 0 is a int; expected an array that the ops gave"),
    ):
        with pytest.raises(pk.SpecError, match=words):
            pk.bound(function, x)
    without = next(s for s in map(registry.find_spec, registry.loadable()) if s.vjp is None and not s.is_vjp)
    arrays, options = sample_arrays(without, dtype="float32" if "float32" in without.dtypes else None)
    name = next(n for n, a in arrays.items() if a.dtype.kind not in "iub")
    with pytest.raises(UnsupportedError, match="has no gradient"):
        pk.bound(lambda a: pk.op(without)(**{**a, name: a[name] + 0}, **options), arrays)
    with pytest.raises(pk.SpecError, match="an input.* is 0.1.*which bfloat16 does not hold"):
        pk.bound(softmax, np.full((1, 2), 0.1), dtype="bfloat16")


def test_calls_of_numpy_before_change_nothing() -> None:
    """An op keeps what served calls of a shape; arrays that are tracked have the same."""
    x, softmax = np.ones((3, 5), np.float32), pk.op("softmax", backend="reference")
    for _ in range(3):
        softmax(x)
    assert pk.bound(softmax, x).orders == {"0": "proof"}
    assert isinstance(softmax(x), np.ndarray)


def test_a_tracked_array_says_what_it_is() -> None:
    seen: list[TrackedArray] = []
    x = np.ones((2, 3), np.float32)
    pk.bound(lambda x: seen.append(pk.op("softmax")(x)) or seen[0], x)
    assert repr(seen[0]) == "TrackedArray((2, 3), float32, proof)" and len(seen[0]) == 2 and seen[0].size == 6
    assert seen[0].dtype == np.float32 and seen[0].ndim == 2
