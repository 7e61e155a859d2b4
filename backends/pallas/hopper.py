"""What the families for Hopper GPUs have in common: where their kernels run, and what compiles and interprets them."""

from portakern.core.backend import Family, Need

__all__ = ["family"]


def family(name: str, before: tuple[str, ...] = ()) -> Family:
    """The family whose kernels lie in the folder of this name; ``before``: those that are tried after it."""
    return Family(
        f"portakern.backends.pallas.{name}",
        platforms=("cuda",),
        targets=("sm_90",),
        before=before,
        interprets=True,
        needs=(Need("jax", "0.11", "which takes Python 3.12 or newer"),),
        lists="portakern.backends.pallas.listed:kernels",
        compiler="portakern.backends.pallas.gpu.toolchain.compiler",
        profiles={"races": "portakern.backends.pallas.gpu.toolchain.races:raising"},
    )
