"""What the cluster is measured beside: transformers, and the bare engine loop of one process.

Both compute the same weights, read from the same checkpoint and widened to float32, on the thread
count that the process has. Everything here imports torch when it is called, not before.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Self, TypeAlias

import torch

from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.errors import LaunchError
from deepinfer.kvstore.core.ids import Seq
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.messages import Tokens
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.actor import BEFORE_TORCH
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import SendToGateway, WorkerEffect
from deepinfer.workers.engine import Engine
from deepinfer.workers.local import LocalEngine
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool

Prompts: TypeAlias = Sequence[Sequence[int]]

_FAMILIES: Final = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One run over a list of prompts: wall-clock seconds, and what each prompt generated.

    ``token_times_s`` holds, a prompt, when each of its tokens came, counted from the start of the
    run; it is empty where the peer does not say.
    """

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]
    token_times_s: tuple[tuple[float, ...], ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)


class TransformersPeer:
    """``generate`` of transformers, as it comes: greedy, with its KV cache, in float32."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = transformers_model(model)

    def generate(self, prompts: Prompts, new_tokens: int) -> Timed:
        """``new_tokens`` for each prompt, an end of sequence or not, in one batch.

        Shorter prompts are padded on the left, as transformers' documentation asks for.
        """
        width = max(len(prompt) for prompt in prompts)
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                use_cache=True,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        return Timed(
            seconds=seconds, token_ids=tuple(tuple(row) for row in output[:, width:].tolist())
        )


def transformers_model(model: LoadedModel) -> Any:
    """The same checkpoint as a float32 model of transformers, on the CPU.

    It is built from our loader's tensors: transformers' own GGUF loader wants another package and
    knows fewer files.

    Raises:
        ConfigError: a model that is not built here; says which switch it has.
    """
    transformers: Any = importlib.import_module("transformers")  # annotated only in part
    config = model.config
    if config.rope_dim != config.head_dim and config.family != "phi3":
        raise ConfigError(
            f"rotary_dim = {config.rope_dim} of {config.head_dim}: of the models here, "
            f"transformers has partial rotary embeddings in phi3 alone, not in {config.family}: "
            "use --no-peers"
        )
    family = _FAMILIES[config.family]
    # On the meta device nothing is computed for weights that are replaced anyway.
    with torch.device("meta"):
        built = getattr(transformers, f"{family}ForCausalLM")(_transformers_config(config, family))
    state = {
        # A copy: what the loader returns may be a view of the file.
        name: model.weights.read(name).to(torch.float32, copy=True)
        for name in built.state_dict()
        if name != "lm_head.weight" or not config.tied_embeddings
    }
    built.load_state_dict(state, strict=False, assign=True)
    built.tie_weights()
    # Not in the state: RoPE's frequencies, which the meta device left without values.
    rotary = type(built.model.rotary_emb)(built.config)
    if config.rope_divisors is not None:
        rotary.inv_freq /= torch.tensor(config.rope_divisors)
    rotary.attention_scaling = config.rope_magnitude
    built.model.rotary_emb = rotary
    # No end of sequence: every peer generates as many tokens as it is asked for.
    built.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return built.eval()


def _transformers_config(config: ModelConfig, family: str) -> Any:
    transformers: Any = importlib.import_module("transformers")
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.family in ("llama", "qwen3"):
        fields |= {"attention_bias": config.qkv_bias}
    if config.family == "llama":
        fields |= {"mlp_bias": config.mlp_bias}
    if config.family in ("mistral", "phi3"):
        fields |= {"sliding_window": None}
    if config.rope_dim != config.head_dim:
        fields |= {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                # They cut the product with head_dim down to a whole number: a half lies safely
                # above what is meant, where rounding could lie below.
                "partial_rotary_factor": (config.rope_dim + 0.5) / config.head_dim,
            }
        }
    return getattr(transformers, f"{family}Config")(**fields)


class EnginePeer:
    """The bare engine loop: the worker's core, engine and model in this thread, no server.

    Peers of several KV dtypes may share one ``decoder``. ``limits`` are fields of WorkerConfig.
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
    ) -> None:
        layout = decoder.kv_layout(resolve_kv_dtype(kv_cache_dtype), block_size)
        pool = PagedPool(layout, blocks, decoder.backend.device)
        self._runner = ModelRunner(decoder, pool, decoder.backend)
        self._config = WorkerConfig(
            blocks_total=blocks,
            block_size=block_size,
            block_bytes=layout.block_bytes,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_batch_tokens=max_batch_tokens,
            prefix_cache=False,
        )

    def together(self, prompts: Prompts, new_tokens: int) -> Timed:
        """Generate ``new_tokens`` for all prompts at once, an end of sequence or not."""
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        loop = _TimedLoop(Engine(self._runner), self._config)
        start = time.perf_counter()
        done = loop.generate(prompts, sampling)
        return Timed(
            seconds=time.perf_counter() - start,
            token_ids=tuple(tuple(completion.token_ids) for completion in done),
            token_times_s=tuple(
                tuple(at - start for at in loop.token_times[seq]) for seq in loop.completions
            ),
        )


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
    """What a process of peers computes: a model, the engine's pools, and on how many threads."""

    model_path: str
    kv_cache_dtypes: tuple[str, ...]
    blocks: int
    threads: int
    transformers: bool
    """Whether transformers is loaded, too."""


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
        return self._call(kv_cache_dtype, prompts, new_tokens)

    def transformers(self, prompts: Prompts, new_tokens: int) -> Timed:
        """transformers' ``generate``, all prompts in one padded batch."""
        return self._call(None, prompts, new_tokens)

    def _call(self, kv_cache_dtype: str | None, prompts: Prompts, new_tokens: int) -> Timed:
        self._pipe.send((kv_cache_dtype, prompts, new_tokens))
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
        decoder = Decoder(model, CpuBackend(threads=settings.threads))
        engines = {
            dtype: EnginePeer(decoder, kv_cache_dtype=dtype, blocks=settings.blocks)
            for dtype in settings.kv_cache_dtypes
        }
        peer = TransformersPeer(model) if settings.transformers else None
    except (OSError, ValueError) as error:
        pipe.send(error)
        return
    assert torch.get_num_threads() == settings.threads
    pipe.send(None)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            kv_cache_dtype, prompts, new_tokens = pipe.recv()
            if kv_cache_dtype is not None:
                pipe.send(engines[kv_cache_dtype].together(prompts, new_tokens))
            else:
                assert peer is not None, "transformers was not asked for"
                pipe.send(peer.generate(prompts, new_tokens))
