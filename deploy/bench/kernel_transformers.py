"""transformers' decode speed at the same shape and weights, in each of its ways."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, get_args

import torch

from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.deploy.bench.transformers_peer import TransformersPeer, Way
from deepinfer.deploy.errors import LaunchError
from deepinfer.workers.model.config import ModelConfig

_FEW: Final = 2
_MANY: Final = 34
_ROUNDS: Final = 2
_WORDS_MAX: Final = 300


def time_transformers(
    config: ModelConfig, *, batches: Sequence[int], context: int, until: float
) -> Iterator[dict[str, Any]]:
    """Tokens a second of decoding at about ``context`` tokens; FP16.

    The time of ``_FEW`` tokens is taken from that of ``_MANY``, so that prompts do not count, and
    each is generated once before, so that compilation does not. Nothing begins after the monotonic
    time ``until``; what is left out says so.
    """
    peer = TransformersPeer(random_model(config, device="cuda"), "cuda")
    prompts = [
        [(7 * row + place) % (config.vocab_size - 5) + 5 for place in range(context - _MANY)]
        for row in range(max(batches))
    ]
    for way in get_args(Way):
        for batch in batches:
            found: dict[str, Any] = {"way": way, "batch": batch, "context": context}
            if time.monotonic() > until:
                yield found | {"tokens_per_s": None, "error": "no time was left"}
                continue
            try:
                yield found | {"tokens_per_s": _decode_rate(peer, way, prompts[:batch])}
            except (RuntimeError, ValueError, TypeError, AttributeError, LaunchError) as error:
                yield found | {"tokens_per_s": None, "error": str(error)[:_WORDS_MAX]}
            torch.cuda.empty_cache()


def _decode_rate(peer: TransformersPeer, way: Way, prompts: Sequence[Sequence[int]]) -> float:
    def seconds(new_tokens: int) -> float:
        return min(peer.generate(prompts, new_tokens, way).seconds for _ in range(_ROUNDS))

    for new_tokens in (_FEW, _MANY):  # compiles
        peer.generate(prompts, new_tokens, way)
    more = seconds(_MANY) - seconds(_FEW)
    if more <= 0:
        raise ValueError(f"{_MANY} tokens took no longer than {_FEW}")
    return len(prompts) * (_MANY - _FEW) / more
