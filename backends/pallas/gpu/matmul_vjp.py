"""Gradients of the matrix product on Hopper: d_a = d_c b^T and d_b = a^T d_c.

a: (*#batch, m, k), b: (*#batch, k, n), d_c: (*batch, m, n) -> d_a and d_b, of the shapes of a and b. Each gradient is
one product of this family's matmul, which reads b^T and a^T as they lie: b is d_a's second operand transposed, a is
d_b's first. The batch axes that are summed are folded into the contraction: into rows, which lie beside them, for d_b,
and for d_a into columns, where XLA has to move them.

block_m, block_n, block_k, stages, band: matmul's, for both products.

Source: the derivative of the matrix product; the products themselves are `matmul`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.configs import HopperProductConfig
from portakern.backends.pallas.gpu import matmul as forward
from portakern.backends.pallas.lib.mosaic_gpu.chip import dtype_refused
from portakern.core.binder import sibling
from portakern.core.call import Call
from portakern.core.registry import find_spec
from portakern.specs.matmul import batch_axes, product_dtype

FACTORS = {"d_a": ("d_c", "b"), "d_b": ("a", "d_c")}
TRANSPOSED = {"d_a": ("b",), "d_b": ("a",)}
"""What is multiplied for each gradient, and which operand of that product lies in memory transposed."""


class Product(NamedTuple):
    """A gradient's product.

    Attributes:
      call: matmul's, on arrays without memory. shapes: of the factors with all axes of the batch, 1 where one lacks it.
      order: of these axes, so that those that are summed stand before the axis of the contraction: the last one of both
        factors of d_a, the one before of d_b's. folded: the shapes that they have then.
    """

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    folded: tuple[tuple[int, ...], ...]

    @property
    def moved(self) -> bool:
        """Whether the order is another than that in memory."""
        return any((axes := [i for i in self.order if x[i] != 1]) != sorted(axes) for x in self.shapes)


def product(call: Call, name: str) -> Product:
    """(*kept, i, K) times (*kept, j, K) transposed for d_a; (*kept, K, i) transposed times (*kept, K, j) for d_b."""
    rank, (kept, summed) = len(call.dims["batch"]), batch_axes(call, name)
    own = [call.arrays[x].shape for x in FACTORS[name]]
    shapes = tuple((1,) * (rank + 2 - len(x)) + x for x in own)
    deep = (rank + 1,) if name == "d_a" else (rank,)
    order = (*kept, rank, *summed, *deep) if name == "d_a" else (*kept, *summed, *deep, rank + 1)

    def folded(x: tuple[int, ...]) -> tuple[int, ...]:
        contraction = math.prod(x[i] for i in (*summed, *deep))
        matrix = (x[rank], contraction) if name == "d_a" else (contraction, x[rank + 1])
        return (*(x[i] for i in kept), *matrix)

    found = tuple(folded(x) for x in shapes)
    bare = [
        jax.ShapeDtypeStruct((*x[:-2], *(x[:-3:-1] if operand in TRANSPOSED[name] else x[-2:])), product_dtype(call))
        for operand, x in zip("ab", found, strict=True)
    ]
    options = {"precision": call.options["precision"], "out_dtype": call.outputs[name][1]}
    return Product(sibling(call, find_spec("matmul"), *bare, **options), shapes, order, found)


def products(call: Call) -> Iterator[tuple[str, Product]]:
    """The gradients that are wanted, and what they are."""
    return ((name, product(call, name)) for name in call.wants)


def key(call: Call) -> dict[str, str | int]:
    """matmul's, for both products: sums are in chunks where those of one are."""
    inner = [(of.call, TRANSPOSED[name]) for name, of in products(call)]
    tile = "deep k" if any(forward.in_chunks(of) for of, _ in inner) else forward.best_tile(*inner)
    return {"dtype": forward.operands(inner[0][0]) if inner else product_dtype(call), "tile": tile}


def supports(call: Call, config: HopperProductConfig) -> str | None:
    refused = dtype_refused(call, product_dtype(call), call.dtype_of("d_c"))
    reasons = (refused or _named(name, forward.supports(of.call, config)) for name, of in products(call))
    return next(filter(None, reasons), None)


def copies(call: Call, config: HopperProductConfig) -> str | None:
    """What XLA copies besides, in words."""
    found = []
    for name, of in products(call):
        if of.moved:
            found.append(_named(name, "batch axes that are summed are moved into the contraction"))
        found.append(_named(f"in the product of {name}", forward.copies(of.call, config, TRANSPOSED[name])))
    return "; ".join(filter(None, found)) or None


def _named(name: str, words: str | None) -> str | None:
    return words and f"{name}: {words}"


@BACKEND.implements("matmul_vjp", key=key, supports=supports, config=HopperProductConfig, copies=copies, same_bits=True)
def matmul_vjp(call: Call, config: HopperProductConfig) -> tuple[jax.Array | None, ...]:
    def gradient(name: str) -> jax.Array | None:
        if name not in call.wants:
            return None
        of, dtype = product(call, name), jnp.dtype(product_dtype(call))
        factors = [
            call.arrays[x].reshape(shape).astype(dtype).transpose(of.order).reshape(folded)
            for x, shape, folded in zip(FACTORS[name], of.shapes, of.folded, strict=True)
        ]
        c = forward.product(of.call, config, dict(zip("ab", factors, strict=True)), TRANSPOSED[name])
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
