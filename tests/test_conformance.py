"""Every op on every backend, through the same suite that third parties use; on a machine with an accelerator both
compiled and interpreted.
"""

import collections

import numpy as np
import pytest

import portakern as pk
from portakern import inventory, testing
from portakern.core import registry
from portakern.testing.check_options import INTERPRETED, CheckOptions
from portakern.testing.runner import cases_of, subject_of
from tests.ops.record import dtype_for
from tests.places import DEEP, runnable_platforms


def pairs(oracle=True):
    """Each op at each place that has it; ``oracle``: the oracle's as well, which has no tiles."""
    for place in runnable_platforms():
        backend, device = place.values
        for op in pk.ops():
            if place.marks or (
                backend in inventory.backends_with(op) and (oracle or not registry.backend(backend).oracle)
            ):
                yield pytest.param(backend, device, op, marks=place.marks, id=f"{place.id or backend}-{op}")


def compiled_anew(backend, device):
    """Whether a kernel is compiled for each case, as in Pallas's interpreter."""
    return registry.backend(backend).framework == "jax" and device == "cpu"


@pytest.mark.parametrize(("backend", "device", "op"), list(pairs()))
def test_within_bounds(op, backend, device):
    """The deep profile and ``portakern check`` draw more."""
    examples = (6 if compiled_anew(backend, device) else 20) * (10 if DEEP else 1)
    # interpreters run one program after the other, of which the 33rd shows nothing that the 32 before it did not; long
    # rows are those of several_* and test_tpu_rows
    limits = testing.Limits(elements=2**10, programs=32) if device == "cpu" else None
    report = pk.check(op, backend=backend, device=device, max_examples=examples, limits=limits)
    assert report.passed, "\n".join(map(str, report.failures))
    assert report.examples >= examples // 4, report.refused


@pytest.mark.parametrize("op", [op for op in registry.ops() if "kv_heads" in registry.find_spec(op).dims])
@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_interpreters_are_given_no_call_of_thousands_of_heads(op, backend):
    """One program runs after the other there: 64 x 64 heads, which these seeds draw without a limit, took minutes."""
    if why := registry.backend(backend).unavailable():
        pytest.skip(why)
    subject = subject_of(op, backend, device="cpu")
    for seed in (0, 1):
        asked = CheckOptions(max_examples=14, seed=seed, limits=testing.Limits(typical_elements=2**13))
        drawn = [c.bound_alone(subject.spec).dims for c in cases_of(subject, asked) if isinstance(c, testing.Case)]
        assert max(d.get("batch", 1) * d["kv_heads"] for d in drawn) <= INTERPRETED


HUGE_LOGITS = [
    '{"dtype":"float32","shapes":{"q":[1,1,2,2],"k":[1,1,2,2],"v":[1,1,2,1]},"regime":"very_negative","seed":0}',
    (
        '{"dtype":"float32","shapes":{"q":[1,40,2,64],"k":[1,40,2,64],"v":[1,40,2,64]},"regime":"very_negative",'
        '"seed":1,"options":{"scale":-0.3}}'
    ),
    (
        '{"dtype":"float32","shapes":{"q":[1,40,2,64],"k":[1,40,2,64],"v":[1,40,2,64]},"regime":"large_mean",'
        '"seed":2,"options":{"softcap":1e12}}'
    ),
    (
        '{"dtype":"bfloat16","shapes":{"q":[1,70,2,64],"k":[1,70,2,64],"v":[1,70,2,64]},"regime":"large_mean",'
        '"seed":3,"options":{"scale":0.0}}'
    ),
]


@pytest.mark.parametrize("case", HUGE_LOGITS)
@pytest.mark.parametrize(("backend", "device"), list(runnable_platforms()))
def test_weights_stay_below_one_at_huge_logits(backend, device, case):
    """An ulp of a logit of 1e10 is 1024: a product that is rounded for the maximum and fused into the difference gives
    exp(512) for a weight of 1.
    """
    report = testing.replay("attention", case, backend=backend, device=device)
    assert report.passed, report.failures


BEYOND = (
    # Logits may be stored in the dtype of the hidden states, of which the slope's bound knew less than the loss's.
    '{"dtype":"float16","shapes":{"hidden":[3,127],"weight":[25,127],"labels":[3]},"regime":"large_mean","seed":2964,'
    '"options":{"return_slope":true}}',
    # Of the gradient: a logit of 5e10 is off by thousands in float32, and p exp(1250) with this lse, beyond float64, or
    # exp(0).
    '{"dtype":"float32","shapes":{"hidden":[1,33],"weight":[1,33],"labels":[1],"lse":[1],"slope":[1,33],"d_loss":[1]},'
    '"regime":"large_mean","seed":246}',
)


@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize(("backend", "device"), list(runnable_platforms()))
def test_nothing_is_promised_of_what_no_dtype_holds(backend, device, of_gradient):
    spec = registry.find_spec("linear_cross_entropy")
    if backend not in inventory.backends_with(spec.name):
        pytest.skip(f"{backend} has no {spec.name}")
    report = testing.replay(spec.vjp if of_gradient else spec.name, BEYOND[of_gradient], backend=backend, device=device)
    assert report.passed, report.failures


def loops(op):
    """Whether an op has a tile of which an extent may need several."""
    return any(t.of for t in registry.find_spec(op).tiling.values())


def crossing(combinations, tile):
    """Compared cases on the edge that has several tiles of a kind, with a tiling smaller than the extent."""
    return sum(n for cell, n in combinations.items() if f" | several_{tile} | " in cell and "default" not in cell)


@pytest.mark.parametrize(("backend", "device", "op"), [p for p in pairs(oracle=False) if loops(p.values[2])])
def test_several_tiles_are_visited(backend, device, op):
    """Drawn sizes seldom exceed default tiles: without the edges that ask for the smallest, loops over tiles would run
    once in the whole suite. Where a backend refused some of the calls, others are drawn, of a few seeds more.
    """
    if not subject_of(op, backend, device=device).tiles:
        pytest.skip("its kernels have no tiles")
    tiles = [tile for tile, t in registry.find_spec(op).tiling.items() if t.of]
    # each edge with the smallest tiles and with twice those; with some of either where a kernel is compiled anew
    each = 1 if compiled_anew(backend, device) else 2
    asked = {"only_edges": [f"several_{tile}" for tile in tiles], "dtypes": [dtype_for(op, "float32")]}
    compared, missing = collections.Counter(), tiles
    for seed in range(5, 12):
        report = pk.check(op, backend=backend, device=device, max_examples=each * len(tiles), seed=seed, **asked)
        assert report.passed or (report.refused and not report.examples and not report.failures), report.failures
        compared += report.combinations
        missing = [tile for tile in tiles if not crossing(compared, tile)]
        if not missing or not report.refused:
            break
    assert not missing, (compared, report.refused)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_a_factor_beyond_float32_makes_no_nan(backend, gradient):
    """scale / softcap, of dots of 0."""
    if why := registry.backend(backend).unavailable():
        pytest.skip(why)
    x = np.zeros((1, 2, 1, 4), np.float32)
    given = {"q": x, "k": x, "v": x + 1, "scale": 100.0, "softcap": 2.0**-126}
    if gradient:
        o, lse = pk.op("attention", backend="reference")(**given, return_lse=True)
        found = pk.op("attention_vjp", backend=backend)(**given, o=o, lse=lse, d_o=x + 1)
    else:
        found = pk.op("attention", backend=backend)(**given)
    for y in found if isinstance(found, tuple) else (found,):
        assert y is None or np.isfinite(np.asarray(y)).all()
