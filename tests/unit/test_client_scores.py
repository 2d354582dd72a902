"""The client's core and a prompt's log-probabilities: each once, over all its streams."""

from __future__ import annotations

from deepinfer.client.core.events import (
    CloseStream,
    Deliver,
    Effect,
    Event,
    Got,
    OpenResume,
    Start,
    StreamEnded,
    Tick,
    Wait,
)
from deepinfer.client.core.resume import ClientCore
from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.messages import Accepted, Delta, PromptDelta
from deepinfer.kvstore.core.requests import Token

ACCEPTED = Accepted(RequestId("r1"), "key", 6, 0)


def prompt(position: int, *ids: int) -> PromptDelta:
    return PromptDelta(position, tuple(map(Token, ids)))


class Bench:
    def __init__(self) -> None:
        self.now_ms = 0
        self.core = ClientCore(("a", "b"))
        self.tell(Start(), Got(1, ACCEPTED))

    def tell(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            effects += self.core.handle(event, self.now_ms)
            self.core.check()
        return [effect for effect in effects if not isinstance(effect, Wait)]

    def again(self) -> OpenResume:
        """The stream breaks; return the next attempt."""
        self.tell(StreamEnded(self.core._attempt, "UNAVAILABLE", ""))
        self.now_ms += 10_000
        (opened,) = self.tell(Tick())
        assert isinstance(opened, OpenResume)
        return opened


def test_each_is_delivered_once() -> None:
    bench = Bench()
    assert bench.tell(Got(1, prompt(1, 5, 6))) == [Deliver(prompt(1, 5, 6))]
    assert bench.tell(Got(1, prompt(1, 5))) == []
    assert bench.tell(Got(1, prompt(3, 7))) == [Deliver(prompt(3, 7))]
    assert bench.again().scored == 3
    assert bench.tell(Got(2, ACCEPTED), Got(2, prompt(2, 6, 7))) == []
    assert bench.tell(Got(2, prompt(4, 8))) == [Deliver(prompt(4, 8))]
    token = Delta(0, 0, (Token(9),))
    assert bench.tell(Got(2, token)) == [Deliver(token)]
    assert bench.again().scored == 4


def test_what_does_not_continue_them_is_insisted_on() -> None:
    for wrong in (prompt(4, 8), prompt(0, 4, 5, 6), prompt(2, 6, 7)):
        bench = Bench()
        bench.tell(Got(1, prompt(1, 5, 6)))
        assert bench.tell(Got(1, wrong)) == [CloseStream(1)]
        bench.now_ms += 10_000
        (opened,) = bench.tell(Tick())
        assert isinstance(opened, OpenResume)
        assert opened.scored == 2
