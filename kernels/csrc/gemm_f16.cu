// Linear layers with plain FP16 weights [N, K], row-major.
#include "gemm_stream.cuh"

struct F16Stream : PlainRows {
  static constexpr int CHUNKS = 2, STEP = 32 * CHUNKS, STAGE_BYTES = 1024 * CHUNKS;
  static constexpr int GROUP_CHUNKS = 0;
  static constexpr bool SHARES = false, DECODED = false;
  static constexpr float UNIT = 1.f, HIGH = 1.f;
  static constexpr u32 ONE = 0;
  struct Part {
    uint4 row[2][CHUNKS];
  };
  const __half* weight;
  i32 K, rows;

  struct Cursor {
    const __half* from;
    i32 rows_left;
  };

  __device__ __forceinline__ static int x_offset(int chunk, int t) { return 32 * chunk + 8 * t; }

  __device__ __forceinline__ Cursor at(i32 tile) const {
    const int lane = threadIdx.x % 32, row = 16 * tile + lane / 4;
    const int k = threadIdx.x / 32 * STEP + 8 * (lane % 4);
    return {weight + static_cast<i64>(row) * K + k, rows - row};
  }

  __device__ __forceinline__ void skip(Cursor& cursor, i32 tiles) const {
    cursor.from += static_cast<i64>(16 * tiles) * K;
    cursor.rows_left -= 16 * tiles;
  }

  __device__ __forceinline__ void fetch(u8* stage, const Cursor& cursor, i32 step,
                                        i32 ahead) const {
    const __half* from = cursor.from + ahead * STEP;
    u8* to = stage + threadIdx.x % 32 * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const bool inside = cursor.rows_left > 8 * half && step * STEP + 32 * chunk < K;
        cp_async16_zfill(to + (CHUNKS * half + chunk) * 512, from + 8 * half * K + 32 * chunk,
                         inside ? 16 : 0);
      }
  }

  __device__ __forceinline__ void read(Part& part, const u8* stage, i32, i32) const {
    const uint4* from = reinterpret_cast<const uint4*>(stage) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; ++i)
      part.row[i / CHUNKS][i % CHUNKS] = from[32 * i];
  }

  __device__ __forceinline__ static void fragments(const Part& part, int chunk, u32 (&a)[2][4]) {
    const uint4 low = part.row[0][chunk], high = part.row[1][chunk];
    a[0][0] = low.x, a[0][1] = high.x, a[0][2] = low.z, a[0][3] = high.z;
    a[1][0] = low.y, a[1][1] = high.y, a[1][2] = low.w, a[1][3] = high.w;
  }

  __device__ __forceinline__ static float scale(const Part&, int, int) { return 1.f; }
  __device__ __forceinline__ static float zero(const Part&, int, int) { return 0.f; }
};

template <int NT, int WARPS, int STAGES, int HELD>
__global__ void __launch_bounds__(32 * WARPS, stream_residents(WARPS))
linear_f16(const __half* __restrict__ weight, const __half* __restrict__ x, i32 M, i32 N,
                  i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                  const float* __restrict__ sumsq, i32 partials, float eps,
                  float* __restrict__ residual, const __half* __restrict__ gamma,
                  float* __restrict__ sumsq_out) {
  extern __shared__ __align__(16) uint4 shared[];
  const F16Stream weights{{}, weight, K, N};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  stream_gemm<F16Stream, NT, WARPS, STAGES, HELD>(weights, x, finish, M, N, K,
                                                  reinterpret_cast<u8*>(shared));
}
