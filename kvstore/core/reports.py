"""Which of a store's levels the controller has yet to hear, and when to say them."""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.kvstore.core.ids import Ticket
from deepinfer.kvstore.core.messages import ReportReply, TicketLevel
from deepinfer.kvstore.core.puts import Entry


class Ledger:
    """Decides when a report is due and what differs from the one before."""

    __slots__ = (
        "_changed",
        "_complete_due",
        "_complete_number",
        "_interval_ms",
        "_sent_ms",
        "number",
    )

    def __init__(self, interval_ms: int) -> None:
        self.number = 0
        """Of the latest report."""
        self._interval_ms = interval_ms
        self._changed: dict[Ticket, None] = {}
        self._complete_due = True
        self._complete_number = 0
        self._sent_ms: int | None = None

    def changed(self, ticket: Ticket) -> None:
        """The ticket's level is not what was last said, or it is gone."""
        self._changed[ticket] = None

    def start_over(self) -> None:
        """The next report must be complete."""
        self._complete_due = True

    def answered(self, reply: ReportReply) -> None:
        """Heed a wish for a complete report, unless one is on its way already."""
        if reply.resync and reply.number >= self._complete_number:
            self._complete_due = True

    def due(self, now_ms: int) -> bool:
        """Whether there is news, or it has been quiet for an interval."""
        return (
            bool(self._changed)
            or self._complete_due
            or self._sent_ms is None
            or now_ms - self._sent_ms >= self._interval_ms
        )

    def next(
        self, entries: Mapping[Ticket, Entry], now_ms: int
    ) -> tuple[bool, tuple[TicketLevel, ...], tuple[Ticket, ...]]:
        """Begin report ``number``: whether it is complete, the levels, and what is gone."""
        self.number += 1
        self._sent_ms = now_ms
        changed, self._changed = self._changed, {}
        if self._complete_due:
            self._complete_due = False
            self._complete_number = self.number
            return True, tuple(entry.level() for entry in entries.values()), ()
        return (
            False,
            tuple(entries[ticket].level() for ticket in changed if ticket in entries),
            tuple(ticket for ticket in changed if ticket not in entries),
        )
