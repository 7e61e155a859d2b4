"""Tables of embeddings of a model on the embedding op. A table that is the head's weight too has one gradient, to which
autograd adds both parts."""

from __future__ import annotations

from torch import Tensor, nn

from portakern.frameworks.torch.functions import embedding
from portakern.frameworks.torch.models.served import Heart, Recipe, has_plain_parameters

__all__ = ["served_embedding"]


def served_embedding(module: nn.Module, backend: str | None) -> tuple[str, Recipe] | str | None:
    """The op that serves a table, and the forward that stands for the module's own; why none does, in words; None for
    what is no ``torch.nn.Embedding``."""
    kind = type(module)
    if kind.forward is not nn.Embedding.forward:
        return None
    given = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
    return f"a table with {given[0]}" if given else ("embedding", Recipe(_embedding, kind, (backend,)))


def _embedding(kind: type, backend: str | None) -> Heart:
    def unless(module: nn.Module) -> str:
        return "" if has_plain_parameters(module) else "its weight is not a plain tensor"

    def forward(self: nn.Embedding, input: Tensor) -> Tensor:
        if unless(self):
            return nn.Embedding.forward(self, input)
        return embedding(input, self.weight, self.padding_idx, backend=backend)

    return Heart(forward, unless)
