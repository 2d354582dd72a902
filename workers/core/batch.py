"""Who runs in the next step, and how many of whose tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.core.blocks import BlockManager
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import Chunk
from deepinfer.workers.core.sequence import Resident


class Batch(NamedTuple):
    """One step's chunks with their residents, and what could not be served."""

    chunks: tuple[Chunk, ...]
    residents: tuple[Resident, ...]
    blocks_short: int
    """Blocks that residents need for their next token and cannot get."""


def plan(
    residents: Iterable[Resident],
    blocks: BlockManager,
    spare_blocks: int,
    config: WorkerConfig,
    step: int,
) -> Batch:
    """Choose the next step and give its residents the blocks it needs.

    Decodes come first, those that have waited longest at the front, then prefill chunks by
    arrival. While a prefill waits, one seat is offered to it (with a single seat the two take
    turns), and ``max_batch_tokens >= max_batch_seqs`` keeps it a token: neither kind starves the
    other. Whoever lacks a block is left out and counted; the others go on. ``spare_blocks`` is
    what growth may take: the available blocks less those promised. ``step`` is the number that
    this step will have.

    A prompt that several choices of a request share is computed once: a choice whose next block
    another one computes in this step waits, and then finds it in the prefix cache.
    """
    ready = [resident for resident in residents if resident.ready]
    decodes = sorted(
        (r for r in ready if r.remaining == 1), key=lambda r: (r.last_step, r.arrival, r.seq)
    )
    prefills = sorted((r for r in ready if r.remaining > 1), key=lambda r: (r.arrival, r.seq))
    seats = config.max_batch_seqs
    decode_seats = seats
    if prefills and decodes:
        decode_seats = seats - 1
        if seats == 1 and decodes[-1].last_step != step - 1:
            decode_seats = 1  # The step before was a prefill's.
    tokens = config.max_batch_tokens
    chunks: list[Chunk] = []
    chosen: list[Resident] = []
    led: set[tuple[RequestId, int]] = set()  # requests, and the block that is being computed
    short = 0
    for resident in [*decodes[:decode_seats], *prefills, *decodes[decode_seats:]]:
        if len(chosen) == seats or tokens == 0:
            break
        prefill = resident.remaining > 1
        if prefill:
            spare_blocks += share(resident, blocks)
            same = (resident.seq.request, len(resident.chain))
            if same in led and _may_take(resident, blocks, resident.computed_max):
                continue
        count = min(resident.remaining, config.prefill_chunk_tokens, tokens)
        missing = config.blocks_for(resident.computed + count) - len(resident.blocks)
        if missing > spare_blocks:
            # A prefill takes what fits; a decode, or a prefill that fits nothing, waits.
            room = (len(resident.blocks) + spare_blocks) * config.block_size - resident.computed
            short += missing - spare_blocks
            if room <= 0:
                continue
            count, missing = min(count, room), spare_blocks
        if missing > 0:
            resident.blocks += blocks.allocate(missing)
            spare_blocks -= missing
        if prefill and _may_share(resident, blocks, resident.prompt_tokens):
            led.add((resident.seq.request, len(resident.chain)))
        chunks.append(_chunk(resident, count))
        chosen.append(resident)
        tokens -= count
    return Batch(tuple(chunks), tuple(chosen), short)


def share(resident: Resident, blocks: BlockManager) -> int:
    """Put blocks that the prefix cache has by now in the place of ones yet to be computed.

    The resident is in no step. Returns how many more blocks are available now.
    """
    size, known = blocks.block_size, len(resident.chain)
    upto = min(resident.computed_max, len(resident.blocks) * size)
    if not _may_take(resident, blocks, upto):
        return 0
    before = blocks.available
    found, digests = blocks.match(
        resident.tokens[: upto + 1], len(resident.blocks), resident.chain, pure=resident.exact
    )
    blocks.release(resident.blocks[known : known + len(found)])
    resident.blocks[known : known + len(found)] = found
    resident.chain += digests
    adopt(resident, found, blocks)
    resident.cached += len(found) * size
    return blocks.available - before


def adopt(resident: Resident, found: Sequence[int], blocks: BlockManager) -> None:
    """Count blocks of the prefix cache as computed; they are in the resident's table already."""
    for block in found:
        end = resident.computed + blocks.block_size
        resident.purity.extend(resident.computed, end, blocks.tag(block))
        resident.computed = end


def _may_share(resident: Resident, blocks: BlockManager, upto: int) -> bool:
    """Whether the block that the resident fills next goes into the cache within ``upto`` tokens."""
    full = (len(resident.chain) + 1) * blocks.block_size
    return blocks.prefix_cache and resident.cacheable and full <= upto


def _may_take(resident: Resident, blocks: BlockManager, upto: int) -> bool:
    """Whether that block may just as well come from the cache: nothing of it is computed yet."""
    untouched = resident.computed == len(resident.chain) * blocks.block_size
    return untouched and _may_share(resident, blocks, upto)


def _chunk(resident: Resident, count: int) -> Chunk:
    assert resident.record is not None
    end = resident.computed + count
    sample = end == len(resident.tokens)
    penalised = sample and counts_output(resident.record.sampling)
    scored = len(resident.scores)  # rows before that are computed for their KV alone
    return Chunk(
        resident.seq,
        resident.run,
        resident.computed,
        tuple(resident.tokens[resident.computed : end]),
        tuple(resident.blocks),
        sample,
        len(resident.generated),
        resident.record,
        tuple(token.id for token in resident.generated) if penalised else (),
        scored,
        resident.record.prompt_ids[scored + 1 : min(end, resident.scores_due) + 1],
    )


def counts_output(sampling: SamplingParams) -> bool:
    """Whether a penalty looks at the tokens generated so far."""
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
    )
