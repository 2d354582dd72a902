"""What a caller gets: the events of a stream, and the completion that they add up to.

Times are in seconds, measured here with ``time.perf_counter`` unless a name says ``gateway``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class TopLogprob(NamedTuple):
    """One of the likeliest tokens of a position, and its natural-log probability."""

    token_id: int
    logprob: float
    token_bytes: bytes = b""
    """What the token adds to a text. UTF-8, but a token may hold a part of a character alone; a
    special token is as it is written out, and an id that has no token adds nothing."""

    @property
    def text(self) -> str:
        """The bytes as text, with U+FFFD for what is no whole character by itself."""
        return self.token_bytes.decode(errors="replace")


class TokenLogprob(NamedTuple):
    """A token's natural-log probability, and those of the likeliest ones, best first."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...]
    token_bytes: bytes = b""
    """As ``TopLogprob.token_bytes``."""

    @property
    def text(self) -> str:
        """The bytes as text, with U+FFFD for what is no whole character by itself."""
        return self.token_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How many tokens a choice, or a request, has taken."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt's: found in a worker's prefix cache instead of computed."""
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStats:
    """What swapping did to one choice, as its gateway saw it."""

    swaps: int = 0
    resumes: int = 0
    recomputes: int = 0
    failed: int = 0
    offload_bytes: int = 0
    offload_s: float = 0.0
    """Copies, hashing and the store's calls on the way out."""
    reload_s: float = 0.0
    """And on the way back."""
    stall_s: float = 0.0
    """Last token before a swap to first token after it, summed; holds waiting and copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """When the tokens of one choice came."""

    ttft_s: float | None
    """From sending the request to its first token; None without tokens."""
    intervals_s: tuple[float, ...]
    """Between each token and the one before it; tokens of one message have 0 between them."""
    total_s: float
    """From sending the request to the end of the choice."""
    reconnects: int
    """How often the stream was lost and taken up again."""
    gateway_ttft_s: float | None
    """From the request's arrival at the gateway; None if another gateway took the request over."""
    gateway_tpot_s: float | None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        return sum(self.intervals_s) / len(self.intervals_s) if self.intervals_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """"stop", "length", "abort", "deadline" or "error"."""
    message: str
    """Why, for "deadline" and "error"."""
    matched_stop: str | int | None
    """The stop string or stop token that ended it."""
    logprobs: tuple[TokenLogprob, ...]
    """One for each token if they were asked for; otherwise empty."""
    usage: Usage
    swaps: SwapStats
    timings: Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request. The properties are those of its first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """If they were asked for, one for each prompt token: None for the first, which follows none."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason

    @property
    def swaps(self) -> SwapStats:
        return self.choices[0].swaps

    @property
    def timings(self) -> Timings:
        return self.choices[0].timings

    @property
    def usage(self) -> Usage:
        """The prompt's tokens once, and those of all choices."""
        first = self.choices[0].usage
        return Usage(
            prompt_tokens=first.prompt_tokens,
            cached_tokens=first.cached_tokens,
            completion_tokens=sum(choice.usage.completion_tokens for choice in self.choices),
        )

    @property
    def prompt_tokens(self) -> int:
        return self.usage.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices."""
        return self.usage.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request will finish. With its resume key another process could go on with it."""

    request_id: str
    resume_key: str
    prompt_tokens: int
    gateway: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDelta:
    """Log-probabilities of prompt tokens, each exactly once, in front of the first ``Delta``."""

    position: int
    """Of the first of them in the prompt; position 0 has none."""
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one choice, each exactly once."""

    choice: int
    position: int
    """Of the first of them among the choice's generated tokens."""
    token_ids: tuple[int, ...]
    text: str
    """The text that has become safe to show; it may lag behind the tokens."""
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that happened to a choice, for those who asked with ``include_events``."""

    kind: str
    """"placed", "swapped_out", "resumed", "swap_failed" or "recomputed"."""
    choice: int
    worker: str
    store: str
    blocks: int
    payload_bytes: int
    copy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrying:
    """No endpoint serves the request and the SDK goes on trying, for those who asked with
    ``include_events``; once until one serves it again."""

    accepted: bool
    """Whether the request had been accepted before."""
    patience_s: float
    """So long after the last sign of life it fails with ``Unavailable``."""
    detail: str
    """How the last attempt ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of one choice."""

    choice: Choice
    text: str
    """The rest of the text, behind the last Delta's."""

    @property
    def usage(self) -> Usage:
        """How many tokens the choice has taken."""
        return self.choice.usage


Event: TypeAlias = Accepted | PromptDelta | Delta | Notice | Retrying | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that is served."""

    id: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_cache_dtype: str
    has_chat_template: bool
