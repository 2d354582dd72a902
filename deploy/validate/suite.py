"""The list of checks: of the kernels at every shape they were made for, and of whole models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import torch

from deepinfer.deploy.bench.fp8_values import fp8_model
from deepinfer.deploy.bench.random_w4 import random_w4_model
from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.deploy.validate.attention_checks import decode_checks, prefill_checks
from deepinfer.deploy.validate.checks import Check
from deepinfer.deploy.validate.layer_checks import linear_checks, pointwise_checks
from deepinfer.deploy.validate.model_checks import Opener, Trial, model_checks
from deepinfer.deploy.validate.sampling_checks import sampling_checks
from deepinfer.deploy.validate.scope import Scope, make_scope
from deepinfer.deploy.validate.subject import Subject, random_ids
from deepinfer.kernels.compiler import device_target
from deepinfer.kernels.linear_w8a8 import CAPABILITY_MIN
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.opening import StepSizes, open_gpu
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.settings import GpuSettings, NestedSettings
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.weights import LoadedModel

_HOPPER_TARGET: Final = "sm_90a"
_TOKENS: Final = 384
_W8A8_CHUNK: Final = 192
"""Tokens of a step that has its activations in FP8: as many as are computed, with none padded."""

_SMALL: Final = ModelConfig(
    family="qwen2",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=688,
    layers=3,
    heads=4,
    kv_heads=1,
    head_dim=64,
    max_positions=2048,
    rms_eps=1e-6,
    rope_theta=1e4,
    tied_embeddings=True,
    qkv_bias=True,
)
SMALL_MODELS: Final = {
    "small qwen2": _SMALL,
    "small qwen3": replace(
        _SMALL,
        family="qwen3",
        heads=6,
        kv_heads=2,
        head_dim=128,
        tied_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        o_bias=True,
        mlp_bias=True,
    ),
    "small phi3": replace(
        _SMALL,
        family="phi3",
        kv_heads=4,
        head_dim=96,
        rotary_dim=64,
        qkv_bias=False,
        fused_projections=True,
    ),
}
"""Random models of a few layers: what the families differ in."""


def card_checks(subject: Subject, card: Card, *, quick: bool) -> list[Check]:
    """Everything, for the current target of the kernels on ``card``."""
    config = subject.config()
    hopper = device_target() == _HOPPER_TARGET
    scope = make_scope(config, device=str(card.device), hopper=hopper, quick=quick)
    checks = list(kernel_checks(scope))
    own = make_trial(subject.name, subject.load, subject.ids(_TOKENS))
    dtypes = scope.kv_dtypes[:2] if quick else scope.kv_dtypes
    checks += model_checks(own, dtypes, card_opener(card, own), card.device)
    others: dict[str, tuple[ModelConfig, Callable[[], LoadedModel]]] = {}
    if subject.path is None:
        others[f"{subject.name} in 4 bits"] = (
            config,
            lambda: random_w4_model(config, device="cuda"),
        )
    for name, small in SMALL_MODELS.items():
        others[name] = (small, functools.partial(random_model, small, device="cuda"))
    trials = [
        make_trial(name, load, random_ids(shape, _TOKENS)) for name, (shape, load) in others.items()
    ]
    nested = {name: others[name] for name in SMALL_MODELS}
    if subject.path is None:
        nested[subject.name] = (config, subject.load)
    for name, (shape, load) in nested.items():
        trials += nested_trials(name, load, random_ids(shape, _TOKENS), card.device)
    if card.capability < CAPABILITY_MIN or not device_target().startswith("sm_"):
        trials = [trial for trial in trials if not trial.w8a8]
    for trial in trials:
        checks += model_checks(trial, ("fp16",), card_opener(card, trial), card.device)
    return checks


def kernel_checks(scope: Scope) -> Iterator[Check]:
    """Kernels one by one."""
    yield from pointwise_checks(scope)
    yield from linear_checks(scope)
    yield from decode_checks(scope)
    yield from prefill_checks(scope)
    yield from sampling_checks(scope)


def make_trial(name: str, load: Callable[[], LoadedModel], ids: tuple[int, ...]) -> Trial:
    """Most of ``ids`` in three chunks of unlike length, the others one a step."""
    return Trial(
        name=name,
        load=load,
        ids=ids,
        prompt=len(ids) - 44,
        chunk=150,
        wide=20,
        mixed=8,
    )


def nested_trials(
    name: str, load: Callable[[], LoadedModel], ids: tuple[int, ...], device: torch.device
) -> Iterator[Trial]:
    """A model, nested, at both of its levels and in W8A8."""

    def nested() -> LoadedModel:
        return nest(load())

    yield make_trial(f"{name}, nested", nested, ids)
    yield replace(
        make_trial(f"{name}, nested, FP8", nested, ids),
        level=1,
        load_values=lambda: fp8_model(nested(), device),
    )
    whole = len(ids) // _W8A8_CHUNK * _W8A8_CHUNK
    yield replace(
        make_trial(f"{name}, nested, W8A8", nested, ids),
        prompt=whole,
        chunk=_W8A8_CHUNK,
        level=2,
        w8a8=True,
        load_values=lambda: fp8_model(nested(), device),
    )


def card_opener(card: Card, trial: Trial) -> Opener:
    """Opens a trial's model as a worker does, with a pool of just its size."""

    def open_runner(model: LoadedModel, layout: KvLayout) -> GpuRunner:
        settings = GpuSettings(fill_card=False, probe=False)
        sizes = StepSizes(rows=256, sequences=trial.wide)
        nested = NestedSettings(w8a8=True) if trial.w8a8 else None
        return open_gpu(card, model, layout, settings, sizes, trial.blocks, nested=nested).runner

    return open_runner
