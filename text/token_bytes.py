"""What a single token means in bytes: the decoder of a tokenizer, applied to one token.

Decoding whole lists of ids, as ``tokenizers`` does, cannot be continued token by token: the text
of a prefix may change when a token is added. Bytes can: the bytes of a sequence are those of its
tokens, joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deepinfer.text.errors import UnsupportedTokenizerError

_SUPPORTED = "ByteLevel, Metaspace, and Sequence of Replace, ByteFallback, Fuse, Strip"


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: the printable character that stands for each of the 256 bytes.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are written
    as the characters from U+0100 on.
    """
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in kept}
    hidden = (byte for byte in range(256) if byte not in set(kept))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


BYTE_OF_CHARACTER: Mapping[str, int] = _byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """How the tokens of a vocabulary are written, and so how they are read back.

    ``byte_level``: in GPT-2's byte alphabet. ``byte_fallback``: ``<0x0A>`` means that byte.
    ``replacements``: substrings that stand for others (SentencePiece writes a space as ``▁``).
    ``leading_spaces``: so many spaces at the start of a text were put there by the encoder.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0

    def to_bytes(self, token: str) -> bytes:
        """Return the UTF-8 bytes, possibly of a part of a character, that ``token`` adds."""
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:  # an added token, written as plain text
                return token.encode()
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return bytes((byte,))
        for written, meant in self.replacements:
            token = token.replace(written, meant)
        return token.encode()


def _fallback_byte(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def token_form(decoder: object, where: str) -> TokenForm:
    """Read the ``decoder`` object of a tokenizer.json.

    Raises :class:`UnsupportedTokenizerError`, naming the decoder, for any that cannot be applied
    to one token at a time.
    """
    byte_level = byte_fallback = False
    replacements: list[tuple[str, str]] = []
    leading_spaces = 0
    for step in _flatten(decoder, where):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(written)}, "content": str(meant)}:
                replacements.append((written, meant))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                leading_spaces = start
            case {"type": "Metaspace", "replacement": str(written)}:
                replacements.append((written, " "))
                prefixed = step.get("prepend_scheme") != "never"
                leading_spaces = int(prefixed and step.get("add_prefix_space") is not False)
            case _:
                raise UnsupportedTokenizerError(
                    f"{where}: decoder {step!r} is not supported (supported: {_SUPPORTED})"
                )
    if byte_level and (replacements or byte_fallback):
        raise UnsupportedTokenizerError(
            f"{where}: decoder {decoder!r} mixes ByteLevel with SentencePiece forms"
        )
    if not (byte_level or replacements):
        raise UnsupportedTokenizerError(
            f"{where}: decoder {decoder!r} is not supported (supported: {_SUPPORTED})"
        )
    return TokenForm(
        byte_level=byte_level,
        byte_fallback=byte_fallback,
        replacements=tuple(replacements),
        leading_spaces=leading_spaces,
    )


def _flatten(decoder: object, where: str) -> Iterator[dict[str, object]]:
    match decoder:
        case {"type": "Sequence", "decoders": list(steps)}:
            for step in steps:
                yield from _flatten(step, where)
        case dict():
            yield decoder
        case _:
            raise UnsupportedTokenizerError(
                f"{where}: decoder {decoder!r} is not supported (supported: {_SUPPORTED})"
            )
