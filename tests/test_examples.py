"""The examples that train and that plug into other libraries, at small sizes."""

from pathlib import Path

import pytest

from portakern import results

torch = pytest.importorskip("torch", reason="torch is not installed")
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_hugging_face_models_agree_with_sdpa(backend):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'portakern[demo]'")
    from portakern.examples.huggingface import attention

    assert all(d < 1e-5 for d in attention.differences("cpu", backend).values())


def test_a_llama_trains_on_portakern_as_on_pytorch(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'portakern[demo]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'portakern[demo]'")
    from portakern.examples.train import train

    file, plot = tmp_path / "losses.json", tmp_path / "losses.svg"
    tiny = ["--size", "tiny", "--device", "cpu", "--on", "portakern", "--on", "torch", "--on", "liger"]
    assert not train.main([*tiny, "--json", str(file), "--plot", str(plot)])
    kept = results.read(file)
    ours, theirs = ([r["losses"] for r in kept.rows if r["ops"] == who] for who in ("portakern", "torch"))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-3)  # two steps on two pieces of text: no descent to speak of
    assert any("linear_cross_entropy" in line for line in kept.rows[0]["served"])
    assert plot.read_text().startswith("<?xml")


def test_the_character_model_trains_and_draws(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'portakern[demo]'")
    from portakern.examples.character_model import train

    monkeypatch.setattr(train, "BATCH", 8)
    monkeypatch.setattr(train, "CONTEXT", 32)
    assert not train.main(["--device", "cpu", "--steps", "2", "--seeds", "2", "--json", str(tmp_path / "losses.json")])
    result = results.read(tmp_path / "losses.json")
    first, second = ([r["final"] for r in result.rows if r["ops"] == who] for who in ("portakern", "torch"))
    assert result.extra["difference"] == pytest.approx(sum(first) / 2 - sum(second) / 2)
    first, second = (next(r["losses"] for r in result.rows if r["ops"] == who) for who in ("portakern", "torch"))
    assert first[0] == pytest.approx(second[0], abs=0.02) and first[1] < first[0]
    train.main(["--draw", str(tmp_path / "losses.json"), str(tmp_path / "losses.svg")])
    assert (tmp_path / "losses.svg").read_text().startswith("<?xml")


def test_losses_are_compared_seed_by_seed():
    """A seed's luck is on both sides: what it adds to both is no spread of their difference. The kept run says so, and
    so does the page that tells of it."""
    from portakern.examples.character_model import train

    luck = [1.0, 2.0, 3.0, 4.0]
    apart = train.compare({"portakern": [x + d for x, d in zip(luck, (1, -1, 1, 1), strict=True)], "torch": luck})
    assert apart["difference"] == 0.5 and apart["standard_error"] == 0.5 and apart["in_standard_errors"] == 1.0
    kept = results.read(ROOT / "benchmarks" / "results" / "character-model-h100.json")
    ends = {who: [row["final"] for row in kept.rows if row["ops"] == who] for who in ("portakern", "torch")}
    again = train.compare(ends)
    assert again["mean"] == pytest.approx(kept.extra["mean"])
    assert all(again[name] == pytest.approx(kept.extra[name]) for name in again.keys() - {"mean"})
    text = " ".join((ROOT / "examples" / "character_model" / "README.md").read_text(encoding="utf-8").split())
    means = "are {portakern:.5f} on portakern's ops and {torch:.5f} on PyTorch's.".format(**again["mean"])
    said = f"The difference is {again['difference']:.1e}, and {again['in_standard_errors']:.2f} standard errors of"
    assert means in text and f"{said} {again['standard_error']:.1e} (" in text
