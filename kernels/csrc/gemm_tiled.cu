// Linear layers for 17 rows and more: FP16, nested and 4-bit weights.
#include "gemm_shared.cuh"
#include "nested.cuh"
#include "w4.cuh"

// Weights without scales, whose sums are the products.
struct Unscaled {
  static constexpr int BLOCK = 64, GROUP = 0;
  struct Scales {};
  __device__ __forceinline__ static int piece(int unit, int t) { return 2 * t + unit; }
  __device__ __forceinline__ static int x_turn(int row) { return row % 2; }
  __device__ __forceinline__ static void load(Scales&, i32, i32) {}
  __device__ __forceinline__ static float scale(const Scales&, int, int) { return 1.f; }
};

// Rows whose sums are all that there is to them.
struct WholeRows {
  struct Factors {};
  __device__ __forceinline__ static void load(Factors&, i32, i32) {}
  __device__ __forceinline__ static float row_scale(i32) { return 1.f; }
  __device__ __forceinline__ static bool extras(i32, i32) { return false; }
  __device__ __forceinline__ static float extra(i32, const __half*) { return 0.f; }
};

struct F16 : Unscaled, WholeRows {
  static constexpr int ARRAYS = 1, PIECES = 8, PLANES = 2;
  static constexpr float UNIT = 1.f;
  using Unscaled::load;
  struct Factors {
    u32 zero;
  };
  const __half* weight;
  i32 K;

  __device__ __forceinline__ F16(const __half* weight, i32 K) : weight(weight), K(K) {}

  // A zero that the compiler does not know: what is made with it is put where a product wants it
  // once, not moved there for each product.
  __device__ __forceinline__ void load(Factors& found, i32, i32) const { found.zero = K % 2; }

  __device__ __forceinline__ const u8* array(int) const {
    return reinterpret_cast<const u8*>(weight);
  }

  __device__ __forceinline__ i64 row_bytes() const { return 2 * K; }

  __device__ __forceinline__ static int turn(int row) { return row % 2; }

  template <int ROWS>
  __device__ __forceinline__ static int place(int row, int t, int plane) {
    return row * PIECES + (2 * t + plane ^ turn(row));
  }

  __device__ __forceinline__ static void fragments(const uint4 (&planes)[PLANES], const Scales&,
                                                   const Factors& factors, int unit, int half,
                                                   u32 (&a)[2][4]) {
    const uint4 eight = planes[unit];
    const u32 zero = factors.zero;
    a[0][half] = eight.x | zero, a[0][2 + half] = eight.y | zero;
    a[1][half] = eight.z | zero, a[1][2 + half] = eight.w | zero;
  }
};

enum NestedMode {
  NESTED_F16 = 0,  // both planes: the FP16 weight
  NESTED_F8 = 1,   // the upper plane: the weight rounded to FP8, products and sums as in FP16
};

// FP16 mode undoes a row's shift in the halves, as far as they go: see gemm_nested.cu.
template <int MODE>
struct Nested : Unscaled, NestedRows {
  static constexpr int ARRAYS = MODE == NESTED_F16 ? 2 : 1, PIECES = 4, PLANES = ARRAYS;
  static constexpr float UNIT = MODE == NESTED_F16 ? 1.f : UPPER_UNIT;
  struct Factors {
    u32 factors[2];
  };
  using Unscaled::load;
  const u8 *upper, *lower;
  i32 K;

  __device__ __forceinline__ Nested(const NestedRows& rows, const u8* upper, const u8* lower, i32 K)
      : NestedRows(rows), upper(upper), lower(lower), K(K) {}

  __device__ __forceinline__ const u8* array(int i) const { return i ? lower : upper; }

  __device__ __forceinline__ i64 row_bytes() const { return K; }

  __device__ __forceinline__ static int turn(int) { return 0; }

  template <int ROWS>
  __device__ __forceinline__ static int place(int row, int t, int plane) {
    return (plane * ROWS + row) * PIECES + t;
  }

  __device__ __forceinline__ void load(Factors& found, i32 row, i32 N) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      found.factors[half] =
          half_factor(MODE == NESTED_F16 && shift && row + 8 * half < N ? shift[row + 8 * half] : 0);
  }

  __device__ __forceinline__ static void fragments(const uint4 (&planes)[PLANES], const Scales&,
                                                   const Factors& factors, int unit, int half,
                                                   u32 (&a)[2][4]) {
    const uint4 up = planes[0];
    const u32 upper[2] = {unit ? up.z : up.x, unit ? up.w : up.y};
    const uint4 low = planes[PLANES - 1];
    const u32 lower[2] = {unit ? low.z : low.x, unit ? low.w : low.y};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (MODE == NESTED_F16) {
        u32 pairs[2];
        decode_nested(upper[i], lower[i], pairs[0], pairs[1]);
        const __half2 factor = u2h(factors.factors[half]);
        a[i][half] = h2u(__hmul2(u2h(pairs[0]), factor));
        a[i][2 + half] = h2u(__hmul2(u2h(pairs[1]), factor));
      } else {
        decode_upper_scaled(upper[i], a[i][half], a[i][2 + half]);
      }
  }

  __device__ __forceinline__ float row_scale(i32 n) const {
    if (!shift) return 1.f;
    return power_of_two(MODE == NESTED_F16 ? max(shift[n] - HALF_SHIFT_MAX, 0) : shift[n]);
  }

  __device__ __forceinline__ bool extras(i32 n, i32 end) const {
    return outlier_starts && outlier_starts[n] < outlier_starts[end];
  }

  __device__ __forceinline__ float extra(i32 n, const __half* x) const {
    return whole(0.f, row(n), x);
  }
};

// GROUP_: chunks of 32 that share a scale in a block: 4 for groups of 128 or a larger power of two,
// 1 for groups of 32 and 64.
template <int GROUP_>
struct W4 : WholeRows {
  static constexpr int BLOCK = 128, ARRAYS = 1, PIECES = 4, PLANES = 1;
  static constexpr int GROUP = GROUP_, GROUPS = 4 / GROUP_;
  static constexpr float UNIT = 1.f;
  struct Scales {
    u16 scale[2][GROUPS];
    u32 zero[2][GROUPS];
  };
  using WholeRows::load;
  const u32* codes;
  const u16* scales;
  const u8* zeros;
  i32 group_shift, N, K;

  __device__ __forceinline__ W4(const u32* codes, const u16* scales, const u8* zeros,
                                i32 group_shift, i32 N, i32 K)
      : codes(codes), scales(scales), zeros(zeros), group_shift(group_shift), N(N), K(K) {}

  __device__ __forceinline__ static int piece(int unit, int t) { return 4 * unit + t; }
  __device__ __forceinline__ static int x_turn(int row) { return row % 2 * 4; }
  __device__ __forceinline__ static int turn(int) { return 0; }

  __device__ __forceinline__ const u8* array(int) const {
    return reinterpret_cast<const u8*>(codes);
  }

  __device__ __forceinline__ i64 row_bytes() const { return (K + 127) / 128 * 64; }

  template <int ROWS>
  __device__ __forceinline__ static int place(int row, int t, int) {
    return row * PIECES + t;
  }

  __device__ __forceinline__ void load(Scales& found, i32 row, i32 k) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const i32 at = k + 32 * GROUP * i, n = row + 8 * half;
        const i32 place = n * (K >> group_shift) + (at >> group_shift);
        const bool valid = n < N && at < K;
        found.scale[half][i] = valid ? __ldg(scales + place) : static_cast<u16>(0);
        found.zero[half][i] = valid && zeros ? __ldg(zeros + place) : 8u;
      }
  }

  __device__ __forceinline__ static void fragments(const uint4 (&planes)[1], const Scales& scales,
                                                   const Factors&, int unit, int half,
                                                   u32 (&a)[2][4]) {
    const uint4 row = planes[0];
    const u32 word = unit == 0 ? row.x : unit == 1 ? row.y : unit == 2 ? row.z : row.w;
    u32 pairs[4];
    decode_w4(word, scales.zero[half][unit / GROUP], pairs);
    a[0][half] = pairs[0], a[0][2 + half] = pairs[1];
    a[1][half] = pairs[2], a[1][2 + half] = pairs[3];
  }

  __device__ __forceinline__ static float scale(const Scales& scales, int group, int half) {
    return __half2float(bits_half(scales.scale[half][group]));
  }
};

// How many CTAs an SM shall have registers for: SM86 has shared memory for one, and two of eight
// warps would leave a thread too few.
constexpr int tiled_residents(int warps, int residents) {
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 900
  return warps > 4 ? 1 : residents;
#else
  return 1;
#endif
}

template <int NT, int MT, int WR, int WC, int WK, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(32 * WR * WC * WK, tiled_residents(WR * WC * WK, RESIDENT))
linear_f16_tiled(const __half* __restrict__ weight, const __half* __restrict__ x, i32 M, i32 N,
                 i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                 const float* __restrict__ sumsq, i32 partials, float eps,
                 float* __restrict__ residual, const __half* __restrict__ gamma,
                 float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  extern __shared__ __align__(128) uint4 shared[];
  const F16 weights(weight, K);
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  tiled_gemm<F16, NT, MT, WR, WC, WK, STAGES>(weights, x, finish, M, N, K, workspace, tickets, shared);
}

template <int MODE, int NT, int MT, int WR, int WC, int WK, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(32 * WR * WC * WK, tiled_residents(WR * WC * WK, RESIDENT))
linear_nested_tiled(const u8* __restrict__ upper, const u8* __restrict__ lower,
                    const signed char* __restrict__ shift, const i32* __restrict__ outlier_starts,
                    const i32* __restrict__ outlier_columns,
                    const __half* __restrict__ outlier_values, const __half* __restrict__ x, i32 M,
                    i32 N, i32 K, i32 epilogue, void* __restrict__ out,
                    const float* __restrict__ bias, const float* __restrict__ sumsq, i32 partials,
                    float eps, float* __restrict__ residual, const __half* __restrict__ gamma,
                    float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  extern __shared__ __align__(128) uint4 shared[];
  const Nested<MODE> weights({shift, outlier_starts, outlier_columns, outlier_values}, upper, lower,
                             K);
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  tiled_gemm<Nested<MODE>, NT, MT, WR, WC, WK, STAGES>(weights, x, finish, M, N, K, workspace, tickets,
                                                   shared);
}

template <int GROUP, int NT, int MT, int WR, int WC, int WK, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(32 * WR * WC * WK, tiled_residents(WR * WC * WK, RESIDENT))
linear_w4_tiled(const u32* __restrict__ codes, const u16* __restrict__ scales,
                const u8* __restrict__ zeros, i32 group_shift, const __half* __restrict__ x, i32 M,
                i32 N, i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                const float* __restrict__ sumsq, i32 partials, float eps,
                float* __restrict__ residual, const __half* __restrict__ gamma,
                float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  extern __shared__ __align__(128) uint4 shared[];
  const W4<GROUP> weights(codes, scales, zeros, group_shift, N, K);
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  tiled_gemm<W4<GROUP>, NT, MT, WR, WC, WK, STAGES>(weights, x, finish, M, N, K, workspace, tickets,
                                                shared);
}
