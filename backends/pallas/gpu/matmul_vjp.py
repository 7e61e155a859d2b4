"""Gradients of the matrix product on Hopper: d_a = d_c b^T and d_b = a^T d_c.

a: (*#batch, m, k), b: (*#batch, k, n), d_c: (*batch, m, n) -> d_a and d_b, of the shapes of a and b. Each gradient is
one product of this family's matmul, of the operands that it has on TPUs too: transposed, and with the batch axes that
are summed folded into its contraction, by XLA.

block_m, block_n, block_k, stages, band: matmul's, for both products.

Source: the derivative of the matrix product; the products themselves are `matmul`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax

from portakern.backends.pallas import BACKEND
from portakern.backends.pallas.gpu import matmul as forward
from portakern.backends.pallas.gpu._chip import dtype_refused
from portakern.backends.pallas.tpu.matmul_vjp import batch_axes, product
from portakern.core.binder import sibling
from portakern.core.call import Call
from portakern.core.registry import find_spec
from portakern.specs.matmul_vjp import product_dtype


def bare_products(call: Call) -> Iterator[tuple[str, Call]]:
    """The calls of matmul that give the gradients that are wanted, on arrays without memory."""
    forms = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in call.arrays.items()}
    for name in call.wants:

        def operands(arrays: Mapping[str, jax.Array], name: str = name) -> tuple[jax.Array, jax.Array]:
            found = product(call.replace(arrays=arrays), name).arrays
            return found["a"], found["b"]

        options = {"precision": call.options["precision"], "out_dtype": call.outputs[name][1]}
        yield name, sibling(call, find_spec("matmul"), *jax.eval_shape(operands, forms), **options)


def key(call: Call) -> dict[str, str | int]:
    """matmul's, for both products: sums are in chunks where those of one are."""
    inner = [of for _, of in bare_products(call)]
    tile = "deep k" if any(map(forward.in_chunks, inner)) else forward.best_tile(*inner)
    return {"dtype": forward.operands(inner[0]) if inner else product_dtype(call), "tile": tile}


def supports(call: Call, tiling: Mapping[str, int]) -> str | None:
    refused = dtype_refused(call, product_dtype(call), call.dtype_of("d_c"))
    reasons = (refused or _named(name, forward.supports(inner, tiling)) for name, inner in bare_products(call))
    return next(filter(None, reasons), None)


def copies(call: Call, tiling: Mapping[str, int]) -> str | None:
    """What XLA copies besides, in words."""
    found = []
    for name, inner in bare_products(call):
        found.append(_named(name, f"{'b' if name == 'd_a' else 'a'} is transposed"))
        if batch_axes(call, name)[1]:
            found.append(_named(name, "batch axes that are summed are moved into the contraction"))
        found.append(_named(f"in the product of {name}", forward.copies(inner, tiling)))
    return "; ".join(filter(None, found)) or None


def _named(name: str, words: str | None) -> str | None:
    return words and f"{name}: {words}"


@BACKEND.implements("matmul_vjp", key=key, supports=supports, knobs=forward.KNOBS, copies=copies)
def matmul_vjp(call: Call, tiling: Mapping[str, int]) -> tuple[jax.Array | None, ...]:
    def gradient(name: str) -> jax.Array | None:
        if name not in call.wants:
            return None
        (c,) = forward.matmul(product(call, name), tiling)
        return c.reshape(call.outputs[name][0])

    return gradient("d_a"), gradient("d_b")
