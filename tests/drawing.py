"""Cases as the checker draws them, for tests of Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from portakern.testing.cases import Case
from portakern.testing.source import Rejected
from portakern.testing.strategies import drawn


@st.composite
def cases(draw: st.DrawFn, *args: Any, **kwargs: Any) -> Case:
    """A case of :func:`portakern.testing.strategies.drawn` by any seed."""
    seed = draw(st.integers(0, 2**32))
    try:
        return drawn(seed, *args, **kwargs)[0]
    except Rejected:
        assume(False)
        raise
