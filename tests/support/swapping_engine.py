"""A worker without servers that swaps a sequence out and in again wherever a test wants it."""

from __future__ import annotations

from deepinfer.kvstore.core.ids import Run, Seq, StoreId, Ticket
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.messages import StoreStatus, SwapIn, SwapOut
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
from deepinfer.workers.local import GATEWAY, LocalEngine
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.pool import PagedPool

STORE = StoreId("memory")
BLOCK = 4


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
