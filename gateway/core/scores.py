"""The log-probabilities of a prompt: kept once, whoever computed which of them."""

from __future__ import annotations

from enum import Enum

from deepinfer.kvstore.core.messages import Scores
from deepinfer.kvstore.core.requests import Token


class Taken(Enum):
    """What an exactly-once filter did with a ``Tokens`` or ``Scores`` message.

    The values name the counters of tokens that were not added.
    """

    ACCEPTED = "tokens_repeated_total"
    AFTER_GAP = "tokens_after_gap_dropped_total"
    CONTRADICTING = "tokens_contradicting_dropped_total"
    ENDED = "tokens_ended_dropped_total"


class PromptScores:
    """A prompt's tokens from the second on with their log-probabilities, as far as they are here.

    ``tokens[i]`` is the prompt's token at position ``i + 1``; ``due`` is how many there will be.
    They arrive in order, and all of them before the choice's first token.
    """

    __slots__ = ("due", "tokens")

    def __init__(self, due: int) -> None:
        self.due = due
        self.tokens: list[Token] = []

    @property
    def complete(self) -> bool:
        """Whether none is missing."""
        return len(self.tokens) == self.due

    def take(self, said: Scores, prompt_ids: tuple[int, ...]) -> Taken:
        """Add those that are not here yet; the first word on each counts. All or nothing."""
        start, end = said.position - 1, said.position - 1 + len(said.tokens)
        if start > len(self.tokens):
            return Taken.AFTER_GAP
        if start < 0 or end > self.due:
            return Taken.CONTRADICTING
        if tuple(token.id for token in said.tokens) != prompt_ids[start + 1 : end + 1]:
            return Taken.CONTRADICTING
        self.tokens += said.tokens[len(self.tokens) - start :]
        return Taken.ACCEPTED

    def hold(self, count: int, prompt_ids: tuple[int, ...]) -> None:
        """Know that a client has the first ``count``, without their log-probabilities."""
        self.tokens = [Token(token_id) for token_id in prompt_ids[1 : count + 1]]

    def can_follow(self, count: int) -> bool:
        """Whether a client that has the first ``count`` can be given the others from here."""
        held = self.tokens
        return count <= len(held) and all(token.logprob is not None for token in held[count:])
