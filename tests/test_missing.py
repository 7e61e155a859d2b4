"""What is not installed is said wherever somebody asks for what it brings, in the same words."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
from typer.testing import CliRunner

import portakern as pk
from portakern import install, inventory
from portakern.cli import app
from portakern.core import registry, targets
from portakern.core.backend import Backend, Family, Need
from portakern.tools.compile import abstract, worker
from portakern.tools.tune.target import tune_targets

WHY = "its kernels for sm_90 need jax >= 99 (which takes Python 9), and jax 0.10 is installed"


@pytest.fixture
def later(monkeypatch):
    """A backend whose kernels for one chip wait for a newer library."""
    pytest.importorskip("jax", reason="jax is not installed: pip install -e '.[pallas]'")
    monkeypatch.setattr(Backend, "missing_kernels", lambda self, target=None: (WHY,) if self.name == "pallas" else ())


@pytest.mark.parametrize(
    "command",
    [
        "doctor --json -",
        "backends --json -",
        "compile softmax --backend pallas --target sm_80",
        "check softmax --backend pallas --max-examples 1",
        "tune softmax --backend pallas --target sm_80",
        "profile softmax --backend pallas --target sm_80",
    ],
)
def test_every_command_names_what_a_chips_kernels_wait_for(later, command):
    done = CliRunner().invoke(app, command.split())
    assert WHY in done.output + done.stderr + str(done.exception)


def test_to_lower_a_call_and_the_pages_of_ops_name_it_too(later):
    with pytest.raises(pk.UnsupportedError, match="softmax on .*sm_80.*: no backend .*jax >= 99"):
        pk.op("softmax", backend="pallas").lower(np.ones((2, 3), "float32"), target="sm_80")
    assert all(WHY in row["status"] for row in inventory.backends() if row["backend"] == "pallas")


def test_what_a_family_waits_for_is_said_for_its_own_targets_alone():
    backend = Backend("waits", framework="torch", platforms=["cpu"])
    need = (Need("no-such-package", "1.0", "a note"),)
    backend.declared = (Family("waits.here", targets=("sm_90",), platforms=("cuda",), needs=need),)
    assert backend.missing_kernels(targets.find("sm_80").target) == ()
    said = ("its kernels for sm_90 need no-such-package >= 1.0 (a note), and none is installed",)
    assert backend.missing_kernels(targets.find("sm_90").target) == backend.missing_kernels() == said


def test_a_compiler_whose_packages_are_missing_is_a_reason_and_no_crash(monkeypatch):
    """``portakern compile --target sm_90`` where torch is missing raised PackageNotFoundError."""

    def missing(package):
        raise PackageNotFoundError(package)

    triton = pk.backends()["triton"]
    monkeypatch.setattr(triton, "requires", ("no_such_module",))
    monkeypatch.setattr(install, "version", missing)
    hardware, spec = targets.find("sm_90"), registry.find_spec("softmax")
    ((_, family),) = [found for found in abstract.compilers("softmax", hardware, triton) if not found[1].targets]
    assert set(family.load_compiler().versions(hardware).values()) == {"none"}
    built = worker.build(spec, triton, family, hardware, abstract.typical_signature(spec, "float32", {}), {})
    assert not built.ok and "no_such_module not installed; " in str(built.reason)
    with pytest.raises(pk.UnavailableError, match="tune: backend 'triton' cannot run here: no_such_module not"):
        tune_targets(spec, "sm_90", "triton", None)


def test_a_target_that_tune_refuses_is_not_among_those_that_it_offers():
    pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[triton]'")
    with pytest.raises(pk.UnsupportedError, match="'triton' has no softmax for v6e; name a --target, one of ") as e:
        tune_targets(registry.find_spec("softmax"), "v6e", "triton", None)
    assert " v6e," not in str(e.value).partition("one of ")[2]
