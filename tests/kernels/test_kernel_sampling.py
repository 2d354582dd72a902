"""Sampling kernels, emulated or on a card, against sampling on the host and the specification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from deepinfer.deploy.validate import sampling_cases as cases
from deepinfer.kernels import sampling
from deepinfer.kernels.reference_sampling import sample_reference, uniform
from deepinfer.kernels.sampling import RowParams, SampleWorkspace
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers import sampler
from deepinfer.workers.philox import uniforms
from deepinfer.workers.sampler import SampleRow
from kernels.simt.build import COMPILER, emulator

emulated = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
VOCAB = 4500  # two whole slices and a part


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: in the emulator, or on a card."""
    device: str = request.param
    with emulator(sampling.specs()) if device == "cpu" else nullcontext():
        yield device


@pytest.mark.parametrize("name", cases.CUTS)
def test_draws_are_the_hosts(name: str, device: str) -> None:
    cases.check_cut(name, VOCAB, rows=6, device=device)


def test_rows_of_a_batch_do_not_mind_each_other(device: str) -> None:
    cases.check_batch(VOCAB, device=device)


@pytest.mark.parametrize("top_k", [0, 7, 2500])
@pytest.mark.parametrize("top_p", [0.4, 1.0])
def test_ties_go_to_the_lowest_ids(top_k: int, top_p: float, device: str) -> None:
    cases.check_ties(top_k, top_p, VOCAB, device=device)


@pytest.mark.parametrize("ctas", [1, 12])
def test_ctas_may_take_several_slices(
    ctas: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_NARROW_CTAS", ctas)  # one or two a row of three slices
    cases.check_cut("everything", VOCAB, rows=6, device=device)
    cases.check_penalties(VOCAB, device=device)


def test_neighbours_of_floats_are_told_apart(device: str) -> None:
    cases.check_neighbours(device=device)


def test_penalties(device: str) -> None:
    cases.check_penalties(VOCAB, device=device)


def test_rows_without_a_choice(device: str) -> None:
    cases.check_bad_rows(VOCAB, device=device)


@pytest.mark.parametrize("vocab", [1, 5, 2048, 2049])
def test_small_vocabularies_and_strided_rows(vocab: int, device: str) -> None:
    cases.check_strided(vocab, device=device)


def test_the_specification_is_the_hosts_sampler() -> None:
    rng = np.random.default_rng(0)
    for trial in range(60):
        logits = cases.logits_of(1, 3000, seed=trial, spread=float(rng.choice([0.01, 1.0, 4.0])))
        if trial % 3 == 0:
            logits = np.round(logits)
        prompt, output = rng.integers(0, 3000, 50).tolist(), rng.integers(0, 3000, 30).tolist()
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 100.0])),
            top_k=int(rng.choice([0, 1, 20, 2999])),
            top_p=float(rng.choice([1.0, 0.95, 0.1])),
            min_p=float(rng.choice([0.0, 0.02, 1.0])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, -2.0])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
        )
        seed = int(rng.integers(0, 2**63))
        row = SampleRow(
            params=params,
            seed=seed,
            index=30,
            choice=trial % 4,
            prompt_ids=prompt,
            output_ids=output,
        )
        ids = np.unique(prompt + output)
        counts = np.array([output.count(i) for i in ids])
        spec = RowParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            seed=seed,
            index=30,
            sequence=trial % 4,
            seen=(ids, counts),
        )
        (token,) = sampler.sample(torch.from_numpy(logits), [row])
        assert sample_reference(logits, [spec]).tolist() == [token.id]


def test_the_numbers_drawn_are_philox() -> None:
    for seed, index, sequence in ((0, 0, 0), (2**64 - 1, 2**33 + 5, 7), (0xDEADBEEF01, 3, 2)):
        counters = np.array([[index & 0xFFFFFFFF, index >> 32, sequence, 0]], dtype=np.uint32)
        keys = np.array([[seed & 0xFFFFFFFF, seed >> 32]], dtype=np.uint32)
        assert uniform(seed, index, sequence) == uniforms(counters, keys)[0]


def test_misfits_are_named() -> None:
    logits = torch.zeros(2, 10)
    ids = torch.zeros(2, dtype=torch.int32)
    workspace = SampleWorkspace.allocate(2, 10, "cpu")
    params = sampling.pack([RowParams()] * 2)
    with pytest.raises(ValueError, match=r"^logits: torch\.float16 \(2, 10\)"):
        sampling.sample(ids, logits.half(), params, workspace)
    with pytest.raises(ValueError, match=r"^logits: .* strides \(1, 10\)"):
        sampling.argmax(torch.zeros(10, dtype=torch.int32), torch.zeros(2, 10).T[:, :2], workspace)
    with pytest.raises(ValueError, match=r"^logits: 262145 columns"):
        sampling.argmax(ids, torch.zeros(2, sampling.VOCAB_MAX + 1), workspace)
    with pytest.raises(ValueError, match=r"^ids: torch\.int64"):
        sampling.argmax(ids.long(), logits, workspace)
    with pytest.raises(ValueError, match=r"^params\.reals: torch\.float64 \(1, 6\)"):
        sampling.sample(ids, logits, sampling.pack([RowParams()]), workspace)
    small = SampleWorkspace.allocate(1, 10, "cpu")
    with pytest.raises(ValueError, match=r"^workspace: for 1 rows of 2048 logits, must be for 2"):
        sampling.argmax(ids, logits, small)
