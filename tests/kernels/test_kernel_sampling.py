"""Sampling kernels, emulated or on a card, against sampling on the host and the specification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from deepinfer.kernels import sampling
from deepinfer.kernels.reference_sampling import sample_reference, uniform
from deepinfer.kernels.sampling import RowParams, SampleWorkspace
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers import sampler
from deepinfer.workers.philox import uniforms
from deepinfer.workers.sampler import SampleRow
from kernels.simt.build import COMPILER, emulator

emulated = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
Logits = npt.NDArray[np.float32]
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


def logits_of(rows: int, vocab: int = VOCAB, *, seed: int, spread: float = 3.0) -> Logits:
    """As models make them: a few likely tokens before a broad rest."""
    rng = np.random.default_rng(seed)
    made = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
    made[:, rng.integers(0, vocab, 5)] += 4 * spread
    return made


def run(logits: Logits, rows: Sequence[RowParams | None], device: str) -> list[int]:
    """Ids by the kernels; twice, for what the first call leaves behind must not matter."""
    on_card = torch.from_numpy(logits.copy()).to(device)
    workspace = SampleWorkspace.allocate(len(rows), logits.shape[1], device)
    params = sampling.pack(rows).to(torch.device(device))
    results = []
    for _ in range(2):
        ids = torch.full((len(rows),), -7, dtype=torch.int32, device=device)
        sampling.sample(ids, on_card, params, workspace)
        results.append(ids.tolist())
    assert results[0] == results[1]
    left = on_card.cpu().numpy().view(np.int32)
    assert np.array_equal(left, logits.view(np.int32)), "logits stay as they are"
    return results[0]


def check(logits: Logits, rows: Sequence[RowParams], device: str) -> list[int]:
    ids = run(logits, rows, device)
    assert ids == sample_reference(logits, rows).tolist()
    return ids


CUTS = {
    "whole": RowParams(temperature=1.0),
    "top_k": RowParams(temperature=0.9, top_k=40),
    "top_k of one": RowParams(temperature=5.0, top_k=1),
    "a narrow top_k in a wide bin of top_p": RowParams(temperature=100.0, top_k=3, top_p=0.9),
    "top_k of more than there are": RowParams(temperature=0.01, top_k=4000),
    "top_p": RowParams(temperature=1.5, top_p=0.9),
    "tiny top_p": RowParams(temperature=1.0, top_p=1e-9),
    "top_k and top_p": RowParams(temperature=2.0, top_k=300, top_p=0.7),
    "min_p": RowParams(temperature=3.0, min_p=0.05),
    "everything": RowParams(temperature=2.5, top_k=200, top_p=0.8, min_p=0.001),
    "cold": RowParams(temperature=1e-5),
    "hot": RowParams(temperature=100.0, top_p=0.5),
    "colder than doubles": RowParams(temperature=1e-300, top_k=3),
}


@pytest.mark.parametrize("name", CUTS)
def test_draws_are_the_hosts(name: str, device: str) -> None:
    rows = [replace(CUTS[name], seed=2**64 - 1 - i, index=i, sequence=i % 3) for i in range(6)]
    check(logits_of(6, seed=len(name)), rows, device)


def test_rows_of_a_batch_do_not_mind_each_other(device: str) -> None:
    logits = logits_of(len(CUTS) + 2, seed=5)
    rows: list[RowParams | None] = [*CUTS.values(), RowParams(), None]
    together = run(logits, rows, device)
    assert together[-1] == -7, "a row that was left out is not written"
    assert together[-2] == logits[-2].argmax()
    for i, row in enumerate(rows[:-1]):
        assert run(logits[i : i + 1], [row], device) == [together[i]]


@pytest.mark.parametrize("top_k", [0, 7, 2500])
@pytest.mark.parametrize("top_p", [0.4, 1.0])
def test_ties_go_to_the_lowest_ids(top_k: int, top_p: float, device: str) -> None:
    rng = np.random.default_rng(3)
    logits = rng.integers(-2, 2, (8, VOCAB)).astype(np.float32)  # about a thousand of each
    rows = [RowParams(temperature=0.7, top_k=top_k, top_p=top_p, seed=i) for i in range(8)]
    check(logits, rows, device)


def test_neighbours_of_floats_are_told_apart(device: str) -> None:
    """The hottest draw of logits that differ in their last bit only."""
    one = np.float32(17.0)
    logits = np.full((1, VOCAB), one, dtype=np.float32)
    logits[0, 1000:2000] = np.nextafter(one, np.float32(20), dtype=np.float32)
    rows = [RowParams(temperature=100.0, top_k=900, seed=i) for i in range(4)]
    for id_ in check(np.repeat(logits, 4, axis=0), rows, device):
        assert 1000 <= id_ < 1900


def test_penalties(device: str) -> None:
    rng = np.random.default_rng(8)
    logits = logits_of(6, seed=8)
    ids = np.unique(rng.integers(0, VOCAB, 700))
    counts = rng.integers(0, 4, ids.size)
    seen = (ids, counts)
    likeliest = int(logits[0].argmax())
    own = (np.array([likeliest]), np.array([1]))
    rows = [
        RowParams(repetition=50.0, seen=own),
        RowParams(temperature=1.0, repetition=1.3, seen=seen, seed=1),
        RowParams(temperature=1.0, presence=1.5, seen=seen, seed=2, top_k=50),
        RowParams(temperature=1.0, frequency=-1.25, seen=seen, seed=3, top_p=0.9),
        RowParams(temperature=1.2, top_p=0.9, seed=4),
        RowParams(repetition=0.01, frequency=0.3, presence=0.1, seen=seen),
    ]
    chosen = check(logits, rows, device)
    assert chosen[0] != likeliest


def test_rows_without_a_choice(device: str) -> None:
    logits = logits_of(7, seed=1)
    logits[1, 4499] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    logits[4] = -np.inf
    logits[4, 2200] = -3.5
    logits[5, :-1] = -np.inf
    drawn = RowParams(temperature=1.0, top_k=5, top_p=0.9)
    expected = [False, True, True, True, False, False, False]
    for row in (RowParams(), drawn):
        ids = check(logits, [row] * 7, device)
        assert [id_ == -1 for id_ in ids] == expected
        assert ids[4:6] == [2200, VOCAB - 1]
    greedy = torch.zeros(7, dtype=torch.int32, device=device)
    workspace = SampleWorkspace.allocate(7, VOCAB, device)
    sampling.argmax(greedy, torch.from_numpy(logits).to(device), workspace)
    assert greedy.tolist() == sample_reference(logits, [RowParams()] * 7).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 2048, 2049])
def test_small_vocabularies_and_strided_rows(vocab: int, device: str) -> None:
    logits = logits_of(3, vocab, seed=vocab)
    wide = torch.full((3, vocab + 3), 99.0, device=device)
    wide[:, :vocab] = torch.from_numpy(logits)
    rows = [RowParams(), RowParams(temperature=1.0), RowParams(temperature=1.0, top_p=0.5)]
    ids = torch.zeros(3, dtype=torch.int32, device=device)
    workspace = SampleWorkspace.allocate(4, vocab, device)
    params = sampling.pack(rows).to(torch.device(device))
    sampling.sample(ids, wide[:, :vocab], params, workspace)
    assert ids.tolist() == sample_reference(logits, rows).tolist()


def test_the_specification_is_the_hosts_sampler() -> None:
    rng = np.random.default_rng(0)
    for trial in range(60):
        logits = logits_of(1, 3000, seed=trial, spread=float(rng.choice([0.01, 1.0, 4.0])))
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
