// Linear layers with nested weights, in both modes.
#include "gemm_stream.cuh"
#include "nested.cuh"

enum NestedMode {
  NESTED_F16 = 0,  // both planes: the FP16 weight
  NESTED_F8 = 1,   // the upper plane: the weight rounded to FP8, products and sums as in FP16
};

// A step is 64 k of both planes, or 128 of the upper one: 2048 bytes. To give the bits of
// `linear_f16`, a lane's fragments are those of F16Stream: eight k of each chunk of 32, half of the
// 16 bytes that one lane copies. Units are the 64 k of eight rows; pieces in them are turned so that
// the reads of 8 bytes by half a warp, of four rows each, fall into different banks.
//
// FP16 mode undoes a row's shift in the halves, where it is exact, not in the sum: a stored weight
// may be subnormal though the weight is not, and tensor cores cut products of such off earlier. Few
// rows have one: most warps find none in a tile, and do nothing.
template <int MODE>
struct NestedStream : NestedRows {
  static constexpr bool BOTH = MODE == NESTED_F16;
  static constexpr int CHUNKS = BOTH ? 2 : 4, STEP = 32 * CHUNKS, BLOCKS = STEP / 64;
  static constexpr int UNIT_BYTES = 512, PLANE_BYTES = 2 * BLOCKS * UNIT_BYTES;
  static constexpr int STAGE_BYTES = (BOTH ? 2 : 1) * PLANE_BYTES;
  static constexpr int GROUP_CHUNKS = 0;
  static constexpr bool SHARES = true, DECODED = true;
  static constexpr float UNIT = BOTH ? 1.f : UPPER_UNIT, HIGH = 1.f;
  static constexpr u32 ONE = 0;
  struct Part {
    uint2 upper[2][CHUNKS], lower[2][BOTH ? CHUNKS : 1];
  };
  struct Shifts {
    i32 rows[2];
  };
  const u8 *upper, *lower;
  i32 K, rows;
  // Of a lane: where in a stage it copies to and reads, and how much of a row its copies have.
  u32 to, from[2];
  u32 left;

  __device__ __forceinline__ static NestedStream make(const NestedRows& ends, const u8* upper,
                                                      const u8* lower, i32 K, i32 rows) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, turned = g & 2;
    const u32 row = 64 * g, half = row + 8 * (t % 2);
    NestedStream made{ends, upper, lower, K, rows, row + 16 * (t ^ turned),
                      {half + 16 * (t / 2 ^ turned), half + 16 * ((2 + t / 2) ^ turned)},
                      static_cast<u32>(max(K - 16 * t - static_cast<i32>(threadIdx.x / 32) * STEP, 0))};
    // They stay in registers instead of being worked out for every step.
    opaque(made.left), opaque(made.to), opaque(made.from[0]), opaque(made.from[1]);
    return made;
  }

  struct Cursor {
    const u8 *upper, *lower;
    i32 rows_left;
  };

  __device__ __forceinline__ static int x_offset(int chunk, int t) { return 32 * chunk + 8 * t; }

  __device__ __forceinline__ Cursor at(i32 tile) const {
    const int lane = threadIdx.x % 32, row = 16 * tile + lane / 4;
    const i64 from = static_cast<i64>(row) * K + threadIdx.x / 32 * STEP + 16 * (lane % 4);
    return {upper + from, lower + from, rows - row};
  }

  __device__ __forceinline__ void skip(Cursor& cursor, i32 tiles) const {
    cursor.upper += static_cast<i64>(16 * tiles) * K;
    if (BOTH) cursor.lower += static_cast<i64>(16 * tiles) * K;
    cursor.rows_left -= 16 * tiles;
  }

  __device__ __forceinline__ void fetch(u8* stage, const Cursor& cursor, i32, i32 ahead) const {
    const u32 k = ahead * STEP;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const int bytes = cursor.rows_left > 8 * half && k + 64 * block < left ? 16 : 0;
        u8* place = stage + to + UNIT_BYTES * (BLOCKS * half + block);
        cp_async16_zfill(place, cursor.upper + 8 * half * K + k + 64 * block, bytes);
        if (BOTH)
          cp_async16_zfill(place + PLANE_BYTES, cursor.lower + 8 * half * K + k + 64 * block, bytes);
      }
  }

  __device__ __forceinline__ void read(Part& part, const u8* stage, i32, i32) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const u8* place = stage + from[chunk % 2] + UNIT_BYTES * (BLOCKS * half + chunk / 2);
        part.upper[half][chunk] = *reinterpret_cast<const uint2*>(place);
        if (BOTH) part.lower[half][chunk] = *reinterpret_cast<const uint2*>(place + PLANE_BYTES);
      }
  }

  __device__ __forceinline__ Shifts shifts(i32 tile) const {
    Shifts found = {};
    if (BOTH && NestedRows::shift)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i32 n = 16 * tile + static_cast<i32>(threadIdx.x) % 32 / 4 + 8 * half;
        if (n < rows) found.rows[half] = NestedRows::shift[n];
      }
    return found;
  }

  template <int N>
  __device__ __forceinline__ static void shift(const Shifts& now, u32 (&a)[N][2][4]) {
    if (!BOTH || !__any_sync(FULL_WARP, now.rows[0] | now.rows[1])) return;
    const u32 factors[2] = {half_factor(now.rows[0]), half_factor(now.rows[1])};
#pragma unroll
    for (int i = 0; i < 8 * N; ++i) {
      u32& pair = a[i / 8][i / 4 % 2][i % 4];
      pair = h2u(__hmul2(u2h(pair), u2h(factors[i % 2])));
    }
  }

  __device__ __forceinline__ void fragments(const Part& part, int chunk, u32 (&a)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 four = part.upper[half][chunk];
      if constexpr (BOTH) {
        const uint2 low = part.lower[half][chunk];
        decode_nested(four.x, low.x, a[0][half], a[1][half]);
        decode_nested(four.y, low.y, a[0][2 + half], a[1][2 + half]);
      } else {
        decode_upper_scaled(four.x, a[0][half], a[1][half]);
        decode_upper_scaled(four.y, a[0][2 + half], a[1][2 + half]);
      }
    }
  }

  __device__ __forceinline__ Row row(i32 n) const {
    Row found = NestedRows::row(n);
    if (BOTH && NestedRows::shift)
      found.scale = power_of_two(max(NestedRows::shift[n] - HALF_SHIFT_MAX, 0));
    return found;
  }

  __device__ __forceinline__ static float scale(const Part&, int, int) { return 1.f; }
  __device__ __forceinline__ static float zero(const Part&, int, int) { return 0.f; }
};

template <int MODE, int NT, int WARPS, int STAGES, int HELD>
__global__ void __launch_bounds__(32 * WARPS, stream_residents(WARPS))
linear_nested(const u8* __restrict__ upper, const u8* __restrict__ lower,
              const signed char* __restrict__ row_shift, const i32* __restrict__ outlier_starts,
              const i32* __restrict__ outlier_columns, const __half* __restrict__ outlier_values,
              const __half* __restrict__ x, i32 M, i32 N, i32 K, i32 epilogue,
              void* __restrict__ out, const float* __restrict__ bias,
              const float* __restrict__ sumsq, i32 partials, float eps,
              float* __restrict__ residual, const __half* __restrict__ gamma,
              float* __restrict__ sumsq_out) {
  extern __shared__ __align__(16) uint4 shared[];
  const NestedStream<MODE> weights = NestedStream<MODE>::make(
      {row_shift, outlier_starts, outlier_columns, outlier_values}, upper, lower, K, N);
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  stream_gemm<NestedStream<MODE>, NT, WARPS, STAGES, HELD>(weights, x, finish, M, N, K,
                                                           reinterpret_cast<u8*>(shared));
}
