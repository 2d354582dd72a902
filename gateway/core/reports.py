"""When the controller is told what: levels, as differences, one report under way at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, Seq
from deepinfer.kvstore.core.messages import GatewayReport, ReportReply, RequestLevel


class ReportSheet:
    """Which sequences the next report has to name.

    A change is reported at once unless a report is unanswered; then it waits for the answer, so
    that a burst of arrivals becomes one report. An unanswered report is followed, after a while,
    by a complete one, since nobody knows whether it was taken.
    """

    def __init__(self, gateway: GatewayId, incarnation: Incarnation, config: GatewayConfig) -> None:
        self._gateway = gateway
        self._incarnation = incarnation
        self._config = config
        self._dirty: dict[Seq, None] = {}
        self._listed: dict[Seq, None] = {}
        self._complete_next = True
        self._unanswered: int | None = None
        self._sent_ms: int | None = None
        self.number = 0
        self.epoch_seen = 0

    def touch(self, seq: Seq) -> None:
        """The sequence's level has changed, or it is gone."""
        self._dirty[seq] = None

    def restart(self) -> None:
        """What the controller knows is unknown: tell it everything, now."""
        self._complete_next, self._unanswered = True, None

    def answered(self, reply: ReportReply) -> bool:
        """Take an answer; return whether it counts (it is not from a controller replaced since)."""
        if reply.epoch < self.epoch_seen:
            return False
        self.epoch_seen = reply.epoch
        if reply.number == self._unanswered:
            self._unanswered = None
        if reply.resync:
            self._complete_next = True
        return True

    def next_report(
        self,
        now_ms: int,
        level: Callable[[Seq], RequestLevel | None],
        everything: Callable[[], Iterable[RequestLevel]],
    ) -> GatewayReport | None:
        """Return the report that is due now, if one is, and count it as sent."""
        waited_ms = None if self._sent_ms is None else now_ms - self._sent_ms
        if self._unanswered is not None and waited_ms is not None:
            if waited_ms < self._config.report_timeout_ms:
                return None
            self._complete_next = True
        elif (
            not (self._dirty or self._complete_next)
            and waited_ms is not None
            and waited_ms < self._config.report_interval_ms
        ):
            return None
        requests: list[RequestLevel] = []
        gone: list[Seq] = []
        complete = self._complete_next
        if complete:
            requests.extend(everything())
            self._listed = {stated.seq: None for stated in requests}
        else:
            for seq in self._dirty:
                stated = level(seq)
                if stated is not None:
                    requests.append(stated)
                    self._listed[seq] = None
                elif seq in self._listed:
                    gone.append(seq)
                    del self._listed[seq]
        self._dirty.clear()
        self._complete_next = False
        self.number += 1
        self._unanswered, self._sent_ms = self.number, now_ms
        return GatewayReport(
            gateway=self._gateway,
            incarnation=self._incarnation,
            number=self.number,
            complete=complete,
            epoch_seen=self.epoch_seen,
            requests=tuple(requests),
            gone=tuple(gone),
        )

    def check(self, level: Callable[[Seq], RequestLevel | None]) -> None:
        """Whoever was listed and is gone is to be reported, unless everything is."""
        if not self._complete_next:
            for seq in self._listed:
                assert seq in self._dirty or level(seq) is not None, f"{seq} is gone unreported"
