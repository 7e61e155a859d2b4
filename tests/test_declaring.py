"""What a signature may say of names, extents and offsets, tried on small ops that only the oracle has."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeVar

import numpy as np
import pytest
from jaxtyping import Float

import portakern as pk
from portakern.errors import SpecError
from portakern.spec import Range, spec
from tests.word_kernels import declared

A = TypeVar("A")

# ---------------------------------------------------------------------------------------------------------------- names


class OddOut(NamedTuple):
    y: Float[A, "call"]


def test_generated_code_has_no_name_of_a_signature():
    """Each of these was a variable, a function or a constant of what is written from a signature."""

    @spec(tiling={}, flops=lambda call: 1.0)
    def strange(
        tuple: Float[A, "call"],
        SPEC: Float[A, "call"],
        *,
        dtype: Literal["up", "down"] = "up",
        framework: bool = False,
        device: Annotated[int, Range(typical=(3,))] = 0,
        len: bool = False,
        type: bool = False,
    ) -> OddOut:
        """y = tuple + SPEC."""
        raise NotImplementedError

    pk.backends()["reference"].implements("strange")(lambda call, tiling: (call.arrays["tuple"] + call.arrays["SPEC"],))
    x, options = np.ones(3, np.float32), {"dtype": "down", "framework": True, "device": 3, "len": True, "type": True}
    call = pk.op(strange).bind(x, x, **options)
    assert call.dtype == "float32" and call.options == options and call.dims == {"call": 3}
    for _ in range(2):  # the second time by the plan that is kept
        np.testing.assert_array_equal(pk.op(strange)(x, x, **options), 2 * x)


def test_generated_code_of_torch_has_no_name_of_a_signature():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from portakern.core.dispatch import Choice
    from portakern.frameworks.torch.custom_ops import staged

    array = Float[A, "n"]
    odd = declared({"result": array, "custom_op": array}, {"y": array}, {"Tensor": int, "type": float})
    pk.backends()["reference"].implements("odd")(lambda call, tiling: (call.arrays["result"],))
    function = staged(odd, Choice.from_names(odd, "reference", None, None))
    y = function(torch.ones(3), torch.ones(3), Tensor=2, type=2.0)
    assert y.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "arrays, options, message",
    [
        ({"x": "n"}, {"wants": bool}, "option 'wants' has the name of a keyword that calls have .*; rename it"),
        ({"tiling": "n"}, {}, "array 'tiling' has the name of a keyword .*; rename it"),
        ({"x": "n"}, {"_y": bool}, "option '_y' begins with an underscore, as names of generated code do; rename it"),
        ({"x": "n"}, {"n": float}, "'n' is an option and a dimension; rename one"),
        ({"x": "n m", "m": "n?"}, {}, "'m' is an optional array and a dimension; rename one"),
    ],
)
def test_names_of_two_things_are_refused(arrays, options, message):
    hints = {n: Float[A, s.rstrip("?")] | None if s.endswith("?") else Float[A, s] for n, s in arrays.items()}
    with pytest.raises(SpecError, match=message):
        declared(hints, {"y": Float[A, "n"]}, options)
