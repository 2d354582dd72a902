"""What a request asks for: sampling parameters, limits and the record that a gateway keeps.

Field names are those of ``vllm.grpc.engine.SamplingParams`` (package ``smg-grpc-proto``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepinfer.kvstore.core.ids import RequestId, Seq
from deepinfer.kvstore.core.precision import Precision

CHOICES_MAX = 64
LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 100.0
LOGIT_BIASES_MAX = 1024
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
STOP_IDS_MAX = 64
_SHOWN_CHARS_MAX = 80


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class InvalidRequestError(ValueError):
    """A request that cannot be served as written: names the field, its value and what is legal.

    A long value is shown by its beginning: the words travel in a status, which is small.
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN_CHARS_MAX:
            shown = shown[: _SHOWN_CHARS_MAX - 3] + "..."
        super().__init__(f"{name} = {shown}: must be {allowed}")
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
    """Alternatives to report beside each generated token; None: no log-probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The first choice computes them."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit) pairs with rising ids."""
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
        allowed = f"between 0 and max_tokens, which is {self.max_tokens}"
        check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, allowed)
        check("n", 1 <= self.n <= CHOICES_MAX, f"between 1 and {CHOICES_MAX}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            allowed = f"between 0 and {LOGPROBS_MAX}"
            check(name, count is None or 0 <= count <= LOGPROBS_MAX, allowed)
        check("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2**63 - 1")
        self._check_stops(check)
        self._check_biases(check)

    def _check_stops(self, check: Callable[[str, bool, str], None]) -> None:
        legal = len(self.stop) <= STOPS_MAX and all(self.stop)
        check("stop", legal, f"at most {STOPS_MAX} non-empty strings")
        for position, stop in enumerate(self.stop):
            if len(stop) > STOP_CHARS_MAX:
                raise InvalidRequestError(
                    f"sampling_params.stop[{position}]",
                    f"{len(stop)} characters",
                    f"at most {STOP_CHARS_MAX} characters",
                )
        ids = self.stop_token_ids
        legal = len(ids) <= STOP_IDS_MAX and all(token_id >= 0 for token_id in ids)
        check("stop_token_ids", legal, f"at most {STOP_IDS_MAX} ids of 0 or more")

    def _check_biases(self, check: Callable[[str, bool, str], None]) -> None:
        ids = [token_id for token_id, _ in self.logit_bias]
        legal = len(ids) <= LOGIT_BIASES_MAX and all(token_id >= 0 for token_id in ids)
        allowed = f"at most {LOGIT_BIASES_MAX} ids of 0 or more, each once and in rising order"
        check("logit_bias", legal and ids == sorted(set(ids)), allowed)
        for token_id, bias in self.logit_bias:
            if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:  # NaN is not either
                raise InvalidRequestError(
                    f"sampling_params.logit_bias[{token_id}]",
                    bias,
                    f"between -{LOGIT_BIAS_MAX:g} and {LOGIT_BIAS_MAX:g}",
                )


class Token(NamedTuple):
    """One token: its id and, if asked for, log-probabilities (natural log)."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids with their log-probabilities, best first."""
    precision: Precision = Precision.FP16
    """The mode of the step that generated it."""


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

    def scores_due(self, choice: int) -> int:
        """Prompt tokens whose log-probabilities this choice has to bring.

        All but the first, which follows nothing; and the first choice brings them for all.
        """
        wanted = self.sampling.prompt_logprobs is not None and choice == 0
        return len(self.prompt_ids) - 1 if wanted else 0
