"""What a worker writes a gateway reads as it was, and the other way round."""

from __future__ import annotations

import pytest

from deepinfer.gateway import wire as gateway_wire
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    AttachRefused,
    Departed,
    Departure,
    Drop,
    Notice,
    NoticeKind,
    ReportReply,
    ResidentLevel,
    ToGateway,
    Tokens,
    ToWorker,
    Usage,
    WorkerReport,
)
from deepinfer.kvstore.core.precision import (
    Policy,
    Precision,
    PrecisionError,
    PrecisionLevel,
    PrecisionRule,
    PrecisionSettings,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, SamplingParams, Token
from deepinfer.kvstore.core.shed import ShedLevel, ShedState
from deepinfer.kvstore.core.states import State
from deepinfer.proto import control_pb2, link_pb2
from deepinfer.workers import wire

REF = WorkerRef(WorkerId("w"), Incarnation(2**50))
SEQ = Seq(RequestId("r-1"), 3)
RUN = Run(2**41, 7)
TICKET = Ticket(SEQ, RUN, Run(2**41, 8))

TO_GATEWAY: list[ToGateway] = [
    Attach(SEQ, RUN, REF),
    Tokens(SEQ, RUN, 5, (Token(0), Token(9, -0.5, ((9, -0.5), (2, -1.25)))), None),
    Tokens(SEQ, RUN, 5, tuple(Token(3, precision=tag) for tag in Precision), None),
    Tokens(SEQ, RUN, 5, (), FinishReason.ERROR),
    *(Notice(SEQ, RUN, 4, kind, REF.worker, StoreId("s"), 3, 2**33, 1500) for kind in NoticeKind),
    Notice(SEQ, RUN, 0, NoticeKind.PLACED, REF.worker, None, 0, 0, 0),
]

RECORD = RequestRecord(
    request=SEQ.request,
    prompt_ids=(0, 1, 2**31),
    sampling=SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        min_p=0.25,
        frequency_penalty=-1.5,
        presence_penalty=0.5,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "ü"),
        stop_token_ids=(4,),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        ignore_eos=True,
        n=5,
        logprobs=0,
        seed=2**62,
    ),
    arrival_ms=2**41,
    seed=2**64 - 1,
    priority=-3,
    deadline_ms=0,
    exact=True,
    stop_token_ids=(4, 2),
)

TO_WORKER: list[ToWorker] = [
    Attached(SEQ, RUN, RECORD, (5, 6)),
    Attached(
        SEQ,
        RUN,
        RequestRecord(
            request=SEQ.request, prompt_ids=(1,), sampling=SamplingParams(), arrival_ms=0, seed=0
        ),
        (),
    ),
    AttachRefused(SEQ, RUN, None),
    AttachRefused(SEQ, RUN, Run(3, 0)),
    Ack(SEQ, RUN, 17, True),
    Drop(SEQ, RUN),
]


@pytest.mark.parametrize("message", TO_GATEWAY, ids=lambda m: type(m).__name__)
def test_a_gateway_reads_what_a_worker_wrote(message: ToGateway) -> None:
    sent = link_pb2.FromWorker.FromString(wire.to_gateway(message).SerializeToString())
    assert gateway_wire.from_worker(sent, REF) == message


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda m: type(m).__name__)
def test_a_worker_reads_what_a_gateway_wrote(message: ToWorker) -> None:
    sent = link_pb2.ToWorker.FromString(gateway_wire.to_worker(message).SerializeToString())
    assert wire.from_gateway(sent) == message


def test_a_hello_names_the_life() -> None:
    sent = link_pb2.FromWorker.FromString(wire.hello_to(REF).SerializeToString())
    assert gateway_wire.worker_ref_from(sent.hello.worker) == REF


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(wire.LinkError, match="message = None: must be attached, refused, ack"):
        wire.from_gateway(link_pb2.ToWorker())


def test_the_controller_reads_a_report_as_it_was() -> None:
    from deepinfer.controller import wire as controller_wire

    report = WorkerReport(
        worker=REF.worker,
        incarnation=REF.incarnation,
        node=NodeId("n"),
        number=2**40,
        complete=True,
        epoch_seen=2**41,
        orders_seen=5,
        block_bytes=589_824,
        block_size=16,
        blocks_total=100,
        blocks_free=7,
        blocks_short=2,
        stalled=True,
        draining=True,
        residents=(
            ResidentLevel(SEQ, RUN, State.SWAPPING_OUT, TICKET, 2, GatewayId("g")),
            ResidentLevel(SEQ, RUN, State.DECODE, None, 0, GatewayId("g")),
        ),
        departed=(
            Departed(SEQ, RUN, Departure.SWAPPED, TICKET, 3, 2**33),
            Departed(SEQ, RUN, Departure.DROPPED, None, 0, 0),
        ),
        usage=(Usage(SEQ, 3, 40, 2**40, 4),),
        precision=PrecisionLevel(
            2, 3, 0.625, "why", 2**40, tuple(2**i for i in range(41, 45)), (7, 2**45, 8, 9)
        ),
        shed=ShedLevel(ShedState.CLOSING, 100, 40, 250),
    )
    sent = control_pb2.WorkerReport.FromString(
        wire.report_to(report, {"steps": 3.0}).SerializeToString()
    )
    assert controller_wire.worker_report_from(sent) == report
    assert dict(sent.counters) == {"steps": 3.0}


def test_what_is_said_of_precision_arrives() -> None:
    from deepinfer.controller import wire as controller_wire

    rule = PrecisionRule(
        settings=PrecisionSettings(
            policy=Policy.THRESHOLD,
            level_max=4,
            threshold_tokens=2**20,
            ttft_target_ms=0.5,
            tpot_target_ms=1.25,
            dwell_ms=3,
        ),
        waiting_tokens=2**33,
        waiting_ms=2**34,
        shed=True,
    )
    for precision in (rule, None):
        reply = ReportReply(epoch=1, number=2, resync=False, precision=precision)
        sent = controller_wire.reply_to(reply).SerializeToString()
        assert wire.reply_from(control_pb2.ReportReply.FromString(sent)) == reply
    wrong = controller_wire.reply_to(ReportReply(epoch=1, number=2, resync=False, precision=rule))
    wrong.precision.policy = "best"
    with pytest.raises(PrecisionError, match="precision = 'best': must be one of fp16"):
        wire.reply_from(wrong)


def test_a_reply_keeps_what_a_worker_needs() -> None:
    said = control_pb2.ReportReply(epoch=2**41, number=3, resync=True)
    assert wire.reply_from(said) == ReportReply(epoch=2**41, number=3, resync=True)
