"""A model without arithmetic: KV and next tokens are hashes of everything before them.

The "KV" of a position is a number that depends on every token up to it, so a block that was
computed from other tokens, copied too early or overwritten shows at once, and the next token is a
function of the last KV, so that wrong KV also gives a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.kvstore.core.ids import Run
from deepinfer.kvstore.core.requests import RequestRecord

_MASK = (1 << 62) - 1
VOCABULARY = 31
"""Token ids are 0 .. 30; the last is the end of sequence."""
EOS = VOCABULARY - 1


def chain(kv: int, token: int) -> int:
    """The KV of a position from the KV of the position before it (0 before the first)."""
    mixed = (kv ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9
    return (mixed ^ (mixed >> 29)) & _MASK


def kv_of(tokens: Sequence[int]) -> list[int]:
    """The KV of every position of ``tokens``."""
    kv, out = 0, []
    for token in tokens:
        kv = chain(kv, token)
        out.append(kv)
    return out


def stored(kv: int, rank: int) -> int:
    """What a pool keeps of a position: its KV, and the worst precision that is behind it."""
    return kv << 2 | rank


def kv_in(value: int) -> int:
    """The KV in what a pool keeps."""
    return value >> 2


def rank_in(value: int) -> int:
    """The rank of the worst precision behind it."""
    return value & 3


def sample(kv: int, record: RequestRecord, choice: int, index: int, noise: int = 0) -> int:
    """The generated token number ``index``, given the KV of the position before it.

    ``noise`` (0 to 7) stands for what differs between two computations of the same step, on real
    hardware or in another precision.
    """
    draw = chain(kv, (record.seed * 64 + choice) * 8 + noise) >> 7
    token = draw % VOCABULARY
    if index < record.sampling.min_tokens:
        while token in record.stop_token_ids:  # the sampler's mask
            token = (token + 1) % VOCABULARY
    return token


def whole_answer(record: RequestRecord, choice: int) -> tuple[int, ...]:
    """Every token that a worker generates when there is no noise (it knows of no stop strings)."""
    kv = kv_of(record.prompt_ids)[-1]
    tokens: list[int] = []
    while len(tokens) < record.sampling.max_tokens:
        token = sample(kv, record, choice, len(tokens))
        tokens.append(token)
        kv = chain(kv, token)
        if token in record.stop_token_ids and len(tokens) > record.sampling.min_tokens:
            break
    return tuple(tokens)


def first_tokens(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The first tokens of a request's first choice, without noise, masks or ends."""
    kv = kv_of(prompt)[-1]
    tokens = []
    for _ in range(count):
        tokens.append((chain(kv, seed * 512) >> 7) % VOCABULARY)
        kv = chain(kv, tokens[-1])
    return tokens


def evidence(kv: int, run: Run, rank: int = 0) -> tuple[float, tuple[tuple[int, float], ...]]:
    """What a sampled token says about its origin, in the fields of a token's log-probabilities.

    The first names the KV it was sampled from, and so every token before it; the second names the
    run that did it, and the rank of the precision in which it did.
    """
    return float(kv >> 14), ((run.epoch * 1_000_000 + run.counter, float(rank)),)
