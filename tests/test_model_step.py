"""The command that times a model's step, at a size for a CPU: its stages, its processes and what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from benchmarks import model_step
from maint import timed
from maint.measurements import StoredResults
from portakern import results
from tests.keeping import keep


@pytest.mark.parametrize("stage", ["eager", "compiled"])
def test_a_stage_times_every_contender_and_compares_its_gradients(stage, monkeypatch):
    monkeypatch.setattr(model_step, "SMALL", replace(model_step.SMALL, layers=1))  # each is traced for itself
    rows = model_step.STAGES[stage](stage, "cpu", 2, "aot_eager")
    assert list(rows) == list(model_step.TURNS[stage])
    able = {who: row for who, row in rows.items() if who != "liger" or "why" not in row}
    for who, row in able.items():
        assert row["rounds"] == 2 and row["best_ms"] <= row["ms"] <= row["worst_ms"], row
        assert row["loss"] == pytest.approx(rows["torch"]["loss"], rel=1e-5)
        assert who == "torch" or 0 <= row["gradients_apart"] < 1e-5
        assert row["grad_norm"] > 0.1
    ours = "\n".join(rows["portakern"]["served"])
    assert "linear_cross_entropy" in ours
    alone = rows[model_step.ALONE]["served"]
    assert [part.split()[0] for part in alone if part.split()[-1] == "reference"] == ["attention"]
    if stage == "eager":
        assert "parts lacks 'linear_loss'" in "\n".join(rows[model_step.KEPT]["served"])


def test_a_step_in_8_bits_is_timed_beside_others_and_its_gradients_differ_as_codes_do(monkeypatch):
    monkeypatch.setattr(model_step, "SMALL", replace(model_step.SMALL, layers=1))
    rows = model_step.STAGES["fp8"]("fp8", "cpu", 1, "aot_eager")
    assert list(rows) == list(model_step.TURNS["fp8"])
    for who in model_step.TRAINED:
        row = rows[who]
        assert row["rounds"] == 1 and row["loss"] == pytest.approx(rows["torch"]["loss"], rel=1e-2)
        assert 0.01 < row["gradients_apart"] < 0.2
        assert any(line.split()[:4] == ["fp8", "Linear", "7", "scaled_matmul"] for line in row["served"])
    assert rows["portakern"]["gradients_apart"] < 1e-5


@pytest.mark.parametrize("stage", ["forward", "forward-compiled"])
def test_a_forward_pass_in_8_bits_is_timed_beside_bfloat16s_with_its_loss(stage, monkeypatch):
    monkeypatch.setitem(model_step.WIDE, "cpu", replace(model_step.WIDE["cpu"], layers=1))
    rows = model_step.STAGES[stage](stage, "cpu", 1, "aot_eager")
    assert list(rows) == list(model_step.TURNS[stage])
    assert all(row["rounds"] == 1 and row["peak_gib"] is None for row in rows.values())
    assert max(rows["portakern"]["errors"].values()) < 1e-5
    for who in model_step.INFERRED:
        assert rows[who]["errors"]["loss"] < 0.05 and 0.01 < rows[who]["errors"]["logits"] < 0.2
        assert any(line.split()[:4] == ["fp8", "Linear", "7", "scaled_matmul"] for line in rows[who]["served"])


def test_every_stage_has_its_name_in_the_report():
    assert timed.STAGES.keys() == model_step.STAGES.keys()


def test_gradients_that_are_others_show(monkeypatch):
    right = model_step.portakerns_loss("cpu")
    monkeypatch.setattr(model_step, "portakerns_loss", lambda device: lambda h, w, t: right(h, w * 1.01, t))
    errors = model_step.STAGES["loss"]("loss", "cpu", 1, "")["portakern"]["errors"]
    assert min(errors.values()) > 1e-3


def test_who_fails_has_the_reason_and_the_others_go_on(monkeypatch):
    def broken(device):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(model_step, "portakerns_loss", broken)
    rows = model_step.STAGES["loss"]("loss", "cpu", 1, "")
    assert rows["portakern"] == {"why": "RuntimeError: no such kernel"}


def test_the_command_writes_results_that_the_report_shows(tmp_path, capsys, monkeypatch):
    file = tmp_path / "step.json"
    words = ["--device", "cpu", "--stages", "loss", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["model_step", *words, "--json", str(file)])
    assert model_step.main() == 0
    assert capsys.readouterr().out.split()[:2] == ["loss", "portakern"]
    run = results.read(file)
    assert (run.benchmark, run.device) == ("model-step", results.HOST_CPU)
    assert run.command == f"python -m benchmarks.model_step {' '.join(words)} --json step.json"
    assert run.extra["sizes"]["loss"] == "96 x 32 x 500"
    row = run.rows[0]
    assert row["contender"] == "portakern" and max(row["errors"].values()) < 1e-5
    keep(tmp_path, "step.json", json.loads(file.read_text()))
    table = timed.steps(StoredResults.load(tmp_path))
    assert f"| `linear_cross_entropy` | portakern | {row['ms']:.1f} |" in table


def test_a_stage_that_ends_early_says_how(tmp_path):
    args = SimpleNamespace(device="cpu", rounds=1, compiler="aot_eager", limit=0.05)
    assert model_step.measured("loss", args) == [
        {"stage": "loss", "contender": "portakern", "why": "did not end within 0.05 s"}
    ]


def test_the_report_shows_what_was_not_timed_and_sums_a_librarys_kernels(tmp_path):
    rows = [
        {"stage": "eager", "contender": "liger", "why": "liger_kernel is not installed"},
        {"stage": "eager", "contender": "portakern", "ms": 20.0, "best_ms": 19.0, "worst_ms": 22.0, "peak_gib": 1.5,
         "kernels": {"all": 18.0, "gemm_sm90_a": 4.0, "gemm_sm90_b(int)": 5.0, "rope_kernel": 6.0}},
        {"stage": "eager", "contender": "torch", "ms": 30.0, "best_ms": 29.0, "worst_ms": 32.0, "peak_gib": 3.0},
    ]  # fmt: skip
    data = results.record("model-step", rows, command="x", sizes={"model": "m", "loss": "l"}, wall_seconds=1)
    keep(tmp_path, "a.json", data)
    text = timed.steps(StoredResults.load(tmp_path))
    assert "| a Llama's step, eager | Liger | liger_kernel is not installed | – | – | – | – |" in text
    assert "| a Llama's step, eager | PyTorch | 30.0 | 29.0, 32.0 | 1.50 | 3.00 | – |" in text
    assert "Kernels of a step, eager, portakern: 18.0 ms, of which `gemm` 9.0, `rope_kernel` 6.0." in text
    assert "Nothing" not in text and "No step was timed yet" in timed.steps(StoredResults(tmp_path, ()))


def test_no_gpu_is_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        model_step.main([])
    assert "PyTorch sees no GPU here; --device cpu" in capsys.readouterr().err
