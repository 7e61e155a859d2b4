"""The examples that train and that plug into other libraries, at small sizes."""

from pathlib import Path

import pytest

import portakern as pk
from maint import store
from portakern import results

torch = pytest.importorskip("torch", reason="torch is not installed")
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_hugging_face_models_agree_with_sdpa(backend):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")
    from portakern.examples.huggingface import attention

    assert all(d < 1e-5 for d in attention.differences("cpu", backend).values())


def test_a_llama_trains_on_portakern_as_on_pytorch(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[demo]'")
    from portakern.examples.train import train

    file, plot = tmp_path / "losses.json", tmp_path / "losses.svg"
    tiny = ["--size", "tiny", "--device", "cpu", "--on", "portakern", "--on", "torch", "--on", "liger"]
    assert not train.main([*tiny, "--json", str(file), "--plot", str(plot)])
    kept = results.read(file)
    ours, theirs = ([r["losses"] for r in kept.rows if r["ops"] == who] for who in ("portakern", "torch"))
    assert ours[0] == pytest.approx(theirs[0], abs=1e-3)  # two steps on two pieces of text: no descent to speak of
    assert any("linear_cross_entropy" in line for line in kept.rows[0]["served"])
    assert plot.read_text().startswith("<?xml")


def test_a_llama_trains_in_jax_as_in_pytorch(tmp_path):
    """From transformers' own weights, so that losses can be laid over each other."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")
    pytest.importorskip("jax", reason="jax is not installed: pip install -e '.[pallas]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[demo]'")
    from portakern.examples.train import train

    file, plot = tmp_path / "losses.json", tmp_path / "losses.svg"
    named = [f"--on={who}" for who in ("torch", "portakern-jax", "jax")]
    tiny = ["--size", "tiny", "--device", "cpu", "--steps", "3", *named]
    assert not train.main([*tiny, "--json", str(file), "--plot", str(plot)])
    kept = {row["ops"]: row for row in results.read(file).rows}
    assert [*kept] == ["torch", "portakern-jax", "jax"]
    for who in ("portakern-jax", "jax"):
        assert kept[who]["losses"] == pytest.approx(kept["torch"]["losses"], abs=1e-4)
    assert "rmsnorm: reference" in kept["portakern-jax"]["served"]
    assert "portakern-jax" in plot.read_text()


def test_an_op_that_no_backend_takes_is_xlas_and_said_to_be(monkeypatch):
    jax = pytest.importorskip("jax", reason="jax is not installed: pip install -e '.[pallas]'")
    from portakern.examples.train import on_jax
    from portakern.examples.train.run import SIZES

    def refused(*arrays):
        raise pk.UnsupportedError("nobody here has it")

    of = on_jax.on_backend
    lacks = dict.fromkeys((*on_jax.COMPOSED, "swiglu"), refused)
    monkeypatch.setattr(on_jax, "on_backend", lambda backend: {**of(backend), **lacks})
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        ops, said = on_jax.served(SIZES["tiny"], "reference", "float32")
    assert ops["swiglu"] is on_jax.swiglu and ops["rope"] is not on_jax.rope
    assert "swiglu: XLA; nobody here has it" in said and "rope: reference" in said
    normed, summed = ops["add_rmsnorm"](*(jax.numpy.ones((2, 3)) for _ in range(2)), jax.numpy.ones(3))
    assert ops["rmsnorm"].func.spec.name == "rmsnorm" and (summed == 2).all() and abs(normed - 1).max() < 1e-6


def test_the_character_model_trains_and_draws(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[demo]'")
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
    kept = next(r for r in store.read(ROOT / store.FOLDER) if r.benchmark == "character_model")
    ends = {who: [row["final"] for row in kept.rows if row["ops"] == who] for who in ("portakern", "torch")}
    again = train.compare(ends)
    assert again["mean"] == pytest.approx(kept.extra["mean"])
    assert all(again[name] == pytest.approx(kept.extra[name]) for name in again.keys() - {"mean"})
    text = " ".join((ROOT / "examples" / "character_model" / "README.md").read_text(encoding="utf-8").split())
    means = "are {portakern:.5f} on portakern's ops and {torch:.5f} on PyTorch's.".format(**again["mean"])
    said = f"The difference is {again['difference']:.1e}, and {again['in_standard_errors']:.2f} standard errors of"
    assert means in text and f"{said} {again['standard_error']:.1e} (" in text
