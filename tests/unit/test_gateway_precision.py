"""The shares of a response: each token counts once, in the mode in which it was sent."""

from __future__ import annotations

import pytest

from deepinfer.client.core.events import Got, OpenResume, Start, StreamEnded, Tick
from deepinfer.client.core.resume import ClientCore
from deepinfer.client.results import Usage
from deepinfer.gateway import client_wire
from deepinfer.gateway.core.events import FromWorker, Generate, Resume
from deepinfer.kvstore.core.ids import Run, WorkerRef
from deepinfer.kvstore.core.messages import Accepted, Attach, Delta, Finished, Tokens
from deepinfer.kvstore.core.precision import Precision, packed
from deepinfer.kvstore.core.requests import FinishReason, InvalidRequestError, SamplingParams, Token
from deepinfer.proto import inference_pb2
from support.gateway_bench import R1, R2, S1, S2, SEQ, W1, W2, Bench
from support.requests import record

FP16, MIXED, FP8, W8A8 = Precision
RECORD = record("r1", sampling=SamplingParams(max_tokens=5))


def tokens(*tags: Precision, start: int = 0) -> tuple[Token, ...]:
    return tuple(Token(10 + start + i, precision=tag) for i, tag in enumerate(tags))


def said(
    bench: Bench,
    index: int,
    *tags: Precision,
    run: Run = R1,
    worker: WorkerRef = W1,
    finish: FinishReason | None = None,
) -> None:
    message = Tokens(SEQ, run, index, tokens(*tags, start=index), finish)
    bench.tell(FromWorker(worker, message))


def shares(bench: Bench) -> tuple[int, ...]:
    (usage,) = bench.usage
    return usage.completion_tokens, usage.tokens_mixed, usage.tokens_fp8, usage.tokens_w8a8


def begun() -> Bench:
    bench = Bench()
    bench.tell(Generate(S1, RECORD, "key"))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    return bench


def test_each_mode_is_counted() -> None:
    bench = begun()
    said(bench, 0, FP16, MIXED, FP8, W8A8)
    said(bench, 4, FP8, finish=FinishReason.LENGTH)
    end = bench.read()[-1]
    assert isinstance(end, Finished)
    assert shares(bench) == (5, 1, 2, 1)


def test_tokens_that_come_again_count_once_and_as_they_came_first() -> None:
    bench = begun()
    said(bench, 0, FP8, FP8)
    said(bench, 0, FP8, FP8, MIXED)
    bench.tell(FromWorker(W2, Attach(SEQ, R2, W2)))  # W1 was killed; all of it is computed again
    said(bench, 0, FP16, FP16, FP16, FP16, run=R2, worker=W2)
    said(bench, 4, FP16, run=R2, worker=W2, finish=FinishReason.LENGTH)
    bench.read()
    assert shares(bench) == (5, 1, 2, 0)


def test_another_gateway_takes_them_from_the_client() -> None:
    bench = Bench()
    bench.tell(Resume(S1, RECORD, "key", 1, ((10, 11),), precisions=((FP8, FP16),)))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    said(bench, 2, FP8, MIXED, FP16, finish=FinishReason.LENGTH)
    bench.read()
    assert shares(bench) == (5, 1, 2, 0)


def test_what_a_client_has_counts_as_the_client_got_it() -> None:
    bench = begun()
    said(bench, 0, FP8, MIXED)
    bench.read()  # the client got the same tokens elsewhere, of another run
    bench.tell(Resume(S2, RECORD, "key", 1, ((10,),), precisions=((W8A8,),)))
    said(bench, 2, FP16, FP16, FP16, finish=FinishReason.LENGTH)
    bench.read(S2)
    assert shares(bench) == (5, 1, 0, 1)


def test_no_modes_are_fp16_throughout() -> None:
    bench = begun()
    said(bench, 0, FP8, MIXED)
    bench.read()
    bench.tell(Resume(S2, RECORD, "key", 1, ((10,),)))
    said(bench, 2, FP16, FP16, FP16, finish=FinishReason.LENGTH)
    bench.read(S2)
    assert shares(bench) == (5, 1, 0, 0)


def test_a_client_keeps_them_for_the_next_gateway() -> None:
    client = ClientCore(("a", "b"))
    client.handle(Start(), 0)
    client.handle(Got(1, Accepted(SEQ.request, "key", 2, 0)), 0)
    client.handle(Got(1, Delta(0, 0, tokens(FP8, FP16))), 0)
    client.handle(Got(1, Delta(0, 0, tokens(FP16, FP16))), 0)  # doubled: nothing new
    client.handle(StreamEnded(1, "UNAVAILABLE", "gone"), 0)
    resumes = [e for e in client.handle(Tick(), 10_000) if isinstance(e, OpenResume)]
    assert [resume.precisions for resume in resumes] == [((FP8, FP16),)]
    client.check()


# ---- what travels --------------------------------------------------------------------------


def test_a_chunk_names_its_tokens_modes_unless_all_are_fp16() -> None:
    reduced = client_wire.delta_to(Delta(0, 0, tokens(FP16, FP8)), "", None)
    assert reduced.chunk.precisions == b"\0\2"
    plain = client_wire.delta_to(Delta(0, 0, tokens(FP16, FP16)), "", None)
    assert plain.chunk.precisions == b""


def test_progress_is_read_with_its_modes() -> None:
    progress = [
        inference_pb2.ChoiceProgress(index=1, token_ids=(5, 6), precisions=packed((MIXED, FP8)))
    ]
    received, precisions = client_wire.received_from(progress, 2)
    assert received == ((), (5, 6))
    assert precisions == ((), (MIXED, FP8))
    for wrong in (b"\1", b"\1\4"):
        progress[0].precisions = wrong
        with pytest.raises(InvalidRequestError, match=r"^progress.precisions = .*must be empty"):
            client_wire.received_from(progress, 2)


def test_shares_add_up_to_one() -> None:
    counts = {"mixed_tokens": 2, "fp8_tokens": 3, "w8a8_tokens": 1}
    usage = Usage(prompt_tokens=1, completion_tokens=8, **counts)
    assert usage.precision_shares == {"fp16": 0.25, "mixed": 0.25, "fp8": 0.375, "w8a8": 0.125}
    none = Usage(prompt_tokens=1, completion_tokens=0)
    assert none.precision_shares == {"fp16": 0.0, "mixed": 0.0, "fp8": 0.0, "w8a8": 0.0}
