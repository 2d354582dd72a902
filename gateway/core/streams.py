"""Clients' streams: cursors over records, each with at most one message under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import Code, Effect, EndStream, ToStream
from deepinfer.gateway.core.record import Entry
from deepinfer.kvstore.core.ids import StreamId
from deepinfer.kvstore.core.messages import Accepted, Delta, Finished, Notice, PromptDelta
from deepinfer.kvstore.core.precision import Precision

LOOKS = 8
"""How often a stream is looked at within ``unread_ms``."""


class Stream:
    """Where one reader is in its request; a slow one costs this object and no copy of a token."""

    __slots__ = (
        "accepted",
        "busy",
        "cursors",
        "done",
        "entry",
        "notices",
        "scored",
        "stream",
        "turn",
        "unread_ms",
        "written",
    )

    def __init__(
        self,
        stream: StreamId,
        entry: Entry,
        cursors: list[int],
        *,
        scored: int,
        include_events: bool,
        max_notices: int,
    ) -> None:
        self.stream = stream
        self.entry = entry
        self.cursors = cursors
        """For each choice: tokens that the client has or that are on their way to it."""
        self.scored = scored
        """The same of the prompt tokens' log-probabilities."""
        self.done = [False] * len(cursors)
        """For each choice: whether its end was sent."""
        self.accepted = False
        self.busy = False
        self.written = 0
        """Messages handed over so far."""
        self.unread_ms: tuple[int, int] | None = None
        """How many had been when a look first found one of them not taken, and when that was."""
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
        scores, start = entry.choices[0].scores.tokens, self.scored
        if start < len(scores):
            self.scored = min(len(scores), start + max_delta_tokens)
            return ToStream(self.stream, PromptDelta(start + 1, tuple(scores[start : self.scored])))
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
            Finished(index, choice.finish, held, choice.finish_message, choice.finish_code),
            choice.meter.usage(
                prompt_tokens=len(entry.record.prompt_ids),
                cached=choice.cached,
                tokens=held,
                tokens_mixed=choice.tokens_in(Precision.MIXED),
                tokens_fp8=choice.tokens_in(Precision.FP8),
                tokens_w8a8=choice.tokens_in(Precision.W8A8),
            ),
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for cursor, done, choice in zip(self.cursors, self.done, self.entry.choices, strict=True):
            assert 0 <= cursor <= choice.sent, f"{choice.seq}: a stream is ahead of its record"
            assert not done or (choice.complete and cursor == len(choice.tokens)), (
                f"{choice.seq}: its end was sent before all of it"
            )
        held = len(self.entry.choices[0].scores.tokens)
        assert 0 <= self.scored <= held, f"stream {self.stream} is ahead of the prompt's scores"
        assert self.busy or self.accepted, "an idle stream was told nothing"


class Streams:
    """The open streams, and what is to be written to them."""

    def __init__(self, config: GatewayConfig, emit: Callable[[Effect], None]) -> None:
        self._config = config
        self._emit = emit
        self._streams: dict[StreamId, Stream] = {}
        self._look_ms = 0

    def __len__(self) -> int:
        return len(self._streams)

    def entries(self) -> list[Entry]:
        """The records of all open streams."""
        return [stream.entry for stream in self._streams.values()]

    def open(
        self,
        stream_id: StreamId,
        entry: Entry,
        cursors: list[int],
        *,
        scored: int,
        include_events: bool,
    ) -> None:
        """Open a stream of a record that has none; its ``Accepted`` is written at once."""
        max_notices = self._config.max_notices
        entry.stream = stream_id
        self._streams[stream_id] = Stream(
            stream_id,
            entry,
            cursors,
            scored=scored,
            include_events=include_events,
            max_notices=max_notices,
        )
        self.pump(entry)

    def refuse(self, stream_id: StreamId, code: Code, message: str) -> None:
        """End a stream that was never opened."""
        self._emit(EndStream(stream_id, code, message))

    def written(self, stream_id: StreamId) -> Entry | None:
        """The message under way was written; return the record to pump, if the stream is open."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return None
        stream.busy = False
        return stream.entry

    def lost(self, stream_id: StreamId) -> Entry | None:
        """The reader went away; return the record that has no stream any more."""
        stream = self._streams.pop(stream_id, None)
        if stream is None:
            return None
        stream.entry.stream = None
        return stream.entry

    def notice(self, entry: Entry, notice: Notice) -> None:
        """Put a notice before what is written next, if the reader wants any."""
        stream = None if entry.stream is None else self._streams[entry.stream]
        if stream is not None and stream.notices is not None:
            stream.notices.append(notice)

    def pump(self, entry: Entry) -> bool:
        """Hand over the next message, if there is one and the stream can take it.

        Returns whether all was written: then the stream has ended.
        """
        stream = None if entry.stream is None else self._streams[entry.stream]
        if stream is None or stream.busy:
            return False
        message = stream.next_message(self._config.max_delta_tokens)
        if message is not None:
            stream.busy = True
            stream.written += 1
            self._emit(message)
            return False
        if not all(stream.done):
            return False
        self.close(entry, entry.code, entry.message)
        return True

    def unread(self, now_ms: int) -> list[Entry]:
        """Records whose reader has not taken the message under way for too long.

        Looked for a few times in that while, so that very many streams cost little.
        """
        limit_ms = self._config.unread_ms
        if now_ms < self._look_ms:
            return []
        self._look_ms = now_ms + max(1, limit_ms // LOOKS)
        found = []
        for stream in self._streams.values():
            if not stream.busy:
                stream.unread_ms = None
            elif stream.unread_ms is None or stream.unread_ms[0] != stream.written:
                stream.unread_ms = stream.written, now_ms
            elif now_ms - stream.unread_ms[1] >= limit_ms:
                found.append(stream.entry)
        return found

    def close(self, entry: Entry, code: Code, message: str) -> None:
        """End a record's stream, if it has one."""
        if entry.stream is not None:
            del self._streams[entry.stream]
            self._emit(EndStream(entry.stream, code, message))
            entry.stream = None

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert len(self._streams) <= self._config.max_streams
        for stream_id, stream in self._streams.items():
            assert stream.entry.stream == stream_id, f"stream {stream_id} was replaced"
            stream.check()
