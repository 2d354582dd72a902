"""A prompt's log-probabilities: what a plain forward pass says, whatever happens to the request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.kvstore.core.requests import SamplingParams, Token
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import SequenceSlice
from support.swapping_engine import BLOCK, make_engine
from support.tiny_model import write_tiny_llama

PROMPT = [7, 70, 101, 33, 12, 80, 45, 9, 10, 60, 61, 62, 63]
SCORED = SamplingParams(
    max_tokens=6, temperature=0.9, seed=3, logprobs=1, prompt_logprobs=3, ignore_eos=True
)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Decoder, CpuBackend]]:
    threads = torch.get_num_threads()
    backend = CpuBackend(threads=1)
    folder: Path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=3)
    yield Decoder(load_model(folder), backend), backend
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def truth(decoder: tuple[Decoder, CpuBackend]) -> list[Token]:
    """From one pass over the whole prompt, by the definition of a log-softmax."""
    runner = make_engine(decoder, "fp16").engine._runner
    blocks = range(-(-len(PROMPT) // BLOCK))
    logits = runner.forward_all([SequenceSlice(PROMPT, 0, list(blocks), False)])  # type: ignore[attr-defined]
    logprobs = logits.double().log_softmax(-1).numpy()
    expected = []
    for row, token_id in zip(logprobs, PROMPT[1:], strict=False):
        best = np.argsort(-row, kind="stable")[:3].tolist()
        top = tuple((i, float(row[i])) for i in best)
        expected.append(Token(token_id, float(row[token_id]), top))
    return expected


def assert_close(scores: list[Token], truth: list[Token]) -> None:
    """Two float64 sums over the vocabulary in other orders: equal to 1e-9."""
    assert [token.id for token in scores] == [token.id for token in truth]
    for got, expected in zip(scores, truth, strict=True):
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-9)
        assert [i for i, _ in got.top] == [i for i, _ in expected.top]
        values = [value for _, value in expected.top]
        assert [value for _, value in got.top] == pytest.approx(values, abs=1e-9)


def test_they_are_those_of_a_plain_pass(
    decoder: tuple[Decoder, CpuBackend], truth: list[Token]
) -> None:
    (completion,) = make_engine(decoder, "fp16").generate([PROMPT], SCORED)
    assert_close(completion.scores, truth)
    (plain,) = make_engine(decoder, "fp16").generate(
        [PROMPT], SamplingParams(max_tokens=6, temperature=0.9, seed=3, logprobs=1, ignore_eos=True)
    )
    assert plain.scores == []
    assert plain.tokens == completion.tokens


def test_chunks_batches_and_a_swap_anywhere_change_no_bit(
    decoder: tuple[Decoder, CpuBackend],
) -> None:
    (whole,) = make_engine(decoder, "fp16").generate([PROMPT], SCORED)
    for chunk, seqs in ((1, 8), (3, 2), (64, 8)):
        engine = make_engine(decoder, "fp16", chunk=chunk, seqs=seqs)
        for one in engine.generate([PROMPT, PROMPT], SCORED):
            assert one.scores == whole.scores, (chunk, seqs)
    for cut in range(len(PROMPT) + 3):
        engine = make_engine(decoder, "fp16", chunk=3)
        engine.cut = cut
        (one,) = engine.generate([PROMPT], SCORED)
        assert engine.swaps == 1
        assert (one.scores, one.tokens) == (whole.scores, whole.tokens), cut
        assert engine.core.counters.tokens_computed == len(PROMPT) + 5, "nothing twice"


@pytest.mark.parametrize("held", [0, 1, 3, 4, 7, 11, 12])
def test_a_gateway_that_lacks_some_gets_the_rest(
    decoder: tuple[Decoder, CpuBackend], held: int
) -> None:
    """Another run has said ``held`` of them; what it had computed is gone."""
    (whole,) = make_engine(decoder, "fp16").generate([PROMPT], SCORED)
    engine = make_engine(decoder, "fp16")
    (one,) = engine.add(PROMPT, SCORED)
    one.scores = whole.scores[:held]
    engine.admit(one)
    engine.drain()
    assert (one.scores, one.tokens) == (whole.scores, whole.tokens)
    engine.core.check()


def test_the_prefix_cache_hides_no_position(decoder: tuple[Decoder, CpuBackend]) -> None:
    (whole,) = make_engine(decoder, "fp16").generate([PROMPT], SCORED)
    engine = make_engine(decoder, "fp16", prefix_cache=True)
    for _ in range(2):
        (one,) = engine.generate([PROMPT], SCORED)
        assert (one.scores, one.tokens) == (whole.scores, whole.tokens)
    assert engine.core.metrics()["prefix_hit_tokens"] == 0
    # Those that a gateway holds need no rows: their blocks are taken from the cache.
    (last,) = engine.add(PROMPT, SCORED)
    last.scores = whole.scores[: 2 * BLOCK + 1]
    engine.admit(last)
    engine.drain()
    assert (last.scores, last.tokens) == (whole.scores, whole.tokens)
    assert engine.core.metrics()["prefix_hit_tokens"] == 2 * BLOCK


def test_choices_compute_a_shared_prompt_once(decoder: tuple[Decoder, CpuBackend]) -> None:
    sampling = SamplingParams(max_tokens=5, seed=3, n=4, ignore_eos=True)
    alone = make_engine(decoder, "fp16").generate([PROMPT], sampling)
    engine = make_engine(decoder, "fp16", prefix_cache=True)
    together = engine.generate([PROMPT], sampling)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in together}) == 4, "each draws its own numbers"
    shared = len(PROMPT) // BLOCK * BLOCK
    rest = len(PROMPT) - shared
    assert engine.core.metrics()["prefix_hit_tokens"] == 3 * shared
    assert engine.core.counters.tokens_computed == shared + 4 * (rest + 4)
    engine.core.check()
