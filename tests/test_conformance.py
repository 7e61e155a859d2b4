"""Every op on every backend, through the same suite that third parties use."""

import logging

import pytest

import portakern as pk
from portakern import registry

logging.getLogger("portakern").setLevel(logging.ERROR)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("op", pk.ops())
@pytest.mark.parametrize("backend", sorted(registry.backends()))
def test_within_bounds(op, backend, seed):
    missing = registry.backend(backend).unavailable()
    if missing:
        pytest.skip(missing)
    report = pk.check(op, backend=backend, max_examples=40, seed=seed)
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= 25, report.refused
