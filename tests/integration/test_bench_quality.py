"""`bench quality` on a tiny model: its figures against ones computed another way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from deepinfer.deploy.bench.quality import (
    CHUNK_TOKENS,
    DTYPES,
    SONNETS,
    Plan,
    common,
    compare,
    cut_windows,
    run_quality,
    served_logits,
)
from deepinfer.deploy.bench.quality_report import Window, exponential, figures_of, spread
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.models import ModelUnavailableError
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.text.load import load_tokenizer
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.pool import PagedPool
from support.tiny_model import write_tiny_llama

PLAN = Plan(windows=3, window_tokens=96, answers=2, prompt_tokens=16, answer_tokens=8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def found(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    output = tmp_path_factory.mktemp("quality")
    figures = run_quality(
        model=str(tiny), plan=PLAN, text=None, output=output, console=Console(quiet=True)
    )
    written: dict[str, Any] = json.loads((output / "quality.json").read_text())
    assert written.items() >= figures.items()
    assert (output / "quality.png").stat().st_size > 10_000
    return written


def test_the_reference_is_transformers_own_loss(found: dict[str, Any], tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokenizer = load_tokenizer(tiny)
    windows, tokens = cut_windows(tokenizer, SONNETS.read_text(encoding="utf-8"), PLAN)
    with torch.inference_mode():
        losses = [
            float(model(torch.tensor([window]), labels=torch.tensor([window])).loss)
            for window in windows
        ]
    expected = math.exp(sum(losses) / len(losses))
    assert found["results"]["fp32"]["perplexity"]["mean"] == pytest.approx(expected, rel=1e-4)
    assert found["text"]["tokens"] == tokens
    assert found["positions"] == 3 * 95
    assert found["command"].startswith(f"deepinfer bench quality --model {tiny.name} ")


def test_every_dtype_is_measured_and_a_coarser_one_is_further_away(found: dict[str, Any]) -> None:
    results = found["results"]
    assert list(results) == ["fp32", *DTYPES]
    assert results["fp32"]["kl_nats"]["mean"] == 0
    assert results["fp32"]["top_token_agreement"]["mean"] == 1
    kl = {dtype: results[dtype]["kl_nats"]["mean"] for dtype in DTYPES}
    assert 0 < kl["fp16"] < kl["int8"] < kl["k16v8"] < kl["fp8"] < kl["fp8_e5m2"]
    assert kl["fp16"] < 1e-4  # our runner and transformers compute the same model
    for dtype in DTYPES:
        one = results[dtype]
        ratio = one["perplexity"]["mean"] / results["fp32"]["perplexity"]["mean"]
        assert one["perplexity_over_fp32"]["mean"] == pytest.approx(ratio, rel=1e-4)
        assert one["kl_nats_p99"] >= one["kl_nats"]["mean"]
        assert 0 <= one["greedy_answers_alike"] <= 2
        assert 0 <= one["greedy_tokens_alike"]["mean"] <= 8
        assert one["kv_elements_clamped"] == 0
    assert results["fp16"]["greedy_tokens_alike"]["mean"] == 8
    assert results["fp8"]["kv_bytes_a_token"] * 2 == results["fp16"]["kv_bytes_a_token"]


def test_what_is_scored_is_what_is_served(tiny: Path) -> None:
    """Chunks through a prompt and decoding token by token give the logits that are scored."""
    loaded = load_model(tiny)
    backend = CpuBackend()
    decoder = Decoder(loaded, backend)
    layout = decoder.kv_layout(resolve_kv_dtype("int8"), 16)
    tokens = [(7 * i) % 250 for i in range(CHUNK_TOKENS + 20)]
    blocks = layout.blocks_for(len(tokens))
    scored = served_logits(ModelRunner(decoder, PagedPool(layout, blocks), backend), tokens)
    assert scored.shape == (len(tokens), loaded.config.vocab_size)
    runner = ModelRunner(decoder, PagedPool(layout, blocks), backend)
    table = list(range(blocks))
    runner.forward([SequenceSlice(tokens[:-3], 0, table, logits=False)])
    for at in range(len(tokens) - 3, len(tokens)):
        [decoded] = runner.forward([SequenceSlice(tokens[at : at + 1], at, table, logits=True)])
        assert torch.equal(decoded, scored[at])


def test_a_window_is_compared_position_by_position() -> None:
    even = torch.zeros(3, 4)
    sure = torch.tensor([[0.0, 0.0, 0.0, math.log(3)]] * 3)  # 1/6, 1/6, 1/6, 1/2
    targets = torch.tensor([3, 0, 3])
    window = compare(sure, targets, torch.log_softmax(even.double(), dim=-1))
    nll = (2 * math.log(2) + math.log(6)) / 3
    kl = math.log(1 / 4) - (3 * math.log(1 / 6) + math.log(1 / 2)) / 4
    assert window.nll == pytest.approx(nll, rel=1e-6)
    assert window.kl == pytest.approx([kl] * 3, rel=1e-6)
    assert window.agreement == 0  # of equals the first counts as the top token
    same = compare(sure, targets, torch.log_softmax(sure.double(), dim=-1))
    assert (same.agreement, same.kl) == (1, (0, 0, 0))


def test_a_reference_of_nan_compares_with_nothing() -> None:
    logits = torch.zeros(2, 3)
    broken = torch.log_softmax(torch.tensor([[0.0, 1.0, 2.0], [0.0, math.nan, 0.0]]).double(), -1)
    with pytest.raises(ModelUnavailableError, match="the reference's logits are NaN"):
        compare(logits, torch.tensor([1, 2]), broken)


def test_errors_are_over_windows() -> None:
    assert tuple(spread([1.0, 2.0, 3.0])) == pytest.approx((2.0, 1 / math.sqrt(3)))
    assert tuple(exponential(spread([0.0, 2.0]))) == pytest.approx((math.e, math.e))
    right = [Window(1.0, 1.0, (0.0, 0.0)), Window(5.0, 1.0, (0.0, 0.0))]
    ours = [Window(1.5, 0.5, (0.1, 0.3)), Window(5.5, 1.0, (0.0, 0.4))]
    figures = figures_of(ours, right)
    assert figures["perplexity_over_fp32"] == {"mean": 1.64872, "standard_error": 0.0}
    assert figures["kl_nats"] == {"mean": 0.2, "standard_error": 0.0}
    assert figures["top_token_agreement"] == {"mean": 0.75, "standard_error": 0.25}
    assert figures["kl_nats_p99"] == pytest.approx(0.397, abs=1e-9)


def test_answers_are_alike_up_to_the_first_difference() -> None:
    assert common([1, 2, 3], [1, 2, 3]) == 3
    assert common([1, 9, 3], [1, 2, 3]) == 1
    assert common([9], [1]) == 0


def test_windows_are_spread_evenly_over_the_text(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    plan = Plan(windows=3, window_tokens=4, answers=2, prompt_tokens=1)
    windows, tokens = cut_windows(tokenizer, "abcdefghijklmnopqrstuvwxyz", plan)
    assert tokens == 26
    assert [tokenizer.decode(window) for window in windows] == ["abcd", "lmno", "wxyz"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"windows": 1}, "windows = 1: must be 2 or more"),
        ({"answers": 9}, "answers = 9: must be at most"),
        ({"prompt_tokens": 600}, "prompt_tokens = 600"),
        ({"dtypes": ("fp16", "int3")}, "int3"),
    ],
)
def test_a_plan_that_cannot_be_names_the_number(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**values)


def test_a_text_or_context_that_is_too_short_is_refused(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = tmp_path / "short.txt"
    text.write_text("few words")

    def run(plan: Plan, text: Path | None) -> None:
        run_quality(
            model=str(tiny), plan=plan, text=text, output=tmp_path, console=Console(quiet=True)
        )

    with pytest.raises(ConfigError, match="has 9 tokens; 3 windows of 96 tokens need 288"):
        run(PLAN, text)
    with pytest.raises(ConfigError, match="up to 600; the model has 512 positions"):
        run(Plan(windows=2, answers=2, window_tokens=600), None)
    assert not (tmp_path / "quality.json").exists()
