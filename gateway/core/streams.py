"""A client's stream: a cursor over a record, with at most one message under way."""

from __future__ import annotations

from collections import deque

from deepinfer.gateway.core.events import ToStream
from deepinfer.gateway.core.record import Entry
from deepinfer.kvstore.core.ids import StreamId
from deepinfer.kvstore.core.messages import Accepted, Delta, Finished, Notice


class Stream:
    """Where one reader is in its request; a slow one costs this object and no copy of a token."""

    __slots__ = ("accepted", "busy", "cursors", "done", "entry", "notices", "stream", "turn")

    def __init__(
        self,
        stream: StreamId,
        entry: Entry,
        cursors: list[int],
        *,
        include_events: bool,
        max_notices: int,
    ) -> None:
        self.stream = stream
        self.entry = entry
        self.cursors = cursors
        """For each choice: tokens that the client has or that are on their way to it."""
        self.done = [False] * len(cursors)
        """For each choice: whether its end was sent."""
        self.accepted = False
        self.busy = False
        self.turn = 0
        """The choice that is looked at first, so that none waits for another."""
        self.notices: deque[Notice] | None = deque(maxlen=max_notices) if include_events else None

    def next_message(self, max_delta_tokens: int) -> ToStream | None:
        """Take the next message that can go out; None if there is nothing (or all was sent)."""
        entry = self.entry
        if not self.accepted:
            self.accepted = True
            record = entry.record
            return ToStream(
                self.stream,
                Accepted(record.request, entry.resume_key, len(record.prompt_ids), entry.claim),
            )
        if self.notices:
            return ToStream(self.stream, self.notices.popleft())
        count = len(self.cursors)
        for step in range(count):
            index = (self.turn + step) % count
            message = self._next_of(index, max_delta_tokens)
            if message is not None:
                self.turn = (index + 1) % count
                return message
        return None

    def _next_of(self, index: int, max_delta_tokens: int) -> ToStream | None:
        entry, choice, start = self.entry, self.entry.choices[index], self.cursors[index]
        end = min(choice.visible, start + max_delta_tokens)
        if start < end:
            self.cursors[index] = end
            choice.sent = max(choice.sent, end)
            return ToStream(self.stream, Delta(index, start, tuple(choice.tokens[start:end])))
        if self.done[index] or not choice.complete or choice.finish is None:
            return None
        self.done[index] = True
        held = len(choice.tokens)
        return ToStream(
            self.stream,
            Finished(index, choice.finish, held, choice.finish_message),
            choice.meter.usage(
                prompt_tokens=len(entry.record.prompt_ids), tokens=held, since_ms=entry.since_ms
            ),
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for cursor, done, choice in zip(self.cursors, self.done, self.entry.choices, strict=True):
            assert 0 <= cursor <= choice.sent, f"{choice.seq}: a stream is ahead of its record"
            assert not done or (choice.complete and cursor == len(choice.tokens)), (
                f"{choice.seq}: its end was sent before all of it"
            )
        assert self.busy or self.accepted, "an idle stream was told nothing"
