"""Faults planted in the kernels of linear."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "z-rounded",
            "the sum is rounded to the result's dtype before the activation",
            old="    f = activated(z, activation, y.dtype",
            new="    f = activated(z.to(y.dtype.element_ty).to(acc_dtype), activation, y.dtype",
            sample=True,
            within="lib.linear",
        ),
        Planted(
            "bias-kept-twice",
            "pre takes the bias twice",
            old="tl.store(pre + at, z.to(",
            new=(
                "if bias is not None:\n"
                "            twice = z + tl.load(bias + col * bias_n, mask=col_ok, other=0.0).to(acc_dtype)[None, :]\n"
                "        else:\n"
                "            twice = z\n"
                "        tl.store(pre + at, twice.to("
            ),
            within="lib.linear",
        ),
        Planted(
            "nan-closed",
            "relu is a maximum, which makes 0 of NaN",
            old="return tl.where(z < 0, 0.0, z)",
            new="return tl.where(z > 0, z, 0.0)",
            within="lib.activations",
            small=True,
        ),
        Planted(
            "tail-unmasked",
            "operands are not masked beyond k",
            old="tile=ProductTile.of(call, config)",
            new="tile=ProductTile.of(call, config)._replace(whole_k=True)",
            gpu=False,
        ),
        Planted(
            "grid-turned",
            "tiles are numbered as if rows and columns were each other's",
            old="tile_index(tl.program_id(0), extents.tiles_m, extents.tiles_n, tile.group)",
            new="tile_index(tl.program_id(0), extents.tiles_n, extents.tiles_m, tile.group)",
            gpu=False,
        ),
        Planted(
            "bias-by-rows",
            "every row of tiles has the biases of the first columns",
            old="tl.load(bias + col * bias_n",
            new="tl.load(bias + col % z.shape[1] * bias_n",
            within="lib.linear",
        ),
    ],
    "pallas": [
        Planted(
            "z-rounded",
            "the sum is rounded to the result's dtype before the activation",
            old="y = activated(z, activation)",
            new="y = activated(z.astype(ref.y.dtype).astype(jnp.float32), activation)",
        ),
        Planted(
            "bias-each-step",
            "the bias is added at each step of k",
            old="z = z + ref.bias[...].astype(jnp.float32)\n",
            new="z = z + ref.bias[...].astype(jnp.float32) * pl.num_programs(2)\n",
        ),
        Planted(
            "weight-beyond-k",
            "neither weight nor x is masked beyond k",
            old="            k=k,\n",
            new="            k=pl.cdiv(k, bk) * bk,\n",
            sample=True,
        ),
        Planted(
            "residual-before",
            "the residual is added before the activation",
            old="    y = activated(z, activation)\n",
            new=(
                '    z = z + ref.residual[...].astype(jnp.float32) if "residual" in ref else z\n'
                "    ref = Refs(**{name: at for name, at in vars(ref).items() if name != 'residual'})\n"
                "    y = activated(z, activation)\n"
            ),
        ),
    ],
}
