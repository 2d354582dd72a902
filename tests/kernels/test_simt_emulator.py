"""The emulator itself, on small kernels whose results are known exactly."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.kernels import source
from deepinfer.kernels.compiler import Argument
from kernels.simt.build import COMPILER, EmulatedKernels, EmulationError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

TEXT = r"""
__global__ void matmul(float* d, const __half* a, const __half* b) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const u32* wide = reinterpret_cast<const u32*>(a);          // A [16][16], row-major
  auto pair = [&](int row, int column) {
    return u32(half_bits(b[row * 8 + column])) | u32(half_bits(b[(row + 1) * 8 + column])) << 16;
  };
  float acc[4];
  for (int i = 0; i < 4; ++i) acc[i] = d[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  mma16816(acc, wide[g * 8 + t], wide[(g + 8) * 8 + t], wide[g * 8 + t + 4],
           wide[(g + 8) * 8 + t + 4], pair(2 * t, g), pair(2 * t + 8, g));
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = acc[i];
}

__global__ void tiles(u32* plain, u32* transposed, u32* moved, const u16* from) {
  __shared__ __align__(16) u16 tile[4 * 64];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) tile[i] = from[i];
  __syncwarp();
  u32 r[4];
  ldmatrix_x4(r, tile + lane * 8);
  for (int j = 0; j < 4; ++j) plain[j * 32 + lane] = r[j];
  for (int j = 0; j < 4; ++j) moved[j * 32 + lane] = movm(r[j]);
  ldmatrix_x4_trans(r, tile + lane * 8);
  for (int j = 0; j < 4; ++j) transposed[j * 32 + lane] = r[j];
}

__global__ void collectives(int* out) {
  const int lane = threadIdx.x & 31, n = gridDim.x * blockDim.x;
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  out[at] = __shfl_xor_sync(FULL_WARP, lane, 5);
  out[n + at] = __shfl_up_sync(FULL_WARP, lane, 3, 8);
  out[2 * n + at] = __shfl_down_sync(FULL_WARP, lane, 3, 16);
  out[3 * n + at] = __shfl_sync(FULL_WARP, lane, lane * 7);
  out[4 * n + at] = int(__ballot_sync(FULL_WARP, lane % 3 == 0));
  out[5 * n + at] = __any_sync(FULL_WARP, lane == 31) + 2 * __all_sync(FULL_WARP, lane < 31);
  out[6 * n + at] = lane < 8 ? __shfl_sync(0xFFu, lane, 2) : __shfl_sync(0xFFFFFF00u, lane, 9);
  out[7 * n + at] = __syncthreads_count(threadIdx.x % 5 == 0);
}

__global__ void reverse(float* x, int n) {
  extern __shared__ float held[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = x[blockIdx.x * n + i];
  BARRIER;
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[blockIdx.x * n + i] = held[n - 1 - i];
}

// The last block to arrive adds up what all wrote.
__global__ void tickets(float* total, float* parts, int* ticket, const float* x) {
  __shared__ int last;
  float sum = warp_sum(x[blockIdx.x * 32 + threadIdx.x]);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(ticket, 1) == int(gridDim.x) - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x) return;
  sum = 0;
  for (int i = 0; i < int(gridDim.x); ++i) sum += ld_cg(parts + i);
  *total = sum;
  *ticket = 0;
}

__global__ void unwritten(float* out) {
  __shared__ float held[32];
  extern __shared__ float more[];
  if (threadIdx.x % 2) held[threadIdx.x] = more[threadIdx.x] = 1.f;
  __syncwarp();
  out[threadIdx.x] = held[threadIdx.x];
  out[32 + threadIdx.x] = more[threadIdx.x];
}

template <int WAIT>
__global__ void staged(uint4* out, const uint4* in) {
  __shared__ uint4 stage[2][32];
  cp_async16(&stage[0][threadIdx.x], in + threadIdx.x);
  cp_async_commit();
  cp_async16_zfill(&stage[1][threadIdx.x], in + 32 + threadIdx.x, threadIdx.x % 2 ? 6 : 16);
  cp_async_commit();
  cp_async_wait<1>();
  out[threadIdx.x] = stage[0][threadIdx.x];
  cp_async_wait<WAIT>();
  out[32 + threadIdx.x] = stage[1][threadIdx.x];
}

__global__ void bits(u32* out, const u32* in, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = prmt(in[i], in[n + i], 0x7263);
  out[n + i] = lop3<(0xF0 & 0xCC) | 0xAA>(in[i], in[n + i], in[2 * n + i]);
}

__global__ void codes(u8* e4m3, u8* e5m2, u16* back, const float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    e4m3[i] = float_to_e4m3(x[i]);
    e5m2[i] = float_to_e5m2(x[i]);
  }
  if (i < 256) back[i] = u16(e4m3x2_to_half2(u16(i << 8 | i)) >> 16);
}

__global__ void diverged(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(FULL_WARP, 1, 0);
  else __syncthreads();
}

// The first warp feeds the second one numbers, through two slots.
__global__ void roles(int* out, int count, int arrivals) {
  __shared__ u64 full[2], empty[2];
  __shared__ int slots[2];
  const int lane = threadIdx.x & 31;
  if (threadIdx.x < 2) arrivals_init(full + threadIdx.x, 1), arrivals_init(empty + threadIdx.x, 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = 0; i < count; i++) {
      if (i >= 2) arrivals_wait(empty + (i & 1), (i >> 1 & 1) ^ 1);
      if (lane == 0) slots[i & 1] = i * i;
      __syncwarp();
      if (lane == 0 && i < arrivals) arrive(full + (i & 1));
    }
    named_arrive(1, 64);
  } else {
    for (int i = 0; i < count; i++) {
      arrivals_wait(full + (i & 1), i >> 1 & 1);
      out[i * 32 + lane] = slots[i & 1];
      arrive(empty + (i & 1));
    }
    named_sync(1, 64);
  }
}

__global__ void gone(int* out) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_xor_sync(FULL_WARP, 1, 1);
}

__global__ void copy(int* to, const int* from, int n, i64 shift, float scale) {
  const int i = threadIdx.x;
  if (i < n) to[i + shift] = int(scale * from[i]);
}

__global__ void vectors(uint4* to, const u8* from) { to[threadIdx.x] = ldg_stream(from + 1); }
"""

CLUSTERS = r"""
// Every CTA shows the others a number, twice; some of its threads have ended by then.
__global__ void __cluster_dims__(4, 1, 1) clustered(float* out, int arrives) {
  extern __shared__ __align__(16) float own[];
  const int rank = blockIdx.x % 4, lane = threadIdx.x % 32;
  if (threadIdx.x >= 32) return;
  for (int round = 0; round < 2; ++round) {
    for (int i = lane; i < 128; i += 32) own[i] = 1000 * round + 128 * rank + i;
    if (rank < arrives) cluster_arrive<4>();
    cluster_wait();
    float sum = 0;
    for (int other = 0; other < 4; ++other) {
      const float4 four = cluster_load(own + 4 * lane, other);
      sum += four.x + 2 * four.y + 3 * four.z + 4 * four.w;
    }
    out[(blockIdx.x * 2 + round) * 32 + lane] = sum;
    cluster_arrive<4>();
    cluster_wait();
  }
}
"""

NAMES = re.findall(r"__global__ void (\w+)", TEXT.replace("void staged", ""))
NAMES += ["staged<0>", "staged<1>"]


@functools.cache
def kernels(barrier: str) -> EmulatedKernels:
    names = NAMES if barrier else ["reverse"]
    text = source.inlined("pipeline.cuh") + TEXT.replace("BARRIER", barrier)
    return EmulatedKernels("test.cu", text, names)


def run(
    name: str,
    threads: int,
    *args: Argument,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared_bytes: int = 0,
    barrier: str = "__syncthreads()",
) -> None:
    kernels(barrier).run(name, grid, threads, args, shared_bytes=shared_bytes)


def test_mma_multiplies_what_its_fragments_hold() -> None:
    random = np.random.default_rng(0)
    a = random.integers(-8, 9, (16, 16))
    b = random.integers(-8, 9, (16, 8))
    c = random.integers(-8, 9, (16, 8))
    d = torch.tensor(c, dtype=torch.float32)
    run("matmul", 32, d, torch.tensor(a).half(), torch.tensor(b).half())
    assert np.array_equal(d.numpy(), a @ b + c)


def test_matrices_are_loaded_and_transposed() -> None:
    tiles = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    results = [torch.zeros(4, 32, dtype=torch.int32) for _ in range(3)]
    run("tiles", 32, *results, tiles)
    plain, transposed, moved = (each.view(torch.int16).view(4, 8, 8) for each in results)
    assert torch.equal(plain, tiles)
    assert torch.equal(transposed, tiles.mT)
    assert torch.equal(moved, tiles.mT)


def test_collectives_give_every_lane_its_own() -> None:
    out = torch.zeros(8, 2, 64, dtype=torch.int32)
    run("collectives", 64, out, grid=(2, 1, 1))
    lane = np.arange(32)
    expected = [
        lane ^ 5,
        np.where(lane % 8 >= 3, lane - 3, lane),
        np.where(lane % 16 + 3 < 16, lane + 3, lane),
        lane * 7 % 32,
        np.full(32, sum(1 << i for i in range(0, 32, 3))),
        np.full(32, 1),
        np.where(lane < 8, 2, 9),
        np.full(32, 13),
    ]
    for row, want in zip(out.numpy(), expected, strict=True):
        assert np.array_equal(row.reshape(4, 32), np.tile(want, (4, 1)))


def test_barrier_separates_writes_from_reads() -> None:
    x = torch.arange(2 * 100, dtype=torch.float32).view(2, 100)
    expected = x.flip(1)
    run("reverse", 96, x, np.int32(100), grid=(2, 1, 1), shared_bytes=400)
    assert torch.equal(x, expected)


def test_missing_barrier_shows() -> None:
    x = torch.arange(2 * 100, dtype=torch.float32).view(2, 100)
    expected = x.flip(1)
    run("reverse", 96, x, np.int32(100), grid=(2, 1, 1), shared_bytes=400, barrier="")
    assert not torch.equal(x, expected)


def test_last_block_sees_what_all_wrote_and_resets_the_ticket() -> None:
    x = torch.arange(5 * 32, dtype=torch.float32)
    total, parts, ticket = torch.zeros(1), torch.zeros(5), torch.zeros(1, dtype=torch.int32)
    run("tickets", 32, total, parts, ticket, x, grid=(5, 1, 1))
    assert float(total) == float(x.sum())
    assert int(ticket) == 0


def test_shared_memory_is_poisoned_before_every_block() -> None:
    out = torch.zeros(64)
    for _ in range(2):
        run("unwritten", 32, out, grid=(2, 1, 1), shared_bytes=128)
        assert out[::2].isnan().all()
        assert (out[1::2] == 1).all()


def test_asynchronous_copies_arrive_when_waited_for() -> None:
    x = torch.arange(64 * 16, dtype=torch.int16).to(torch.uint8).view(64, 16)
    out = torch.zeros_like(x)
    run("staged<0>", 32, out, x)
    expected = x.clone()
    expected[33::2, 6:] = 0
    assert torch.equal(out, expected)
    run("staged<1>", 32, out, x)
    assert torch.equal(out[:32], x[:32])
    assert not torch.equal(out[32:], expected[32:])


def test_bit_primitives() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, (3, 70), dtype=np.uint32)
    a, b, c = words
    out = torch.zeros(2, 70, dtype=torch.int32)
    given = torch.from_numpy(words.view(np.int32).copy())
    run("bits", 32, out, given, np.int32(70), grid=(3, 1, 1))
    result = out.numpy().view(np.uint32)
    # Bytes 3 of a, 6 - 4 of b, 2 of a, 7 - 4 of b, from the lowest.
    expected = a >> 24 | (b >> 16 & 255) << 8 | (a >> 16 & 255) << 16 | b >> 24 << 24
    assert np.array_equal(result[0], expected)
    assert np.array_equal(result[1], a & b | c)


def test_float8_conversions_equal_torchs() -> None:
    every_half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = torch.cat((every_half.view(torch.float16).float(), torch.randn(5000) * 2.0**-8))
    e4m3, e5m2 = (torch.zeros(len(x), dtype=torch.uint8) for _ in range(2))
    back = torch.zeros(256, dtype=torch.float16)
    grid = (-(-len(x) // 128), 1, 1)
    run("codes", 128, e4m3, e5m2, back, x, np.int32(len(x)), grid=grid)
    for ours, dtype in ((e4m3, torch.float8_e4m3fn), (e5m2, torch.float8_e5m2)):
        limit = torch.finfo(dtype).max
        theirs = x.clamp(-limit, limit).to(dtype)
        number = ~x.isnan()
        assert torch.equal(ours[number], theirs.view(torch.uint8)[number])
        assert ours.view(dtype).float()[~number].isnan().all()
    every_code = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).half()
    assert torch.equal(back.nan_to_num(nan=-1.0), every_code.nan_to_num(nan=-1.0))


def test_warps_of_different_roles_meet_at_their_barriers() -> None:
    out = torch.zeros(7, 32, dtype=torch.int32)
    run("roles", 64, out, np.int32(7), np.int32(7))
    assert torch.equal(out, (torch.arange(7) ** 2).int()[:, None].expand(7, 32))
    with pytest.raises(EmulationError, match=r"stuck.*thread 0 waits for arrivals_wait"):
        run("roles", 64, out, np.int32(7), np.int32(4))


def test_blocks_of_a_cluster_read_each_others_shared_memory() -> None:
    made = EmulatedKernels("clusters.cu", source.inlined("cluster.cuh") + CLUSTERS, ["clustered"])
    out = torch.zeros(8, 2, 32)
    made.run("clustered", (8, 1, 1), 64, (out, np.int32(4)), shared_bytes=512)
    at = torch.arange(4.0)[:, None, None] * 128 + torch.arange(128.0).view(32, 4)
    for turn in range(2):
        sums = ((at + 1000 * turn) * torch.arange(1.0, 5)).sum((0, 2))
        assert torch.equal(out[:, turn], sums.expand(8, 32))
    with pytest.raises(EmulationError, match=r"block \(3,0,0\).*has not arrived"):
        made.run("clustered", (4, 1, 1), 64, (out, np.int32(3)), shared_bytes=512)
    with pytest.raises(EmulationError, match="the grid ends within one"):
        made.run("clustered", (6, 1, 1), 64, (out, np.int32(4)), shared_bytes=512)


FAULTS: list[tuple[str, Sequence[Argument], str]] = [
    ("diverged", [torch.zeros(32, dtype=torch.int32)], "stuck.*thread 0 waits for __shfl_sync"),
    ("gone", [torch.zeros(32, dtype=torch.int32)], "names lane 7, which has returned"),
    ("vectors", [torch.zeros(32, 4, dtype=torch.int32), torch.zeros(99)], "16 bytes is misaligned"),
]


@pytest.mark.parametrize(("name", "args", "message"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_faults_are_named(name: str, args: Sequence[Argument], message: str) -> None:
    with pytest.raises(EmulationError, match=f"test.cu: {name}: block \\(0,0,0\\).*{message}"):
        run(name, 32, *args)


def copied(to: Tensor, numbers: Tensor, n: int, shift: int) -> None:
    run("copy", 64, to, numbers, np.int32(n), np.int64(shift), np.float32(1))


def test_out_of_bounds_is_named() -> None:
    to, numbers = torch.zeros(64, dtype=torch.int32), torch.arange(60, dtype=torch.int32)
    copied(to, numbers, 60, 0)
    assert torch.equal(to[:60], numbers)
    with pytest.raises(EmulationError, match=r"thread 60 .*0 bytes behind .* argument 1's storage"):
        copied(to, numbers, 61, 0)
    with pytest.raises(EmulationError, match=r"thread 57 .*0 bytes behind .* argument 0's storage"):
        copied(to, numbers, 60, 7)
    with pytest.raises(EmulationError, match="just before or behind argument 0's storage"):
        copied(to, numbers, 60, -1)


def test_arguments_must_have_the_kernels_types() -> None:
    x = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(EmulationError, match=r"takes .*int64, float32.* got .*int32, float32"):
        run("copy", 64, x, x, np.int32(1), np.int32(1), np.float32(1))


def test_a_tensor_and_a_view_of_it_stay_one_memory() -> None:
    x = torch.arange(64, dtype=torch.int32)
    copied(x[32:], x[:32], 32, 0)
    assert torch.equal(x, torch.arange(32, dtype=torch.int32).repeat(2))
