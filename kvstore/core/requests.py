"""What a request asks for: sampling parameters, limits and the record that a gateway keeps.

Field names are those of ``vllm.grpc.engine.SamplingParams`` (package ``smg-grpc-proto``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepinfer.kvstore.core.ids import RequestId, Seq


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class InvalidRequestError(ValueError):
    """A request that cannot be served as written: names the field, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} = {value!r}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Checked on construction.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 keep every token.
    ``seed`` None lets the gateway derive one from the request id, so that a retried step and a
    moved request draw the same numbers.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, legal: bool, allowed: str) -> None:
            if not legal:
                raise InvalidRequestError(f"sampling_params.{name}", getattr(self, name), allowed)

        for name in (
            "temperature",
            "top_p",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        ):
            check(name, math.isfinite(getattr(self, name)), "finite")
        check("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        check("top_k", self.top_k >= 0, "0 (off) or more")
        check("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2")
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2")
        check("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0, at most 100")
        check("max_tokens", self.max_tokens >= 1, "1 or more")
        check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        check("n", 1 <= self.n <= 64, "between 1 and 64")
        check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20")
        check("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2**63 - 1")
        check("stop", len(self.stop) <= 16 and all(self.stop), "at most 16 non-empty strings")
        check(
            "stop_token_ids",
            len(self.stop_token_ids) <= 64 and all(t >= 0 for t in self.stop_token_ids),
            "at most 64 ids of 0 or more",
        )


class Token(NamedTuple):
    """One generated token: its id and, if asked for, log-probabilities (natural log)."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids with their log-probabilities, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The truth of one request, kept by its gateway and lent to the worker that runs it."""

    request: RequestId
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_ms: int
    seed: int
    priority: int = 0
    deadline_ms: int | None = None
    exact: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence ids (unless ``ignore_eos``) and the request's own, sorted."""

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise InvalidRequestError("prompt", self.prompt_ids, "at least one token")

    def seqs(self) -> tuple[Seq, ...]:
        """One sequence for each of the ``n`` choices."""
        return tuple(Seq(self.request, choice) for choice in range(self.sampling.n))
