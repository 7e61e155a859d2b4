"""What users get wrong in calls of attention, and what they are told."""

from __future__ import annotations

import decimal
import math

import numpy as np

import portakern as pk
from tests.ops._shared import zeros

inf = math.inf


def call(*arrays, **options):
    return pk.op("attention")(*arrays, **options)


Q, K = zeros(2, 5, 4, 8), zeros(2, 7, 2, 8)
INT32 = np.int32
SHAPES = {
    "rank": (
        lambda: call(zeros(2, 3), K, K),
        r"attention: q has 2 axes, shape \(2, 3\); expected 4: \(batch, q_len, kv_heads\*group, d\); reshape it",
    ),
    "rank of a bias": (
        lambda: call(Q, K, K, zeros(7)),
        r"bias has 1 axis, shape \(7,\); expected 4: \(#batch, #kv_heads\*group, #q_len, kv_len\)",
    ),
    "axis": (
        lambda: call(Q, zeros(2, 7, 2, 9), K),
        r"attention: k axis 3 \(d\) is 9; expected 8, as set by q axis 3; make them agree: k is \(batch, ",
    ),
    "batch": (
        lambda: call(Q, zeros(3, 7, 2, 8), zeros(3, 7, 2, 8)),
        r"k axis 0 \(batch\) is 3; expected 2, as set by q axis 0",
    ),
    "heads that do not divide": (
        lambda: call(zeros(2, 5, 3, 8), K, K),
        r"q axis 2 \(kv_heads\*group\) is 3; expected a multiple of kv_heads = 2; change one",
    ),
    "no heads": (
        lambda: call(Q, zeros(2, 7, 0, 8), zeros(2, 7, 0, 8)),
        r"kv_heads is 0 \(k axis 2\); expected at least 1: an empty axis",
    ),
    "no query heads": (lambda: call(zeros(2, 5, 0, 8), K, K), r"group is 0 \(q axis 2\); expected at least 1"),
    "no head_dim": (
        lambda: call(zeros(1, 1, 1, 0), zeros(1, 1, 1, 0), zeros(1, 1, 1, 1)),
        r"attention: d is 0 \(q axis 3\); expected at least 1",
    ),
    "bias heads": (
        lambda: call(Q, K, K, zeros(2, 3, 5, 7)),
        r"bias axis 1 \(kv_heads\*group\) is 3; expected 4 or 1, as set by k axis 2",
    ),
    "bias keys": (
        lambda: call(Q, K, K, zeros(1, 1, 1, 1)),
        r"bias axis 3 \(kv_len\) is 1; expected 7, as set by k axis 1",
    ),
    "segment length": (
        lambda: call(Q, K, K, None, zeros(2, 4, dtype=INT32), zeros(2, 7, dtype=INT32)),
        r"q_segment_ids axis 1 \(q_len\) is 4; expected 5",
    ),
    "sinks of key heads": (
        lambda: call(Q, K, K, sinks=zeros(2)),
        r"sinks axis 0 \(kv_heads\*group\) is 2; expected 4, as set by",
    ),
    "slopes of key heads": (
        lambda: call(Q, K, K, alibi_slopes=zeros(2)),
        r"alibi_slopes axis 0 \(kv_heads\*group\) is 2; expected 4, as set by",
    ),
    "slopes of each batch entry": (
        lambda: call(Q, K, K, alibi_slopes=zeros(2, 4)),
        r"alibi_slopes has 2 axes, shape \(2, 4\); expected 1: \(kv_heads\*group\)",
    ),
    "sinks of each query": (
        lambda: call(Q, K, K, sinks=zeros(4, 5)),
        r"sinks has 2 axes, shape \(4, 5\); expected 1: \(kv_heads\*group\)",
    ),
    "sinks without keys": (
        lambda: call(Q, zeros(2, 0, 2, 8), zeros(2, 0, 2, 8), sinks=zeros(4)),
        r"sinks are given and k has no keys \(kv_len is 0\)",
    ),
    "one segment array": (
        lambda: call(Q, K, K, q_segment_ids=zeros(2, 5, dtype=INT32)),
        r"q_segment_ids and kv_segment_ids come together; pass both, or",
    ),
}
VALUES = {
    "a bias too wide": (
        lambda: call(Q, K, K, zeros(1, 1, 1, 7, dtype=np.float64)),
        r"bias is float64 but q is float32; expected float32: cast one",
    ),
    "sinks too wide": (
        lambda: call(Q, K, K, sinks=zeros(4, dtype=np.float64)),
        r"sinks is float64 but q is float32; expected float32: cast one",
    ),
    "slopes too narrow": (
        lambda: call(Q, K, K, alibi_slopes=zeros(4, dtype=np.float16)),
        r"alibi_slopes is float16; expected float32: cast it",
    ),
    "an integer bias": (lambda: call(Q, K, K, zeros(1, 1, 1, 7, dtype=INT32)), r"bias is int32 but q is float32"),
    "float segments": (
        lambda: call(Q, K, K, q_segment_ids=zeros(2, 5)),
        r"q_segment_ids is float32; expected one of int32, int64: cast it",
    ),
    "unsigned segments": (
        lambda: call(Q, K, K, None, zeros(2, 5, dtype=np.uint32)),
        r"q_segment_ids is uint32; expected one of int32, int64",
    ),
    "None for an array": (
        lambda: call(Q, None, K),
        r"attention: k has type NoneType; expected a NumPy, PyTorch or JAX array",
    ),
    "a word out of a list": (
        lambda: call(Q, K, K, precision="fp8"),
        r"attention: precision is 'fp8'; expected one of 'ieee', 'tf32': leave it out for 'ieee'",
    ),
    "window below zero": (
        lambda: call(Q, K, K, window=(1, -2)),
        (
            r"window is \(1, -2\); expected a tuple of 2 integers >= 0 \(None for no limit\), or None: leave it "
            r"out for None"
        ),
    ),
    "keys that stand somewhere beside queries that do not": (
        lambda: call(Q, K, K, is_causal=True, kv_start=3),
        r"kv_start is given and q_start is not: .*; pass q_start too",
    ),
    "a start between places": (
        lambda: call(Q, K, K, is_causal=True, q_start=0.5),
        r"q_start is 0.5; expected an integer .*, or None: leave it out for None",
    ),
    "a result of 16 bits by name": (
        lambda: call(Q, K, K, out_dtype="bfloat16"),
        r"out_dtype is 'bfloat16'; expected a dtype \(float32\), or None",
    ),
    "a result that is narrower than float64": (
        lambda: call(*(x.astype(np.float64) for x in (Q, K, K)), out_dtype="float32"),
        r"out_dtype is float32 and q is float64: .*; leave it out",
    ),
    "window of one": (lambda: call(Q, K, K, window=3), r"window is 3; expected a tuple of 2 integers"),
    "window of three": (
        lambda: call(Q, K, K, window=(1, 2, 3)),
        r"window is \(1, 2, 3\); expected a tuple of 2 integers",
    ),
    "window of booleans": (lambda: call(Q, K, K, window=(True, 1)), r"window is \(True, 1\)"),
    "window without end": (
        lambda: call(Q, K, K, window=(inf, None)),
        r"window is \(inf, None\); expected .* \(None for no limit\)",
    ),
    "softcap of zero": (
        lambda: call(Q, K, K, softcap=0.0),
        r"softcap is 0.0; expected a finite number .*or None",
    ),
    "softcap below zero": (lambda: call(Q, K, K, softcap=-1), r"softcap is -1; expected a finite number .*or None"),
    "softcap below float32": (
        lambda: call(Q, K, K, softcap=1e-300),
        r"softcap is 1e-300; expected a finite number .*or None",
    ),
    "scale nan": (
        lambda: call(Q, K, K, scale=math.nan),
        r"scale is nan; expected a finite number in float32's range, or None: leave it out for None",
    ),
    "scale that no float holds": (
        lambda: call(Q, K, K, scale=10**400),
        r"scale is 1000.*\.\.\. \(int\); expected a finite number in float32's range, or None",
    ),
    "scale beyond float32": (
        lambda: call(Q, K, K, scale=1e300),
        r"scale is 1e\+300; expected a finite number in float32's range",
    ),
    "scale as text": (lambda: call(Q, K, K, scale="1"), r"scale is '1'; expected a finite number"),
    "scale as an array": (
        lambda: call(Q, K, K, scale=np.ones(3)),
        r"scale is array\(\[1., 1., 1.\]\); expected a finite number",
    ),
    "scale as a decimal": (
        lambda: call(Q, K, K, scale=decimal.Decimal(1)),
        r"scale is Decimal\('1'\); expected a finite number",
    ),
    "scale as a boolean": (lambda: call(Q, K, K, scale=True), r"scale is True; expected a finite number"),
    "an integer for a boolean": (
        lambda: call(Q, K, K, is_causal=1),
        r"is_causal is 1; expected True or False: leave it out for False",
    ),
    "an array for a boolean": (
        lambda: call(Q, K, K, is_causal=np.array(True)),
        r"is_causal is array\(True\); expected True or False",
    ),
}
