// Linear layers with 4-bit weights. Products of exact small integers with X are summed in FP32 by
// group; scales multiply those sums, never the weights, so no weight is rounded.
#include "gemm.cuh"
#include "gemm_tiled.cuh"
#include "w4.cuh"

// GROUP: chunks of 32 that share a scale in a step: 1, 2 or 4 for groups of 32, 64, and 128 or a
// larger power of two.
template <int GROUP>
struct W4 {
  static constexpr int CHUNKS = 4, GROUP_CHUNKS = GROUP, GROUPS = CHUNKS / GROUP;
  struct Tile {
    uint4 row[2];
    u16 scale[2][GROUPS];
    u32 zero[2][GROUPS];
  };
  struct Rows {
    const u32* codes[2];
    i32 scales[2];
  };
  const u32* codes;
  const u16* scales;
  const u8* zeros;
  i32 group_shift, K;

  __device__ __forceinline__ static int x_offset(int chunk, int t) { return 32 * chunk + 8 * t; }

  // A group of 128 or more divides K.
  __device__ __forceinline__ bool live(int chunk, int k) const {
    return GROUP == CHUNKS || k + 32 * chunk < K;
  }

  __device__ __forceinline__ Rows rows(i32 row, i32 row8) const {
    const i64 words = (K + 127) / 128 * 16;
    const i32 groups = K >> group_shift;
    const u32* lane = codes + 4 * (threadIdx.x % 4);
    return {{lane + row * words, lane + row8 * words}, {row * groups, row8 * groups}};
  }

  __device__ __forceinline__ void load(Tile& tile, const Rows& rows, i32 k, i32 ahead) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile.row[half] = ldg_stream(rows.codes[half] + k / 8 + ahead / 8);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i)
        if (live(GROUP * i, k + ahead)) {
          const i32 at = rows.scales[half] + ((k + ahead + 32 * GROUP * i) >> group_shift);
          tile.scale[half][i] = __ldg(scales + at);
          tile.zero[half][i] = zeros ? __ldg(zeros + at) : 8u;
        }
    }
  }

  __device__ __forceinline__ void fragments(const Tile& tile, int chunk, u32 (&a)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 row = tile.row[half];
      const u32 word = chunk == 0 ? row.x : chunk == 1 ? row.y : chunk == 2 ? row.z : row.w;
      u32 pairs[4];
      decode_w4(word, tile.zero[half][chunk / GROUP], pairs);
      a[0][half] = pairs[0], a[0][2 + half] = pairs[1];
      a[1][half] = pairs[2], a[1][2 + half] = pairs[3];
    }
  }

  __device__ __forceinline__ static __half scale(const Tile& tile, int group, int half) {
    return bits_half(tile.scale[half][group]);
  }
};

template <int GROUP, int NT, int MT, int WARPS, int DEPTH, int AHEAD>
__global__ void __launch_bounds__(32 * WARPS, resident_ctas(MT, WARPS, AHEAD))
linear_w4(const u32* __restrict__ codes, const u16* __restrict__ scales,
          const u8* __restrict__ zeros, i32 group_shift, const __half* __restrict__ x, i32 M, i32 N,
          i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
          const float* __restrict__ sumsq, i32 partials, float eps, float* __restrict__ residual,
          const __half* __restrict__ gamma, float* __restrict__ sumsq_out) {
  const W4<GROUP> weights{codes, scales, zeros, group_shift, K};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  small_gemm<W4<GROUP>, NT, MT, WARPS, DEPTH, AHEAD>(weights, x, finish, M, N, K);
}

template <int GROUP, int NT, int MT, int WARPS, int DEPTH>
__global__ void __launch_bounds__(32 * WARPS, 1)
linear_w4_tiled(const u32* __restrict__ codes, const u16* __restrict__ scales,
                const u8* __restrict__ zeros, i32 group_shift, const __half* __restrict__ x, i32 M,
                i32 N, i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                const float* __restrict__ sumsq, i32 partials, float eps,
                float* __restrict__ residual, const __half* __restrict__ gamma,
                float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  extern __shared__ __align__(16) uint4 shared[];
  const W4<GROUP> weights{codes, scales, zeros, group_shift, K};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  tiled_gemm<W4<GROUP>, NT, MT, WARPS, DEPTH>(weights, x, finish, M, N, K,
                                              workspace, tickets, shared);
}
