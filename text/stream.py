"""One sequence's tokens to the text that a client may see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepinfer.text.detokenizer import Detokenizer, Vocabulary
from deepinfer.text.stop import StopMatcher


class TextStream:
    """Detokenizing and stop strings together, token by token.

    What ``push`` has returned after n tokens, joined, depends on those n tokens only. To resume,
    make a new object with the same arguments, ``extend`` it by the tokens already sent, ignore
    what that returns, and go on.

    A stop string is looked for in the text that is shown, so a skipped special token neither
    matches nor interrupts one.
    """

    __slots__ = ("_matcher", "_min_tokens", "_text", "finished", "tokens")

    def __init__(
        self,
        tokenizer: Vocabulary,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        *,
        min_tokens: int = 0,
        continues_text: bool = False,
    ) -> None:
        """Start an empty text.

        ``min_tokens``: stop strings that end within the first so many tokens are passed over.
        ``continues_text``: see :class:`Detokenizer`; True for a plain prompt, False for a chat.
        """
        self._text = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, continues_text=continues_text
        )
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens taken so far; once stopped, the number of tokens that complete the stop string."""
        self.finished = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed: the sequence ends with ``tokens`` tokens."""
        return self._matcher.match is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was completed, if any."""
        return self._matcher.match

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is newly safe to show.

        After a stop string was completed, further tokens are ignored. Raises RuntimeError after
        ``finish`` of a text that did not stop: its tail has been given away.
        """
        if self.stopped:
            return ""
        if self.finished:
            raise RuntimeError("push after finish: the end of this text was already returned")
        self.tokens += 1
        return self._matcher.push(self._text.push(token_id), armed=self.tokens > self._min_tokens)

    def extend(self, token_ids: Iterable[int]) -> str:
        """Push several tokens; return their text joined."""
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """End the text; return what was held back, with U+FFFD for a character cut in two.

        Empty after a stop string, and when called again.
        """
        if self.stopped or self.finished:
            self.finished = True
            return ""
        self.finished = True
        return self._matcher.finish() + self._text.finish()
