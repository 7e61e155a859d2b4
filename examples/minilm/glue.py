"""What the model needs from an array library beside the ops: arrays on a device, casts, and the exact GELU.

Indexing, ``+``, ``.T`` and ``.reshape`` mean the same in NumPy, PyTorch and JAX and need no glue.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from portakern.core import registry
from portakern.core.framework import frameworks
from portakern.core.targets import Target
from portakern.errors import UnavailableError
from portakern.spec.dtypes import numpy_dtype

__all__ = ["Glue", "glue_for"]


class Glue:
    """NumPy arrays in and out of one array library, on the best device that a backend serves."""

    def __init__(self, backend: str) -> None:
        served = registry.backend(backend)
        served.check_available()
        self.framework = frameworks()[served.framework]
        self.framework.load()
        devices = [d for d in self.framework.devices() if served.families_for(self.framework.target(d))]
        if not devices:
            raise UnavailableError(f"{backend} serves no device of {self.framework.name} here")
        self.device = devices[0]
        self.target: Target = self.framework.target(self.device)
        self.oracle = served.oracle
        self.interpreted = served.families_for(self.target)[0][1]

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """``x`` as an array of the library, on the device."""
        return self.framework.from_numpy(x.astype(numpy_dtype(dtype)), self.device)

    def numpy(self, x: Any) -> np.ndarray:
        """The values on the host as float32; waits for them where the library computes ahead."""
        return self.framework.to_numpy(x).astype(np.float32)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(numpy_dtype(dtype))

    def gelu(self, x: Any) -> Any:
        """x Phi(x), Phi the normal distribution function (Hendrycks, Gimpel 2016), through erf and not through tanh."""
        wide = x.astype(np.float64)
        return (wide * 0.5 * (1.0 + _erf(wide / math.sqrt(2.0)))).astype(x.dtype)


class TorchGlue(Glue):
    def cast(self, x: Any, dtype: str) -> Any:
        import torch

        return x.to(getattr(torch, dtype))

    def gelu(self, x: Any) -> Any:
        import torch

        return torch.nn.functional.gelu(x)


class JaxGlue(Glue):
    def gelu(self, x: Any) -> Any:
        import jax

        wide = x.astype(np.float32)  # in bfloat16 JAX would round after every step of the formula
        return jax.nn.gelu(wide, approximate=False).astype(x.dtype)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_GLUES: dict[str, type[Glue]] = {"numpy": Glue, "torch": TorchGlue, "jax": JaxGlue}


def glue_for(backend: str) -> Glue:
    """The glue for the array library that ``backend`` takes."""
    return _GLUES[registry.backend(backend).framework](backend)
