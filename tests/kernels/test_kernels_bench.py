"""``bench kernels`` without a card: its launches in the emulator, each once, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from deepinfer.deploy.bench import (
    kernel_attention,
    kernel_linears,
    kernel_nested,
    kernel_plots,
    kernel_pointwise,
    kernel_timing,
)
from deepinfer.deploy.bench.kernel_attention import AttentionShape
from deepinfer.deploy.bench.kernel_projection import step_bytes
from deepinfer.deploy.bench.kernel_report import tables
from deepinfer.deploy.bench.kernels import Plan, run_kernels
from deepinfer.deploy.bench.random_weights import QWEN25_3B
from deepinfer.deploy.config import ConfigError
from deepinfer.workers.gpu import card
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.model.config import ModelConfig
from kernels.simt.build import COMPILER, emulator

needs_emulator = pytest.mark.skipif(COMPILER is None, reason="needs g++")

TINY = ModelConfig(
    family="qwen2",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=64,
    max_positions=512,
    rms_eps=1e-6,
    rope_theta=1e4,
    qkv_bias=True,
)
FACTS: dict[str, Any] = {
    "shape": "tiny",
    "gpu": {"name": "emulator"},
    "copy_bytes_per_s": {"1": 4e12},
}


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionShape]:
    """The emulator as a card of four multiprocessors, on which everything takes 3 µs."""
    here = torch.device("cpu")
    monkeypatch.setattr(card.Card, "device", property(lambda _: here))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 26, 1 << 26))

    def once(calls: Sequence[Callable[[], object]]) -> float:
        for call in calls:
            call()
        return 3.0

    for module in (kernel_attention, kernel_linears, kernel_nested, kernel_pointwise):
        monkeypatch.setattr(module, "graph_us", once)
        monkeypatch.setattr(module, "rotations", lambda *_, **__: 3)
    with emulator():
        yield AttentionShape(
            config=TINY,
            card=Card(
                index=0,
                name="emulator",
                capability=(8, 6),
                multiprocessors=4,
                bytes_total=1 << 26,
            ),
        )


@needs_emulator
def test_attention_is_launched_as_it_is_served(
    shape: AttentionShape, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        kernel_attention, "PREFILLS", {"short": ((0, 20),), "two": ((16, 9), (0, 5))}
    )
    own = list(kernel_attention.time_decode(shape, "fp16", [(1, 32), (2, 64)]))
    assert [(each["batch"], each["context"]) for each in own] == [(1, 32), (2, 64)]
    # K and V of one head of 64 halves a layer.
    assert [each["bytes"] for each in own] == [32 * 256, 128 * 256]
    assert own[0]["bytes_per_s"] == pytest.approx(32 * 256 / 3e-6)
    assert own[1]["rotated_bytes"] == 3 * 128 * 256
    found = FACTS | {"own": own, "peers": [{"mode": "fp16", "us": None, "error": "too slow"}]}
    assert len(list(tables("decode", found))) == 1

    own = [kernel_attention.time_prefill(shape, "fp16", name) for name in ("short", "two")]
    # Row i of a prompt attends i + 1 tokens: 4 * 2 heads * 64 for each pair.
    assert own[0]["flop_per_s"] == pytest.approx(512 * 210 / 3e-6)
    assert own[1]["flop_per_s"] == pytest.approx(512 * (16 * 9 + 45 + 15) / 3e-6)
    found = FACTS | {"flop_per_s": 1e12, "own": own, "peers": []}
    assert len(list(tables("prefill", found))) == 1
    if kernel_plots.can_draw():
        kernel_plots.plot_prefill(found, tmp_path / "prefill.png")
        assert (tmp_path / "prefill.png").stat().st_size > 5_000


@needs_emulator
def test_linears_and_pointwise_kernels_are_launched(
    shape: AttentionShape, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = (2, 70)
    records = list(kernel_linears.time_linears(TINY, shape.card.device, peers=False, rows=rows))
    assert [(each["weight"], each["rows"]) for each in records] == [
        *((name, m) for name in ("qkv", "o", "gate_up", "down") for m in rows),
        ("head", 2),
    ]
    assert all(each["f16_us"] == 3.0 for each in records)
    assert [each["w4_us"] for each in records] == [3.0] * 8 + [None]
    assert len(list(tables("linear", FACTS | {"linears": records}))) == 1

    records = list(kernel_nested.time_nested(TINY, shape.card.device, peers=True, rows=(1, 17)))
    assert [(each["weight"], each["rows"]) for each in records][::2] == [
        (name, 1) for name in ("qkv", "o", "gate_up", "down", "head")
    ]
    assert all(each["nested_us"] == each["nested_fp8_us"] == 3.0 for each in records)
    assert [each["expanded_us"] for each in records] == [None, 3.0] * 5
    assert len(list(tables("nested", FACTS | {"nested": records}))) == 1
    if kernel_plots.can_draw():
        kernel_plots.plot_nested(FACTS | {"nested": records}, tmp_path / "nested.png")
        assert (tmp_path / "nested.png").stat().st_size > 5_000

    monkeypatch.setattr(kernel_pointwise, "ROWS", (3,))
    monkeypatch.setattr(kernel_pointwise, "KV_DTYPES", ("fp16",))
    records = list(kernel_pointwise.time_pointwise(shape, peers=True))
    kernels = {each["kernel"] for each in records}
    assert kernels == {"rms_norm", "residual_add_norm", "swiglu", "rope_kv_write", "copy_blocks"}
    assert len(list(tables("pointwise", FACTS | {"kernels": records}))) == 1


def test_rotations_pass_four_times_the_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 50 << 20

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert kernel_timing.rotations(10 << 20) == 20
    assert kernel_timing.rotations(1 << 30) == 2
    assert kernel_timing.rotations(1) == 800


def test_numbers_of_a_pool_are_finite_in_every_dtype() -> None:
    storage = torch.empty(3, 4096, dtype=torch.uint8)
    kernel_timing.fill_with_numbers(storage)
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        values = storage.view(dtype).float()
        assert values.isfinite().all()
        assert 0 < float(values.abs().max()) < 4


def test_the_projection_is_of_the_bytes_that_are_known() -> None:
    gigabytes = [step_bytes(QWEN25_3B, weights, 0, 1, 0) / 1e9 for weights in ("fp16", "w4a16")]
    assert gigabytes == [pytest.approx(6.171, abs=1e-3), pytest.approx(2.053, abs=2e-3)]


def test_the_projection_needs_no_card(tmp_path: Path) -> None:
    plan = Plan(shape="qwen2.5-3b", parts=("projection",))
    run_kernels(plan, output=tmp_path, console=Console(quiet=True))
    found = json.loads((tmp_path / "kernels_projection.json").read_text("utf-8"))
    assert found["projection"] is True
    [row] = [
        each
        for each in found["rows"]
        if (each["weights"], each["kv_cache_dtype"]) == ("fp16", "fp16")
        and (each["batch"], each["context"]) == (1, 2048)
    ]
    rates = [each["roofline"] for each in row["tokens_per_s"].values()]
    assert [round(rate) for rate in rates] == [31, 96, 150]
    assert all(each["projected"] is None for each in row["tokens_per_s"].values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shape": "big"}, "shape = 'big': must be one of qwen2.5-3b"),
        ({"parts": ("decode", "all")}, "part = 'all': must be one of decode"),
        ({"kv_dtypes": ("fp32",)}, "kv-cache-dtype = 'fp32': must be one of fp16"),
        ({"batches": (0,)}, "batches: 0 must be a positive multiple of 1"),
        ({"contexts": (500,)}, "contexts: 500 must be a positive multiple of 512"),
    ],
)
def test_plans_that_cannot_be_measured_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**({"shape": "qwen2.5-3b"} | fields))  # type: ignore[arg-type]
