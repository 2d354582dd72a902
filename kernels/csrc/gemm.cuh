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
