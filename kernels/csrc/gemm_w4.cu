// Linear layers with 4-bit weights. Products of exact small integers with X are summed in FP32 by
// group; scales multiply those sums, never the weights, so no weight is rounded.
#include "gemm_stream.cuh"
#include "w4.cuh"

// A code masked out of its word is a subnormal half, 2^-24 times its value (16 times that for a
// high nibble), exactly: no more is done to it. Sums of codes times x come first, then zero times
// the sum of x is taken off and the scale applied, and 2^24 at the end. That sum itself is one of
// ones, not of subnormals: tensor cores align products by their operands' exponents, and what they
// then cut off a product with 2^-24 would be multiplied by up to 16, the zero.
//
// GROUP: chunks of 32 that share a scale in a step: 4 for groups of 128 or a larger power of two, 1
// for groups of 32 and 64.
template <int GROUP>
struct W4Stream : PlainRows {
  static constexpr int CHUNKS = 4, STEP = 32 * CHUNKS;
  static constexpr int GROUP_CHUNKS = GROUP, GROUPS = CHUNKS / GROUP;
  static constexpr int CODE_BYTES = 1024, STAGE_BYTES = CODE_BYTES + 128;
  static constexpr bool DECODED = false;
  static constexpr bool SHARES = true;  // scales are copied by one lane and read by four
  static constexpr float UNIT = 16777216.f, HIGH = 0.0625f;
  static constexpr u32 ONE = 0x3C003C00u;
  struct Part {
    uint4 row[2];
    float scales[2], zeros[2];  // with one group in a step; zeros over UNIT
    i32 first_row, step;        // with several
  };
  const u32* codes;
  const u16* scales;
  const u8* zeros;
  i32 group_shift, K, rows;

  struct Cursor {
    const u32* from;
    i32 rows_left, scale;
  };

  __device__ __forceinline__ static int x_offset(int chunk, int t) { return 32 * chunk + 8 * t; }

  __device__ __forceinline__ Cursor at(i32 tile) const {
    const int lane = threadIdx.x % 32, t = lane % 4, row = 16 * tile + lane / 4;
    return {codes + static_cast<i64>(row) * words() + 4 * t, rows - row,
            (row + 8 * (t & 1)) * (K >> group_shift)};
  }

  __device__ __forceinline__ void skip(Cursor& cursor, i32 tiles) const {
    cursor.from += static_cast<i64>(16 * tiles) * words();
    cursor.rows_left -= 16 * tiles;
    cursor.scale += 16 * tiles * (K >> group_shift);
  }

  __device__ __forceinline__ i32 words() const { return (K + STEP - 1) / STEP * 16; }

  // Lane t = 0 and 1 copies the scales of rows g and g + 8, t = 2 and 3 their zeros: the four bytes
  // around each. Several groups in a step are not copied but read when needed.
  __device__ __forceinline__ void fetch(u8* stage, const Cursor& cursor, i32 step, i32) const {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const u32* from = cursor.from + 16 * step;
    u8* to = stage + 16 * lane;
    if (cursor.rows_left > 0) cp_async16(to, from);
    if (cursor.rows_left > 8) cp_async16(to + 512, from + 8 * words());
    if (GROUPS > 1) return;
    const i32 at = cursor.scale + ((step * STEP) >> group_shift);
    const u8* scale = t < 2 ? reinterpret_cast<const u8*>(scales) : zeros;
    const i32 byte = (t < 2 ? 2 * at : at) & ~3;
    if (cursor.rows_left > 8 * (t & 1) && scale)
      cp_async4(stage + CODE_BYTES + 4 * lane, scale + byte);
  }

  __device__ __forceinline__ void read(Part& part, const u8* stage, i32 tile, i32 step) const {
    const int lane = threadIdx.x % 32, g = lane / 4;
    const i32 groups = K >> group_shift;
    const uint4* from = reinterpret_cast<const uint4*>(stage);
    part.row[0] = from[lane], part.row[1] = from[32 + lane];
    part.first_row = 16 * tile + g, part.step = step;
    if (GROUPS > 1) return;
    // Eight rows further, and in every tile, a scale is at the same place within its four bytes.
    const uint4 four = from[CODE_BYTES / 16 + g];
    const i32 at = g * groups + ((step * STEP) >> group_shift);
    const int scale_bit = 16 * (at & 1), zero_bit = 8 * (at & 3);
    part.scales[0] = __half2float(bits_half(static_cast<u16>(four.x >> scale_bit)));
    part.scales[1] = __half2float(bits_half(static_cast<u16>(four.y >> scale_bit)));
    part.zeros[0] = (zeros ? static_cast<float>(four.z >> zero_bit & 0xFF) : 8.f) / UNIT;
    part.zeros[1] = (zeros ? static_cast<float>(four.w >> zero_bit & 0xFF) : 8.f) / UNIT;
  }

  __device__ __forceinline__ static void fragments(const Part& part, int chunk, u32 (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 row = part.row[half];
      const u32 word = chunk == 0 ? row.x : chunk == 1 ? row.y : chunk == 2 ? row.z : row.w;
      a[0][half] = word & 0x000F000Fu, a[0][2 + half] = word >> 8 & 0x000F000Fu;
      a[1][half] = word & 0x00F000F0u, a[1][2 + half] = word >> 8 & 0x00F000F0u;
    }
  }

  // Where the scale of row g or g + 8 is in its array; -1 beyond the weight.
  __device__ __forceinline__ i32 scale_at(const Part& part, int group, int half) const {
    const i32 row = part.first_row + 8 * half, k = part.step * STEP + 32 * GROUP * group;
    return row < rows && k < K ? row * (K >> group_shift) + (k >> group_shift) : -1;
  }

  __device__ __forceinline__ float scale(const Part& part, int group, int half) const {
    if (GROUPS == 1) return part.scales[half];
    const i32 at = scale_at(part, group, half);
    return at < 0 ? 0.f : __half2float(bits_half(__ldg(scales + at)));
  }

  __device__ __forceinline__ float zero(const Part& part, int group, int half) const {
    if (GROUPS == 1) return part.zeros[half];
    const i32 at = scale_at(part, group, half);
    return (at < 0 || !zeros ? 8.f : static_cast<float>(__ldg(zeros + at))) / UNIT;
  }
};

template <int GROUP, int NT, int WARPS, int STAGES, int HELD>
__global__ void __launch_bounds__(32 * WARPS, stream_residents(WARPS))
linear_w4(const u32* __restrict__ codes, const u16* __restrict__ scales,
                 const u8* __restrict__ zeros, i32 group_shift, const __half* __restrict__ x, i32 M,
                 i32 N, i32 K, i32 epilogue, void* __restrict__ out,
                 const float* __restrict__ bias, const float* __restrict__ sumsq, i32 partials,
                 float eps, float* __restrict__ residual, const __half* __restrict__ gamma,
                 float* __restrict__ sumsq_out) {
  extern __shared__ __align__(16) uint4 shared[];
  const W4Stream<GROUP> weights{{}, codes, scales, zeros, group_shift, K, N};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  stream_gemm<W4Stream<GROUP>, NT, WARPS, STAGES, HELD>(weights, x, finish, M, N, K,
                                                        reinterpret_cast<u8*>(shared));
}
