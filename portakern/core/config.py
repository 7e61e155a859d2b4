"""Tilings as typed objects: the tile sizes and launch parameters of a kernel."""

from __future__ import annotations

import functools
from collections.abc import ItemsView, Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

from portakern.errors import SpecError
from portakern.spec import Count, Tile

__all__ = ["NOTHING", "Config", "Field", "completed", "fields_of"]

C = TypeVar("C", bound="Config")


class Field(NamedTuple):
    """A field of a Config: its Python type, its permitted values (None: the range of the spec's tile of this name), and
    its meaning."""

    kind: type
    values: Tile | None
    meaning: str


class Config(Mapping[str, int]):
    """The tile sizes and launch parameters of a kernel: they change its speed, not its contract.

    A subclass declares fields with their meaning; a field that is not a tile of the spec also declares its values::

        class RowsConfig(pk.Config):
            block_rows: Annotated[int, "rows that a program owns"]
            num_warps: Annotated[int, Tile(1, 32), "warps of a program"]
            persistent: Annotated[bool, "programs take several tiles each"]

    A ``bool`` or ``IntEnum`` field needs no values. A field that is declared again inherits the meaning or values that
    it does not declare.

    A kernel reads ``config.num_warps``. As a mapping (in tables, results and ``explain()``) it has only integers.
    Fields without a value are not in the mapping; reading one gives the default of the class, if any. It is immutable;
    :meth:`replace` makes a changed copy.
    """

    __slots__ = ("__dict__", "_values")  # a field's value where attributes are looked up, and all of them as integers
    _fields: ClassVar[Mapping[str, Field]] = MappingProxyType({})
    _values: dict[str, int]

    def __init_subclass__(cls) -> None:
        known: dict[str, Field] = {}
        for base in reversed(cls.__mro__[1:]):
            known |= vars(base).get("_fields", {})
        hints = get_type_hints(cls, include_extras=True)
        cls._fields = MappingProxyType(known | {n: _field(cls, n, hints[n], known) for n in cls.__annotations__})

    def __init__(self, **values: int) -> None:
        fields, attributes = self._fields, self.__dict__
        for name, value in values.items():
            field = fields.get(name)
            if field is None:
                raise SpecError(
                    f"{type(self).__name__} has no {name!r}; expected names among {', '.join(fields) or '(none)'}"
                )
            attributes[name] = value if field.kind is int else field.kind(value)
            if type(value) is not int:
                values[name] = int(value)
        object.__setattr__(self, "_values", values)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, int]:
        """Names and integers, as :class:`dict` has them."""
        return self._values.items()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Config is immutable; use config.replace({name}=...)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.items())})"

    def replace(self, **values: int) -> Self:
        """A copy with other values for these names."""
        return type(self)(**(self._values | values))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self), ()


NOTHING = Config()
"""Of an op without tiles, and where nobody named any."""


def _field(cls: type[Config], name: str, hint: Any, known: Mapping[str, Field]) -> Field:
    """A field of a class from its annotation, and from the same name in a base."""
    if hasattr(Config, name) or name.startswith("_"):
        raise SpecError(f"{cls.__name__}: a field is called {name!r}, an attribute of Config; rename the field")
    kind, *said = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    before = known.get(name, Field(kind, None, ""))
    values = next((part for part in said if isinstance(part, Tile)), before.values)
    if isinstance(kind, type) and issubclass(kind, (bool, IntEnum)):
        values = Count(0, 1) if kind is bool else Count(int(min(kind)), int(max(kind)))
    elif kind is not int:
        raise SpecError(f"{cls.__name__}.{name} is of type {kind!r}; expected int, bool or an IntEnum")
    return Field(kind, values, next((part for part in said if isinstance(part, str)), before.meaning))


def fields_of(config: type[Config] | Config) -> Mapping[str, Field]:
    """The fields of a Config by name."""
    return config._fields


@functools.cache
def completed(config: type[C], op: str, tiles: tuple[str, ...]) -> type[C]:
    """A Config that has all tiles of an op's spec: the class itself, or where it leaves some out one made from it.

    Raises:
      SpecError: a field has no values, and is no tile; or it is a tile, whose values the spec says.
    """
    for name, field in fields_of(config).items():
        if (field.values is None) != (name in tiles):
            what = "a tile of the spec, which says its values" if name in tiles else "no tile of the spec"
            expected = "a meaning alone" if name in tiles else "its values too: Annotated[int, Tile(1, 8), ...]"
            raise SpecError(f"{config.__name__}.{name} for {op} is {what}; expected {expected}")
    missing = [name for name in tiles if name not in fields_of(config)]
    return type(config.__name__, (config,), {"__annotations__": dict.fromkeys(missing, int)}) if missing else config
