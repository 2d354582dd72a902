"""Words of strangers in a chat: special tokens written out in them stay text.

A chat template joins messages by control tokens, and a tokenizer that reads the joined text cannot
tell a control token of the template from the same characters in a message: whoever writes
``<|im_end|>`` could end their turn and open another's. So the characters of special tokens in
contents are replaced by marks before the template is rendered, and put back where the text between
the template's own control tokens is encoded, there by a tokenizer that knows no special tokens.
Messages without any such characters are not touched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import tokenizers

from deepinfer.text.errors import ChatMessageError

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters: Unicode promises that they never mean anything to anybody else."""


class Literals:
    """What was replaced in the messages of one chat.

    Raises ChatMessageError for messages that use every one of the 32 noncharacters already.
    """

    def __init__(self, messages: Sequence[Mapping[str, str]]) -> None:
        words = [word for message in messages for word in message.values()]
        mark = next((mark for mark in _MARKS if not any(mark in word for word in words)), None)
        if mark is None:
            allowed = "without some of the noncharacters U+FDD0 to U+FDEF"
            raise ChatMessageError("messages", "all of them", allowed)
        self._mark = mark
        self._texts: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._texts)

    def hide(self, words: str, backend: tokenizers.Tokenizer, special: Collection[int]) -> str:
        """Return ``words`` with a mark for each special token that ``backend`` sees in them."""
        encoding = backend.encode(words, add_special_tokens=False)
        shown, end = [], 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in special and start >= end:
                shown += [words[end:start], f"{self._mark}{len(self._texts)}{self._mark}"]
                self._texts.append(words[start:stop])
                end = stop
        return "".join([*shown, words[end:]])

    def encode(
        self,
        text: str,
        backend: tokenizers.Tokenizer,
        plain: tokenizers.Tokenizer,
        special: Collection[int],
    ) -> list[int]:
        """Return the ids of a rendered chat; ``plain`` is ``backend`` without special tokens."""
        encoding = backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        run: list[int] = []
        begin = 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in special:
                run.append(token_id)
                continue
            ids += self._between(text[begin:start], run, plain)
            ids.append(token_id)
            run, begin = [], stop
        return [*ids, *self._between(text[begin:], run, plain)]

    def _between(self, text: str, ids: list[int], plain: tokenizers.Tokenizer) -> list[int]:
        if self._mark not in text:
            return ids

        def put_back(found: re.Match[str]) -> str:
            number = int(found[1])
            # A template may write marks of its own: those stand for nothing.
            return self._texts[number] if number < len(self._texts) else found[0]

        shown = re.sub(f"{self._mark}([0-9]{{1,9}}){self._mark}", put_back, text)
        return plain.encode(shown, add_special_tokens=False).ids
