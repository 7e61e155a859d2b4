"""The server's loop of the examples: its batches, and its tokens beside those of the model without a cache."""

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[demo]'")

from portakern import results  # noqa: E402
from portakern.examples.serve import serve as serving  # noqa: E402
from portakern.examples.serve.batching import Batch, Capacity, Request, sampled  # noqa: E402
from portakern.examples.serve.model import CONTENDERS, Llama, made  # noqa: E402

LOAD = serving.SIZES["tiny"]


def steps_of(batch):
    """Every step of a batch whose rows all draw token 7, with the rows that it had."""
    while not batch.ended:
        step = batch.next()
        yield step, list(batch.rows)
        batch.take(step, [7] * len(step.draws))


@pytest.mark.parametrize("seed", range(5))
def test_batches_keep_within_their_capacity(seed):
    capacity = Capacity(sequences=4, tokens=9, pages=14, page_size=4, longest=30)
    requests = sampled(20, 50, capacity.longest, seed)
    batch, written = Batch(requests, capacity), {}
    for step, rows in steps_of(batch):
        assert 0 < len(step.tokens) <= capacity.tokens
        used = [p for row in step.page_table for p in row if p >= 0]
        assert len(set(used)) == len(used)  # no page is two sequences'
        assert step.q_starts[0] == 0 and step.q_starts[-1] == len(step.tokens)
        for i, row in enumerate(rows):
            begin, end = step.q_starts[i : i + 2]
            assert step.kv_lens[i] == (step.positions[end - 1] + 1 if end > begin else 0)
            for at in range(begin, end):
                page, place = divmod(step.slots[at], capacity.page_size)
                assert step.page_table[i][step.positions[at] // capacity.page_size] == page
                assert place == step.positions[at] % capacity.page_size
                written.setdefault(row.number, []).append(step.tokens[at])
    for i, request in enumerate(requests):
        assert batch.results[i] == [7] * request.new
        assert written[i] == [*request.prompt, *[7] * (request.new - 1)]
    assert sorted(batch.free) == list(range(capacity.pages))


def test_whoever_draws_does_not_wait_for_prompts():
    capacity = Capacity(sequences=3, tokens=4, pages=30, page_size=4, longest=40)
    batch = Batch([Request((1,), 20), Request((2,) * 30, 2), Request((3,) * 30, 2)], capacity)
    drew = [[row for row, _ in step.draws] for step, _ in steps_of(batch)]
    assert all(0 in rows for rows in drew[:20])


def test_what_never_fits_is_refused():
    capacity = Capacity(sequences=2, tokens=4, pages=3, page_size=4, longest=40)
    with pytest.raises(ValueError, match="request 1 has 13 keys at its end, and the cache holds 12"):
        Batch([Request((1,), 3), Request((1,) * 10, 4)], capacity)
    with pytest.raises(ValueError, match="tokens is 1; expected at least sequences = 2"):
        dataclasses.replace(capacity, tokens=1)
    with pytest.raises(ValueError, match="a request has 0 tokens of prompt and draws 1"):
        Request((), 1)


def served(who, backend=None, break_of=lambda kernels: kernels):
    capacity, size = LOAD.capacity, LOAD.model
    model = made(size, capacity.longest, "cpu", torch.float32)
    requests = sampled(4, size.words, capacity.longest, 1)
    llama = Llama(model, break_of(CONTENDERS[who](size, capacity, backend)), capacity)
    found = serving.serve(llama, requests)
    return serving.agreement(model, requests, found.tokens, 1e-4), sum(r.new for r in requests)


@pytest.mark.parametrize(
    ("who", "backend"), [("torch", None), ("portakern", "reference"), ("portakern", "triton")], ids=str
)
def test_each_token_is_the_models_without_a_cache(who, backend):
    agree, asked = served(who, backend)
    assert agree == asked


def test_a_key_that_is_not_written_shows():
    def skips_one(kernels):
        def append(k, v, k_pages, v_pages, packed, *tables):
            slots = torch.where(packed.positions == 2, -1, packed.slots)
            kernels.append(k, v, k_pages, v_pages, dataclasses.replace(packed, slots=slots), *tables)

        return dataclasses.replace(kernels, append=append)

    agree, asked = served("portakern", "reference", skips_one)
    assert agree < asked


def test_the_command_writes_what_it_measured(tmp_path, capsys):
    file = tmp_path / "serve.json"
    tiny = ["--size", "tiny", "--device", "cpu", "--requests", "2", "--backend", "reference", "--json", str(file)]
    assert not serving.main(tiny)
    said = capsys.readouterr()
    assert "flashinfer   left out: FlashInfer needs an NVIDIA GPU" in said.err
    rows = {row["ops"]: row for row in results.read(file).rows}
    assert [*rows] == ["portakern", "torch"] and rows["portakern"]["agree"] == rows["portakern"]["drawn"]
