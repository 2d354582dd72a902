// Linear layers for 17 to 64 rows. The warps of a CTA have different rows of W and share X, which
// passes through shared memory: at 64 rows every warp reading X by itself would cost several times
// the traffic of W.
//
// X is stored as fragments, [chunk][n-tile][lane] 16 bytes each, so that every read is one
// conflict-free 512-byte access. Where N alone makes too few CTAs, gridDim.z of them split K; the
// last to come adds the partial sums in the order of the splits.
//
// How the weights are stored is the policy F:
//   CHUNKS            chunks of 32 k in a step
//   GROUP_CHUNKS      chunks that share a scale; 0: no scales, sums stay in the accumulators
//   Rows              where a lane's rows g and g + 8 of a tile of 16 begin: rows(row, row8)
//   Tile              a lane's part of 16 rows and one step, as loaded
//   load(tile, rows, k)             issues the loads of the step at k
//   live(chunk, k)                  whether the chunk of the step at k is within K
//   x_offset(chunk, t)              where in the step the lane's 8 values of X are
//   fragments(tile, chunk, a)       the A operands of the chunk's two mma
//   scale(tile, group, half)        what the sums of row g (half 0) or g + 8 (1) multiply, as half
#pragma once
#include "gemm.cuh"

constexpr int X_STAGES = 3;

// Leaves this split's `sums` [ROWS][COLUMNS + 1] in the workspace. In the CTA that comes last true,
// and `sums` is that of all splits, added in their order.
template <int ROWS, int COLUMNS, int THREADS>
DEV bool merge(float* sums, float* workspace, i32* tickets) {
  constexpr int AREA = ROWS * COLUMNS, PITCH = COLUMNS + 1, QUADS = AREA / 4 / THREADS;
  const int splits = gridDim.z, block = blockIdx.y * gridDim.x + blockIdx.x;
  float* partial = workspace + static_cast<i64>(block) * splits * AREA;
  for (int e = threadIdx.x; e < AREA; e += THREADS)
    partial[blockIdx.z * AREA + e] = sums[e % ROWS * PITCH + e / ROWS];
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(tickets + block, 1) == splits - 1;
    if (last) tickets[block] = 0;
  }
  __syncthreads();
  if (!last) return false;
  __threadfence();

  float total[QUADS][4] = {};
  for (int split = 0; split < splits; ++split)
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const int e = 4 * (q * THREADS + static_cast<int>(threadIdx.x));
      const float4 four = ld_cg(reinterpret_cast<const float4*>(partial + split * AREA + e));
      total[q][0] += four.x, total[q][1] += four.y, total[q][2] += four.z, total[q][3] += four.w;
    }
#pragma unroll
  for (int q = 0; q < QUADS; ++q)
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int e = 4 * (q * THREADS + static_cast<int>(threadIdx.x)) + v;
      sums[e % ROWS * PITCH + e / ROWS] = total[q][v];
    }
  __syncthreads();
  return true;
}

// Grid: x over blocks of 8 NT rows of X, y over 16 MT WARPS rows of W, z over splits of K.
// `workspace` has gridDim.x y z blocks of 16 MT WARPS * 8 NT floats, `tickets` a zero for each x, y
// (and is left so); both unused if gridDim.z is 1. `shared`: see `tiled_shared_bytes` of linear.py.
template <class F, int NT, int MT, int WARPS, int DEPTH>
DEV void tiled_gemm(const F& weights, const __half* __restrict__ x, const Finish& f, i32 M, i32 N,
                    i32 K, float* workspace, i32* tickets, uint4* shared) {
  constexpr int STEP = 32 * F::CHUNKS, THREADS = 32 * WARPS;
  constexpr int ROWS = 16 * MT * WARPS, COLUMNS = 8 * NT, PITCH = COLUMNS + 1;
  constexpr int GROUP = F::GROUP_CHUNKS ? F::GROUP_CHUNKS : F::CHUNKS;
  constexpr int STAGE = F::CHUNKS * NT * 32;  // 16-byte pieces of X in a step
  constexpr int SUMS = (ROWS * PITCH + 3) / 4;
  float* rstd = reinterpret_cast<float*>(shared + max(X_STAGES * STAGE, SUMS));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.x * COLUMNS, n0 = blockIdx.y * ROWS, row0 = n0 + 16 * MT * warp;
  const int steps = (K + STEP - 1) / STEP, share = (steps + gridDim.z - 1) / gridDim.z;
  const int begin = share * blockIdx.z, end = min(begin + share, steps);

  typename F::Tile ring[DEPTH][MT];
  typename F::Rows rows[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const int row = row0 + 16 * i + g;
    rows[i] = weights.rows(min(row, N - 1), min(row + 8, N - 1));
  }
  auto load = [&](typename F::Tile(&tiles)[MT], int step) {
#pragma unroll
    for (int i = 0; i < MT; ++i) weights.load(tiles[i], rows[i], step * STEP);
  };
  auto stage_x = [&](int step) {  // one group a step, empty beyond the end
    if (step < end)
#pragma unroll
      for (int piece = threadIdx.x; piece < STAGE; piece += THREADS) {
        const int chunk = piece / (32 * NT), m = m0 + piece / 32 % NT * 8 + piece % 32 / 4;
        const int k = step * STEP + F::x_offset(chunk, piece % 4);
        const bool valid = m < M && k < K;
        cp_async16_zfill(shared + step % X_STAGES * STAGE + piece,
                         valid ? x + static_cast<i64>(m) * K + k : x, valid ? 16 : 0);
      }
    cp_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < DEPTH; ++stage)
    if (begin + stage < end) load(ring[stage], begin + stage);
#pragma unroll
  for (int stage = 0; stage < X_STAGES - 1; ++stage) stage_x(begin + stage);
  row_scales<COLUMNS, WARPS>(f, rstd, m0, M, 1.f / K);

  float acc[MT][NT][4];
  clear(acc);
  auto multiply = [&](const typename F::Tile(&tiles)[MT], const uint4* values, int k) {
#pragma unroll
    for (int first = 0; first < F::CHUNKS; first += GROUP) {
      if (!weights.live(first, k)) break;
      float group[MT][NT][4];
      if (F::GROUP_CHUNKS) clear(group);
      auto& into = F::GROUP_CHUNKS ? group : acc;
#pragma unroll
      for (int chunk = first; chunk < first + GROUP; ++chunk) {
        if (!weights.live(chunk, k)) break;
        u32 a[MT][2][4];
#pragma unroll
        for (int i = 0; i < MT; ++i) weights.fragments(tiles[i], chunk, a[i]);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          const uint4 b = values[(chunk * NT + j) * 32 + lane];
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            mma16816(into[i][j], a[i][0][0], a[i][0][1], a[i][0][2], a[i][0][3], b.x, b.y);
            mma16816(into[i][j], a[i][1][0], a[i][1][1], a[i][1][2], a[i][1][3], b.z, b.w);
          }
        }
      }
      if (F::GROUP_CHUNKS)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float scale = __half2float(weights.scale(tiles[i], first / GROUP, half));
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
              for (int v = 2 * half; v < 2 * half + 2; ++v)
                acc[i][j][v] += scale * group[i][j][v];
          }
    }
  };
  for (int step = begin; step < end; step += DEPTH) {
#pragma unroll
    for (int stage = 0; stage < DEPTH; ++stage) {
      const int at = step + stage;
      if (at >= end) break;
      cp_async_wait<X_STAGES - 2>();
      __syncthreads();  // this step's X is there, and the step before is done with its buffer
      stage_x(at + X_STAGES - 1);
      multiply(ring[stage], shared + at % X_STAGES * STAGE, at * STEP);
      if (at + DEPTH < end) load(ring[stage], at + DEPTH);
    }
  }

  cp_async_wait<0>();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v)
        sums[(16 * (warp * MT + i) + g + 8 * (v / 2)) * PITCH + 8 * j + 2 * t + v % 2] =
            acc[i][j][v];
  __syncthreads();
  if (gridDim.z > 1 && !merge<ROWS, COLUMNS, THREADS>(sums, workspace, tickets)) return;
  const auto sum = [&](int row, int column) { return sums[row * PITCH + column]; };
  finish<ROWS, COLUMNS, THREADS>(f, sum, rstd, m0, n0, M, N);
}
