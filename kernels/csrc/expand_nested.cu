// Nested weights back to FP16, for a matrix product of many rows by cuBLAS.
#include "nested.cuh"

// out [rows, K]: rows row0 ... of the weight, their shift undone, outliers zero. A thread has eight
// values. K is a multiple of 8. FP8: of the upper plane alone.
template <int FP8>
__global__ void __launch_bounds__(256)
expand_nested(__half* __restrict__ out, const u8* __restrict__ upper, const u8* __restrict__ lower,
              const signed char* __restrict__ row_shift, i32 row0, i32 rows, i32 K) {
  const i64 at = 8 * (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x);
  if (at >= static_cast<i64>(rows) * K) return;
  const i64 from = at + static_cast<i64>(row0) * K;
  u32 pairs[4];
  load_nested<FP8>(pairs, upper + from, lower + from);
  const i32 shift = row_shift ? row_shift[row0 + at / K] : 0;
  if (shift) {
    const float scale = power_of_two(shift);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(u2h(pairs[i]));
      pairs[i] = pack_half2(pair.x * scale, pair.y * scale);
    }
  }
  *reinterpret_cast<uint4*>(out + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Puts the outliers of these rows in their places; a warp has a row.
__global__ void __launch_bounds__(256)
place_outliers(__half* __restrict__ out, const i32* __restrict__ starts,
               const i32* __restrict__ columns, const __half* __restrict__ values, i32 row0,
               i32 rows, i32 K) {
  const i32 row = (blockIdx.x * 256 + threadIdx.x) / 32;
  if (row >= rows) return;
  for (i32 i = starts[row0 + row] + threadIdx.x % 32; i < starts[row0 + row + 1]; i += 32)
    out[static_cast<i64>(row) * K + columns[i]] = values[i];
}
