"""Faults planted in the kernels of linear_cross_entropy."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "ragged-chunk-dropped",
            "the last chunk of rows is left out where it is shorter",
            old="in_parts(rows, chunk, piece",
            new="in_parts(rows // chunk * chunk, chunk, piece",
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "labels-of-the-first-chunk",
            "every chunk of rows has the labels of the first",
            old="        losses_into(call, x, t, own_loss, (own_lse, own_low), walk)\n",
            new="        t = labels[: h.shape[0]]\n"
            "        losses_into(call, x, t, own_loss, (own_lse, own_low), walk)\n",
            sample=True,
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "target-one-class-on",
            "the slope has the target at the class before the label",
            old="(own_lse, own_low), None, b, back, 0, n)",
            new="(own_lse, own_low), None, b, back, 1, n)",
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "smoothing-of-a-class-more",
            "what all classes share in the slope is divided among one more",
            old="(own_lse, own_low), None, b, back, 0, n)",
            new="(own_lse, own_low), None, b, back, 0, n + 1)",
            small=True,
            within="lib.linear_cross_entropy",
        ),
        Planted(
            "kept-of-the-first-chunk",
            "what is kept of every chunk of rows is written over that of the first",
            old="            b = overwritten(x) if own_kept is None else own_kept\n",
            new="            b = overwritten(x) if own_kept is None else kept[: h.shape[0]]\n",
            within="lib.linear_cross_entropy",
        ),
    ],
    "pallas": [
        Planted(
            "labels-of-the-first-chunk",
            "every whole chunk of rows has the labels of the first",
            old="lax.map(lambda part: piece(*part), parts)",
            new="lax.map(lambda part: piece(part[0], parts[1][0]), parts)",
        ),
        Planted(
            "lse-rounded",
            "the slope is taken with an lse that is rounded to the dtype of the logits",
            old="dims, x, t, lse, jnp.ones_like(lse), low)",
            new="dims, x, t, lse.astype(x.dtype).astype(lse.dtype), jnp.ones_like(lse), low)",
        ),
        Planted(
            "kept-in-8-bits",
            "what is kept is rounded to 8 bits on its way",
            old='"logit_gradients": lambda: b}',
            new='"logit_gradients": lambda: b.astype(jnp.float8_e4m3fn).astype(b.dtype)}',
        ),
    ],
}
