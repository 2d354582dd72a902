"""Between protobuf and the core's values; the only module here that sees both.

Decoding raises ``LinkError`` for what is no message of the link, or ``InvalidRequestError`` for a
record that no gateway may lend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepinfer.kvstore.core.ids import RequestId, Run, Seq, Ticket, WorkerRef
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    AttachRefused,
    Departed,
    DrainRule,
    Drop,
    Notice,
    ReportReply,
    ResidentLevel,
    Scores,
    ToGateway,
    Tokens,
    ToWorker,
    Usage,
    WorkerReport,
)
from deepinfer.kvstore.core.precision import (
    PrecisionLevel,
    PrecisionRule,
    PrecisionSettings,
    resolve_policy,
)
from deepinfer.kvstore.core.requests import RequestRecord, SamplingParams, Token
from deepinfer.kvstore.core.shed import ShedLevel
from deepinfer.proto import control_pb2, ids_pb2, inference_pb2, link_pb2
from deepinfer.proto.bundle import unbundled
from deepinfer.proto.fields import SAMPLING_SCALARS


class LinkError(ValueError):
    """A gateway sent something that is no message of the link."""


# ---- names ---------------------------------------------------------------------------------


def seq_to(seq: Seq) -> ids_pb2.Seq:
    """Write a sequence."""
    return ids_pb2.Seq(request=seq.request, choice=seq.choice)


def run_to(run: Run) -> ids_pb2.Run:
    """Write a run."""
    return ids_pb2.Run(epoch=run.epoch, counter=run.counter)


def ticket_to(ticket: Ticket) -> ids_pb2.Ticket:
    """Write a ticket."""
    return ids_pb2.Ticket(
        seq=seq_to(ticket.seq), run=run_to(ticket.run), order=run_to(ticket.order)
    )


def seq_from(said: ids_pb2.Seq) -> Seq:
    """Read a sequence."""
    return Seq(RequestId(said.request), said.choice)


def run_from(said: ids_pb2.Run) -> Run:
    """Read a run."""
    return Run(said.epoch, said.counter)


# ---- gateways ------------------------------------------------------------------------------


def hello_to(worker: WorkerRef) -> link_pb2.FromWorker:
    """Write the first message of a link."""
    ref = ids_pb2.WorkerRef(worker=worker.worker, incarnation=worker.incarnation)
    return link_pb2.FromWorker(hello=link_pb2.Hello(worker=ref))


def to_gateway(message: ToGateway) -> link_pb2.FromWorker:
    """Write a message of the link."""
    seq, run = seq_to(message.seq), run_to(message.run)
    match message:
        case Attach():
            return link_pb2.FromWorker(attach=link_pb2.Attach(seq=seq, run=run))
        case Tokens():
            return link_pb2.FromWorker(
                tokens=link_pb2.Tokens(
                    seq=seq,
                    run=run,
                    index=message.index,
                    tokens=map(_token_to, message.tokens),
                    finish_reason="" if message.finish is None else message.finish.value,
                    cached=message.cached,
                )
            )
        case Scores():
            tokens = map(_token_to, message.tokens)
            return link_pb2.FromWorker(
                scores=link_pb2.Scores(seq=seq, run=run, position=message.position, tokens=tokens)
            )
        case Notice():
            notice = _notice_to(message)
            return link_pb2.FromWorker(notice=link_pb2.LinkNotice(seq=seq, notice=notice))


def _token_to(token: Token) -> link_pb2.LinkToken:
    return link_pb2.LinkToken(
        id=token.id,
        logprob=token.logprob,
        top_ids=[token_id for token_id, _ in token.top],
        top_logprobs=[logprob for _, logprob in token.top],
        precision=token.precision.rank,
    )


def _notice_to(notice: Notice) -> inference_pb2.Notice:
    return inference_pb2.Notice(
        kind=notice.kind.name,
        index=notice.seq.choice,
        worker=notice.worker,
        store=notice.store or "",
        blocks=notice.blocks,
        payload_bytes=notice.payload_bytes,
        copy_us=notice.copy_us,
        run_epoch=notice.run.epoch,
        run_counter=notice.run.counter,
        number=notice.number,
    )


def link_messages(said: link_pb2.ToWorker) -> Iterator[link_pb2.ToWorker]:
    """Take a bundle apart. Raises LinkError for bundles inside it."""
    try:
        yield from unbundled(said)
    except ValueError as error:
        raise LinkError(str(error)) from error


def from_gateway(said: link_pb2.ToWorker) -> ToWorker:
    """Read a message of the link."""
    match said.WhichOneof("message"):
        case "attached":
            attached = said.attached
            return Attached(
                seq_from(attached.seq),
                run_from(attached.run),
                record_from(attached.record),
                tuple(attached.tokens),
                attached.scored,
            )
        case "refused":
            refused = said.refused
            highest = run_from(refused.highest) if refused.HasField("highest") else None
            return AttachRefused(seq_from(refused.seq), run_from(refused.run), highest)
        case "ack":
            ack = said.ack
            seq, run = seq_from(ack.seq), run_from(ack.run)
            return Ack(seq, run, ack.next_index, ack.finished, ack.scored)
        case "drop":
            return Drop(seq_from(said.drop.seq), run_from(said.drop.run))
        case other:
            raise LinkError(f"message = {other}: must be attached, refused, ack or drop")


def record_from(said: link_pb2.RequestRecord) -> RequestRecord:
    """Read a record; a sampling field that is unset takes its default."""
    params = said.sampling_params
    given = {name: getattr(params, name) for name in SAMPLING_SCALARS if params.HasField(name)}
    return RequestRecord(
        request=RequestId(said.request_id),
        prompt_ids=tuple(said.prompt_ids),
        sampling=SamplingParams(
            **given,
            stop=tuple(params.stop),
            stop_token_ids=tuple(params.stop_token_ids),
            logit_bias=tuple(sorted(params.logit_bias.items())),
        ),
        arrival_ms=said.arrival_ms,
        seed=said.seed,
        priority=said.priority,
        deadline_ms=said.deadline_ms if said.HasField("deadline_ms") else None,
        exact=said.exact,
        stop_token_ids=tuple(said.stop_token_ids),
    )


# ---- the controller ------------------------------------------------------------------------


def report_to(report: WorkerReport, counters: Mapping[str, float]) -> control_pb2.WorkerReport:
    """Write a report. A worker serves no calls itself, so it has no address."""
    return control_pb2.WorkerReport(
        worker=report.worker,
        incarnation=report.incarnation,
        node=report.node,
        number=report.number,
        complete=report.complete,
        epoch_seen=report.epoch_seen,
        orders_seen=report.orders_seen,
        block_bytes=report.block_bytes,
        block_size=report.block_size,
        blocks_total=report.blocks_total,
        blocks_free=report.blocks_free,
        blocks_short=report.blocks_short,
        stalled=report.stalled,
        draining=report.draining,
        residents=map(_level_to, report.residents),
        departed=map(_departed_to, report.departed),
        usage=map(_usage_to, report.usage),
        shed=None if report.shed is None else _shed_to(report.shed),
        precision=None if report.precision is None else _precision_to(report.precision),
        counters=counters,
    )


def _shed_to(level: ShedLevel) -> control_pb2.ShedLevel:
    return control_pb2.ShedLevel(
        state=level.state.value,
        ordinary_blocks=level.ordinary_blocks,
        tail_blocks=level.tail_blocks,
        return_ms=level.return_ms,
    )


def _level_to(level: ResidentLevel) -> control_pb2.ResidentLevel:
    return control_pb2.ResidentLevel(
        seq=seq_to(level.seq),
        run=run_to(level.run),
        state=level.state.value,
        ticket=None if level.ticket is None else ticket_to(level.ticket),
        swap_failures=level.swap_failures,
        gateway=level.gateway,
    )


def _departed_to(departed: Departed) -> control_pb2.Departed:
    return control_pb2.Departed(
        seq=seq_to(departed.seq),
        run=run_to(departed.run),
        why=departed.why.value,
        ticket=None if departed.ticket is None else ticket_to(departed.ticket),
        blocks=departed.blocks,
        payload_bytes=departed.payload_bytes,
    )


def _precision_to(said: PrecisionLevel) -> control_pb2.PrecisionLevel:
    tokens_fp16, tokens_mixed, tokens_fp8, tokens_w8a8 = said.tokens
    ms_fp16, ms_mixed, ms_fp8, ms_w8a8 = said.ms
    return control_pb2.PrecisionLevel(
        level=said.level,
        levels=said.levels,
        ratio=said.ratio,
        remark=said.remark,
        switches=said.switches,
        tokens_fp16=tokens_fp16,
        tokens_mixed=tokens_mixed,
        tokens_fp8=tokens_fp8,
        tokens_w8a8=tokens_w8a8,
        ms_fp16=ms_fp16,
        ms_mixed=ms_mixed,
        ms_fp8=ms_fp8,
        ms_w8a8=ms_w8a8,
    )


def _usage_to(usage: Usage) -> control_pb2.Usage:
    return control_pb2.Usage(
        seq=seq_to(usage.seq),
        private_blocks=usage.private_blocks,
        tokens=usage.tokens,
        last_step=usage.last_step,
        advanced=usage.advanced,
    )


def reply_from(said: control_pb2.ReportReply) -> ReportReply:
    """Read the controller's answer; what it says to gateways only is not for a worker.

    Raises PrecisionError for a rule that no controller may give.
    """
    return ReportReply(
        epoch=said.epoch,
        number=said.number,
        resync=said.resync,
        precision=_rule_from(said.precision) if said.HasField("precision") else None,
        drain=DrainRule(None) if said.HasField("drain") else None,
    )


def _rule_from(said: control_pb2.PrecisionRule) -> PrecisionRule:
    return PrecisionRule(
        settings=PrecisionSettings(
            policy=resolve_policy(said.policy),
            level_max=said.level_max,
            threshold_tokens=said.threshold_tokens,
            ttft_target_ms=said.ttft_target_ms,
            tpot_target_ms=said.tpot_target_ms,
            dwell_ms=said.dwell_ms,
        ),
        waiting_tokens=said.waiting_tokens,
        waiting_ms=said.waiting_ms,
        shed=said.shed,
    )
