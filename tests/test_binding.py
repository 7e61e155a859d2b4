"""Binding: shapes solved, options made canonical."""

import ml_dtypes
import numpy as np
import pytest

import portakern as pk
from portakern.spec import Count, Dim, Tile


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K = zeros(2, 5, 4, 8), zeros(2, 7, 2, 8)


def test_dimensions_are_solved_from_products():
    call = pk.op("attention").bind(Q, K, zeros(2, 7, 2, 3), return_lse=True)
    assert call.dims == {"batch": 2, "q_len": 5, "kv_heads": 2, "group": 2, "d": 8, "kv_len": 7, "dv": 3}
    row = ((2, 4, 5), "float32")
    assert call.outputs == {"o": ((2, 5, 4, 3), "float32"), "lse": row, "lse_low": row}
    assert call.wants == ("o", "lse")


def test_leading_axes_broadcast_as_numpy_does():
    call = pk.op("matmul").bind(zeros(3, 1, 4, 5), zeros(6, 5, 2))
    assert call.dims["batch"] == (3, 6) and call.outputs["c"][0] == (3, 6, 4, 2)


def test_options_become_canonical():
    call = pk.op("softmax").bind(zeros(2, 3, 4), axis=np.int64(-2))
    assert call.options == {"axis": 1} and type(call.options["axis"]) is int
    for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)):
        assert pk.op("matmul").bind(zeros(1, 1), zeros(1, 1), out_dtype=dtype).outputs["c"][1] == "bfloat16"
    assert pk.op("attention").bind(Q, K, K, window=[1, None], is_causal=np.bool_(True)).options["window"] == (1, None)


def test_a_call_prints_an_extent_that_is_an_option_once():
    assert repr(pk.op("top_k").bind(zeros(2, 8), k=3)) == "top_k(float32; batch=(2,), n=8, k=3)"


def test_float64_keeps_its_statistics():
    q = zeros(1, 2, 1, 4, dtype=np.float64)
    assert pk.op("attention").bind(q, q, q, return_lse=True).outputs["lse"][1] == "float64"


def test_shape_notation():
    assert Dim.parse("*#batch") == Dim(("batch",), broadcast=True, variadic=True)
    assert Dim.parse("#a*b") == Dim(("a", "b"), broadcast=True)
    for bad in ("", "2", "a+b", "**a", "*a*b"):
        with pytest.raises(ValueError, match="shape notation"):
            Dim.parse(bad)


def test_tiles_are_powers_of_two():
    assert Tile(16, 64).values == (16, 32, 64)
    assert 32 in Tile(16, 64) and 48 not in Tile(16, 64) and 128 not in Tile(16, 64) and True not in Tile(1, 64)
    assert Count(1, 4).values == (1, 2, 3, 4) and 3 in Count(1, 4) and 5 not in Count(1, 4) and True not in Count(1, 4)
