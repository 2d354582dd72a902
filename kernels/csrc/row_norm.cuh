// RMS norm of one row by one block, the row held in registers between its two passes.
#pragma once
#include "primitives.cuh"

constexpr i32 NORM_THREADS = 256;
constexpr i32 NORM_VECTORS = 8;  // of four columns a thread: rows of up to 8,192 columns

// out = x / sqrt(mean(x^2) + eps) * gamma, saturating, with x = residual, or (ADD) residual +
// branch, which is also written back. `columns` is a multiple of 4.
template <bool ADD>
DEV void row_norm(__half* __restrict__ out, float* __restrict__ residual,
                  const __half* __restrict__ branch, const __half* __restrict__ gamma, i32 columns,
                  float eps) {
  __shared__ float sums[NORM_THREADS / 32];
  const i64 start = static_cast<i64>(blockIdx.x) * columns;
  float4 x[NORM_VECTORS];
  float sum = 0.f;
#pragma unroll
  for (i32 i = 0; i < NORM_VECTORS; ++i) {
    const i32 column = 4 * (threadIdx.x + i * NORM_THREADS);
    x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (column < columns) {
      float4* at = reinterpret_cast<float4*>(residual + start + column);
      x[i] = *at;
      if constexpr (ADD) {
        const uint2 bits = *reinterpret_cast<const uint2*>(branch + start + column);
        const float2 low = __half22float2(u2h(bits.x)), high = __half22float2(u2h(bits.y));
        x[i] = make_float4(x[i].x + low.x, x[i].y + low.y, x[i].z + high.x, x[i].w + high.y);
        *at = x[i];
      }
    }
    sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.f;
#pragma unroll
  for (i32 i = 0; i < NORM_THREADS / 32; ++i) sum += sums[i];
  const float rstd = rsqrtf(sum / columns + eps);
#pragma unroll
  for (i32 i = 0; i < NORM_VECTORS; ++i) {
    const i32 column = 4 * (threadIdx.x + i * NORM_THREADS);
    if (column < columns) {
      const uint2 scale = *reinterpret_cast<const uint2*>(gamma + column);
      *reinterpret_cast<uint2*>(out + start + column) =
          make_uint2(scaled_half2(x[i].x * rstd, x[i].y * rstd, scale.x),
                     scaled_half2(x[i].z * rstd, x[i].w * rstd, scale.y));
    }
  }
}
