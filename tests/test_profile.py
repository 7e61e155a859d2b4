"""portakern profile: Nsight Compute's output read, facts joined by kernel, and what bounds each in words."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import results
from portakern.cli import app
from portakern.core import registry, targets
from portakern.core.instruments import Instruments
from portakern.core.machine_code import Kernel, occupancy, residents
from portakern.core.targets import Target
from portakern.tools.bench.contenders import here
from portakern.tools.bench.roof import Ceiling
from portakern.tools.compile.build import Build
from portakern.tools.profile import counters, facts, session, subject
from portakern.tools.profile.counters import Counted, NotCounted, parse

LAUNCH = '"{}","4321","python3.11","127.0.0.1","{}","1","7","(128, 1, 1)","(132, 1, 1)","0","9.0"'
HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC"'
)
STALLED = counters.STALL.format("long_scoreboard"), counters.STALL.format("not_selected")

RAW = f"""==PROF== Connected to process 4321 (/usr/bin/python3.11)
==PROF== Profiling "rows_kernel": 0%....50%....100% - 9 passes
the program's own words
==PROF== Disconnected from process 4321
{HEAD},"dram__bytes_read.sum","dram__bytes_write.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__time_duration.sum","sm__warps_active.avg.pct_of_peak_sustained_active","{STALLED[0]}","{STALLED[1]}",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","byte","byte","%","nsecond","%","","","%"
{LAUNCH.format(0, "rows_kernel")},"33,554,432","33,554,432","91.25","24,000","88.5","12.5","30","n/a"
{LAUNCH.format(1, "sum_kernel")},"1,024","512","1.5","2,000","10","3.5","0.5","0"
{LAUNCH.format(2, "sum_kernel")},"1,024","512","3.5","6,000","30","3.5","0.5","0"
"""
"""In the form of ``--csv --page raw --print-units base``: a row a launch, the second row of units."""

TYPED = LAUNCH.format(0, "void rows_kernel(float*, int)")

LONG = f"""{HEAD},"Section Name","Metric Name","Metric Unit","Metric Value"
{TYPED},"Command line profiler metrics","gpu__time_duration.sum","usecond","24.00"
{TYPED},"Command line profiler metrics","dram__bytes_read.sum","Mbyte","33.55"
"""
"""A row a metric, as other pages and versions print it."""


def test_both_forms_of_output_are_read():
    rows, sums = parse(RAW)
    assert (rows.kernel, rows.launches, sums.kernel, sums.launches) == ("rows_kernel", 1, "sum_kernel", 2)
    assert rows.values["time"] == 24.0 and rows.values["read"] == 2**25 and rows.values["memory"] == 91.25
    assert "matrix" not in rows.values and sums.values["matrix"] == 0  # n/a is no zero
    assert sums.values["time"] == 8.0 and sums.values["written"] == 1024  # summed
    assert sums.values["memory"] == pytest.approx(3.0) and sums.values["occupancy"] == pytest.approx(25.0)  # by time
    (other,) = parse(LONG)
    assert other.kernel == "void rows_kernel(float*, int)"
    assert other.values == {"time": 24.0, "read": pytest.approx(33.55e6)}
    assert parse("==ERROR== nothing\n") == [] == parse(HEAD)


def stand_in(tmp_path, body):
    """A program in ncu's place: ``body`` sees the metrics that were asked for as ``metrics``."""
    file = tmp_path / "ncu"
    lines = ["import sys", "metrics = sys.argv[sys.argv.index('--metrics') + 1].split(',')", f"RAW = {RAW!r}", body]
    file.write_text(f"#!{sys.executable}\n" + "\n".join(lines) + "\n")
    file.chmod(0o755)
    return file


def collected(ncu):
    return counters.collect(ncu, ["true"], 60.0, os.environ)


def test_a_metric_that_a_chip_lacks_is_left_out(tmp_path):
    gone = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    ncu = stand_in(tmp_path, f"print('==ERROR== no such metric: {gone}' if {gone!r} in metrics else RAW)")
    assert [c.kernel for c in collected(ncu)] == ["rows_kernel", "sum_kernel"]


REFUSED = {
    "permission": (
        "print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access'); sys.exit(1)",
        "NVreg_RestrictProfilingToAdminUsers=0.*--cap-add=SYS_ADMIN",
    ),
    "words of its own": (
        "print('==WARNING== No kernels were profiled.')",
        r"counted nothing \(exit status 0\): No kernels were profiled",
    ),
    "a failure": ("sys.exit('libnothing.so is missing')", r"\(exit status 1\): libnothing.so is missing"),
    "all of them": ("print('==ERROR== none of', *metrics)", "refused|counted nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_nothing_was_counted_is_said(name, tmp_path):
    body, words = REFUSED[name]
    with pytest.raises(NotCounted, match=words):
        collected(stand_in(tmp_path, body))


def test_ncu_is_found_on_the_path_and_in_cudas_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(counters.glob, "glob", lambda pattern, glob=counters.glob.glob: (
        glob(pattern) if pattern.startswith(str(tmp_path)) else []
    ))  # fmt: skip
    assert counters.find({"PATH": str(tmp_path)}) is None
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    there = stand_in(tmp_path / "cuda" / "bin", "")
    assert counters.find({"PATH": "", "CUDA_HOME": str(tmp_path / "cuda")}) == there
    on_path = stand_in(tmp_path, "")
    assert counters.find({"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}) == on_path


H100 = targets.find("sm_90")
CODE = Kernel("rows_kernel", threads=128, registers=168, on_chip={"shared": 65536}, occupancy=0.1875)


def test_what_is_shared_among_programs_says_what_holds_occupancy_down():
    beside = residents(4, 168, {"shared": 65536}, H100)
    assert beside == {"threads": 16, "registers": 3, "programs": 32, "shared": 3}
    assert occupancy(4, 168, {"shared": 65536}, H100) == 3 * 4 / 64
    assert residents(4, 168, {"lds": 65536}, targets.find("gfx942")) == {}
    assert residents(4, None, {}, H100) == {} and occupancy(4, None, {}, H100) is None
    (kernel,) = facts.kernels_of([CODE], [], [], None, H100)
    shown = {fact.name: fact.value for fact in kernel.facts}
    assert shown["occupancy is limited by"] == "registers: 3 programs of a core"
    assert kernel.bound == "not known: nothing was run"


def bounds(**given):
    known = {"built": [CODE], "samples": [], "counted": [], "ceiling": Ceiling(20.0, "copy"), "hardware": H100}
    return [kernel.bound for kernel in facts.kernels_of(**known | given)]


def test_what_bounds_a_kernel_by_its_counters():
    rows, sums = parse(RAW)
    assert bounds(counted=[rows, sums])[0] == "device memory, 91 % of the peak"
    assert bounds(counted=[sums])[0] == (
        "latency: warps wait most for loads from device memory or L2; "
        "the nearest limit is device memory, 3 % of the peak"
    )
    # another warp's turn is the longest wait of all, and is none
    assert rows.stall == sums.stall == "loads from device memory or L2"
    matrix = Counted("rows_kernel", 1, {"memory": 30.0, "matrix": 84.4})
    spilt = Kernel("rows_kernel", spills=24, serialised=["why"])
    assert bounds(counted=[matrix], built=[spilt])[0] == (
        "matrix units, 84 % of the peak; 24 bytes a thread are spilled; its matrix instructions wait for each other"
    )


def test_what_bounds_a_kernel_by_the_roof():
    alone = [[("rows_kernel", 24.0)], [("rows_kernel", 25.0)], [("rows_kernel", 99.0)]]
    assert bounds(samples=alone)[0] == "device memory, 80% of the measured roof"
    slow = bounds(samples=[[("rows_kernel", 80.0)]], ceiling=Ceiling(20.0, "bfloat16"))
    assert slow[0].startswith("neither memory nor products, 25% of the measured roof (products in bfloat16)")
    shared = bounds(samples=[[("rows_kernel", 24.0), ("sum_kernel", 9.0), ("sum_kernel", 9.0)]])
    assert all("not known without counters" in bound for bound in shared)
    assert "no roof" in bounds(samples=alone, ceiling=None)[0]


def test_kernels_of_several_sources_are_one_by_name():
    named = "void rows_kernel(float*, int)"
    counted = Counted(named, 1, {"time": 10.0, "read": 2e6, "written": 1e6, "memory": 70.0})
    (kernel, other) = facts.kernels_of([CODE], [[(named, 12.0), ("fill", 1.0)]], [counted], None, H100)
    assert (kernel.name, kernel.launches, other.name) == (named, 1, "fill")
    assert {fact.source for fact in kernel.facts} == {facts.TIMES, facts.NCU, facts.COMPILER}
    shown = {(fact.name, fact.source): fact.value for fact in kernel.facts}
    assert shown["bytes a second", facts.NCU] == pytest.approx(300.0)
    assert {fact.source for fact in other.facts} == {facts.TIMES}
    forms = [CODE, Kernel("rows_kernel", threads=128, registers=40), Kernel("rows_kernel", threads=128, registers=40)]
    (together,) = facts.kernels_of(forms, [], [], None, H100)
    assert together.launches == 3
    assert [fact.value for fact in together.facts if fact.name == "registers a thread"] == [168, 40]


class Told(Instruments):
    """A GPU's, on the host."""

    def kernels(self, run):
        run()
        return [("rows_kernel", 24.0)]


@pytest.fixture
def asked():
    return subject.ProfileRequest("softmax", "float32", {"shape": (8, 16)}, "reference")


@pytest.fixture
def looked_at(asked, monkeypatch):
    """A function of ncu: the profile of a call that the oracle makes and that this machine passes off as a GPU's."""
    monkeypatch.setattr(subject, "here", lambda b, device: here(b, "cpu"))
    monkeypatch.setattr(session, "lower", lambda call, choice, arch: Build(
        "softmax", "forward", "float32", arch, "triton", "gpu", ok=True, kernels=[CODE]
    ))  # fmt: skip
    entry, _ = asked.made()
    told = Told(entry.framework, None)
    monkeypatch.setattr(type(entry), "instruments", property(lambda self: told))

    def made(ncu, platform="cuda", arch="sm_90"):
        monkeypatch.setattr(counters, "find", lambda: ncu)
        return session.looked_at(asked, entry, Target(platform, arch), True)

    return made


def test_a_profile_has_every_source_and_keeps_its_form(looked_at, tmp_path):
    ncu = stand_in(tmp_path, "print(RAW) if sys.argv[-3:-1] == ['-m', 'portakern.tools.profile.subject'] else None")
    found = looked_at(ncu)
    assert found.missing == {} and found.kernels[0].bound == "device memory, 91 % of the peak"
    sources = {fact.source for fact in [*found.facts, *found.kernels[0].facts]}
    assert sources == {facts.SPEC, facts.ROOF, facts.TIMES, facts.NCU, facts.COMPILER}
    file = tmp_path / "profile.json"
    results.write(file, results.record("profile", found.rows(), command="portakern profile", device="a GPU"))
    (row,) = results.read(file).rows
    assert row["kernel"] == "rows_kernel" and row["call_facts"][0]["value"] == 2 * 4 * 8 * 16


def test_without_counters_the_rest_is_there(looked_at):
    found = looked_at(None)
    assert "ncu is neither on the PATH" in found.missing[facts.NCU]
    assert "of the measured roof" in found.kernels[0].bound
    assert "reads NVIDIA's GPUs, and this is rocm gfx942" in looked_at(None, "rocm", "gfx942").missing[facts.NCU]


def test_a_kernel_that_no_compiler_here_made_is_kept_too(looked_at, monkeypatch, tmp_path):
    """As a peer's: there is no report, and no variant."""

    def refused(*of):
        raise pk.UnsupportedError("no backend compiles it ahead of time")

    monkeypatch.setattr(session, "lower", refused)
    found = looked_at(None)
    assert "no backend compiles it" in found.missing[facts.COMPILER] and found.variant is None
    file = tmp_path / "profile.json"
    results.write(file, results.record("profile", found.rows(), command="portakern profile", device="a GPU"))
    assert results.read(file).rows[0]["variant"] is None


def test_the_process_that_is_counted_makes_the_call_twice(asked, monkeypatch):
    """Once unseen, as compilers run in it, and once between the marks."""
    order = []

    class Marks:
        def __enter__(self):
            order.append("begin")

        def __exit__(self, *raised):
            order.append("end")

    monkeypatch.setattr(subject, "marked", Marks)
    monkeypatch.setattr(subject.ProfileRequest, "made", lambda self: (
        SimpleNamespace(run=lambda: order.append(self), instruments=SimpleNamespace(wait=lambda result: None)), None
    ))  # fmt: skip
    subject.main(subject.command(asked)[-1])
    assert order == [asked, "begin", asked, "end"]


def test_what_a_device_ran_is_told_by_pytorchs_profiler(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from portakern.core.framework import frameworks
    from portakern.frameworks.torch import timing

    def event(name, start, us, device, annotation=False):
        span = SimpleNamespace(start=start, elapsed_us=lambda: us)
        return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotation)

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    ran = [event("b", 9, 2.0, cuda), event("a", 1, 3.0, cuda), event("portakern::softmax", 0, 12.0, cuda, True)]
    ran.append(event("cudaLaunchKernel", 0, 5.0, cpu))

    class Profile(SimpleNamespace):
        __enter__, __exit__ = lambda self: self, lambda *raised: None

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile(events=lambda: ran))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(timing, "_cache_filler", lambda device: torch.empty(1))
    library, calls = frameworks()["torch"], []
    on_gpu = timing.TorchInstruments(library, SimpleNamespace(type="cuda"))
    assert on_gpu.kernels(lambda: calls.append(1)) == [("a", 3.0), ("b", 2.0)] and len(calls) == 2
    assert timing.TorchInstruments(library, torch.device("cpu")).kernels(lambda: None) is None


def test_gradients_are_called_for_what_their_forward_op_saves(monkeypatch):
    monkeypatch.setattr(subject, "here", lambda b, device: here(b, "cpu"))
    entry, target = subject.ProfileRequest("softmax_vjp", "float32", {"shape": (8, 16)}, "reference").made()
    assert entry.call.spec is registry.find_spec("softmax_vjp") and target.platform == "cpu"
    assert entry.run()[0].shape == (8, 16)


cli = CliRunner().invoke


def test_the_half_that_needs_no_device(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    file = tmp_path / "profile.json"
    shown = cli(app, ["profile", "softmax", "--shape", "shape=64x128", "--target", "sm_90", "--json", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "registers a thread" in shown.output and "nothing was run" in shown.output
    (row,) = results.read(file).rows
    assert row["op"] == "softmax" and {"Nsight Compute", "profiler", "measured roof"} == row["missing"].keys()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["softmax"], "serves no accelerator here.*--target sm_90, to profile"),
        (["nothing"], "nothing"),
        (["softmax", "--dtype", "int3"], "--dtype is 'int3'"),
        (["softmax", "--shape", "rows=3", "--target", "sm_90"], "--shape names 'rows'"),
        (["softmax", "--target", "sm_1"], "sm_1"),
        (["softmax", "--target", "sm_90", "--backend", "reference"], "no backend compiles softmax for sm_90"),
    ],
)
def test_what_cannot_be_profiled_is_said(arguments, words, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if torch.cuda.is_available() and arguments == ["softmax"]:
        pytest.skip("there is a GPU")
    result = cli(app, ["profile", *arguments])
    assert result.exit_code != 0
    assert re.search(words, str(result.exception), re.DOTALL)
