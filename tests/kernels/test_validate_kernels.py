"""``deepinfer validate-kernels`` without a card: its checks in the emulator, tiny ones."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from deepinfer.deploy.bench.random_w4 import random_w4_model
from deepinfer.deploy.bench.random_weights import QWEN25_3B, random_model
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.validate import accuracy, report, run, suite
from deepinfer.deploy.validate.accuracy import Accuracy, Miss
from deepinfer.deploy.validate.attention_checks import decode_checks, prefill_checks
from deepinfer.deploy.validate.checks import Check, Outcome, perform
from deepinfer.deploy.validate.layer_checks import linear_checks, pointwise_checks
from deepinfer.deploy.validate.model_checks import model_checks
from deepinfer.deploy.validate.scope import KV_DTYPES, Scope, make_scope
from deepinfer.deploy.validate.second import SecondRun
from deepinfer.deploy.validate.subject import Subject, make_subject, random_ids
from deepinfer.kernels import linear
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.weights import LoadedModel
from kernels.simt.build import COMPILER, emulator
from support.gpu_runner import cpu_runner, emulated_gpu

needs_emulator = pytest.mark.skipif(COMPILER is None, reason="needs g++")

TINY = Scope(
    device="cpu",
    hopper=False,
    kv_dtypes=("fp16",),
    heads=((64, 3),),
    linears=(),
    thorough=False,
    length_max=90,
    prompt=60,
    weight_max=40 * 96,
)
MODEL = ModelConfig(
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


@needs_emulator
def test_kernels_pass_every_kind_of_check() -> None:
    checks = [
        *pointwise_checks(TINY),
        *decode_checks(dataclasses.replace(TINY, kv_dtypes=("int8",))),
        *prefill_checks(TINY),
        *linear_checks(TINY),
    ]
    with emulator():
        outcomes = [perform(check, "emulated") for check in checks]
    assert [each for each in outcomes if each.misses] == []
    assert {each.kernel for each in outcomes} == {
        *("embed", "norms", "swiglu", "copy_blocks", "rope_kv_write"),
        *("paged_decode", "paged_prefill", "linear"),
    }
    compared = [each for each in outcomes if each.results]
    exact = ("same bits", "every V code")
    assert all(
        0 < each.share <= 1 for each in compared if not any(words in each.name for words in exact)
    )
    assert "saturated d64" in " ".join(each.name for each in outcomes)


@needs_emulator
def test_a_kernel_that_is_a_little_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(out: Tensor, *arguments: Any, **options: Any) -> None:
        right(out, *arguments, **options)
        out[-1, 0] += 0.004

    right = linear.linear_norm
    check = next(iter(linear_checks(TINY)))
    with emulator():
        assert perform(check, "emulated").misses == ()
        monkeypatch.setattr(linear, "linear_norm", wrong)
        outcome = perform(check, "emulated")
    assert len(outcome.misses) == 1
    assert outcome.misses[0].startswith("norm: error 0.00")


@needs_emulator
@pytest.mark.parametrize("kind", ["plain", "4 bits", "nested", "FP8", "W8A8"])
def test_models_are_held_to_what_torch_itself_errs(kind: str) -> None:
    def load() -> LoadedModel:
        return random_w4_model(MODEL) if kind == "4 bits" else random_model(MODEL)

    def open_runner(model: LoadedModel, layout: KvLayout) -> GpuRunner:
        assert layout.block_size == 16
        return cpu_runner(
            MODEL,
            model=model,
            kv_cache_dtype=layout.dtype.name,
            blocks=trial.blocks,
            levels=2 if model.nested else 1,
            w8a8_rows=12 if kind == "W8A8" else 0,
        )

    cpu = torch.device("cpu")
    ids = random_ids(MODEL, 45)
    fp16, fp8, w8a8 = suite.nested_trials("tiny", load, ids, cpu)
    nested = {"nested": fp16, "FP8": fp8, "W8A8": w8a8}
    made = nested.get(kind) or suite.make_trial("tiny", load, ids)
    trial = dataclasses.replace(made, prompt=37, chunk=20, wide=6, mixed=2)
    dtypes = ("fp16", "int8") if kind == "plain" else ("fp16",)
    with emulated_gpu():
        outcomes = [perform(check, "") for check in model_checks(trial, dtypes, open_runner, cpu)]
    assert [each.misses for each in outcomes] == [()] * len(dtypes)
    assert [each.results for each in outcomes] == [1 if kind == "W8A8" else 4] * len(dtypes)
    assert all(0 < each.error < 0.1 for each in outcomes)


def test_a_full_scope_has_all_there_is() -> None:
    scope = make_scope(QWEN25_3B, device="cpu", hopper=True, quick=False)
    assert scope.heads[-1] == (128, 8)
    assert len(scope.heads) == 15
    checks = list(suite.kernel_checks(scope))
    assert {(c.kernel, c.variant) for c in checks} >= {
        (kernel, dtype)
        for kernel in ("paged_decode", "paged_prefill", "rope_kv_write")
        for dtype in KV_DTYPES
    }
    assert len({(c.kernel, c.variant, c.name) for c in checks}) == len(checks)
    quick = suite.kernel_checks(make_scope(QWEN25_3B, device="cpu", hopper=True, quick=True))
    assert len(list(quick)) < len(checks) / 2
    assert any("hopper" in spec.name for check in checks for spec in check.specs)


def test_the_rules_are_those_of_the_design() -> None:
    exact = torch.linspace(0.1, 1, 64, dtype=torch.float64).repeat(2, 1)

    def problem(changed: float, *, e5m2: bool = False) -> str | None:
        out = exact.clone()
        out[0, 5] += changed
        return accuracy.attention("x", out, exact, e5m2=e5m2).problem

    assert problem(0.0009) is None
    assert "x: error 0.0011 of 0.001" in (problem(0.0011) or "")
    assert problem(math.nan) is not None
    # Outputs of 2 to 4: half an ulp is 2^-10.
    assert accuracy.attention("x", 3 * exact, 3 * exact).allowed == 2 * 2.0**-10
    assert accuracy.product("x", exact * 0.9, exact * 0.9).allowed == 2 * 2.0**-12
    assert accuracy.half_ulp(0.0) == accuracy.half_ulp(1e-7) == 2.0**-25
    assert Accuracy("x", 0.0, 1.0, row_cosine=0.9999989).problem is not None
    assert Accuracy("x", 0.0, 1.0, cosine=0.9999998).problem is not None
    assert Accuracy("x", 0.0, 1.0, cosine=0.9999998, cosine_min=0.999999).problem is None
    with pytest.raises(Miss, match="shape"):
        accuracy.product("x", exact[:1], exact)


def test_a_direction_is_asked_for_as_far_as_halves_are_fine() -> None:
    random = torch.Generator().manual_seed(0)
    exact = torch.randn((3, 512), generator=random, dtype=torch.float64)

    def problem(scale: float, off: float, *, single: bool = False) -> str | None:
        """Of ``scale * exact`` as halves, every element off by ``off``, signs at random."""
        want = scale * exact
        signs = torch.randn(exact.shape, generator=random).sign()
        out = (want + off * signs).to(torch.float32 if single else torch.float16)
        return accuracy.product("x", out, want).problem

    subnormal = 2.0**-19
    # Rounded once: all that halves can hold of it, though the plain cosine is about 1 - 4e-5.
    rounded = (subnormal * exact).half().double()
    plain = torch.nn.functional.cosine_similarity(rounded, subnormal * exact, dim=1)
    assert float(plain.min()) < 0.99999
    assert problem(subnormal, 0.0) is None
    # A step further, which the largest error alone would let pass.
    assert problem(subnormal, 2.0**-25) is not None
    # Single precision has such numbers exactly.
    assert problem(subnormal, 2.0**-26, single=True) is not None
    # Where halves have all their bits nothing is forgiven that was not.
    for scale in (2.0**-10, 1.0, 1000.0):
        assert problem(scale, 0.0) is None
        assert problem(scale, 0.0015 * scale) is not None
    assert accuracy.product("x", torch.zeros(1, 8).half(), 2.0**-23 * exact[:1, :8]).problem


def test_whatever_a_check_raises_is_a_miss() -> None:
    def broken() -> Iterator[Accuracy]:
        yield Accuracy("first", 3.0, 2.0)
        raise RuntimeError("an illegal address")

    outcome = perform(Check("k", "v", "n", broken), "sm_86")
    assert outcome.misses == (
        "RuntimeError: an illegal address",
        "first: error 3 of 2, cosine of the worst row 1 - 0.00e+00, of all 1 - 0.00e+00",
    )
    assert Outcome.from_json(json.loads(json.dumps(dataclasses.asdict(outcome)))) == outcome


def test_misses_are_told_written_and_end_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def good() -> Iterator[Accuracy]:
        yield Accuracy("x", 1.0, 2.0)

    def bad() -> Iterator[Accuracy]:
        yield Accuracy("y", math.nan, 2.0, math.nan, math.nan)

    card = Card(index=0, name="C", capability=(8, 6), multiprocessors=2, bytes_total=1 << 33)
    checks = [Check("good", "fp16", "1", good), Check("bad", "", "2", bad)]
    monkeypatch.setattr(run, "usable_card", lambda: (card, "sm_86"))
    monkeypatch.setattr(run, "card_checks", lambda *_, **__: checks)
    monkeypatch.setattr(report, "card_facts", lambda _: {"name": "C"})
    console = Console(record=True, width=150)

    def go() -> bool:
        return run.run_validation(
            None, "smollm2", quick=True, ptx=True, output=tmp_path, console=console
        )

    assert go() is False
    text = console.export_text()
    assert "missed (sm_86): bad  2: y: error nan of 2" in text
    assert "1 of 2 checks pass (sm_86)" in text
    found = json.loads((tmp_path / "kernel_validation.json").read_text("utf-8"))
    assert (found["checks"], found["missed"]) == (2, 1)
    assert found["groups"][1]["share"] is None
    assert found["command"] == "deepinfer validate-kernels --shape smollm2 --quick"
    checks.pop()
    assert go() is True


def test_without_a_card_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(ConfigError, match=r"install|driver"):
        run.run_validation(
            None, "smollm2", quick=True, ptx=True, output=tmp_path, console=Console(quiet=True)
        )
    with pytest.raises(ConfigError, match=r"shape = 'big': must be qwen2\.5-3b or smollm2"):
        make_subject(None, "big", console=Console(quiet=True))
    assert Subject(shape="smollm2").config().hidden_size == 576


def test_random_4_bit_weights_are_the_same_numbers_both_ways() -> None:
    model = random_w4_model(dataclasses.replace(MODEL, hidden_size=128))
    name = "model.layers.1.self_attn.q_proj.weight"
    packed = model.weights.read_quantized(name)
    assert packed is not None
    assert torch.equal(packed.dequantised(), model.weights.read(name).float())
    assert 0.4 < float(model.weights.read(name).float().square().sum(1).mean()) < 2
    assert model.weights.read_quantized("model.embed_tokens.weight") is None


def test_a_second_process_that_ends_early_is_a_miss() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    seen: list[Outcome] = []
    second = SecondRun(Subject(shape="smollm2"), "compute_86", quick=True, seen=seen.append)
    second.finish()
    [outcome] = seen
    assert (outcome.target, outcome.kernel) == ("compute_86", "process")
    told = "ended with code 1 after 0 of an unknown number of checks: "
    assert outcome.misses[0].startswith(told)
    assert "without CUDA" in outcome.misses[0] or "no CUDA device" in outcome.misses[0]


@pytest.mark.parametrize(("announced", "missing"), [(1, False), (2, True)])
def test_a_second_process_says_itself_how_many_checks_it_has(
    monkeypatch: pytest.MonkeyPatch, announced: int, missing: bool
) -> None:
    outcome = Outcome(
        target="compute_86",
        kernel="linear",
        variant="w8a8",
        name="rows quantised",
        seconds=0.0,
        results=1,
        row_cosine=1.0,
        cosine=1.0,
        error=0.0,
        share=0.0,
        misses=(),
    )
    lines = f"checks: {announced}\n{json.dumps(dataclasses.asdict(outcome))}\n"
    popen = subprocess.Popen

    def stand_in(_: object, **options: Any) -> subprocess.Popen[str]:
        return popen([sys.executable, "-c", f"print({lines!r})"], **options)

    monkeypatch.setattr(subprocess, "Popen", stand_in)
    seen: list[Outcome] = []
    second = SecondRun(Subject(shape="smollm2"), "compute_86", quick=True, seen=seen.append)
    second.finish()
    assert seen[0] == outcome
    misses = [miss for each in seen[1:] for miss in each.misses]
    assert misses == (["ended with code 0 after 1 of 2 checks: "] if missing else [])
