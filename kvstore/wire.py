"""Between the store's values and what carries them: protobuf, and msgpack with caps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack  # type: ignore[import-untyped]

from deepinfer.kvstore.core.events import PutId, ReadId
from deepinfer.kvstore.core.ids import Incarnation, RequestId, Run, Seq, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.manifest import (
    MANIFEST_BYTES_MAX,
    TEXT_MAX,
    Manifest,
    ManifestError,
    from_dict,
    to_dict,
)
from deepinfer.kvstore.core.messages import ReportReply, StoreReply, StoreReport, StoreStatus
from deepinfer.proto import control_pb2, ids_pb2, kvstore_pb2

ID_MAX = 256
"""Characters in a request's or worker's id."""


class WireError(ValueError):
    """A message that no correct peer sends: names the field, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:  # a frame may hold a megabyte of anything
            shown = f"{shown[:77]}..."
        super().__init__(f"{name} = {shown}: must be {allowed}")


# ---- protobuf -----------------------------------------------------------------------------------


def ticket_to_proto(ticket: Ticket) -> ids_pb2.Ticket:
    """Translate outwards."""
    return ids_pb2.Ticket(
        seq=ids_pb2.Seq(request=ticket.seq.request, choice=ticket.seq.choice),
        run=ids_pb2.Run(epoch=ticket.run.epoch, counter=ticket.run.counter),
        order=ids_pb2.Run(epoch=ticket.order.epoch, counter=ticket.order.counter),
    )


def ticket_from_proto(raw: ids_pb2.Ticket) -> Ticket:
    """Translate inwards. Raises WireError."""
    return Ticket(
        Seq(RequestId(_id("ticket.seq.request", raw.seq.request)), raw.seq.choice),
        Run(raw.run.epoch, raw.run.counter),
        Run(raw.order.epoch, raw.order.counter),
    )


def writer_to_proto(writer: WorkerRef) -> ids_pb2.WorkerRef:
    """Translate outwards."""
    return ids_pb2.WorkerRef(worker=writer.worker, incarnation=writer.incarnation)


def writer_from_proto(raw: ids_pb2.WorkerRef) -> WorkerRef:
    """Translate inwards. Raises WireError."""
    return WorkerRef(WorkerId(_id("writer.worker", raw.worker)), Incarnation(raw.incarnation))


def incarnation_from_proto(raw: int) -> Incarnation | None:
    """0 stands for a caller that does not know."""
    return Incarnation(raw) if raw else None


def reply_to_proto(reply: StoreReply, detail: str = "") -> kvstore_pb2.StoreReply:
    """Translate outwards."""
    return kvstore_pb2.StoreReply(
        ticket=ticket_to_proto(reply.ticket),
        status=reply.status.value,
        used_bytes=reply.used_bytes,
        budget_bytes=reply.budget_bytes,
        detail=detail,
    )


def status_from_proto(raw: str) -> StoreStatus:
    """Translate inwards. Raises WireError."""
    try:
        return StoreStatus(raw)
    except ValueError:
        raise WireError("status", raw, "a StoreStatus") from None


def report_to_proto(
    report: StoreReport, address: str, counters: Mapping[str, float]
) -> control_pb2.StoreReport:
    """Translate outwards."""
    return control_pb2.StoreReport(
        store=report.store,
        incarnation=report.incarnation,
        node=report.node,
        number=report.number,
        complete=report.complete,
        epoch_seen=report.epoch_seen,
        budget_bytes=report.budget_bytes,
        used_bytes=report.used_bytes,
        tickets=[
            control_pb2.TicketLevel(
                ticket=ticket_to_proto(level.ticket),
                state=level.state.value,
                payload_bytes=level.payload_bytes,
                tokens=level.tokens,
                blocks=level.blocks,
            )
            for level in report.tickets
        ],
        gone=[ticket_to_proto(ticket) for ticket in report.gone],
        address=address,
        counters=counters,
    )


def report_reply_from_proto(raw: control_pb2.ReportReply) -> ReportReply:
    """Translate inwards; what only gateways get is left out."""
    return ReportReply(epoch=raw.epoch, number=raw.number, resync=raw.resync)


def _id(name: str, value: str) -> str:
    if not 0 < len(value) <= ID_MAX:
        raise WireError(name, value[:ID_MAX], f"1 to {ID_MAX} characters")
    return value


# ---- chunk messages -----------------------------------------------------------------------------
# PutRequest and GetResponse are {1: header, 2: chunk}. Protobuf's own code would copy a chunk two
# or three times; these write and read the same bytes with one copy and with none.

_CHUNK_TAG = 0x12  # field 2, length-delimited


def chunk_to_bytes(pieces: list[memoryview]) -> bytes:
    """A serialized PutRequest or GetResponse whose ``chunk`` is the pieces joined."""
    length = sum(len(piece) for piece in pieces)
    head = bytearray([_CHUNK_TAG])
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return b"".join([head, *pieces])


def chunk_from_bytes(raw: bytes) -> memoryview | None:
    """The chunk of a message that is exactly one chunk; None for any other message."""
    if not raw or raw[0] != _CHUNK_TAG:
        return None
    length = shift = 0
    for at in range(1, min(len(raw), 11)):
        length |= (raw[at] & 0x7F) << shift
        shift += 7
        if raw[at] < 0x80:
            return memoryview(raw)[at + 1 :] if len(raw) - at - 1 == length else None
    return None


def put_request_from_bytes(raw: bytes) -> kvstore_pb2.PutHeader | memoryview:
    """Read one PutRequest. Raises ``google.protobuf.message.DecodeError``."""
    chunk = chunk_from_bytes(raw)
    if chunk is not None:
        return chunk
    request = kvstore_pb2.PutRequest.FromString(raw)
    if request.WhichOneof("message") == "chunk":
        return memoryview(request.chunk)
    return request.header


def get_response_from_bytes(raw: bytes) -> kvstore_pb2.GetHeader | memoryview:
    """Read one GetResponse. Raises ``google.protobuf.message.DecodeError``."""
    chunk = chunk_from_bytes(raw)
    if chunk is not None:
        return chunk
    response = kvstore_pb2.GetResponse.FromString(raw)
    if response.WhichOneof("message") == "chunk":
        return memoryview(response.chunk)
    return response.header


# ---- msgpack ------------------------------------------------------------------------------------


def pack(value: object) -> bytes:
    """Encode a value of maps, lists, text, bytes and numbers."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(raw: bytes | memoryview, *, bytes_max: int) -> Any:
    """Decode at most ``bytes_max`` bytes of plain values. Raises ValueError and nothing else."""
    if len(raw) > bytes_max:
        raise WireError("length", len(raw), f"at most {bytes_max}")
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_bin_len=bytes_max,
            max_str_len=4 * max(TEXT_MAX, ID_MAX),  # bytes of UTF-8
            max_map_len=64,
            max_array_len=bytes_max,
            max_ext_len=0,
        )
    except (msgpack.UnpackException, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not msgpack: {error or type(error).__name__}") from None


def manifest_to_bytes(manifest: Manifest) -> bytes:
    """Encode for the wire."""
    return pack(to_dict(manifest))


def manifest_from_bytes(raw: bytes) -> Manifest:
    """Decode and check. Raises ManifestError and nothing else."""
    try:
        decoded = unpack(raw, bytes_max=MANIFEST_BYTES_MAX)
    except ValueError as error:
        raise ManifestError("(all)", f"{len(raw)} bytes", f"a msgpack map ({error})") from None
    return from_dict(decoded)


def ticket_to_list(ticket: Ticket) -> list[object]:
    """Translate outwards, for msgpack."""
    return [*ticket.seq, *ticket.run, *ticket.order]


def ticket_from_list(raw: object) -> Ticket:
    """Translate inwards. Raises WireError."""
    match raw:
        case [str(request), int(choice), int(e1), int(c1), int(e2), int(c2)]:
            seq = Seq(RequestId(_id("ticket.seq.request", request)), choice)
            return Ticket(seq, Run(e1, c1), Run(e2, c2))
    raise WireError("ticket", raw, "[request, choice, run, run, order, order]")


def hold_from_list(raw: object) -> tuple[Incarnation, int]:
    """The fields of a PutId or ReadId. Raises WireError."""
    match raw:
        case [int(incarnation), int(number)]:
            return Incarnation(incarnation), number
    raise WireError("put or read", raw, "[incarnation, number]")


def put_from_list(raw: object) -> PutId:
    """Translate inwards. Raises WireError."""
    return PutId(*hold_from_list(raw))


def read_from_list(raw: object) -> ReadId:
    """Translate inwards. Raises WireError."""
    return ReadId(*hold_from_list(raw))
