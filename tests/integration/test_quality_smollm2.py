"""The KV quality gate's limits on a real model, and on a copy of it with large channels in K."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.text.load import load_tokenizer
from deepinfer.text.probe_text import PROBE_TEXT
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.quality import LIMITS, KvQualityError
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.quality import CpuTrial, QualityGate, Verdict
from deepinfer.workers.quality_settings import QualitySettings
from support.provoked_model import provoked

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16


def verdicts(model: LoadedModel, path: Path, folder: Path) -> dict[str, Verdict | KvQualityError]:
    """Of every dtype that has limits."""
    ids = load_tokenizer(path).encode(PROBE_TEXT, add_special_tokens=False)
    settings = QualitySettings(token_ids=tuple(ids[:256]), cache_folder=str(folder))
    found: dict[str, Verdict | KvQualityError] = {}
    backend = CpuBackend()
    for name in LIMITS:
        gate = QualityGate(settings, model, resolve_kv_dtype(name), BLOCK_SIZE, "cpu")
        try:
            found[name] = gate.recall() or gate.settle(
                CpuTrial(Decoder(model, backend), backend, BLOCK_SIZE)
            )
        except KvQualityError as error:
            found[name] = error
    return found


def test_smollm2_bears_every_dtype_as_it_is(demo_model: Path, tmp_path: Path) -> None:
    for name, verdict in verdicts(load_model(demo_model), demo_model, tmp_path).items():
        assert isinstance(verdict, Verdict), name
        assert verdict.scales is None
        assert verdict.figures is not None
        # Far enough within the limits that rounding on another processor changes nothing.
        assert verdict.figures.kl_nats < LIMITS[name].kl_nats / 2


def test_with_large_channels_it_bears_scaled_int8_and_k16v8(
    demo_model: Path, tmp_path: Path
) -> None:
    model = provoked(load_model(demo_model), 200.0, every=3)
    found = verdicts(model, demo_model, tmp_path)
    for name in ("fp8", "fp8_e5m2"):
        assert isinstance(found[name], KvQualityError)
        assert "int8 with K channel scales passes" in str(found[name])
    int8, k16v8 = found["int8"], found["k16v8"]
    assert isinstance(int8, Verdict)
    assert int8.scales is not None
    assert isinstance(k16v8, Verdict)
    assert k16v8.scales is None
