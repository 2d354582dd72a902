"""From what gateways send to the core's messages and the caller's events."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # has no stubs
from grpc_status import rpc_status

from deepinfer.client import results
from deepinfer.client.core.events import Fail, Failure
from deepinfer.client.errors import (
    Aborted,
    DeepInferError,
    InvalidRequest,
    ModelNotFound,
    ProtocolError,
    Replaced,
    RequestFailed,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Untrusted,
)
from deepinfer.kvstore.core.ids import RequestId, Run, Seq, StoreId, WorkerId
from deepinfer.kvstore.core.messages import (
    Accepted,
    Delta,
    Finished,
    Notice,
    NoticeKind,
    PromptDelta,
    ToClient,
)
from deepinfer.kvstore.core.precision import unpacked
from deepinfer.kvstore.core.requests import FinishReason, Token
from deepinfer.proto import inference_pb2

_KINDS = {
    inference_pb2.Notice.PLACED: NoticeKind.PLACED,
    inference_pb2.Notice.SWAPPED_OUT: NoticeKind.SWAPPED_OUT,
    inference_pb2.Notice.RESUMED: NoticeKind.RESUMED,
    inference_pb2.Notice.SWAP_FAILED: NoticeKind.SWAP_FAILED,
    inference_pb2.Notice.RECOMPUTED: NoticeKind.RECOMPUTED,
}
_REASONS = {reason.value: reason for reason in FinishReason}
_FAILURES: dict[Failure, type[DeepInferError]] = {
    Failure.INVALID: InvalidRequest,
    Failure.UNAUTHENTICATED: Unauthenticated,
    Failure.NOT_FOUND: ModelNotFound,
    Failure.EXHAUSTED: ResourceExhausted,
    Failure.UNAVAILABLE: Unavailable,
    Failure.UNTRUSTED: Untrusted,
    Failure.FAILED: RequestFailed,
    Failure.PROTOCOL: ProtocolError,
    Failure.REPLACED: Replaced,
    Failure.ABORTED: Aborted,
}


def message_from(said: inference_pb2.GenerateResponse, request: RequestId) -> ToClient:
    """Read a message of a stream.

    Raises:
        ProtocolError: it is none, or says what no gateway should.
    """
    match said.WhichOneof("response"):
        case "accepted":
            accepted = said.accepted
            return Accepted(
                RequestId(accepted.request_id),
                accepted.resume_key,
                accepted.prompt_tokens,
                accepted.claim,
            )
        case "chunk":
            chunk = said.chunk
            return Delta(chunk.index, chunk.position, _tokens_from(chunk))
        case "prompt":
            prompt = said.prompt
            return PromptDelta(prompt.position, tuple(map(Token, prompt.logprobs.token_ids)))
        case "notice":
            return _notice_from(said.notice, request)
        case "complete":
            complete = said.complete
            reason = _REASONS.get(complete.finish_reason)
            if reason is None:
                raise ProtocolError(f"finish_reason = {complete.finish_reason!r} is unknown")
            return Finished(
                complete.index,
                reason,
                complete.completion_tokens,
                complete.message,
                complete.error_code,
            )
        case other:
            raise ProtocolError(f"response = {other}: this client does not know it")


def _tokens_from(chunk: inference_pb2.GenerateStreamChunk) -> tuple[Token, ...]:
    if not chunk.precisions:
        return tuple(map(Token, chunk.token_ids))
    try:
        precisions = unpacked(chunk.precisions, len(chunk.token_ids))
    except ValueError as error:
        raise ProtocolError(f"chunk.precisions: {error}") from None
    return tuple(
        Token(token_id, precision=precision)
        for token_id, precision in zip(chunk.token_ids, precisions, strict=True)
    )


def _notice_from(said: inference_pb2.Notice, request: RequestId) -> Notice:
    kind = _KINDS.get(said.kind)
    if kind is None:
        raise ProtocolError(f"notice.kind = {said.kind} is unknown")
    return Notice(
        seq=Seq(request, said.index),
        run=Run(said.run_epoch, said.run_counter),
        number=said.number,
        kind=kind,
        worker=WorkerId(said.worker),
        store=StoreId(said.store) if said.store else None,
        blocks=said.blocks,
        payload_bytes=said.payload_bytes,
        copy_us=said.copy_us,
    )


def notice_event(notice: Notice) -> results.Notice:
    """A notice as the caller sees it."""
    return results.Notice(
        kind=notice.kind.value,
        choice=notice.seq.choice,
        worker=notice.worker,
        store=notice.store or "",
        blocks=notice.blocks,
        payload_bytes=notice.payload_bytes,
        copy_s=notice.copy_us / 1e6,
    )


def logprobs_from(said: inference_pb2.OutputLogProbs) -> tuple[results.TokenLogprob, ...]:
    """Read log-probabilities; a token without one has NaN."""
    values: Sequence[float] = said.token_logprobs
    tops: Sequence[inference_pb2.TopLogProbs] = said.top_logprobs
    texts: Sequence[bytes] = said.token_bytes
    return tuple(
        results.TokenLogprob(
            token_id,
            values[i] if i < len(values) else math.nan,
            _top_from(tops[i]) if i < len(tops) else (),
            texts[i] if i < len(texts) else b"",
        )
        for i, token_id in enumerate(said.token_ids)
    )


def _top_from(said: inference_pb2.TopLogProbs) -> tuple[results.TopLogprob, ...]:
    texts: Sequence[bytes] = said.token_bytes
    return tuple(
        results.TopLogprob(token_id, value, texts[i] if i < len(texts) else b"")
        for i, (token_id, value) in enumerate(zip(said.token_ids, said.values, strict=False))
    )


def swaps_from(said: inference_pb2.SwapStats) -> results.SwapStats:
    """Read what swapping did."""
    return results.SwapStats(
        swaps=said.swaps,
        resumes=said.resumes,
        recomputes=said.recomputes,
        failed=said.failed,
        offload_bytes=said.offload_bytes,
        offload_s=said.offload_us / 1e6,
        reload_s=said.reload_us / 1e6,
        stall_s=said.stall_us / 1e6,
    )


def error_of(
    fail: Fail, request_id: str, error: grpc.aio.AioRpcError | None = None
) -> DeepInferError:
    """The exception for a failed request; ``error`` is the call that said so, if one did."""
    kind = _FAILURES[fail.failure]
    if kind is InvalidRequest:
        return InvalidRequest(
            fail.detail, code=fail.code, request_id=request_id, fields=_fields_of(error)
        )
    return kind(fail.detail, code=fail.code, request_id=request_id)


def _fields_of(error: grpc.aio.AioRpcError | None) -> dict[str, str]:
    """What google.rpc.BadRequest in the status says of each field."""
    if error is None:
        return {}
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # quacks like a Call
    except ValueError:  # the details contradict the status: believe the status alone
        return {}
    found: dict[str, str] = {}
    for detail in () if status is None else status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found |= {violation.field: violation.description for violation in bad.field_violations}
    return found
