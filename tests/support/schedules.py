"""Whether a card's runner gives a request the same bits however its steps are shared and cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.model.runner import SequenceSlice

POISON = 0x7E
"""NaN as float16 and as E4M3: what no token owns."""


class Compared(NamedTuple):
    """Rows of logits, and how many of them differ from those of decoding alone."""

    rows: int
    different: int
    kv_is_the_same: bool


def kv_bits(runner: GpuRunner, table: Sequence[int], tokens: int) -> Tensor:
    """Bytes of K and V of the first tokens, ``[2 * layers, tokens, anything]``."""
    pool, layout = runner.pool, runner.pool.layout
    parts = []
    for layer in range(layout.layers):
        for part in (pool.k(layer), pool.v(layer)):
            bits = part[list(table)].view(torch.uint8)  # [blocks, kv_heads, block_size, bytes]
            flat = bits.transpose(1, 2).flatten(0, 1)[:tokens].flatten(1)
            parts.append(torch.nn.functional.pad(flat, (0, -flat.shape[1] % 512)))
    return torch.stack(parts)


def compare_schedules(
    runner: GpuRunner,
    lengths: Sequence[int],
    *,
    blocks: int,
    chance: random.Random,
    cuts: Sequence[int],
    between: Callable[[], object] = lambda: None,
    level: int = 0,
) -> Compared:
    """Compute prompts of ``lengths`` alone, a token a step; then together, cut by ``cuts``.

    A cut of 0 leaves a sequence out of a step. ``between`` is called between the two.
    """
    vocab, block_size = runner.config.vocab_size, runner.pool.layout.block_size
    prompts = [[chance.randrange(vocab) for _ in range(length)] for length in lengths]
    free = chance.sample(range(blocks), blocks)
    tables = [tuple(free.pop() for _ in range(-(-len(p) // block_size))) for p in prompts]
    runner.pool.storage[:blocks].fill_(POISON)
    alone: list[Tensor] = []
    kv: list[Tensor] = []
    for prompt, table in zip(prompts, tables, strict=True):
        steps = [
            runner.forward([SequenceSlice([token], at, table, True)], level).clone()
            for at, token in enumerate(prompt)
        ]
        alone.append(torch.cat(steps))
        kv.append(kv_bits(runner, table, len(prompt)))
    runner.pool.storage[:blocks].fill_(POISON)
    between()

    done, rows, different = [0] * len(prompts), 0, 0
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        slices: list[SequenceSlice] = []
        wanted: list[Tensor] = []
        room = runner.limits.rows
        for index in chance.sample(range(len(prompts)), len(prompts)):
            prompt = prompts[index]
            count = min(len(prompt) - done[index], chance.choice(cuts), room)
            if count and len(slices) < runner.limits.sequences:
                chunk = prompt[done[index] : done[index] + count]
                slices.append(SequenceSlice(chunk, done[index], tables[index], True))
                done[index] += count
                room -= count
                wanted.append(alone[index][done[index] - 1])
        if slices:
            found = runner.forward(slices, level)
            rows += len(slices)
            different += int((found != torch.stack(wanted)).any(1).sum())
    same = all(
        torch.equal(kv_bits(runner, table, len(prompt)), bits)
        for prompt, table, bits in zip(prompts, tables, kv, strict=True)
    )
    return Compared(rows, different, same)
