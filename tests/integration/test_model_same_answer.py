"""The same answer: chunking, batching, placement and threads change no bit of KV or logits.

The reference for every schedule is the same request decoded alone, one token a step, which also
makes this the proof that KV recomputed by prefill equals KV computed by decode.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.pool import PagedPool
from support.memory_weights import random_model

DTYPES = ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")
BLOCK_SIZE = 8
NUM_BLOCKS = 160
MAX_TOKENS = 150  # three tiles of 64 keys

CONFIGS = {
    # Widths that are no multiple of a vector, grouped heads, biases.
    "qwen2": ModelConfig(
        family="qwen2", vocab_size=61, hidden_size=36, intermediate_size=52, layers=2, heads=6,
        kv_heads=2, head_dim=8, max_positions=256, rms_eps=1e-6, rope_theta=10_000.0,
        tied_embeddings=True, qkv_bias=True,
    ),
    # An MLP so wide that oneDNN sums a lone row in another order than four.
    "qwen3": ModelConfig(
        family="qwen3", vocab_size=97, hidden_size=64, intermediate_size=1552, layers=2, heads=4,
        kv_heads=4, head_dim=32, max_positions=256, rms_eps=1e-6, rope_theta=10_000.0,
        qk_norm=True,
    ),
    # Heads of which RoPE turns a part that is no multiple of a vector.
    "phi3": ModelConfig(
        family="phi3", vocab_size=61, hidden_size=36, intermediate_size=52, layers=2, heads=6,
        kv_heads=2, head_dim=16, max_positions=256, rms_eps=1e-5, rope_theta=10_000.0,
        rotary_dim=6, rope_divisors=(1.0, 1.5, 3.0), rope_magnitude=1.2, fused_projections=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """One model with a pool, and what a request gives when it is decoded alone."""

    runner: ModelRunner
    layout: KvLayout

    def kv_bits(self, layer: int, blocks: list[int], tokens: int) -> torch.Tensor:
        """Bits of K, V and scales of the first ``tokens`` tokens, ``[tokens, anything]``."""
        pool = self.runner.pool
        parts = [pool.k(layer), pool.v(layer)]
        if self.layout.dtype.scaled:
            parts += [pool.scales(layer)[:, kv, :, :, None] for kv in range(2)]
        flat = []
        for part in parts:
            bits = part.view(torch.uint8)[blocks]  # [blocks, kv_heads, block_size, bytes]
            flat.append(bits.transpose(1, 2).flatten(0, 1)[:tokens].flatten(1))
        return torch.cat(flat, dim=1)


def machine(config: ModelConfig, dtype: str, backend: CpuBackend) -> Machine:
    decoder = Decoder(random_model(config, seed=7), backend)
    layout = decoder.kv_layout(resolve_kv_dtype(dtype), BLOCK_SIZE)
    pool = PagedPool(layout, NUM_BLOCKS)
    # Stale bits of another life: NaN as float16 and as float8. Nothing may read them.
    pool.storage.fill_(0x7F)
    return Machine(ModelRunner(decoder, pool, backend), layout)


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """A backend sets torch's threads for the process; other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SUBJECTS = [*((c, d) for c in ("qwen2", "qwen3") for d in DTYPES), ("phi3", "fp16")]


@pytest.fixture(params=SUBJECTS, ids="-".join)
def subject(request: pytest.FixtureRequest) -> Machine:
    config, dtype = request.param
    # Chunks of 100 tokens and more are cut into several tiles.
    deterministic = dtype in ("fp16", "int8")
    return machine(CONFIGS[config], dtype, CpuBackend(threads=1, deterministic=deterministic))


def decode_alone(subject: Machine, tokens: list[int], blocks: list[int]) -> torch.Tensor:
    """Logits after every token, one token a step: ``[tokens, vocab]``."""
    return torch.cat(
        [
            subject.runner.forward([SequenceSlice([token], at, blocks, logits=True)])
            for at, token in enumerate(tokens)
        ]
    )


@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_gives_the_bits_of_decoding_alone(subject: Machine, seed: int) -> None:
    chance = random.Random(seed)
    vocab = subject.runner.config.vocab_size
    prompts = [
        [chance.randrange(vocab) for _ in range(chance.randint(1, MAX_TOKENS))]
        for _ in range(chance.randint(2, 3))
    ]
    blocks = chance.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables, free = [], blocks
    for prompt in prompts:
        needed = subject.layout.blocks_for(len(prompt))
        tables.append([free.pop() for _ in range(needed)])
    expected_logits, expected_kv = [], []
    for prompt, table in zip(prompts, tables, strict=True):
        reversed_table = table[::-1]
        expected_logits.append(decode_alone(subject, prompt, reversed_table))
        expected_kv.append(
            [subject.kv_bits(layer, reversed_table, len(prompt)) for layer in range(2)]
        )
    subject.runner.pool.storage.fill_(0x7F)

    done = [0] * len(prompts)
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        slices, wanted = [], []
        for index, prompt in enumerate(prompts):
            left = len(prompt) - done[index]
            count = min(left, chance.choice([0, 1, 1, 2, 7, 31, 64, 150]))
            if not count:
                continue
            chunk = prompt[done[index] : done[index] + count]
            slices.append(SequenceSlice(chunk, done[index], tables[index], logits=True))
            done[index] += count
            wanted.append(expected_logits[index][done[index] - 1])
        if slices:
            logits = subject.runner.forward(slices)
            assert torch.equal(logits, torch.stack(wanted))
    for index, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        for layer in range(2):
            bits = subject.kv_bits(layer, table, len(prompt))
            assert torch.equal(bits, expected_kv[index][layer])


def test_all_rows_logits_equal_the_last_rows(subject: Machine) -> None:
    tokens = [(5 * at + 3) % 60 for at in range(140)]
    table = list(range(subject.layout.blocks_for(len(tokens))))
    alone = decode_alone(subject, tokens, table)
    assert torch.isfinite(alone).all()
    together = subject.runner.forward_all([SequenceSlice(tokens, 0, table, logits=False)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("threads", [2, 3])
def test_thread_count_changes_no_bit(threads: int) -> None:
    tokens = [(11 * at + 1) % 60 for at in range(130)]
    one = machine(CONFIGS["qwen2"], "fp16", CpuBackend(threads=1))
    table = list(range(one.layout.blocks_for(len(tokens))))
    expected = one.runner.forward_all([SequenceSlice(tokens, 0, table, logits=True)])
    several = machine(CONFIGS["qwen2"], "fp16", CpuBackend(threads=threads))
    prefilled = several.runner.forward_all([SequenceSlice(tokens[:-6], 0, table, logits=True)])
    assert torch.equal(prefilled, expected[:-6])
    for at in range(len(tokens) - 6, len(tokens)):
        logits = several.runner.forward([SequenceSlice(tokens[at : at + 1], at, table, True)])
        assert torch.equal(logits[0], expected[at])
