"""The decoder against transformers in float32, on tiny random checkpoints of every family.

Transformers runs with a cache that rounds K and V to float16, as the pool stores them; what is
left is float32 noise and the rare K or V that it pushes over a float16 rounding boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.pool import PagedPool

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 32, "num_key_value_heads": 6}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1, "rope_theta": 500_000.0}),
    "llama3-scaling": ("Llama", {"rope_parameters": LLAMA3_SCALING}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"num_key_value_heads": 3, "rms_norm_eps": 1e-5}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {"sliding_window": None}),
}
TOKENS = 150


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class HalfCache(transformers.DynamicCache):  # type: ignore[misc, name-defined]
    """A cache that stores float16."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(
            key.half().float(), value.half().float(), *args, **kwargs
        )
        return updated


def make_oracle(case: str) -> Any:
    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.2 * torch.randn(tensor.shape))
    return model


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    """Our logits of every token: a chunk, then the rest token by token."""
    backend = CpuBackend(threads=1)
    decoder = Decoder(load_model(path), backend)
    pool = PagedPool(decoder.kv_layout(resolve_kv_dtype("fp16"), 16), 16)
    runner = ModelRunner(decoder, pool, backend)
    table = [5, 3, 8, 1, 0, 15, 14, 9, 2, 7]
    parts = [runner.forward_all([SequenceSlice(tokens[:-10], 0, table, logits=True)])]
    parts += [
        runner.forward([SequenceSlice(tokens[at : at + 1], at, table, True)])
        for at in range(len(tokens) - 10, len(tokens))
    ]
    return torch.cat(parts)


# Renamed to `cache` in transformers 5.2x; the old name works from 4.56 to 5.39.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(case)
    oracle.save_pretrained(tmp_path)
    tokens = torch.randint(0, 89, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), past_key_values=HalfCache()).logits[0]
    result = logits_of(tmp_path, tokens)
    assert float(expected.std()) > 0.3  # a model that says something
    assert float((result - expected).abs().max()) < 1e-3 * float(expected.abs().max())
    assert torch.equal(result.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_shards_load_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = make_oracle("qwen2-untied").to(dtype)
    oracle.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    oracle.save_pretrained(tmp_path / "single")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    sharded, single = load_model(tmp_path / "sharded"), load_model(tmp_path / "single")
    assert sharded.fingerprint == single.fingerprint
    for name, tensor in oracle.state_dict().items():
        read = sharded.weights.read(name)
        assert read.dtype == dtype
        assert torch.equal(read, tensor)
