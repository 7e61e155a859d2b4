"""How long a kernel takes a TPU, from its machine code and its grid, with nothing run.

A kernel's program is one loop over the grid. Each ``pl.when`` is a region of the loop's code that a branch skips, and
which steps skip it follows from the step's indices alone. So the cycles of a whole run are the sum over the regions
of their VLIW bundles times the steps that come by them, and what a step waits besides (:data:`STEP`); a loop within a
step counts as often as it runs. In the same way the bytes between device memory and the chip follow from the index
maps: a window is moved when its index differs from the step before, and of one that hangs over the end of its array
what lies within.

Which region belongs to which ``pl.when`` is told by their order and by their sizes. What the compiler knows to be
always or never taken has no region, small ones become predicated instructions without a branch, and the compiler has
regions of its own.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = ["GridWalk", "Region", "cycles", "regions", "walks_of"]

PARALLEL = "parallel"
"""What JAX calls an axis of a grid whose steps do not depend on each other."""

STEPS = 1 << 22
"""Steps beyond which a grid is not followed."""

FLOAT32_PASSES = 6
"""Products of bfloat16 parts that make one of float32, of three parts each, where all that count are taken."""

STEP = 400
"""Cycles that a step waits: by how much libtpu's own estimates exceed bundles, 120 to 900 a step over the tilings of
matmul and attention on v5e and v6e. Without it many small steps would look as good as few large ones."""


WORK, SMALL = 6000, 20
"""Elements that a bundle of a kernel reads and makes, about: 5000 to 8000 in attention's. Bundles below which sizes say
little: those of a branch become predicated instructions, and a window's move has as many."""


class Region(NamedTuple):
    """Code that a branch skips: its bundles, those of regions within it left out, these regions, and of its loops in
    order how many loops are around each and its bundles, which are among those of the region."""

    bundles: int
    inner: tuple[Region, ...]
    loops: tuple[tuple[int, int], ...] = ()


class Condition(NamedTuple):
    """A ``pl.when`` of a kernel: how many steps take it, how much it works on (elements that it reads and makes), the
    operations of its matrix products, what it holds, and how often each loop of it comes by its code."""

    steps: int
    work: int
    flops: int
    inner: tuple[Condition, ...]
    loops: tuple[int, ...] = ()


class GridWalk(NamedTuple):
    """A kernel of a program, as its grid walks it.

    Attributes:
      name: the kernel's; steps: of its grid; body: all of it, with its branches in order.
      moved: bytes of its windows; first: those of one window of each.
      program: the kernel's text without the numbers that differ between calls of other extents.
      beside: the same of the other cores, where several share a launch; then all numbers are of the steps of one.
      widest: whether spans of segments are data, and were taken to hold every tile (`_widest`).
    """

    name: str
    steps: int
    body: Condition
    moved: int
    first: int
    program: str
    beside: tuple[GridWalk, ...] = ()
    widest: bool = False


def walks_of(jaxpr: Any, consts: Sequence[Any] = (), cores: int = 1) -> list[GridWalk]:
    """Every kernel of a traced program, in order, but those with a grid whose extents are data. ``consts``: the
    program's constants: what a kernel reads of them in scalar memory, such as which blocks follow each other, is known
    with them. ``cores``: how many share a launch. Spans of segments, which are data, are the widest."""
    known = dict(zip(jaxpr.constvars, map(np.asarray, consts), strict=False))
    return [_walk(eqn, given, cores) for eqn, given in _calls(jaxpr, known) if _followed(eqn)]


def _followed(eqn: Any) -> bool:
    return all(isinstance(extent, int) for extent in eqn.params["grid_mapping"].grid)


def _calls(jaxpr: Any, known: dict[Any, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Every kernel, with its operands where they are constants."""
    for eqn in jaxpr.eqns:
        given = [_value(v, known) for v in eqn.invars]
        if eqn.primitive.name == "pallas_call":
            yield eqn, given
        else:
            for inner in _inner(eqn):
                same = given if len(inner.invars) == len(given) else []
                yield from _calls(inner, {v: g for v, g in zip(inner.invars, same, strict=False) if g is not None})


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs of an equation's parameters."""
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            found = getattr(one, "jaxpr", one)
            if hasattr(found, "eqns"):
                yield found


def _walk(eqn: Any, given: Sequence[Any], cores: int) -> GridWalk:
    mapping, body = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    grid = tuple(int(extent) for extent in mapping.grid)
    steps = math.prod(grid)
    name = str(eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", ""))
    if steps > STEPS:
        raise ValueError(f"{name} has a grid of {steps} steps; expected at most {STEPS}, which are followed one by one")
    every = [axis.reshape(-1).astype(np.int32) for axis in np.indices(grid, dtype=np.int32)]
    scalars = list(given)[: mapping.num_index_operands]
    data = sum(array is None for array in scalars)
    widest = [
        _widest(v.aval) if array is None and data == 1 else None for v, array in zip(eqn.invars, scalars, strict=False)
    ]
    scalars = [array if of_all is None else of_all for array, of_all in zip(scalars, widest, strict=True)]
    known = {ref: array for ref, array in zip(body.invars, scalars, strict=False) if array is not None}
    text = "\n".join([str(body), *(f"{m.block_shape} {m.index_map_jaxpr}" for m in mapping.block_mappings)])

    def walk_over(indices: list[np.ndarray], beside: tuple[GridWalk, ...]) -> GridWalk:
        taken = np.ones(len(indices[0]) if indices else 1, bool)
        inner = tuple(_conditions(body, known, indices, taken))
        moved = [_moved(m, indices, scalars) for m in mapping.block_mappings]
        return GridWalk(
            name,
            len(taken),
            Condition(len(taken), _work(body), _flops(body), inner, _loops(body)),
            sum(int(moves.sum()) for moves in moved),
            sum(int(moves[0]) for moves in moved),
            re.sub(r"\b-?\d+:i32\[\]", "N:i32[]", text),
            beside,
            any(of_all is not None for of_all in widest),
        )

    first, *others = _shares(eqn.params["compiler_params"], grid, every, cores)
    return walk_over(first, tuple(walk_over(places, ()) for places in others))


def _widest(aval: Any) -> np.ndarray | None:
    """What stands for numbers in scalar memory that are no constants: spans of segments, one row of the first tile and
    the one after the last of each, that hold every tile; None for what cannot be such. A kernel has them alone: where
    several arrays are data they are lengths and tables, of which nobody knows anything."""
    if aval.dtype != np.int32 or len(aval.shape) != 1 or aval.shape[0] % 2:
        return None
    return np.tile(np.asarray([0, 1 << 30], np.int32), aval.shape[0] // 2)


def _shares(params: Any, grid: tuple[int, ...], indices: list[np.ndarray], cores: int) -> list[list[np.ndarray]]:
    """The steps of each core: the first parallel axis of several steps is cut into as many runs, as libtpu's estimates
    say, which are of the first."""
    semantics = getattr(params, "dimension_semantics", None) or ()
    parallel = [
        a for a, (kind, extent) in enumerate(zip(semantics, grid, strict=False)) if kind == PARALLEL and extent > 1
    ]
    if cores == 1 or not parallel:
        return [indices]
    share = indices[parallel[0]] // -(-grid[parallel[0]] // cores)
    return [[axis[share == core] for axis in indices] for core in range(share.max() + 1)]


def _moved(mapping: Any, indices: list[np.ndarray], scalars: Sequence[Any]) -> np.ndarray:
    """Bytes of a window's moves, step by step: it is moved at the first one, and wherever its index changes; at every
    step where the index is data. A window that hangs over its array's end is moved as far as that, in whole native
    tiles: the copies of libtpu's code are as long as the rest of the array then."""
    closed = mapping.index_map_jaxpr
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= {v: a for v, a in zip(closed.jaxpr.invars, [*indices, *scalars], strict=False) if a is not None}
    known = _evaluated(closed.jaxpr, known, indices)
    steps = len(indices[0]) if indices else 1
    found = [_value(v, known) for v in closed.jaxpr.outvars]
    at = np.stack([np.broadcast_to(0 if v is None else v, steps) for v in found])
    moves = np.concatenate([[True], (at[:, 1:] != at[:, :-1]).any(0)]) | any(v is None for v in found)
    array = mapping.array_aval.shape
    lengths = [getattr(size, "block_size", size) for size in mapping.block_shape]
    size = np.full(steps, mapping.ref_aval.dtype.itemsize, np.int64)
    for axis, (length, extent) in enumerate(zip(lengths, array, strict=True)):
        if not isinstance(length, int):
            continue  # one entry of the array, without an axis in the window
        grain = {0: NATIVE[1], 1: NATIVE[0]}.get(len(array) - 1 - axis, 1)
        within = -(-(extent - at[axis].astype(np.int64) * length) // grain) * grain
        size *= np.clip(within, 0, length)
    return moves * size


NATIVE = (8, 128)
"""Rows and lanes of a tile of device memory."""


def _evaluated(jaxpr: Any, known: dict[Any, Any], indices: list[np.ndarray]) -> dict[Any, Any]:
    """``known`` with every scalar that follows from it and from the step's indices, each as an array over the steps."""
    found = dict(known)
    for eqn in jaxpr.eqns:
        _evaluate(eqn, found, indices)
    return found


def _evaluate(eqn: Any, known: dict[Any, Any], indices: list[np.ndarray]) -> None:
    """Add what an equation gives, where it is made of known scalars alone."""
    if eqn.primitive.name == "program_id":
        known[eqn.outvars[0]] = indices[eqn.params["axis"]]
        return
    if any(getattr(v.aval, "shape", None) != () for v in eqn.outvars) or not eqn.outvars:
        return
    values = [_value(v, known) for v in eqn.invars]
    if any(v is None for v in values) or not eqn.invars:
        return
    if eqn.primitive.name == "get":
        (indexer,) = jax.tree.unflatten(eqn.params["tree"], values[1:])
        known[eqn.outvars[0]] = values[0][tuple(np.asarray(i) for i in indexer.indices)]
        return
    inner = next(_inner(eqn), None)
    if inner is not None:
        if eqn.primitive.name in ("pjit", "jit", "closed_call", "custom_jvp_call"):
            deeper = _evaluated(inner, dict(zip(inner.invars, values, strict=True)), indices)
            results = [_value(v, deeper) for v in inner.outvars]
            known.update({v: r for v, r in zip(eqn.outvars, results, strict=True) if r is not None})
        return
    steps = len(indices[0]) if indices else 1
    wide = [np.broadcast_to(v, steps) for v in values]
    with jax.ensure_compile_time_eval():
        made = eqn.primitive.bind(*map(jax.numpy.asarray, wide), **eqn.params)
    known[eqn.outvars[0]] = np.asarray(made)


def _value(v: Any, known: dict[Any, Any]) -> Any:
    """What a variable or literal holds, None where that is not known."""
    if hasattr(v, "val"):
        return np.asarray(v.val)
    return known.get(v)


def _conditions(jaxpr: Any, known: dict[Any, Any], indices: list[np.ndarray], taken: np.ndarray) -> Iterator[Condition]:
    """The branches of a kernel; ``taken``: which steps come by."""
    known = dict(known)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "cond":
            _evaluate(eqn, known, indices)
            continue
        index = _value(eqn.invars[0], known)
        for number, branch in enumerate(eqn.params["branches"]):
            if not branch.jaxpr.eqns:
                continue
            here = taken if index is None else taken & (np.broadcast_to(index, taken.shape).astype(int) == number)
            given = zip(branch.jaxpr.invars, (_value(v, known) for v in eqn.invars[1:]), strict=True)
            inside = {v: value for v, value in given if value is not None}
            inner = tuple(_conditions(branch.jaxpr, inside, indices, here))
            body = branch.jaxpr
            yield Condition(int(here.sum()), _work(body), _flops(body), inner, _loops(body))


def _work(jaxpr: Any) -> int:
    return sum(
        _work(_inside_of(eqn)) * eqn.params["unroll"]
        if eqn.primitive.name == "scan"
        else sum(math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.outvars, *eqn.invars))
        for eqn in jaxpr.eqns
    )


def _inside_of(loop: Any) -> Any:
    return next(_inner(loop))


def _loops(jaxpr: Any) -> tuple[int, ...]:
    """How often the code of each loop runs that is neither in a branch nor laid out whole."""
    counts = (eqn.params["length"] // eqn.params["unroll"] for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return tuple(count for count in counts if count > 1)


def _flops(jaxpr: Any) -> int:
    """Operations of the matrix products outside branches. One in full float32 is several of bfloat16, one in the
    default precision is one, whatever its operands."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval
            depth = math.prod(left.shape[axis] for axis in contracted)
            in_full = left.dtype == np.float32 and jax.lax.Precision.HIGHEST in (eqn.params["precision"] or ())
            passes = FLOAT32_PASSES if in_full else 1
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape) * passes
        elif eqn.primitive.name != "cond":
            total += sum(map(_flops, _inner(eqn)))
    return total


# ------------------------------------------------------------------------------------------------------- machine code

_BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s*(LB|LH|LE|PB|PF|CT)?\s*:([ >]*)\{")
"""A bundle's address, what begins or ends there (LB: a loop), and a mark for each loop around it."""


def regions(bundles: str) -> Region:
    """The whole of a kernel's final bundles as a region, with those that branches skip."""
    skipped: list[tuple[int, int]] = []
    open_branches: dict[str, int] = {}
    last = 0
    loops: list[list[int]] = []  # of each where it begins, how many are around it with itself, and its bundles
    around: list[list[int]] = []
    for line in bundles.splitlines():
        match = _BUNDLE.match(line)
        if match:
            last, depth = int(match[1], 16), match[3].count(">")
            around = [loop for loop in around if loop[1] <= depth - (match[2] == "LB")]
            if match[2] == "LB":
                loops.append([last, depth, 0])
                around.append(loops[-1])
            for loop in around:
                loop[2] += 1
        for label in re.findall(r"Start/End empty region (\d+)", line):
            if label in open_branches:
                skipped.append((open_branches.pop(label), last))
        branch = re.search(r"sbr\.rel .*?target = \$region(\d+)", line)
        if branch:
            open_branches[branch[1]] = last + 1
    return _nested(0, last + 1, sorted(skipped, key=lambda span: (span[0], -span[1])), loops)


def _nested(start: int, end: int, spans: list[tuple[int, int]], loops: list[list[int]]) -> Region:
    inner: list[Region] = []
    covered = 0
    while spans:
        (a, b), spans = spans[0], spans[1:]
        inner.append(_nested(a, b, [s for s in spans if s[1] <= b], [loop for loop in loops if a <= loop[0] < b]))
        loops = [loop for loop in loops if not a <= loop[0] < b]
        spans = [s for s in spans if s[0] >= b]
        covered += b - a
    return Region(end - start - covered, tuple(inner), tuple((depth, bundles) for _, depth, bundles in loops))


def cycles(walk: GridWalk, code: Region, flops_a_cycle: float, bytes_a_cycle: float) -> int:
    """Bundles times how often the grid comes by them, and what the steps wait; no less than the matrix units take. The
    first step waits for all windows, and the last is over when its results are in memory."""
    inside = _inside(walk.body, _body(walk, code), flops_a_cycle, 2 if walk.steps > 1 else 1)
    return round(walk.steps * STEP + inside + walk.first / bytes_a_cycle)


def _body(walk: GridWalk, code: Region) -> Region:
    """The kernel's own code, of which the pipeline around it is made a straight part: it moves windows in regions of
    its own, which most steps come by, and guards the kernel with one that holds it all."""
    while _region_depth(code) > _depth(walk.body.inner):
        guard = max(code.inner, key=lambda r: (bool(r.inner), _all_bundles(r)))
        around = code.bundles + sum(_all_bundles(r) for r in code.inner if r is not guard)
        code = Region(guard.bundles + around, guard.inner, guard.loops)
    return code


def _inside(condition: Condition, code: Region, flops_a_cycle: float, depth: int) -> float:
    """The cycles of a region, with those within it, each under the condition that it stands for: a region that is left
    over is the compiler's own, and the work of a condition without one stands in the straight code. Its loops, of so
    many one in the other, run as often as it says."""
    pairs, lost = _matched(condition, code, flops_a_cycle)
    straight_flops = condition.flops + sum(c.flops for c in lost if c.steps)
    straight = _all_bundles(code) - sum(_all_bundles(r) for _, r in pairs)
    of_loops = [bundles for at, bundles in code.loops if at == depth]
    counts = [*condition.loops, *(count for c in lost for count in c.loops)]
    straight += sum((count - 1) * bundles for count, bundles in zip(counts, of_loops, strict=False))
    of_these = max(straight, straight_flops / flops_a_cycle)
    return condition.steps * of_these + sum(_inside(c, r, flops_a_cycle, depth) for c, r in pairs)


def _matched(
    around: Condition, code: Region, flops_a_cycle: float
) -> tuple[list[tuple[Condition, Region]], list[Condition]]:
    """The conditions within one, each with its region of its code, and those that have none.

    Both stand in the same order. Of all ways to lay them beside each other the one whose sizes agree best: a region
    costs what its size differs from its condition's, or where it is left over how large it is; a condition without one
    costs little where the compiler may know it to be never or always taken, if its work is in the straight code then.
    """
    conditions, regions = around.inner, code.inner

    def alone(c: Condition) -> float:
        if not c.steps:
            return 0.2
        hidden = math.log((_expected(c, flops_a_cycle) + SMALL) / (code.bundles + SMALL))
        return max(0.0, hidden) + (0.5 if c.steps == around.steps else 1.0)

    @functools.cache
    def best(i: int, j: int) -> tuple[float, tuple[tuple[int, int], ...]]:
        rest = sum(map(alone, conditions[i:])) + sum(math.log1p(_all_bundles(r) / SMALL) for r in regions[j:])
        found: list[tuple[float, tuple[tuple[int, int], ...]]] = [(rest, ())]
        if i < len(conditions) and j < len(regions):
            unlike = math.log((_expected(conditions[i], flops_a_cycle) + SMALL) / (_all_bundles(regions[j]) + SMALL))
            cost, pairs = best(i + 1, j + 1)
            found.append((cost + abs(unlike), ((i, j), *pairs)))
            cost, pairs = best(i + 1, j)
            found.append((cost + alone(conditions[i]), pairs))
            cost, pairs = best(i, j + 1)
            found.append((cost + math.log1p(_all_bundles(regions[j]) / SMALL), pairs))
        return min(found)

    _, pairs = best(0, 0)
    with_region = {i for i, _ in pairs}
    lost = [c for i, c in enumerate(conditions) if i not in with_region]
    return [(conditions[i], regions[j]) for i, j in pairs], lost


def _expected(c: Condition, flops_a_cycle: float) -> float:
    """The bundles that a condition may have."""
    return max(_total(c) / WORK, c.flops / flops_a_cycle)


def _total(c: Condition) -> int:
    return c.work + sum(map(_total, c.inner))


@functools.cache
def _all_bundles(region: Region) -> int:
    return region.bundles + sum(map(_all_bundles, region.inner))


def _depth(conditions: tuple[Condition, ...]) -> int:
    return 1 + max((_depth(c.inner) for c in conditions), default=-1)


def _region_depth(region: Region) -> int:
    return max((1 + _region_depth(r) for r in region.inner), default=0)
