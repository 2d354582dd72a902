"""The CPU backend's operations against their specification (``kernels.reference``)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from deepinfer.kernels import reference
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.backends import cpu, cpu_attention
from deepinfer.workers.backends.base import RowSpan
from deepinfer.workers.backends.cpu import CpuBackend, rows_are_independent
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import RopeTable
from deepinfer.workers.pool import PagedPool

DTYPES = ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")
SPANS = [  # a fresh prompt, a chunk behind cached tokens, and three decodes of unlike length
    RowSpan(0, 37, (9, 4, 31)),
    RowSpan(70, 21, (1, 2, 3, 5, 6, 7)),
    RowSpan(15, 1, (8,)),
    RowSpan(16, 1, (10, 11)),
    RowSpan(140, 1, tuple(range(12, 21))),
]


@pytest.fixture
def backend() -> Iterator[CpuBackend]:
    before = torch.get_num_threads()
    yield CpuBackend(threads=1)
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).abs().max() / expected.abs().max())


def slots_of(span: RowSpan, block_size: int) -> list[tuple[int, int]]:
    return [
        (span.block_table[at // block_size], at % block_size)
        for at in range(span.start, span.start + span.count)
    ]


# float32 sums of n products err by about sqrt(n) * 2^-24 of the largest result; n <= 1536 here.
FLOAT32_SUM = math.sqrt(1536) * 2**-24


@pytest.mark.parametrize("rows", [1, 3, 4, 13])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(backend: CpuBackend, rows: int, biased: bool) -> None:
    weight, x = normal(52, 1536), normal(rows, 1536, seed=1)
    bias = normal(52, seed=2) if biased else None
    result = backend.linear(x, backend.pack_linear(weight, bias))
    assert result.shape == (rows, 52)
    assert relative_error(result, reference.linear(x, weight, bias)) < FLOAT32_SUM


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_widens_sixteen_bit_weights_exactly(backend: CpuBackend, dtype: torch.dtype) -> None:
    weight, x = normal(24, 64).to(dtype), normal(5, 64, seed=1)
    result = backend.linear(x, backend.pack_linear(weight, None))
    assert relative_error(result, reference.linear(x, weight)) < FLOAT32_SUM


def test_rms_norm(backend: CpuBackend) -> None:
    x, weight = 300 * normal(7, 576), normal(576, seed=1)
    assert (
        relative_error(backend.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        < 4 * 2**-24 + FLOAT32_SUM
    )


def test_silu_mul(backend: CpuBackend) -> None:
    gate_up = 4 * normal(8, 128)
    assert relative_error(backend.silu_mul(gate_up), reference.silu_mul(gate_up)) < 4 * 2**-24


def test_rope_turns_pairs_by_position(backend: CpuBackend) -> None:
    config = ModelConfig(
        family="llama", vocab_size=8, hidden_size=64, intermediate_size=64, layers=1, heads=2,
        kv_heads=1, head_dim=32, max_positions=4096, rms_eps=1e-5, rope_theta=100_000.0,
    )  # fmt: skip
    positions = [0, 1, 15, 1023, 1024, 3001]
    x = normal(len(positions), 2, 32)
    cos, sin = RopeTable(config, torch.device("cpu")).at(torch.tensor(positions))
    inverse = [100_000.0 ** (-2 * pair / 32) for pair in range(16)]
    expected = reference.rope(x, positions, inverse)
    # The angle is a float32 product: at position p it errs by up to p * 2^-24, twice rounded.
    assert relative_error(backend.rope(x, cos, sin), expected) < 3001 * 2**-23


@pytest.mark.parametrize("name", DTYPES)
def test_kv_write_stores_the_specified_bits(backend: CpuBackend, name: str) -> None:
    layout = KvLayout(resolve_kv_dtype(name), layers=2, kv_heads=3, head_dim=8, block_size=16)
    pool, expected = PagedPool(layout, 32), PagedPool(layout, 32)
    plan = backend.plan(SPANS, layout, query_heads=6)
    k, v = normal(plan.padded_rows, 3, 8), normal(plan.padded_rows, 3, 8, seed=1)
    k[3] *= 1e9  # beyond every dtype's range
    k[5, 1] = 0  # absmax 0
    v[7] *= 1e-7  # a subnormal scale without the floor
    v[9, 2, 4] = -449.0  # rounds to E4M3's limit, but lies beyond it
    backend.kv_write(pool, 1, k, v, plan)
    slots = [slot for span in SPANS for slot in slots_of(span, layout.block_size)]
    clamped = 0
    for values, pages, kv in ((k, expected.k(1), 0), (v, expected.v(1), 1)):
        scales = expected.scales(1)[:, kv] if layout.dtype.scaled else None
        clamped += reference.kv_write(pages, scales, values[: plan.rows], slots)
    assert torch.equal(pool.storage, expected.storage)
    assert backend.kv_saturations == clamped
    if name != "int8":
        assert clamped >= 24


def test_int8_stays_in_range_for_extreme_vectors() -> None:
    values = torch.stack([torch.full((8,), x) for x in (0.0, 1e-30, 2.0**-14, 1.0, 65504.0, 1e9)])
    quantised, scale = cpu.quantise_int8(values)
    assert int(quantised.abs().max()) <= 127
    assert float(scale.min()) == cpu.INT8_SCALE_MIN
    assert torch.isfinite(scale.float()).all()
    restored = quantised.float() * scale.float()[:, None]
    assert torch.allclose(restored[2:5], values[2:5], rtol=1 / 127, atol=cpu.INT8_SCALE_MIN / 2)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("kv_heads", "heads", "head_dim"), [(3, 9, 64), (2, 2, 8), (1, 7, 32)])
def test_attention_over_the_same_quantised_kv(
    backend: CpuBackend, name: str, kv_heads: int, heads: int, head_dim: int
) -> None:
    layout = KvLayout(resolve_kv_dtype(name), 2, kv_heads, head_dim, block_size=16)
    pool = PagedPool(layout, 32)
    pool.storage.fill_(0x7F)  # NaN as float16 and float8: whatever is stale must not be read
    for span in SPANS:
        everything = [RowSpan(0, span.start + span.count, span.block_table)]
        plan = backend.plan(everything, layout, heads)
        shape = (plan.padded_rows, kv_heads, head_dim)
        backend.kv_write(pool, 1, normal(*shape, seed=3), normal(*shape, seed=4), plan)
    plan = backend.plan(SPANS, layout, heads)
    q = normal(plan.padded_rows, heads, head_dim, seed=5)
    result = backend.attention(pool, 1, q, plan)
    assert not result[plan.rows :].any()
    at = 0
    for span in SPANS:
        tokens = span.start + span.count
        scales = pool.scales(1) if layout.dtype.scaled else None
        k, v = (
            reference.kv_read(
                pages, None if scales is None else scales[:, kv], span.block_table, tokens
            )
            for kv, pages in enumerate((pool.k(1), pool.v(1)))
        )
        rows = slice(at, at + span.count)
        expected = reference.attention(q[rows], k, v, span.start).flatten(1)
        # |q|, |k|, |v| and the scores stay below 5. A score sums up to 64 products in float32 and
        # errs by sqrt(64) * 5 * 2^-24 at most, a weight by as much relative to itself, and the
        # result by that times |v|.
        assert float((result[rows].double() - expected).abs().max()) < 8 * 5 * 5 * 2**-24
        cosine = torch.cosine_similarity(result[rows].double(), expected, dim=-1)
        assert float(cosine.min()) >= 0.999999
        at += span.count


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 64, 256])
def test_tiles_are_whole_blocks_and_vectors(block_size: int) -> None:
    layout = KvLayout(resolve_kv_dtype("fp16"), 1, 1, 8, block_size)
    tile = cpu_attention.tile_keys(layout)
    assert tile >= cpu_attention.TILE_KEYS
    assert tile % block_size == 0
    assert tile % cpu_attention.VECTOR_WIDTH == 0


def test_buckets_waste_less_than_a_quarter() -> None:
    for tiles in range(1, 2000):
        assert tiles <= cpu_attention.tile_bucket(tiles) < 1.25 * tiles + 1e-9


# SmolLM2-135M's linear layers (the LM head shortened) and its attention tile.
SMOLLM2_SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 4096)]


@pytest.mark.parametrize("threads", [1, 2])
def test_padding_of_four_rows_makes_rows_independent_here(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        backend = CpuBackend(threads=threads)
        layout = KvLayout(resolve_kv_dtype("fp16"), 30, 3, 64, 16)
        linears = [
            backend.pack_linear(normal(rows, width) * width**-0.5, None)
            for width, rows in SMOLLM2_SHAPES
        ]
        backend.calibrate(linears, layout)
        for linear in linears:
            assert rows_are_independent(linear, linear.in_features, backend.row_multiple)
    finally:
        torch.set_num_threads(before)


def test_rows_that_depend_on_their_batch_are_noticed(backend: CpuBackend) -> None:
    def by_batch(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (x.shape[0] > 8) * 2**-20)

    def by_place(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (torch.arange(x.shape[0]) % 4 == 1)[:, None] * 2**-20)

    assert not rows_are_independent(by_batch, 16, 4)
    assert not rows_are_independent(by_place, 16, 4)
    assert rows_are_independent(lambda x: x * 3, 16, 4)


def test_calibrate_refuses_a_machine_without_any_fit(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "rows_are_independent", lambda *_: False)
    layout = KvLayout(resolve_kv_dtype("fp16"), 1, 1, 8, 16)
    said = r"no padding to 4, 8, 16, 32, 64 rows .* linear 8 to 8, scores of head_dim 8"
    with pytest.raises(RuntimeError, match=said):
        backend.calibrate([backend.pack_linear(normal(8, 8), None)], layout)


def test_threads_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        CpuBackend(threads=0)
