"""Faults planted in the gradients of a norm of a sum; those of the norms are planted in their own gradients."""

from __future__ import annotations

from tests.mutants.faults import Planted

FAULTS = {
    "triton": [
        Planted(
            "other-cotangent-forgotten",
            "the cotangent of the sum is not added",
            old='call.arrays["residual_out"], call.arrays["d_residual_out"])',
            new='call.arrays["residual_out"], None)',
            sample=True,
        ),
        Planted(
            "other-cotangent-for-d-y",
            "the cotangent of the sum goes through the norm, and that of y past it",
            old='    return gradients(call, config, call.arrays["residual_out"], call.arrays["d_residual_out"])',
            new='    other = call.arrays["d_residual_out"]\n'
            "    if other is None:\n"
            '        return gradients(call, config, call.arrays["residual_out"], None)\n'
            '    swapped = call.replace(arrays={**call.arrays, "d_y": other})\n'
            '    return gradients(swapped, config, call.arrays["residual_out"], call.arrays["d_y"])',
        ),
    ],
    "pallas": [
        Planted(
            "other-cotangent-forgotten",
            "the cotangent of the sum is not added",
            old='call.arrays["residual_out"], call.arrays["d_residual_out"]',
            new='call.arrays["residual_out"], None',
        ),
        Planted(
            "eps-ignored",
            "eps is always that of half precision",
            old='gradient_kernel, eps=call.options["eps"]',
            new="gradient_kernel, eps=1e-3",
            small=True,
        ),
    ],
}
