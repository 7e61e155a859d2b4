"""The process of a candidate. A verdict depends on nothing in it but the candidate's outputs, which leave it as bytes
before the next call. Cases, expected values, bounds and clocks are in the judge's process.

It is started by :mod:`portakern.tools.judge.process`, reads requests from one pipe, inputs from shared memory, and
writes replies to another pipe: a length, a header in JSON, the outputs' bytes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import sys
from typing import Any, BinaryIO

__all__ = ["main"]


class Host:
    """Serves the requests. ``kept``: the outputs since the last case began, which keep their memory alive."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.candidate: Any = None
        self.framework: Any = None
        self.device: Any = None
        self.kept: list[Any] = []

    def begin(self, ask: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Import the array library, and say whether it reaches the device from in here."""
        from portakern.core.framework import frameworks

        self.framework = frameworks()[ask["framework"]]
        self.framework.load()
        try:
            there = (d for d in self.framework.devices() if self.framework.target(d).platform == ask["device"])
            self.device = next(there, None)
            if self.device is not None:  # a driver begins with the first array, and takes its time
                self.framework.full((1,), "float32", 0.0, self.device)
        except Exception as e:
            return {"reached": False, "why": f"{type(e).__name__}: {e}"[:300]}, []
        return {"reached": self.device is not None}, []

    def load(self, ask: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Import the candidate and say how it can be called."""
        from portakern.tools.judge import adapters

        self.candidate = adapters.load(ask, self.framework, self.device)
        return self.candidate.described(), []

    def inputs(self, ask: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Import a problem, and say which inputs it names. Nothing of a candidate was, or will be, imported here."""
        from pathlib import Path

        from portakern.tools.judge import adapters

        path = Path(ask["file"])
        inputs = adapters.inputs_of(path)
        return {"inputs": inputs, "beside": adapters.imported_beside(path)}, []

    def call(self, ask: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """One call of the candidate."""
        import numpy as np

        fw = self.framework
        if ask["forget"]:
            self.kept.clear()
        shared = mmap.mmap(self.memory, max(ask["bytes"], 1))
        arrays, wholes = {}, {}
        for a in ask["arrays"]:
            raw = np.frombuffer(shared, np.uint8, a["bytes"], a["at"])
            whole = raw.view(_numpy_dtype(a["dtype"]))
            whole = whole.copy() if fw.immutable else whole
            # on the host the candidate works on the judge's own memory, elsewhere on a copy of all of it
            arrays[a["name"]] = fw.strided(whole, tuple(a["shape"]), tuple(a["strides"]), a["offset"], self.device)
            wholes[a["name"]] = whole
        for a in ask["same"]:
            arrays[a[0]] = arrays[a[1]]
        with fw.poisoned(self) if ask["poison"] else contextlib.nullcontext():
            outputs = self.candidate.call(arrays, ask["options"], ask["forms"])
        told: list[dict[str, Any]] = []
        payload: list[Any] = []
        for out in outputs:
            if not fw.owns(out):
                told.append({"type": type(out).__name__})
                continue
            value = np.ascontiguousarray(fw.to_numpy(out))
            if value.dtype.hasobject:
                told.append({"type": "array of Python objects"})
                continue
            shares = [n for n, array in arrays.items() if not fw.immutable and fw.overlap(out, array)]
            before = [i for i, o in enumerate(self.kept) if not fw.immutable and fw.overlap(out, o)]
            told.append({"dtype": value.dtype.name, "shape": [*value.shape], "contiguous": bool(fw.contiguous(out)),
                         "bytes": value.nbytes, "shares": shares, "before": before})  # fmt: skip
            payload.append(value.reshape(-1).view(np.uint8))
        self.kept += [o for o in outputs if fw.owns(o)]
        if not fw.immutable and fw.target(self.device).platform != "cpu":
            for name, whole in wholes.items():
                now = fw.memory(arrays[name])
                if now is not None and now.size == whole.nbytes:
                    whole.view(np.uint8)[...] = now
        return {"outputs": told}, payload


def _numpy_dtype(name: str) -> Any:
    from portakern.spec.dtypes import numpy_dtype

    return numpy_dtype(name)


def main() -> None:
    """Enter the sandbox, then serve requests until the pipe closes."""
    requests, replies, memory, sandbox = sys.argv[1:5]
    from portakern.tools.judge.sandbox import Sandbox, enter_sandbox

    if not os.read(int(requests), 1):  # till the judge has put it into its control group
        return
    in_force = enter_sandbox(Sandbox(*json.loads(sandbox)))
    source, sink = os.fdopen(int(requests), "rb"), os.fdopen(int(replies), "wb")
    _reply(sink, {"protections": in_force}, [])
    host = Host(int(memory))
    while head := source.read(8):
        ask = json.loads(source.read(struct.unpack("<Q", head)[0]))
        try:
            does = {"begin": host.begin, "inputs": host.inputs, "load": host.load, "call": host.call}
            told, payload = does[ask["do"]](ask)
        except BaseException as e:  # what a candidate raises, exits included, is told; who else ends this process?
            from portakern.core.failing import kind_of

            told, payload = _words(e, kind_of), []
        _reply(sink, told, payload)


def _words(error: BaseException, kind_of: Any) -> dict[str, Any]:
    """What is told of an exception, whose own methods may raise others."""
    try:
        return {"error": kind_of(error), "type": str(type(error).__name__), "text": str(error)[:2000]}
    except BaseException:
        return {"error": "crashed", "type": "an exception", "text": "its message cannot be read"}


def _reply(sink: BinaryIO, message: dict[str, Any], payload: list[Any]) -> None:
    text = json.dumps(message).encode()
    sink.write(struct.pack("<Q", len(text)) + text)
    for part in payload:
        sink.write(part)
    sink.flush()


if __name__ == "__main__":
    main()
