"""The examples that train and that plug into other libraries, at small sizes."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_hugging_face_models_agree_with_sdpa(backend):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'portakern[demo]'")
    from portakern.examples.huggingface import attention

    assert all(d < 1e-5 for d in attention.differences("cpu", backend).values())


def test_the_character_model_trains_and_draws(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'portakern[demo]'")
    from portakern.examples.character_model import train

    monkeypatch.setattr(train, "BATCH", 8)
    monkeypatch.setattr(train, "CONTEXT", 32)
    assert not train.main(["--device", "cpu", "--steps", "2", "--seeds", "2", "--json", str(tmp_path / "losses.json")])
    result = json.loads((tmp_path / "losses.json").read_text())
    first, second = (next(r["losses"] for r in result["rows"] if r["ops"] == who) for who in ("portakern", "torch"))
    assert first[0] == pytest.approx(second[0], abs=0.02) and first[1] < first[0]
    train.main(["--draw", str(tmp_path / "losses.json"), str(tmp_path / "losses.svg")])
    assert (tmp_path / "losses.svg").read_text().startswith("<?xml")
