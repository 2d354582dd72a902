"""Requests whose answers are known, and what is wrong with a stream of one of them.

The answers are an unpressed run's (``deploy/oracle.py``). On the CPU a token depends on the request
alone, so whatever happens to a request meanwhile, its stream must bring exactly these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.oracle import Question, unpressed

if TYPE_CHECKING:
    from deepinfer.text.tokenizer import Tokenizer

STOP_CHARS = 3
"""Of a stop string: so few that an answer holds one soon, and so many that it is not the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One request and its answer."""

    prompt_ids: tuple[int, ...]
    options: dict[str, Any]
    """For the SDK, seed and all."""
    token_ids: tuple[int, ...]
    text: str
    stop: str = ""
    """A string that its text comes to; "" if the answer has no such whole characters."""
    stopped_tokens: int = 0
    """Tokens of the answer, if it is asked to stop there."""
    stopped_text: str = ""

    @property
    def tokens(self) -> int:
        """Of prompt and answer together."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """From and to, both included, in tokens."""

    prompt: tuple[int, int]
    answer: tuple[int, int]

    @property
    def longest(self) -> int:
        """Tokens that one request may come to."""
        return self.prompt[1] + self.answer[1]


def make_known(
    model: Path, lengths: Lengths, *, count: int, seed: int, kv_cache_dtype: str, block_size: int
) -> list[Known]:
    """Draw ``count`` requests and compute their answers, every other one greedy.

    Raises:
        ConfigError: the model's context is too short for ``lengths``.
        LaunchError: the process that computes has died.
    """
    from deepinfer.text.load import load_tokenizer
    from deepinfer.workers.model.load import load_model

    context = load_model(model).config.max_positions
    if lengths.longest > context:
        raise ConfigError(
            f"model {model.name} has a context of {context} tokens: must be {lengths.longest} or "
            "more"
        )
    tokenizer, draw = load_tokenizer(model), Random(seed)
    plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    questions = [
        Question(
            prompt=tuple(draw.choice(plain) for _ in range(draw.randint(*lengths.prompt))),
            sampling={
                "max_tokens": draw.randint(*lengths.answer),
                "temperature": 0.0 if i % 2 == 0 else 0.8,
                "ignore_eos": True,
            },
            seed=i,
        )
        for i in range(count)
    ]
    answers = unpressed(model, questions, kv_cache_dtype=kv_cache_dtype, block_size=block_size)
    return [
        _with_stop(
            Known(
                prompt_ids=answer.prompt_ids,
                options={**question.sampling, "seed": question.seed},
                token_ids=answer.token_ids,
                text=_text(tokenizer, answer.token_ids)[0],
            ),
            tokenizer,
            draw,
        )
        for question, answer in zip(questions, answers, strict=True)
    ]


@dataclass(slots=True)
class Heard:
    """What one stream has brought so far, held against the right ids."""

    right: Sequence[int]
    tokens: int = 0
    wrong: str = ""
    """The first thing that was; "" as long as nothing is."""

    def hear(self, position: int, token_ids: Sequence[int]) -> None:
        """Take the next tokens, which say that they begin at ``position``."""
        end = self.tokens + len(token_ids)
        if position != self.tokens:
            self._say(f"position {position} after {self.tokens} tokens")
        elif tuple(self.right[self.tokens : end]) != tuple(token_ids):
            right = tuple(self.right[self.tokens : end])
            self._say(f"tokens {tuple(token_ids)} at position {position}: right are {right}")
        self.tokens = end

    def end(self, tokens: int) -> None:
        """The stream says that it is complete: so many tokens it should have brought."""
        if self.tokens != tokens:
            self._say(f"{self.tokens} tokens at the end: {tokens} are right")

    def _say(self, wrong: str) -> None:
        self.wrong = self.wrong or wrong


def _with_stop(known: Known, tokenizer: Tokenizer, draw: Random) -> Known:
    """Choose a stop string in the latter half of the text; the first place where it is counts."""
    half = len(known.text) // 2
    places = [
        i
        for i in range(half, len(known.text) - STOP_CHARS + 1)
        if "\ufffd" not in known.text[i : i + STOP_CHARS]
    ]
    if not places:
        return known
    place = draw.choice(places)
    stop = known.text[place : place + STOP_CHARS]
    text, tokens = _text(tokenizer, known.token_ids, stop)
    return replace(known, stop=stop, stopped_tokens=tokens, stopped_text=text)


def _text(tokenizer: Tokenizer, token_ids: Sequence[int], stop: str = "") -> tuple[str, int]:
    """What a client of a plain prompt sees of these tokens, and how many of them it gets."""
    from deepinfer.text.stream import TextStream

    shown = TextStream(tokenizer, (stop,) if stop else (), continues_text=True)
    text = shown.extend(token_ids) + shown.finish()
    return text, shown.tokens
