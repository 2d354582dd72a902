"""transformers as a peer: the same weights, served in each of the ways that it has."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.errors import LaunchError
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.weights import LoadedModel

Prompts: TypeAlias = Sequence[Sequence[int]]

Way: TypeAlias = Literal["padded_batch", "static", "continuous"]
"""``generate`` on one padded batch with a cache that grows; the same with a cache of fixed size and
the compiled decode step that it brings on a GPU; its continuous batching."""

CB_BLOCK_SIZE: Final = 256
"""Tokens in a block of continuous batching's cache: its own default."""
CB_BATCH_TOKENS: Final = 512
"""Tokens in one of its steps at most: ours have as many."""
CB_PATIENCE_S: Final = 120.0

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
    """transformers as it comes, greedy: in float32 on the CPU, in float16 on a GPU."""

    def __init__(self, model: LoadedModel, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self._model = transformers_model(
            model, torch.float32 if device == "cpu" else torch.float16
        ).to(device)

    def generate(self, prompts: Prompts, new_tokens: int, way: Way = "padded_batch") -> Timed:
        """``new_tokens`` for each prompt, an end of sequence or not.

        Of the first call in each way at each number of prompts the time is not to be believed:
        "static" compiles in it.

        Raises:
            LaunchError: continuous batching has lost a request, or takes ``CB_PATIENCE_S``.
        """
        if way == "continuous":
            return self._continuous(prompts, new_tokens)
        return self._batch(prompts, new_tokens, "static" if way == "static" else None)

    def _batch(self, prompts: Prompts, new_tokens: int, cache: str | None) -> Timed:
        """In one batch; shorter prompts are padded on the left, as its documentation asks for."""
        width = max(len(prompt) for prompt in prompts)
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                do_sample=False,
                use_cache=True,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                cache_implementation=cache,
            )
        generated = output[:, width:].tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        return Timed(seconds=seconds, token_ids=tuple(tuple(row) for row in generated))

    def _continuous(self, prompts: Prompts, new_tokens: int) -> Timed:
        """By its continuous batching; starting it and its warm-up are not in the time."""
        transformers: Any = importlib.import_module("transformers")
        # Left to itself it takes nine tenths of the card, which others use, too.
        blocks = sum(-(-(len(prompt) + new_tokens) // CB_BLOCK_SIZE) for prompt in prompts)
        settings = transformers.ContinuousBatchingConfig(
            num_blocks=blocks + len(prompts),
            max_batch_tokens=CB_BATCH_TOKENS,
            allow_block_sharing=False,  # every round sends the same prompts
        )
        generation = transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        found: dict[str, tuple[int, ...]] = {}
        with (
            torch.no_grad(),  # its thread may not write to what an inference mode here has made
            self._model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=settings
            ) as manager,
        ):
            start = time.perf_counter()
            asked = manager.add_requests(
                inputs=[list(prompt) for prompt in prompts], max_new_tokens=new_tokens
            )
            while len(found) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise LaunchError(f"transformers' continuous batching: {result.error}")
                    found[result.request_id] = tuple(result.generated_tokens)
                elif not manager.is_running() or time.perf_counter() - start > CB_PATIENCE_S:
                    raise LaunchError(
                        f"transformers' continuous batching answered {len(found)} of "
                        f"{len(prompts)} requests"
                    )
            seconds = time.perf_counter() - start
        return Timed(seconds=seconds, token_ids=tuple(found[name] for name in asked))


def transformers_model(model: LoadedModel, dtype: torch.dtype = torch.float32) -> Any:
    """The same checkpoint as a model of transformers in ``dtype``, on the CPU.

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
        name: model.weights.read(name).to(dtype, copy=True)
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
