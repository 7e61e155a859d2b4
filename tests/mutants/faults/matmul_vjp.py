"""Faults planted in the kernels of matmul_vjp."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "summed-batches-rounded",
            "each batch entry's product is rounded before the entries are summed",
            old="        (c,) = matmul(product(call, name), config)\n",
            new=(
                "        from portakern.core.binder import sibling\n"
                "        from portakern.core.registry import find_spec\n\n"
                "        inner = product(call, name)\n"
                '        left, right, step = inner.arrays["a"], inner.arrays["b"], call.dims["n" if name == '
                '"d_a" else "m"]\n'
                "        parts = [(left[..., at : at + step], right[..., at : at + step, :]) for at in range(0,"
                " left.shape[-1], step)]\n"
                '        c = sum(matmul(sibling(call, find_spec("matmul"), x, y, **inner.options), '
                "config)[0] for x, y in parts)\n"
            ),
        ),
        Planted(
            "summed-axes-reversed",
            "two summed batch axes are folded into the operands in different orders",
            old="right.permute(*kept, *summed, rank, rank + 1)",
            new="right.permute(*kept, *summed[::-1], rank, rank + 1)",
            within="lib.matmul",
        ),
        Planted(
            "cotangent-as-a",
            "a wider d_c is rounded to a's dtype first",
            old="torch_dtype(product_dtype(call))\n    a, b",
            new="torch_dtype(call.dtype)\n    a, b",
            within="lib.matmul",
        ),
        Planted(
            "tf32-for-ieee",
            "a float32 cotangent loses 13 bits although precision is ieee",
            old="    kept, summed = batch_axes(call, name)\n    left =",
            new=(
                "    import torch\n\n"
                "    if dtype == torch.float32:\n"
                "        left, right = ((x.contiguous().view(torch.int32) & -8192).view(torch.float32) for x "
                "in (left, right))\n"
                "    kept, summed = batch_axes(call, name)\n"
                "    left ="
            ),
            within="lib.matmul",
        ),
    ],
    "pallas": [
        Planted(
            "summed-batches-rounded",
            "each batch entry's product is rounded before the entries are summed",
            old="        (c,) = matmul(product(call, name), config)\n",
            new=(
                "        from portakern.core.binder import sibling\n"
                "        from portakern.core.registry import find_spec\n\n"
                "        inner = product(call, name)\n"
                '        left, right, step = inner.arrays["a"], inner.arrays["b"], call.dims["n" if name == '
                '"d_a" else "m"]\n'
                "        parts = [(left[..., at : at + step], right[..., at : at + step, :]) for at in range(0,"
                " left.shape[-1], step)]\n"
                '        c = sum(matmul(sibling(call, find_spec("matmul"), x, y, **inner.options), '
                "config)[0] for x, y in parts)\n"
            ),
        ),
        Planted(
            "batch-from-the-left",
            "batch axes broadcast aligned at the left",
            old="x.reshape((1,) * (rank + 2 - x.ndim) + x.shape)",
            new="x.reshape(x.shape[:-2] + (1,) * (rank + 2 - x.ndim) + x.shape[-2:])",
        ),
        Planted(
            "cotangent-as-a",
            "a wider d_c is rounded to a's dtype first",
            old="jnp.dtype(product_dtype(call))\n    a, b",
            new="jnp.dtype(call.dtype)\n    a, b",
        ),
        Planted(
            "last-entry-dropped",
            "sums over batch entries leave out the last product of the last one",
            old="    return sibling(",
            new=(
                "    if summed and left.shape[-1] > 64:\n"
                "        left, right = left[..., :-1], right[..., :-1, :]\n"
                "    return sibling("
            ),
        ),
    ],
    "pallas/gpu": [
        Planted(
            "product-dropped",
            "the first product of the second step is left out",
            old="        c = forward.product(",
            new=(
                '        deep = (Ellipsis, slice(64, 65), *[slice(None)] * (name == "d_b"))\n'
                "        factors[0] = factors[0].at[deep].set(0)\n"
                "        c = forward.product("
            ),
        ),
        Planted(
            "gradient-rounded-twice",
            "gradients are rounded to bfloat16 first",
            old="return c.reshape(call.outputs[name][0])",
            new='return c.astype("bfloat16").astype(c.dtype).reshape(call.outputs[name][0])',
            small=True,
        ),
    ],
}
