"""What is replayed of a trace: windows of its arrivals at a rate, and prompts of its lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from deepinfer.deploy.bench.trace_files import HASH_TOKENS, Arrival
from deepinfer.deploy.config import ConfigError

MARK_TOKENS = 8
"""Tokens at the beginning of a prompt, or of a shared block, that tell it from all others."""
LAPS_MAX = 1024
ALPHABET_MIN = 16
"""Different tokens that a text must have for that."""


class Ask(NamedTuple):
    """One request as it is replayed."""

    at_us: int
    """Since the window's beginning."""
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How a trace's lengths become those that a model can hold: all by the same factor."""

    factor: float
    """Of every length; at most 1."""

    @classmethod
    def for_context(cls, arrivals: Sequence[Arrival], max_context: int) -> Shape:
        """The factor by which the longest prompt and answer fit ``max_context`` tokens."""
        longest = max(arrival.input_tokens + arrival.output_tokens for arrival in arrivals)
        # Each of the two lengths may be rounded up to a whole token.
        return cls(min(1.0, (max_context - 2) / longest))

    def tokens(self, tokens: int) -> int:
        """A length, scaled; at least 1."""
        return max(1, round(self.factor * tokens))


class Words:
    """Makes prompts of a text's tokens.

    A prompt is the text from some place on, repeated as needed, behind a mark that no other prompt
    begins with: what two prompts have in common is what the trace says, and nothing else.

    Raises:
        ConfigError: the text has fewer than ``ALPHABET_MIN`` different tokens.
    """

    def __init__(self, text_ids: Sequence[int]) -> None:
        self._alphabet = sorted(set(text_ids))
        if len(self._alphabet) < ALPHABET_MIN:
            raise ConfigError(
                f"the prompts' text has {len(self._alphabet)} different tokens: must have at least "
                f"{ALPHABET_MIN}"
            )
        self._text = tuple(text_ids)

    def prompt(self, arrival: Arrival, number: int, lap: int, shape: Shape) -> tuple[int, ...]:
        """The prompt of the trace's request ``number``; prompts of different laps share nothing."""
        length = shape.tokens(arrival.input_tokens)
        if not arrival.hash_ids:
            return self._piece((number, lap, 0), length)
        block = max(1, round(shape.factor * HASH_TOKENS))
        ids: list[int] = []
        for hash_id in arrival.hash_ids:
            ids += self._piece((hash_id, lap, 1), min(block, length - len(ids)))
            if len(ids) == length:
                break
        else:  # blocks are rounded down more than the whole
            ids += self._piece((number, lap, 2), length - len(ids))
        return tuple(ids)

    def _piece(self, name: tuple[int, int, int], length: int) -> tuple[int, ...]:
        number, lap, kind = name
        code = (number * 3 + kind) * LAPS_MAX + lap % LAPS_MAX
        base, mark = len(self._alphabet), []
        for _ in range(MARK_TOKENS):
            code, digit = divmod(code, base)
            mark.append(self._alphabet[digit])
        start = (37 * number) % len(self._text)
        wanted = max(0, length - MARK_TOKENS)
        turned = self._text[start:] + self._text[:start]
        body = turned * (wanted // len(turned)) + turned[: wanted % len(turned)]
        return (*mark, *body)[:length]


def window(
    arrivals: Sequence[Arrival],
    words: Words,
    shape: Shape,
    *,
    count: int,
    rate: float,
    seed: int,
    lap: int = 0,
) -> tuple[Ask, ...]:
    """``count`` requests in a row of the trace from a place that ``seed`` draws, at ``rate``.

    Times between them are the trace's, multiplied so that their mean is ``1 / rate`` seconds. A
    trace that ends before begins again, with other prompts, and so does one of another ``lap``.
    """
    start = Random(seed).randrange(len(arrivals))
    span_ms = arrivals[-1].at_ms
    lap_ms = span_ms + span_ms / max(1, len(arrivals) - 1)
    times_ms, asks = [], []
    for i in range(count):
        around, number = divmod(start + i, len(arrivals))
        times_ms.append(arrivals[number].at_ms + around * lap_ms)
    lasted_ms = times_ms[-1] - times_ms[0]
    wanted_us = 1e6 * (count - 1) / rate
    for i, at_ms in enumerate(times_ms):
        around, number = divmod(start + i, len(arrivals))
        share = (at_ms - times_ms[0]) / lasted_ms if lasted_ms else i / max(1, count - 1)
        asks.append(
            Ask(
                round(share * wanted_us),
                words.prompt(arrivals[number], number, lap + around, shape),
                shape.tokens(arrivals[number].output_tokens),
            )
        )
    return tuple(asks)


def one_by_one(
    arrivals: Sequence[Arrival], words: Words, shape: Shape, *, count: int, lap: int
) -> tuple[Ask, ...]:
    """``count`` requests at equal distances in the trace, each to be served alone."""
    count = min(count, len(arrivals))
    numbers = [i * len(arrivals) // count for i in range(count)]
    return tuple(
        Ask(
            0,
            words.prompt(arrivals[number], number, lap, shape),
            shape.tokens(arrivals[number].output_tokens),
        )
        for number in numbers
    )
