"""PyTorch: its tensors, and all that sees an op call beside the kernel (autograd, torch.func, torch.compile, autocast).
Importing this imports no torch.
"""

from portakern.frameworks.torch.arrays import Torch

__all__ = ["FRAMEWORK"]

FRAMEWORK = Torch()
