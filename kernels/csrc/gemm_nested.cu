// Linear layers with nested weights, in both modes.
#include "gemm_stream.cuh"
#include "nested.cuh"

enum NestedMode {
  NESTED_F16 = 0,  // both planes: the FP16 weight
  NESTED_F8 = 1,   // the upper plane: the weight rounded to FP8, products and sums as in FP16
};

template <int MODE>
struct NestedStream;

// A step is 64 k of both planes. To give the bits of `linear_f16`, a lane's fragments are those of
// F16Stream: eight k of each chunk of 32, half of the 16 bytes that one lane copies. Pieces are
// turned so that the reads of 8 bytes by half a warp, of four rows each, fall into different banks.
template <>
struct NestedStream<NESTED_F16> : NestedRows {
  static constexpr int CHUNKS = 2, STEP = 32 * CHUNKS, PLANE_BYTES = 16 * STEP;
  static constexpr int STAGE_BYTES = 2 * PLANE_BYTES, GROUP_CHUNKS = 0;
  static constexpr bool SHARES = true;
  static constexpr float UNIT = 1.f, HIGH = 1.f;
  static constexpr u32 ONE = 0;
  struct Part {
    uint2 upper[2][CHUNKS], lower[2][CHUNKS];
  };
  const u8 *upper, *lower;
  i32 K, rows;

  struct Cursor {
    i64 from;
    i32 rows_left;
  };

  __device__ __forceinline__ static int x_offset(int chunk, int t) { return 32 * chunk + 8 * t; }

  __device__ __forceinline__ static int turned(int g) { return g & 2; }

  __device__ __forceinline__ Cursor at(i32 tile) const {
    const int lane = threadIdx.x % 32, row = 16 * tile + lane / 4;
    return {static_cast<i64>(row) * K + 16 * (lane % 4), rows - row};
  }

  __device__ __forceinline__ void skip(Cursor& cursor, i32 tiles) const {
    cursor.from += static_cast<i64>(16 * tiles) * K;
    cursor.rows_left -= 16 * tiles;
  }

  __device__ __forceinline__ void fetch(u8* stage, const Cursor& cursor, i32 step) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const i64 from = cursor.from + step * STEP;
    u8* to = stage + 64 * g + 16 * (t ^ turned(g));
    const bool inside = step * STEP + 16 * t < K;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (cursor.rows_left > 8 * half)
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
          u8* place = to + plane * PLANE_BYTES + 512 * half;
          if (inside)
            cp_async16(place, (plane ? lower : upper) + from + 8 * half * K);
          else
            *reinterpret_cast<uint4*>(place) = zero16();
        }
  }

  __device__ __forceinline__ void read(Part& part, const u8* stage, i32, i32) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u8* from = stage + 64 * g + 8 * (t % 2);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const u8* place = from + 512 * half + 16 * ((2 * chunk + t / 2) ^ turned(g));
        part.upper[half][chunk] = *reinterpret_cast<const uint2*>(place);
        part.lower[half][chunk] = *reinterpret_cast<const uint2*>(place + PLANE_BYTES);
      }
  }

  __device__ __forceinline__ static void fragments(const Part& part, int chunk, u32 (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 upper = part.upper[half][chunk], lower = part.lower[half][chunk];
      decode_nested(upper.x, lower.x, a[0][half], a[1][half]);
      decode_nested(upper.y, lower.y, a[0][2 + half], a[1][2 + half]);
    }
  }

  __device__ __forceinline__ static float scale(const Part&, int, int) { return 1.f; }
  __device__ __forceinline__ static float zero(const Part&, int, int) { return 0.f; }
};

// A step is 128 k of the upper plane; a lane reads the 16 bytes that it copied, two chunks of them.
template <>
struct NestedStream<NESTED_F8> : NestedRows {
  static constexpr int CHUNKS = 4, STEP = 32 * CHUNKS, STAGE_BYTES = 16 * STEP;
  static constexpr int GROUP_CHUNKS = 0;
  static constexpr bool SHARES = false;
  static constexpr float UNIT = UPPER_UNIT, HIGH = 1.f;
  static constexpr u32 ONE = 0;
  struct Part {
    uint4 row[2][CHUNKS / 2];
  };
  const u8 *upper, *lower;
  i32 K, rows;

  struct Cursor {
    const u8* from;
    i32 rows_left;
  };

  __device__ __forceinline__ static int x_offset(int chunk, int t) {
    return 64 * (chunk / 2) + 16 * t + 8 * (chunk % 2);
  }

  __device__ __forceinline__ Cursor at(i32 tile) const {
    const int lane = threadIdx.x % 32, row = 16 * tile + lane / 4;
    return {upper + static_cast<i64>(row) * K + 16 * (lane % 4), rows - row};
  }

  __device__ __forceinline__ void skip(Cursor& cursor, i32 tiles) const {
    cursor.from += static_cast<i64>(16 * tiles) * K;
    cursor.rows_left -= 16 * tiles;
  }

  __device__ __forceinline__ void fetch(u8* stage, const Cursor& cursor, i32 step) const {
    const int lane = threadIdx.x % 32;
    const u8* from = cursor.from + step * STEP;
    const i32 k = step * STEP + 16 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (cursor.rows_left > 8 * half)
#pragma unroll
        for (int piece = 0; piece < CHUNKS / 2; ++piece) {
          u8* place = stage + 16 * lane + (CHUNKS / 2 * half + piece) * 512;
          if (k + 64 * piece < K)
            cp_async16(place, from + 8 * half * K + 64 * piece);
          else
            *reinterpret_cast<uint4*>(place) = zero16();
        }
  }

  __device__ __forceinline__ void read(Part& part, const u8* stage, i32, i32) const {
    const uint4* from = reinterpret_cast<const uint4*>(stage) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) part.row[i / (CHUNKS / 2)][i % (CHUNKS / 2)] = from[32 * i];
  }

  __device__ __forceinline__ static void fragments(const Part& part, int chunk, u32 (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 piece = part.row[half][chunk / 2];
      const u32 first = chunk % 2 ? piece.z : piece.x, second = chunk % 2 ? piece.w : piece.y;
      decode_upper_scaled(first, a[0][half], a[1][half]);
      decode_upper_scaled(second, a[0][2 + half], a[1][2 + half]);
    }
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
  const NestedStream<MODE> weights{
      {row_shift, outlier_starts, outlier_columns, outlier_values}, upper, lower, K, N};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  stream_gemm<NestedStream<MODE>, NT, WARPS, STAGES, HELD>(weights, x, finish, M, N, K,
                                                           reinterpret_cast<u8*>(shared));
}
