"""Between the clients' contract and the core's values.

Decoding raises ``InvalidRequestError``: whatever is wrong is the client's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from deepinfer.gateway.core.events import ChoiceUsage
from deepinfer.gateway.intake import Ask
from deepinfer.kvstore.core.messages import Accepted, Delta, Finished, Notice, PromptDelta
from deepinfer.kvstore.core.precision import Precision, packed, unpacked
from deepinfer.kvstore.core.requests import (
    InvalidRequestError,
    RequestRecord,
    SamplingParams,
    Token,
)
from deepinfer.proto import inference_pb2
from deepinfer.proto.fields import SAMPLING_SCALARS

TokenBytes: TypeAlias = Callable[[int], bytes]
"""What a token id adds to a text, as ``Tokenizer.token_bytes``."""

# ---- clients ask ---------------------------------------------------------------------------


def sampling_from(said: inference_pb2.SamplingParams) -> SamplingParams:
    """Read sampling parameters; what is unset takes its default."""
    given = {name: getattr(said, name) for name in SAMPLING_SCALARS if said.HasField(name)}
    return SamplingParams(
        **given,
        stop=tuple(said.stop),
        stop_token_ids=tuple(said.stop_token_ids),
        logit_bias=tuple(sorted(said.logit_bias.items())),
    )


def ask_from(said: inference_pb2.GenerateRequest) -> Ask:
    """Read a request.

    Raises:
        InvalidRequestError: a parameter is out of range, or a field is not in this contract:
            whoever wrote it wants something that would not be done.
    """
    _refuse_unknown("request", said)
    _refuse_unknown("sampling_params", said.sampling_params)
    which = said.WhichOneof("input")
    return Ask(
        model=said.model,
        text=said.text if which == "text" else None,
        input_ids=tuple(said.tokenized.input_ids) if which == "tokenized" else None,
        messages=(
            tuple((message.role, message.content) for message in said.chat.messages)
            if which == "chat"
            else None
        ),
        sampling=sampling_from(said.sampling_params),
        max_tokens_given=said.sampling_params.HasField("max_tokens"),
        priority=said.priority,
        deadline_ms=said.deadline_ms if said.HasField("deadline_ms") else None,
        exact=said.exact,
        include_events=said.include_events,
    )


def _refuse_unknown(name: str, said: Message) -> None:
    unknown = UnknownFieldSet(said)
    numbers = sorted({unknown[i].field_number for i in range(len(unknown))})
    if numbers:
        known = ", ".join(field.name for field in said.DESCRIPTOR.fields)
        raise InvalidRequestError(
            name, f"with field {', '.join(map(str, numbers))}", f"of known fields: {known}"
        )


def received_from(
    progress: Sequence[inference_pb2.ChoiceProgress], choices: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[Precision, ...], ...]]:
    """Read what a resuming client has, and in which modes it was generated.

    A choice that it does not name has nothing yet.
    """
    received: list[tuple[int, ...]] = [()] * choices
    precisions: list[tuple[Precision, ...]] = [()] * choices
    for entry in progress:
        if entry.index >= choices:
            raise InvalidRequestError("progress.index", entry.index, f"below n = {choices}")
        received[entry.index] = tuple(entry.token_ids)
        try:
            precisions[entry.index] = unpacked(entry.precisions, len(entry.token_ids))
        except ValueError as error:
            said, _, allowed = str(error).partition(": must be ")
            raise InvalidRequestError("progress.precisions", said, allowed) from None
    return tuple(received), tuple(precisions)


# ---- clients are told ----------------------------------------------------------------------


def accepted_to(
    accepted: Accepted, record: RequestRecord, gateway: str
) -> inference_pb2.GenerateResponse:
    """Write the first message of a stream."""
    return inference_pb2.GenerateResponse(
        accepted=inference_pb2.Accepted(
            request_id=accepted.request,
            resume_key=accepted.resume_key,
            prompt_tokens=accepted.prompt_tokens,
            claim=accepted.claim,
            seed=record.seed,
            arrival_ms=record.arrival_ms,
            gateway=gateway,
        )
    )


def delta_to(
    delta: Delta, text: str, logprobs: TokenBytes | None
) -> inference_pb2.GenerateResponse:
    """Write tokens and the text that they made safe to show.

    ``logprobs``: None unless the client asked for log-probabilities.
    """
    return inference_pb2.GenerateResponse(
        chunk=inference_pb2.GenerateStreamChunk(
            token_ids=[token.id for token in delta.tokens],
            index=delta.choice,
            position=delta.index,
            text=text,
            precisions=packed(token.precision for token in delta.tokens),
            output_logprobs=None if logprobs is None else _logprobs_to(delta.tokens, logprobs),
        )
    )


def prompt_to(delta: PromptDelta, token_bytes: TokenBytes) -> inference_pb2.GenerateResponse:
    """Write prompt tokens with their log-probabilities."""
    return inference_pb2.GenerateResponse(
        prompt=inference_pb2.PromptChunk(
            position=delta.position, logprobs=_logprobs_to(delta.tokens, token_bytes)
        )
    )


def notice_to(notice: Notice) -> inference_pb2.GenerateResponse:
    """Write a notice."""
    return inference_pb2.GenerateResponse(
        notice=inference_pb2.Notice(
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
    )


def finished_to(
    finished: Finished,
    usage: ChoiceUsage,
    text: str,
    *,
    stop_string: str | None,
    stop_token: int | None,
) -> inference_pb2.GenerateResponse:
    """Write the end of a choice: the rest of its text, why it ended, what it cost."""
    complete = inference_pb2.GenerateComplete(
        finish_reason=finished.reason.value,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        tokens_fp16=usage.completion_tokens
        - usage.tokens_mixed
        - usage.tokens_fp8
        - usage.tokens_w8a8,
        tokens_mixed=usage.tokens_mixed,
        tokens_fp8=usage.tokens_fp8,
        tokens_w8a8=usage.tokens_w8a8,
        index=finished.choice,
        text=text,
        message=finished.message,
        error_code=finished.code,
        swap_stats=inference_pb2.SwapStats(
            swaps=usage.swaps,
            resumes=usage.resumes,
            recomputes=usage.recomputes,
            failed=usage.swap_failures,
            offload_bytes=usage.offload_bytes,
            offload_us=usage.copy_out_us,
            reload_us=usage.copy_in_us,
            stall_us=usage.stall_ms * 1000,
        ),
    )
    if stop_string is not None:
        complete.matched_stop_str = stop_string
    elif stop_token is not None:
        complete.matched_token_id = stop_token
    if usage.ttft_ms is not None and usage.last_token_ms is not None:
        complete.ttft_us = usage.ttft_ms * 1000
        if usage.completion_tokens > 1:
            spread_us = (usage.last_token_ms - usage.ttft_ms) * 1000
            complete.tpot_us = spread_us // (usage.completion_tokens - 1)
    return inference_pb2.GenerateResponse(complete=complete)


def _logprobs_to(tokens: Sequence[Token], token_bytes: TokenBytes) -> inference_pb2.OutputLogProbs:
    """Write tokens with their log-probabilities; NaN for one that has none."""
    return inference_pb2.OutputLogProbs(
        token_ids=[token.id for token in tokens],
        token_logprobs=[float("nan") if t.logprob is None else t.logprob for t in tokens],
        top_logprobs=[
            inference_pb2.TopLogProbs(
                token_ids=[token_id for token_id, _ in token.top],
                values=[value for _, value in token.top],
                token_bytes=[token_bytes(token_id) for token_id, _ in token.top],
            )
            for token in tokens
        ],
        token_bytes=[token_bytes(token.id) for token in tokens],
    )
