"""The decoder against transformers in float32, on tiny random checkpoints of every family.

Transformers runs with a cache that rounds K and V to float16, as the pool stores them; what is
left is float32 noise and the rare K or V that it pushes over a float16 rounding boundary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.hf_config import config_from_hf
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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.25, 1.5, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 16.0],
}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
BOTH = LONGROPE | {
    "short_factor": [1.1, 2.0], "long_factor": [2.0, 9.0], "partial_rotary_factor": 0.5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-attention-biases": ("Llama", {"attention_bias": True}),
    "llama-mlp-biases": ("Llama", {"mlp_bias": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-narrow-heads": ("Llama", {"head_dim": 4, "num_key_value_heads": 3}),
    "llama-head-dim-64": ("Llama", {"head_dim": 64, "num_attention_heads": 2}),
    "llama-head-dim-96": ("Llama", {"head_dim": 96, "num_attention_heads": 2}),
    "llama-head-dim-128": (
        "Llama", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "llama-no-groups": ("Llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-theta": (
        "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    ),
    "llama-odd-widths": ("Llama", {"intermediate_size": 77, "vocab_size": 91}),
    "llama-linear": (
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama3-scaling": ("Llama", {"rope_parameters": LLAMA3_SCALING}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 3, "rms_norm_eps": 1e-5}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-unused-window": ("Qwen2", {"sliding_window": 16, "use_sliding_window": False}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-head-dim-128": ("Qwen3", {"head_dim": 128, "num_attention_heads": 2}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-head-dim": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {}),
    "phi3-tied": ("Phi3", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "phi3-partial-rotary": ("Phi3", {"rope_parameters": PARTIAL}),
    "phi3-longrope": (
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 160},
    ),
    "phi3-longrope-partial": (
        "Phi3", {"rope_parameters": BOTH, "original_max_position_embeddings": 160},
    ),
}  # fmt: skip
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 70}),
    "phi3": ("Phi3", {"sliding_window": 70}),
    "qwen2": (
        "Qwen2", {"sliding_window": 70, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": (
        "Qwen3", {"head_dim": 8, "sliding_window": 70, "use_sliding_window": True,
                  "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
}  # fmt: skip
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


def make_oracle(family: str, changes: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{family}Config")(**copy.deepcopy(SIZES | changes))
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.2 * torch.randn(tensor.shape))
    return model


def make_runner(path: Path) -> ModelRunner:
    backend = CpuBackend(threads=1)
    decoder = Decoder(load_model(path), backend)
    pool = PagedPool(decoder.kv_layout(resolve_kv_dtype("fp16"), 16), 16)
    return ModelRunner(decoder, pool, backend)


TABLE = [5, 3, 8, 1, 0, 15, 14, 9, 2, 7]


def logits_of(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Our logits of every token: a chunk, then the rest token by token."""
    parts = [runner.forward_all([SequenceSlice(tokens[:-10], 0, TABLE, logits=True)])]
    parts += [
        runner.forward([SequenceSlice(tokens[at : at + 1], at, TABLE, True)])
        for at in range(len(tokens) - 10, len(tokens))
    ]
    return torch.cat(parts)


def greedy(runner: ModelRunner, prompt: list[int], count: int) -> list[int]:
    output: list[int] = []
    part = SequenceSlice(prompt, 0, TABLE, True)
    for _ in range(count):
        output.append(int(runner.forward([part]).argmax()))
        part = SequenceSlice(output[-1:], len(prompt) + len(output) - 1, TABLE, True)
    return output


def some_tokens(count: int) -> list[int]:
    ids: list[int] = torch.randint(
        0, 89, (count,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return ids


def assert_same_logits(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32 noise: sums over 48 to 256 terms, in another order, three layers deep,
    and now and then a K or V one float16 step away. Seen: up to 8e-5 of the largest logit."""
    assert float(expected.std()) > 0.3  # a model that says something
    assert float((result - expected).abs().max()) < 4e-4 * float(expected.abs().max())
    assert torch.equal(result.argmax(-1), expected.argmax(-1))


# Renamed to `cache` in transformers 5.2x; the old name works from 4.56 to 5.39.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_ids_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case])
    oracle.save_pretrained(tmp_path)
    tokens = some_tokens(TOKENS)
    runner = make_runner(tmp_path)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), past_key_values=HalfCache()).logits[0]
        generated = oracle.generate(
            torch.tensor([tokens[:40]]),
            attention_mask=torch.ones(1, 40),
            past_key_values=HalfCache(),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
        )
    assert_same_logits(logits_of(runner, tokens), expected)
    assert greedy(runner, tokens[:40], 24) == generated[0, 40:].tolist()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", WINDOWS)
def test_a_context_beyond_the_window_is_refused_and_one_within_is_right(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = make_oracle(*WINDOWS[case])
    oracle.save_pretrained(tmp_path)
    tokens = some_tokens(71)
    runner = make_runner(tmp_path)
    assert "limited to 70 tokens: sliding_window is 70, and what lies beyond" in caplog.text
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), past_key_values=HalfCache()).logits[0]
    assert_same_logits(logits_of(runner, tokens[:70]), expected[:70])
    with pytest.raises(ValueError, match="position 70 is beyond the model's 70 positions"):
        runner.forward([SequenceSlice(tokens[70:], 70, TABLE, True)])


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_longrope_is_right_up_to_the_original_context(tmp_path: Path) -> None:
    oracle = make_oracle(*CASES["phi3-longrope"])
    oracle.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    assert runner.config.max_positions == 160
    assert runner.config.positions_limit == "longrope's original context is 160"
    tokens = some_tokens(160)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens]), past_key_values=HalfCache()).logits[0]
    assert_same_logits(logits_of(runner, tokens), expected)


@pytest.mark.parametrize("case", CASES)
def test_the_spelling_of_transformers_4_means_the_same(case: str, tmp_path: Path) -> None:
    oracle = make_oracle(*CASES[case])
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    assert "dtype" in fields
    new = config_from_hf(fields)
    rope = fields.pop("rope_parameters")
    fields["torch_dtype"] = fields.pop("dtype")
    fields["rope_theta"] = rope.pop("rope_theta")
    if (factor := rope.pop("partial_rotary_factor", None)) is not None:
        fields["partial_rotary_factor"] = factor
    rope["type"] = rope.pop("rope_type")
    fields["rope_scaling"] = None if rope["type"] == "default" else rope
    assert config_from_hf(fields) == new
    file.write_text(json.dumps(fields))
    assert load_model(tmp_path).config == new


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3"])
def test_shards_of_every_dtype_load_exactly(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    oracle = make_oracle(family, {"sliding_window": None, "head_dim": 8}).to(dtype)
    oracle.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    oracle.save_pretrained(tmp_path / "single")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    sharded, single = load_model(tmp_path / "sharded"), load_model(tmp_path / "single")
    assert sharded.fingerprint == single.fingerprint
    for name, tensor in oracle.state_dict().items():
        read = sharded.weights.read(name)
        assert read.dtype == dtype
        assert torch.equal(read, tensor)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_checkpoints_are_computed_in_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    make_oracle(*CASES["qwen2-tied"]).to(dtype).save_pretrained(tmp_path)
    # Loaded anew: narrowing the model above has rounded its RoPE frequencies too.
    wide = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = some_tokens(TOKENS)
    with torch.inference_mode():
        expected = wide(torch.tensor([tokens]), past_key_values=HalfCache()).logits[0]
    assert_same_logits(logits_of(make_runner(tmp_path), tokens), expected)
