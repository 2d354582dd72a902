"""What carries messages: streams, in order while they live, and calls, each on its own.

Nothing here looks into a message. How long one takes and whether it is lost or doubled is the
weather's word (``faults.py``, or a story's script). While one process cannot reach another, calls
are lost and streams stand still, until they are taken for dead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from deepinfer.deploy.sim.engine import Act, Engine, Process

KEEPALIVE_MS = 1500
"""The longest that a stream stands still before it is taken for dead."""

Tape = Callable[[int, str, str, str, object], None]
"""(now_ms, what happened, from, to, message): called for everything that is sent or arrives."""


class Weather(Protocol):
    """Decides what becomes of each message."""

    def hop_ms(self, source: str, target: str, message: object) -> int | None:
        """Delay of a message on a live stream; None holds it and all behind it."""

    def calls_ms(self, source: str, target: str, message: object) -> tuple[int | None, ...]:
        """Delay of each copy of a call or of its reply: () loses it, None holds a copy."""

    def leaks(self) -> bool:
        """Whether what is under way on a stream that breaks may still arrive."""


Arrive = Callable[["Stream", Any], None]
Down = Callable[["Stream"], None]


class _Direction:
    __slots__ = ("arrive", "closed", "down", "held", "last_ms", "life", "source", "target")

    def __init__(self, source: Process, target: Process, arrive: Arrive, down: Down) -> None:
        self.source = source
        self.target = target
        self.life = target.life
        self.arrive = arrive
        self.down = down
        self.closed = False
        """The receiving end knows that the stream is broken."""
        self.last_ms = 0
        self.held: list[object] = []


class Stream:
    """A two-way connection between two lives.

    When it breaks, what is under way is lost, or else still arrives as long as the receiving end
    has not heard of the break: perhaps after what came on a newer connection.

    ``arrive_*(stream, message)`` and ``down_*(stream)`` are done in the process they are for.
    """

    __slots__ = ("_ab", "_ba", "_leaks", "_network", "up")

    def __init__(
        self,
        network: Network,
        a: Process,
        b: Process,
        *,
        arrive_a: Arrive,
        arrive_b: Arrive,
        down_a: Down,
        down_b: Down,
    ) -> None:
        self._network = network
        self._ab = _Direction(a, b, arrive_b, down_b)
        self._ba = _Direction(b, a, arrive_a, down_a)
        self.up = True
        self._leaks = False
        a.streams[self] = None
        b.streams[self] = None

    def send(self, source: Process, message: object) -> None:
        """Send from one end; a no-op once broken (the sender hears of that on its own)."""
        if self.up:
            self._network.hop(self, self._ab if source is self._ab.source else self._ba, message)

    def peer(self, end: Process) -> Process:
        """The other end."""
        return self._ab.target if end is self._ab.source else self._ab.source

    def arrive(self, direction: _Direction, message: object) -> None:
        """A message has come through the wire."""
        if not self.up and (not self._leaks or direction.closed):
            return
        target = direction.target
        if not target.up or target.life != direction.life:
            self.cut()
            return
        network = self._network
        if network.tape is not None:
            network.tape(network.engine.now_ms, "->", direction.source.name, target.name, message)
        target.take(direction.life, direction.arrive, (self, message))

    def cut(self) -> None:
        """Break it: each living end hears of it, a little later and on its own."""
        if not self.up:
            return
        engine = self._network.engine
        self.up = False
        self._leaks = self._network.weather.leaks()
        for direction in (self._ab, self._ba):
            direction.target.streams.pop(self, None)
            engine.after(1 + direction.target.within(19), self._close, direction)

    def _close(self, direction: _Direction) -> None:
        direction.closed = True
        direction.target.take(direction.life, direction.down, (self,))


class Network:
    """Carries messages between processes as the weather allows."""

    __slots__ = ("_stuck", "engine", "held", "silent", "tape", "weather")

    def __init__(self, engine: Engine, weather: Weather, tape: Tape | None = None) -> None:
        self.engine = engine
        self.weather = weather
        self.tape = tape
        self.held: list[tuple[str, str, object, Act, tuple[Any, ...]]] = []
        """Held by a script: (from, to, message, what delivers it)."""
        self.silent: dict[tuple[str, str], int] = {}
        """(from, to) that nothing passes now, and how many partitions say so."""
        self._stuck: dict[tuple[str, str], list[tuple[Stream, _Direction]]] = {}

    def reachable(self, a: str, b: str) -> bool:
        """Whether a connection can be made between two processes."""
        silent = self.silent
        return not silent or ((a, b) not in silent and (b, a) not in silent)

    def silence(self, source: str, target: str) -> None:
        """From here on nothing passes from ``source`` to ``target``."""
        self.silent[source, target] = self.silent.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """End one ``silence``; what waited on streams that still live goes on its way."""
        self.silent[source, target] -= 1
        if not self.silent[source, target]:
            del self.silent[source, target]
            for stream, direction in self._stuck.pop((source, target), ()):
                self._let_go(stream, direction)

    def hop(self, stream: Stream, direction: _Direction, message: object) -> None:
        """Carry a message along a stream, behind those sent before it."""
        source, target = direction.source.name, direction.target.name
        if direction.held:
            direction.held.append(message)
            return
        if self.silent and (source, target) in self.silent:
            direction.held.append(message)
            self._stuck.setdefault((source, target), []).append((stream, direction))
            patience_ms = KEEPALIVE_MS // 10 + direction.source.within(KEEPALIVE_MS)
            self.engine.after(patience_ms, self._taken_for_dead, stream, direction)
            return
        delay = self.weather.hop_ms(source, target, message)
        if delay is None:
            direction.held.append(message)
            self.held.append((source, target, message, self._let_go, (stream, direction)))
            return
        at_ms = max(self.engine.now_ms + delay, direction.last_ms)
        direction.last_ms = at_ms
        self.engine.after(at_ms - self.engine.now_ms, stream.arrive, direction, message)

    def _taken_for_dead(self, stream: Stream, direction: _Direction) -> None:
        if direction.held:
            stream.cut()

    def _let_go(self, stream: Stream, direction: _Direction) -> None:
        waiting, direction.held = direction.held, []
        for message in waiting:
            self.engine.after(1, stream.arrive, direction, message)
        direction.last_ms = self.engine.now_ms + 1

    def post(self, source: str, target: str, message: object, act: Act, *args: Any) -> None:
        """Carry a call (or a reply): each copy of it does ``act(*args)`` when it arrives."""
        if self.silent and (source, target) in self.silent:
            return
        for delay in self.weather.calls_ms(source, target, message):
            if delay is None:
                copy = (source, target, message, act, args)
                self.held.append((source, target, message, self._deliver, copy))
            else:
                self.engine.after(delay, self._deliver, source, target, message, act, args)

    def _deliver(
        self, source: str, target: str, message: object, act: Act, args: tuple[Any, ...]
    ) -> None:
        if self.tape is not None:
            self.tape(self.engine.now_ms, "->", source, target, message)
        act(*args)

    def release(self) -> None:
        """Let everything go that a script holds."""
        held, self.held = self.held, []
        for _, _, _, act, args in held:
            self.engine.after(1, act, *args)
