"""The Mojo backend beyond what the checker asks of it: threads, libraries that are made once, failures in words."""

import numpy as np
import pytest

pytest.importorskip("mojo", reason="mojo is not installed: pip install -e '.[mojo]'")

import portakern as pk
from portakern import inventory
from portakern.backends.mojo import launch, library
from tests.ops import records
from tests.ops.record import dtype_for

OPS = [op for op in records() if "mojo" in inventory.backends_with(op)]


@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_the_number_of_threads(op, monkeypatch):
    monkeypatch.setattr(launch, "SHARE", 1)
    for sample in records()[op].small.values():
        found = []
        for threads in (1, 3):
            monkeypatch.setattr(launch, "_threads", lambda threads=threads: threads)
            arrays = sample.arrays(op, dtype_for(op, "float32"))
            found.append(pk.op(op, backend="mojo", tiling=sample.tiling)(**arrays, **sample.options))
        one, many = ((x,) if isinstance(x, np.ndarray) else x for x in found)
        assert [x is None or x.tobytes() for x in one] == [x is None or x.tobytes() for x in many]


def test_a_call_that_names_no_backend_is_still_the_oracles():
    assert "backend: reference (chosen" in pk.op("softmax").explain(np.ones((2, 3), np.float32))


def test_what_the_compiler_says_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTAKERN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "HERE", tmp_path)
    for folder in ("cpu", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cpu" / "broken.mojo").write_text("def broken(:\n")
    with pytest.raises(pk.UnavailableError, match=r"(?s)cannot compile .*broken\.mojo, after \d+ s:.*error"):
        library.function("broken", "broken")
    assert not list((tmp_path / "cache").rglob("*.so")) and not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_library_is_made_once(monkeypatch):
    library.make(["softmax"])
    monkeypatch.setattr(library, "_compile", lambda module: pytest.fail(f"{module} is compiled again"))
    library.make(["softmax"])
