"""Faults of any op: its oracle, rounded, with one thing changed, each of a kind that calls as people make them meet.

Run as a script for the study over seeds: how many of each kind are found in so many cases.

    python -m tests.mutants.drawn 20 60 100 200
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.binder import bind
from portakern.core.oracle import degenerate_outputs, rounded_oracle
from tests.mutants.functions import Planted, found

__all__ = ["FAULTS", "kernel"]

Arrays = dict[str, Any]
Changed = Callable[[Any, Arrays, Arrays], None]
"""(the call, its arrays, its outputs) -> nothing: changes the outputs in place."""
Read = Callable[[Any, Arrays, dict[str, Any]], None]
"""(the call, its arrays, its options) -> nothing: changes what the kernel reads; arrays are copies."""


FAULTS: list[Planted] = []


def outputs_of(call: Any) -> Arrays:
    """The outputs of a call, whole, rounded and contiguous."""
    with np.errstate(all="ignore"):
        found = degenerate_outputs(call) if call.degenerate else rounded_oracle(call)
    return {n: None if y is None else np.array(y, order="C") for n, y in zip(call.outputs, found, strict=True)}


def kernel(op: str, read: Read | None = None, changed: Changed | None = None) -> Callable[..., Any]:
    """The op by its oracle, with what it reads or gives changed."""
    spec = registry.find_spec(op)

    def fn(*arrays: Any, **named: Any) -> Any:
        call = bind(spec, *arrays, **named)
        given = {n: a for n, a in call.arrays.items() if a is not None}
        seen = call
        if read is not None and not call.degenerate:
            copies, options = {n: np.array(a) for n, a in given.items()}, dict(call.options)
            read(call, copies, options)
            seen = bind(spec, **copies, **options, **({"wants": call.wants} if spec.is_vjp else {}))
            seen = seen.replace(wants=call.wants)
        outputs = outputs_of(seen)
        if changed is not None:
            changed(call, given, {n: y for n, y in outputs.items() if y is not None})
        return tuple(outputs.values()) if spec.is_vjp or len(call.wants) > 1 else outputs[call.wants[0]]

    return fn


def reads(op: str, kind: str, what: str, read: Read) -> None:
    FAULTS.append(Planted(op, kind, what, lambda: kernel(op, read), ""))


def gives(op: str, kind: str, what: str, changed: Changed) -> None:
    FAULTS.append(Planted(op, kind, what, lambda: kernel(op, None, changed), ""))


def off(outputs: Arrays) -> None:
    """A quarter too much, everywhere."""
    with np.errstate(all="ignore"):
        for y in outputs.values():
            y *= y.dtype.type(1.25)


def where(op: str, kind: str, what: str, condition: Callable[[Any, Arrays], bool]) -> None:
    """Off where a condition on the call holds."""
    gives(op, kind, what, lambda call, arrays, outputs: off(outputs) if condition(call, arrays) else None)


# --- long: vocabularies, contexts, many rows ---

LAST = {
    "softmax": "x", "logsumexp": "x", "cross_entropy": "logits", "layernorm": "x", "rmsnorm": "x", "swiglu": "gate",
    "geglu": "gate", "softmax_vjp": "y", "logsumexp_vjp": "x", "cross_entropy_vjp": "logits", "layernorm_vjp": "x",
    "rmsnorm_vjp": "x",
}  # fmt: skip
for _op, _name in LAST.items():
    where(_op, "long", "rows longer than 4,100", lambda c, a, n=_name: a[n].ndim and a[n].shape[-1] > 4100)
for _op, _name, _axis in (
    ("matmul", "a", -1), ("matmul", "b", -1), ("linear", "x", -1), ("linear", "weight", 0),
    ("linear_cross_entropy", "weight", 0), ("linear_cross_entropy_vjp", "weight", 0), ("attention", "k", 1),
    ("attention_vjp", "k", 1), ("rope", "x", 1),
):  # fmt: skip
    where(_op, "long", f"{_name} longer than 4,100 along axis {_axis}",
          lambda c, a, n=_name, i=_axis: a[n].ndim > 1 and a[n].shape[i] > 4100)  # fmt: skip
for _op, _name in (("layernorm", "x"), ("rmsnorm_vjp", "x"), ("cross_entropy", "logits"), ("softmax", "x")):
    where(_op, "long", "more than 4,100 rows",
          lambda c, a, n=_name: a[n].ndim > 1 and a[n].size // max(a[n].shape[-1], 1) > 4100)  # fmt: skip
where("cross_entropy", "long", "classes beyond 32,000",
      lambda c, a: a["logits"].shape[-1] > 32000)  # fmt: skip
where("logsumexp", "long", "an index of 16 bits with a sign", lambda c, a: max(a["x"].shape) > 32767)

# --- attention as people run it ---


def attended(op: str, what: str, condition: Callable[[Any, Arrays], bool]) -> None:
    where(op, "attention", what, condition)


for _op in ("attention", "attention_vjp"):
    attended(_op, "d of 65 and more that 16 does not divide", lambda c, a: c.dims["d"] > 64 and c.dims["d"] % 16 > 0)
    attended(_op, "causal over more than 128 keys", lambda c, a: c.options["is_causal"] and c.dims["kv_len"] > 128)
    attended(
        _op, "one key beyond whole tiles of 128", lambda c, a: c.dims["kv_len"] > 128 and c.dims["kv_len"] % 128 == 1
    )
    attended(_op, "heads of 128 and causal", lambda c, a: c.dims["d"] >= 128 and c.options["is_causal"])


def two_queries(call: Any, arrays: Arrays, options: dict[str, Any]) -> None:
    if call.dims["q_len"] == 2:
        options["is_causal"] = False


def last_split(call: Any, arrays: Arrays, options: dict[str, Any]) -> None:
    if call.dims["q_len"] == 1 and call.dims["kv_len"] > 512:
        arrays["v"][:, call.dims["kv_len"] // 256 * 256 :] = 0


for _op in ("attention", "attention_vjp"):
    reads(_op, "attention", "is_causal lost of two queries", two_queries)
reads("attention", "attention", "the last split of decoding adds nothing", last_split)

# --- float64 ---


def narrow(dtype: type) -> Changed:
    def changed(call: Any, arrays: Arrays, outputs: Arrays) -> None:
        with np.errstate(all="ignore"):
            for y in outputs.values():
                if y.dtype == np.float64:
                    y[...] = y.astype(dtype)

    return changed


for _op in ("softmax", "layernorm", "matmul", "attention", "swiglu", "cross_entropy", "rmsnorm_vjp", "attention_vjp"):
    gives(_op, "float64", "rounded to float32 on the way", narrow(np.float32))
gives("softmax", "float64", "of float16 precision", narrow(np.float16))

# --- layouts ---


def flat(a: Any) -> bool:
    return bool(a.size > 1 and any(s == 0 and n > 1 for s, n in zip(a.strides, a.shape, strict=True)) and a.ndim > 0)


def one_number(a: Any) -> bool:
    return bool(a.size > 1 and all(s == 0 or n == 1 for s, n in zip(a.strides, a.shape, strict=True)))


for _op, _name in (
    ("softmax_vjp", "d_y"), ("layernorm_vjp", "d_y"), ("rmsnorm_vjp", "d_y"), ("swiglu_vjp", "d_y"),
    ("cross_entropy_vjp", "d_loss"), ("attention_vjp", "d_o"), ("logsumexp_vjp", "d_y"), ("matmul_vjp", "d_c"),
):  # fmt: skip
    where(_op, "layouts", f"{_name} of strides 0", lambda c, a, n=_name: one_number(a[n]))
for _op, _name in (("softmax", "x"), ("layernorm", "x"), ("matmul", "b"), ("attention", "k")):
    where(_op, "layouts", f"a negative stride of {_name}", lambda c, a, n=_name: any(s < 0 for s in a[n].strides))
    where(_op, "layouts", f"every third element of {_name}",
          lambda c, a, n=_name: a[n].ndim > 0 and a[n].shape[-1] > 1
          and a[n].strides[-1] == 3 * a[n].itemsize)  # fmt: skip
where("attention", "layouts", "q, k and v beside each other", lambda c, a: a["k"].shape[1] > 1 and a["k"].size
      and a["k"].strides[-1] == a["k"].itemsize and a["k"].shape[-1] > 1
      and a["k"].strides[-2] == 3 * a["k"].shape[-1] * a["k"].itemsize)  # fmt: skip
where("rmsnorm", "layouts", "what nobody may write to", lambda c, a: not a["x"].flags.writeable)

# --- integers ---


def ids(change: Callable[[Any], Any]) -> Read:
    def read(call: Any, arrays: Arrays, options: dict[str, Any]) -> None:
        for n in ("q_segment_ids", "kv_segment_ids"):
            if n in arrays:
                arrays[n] = change(arrays[n].astype(np.int64)).astype(arrays[n].dtype)

    return read


for _op in ("attention", "attention_vjp"):
    reads(_op, "integers", "segments in 8 bits", ids(lambda s: s & 255))
    reads(_op, "integers", "segments in float32", ids(lambda s: s.astype(np.float32).astype(np.int64)))
    reads(_op, "integers", "negative segments are one", ids(lambda s: np.maximum(s, -1)))


def only_100(call: Any, arrays: Arrays, outputs: Arrays) -> None:
    if call.options["ignore_index"] < 0 and call.options["ignore_index"] != -100:
        off(outputs)


for _op in ("cross_entropy", "cross_entropy_vjp", "linear_cross_entropy"):
    gives(_op, "integers", "a negative ignore_index other than -100", only_100)

# --- kept by identity ---


def keeping(op: str, names: tuple[str, ...], kind: str = "kept") -> None:
    """What a call reads of some arguments is what the last call with the same objects read."""

    def make() -> Callable[..., Any]:
        kept: dict[str, tuple[Any, Any]] = {}
        spec = registry.find_spec(op)
        inner = kernel(op)

        def fn(*arrays: Any, **named: Any) -> Any:
            required = [a.name for a in spec.arrays if not a.optional]
            given = {**dict(zip(required, arrays, strict=False)), **named}
            for n in names:
                a = given.get(n)
                if a is not None:
                    if n not in kept or kept[n][0] is not a:
                        kept[n] = a, a.copy()
                    given[n] = kept[n][1]
            return inner(**given)

        return fn

    FAULTS.append(Planted(op, kind, f"{' and '.join(names)} by identity", make, ""))


keeping("cross_entropy", ("labels",))
keeping("cross_entropy_vjp", ("logits",))
keeping("attention", ("bias",))
keeping("attention", ("q_segment_ids", "kv_segment_ids"))
keeping("attention_vjp", ("k", "v"))
keeping("attention_vjp", ("lse",))
keeping("layernorm_vjp", ("x",))
keeping("rmsnorm_vjp", ("weight",))
keeping("linear_cross_entropy", ("labels",))
keeping("rope", ("cos", "sin"))

# --- precision ---


def halves_of_heads(call: Any, arrays: Arrays, outputs: Arrays) -> None:
    """d_k and d_v of each query head rounded to the dtype, then added up."""
    group = call.dims["group"]
    if group == 1 or call.degenerate:
        return
    spec = call.spec
    q_heads = {n for n in ("q", "o", "d_o") if n in arrays}
    for name in ("d_k", "d_v"):
        if name not in outputs:
            continue
        total = np.zeros(outputs[name].shape, np.float64)
        for g in range(group):
            one = {n: np.ascontiguousarray(a[:, :, g::group]) if n in q_heads else a for n, a in arrays.items()}
            for n in ("lse", "d_lse"):
                if n in one:
                    one[n] = np.ascontiguousarray(one[n][:, g::group])
            if "bias" in one and one["bias"].shape[1] > 1:
                one["bias"] = np.ascontiguousarray(one["bias"][:, g::group])
            part = bind(spec, **one, **call.options, wants=(name,))
            with np.errstate(all="ignore"):
                total += np.asarray(dict(zip(part.outputs, rounded_oracle(part), strict=True))[name], np.float64)
        with np.errstate(all="ignore"):
            outputs[name][...] = total.astype(outputs[name].dtype)


gives("attention_vjp", "precision", "d_k and d_v of a head rounded before the group's sum", halves_of_heads)


def rescaled(call: Any, arrays: Arrays, outputs: Arrays) -> None:
    """The running sum l in x's dtype, tile after tile of 64."""
    x = np.moveaxis(np.asarray(arrays["x"], np.float64), call.options["axis"], -1)
    if call.degenerate or call.dtype not in ("float16", "bfloat16") or x.shape[-1] <= 64:
        return
    low = arrays["x"].dtype
    with np.errstate(all="ignore"):
        top, total = np.full(x.shape[:-1], -np.inf), np.zeros(x.shape[:-1])
        for j in range(0, x.shape[-1], 64):
            part = x[..., j : j + 64]
            new = np.maximum(top, part.max(-1))
            total = total * np.exp(top - new) + np.exp(part - new[..., None]).sum(-1)
            total, top = total.astype(low).astype(np.float64), new
        y = np.exp(x - top[..., None]) / total[..., None]
    outputs["y"][...] = np.moveaxis(y, -1, call.options["axis"]).astype(low)


gives("softmax", "precision", "a running sum in 16 bits", rescaled)


def running_average(call: Any, arrays: Arrays, outputs: Arrays) -> None:
    """The running sum of weighted values in 16 bits between tiles of 32 keys: half an ulp a tile, at random."""
    if call.degenerate or call.dtype not in ("float16", "bfloat16") or call.dims["kv_len"] <= 64:
        return
    low, rng = outputs["o"].dtype, np.random.default_rng(0)
    tiles = call.dims["kv_len"] // 32
    with np.errstate(all="ignore"):
        ulp = np.abs(outputs["o"].astype(np.float64)) * float(2.0 ** (-11 if call.dtype == "float16" else -8))
        noise = rng.uniform(-1, 1, (tiles, *ulp.shape)).sum(0) * ulp / 2
        outputs["o"][...] = (outputs["o"].astype(np.float64) + noise).astype(low)


gives("attention", "precision", "a running sum of values in 16 bits", running_average)


# --- unseen: of the same kinds, written after the drawing was settled, which nothing in it was made for ---

for _op, _name in (
    ("geglu", "up"), ("add_layernorm", "x"), ("add_rmsnorm", "x"), ("add_layernorm_vjp", "d_y"),
    ("add_rmsnorm_vjp", "residual_out"), ("geglu_vjp", "gate"), ("swiglu_vjp", "gate"),
):  # fmt: skip
    where(_op, "unseen long", "rows longer than 4,100", lambda c, a, n=_name: a[n].ndim and a[n].shape[-1] > 4100)
for _op, _name, _axis in (
    ("attention", "q", 1), ("attention_vjp", "q", 1), ("rope_vjp", "d_y", 1), ("matmul_vjp", "a", -1),
    ("linear_vjp", "weight", 0),
):  # fmt: skip
    where(_op, "unseen long", f"{_name} longer than 4,100 along axis {_axis}",
          lambda c, a, n=_name, i=_axis: a[n].ndim > 1 and a[n].shape[i] > 4100)  # fmt: skip
where("rmsnorm", "unseen long", "more than 4,100 rows",
      lambda c, a: a["x"].ndim > 1 and a["x"].size // max(a["x"].shape[-1], 1) > 4100)  # fmt: skip
for _op in ("softmax", "logsumexp"):
    where(_op, "unseen long", "more than 1,000 elements along an axis that is not the last",
          lambda c, a: c.options["axis"] not in (-1, a["x"].ndim - 1)
          and a["x"].shape[c.options["axis"]] > 1000)  # fmt: skip

for _op in ("attention", "attention_vjp"):
    for _what, _condition in {
        "causal with a window over more than 64 keys": lambda c, a: (
            c.options["is_causal"] and c.options["window"] is not None and c.dims["kv_len"] > 64
        ),
        "softcap beside a bias": lambda c, a: c.options["softcap"] is not None and a.get("bias") is not None,
        "four or more heads a group, causal": lambda c, a: c.dims["group"] >= 4 and c.options["is_causal"],
        "more than 8 heads": lambda c, a: c.dims["group"] * c.dims["kv_heads"] > 8,
        "a scale of its own with heads of more than 64": lambda c, a: (
            c.options["scale"] is not None and c.dims["d"] > 64
        ),
        "causal with more queries than keys": lambda c, a: (
            c.options["is_causal"] and c.dims["q_len"] > c.dims["kv_len"]
        ),
        "segments in several samples": lambda c, a: c.dims["batch"] > 1 and a.get("q_segment_ids") is not None,
    }.items():
        where(_op, "unseen attention", _what, _condition)

for _op in (
    "geglu", "linear", "rope", "logsumexp", "rmsnorm", "add_rmsnorm", "softmax_vjp", "swiglu_vjp", "layernorm_vjp",
    "cross_entropy_vjp", "matmul_vjp", "linear_cross_entropy_vjp",
):  # fmt: skip
    gives(_op, "unseen float64", "rounded to float32 on the way", narrow(np.float32))

for _op, _name in (
    ("geglu_vjp", "d_y"), ("add_layernorm_vjp", "d_y"), ("add_rmsnorm_vjp", "d_y"), ("linear_vjp", "d_y"),
    ("rope_vjp", "d_y"), ("linear_cross_entropy_vjp", "d_loss"), ("layernorm", "weight"),
):  # fmt: skip
    where(_op, "unseen layouts", f"{_name} of strides 0",
          lambda c, a, n=_name: a.get(n) is not None and one_number(a[n]))  # fmt: skip
for _op, _name in (("rope", "x"), ("cross_entropy", "logits"), ("linear", "weight")):
    where(_op, "unseen layouts", f"a negative stride of {_name}",
          lambda c, a, n=_name: any(s < 0 for s in a[n].strides))  # fmt: skip
where("swiglu", "unseen layouts", "every third element of gate", lambda c, a: a["gate"].ndim > 0
      and a["gate"].shape[-1] > 1 and a["gate"].strides[-1] == 3 * a["gate"].itemsize)  # fmt: skip
where("matmul", "unseen layouts", "columns of a side by side", lambda c, a: min(a["a"].shape[-2:]) > 1
      and a["a"].strides[-2] == a["a"].itemsize)  # fmt: skip


def labels_in_16_bits(call: Any, arrays: Arrays, options: dict[str, Any]) -> None:
    arrays["labels"] = np.where(arrays["labels"] > 0, arrays["labels"] & 32767, arrays["labels"])


def nobody_is_0(call: Any, arrays: Arrays, options: dict[str, Any]) -> None:
    if "q_segment_ids" in arrays:
        arrays["q_segment_ids"] = np.where(arrays["q_segment_ids"] == 0, -9, arrays["q_segment_ids"])


gives("linear_cross_entropy_vjp", "unseen integers", "a negative ignore_index other than -100", only_100)
reads("cross_entropy", "unseen integers", "labels in 15 bits", labels_in_16_bits)
reads("cross_entropy_vjp", "unseen integers", "labels in 15 bits", labels_in_16_bits)
where(
    "cross_entropy_vjp",
    "unseen integers",
    "an ignore_index that is a class",
    lambda c, a: c.options["ignore_index"] >= 0,
)
reads("attention", "unseen integers", "segments in 16 bits", ids(lambda s: s & 65535))
reads("attention", "unseen integers", "segment 0 is nobody's", nobody_is_0)

keeping("softmax_vjp", ("y",), "unseen kept")
keeping("matmul", ("b",), "unseen kept")
keeping("linear", ("weight", "bias"), "unseen kept")
keeping("swiglu", ("gate",), "unseen kept")
keeping("rope_vjp", ("cos",), "unseen kept")
keeping("cross_entropy_vjp", ("labels",), "unseen kept")
keeping("attention", ("k", "v"), "unseen kept")
keeping("linear_cross_entropy_vjp", ("weight",), "unseen kept")

where(
    "rmsnorm", "unseen ways", "another thread", lambda c, a: threading.current_thread() is not threading.main_thread()
)
where("layernorm", "unseen ways", "what nobody may write to", lambda c, a: not a["x"].flags.writeable)


def study(counts: list[int], seeds: int, only: str = "") -> Iterator[str]:
    """Lines of a table: kind, faults, and how many are found on every seed, and altogether, in so many cases."""
    every: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for fault in FAULTS:
        if only and not (fault.group.startswith(only) or fault.op == only):
            continue
        for count in counts:
            caught = sum(found(fault, seed, count) for seed in range(seeds))
            every[fault.group][count].append(caught)
            if count == counts[-1] and caught < seeds:
                yield f"missed on {seeds - caught} of {seeds} at {count}: {fault.op}: {fault.group}: {fault.what}"
    yield "| kind | faults | " + " | ".join(f"{c} cases" for c in counts) + " |"
    for kind, by in every.items():
        cells = (f"{sum(c == seeds for c in by[n])} ({sum(by[n]) / seeds:.1f})" for n in counts)
        yield f"| {kind} | {len(by[counts[0]])} | {' | '.join(cells)} |"


def main() -> None:
    start = time.process_time()
    kinds = [a for a in sys.argv[1:] if not a.isdigit()]
    for line in study([int(a) for a in sys.argv[1:] if a.isdigit()] or [100], 5, *kinds[:1]):
        print(line, flush=True)
    print(f"{len(FAULTS)} faults, {time.process_time() - start:.0f} s CPU")


if __name__ == "__main__":
    main()
