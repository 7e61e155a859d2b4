"""The house is laid out anew: no bit of a result and no choice of a kernel changes meanwhile."""

from pathlib import Path

import pytest

from tests import freeze

OPS = [*freeze.kept("choices")]


@pytest.mark.parametrize("op", OPS)
def test_the_kernel_and_tiles_of_every_sample_are_those_of_before(op):
    now, before = freeze.choices(op), freeze.kept("choices")[op]
    here = {key: now[key] for key in now if key in before}
    assert here == {key: before[key] for key in here}


@pytest.mark.parametrize("backend", ["reference", "triton", "pallas"])
@pytest.mark.parametrize("op", OPS)
def test_bits_are_those_of_before(op, backend):
    before = freeze.kept(f"bits-{backend}")
    if not Path("/proc/cpuinfo").exists() or freeze.here(backend) != before["here"]:
        pytest.skip(f"bits were kept on {before['here']}")
    few = 1 if backend == "pallas" else 12
    assert not freeze.differ(op, before[op], freeze.bits(op, backend, few))
