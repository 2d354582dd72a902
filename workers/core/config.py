"""What a worker is told once, at its start."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.kvstore.core.precision import StepCost


class WorkerConfigError(ValueError):
    """A worker setting that cannot work: names the field, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"worker.{name} = {value!r}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The pool's size, the batch's budgets and every deadline of a worker. Checked once."""

    blocks_total: int
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    """Key, value and scale bytes of one block across all layers."""
    levels: int = 1
    """Levels that the model's weights can be read at; 1: they are not nested."""
    costs: tuple[StepCost, ...] = ()
    """What steps take at each level, as measured at the start; () if that was not."""
    w8a8_rows: int = 0
    """Steps at the highest level of so many tokens or more multiply FP8 by FP8; 0: none does."""
    tail_blocks: int = 0
    """Blocks that come to ``blocks_total`` while the weights' lower planes are off the card."""
    return_ms: int = 0
    """How long the lower planes' copy back takes, about."""
    start_shed: bool = False
    """There are no lower planes: every step runs at the top level."""
    restore_retry_ms: int = 1000
    """Pause after a copy back that failed; it doubles with each, up to the longest."""
    restore_retry_max_ms: int = 60_000
    max_batch_tokens: int = 2048
    """Tokens computed in one step, decodes and prefill chunks together."""
    max_batch_seqs: int = 64
    """Sequences in one step."""
    prefill_chunk_tokens: int = 512
    """Tokens of one sequence in one step."""
    prefix_cache: bool = True
    cache_salt: bytes = b""
    """Model fingerprint and KV layout: blocks computed under another salt never match."""
    report_interval_ms: int = 100
    attach_timeout_ms: int = 1000
    """An Attach unanswered for so long is sent again."""
    unreachable_ms: int = 10_000
    """A run without KV whose gateway has not answered for so long leaves."""
    resend_ms: int = 1000
    """Tokens unacknowledged for so long are sent again."""
    step_timeout_ms: int = 600_000
    """A step that has not ended after so long never will: the process gives itself up."""
    put_timeout_ms: int = 30_000
    commit_timeout_ms: int = 2000
    resolve_timeout_ms: int = 2000
    fetch_timeout_ms: int = 30_000
    prefetch_bytes_max: int = 256 * 2**20
    """Longest payload that is fetched ahead of its swap-in; 0: none is."""
    prefetch_keep_ms: int = 30_000
    """A payload fetched ahead that no order has named for so long is dropped."""
    ended_max: int = 8192
    """Sequences whose last run here is remembered, so that a late order cannot bring it back; about
    0.4 KB each."""

    def __post_init__(self) -> None:
        def check(name: str, legal: bool, allowed: str) -> None:
            if not legal:
                raise WorkerConfigError(name, getattr(self, name), allowed)

        for name in (
            "blocks_total",
            "block_size",
            "block_bytes",
            "max_batch_seqs",
            "prefill_chunk_tokens",
            "report_interval_ms",
            "attach_timeout_ms",
            "unreachable_ms",
            "resend_ms",
            "step_timeout_ms",
            "put_timeout_ms",
            "commit_timeout_ms",
            "resolve_timeout_ms",
            "fetch_timeout_ms",
            "prefetch_keep_ms",
            "ended_max",
            "levels",
            "restore_retry_ms",
        ):
            check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("prefetch_bytes_max", "tail_blocks", "return_ms", "w8a8_rows"):
            check(name, getattr(self, name) >= 0, "0 or more")
        measured = len(self.costs) in (0, self.levels)
        check("costs", measured, f"empty or one for each of {self.levels} levels")
        nested = self.levels > 1
        check("tail_blocks", nested or not self.tail_blocks, "0 where levels is 1")
        check("w8a8_rows", nested or not self.w8a8_rows, "0 where levels is 1")
        check("start_shed", nested or not self.start_shed, "False where levels is 1")
        check("start_shed", not (self.tail_blocks and self.start_shed), "False with tail_blocks")
        check(
            "restore_retry_max_ms",
            self.restore_retry_max_ms >= self.restore_retry_ms,
            f"at least restore_retry_ms ({self.restore_retry_ms})",
        )
        check(
            "max_batch_tokens",
            self.max_batch_tokens >= self.max_batch_seqs,
            f"at least max_batch_seqs ({self.max_batch_seqs}), so that a full batch can decode",
        )

    @property
    def capacity_blocks(self) -> int:
        """Blocks that there can be at most."""
        return self.blocks_total + self.tail_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of ``tokens`` tokens."""
        return -(-tokens // self.block_size)
