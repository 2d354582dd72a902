"""SentencePiece vocabularies of GGUF files: pieces with scores, as Llama 2, Mistral and Phi-3 have.

Such a file lists no merges. SentencePiece joins whichever neighbours make the piece of the highest
score, so the merges are all ways to cut a piece in two other pieces, in the order of its score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from deepinfer.text.token_bytes import TokenForm

_SPACE = "▁"
_NORMAL, _UNKNOWN, _BYTE = 1, 2, 6
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A vocabulary by id. ``space_prefix``: texts, and what follows a control token, get a space.

    ``controls_eat_space``: white space behind a token that is not a piece belongs to it, as
    llama.cpp has it for Phi-3 (the file does not say so).
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    space_prefix: bool
    controls_eat_space: bool

    def form(self) -> TokenForm:
        """How tokens are read back."""
        return TokenForm(
            byte_fallback=True,
            replacements=((_SPACE, " "),),
            leading_spaces=int(self.space_prefix),
        )

    def fault(self) -> str | None:
        """Say what makes the vocabulary unusable: a byte that has no token."""
        known = {
            token for token, kind in zip(self.tokens, self.types, strict=True) if kind == _BYTE
        }
        lost = [token for byte in range(256) if (token := f"<0x{byte:02X}>") not in known]
        return f"byte tokens are missing: {', '.join(lost[:3])}" if lost else None

    def backend(self) -> tokenizers.Tokenizer:
        """A BPE tokenizer of these pieces, without its added tokens."""
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        unknown = next(
            (t for t, kind in zip(self.tokens, self.types, strict=True) if kind == _UNKNOWN), None
        )
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocabulary,
                list(self._merges(vocabulary)),
                unk_token=unknown,
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces = normalizers.Replace(" ", _SPACE)
        backend.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
            if self.space_prefix
            else spaces
        )
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.space_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(steps)
        return backend

    def added(self, token_id: int) -> AddedToken:
        """How text is searched for a control or user-defined token."""
        token = self.tokens[token_id]
        eats = self.controls_eat_space and token not in _KEEP_SPACE
        return AddedToken(token, normalized=False, rstrip=eats)

    def _merges(self, vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        normal = {token: i for token, i in vocabulary.items() if self.types[i] == _NORMAL}
        cuts = [
            (-self.scores[i], normal[left], normal[right], left, right)
            for token, i in normal.items()
            for at in range(1, len(token))
            if (left := token[:at]) in normal and (right := token[at:]) in normal
        ]
        for _, _, _, left, right in sorted(cuts):
            yield left, right
