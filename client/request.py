"""From a caller's arguments to the request that is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from google.protobuf.descriptor import FieldDescriptor

from deepinfer.client.errors import InvalidRequest
from deepinfer.proto import inference_pb2
from deepinfer.proto.fields import SAMPLING_SCALARS


class Options(TypedDict, total=False):
    """What a request may say besides its prompt; what is left out takes the server's default.

    ``deadline_s`` counts from the request's arrival; then it ends with ``DeadlineExceeded``.
    ``exact`` keeps a nested model's weights at FP16 in every step of the request, and KV that other
    steps have left out of it; ``Completion.precision_shares`` tells what other requests were given.
    ``priority`` reaches the controller, which goes by arrival and does not look at it so far.
    ``logprobs`` and ``prompt_logprobs`` say how many alternatives come beside each token's own
    log-probability. ``include_events`` adds ``Notice`` and ``Retrying`` to a stream's events.
    ``logit_bias`` maps token ids to what is added to their logits, -100 to 100.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    ignore_eos: bool
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float]
    seed: int | None
    model: str
    priority: int
    deadline_s: float | None
    exact: bool
    include_events: bool


Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

_UINT32 = "whole numbers from 0 to 2**32 - 1"
_KINDS = {
    FieldDescriptor.TYPE_STRING: "Unicode text (a lone surrogate is none)",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_INT32: "a whole number from -2**31 to 2**31 - 1",
    FieldDescriptor.TYPE_INT64: "a whole number from -2**63 to 2**63 - 1",
    FieldDescriptor.TYPE_UINT32: "a whole number from 0 to 2**32 - 1",
}
_PLAIN = frozenset({"model", "priority", "exact", "include_events"})


def build_request(prompt: Prompt, options: Options) -> inference_pb2.GenerateRequest:
    """Write the request.

    Raises:
        InvalidRequest: a value does not have the type or range of its field, or the prompt is
            none of text, token ids and messages.
        TypeError: an unknown option.
    """
    request = inference_pb2.GenerateRequest(sampling_params=inference_pb2.SamplingParams())
    _set_prompt(request, prompt)
    for name, value in options.items():
        if value is None:
            continue
        if name in SAMPLING_SCALARS:
            _set(request.sampling_params, name, value)
        elif name in _PLAIN:
            _set(request, name, value)
        elif name == "stop":
            stops = [value] if isinstance(value, str) else value
            _extend(request.sampling_params.stop, "stop", stops)
        elif name == "stop_token_ids":
            _extend(request.sampling_params.stop_token_ids, name, value)
        elif name == "logit_bias":
            _bias(request.sampling_params.logit_bias, value)
        elif name == "deadline_s":
            if not isinstance(value, int | float) or not 0.0 < value < float("inf"):
                raise _invalid("deadline_s", value, "a number of seconds above 0")
            _set(request, "deadline_ms", max(1, round(value * 1000)))
        else:
            allowed = ", ".join(sorted(Options.__annotations__))
            raise TypeError(f"unknown option {name!r}; known are {allowed}")
    return request


def check_messages(messages: Any) -> None:
    """Raises InvalidRequest for what is no list of messages: it would be served as a text."""
    if isinstance(messages, str) or not all(isinstance(m, Mapping) for m in messages):
        raise _invalid("messages", messages, "a list of messages, each of role and content")


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, str):
        _set(request, "text", prompt)
        return
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        allowed = "text, a list of token ids, or a list of messages, and not an empty list"
        raise _invalid("prompt", prompt, allowed)
    if all(isinstance(message, Mapping) for message in prompt):
        for position, message in enumerate(prompt):
            if set(message) != {"role", "content"}:
                raise _invalid(f"messages[{position}]", dict(message), "of role and content")
            added = request.chat.messages.add()
            _set(added, "role", message["role"], at=f"messages[{position}].")
            _set(added, "content", message["content"], at=f"messages[{position}].")
        return
    request.tokenized.SetInParent()
    _extend(request.tokenized.input_ids, "prompt", prompt)


def _set(message: Any, name: str, value: object, *, at: str = "") -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        kind = message.DESCRIPTOR.fields_by_name[name].type
        raise _invalid(f"{at}{name}", value, _KINDS[kind]) from error


def _extend(repeated: Any, name: str, values: Any) -> None:
    allowed = "a list of strings of Unicode text" if name == "stop" else f"a list of {_UINT32}"
    try:
        values = list(values)
    except TypeError as error:
        raise _invalid(name, values, allowed) from error
    try:
        repeated.extend(values)
    except (TypeError, ValueError):
        for position, value in enumerate(values):
            try:
                repeated.append(value)
            except (TypeError, ValueError) as error:
                raise _invalid(f"{name}[{position}]", value, f"one of {allowed}") from error
        raise


def _bias(target: Any, bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise _invalid("logit_bias", bias, "a mapping of token ids to numbers")
    for token_id, value in bias.items():
        try:
            target[token_id] = value
        except (TypeError, ValueError) as error:
            shown = {token_id: value}
            raise _invalid("logit_bias", shown, "of token ids to numbers") from error


def _invalid(name: str, value: object, allowed: str) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = f"{name} = {shown}: must be {allowed}"
    return InvalidRequest(message, fields={name: message})
