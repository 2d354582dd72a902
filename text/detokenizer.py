"""Tokens to text, one token at a time."""

from __future__ import annotations

import codecs
from typing import Protocol

from deepinfer.text.token_bytes import TokenForm


class Vocabulary(Protocol):
    """The part of a tokenizer that turning tokens into text needs."""

    form: TokenForm
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        ...


class Detokenizer:
    """The text of one growing sequence, emitted as soon as its characters are complete.

    The text emitted for the first n tokens is a function of those tokens alone, and only ever
    grows: replaying the tokens into a new object brings it to the same state. A character cut
    into several tokens is held until it is whole. Ill-formed bytes become U+FFFD, one for each
    maximal ill-formed part (Unicode 15, section 3.9, the practice of the WHATWG decoder); the
    ``tokenizers`` package agrees for byte-level vocabularies, while for SentencePiece's byte
    tokens it rewrites a whole run of them, text already seen included, which no stream can do.
    """

    __slots__ = ("_skip_special", "_spaces_left", "_utf8", "_vocabulary")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> None:
        """Start an empty text.

        ``continues_text``: the tokens go on from a text before them (a completion of a plain
        prompt), so a SentencePiece vocabulary's leading space is a real one and is kept. Without
        it the text stands alone, and that space, which encoding would add again, is dropped.
        """
        self._vocabulary = vocabulary
        self._skip_special = skip_special_tokens
        self._spaces_left = 0 if continues_text else vocabulary.form.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take the next token and return the characters that are complete with it, if any."""
        if self._skip_special and token_id in self._vocabulary.special_ids:
            return ""
        return self._strip(self._utf8.decode(self._vocabulary.token_bytes(token_id)))

    def finish(self) -> str:
        """Return U+FFFD if the sequence ends inside a character, else the empty string."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._spaces_left and text:
            if text[0] != " ":
                self._spaces_left = 0
                break
            text = text[1:]
            self._spaces_left -= 1
        return text
