"""What the controller is told of every sequence, and until when.

A sequence that is over is simply gone from the reports, unless it was cancelled: then it is listed
as cancelled until a report that says so was answered.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.reports import ReportSheet
from deepinfer.gateway.core.table import RequestTable
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, RequestId, Seq
from deepinfer.kvstore.core.messages import GatewayReport, ReportReply, RequestLevel


class Cancels:
    """Sequences that are over and that the controller does not know to be over yet."""

    def __init__(self, max_cancels: int) -> None:
        self._max = max_cancels
        self._levels: dict[Seq, RequestLevel] = {}
        self._numbers: dict[Seq, int] = {}
        """The report whose answer acknowledges each; absent before it was sent."""

    def add(self, level: RequestLevel) -> list[Seq]:
        """Keep a cancelled level; return those that had to make room."""
        seq = level.seq
        self.drop(seq)
        self._levels[seq] = level
        if len(self._levels) <= self._max:
            return []
        oldest = next(iter(self._levels))
        self.drop(oldest)
        return [oldest]

    def get(self, seq: Seq) -> RequestLevel | None:
        """The sequence's level, if it is kept."""
        return self._levels.get(seq)

    def levels(self) -> Iterator[RequestLevel]:
        """All of them, oldest first."""
        yield from self._levels.values()

    def drop(self, seq: Seq) -> None:
        """Forget a sequence."""
        self._levels.pop(seq, None)
        self._numbers.pop(seq, None)

    def reported(self, seq: Seq, number: int, *, anew: bool) -> None:
        """Report ``number`` states the sequence; ``anew``: the ones before may be lost."""
        if anew or seq not in self._numbers:
            self._numbers[seq] = number

    def take_acknowledged(self, number: int) -> list[Seq]:
        """Forget, and return, those that report ``number`` or one before it has stated."""
        done = [seq for seq, stated in self._numbers.items() if stated <= number]
        for seq in done:
            self.drop(seq)
        return done


class Levels:
    """States every live sequence of the table, and the cancelled ones beside it."""

    def __init__(
        self,
        table: RequestTable,
        gateway: GatewayId,
        incarnation: Incarnation,
        config: GatewayConfig,
        *,
        now_ms: int,
    ) -> None:
        self._table = table
        self._held_refresh_ms = config.held_refresh_ms
        self._refreshed_ms = now_ms
        self._sheet = ReportSheet(gateway, incarnation, config)
        self._cancels = Cancels(config.max_cancels)

    def touch(self, seq: Seq) -> None:
        """The sequence's level has changed, or it is gone."""
        self._sheet.touch(seq)

    def live(self, seq: Seq) -> None:
        """The sequence is live now, whatever it was before."""
        self._cancels.drop(seq)
        self._sheet.touch(seq)

    def cancel(self, level: RequestLevel) -> None:
        """The sequence is over and the controller has to know; it must not be live after this."""
        self._sheet.touch(level.seq)
        for seq in self._cancels.add(level):
            self._sheet.touch(seq)

    def cancel_unknown(self, request: RequestId, choices: int, claim: int) -> None:
        """Cancel a request of which only its name is known."""
        for choice in range(choices):
            self.cancel(
                RequestLevel(
                    seq=Seq(request, choice),
                    claim=claim,
                    cancelled=True,
                    prompt_tokens=0,
                    max_tokens=0,
                    held_tokens=0,
                    arrival_ms=0,
                    priority=0,
                    deadline_ms=None,
                    exact=False,
                    attached=None,
                )
            )

    def is_cancelled(self, seq: Seq) -> bool:
        """Whether the sequence is listed as cancelled."""
        return self._cancels.get(seq) is not None

    def disown(self, seq: Seq, claim: int) -> None:
        """Another gateway speaks for the sequence: a cancel of a lower claim is void."""
        cancelled = self._cancels.get(seq)
        if cancelled is not None and cancelled.claim < claim:
            self.live(seq)

    def restart(self) -> None:
        """What the controller knows is unknown: tell it everything, now."""
        self._sheet.restart()

    def answered(self, reply: ReportReply) -> bool:
        """Take an answer; return whether it counts (it is not from a controller replaced since)."""
        if not self._sheet.answered(reply):
            return False
        if not reply.resync:
            for seq in self._cancels.take_acknowledged(reply.number):
                self._sheet.touch(seq)
        return True

    def next_report(self, now_ms: int) -> GatewayReport | None:
        """Return the report that is due now, if one is, and count it as sent."""
        if now_ms - self._refreshed_ms >= self._held_refresh_ms:
            self._refreshed_ms = now_ms
            for _, choice in self._table.live_choices():
                if len(choice.tokens) != choice.reported_tokens:
                    self._sheet.touch(choice.seq)
        report = self._sheet.next_report(now_ms, self._level, self._everything)
        if report is None:
            return None
        for level in report.requests:
            if level.cancelled:
                self._cancels.reported(level.seq, report.number, anew=report.complete)
            else:
                found = self._table.choice(level.seq)
                assert found is not None, f"{level.seq} is listed but not held"
                found[1].reported_tokens = level.held_tokens
        return report

    def _level(self, seq: Seq) -> RequestLevel | None:
        found = self._table.choice(seq)
        if found is not None and found[1].finish is None:
            return found[0].level(found[1])
        return self._cancels.get(seq)

    def _everything(self) -> Iterator[RequestLevel]:
        for entry, choice in self._table.live_choices():
            yield entry.level(choice)
        yield from self._cancels.levels()

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self._sheet.check(self._level)
        for level in self._cancels.levels():
            found = self._table.choice(level.seq)
            assert found is None or found[1].finish is not None, f"{level.seq} lives, cancelled"
