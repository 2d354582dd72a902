"""The CPU backend: float32 arithmetic over a paged pool, in torch, with no loop over tokens.

*The same answer* rests on four things, the first two measured by ``calibrate``:

* Linear layers see a multiple of ``row_multiple`` rows. oneDNN (and MKL) then sum every row in the
  same order however many rows there are.
* Attention works on tiles of a fixed number of keys, and on a multiple of ``row_multiple`` query
  rows (``cpu_attention`` says why that suffices).
* K and V are always read back from the pool, the step's own too.
* Elementwise functions whose vector and scalar code differ in the last bit (silu) only see rows
  that are whole vectors, and are never split across threads inside a vector.

``calibrate`` compares a few numbers of rows, for there are hundreds. A *deterministic* backend
computes no other number of rows than it has compared: linear layers see tiles of at most
``TILE_ROWS``, attention's products at most ``QUERY_ROWS``, and each number up to there was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.kvstore.core.requests import Token
from deepinfer.workers import sampler
from deepinfer.workers.backends.base import Linear, Plan, RowSpan
from deepinfer.workers.backends.cpu_attention import (
    CHUNK_ROWS,
    VECTOR_WIDTH,
    AttentionGroup,
    Scratch,
    attend,
    attention_kernels,
    make_groups,
    read_tiles,
    serial_parts,
)
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.sampler import SampleRow

ROW_MULTIPLES: Final = (4, 8, 16, 32, 64)
"""Row paddings that ``calibrate`` tries, cheapest first. The last is a whole small tile: where
tiles are small, linear layers then see one number of rows only, and that works wherever a row's
place in it does not matter."""

TILE_ROWS: Final = 64
"""Most rows of a small tile: with 64 it is as fast as with more."""

LARGEST_TILE_ROWS: Final = 512
"""Most rows that any backend multiplies at once. Above ``TILE_ROWS`` it multiplies powers of two,
for oneDNN keeps half a MiB of code for each number of rows that it has met, and for each weight."""

LARGE_TILE_WEIGHTS: Final = 1 << 23
"""Elements of a weight above which tiles stay small: a start would take long to compare more, and
such a product gains nothing from it."""

LARGE_TILES: Final = (128, 256, LARGEST_TILE_ROWS)
"""The numbers of rows that are multiplied at once above ``TILE_ROWS``."""

QUERY_ROWS: Final = 512
"""Most rows (query tokens times the heads of a group) of a deterministic attention product."""

SAMPLE_FACTORS: Final = (2, 3, 5, 8, 16)
"""Times the padding: numbers of rows that ``calibrate`` compares with the padding itself, beside
``LARGE_TILES``."""

INT8_SCALE_MIN: Final = 2.0**-14
"""The smallest normal float16: a subnormal scale would lose its precision."""

_FLOAT16_MAX: Final = torch.finfo(torch.float16).max


class CpuLinear:
    """A float32 weight, packed for oneDNN where torch has it, else row-major ``[out, in]``."""

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self.out_features, self.in_features = (int(size) for size in weight.shape)
        weight = weight.to(torch.float32).contiguous()
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._packed = packed
        # The hint is the batch the layout is made for; every batch computes from it.
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, ROW_MULTIPLES[0]) if packed else weight
        )

    @property
    def elements(self) -> int:
        """Of the weight."""
        return self.in_features * self.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in_features]`` to ``[rows, out_features]``, rows as given."""
        if self._packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return result
        return F.linear(x, self._weight, self._bias)


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """One step: where every row's KV goes, and what it attends."""

    rows: int
    padded_rows: int
    positions: Tensor
    slot_blocks: Tensor
    """Block of each real row, int64 ``[rows, 1]``."""
    slot_offsets: Tensor
    """Offset of each real row in its block, int64 ``[rows, 1]``."""
    heads: Tensor
    """0 .. kv_heads - 1, int64 ``[1, kv_heads]``."""
    groups: tuple[AttentionGroup, ...]


class CpuBackend:
    """``Backend`` for the CPU.

    ``threads`` is torch's intra-op thread count, set for the whole process. The default suits
    several workers on one machine: OpenMP's threads spin at every barrier, and two of them on
    cores that are not free were seen to run 20 times slower than one. Start a process that wants
    more with ``OMP_WAIT_POLICY=PASSIVE``. Only the engine thread may call a backend.

    ``deterministic`` multiplies in small tiles only, and makes ``calibrate`` try every number of
    rows of them. So does whoever runs on a CPU where larger products have other bits: a server with
    Intel's was seen where no padding made products of up to ``LARGEST_TILE_ROWS`` rows alike.

    Raises ValueError for ``threads`` below 1.
    """

    def __init__(self, *, threads: int = 1, deterministic: bool = False) -> None:
        if threads < 1:
            raise ValueError(f"CpuBackend.threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
        self.small_tiles = deterministic
        """Whether only shapes are computed that ``calibrate`` has compared, every one of them."""
        self.compared = 0
        """Shapes that ``calibrate`` has compared, each bit by bit."""
        self.row_multiple = ROW_MULTIPLES[0]
        self._packs = _has_packed_linear()
        self._saturations = 0
        self._scratch = Scratch()

    @property
    def name(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def kv_saturations(self) -> int:
        """K and V elements clamped to the pool's dtype since start."""
        return self._saturations

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        """Pack a weight ``[out_features, in_features]``; see ``Backend.pack_linear``."""
        return CpuLinear(weight, bias, packed=self._packs)

    def calibrate(self, linears: Sequence[Linear], layout: KvLayout) -> None:
        """Choose the smallest of ``ROW_MULTIPLES`` with which every row's bits are its own.

        Called again for another model or pool, it never goes below what an earlier one needs.
        """
        shapes: dict[tuple[int, int], CpuLinear] = {}
        for linear in sorted(linears, key=_elements):
            assert isinstance(linear, CpuLinear)
            shapes.setdefault((linear.in_features, linear.out_features), linear)
        kernels: list[tuple[str, int, Callable[[Tensor], Tensor]]] = [
            (f"linear {width} to {rows}", width, linear) for (width, rows), linear in shapes.items()
        ]
        kernels += attention_kernels(layout)
        large = sum(linear.elements <= LARGE_TILE_WEIGHTS for linear in shapes.values())
        failed = self._choose_multiple(kernels, len(shapes), large)
        if failed and not self.small_tiles:
            self.small_tiles = True
            failed = self._choose_multiple(kernels, len(shapes), large)
        if failed:
            raise RuntimeError(
                f"batching would change answers: with {torch.get_num_threads()} threads no padding "
                f"to {', '.join(map(str, ROW_MULTIPLES))} rows makes the bits of a row its own in "
                f"{', '.join(failed)}"
            )

    def _choose_multiple(
        self,
        kernels: Sequence[tuple[str, int, Callable[[Tensor], Tensor]]],
        linears: int,
        large: int,
    ) -> list[str]:
        """Set ``row_multiple``, or say in which kernels no multiple does.

        First of ``kernels`` come the ``linears`` layers, and of these the ``large`` ones that are
        multiplied in large tiles.
        """
        failed: list[str] = []
        for multiple in ROW_MULTIPLES[ROW_MULTIPLES.index(self.row_multiple) :]:
            failed = []
            for at, (name, width, kernel) in enumerate(kernels):
                factors = [f for f in SAMPLE_FACTORS if f * multiple <= LARGEST_TILE_ROWS]
                if at < large:
                    factors = sorted({*factors, *(rows // multiple for rows in LARGE_TILES)})
                if self.small_tiles:
                    most = TILE_ROWS if at < linears else QUERY_ROWS
                    factors = [*range(2, most // multiple + 1)] or [1]
                self.compared += len(factors)
                if not rows_are_independent(kernel, width, multiple, factors):
                    failed.append(name)
            if not failed:
                self.row_multiple = multiple
                break
        return failed

    def plan(self, spans: Sequence[RowSpan], layout: KvLayout, query_heads: int) -> CpuPlan:
        """Lay out a step; see ``Backend.plan``."""
        rows = sum(span.count for span in spans)
        padded = self._pad(rows)
        positions = torch.zeros(padded, dtype=torch.int64)
        slot_blocks = torch.empty(rows, dtype=torch.int64)
        at = 0
        for span in spans:
            end = span.start + span.count
            place = torch.arange(span.start, end)
            positions[at : at + span.count] = place
            table = torch.tensor(span.block_table[: layout.blocks_for(end)], dtype=torch.int64)
            slot_blocks[at : at + span.count] = table[place // layout.block_size]
            at += span.count
        return CpuPlan(
            rows=rows,
            padded_rows=padded,
            positions=positions,
            slot_blocks=slot_blocks[:, None],
            slot_offsets=(positions[:rows] % layout.block_size)[:, None],
            heads=torch.arange(layout.kv_heads)[None],
            groups=make_groups(
                spans,
                layout,
                group_size=query_heads // layout.kv_heads,
                row_multiple=self.row_multiple,
                scratch=self._scratch,
                chunk_rows=self._chunk_rows(query_heads // layout.kv_heads),
            ),
        )

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """``x @ weight.T + bias``, padding the rows where needed."""
        assert isinstance(weight, CpuLinear)
        if x.shape[0] <= TILE_ROWS:
            return self._padded(x, weight)
        parts = torch.split(x, self._tiles(x.shape[0], weight))
        return torch.cat([self._padded(part, weight) for part in parts])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last axis in float32."""
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the two halves of the last axis; a new tensor."""
        half = x.shape[-1] // 2
        cos = torch.cat((cos, cos), dim=-1)[:, None]
        sin = torch.cat((-sin, sin), dim=-1)[:, None]
        return torch.mul(x, cos).add_(x.roll(half, -1).mul_(sin))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``; the width must be a multiple of ``VECTOR_WIDTH``."""
        gate, up = gate_up.chunk(2, dim=-1)
        width = gate.shape[1]
        assert width % VECTOR_WIDTH == 0, f"width {width} would leave a scalar tail"
        result = torch.empty(gate.shape, dtype=torch.float32)
        for source, target in zip(serial_parts(gate), serial_parts(result), strict=True):
            torch.ops.aten.silu.out(source, out=target)
        return result.mul_(up)

    def kv_write(self, pool: PagedPool, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Quantise and scatter the step's K and V; see ``Backend.kv_write``."""
        assert isinstance(plan, CpuPlan)
        index = (plan.slot_blocks, plan.heads, plan.slot_offsets)
        for kv, (values, typed, words) in enumerate(
            (
                (k, pool.k(layer), pool.k_words(layer)),
                (v, pool.v(layer), pool.v_words(layer)),
            )
        ):
            values = values[: plan.rows]
            if typed.dtype == torch.int8:
                stored, scale = quantise_int8(values)
                pool.scales(layer)[plan.slot_blocks, kv, plan.heads, plan.slot_offsets] = scale
            else:
                stored = self._saturating_cast(values, typed.dtype)
            words[index] = stored.view(words.dtype)

    def attention(self, pool: PagedPool, layer: int, q: Tensor, plan: Plan) -> Tensor:
        """Tiled attention over the pool; see ``Backend.attention``."""
        assert isinstance(plan, CpuPlan)
        heads, head_dim = q.shape[1], q.shape[2]
        result = torch.zeros((plan.padded_rows, heads * head_dim), dtype=torch.float32)
        for group in plan.groups:
            read_tiles(pool, layer, group)
            result[group.rows] = attend(q[group.rows], group)
        return result

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Token]:
        """Choose one token a row, by the worker's sampler."""
        return sampler.sample(logits, rows)

    def _tiles(self, rows: int, weight: CpuLinear) -> list[int]:
        """What is multiplied at once: few different numbers of rows."""
        large = not self.small_tiles and weight.elements <= LARGE_TILE_WEIGHTS
        most = LARGEST_TILE_ROWS if large else TILE_ROWS
        tiles = []
        while rows > TILE_ROWS:
            tiles.append(min(most, 1 << (rows.bit_length() - 1)))
            rows -= tiles[-1]
        return [*tiles, rows] if rows else tiles

    def _padded(self, x: Tensor, weight: CpuLinear) -> Tensor:
        rows = x.shape[0]
        missing = self._pad(rows) - rows
        if not missing:
            return weight(x)
        return weight(F.pad(x, (0, 0, 0, missing)))[:rows]

    def _chunk_rows(self, group_size: int) -> int:
        """Query tokens of one attention product."""
        if not self.small_tiles:
            return CHUNK_ROWS
        return min(CHUNK_ROWS, max(1, QUERY_ROWS // group_size))

    def _pad(self, rows: int) -> int:
        return -(-rows // self.row_multiple) * self.row_multiple

    def _saturating_cast(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        limit = torch.finfo(dtype).max
        low, high = values.aminmax()
        # Said so that NaN, of which no comparison holds, is looked at as well.
        if not (-limit <= float(low) and float(high) <= limit):
            clamped = values.clamp(-limit, limit)
            self._saturations += int((clamped != values).sum())
            values = clamped
        return values.to(dtype)


def quantise_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``[..., head_dim]`` to int8 with one float16 scale ``[...]`` a vector."""
    scale = (values.abs().amax(-1) / 127).clamp_(INT8_SCALE_MIN, _FLOAT16_MAX).to(torch.float16)
    quantised = (values / scale.to(torch.float32)[..., None]).round_().clamp_(-127, 127)
    return quantised.to(torch.int8), scale


def rows_are_independent(
    kernel: Callable[[Tensor], Tensor],
    width: int,
    multiple: int,
    factors: Sequence[int] = SAMPLE_FACTORS,
) -> bool:
    """Whether a row's bits survive batches of ``factors`` times ``multiple`` rows, anywhere in one.

    ``kernel`` maps ``[rows, width]`` to ``[rows, anything]``.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn((max(factors) * multiple, width), generator=generator)
    expected = torch.cat([kernel(part) for part in torch.split(probe, multiple)])
    for factor in factors:
        rows = factor * multiple
        if not torch.equal(kernel(probe[:rows].contiguous()), expected[:rows]):
            return False
    same = kernel(probe[:1].expand(min(3, max(factors)) * multiple, width).contiguous())
    return torch.equal(same, expected[:1].expand_as(same))


def _elements(linear: Linear) -> int:
    assert isinstance(linear, CpuLinear)
    return linear.elements


def _has_packed_linear() -> bool:
    operators: Any = torch.ops.mkldnn
    return torch._C._has_mkldnn and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
