"""The sampler: each option against its definition, and every row alone against it in a crowd."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer.kvstore.core.requests import SamplingParams, Token
from deepinfer.workers.philox import uniforms
from deepinfer.workers.sampler import LogitsError, SampleRow, _draw, sample

GREEDY = SamplingParams(temperature=0.0)


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.log(torch.tensor([probabilities], dtype=torch.float32))


def one(logits: torch.Tensor, params: SamplingParams = GREEDY, **row: object) -> Token:
    made = replace(SampleRow(params=params, seed=0, index=0), **row)  # type: ignore[arg-type]
    return sample(logits, [made])[0]


def drawn(logits: torch.Tensor, params: SamplingParams, n: int) -> Counter[int]:
    rows = [SampleRow(params=params, seed=5, index=i) for i in range(n)]
    return Counter(token.id for token in sample(logits.expand(n, -1), rows))


def assert_distributed(counts: Counter[int], expected: list[float], limit: float) -> None:
    """Chi-square of fixed draws: ``limit`` is the 99.9% point for the degrees of freedom."""
    n = counts.total()
    possible = {i for i, p in enumerate(expected) if p > 0}
    assert set(counts) <= possible
    chi_square = sum((counts[i] - n * expected[i]) ** 2 / (n * expected[i]) for i in possible)
    assert chi_square < limit


P = [0.05, 0.4, 0.1, 0.25, 0.2]


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id() -> None:
    assert one(torch.tensor([[0.0, 3.0, 1.0, 3.0]])) == Token(1)
    # The same on the path taken with log-probabilities.
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert one(logits, SamplingParams(temperature=0.0, logprobs=0)).id == 1


def test_temperature_one_draws_from_the_softmax() -> None:
    assert_distributed(drawn(logits_of(P), SamplingParams(), 5000), P, 18.5)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    weights = [p ** (1 / temperature) for p in P]
    expected = [w / sum(weights) for w in weights]
    params = SamplingParams(temperature=temperature)
    assert_distributed(drawn(logits_of(P), params, 5000), expected, 18.5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert drawn(logits_of(P), SamplingParams(temperature=temperature), 50) == {1: 50}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {1, 3}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.6), {1, 3}),  # .4 + .25 is the first sum to reach it
        (SamplingParams(top_p=0.66), {1, 3, 4}),
        (SamplingParams(top_p=1e-9), {1}),
        (SamplingParams(min_p=0.26), {1, 3, 4}),  # .1 < .26 * .4
        (SamplingParams(min_p=1.0), {1}),
        (SamplingParams(top_k=3, top_p=0.75), {1, 3}),  # .65 / .85 reaches it: top-k first
        (SamplingParams(min_p=0.2, top_k=4, top_p=0.999), {1, 2, 3, 4}),
    ],
)
def test_cuts_keep_what_they_define(params: SamplingParams, kept: set[int]) -> None:
    expected = [p if i in kept else 0.0 for i, p in enumerate(P)]
    expected = [p / sum(expected) for p in expected]
    counts = drawn(logits_of(P), params, 3000)
    assert set(counts) == kept
    assert_distributed(counts, expected, 18.5)


def test_cuts_settle_ties_by_the_lowest_id() -> None:
    flat = torch.zeros(1, 1000)
    assert set(drawn(flat, SamplingParams(top_k=3), 300)) == {0, 1, 2}
    assert set(drawn(flat, SamplingParams(top_p=0.004), 300)) == {0, 1, 2, 3}


def test_a_wide_nucleus_equals_a_full_sort() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 0.5, (1, 5001))).float()
    weights = np.exp(logits[0].numpy().astype(np.float64))
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order]) / weights.sum()
    nucleus = set(order[: int(np.searchsorted(sums, 0.7)) + 1].tolist())
    counts = drawn(logits, SamplingParams(top_p=0.7), 600)
    assert set(counts) <= nucleus
    assert len(counts) > 500  # the first look of 256 places did not cut it short


def test_seed_choice_and_index_each_change_the_draw() -> None:
    flat = torch.zeros(1, 50_000)
    base = SampleRow(params=SamplingParams(), seed=1, index=2, choice=3)
    rows = [
        base,
        replace(base, seed=2),
        replace(base, seed=1 + 2**32),
        replace(base, index=3),
        replace(base, choice=4),
        replace(base, index=3, choice=2),
    ]
    assert len({sample(flat, [row])[0] for row in rows}) == len(rows)


def test_the_draw_is_pinned() -> None:
    # A change here changes every sampled answer in the field: it must be deliberate.
    flat = torch.zeros(1, 50_000)
    row = SampleRow(params=SamplingParams(), seed=1234, index=7, choice=1)
    assert sample(flat, [row])[0].id == 24_186
    u = uniforms(np.array([[7, 0, 1, 0]], dtype=np.uint32), np.array([[1234, 0]], dtype=np.uint32))
    assert int(u[0] * 50_000) == 24_186


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    vocab = 1_021  # odd, so that rows start at every alignment
    kinds = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, logprobs=5),
        SamplingParams(top_k=20, min_p=0.01, presence_penalty=1.0, logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=4, max_tokens=9),
    ]
    rows = [
        SampleRow(
            params=kinds[i % len(kinds)],
            seed=int(rng.integers(2**63)),
            index=3,
            choice=i % 3,
            prompt_ids=rng.integers(0, vocab, 9).tolist(),
            output_ids=rng.integers(0, vocab, 3).tolist(),
            stop_token_ids=(2, 3),
        )
        for i in range(40)
    ]
    logits = torch.from_numpy(rng.normal(0, 3, (40, vocab))).float()
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert alone == together  # log-probabilities included, bit for bit
    order = rng.permutation(40).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[4.0, 3.0, -1.0, -1.5]])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert one(logits, params, prompt_ids=[0]).id == 1  # 4 / 2 < 3
    assert one(logits, params, output_ids=[0], index=1).id == 1
    logits = torch.tensor([[-1.0, -1.5]])
    assert one(logits, params, prompt_ids=[0]).id == 1  # -1 * 2 < -1.5


def test_repetition_penalty_counts_a_token_once() -> None:
    logits = torch.tensor([[4.0, 1.5]])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert one(logits, params, prompt_ids=[0, 0], output_ids=[0, 0], index=2).id == 0


def test_presence_and_frequency_penalties_see_only_the_output() -> None:
    logits = torch.tensor([[2.0, 1.5]])
    presence = SamplingParams(temperature=0.0, presence_penalty=0.6)
    assert one(logits, presence, prompt_ids=[0]).id == 0
    assert one(logits, presence, output_ids=[0], index=1).id == 1
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    assert one(logits, frequency, output_ids=[0], index=1).id == 0
    assert one(logits, frequency, output_ids=[0, 0], index=2).id == 1


def test_min_tokens_forbids_the_end_until_it_is_reached() -> None:
    logits = torch.tensor([[1.0, 9.0, 2.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2)
    assert one(logits, params, stop_token_ids=[1], index=1).id == 2
    assert one(logits, params, stop_token_ids=[1], index=2).id == 1


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.3, top_k=1, presence_penalty=0.1, logprobs=2)
    token = one(logits_of(P), params, output_ids=[1], index=1)
    assert token.id == 1
    assert token.logprob == pytest.approx(np.log(0.4), abs=1e-6)
    assert [i for i, _ in token.top] == [1, 3]
    assert [p for _, p in token.top] == pytest.approx(np.log([0.4, 0.25]), abs=1e-6)


def test_logprobs_zero_gives_the_chosen_tokens_alone() -> None:
    token = one(logits_of(P), SamplingParams(temperature=0.0, logprobs=0))
    assert token.top == ()
    assert token.logprob == pytest.approx(np.log(0.4), abs=1e-6)
    assert one(logits_of(P)).logprob is None


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]])
    assert set(drawn(logits, SamplingParams(temperature=100.0), 200)) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_choice_are_named(bad: float) -> None:
    logits = torch.zeros(4, 8)
    logits[1, 3] = bad
    logits[3] = float("-inf")
    rows = [SampleRow(params=GREEDY, seed=0, index=0)] * 4
    with pytest.raises(LogitsError) as caught:
        sample(logits, rows)
    assert caught.value.rows == (1, 3)
    assert sample(logits[[0, 2]], rows[:2]) == [Token(0), Token(0)]


def test_a_mask_that_leaves_nothing_is_named() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1)
    row = SampleRow(params=params, seed=0, index=0, stop_token_ids=(0, 1))
    with pytest.raises(LogitsError) as caught:
        sample(torch.zeros(1, 2), [row])
    assert caught.value.rows == (0,)


def test_wrong_arguments_are_named() -> None:
    row = SampleRow(params=GREEDY, seed=0, index=0)
    with pytest.raises(ValueError, match=r"must be torch\.float32 \[1, vocab\]"):
        sample(torch.zeros(2, 8), [row])
    with pytest.raises(ValueError, match=r"torch\.float64"):
        sample(torch.zeros(1, 8, dtype=torch.float64), [row])
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    with pytest.raises(ValueError, match="output_ids: 8 to 8: must be between 0 and 7"):
        one(torch.zeros(1, 8), params, output_ids=[8], index=1)


def test_logits_are_left_alone_and_no_rows_is_fine() -> None:
    logits = torch.zeros(1, 4)
    params = SamplingParams(min_tokens=3, presence_penalty=2.0)
    one(logits, params, stop_token_ids=[0], output_ids=[1], index=1)
    assert logits.tolist() == [[0.0] * 4]
    assert sample(torch.zeros(0, 4), []) == []


def test_kept_ids_divide_the_unit_interval_in_ascending_order() -> None:
    logits = np.log(np.array([0.3, 0.5, 0.2]))
    nucleus = SamplingParams(top_p=0.75)  # keeps 1, then 0
    assert [_draw(logits, nucleus, u) for u in (0.0, 0.37, 0.38, 1 - 2**-53)] == [0, 0, 1, 1]
    # Each share is half open: of two equal ones, the second begins at exactly one half.
    assert [_draw(np.zeros(2), SamplingParams(), u) for u in (0.5 - 2**-53, 0.5)] == [0, 1]


def test_top_logprobs_rank_ties_by_id() -> None:
    # Ten of the largest among thousands of the next: the sort sees both.
    values = np.zeros(5000)
    values[np.random.default_rng(2).choice(5000, 10, replace=False)] = 1.0
    token = one(
        torch.from_numpy(values)[None].float(), SamplingParams(temperature=0.0, logprobs=20)
    )
    expected = np.lexsort((np.arange(5000), -values))[:20].tolist()
    assert [token_id for token_id, _ in token.top] == expected
