"""PyTorch's functions that are a matrix product and little else, on the matmul op: what ``swapped`` takes beside the
twins.

The sum of a product and a bias is rounded once, as PyTorch's is: a product of 16-bit matrices that something is added
to stays in float32 until then.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from portakern.errors import SpecError
from portakern.frameworks.torch.casting import lowered
from portakern.frameworks.torch.functions import cut_within, into, kept_op, rows_times

__all__ = ["Elsewhere", "addmm", "baddbmm", "bmm", "einsum", "linear", "mm"]


class Elsewhere(Exception):
    """A call that is not what a swapped function does here, and is PyTorch's own to serve; the words say why."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """``torch.nn.functional.linear``: input @ weight^T + bias, with weight (out, in), or (in,) for a number a row."""
    if bias is None and weight.dim() == 2 and input.dim() > 1:  # as most calls have it
        if torch._C._is_any_autocast_enabled():
            input, weight = lowered(input), lowered(weight)
        return rows_times(kept_op("matmul", backend), input, weight.mT)
    if input.dim() == 0 or weight.dim() not in (1, 2):
        raise SpecError(
            f"linear: input has shape {tuple(input.shape)} and weight {tuple(weight.shape)}; expected (..., in) and "
            "(out, in) or (in,)"
        )
    wide = tuple(weight.shape[:-1])
    if bias is not None and tuple(bias.shape) not in ((), wide):
        raise SpecError(f"linear: bias has shape {tuple(bias.shape)}; expected {wide}, weight's without its last axis")
    lead = input.shape[:-1]
    flat = input if cut_within(input) else input.reshape(math.prod(lead), input.shape[-1])
    columns = weight.mT if weight.dim() == 2 else weight[:, None]
    return _sum("linear", bias, flat, columns, 1, 1, backend).reshape((*lead, *wide))


def mm(
    input: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``torch.mm``: (m, k) @ (k, n)."""
    _matrices("mm", 2, input=input, mat2=mat2)
    return into("mm", out, kept_op("matmul", backend)(input, mat2, out_dtype=out_dtype))


def bmm(
    input: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``torch.bmm``: (b, m, k) @ (b, k, n)."""
    _matrices("bmm", 3, input=input, mat2=mat2)
    return into("bmm", out, kept_op("matmul", backend)(input, mat2, out_dtype=out_dtype))


def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``torch.addmm``: beta input + alpha (m, k) @ (k, n)."""
    _matrices("addmm", 2, mat1=mat1, mat2=mat2)
    return into("addmm", out, _sum("addmm", input, mat1, mat2, beta, alpha, backend))


def baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """``torch.baddbmm``: beta input + alpha (b, m, k) @ (b, k, n)."""
    _matrices("baddbmm", 3, batch1=batch1, batch2=batch2)
    return into("baddbmm", out, _sum("baddbmm", input, batch1, batch2, beta, alpha, backend))


def _matrices(name: str, axes: int, **pair: Tensor) -> None:
    """Refuse what the matmul op would take and these functions do not: other ranks, and batches that broadcast."""
    (first, a), (second, b) = pair.items()
    if a.dim() != axes or b.dim() != axes or a.shape[:-2] != b.shape[:-2]:
        form = "(m, k) and (k, n)" if axes == 2 else "(b, m, k) and (b, k, n)"
        raise SpecError(
            f"{name}: {first} has shape {tuple(a.shape)} and {second} {tuple(b.shape)}; expected {form}: "
            "torch.matmul broadcasts"
        )


def _sum(
    name: str, added: Tensor | None, a: Tensor, b: Tensor, beta: float, alpha: float, backend: str | None
) -> Tensor:
    """beta added + alpha a @ b, rounded to the operands' dtype once; ``added`` is not read where beta is 0."""
    a, b, added = lowered(a), lowered(b), None if added is None else lowered(added)
    if added is not None and added.dtype != a.dtype:
        raise SpecError(
            f"{name}: {'bias' if name == 'linear' else 'input'} is {added.dtype}; expected {a.dtype}, as the "
            "matrices are: cast it"
        )
    product = kept_op("matmul", backend)
    if added is None and alpha == 1:
        return product(a, b)
    shape = (*a.shape[:-1], b.shape[-1])
    if added is not None:
        try:
            added = added.expand(shape)
        except RuntimeError:
            raise SpecError(
                f"{name}: input has shape {tuple(added.shape)}; expected one that broadcasts to {shape}"
            ) from None
    wide = a.dtype in (torch.float16, torch.bfloat16) and not (alpha == 1 and beta == 0)
    c = product(a, b, out_dtype="float32") if wide else product(a, b)
    c = c if alpha == 1 else c * alpha
    if added is not None and beta != 0:
        added = added.to(c.dtype) if wide else added
        c = c + (added if beta == 1 else added * beta)
    c = c.to(a.dtype) if wide else c
    if added is not None and beta == 0 and added.requires_grad and torch.is_grad_enabled():
        c = torch.where(
            c.new_ones((), dtype=torch.bool), c, added
        )  # whose gradient is zeros, as PyTorch's, and not None
    return c


def einsum(*args: Any, backend: str | None = None) -> Tensor:
    """``torch.einsum`` where it is one product of matrices, or of a batch of them.

    Raises:
      Elsewhere: it is something else: a sum, a diagonal, an outer product, more than two operands.
    """
    equation, *operands = args  # of indices in lists torch.einsum makes an equation before a mode sees the call
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if len(operands) != 2:
        raise Elsewhere(f"einsum: {equation!r} has {len(operands)} operands; a product has 2")
    a, b = operands
    left, right, result = _indices(equation, a.dim(), b.dim())
    sizes = _sizes(equation, (left, a), (right, b))
    batch = [i for i in left if i in right and i in result]
    summed = [i for i in left if i in right and i not in result]
    rows, columns = [i for i in left if i not in right], [i for i in right if i not in left]
    if not summed:
        raise Elsewhere(f"einsum: {equation!r} sums over no index of both operands")
    if all(
        1 in (a.shape[left.index(i)], b.shape[right.index(i)]) for i in summed
    ):  # which PyTorch multiplies as numbers
        raise Elsewhere(f"einsum: {equation!r} sums over no index with an extent above 1 in both operands")
    if any(i not in result for i in rows + columns):
        raise Elsewhere(f"einsum: {equation!r} sums over an index that only one operand has")
    outer, k = [sizes[i] for i in batch], math.prod([sizes[i] for i in summed])
    m, n = [math.prod([sizes[i] for i in some]) for some in (rows, columns)]  # lists: dynamo takes no generator here
    a = _arranged(a, left, batch + rows + summed, sizes).reshape(*outer, m, k)
    b = _arranged(b, right, batch + summed + columns, sizes).reshape(*outer, k, n)
    order = batch + rows + columns
    c = kept_op("matmul", backend)(a, b).reshape([sizes[i] for i in order])
    return c.permute([order.index(i) for i in result])


def _indices(equation: str, *ranks: int) -> list[list[str]]:
    """The indices of the two operands and of the result; ``...`` stands for names of its own, aligned at the right."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    operands = terms.split(",")
    if len(operands) != 2:
        raise Elsewhere(f"einsum: {equation!r} does not name two operands")
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(operands, ranks, strict=True)]
    if any(n < 0 or (n and "..." not in term) for n, term in zip(hidden, operands, strict=True)):
        raise Elsewhere(f"einsum: {equation!r} does not match the numbers of axes of its operands")
    rest = [f"...{n}" for n in range(max(hidden), 0, -1)]
    if not arrow:
        once = sorted(i for i in set("".join(operands)) - {"."} if "".join(operands).count(i) == 1)
        result = "..." * ("..." in terms) + "".join(once)
    named = [_named(term, rest[len(rest) - n :]) for term, n in zip(operands, hidden, strict=True)]
    named.append(_named(result, rest if "..." in result else []))
    for term in named:
        if len(set(term)) != len(term):
            raise Elsewhere(f"einsum: {equation!r} repeats an index within an operand or the result (a diagonal)")
    if not set(named[2]) <= set(named[0]) | set(named[1]):
        raise Elsewhere(f"einsum: {equation!r} has an index in the result that no operand has")
    return named


def _named(term: str, rest: list[str]) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(rest if dots else []), *after]


def _sizes(equation: str, *operands: tuple[list[str], Tensor]) -> dict[str, int]:
    """The extent of every index; where one operand has 1, the other's."""
    sizes: dict[str, int] = {}
    for indices, x in operands:
        for i, n in zip(indices, x.shape, strict=True):
            if sizes.get(i, 1) != 1 and n not in (1, sizes[i]):
                raise Elsewhere(f"einsum: {equation!r} has operands that disagree on the extent of {i}")
            sizes[i] = n if sizes.get(i, 1) == 1 else sizes[i]
    return sizes


def _arranged(x: Tensor, indices: list[str], order: list[str], sizes: dict[str, int]) -> Tensor:
    """An operand with its axes in another order, each of its whole extent."""
    return x.permute([indices.index(i) for i in order]).expand([sizes[i] for i in order])
