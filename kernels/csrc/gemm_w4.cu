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
    u8 zero[2][GROUPS];
  };
  const u32* codes;
  const u16* scales;
  const u8* zeros;
  i32 group_shift, K;

  __device__ __forceinline__ static int x_offset(int chunk, int t) { return 32 * chunk + 8 * t; }

  __device__ __forceinline__ void load(Tile& tile, i32 row, i32 row8, i32 k) const {
    const int words = (K + 127) / 128 * 16, groups = K >> group_shift;
    const int lane_words = 4 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 at = half ? row8 : row;
      tile.row[half] = ldg_stream(codes + at * words + k / 8 + lane_words);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const int group = min((k + 32 * GROUP * i) >> group_shift, groups - 1);
        tile.scale[half][i] = __ldg(scales + at * groups + group);
        tile.zero[half][i] = zeros ? __ldg(zeros + at * groups + group) : static_cast<u8>(8);
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
__global__ void __launch_bounds__(32 * WARPS, 1)
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
