"""The KV quality gate on real (tiny) models: what is served, refused, scaled, and remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.proto.failpoints import Failpoints
from deepinfer.text.load import load_tokenizer
from deepinfer.text.probe_text import PROBE_TEXT
from deepinfer.workers import assembly, quality
from deepinfer.workers.actor import WorkerSettings
from deepinfer.workers.assembly import Device, open_device
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.quality import Figures, KvQualityError, Mode
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import Decoder, kv_layout
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.quality import CpuTrial, QualityGate, Verdict
from deepinfer.workers.quality_settings import QualitySettings
from support.memory_weights import random_model
from support.provoked_model import provoked
from support.tiny_model import write_tiny_llama

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def mild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: INT8 costs it .001 nats, FP8 .03."""
    return write_tiny_llama(tmp_path_factory.mktemp("mild"), layers=1)


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of sharp attention: every rounding changes its answers."""
    return write_tiny_llama(tmp_path_factory.mktemp("wild"), layers=4, hidden=128)


def settings(model: Path, dtype: str, cache: Path, mode: Mode = "strict") -> WorkerSettings:
    layout = kv_layout(load_model(model).config, resolve_kv_dtype(dtype), BLOCK_SIZE)
    ids = load_tokenizer(model).encode(PROBE_TEXT, add_special_tokens=False)
    return WorkerSettings(
        worker="w",
        node="n",
        token="t",
        model_path=str(model),
        kv_cache_dtype=dtype,
        quality=QualitySettings(mode=mode, token_ids=tuple(ids[:128]), cache_folder=str(cache)),
        config=WorkerConfig(blocks_total=4, block_size=BLOCK_SIZE, block_bytes=layout.block_bytes),
    )


def opened(model: Path, dtype: str, cache: Path, mode: Mode = "strict") -> Device:
    return open_device(settings(model, dtype, cache, mode), Failpoints())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes that were measured, in their order."""
    names: list[str] = []
    original = quality.compare

    def noting(
        reference: object, candidate: quality.PooledRunner, *rest: object, **how: object
    ) -> Figures:
        names.append(candidate.pool.layout.dtype.name)
        return original(reference, candidate, *rest, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(quality, "compare", noting)
    return names


def test_a_dtype_that_passes_is_served_and_remembered(
    mild: Path, tmp_path: Path, measured: list[str]
) -> None:
    first = opened(mild, "int8", tmp_path)
    again = opened(mild, "int8", tmp_path)
    assert measured == ["int8"]
    [note] = first.notes
    assert note.startswith("KV quality, int8 beside fp16: KL ")
    assert again.notes == first.notes
    assert again.gauges == first.gauges
    assert 0 < first.gauges["deepinfer_worker_kv_quality_kl_nats"] < 0.01
    assert first.gauges["deepinfer_worker_kv_key_scales"] == 0
    assert first.identity.key_scales == ""
    assert not first.pool.storage.any(), "what is measured with leaves nothing behind"


def test_a_dtype_that_fails_is_refused_with_the_one_that_passes(
    mild: Path, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KvQualityError, match=r"'fp8'.*int8 passes.*--kv-cache-dtype int8") as first:
        opened(mild, "fp8", tmp_path)
    assert measured == ["fp8", "int8"]
    # Known from now on, before any weight is read; and so is what it named.
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "Decoder", None)
        with pytest.raises(KvQualityError) as again:
            opened(mild, "fp8", tmp_path)
    assert str(again.value) == str(first.value)
    opened(mild, "int8", tmp_path)
    assert measured == ["fp8", "int8"]


def test_where_nothing_passes_fp16_is_named(
    wild: Path, tmp_path: Path, measured: list[str]
) -> None:
    with pytest.raises(KvQualityError, match=r"'int8'.*with K channel scales: .*only fp16 passes"):
        opened(wild, "int8", tmp_path)
    assert measured == ["int8", "int8", "k16v8"]


def test_a_failing_dtype_may_be_served_with_a_warning(wild: Path, tmp_path: Path) -> None:
    device = opened(wild, "fp8", tmp_path, "warn")
    [note] = device.notes
    assert note.startswith("warning: KV quality, fp8 beside fp16: ")
    assert note.endswith("it fails)")
    assert device.gauges["deepinfer_worker_kv_quality_kl_nats"] > 0.02


def test_nothing_is_measured_where_there_is_nothing_to_find_out(
    wild: Path, tmp_path: Path, measured: list[str]
) -> None:
    assert opened(wild, "fp16", tmp_path).notes == ()
    assert opened(wild, "fp8", tmp_path, "off").notes == ()
    assert open_device(replace(settings(wild, "fp8", tmp_path), quality=None), Failpoints())
    assert measured == []
    assert list(tmp_path.iterdir()) == []


# ---- key scales ----------------------------------------------------------------------------

BIASED = provoked(
    random_model(
        ModelConfig(
            family="llama",
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=64,
            max_positions=256,
            rms_eps=1e-5,
            rope_theta=1e6,
        ),
        seed=3,
    ),
    100.0,
)
"""INT8 costs it .02 nats and one token in five, with key scales .001 and one in twenty."""
TOKENS = tuple((7 * i * i + 3 * i) % 96 for i in range(96))


def gate(dtype: str, cache: Path, mode: Mode = "strict") -> QualityGate:
    settings = QualitySettings(mode=mode, token_ids=TOKENS, cache_folder=str(cache))
    return QualityGate(settings, BIASED, resolve_kv_dtype(dtype), BLOCK_SIZE, "cpu")


def trial() -> tuple[CpuTrial, Decoder]:
    backend = CpuBackend()
    decoder = Decoder(BIASED, backend)
    return CpuTrial(decoder, backend, BLOCK_SIZE), decoder


def keys(model: LoadedModel | Decoder, trial_of: Callable[[Decoder], CpuTrial]) -> bytes:
    decoder = model if isinstance(model, Decoder) else Decoder(model, CpuBackend())
    runner = trial_of(decoder).runner(resolve_kv_dtype("int8"), len(TOKENS))
    table = tuple(range(runner.pool.num_blocks))
    runner.forward([SequenceSlice(TOKENS, 0, table, logits=False)])
    return runner.pool.storage.numpy().tobytes()


def of(decoder: Decoder) -> CpuTrial:
    return CpuTrial(decoder, decoder.backend, BLOCK_SIZE)


def test_int8_gets_key_scales_where_it_needs_them(tmp_path: Path, measured: list[str]) -> None:
    trying, decoder = trial()
    assert gate("int8", tmp_path).recall() is None
    verdict = gate("int8", tmp_path).settle(trying)
    assert measured == ["int8", "int8"]
    assert verdict.scales is not None
    assert verdict.notes[0].startswith("KV quality, int8 with K channel scales beside fp16: ")
    assert verdict.gauges["deepinfer_worker_kv_key_scales"] == 1
    # A later start loads what the first ended with: the same K, under the same name.
    again = gate("int8", tmp_path).recall()
    assert again is not None
    assert again.scales is not None
    assert again.scales.digest == verdict.scales.digest
    assert keys(again.model(BIASED), of) == keys(decoder, of) != keys(BIASED, of)


def test_another_dtype_is_told_of_int8_with_key_scales(tmp_path: Path) -> None:
    with pytest.raises(KvQualityError, match=r"int8 with K channel scales passes .*dtype int8"):
        gate("fp8", tmp_path).settle(trial()[0])


def test_a_warned_pool_leaves_the_weights_that_belong_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = iter(
        (
            Figures(kl_nats=0.5, agreement=0.5, positions=96, saturations=0),
            Figures(kl_nats=0.6, agreement=0.5, positions=96, saturations=0),
        )
    )
    monkeypatch.setattr(quality, "compare", lambda *_, **__: next(worse))
    trying, decoder = trial()
    verdict = gate("int8", tmp_path, "warn").settle(trying)
    assert verdict.scales is None
    assert keys(decoder, of) == keys(BIASED, of)


def test_of_many_workers_one_measures(tmp_path: Path, measured: list[str]) -> None:
    verdicts: list[Verdict] = []
    trials = [trial()[0] for _ in range(3)]
    threads = [
        threading.Thread(target=lambda t=one: verdicts.append(gate("int8", tmp_path).settle(t)))
        for one in trials
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert measured == ["int8", "int8"]
    digests = {v.scales.digest for v in verdicts if v.scales is not None}
    assert (len(verdicts), len(digests)) == (3, 1)
