"""A gateway that is to be stopped: whom it still serves, and when it lets go."""

from __future__ import annotations

from deepinfer.gateway.core.events import Code, EndStream, FromWorker, Generate, Resume
from deepinfer.kvstore.core.messages import Delta, DrainRule, Finished
from deepinfer.kvstore.core.requests import FinishReason
from support.gateway_bench import R1, S1, S2, S3, W1, Bench, running, said
from support.requests import record


def drain(bench: Bench, left_ms: int | None) -> None:
    bench.settle()
    bench.wait(100)
    bench.answer(drain=DrainRule(left_ms))


def newest(bench: Bench) -> tuple[bool, bool]:
    """What the next report says: draining, drained."""
    bench.settle()
    bench.wait(100)
    report = bench.reports()[-1]
    return report.draining, report.drained


def test_new_requests_are_refused_and_running_ones_finish() -> None:
    bench = running()
    drain(bench, 5000)
    bench.tell(Generate(S2, record("r2"), "key2"))
    [refused] = bench.take(EndStream)
    assert (refused.stream, refused.code) == (S2, Code.UNAVAILABLE)
    assert "g1 is being stopped" in refused.message
    assert bench.core.counters['requests_refused_total{reason="draining"}'] == 1
    assert newest(bench) == (True, False)
    bench.tell(FromWorker(W1, said(R1, 0, 5, 6, finish=FinishReason.LENGTH)))
    assert [type(message) for message in bench.read()] == [Delta, Finished]
    assert [end.code for end in bench.take(EndStream)] == [Code.OK]
    assert newest(bench) == (True, True)


def test_after_the_grace_clients_are_sent_to_another_gateway() -> None:
    bench = running()
    drain(bench, 1000)
    bench.wait(900)
    assert bench.take(EndStream) == []
    bench.wait(150)
    [end] = bench.take(EndStream)
    assert (end.stream, end.code) == (S1, Code.UNAVAILABLE)
    assert "resume at another one" in end.message
    assert bench.core.live_requests == 1  # its client takes it along
    assert newest(bench) == (True, True)
    bench.tell(Resume(S2, record(), "key", 1, ((),)))
    assert [e.code for e in bench.take(EndStream)] == [Code.UNAVAILABLE]


def test_a_client_whose_stream_broke_comes_back_while_the_grace_lasts() -> None:
    bench = running()
    drain(bench, 5000)
    bench.tell(Resume(S2, record(), "key", 1, ((),)))
    assert [(e.stream, e.code) for e in bench.take(EndStream)] == [(S1, Code.ABORTED)]
    bench.tell(Resume(S3, record("r9"), "key9", 1, ((),)))  # another gateway's
    assert [(e.stream, e.code) for e in bench.take(EndStream)] == [(S3, Code.UNAVAILABLE)]


def test_where_clients_can_go_nowhere_else_all_that_was_accepted_is_served() -> None:
    bench = running()
    drain(bench, None)
    bench.tell(Generate(S2, record("r2"), "key2"))
    assert [e.code for e in bench.take(EndStream)] == [Code.UNAVAILABLE]
    bench.tell(Resume(S3, record("r9"), "key9", 1, ((),)))
    assert bench.take(EndStream) == []
    bench.wait(600_000)
    assert bench.take(EndStream) == []
    assert bench.core.live_requests == 2


def test_the_grace_can_only_be_brought_forward() -> None:
    bench = running()
    for left_ms in (1000, None, 60_000):
        drain(bench, left_ms)
    bench.wait(850)
    assert [e.code for e in bench.take(EndStream)] == [Code.UNAVAILABLE]
