"""Tilings as data: the shipped tables are right, the layers speak in their order, and no key sees a batch."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import portakern as pk
from portakern.core import registry, tilings
from portakern.core.backend import Implementation
from portakern.core.binder import unchecked
from portakern.core.call import dropped_dims, shape_of
from portakern.core.config import fields_of
from portakern.core.framework import frameworks
from portakern.core.targets import HARDWARE, HOST, Target
from portakern.testing.sizes import within_range

ROOT = Path(__file__).resolve().parents[1]
TABLES = sorted((ROOT / "backends").glob("*/tuned/*.json"))
VARIANTS = [
    (p, v) for p in TABLES for v in sorted({v for ops in json.loads(p.read_text())["ops"].values() for v in ops})
]
OWN = [b.name for b in registry.backends().values() if b.auto and not b.oracle]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of this test's own, and tables that are read anew in it and after it."""
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path))
    tilings.forget()
    yield tmp_path
    tilings.forget()


def implementation(backend: str, op: str, variant: str | None = None) -> Implementation:
    """The variant of an op, or the one for every machine."""
    b = registry.backend(backend)
    if b.unavailable():
        pytest.skip(b.unavailable())
    family = next((f for f in b.declared if f.name == variant), b.families[-1])
    if family.missing_packages():
        pytest.skip(f"variant {variant} needs {family.missing_packages()}")
    found = b.implementation(op, family)
    assert found is not None
    return found


def ops_of(backend: str) -> list[str]:
    b = registry.backend(backend)
    return [op for op in pk.ops() if b.module_of(op, b.families[-1])]


# ------------------------------------------------------------------------------------------------- which row is nearest


def rows(*keys: dict[str, Any]) -> tuple[tilings.Row, ...]:
    return tuple(tilings.Row(str(i), key, {}, "", "") for i, key in enumerate(keys))


@pytest.mark.parametrize(
    ("keys", "key", "wins"),
    [
        ([{"d": 64}, {"d": 128}, {"d": 256}], {"d": 64}, "0"),
        ([{"d": 64}, {"d": 128}, {"d": 256}], {"d": 65}, "1"),
        ([{"d": 256}, {"d": 64}, {"d": 128}], {"d": 1000}, "0"),  # none is large enough: the largest
        ([{}, {"d": 128}], {"d": 100}, "1"),  # no number: no end, so that any that reaches is nearer
        ([{}, {"d": 128}], {"d": 129}, "0"),
        ([{"dtype": "float32", "d": 1}, {"dtype": "float16", "d": 64}], {"dtype": "float16", "d": 1}, "1"),
        ([{"dtype": ["float32", "float64"]}], {"dtype": "float64"}, "0"),
        ([{"dtype": "float32"}], {"dtype": "float16"}, None),
        ([{"d": 64}], {"dtype": "float16", "d": 64}, None),  # a row names every string of the key
        ([{"aligned": False}, {"aligned": True}], {"aligned": True}, "1"),
        ([{"n": 128, "k": 64}, {"n": 64, "k": 128}, {"n": 64, "k": 64}], {"n": 33, "k": 33}, "2"),
        ([{"n": 128, "k": 64}, {"n": 64, "k": 128}], {"n": 65, "k": 100}, "0"),  # n before k
        ([{"d": 64}, {"d": 64}], {"d": 64}, "0"),
        ([], {"d": 64}, None),
    ],
)
def test_the_nearest_row(keys, key, wins):
    found = tilings.nearest(rows(*keys), key)
    assert (found and found.name) == wins


# ----------------------------------------------------------------------------------------------------- shipped tables


@pytest.mark.parametrize("path", TABLES, ids=lambda p: f"{p.parts[-3]}-{p.stem}")
def test_a_shipped_table_is_for_a_target(path):
    table = json.loads(path.read_text())
    assert table["schema"] == tilings.SCHEMA and table["target"] == path.stem
    platforms = {h.platform for h in HARDWARE.values()} | {HOST.platform}
    assert path.stem in HARDWARE or path.stem in platforms, f"{path.stem} is no target of portakern.targets"
    assert all(len(line) <= 120 for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("path", "variant"), VARIANTS, ids=lambda p: f"{p.parts[-3]}-{p.stem}" if isinstance(p, Path) else p
)
def test_a_shipped_table_is_right(path, variant):
    table, backend = json.loads(path.read_text()), path.parts[-3]
    for op in (op for op, variants in table["ops"].items() if variant in variants):
        impl = implementation(backend, op, variant)
        assert impl.fn.__module__.split(".")[-2] == variant
        found, key = tilings.rows(impl, path.stem), impl.key(abstract_call(backend, op, "float32", 1, False))
        assert found and len({r.name for r in found}) == len(found), op
        for row in found:
            tilings.check_row(impl, registry.find_spec(op), row, key)
            assert row.source.strip(), row
            assert not registry.find_spec(op).tiling.keys() - row.tiling.keys(), row


def test_a_wrong_tile_in_a_table_is_found():
    impl, spec = implementation("triton", "matmul"), registry.find_spec("matmul")
    for tiling in ({"block_q": 64}, {"block_m": 65}, {"num_stages": 9}):
        with pytest.raises(ValueError, match="matmul, row 'a': tiling"):
            tilings.check_row(impl, spec, tilings.Row("a", {}, tiling, "", "sm_90"), {})


@pytest.mark.parametrize("backend", OWN)
def test_what_has_a_table_has_a_row_for_every_key_and_target(backend):
    portable = registry.backend(backend).families[-1]
    targets = [h.target for h in HARDWARE.values() if portable.compiles_for(h.target)]
    targets += [*map(Target, portable.platforms), HOST, Target(targets[0].platform, "unheard of")]
    for op in ops_of(backend):
        impl = implementation(backend, op)
        tabled = any(tilings.rows(impl, path.stem) for path in TABLES if path.parts[-3] == backend)
        for target in targets if tabled else []:
            found = tuple(row for name in tilings.tables_for(target) for row in tilings.rows(impl, name))
            heuristic = impl.tiling(abstract_call(backend, op, "float32", 1, False))
            for key in keys_of(impl, backend, target):
                tf32 = key.get("products") != "tf32" or "tf32" in getattr(
                    HARDWARE.get(target.arch), "matrix_dtypes", ()
                )
                assert tilings.nearest(found, key) or heuristic or not tf32, (op, target, key)


def keys_of(impl: Implementation, backend: str, target: Target) -> list[dict[str, Any]]:
    """What the op's calls for a target have for a key but its numbers, in each dtype and with each choice of an
    option, and both values of what is true or false."""
    spec, found = registry.find_spec(impl.op), []
    choices = [{}, *({o.name: v} for o in spec.options if not o.axis_of for v in o.choices or ())]
    for dtype, chosen in itertools.product(spec.dtypes, choices):
        call = abstract_call(backend, impl.op, dtype, 1, False)
        call = call.replace(target=target, interpret=target == HOST, options={**call.options, **chosen})
        key = {n: [True, False] if isinstance(v, bool) else [v] for n, v in impl.key(call).items() if not number(v)}
        found += [dict(zip(key, values, strict=True)) for values in itertools.product(*key.values())]
    return [key for i, key in enumerate(found) if key not in found[:i]]


def number(value: Any) -> bool:
    return not isinstance(value, (str, bool))


# ------------------------------------------------------------------------------------------ what a key may depend on

EXTENTS = {"batch": 3, "q_len": 40, "kv_len": 48, "m": 24, "kv_heads": 2, "group": 3}
"""What no row's bits may depend on: samples, rows, heads. The other extents (n, k, d, dv) are what a row is made of."""


def abstract_call(backend: str, op: str, dtype: str, scale: int, optional: bool) -> Any:
    """A call without values; ``scale`` multiplies what a key must not see."""
    b, spec = registry.backend(backend), registry.find_spec(op)
    framework = frameworks()[b.framework]
    framework.load()
    variadic = {d.factors[0] for a in spec.arrays for d in a.dims if d.variadic}
    dims = {n: EXTENTS.get(n, 32) * (scale if n in EXTENTS else 1) for n in spec.dims}
    dims |= {n: (2 * scale, 3, 64) if n == "shape" else (2 * scale, 3) for n in variadic}
    dims |= dropped_dims(spec, dims, {}) | {o.name: within_range(o, dims[o.name]) for o in spec.extents}
    for rule in spec.require:
        dims |= rule.mends(dims) if rule.mends else {}
    arrays = {}
    for a in spec.arrays:
        if a.optional and not spec.reads_under(a.name, {}, optional):
            continue
        kind = (
            ("float64" if dtype == "float64" else "float32")
            if a.statistic
            else dtype
            if dtype in a.dtypes
            else a.dtypes[0]
        )
        arrays[a.name] = framework.abstract(shape_of(a.dims, dims), kind, None)
    call = unchecked(spec, **arrays, **spec.extent_options(dims))
    return call.replace(target=HOST, interpret=True, concrete=False)


@pytest.mark.parametrize(("backend", "op"), [(b, op) for b in OWN for op in ops_of(b)])
def test_neither_key_nor_tiling_sees_a_batch_or_rows(backend, op):
    impl = implementation(backend, op)
    if not (impl.knobs or registry.find_spec(op).tiling):
        assert not tilings.default(impl, abstract_call(backend, op, "float32", 1, False)).tiling
        return
    assert impl.key is not None, f"{op} on {backend} declares no key"
    for dtype, optional in itertools.product(("bfloat16", "float32"), (False, True)):
        one, many = (abstract_call(backend, op, dtype, scale, optional) for scale in (1, 50))
        assert impl.key(one) == impl.key(many) and list(impl.key(one)) == list(impl.key(many))
        assert tilings.default(impl, one).tiling == tilings.default(impl, many).tiling


def test_variants_for_one_machine_see_rows_only_where_bits_allow_it():
    for backend in OWN:
        b = registry.backend(backend)
        for family in b.families[:-1] if not b.unavailable() else ():
            for op in (op for op in pk.ops() if b.module_of(op, family)):
                impl = b.implementation(op, family)
                calls = [
                    abstract_call(backend, op, "bfloat16", scale, False).replace(
                        target=Target(family.platforms[0], family.targets[0]), interpret=False
                    )
                    for scale in (1, 50)
                ]
                assert impl.same_bits or impl.key is None or impl.key(calls[0]) == impl.key(calls[1]), op


@pytest.mark.parametrize(("backend", "op"), [(b, op) for b in OWN for op in ops_of(b)])
def test_what_is_kept_for_a_key_is_what_would_be_found_again(backend, op):
    impl = implementation(backend, op)
    for dtype, optional in itertools.product(("float16", "bfloat16", "float32"), (False, True)):
        call = abstract_call(backend, op, dtype, 1, optional)
        first = dict(tilings.default(impl, call).tiling)
        assert tilings.default(impl, call).tiling == first
        tilings.forget()
        assert tilings.default(impl, call).tiling == first


# ------------------------------------------------------------------------------------------------------------- layers


def small_attention(**more: Any) -> Any:
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    q = torch.zeros(1, 8, 2, 16)
    return pk.op("attention", backend="triton", **more), (q, q, q)


def write_own(folder: Path, ops: Any, *, schema: int = 1, target: str = "cpu", backend: str = "triton") -> Path:
    path = folder / "tuned" / backend / "cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": schema, "target": target, "ops": ops}))
    tilings.forget()
    return path


def own_row(tiling: dict[str, Any], **key: Any) -> dict[str, Any]:
    return {"name": "mine", "key": {"products": "ieee", **key}, "tiling": tiling, "source": "measured in a test"}


def test_the_shipped_table_speaks():
    attention, arrays = small_attention()
    assert "block_q=64 (shipped cpu: ieee, d to 64), block_kv=32 (shipped cpu" in attention.explain(*arrays)


def test_the_heuristic_speaks_where_there_is_no_table():
    pytest.importorskip("triton", reason="triton is not installed")
    text = pk.op("softmax", backend="triton").explain(np.zeros((3, 5), np.float32))
    assert "tiling: block_rows=8 (heuristic), block_n=128 (heuristic)" in text


def test_what_no_row_and_no_formula_serves_is_refused_in_words():
    mine = pk.Backend("mine", framework="numpy", platforms=["cpu"])
    mine.implements("softmax", key=lambda call: {"dtype": call.dtype})(lambda call, tiling: (call.arrays["x"],))
    words = r"backend 'mine' has no block_rows, block_n for \{'dtype': 'float32'\}; add a row to tuned/cpu.json"
    with pytest.raises(pk.UnsupportedError, match=words):
        pk.op("softmax", backend=mine)(np.ones((2, 3), np.float32))


def test_the_users_cache_comes_before_the_shipped_table_and_may_leave_tiles_to_it(own_cache):
    attention, arrays = small_attention()
    write_own(own_cache, {"attention": {"gpu": [own_row({"block_q": 128}, d=16), own_row({"block_q": 256})]}})
    text = attention.explain(*arrays)
    assert "block_q=128 (cache: mine), block_kv=32 (shipped cpu: ieee, d to 64)" in text


def test_the_users_cache_comes_before_the_heuristic(own_cache):
    pytest.importorskip("triton", reason="triton is not installed")
    row = {
        "name": "mine",
        "key": {"dtype": "float32", "rows": "apart"},
        "tiling": {"block_n": 512},
        "source": "measured in a test",
    }
    write_own(own_cache, {"softmax": {"gpu": [row]}})
    text = pk.op("softmax", backend="triton").explain(np.zeros((3, 5), np.float32))
    assert "block_rows=8 (heuristic), block_n=512 (cache: mine)" in text
    seen: list[Any] = []
    with pk.observe(seen.append):
        pk.op("softmax", backend="triton")(np.zeros((3, 5), np.float32))
    assert seen[0].tiling["block_n"] == 512


def test_the_users_argument_comes_before_all(own_cache):
    write_own(own_cache, {"attention": {"gpu": [own_row({"block_q": 128, "num_warps": 2})]}})
    attention, arrays = small_attention(tiling={"block_q": 32})
    assert "block_q=32 (yours), block_kv=32 (shipped" in attention.explain(*arrays)
    assert "num_warps=2 (cache: mine)" in attention.explain(*arrays)


def test_explain_says_what_was_fitted_to_the_call():
    pytest.importorskip("triton", reason="triton is not installed")
    text = pk.op("matmul", backend="triton").explain(np.zeros((8, 16), np.float32), np.zeros((16, 40), np.float32))
    assert (
        "block_m=128 (shipped cuda: ieee, aligned), block_n=64 (shipped cuda: ieee, aligned, fitted to this call)"
        in text
    )


BROKEN = {
    "it cannot be read": "{",
    "the table is [1]; expected an object": [1],
    "schema is 2; expected 1": {"schema": 2, "target": "cpu", "ops": {}},
    "target is 'sm_90'; expected 'cpu', as the file is called": {"schema": 1, "target": "sm_90", "ops": {}},
    "ops is None; expected an object": {"schema": 1, "target": "cpu"},
    "ops/attention/gpu is 3; expected a list of rows": {"schema": 1, "target": "cpu", "ops": {"attention": {"gpu": 3}}},
}
WRONG_ROWS = {
    "ops/attention/gpu/0/source is None; expected text": {"name": "a", "key": {}, "tiling": {}},
    "ops/attention/gpu/0/tiling/block_q is '64'; expected a whole number": own_row({"block_q": "64"}),
    "ops/attention/gpu/0/key/d is 1.5; expected text, a whole number or a list": own_row({}, d=1.5),
    "ops/attention/gpu/0/from is 'cuda'; expected '<target>/<op>'": {"from": "cuda"},
    "attention, row 'mine': tiling is 'block_m'; expected names among block_q, block_kv": own_row({"block_m": 64}),
    "attention, row 'mine': tiling is 'few_q'; expected names among block_q, block_kv": own_row({"few_q": 16}),
    "attention, row 'mine': key is 'b'; expected names among products, d": own_row({}, b=1),
    "attention, row 'mine': key['d'] is '64'; expected a whole number": own_row({}, d="64"),
    "attention, row 'mine': key is {'d': 64}; expected a value of 'products'": {**own_row({}), "key": {"d": 64}},
    "attention, row 'mine': tiling['block_q'] is 60; expected one of 16, 32": own_row({"block_q": 60}),
}
BROKEN |= {m: {"schema": 1, "target": "cpu", "ops": {"attention": {"gpu": [r]}}} for m, r in WRONG_ROWS.items()}


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_cache_file_is_named_once_and_passed_over(words, own_cache, caplog):
    attention, arrays = small_attention()
    path = write_own(own_cache, {})
    path.write_text(BROKEN[words] if isinstance(BROKEN[words], str) else json.dumps(BROKEN[words]))
    with caplog.at_level(logging.WARNING, "portakern"):
        for _ in range(2):
            tilings.forget()
            assert "block_q=64 (shipped cpu: ieee, d to 64)" in attention.explain(*arrays)
    told = [r.getMessage() for r in caplog.records if "tiling table" in r.getMessage()]
    assert len(told) == 1 and str(path) in told[0] and words in told[0], told


def test_a_broken_shipped_table_is_an_error(tmp_path, monkeypatch):
    attention, arrays = small_attention()
    folder = tmp_path / "shipped"
    folder.mkdir()
    (folder / "cpu.json").write_text('{"schema": 7}')
    monkeypatch.setattr(tilings, "shipped_folder", lambda package: folder)
    with pytest.raises(pk.SpecError, match=r"tiling table .*cpu\.json is invalid: schema is 7; expected 1"):
        attention.explain(*arrays)


# ------------------------------------------------------------------------------------------------- which table is asked


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (Target("cuda", "sm_90"), ["sm_90", "cuda"]),
        (Target("cuda", "sm_103"), ["sm_103", "sm_100", "cuda"]),
        (Target("rocm", "gfx908"), ["gfx908", "gfx90a", "rocm"]),
        (Target("tpu"), ["tpu"]),
        (HOST, ["cpu"]),
        (Target("npu", "one"), ["one", "npu"]),  # the limits of no NVIDIA chip are those of another platform's
    ],
)
def test_the_tables_that_a_target_asks(target, names):
    assert list(tilings.tables_for(target)) == names


def test_tables_of_a_package():
    assert tilings.shipped_folder("portakern.backends.triton.gpu") == ROOT / "portakern/backends/triton/tuned"
    assert tilings.shipped_folder("portakern") == ROOT / "portakern/tuned"
    assert tilings.shipped_folder("") is None and tilings.shipped_folder("no_such_package.gpu") is None


def test_attempt_gives_the_reason_that_resolve_raises():
    pytest.importorskip("triton", reason="triton is not installed")
    impl, call = implementation("triton", "softmax"), abstract_call("triton", "softmax", "float64", 1, False)
    call = call.replace(target=Target("cuda", "sm_90"), interpret=False)
    resolved, reason = tilings.attempt(impl, call, {"block_n": 256})
    assert reason and "float64 is not compiled" in reason and resolved.sources["block_n"] == "yours"
    with pytest.raises(pk.UnsupportedError, match=r"on cuda sm_90: backend 'triton' cannot: float64 is not compiled"):
        tilings.resolve(impl, call, {"block_n": 256})
    with pytest.raises(
        pk.SpecError, match="softmax: tiling has no 'block_q' on triton; expected one of block_rows, block_n"
    ):
        tilings.attempt(impl, call, {"block_q": 64})


# ----------------------------------------------------------------------------- the tilings before there were tables

FROZEN = {
    # attention: (arch, products, d) -> block_q, block_kv, num_warps, num_stages, and what follows
    ("attention", "sm_90", "16-bit"): {64: (128, 128, 8, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2),
                                       inf: (32, 16, 8, 1)},
    ("attention", "sm_86", "16-bit"): {64: (128, 64, 4, 3), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1),
                                       inf: (16, 16, 8, 1)},
    ("attention", "sm_90", "ieee"): {64: (64, 32, 8, 2), 128: (16, 64, 4, 2), inf: (16, 16, 4, 1)},
    ("attention", "sm_120", "ieee"): {64: (64, 32, 8, 2), 128: (16, 64, 4, 1), inf: (16, 16, 4, 1)},
    ("attention", "gfx950", "16-bit"): {128: (128, 64, 8, 1, 16), 256: (128, 32, 8, 1, 16), 512: (64, 16, 8, 1, 16),
                                        inf: (16, 16, 4, 1, 16)},
    ("attention", "gfx942", "tf32"): {64: (128, 64, 8, 2, 16), 128: (128, 32, 8, 2, 16), 256: (32, 32, 4, 2, 16)},
    ("attention", "gfx1201", "16-bit"): {64: (128, 32, 8, 1), 128: (128, 16, 8, 1), 256: (128, 16, 16, 1)},
    ("attention", "", "ieee"): {64: (64, 32, 8, 2), 128: (32, 16, 8, 2), inf: (16, 16, 4, 1)},
    ("attention_vjp", "sm_90", "16-bit"): {128: (64, 64, 4, 2, 64, 64), 256: (32, 64, 8, 2, 128, 32)},
    ("attention_vjp", "sm_100", "16-bit"): {64: (64, 64, 8, 2, 128, 64), 128: (64, 64, 8, 1, 64, 64)},
    ("attention_vjp", "sm_100", "ieee"): {64: (32, 64, 16, 2, 64, 32), 128: (16, 64, 8, 2, 64, 16)},
    ("attention_vjp", "gfx942", "tf32"): {64: (32, 64, 4, 1, 64, 32, 16), 128: (16, 64, 8, 1, 64, 16, 16)},
    ("matmul_vjp", "sm_90", "16-bit"): {inf: (128, 256, 64, 8, 3, 8)},
    ("matmul", "sm_89", "16-bit"): {inf: (128, 128, 32, 4, 4, 8)},
    ("matmul", "gfx90a", "16-bit"): {inf: (128, 128, 32, 4, 2, 8)},
    ("matmul", "gfx1100", "16-bit"): {inf: (128, 128, 32, 8, 2, 8)},
    ("matmul", "", "ieee"): {inf: (128, 128, 16, 8, 3, 8)},
}  # fmt: skip


@pytest.mark.parametrize(("op", "tiles"), [("attention", (128, 64, 8)), ("attention_vjp", (32, 32, 4))])
def test_float32_in_ieee_goes_by_the_matrix_unit_where_that_was_measured(op, tiles):
    impl, call = implementation("triton", op), SimpleNamespace(spec=registry.find_spec(op))

    def found(arch, d, size):
        call.target = Target("cuda", arch)
        return tilings._look_up(impl, call, {"products": "ieee", "d": d, "size": size}).tiling

    for d in (65, 100, 128):
        tiling = found("sm_90", d, 4)
        assert tuple(tiling[n] for n in ("block_q", "block_kv", "num_warps")) == tiles and tiling["threefold"] == 1
    for other in (("sm_90", 64, 4), ("sm_90", 128, 8), ("sm_90", 256, 4), ("sm_100", 128, 4), ("sm_89", 128, 4)):
        assert not found(*other).get("threefold"), other


@pytest.mark.parametrize(("op", "arch", "products"), FROZEN)
def test_tilings_are_as_they_were_measured(op, arch, products):
    impl = implementation("triton", op)
    target = Target("rocm" if arch.startswith("gfx") else "cuda" if arch else "cpu", arch)
    call: Any = SimpleNamespace(target=target, spec=registry.find_spec(op))
    for most, tiles in FROZEN[op, arch, products].items():
        for d in (1, 24, 64, 100, 128, 200, 256, 300, 512, 600):
            if d <= most and not any(d <= less < most for less in FROZEN[op, arch, products]):
                size = {"16-bit": 2, "tf32": 4}.get(products, 8)
                key = {"products": products} | ({"aligned": True} if "matmul" in op else {"d": d, "size": size})
                found = tilings._look_up(impl, call, key).tiling
                assert tuple(v for n, v in found.items() if n not in ("min_split_keys", "block_q_few")) == tiles, d


@pytest.mark.parametrize("name", [n for n, b in pk.backends().items() if not b.oracle])
def test_every_tile_and_knob_has_its_meaning(name):
    """And nothing has one that no kernel takes."""
    b, taken = pk.backends()[name], set()
    for op in pk.ops():
        for family in b.families_with(op):
            try:
                impl = b.implementation(op, family)
            except pk.UnavailableError as e:
                pytest.skip(str(e))
            known = fields_of(impl.config)
            if not impl.is_tiled:
                continue
            assert {*known} == {*pk.op(op).spec.tiling, *impl.knobs} and all(f.meaning for f in known.values()), op
            taken |= {*known}
    if not any(f.missing_packages() for f in b.declared):
        assert {name for config in b.configs for name in fields_of(config)} == taken
