"""Tables of tilings: named rows, looked up by the key that an implementation declares for a call.

A table is a JSON file for one target, in the folder ``tuned`` of the package that holds a backend's packages of op
modules::

    {"schema": 1, "target": "sm_90", "notes": ["..."], "ops": {"attention": {"gpu": [ROW, ...]}}}

``target`` is an architecture, or a platform for all architectures without a row of their own: interpreters use ``cpu``.
``gpu`` is the variant, the last name of the package that holds the op module. A row has a name, a key, a tiling, and a
source in words: whether it was measured or only compiled, and how it was chosen. ``made`` may give the device and the
versions: ``{"device": "...", "versions": {"triton": "3.6.0"}}``. A user's row that was measured with another version or
on another chip serves, with a warning. In place of a row, ``{"from": "cuda/matmul", "key": {"products": "tf32"}}``
takes over the rows of an op from the shipped table of another target: all of them, or those that agree with a key.

A row serves a key if its strings and booleans are equal; a list in the row names several values. Among these rows the
one with the nearest shape serves: the smallest number that is at least the call's, else the largest; a number that the
row leaves out counts as infinite. If the key has several numbers, the first one decides first; then the order of the
rows.

There are four layers, and each is used if those before it have no value: the user's ``tiling=``; the table in the
user's cache folder, ``tuned/<backend>/<target>.json``; the backend's own table; the implementation's function
``tiling``. A row may leave tiles to later layers. A user's row does not count if the shipped row is nearer: a row that
was tuned for n = 512 does not apply to n = 8192. An implementation may ``fit`` the tiling to the call; the user's own
tiles are not changed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from portakern.core import cache
from portakern.core.cache import BoundedCache
from portakern.core.targets import HOST, family
from portakern.errors import SpecError, UnsupportedError
from portakern.files import cache_folder
from portakern.install import installed
from portakern.spec.options import shown

if TYPE_CHECKING:
    from portakern.core.backend import Implementation
    from portakern.core.call import Call
    from portakern.core.config import Config
    from portakern.core.targets import Target
    from portakern.spec import Spec

__all__ = [
    "SCHEMA", "Resolved", "Row", "attempt", "check_row", "check_table", "content", "default", "files", "forget",
    "nearest", "own_table", "resolve", "rows", "shipped", "shipped_folder", "shipped_rows", "tables_for",
]  # fmt: skip

SCHEMA = 1

log = logging.getLogger("portakern")

Key = Mapping[str, Any]


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Row(NamedTuple):
    """One row of a table. ``table``: the target of its table; ``made``: the device and versions with which it was
    found."""

    name: str
    key: Key
    tiling: Mapping[str, int]
    source: str
    table: str
    made: Mapping[str, Any] = _NOTHING


class TableTiling(NamedTuple):
    """The tiling of tables and the heuristic for a key, and tile name -> the layer that it comes from."""

    tiling: Mapping[str, int]
    sources: Mapping[str, str]


class Resolved(NamedTuple):
    """The tiling of a call. ``found``: before it was fitted to the call; ``user``: the tiles that the user gave."""

    tiling: Any  # a Config of the implementation's class
    found: TableTiling
    user: Mapping[str, int]

    @property
    def sources(self) -> dict[str, str]:
        """Tile name -> "yours", "cache: <row>", "shipped <target>: <row>" or "heuristic", and whether it was fitted."""
        told = {}
        for name, value in self.tiling.items():
            fitted = "" if self.found.tiling.get(name) == value else ", fitted to this call"
            told[name] = "yours" if name in self.user else self.found.sources.get(name, "heuristic") + fitted
        return told


_kept: BoundedCache[tuple[Any, ...], Resolved] = BoundedCache(4096)


def resolve(impl: Implementation, call: Call, user: Mapping[str, int]) -> Resolved:
    """The tiling of a call, and where it came from.

    Raises:
      SpecError: the user names a tile that there is not, or a value that a launch knob cannot have.
      UnsupportedError: the backend cannot serve the call with this tiling.
    """
    resolved = default(impl, call) if not user else _named(impl, call, user)
    reason = impl.refuses(call, resolved.tiling)
    if reason:
        raise UnsupportedError(f"{call!r} on {call.target}: backend {impl.backend.name!r} cannot: {reason}")
    return resolved


def attempt(impl: Implementation, call: Call, user: Mapping[str, int]) -> tuple[Resolved, str | None]:
    """The tiling of a call, and why the implementation cannot serve the call with it, or None.

    Raises:
      SpecError: as :func:`resolve`.
    """
    resolved = _named(impl, call, user)
    return resolved, impl.refuses(call, resolved.tiling)


def default(impl: Implementation, call: Call) -> Resolved:
    """The tiling of a call whose user names none.

    A key is looked up once for each target, and its tiling, which nobody may write to, is fitted to each call.
    """
    if impl.key is None:
        heuristic = impl.tiling(call)
        return Resolved(impl.configured(call.spec, heuristic), TableTiling(heuristic, {}), _NOTHING)
    key = impl.key(call)
    place = (impl, call.target, *key.values())
    kept = _kept.get(place)
    if kept is None:
        found = _look_up(impl, call, key)
        kept = _kept.keep(place, Resolved(impl.configured(call.spec, found.tiling), found, _NOTHING))
    if impl.fit is None:
        return kept
    tiling = impl.fit(call, kept.tiling)
    return kept if tiling is kept.tiling else Resolved(tiling, kept.found, _NOTHING)


def shipped(impl: Implementation, call: Call) -> Config:
    """The tiling of a call for somebody who never tuned anything: the user's own table is not asked."""
    row = None if impl.key is None else _shipped_row(impl, call, impl.key(call))
    config = impl.configured(call.spec, {**impl.tiling(call), **(row.tiling if row else {})})
    return config if impl.key is None or impl.fit is None else impl.fit(call, config)


def own_table(backend: str, target: Target) -> Path:
    """The user's own table of a target."""
    return cache_folder() / "tuned" / backend / f"{target.arch or target.platform}.json"


def forget() -> None:
    """Read tables anew: a file may have changed since it was last asked."""
    _table.cache_clear()
    cache.forget()


def _named(impl: Implementation, call: Call, user: Mapping[str, int]) -> Resolved:
    """The default tiling with what the user names in its place, which must be there.

    The values of the spec's own tiles were checked when the op was made.
    """
    tiling, found, _ = default(impl, call)
    for name, value in user.items():
        if name not in tiling:
            raise SpecError(
                f"{call.spec.name}: tiling has no {name!r} on {impl.backend.name}; "
                f"expected one of {', '.join(tiling) or 'none: this backend has no tiles'}"
            )
        if name in impl.knobs and value not in impl.knobs[name]:
            raise SpecError(
                f"{call.spec.name}: tiling[{name!r}] is {shown(value)}; "
                f"expected one of {', '.join(map(str, impl.knobs[name].values))}: leave it out for the default"
            )
    return Resolved(tiling.replace(**user), found, user)


def _look_up(impl: Implementation, call: Call, key: Key) -> TableTiling:
    """Ask the layers below the user's, the last one first, so that what an earlier one says replaces it."""
    tiling = dict(impl.tiling(call))
    sources = dict.fromkeys(tiling, "heuristic")
    shipped = _shipped_row(impl, call, key)
    own = _own_rows(impl, call.spec, own_table(impl.backend.name, call.target), key)
    cached = nearest(own, key)
    layers = [(shipped, f"shipped {shipped and shipped.table}"), (cached, "cache")]
    if shipped is not None and cached is not None:
        numbers = {name: value for name, value in key.items() if not isinstance(value, (str, bool))}
        anywhere = cached._replace(key={**numbers, **cached.key})  # what it leaves out, its user means for every extent
        if nearest((anywhere, shipped), key) is shipped:
            layers = layers[:1]
    for row, layer in layers:
        if row is not None:
            tiling |= row.tiling
            sources |= dict.fromkeys(row.tiling, f"{layer}: {row.name}")
    if cached is not None and layers[-1][0] is cached:
        _warn_of_age(cached, impl, call)
    if call.spec.tiling and not tiling:
        tables = " or ".join(f"tuned/{name}.json" for name in tables_for(call.target))
        raise UnsupportedError(
            f"{call!r} on {call.target}: backend {impl.backend.name!r} has no {', '.join(call.spec.tiling)} for "
            f"{dict(key)}; add a row to {tables}, or pass a default to implements(tiling=...)"
        )
    return TableTiling(tiling, sources)


def _shipped_row(impl: Implementation, call: Call, key: Key) -> Row | None:
    return next(filter(None, (nearest(rows(impl, name), key) for name in tables_for(call.target))), None)


def _warn_of_age(row: Row, impl: Implementation, call: Call) -> None:
    """Say once where a row of the user's was found with another compiler, or on another chip, than what is here."""
    path = own_table(impl.backend.name, call.target)
    again = f"the tiling is used; to update it, tune again (portakern tune {impl.op}), or delete "
    for package, then in row.made.get("versions", {}).items():
        here = _installed(package)
        if here is not None and here != then:
            _warn(f"portakern: {path} was tuned with {package} {then}, and {here} is installed: {again}the file")
            return
    device, chips = row.made.get("device"), call.framework.accelerator_names()
    if device and chips and call.target.platform != HOST.platform and device not in chips:
        _warn(f"portakern: {path} was tuned on {device}, and this is {chips[0]}: {again}the file")


@functools.cache
def _installed(package: str) -> str | None:
    """The version of a package that is installed, without its local part ("+cu130"); None where it is not."""
    here = installed(package)
    return None if here is None else here.partition("+")[0]


def nearest(among: tuple[Row, ...], key: Key) -> Row | None:
    """The row that serves a key, or None: see the rule at the head of this module."""
    exact = {name: value for name, value in key.items() if isinstance(value, (str, bool))}
    numbers = {name: value for name, value in key.items() if name not in exact}

    def distance(row: Row) -> list[tuple[bool, float]]:
        extents = ((row.key.get(name, inf), value) for name, value in numbers.items())
        return [(extent < value, extent if extent >= value else -extent) for extent, value in extents]

    return min((row for row in among if _agrees(row, exact)), key=distance, default=None)


def _agrees(row: Row, exact: Key) -> bool:
    """Whether a row has these values, or lists that hold them."""
    found = ((row.key.get(name), value) for name, value in exact.items())
    return all(value in theirs if isinstance(theirs, list) else value == theirs for theirs, value in found)


# -------------------------------------------------------------------------------------------------------------- files


def tables_for(target: Target) -> Iterator[str]:
    """The tables to ask: the target's own, that of the architecture whose limits hold for it, its platform's."""
    if target.arch:
        yield target.arch
        kin = family(target.arch)
        if kin.platform == target.platform and kin.name != target.arch:
            yield kin.name
    yield target.platform


def shipped_folder(package: str) -> Path | None:
    """Where the tables of a package of op modules lie: ``tuned`` in the package that holds it, or in itself."""
    try:
        found = importlib.util.find_spec(package.rpartition(".")[0] or package) if package else None
    except (ImportError, ValueError):
        return None
    places = found.submodule_search_locations if found else None
    return Path(next(iter(places))) / "tuned" if places else None


def files(package: str, backend: str) -> list[Path]:
    """Every table, shipped or the user's, on which tilings of a package's ops may depend."""
    folders = (shipped_folder(package), cache_folder() / "tuned" / backend)
    return [path for folder in folders if folder for path in sorted(folder.glob("*.json"))]


def content(package: str, backend: str, target: Target) -> dict[str, str]:
    """The tables that a look-up for a target may read, those from which its own take rows over among them, by path,
    and what they hold, whatever that is: the look-up says what is wrong with it."""
    every, names, found = files(package, backend), set(tables_for(target)), dict[str, str]()
    while new := [path for path in every if path.stem in names and str(path) not in found]:
        for path in new:
            try:
                found[str(path)] = text = path.read_bytes().decode(errors="backslashreplace")
                names |= set(re.findall(r'"from":\s*"([^"/]+)/', text))
            except OSError as e:
                found[str(path)] = type(e).__name__
    return found


def rows(impl: Implementation, target: str) -> tuple[Row, ...]:
    """The rows that the backend's table of a target has for this implementation. SpecError: the table is wrong."""
    package = impl.fn.__module__.rpartition(".")[0]
    folder = shipped_folder(package)
    return shipped_rows(folder, target, impl.op, package.rpartition(".")[2]) if folder else ()


def shipped_rows(folder: Path, target: str, op: str, variant: str) -> tuple[Row, ...]:
    """The rows of one op in a shipped table, those taken over from other tables among them."""
    path = folder / f"{target}.json"
    try:
        return _with_borrowed(_table(path), op, variant, folder)
    except ValueError as e:
        raise SpecError(f"tiling table {path} is invalid: {e}") from None


def _own_rows(impl: Implementation, spec: Spec[Any], path: Path, key: Key) -> tuple[Row, ...]:
    """The rows of the user's own table; none, after a warning that says why, where it cannot be used."""
    package = impl.fn.__module__.rpartition(".")[0]
    try:
        found = _with_borrowed(_table(path), impl.op, package.rpartition(".")[2], shipped_folder(package))
        for row in found:
            check_row(impl, spec, row, key)
    except ValueError as e:
        _warn(f"portakern: tiling table {path} is ignored: {e}; tune again, or delete the file")
        return ()
    return found


@functools.cache
def _warn(text: str) -> None:
    """Log a warning, once in a process."""
    log.warning(text)


def check_row(impl: Implementation, spec: Spec[Any], row: Row, key: Key) -> None:
    """ValueError if a row has tiles that the implementation does not have, or values that they cannot have.

    ``key``: one of the implementation's keys, to whose names and kinds the row's key is held.
    """
    legal, where = {**spec.tiling, **impl.knobs}, f"{impl.op}, row {row.name!r}: key"
    for name in row.key:
        _expect(name in key, where, name, f"names among {', '.join(key)}")
    for name, value in key.items():
        if isinstance(value, (str, bool)):
            _expect(name in row.key, where, row.key, f"a value of {name!r}, such as {value!r}")
        elif name in row.key:
            _expect(type(row.key[name]) is int, f"{where}[{name!r}]", row.key[name], "a whole number")
    for name, value in row.tiling.items():
        where = f"{impl.op}, row {row.name!r}: tiling"
        _expect(name in legal, where, name, f"names among {', '.join(legal)}")
        _expect(value in legal[name], f"{where}[{name!r}]", value, f"one of {', '.join(map(str, legal[name].values))}")


Entries = Mapping[str, Mapping[str, list[Any]]]


def check_table(path: Path) -> None:
    """ValueError if a file is no table, and why; one that is not there is an empty table."""
    _table.cache_clear()
    _table(path)


@functools.cache
def _table(path: Path) -> tuple[str, Entries]:
    """The target of a table, and its entries by op and variant; none where there is no such file.

    Raises:
      ValueError: the file is wrong, and how.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return path.stem, {}
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"it cannot be read ({e})") from None
    _expect(isinstance(table, dict), "the table", table, "an object")
    _expect(table.get("schema") == SCHEMA, "schema", table.get("schema"), str(SCHEMA))
    _expect(table.get("target") == path.stem, "target", table.get("target"), f"{path.stem!r}, as the file is called")
    ops = table.get("ops")
    _expect(isinstance(ops, dict), "ops", ops, "an object")
    for op, variants in ops.items():
        _expect(isinstance(variants, dict), f"ops/{op}", variants, "an object")
        for variant, entries in variants.items():
            _expect(isinstance(entries, list), f"ops/{op}/{variant}", entries, "a list of rows")
            for i, entry in enumerate(entries):
                _check_entry(f"ops/{op}/{variant}/{i}", entry)
    return path.stem, ops


def _check_entry(where: str, entry: Any) -> None:
    """ValueError if an entry is neither a row nor a reference to rows."""
    _expect(isinstance(entry, dict), where, entry, "an object")
    if "from" in entry:
        source = entry["from"]
        _expect(isinstance(source, str) and source.count("/") == 1, f"{where}/from", source, "'<target>/<op>'")
        _expect(isinstance(entry.get("key", {}), dict), f"{where}/key", entry.get("key"), "an object")
        return
    for name, kind in (("name", str), ("key", dict), ("tiling", dict), ("source", str)):
        expected = "text" if kind is str else "an object"
        _expect(isinstance(entry.get(name), kind), f"{where}/{name}", entry.get(name), expected)
    made = entry.get("made", {})
    _expect(isinstance(made, dict), f"{where}/made", made, "an object")
    versions, device = made.get("versions", {}), made.get("device", "")
    right = isinstance(versions, dict) and all(isinstance(v, str) for v in versions.values())
    _expect(right, f"{where}/made/versions", versions, "an object of texts")
    _expect(isinstance(device, str), f"{where}/made/device", device, "text")
    for name, value in entry["key"].items():
        _expect(isinstance(value, (str, int, list)), f"{where}/key/{name}", value, "text, a whole number or a list")
    for name, value in entry["tiling"].items():
        _expect(isinstance(value, int) and value is not True, f"{where}/tiling/{name}", value, "a whole number")


def _expect(right: bool, where: str, actual: Any, expected: str) -> None:
    if not right:
        raise ValueError(f"{where} is {shown(actual)}; expected {expected}")


def _with_borrowed(table: tuple[str, Entries], op: str, variant: str, folder: Path | None) -> tuple[Row, ...]:
    """An op's rows in a table; ``folder``: where the tables lie that rows are taken over from."""
    target, ops = table
    found: list[Row] = []
    for entry in ops.get(op, {}).get(variant, []):
        if "from" not in entry:
            made = entry.get("made", _NOTHING)
            found.append(Row(entry["name"], entry["key"], entry["tiling"], entry["source"], target, made))
        elif folder:
            of_target, _, of_op = entry["from"].partition("/")
            borrowed = shipped_rows(folder, of_target, of_op, variant)
            found += [row for row in borrowed if _agrees(row, entry.get("key", {}))]
    return tuple(found)
