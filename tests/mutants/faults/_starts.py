"""Faults planted where attention and its gradients learn where queries and keys begin."""

from __future__ import annotations

from tests.mutants.faults import Planted

STARTS = {
    "triton": [
        Planted(
            "starts-ignored",
            "the last query stands at the last key whatever the starts are",
            old="    window = sight(call)\n",
            new='    window = sight(call.replace(options=call.options | {"q_start": None, "kv_start": None}))\n',
            sample=True,
            edge="keys_ahead_of_queries",
        ),
        Planted(
            "starts-exchanged",
            "the start of queries is taken for that of keys, and the other way round",
            old="    window = sight(call)\n",
            new=(
                '    q_start, kv_start = call.options["q_start"], call.options["kv_start"]\n'
                "    if q_start is not None:\n"
                "        q_start, kv_start = kv_start or 0, q_start\n"
                '    window = sight(call.replace(options=call.options | {"q_start": q_start, "kv_start": kv_start}))\n'
            ),
        ),
        Planted(
            "kv-start-ignored",
            "keys stand at the beginning of the sequence",
            old="    window = sight(call)\n",
            new='    window = sight(call.replace(options=call.options | {"kv_start": None}))\n',
        ),
    ],
    "pallas": [
        Planted(
            "starts-ignored",
            "the last query stands at the last key whatever the starts are",
            old="(left, right), kv_len = sight(call), ",
            new=(
                'call = call.replace(options=call.options | {"q_start": None, "kv_start": None})\n'
                "        (left, right), kv_len = sight(call), "
            ),
            within="lib.band",
            sample=True,
            edge="keys_ahead_of_queries",
        ),
        Planted(
            "kv-start-ignored",
            "keys stand at the beginning of the sequence",
            old="(left, right), kv_len = sight(call), ",
            new=(
                'call = call.replace(options=call.options | {"kv_start": None})\n'
                "        (left, right), kv_len = sight(call), "
            ),
            within="lib.band",
        ),
    ],
}
