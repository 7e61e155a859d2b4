"""What grouped_matmul promises beside its spec's laws: gradients, transformations and other libraries' conventions need
no line of their own, no program is launched for what the ends are, and no ends reach memory beyond the rows."""

from __future__ import annotations

import numpy as np
import pytest

import portakern as pk

ROWS, GROUPS, K, N = 12, 4, 8, 16
ENDS = np.array([3, 3, 9, 10], np.int32)  # the second group is empty, and two rows belong to none


def drawn(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (ROWS, K), (GROUPS, K, N), (ROWS, N)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)


def wanted(a, b, d_c, ends=ENDS):
    """c, d_a and d_b, group by group."""
    c, d_a, d_b, start = np.zeros((len(a), b.shape[2])), np.zeros(a.shape), np.zeros(b.shape), 0
    for g, end in enumerate(ends):
        rows = slice(start, end)
        c[rows], d_a[rows], d_b[g], start = a[rows] @ b[g], d_c[rows] @ b[g].T, a[rows].T @ d_c[rows], end
    return c, d_a, d_b


def close(found, want):
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-5, atol=1e-5)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_autograd_gives_both_gradients_and_zeros_for_rows_and_matrices_of_nobody(torch, backend):
    pytest.importorskip("triton", reason="triton is not installed")
    a, b, d_c = drawn()
    a[ENDS[-1] :], d_c[ENDS[-1] :] = np.nan, np.inf
    x, w = (torch.tensor(t, requires_grad=True) for t in (a, b))
    c = pk.op("grouped_matmul", backend=backend)(x, w, torch.tensor(ENDS))
    c.backward(torch.tensor(d_c))
    close((c.detach(), x.grad, w.grad), wanted(a, b, d_c))
    assert not c[ENDS[-1] :].any() and not x.grad[ENDS[-1] :].any() and not w.grad[1].any()


def test_weights_that_lie_transposed_are_read_as_they_lie(torch):
    pytest.importorskip("triton", reason="triton is not installed")
    from portakern.backends.triton.capture import Capture, capturing

    a, b, d_c = drawn()
    w = torch.tensor(b).mT.contiguous().mT
    assert w.stride() == (K * N, 1, K)
    seen = Capture()
    with capturing(seen):
        c = pk.op("grouped_matmul", backend="triton")(torch.tensor(a), w, torch.tensor(ENDS))
    assert [launch.kernel.__name__ for launch in seen.launches] == ["grouped_matmul_kernel"]
    assert len(seen.made) == 1  # c: nothing is copied
    close((c,), wanted(a, b, d_c)[:1])


def test_torch_compile_traces_it_whole(torch):
    a, b, d_c = drawn()
    run = pk.op("grouped_matmul", backend="reference")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, w, ends):
        return run(x * 2, w, ends)

    x, w = (torch.tensor(t, requires_grad=True) for t in (a, b))
    c = layer(x, w, torch.tensor(ENDS))
    c.backward(torch.tensor(d_c))
    want = wanted(2 * a, b, d_c)
    close((c.detach(), x.grad / 2, w.grad), want)


def test_jax_differentiates_compiles_and_maps_it():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    a, b, d_c = drawn()
    run = pk.op("grouped_matmul", backend="pallas")

    def loss(x, w, ends):
        return (run(x, w, ends) * d_c).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)))(a, b, ENDS)
    close(gradients, wanted(a, b, d_c)[1:])
    several = np.stack([ENDS, ENDS[::-1] * 0 + 5])
    mapped = jax.vmap(run, (None, None, 0))(*map(jax.numpy.asarray, (a, b, several)))
    close(mapped, [wanted(a, b, d_c, ends)[0] for ends in several])


@pytest.mark.parametrize("ends", [[3, 40, 9, 10], [-7, 3, 9, 12], [9, 3, 3, 12], [5, 2**31 - 1, -(2**31), 4]], ids=str)
def test_ends_that_break_the_rule_reach_no_memory_beyond_the_rows(torch, ends):
    """No kernel may learn them before: the oracle alone refuses such a call."""
    pytest.importorskip("triton", reason="triton is not installed")
    whole = [torch.full((3 * ROWS, width), 7.0) for width in (K, N)]
    a, d_c = (x[ROWS : 2 * ROWS] for x in whole)
    b, at = torch.ones(GROUPS, K, N), torch.tensor(ends, dtype=torch.int32)
    for x in whole:
        x[:ROWS], x[2 * ROWS :] = torch.nan, torch.nan
    found = [pk.op("grouped_matmul", backend="triton")(a, b, at)]
    found += pk.op("grouped_matmul_vjp", backend="triton")(a, b, at, d_c)
    assert not torch.isnan(found[2]).any()  # d_b would be NaN of any row beyond
    with pytest.raises(pk.SpecError, match="group_ends are the rows before which groups end"):
        pk.op("grouped_matmul", backend="reference")(a, b, at)


def test_the_grid_follows_from_shapes_alone(torch):
    """The host never waits for the ends. Calls of one signature repeat the launches of the first, so each has its
    own."""
    pytest.importorskip("triton", reason="triton is not installed")
    from portakern.backends.triton.capture import Capture, capturing

    a, b, d_c = map(torch.tensor, drawn())
    grids = set()
    strided = torch.tensor([12, 0, 12, 0, 12, 0, 12, 0])[::2]
    for ends in (torch.tensor([0, 0, 0, 0]), torch.tensor(ENDS), strided):
        seen = Capture()
        with capturing(seen):
            pk.op("grouped_matmul", backend="triton")(a, b, ends)
            pk.op("grouped_matmul_vjp", backend="triton")(a, b, ends, d_c)
        grids.add(tuple(launch.grid for launch in seen.launches))
    assert len(grids) == 1 and len(*grids) == 3


def test_a_group_has_the_gradients_on_tpus_that_it_has_alone_wherever_it_begins():
    """Rows are summed from the group's first one on, in blocks of 128, and a block's border moves with it."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    rng = np.random.default_rng(0)
    a, d_c = rng.standard_normal((500, 8)).astype(np.float32), rng.standard_normal((500, 16)).astype(np.float32)
    run = jax.jit(pk.op("grouped_matmul_vjp", backend="pallas"))
    b, size = np.zeros((2, 8, 16), np.float32), 300
    alone = run(a[:size], b[:1], np.array([size]), d_c[:size]).d_b[0]
    for before in (1, 37, 128, 200):
        shifted = [np.concatenate([x[size : size + before], x[:size]]) for x in (a, d_c)]
        found = run(shifted[0], b, np.array([before, before + size]), shifted[1]).d_b[1]
        np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("peer", ["torch", "jax"])
def test_peers_take_ends_as_their_own_groups(peer):
    pytest.importorskip(peer, reason=f"{peer} is not installed")
    functional = peer == "torch" and pytest.importorskip("torch.nn.functional")
    if functional and not hasattr(functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    a, b, d_c = drawn()
    arrays = a, b, ENDS
    if peer == "torch":
        import torch

        arrays = tuple(map(torch.tensor, arrays))
        d_c_there = torch.tensor(d_c)
    else:
        import jax.numpy as jnp

        arrays = tuple(map(jnp.asarray, arrays))
        d_c_there = jnp.asarray(d_c)
    c = pk.op("grouped_matmul", backend=peer)(*arrays)
    close((c, *pk.op("grouped_matmul_vjp", backend=peer)(*arrays, d_c_there)), wanted(a, b, d_c))


def test_torchs_peer_says_what_it_does_not_take(torch):
    a, b, ends = (torch.zeros(4, 8), torch.zeros(2, 8, 6), torch.tensor([1, 4]))
    with pytest.raises(pk.UnsupportedError, match="torch wants n to be a multiple of 4, not 6: pad a and b"):
        pk.op("grouped_matmul", backend="torch")(a, b, ends)
