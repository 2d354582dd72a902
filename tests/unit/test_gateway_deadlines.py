"""Nothing at a gateway waits for ever: not a request, and not for a reader."""

from __future__ import annotations

from deepinfer.gateway.core.events import Code, EndStream, FromWorker, StreamReady
from deepinfer.kvstore.core.messages import Delta, Finished
from deepinfer.kvstore.core.requests import FinishReason
from support.gateway_bench import R1, S1, W1, running, said
from support.requests import record

UNREAD_MS = 8_000


def test_a_reader_that_takes_nothing_loses_its_stream_and_then_its_request() -> None:
    bench = running(unread_ms=UNREAD_MS, orphan_grace_ms=5_000)
    bench.tell(FromWorker(W1, said(R1, 0, 7)))
    waited = 0
    while not (ended := bench.take(EndStream)):
        bench.wait(500)
        waited += 500
        assert waited <= 2 * UNREAD_MS
    assert waited >= UNREAD_MS
    assert [(end.stream, end.code) for end in ended] == [(S1, Code.UNAVAILABLE)]
    assert "no message was read for 8 s" in ended[0].message
    assert bench.core.live_requests == 1  # its client may come back for it
    bench.wait(5_000)
    assert bench.core.live_requests == 0
    assert bench.core.counters["streams_unread_total"] == 1


def test_a_slow_reader_and_one_that_has_all_there_is_keep_their_streams() -> None:
    bench = running(unread_ms=UNREAD_MS)
    for index in range(40):  # one message every 6 s
        bench.tell(FromWorker(W1, said(R1, index, 7)))
        for _ in range(12):
            bench.wait(500)
        bench.tell(StreamReady(S1))
    assert bench.read()[-1] == Delta(0, 39, said(R1, 39, 7).tokens)
    for _ in range(100):  # there is nothing to read
        bench.wait(500)
    assert not bench.take(EndStream)


def test_a_request_that_is_never_served_ends_by_its_lifetime() -> None:
    """Wherever it waits: this is the wait that every other one is within."""
    bench = running(record(deadline_ms=70_000), lifetime_ms=70_000)  # since its arrival at 0
    bench.wait(69_999 - bench.now_ms)
    assert not bench.read()
    bench.wait(1)
    said_why = "it has not ended within 70 s (request_timeout)"
    assert bench.read() == [Finished(0, FinishReason.DEADLINE, 0, said_why)]
    assert bench.core.live_requests == 0
