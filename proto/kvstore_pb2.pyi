# mypy: disable-error-code="type-arg"
from deepinfer.proto import ids_pb2 as _ids_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReserveRequest(_message.Message):
    __slots__ = ("epoch", "ticket", "bytes_max", "writer")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ticket: _ids_pb2.Ticket
    bytes_max: int
    writer: _ids_pb2.WorkerRef
    def __init__(self, epoch: _Optional[int] = ..., ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., bytes_max: _Optional[int] = ..., writer: _Optional[_Union[_ids_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("ticket", "status", "used_bytes", "budget_bytes", "detail")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ticket: _ids_pb2.Ticket
    status: str
    used_bytes: int
    budget_bytes: int
    detail: str
    def __init__(self, ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., status: _Optional[str] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("ticket", "writer", "store_incarnation", "manifest", "payload_bytes", "payload_xxh3")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STORE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_XXH3_FIELD_NUMBER: _ClassVar[int]
    ticket: _ids_pb2.Ticket
    writer: _ids_pb2.WorkerRef
    store_incarnation: int
    manifest: bytes
    payload_bytes: int
    payload_xxh3: int
    def __init__(self, ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., writer: _Optional[_Union[_ids_pb2.WorkerRef, _Mapping]] = ..., store_incarnation: _Optional[int] = ..., manifest: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., payload_xxh3: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class TicketRequest(_message.Message):
    __slots__ = ("ticket", "writer", "store_incarnation")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STORE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ticket: _ids_pb2.Ticket
    writer: _ids_pb2.WorkerRef
    store_incarnation: int
    def __init__(self, ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., writer: _Optional[_Union[_ids_pb2.WorkerRef, _Mapping]] = ..., store_incarnation: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("ticket", "reader")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    ticket: _ids_pb2.Ticket
    reader: _ids_pb2.WorkerRef
    def __init__(self, ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., reader: _Optional[_Union[_ids_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class GetHeader(_message.Message):
    __slots__ = ("reply", "manifest", "payload_bytes", "payload_xxh3")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_XXH3_FIELD_NUMBER: _ClassVar[int]
    reply: StoreReply
    manifest: bytes
    payload_bytes: int
    payload_xxh3: int
    def __init__(self, reply: _Optional[_Union[StoreReply, _Mapping]] = ..., manifest: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., payload_xxh3: _Optional[int] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GetHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[GetHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("epoch", "ticket")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ticket: _ids_pb2.Ticket
    def __init__(self, epoch: _Optional[int] = ..., ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListedTicket(_message.Message):
    __slots__ = ("ticket", "state", "payload_bytes", "tokens", "blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: _ids_pb2.Ticket
    state: str
    payload_bytes: int
    tokens: int
    blocks: int
    def __init__(self, ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., state: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("tickets",)
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    tickets: _containers.RepeatedCompositeFieldContainer[ListedTicket]
    def __init__(self, tickets: _Optional[_Iterable[_Union[ListedTicket, _Mapping]]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("store", "incarnation", "budget_bytes", "used_bytes", "quarantined_bytes", "tickets", "counters", "local_socket", "node")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STORE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    store: str
    incarnation: int
    budget_bytes: int
    used_bytes: int
    quarantined_bytes: int
    tickets: int
    counters: _containers.ScalarMap[str, float]
    local_socket: str
    node: str
    def __init__(self, store: _Optional[str] = ..., incarnation: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., tickets: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., local_socket: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...
