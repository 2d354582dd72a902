// How a tile of sums in shared memory becomes outputs: four neighbouring rows of W a lane, and all
// loads of a thread before its stores, since few warps do this while nothing else runs.
#pragma once
#include "gemm.cuh"

// Of a tile's sums, float [COLUMNS][finish_pitch(ROWS)]: neither rows of fragments nor four rows at
// once meet themselves in a bank.
constexpr int finish_pitch(int rows) { return rows + 4; }

// What row m of X multiplies: rstd[COLUMNS] of the rows from m0, each added up in a fixed order.
// `share` is 1 / K.
template <int COLUMNS, int WARPS>
DEV void tile_scales(const Finish& f, float* rstd, i32 m0, i32 M, float share) {
  constexpr int EACH = (COLUMNS + WARPS - 1) / WARPS, BATCH = EACH < 16 ? EACH : 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (!f.sumsq) {
    for (int column = threadIdx.x; column < COLUMNS; column += 32 * WARPS) rstd[column] = 1.f;
    return;
  }
  const bool fours = f.partials % 4 == 0 && reinterpret_cast<u64>(f.sumsq) % 16 == 0;
  for (int first = warp; first < COLUMNS; first += BATCH * WARPS) {
    float s[BATCH] = {};
    const float* const row = f.sumsq + static_cast<i64>(m0 + first) * f.partials;
    if (fours) {
      for (int i = 4 * lane; i < f.partials; i += 128)
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
          if (m0 + first + b * WARPS < M) {
            const float4 four = ld_cg(reinterpret_cast<const float4*>(
                row + static_cast<i64>(b * WARPS) * f.partials + i));
            s[b] += (four.x + four.y) + (four.z + four.w);
          }
    } else {
      for (int i = lane; i < f.partials; i += 32)
#pragma unroll
        for (int b = 0; b < BATCH; ++b)
          if (m0 + first + b * WARPS < M)
            s[b] += ld_cg(row + static_cast<i64>(b * WARPS) * f.partials + i);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const float scale = rsqrtf(warp_sum(s[b]) * share + f.eps);
      if (lane == 0 && first + b * WARPS < COLUMNS) rstd[first + b * WARPS] = scale;
    }
  }
}

// Outputs of ROWS rows of W (a multiple of 16) from n0 and COLUMNS rows of X from m0, whose sums are
// in `sums`. All THREADS threads come here, after a barrier.
template <int ROWS, int COLUMNS, int THREADS>
DEV void finish_tile(const Finish& f, const float* sums, const float* rstd, i32 m0, i32 n0, i32 M,
                     i32 N) {
  constexpr int PITCH = finish_pitch(ROWS);
  const bool fours =
      N % 4 == 0 && (reinterpret_cast<u64>(f.out) | reinterpret_cast<u64>(f.residual)) % 16 == 0;
  auto four_of = [&](int column, int row) {
    return *reinterpret_cast<const float4*>(sums + column * PITCH + row);
  };
  // Four values of an array of N; those beyond it are zero.
  auto load_row = [&](const float* array, int n) {
    float4 found = make_float4(0.f, 0.f, 0.f, 0.f);
    if (array) {
      if (n < N) found.x = array[n];
      if (n + 1 < N) found.y = array[n + 1];
      if (n + 2 < N) found.z = array[n + 2];
      if (n + 3 < N) found.w = array[n + 3];
    }
    return found;
  };
  auto store_halves = [&](i64 at, int n, float4 value) {
    __half* const out = static_cast<__half*>(f.out) + at;
    if (fours && n < N) {
      *reinterpret_cast<uint2*>(out) =
          make_uint2(saturate_half2(value.x, value.y), saturate_half2(value.z, value.w));
    } else {
      if (n < N) out[0] = saturate_half(value.x);
      if (n + 1 < N) out[1] = saturate_half(value.y);
      if (n + 2 < N) out[2] = saturate_half(value.z);
      if (n + 3 < N) out[3] = saturate_half(value.w);
    }
  };

  if (f.epilogue == SWIGLU) {
    constexpr int QUADS = ROWS / 8, RUN = THREADS / QUADS;
    static_assert(THREADS % QUADS == 0 && (COLUMNS % RUN == 0 || COLUMNS < RUN), "whole runs");
    const int quad = threadIdx.x % QUADS, row = 16 * (quad / 2) + 4 * (quad % 2), n = n0 + row;
    const float4 gate_bias = load_row(f.bias, n), up_bias = load_row(f.bias, n + 8);
#pragma unroll 4
    for (int c = 0; c < COLUMNS; c += RUN) {
      const int column = c + threadIdx.x / QUADS, m = m0 + column;
      if (column >= COLUMNS) break;
      const float scale = rstd[column];
      const float4 gate = four_of(column, row), up = four_of(column, row + 8);
      auto one = [&](float g, float gb, float u, float ub) {
        return silu(g * scale + gb) * (u * scale + ub);
      };
      const float4 value = make_float4(one(gate.x, gate_bias.x, up.x, up_bias.x),
                                       one(gate.y, gate_bias.y, up.y, up_bias.y),
                                       one(gate.z, gate_bias.z, up.z, up_bias.z),
                                       one(gate.w, gate_bias.w, up.w, up_bias.w));
      if (m < M && n < N)  // N is a multiple of 16
        store_halves(static_cast<i64>(m) * (N / 2) + (n0 / 2 + row / 16 * 8 + row % 16), n, value);
    }
    return;
  }

  constexpr int QUADS = ROWS / 4, RUN = THREADS / QUADS, EACH = COLUMNS / RUN;
  constexpr int BATCH = EACH < 8 ? EACH : 8;
  static_assert(THREADS % QUADS == 0 && COLUMNS % RUN == 0 && EACH % BATCH == 0, "whole runs");
  const int row = 4 * (threadIdx.x % QUADS), n = n0 + row;
  const float4 bias = load_row(f.bias, n);
  float4 gamma = make_float4(0.f, 0.f, 0.f, 0.f);
  if (f.epilogue == RESIDUAL) {
    if (n < N) gamma.x = __half2float(f.gamma[n]);
    if (n + 1 < N) gamma.y = __half2float(f.gamma[n + 1]);
    if (n + 2 < N) gamma.z = __half2float(f.gamma[n + 2]);
    if (n + 3 < N) gamma.w = __half2float(f.gamma[n + 3]);
  }
  for (int first = threadIdx.x / QUADS; first < COLUMNS; first += BATCH * RUN) {
    float4 before[BATCH];
    if (f.epilogue == RESIDUAL)
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
        const int m = m0 + first + b * RUN;
        before[b] = make_float4(0.f, 0.f, 0.f, 0.f);
        const float* const from = f.residual + static_cast<i64>(m) * N + n;
        if (m < M && n < N && fours) {
          before[b] = ld_cg(reinterpret_cast<const float4*>(from));
        } else if (m < M) {
          if (n < N) before[b].x = ld_cg(from);
          if (n + 1 < N) before[b].y = ld_cg(from + 1);
          if (n + 2 < N) before[b].z = ld_cg(from + 2);
          if (n + 3 < N) before[b].w = ld_cg(from + 3);
        }
      }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int column = first + b * RUN, m = m0 + column;
      const i64 at = static_cast<i64>(m) * N + n;
      float4 value = four_of(column, row);
      if (f.epilogue == RESIDUAL) {
        value.x = n < N ? before[b].x + (value.x + bias.x) : 0.f;
        value.y = n + 1 < N ? before[b].y + (value.y + bias.y) : 0.f;
        value.z = n + 2 < N ? before[b].z + (value.z + bias.z) : 0.f;
        value.w = n + 3 < N ? before[b].w + (value.w + bias.w) : 0.f;
        float square = (value.x * value.x + value.y * value.y) +
                       (value.z * value.z + value.w * value.w);
        square += __shfl_xor_sync(FULL_WARP, square, 1);
        square += __shfl_xor_sync(FULL_WARP, square, 2);
        if (m >= M) continue;
        float* const to = f.residual + at;
        if (fours && n < N) {
          *reinterpret_cast<float4*>(to) = value;
        } else {
          if (n < N) to[0] = value.x;
          if (n + 1 < N) to[1] = value.y;
          if (n + 2 < N) to[2] = value.z;
          if (n + 3 < N) to[3] = value.w;
        }
        store_halves(at, n,
                     make_float4(value.x * gamma.x, value.y * gamma.y, value.z * gamma.z,
                                 value.w * gamma.w));
        if (row % 16 == 0 && n < N)
          f.sumsq_out[static_cast<i64>(m) * ((N + 15) / 16) + n / 16] = square;
        continue;
      }
      if (m >= M) continue;
      const float scale = rstd[column];
      value.x = value.x * scale + bias.x, value.y = value.y * scale + bias.y;
      value.z = value.z * scale + bias.z, value.w = value.w * scale + bias.w;
      if (f.epilogue == NORM) {
        store_halves(at, n, value);
        continue;
      }
      float* const to = static_cast<float*>(f.out) + at;
      if (fours && n < N) {
        *reinterpret_cast<float4*>(to) = value;
      } else {
        if (n < N) to[0] = value.x;
        if (n + 1 < N) to[1] = value.y;
        if (n + 2 < N) to[2] = value.z;
        if (n + 3 < N) to[3] = value.w;
      }
    }
  }
}
