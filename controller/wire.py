"""Between protobuf and the core's values; with ``service`` and ``stores`` the only users of it.

Reading raises ``WireError`` for what is no legal message, naming the field and its value.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from deepinfer.controller.core.draining import DrainLevel
from deepinfer.controller.core.events import Drain
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
    Departed,
    Departure,
    GatewayReport,
    Release,
    ReportReply,
    RequestLevel,
    Reserve,
    ResidentLevel,
    StoreReply,
    StoreReport,
    StoreStatus,
    TicketLevel,
    TicketState,
    Usage,
    WorkerReport,
)
from deepinfer.kvstore.core.precision import PrecisionLevel, PrecisionRule
from deepinfer.kvstore.core.shed import ShedLevel, ShedState
from deepinfer.kvstore.core.states import State
from deepinfer.proto import control_pb2, ids_pb2, kvstore_pb2


class WireError(ValueError):
    """A peer sent something that is no legal message: names the field, its value, what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} = {value!r}: must be {allowed}")


_E = TypeVar("_E", bound=Enum)


def _enum(kind: type[_E], name: str, value: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise WireError(name, value, f"one of {', '.join(e.value for e in kind)}") from None


def _name(name: str, value: str) -> str:
    if not value:
        raise WireError(name, value, "a name")
    return value


# ---- names ---------------------------------------------------------------------------------


def seq_from(said: ids_pb2.Seq) -> Seq:
    return Seq(RequestId(_name("seq.request", said.request)), said.choice)


def seq_to(seq: Seq) -> ids_pb2.Seq:
    return ids_pb2.Seq(request=seq.request, choice=seq.choice)


def run_from(said: ids_pb2.Run) -> Run:
    return Run(said.epoch, said.counter)


def run_to(run: Run) -> ids_pb2.Run:
    return ids_pb2.Run(epoch=run.epoch, counter=run.counter)


def ticket_from(said: ids_pb2.Ticket) -> Ticket:
    return Ticket(seq_from(said.seq), run_from(said.run), run_from(said.order))


def ticket_to(ticket: Ticket) -> ids_pb2.Ticket:
    return ids_pb2.Ticket(
        seq=seq_to(ticket.seq), run=run_to(ticket.run), order=run_to(ticket.order)
    )


# ---- reports -------------------------------------------------------------------------------


def worker_report_from(said: control_pb2.WorkerReport) -> WorkerReport:
    """Read a worker's report.

    Raises:
        WireError: a name is empty, a state unknown, or a block holds no token.
    """
    if said.block_size < 1:
        raise WireError("block_size", said.block_size, "at least 1")
    return WorkerReport(
        worker=WorkerId(_name("worker", said.worker)),
        incarnation=Incarnation(said.incarnation),
        node=NodeId(said.node),
        number=said.number,
        complete=said.complete,
        epoch_seen=said.epoch_seen,
        orders_seen=said.orders_seen,
        block_bytes=said.block_bytes,
        block_size=said.block_size,
        blocks_total=said.blocks_total,
        blocks_free=said.blocks_free,
        blocks_short=said.blocks_short,
        stalled=said.stalled,
        draining=said.draining,
        residents=tuple(_resident_from(level) for level in said.residents),
        departed=tuple(_departed_from(departed) for departed in said.departed),
        usage=tuple(
            Usage(seq_from(u.seq), u.private_blocks, u.tokens, u.last_step, u.advanced)
            for u in said.usage
        ),
        shed=_shed_from(said.shed) if said.HasField("shed") else None,
        precision=_precision_from(said.precision) if said.HasField("precision") else None,
    )


def _shed_from(said: control_pb2.ShedLevel) -> ShedLevel:
    state = _enum(ShedState, "shed.state", said.state)
    return ShedLevel(state, said.ordinary_blocks, said.tail_blocks, said.return_ms)


def _precision_from(said: control_pb2.PrecisionLevel) -> PrecisionLevel:
    return PrecisionLevel(
        said.level,
        said.levels,
        said.ratio,
        said.remark,
        said.switches,
        (said.tokens_fp16, said.tokens_mixed, said.tokens_fp8, said.tokens_w8a8),
        (said.ms_fp16, said.ms_mixed, said.ms_fp8, said.ms_w8a8),
    )


def _resident_from(said: control_pb2.ResidentLevel) -> ResidentLevel:
    return ResidentLevel(
        seq_from(said.seq),
        run_from(said.run),
        _enum(State, "residents.state", said.state),
        ticket_from(said.ticket) if said.HasField("ticket") else None,
        said.swap_failures,
        GatewayId(said.gateway),
    )


def _departed_from(said: control_pb2.Departed) -> Departed:
    return Departed(
        seq_from(said.seq),
        run_from(said.run),
        _enum(Departure, "departed.why", said.why),
        ticket_from(said.ticket) if said.HasField("ticket") else None,
        said.blocks,
        said.payload_bytes,
    )


def store_report_from(said: control_pb2.StoreReport) -> StoreReport:
    """Read a store's report.

    Raises:
        WireError: a name is empty or a ticket's state unknown.
    """
    return StoreReport(
        store=StoreId(_name("store", said.store)),
        incarnation=Incarnation(said.incarnation),
        node=NodeId(said.node),
        number=said.number,
        complete=said.complete,
        epoch_seen=said.epoch_seen,
        budget_bytes=said.budget_bytes,
        used_bytes=said.used_bytes,
        tickets=tuple(
            TicketLevel(
                ticket_from(level.ticket),
                _enum(TicketState, "tickets.state", level.state),
                level.payload_bytes,
                level.tokens,
                level.blocks,
            )
            for level in said.tickets
        ),
        gone=tuple(ticket_from(ticket) for ticket in said.gone),
    )


def gateway_report_from(said: control_pb2.GatewayReport) -> GatewayReport:
    """Read a gateway's report.

    Raises:
        WireError: a name is empty, or a request has no prompt or wants no token.
    """
    return GatewayReport(
        gateway=GatewayId(_name("gateway", said.gateway)),
        incarnation=Incarnation(said.incarnation),
        number=said.number,
        complete=said.complete,
        epoch_seen=said.epoch_seen,
        requests=tuple(_request_from(level) for level in said.requests),
        gone=tuple(seq_from(seq) for seq in said.gone),
        draining=said.draining,
        drained=said.drained,
    )


def _request_from(said: control_pb2.RequestLevel) -> RequestLevel:
    if said.prompt_tokens < 1:
        raise WireError("requests.prompt_tokens", said.prompt_tokens, "at least 1")
    if said.max_tokens < 1:
        raise WireError("requests.max_tokens", said.max_tokens, "at least 1")
    return RequestLevel(
        seq_from(said.seq),
        said.claim,
        said.cancelled,
        said.prompt_tokens,
        said.max_tokens,
        said.held_tokens,
        said.arrival_ms,
        said.priority,
        said.deadline_ms if said.HasField("deadline_ms") else None,
        said.exact,
        run_from(said.attached) if said.HasField("attached") else None,
    )


def reply_to(reply: ReportReply) -> control_pb2.ReportReply:
    """Write the answer to a report."""
    return control_pb2.ReportReply(
        epoch=reply.epoch,
        number=reply.number,
        resync=reply.resync,
        disown=[control_pb2.Disown(seq=seq_to(d.seq), claim=d.claim) for d in reply.disown],
        reject=[
            control_pb2.Reject(
                seq=seq_to(r.seq),
                blocks_needed=r.blocks_needed,
                blocks_total=r.blocks_total,
                why=r.why.value,
            )
            for r in reply.reject
        ],
        precision=None if reply.precision is None else _rule_to(reply.precision),
        drain=None if reply.drain is None else control_pb2.DrainRule(left_ms=reply.drain.left_ms),
    )


def drain_from(said: control_pb2.DrainRequest) -> Drain:
    """Read a wish to empty a worker or gateway.

    Raises:
        WireError: the name is empty.
    """
    return Drain(
        WorkerId(_name("name", said.name)),
        said.grace_ms if said.HasField("grace_ms") else None,
        Incarnation(said.incarnation) if said.incarnation else None,
    )


def drain_level_to(level: DrainLevel) -> control_pb2.DrainLevel:
    """Write how far it has been emptied."""
    return control_pb2.DrainLevel(
        name=level.name,
        incarnation=level.life,
        serving=level.serving,
        draining=level.draining,
        drained=level.drained,
        left=level.left,
    )


def _rule_to(rule: PrecisionRule) -> control_pb2.PrecisionRule:
    settings = rule.settings
    return control_pb2.PrecisionRule(
        policy=settings.policy.value,
        level_max=settings.level_max,
        threshold_tokens=settings.threshold_tokens,
        ttft_target_ms=settings.ttft_target_ms,
        tpot_target_ms=settings.tpot_target_ms,
        dwell_ms=settings.dwell_ms,
        waiting_tokens=rule.waiting_tokens,
        waiting_ms=rule.waiting_ms,
        shed=rule.shed,
    )


# ---- stores --------------------------------------------------------------------------------


def worker_ref_to(ref: WorkerRef) -> ids_pb2.WorkerRef:
    return ids_pb2.WorkerRef(worker=ref.worker, incarnation=ref.incarnation)


def reserve_to(call: Reserve) -> kvstore_pb2.ReserveRequest:
    """Write a reservation."""
    return kvstore_pb2.ReserveRequest(
        epoch=call.epoch,
        ticket=ticket_to(call.ticket),
        bytes_max=call.bytes_max,
        writer=worker_ref_to(call.writer),
    )


def release_to(call: Release) -> kvstore_pb2.ReleaseRequest:
    """Write a release."""
    return kvstore_pb2.ReleaseRequest(epoch=call.epoch, ticket=ticket_to(call.ticket))


def store_reply_from(said: kvstore_pb2.StoreReply) -> StoreReply:
    """Read a store's answer.

    Raises:
        WireError: a status that is none.
    """
    return StoreReply(
        ticket_from(said.ticket),
        _enum(StoreStatus, "status", said.status),
        said.used_bytes,
        said.budget_bytes,
    )
