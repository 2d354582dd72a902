"""From what a client asks to the record that is kept: tokenized, validated, complete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.requests import InvalidRequestError, RequestRecord, SamplingParams
from deepinfer.text.errors import ChatError, ChatMessageError
from deepinfer.text.tokenizer import Tokenizer

DEADLINE_MAX_MS = 7 * 24 * 3600 * 1000
PRIORITY_MAX = 1_000_000
MESSAGES_MAX = 4_096
LOGPROB_VALUES_MAX = 1 << 19
"""Log-probabilities that one request may come to, prompt and all choices: about 100 bytes each,
kept while the request is."""
SHOWN_CHARS_MAX = 200
"""Of a client's or a template's own words in an error: a status has to stay small."""


class UnknownModelError(LookupError):
    """The request names a model that is not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The served model, as far as a gateway needs to know it."""

    model: str
    tokenizer: Tokenizer
    max_context_tokens: int
    vocab_size: int
    """Rows of the output layer: ids below it can be computed and asked for."""
    kv_cache_dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def has_chat_template(self) -> bool:
        """Whether it can be sent messages."""
        return self.tokenizer.chat is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A client's request in its own words; exactly one of the three inputs is given."""

    model: str
    text: str | None = None
    input_ids: tuple[int, ...] | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    """(role, content) pairs."""
    sampling: SamplingParams
    max_tokens_given: bool
    """Otherwise ``sampling.max_tokens`` is the default and gives way to the model's context."""
    priority: int
    deadline_ms: int | None
    """From arrival."""
    exact: bool
    include_events: bool

    @property
    def continues_text(self) -> bool:
        """Whether the output goes on with the prompt's text; an answer in a chat begins afresh."""
        return self.messages is None

    @property
    def input_chars(self) -> int:
        """How much text there is to tokenize."""
        if self.messages is not None:
            return sum(len(content) for _, content in self.messages)
        return len(self.text or "")


def build_record(
    ask: Ask,
    card: ModelCard,
    request: RequestId,
    *,
    arrival_ms: int,
    default_seed: int,
    lifetime_ms: int,
) -> RequestRecord:
    """Tokenize and check a request; it has ``lifetime_ms`` to end, or less if it says so.

    Tokenizing a long text takes a while and touches nothing else: safe off the event loop.

    Raises:
        InvalidRequestError: names the field, its value and what is legal.
        UnknownModelError: another model is served.
    """
    if ask.model not in ("", card.model):
        asked = ask.model[:SHOWN_CHARS_MAX]
        raise UnknownModelError(f"model {asked!r} is not served; {card.model!r} is")
    sampling, vocab = ask.sampling, card.vocab_size
    _check_limits(ask, vocab)
    prompt = _prompt_ids(ask, card, arrival_ms)
    room = card.max_context_tokens - len(prompt)
    if room < 1:
        raise InvalidRequestError(
            "prompt", f"{len(prompt)} tokens", f"at most {card.max_context_tokens - 1} tokens: "
            f"the model's context is {card.max_context_tokens} and one is to be generated"
        )  # fmt: skip
    if not ask.max_tokens_given:
        sampling = replace(sampling, max_tokens=max(sampling.min_tokens, min(128, room)))
    if sampling.max_tokens > room:
        raise InvalidRequestError(
            "sampling_params.max_tokens", sampling.max_tokens, f"at most {room}: the prompt has "
            f"{len(prompt)} tokens and the model's context is {card.max_context_tokens}"
        )  # fmt: skip
    _check_logprobs(sampling, len(prompt))
    stops = set(sampling.stop_token_ids) | set(() if sampling.ignore_eos else card.eos_token_ids)
    return RequestRecord(
        request=request,
        prompt_ids=prompt,
        sampling=sampling,
        arrival_ms=arrival_ms,
        seed=default_seed if sampling.seed is None else sampling.seed,
        priority=ask.priority,
        deadline_ms=arrival_ms + min(lifetime_ms, ask.deadline_ms or lifetime_ms),
        exact=ask.exact,
        stop_token_ids=tuple(sorted(stops)),
    )


def _check_limits(ask: Ask, vocab: int) -> None:
    if ask.deadline_ms is not None and not 1 <= ask.deadline_ms <= DEADLINE_MAX_MS:
        raise InvalidRequestError("deadline_ms", ask.deadline_ms, f"from 1 to {DEADLINE_MAX_MS}")
    if abs(ask.priority) > PRIORITY_MAX:
        allowed = f"from {-PRIORITY_MAX} to {PRIORITY_MAX}"
        raise InvalidRequestError("priority", ask.priority, allowed)
    if ask.messages is not None and len(ask.messages) > MESSAGES_MAX:
        allowed = f"at most {MESSAGES_MAX} messages"
        raise InvalidRequestError("chat.messages", f"{len(ask.messages)} messages", allowed)
    check_ids("sampling_params.stop_token_ids", ask.sampling.stop_token_ids, vocab)
    check_ids("tokenized.input_ids", ask.input_ids or (), vocab)
    for token_id, _ in ask.sampling.logit_bias:
        if token_id >= vocab:
            allowed = f"of ids from 0 to {vocab - 1}"
            raise InvalidRequestError("sampling_params.logit_bias", token_id, allowed)


def _check_logprobs(sampling: SamplingParams, prompt_tokens: int) -> None:
    """Refuse what would fill the gateway's memory."""
    values = 0
    if sampling.logprobs is not None:
        values += sampling.n * sampling.max_tokens * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        values += prompt_tokens * (1 + sampling.prompt_logprobs)
    if values > LOGPROB_VALUES_MAX:
        raise InvalidRequestError(
            "sampling_params.logprobs"
            if sampling.logprobs is not None
            else "sampling_params.prompt_logprobs",
            f"{values} log-probabilities in all",
            f"fewer: {LOGPROB_VALUES_MAX} at most, of the prompt and of n * max_tokens tokens",
        )


def check_ids(name: str, ids: tuple[int, ...], vocab: int) -> None:
    """Raise InvalidRequestError for an id that the model does not have."""
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab:
            raise InvalidRequestError(f"{name}[{position}]", token_id, f"from 0 to {vocab - 1}")


def _prompt_ids(ask: Ask, card: ModelCard, arrival_ms: int) -> tuple[int, ...]:
    if ask.input_ids is not None:
        name, ids = "tokenized.input_ids", list(ask.input_ids)
    elif ask.text is not None:
        name, ids = "text", card.tokenizer.encode(ask.text)
    elif ask.messages is not None:
        name = "chat.messages"
        # A template that shows the date must show the same one when the request is resumed, after
        # midnight and at a gateway in another time zone too: it is part of the prompt.
        arrival = datetime.fromtimestamp(arrival_ms / 1000, UTC)
        try:
            ids = card.tokenizer.encode_chat(
                [{"role": role, "content": content} for role, content in ask.messages],
                now=arrival,
            )
        except ChatMessageError as error:
            raise InvalidRequestError(f"chat.{error.name}", error.value, error.allowed) from error
        except ChatError as error:
            refusal = f"ones that the model takes: {str(error)[:SHOWN_CHARS_MAX]}"
            raise InvalidRequestError(name, f"{len(ask.messages)} messages", refusal) from error
    else:
        raise InvalidRequestError("input", None, "one of tokenized, text and chat")
    if not ids:
        raise InvalidRequestError(name, ids, "at least one token")
    return tuple(ids)
