"""Binding: shapes solved, options made canonical, wrong calls refused in words."""

import ml_dtypes
import numpy as np
import pytest

import portakern as pk
from portakern.spec import Dim, Tile


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K = zeros(2, 5, 4, 8), zeros(2, 7, 2, 8)


def test_dimensions_are_solved_from_products():
    call = pk.op("attention").bind(Q, K, zeros(2, 7, 2, 3), return_lse=True)
    assert call.dims == {"batch": 2, "q_len": 5, "kv_heads": 2, "group": 2, "d": 8, "kv_len": 7, "dv": 3}
    assert call.outputs == {"o": ((2, 5, 4, 3), "float32"), "lse": ((2, 4, 5), "float32")}
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


def test_float64_keeps_its_statistics():
    q = zeros(1, 2, 1, 4, dtype=np.float64)
    assert pk.op("attention").bind(q, q, q, return_lse=True).outputs["lse"][1] == "float64"


WRONG = {
    "rank": (lambda: pk.op("attention")(zeros(2, 3), K, K), r"attention: q has 2 axes, shape \(2, 3\); expected 4: \(batch, q_len, kv_heads\*group, d\)"),
    "axis": (lambda: pk.op("attention")(Q, zeros(2, 7, 2, 9), K), r"attention: k axis 3 \(d\) is 9; expected 8, as set by q axis 3"),
    "division": (lambda: pk.op("attention")(zeros(2, 5, 3, 8), K, K), r"q axis 2 \(kv_heads\*group\) is 3, which kv_heads = 2 does not divide; make it a multiple of 2"),
    "zero heads": (lambda: pk.op("attention")(Q, zeros(2, 7, 0, 8), zeros(2, 7, 0, 8)), r"kv_heads is 0 \(k axis 2\); expected at least 1"),
    "zero head_dim": (lambda: pk.op("attention")(zeros(1, 1, 1, 0), zeros(1, 1, 1, 0), zeros(1, 1, 1, 1)), r"d is 0"),
    "dtype mix": (lambda: pk.op("matmul")(zeros(2, 2), zeros(2, 2, dtype=np.float16)), r"matmul: b is float16 but a is float32; expected float32: cast one"),
    "dtype": (lambda: pk.op("softmax")(zeros(3, dtype=np.int32)), r"softmax: x is int32; expected one of float32, float16, bfloat16, float64: cast it"),
    "byte order": (lambda: pk.op("softmax")(zeros(3, dtype=">f4")), r"softmax: x is >f4"),
    "complex": (lambda: pk.op("softmax")(zeros(3, dtype=np.complex64)), r"softmax: x is complex64"),
    "broadcast": (lambda: pk.op("matmul")(zeros(3, 2, 2), zeros(4, 2, 2)), r"leading axes \(4,\) of b do not broadcast with \(3,\) of a"),
    "bias axis": (lambda: pk.op("attention")(Q, K, K, zeros(2, 3, 5, 7)), r"bias axis 1 \(kv_heads\*group\) is 3; expected 4 or 1"),
    "one segment array": (lambda: pk.op("attention")(Q, K, K, q_segment_ids=zeros(2, 5, dtype=np.int32)), r"q_segment_ids and kv_segment_ids come together"),
    "float segments": (lambda: pk.op("attention")(Q, K, K, q_segment_ids=zeros(2, 5)), r"q_segment_ids is float32; expected one of int32, int64"),
    "option value": (lambda: pk.op("attention")(Q, K, K, precision="fp8"), r"precision is 'fp8'; expected one of 'ieee', 'tf32'"),
    "window": (lambda: pk.op("attention")(Q, K, K, window=(1, -2)), r"window is \(1, -2\); expected a tuple of 2 integers >= 0 \(None for no limit\), or None"),
    "window length": (lambda: pk.op("attention")(Q, K, K, window=3), r"window is 3"),
    "softcap": (lambda: pk.op("attention")(Q, K, K, softcap=0.0), r"softcap is 0.0; expected a finite number > 0, or None"),
    "scale": (lambda: pk.op("attention")(Q, K, K, scale=float("nan")), r"scale is nan; expected a finite number, or None"),
    "bool": (lambda: pk.op("attention")(Q, K, K, is_causal=1), r"is_causal is 1; expected True or False"),
    "eps": (lambda: pk.op("layernorm")(zeros(2, 2), eps=-1.0), r"eps is -1.0; expected a finite number >= 0"),
    "axis range": (lambda: pk.op("softmax")(zeros(2, 2), axis=2), r"axis is 2; expected an integer from -2 to 1"),
    "no axes": (lambda: pk.op("softmax")(np.zeros((), np.float32)), r"axis is -1; expected an integer but the array has no axes"),
    "out_dtype": (lambda: pk.op("matmul")(zeros(2, 2), zeros(2, 2), out_dtype="int8"), r"out_dtype is 'int8'; expected a floating-point dtype"),
    "not an array": (lambda: pk.op("softmax")([1.0, 2.0]), r"softmax: x has type list; expected a NumPy, PyTorch or JAX array"),
    "NumPy scalar": (lambda: pk.op("softmax")(np.float32(1)), r"softmax: x has type numpy.float32"),
    "masked array": (lambda: pk.op("softmax")(np.ma.masked_equal(zeros(3), 1)), r"MaskedArray, whose mask no kernel sees"),
    "unknown keyword": (lambda: pk.op("softmax")(zeros(3), dim=0), r"softmax\(\) got an unexpected keyword argument 'dim'; arrays: x; keyword options: axis"),
    "missing array": (lambda: pk.op("matmul")(zeros(2, 2)), r"matmul\(\) missing 1 required positional argument: 'b'"),
    "positional option": (lambda: pk.op("softmax")(zeros(3), 0), r"softmax\(\) takes 1 positional argument"),
    "unknown op": (lambda: pk.op("conv"), r"op 'conv' is unknown; expected one of attention, "),
    "unknown backend": (lambda: pk.op("softmax", backend="cuda"), r"backend 'cuda' is unknown; expected one of .*reference"),
    "unknown tile": (lambda: pk.op("softmax", tiling={"block_m": 16}), r"tiling has no 'block_m'; expected one of block_rows, block_n"),
    "tile value": (lambda: pk.op("softmax", tiling={"block_n": 100}), r"tiling\['block_n'\] is 100; expected one of 128, 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_is_wrong(name):
    call, message = WRONG[name]
    with pytest.raises(pk.SpecError, match=message):
        call()


def test_spec_errors_are_value_and_type_errors():
    for kind in (ValueError, TypeError):
        with pytest.raises(kind):
            pk.op("softmax")("text")


def test_shape_notation():
    assert Dim.parse("*#batch") == Dim(("batch",), broadcast=True, variadic=True)
    assert Dim.parse("#a*b") == Dim(("a", "b"), broadcast=True)
    for bad in ("", "2", "a+b", "**a", "*a*b"):
        with pytest.raises(ValueError, match="shape notation"):
            Dim.parse(bad)


def test_tiles_are_powers_of_two():
    assert Tile(16, 64).values == (16, 32, 64)
    assert 32 in Tile(16, 64) and 48 not in Tile(16, 64) and 128 not in Tile(16, 64) and True not in Tile(1, 64)
