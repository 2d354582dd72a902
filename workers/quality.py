"""The quality gate: measures once what a KV dtype does to a model, and remembers it.

It runs in the worker, which has the device, between loading the weights and making the pool. The
first worker of a machine to get there measures; the others wait for its result, and so does every
later start. Everything it needs of a device is a ``Trial``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from deepinfer.kvstore.core.layout import KvDtype, resolve_kv_dtype
from deepinfer.workers.backends.base import Backend
from deepinfer.workers.core.quality import (
    Candidate,
    Figures,
    alternatives,
    candidates,
    refusal,
    remarks,
)
from deepinfer.workers.engine import Runner
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.key_scales import KeyScales, with_key_scales
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.quality_cache import Findings, QualityCache
from deepinfer.workers.quality_settings import TOKENS_MIN, QualitySettings

log = logging.getLogger(__name__)

CHUNK_TOKENS: Final = 64
"""Computed at a time: what bounds the logits that are held."""


class PooledRunner(Runner, Protocol):
    """A runner with its pool."""

    @property
    def pool(self) -> PagedPool: ...


class Trial(Protocol):
    """A device with a model's weights on it, before its pool is made."""

    chunk_tokens: int
    """The longest step it takes."""

    def runner(self, dtype: KvDtype, tokens: int) -> PooledRunner:
        """A runner with a pool of its own for one sequence of ``tokens``."""
        ...

    def saturations(self) -> int:
        """K and V elements clamped so far, by all its runners."""
        ...

    def take_projections(self, model: LoadedModel) -> None:
        """Read q and k anew: ``model`` is the same, but for key scales."""
        ...


Settle = Callable[[Trial], "Verdict"]
"""``QualityGate.settle``."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a pool is to be: ``scales`` on K's channels or none. ``notes`` are lines to say."""

    scales: KeyScales | None = None
    figures: Figures | None = None
    """None: nothing was measured."""
    notes: tuple[str, ...] = ()

    @property
    def gauges(self) -> dict[str, float]:
        """For metrics and status, by exported name."""
        if self.figures is None:
            return {}
        return {
            "deepinfer_worker_kv_quality_kl_nats": self.figures.kl_nats,
            "deepinfer_worker_kv_quality_agreement_ratio": self.figures.agreement,
            "deepinfer_worker_kv_key_scales": float(self.scales is not None),
        }

    def model(self, loaded: LoadedModel) -> LoadedModel:
        """The model whose K that pool keeps."""
        return loaded if self.scales is None else with_key_scales(loaded, self.scales)


class QualityGate:
    """Decides for one model and one dtype; ``device`` names what computes, ``cpu`` or a card."""

    def __init__(
        self,
        settings: QualitySettings,
        model: LoadedModel,
        dtype: KvDtype,
        block_size: int,
        device: str,
    ) -> None:
        self._mode = settings.mode
        self._model = model
        self._dtype = dtype
        self._tokens = settings.token_ids[: model.config.max_positions]
        self._cache = QualityCache(
            Path(settings.cache_folder), model.fingerprint, self._tokens, block_size, device
        )

    def recall(self) -> Verdict | None:
        """The verdict, if all that it needs was found out before.

        Raises KvQualityError: the dtype is refused.
        """
        if not self._judges:
            return Verdict()
        return self._judge(self._cache.read(), None)

    def settle(self, trial: Trial) -> Verdict:
        """The verdict, measured where it has to be; takes seconds.

        Afterwards the trial has the weights that belong to it. Raises KvQualityError: the dtype
        is refused.
        """
        if not self._judges:
            return Verdict()
        with self._cache.held():
            # Another worker may have had the lock.
            found = self._cache.read()
            measurer = _Measurer(trial, self._model, self._tokens, found)
            try:
                verdict = self._judge(found, measurer)
            finally:
                self._cache.write(found)
        assert verdict is not None, "there was a measurer"
        measurer.scale(verdict.scales is not None)
        return verdict

    @property
    def _judges(self) -> bool:
        short = len(self._tokens) < TOKENS_MIN
        return self._mode != "off" and bool(candidates(self._dtype.name)) and not short

    def _judge(self, found: Findings, measurer: _Measurer | None) -> Verdict | None:
        """Decide by ``found``, which ``measurer`` adds to; None: it is not there to do so."""
        dtype = self._dtype.name
        mine = candidates(dtype)
        for one in mine:
            if one not in found.figures:
                if measurer is None:
                    return None
                measurer.measure(one)
            if found.figures[one].passes(dtype):
                return self._verdict(one, found)
        if self._mode == "warn":
            return self._verdict(min(mine, key=lambda one: found.figures[one].kl_nats), found)
        for one in alternatives(dtype):
            if one not in found.figures:
                if measurer is None:
                    return None
                measurer.measure(one)
            if found.figures[one].passes(one.dtype):
                break
        raise refusal(dtype, found.figures)

    def _verdict(self, one: Candidate, found: Findings) -> Verdict:
        scales = found.scales if one.key_scales else None
        figures = found.figures[one]
        return Verdict(scales, figures, remarks(one, figures))


class _Measurer:
    """Measures candidates on a trial, and adds to ``found``."""

    def __init__(
        self, trial: Trial, model: LoadedModel, tokens: Sequence[int], found: Findings
    ) -> None:
        self._trial = trial
        self._model = model
        self._tokens = tokens
        self._found = found
        self._scaled = False

    def measure(self, one: Candidate) -> None:
        if one.key_scales and self._found.scales is None:
            self._found.scales = self._key_scales()
        self.scale(one.key_scales)
        figures = compare(
            self._runner("fp16"),
            self._runner(one.dtype),
            self._tokens,
            chunk_tokens=self._chunk_tokens,
            saturations=self._trial.saturations,
        )
        log.info("KV quality, %s: %s", one.name, figures)
        self._found.figures[one] = figures

    def scale(self, wanted: bool) -> None:
        """Give the trial the weights with or without key scales."""
        if wanted == self._scaled:
            return
        self._scaled = wanted
        scales = self._found.scales if wanted else None
        self._trial.take_projections(Verdict(scales).model(self._model))

    def _key_scales(self) -> KeyScales:
        """Exponents for the K that a FP16 pool holds after the text."""
        assert not self._scaled
        runner = self._runner("fp16")
        for part in chunks(self._tokens, runner.pool, self._chunk_tokens):
            runner.forward([part])
        return KeyScales.for_sizes(key_sizes(runner.pool), self._model.config)

    @property
    def _chunk_tokens(self) -> int:
        return min(CHUNK_TOKENS, self._trial.chunk_tokens)

    def _runner(self, dtype: str) -> PooledRunner:
        return self._trial.runner(resolve_kv_dtype(dtype), len(self._tokens))


class CpuTrial:
    """A decoder on a CPU backend."""

    chunk_tokens = CHUNK_TOKENS

    def __init__(self, decoder: Decoder, backend: Backend, block_size: int) -> None:
        self._decoder = decoder
        self._backend = backend
        self._block_size = block_size

    def runner(self, dtype: KvDtype, tokens: int) -> ModelRunner:
        """See ``Trial.runner``."""
        layout = self._decoder.kv_layout(dtype, self._block_size)
        pool = PagedPool(layout, layout.blocks_for(tokens), self._backend.device)
        return ModelRunner(self._decoder, pool, self._backend)

    def saturations(self) -> int:
        """See ``Trial.saturations``."""
        return self._backend.kv_saturations

    def take_projections(self, model: LoadedModel) -> None:
        """See ``Trial.take_projections``."""
        self._decoder.take_projections(model.weights)


def chunks(tokens: Sequence[int], pool: PagedPool, size: int) -> list[SequenceSlice]:
    """One sequence in an empty pool, ``size`` tokens at a time; no logits are wanted."""
    table = tuple(range(pool.layout.blocks_for(len(tokens))))
    return [
        SequenceSlice(tokens[start : start + size], start, table, logits=False)
        for start in range(0, len(tokens), size)
    ]


def key_sizes(pool: PagedPool) -> Tensor:
    """The largest absolute value of each channel of K, float32 ``[layers, kv_heads, head_dim]``.

    Over the whole pool: slots that nobody wrote are zeros.
    """
    layers = range(pool.layout.layers)
    sizes = [pool.k(layer).abs().amax((0, 2)).to("cpu", torch.float32) for layer in layers]
    return torch.stack(sizes)


@torch.inference_mode()
def compare(
    reference: PooledRunner,
    candidate: PooledRunner,
    tokens: Sequence[int],
    *,
    chunk_tokens: int,
    saturations: Callable[[], int],
) -> Figures:
    """Run both over ``tokens`` side by side and compare the logits of every position.

    K and V, the step's own too, are read back from the pools. KL(reference || candidate) in
    float64: in float32 its rounding would be the result.
    """
    kl = 0.0
    same = clamped = 0
    parts = zip(
        chunks(tokens, reference.pool, chunk_tokens),
        chunks(tokens, candidate.pool, chunk_tokens),
        strict=True,
    )
    for right, ours in parts:
        log_p = _log_probabilities(reference, right)
        before = saturations()
        log_q = _log_probabilities(candidate, ours)
        clamped += saturations() - before
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    count = len(tokens)
    return Figures(
        kl_nats=max(kl / count, 0.0),  # of equal logits rounding may leave less than nothing
        agreement=same / count,
        positions=count,
        saturations=clamped,
    )


def _log_probabilities(runner: PooledRunner, part: SequenceSlice) -> Tensor:
    """Of every row of a step, float64 ``[rows, vocab]``."""
    found: list[Tensor] = []

    def visit(_: int, __: int, logits: Tensor) -> None:
        found.append(torch.log_softmax(logits.double(), dim=-1))

    runner.forward_and_score([part], [range(len(part.token_ids))], visit)
    return torch.cat(found)
