"""AMD machine code on the emulator: its tables, what it says where it cannot run, and, where tinygrad's tree is,
kernels and faults in them.
"""

from __future__ import annotations

import importlib
import os
from contextlib import nullcontext

import numpy as np
import pytest

import portakern as pk
from portakern import testing
from portakern.core import registry
from portakern.core.backend import Profile
from portakern.core.oracle import rounded_oracle
from portakern.core.targets import Target
from portakern.errors import NotEmulatedError
from portakern.testing import check_options
from portakern.testing.subject import backend_subject

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch

from portakern.backends.triton.emulator import (
    accesses,
    code_object,
    decode,
    lanes,
    machine,
    matrices,
    profile,
    tree,
    waits,
)
from portakern.backends.triton.emulator.faults import (
    CompilerCrash,
    EarlyRead,
    OutsideMemory,
    UninitialisedRegister,
)

from .mutants import machine_code

TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
needs_tree = pytest.mark.skipif(tree.unavailable() is not None, reason=f"no emulator here: {tree.unavailable()}")


def emulated(op, case, target):
    return testing.replay(op, case, backend="triton", profile="emulated", target=target)


# ------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("name", "space", "store", "size", "signed", "half", "two", "unit"),
    [
        ("BUFFER_LOAD_D16_HI_U8", accesses.BUFFER, False, 1, False, 2, False, 1),
        ("BUFFER_LOAD_SSHORT", accesses.BUFFER, False, 2, True, 0, False, 1),
        ("BUFFER_STORE_SHORT_D16_HI", accesses.BUFFER, True, 2, False, 2, False, 1),
        ("GLOBAL_LOAD_D16_B16", accesses.GLOBAL, False, 2, False, 1, False, 1),
        ("GLOBAL_STORE_DWORDX4", accesses.GLOBAL, True, 16, False, 0, False, 1),
        ("SCRATCH_LOAD_B96", accesses.SCRATCH, False, 12, False, 0, False, 1),
        ("DS_READ2ST64_B64", accesses.LDS, False, 8, False, 0, True, 64),
        ("DS_STORE_2ADDR_STRIDE64_B32", accesses.LDS, True, 4, False, 0, True, 64),
        ("DS_LOAD_2ADDR_B32", accesses.LDS, False, 4, False, 0, True, 1),
        ("DS_WRITE_B8_D16_HI", accesses.LDS, True, 1, False, 2, False, 1),
        ("S_BUFFER_LOAD_B128", accesses.BUFFER, False, 16, False, 0, False, 1),
        ("S_LOAD_DWORDX16", accesses.GLOBAL, False, 64, False, 0, False, 1),
    ],
)
def test_a_name_says_what_is_moved(name, space, store, size, signed, half, two, unit):
    assert accesses.access(name) == accesses.Access(space, store, size, signed, half, two, unit, False)


@pytest.mark.parametrize("name", ["DS_ADD_F32", "GLOBAL_ATOMIC_ADD_F32", "DS_READ_B96_TR_B6", "BUFFER_LOAD_FORMAT_X"])
def test_an_access_that_is_not_known_is_refused_by_name(name):
    with pytest.raises(NotEmulatedError, match=f"cannot: the emulator lacks {name}"):
        accesses.access(name)


def test_loads_into_lds_are_told_from_their_names():
    assert accesses.access("GLOBAL_LOAD_LDS_DWORDX4").to_lds and not accesses.access("GLOBAL_LOAD_DWORDX4").to_lds


@pytest.mark.parametrize(
    ("isa", "name", "word", "limits"),
    [
        ("cdna", "S_WAITCNT", 0x0F70 | 2, [2, -1, -1, -1]),  # vmcnt(2)
        ("cdna", "S_WAITCNT", 0xC07F, [-1, 0, -1, 0]),  # lgkmcnt(0)
        ("cdna", "S_WAITCNT", 0x4F70, [16, -1, -1, -1]),  # vmcnt(16): its high bits lie apart
        ("rdna3", "S_WAITCNT", 0xFC07, [-1, 0, -1, 0]),
        ("rdna3", "S_WAITCNT_VSCNT", 0, [-1, -1, 0, -1]),
        ("rdna4", "S_WAIT_LOADCNT_DSCNT", 0x0103, [1, 3, -1, -1]),
        ("rdna4", "S_WAIT_KMCNT", 0, [-1, -1, -1, 0]),
        ("rdna3", "S_WAIT_IDLE", 0, [0, 0, 0, 0]),
        ("rdna3", "S_NOP", 0, None),
    ],
)
def test_a_wait_says_how_much_may_be_under_way(isa, name, word, limits):
    assert waits.limits(isa, name, word) == limits


def test_lanes_move_as_their_controls_say():
    lane = np.arange(32)
    assert (lanes.dpp(0b10110001, 32) == lane ^ 1).all()  # quad_perm:[1,0,3,2]
    assert (lanes.dpp(0x140, 64) == np.arange(64) ^ 15).all()  # row_mirror
    assert (lanes.dpp(0x168, 32) == lane ^ 8).all()  # row_xmask:8
    assert lanes.dpp(0x111, 32)[[0, 1, 16, 17]].tolist() == [-1, 0, -1, 16]  # row_shr:1 ends at its row
    assert lanes.dpp(0x143, 64)[[31, 32, 63]].tolist() == [-1, 31, 31]  # row_bcast:31
    assert (lanes.swizzle(16 << 10 | 31, 32) == lane ^ 16).all()
    assert lanes.enabled(0b01, 0b1010, 32) == 0xF0F0
    with pytest.raises(NotEmulatedError, match="DPP control 0x142"):
        lanes.dpp(0x142, 32)


@pytest.mark.parametrize(
    ("name", "isa"),
    [
        ("V_MFMA_F32_16X16X16_F16", "cdna"), ("V_MFMA_F32_32X32X8_BF16_1K", "cdna"), ("V_MFMA_F32_32X32X2_F32", "cdna"),
        ("V_MFMA_F32_16X16X4_F32", "cdna"), ("V_MFMA_F32_16X16X32_BF16", "cdna"), ("V_MFMA_F32_32X32X16_F16", "cdna"),
        ("V_MFMA_F32_16X16X8_XF32", "cdna"), ("V_WMMA_F32_16X16X16_F16", "rdna3"),
        ("V_WMMA_F32_16X16X16_BF16", "rdna4"),
    ],
)  # fmt: skip
def test_every_element_of_a_matrix_instruction_lies_somewhere_of_its_own(name, isa):
    found = matrices.layout(name, isa)
    waves, size = 64 if isa == "cdna" else 32, 1 if name.endswith("F32") else 2
    operand = found.table[: found.m * found.k]
    assert len(set(operand.tolist())) == found.m * found.k and operand.max() < found.registers * waves * size
    rows, cols = np.split(found.table[2 * found.m * found.k :], 2)
    assert sorted(zip(rows.tolist(), cols.tolist(), strict=True)) == [
        (i, j) for i in range(found.m) for j in range(found.n)
    ]


def test_elements_lie_where_the_documents_say():
    cdna = matrices.layout("V_MFMA_F32_16X16X16_F16", "cdna")
    assert cdna.table[1 * 16 + 5] == (0 * 64 + 17) * 2 + 1  # A[1][5]: lane 17, the high half of its first register
    rows = matrices.layout("V_MFMA_F32_32X32X8_F16", "cdna").table[2 * 32 * 8 :][: 16 * 64].reshape(16, 64)
    assert rows[:5, 0].tolist() == [0, 1, 2, 3, 8] and rows[0, 32] == 4
    wmma = matrices.layout("V_WMMA_F32_16X16X16_F16", "rdna3")
    assert wmma.table[2 * 256 :][:256].reshape(8, 32)[3, [0, 16]].tolist() == [6, 7] and wmma.twin == 8
    with pytest.raises(NotEmulatedError, match="V_MFMA_I32_32X32X16_I8"):
        matrices.layout("V_MFMA_I32_32X32X16_I8", "cdna")


# -------------------------------------------------------------------------------- a profile that stands in for hardware

SEEN: list[tuple[Target, bool]] = []
ENTERED: list[Target] = []


def as_if(target):
    ENTERED.append(target)
    return nullcontext()


def standing_in(fn):
    b = pk.Backend("ours", "numpy", platforms=["rocm"], profiles={"as_if": Profile(f"{__name__}:as_if", ("gfx942",))})
    b.implements("softmax")(fn)
    return b


def right(call, tiling):
    SEEN.append((call.target, call.interpret))
    return rounded_oracle(call)


def test_a_profile_with_targets_has_calls_served_as_on_that_target():
    SEEN.clear(), ENTERED.clear()
    b = standing_in(right)
    report = testing.check("softmax", backend=b, profile="as_if", target="gfx942", max_examples=3, dtypes=["float32"])
    assert report.passed and set(SEEN) == {(Target("rocm", "gfx942"), False)} == {(ENTERED[0], False)}
    assert "on rocm gfx942 (emulated), profile as_if" in report.subject and b.standing_for is None
    with pytest.raises((pk.UnsupportedError, pk.UnavailableError)):  # outside, the host is the host
        pk.op("softmax", backend=b)(np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (
            {"profile": "emulated"},
            "'emulated': target is None; expected one of gfx90a, gfx942, gfx950, gfx1100, gfx1201",
        ),
        ({"profile": "emulated", "target": "sm_90"}, "target is 'sm_90'; expected one of gfx90a"),
        ({"target": "gfx942"}, "no profile: target is 'gfx942'; expected none .*goes with the profile 'emulated'"),
        ({"profile": "strict"}, "no profile 'strict'; expected one of emulated"),
    ],
)
def test_a_target_that_no_profile_stands_in_for_is_an_error(asked, match):
    with pytest.raises(pk.SpecError, match=match):
        testing.check("softmax", backend="triton", **asked)


def test_what_is_not_emulated_is_counted_apart():
    turn = iter(range(10**6))

    def sometimes(call, tiling):
        if next(turn) % 5 == 0:
            raise NotEmulatedError("cannot: the emulator lacks V_FOO_F32")
        return right(call, tiling)

    report = testing.check(
        "softmax", backend=standing_in(sometimes), profile="as_if", target="gfx942", max_examples=8, dtypes=["float32"]
    )
    assert report.passed and not report.refused and set(report.not_emulated) == {"the emulator lacks V_FOO_F32"}
    assert report.to_dict()["not_emulated"] == dict(report.not_emulated)
    assert report.merge(report).not_emulated.total() == 2 * report.not_emulated.total()


def test_emulated_cases_are_small():
    assert check_options.EMULATED.elements < testing.Limits.elements and not check_options.EMULATED.fill


def test_what_a_launch_adds_to_the_arguments_is_known_or_refused_by_name():
    def code(**hidden):
        return code_object.CodeObject(0, 0, 0, 0, 256, False, 0, 0, 0, [], hidden, None)

    asked = code(hidden_block_count_x=(64, 4), hidden_group_size_x=(76, 2), hidden_dynamic_lds_size=(184, 4))
    added = asked.hidden_arguments(programs=70000, threads=256, lds=1024)
    assert added == [(64, b"\x70\x11\x01\x00"), (76, b"\x00\x01"), (184, b"\x00\x04\x00\x00")]
    with pytest.raises(NotEmulatedError, match="cannot: the emulator lacks the argument hidden_heap_v1"):
        code(hidden_heap_v1=(160, 8)).hidden_arguments(programs=1, threads=64, lds=0)


def test_without_its_tree_the_emulator_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.delenv(tree.VARIABLE, raising=False)
    tree.tree.cache_clear()
    how = rf"PORTAKERN_TINYGRAD: git clone .*tinygrad && git -C tinygrad checkout {tree.TRIED[:12]}"
    with pytest.raises(pk.UnavailableError, match=how):
        testing.check("softmax", backend="triton", profile="emulated", target="gfx942", max_examples=1)
    monkeypatch.setenv(tree.VARIABLE, str(tmp_path))
    with pytest.raises(
        pk.UnavailableError, match="where test/mockgpu/amd/emu.py is not; expected tinygrad's source tree"
    ):
        testing.check("softmax", backend="triton", profile="emulated", target="gfx942", max_examples=1)


# ------------------------------------------------------------------------------------------ where the tree is there

QUICK = {
    "softmax": '{"dtype":"float32","shapes":{"x":[5,300]},"regime":"normal","seed":1,"layouts":{"x":"sliced"}}',
    "matmul": machine_code.CASES["matmul"],
    "attention": machine_code.CASES["attention"],
}


@needs_tree
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", QUICK)
def test_a_kernel_runs_as_machine_code(op, target):
    report = emulated(op, QUICK[op], target)
    assert report.examples == 1 and report.passed and not report.not_emulated, (report.failures, report.not_emulated)


@needs_tree
@pytest.mark.parametrize("target", ["gfx1100", "gfx942"])
def test_programs_know_how_many_there_are(target):
    """Rows side by side are walked from the last program on; the size of the grid is no argument of the kernel's."""
    case = '{"dtype":"float32","shapes":{"x":[300,130]},"regime":"normal","seed":1,"options":{"axis":0}}'
    report = emulated("softmax", case, target)
    assert report.passed and not report.not_emulated, (report.failures, report.not_emulated)


@needs_tree
@pytest.mark.parametrize(
    ("op", "arrays"), [("softmax", '"x":[2,1025,8]'), ("logsumexp_vjp", '"x":[2,1025,8],"d_y":[2,8]')]
)
def test_what_parts_of_a_row_found_has_one_sum_in_all_waves(op, arrays):
    """Two products that are added are both rounded first: fused with the sum, one is not, and in each wave another."""
    case = f'{{"dtype":"bfloat16","shapes":{{{arrays}}},"regime":"normal","seed":5,"options":{{"axis":1}}}}'
    report = emulated(op, case, "gfx942")
    assert report.passed and not report.not_emulated, (report.failures, report.not_emulated)


@needs_tree
@pytest.mark.parametrize("n", [100, 1025], ids=["whole", "in parts"])
def test_a_row_has_the_same_bits_in_strips_of_any_width(n):
    """Machine code fuses products with sums where it can, in the code of one width and not in that of another."""
    subject = backend_subject(registry.find_spec("softmax_vjp"), "triton", None, None, "emulated", "gfx942")
    rng = np.random.default_rng(3)
    y, d_y = (torch.from_numpy(rng.standard_normal((n, 64), np.float32)) for _ in range(2))

    def first_two(lanes):
        with subject.context():
            (d_x,) = subject.run({})(y[:, :lanes].contiguous(), d_y[:, :lanes].contiguous(), axis=0)
        return d_x[:, :2].numpy().tobytes()

    assert first_two(2) == first_two(33) == first_two(64)


FIRST_SEEN = {"barrier": "LdsRace", "wait": "EarlyRead", "mask": "OutsideMemory", "strides": "wrong bounds"}


@needs_tree
@pytest.mark.parametrize("kind", FIRST_SEEN)
@pytest.mark.parametrize("target", ["gfx1100", "gfx942"])
def test_a_fault_in_machine_code_is_seen_for_what_it_is(kind, target):
    site = next(s for s in machine_code.sites("softmax", target) if s.kind == kind)
    assert machine_code.caught("softmax", target, site) == FIRST_SEEN[kind]


def without(start):
    """Plants: the first instruction whose name begins so does nothing."""
    found = machine_code.Found()
    with profile.planted(found):
        assert emulated("softmax", QUICK["softmax"], "gfx942").passed
    program = found.programs["softmax_kernel"]
    at = min(a for a, name in program.names.items() if name.startswith(start))

    def change(program, values):
        for word in range(program.steps[at].size // 4 or 2):
            program.code.word(4 * (at + word), machine_code.NOTHING)

    return change


@needs_tree
def test_what_nothing_wrote_is_seen_where_it_is_used():
    with profile.planted(without("BUFFER_LOAD")):
        (failure,) = emulated("softmax", QUICK["softmax"], "gfx942").failures
    assert (
        "UninitialisedRegister: BUFFER_STORE" in failure.what
        and "what is stored comes from what nothing wrote" in failure.what
    )


@needs_tree
def test_an_address_beyond_the_tensors_is_told_beside_the_nearest():

    def beyond(program, values):
        """The first number that is a stride is a hundred times what it is."""
        at = max(range(len(values)), key=lambda i: values[i][2] if values[i][1] == "i32" else -1)
        name, kind, value = values[at]
        return [*values[:at], (name, kind, 100 * value), *values[at + 1 :]]

    with profile.planted(beyond):
        (failure,) = emulated("softmax", QUICK["softmax"], "gfx1100").failures
    assert "OutsideMemory: BUFFER_" in failure.what and "outside every tensor of the launch; nearest:" in failure.what


@needs_tree
def test_an_instruction_that_is_lacking_is_a_refusal_with_its_name(monkeypatch):
    monkeypatch.setattr(decode, "REFUSED", (*decode.REFUSED, "V_EXP_F32"))
    monkeypatch.setattr(machine.decoder("rdna3"), "known", {})
    profile._programs.clear()
    report = emulated("softmax", QUICK["softmax"], "gfx1100")
    (reason,) = report.not_emulated
    assert reason.startswith("the emulator lacks V_EXP_F32") and not report.failures and not report.passed


@needs_tree
def test_a_compiler_that_ends_its_process_ends_no_check():
    with pytest.raises(CompilerCrash, match="cannot: Triton's compiler ended with signal 6 on some_kernel"):
        profile._try_apart(os.abort, "some_kernel")


def test_a_number_that_no_float32_holds_is_passed_as_launchers_do():
    assert np.frombuffer(profile._packed("fp32", 8.5e39), np.float32)[0] == np.inf
    assert profile._packed("i64", -1) == b"\xff" * 8 and profile._packed("u1", True) == b"\x01"


def program(isa, instructions, waves=1):
    """A program of instructions as tinygrad's assembler writes them; s[0:1] point to 4 KiB that it may touch."""
    text = b"".join(i.to_bytes() for i in instructions)
    memory = np.zeros(4096 + len(text) + 64, np.uint8)
    memory[4096 : 4096 + len(text)] = np.frombuffer(text, np.uint8)
    base = memory.ctypes.data + 4096
    user = 1 << code_object.KERNARG
    code = code_object.CodeObject(base, len(text) // 4 + 1, base, 0, 4096, False, user, 2, 1, [], {}, memory)
    made = machine.EmulatedKernel(code, "made_here", isa, waves, 1024)
    start = memory.ctypes.data
    made.run(0, start, {"memory": (start, start + 4096)})
    return made


@needs_tree
@pytest.mark.parametrize("loads", [63, 64])
def test_what_was_asked_for_first_is_there_once_its_counter_is_full(loads):
    """A counter of 6 bits holds the 64th load back until the first is there, and Triton's code relies on it."""
    tree.tree()
    from tinygrad.renderer.amd.dsl import s, v
    from tinygrad.runtime.autogen.amd.cdna import ins

    asked = [ins.global_load_dword(v[2 + i], v[0], v[0], s[0:1]) for i in range(loads)]
    code = [ins.v_lshlrev_b32_e32(v[0], 2, v[0]), *asked, ins.v_mov_b32_e32(v[100], v[2]), ins.s_endpgm()]
    if loads < 64:
        with pytest.raises(EarlyRead, match="V_MOV_B32.*wave 0.: v2 is used, and no wait"):
            program("cdna", code)
    else:
        program("cdna", code)


@needs_tree
@pytest.mark.parametrize(
    ("load", "store", "waits", "early"),
    [
        ("d16_hi_b16", "b16", 1, False), ("d16_hi_b16", "b8", 1, False), ("d16_hi_b16", "d16_hi_b16", 1, True),
        ("d16_hi_b16", "b32", 1, True), ("d16_hi_b16", "b32", 0, False), ("d16_hi_b16", "b16", 2, True),
        ("d16_b16", "b16", 1, True), ("d16_b16", "d16_hi_b16", 1, False), ("d16_b16", "b32", 1, True),
    ],
)  # fmt: skip
def test_a_register_is_on_its_way_half_by_half(load, store, waits, early):
    """A load of one half alone leaves the other one, which came before, to be read."""
    tree.tree()
    from tinygrad.renderer.amd.dsl import s, v
    from tinygrad.runtime.autogen.amd.rdna3 import ins

    code = [ins.v_lshlrev_b32_e32(v[0], 2, v[0]), ins.global_load_b32(v[2], v[0], v[0], s[0:1]),
            getattr(ins, f"global_load_{load}")(v[2], v[0], v[0], s[0:1]), ins.s_waitcnt(waits << 10 | 0x3F7),
            getattr(ins, f"global_store_{store}")(v[0], v[0], v[2], s[0:1]), ins.s_endpgm()]  # fmt: skip
    if early:
        with pytest.raises(EarlyRead, match=f"GLOBAL_STORE_{store.upper()}.*: v2 is used, and no wait"):
            program("rdna3", code)
    else:
        program("rdna3", code)


@needs_tree
@pytest.mark.parametrize("isa", ["cdna", "rdna3"])
def test_a_load_over_what_another_counter_brings_is_early_wherever_it_stands(isa):
    """What one counter counts arrives in order; a register beside it that waits for another counter does not."""
    tree.tree()
    from tinygrad.renderer.amd.dsl import s, v

    ins = importlib.import_module(f"tinygrad.runtime.autogen.amd.{isa}.ins")
    old = isa == "cdna"
    one, two = ("dword", "dwordx2") if old else ("b32", "b64")
    lds = ins.ds_read_b32 if old else ins.ds_load_b32

    def code(beside):
        return [ins.v_lshlrev_b32_e32(v[0], 2, v[0]), getattr(ins, f"global_load_{one}")(v[2], v[0], v[0], s[0:1]),
                lds(v[beside], v[0], v[0], v[0]), getattr(ins, f"global_load_{two}")(v[2:3], v[0], v[0], s[0:1]),
                ins.s_endpgm()]  # fmt: skip

    program(isa, code(7))
    with pytest.raises(EarlyRead, match="v3 is used, and no wait"):
        program(isa, code(3))


@needs_tree
def test_a_long_number_is_undefined_half_by_half():
    """What reads the defined half of a pair is right; a store of the other one is told where that came from."""
    tree.tree()
    from tinygrad.renderer.amd.dsl import s, v
    from tinygrad.runtime.autogen.amd.cdna import ins

    def code(stored):
        return [ins.v_mov_b32_e32(v[4], 7), ins.v_lshlrev_b32_e32(v[0], 2, v[0]), ins.v_mov_b64_e32(v[6:7], v[4:5]),
                ins.global_store_dword(v[0], v[0], v[stored], s[0:1]), ins.s_endpgm()]  # fmt: skip

    program("cdna", code(6))
    with pytest.raises(UninitialisedRegister, match=r"GLOBAL_STORE_DWORD .*: v7, which \+0x8 made of v5"):
        program("cdna", code(7))


@needs_tree
def test_what_runs_is_counted():
    """Lanes 32 bytes apart meet in 4 of the 32 banks, 8 in each: 7 passes more than one."""
    tree.tree()
    from tinygrad.renderer.amd.dsl import v
    from tinygrad.runtime.autogen.amd.rdna3 import ins

    code = [ins.v_lshlrev_b32_e32(v[0], 5, v[0]), ins.ds_load_b32(v[1], v[0], v[0], v[0]), ins.s_endpgm()]
    found = program("rdna3", code).counted()
    assert found["moved"]["lds conflicts"] == 7 and found["moved"]["lds loaded"] == 32 * 4
    assert found["instructions"].total() == 3 and found["instructions"]["DS_LOAD_B32"] == 1
    with pytest.raises(OutsideMemory, match="lane 16 reaches 4 bytes of LDS at 1024, beyond the 1024 that it has"):
        program("rdna3", [ins.v_lshlrev_b32_e32(v[0], 6, v[0]), *code[1:]])


@needs_tree
@pytest.mark.parametrize("isa", ["cdna", "rdna3", "rdna4"])
def test_a_far_jump_reaches_where_it_says(isa):
    tree.tree()
    ins = importlib.import_module(f"tinygrad.runtime.autogen.amd.{isa}.ins")
    from tinygrad.renderer.amd.dsl import s, v

    add, carry = (ins.s_add_co_u32, ins.s_add_co_ci_u32) if isa == "rdna4" else (ins.s_add_u32, ins.s_addc_u32)
    jump = [ins.s_getpc_b64(s[4:5]), add(s[4], s[4], 16), carry(s[5], s[5], 0), ins.s_setpc_b64(s[0:1], s[4:5])]
    stray = ins.v_mov_b32_e32(v[1], 1)
    found = program(isa, [*jump, stray, ins.s_endpgm()]).counted()["instructions"]
    assert "V_MOV_B32_E32" not in found and found.total() == 5
