"""The sampler beside independent ones: transformers' processors, and vLLM's formulas in torch.

What is compared is the distribution: which ids can be drawn, and with what probability.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.sampler import SampleRow, _adjust, _draw, sample, score

VOCAB = 257
PROMPT = (3, 5, 5, 200, 9)
OUTPUT = (9, 7, 7, 7, 256, 11)
STOPS = (7, 40)

CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.35),
    SamplingParams(temperature=3.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=17),
    SamplingParams(top_p=0.05),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=1.7, min_p=0.1),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7),
    SamplingParams(frequency_penalty=0.8),
    SamplingParams(frequency_penalty=-1.5),
    SamplingParams(presence_penalty=1.1),
    SamplingParams(min_tokens=7),
    SamplingParams(logit_bias=((7, 5.0), (9, -100.0), (256, 0.5))),
    SamplingParams(logit_bias=((7, 100.0),), min_tokens=7),
    SamplingParams(
        temperature=0.8,
        min_p=0.001,
        top_k=60,
        top_p=0.93,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        logit_bias=((11, 2.0), (100, -3.0)),
        min_tokens=7,
    ),
]


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities [vocab] in float64; ``logits`` float64 [1, vocab]. vLLM's order of steps."""
    scores = logits.clone()
    for token_id, bias in params.logit_bias:
        scores[0, token_id] += bias
    if len(OUTPUT) < params.min_tokens:
        scores[0, list(STOPS)] = -float("inf")
    seen = torch.tensor([[*PROMPT, *OUTPUT]])
    if params.repetition_penalty != 1.0:
        penalise = logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        scores = penalise(seen, scores)
    counts = torch.bincount(torch.tensor(OUTPUT), minlength=VOCAB).double()
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    warpers: list[logits_process.LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(logits_process.TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        warpers.append(logits_process.MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(logits_process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(logits_process.TopPLogitsWarper(params.top_p))
    for warp in warpers:
        scores = warp(seen, scores)
    return scores.softmax(-1)[0]


def probabilities(logits: torch.Tensor, row: SampleRow, places: int) -> np.ndarray:
    """How often each id is drawn when the random number takes ``places`` evenly spread values."""
    adjusted = _adjust(logits[0].double().numpy(), row, 0)
    draws = [_draw(adjusted, row.params, (i + 0.5) / places) for i in range(places)]
    return np.bincount(draws, minlength=VOCAB) / places


def row_of(params: SamplingParams) -> SampleRow:
    return SampleRow(
        params=params,
        seed=1,
        index=len(OUTPUT),
        prompt_ids=PROMPT,
        output_ids=OUTPUT,
        stop_token_ids=STOPS,
    )


@pytest.mark.parametrize("params", CASES, ids=range(len(CASES)))
def test_the_distribution_is_the_references(params: SamplingParams) -> None:
    logits = torch.from_numpy(np.random.default_rng(4).normal(0, 2.5, (1, VOCAB))).float()
    places = 4000
    got = probabilities(logits, row_of(params), places)
    expected = reference(logits.double(), params).numpy()
    # Each id owns one interval of the unit line: of evenly spread numbers it gets its share to
    # within one at each of its two ends.
    assert np.abs(got - expected).max() <= 1.0 / places
    assert set(np.flatnonzero(got)) <= set(np.flatnonzero(expected))


@pytest.mark.parametrize("params", CASES, ids=range(len(CASES)))
def test_greedy_takes_the_references_largest(params: SamplingParams) -> None:
    greedy = SamplingParams(
        temperature=0.0,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=params.logit_bias,
        min_tokens=params.min_tokens,
    )
    for seed in range(20):
        logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 1, (1, VOCAB))).float()
        (token,) = sample(logits, [row_of(greedy)])
        same = SamplingParams(
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens,
        )
        assert token.id == int(reference(logits.double(), same).argmax())


def test_a_seed_is_a_seed() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (1, VOCAB))).float()

    def drawn(seed: int, choice: int) -> list[int]:
        rows = [
            SampleRow(params=SamplingParams(), seed=seed, index=i, choice=choice) for i in range(12)
        ]
        return [token.id for token in sample(logits.expand(12, -1), rows)]

    assert drawn(5, 0) == drawn(5, 0)
    assert len({tuple(drawn(seed, choice)) for seed in (5, 6) for choice in (0, 1)}) == 4


def test_bias_changes_no_log_probability() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (1, VOCAB))).float()
    biased = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((13, 100.0),))
    (token,) = sample(logits, [row_of(biased)])
    assert token.id == 13
    assert token.logprob == pytest.approx(float(logits.double().log_softmax(-1)[0, 13]), abs=1e-9)


def test_scores_are_those_of_the_sampler() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 1, (5, VOCAB))).float()
    plain = SamplingParams(temperature=0.0, logprobs=3)
    tokens = sample(logits, [SampleRow(params=plain, seed=0, index=0)] * 5)
    assert score(logits, [token.id for token in tokens], 3) == tokens
    with pytest.raises(ValueError, match="token_ids: 1 to 257: must be between 0 and 256"):
        score(logits[:2], [1, VOCAB], 0)
    bad = logits.clone()
    bad[3, 0] = float("nan")
    with pytest.raises(ValueError, match=r"logits of rows \[3\]"):
        score(bad, [0] * 5, 0)


def test_a_bias_outside_the_vocabulary_is_named() -> None:
    params: Sequence[SamplingParams] = [SamplingParams(logit_bias=((VOCAB, 1.0),))]
    with pytest.raises(ValueError, match="logit_bias: 257 to 257: must be between 0 and 256"):
        sample(torch.zeros(1, VOCAB), [row_of(params[0])])
