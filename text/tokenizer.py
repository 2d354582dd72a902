"""Text to token ids and back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import tokenizers
from tokenizers.processors import TemplateProcessing

from deepinfer.text.chat import ChatTemplate, check_messages
from deepinfer.text.detokenizer import Detokenizer
from deepinfer.text.errors import ChatTemplateError, TokenizerError
from deepinfer.text.literal import Literals
from deepinfer.text.token_bytes import TokenForm

_WORDS = frozenset({"content", "name"})
"""Fields of a message that hold words of whoever wrote it."""


class Tokenizer:
    """A model's vocabulary: encodes text, says what each id means, and knows the special ids.

    Immutable after construction and safe to share between threads. ``load_tokenizer`` makes one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        form: TokenForm,
        special_ids: Iterable[int],
        eos_ids: Iterable[int],
        bos_id: int | None,
        prefix_ids: Iterable[int],
        suffix_ids: Iterable[int] = (),
        chat: ChatTemplate | None,
    ) -> None:
        """Wrap ``backend``; every id given must be in its vocabulary, else TokenizerError."""
        self._backend = backend
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._plain_lock = threading.Lock()
        self._bytes: dict[int, bytes] = {}
        self.form = form
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the highest id. A model's logits may be wider (padded), never narrower."""
        self.special_ids = frozenset(special_ids)
        """Ids that are control, not text: left out of text by ``skip_special_tokens``."""
        self.eos_ids = tuple(sorted(set(eos_ids)))
        """Ids that end a generation (unless ``ignore_eos``)."""
        self.bos_id = bos_id
        self.prefix_ids = tuple(prefix_ids)
        """Ids put before a text: the begin-of-sequence id of models that were trained with one."""
        self.suffix_ids = tuple(suffix_ids)
        """Ids put after a text: empty for nearly every model that generates."""
        self.chat = chat
        """The model's chat template, or None if it has none."""
        named = {"special_ids": self.special_ids, "eos_ids": self.eos_ids}
        named |= {"prefix_ids": self.prefix_ids, "suffix_ids": self.suffix_ids}
        named |= {"bos_id": () if bos_id is None else (bos_id,)}
        for name, ids in named.items():
            if unknown := sorted(i for i in ids if self.token(i) is None):
                raise TokenizerError(f"{name}: {unknown} are not in the vocabulary")

    @property
    def adds_bos(self) -> bool:
        """Whether ``encode`` puts the begin-of-sequence id before a text."""
        return bool(self.prefix_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; special tokens written out in it become their ids.

        ``add_special_tokens`` puts ``prefix_ids`` before and ``suffix_ids`` after, as the model
        expects of a plain prompt. A rendered chat template has them already: pass False.
        Raises ValueError for text that has no UTF-8 form (a lone surrogate).
        """
        _check_utf8(text)
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
    ) -> list[int]:
        """Return the ids of ``messages`` in the model's own chat format.

        Special tokens written out in a content do not become tokens: see ``text.literal``. A
        template may show the date: ``now``, or the local time when it is not given.
        Raises :class:`ChatMessageError` for malformed messages and :class:`ChatTemplateError` for
        a model without a template or a template that refuses them.
        """
        if self.chat is None:
            raise ChatTemplateError("this model has no chat template: send a prompt, not messages")
        checked = check_messages(messages)
        literals = Literals(checked)
        for message in checked:
            for field in _WORDS & message.keys():
                _check_utf8(message[field])
                message[field] = literals.hide(message[field], self._backend, self.special_ids)
        text = self.chat.render(checked, add_generation_prompt=add_generation_prompt, now=now)
        if not literals:
            return self.encode(text, add_special_tokens=False)
        return literals.encode(text, self._backend, self._plain(), self.special_ids)

    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer, to which special tokens are text; made when first needed."""
        with self._plain_lock:
            if self._plain_backend is None:
                plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
                plain.encode_special_tokens = True
                self._plain_backend = plain
            return self._plain_backend

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``: exactly what a :class:`Detokenizer` emits for them.

        Bytes that are not UTF-8 become U+FFFD, one for each maximal ill-formed part.
        """
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it (``Ġthe``), or None if there is none."""
        # The backend takes 32-bit numbers and raises OverflowError for others.
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it, or None if it has none."""
        return self._backend.token_to_id(token)

    def to_json(self) -> str:
        """Vocabulary and rules as the text of a ``tokenizer.json``, ``prefix_ids`` among them."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        if self.prefix_ids or self.suffix_ids:
            around = [
                [f"{self.token(i)}:0" for i in ids] for ids in (self.prefix_ids, self.suffix_ids)
            ]
            backend.post_processor = TemplateProcessing(
                single=[*around[0], "$A:0", *around[1]],
                special_tokens=[(self.token(i), i) for i in {*self.prefix_ids, *self.suffix_ids}],
            )
        return backend.to_str(pretty=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: not always whole characters.

        Empty for an id outside the vocabulary: logits are often padded beyond it.
        """
        known = self._bytes.get(token_id)
        if known is None:
            token = self.token(token_id)
            if token is None:
                return b""  # not kept: there is no end of ids without a token
            known = self._bytes[token_id] = self.form.to_bytes(token)
        return known


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text has no UTF-8 form at character {error.start}") from None
