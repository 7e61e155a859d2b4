"""Conformance in pytest: each case of ``portakern.testing.conformance`` is a test with its own id.

pytest loads this module wherever portakern is installed. It therefore imports the rest of portakern only when a test
uses it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which cases are drawn, for all tests that do not say it themselves."""
    group = parser.getgroup("portakern", "conformance of kernels (portakern)")
    group.addoption(
        "--portakern-examples",
        type=int,
        metavar="N",
        help="cases of each conformance test (default: as many as portakern check draws)",
    )
    group.addoption(
        "--portakern-seed", type=int, action="append", metavar="N", help="which cases; may be repeated (default: 0)"
    )


def _seeds(metafunc: pytest.Metafunc) -> list[int] | None:
    """The seeds that the command line gives; else those of the ids that it names, an id being seed-number-dtype-regime,
    and the default beside them where it asks for more than ids."""
    given: list[int] | None = metafunc.config.getoption("portakern_seed")
    args = [str(a) for a in metafunc.config.args]
    named = [int(m[1]) for a in args if (m := re.search(rf"::{metafunc.definition.name}\[(\d+)-", a))]
    named += [0] if any("[" not in a for a in args) else []
    return given or ([*dict.fromkeys(named)] if any(named) else None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A conformance test becomes one test a case."""
    made = getattr(metafunc.function, "portakern_conformance", None)
    if made is None:
        return
    cases = made.cases(metafunc.config.getoption("portakern_examples"), _seeds(metafunc))
    metafunc.parametrize("portakern_case", [c for _, c in cases], ids=[name for name, _ in cases])
