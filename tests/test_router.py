"""What router's bound says where rounding leaves two choices, and where it does not."""

import numpy as np

import portakern as pk
from portakern.core.oracle import as_float64
from portakern.spec.dtypes import numpy_dtype


def judged(x, bias=None, **options):
    """(bound of the weights, of the indices, the oracle's indices) of one token."""
    x = np.asarray(x, numpy_dtype("float32"))[None]
    call = as_float64(pk.op("router").bind(x, None if bias is None else np.asarray(bias, np.float32), **options))
    ref = pk.op("router", backend="reference")(*call.arrays.values(), **options)
    weights, indices = call.spec.bound(call, tuple(np.asarray(y, np.float64) for y in ref))
    return weights[0], indices[0], ref[1][0]


def test_either_of_two_sums_within_rounding_is_right():
    """sigmoid(20) and sigmoid(30) are 1 in float32: their order is the logits' without a bias, and open beside one."""
    sure, far, options = [20.0, -3.0, 30.0, 1.0], [0.0] * 4, {"k": 3, "scoring": "sigmoid"}
    assert (judged(sure, **options)[1] == 0).all() and judged(sure, **options)[2].tolist() == [2, 0, 3]
    weights, indices, _ = judged(sure, far, **options)
    assert indices.tolist() == [2, 2, 0] and (weights[:2] >= 1).all() and weights[2] < 1e-5


def test_the_same_logits_and_biases_have_one_order():
    weights, indices, found = judged([1.0, 2.0, 2.0, 2.0], [0.5, 0.25, 0.25, 0.25], k=2, scoring="sigmoid")
    assert indices.tolist() == [0, 0] and found.tolist() == [0, 1] and (weights < 1e-5).all()


def test_groups_within_rounding_leave_a_row_open():
    """Two groups with the same sum of other logits; with the same logits the first one is kept."""
    options = {"k": 2, "scoring": "sigmoid", "groups": 2, "groups_kept": 1}
    assert judged([20.0, 30.0, 25.0, 28.0], **options)[1].tolist() == [3, 2]
    assert judged([20.0, 30.0, 30.0, 20.0], **options)[1].tolist() == [0, 0]


def test_a_wrong_choice_is_found_beside_open_ones():
    """A kernel that drops the bias is wrong where sums are apart."""

    def without(logits, bias=None, **options):
        return pk.op("router", backend="reference")(logits, None, **options)

    edge = ["a_bias_that_rules"]
    report = pk.check("router", fn=without, framework="numpy", only_edges=edge, max_examples=8, shrink=False)
    assert not report.passed
