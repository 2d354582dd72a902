"""What one choice cost: swaps, copies and stalls, from its notices and its tokens' arrival."""

from __future__ import annotations

from deepinfer.gateway.core.events import ChoiceUsage
from deepinfer.gateway.core.measures import Measures
from deepinfer.kvstore.core.ids import Run
from deepinfer.kvstore.core.messages import Notice, NoticeKind

_RUNS_REMEMBERED = 8
"""Runs of a choice whose notices are still told apart; older runs have said what they had to."""


class Meter:
    """Counts for one choice, which it also adds to the gateway's measures.

    A swap's stall is the time from the last token before it (or from the notice, if it came
    before any token) to the first token after it. A notice travels on its own worker's link and
    may arrive after that token: then the gap that the newer run began with is the stall.
    """

    __slots__ = (
        "arrived",
        "copy_in_us",
        "copy_out_us",
        "first_token_ms",
        "gap_ms",
        "gap_run",
        "last_token_ms",
        "measures",
        "notices_seen",
        "offload_blocks",
        "offload_bytes",
        "over",
        "recomputes",
        "reload_blocks",
        "reload_bytes",
        "resumes",
        "since_ms",
        "stall_ms",
        "stalled_since_ms",
        "swap_failures",
        "swaps",
    )

    def __init__(self, measures: Measures, since_ms: int | None) -> None:
        self.measures = measures
        self.since_ms = since_ms
        """When the request arrived here; None for one taken over from another gateway."""
        self.arrived = 0
        """Tokens that arrived here."""
        self.over = False
        """The end was counted."""
        self.first_token_ms: int | None = None
        self.last_token_ms: int | None = None
        self.swaps = self.resumes = self.swap_failures = self.recomputes = 0
        self.offload_blocks = self.offload_bytes = self.copy_out_us = 0
        self.reload_blocks = self.reload_bytes = self.copy_in_us = 0
        self.stall_ms = 0
        self.stalled_since_ms: int | None = None
        self.gap_run: Run | None = None
        """The newest run that has sent a token, and in ``gap_ms`` the gap before its first one."""
        self.gap_ms = 0
        self.notices_seen: dict[Run, int] = {}

    def attached(self, now_ms: int) -> None:
        """The first run has attached."""
        if self.since_ms is not None:
            self.measures.queue_ms.observe(now_ms - self.since_ms)

    def tokens_arrived(self, run: Run, count: int, now_ms: int) -> None:
        """``count`` new tokens of ``run``, the attached one, were accepted."""
        last_ms, together = self.last_token_ms, count - 1
        if run != self.gap_run:
            self.gap_run = run
            self.gap_ms = 0 if last_ms is None else now_ms - last_ms
        if self.stalled_since_ms is not None:
            self._stalled(max(0, now_ms - self.stalled_since_ms))
            self.stalled_since_ms = None
        if last_ms is not None:
            self.measures.inter_token_ms.observe(now_ms - last_ms)
        else:
            self.first_token_ms = now_ms
            if self.since_ms is not None:
                self.measures.ttft_ms.observe(now_ms - self.since_ms)
        if together:
            self.measures.inter_token_ms.observe(0, together)
        self.arrived += count
        self.last_token_ms = now_ms

    def _stalled(self, ms: int) -> None:
        self.stall_ms += ms
        self.measures.stall_ms.observe(ms)

    def ended(self, tokens: int, now_ms: int) -> None:
        """The choice has ended with ``tokens`` tokens."""
        self.over = True
        self.measures.generation_tokens.observe(tokens)
        if self.since_ms is not None:
            self.measures.choice_ms.observe(now_ms - self.since_ms)
        if self.arrived > 1 and self.first_token_ms is not None and self.last_token_ms is not None:
            us = (self.last_token_ms - self.first_token_ms) * 1_000
            self.measures.tpot_us.observe(us // (self.arrived - 1))

    def notice_arrived(self, notice: Notice, now_ms: int) -> bool:
        """Count a notice; return False (and count nothing) for one seen before or too old."""
        seen = self.notices_seen
        if notice.run not in seen and len(seen) >= _RUNS_REMEMBERED:
            oldest = min(seen)
            if notice.run < oldest:
                return False
            del seen[oldest]
        if notice.number <= seen.get(notice.run, -1):
            return False
        seen[notice.run] = notice.number
        match notice.kind:
            case NoticeKind.SWAPPED_OUT:
                self.swaps += 1
                self.offload_blocks += notice.blocks
                self.offload_bytes += notice.payload_bytes
                self.copy_out_us += notice.copy_us
                self.measures.copy_out_us.observe(notice.copy_us)
                if self.gap_run is not None and notice.run < self.gap_run:
                    self._stalled(self.gap_ms)
                elif self.stalled_since_ms is None:
                    self.stalled_since_ms = (
                        now_ms if self.last_token_ms is None else self.last_token_ms
                    )
            case NoticeKind.RESUMED:
                self.resumes += 1
                self.reload_blocks += notice.blocks
                self.reload_bytes += notice.payload_bytes
                self.copy_in_us += notice.copy_us
                self.measures.copy_in_us.observe(notice.copy_us)
            case NoticeKind.SWAP_FAILED:
                self.swap_failures += 1
            case NoticeKind.RECOMPUTED:
                self.recomputes += 1
            case NoticeKind.PLACED:
                pass
        return True

    def usage(
        self,
        *,
        prompt_tokens: int,
        cached: int,
        tokens: int,
        tokens_mixed: int,
        tokens_fp8: int,
        tokens_w8a8: int,
    ) -> ChoiceUsage:
        """Sum up."""
        since_ms = self.since_ms

        def after(at_ms: int | None) -> int | None:
            return None if at_ms is None or since_ms is None else max(0, at_ms - since_ms)

        return ChoiceUsage(
            prompt_tokens=prompt_tokens,
            cached_tokens=min(cached, prompt_tokens),
            completion_tokens=tokens,
            tokens_mixed=tokens_mixed,
            tokens_fp8=tokens_fp8,
            tokens_w8a8=tokens_w8a8,
            ttft_ms=after(self.first_token_ms),
            last_token_ms=after(self.last_token_ms),
            swaps=self.swaps,
            resumes=self.resumes,
            swap_failures=self.swap_failures,
            recomputes=self.recomputes,
            offload_blocks=self.offload_blocks,
            offload_bytes=self.offload_bytes,
            reload_blocks=self.reload_blocks,
            reload_bytes=self.reload_bytes,
            copy_out_us=self.copy_out_us,
            copy_in_us=self.copy_in_us,
            stall_ms=self.stall_ms,
        )
