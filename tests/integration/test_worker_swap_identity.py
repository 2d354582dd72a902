"""Swapping, batching, chunking and the prefix cache change no token, whatever the KV dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from deepinfer.kvstore.core.ids import Run, Seq, StoreId, Ticket
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.messages import StoreStatus, SwapIn, SwapOut
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import (
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    ForgetSeq,
    PutDone,
    PutPayload,
    WorkerEffect,
)
from deepinfer.workers.engine import Engine
from deepinfer.workers.local import GATEWAY, Completion, LocalEngine, PoolTooSmallError
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.pool import PagedPool
from support.tiny_model import write_tiny_llama

STORE = StoreId("memory")
DTYPES = ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")
BLOCK = 4
PROMPT = [7, 70, 101, 33, 12, 80, 45, 9, 10]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Decoder, CpuBackend]]:
    threads = torch.get_num_threads()
    backend = CpuBackend(threads=1)
    folder: Path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=3)
    yield Decoder(load_model(folder), backend), backend
    torch.set_num_threads(threads)


class SwappingEngine(LocalEngine):
    """Swaps a sequence out and in again at a chosen number of computed tokens."""

    def __init__(self, engine: Engine, config: WorkerConfig, pool: PagedPool) -> None:
        super().__init__(engine, config)
        self.pool = pool
        self.payloads: dict[Ticket, tuple[tuple[int, ...], bytes]] = {}
        self.cut: int | None = None
        self.swaps = 0

    def perform(self, effect: WorkerEffect) -> None:
        match effect:
            case PutPayload():
                target = bytearray(self.pool.layout.payload_bytes(len(effect.block_ids)))
                self.pool.copy_out(effect.block_ids, target)
                self.payloads[effect.ticket] = (effect.token_ids, bytes(target))
                self.feed(PutDone(effect.ticket, True, len(target), 1))
            case Commit():
                self.feed(CommitReply(effect.ticket, StoreStatus.OK))
                # Without sharing, nobody may read what these blocks held from here on.
                if not self.config.prefix_cache:
                    freed = self.core.residents[effect.ticket.seq].blocks
                    self.pool.storage[freed] = 0xA5
            case ForgetSeq() if effect.seq in self.completions:
                self._return(effect.seq)
            case FetchPayload():
                token_ids, payload = self.payloads[effect.ticket]
                self.pool.copy_in(effect.block_ids, payload)
                blocks = len(effect.block_ids)
                ok = StoreStatus.OK
                self.feed(FetchDone(effect.ticket, effect.run, ok, token_ids, blocks, 1))
            case _:
                super().perform(effect)

    def advance(self) -> bool:
        went_on = super().advance()
        for seq, resident in self.core.residents.items():
            if self.cut is not None and resident.in_step and resident.computed >= self.cut:
                self.cut = None
                order = self.mint()
                ticket = Ticket(seq, resident.run, order)
                # It arrives while the step runs: before the StepDone that is waiting already.
                self._events.appendleft(SwapOut(order, seq, resident.run, ticket, STORE))
        return went_on

    def _return(self, seq: Seq) -> None:
        """Order a sequence that was swapped out back."""
        tickets = [ticket for ticket in self.payloads if ticket.seq == seq]
        if not tickets or self.completions[seq].finish is not None:
            return
        self.swaps += 1
        ticket = tickets[-1]
        token_ids, payload = self.payloads[ticket]
        run: Run = self.mint()
        blocks = len(payload) // self.pool.layout.block_bytes
        record = self.completions[seq].record
        total = len(record.prompt_ids) + record.sampling.max_tokens
        self.feed(SwapIn(run, seq, run, GATEWAY, ticket, STORE, len(token_ids), blocks, total))


def make_engine(
    decoder: tuple[Decoder, CpuBackend],
    dtype: str,
    *,
    blocks: int = 64,
    chunk: int = 4,
    seqs: int = 8,
    prefix_cache: bool = False,
) -> SwappingEngine:
    model, backend = decoder
    config = model.config
    layout = KvLayout(
        resolve_kv_dtype(dtype), config.layers, config.kv_heads, config.head_dim, BLOCK
    )
    pool = PagedPool(layout, blocks)
    limits = WorkerConfig(
        blocks_total=blocks,
        block_size=BLOCK,
        block_bytes=layout.block_bytes,
        prefill_chunk_tokens=chunk,
        max_batch_tokens=64,
        max_batch_seqs=seqs,
        prefix_cache=prefix_cache,
    )
    return SwappingEngine(Engine(ModelRunner(model, pool, backend)), limits, pool)


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
