"""Tables of the rope op at any position, and transformers' function on it."""

import numpy as np
import pytest

import portakern as pk

POSITIONS = np.r_[0:9, 131072 - 5 : 131072 + 5, 2**24 - 3 : 2**24 + 3, 2**31 - 1]
FREQUENCIES = (10000.0 ** -(np.arange(32) / 32)).astype(np.float32)
ANGLE = POSITIONS[:, None] * FREQUENCIES.astype(np.float64)
EXACT = np.cos(ANGLE), np.sin(ANGLE)


def test_tables_of_torch_are_exact_at_any_position():
    torch = pytest.importorskip("torch")
    from portakern.torch import rotary_tables

    positions, inv_freq = torch.from_numpy(POSITIONS), torch.from_numpy(FREQUENCIES)
    for got, want in zip(rotary_tables(positions, inv_freq, scaling=2.0), EXACT, strict=True):
        assert got.dtype == torch.float32 and got.shape == (1, *ANGLE.shape)
        np.testing.assert_allclose(got[0].double().numpy(), 2 * want, rtol=2.0**-23, atol=1e-6 * 2.0**-8)
    assert rotary_tables(positions[None].expand(2, -1), inv_freq, dtype=torch.bfloat16)[0].shape == (2, *ANGLE.shape)


def test_tables_of_jax_are_exact_at_any_position_and_traced():
    jax = pytest.importorskip("jax")
    from portakern.jax import rotary_tables

    made = jax.jit(lambda positions: rotary_tables(positions, FREQUENCIES, scaling=2.0))(POSITIONS.astype(np.int32))
    for got, want in zip(made, EXACT, strict=True):
        assert got.dtype == np.float32 and got.shape == (1, *ANGLE.shape)
        np.testing.assert_allclose(np.asarray(got[0], np.float64), 2 * want, rtol=0, atol=2 * 2.0**-22)
    in_float32 = np.cos(POSITIONS[:, None].astype(np.float32) * FREQUENCIES)
    assert np.abs(in_float32 - EXACT[0]).max() > 1e-3  # which is what the integers are for
    with pytest.raises(pk.SpecError, match="inv_freq is traced; expected values that are known while tracing"):
        jax.jit(lambda f: rotary_tables(POSITIONS, f))(FREQUENCIES)


BETWEEN = [0.5, 1.5, 1000.25, -3.75, 131072.125, 1e-3, -1e-9, 0.0]


@pytest.mark.parametrize(
    ("positions", "dtype"),
    [(BETWEEN, None), *((BETWEEN, d) for d in ("float64", "float32", "float16")), ([-5, -1, 3, 2**31 - 1,
    -(2**31)], "int64"),
     ([-5, 100], "int8"), ([2**32 - 1, 2**31], "uint32")],
)  # fmt: skip
def test_positions_are_what_they_are_in_jax(positions, dtype):
    """Numbers between tokens, before the first, and of any width; as lists, NumPy's arrays, JAX's, and traced."""
    jax = pytest.importorskip("jax")
    from portakern.jax import rotary_tables

    given = (
        positions if dtype is None else np.array([p for p in positions if dtype != "float16" or abs(p) < 60000], dtype)
    )
    angle = np.asarray(given, np.float64)[:, None] * FREQUENCIES.astype(np.float64)
    here = [given] if dtype is None else [given, jax.numpy.asarray(given)]
    made = [rotary_tables(p, FREQUENCIES) for p in here]
    if dtype is not None:
        made.append(jax.jit(lambda p: rotary_tables(p, FREQUENCIES))(given))
    for cos, sin in made:
        np.testing.assert_allclose(np.asarray(cos[0], np.float64), np.cos(angle), rtol=0, atol=2.0**-22)
        np.testing.assert_allclose(np.asarray(sin[0], np.float64), np.sin(angle), rtol=0, atol=2.0**-22)


def test_what_is_no_position_is_refused_in_jax():
    pytest.importorskip("jax")
    from portakern.jax import rotary_tables

    for bad in ([True], [1j], ["a"]):
        with pytest.raises(pk.SpecError, match="rotary_tables: positions are .*; expected integers or floating-point"):
            rotary_tables(bad, FREQUENCIES)
    for bad in (np.nan, 2.0**31, -np.inf):
        with pytest.raises(pk.SpecError, match="rotary_tables: positions has .*; expected numbers below 2"):
            rotary_tables([0.0, bad], FREQUENCIES)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_transformers_function(unsqueeze_dim):
    torch = pytest.importorskip("torch")
    from portakern.torch import apply_rotary_pos_emb, rotary_tables

    torch.manual_seed(0)
    cos, sin = (torch.cat((t, t), -1) for t in rotary_tables(torch.arange(5), torch.from_numpy(FREQUENCIES[:4])))
    q, k = (torch.randn(2, 5, heads, 10, requires_grad=True) for heads in (4, 2))
    order = (lambda x: x.transpose(1, 2)) if unsqueeze_dim == 1 else (lambda x: x)

    def plain(x):
        c, s, turned = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), x[..., :8]
        turned = turned * c + torch.cat((-turned[..., 4:], turned[..., :4]), -1) * s
        return torch.cat((turned, x[..., 8:]), -1)

    got = apply_rotary_pos_emb(order(q), order(k), cos, sin, unsqueeze_dim, backend="reference")
    for x, y, want in zip((q, k), got, (plain(order(q)), plain(order(k))), strict=True):
        torch.testing.assert_close(y, want)
        ours, theirs = (torch.autograd.grad(z.square().sum(), x)[0] for z in (y, want))
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(pk.SpecError, match="unsqueeze_dim is 3; expected 1, .*or 2"):
        apply_rotary_pos_emb(q, k, cos, sin, 3)
    with pytest.raises(pk.SpecError, match="cos has 7 columns; expected an even number"):
        apply_rotary_pos_emb(q, k, cos[..., :7], sin[..., :7])
