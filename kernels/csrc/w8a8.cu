// What a product of FP8 weights and FP8 activations needs before and after it.
#include "nested.cuh"

constexpr i32 QUANTIZE_THREADS = 256;

// Rows of x [gridDim.x, K] as E4M3 codes times a scale for each: the largest value of a row becomes
// 448, the largest code, so nothing saturates, and a row of zeros has the scale 1. K is a multiple
// of 8.
__global__ void __launch_bounds__(QUANTIZE_THREADS)
quantize_rows(u8* __restrict__ codes, float* __restrict__ scales, const __half* __restrict__ x,
              i32 K) {
  __shared__ float largest[QUANTIZE_THREADS / 32];
  const uint4* const row = reinterpret_cast<const uint4*>(x + static_cast<i64>(blockIdx.x) * K);
  __half2 most = u2h(0);
  for (i32 i = threadIdx.x; i < K / 8; i += QUANTIZE_THREADS) {
    const uint4 eight = row[i];
    const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int p = 0; p < 4; ++p) most = __hmax2(most, u2h(pairs[p] & 0x7FFF7FFFu));
  }
  const float2 wide = __half22float2(most);
  const float of_warp = warp_max(fmaxf(wide.x, wide.y));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  float of_row = 0.f;
#pragma unroll
  for (int i = 0; i < QUANTIZE_THREADS / 32; ++i) of_row = fmaxf(of_row, largest[i]);
  const float scale = of_row > 0.f ? of_row / 448.f : 1.f;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  const float inverse = 1.f / scale;
  uint2* const out = reinterpret_cast<uint2*>(codes + static_cast<i64>(blockIdx.x) * K);
  for (i32 i = threadIdx.x; i < K / 8; i += QUANTIZE_THREADS) {
    const uint4 eight = row[i];
    const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    u32 words[2] = {};
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 pair = __half22float2(u2h(pairs[p]));
      const u32 two = float_to_e4m3(pair.x * inverse) | float_to_e4m3(pair.y * inverse) << 8;
      words[p / 2] |= two << 16 * (p % 2);
    }
    out[i] = make_uint2(words[0], words[1]);
  }
}

// out [M, N] += the outliers of the weight's rows times x [M, K]. A thread has a row of the weight
// and `EXTRA_ROWS` rows of x.
constexpr i32 EXTRA_THREADS = 256, EXTRA_ROWS = 16;

__global__ void __launch_bounds__(EXTRA_THREADS)
add_outliers(__half* __restrict__ out, const __half* __restrict__ x,
             const i32* __restrict__ outlier_starts, const i32* __restrict__ outlier_columns,
             const __half* __restrict__ outlier_values, i32 M, i32 N, i32 K) {
  const i32 n = blockIdx.x * EXTRA_THREADS + threadIdx.x, m0 = blockIdx.y * EXTRA_ROWS;
  if (n >= N) return;
  const NestedRows rows = {nullptr, outlier_starts, outlier_columns, outlier_values};
  const NestedRows::Row row = rows.row(n);
  if (row.first == row.last) return;
  for (i32 m = m0; m < min(m0 + EXTRA_ROWS, M); ++m) {
    __half* const at = out + static_cast<i64>(m) * N + n;
    *at = saturate_half(rows.whole(__half2float(*at), row, x + static_cast<i64>(m) * K));
  }
}
