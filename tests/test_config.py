"""A tiling as kernels take it: a Config."""

from __future__ import annotations

import copy
import pickle
from enum import IntEnum
from typing import Annotated

import pytest

import portakern as pk
from portakern.core.config import completed, fields_of
from portakern.spec import Count, Tile


class Way(IntEnum):
    NO = 0
    BOTH = 2


class Rows(pk.Config):
    block_rows: Annotated[int, "rows of a block"]
    num_warps: Annotated[int, Tile(1, 32), "warps of a program"]


class Wide(Rows):
    num_warps: Annotated[int, Tile(4, 8)]
    persistent: Annotated[bool, "whether programs stay"] = False
    way: Annotated[Way, "how"] = Way.NO


def test_a_field_keeps_what_it_does_not_say_anew():
    found = fields_of(Wide)
    assert found["num_warps"] == (int, Tile(4, 8), "warps of a program") and found["block_rows"].values is None
    assert found["persistent"].values == Count(0, 1) and found["way"].values == Count(0, 2)


def test_it_is_a_mapping_of_integers_and_attributes_have_their_types():
    config = Wide(block_rows=3, num_warps=4, persistent=1, way=2)
    assert config.persistent is True and config.way is Way.BOTH and config.block_rows == 3
    assert dict(config) == config == {"block_rows": 3, "num_warps": 4, "persistent": 1, "way": 2}
    assert all(type(value) is int for value in config.values()) and all(type(v) is int for _, v in config.items())
    assert Wide(num_warps=4).way is Way.NO and "way" not in Wide(num_warps=4)
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and same.way is Way.BOTH


def test_it_is_immutable_and_replace_makes_another():
    config = Rows(block_rows=3)
    with pytest.raises(AttributeError, match=r"immutable; use config.replace\(block_rows=...\)"):
        config.block_rows = 4
    assert config.replace(block_rows=4, num_warps=1) == {"block_rows": 4, "num_warps": 1} and config.block_rows == 3


def test_what_is_wrong_is_said():
    with pytest.raises(pk.SpecError, match="Rows has no 'block_m'; expected names among block_rows, num_warps"):
        Rows(block_m=1)
    with pytest.raises(pk.SpecError, match="Rows.block_rows for an_op is no tile of the spec; expected its values too"):
        completed(Rows, "an_op", ("block_n",))
    with pytest.raises(
        pk.SpecError, match="Rows.num_warps for an_op is a tile of the spec, .*; expected a meaning alone"
    ):
        completed(Rows, "an_op", ("block_rows", "num_warps"))
    with pytest.raises(pk.SpecError, match="a field is called 'items'"):
        type("Bad", (pk.Config,), {"__annotations__": {"items": int}})
    with pytest.raises(pk.SpecError, match=r"Bad.a is of type <class 'str'>; expected int, bool or an IntEnum"):
        type("Bad", (pk.Config,), {"__annotations__": {"a": str}})


def test_tiles_that_a_config_leaves_out_are_the_specs():
    made = completed(Rows, "an_op", ("block_rows", "block_n"))
    assert issubclass(made, Rows) and made(block_n=3, num_warps=1).block_n == 3
    assert completed(Rows, "an_op", ("block_rows",)) is Rows
    assert {*fields_of(completed(pk.Config, "an_op", ("block_n",)))} == {"block_n"}
