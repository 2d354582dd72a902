"""What the cluster is measured beside: transformers, and the bare engine loop of one process.

Both compute the same weights, read from the same checkpoint: widened to float32, on the thread
count that the process has, or in float16 on the card that the cluster has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Self

import torch

from deepinfer.deploy.bench.transformers_peer import Prompts, Timed, TransformersPeer, Way
from deepinfer.deploy.config import Device
from deepinfer.deploy.errors import LaunchError
from deepinfer.kvstore.core.ids import Seq
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.messages import Tokens
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.proto.failpoints import Failpoints
from deepinfer.workers.actor import BEFORE_TORCH, WorkerSettings
from deepinfer.workers.assembly import open_device
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import SendToGateway, WorkerEffect
from deepinfer.workers.engine import Engine
from deepinfer.workers.gpu.settings import GpuSettings
from deepinfer.workers.local import LocalEngine
from deepinfer.workers.model.decoder import Decoder, kv_layout
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import Levels, ModelRunner
from deepinfer.workers.pool import PagedPool


class EngineLoop:
    """The bare engine loop: the worker's core, engine and model in this thread, no server."""

    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        self._engine = engine
        self._config = config

    def together(self, prompts: Prompts, new_tokens: int) -> Timed:
        """Generate ``new_tokens`` for all prompts at once, an end of sequence or not."""
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        loop = _TimedLoop(self._engine, self._config)
        start = time.perf_counter()
        done = loop.generate(prompts, sampling)
        return Timed(
            seconds=time.perf_counter() - start,
            token_ids=tuple(tuple(completion.token_ids) for completion in done),
            token_times_s=tuple(
                tuple(at - start for at in loop.token_times[seq]) for seq in loop.completions
            ),
        )


class EnginePeer(EngineLoop):
    """The bare engine loop on the CPU.

    Peers of several KV dtypes may share one ``decoder``. The limits are fields of WorkerConfig;
    ``levels`` are as ``ModelRunner`` takes them.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        kv_cache_dtype: str,
        blocks: int,
        block_size: int = 16,
        prefill_chunk_tokens: int = 256,
        max_batch_tokens: int = 512,
        levels: Levels | None = None,
    ) -> None:
        layout = decoder.kv_layout(resolve_kv_dtype(kv_cache_dtype), block_size)
        pool = PagedPool(layout, blocks, decoder.backend.device)
        config = WorkerConfig(
            blocks_total=blocks,
            block_size=block_size,
            block_bytes=layout.block_bytes,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_batch_tokens=max_batch_tokens,
            prefix_cache=False,
        )
        super().__init__(Engine(ModelRunner(decoder, pool, decoder.backend, levels)), config)


def engine_on_card(
    model_path: str,
    *,
    kv_cache_dtype: str,
    blocks: int,
    block_size: int = 16,
    prefill_chunk_tokens: int = 256,
    max_batch_tokens: int = 512,
) -> EngineLoop:
    """The bare engine loop on the current card.

    Raises what ``open_device`` raises.
    """
    config = load_model(model_path).config
    layout = kv_layout(config, resolve_kv_dtype(kv_cache_dtype), block_size)
    limits = WorkerConfig(
        blocks_total=blocks,
        block_size=block_size,
        block_bytes=layout.block_bytes,
        prefill_chunk_tokens=prefill_chunk_tokens,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=False,
    )
    settings = WorkerSettings(
        worker="engine",
        node="local",
        model_path=model_path,
        kv_cache_dtype=kv_cache_dtype,
        gpu=GpuSettings(fill_card=False, probe=False),
        token="of nobody",
        config=limits,
    )
    return EngineLoop(open_device(settings, Failpoints()).engine, limits)


class _TimedLoop(LocalEngine):
    """Notes when each token came."""

    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        super().__init__(engine, config)
        self.token_times: dict[Seq, list[float]] = {}

    def perform(self, effect: WorkerEffect) -> None:
        if isinstance(effect, SendToGateway) and isinstance(effect.message, Tokens):
            message = effect.message
            times = self.token_times.setdefault(message.seq, [])
            news = message.index + len(message.tokens) - len(times)
            times += [time.perf_counter()] * news
        super().perform(effect)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """What a process of peers computes: a model, the engine's pools, and on what."""

    model_path: str
    kv_cache_dtypes: tuple[str, ...]
    blocks: int
    threads: int
    transformers: bool
    """Whether transformers is loaded, too."""
    device: Device = "cpu"


class PeerProcess:
    """The peers in a process of their own, one call at a time; a context manager.

    It waits without using the processor while the cluster is measured, and has a worker's
    environment.

    Raises:
        LaunchError: the process has died.
        ConfigError, OSError, ValueError: the model cannot be opened.
    """

    def __init__(self, settings: PeerSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        added = {name: text for name, text in BEFORE_TORCH.items() if name not in os.environ}
        os.environ.update(added)
        try:
            self._process.start()
        finally:
            for name in added:
                del os.environ[name]
        theirs.close()

    def __enter__(self) -> Self:
        try:
            self._answer()  # to having been started
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # at an interrupt it is in the middle of its work
        self._process.join()
        self._pipe.close()

    def engine(self, kv_cache_dtype: str, prompts: Prompts, new_tokens: int) -> Timed:
        """The bare engine loop, all prompts at once."""
        return self._call(kv_cache_dtype, None, prompts, new_tokens)

    def transformers(self, prompts: Prompts, new_tokens: int, way: Way = "padded_batch") -> Timed:
        """transformers, all prompts at once."""
        return self._call(None, way, prompts, new_tokens)

    def _call(
        self, kv_cache_dtype: str | None, way: Way | None, prompts: Prompts, new_tokens: int
    ) -> Timed:
        self._pipe.send((kv_cache_dtype, way, prompts, new_tokens))
        timed = self._answer()
        assert timed is not None
        return timed

    def _answer(self) -> Timed | None:
        try:
            answer: Timed | Exception | None = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise LaunchError(
                f"the process of the peers has died (exit code {self._process.exitcode}): "
                "is there enough memory?"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, settings: PeerSettings) -> None:
    """Load everything, then answer until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for who started this, who ends it
    try:
        model = load_model(settings.model_path)
        engines = _engines(settings)
        peer = TransformersPeer(model, settings.device) if settings.transformers else None
    except (OSError, ValueError) as error:
        pipe.send(error)
        return
    assert settings.device != "cpu" or torch.get_num_threads() == settings.threads
    pipe.send(None)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            kv_cache_dtype, way, prompts, new_tokens = pipe.recv()
            if kv_cache_dtype is not None:
                pipe.send(engines[kv_cache_dtype].together(prompts, new_tokens))
                continue
            assert peer is not None, "transformers was not asked for"
            try:
                pipe.send(peer.generate(prompts, new_tokens, way))
            except LaunchError as error:
                pipe.send(error)


def _engines(settings: PeerSettings) -> dict[str, EngineLoop]:
    """By KV dtype."""
    if settings.device == "cuda":
        return {
            dtype: engine_on_card(settings.model_path, kv_cache_dtype=dtype, blocks=settings.blocks)
            for dtype in settings.kv_cache_dtypes
        }
    # On the CPU they share one copy of the weights.
    decoder = Decoder(load_model(settings.model_path), CpuBackend(threads=settings.threads))
    return {
        dtype: EnginePeer(decoder, kv_cache_dtype=dtype, blocks=settings.blocks)
        for dtype in settings.kv_cache_dtypes
    }
