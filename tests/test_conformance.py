"""Every op on every backend, through the same suite that third parties use; on a machine with an accelerator both compiled and interpreted."""

import pytest

import portakern as pk
from portakern import registry, testing
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


HUGE_LOGITS = [
    '{"dtype":"float32","shapes":{"q":[1,1,2,2],"k":[1,1,2,2],"v":[1,1,2,1]},"regime":"very_negative","seed":0}',
    '{"dtype":"float32","shapes":{"q":[1,40,2,64],"k":[1,40,2,64],"v":[1,40,2,64]},"regime":"very_negative","seed":1,"options":{"scale":-0.3}}',
    '{"dtype":"float32","shapes":{"q":[1,40,2,64],"k":[1,40,2,64],"v":[1,40,2,64]},"regime":"large_mean","seed":2,"options":{"softcap":1e12}}',
    '{"dtype":"bfloat16","shapes":{"q":[1,70,2,64],"k":[1,70,2,64],"v":[1,70,2,64]},"regime":"large_mean","seed":3,"options":{"scale":0.0}}',
]


@pytest.mark.parametrize("case", HUGE_LOGITS)
@pytest.mark.parametrize(("backend", "device"), list(places()))
def test_weights_stay_below_one_at_huge_logits(backend, device, case):
    """An ulp of a logit of 1e10 is 1024: a product that is rounded for the maximum and fused into the difference gives exp(512) for a weight of 1."""
    report = testing.replay("attention", case, backend=backend, device=device)
    assert report.passed, report.failures
