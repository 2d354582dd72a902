# mypy: disable-error-code="type-arg"
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Seq(_message.Message):
    __slots__ = ("request", "choice")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request: str
    choice: int
    def __init__(self, request: _Optional[str] = ..., choice: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("epoch", "counter")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    counter: int
    def __init__(self, epoch: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("seq", "run", "order")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    seq: Seq
    run: Run
    order: Run
    def __init__(self, seq: _Optional[_Union[Seq, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., order: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker", "incarnation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...
