"""Attention of packed sequences on Hopper where there is no GPU: on the host, and what is compiled."""

from __future__ import annotations

import importlib.util
import platform
from functools import partial
from typing import Any

import numpy as np
import pytest

from portakern import testing
from portakern.core import registry, targets, tilings
from portakern.core.binder import unchecked
from portakern.core.call import Call

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from portakern.backends.triton import compiler, interpreter  # noqa: E402
from portakern.backends.triton.hopper import _flash  # noqa: E402
from portakern.backends.triton.hopper import varlen_attention as hopper  # noqa: E402
from portakern.backends.triton.launch import recording  # noqa: E402
from portakern.backends.triton.lib import gluon, gluon_sequences, tma  # noqa: E402
from tests import gluon_on_host as host  # noqa: E402

BACKEND = registry.backend("triton")
(FAMILY,) = (f for f in BACKEND.families if f.name == "hopper")
VARIANT = BACKEND.implementation("varlen_attention", FAMILY)
PORTABLE = BACKEND.implementation("varlen_attention", next(f for f in BACKEND.families if f.name == "gpu"))
MODULES = {"varlen_attention_flash_kernel": [_flash, gluon_sequences, gluon]}
compiles = pytest.mark.skipif(
    not (platform.system() == "Linux" and importlib.util.find_spec("triton")), reason="triton is made for Linux alone"
)
FLASH = ["varlen_attention_schedule_kernel", "varlen_attention_flash_kernel"]


def starts_of(lengths: list[int], device: str, first: int = 0) -> Any:
    return torch.tensor(np.cumsum([first, *lengths]), dtype=torch.int32, device=device)


def bound(
    q_lens: list[int], kv_lens: list[int] | None, kv_heads: int, group: int, d: int, dv: int | None = None, *,
    dtype: Any = torch.bfloat16, device: str = "cpu", around: int = 0, seed: int = 0, **options: Any,
) -> Call:  # fmt: skip
    """A call as on a Hopper GPU, whose arrays are the host's or have no memory (meta). around: tokens of no sequence
    before the first and behind the last, which hold NaN."""
    kv_lens, dv, made = q_lens if kv_lens is None else kv_lens, dv or d, torch.Generator().manual_seed(seed)

    def normal(tokens: int, *shape: int) -> Any:
        shape = (tokens + 2 * around, *shape)
        if device == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        x = torch.randn(shape, generator=made)
        x[:around] = x[tokens + around :] = float("nan")
        return x.to(dtype)

    q, k, v = (
        normal(sum(q_lens), kv_heads * group, d), normal(sum(kv_lens), kv_heads, d), normal(sum(kv_lens), kv_heads, dv)
    )  # fmt: skip
    starts = (starts_of(lens, device, around) for lens in (q_lens, kv_lens))
    call: Call = unchecked(registry.find_spec("varlen_attention"), q, k, v, *starts, return_lse=True, **options)
    return call.replace(target=targets.find("sm_90").target, interpret=False)


def tiling_of(call: Call, **named: int) -> Any:
    return tilings.resolve(VARIANT, call, named).tiling


def on_the_host(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: dict[str, Any], ran: list[str]) -> None:
    """What a launch does, on the host: kernels of ``tl`` interpreted, the others by threads."""
    ran.append(kernel.__name__)
    if kernel.__name__ not in MODULES:
        interpreter.run(kernel, grid, *args, **constexprs)
        return
    host.launched(kernel, MODULES[kernel.__name__], grid, args, plan=constexprs["plan"])


def run(call: Call, tiling: Any, ran: list[str] | None = None) -> Any:
    """The outputs of whoever serves the call in the end, on the host."""
    serving, tiling = VARIANT.resolve(call, tiling)
    with recording(partial(on_the_host, ran=[] if ran is None else ran)):
        return serving.run(call, tiling)


def worst_share(call: Call, outputs: Any) -> float:
    arrays = [call.framework.to_numpy(x) for x in outputs if x is not None]
    return max(testing.compare_call(call, arrays).values())


CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]] = {
    "full": (([200, 90, 131], [150, 300, 40], 2, 1, 64), {}, {}),
    "causal": (([200, 150, 300], None, 1, 2, 64), {"is_causal": True}, {}),
    "causal, two consumers": (([200, 257], None, 1, 2, 64), {"is_causal": True}, {"consumers": 2}),
    "in turns": (([257, 140], None, 2, 1, 128), {"is_causal": True}, {"pingpong": 1}),
    "a program for each tile": (([200, 150, 300], None, 1, 2, 64), {"is_causal": True}, {"persistent": 0}),
    "a sequence without keys": (([100, 130, 90], [80, 0, 200], 1, 1, 64), {"is_causal": True}, {}),
    "a sequence without queries": (([130, 0, 190], [80, 300, 200], 2, 1, 64), {}, {}),
    "no sequence has a key but one": (([130, 100, 190], [0, 3, 0], 1, 2, 64), {}, {}),
    "more queries than keys": (([250, 130], [60, 131], 1, 1, 128), {"is_causal": True}, {}),
    "a band": (([300, 130], [290, 400], 1, 2, 72, 40), {"window": (90, 30), "softcap": 5.0}, {}),
    "a band on one side": (([300, 130], [290, 400], 1, 1, 64), {"window": (60, None)}, {}),
    "tokens of no sequence": (([130, 90], [140, 200], 1, 1, 64), {"around": 5, "is_causal": True}, {}),
    "one token more than a tile": (([129, 128, 127], [129, 128, 127], 1, 1, 128), {}, {}),
    "short sequences among one that is long": (([1, 3, 500, 2, 1], [2, 3, 700, 90, 1], 1, 1, 64), {"is_causal": True},
        {}),
    "two pieces": (([200, 150], [150, 310], 2, 1, 96), {}, {}),
    "two pieces, causal": (([300, 70], None, 1, 2, 80), {"is_causal": True, "dtype": torch.float16}, {}),
    "two pieces, o in the memory of q": (([150, 80], None, 1, 1, 192), {}, {}),
    "two pieces, values of one": (([150, 120], [90, 150], 1, 2, 192, 128), {"is_causal": True}, {}),
    "wide": (([150, 90], [200, 150], 1, 1, 256), {"is_causal": True, "dtype": torch.float16}, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(hopper, "processors", lambda device: 2)


@pytest.fixture(autouse=True)
def _heads_in_pieces(monkeypatch):
    monkeypatch.setitem(tma.MEASURED, "forward", tuple(tma.SUMS))


@pytest.mark.parametrize("name", CASES)
def test_every_role_meets_the_bound(name):
    """Barriers that are waited for, buffers that are handed back, rows that are masked: see ``gluon_on_host`` for what
    is not looked at."""
    shape, options, named = CASES[name]
    call, ran = bound(*shape, **options), []
    assert worst_share(call, run(call, tiling_of(call, **named), ran)) <= 1
    assert ran == FLASH
