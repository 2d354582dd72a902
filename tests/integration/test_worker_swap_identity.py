"""Swapping, batching, chunking and the prefix cache change no token, whatever the KV dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.local import Completion, PoolTooSmallError
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from support.swapping_engine import make_engine
from support.tiny_model import write_tiny_llama

DTYPES = ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")
PROMPT = [7, 70, 101, 33, 12, 80, 45, 9, 10]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Decoder, CpuBackend]]:
    threads = torch.get_num_threads()
    backend = CpuBackend(threads=1)
    folder: Path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=3)
    yield Decoder(load_model(folder), backend), backend
    torch.set_num_threads(threads)


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


SAMPLING = (
    SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_swap_at_any_position_changes_no_token(
    decoder: tuple[Decoder, CpuBackend], dtype: str
) -> None:
    prompts = [PROMPT, [5, 6, 99, 14]]
    for sampling in SAMPLING:
        whole = ids(make_engine(decoder, dtype).generate(prompts, sampling))
        assert len({tuple(tokens) for tokens in whole}) == 2
        last_step = len(PROMPT) + sampling.max_tokens - 2
        for cut in range(last_step + 2):
            engine = make_engine(decoder, dtype)
            engine.cut = cut
            cut_up = ids(engine.generate(prompts, sampling))
            assert cut_up == whole, f"swapped after {cut} tokens"
            # An order that comes during the last step finds the sequence finished.
            assert engine.swaps == (1 if cut < last_step else 0)
            assert engine.core.counters.recomputed == 0
            engine.core.check()


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_batching_and_chunking_change_no_token(
    decoder: tuple[Decoder, CpuBackend], dtype: str
) -> None:
    prompts = [PROMPT, PROMPT[:3], [*PROMPT, *PROMPT, 77], [42], PROMPT[::-1]]
    for sampling in SAMPLING:
        alone = [
            ids(make_engine(decoder, dtype, chunk=64).generate([prompt], sampling))[0]
            for prompt in prompts
        ]
        for chunk, seqs in ((1, 8), (3, 2), (7, 1), (64, 8)):
            engine = make_engine(decoder, dtype, chunk=chunk, seqs=seqs)
            assert ids(engine.generate(prompts, sampling)) == alone, (chunk, seqs)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_the_prefix_cache_changes_no_token(decoder: tuple[Decoder, CpuBackend], dtype: str) -> None:
    long = [*PROMPT, *PROMPT[::-1]]
    rounds = [[long], [[*long, 3], [*long[:8], 50, 51], long], [long[:9]], [long]]
    for sampling in SAMPLING:
        plain = make_engine(decoder, dtype)
        cached = make_engine(decoder, dtype, prefix_cache=True)
        for prompts in rounds:
            expected = ids(plain.generate(prompts, sampling))
            assert ids(cached.generate(prompts, sampling)) == expected
        snapshot = cached.core.snapshot()
        assert snapshot["prefix_hit_tokens"] == 16 + 8 + 16 + 8 + 16
        assert plain.core.snapshot()["prefix_hit_tokens"] == 0


@pytest.mark.parametrize("cut", [2, 9, 13])
def test_a_swap_of_shared_blocks_copies_them_and_changes_no_token(
    decoder: tuple[Decoder, CpuBackend], cut: int
) -> None:
    prompts = [[*PROMPT, 60], [*PROMPT, 61]]
    whole = [ids(make_engine(decoder, "fp16").generate([p], SAMPLING[1]))[0] for p in prompts]
    engine = make_engine(decoder, "fp16", prefix_cache=True)
    assert ids(engine.generate(prompts[:1], SAMPLING[1])) == whole[:1]
    engine.cut = cut
    assert ids(engine.generate(prompts, SAMPLING[1])) == whole
    assert engine.swaps == 1


def test_a_recompute_from_kept_tokens_changes_no_token(
    decoder: tuple[Decoder, CpuBackend],
) -> None:
    for sampling in SAMPLING:
        whole = make_engine(decoder, "fp16").generate([PROMPT], sampling)[0]
        for kept in range(len(whole.tokens)):
            engine = make_engine(decoder, "fp16")
            (completion,) = engine.add(PROMPT, sampling)
            completion.tokens = whole.tokens[:kept]
            engine.admit(completion)
            engine.drain()
            assert completion.token_ids == whole.token_ids, kept


def test_penalties_and_choices_survive_a_swap(decoder: tuple[Decoder, CpuBackend]) -> None:
    sampling = SamplingParams(
        max_tokens=10,
        temperature=0.8,
        n=2,
        seed=5,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logprobs=2,
        ignore_eos=True,
    )
    whole = make_engine(decoder, "fp16").generate([PROMPT], sampling)
    assert whole[0].tokens != whole[1].tokens
    for cut in (6, 12):
        engine = make_engine(decoder, "fp16")
        engine.cut = cut
        again = engine.generate([PROMPT], sampling)
        assert engine.swaps == 1
        assert [c.tokens for c in again] == [c.tokens for c in whole]


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(
    decoder: tuple[Decoder, CpuBackend],
) -> None:
    engine = make_engine(decoder, "fp16", blocks=3)
    with pytest.raises(PoolTooSmallError, match="13 tokens: they need 4 KV blocks, the pool has 3"):
        engine.generate([[7]], SAMPLING[0])
