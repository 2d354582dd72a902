"""What is decided from figures, and what is said; no model is run."""

from __future__ import annotations

import json
import logging
import math
import threading
from pathlib import Path

import pytest
import torch

from deepinfer.kvstore.core.layout import KV_DTYPE_NAMES, KvLayout, resolve_kv_dtype
from deepinfer.workers.core.quality import (
    INT8_SCALED,
    LIMITS,
    Candidate,
    Figures,
    alternatives,
    candidates,
    refusal,
    remarks,
)
from deepinfer.workers.model.key_scales import KeyScales
from deepinfer.workers.quality_cache import Findings, QualityCache
from deepinfer.workers.quality_settings import QualitySettings
from deepinfer.workers.swap import KvIdentity


def figures(kl: float, agreement: float, saturations: int = 0) -> Figures:
    return Figures(kl_nats=kl, agreement=agreement, positions=256, saturations=saturations)


SMOLLM2 = {
    "int8": figures(0.0012, 0.975),
    "k16v8": figures(0.0012, 0.978),
    "fp8": figures(0.0119, 0.926),
    "fp8_e5m2": figures(0.0422, 0.861),
}
"""On a text that it predicts badly: docs/results/quality.json."""
QWEN_CODER = {
    "int8": figures(0.022, 0.88),
    "k16v8": figures(0.0005, 0.98),
    "fp8": figures(0.025, 0.87),
    "fp8_e5m2": figures(0.105, 0.74),
}
"""Qwen2.5-Coder-0.5B."""


def test_limits_tell_a_sound_model_from_one_with_outliers() -> None:
    assert {dtype: found.passes(dtype) for dtype, found in SMOLLM2.items()} == dict.fromkeys(
        LIMITS, True
    )
    passed = {dtype for dtype, found in QWEN_CODER.items() if found.passes(dtype)}
    assert passed == {"k16v8"}
    assert figures(0.001, 0.98).passes("int8"), "what key scales make of it"


def test_both_figures_count_and_nan_never_passes() -> None:
    limit = LIMITS["fp8"]
    assert figures(limit.kl_nats, limit.agreement).passes("fp8")
    assert not figures(limit.kl_nats * 1.01, 1.0).passes("fp8")
    assert not figures(0.0, limit.agreement - 0.01).passes("fp8")
    assert not figures(math.nan, 1.0).passes("fp8")
    for wrong in ((-0.1, 1.0), (0.1, 1.1), (0.1, math.nan)):
        with pytest.raises(ValueError, match="kl_nats"):
            figures(*wrong)


def test_every_dtype_but_the_reference_has_limits() -> None:
    named = {resolve_kv_dtype(name).name for name in KV_DTYPE_NAMES}
    assert set(LIMITS) == named - {"fp16"}
    assert candidates("fp16") == ()
    assert candidates("int8") == (Candidate("int8"), INT8_SCALED)
    assert candidates("fp8") == (Candidate("fp8"),)


def test_alternatives_come_by_their_bytes() -> None:
    assert alternatives("fp8") == (Candidate("int8"), INT8_SCALED, Candidate("k16v8"))
    assert alternatives("int8") == (Candidate("k16v8"),)
    sizes = [
        KvLayout(resolve_kv_dtype(one.dtype), 2, 2, 64, 16).block_bytes
        for one in (*alternatives("fp8"), Candidate("fp16"))
    ]
    assert sizes == sorted(sizes)


def test_a_refusal_has_the_figures_and_what_to_take() -> None:
    bad = figures(0.9, 0.54)
    said = str(refusal("fp8", {Candidate("fp8"): bad, Candidate("int8"): SMOLLM2["int8"]}))
    assert said == (
        "kv_cache_dtype = 'fp8': this model loses too much with it. Beside FP16 KV, over 256 "
        "tokens: fp8: KL 0.9 nats, top token the same at 54.0%; allowed are KL 0.02 and 90%. int8 "
        "passes (KL 0.0012 nats, top token the same at 97.5%): take --kv-cache-dtype int8, or "
        "--kv-quality off to serve it all the same"
    )
    measured = {Candidate("fp8"): bad, Candidate("int8"): bad, INT8_SCALED: figures(0.001, 0.98)}
    said = str(refusal("fp8", measured))
    assert "int8 with K channel scales passes (KL 0.001 nats" in said
    assert "take --kv-cache-dtype int8" in said
    measured = {Candidate("int8"): bad, INT8_SCALED: bad, Candidate("k16v8"): bad}
    said = str(refusal("int8", measured))
    assert "int8: KL 0.9" in said
    assert "int8 with K channel scales: KL 0.9" in said
    assert "only fp16 passes: take --kv-cache-dtype fp16, or --kv-quality off" in said


def test_what_is_served_is_said_with_its_figures() -> None:
    [line] = remarks(INT8_SCALED, SMOLLM2["int8"])
    assert line == (
        "KV quality, int8 with K channel scales beside fp16: KL 0.0012 nats, top token the same at "
        "97.5% of 256 tokens (allowed are 0.01 and 93%)"
    )
    first, second = remarks(Candidate("fp8"), figures(0.9, 0.5, saturations=1234))
    assert first.startswith("warning: ")
    assert first.endswith("it fails)")
    assert second == (
        "warning: 1,234 K and V elements of these tokens are beyond the range of fp8 and were "
        "clamped"
    )


def test_a_text_is_needed() -> None:
    with pytest.raises(ValueError, match="token_ids: 1 tokens, must be 2 or more"):
        QualitySettings(token_ids=(1,), cache_folder="x")


# ---- what is remembered --------------------------------------------------------------------


def cache(folder: Path, **changes: object) -> QualityCache:
    about = {"model": "ab12", "tokens": (1, 2, 3), "block_size": 16, "device": "cpu"} | changes
    return QualityCache(folder / "kv-quality", **about)  # type: ignore[arg-type]


FOUND = Findings(
    {Candidate("int8"): figures(math.nan, 0.5), INT8_SCALED: figures(0.001, 0.98, 3)},
    KeyScales(torch.ones((1, 2, 4), dtype=torch.int8)),
)


def test_findings_are_read_back(tmp_path: Path) -> None:
    assert cache(tmp_path).read().figures == {}
    cache(tmp_path).write(FOUND)
    found = cache(tmp_path).read()
    assert math.isnan(found.figures.pop(Candidate("int8")).kl_nats)
    assert found.figures == {INT8_SCALED: FOUND.figures[INT8_SCALED]}
    assert found.scales is not None
    assert FOUND.scales is not None
    assert found.scales.digest == FOUND.scales.digest
    for change in (
        {"model": "cd34"},
        {"tokens": (1, 2)},
        {"block_size": 32},
        {"device": "NVIDIA A10"},
    ):
        assert cache(tmp_path, **change).read().figures == {}, change
    assert [p.suffix for p in (tmp_path / "kv-quality").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace("ab12", "ffff"),
        lambda text: text.replace("0.98", "1.98"),
        lambda text: text.replace('"agreement"', '"aggrement"'),
        lambda text: json.dumps(json.loads(text) | {"key_exponents": None}),
        lambda text: json.dumps(json.loads(text) | {"key_exponents": [[[77]]]}),
        lambda text: "[" * 100_000,
    ],
)
def test_a_damaged_file_is_as_good_as_none(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    cache(tmp_path).write(FOUND)
    [file] = (tmp_path / "kv-quality").iterdir()
    file.write_text(damage(file.read_text()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert cache(tmp_path).read().figures == {}
    assert "is not used" in caplog.text


def test_one_measures_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with cache(tmp_path).held():
            inside.set()
            leave.wait(10)
            order.append("first")

    def second() -> None:
        with cache(tmp_path).held():
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert order == []
    leave.set()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "second"]


def test_a_folder_that_cannot_be_written_only_costs_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv-quality").write_text("a file")
    with caplog.at_level(logging.WARNING), cache(tmp_path).held():
        cache(tmp_path).write(FOUND)
    assert cache(tmp_path).read().figures == {}
    assert "measured again" in caplog.text


# ---- whose payloads it is ------------------------------------------------------------------


def test_scaled_k_is_another_layout() -> None:
    layout = KvLayout(resolve_kv_dtype("int8"), 2, 2, 64, 16)
    plain, scaled = KvIdentity(model="m"), KvIdentity(model="m", key_scales="0123456789abcdef")
    assert plain.layout(layout) == layout.fingerprint()
    other = KvIdentity(model="m", key_scales="fedcba9876543210")
    names = {identity.layout(layout) for identity in (plain, scaled, other)}
    assert len(names) == 3
