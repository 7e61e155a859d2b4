"""Random calls, right and wrong, on the oracle path: the project's own errors or right results, and nothing else.

Each call starts right. Then its dress may change (the framework, the memory layout, the spelling of an option,
arguments by keyword), which must not change a bit of the result; or some arguments are replaced by values from a pool
of nasty ones, after which the call is refused with one of the three error classes, or its result is within its bound.

    python benchmarks/fuzz.py [--calls 100000] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import portakern as pk
from portakern import results, testing
from portakern.core.framework import frameworks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, this folder alone is on the path
from tests.ops import forward_records

OURS = (pk.SpecError, pk.UnsupportedError, pk.UnavailableError)
DTYPES = ("float32", "float16", "bfloat16", "float64")
SLOW = 10.0  # seconds: a call on arrays this small that takes longer counts as a hang


@dataclass
class Result:
    """What happened: counts by verdict, the worst share of a bound, the slowest call in seconds, and every call that
    broke the rules.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    worst: float = 0.0
    slowest: float = 0.0
    broken: list[str] = field(default_factory=list)


@dataclass
class Random:
    rng: np.random.Generator

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def extent(self) -> int:
        return int(self.pick((0, 1, 1, 2, 2, 3, 3, 4, 5, 7)))

    def array(self, dtype: str, *shape: int) -> np.ndarray:
        x = self.rng.standard_normal(shape)
        if self.chance(0.1) and x.size:
            x.reshape(-1)[int(self.rng.integers(x.size))] = self.pick((np.nan, np.inf, -np.inf, 1e30, 0.0))
        with np.errstate(over="ignore"):
            return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


FORWARD = forward_records()


def right_call(r: Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(op, arrays by name, options): a call that the spec allows."""
    record = r.pick(FORWARD)
    return record.op, *record.fuzzed(r, r.pick(DTYPES))


def nasty_arrays() -> list[Callable[[], Any]]:
    """Makers of values that are no array, or no array that any op takes."""
    z = np.zeros((2, 3), np.float32)
    found: list[Callable[[], Any]] = [
        lambda: None, lambda: 3, lambda: 1.5, lambda: "x", lambda: [1.0], dict, lambda: object(),
        lambda: np.float32(1), lambda: z, lambda: z[..., ::-1], lambda: z[:0], lambda: z[0, 0, ...],
        lambda: z.astype(complex), lambda: z.astype(object), lambda: z.astype(">f4"), lambda: z.astype(bool),
        lambda: z > 0, lambda: z.astype(np.int32), lambda: z.astype(np.uint8),
        lambda: z.astype(ml_dtypes.float8_e4m3fn), lambda: z.astype(np.longdouble), lambda: z.astype("M8[s]"),
        lambda: np.zeros(3, [("a", "f4")]), lambda: np.ma.masked_equal(z, 0), lambda: np.array("text"),
        lambda: z.view(type("Sub", (np.ndarray,), {})), lambda: np,
    ]  # fmt: skip
    try:
        import torch

        t = torch.zeros(2, 3)
        found += [
            lambda: t,
            t.to_sparse,
            lambda: t.to("meta"),
            lambda: t.clone().requires_grad_(),
            lambda: t.to(torch.complex64).conj().imag,
            t.bool,
            t.int,
            lambda: t.to(torch.float8_e5m2),
            lambda: t.T,
            lambda: t[0, 0],
            lambda: torch.nn.parameter.UninitializedParameter(),
        ]
    except ImportError:
        pass
    try:
        import jax

        def deleted() -> Any:
            x = jax.numpy.zeros((2, 3))
            x.delete()
            return x

        j = frameworks()["jax"].from_numpy(z, None)
        found += [
            lambda: j,
            deleted,
            lambda: jax.random.key(0),
            lambda: jax.ShapeDtypeStruct((2, 3), np.float32),
            lambda: j.astype(np.int8),
            lambda: j[0, 0],
        ]
    except ImportError:
        pass
    return found


NASTY_OPTIONS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 10**30, -(10**400), 0.0, -0.0, 1.5, 1e300, 5e-324, float("nan"), float("inf"), 1j,
    "", "ieee", "tf32", "float32", "int8", b"x", (), (1,), (1, 2), (None, None), [0, 0], (-1, 0), (1.0, 2), (True, 0),
    ((1,), 2), {}, {"a": 1}, object(), object, Fraction(1, 3), np.int8(1), np.bool_(True), np.float16(0.5),
    np.float64("nan"), np.array(1), np.array([1, 2]), np.dtype("float16"), np.dtype(">f4"), np.float32,
    ml_dtypes.bfloat16, range(2), slice(1), len,
)  # fmt: skip
NASTY_TILINGS: tuple[Any, ...] = (
    {},
    None,
    {"block_m": 16},
    {"block_n": 128},
    {"block_q": 100},
    {"block_rows": True},
    {3: 4},
    [1],
    "x",
    7,
    {"block_kv": None},
)
NASTY_BACKENDS: tuple[Any, ...] = (None, "reference", "nobody", "", 3, object())


def dress(r: Random, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same call, spelled otherwise."""
    kind = r.pick([k for k in frameworks() if k in sys.modules or k == "numpy"])
    if kind == "jax" and any(a.dtype.itemsize == 8 for a in arrays.values()):
        kind = "numpy"
    new = {}
    for n, a in arrays.items():
        layout = r.pick(("as it is", "transposed", "strided", "reversed"))
        if layout == "transposed" and a.ndim:  # NumPy makes an axis where there is none
            a = np.ascontiguousarray(a.T).T
        elif layout == "strided" and a.ndim:
            a = np.repeat(a, 2, -1)[..., ::2]
        elif layout == "reversed" and a.ndim:
            a = np.ascontiguousarray(a[::-1])[::-1]
        new[n] = frameworks()[kind].from_numpy(a, None)
    spelled = {}
    for n, v in options.items():
        if isinstance(v, bool):
            v = r.pick((v, np.bool_(v)))
        elif isinstance(v, int):
            v = r.pick((v, np.int64(v), np.array(v)))
        elif isinstance(v, float):
            v = r.pick((v, np.float64(v)))
        elif isinstance(v, tuple):
            v = r.pick((v, list(v)))
        spelled[n] = v
    return new, spelled


def spoil(
    r: Random, pool: list[Callable[[], Any]], arrays: dict[str, Any], options: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """(positional arguments, keywords, arguments of pk.op) with one to three of them replaced, dropped or added."""
    arrays, options, how = dict(arrays), dict(options), {}
    for _ in range(int(r.rng.integers(1, 4))):
        what = r.pick(
            ("array", "array", "array", "option", "option", "option", "drop", "keyword", "tiling", "backend", "cut")
        )
        if what == "array":
            arrays[r.pick(list(arrays) or ["x"])] = r.pick(pool)()
        elif what == "option":
            options[r.pick(list(options) or ["axis"])] = r.pick(NASTY_OPTIONS)
        elif what == "drop" and arrays:
            del arrays[r.pick(list(arrays))]
        elif what == "keyword":
            options[r.pick(("dim", "self", "x", "q", "a b", "", "axis", "scale"))] = r.pick(NASTY_OPTIONS)
        elif what == "tiling":
            how["tiling"] = r.pick(NASTY_TILINGS)
        elif what == "backend":
            how["backend"] = r.pick(NASTY_BACKENDS)
        elif what == "cut":
            n = r.pick(list(arrays) or ["x"])
            if isinstance(arrays.get(n), np.ndarray) and arrays[n].ndim:
                arrays[n] = arrays[n][..., : r.extent()]
    n = int(r.rng.integers(len(arrays) + 1))
    return list(arrays.values())[:n], {**dict(list(arrays.items())[n:]), **options}, how


def bits(out: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """The outputs to the bit, NaN alike; float64 cut to float32, because the oracle's own last bits depend on the order
    in which BLAS adds.
    """
    found = []
    for o in out if isinstance(out, tuple) else (out,):
        host = next(f for f in frameworks().values() if f.owns(o)).to_numpy(o)
        with np.errstate(over="ignore"):
            single = host.astype(np.float32)  # exact but for float64
        found.append((host.dtype.name, host.shape, np.where(np.isnan(single), np.float32("nan"), single).tobytes()))
    return found


def fuzz(calls: int, seed: int = 0, progress: Callable[[int], None] | None = None) -> Result:
    """Make that many calls."""
    result, pool = Result(), nasty_arrays()
    for i in range(calls):
        r = Random(np.random.default_rng([seed, i]))
        start = time.perf_counter()
        with testing.audit() as seen:
            try:
                verdict = one(r, pool)
            except OURS as e:
                verdict = type(e).__name__
            except Exception as e:
                verdict = "crashed"
                result.broken.append(f"call {i} of seed {seed} raised {type(e).__name__}: {e}")
        took = time.perf_counter() - start
        result.verdicts[verdict] += 1
        result.slowest = max(result.slowest, took)
        result.worst = max(result.worst, *seen.worst.values(), 0.0)
        result.broken += [f"call {i} of seed {seed}: {text}" for text in seen.broken]
        if verdict == "changed" or took > SLOW:
            result.broken.append(f"call {i} of seed {seed} {verdict}, after {took:.1f} s")
        if progress and i % 1000 == 0:
            progress(i)
    return result


def one(r: Random, pool: list[Callable[[], Any]]) -> str:
    name, arrays, options = right_call(r)
    if r.chance(0.3):
        want = bits(pk.op(name)(**arrays, **options))
        dressed, spelled = dress(r, arrays, options)
        return "dressed" if bits(pk.op(name)(**dressed, **spelled)) == want else "changed"
    args, keywords, how = spoil(r, pool, arrays, options)
    pk.op(name, **how)(*args, **keywords)
    return "accepted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("portakern").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for fw in frameworks().values():
        try:
            fw.load()
        except pk.UnavailableError as e:
            print(e)
    start = time.perf_counter()
    result = fuzz(args.calls, args.seed, progress=lambda i: print(f"\r{i} of {args.calls}", end="", file=sys.stderr))
    seconds = time.perf_counter() - start
    verdicts = ", ".join(f"{n} {v}" for v, n in result.verdicts.most_common())
    print(
        f"\n{args.calls} calls in {seconds:.0f} s: {verdicts}; worst share of a bound {result.worst:.2f}; "
        f"slowest call {result.slowest:.2f} s; broken {len(result.broken)}"
    )
    for text in result.broken[:20]:
        print(text)
    if args.json:
        rows = [{"verdict": v, "calls": n} for v, n in result.verdicts.most_common()]
        data = results.record(
            "fuzz",
            rows,
            command=results.command_line("python benchmarks/fuzz.py", args.json),
            device=results.HOST_CPU,
            calls=args.calls,
            seed=args.seed,
            seconds=round(seconds, 1),
            worst=result.worst,
            slowest_seconds=round(result.slowest, 2),
            broken=result.broken,
        )
        results.write(args.json, data)
    sys.exit(bool(result.broken))


if __name__ == "__main__":
    main()
