"""What convolutions have in the words of others: the arguments of the package causal_conv1d."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import portakern as pk  # noqa: E402
import portakern.torch as twins  # noqa: E402
from portakern.errors import SpecError, UnsupportedError  # noqa: E402

BACKENDS = ("reference", "triton")


def of_package(x, weight, bias, state, activation):
    """The package's function in PyTorch's own words."""
    whole = torch.cat((state, x), -1)
    y = torch.nn.functional.conv1d(whole, weight[:, None], bias, groups=len(weight))
    return (torch.nn.functional.silu(y) if activation else y), whole[..., x.shape[-1] :]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_the_package_is_called_with_its_own_arguments(backend, activation):
    x, weight, bias, state = (torch.randn(*shape) for shape in ((2, 5, 9), (5, 4), (5,), (2, 5, 3)))
    leaves = [t.requires_grad_() for t in (x, weight, bias, state)]
    ours = twins.causal_conv1d(x, weight, bias, None, state, True, activation=activation, backend=backend)
    theirs = of_package(x, weight, bias, state, activation)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)
    d_y, d_state = torch.randn_like(ours[0]), torch.randn_like(ours[1])
    found, expected = (torch.autograd.grad(out, leaves, (d_y, d_state)) for out in (ours, theirs))
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_states_and_segments_compile():
    """Code that calls without them are compiled without."""
    x, states = torch.empty(2, 64, 64, device="meta"), torch.empty(2, 64, 3, device="meta")
    weight, bias = torch.empty(64, 4, device="meta"), torch.empty(64, device="meta")
    ids = torch.empty(2, 64, dtype=torch.int32, device="meta")
    forward = pk.op("causal_conv1d", backend="triton")
    gradient = pk.op(forward.spec.vjp, backend="triton")
    for built in (
        forward.lower(x, weight, bias, states, ids, return_final_state=True, target="sm_90"),
        gradient.lower(x, weight, x, bias, states, ids, states, target="sm_90"),
    ):
        assert built.ok, built.reason


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_of_a_row_do_not_see_each_other(backend):
    x, weight = torch.randn(1, 3, 10), torch.randn(3, 3)
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    packed = twins.causal_conv1d(x, weight, seq_idx=ids, backend=backend)
    alone = [twins.causal_conv1d(part, weight, backend=backend) for part in (x[..., :4], x[..., 4:])]
    assert torch.equal(packed, torch.cat(alone, -1))


def test_what_the_twin_refuses_is_said_in_its_own_words():
    x, weight = torch.randn(1, 3, 10), torch.randn(3, 3)
    with pytest.raises(UnsupportedError, match="final_states_out is given; expected None"):
        twins.causal_conv1d(x, weight, final_states_out=torch.empty(1, 3, 2))
    with pytest.raises(SpecError, match="activation is 'gelu'; expected None, 'silu' or 'swish'"):
        twins.causal_conv1d(x, weight, activation="gelu")
    with pytest.raises(SpecError, match="x has 2 axes; expected 3"):
        twins.causal_conv1d(x[0], weight)
    with pytest.raises(SpecError, match=r"weight axis 0 \(channels\) is 4; expected 3"):
        twins.causal_conv1d(x, torch.randn(4, 3))
