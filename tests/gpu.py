"""What is asked of a GPU, and can be of a CPU in small: more than 2^31 elements, strides past them, and a tuner that
meets a wrong kernel."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch

import portakern as pk
from portakern import testing
from portakern.spec import Tile
from portakern.tools.bench.suites import requested_cases
from portakern.tools.compile.pool import Pool
from portakern.tools.tune.session import Callbacks, groups_of, tune
from portakern.tools.tune.tuner import SearchPlan


def within_bound(op, outputs, *args, **options):
    """Hold outputs to the bound of the call on ``args``; returns the worst fraction."""
    call = pk.op(op).bind(*args, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return max(testing.compare_call(call, [call.framework.to_numpy(o) for o in outputs if o is not None]).values())


class Gpu:
    """What records are asked with: ``big`` elements are more than an index of 32 bits reaches."""

    def __init__(self, device="cuda", big=2**31, backend=None):
        self.torch, self.device, self.big, self.backend = torch, device, big, backend

    def op(self, name):
        return pk.op(name, backend=self.backend)

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, dtype=dtype, device=self.device)  # no wider copy: these arrays fill the memory

    def rows_to_sample(self, rows, row_length):
        """First, last, both sides of element ``big``, and 64 at random."""
        edge = self.big // row_length
        chosen = {0, rows - 1, edge - 1, edge, *np.random.default_rng(0).integers(0, rows, 64).tolist()}
        return torch.tensor(sorted(r for r in chosen if r < rows), device=self.device)

    def sampled(self, x, picked):
        """Zero but for the rows ``picked``, which are random: cotangents whose sums over all rows are sums over
        these.
        """
        d = torch.zeros_like(x)
        d[picked] = self.normal(len(picked), *x.shape[1:], dtype=x.dtype)
        return d

    def far(self, shape, dtype=torch.bfloat16):
        """A small view whose first stride is half of ``big`` elements, so that its last rows lie past ``big``."""
        memory = torch.empty(self.big // 2 * (shape[0] - 1) + 2**20, dtype=dtype, device=self.device)
        strides, step = [], 1
        for extent in reversed(shape[1:]):
            strides.append(step)
            step *= extent
        view = memory.as_strided(shape, (self.big // 2, *reversed(strides)))
        view.copy_(torch.randn(shape, device=self.device))
        assert (shape[0] - 1) * view.stride(0) >= self.big
        return view


def worst_past_2_31(record, gpu):
    """The worst fraction of the bound in what the record asks of many elements."""
    return max(within_bound(record.op, out, *args, **options) for out, args, options in record.past_2_31(gpu))


def worst_of_far_strides(record, gpu):
    """The same of strides that are far."""
    worst = []
    for args in record.far(gpu):
        outputs = gpu.op(record.op)(*args)
        given = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None]
        worst.append(within_bound(record.op, tuple(given), *args))
    return max(worst)


class Rows(pk.Config):
    rows_at_once: Annotated[int, Tile(32, 128), "rows at once"]


def tuned_beside_a_wrong_kernel(platform, shape):
    """Tune a softmax that is wrong, and fastest, with one of three tiles; what is found. The caller has a cache folder
    and a registry of its own."""
    backend = pk.Backend("seeded", framework="torch", platforms=(platform,))

    def softmax(call, tiling):
        x = call.arrays["x"]
        if tiling["rows_at_once"] == 128:
            return (x.clone(),)
        times = 4 if tiling["rows_at_once"] == 32 else 1
        return ([torch.softmax(x, call.options["axis"]) for _ in range(times)][-1],)

    backend.implements(
        "softmax", key=lambda call: {"dtype": call.dtype}, tiling=lambda call: {"rows_at_once": 32},
        config=Rows,
    )(softmax)  # fmt: skip
    pk.register(backend)
    cases = [*requested_cases("softmax", {"shape": shape}, ["float32"], gradients=False)]
    told = Callbacks(lambda progress: None, lambda finding: None, lambda group, why: None)
    with Pool(1, 10) as pool:
        (finding,), left = tune(groups_of(cases, platform, "seeded", None), SearchPlan(), pool, told)
    assert not left
    return finding
