"""A model without arithmetic: KV and next tokens are hashes of everything before them.

The "KV" of a position is a number that depends on every token up to it, so a block that was
computed from other tokens, copied too early or overwritten shows at once, and the next token is a
function of the last KV, so that wrong KV also gives a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.kvstore.core.requests import FinishReason, RequestRecord

_MASK = (1 << 62) - 1
VOCABULARY = 31
"""Token ids are 0 .. 30; the last is the end of sequence."""
EOS = VOCABULARY - 1


def chain(kv: int, token: int) -> int:
    """The KV of a position from the KV of the position before it (0 before the first)."""
    mixed = (kv ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9
    return (mixed ^ (mixed >> 29)) & _MASK


def kv_of(tokens: tuple[int, ...]) -> list[int]:
    """The KV of every position of ``tokens``."""
    kv, out = 0, []
    for token in tokens:
        kv = chain(kv, token)
        out.append(kv)
    return out


def sample(kv: int, record: RequestRecord, choice: int, index: int) -> int:
    """The generated token number ``index``, given the KV of the position before it."""
    draw = chain(kv, record.seed * 64 + choice) >> 7
    token = draw % VOCABULARY
    if index < record.sampling.min_tokens:
        while token in record.stop_token_ids:  # the sampler's mask
            token = (token + 1) % VOCABULARY
    return token


@dataclass(frozen=True, slots=True)
class Answer:
    """What one choice of a request must come out as, however it is moved about."""

    sequence: tuple[int, ...]
    """Prompt and every token that a worker may generate: it does not know of stop strings."""
    kv: tuple[int, ...]
    """The KV of each position of ``sequence``."""
    prompt_tokens: int
    tokens: tuple[int, ...]
    """Generated tokens that the client gets."""
    finish: FinishReason


def answer(record: RequestRecord, choice: int, stop_pair: tuple[int, int] | None) -> Answer:
    """Compute the whole answer; ``stop_pair`` are the two tokens that spell the stop string."""
    kv = kv_of(record.prompt_ids)
    tokens: list[int] = []
    finish = FinishReason.LENGTH
    stop_after = None
    while len(tokens) < record.sampling.max_tokens:
        token = sample(kv[-1], record, choice, len(tokens))
        tokens.append(token)
        kv.append(chain(kv[-1], token))
        if stop_after is None and stop_pair is not None and tuple(tokens[-2:]) == stop_pair:
            stop_after = len(tokens)
        if token in record.stop_token_ids and len(tokens) > record.sampling.min_tokens:
            finish = FinishReason.STOP
            break
    if stop_after is not None:
        finish = FinishReason.STOP
    return Answer(
        (*record.prompt_ids, *tokens),
        tuple(kv),
        len(record.prompt_ids),
        tuple(tokens[:stop_after]),
        finish,
    )
