# mypy: disable-error-code="type-arg"
from deepinfer.proto import ids_pb2 as _ids_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResidentLevel(_message.Message):
    __slots__ = ("seq", "run", "state", "ticket", "swap_failures", "gateway")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SWAP_FAILURES_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    state: str
    ticket: _ids_pb2.Ticket
    swap_failures: int
    gateway: str
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ..., state: _Optional[str] = ..., ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., swap_failures: _Optional[int] = ..., gateway: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("seq", "private_blocks", "tokens", "last_step", "advanced")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    ADVANCED_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    private_blocks: int
    tokens: int
    last_step: int
    advanced: int
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., private_blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., last_step: _Optional[int] = ..., advanced: _Optional[int] = ...) -> None: ...

class Departed(_message.Message):
    __slots__ = ("seq", "run", "why", "ticket", "blocks", "payload_bytes")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    run: _ids_pb2.Run
    why: str
    ticket: _ids_pb2.Ticket
    blocks: int
    payload_bytes: int
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., run: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ..., why: _Optional[str] = ..., ticket: _Optional[_Union[_ids_pb2.Ticket, _Mapping]] = ..., blocks: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class PrecisionLevel(_message.Message):
    __slots__ = ("level", "levels", "ratio", "remark", "switches", "tokens_fp16", "tokens_mixed", "tokens_fp8", "ms_fp16", "ms_mixed", "ms_fp8", "tokens_w8a8", "ms_w8a8")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    REMARK_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FP16_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MIXED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FP8_FIELD_NUMBER: _ClassVar[int]
    MS_FP16_FIELD_NUMBER: _ClassVar[int]
    MS_MIXED_FIELD_NUMBER: _ClassVar[int]
    MS_FP8_FIELD_NUMBER: _ClassVar[int]
    TOKENS_W8A8_FIELD_NUMBER: _ClassVar[int]
    MS_W8A8_FIELD_NUMBER: _ClassVar[int]
    level: int
    levels: int
    ratio: float
    remark: str
    switches: int
    tokens_fp16: int
    tokens_mixed: int
    tokens_fp8: int
    ms_fp16: int
    ms_mixed: int
    ms_fp8: int
    tokens_w8a8: int
    ms_w8a8: int
    def __init__(self, level: _Optional[int] = ..., levels: _Optional[int] = ..., ratio: _Optional[float] = ..., remark: _Optional[str] = ..., switches: _Optional[int] = ..., tokens_fp16: _Optional[int] = ..., tokens_mixed: _Optional[int] = ..., tokens_fp8: _Optional[int] = ..., ms_fp16: _Optional[int] = ..., ms_mixed: _Optional[int] = ..., ms_fp8: _Optional[int] = ..., tokens_w8a8: _Optional[int] = ..., ms_w8a8: _Optional[int] = ...) -> None: ...

class ShedLevel(_message.Message):
    __slots__ = ("state", "ordinary_blocks", "tail_blocks", "return_ms")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ORDINARY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETURN_MS_FIELD_NUMBER: _ClassVar[int]
    state: str
    ordinary_blocks: int
    tail_blocks: int
    return_ms: int
    def __init__(self, state: _Optional[str] = ..., ordinary_blocks: _Optional[int] = ..., tail_blocks: _Optional[int] = ..., return_ms: _Optional[int] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("worker", "incarnation", "node", "number", "complete", "epoch_seen", "orders_seen", "block_bytes", "block_size", "blocks_total", "blocks_free", "blocks_short", "stalled", "draining", "residents", "departed", "usage", "address", "counters", "shed", "precision")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    ORDERS_SEEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SHORT_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RESIDENTS_FIELD_NUMBER: _ClassVar[int]
    DEPARTED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: int
    node: str
    number: int
    complete: bool
    epoch_seen: int
    orders_seen: int
    block_bytes: int
    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_short: int
    stalled: bool
    draining: bool
    residents: _containers.RepeatedCompositeFieldContainer[ResidentLevel]
    departed: _containers.RepeatedCompositeFieldContainer[Departed]
    usage: _containers.RepeatedCompositeFieldContainer[Usage]
    address: str
    counters: _containers.ScalarMap[str, float]
    shed: ShedLevel
    precision: PrecisionLevel
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[int] = ..., node: _Optional[str] = ..., number: _Optional[int] = ..., complete: _Optional[bool] = ..., epoch_seen: _Optional[int] = ..., orders_seen: _Optional[int] = ..., block_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_short: _Optional[int] = ..., stalled: _Optional[bool] = ..., draining: _Optional[bool] = ..., residents: _Optional[_Iterable[_Union[ResidentLevel, _Mapping]]] = ..., departed: _Optional[_Iterable[_Union[Departed, _Mapping]]] = ..., usage: _Optional[_Iterable[_Union[Usage, _Mapping]]] = ..., address: _Optional[str] = ..., counters: _Optional[_Mapping[str, float]] = ..., shed: _Optional[_Union[ShedLevel, _Mapping]] = ..., precision: _Optional[_Union[PrecisionLevel, _Mapping]] = ...) -> None: ...

class TicketLevel(_message.Message):
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

class StoreReport(_message.Message):
    __slots__ = ("store", "incarnation", "node", "number", "complete", "epoch_seen", "budget_bytes", "used_bytes", "tickets", "gone", "address", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STORE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    store: str
    incarnation: int
    node: str
    number: int
    complete: bool
    epoch_seen: int
    budget_bytes: int
    used_bytes: int
    tickets: _containers.RepeatedCompositeFieldContainer[TicketLevel]
    gone: _containers.RepeatedCompositeFieldContainer[_ids_pb2.Ticket]
    address: str
    counters: _containers.ScalarMap[str, float]
    def __init__(self, store: _Optional[str] = ..., incarnation: _Optional[int] = ..., node: _Optional[str] = ..., number: _Optional[int] = ..., complete: _Optional[bool] = ..., epoch_seen: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., tickets: _Optional[_Iterable[_Union[TicketLevel, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[_ids_pb2.Ticket, _Mapping]]] = ..., address: _Optional[str] = ..., counters: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RequestLevel(_message.Message):
    __slots__ = ("seq", "claim", "cancelled", "prompt_tokens", "max_tokens", "held_tokens", "arrival_ms", "priority", "deadline_ms", "exact", "attached")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    claim: int
    cancelled: bool
    prompt_tokens: int
    max_tokens: int
    held_tokens: int
    arrival_ms: int
    priority: int
    deadline_ms: int
    exact: bool
    attached: _ids_pb2.Run
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., claim: _Optional[int] = ..., cancelled: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., held_tokens: _Optional[int] = ..., arrival_ms: _Optional[int] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., exact: _Optional[bool] = ..., attached: _Optional[_Union[_ids_pb2.Run, _Mapping]] = ...) -> None: ...

class GatewayReport(_message.Message):
    __slots__ = ("gateway", "incarnation", "number", "complete", "epoch_seen", "requests", "gone", "address", "counters", "draining", "drained")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    incarnation: int
    number: int
    complete: bool
    epoch_seen: int
    requests: _containers.RepeatedCompositeFieldContainer[RequestLevel]
    gone: _containers.RepeatedCompositeFieldContainer[_ids_pb2.Seq]
    address: str
    counters: _containers.ScalarMap[str, float]
    draining: bool
    drained: bool
    def __init__(self, gateway: _Optional[str] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., complete: _Optional[bool] = ..., epoch_seen: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RequestLevel, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[_ids_pb2.Seq, _Mapping]]] = ..., address: _Optional[str] = ..., counters: _Optional[_Mapping[str, float]] = ..., draining: _Optional[bool] = ..., drained: _Optional[bool] = ...) -> None: ...

class Disown(_message.Message):
    __slots__ = ("seq", "claim")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    claim: int
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., claim: _Optional[int] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("seq", "blocks_needed", "blocks_total", "why")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    seq: _ids_pb2.Seq
    blocks_needed: int
    blocks_total: int
    why: str
    def __init__(self, seq: _Optional[_Union[_ids_pb2.Seq, _Mapping]] = ..., blocks_needed: _Optional[int] = ..., blocks_total: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class PrecisionRule(_message.Message):
    __slots__ = ("policy", "level_max", "threshold_tokens", "ttft_target_ms", "tpot_target_ms", "dwell_ms", "waiting_tokens", "waiting_ms", "shed")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LEVEL_MAX_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    DWELL_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_MS_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    policy: str
    level_max: int
    threshold_tokens: int
    ttft_target_ms: float
    tpot_target_ms: float
    dwell_ms: int
    waiting_tokens: int
    waiting_ms: int
    shed: bool
    def __init__(self, policy: _Optional[str] = ..., level_max: _Optional[int] = ..., threshold_tokens: _Optional[int] = ..., ttft_target_ms: _Optional[float] = ..., tpot_target_ms: _Optional[float] = ..., dwell_ms: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., waiting_ms: _Optional[int] = ..., shed: _Optional[bool] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("epoch", "number", "resync", "disown", "reject", "precision", "drain")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    DISOWN_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    resync: bool
    disown: _containers.RepeatedCompositeFieldContainer[Disown]
    reject: _containers.RepeatedCompositeFieldContainer[Reject]
    precision: PrecisionRule
    drain: DrainRule
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., resync: _Optional[bool] = ..., disown: _Optional[_Iterable[_Union[Disown, _Mapping]]] = ..., reject: _Optional[_Iterable[_Union[Reject, _Mapping]]] = ..., precision: _Optional[_Union[PrecisionRule, _Mapping]] = ..., drain: _Optional[_Union[DrainRule, _Mapping]] = ...) -> None: ...

class DrainRule(_message.Message):
    __slots__ = ("left_ms",)
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    left_ms: int
    def __init__(self, left_ms: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("name", "grace_ms", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    grace_ms: int
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., grace_ms: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("name", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DrainLevel(_message.Message):
    __slots__ = ("name", "incarnation", "serving", "draining", "drained", "left")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    serving: bool
    draining: bool
    drained: bool
    left: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., serving: _Optional[bool] = ..., draining: _Optional[bool] = ..., drained: _Optional[bool] = ..., left: _Optional[int] = ...) -> None: ...
