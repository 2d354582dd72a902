"""Powers of two on K's channels: the model stays the same, bit for bit; its K becomes even."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepinfer.kvstore.core.layout import KvDtype, KvLayout, resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.key_scales import EXPONENT_MAX, KeyScales, with_key_scales
from deepinfer.workers.model.quantized import QuantizedTensor
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.quality import key_sizes
from support.memory_weights import MemoryWeights, random_model
from support.provoked_model import provoked

LLAMA = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=48,
    intermediate_size=64,
    layers=2,
    heads=6,
    kv_heads=2,
    head_dim=16,
    max_positions=64,
    rms_eps=1e-5,
    rope_theta=1e4,
)
MODELS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True),
    "phi3": replace(LLAMA, family="phi3", fused_projections=True, rotary_dim=12),
}
TOKENS = [7, 3, 60, 21, 21, 9, 0, 33, 5, 48, 12, 6, 2, 17, 40, 11, 8, 1, 63]
EXACT = resolve_kv_dtype("fp16", compute_dtype="bf16")
"""bfloat16 storage: its exponents reach so far that no power of two rounds anything."""


def random_scales(config: ModelConfig, seed: int = 0) -> KeyScales:
    generator = torch.Generator().manual_seed(seed)
    heads = 1 if config.qk_norm else config.kv_heads
    shape = (config.layers, heads, config.head_dim)
    found = torch.randint(-EXPONENT_MAX, EXPONENT_MAX + 1, shape, generator=generator)
    half = config.rope_dim // 2
    found[..., half : 2 * half] = found[..., :half]
    return KeyScales(found.expand(-1, config.kv_heads, -1).to(torch.int8))


def run(model: LoadedModel | Decoder, dtype: KvDtype = EXACT) -> tuple[Tensor, PagedPool]:
    """Logits of every position, computed in two chunks, and the pool."""
    config = model.config
    layout = KvLayout(dtype, config.layers, config.kv_heads, config.head_dim, block_size=8)
    pool = PagedPool(layout, layout.blocks_for(len(TOKENS)))
    backend = model.backend if isinstance(model, Decoder) else CpuBackend()
    runner = ModelRunner(model, pool, backend)
    table = tuple(range(pool.num_blocks))
    parts = [(TOKENS[:11], 0), (TOKENS[11:], 11)]
    logits = [runner.forward_all([SequenceSlice(ids, at, table, False)]) for ids, at in parts]
    return torch.cat(logits), pool


@pytest.mark.parametrize("name", MODELS)
def test_logits_keep_every_bit_and_k_is_scaled(name: str) -> None:
    config = MODELS[name]
    model, scales = random_model(config, seed=5), random_scales(config)
    logits, pool = run(model)
    scaled_logits, scaled_pool = run(with_key_scales(model, scales))
    assert torch.equal(logits, scaled_logits)
    factor = torch.exp2(-scales.exponents.float())
    assert bool((factor != 1).any())
    for layer in range(config.layers):
        expected = pool.k(layer).float() * factor[layer][:, None]
        assert torch.equal(scaled_pool.k(layer).float(), expected)
        assert torch.equal(scaled_pool.v(layer), pool.v(layer))


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_projections_taken_later_are_those_of_a_scaled_load(name: str) -> None:
    model = random_model(MODELS[name], seed=5)
    scaled = with_key_scales(model, random_scales(model.config))
    decoder = Decoder(model, CpuBackend())
    decoder.take_projections(scaled.weights)
    (taken, taken_pool), (loaded, pool) = run(decoder), run(scaled)
    assert torch.equal(taken, loaded)
    assert torch.equal(taken_pool.storage, pool.storage)


def test_packed_weights_are_scaled_by_their_scales() -> None:
    class Packed(MemoryWeights):
        def read_quantized(  # type: ignore[override]
            self, name: str, device: torch.device | None = None
        ) -> QuantizedTensor | None:
            if not name.endswith("q_proj.weight") and not name.endswith("v_proj.weight"):
                return None
            rows = self.tensors[name].shape[0]
            generator = torch.Generator().manual_seed(rows)
            codes = torch.randint(0, 16, (rows, 48), generator=generator, dtype=torch.uint8)
            return QuantizedTensor(codes, torch.full((rows, 3), 2.0**-10, dtype=torch.float16))

    plain = random_model(LLAMA, seed=5)
    assert isinstance(plain.weights, MemoryWeights)
    weights, scales = Packed(plain.weights.tensors), random_scales(LLAMA)
    scaled = with_key_scales(LoadedModel(LLAMA, weights, "x"), scales).weights
    name = "model.layers.1.self_attn.q_proj.weight"
    before, after = weights.read_quantized(name), scaled.read_quantized(name)
    assert before is not None
    assert after is not None
    factor = torch.exp2(scales.exponents[1].float()).repeat_interleave(3, dim=0).view(-1, 1)
    assert torch.equal(after.dequantised(), before.dequantised() * factor)
    name = "model.layers.1.self_attn.v_proj.weight"
    before, after = weights.read_quantized(name), scaled.read_quantized(name)
    assert before is not None
    assert after is not None
    assert torch.equal(after.scales, before.scales)
    assert scaled.read_quantized("model.norm.weight") is None


def test_exponents_make_channels_alike() -> None:
    sizes = torch.full((2, 2, 16), 3.0)
    sizes[0, 1, 2] = 192.0  # 64 times as large, and RoPE turns it into channel 10
    sizes[1, 0, 5] = 1.0
    scales = KeyScales.for_sizes(sizes, LLAMA)
    level = torch.exp2(-scales.exponents.float()) * sizes
    assert float(level[0, 1, 2]) == float(level[0, 1, 3]) == 24.0
    assert scales.exponents[0, 1, 2] == scales.exponents[0, 1, 10] == 3
    assert scales.exponents[0, 1, 3] == -3
    assert not scales.exponents[0, 0].any()
    assert not scales.exponents[1, 0].any(), "it has the exponent of its pair, which is larger"
    sizes[0, 0, 4] = 1e5
    sizes[1, 1, :] = 0.0
    far = KeyScales.for_sizes(sizes, LLAMA).exponents
    assert far[0, 0, 4] == far[0, 0, 12] == EXPONENT_MAX
    assert far[0, 0, 3] == -EXPONENT_MAX
    assert not far[1, 1].any()
    shared = KeyScales.for_sizes(sizes, MODELS["qwen3"]).exponents
    assert torch.equal(shared[:, 0], shared[:, 1])


def test_int8_bears_large_channels_with_scales() -> None:
    """The error of K's other channels, which one scale for all of them leaves no steps for."""
    model = provoked(random_model(replace(LLAMA, head_dim=32), seed=3), 100.0)
    _, exact = run(model)
    scales = KeyScales.for_sizes(key_sizes(exact), model.config)
    int8 = resolve_kv_dtype("int8")
    _, plain = run(model, int8)
    _, scaled = run(with_key_scales(model, scales), int8)
    others = [channel for channel in range(32) if channel not in (15, 31)]

    def errors(pool: PagedPool, exponents: Tensor) -> float:
        """Of layer 0 alone: what it writes depends on no KV."""
        step = pool.scales(0)[:, 0].float()[..., None]
        k = pool.k(0).float() * step * torch.exp2(exponents.float())[:, None]
        return float((k - exact.k(0).float())[..., others].abs().max())

    assert errors(plain, torch.zeros_like(scales.exponents[0])) > 0.3
    assert errors(scaled, scales.exponents[0]) < 0.05


def test_exponents_have_a_name_and_survive_json() -> None:
    scales, others = random_scales(LLAMA), random_scales(LLAMA, seed=1)
    again = KeyScales.from_lists(scales.to_lists())
    assert torch.equal(again.exponents, scales.exponents)
    assert again.digest == scales.digest != others.digest
    assert len(scales.digest) == 16


@pytest.mark.parametrize(
    ("exponents", "message"),
    [
        ([[[9] * 16] * 2] * 2, "within ±4"),
        ([[1, 2], [3, 4]], r"\[2, 2\]"),
        ("text", "key exponents"),
        ([[[0] * 16, [0]]], "key exponents"),
        ([[[400] * 16] * 2] * 2, "within ±4"),
    ],
)
def test_what_are_no_exponents_is_refused(exponents: list[list[list[int]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyScales.from_lists(exponents)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", (0, 0, 3), "RoPE pair"),
        ("qwen3", (0, 0, slice(None)), "heads with one norm"),
        ("phi3", None, r"\[2, 2, 8\], the model has \[2, 2, 16\]"),
    ],
)
def test_exponents_must_be_the_models(
    name: str, change: tuple[int, int, int | slice] | None, message: str
) -> None:
    found = torch.zeros((2, 2, 16), dtype=torch.int8)
    if change is None:
        found = found[..., :8]
    else:
        found[change] = 1
    with pytest.raises(ValueError, match=message):
        with_key_scales(random_model(MODELS[name], seed=0), KeyScales(found))
