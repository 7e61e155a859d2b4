"""Every op on every backend, through the same suite that third parties use; on a machine with an accelerator both compiled and interpreted."""

import pytest

import portakern as pk
from portakern import registry
from portakern.frameworks import FRAMEWORKS


def places():
    for name, backend in sorted(registry.backends().items()):
        if backend.unavailable():
            yield pytest.param(name, None, marks=pytest.mark.skip(reason=backend.unavailable()))
            continue
        fw = FRAMEWORKS[backend.framework]
        fw.load()
        for platform in dict.fromkeys(fw.target(d).platform for d in fw.devices()):
            if platform == "cpu" or platform in backend.compiles:
                yield pytest.param(name, platform, id=f"{name}-{platform}")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("op", pk.ops())
@pytest.mark.parametrize(("backend", "device"), list(places()))
def test_within_bounds(op, backend, device, seed):
    report = pk.check(op, backend=backend, device=device, max_examples=40, seed=seed)
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= 35, report.refused
