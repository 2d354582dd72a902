# mypy: disable-error-code="type-arg"
from deepinfer.proto import ids_pb2 as _ids_pb2
from deepinfer.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: _ids_pb2.WorkerRef
    def __init__(self, worker: _Optional[_Union[_ids_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("seq", "run")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ...) -> None: ...

class LinkToken(_message.Message):
    __slots__ = ("id", "logprob", "top_ids", "top_logprobs", "precision")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    precision: int
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., precision: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("seq", "run", "index", "tokens", "finish_reason", "cached")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    index: int
    tokens: _containers.RepeatedCompositeFieldContainer[LinkToken]
    finish_reason: str
    cached: int
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ..., index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[LinkToken, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., cached: _Optional[int] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("seq", "run", "position", "tokens")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    position: int
    tokens: _containers.RepeatedCompositeFieldContainer[LinkToken]
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[LinkToken, _Mapping]]] = ...) -> None: ...

class LinkNotice(_message.Message):
    __slots__ = ("seq", "notice")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    notice: _inference_pb2.Notice
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., notice: _Optional[_Union[_inference_pb2.Notice, _Mapping]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("hello", "attach", "tokens", "notice", "scores", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    attach: Attach
    tokens: Tokens
    notice: LinkNotice
    scores: Scores
    more: _containers.RepeatedCompositeFieldContainer[FromWorker]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., notice: _Optional[_Union[LinkNotice, _Mapping]] = ..., scores: _Optional[_Union[Scores, _Mapping]] = ..., more: _Optional[_Iterable[_Union[FromWorker, _Mapping]]] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "sampling_params", "arrival_ms", "seed", "priority", "deadline_ms", "exact", "stop_token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_MS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _inference_pb2.SamplingParams
    arrival_ms: int
    seed: int
    priority: int
    deadline_ms: int
    exact: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., arrival_ms: _Optional[int] = ..., seed: _Optional[int] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., exact: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("seq", "run", "record", "tokens", "scored")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    record: RequestRecord
    tokens: _containers.RepeatedScalarFieldContainer[int]
    scored: int
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ..., record: _Optional[_Union[RequestRecord, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., scored: _Optional[int] = ...) -> None: ...

class AttachRefused(_message.Message):
    __slots__ = ("seq", "run", "highest")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    highest: _ids_pb2.Run
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ..., highest: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("seq", "run", "next_index", "finished", "scored")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    next_index: int
    finished: bool
    scored: int
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ..., next_index: _Optional[int] = ..., finished: _Optional[bool] = ..., scored: _Optional[int] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("seq", "run")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("attached", "refused", "ack", "drop", "more")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    refused: AttachRefused
    ack: Ack
    drop: Drop
    more: _containers.RepeatedCompositeFieldContainer[ToWorker]
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., refused: _Optional[_Union[AttachRefused, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ..., more: _Optional[_Iterable[_Union[ToWorker, _Mapping]]] = ...) -> None: ...
