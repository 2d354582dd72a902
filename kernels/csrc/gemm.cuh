// What the linear kernels share: out[M, N] = X[M, K] W[N, K]^T, and how it is finished.
//
// W is the A operand of mma.m16n8k16, X the B operand, so a tile of 16 rows of W meets 8 NT rows of
// X. A product over k does not care in which order k runs, so each lane takes 16 contiguous bytes
// of a row of W, calls them its fragment, and takes the same k of X. With g = lane / 4 and
// t = lane % 4 a lane holds rows g and g + 8 of W and row g of X; k advances by chunks of 32, of
// which lane t has 8 (two mma).
#pragma once
#include "primitives.cuh"

enum Epilogue {
  NORM = 0,      // half out = acc rstd + bias
  SWIGLU = 1,    // half out = silu(gate) up; rows of W in eights: 8 gate, 8 up, 8 gate, ...
  RESIDUAL = 2,  // residual += acc + bias; half out = residual gamma; sums of residual^2
  LOGITS = 3,    // float out = acc rstd + bias
};

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

DEV float silu(float x) { return __fdividef(x, 1.f + ex2(-1.4426950408889634f * x)); }

template <int NT>
DEV void clear(float (&sums)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int v = 0; v < 4; ++v) sums[j][v] = 0.f;
}

template <int MT, int NT>
DEV void clear(float (&sums)[MT][NT][4]) {
#pragma unroll
  for (int i = 0; i < MT; ++i) clear(sums[i]);
}

// What row m of X multiplies: rstd[COLUMNS] of the rows from m0, each added up in a fixed order. A
// warp takes several rows at once, so that their loads overlap. `share` is 1 / K.
template <int COLUMNS, int WARPS>
DEV void row_scales(const Finish& f, float* rstd, i32 m0, i32 M, float share) {
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
      const float scale = f.sumsq ? rsqrtf(warp_sum(s[b]) * share + f.eps) : 1.f;
      if (lane == 0 && first + b * WARPS < COLUMNS) rstd[first + b * WARPS] = scale;
    }
  }
}

// A thread's share of the outputs of a CTA: ROWS (a multiple of 16) rows of W from n0, COLUMNS
// rows of X from m0. `sum(row, column)` is the product.
template <int ROWS, int COLUMNS, int THREADS, class Sum>
DEV void finish(const Finish& f, const Sum& sum, const float* rstd, i32 m0, i32 n0, i32 M, i32 N) {
  if (f.epilogue == SWIGLU) {
#pragma unroll 4
    for (int e = threadIdx.x; e < ROWS / 2 * COLUMNS; e += THREADS) {
      const int unit = e % 8, tile = e / 8 % (ROWS / 16), column = e / (ROWS / 2);
      const int m = m0 + column, n = n0 + 16 * tile + unit;
      const bool valid = m < M && n < N;
      float gate = sum(16 * tile + unit, column) * rstd[column];
      float up = sum(16 * tile + unit + 8, column) * rstd[column];
      if (f.bias && valid) {
        gate += f.bias[n];
        up += f.bias[n + 8];
      }
      const __half result = saturate_half(silu(gate) * up);
      if (valid)
        static_cast<__half*>(f.out)[static_cast<i64>(m) * (N / 2) + (n0 / 2 + 8 * tile + unit)] =
            result;
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
