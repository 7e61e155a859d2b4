"""Compiling for hardware that is not here: the table of targets, what is read back, processes that die, the cache, the
command line.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import json
import platform
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import cli, results
from portakern.core import registry, targets
from portakern.core.machine_code import Compiled, Kernel
from portakern.errors import SpecError, UnsupportedError
from portakern.tools.bench import suites
from portakern.tools.compile import abstract, cache, pool
from portakern.tools.compile import matrix as compiling
from portakern.tools.compile.build import Build
from portakern.tools.compile.worker import one_line, reason
from tests.ops import record, records
from tests.ops.record import dtype_for

LINUX = platform.system() == "Linux"
has_triton = pytest.mark.skipif(
    not (LINUX and importlib.util.find_spec("triton") and importlib.util.find_spec("torch")),
    reason="triton, which is made for Linux alone, or torch is not installed",
)
has_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="jax is not installed")
has_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu, the TPU compiler that the tpu extra brings, is not installed",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def compilers():
    """Processes that compile, one a backend and target: each imports torch and triton when it starts, or jax."""
    found = {}
    yield found
    for worker in found.values():
        worker.close()


@pytest.fixture
def kept(compilers, monkeypatch):
    """``lower`` asks a process that stays for the next test, in place of one of its own for each call."""

    def run(jobs, processes, timeout):
        for job in jobs:
            backend, target, environment = pool.environment_of(job)
            key = (backend, target, *sorted(environment.items()))
            yield job, compilers.setdefault(key, pool._CompilerWorker()).serve(job, timeout)

    monkeypatch.setattr(pool, "run", run)


# ------------------------------------------------------------------------------------------------- the table of targets
@pytest.mark.parametrize("name", targets.HARDWARE)
def test_every_figure_has_a_source_and_every_absence_a_note(name):
    h = targets.find(name)
    for figure, value in h.figures.items():
        assert (h.notes if value is None else h.sources).get(figure), f"{name}: {figure} is {value} without a word"
    assert {"float32", "bfloat16"} <= set(h.flops) and h.matrix and h.lanes and h.bandwidth


def test_targets_that_the_table_lacks_fall_to_their_family():
    assert (
        targets.family("sm_90").name == "sm_90"
        and targets.family("sm_103").name == "sm_100"
        and targets.family("7x").name == "v7x"
    )
    assert (
        targets.family("sm_75").name == "sm_86"
        and targets.family("gfx906").name == "gfx90a"
        and targets.family("gfx1030").name == "gfx1100"
    )
    assert targets.find("sm_121").name == "sm_120"
    with pytest.raises(SpecError, match="target 'sm_12' is unknown; expected one of sm_80"):
        targets.find("sm_12")


@has_jax
@pytest.mark.parametrize("name", [n for n, h in targets.HARDWARE.items() if h.platform == "tpu"])
def test_tpu_figures_are_jax_s(name):
    from jax._src.pallas.mosaic import tpu_info

    chip = tpu_info.ChipVersion(name.removeprefix("v") if name == "v7x" else name)
    theirs, h = tpu_info.get_tpu_info_for_chip(chip, 1), targets.find(name)
    assert (theirs.vmem_capacity_bytes, theirs.smem_capacity_bytes, theirs.num_lanes, theirs.num_sublanes) == (
        *h.on_chip.values(),
        h.lanes,
        h.sublanes,
    )
    assert chip.num_physical_tensor_cores_per_chip == h.cores
    assert h.flops["bfloat16"] == pytest.approx(theirs.bf16_ops_per_second * h.cores, rel=0.01)
    assert h.bandwidth == pytest.approx(theirs.mem_bw_bytes_per_second * h.cores, rel=0.13)  # v5p: 2460 and 2765 GB/s


# ---------------------------------------------------------------------------------------------------------- the verdict
def test_what_overflows_the_chip_is_a_failure_with_its_limit():
    built = Build("op", "forward", "bfloat16", "sm_86", "mine")
    built.judge(
        Compiled(
            [Kernel("small", on_chip={"shared": 1024}, threads=256), Kernel("large", on_chip={"shared": 164 * 1024})]
        ),
        targets.find("sm_86"),
    )
    assert not built.ok and built.reason == "large takes 167936 bytes of shared, and sm_86 has 101376"
    built.judge(Compiled([Kernel("large", on_chip={"shared": 99 * 1024}, code_bytes=7)]), targets.find("sm_86"))
    assert built.ok and built.reason is None and built.code_bytes == 7
    assert "2048 threads" in (Kernel("wide", threads=2048).over(targets.find("gfx942")) or "")
    assert Build.from_dict(json.loads(json.dumps(built.to_dict()))).kernels[0].on_chip == {"shared": 99 * 1024}


def test_a_reason_names_what_went_wrong_where_the_compiler_was():
    def raised(where, cause):
        try:
            raise RuntimeError(where) from cause
        except RuntimeError as e:
            return e

    inner = AttributeError("'int' object has no attribute 'type'")
    calls = raised("at 30:8:\n    attend(turn)\n    ^", raised("at 36:32:\n  zeros([64])\n  ^", inner))
    assert reason(calls) == "RuntimeError: at 30:8: AttributeError: 'int' object has no attribute 'type'"
    assert reason(inner) == "AttributeError: 'int' object has no attribute 'type'"
    assert (
        reason(raised("ptxas: AttributeError: gone", AttributeError("gone")))
        == "RuntimeError: ptxas: AttributeError: gone"
    )


def test_reasons_are_one_line():
    assert one_line("") == "it gave no reason"
    assert (
        one_line("\nwhile compiling:\n  in f\nerror: out of shared memory\n  ^\n")
        == "while compiling: error: out of shared memory"
    )
    assert len(one_line("x" * 1000)) == 300


# ------------------------------------------------------------------------------------------------- calls without arrays
@pytest.mark.parametrize("name", registry.ops())
def test_every_op_has_a_typical_call(name):
    form = abstract.typical_signature(registry.find_spec(name), dtype_for(name, "bfloat16"))
    assert max(e for shape, _, _ in form["arrays"].values() for e in shape) == 4096
    assert all(o in {o.name for o in registry.find_spec(name).options} for o in form["options"])


def test_a_forward_op_is_compiled_with_what_its_gradient_reads_too():
    """The outputs that nobody sees have code of their own, which may be what fails to compile."""
    spec = registry.find_spec("attention")
    typical = abstract.typical_signature(spec, "bfloat16")
    training = abstract.training_signature(spec, typical)
    assert training == typical | {"wants": ["o", "lse", "lse_low"]}
    assert [abstract.direction(spec, form) for form in (typical, training)] == ["forward", "training"]
    jobs = compiling.jobs_for([spec.name], ["sm_90"], ["bfloat16"], "triton", variant="gpu")
    assert [job.signature["wants"] for job in jobs] == [None, training["wants"]]
    assert abstract.training_signature(registry.find_spec("softmax"), typical) is None


def test_a_gradient_op_takes_its_forward_s_call():
    form = abstract.typical_signature(registry.find_spec("attention_vjp"), "float32")
    assert (
        form["options"] == {"is_causal": True}
        and form["arrays"]["lse"] == [[4, 16, 4096], "float32", None]
        and "bias" not in form["arrays"]
    )


def test_a_typical_call_keeps_what_it_has_besides_its_extents():
    spec = registry.find_spec("layernorm")
    form = abstract.typical_signature(spec, "bfloat16", {"batch": (5,), "n": 7})
    assert {*form["arrays"]} == {"x", "weight", "bias"} and form["arrays"]["weight"][0] == [7]
    assert (
        "weight" not in abstract.typical_signature(spec, "bfloat16", {"batch": (5,), "n": 7, "weight": False})["arrays"]
    )
    causal = {"batch": 1, "q_len": 8, "kv_heads": 1, "group": 1, "d": 16, "kv_len": 8, "dv": 16}
    assert abstract.typical_signature(registry.find_spec("attention"), "float32", causal)["options"] == {
        "is_causal": True
    }
    assert abstract.named_signature(registry.find_spec("attention"), "float32", causal)["options"] == {}


def test_a_typical_call_has_what_its_options_ask_for():
    spec = registry.find_spec("linear_cross_entropy_vjp")
    assert "logit_gradients" not in abstract.typical_signature(spec, "bfloat16")["arrays"]
    keeping = abstract.typical_signature(spec, "bfloat16", {"keep_logit_gradients": True})
    assert keeping["arrays"]["logit_gradients"][0] == [4096, 4096]


def test_no_typical_call_is_said():
    spec = registry.find_spec("softmax")
    bare = type(spec)(**{**{n: getattr(spec, n) for n in spec.__dataclass_fields__}, "typical": {}})
    with pytest.raises(SpecError, match="declares no typical call; add typical="):
        abstract.typical_signature(bare, "float32")


@pytest.mark.parametrize(
    ("op", "shape", "expected"),
    [
        pytest.param("softmax", "shape=33", [33]),
        pytest.param("layernorm", "batch=33", [33, 4096]),
        pytest.param("layernorm_vjp", "batch=2x3,n=8", [2, 3, 8]),
        pytest.param("layernorm", "n=3x3", "layernorm: n is 3x3; expected a whole number of at least 1"),
        pytest.param("layernorm", "batch=8x0", "layernorm: batch is 8x0; expected whole numbers of at least 1"),
        pytest.param("matmul", "m=-3", "matmul: m is -3; expected a whole number of at least 1"),
        pytest.param("matmul", "m=true", "matmul: m is True; expected"),
        pytest.param("matmul", "m=4k", "matmul: m is 4k; expected"),
        pytest.param("matmul", "m=none", "matmul: no extent for m; pass one, e.g. m=64"),
    ],
)
def test_a_shape_that_a_user_gives_is_one_or_is_refused_in_words(op, shape, expected):
    """By whichever command: one that compiles, and those that time calls."""
    spec, given = registry.find_spec(op), suites.parse_shape(shape)
    timed = functools.partial(suites.requested_cases, op, given, ["float32"], gradients=False)
    for made in (lambda: abstract.typical_signature(spec, "float32", given), lambda: next(timed()).signature):
        if isinstance(expected, list):
            assert made()["arrays"]["x"][0] == expected
        else:
            with pytest.raises(SpecError) as refused:
                made()
            assert str(refused.value).startswith(expected)


# ------------------------------------------------------------------------------------------------------- real compilers
@has_triton
@pytest.mark.parametrize("target, matrix", [("sm_90", "HGMMA"), ("gfx942", "v_mfma")])
def test_lower_gives_machine_code_and_what_it_takes(target, matrix, kept):
    a = np.zeros((512, 256), np.float16)
    built = pk.op("matmul").lower(a, a.T, target=target)
    assert built.ok, built.reason
    (kernel,) = built.kernels
    h = targets.find(target)
    assert kernel.name == "matmul_kernel" and 0 < kernel.registers <= h.thread_registers and 0 < kernel.occupancy <= 1
    assert sum(n for name, n in kernel.matrix.items() if matrix in name) and matrix.lower() in built.assembly.lower()
    assert 0 < next(iter(kernel.on_chip.values())) <= next(iter(h.on_chip.values())) and built.code_bytes > 1000
    assert "registers a thread" in str(built) and "block_m=" in str(built)


@has_triton
@pytest.mark.parametrize("d, dv, columns", [(19, 13, 32), (5, 5, 16), (128, 16, 64), (5, 40, 64)])
def test_keys_and_values_take_tiles_of_one_layout_on_hopper(d, dv, columns, kept):
    q, k, v = (np.zeros((1, 300, 2, n), np.float16) for n in (d, d, dv))
    built = pk.op("attention").lower(q, k, v, target="sm_90")
    widths = {name.split(".")[1].split("x")[1] for name in built.kernels[0].matrix}
    assert built.ok and widths == {str(built.tiling["block_kv"]), str(columns)}, str(built)


OF_ROWS = [r for r in records().values() if r.rows]


@has_triton
@pytest.mark.parametrize(
    "r, target",
    [*((r, "sm_90") for r in OF_ROWS[::4]), (record("layernorm"), "gfx942")],
    ids=lambda x: getattr(x, "op", x),
)
def test_rows_of_an_odd_number_of_16_bytes_are_moved_16_bytes_at_a_time(r, target, kept):
    narrow = {"sm_90": r"(LDG|STG)\.E\.U16", "gfx942": r"buffer_(load_ushort|store_short)"}[target]
    for n, scalar in ((72, False), (73, True)):
        arrays = {
            "x": np.zeros((64, n), np.float16),
            "weight": np.zeros(n, np.float32),
            "bias": np.zeros(n, np.float32),
        }
        built = pk.op(r.op, backend="triton").lower(*(arrays[name] for name in r.rows), target=target)
        assert built.ok and bool(re.search(narrow, built.assembly)) == scalar, str(built)


@has_triton
def test_a_tile_that_registers_cannot_hold_is_refused_before_minutes_of_compiling(kept):
    q, lse = np.zeros((1, 300, 2, 9), np.float32), np.zeros((1, 2, 300), np.float32)
    op = pk.op("attention_vjp", backend="triton", tiling={"dq_block_q": 128, "dq_block_kv": 128, "num_warps": 2})
    built = op.lower(q, q, q, q, lse, q, target="sm_90")
    assert (
        not built.ok
        and "needs about 69632 registers and 2 warps of sm_90 have 16320" in built.reason
        and "more warps" in built.reason
    )


@has_triton
def test_numbers_of_a_table_that_registers_cannot_hold_are_refused(kept):
    arrays = np.zeros((5, 9), np.float32), np.zeros(7, np.int32), np.zeros((7, 9), np.float32)
    forward = pk.op("embedding").spec
    for name, number in ((forward.name, 2), (forward.vjp, 3)):
        op = pk.op(name, backend="triton", tiling={"block_n": 16384, "num_warps": 1})
        built = op.lower(*arrays[:number], target="sm_90")
        assert not built.ok and "a tile of 16384 elements is over 128 registers a thread" in built.reason


def stored_values(ptx, names):
    """array -> what is stored there, as the operations that it comes from, arrays that are loaded the first;
    ``names``: of the kernel's parameters. For kernels without loops, of one element a thread; a register that is
    written on several branches stands for all that is written to it.
    """
    made, stores = collections.defaultdict(list), []
    for op, operands in re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][\w.]*)\s+(.*);", ptx, re.MULTILINE):
        first, *others = re.sub(r"[\[\]{} ]", "", operands).split(",")
        if op.startswith("st.global"):
            stores.append((first, *others))
        else:
            made[first].append((op, others))

    @functools.cache
    def pointers(x):
        param = re.search(r"_param_(\d+)$", x)
        deeper = (pointers(re.sub(r"\+\d+$", "", y)) for _, operands in made[x] for y in operands)
        return frozenset().union({names[int(param[1])]} & ARRAYS if param else (), *deeper)

    def array(address):
        (name,) = pointers(re.sub(r"\+\d+$", "", address))
        return name

    def listing(value):
        numbers, lines = {}, []

        def visit(x):
            if x in made and x not in numbers:
                numbers[x] = f"v{len(numbers)}"  # before its operands: a branch may write over what it reads
                ops = [f"{op} {array(y[0]) if op.startswith('ld.') else ', '.join(map(visit, y))}" for op, y in made[x]]
                lines.append(f"{numbers[x]} = {' | '.join(dict.fromkeys(ops))}")
            return numbers.get(x, x)

        visit(value)
        return lines

    return {array(address): listing(value) for address, value in stores}


ARRAYS = frozenset(("gate", "up", "d_y", "d_gate", "d_up"))


def compiled_gradients(op, options, wants):
    """What the kernel of a gated product's gradients stores on sm_90, of one element a thread."""
    import triton

    from portakern.backends.triton.compiler import gpu_target, specialised
    from portakern.backends.triton.launch import recording

    hardware, backend = targets.find("sm_90"), registry.backends()["triton"]
    (family,) = (f for _, f in abstract.compilers(op, hardware, backend))
    arrays = dict.fromkeys(("gate", "up", "d_y"), ((300,), "float32", None))
    impl = backend.implementation(op, family)
    call, tiling = abstract.abstract_call(
        registry.find_spec(op),
        impl,
        {"arrays": arrays, "options": options, "wants": wants},
        hardware,
        {"block_rows": 1, "block_n": 128, "num_warps": 4},
    )
    seen = []
    with recording(lambda *launch: seen.append(launch)):
        impl.run(call, tiling)
    ((kernel, _, args, constexprs),) = seen
    source, compiler_options = specialised(kernel, args, constexprs, hardware)
    ptx = triton.compile(source, target=gpu_target(hardware), options=compiler_options).asm["ptx"]
    return stored_values(ptx, [n for n in kernel.arg_names for _ in passed(source.signature[n])])


def passed(declared):
    """What is passed of an argument: the members of groups, without what is compiled in."""
    if isinstance(declared, tuple):
        return [kind for member in declared for kind in passed(member)]
    return [] if declared == "constexpr" else [declared]


GATED = [s for s in map(registry.find_spec, registry.ops()) if {o.name for o in s.outputs} == {"d_gate", "d_up"}]
FORMS = [(s.name, how) for s in GATED for how in ({}, {"approximate": "tanh"}) if {o.name for o in s.options} >= {*how}]


@has_triton
@pytest.mark.parametrize(("op", "options"), FORMS)
def test_a_gated_gradient_alone_is_computed_as_beside_the_other(op, options, tmp_path):
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        both = compiled_gradients(op, options, ("d_gate", "d_up"))
        assert set(both) == {"d_gate", "d_up"}
        for name, value in both.items():
            assert compiled_gradients(op, options, (name,)) == {name: value}
            text = "\n".join(value)
            assert "ex2.approx" in text and not re.search(r"\b(mul|add|sub)(\.ftz)?\.f32", text), (
                f"{name}: ptxas may contract what is not rounded"
            )


def begins_at(ttir):
    """What each product of a kernel is added to: of 0, an argument of a loop, or what an operation gave, its name."""
    made = {m[1]: m[2] for m in re.finditer(r"^ *(%[\w#]+)(?::\d+)? = ([^%\n]*)", ttir, re.MULTILINE)}
    sums = re.findall(r"tt\.dot %[\w#]+, %[\w#]+, (%[\w#]+)", ttir)
    return ["0" if "dense<0.0" in made.get(x, "") else made.get(x, "a loop's").strip() for x in sums]


@has_triton
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("given", ["bias", "residual"])
@pytest.mark.parametrize("k", [4, 300])
def test_what_follows_a_product_is_added_to_its_sum(k, given, target, tmp_path):
    """A bias that is far above the products is rounded once, and not with each of them: no sum begins at it."""
    import triton
    from triton import knobs

    from portakern.backends.triton.compiler import gpu_target, specialised
    from portakern.backends.triton.launch import recording

    hardware, backend = targets.find(target), registry.backends()["triton"]
    shapes = {"x": (70, k), "weight": (40, k), given: {"bias": (40,), "residual": (70, 40)}[given]}
    form = {"arrays": {n: (s, "float32", None) for n, s in shapes.items()}, "options": {}, "wants": ("y",)}
    seen = []
    for _, family in abstract.compilers("linear", hardware, backend):
        impl = backend.implementation("linear", family)
        call, tiling = abstract.abstract_call(registry.find_spec("linear"), impl, form, hardware, {})
        with recording(lambda *launch: seen.append(launch)):
            impl.run(call, tiling)
    found = []
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        for kernel, _, args, constexprs in seen:
            source, options = specialised(kernel, args, constexprs, hardware)
            asm = triton.compile(source, target=gpu_target(hardware), options=options).asm
            found += begins_at(asm["ttir"])
    assert found and {*found} <= {"0", "a loop's"}, found


LOST_BASE = """
        /*1180*/                   USGXT.U32 UR8, UR5, 0xe ;
        /*1190*/                   UIADD3 UR10, UP0, UR{low}, 0x20, URZ ;
        /*11a0*/              @!P0 UIADD3.X UR11, UR{high}, -0x3ffffff0, URZ, UP0, !UPT ;
        /*11b0*/                   UMOV UR12, UR40 ;
        /*11c0*/                   HGMMA.64x16x16.F32 R88, R28, gdesc[UR8].tnspB, R88 ;
"""


PAIRED = """
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd433, %r1, {factor};
	cvt.u64.u32 	%rd434, %r1366;
	shl.b64 	%rd435, %rd434, 33;
	or.b64 	%rd436, %rd433, %rd435;
	{taken}
"""


@pytest.mark.parametrize("taken", ["mov.b64 	{_, %r90}, %rd436;", "shr.u64 	%rd7, %rd436, 32;"])
def test_a_product_that_reaches_into_the_other_half_of_a_register_is_refused(taken):
    """What the LLVM of Triton 3.6 makes of ``tid & 31`` beside ``col << 1``, where two layouts' columns meet a mask."""
    from portakern.backends.triton.leaks import leaking_products, refuse_leaks

    ptx = PAIRED.format(factor=2**31, taken=taken)
    found = leaking_products(ptx)
    assert found == ["%r1 * 2147483648"]
    assert "%r1 * 2147483648 reach into the other half" in Kernel("k", leaking=found).over(targets.find("sm_90"))
    with pytest.raises(RuntimeError, match="k: this Triton's compiler lets %r1"):
        refuse_leaks("k", SimpleNamespace(asm={"ptx": ptx}))
    # Below 2^22 a thread's index stays in its half; other factors are products that somebody wants, and so are sums
    # that are never taken apart.
    for factor, then in ((2**21, taken), (2**31 - 1, taken), (2**31, "st.global.b64 	[%rd1], %rd436;")):
        right = PAIRED.format(factor=factor, taken=then)
        assert leaking_products(right) == []
        refuse_leaks("k", SimpleNamespace(asm={"ptx": right}))
    refuse_leaks("k", SimpleNamespace(asm={"amdgcn": ""}))


def test_machine_code_that_computes_with_what_nothing_wrote_is_refused():
    from portakern.backends.triton.compiler import undefined_registers

    head = "/*0010*/ ULDC.64 UR4, c[0x0][0x210] ;\n/*0020*/ UMOV UR9, URZ ;\n"
    assert undefined_registers(head + LOST_BASE.format(low=8, high=9)) == []
    found = undefined_registers(head + LOST_BASE.format(low=10, high=11))
    assert found == ["UR10", "UR11"]
    assert "reads UR10, UR11, which nothing before writes" in Kernel("k", undefined=found).over(targets.find("sm_90"))
    least = "/*0c90*/ UIMNMX.S64 UPT, UPT, UR34, UR4, 0x1000, UPT, !UPT ;\n/*0df0*/ ISETP.LT.AND P1, PT, R0, {}, P2 ;"
    assert undefined_registers(head + least.format("UR34")) == undefined_registers(head + least.format("UR35")) == []
    assert undefined_registers(head + least.format("UR36")) == ["UR36"]  # which a comparison reads, and does not write
    assert undefined_registers(head + "/*0030*/ UISETP.NE.AND UP0, UPT, UR12, URZ, UPT ;") == ["UR12"]


def test_the_report_says_why_matrix_instructions_wait():
    from portakern.backends.triton.compiler import serialised_products

    log = (
        "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "non wgmma "
        "instructions reading accumulator registers of  a wgmma between start and end of the pipeline stage in the "
        "function 'k' in line 0\nptxas info    : 0 bytes gmem\nptxas info    : Used 70 registers, used 0 barriers\n"
    )
    found = serialised_products(log * 2)
    assert len(found) == 1 and found[0].startswith("C7514: wgmma.mma_async instructions are serialized due to non")
    kernel = Kernel("k", registers=70, serialised=found)
    assert kernel.over(targets.find("sm_90")) is None  # right, and slow
    made = Build("matmul", "forward", "bfloat16", "sm_90", "triton", ok=True, kernels=[kernel])
    assert f"wait for each other: {found[0]}" in str(made)
    assert Build.from_dict(made.to_dict(True)) == made and not serialised_products("ptxas info : Used 70 registers")


@has_triton
def test_lower_refuses_in_words():
    softmax, x = pk.op("softmax"), np.zeros((4, 256), np.float32)
    with pytest.raises(SpecError, match="name a target: one of sm_80"):
        softmax.lower(x)
    with pytest.raises(SpecError, match="'sm_1' is unknown"):
        softmax.lower(x, target="sm_1")
    with pytest.raises(UnsupportedError, match="'reference' was named"):
        pk.op("softmax", backend="reference").lower(x, target="sm_90")
    with pytest.raises(UnsupportedError, match="an extent is 0"):
        softmax.lower(x[:0], target="sm_90")
    built = pk.op("matmul", backend="triton", tiling={"block_m": 1024, "num_warps": 32}).lower(
        np.zeros((512, 512), np.float16), np.zeros((512, 512), np.float16), target="sm_86"
    )
    assert not built.ok and "sm_86 has 101376" in built.reason and built.final


@has_triton
def test_lower_in_this_process_for_a_backend_that_no_other_knows():
    from portakern.backends.triton import BACKEND

    mine = pk.Backend(
        "mine",
        framework="torch",
        compiles={"cuda": "portakern.backends.triton.gpu"},
        compiler=BACKEND.families[-1].compiler,
    )
    impl = BACKEND.implementation("softmax", BACKEND.families[-1])
    mine.implements("softmax", key=impl.key, tiling=impl.tiling, supports=impl.supports, config=impl.config)(impl.fn)
    built = pk.op("softmax", backend=mine).lower(np.zeros((4, 256), np.float32), target="sm_89")
    assert built.ok and built.backend == "mine" and built.kernels[0].matrix == {}


@has_triton
def test_recorded_launches_do_not_take_place():
    torch = pytest.importorskip("torch")
    from portakern.backends.triton.launch import recording

    seen = []
    b = registry.backend("triton")
    form = {"arrays": {"x": [[8, 64], "float32", [1, 8]]}, "options": {}, "wants": None}
    with recording(lambda *launch: seen.append(launch)):
        impl = b.implementation("softmax", b.families[-1])
        call, tiling = abstract.abstract_call(pk.op("softmax").spec, impl, form, targets.find("sm_90"), {})
        (y,) = impl.run(call, tiling)
    assert len(seen) == 1 and y.is_meta and y.is_contiguous() and seen[0][1] > 0 and seen[0][2][0].stride() == (1, 8)
    assert isinstance(seen[0][2][0], torch.Tensor) and seen[0][3]["num_warps"] == tiling["num_warps"]


@has_libtpu
@has_jax
def test_tpu_kernels_compile_without_a_tpu():
    a = np.zeros((512, 512), np.float32)
    built = pk.op("matmul").lower(a, a, target="v5e")
    assert built.ok, built.reason
    (kernel,) = built.kernels
    assert (
        kernel.on_chip["vmem"] > 2**20
        and any(n.startswith("vmatmul") for n in kernel.matrix)
        and "vmatmul" in kernel.assembly
    )


@has_libtpu
@has_jax
def test_the_vmem_of_a_tpu_kernel_is_known_to_the_byte_and_kept_by_program(tmp_path, monkeypatch):
    """What libtpu tells a kernel takes is the least limit with which it compiles: a byte less, and it is refused."""
    from jax import stages

    from portakern.backends.pallas.lib.mosaic_tpu import chip

    place, v5e = registry.backend("pallas"), targets.find("v5e")
    family = next(f for f in place.families if "tpu" in f.platforms)
    compiler, impl = family.load_compiler(), place.implementation("matmul", family)
    for name, value in compiler.environment(v5e, True).items():
        monkeypatch.setenv(name, value.replace("{scratch}", str(tmp_path)))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", compiler.FROM_HBM)
    form = abstract.typical_signature(registry.find_spec("matmul"), "float32", {"m": 512, "n": 512, "k": 512})
    call, tiling = abstract.abstract_call(registry.find_spec("matmul"), impl, form, v5e, {})
    (kernel,) = compiler.memory(impl, call, tiling).kernels
    takes = kernel.on_chip["vmem"]
    assert 2**20 < takes < kernel.granted["vmem"] == v5e.scoped["vmem"]

    of_jax = chip.pltpu.CompilerParams
    for limit in (takes, takes - 1):
        with monkeypatch.context() as patched:
            asks = functools.partial(lambda limit, **given: of_jax(**given | {"vmem_limit_bytes": limit}), limit)
            patched.setattr(chip.pltpu, "CompilerParams", asks)
            if limit == takes:
                (kernel,) = compiler.memory(impl, call, tiling).kernels
                assert kernel.on_chip == kernel.granted == {"vmem": takes}
            else:
                with pytest.raises(UnsupportedError, match="portakern_matmul.* takes .* of VMEM, and may take"):
                    compiler.memory(impl, call, tiling)

    def not_asked(lowered):
        raise AssertionError("a program that is known was compiled again")

    monkeypatch.setattr(stages.Lowered, "compile", not_asked)
    assert compiler.memory(impl, call, tiling).kernels[0].on_chip == {"vmem": takes}


@has_jax
def test_the_vmem_of_kernels_is_read_of_a_program_s_text():
    """One that asks for no more than it is granted says no limit; a configuration may go on in further lines."""
    from portakern.backends.pallas.tpu.toolchain.compiler import scoped_memory

    def call(name, limits, config=""):
        return (
            f'  %{name} = f32[8,128]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", '
            f'backend_config={{"scoped_memory_configs":[{limits}],"custom_call_config":{{{config}}},'
            '"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4711"},'
            '{"memory_space":"4","offset":"0","size":"9"}]}\n'
        )

    asked = '{"memory_space":"1","offset":"0","size":"50331648"}'
    text = call("a.1", "") + '  %y = f32[8] custom-call(%x), custom_call_target="other"\n'
    text += call("b.2", asked, '\n"cost_estimate":{\n"flops":"1"\n}\n')
    v5e = targets.find("v5e")
    assert scoped_memory(text, v5e) == [("a.1", 4711, v5e.scoped["vmem"]), ("b.2", 4711, 48 * 2**20)]


@has_jax
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="libtpu, which this test wants to miss, is installed"
)
def test_a_missing_compiler_is_named_with_its_extra():
    built = pk.op("softmax").lower(np.zeros((8, 128), np.float32), target="v6e")
    assert not built.ok and "libtpu" in built.reason and "[tpu]" in built.reason and not built.final


# -------------------------------------------------------------------------------------------------- processes and cache
def jobs(op="softmax", target="sm_90", dtype="float32"):
    return compiling.jobs_for([op], [target], [dtype], "triton")


@has_triton
def test_a_variant_has_no_job_where_it_refuses_what_another_takes():
    """Unless it was named: then its refusal is what was asked for."""

    told = []

    def variants(*dtypes, variant=None):
        refused = lambda job, why: told.append((job.family.name, "float32" in why))  # noqa: E731
        found = compiling.jobs_for(["attention_vjp"], ["sm_90"], dtypes, "triton", variant=variant, refused=refused)
        return [job.family.name for job in found]

    assert variants("bfloat16") == ["hopper", "unordered", "gpu"] and not told
    assert variants("float32") == ["gpu"] and told == [("hopper", True), ("unordered", True)]
    assert variants("float32", variant="hopper") == ["hopper"]


@has_triton
def test_a_variant_that_breaks_on_a_call_is_left_to_who_compiles_it(monkeypatch):
    """One that fails on its typical call is a row that fails, and does not end the run of all others."""
    b = registry.backend("triton")
    found = {f.name: b.implementation("attention", f) for f in b.families}

    def broken(call, tiling):
        raise KeyError("planted")

    found["hopper"] = replace(found["hopper"], supports=broken)
    monkeypatch.setattr(type(b), "implementation", lambda self, op, family: found[family.name])
    jobs = compiling.jobs_for(["attention"], ["sm_90"], ["bfloat16"], "triton")
    assert [job.family.name for job in jobs] == ["hopper", "hopper", "unsplit", "unsplit", "gpu", "gpu"]


@has_triton
def test_a_compiler_that_dies_or_hangs_costs_its_own_job(monkeypatch):
    compiler = registry.backend("triton").families[0].load_compiler()
    (good,), (bad,) = jobs(), jobs(target="gfx1201")
    real = compiler.environment
    monkeypatch.setattr(
        compiler,
        "environment",
        lambda h, quick: {"PYTHONHOME": "/nonexistent"} if h.name == "gfx1201" else real(h, quick),
    )
    ok, dead = compiling.compile_all([good, bad], 2)
    assert ok.ok and not dead.ok and dead.reason.startswith("the compiler ended with status") and not dead.final
    monkeypatch.setattr(compiler, "environment", real)
    assert compiling.compile_all([bad])[0].ok, "a death is not kept"
    (slow,) = compiling.compile_all([bad], fresh=True, timeout=0.01)
    assert slow.reason == "no answer in 0 s" and not slow.ok


@has_triton
def test_variants_of_one_target_are_compiled_by_one_process():
    first, second = map(pool.environment_of, jobs("matmul"))
    assert first == second and {j.family.name for j in jobs("matmul")} == {"gpu", "hopper"}
    (elsewhere,) = map(pool.environment_of, jobs("matmul", target="gfx942"))
    assert elsewhere != first


@has_triton
def test_what_was_compiled_is_kept_until_something_changes(tmp_path, monkeypatch):
    (first,) = compiling.compile_all(jobs())
    assert first.ok and len(list((tmp_path / "cache").rglob("*.json"))) == 1
    monkeypatch.setattr(pool, "run", lambda *a: pytest.fail("compiled again") if a[0] else iter(()))
    (again,) = compiling.compile_all(jobs())
    assert again.to_dict() == first.to_dict()
    names = {cache.key(j) for j in [*jobs(), *jobs(dtype="bfloat16"), *jobs(target="sm_80"), *jobs("softmax_vjp")]}
    monkeypatch.setattr(registry.backend("triton").families[0].load_compiler(), "versions", lambda h: {"triton": "0"})
    assert len(names | {cache.key(*jobs())}) == 5
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text("{")
    assert cache.find(file.stem) is None


def test_the_cache_follows_imports_within_the_package():
    cache._read.cache_clear()
    text, imports = cache._read("portakern.backends.triton.gpu.rmsnorm")
    assert (
        "rmsnorm_vjp_kernel" in text
        and "portakern.backends.triton.gpu.layernorm" in imports
        and "portakern.backends.triton.launch" in imports
    )
    one, other = (cache._digest(frozenset([f"portakern.specs.{n}"])) for n in list(records())[:2])
    assert one != other


@has_triton
def test_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr(cli.common.out, "_width", 220)  # rich reads COLUMNS once, when the first test imports it
    run = CliRunner().invoke
    command = ["compile", "softmax", "--target", "sm_80", "--target", "gfx1100", "--dtype", "bfloat16", "--jobs", "2"]
    result = run(cli.app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    file = tmp_path / "compile-matrix.json"
    file.write_text(result.stdout, encoding="utf-8")
    assert len(results.read(file).rows) == 2  # what the report takes in
    assert {"benchmark", "command", "date", "environment", "wall_seconds", "limits", "rows"} <= set(record) and record[
        "ok"
    ] == record["of"] == 2
    assert [r["target"] for r in record["rows"]] == ["sm_80", "gfx1100"] and record["limits"]["gfx1100"] == {
        "lds": 65536
    }
    for row in record["rows"]:
        assert (
            row["ok"]
            and row["direction"] == "forward"
            and row["tiling"]["block_n"] == 4096
            and "assembly" not in row["kernels"][0]
        )
    table = run(cli.app, command)
    assert table.exit_code == 0 and "2 of 2 compile and fit" in table.output and "softmax_kernel" in table.output
    for unclear in ([], ["--all", "--target", "sm_80"]):
        refused = run(cli.app, ["compile", "softmax", *unclear])
        assert isinstance(refused.exception, SpecError) and "or --all, not both" in str(refused.exception)


@has_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtypes"),
    [
        ("sm_90", ["bfloat16"]),
        ("gfx942", ["float32"]),
        pytest.param("v5e", ["bfloat16"], marks=has_libtpu),
        pytest.param("v5e", ["float32"], marks=has_libtpu),
    ],
)
def test_every_op_compiles_and_fits_one_target_of_each_vendor(target, dtypes, kept):
    """Where no variant is for the target alone, and takes the place of that which any chip has: tests/test_hopper*.py
    and tests/test_unordered.py compile those, and .ci/run all. An op of 8-bit numbers is compiled in
    one of its own for each of these dtypes."""
    kinds = {op: [dtype_for(op, dtype) for dtype in dtypes] for op in registry.ops()}
    jobs = [job for op, each in kinds.items() for job in compiling.jobs_for([op], [target], each, quick=True)]
    own = {job.spec.name for job in jobs if job.family.targets and job.backend.name == "triton"}
    found = [job for job in jobs if job.spec.name not in own]
    once = sorted(job.spec.name for job in found if job.signature["wants"] is None)
    assert once == sorted([op for op in registry.ops() if op not in own] * len(dtypes))
    assert bool(own) == (target == "sm_90")
    for built in compiling.compile_all(found):
        assert built.ok, str(built)
        products = record(built.op).matrix_units
        assert bool(any(k.matrix for k in built.kernels)) == products, str(built)
