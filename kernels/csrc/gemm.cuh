// Linear layers for few rows: out[M, N] = X[M, K] W[N, K]^T, bound by reading W once.
//
// W is the A operand of mma.m16n8k16, X the B operand, so a tile of 16 weight rows meets 8 NT rows
// of X. Nothing passes through shared memory on the way in: a product over k does not care in
// which order k runs, so each lane takes 16 contiguous bytes of a row of W, calls them its
// fragment, and takes the same k of X. With g = lane / 4 and t = lane % 4 a lane holds rows g and
// g + 8 of W and row g of X; k advances by chunks of 32, of which lane t has 8 (two mma).
//
// The WARPS of a CTA split K: warp w takes steps w, w + WARPS, ... and keeps DEPTH steps of weights
// in flight in registers (and with AHEAD = 1 the next step's X). Their sums meet in shared memory
// and are added in the order of the warps, so a result depends on WARPS but on nothing else: not on
// M, NT, MT, DEPTH, AHEAD or the grid.
//
// How the weights are stored is the policy F:
//   CHUNKS            chunks of 32 k in a step
//   GROUP_CHUNKS      chunks that share a scale; 0: no scales, sums stay in the accumulators
//   Rows              where a lane's rows g and g + 8 of a tile of 16 begin: rows(row, row8)
//   Tile              a lane's part of 16 rows and one step, as loaded
//   load(tile, rows, k, ahead)      issues the loads of the step at k + ahead
//   live(chunk, k)                  whether the chunk of the step at k is within K
//   x_offset(chunk, t)              where in the step the lane's 8 values of X are
//   fragments(tile, chunk, a)       the A operands of the chunk's two mma
//   scale(tile, group, half)        what the sums of row g (half 0) or g + 8 (1) multiply, as half
#pragma once
#include "primitives.cuh"

enum Epilogue {
  NORM = 0,      // half out = acc rstd + bias
  SWIGLU = 1,    // half out = silu(gate) up; rows of W in eights: 8 gate, 8 up, 8 gate, ...
  RESIDUAL = 2,  // residual += acc + bias; half out = residual gamma; sums of residual^2
  LOGITS = 3,    // float out = acc rstd + bias
};

// CTAs that an SM should hold at least, which bounds the registers: enough loads must be in flight.
constexpr int resident_ctas(int row_tiles, int warps, int ahead) {
  const int resident_warps = row_tiles > 1 ? 8 : ahead ? 12 : 16;
  return warps < resident_warps ? resident_warps / warps : 1;
}

// What happens to the sums. Null: no bias, rstd = 1.
struct Finish {
  i32 epilogue;
  void* out;            // [M, N], for SWIGLU [M, N / 2]
  const float* bias;    // [N]
  const float* sumsq;   // [M, partials]: rstd = rsqrt(sum / K + eps)
  i32 partials;
  float eps;
  float* residual;      // [M, N]
  const __half* gamma;  // [N]
  float* sumsq_out;     // [M, ceil(N / 16)]
};

template <int MT, int NT>
DEV void clear(float (&sums)[MT][NT][4]) {
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[i][j][v] = 0.f;
}

// What row m of X multiplies: rstd[COLUMNS] of the rows from m0, each added up in a fixed order. A
// warp takes several rows at once, so that their loads overlap.
template <int COLUMNS, int WARPS>
DEV void row_scales(const Finish& f, float* rstd, i32 m0, i32 M, i32 K) {
  constexpr int EACH = (COLUMNS + WARPS - 1) / WARPS, BATCH = EACH < 4 ? EACH : 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = warp; first < COLUMNS; first += BATCH * WARPS) {
    float s[BATCH] = {};
    if (f.sumsq && m0 + first < M)
#pragma unroll 4
      for (int i = lane; i < f.partials; i += 32)
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          const int m = m0 + first + b * WARPS;
          if (m < M) s[b] += ld_cg(f.sumsq + static_cast<i64>(m) * f.partials + i);
        }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const float scale = f.sumsq ? rsqrtf(warp_sum(s[b]) / K + f.eps) : 1.f;
      if (lane == 0 && first + b * WARPS < COLUMNS) rstd[first + b * WARPS] = scale;
    }
  }
}

// A thread's share of the outputs of a CTA: ROWS (a multiple of 16) rows of W from n0, COLUMNS
// rows of X from m0. `sum(row, column)` is the product.
template <int ROWS, int COLUMNS, int THREADS, class Sum>
DEV void finish(const Finish& f, const Sum& sum, const float* rstd, i32 m0, i32 n0, i32 M, i32 N) {
  if (f.epilogue == SWIGLU) {
    for (int e = threadIdx.x; e < ROWS / 2 * COLUMNS; e += THREADS) {
      const int unit = e % 8, tile = e / 8 % (ROWS / 16), column = e / (ROWS / 2);
      const int m = m0 + column, n = n0 + 16 * tile + unit;
      if (m >= M || n >= N) continue;
      float gate = sum(16 * tile + unit, column) * rstd[column];
      float up = sum(16 * tile + unit + 8, column) * rstd[column];
      if (f.bias) {
        gate += f.bias[n];
        up += f.bias[n + 8];
      }
      const float silu = gate / (1.f + ex2(-1.4426950408889634f * gate));
      static_cast<__half*>(f.out)[static_cast<i64>(m) * (N / 2) + (n0 / 2 + 8 * tile + unit)] =
          saturate_half(silu * up);
    }
    return;
  }
  // A thread's loads come before its stores, BATCH outputs at a time. All lanes of a warp have the
  // same number of outputs, so they stay together for the shuffles.
  constexpr int EACH = (ROWS * COLUMNS + THREADS - 1) / THREADS, BATCH = EACH < 8 ? EACH : 8;
  static_assert(EACH == 1 || ROWS * COLUMNS % (BATCH * THREADS) == 0, "whole batches");
  for (int e0 = threadIdx.x; e0 < ROWS * COLUMNS; e0 += BATCH * THREADS) {
    float before[BATCH], gamma[BATCH], bias[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int e = e0 + i * THREADS, m = m0 + e / ROWS, n = n0 + e % ROWS;
      const bool valid = m < M && n < N, has_residual = valid && f.epilogue == RESIDUAL;
      bias[i] = valid && f.bias ? f.bias[n] : 0.f;
      before[i] = has_residual ? f.residual[static_cast<i64>(m) * N + n] : 0.f;
      gamma[i] = has_residual ? __half2float(f.gamma[n]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int e = e0 + i * THREADS, row = e % ROWS, column = e / ROWS;
      const int m = m0 + column, n = n0 + row;
      const bool valid = m < M && n < N;
      const i64 at = static_cast<i64>(m) * N + n;
      if (f.epilogue == RESIDUAL) {
        const float r = valid ? before[i] + (sum(row, column) + bias[i]) : 0.f;
        if (valid) {
          f.residual[at] = r;
          static_cast<__half*>(f.out)[at] = saturate_half(r * gamma[i]);
        }
        float square = r * r;
#pragma unroll
        for (int offset = 8; offset; offset >>= 1)
          square += __shfl_xor_sync(FULL_WARP, square, offset);
        if (valid && row % 16 == 0)
          f.sumsq_out[static_cast<i64>(m) * ((N + 15) / 16) + n / 16] = square;
      } else if (valid) {
        const float value = sum(row, column) * rstd[column] + bias[i];
        if (f.epilogue == LOGITS)
          static_cast<float*>(f.out)[at] = value;
        else
          static_cast<__half*>(f.out)[at] = saturate_half(value);
      }
    }
  }
}

// Grid: x over blocks of 8 NT rows of X, y over tiles of 16 MT rows of W, so that the CTAs that
// share weights run together. With fewer y than tiles a CTA goes on to the tile gridDim.y further,
// whose weights are on their way while it finishes the one before. K is a multiple of 32, N of 16
// for SWIGLU.
template <class F, int NT, int MT, int WARPS, int DEPTH, int AHEAD>
DEV void small_gemm(const F& weights, const __half* __restrict__ x, const Finish& f, i32 M, i32 N,
                    i32 K) {
  static_assert(DEPTH % (AHEAD + 1) == 0, "buffers of X take turns with the stages");
  constexpr int STEP = 32 * F::CHUNKS, STRIDE = STEP * WARPS, ROUND = DEPTH * STRIDE;
  constexpr int GROUP = F::GROUP_CHUNKS ? F::GROUP_CHUNKS : F::CHUNKS;
  constexpr int ROWS = 16 * MT, COLUMNS = 8 * NT, PITCH = COLUMNS + 1;
  __shared__ float sums[2][WARPS][ROWS][PITCH];  // tiles take turns
  __shared__ float rstd[COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.x * COLUMNS, first_k = warp * STEP;

  typename F::Tile ring[DEPTH][MT];
  typename F::Rows rows[MT];
  auto find_rows = [&](int n0) {
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      const int row = n0 + 16 * i + g;  // rows beyond N repeat the last one, and are not stored
      rows[i] = weights.rows(min(row, N - 1), min(row + 8, N - 1));
    }
  };
  auto load = [&](typename F::Tile(&tiles)[MT], int k, int ahead) {
#pragma unroll
    for (int i = 0; i < MT; ++i) weights.load(tiles[i], rows[i], k, ahead);
  };
  int n0 = blockIdx.y * ROWS;
  find_rows(n0);
#pragma unroll
  for (int stage = 0; stage < DEPTH; ++stage)
    if (first_k + stage * STRIDE < K) load(ring[stage], first_k, stage * STRIDE);
  row_scales<COLUMNS, WARPS>(f, rstd, m0, M, K);

  // Columns beyond M repeat the last one, and are not stored.
  const __half* x_rows[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    x_rows[j] = x + static_cast<i64>(min(m0 + 8 * j + g, M - 1)) * K + F::x_offset(0, t);
    opaque(x_rows[j]);
  }
  typedef uint4 Activations[NT][F::CHUNKS];
  auto load_x = [&](Activations& values, int k, int ahead) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const __half* from = x_rows[j] + k;
#pragma unroll
      for (int chunk = 0; chunk < F::CHUNKS; ++chunk) {
        const int offset = ahead + F::x_offset(chunk, 0) - F::x_offset(0, 0);
        if (weights.live(chunk, k + ahead))
          values[j][chunk] = __ldg(reinterpret_cast<const uint4*>(from + offset));
      }
    }
  };
  // Two chains of sums, one for each mma of a chunk: an mma waits long for the one it adds to.
  float acc[2][MT][NT][4];
  auto multiply = [&](const typename F::Tile(&tiles)[MT], const Activations& values, int k) {
#pragma unroll
    for (int first = 0; first < F::CHUNKS; first += GROUP) {
      if (!weights.live(first, k)) break;
      float part[2][MT][NT][4];
      if (F::GROUP_CHUNKS) clear(part[0]), clear(part[1]);
      auto& into = F::GROUP_CHUNKS ? part : acc;
#pragma unroll
      for (int chunk = first; chunk < first + GROUP; ++chunk) {
        if (!weights.live(chunk, k)) break;
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          u32 a[2][4];
          weights.fragments(tiles[i], chunk, a);
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            const uint4 b = values[j][chunk];
            mma16816(into[0][i][j], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
            mma16816(into[1][i][j], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
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
                acc[0][i][j][v] += scale * (part[0][i][j][v] + part[1][i][j][v]);
          }
    }
  };
  Activations values[AHEAD + 1];
  if (AHEAD) load_x(values[0], first_k, 0);
  for (int buffer = 0; n0 < N; buffer ^= 1) {
    const int next_n0 = n0 + gridDim.y * ROWS;
    clear(acc[0]), clear(acc[1]);
    for (int k = first_k; k - first_k < K; k += ROUND) {
      // The last round fetches the first of the next tile.
      const bool last = k + ROUND - first_k >= K;
      const int next_k = last ? first_k : k + ROUND;
      const bool more = !last || next_n0 < N;
      if (last) find_rows(next_n0);
#pragma unroll
      for (int stage = 0; stage < DEPTH; ++stage) {
        const int at = k + stage * STRIDE, then = at + STRIDE;
        if (AHEAD) {
          const bool within = then < K;
          load_x(values[(stage + 1) % (AHEAD + 1)], within ? k : first_k - (stage + 1) * STRIDE,
                 (stage + 1) * STRIDE);
        }
        if (at < K) {
          if (!AHEAD) load_x(values[0], k, stage * STRIDE);
          multiply(ring[stage], values[stage % (AHEAD + 1)], at);
        }
        if (more && next_k + stage * STRIDE < K) load(ring[stage], next_k, stage * STRIDE);
      }
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int v = 0; v < 4; ++v)
          sums[buffer][warp][16 * i + g + 8 * (v / 2)][8 * j + 2 * t + v % 2] =
              acc[0][i][j][v] + acc[1][i][j][v];
    __syncthreads();
    const auto sum = [&](int row, int column) {
      float s = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) s += sums[buffer][w][row][column];
      return s;
    };
    finish<ROWS, COLUMNS, 32 * WARPS>(f, sum, rstd, m0, n0, M, N);
    n0 = next_n0;
  }
}
