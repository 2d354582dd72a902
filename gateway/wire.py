"""Between the cluster's own contracts, the worker's link and the reports, and the core's values.

Decoding raises ``LinkError``: whatever is wrong is the worker's fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from deepinfer.kvstore.core.ids import (
    Incarnation,
    RequestId,
    Run,
    Seq,
    StoreId,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    AttachRefused,
    Disown,
    DrainRule,
    Drop,
    GatewayReport,
    Notice,
    NoticeKind,
    Reject,
    RejectReason,
    ReportReply,
    RequestLevel,
    Scores,
    ToGateway,
    Tokens,
    ToWorker,
)
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.requests import (
    FinishReason,
    RequestRecord,
    Token,
)
from deepinfer.proto import control_pb2, ids_pb2, inference_pb2, link_pb2
from deepinfer.proto.bundle import unbundled
from deepinfer.proto.fields import SAMPLING_SCALARS

_PRECISIONS = tuple(Precision)
_REASONS = {reason.value: reason for reason in RejectReason}
_FINISH_NAMES = {reason.value: reason for reason in FinishReason}


class LinkError(ValueError):
    """A worker sent something that is no message of the link."""


# ---- workers -------------------------------------------------------------------------------


def run_from(said: ids_pb2.Run) -> Run:
    """Read a run."""
    return Run(said.epoch, said.counter)


def seq_from(said: ids_pb2.Seq) -> Seq:
    """Read a sequence."""
    return Seq(RequestId(said.request), said.choice)


def worker_ref_from(said: ids_pb2.WorkerRef) -> WorkerRef:
    """Read a worker's life.

    Raises:
        LinkError: it has no name.
    """
    if not said.worker:
        raise LinkError("hello.worker.worker = '': must not be empty")
    return WorkerRef(WorkerId(said.worker), Incarnation(said.incarnation))


def link_messages(said: link_pb2.FromWorker) -> Iterator[link_pb2.FromWorker]:
    """Take a bundle apart.

    Raises:
        LinkError: bundles inside it.
    """
    try:
        yield from unbundled(said)
    except ValueError as error:
        raise LinkError(str(error)) from error


def from_worker(said: link_pb2.FromWorker, worker: WorkerRef) -> ToGateway:
    """Read a message of the link after its Hello.

    Raises:
        LinkError: no message, a second Hello, or a value outside its enum.
    """
    match said.WhichOneof("message"):
        case "attach":
            return Attach(seq_from(said.attach.seq), run_from(said.attach.run), worker)
        case "tokens":
            tokens = said.tokens
            finish = tokens.finish_reason
            if finish and finish not in _FINISH_NAMES:
                allowed = ", ".join(_FINISH_NAMES)
                raise LinkError(f"tokens.finish_reason = {finish!r}: must be one of {allowed}")
            return Tokens(
                seq_from(tokens.seq),
                run_from(tokens.run),
                tokens.index,
                tuple(map(_token_from, tokens.tokens)),
                _FINISH_NAMES[finish] if finish else None,
                tokens.cached,
            )
        case "scores":
            scores = said.scores
            return Scores(
                seq_from(scores.seq),
                run_from(scores.run),
                scores.position,
                tuple(map(_token_from, scores.tokens)),
            )
        case "notice":
            return _notice_from(said.notice, worker)
        case other:
            raise LinkError(f"message = {other}: must be attach, scores, tokens or notice")


def _token_from(said: link_pb2.LinkToken) -> Token:
    if len(said.top_ids) != len(said.top_logprobs):
        raise LinkError(
            f"token: {len(said.top_ids)} top_ids and {len(said.top_logprobs)} top_logprobs: "
            "must be as many"
        )
    return Token(
        said.id,
        said.logprob if said.HasField("logprob") else None,
        tuple(zip(said.top_ids, said.top_logprobs, strict=True)),
        _precision_from(said.precision),
    )


def _precision_from(rank: int) -> Precision:
    if rank >= len(_PRECISIONS):
        raise LinkError(f"token.precision = {rank}: must be at most {len(_PRECISIONS) - 1}")
    return _PRECISIONS[rank]


def _notice_from(said: link_pb2.LinkNotice, worker: WorkerRef) -> Notice:
    notice = said.notice
    kinds: Mapping[int, str] = {v.number: v.name for v in notice.Kind.DESCRIPTOR.values}
    name = kinds.get(notice.kind, "")
    if name not in NoticeKind.__members__:
        allowed = ", ".join(NoticeKind.__members__)
        raise LinkError(f"notice.kind = {notice.kind}: must be one of {allowed}")
    return Notice(
        seq=seq_from(said.seq),
        run=Run(notice.run_epoch, notice.run_counter),
        number=notice.number,
        kind=NoticeKind[name],
        worker=worker.worker,
        store=StoreId(notice.store) if notice.store else None,
        blocks=notice.blocks,
        payload_bytes=notice.payload_bytes,
        copy_us=notice.copy_us,
    )


def _run_to(run: Run) -> ids_pb2.Run:
    return ids_pb2.Run(epoch=run.epoch, counter=run.counter)


def _seq_to(seq: Seq) -> ids_pb2.Seq:
    return ids_pb2.Seq(request=seq.request, choice=seq.choice)


def to_worker(message: ToWorker) -> link_pb2.ToWorker:
    """Write an answer to a worker."""
    seq, run = _seq_to(message.seq), _run_to(message.run)
    match message:
        case Attached():
            return link_pb2.ToWorker(
                attached=link_pb2.Attached(
                    seq=seq,
                    run=run,
                    record=record_to(message.record),
                    tokens=message.tokens,
                    scored=message.scored,
                )
            )
        case AttachRefused():
            highest = None if message.highest is None else _run_to(message.highest)
            return link_pb2.ToWorker(
                refused=link_pb2.AttachRefused(seq=seq, run=run, highest=highest)
            )
        case Ack():
            return link_pb2.ToWorker(
                ack=link_pb2.Ack(
                    seq=seq,
                    run=run,
                    next_index=message.next_index,
                    finished=message.finished,
                    scored=message.scored,
                )
            )
        case Drop():
            return link_pb2.ToWorker(drop=link_pb2.Drop(seq=seq, run=run))


def record_to(record: RequestRecord) -> link_pb2.RequestRecord:
    """Write a record for the worker that runs it: every sampling field set."""
    sampling = inference_pb2.SamplingParams(
        stop=record.sampling.stop,
        stop_token_ids=record.sampling.stop_token_ids,
        logit_bias=dict(record.sampling.logit_bias),
    )
    for name in SAMPLING_SCALARS:
        value = getattr(record.sampling, name)
        if value is not None:
            setattr(sampling, name, value)
    return link_pb2.RequestRecord(
        request_id=record.request,
        prompt_ids=record.prompt_ids,
        sampling_params=sampling,
        arrival_ms=record.arrival_ms,
        seed=record.seed,
        priority=record.priority,
        deadline_ms=record.deadline_ms,
        exact=record.exact,
        stop_token_ids=record.stop_token_ids,
    )


# ---- the controller ------------------------------------------------------------------------


def report_to(
    report: GatewayReport, address: str, counters: Mapping[str, float]
) -> control_pb2.GatewayReport:
    """Write a report."""
    return control_pb2.GatewayReport(
        gateway=report.gateway,
        incarnation=report.incarnation,
        number=report.number,
        complete=report.complete,
        epoch_seen=report.epoch_seen,
        requests=map(_level_to, report.requests),
        gone=map(_seq_to, report.gone),
        address=address,
        counters=counters,
        draining=report.draining,
        drained=report.drained,
    )


def _level_to(level: RequestLevel) -> control_pb2.RequestLevel:
    return control_pb2.RequestLevel(
        seq=_seq_to(level.seq),
        claim=level.claim,
        cancelled=level.cancelled,
        prompt_tokens=level.prompt_tokens,
        max_tokens=level.max_tokens,
        held_tokens=level.held_tokens,
        arrival_ms=level.arrival_ms,
        priority=level.priority,
        deadline_ms=level.deadline_ms,
        exact=level.exact,
        attached=None if level.attached is None else _run_to(level.attached),
    )


def _reject_from(said: control_pb2.Reject) -> Reject:
    why = _REASONS.get(said.why or RejectReason.TOO_LARGE.value)
    if why is None:
        raise LinkError(f"reject.why = {said.why!r}: must be one of {', '.join(_REASONS)}")
    return Reject(seq_from(said.seq), said.blocks_needed, said.blocks_total, why)


def reply_from(said: control_pb2.ReportReply) -> ReportReply:
    """Read the controller's answer."""
    return ReportReply(
        epoch=said.epoch,
        number=said.number,
        resync=said.resync,
        disown=tuple(Disown(seq_from(d.seq), d.claim) for d in said.disown),
        reject=tuple(_reject_from(reject) for reject in said.reject),
        drain=_drain_from(said.drain) if said.HasField("drain") else None,
    )


def _drain_from(said: control_pb2.DrainRule) -> DrainRule:
    return DrainRule(said.left_ms if said.HasField("left_ms") else None)
