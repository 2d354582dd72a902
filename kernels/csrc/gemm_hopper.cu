// Linear layers of many rows by Hopper's warpgroup products (sm_90a): any weights.
//
// A CTA has 64 WGS rows of W and NW NB rows of X; each of its WGS warpgroups has 64 rows of W, which
// it decodes into registers, and all rows of X, which products read from shared memory. So every
// weight is decoded once for NW NB rows of X. A warpgroup waits for its products before it does anything
// else (ptxas would put other values into registers that they still read); meanwhile others decode.
//
// The pieces of a row of W are turned in shared memory, so that the reads of a fragment (two bytes
// of a plane, or a pair of halves, by each lane) fall into different banks.
//
// How the weights are stored is the policy F:
//   STEP                            k that are copied at once, a multiple of 64
//   PLANES, ROW_BYTES               of a row and a step
//   plane(i), row_bytes()           where W is
//   turn(row)                       what the pieces of a row are turned by (exclusive or)
//   Factors, load(factors, row, N)  what a lane needs besides of rows row and row + 8
//   Scales, load(scales, row, k)    the same, of the step at k
//   GROUP, scale(scales, group, half)   chunks of 32 k that share a scale (0: no scales), and that
//   fragment(row, turned, factors, scales, unit, half, t, a)   the A operand of 16 k, of row g
//                                   (half 0) or g + 8 (1)
//   and what finishes rows, as in gemm_shared.cuh
#include "gemm_shared.cuh"
#include "nested.cuh"
#include "w4.cuh"
#include "wgmma.cuh"

template <class F, int WGS, int NW, int NB, int STAGES>
DEV void hopper_gemm(const F& weights, const __half* __restrict__ x, const Finish& f, i32 M, i32 N,
                     i32 K, float* workspace, i32* tickets, u8* shared) {
  constexpr int ROWS = 64 * WGS, THREADS = 128 * WGS;
  constexpr int COLUMNS = NW * NB, PITCH = finish_pitch(ROWS), PLANES = F::PLANES, STEP = F::STEP;
  constexpr int X_TILE = COLUMNS * 128, X_BYTES = STEP / 64 * X_TILE;  // a tile is 64 k
  constexpr bool SCALED = F::GROUP > 0;
  constexpr int ROW = F::ROW_BYTES, PLANE = ROWS * ROW, PIECES = ROW / 16;
  constexpr int STAGE = X_BYTES + PLANES * PLANE;
  static_assert(STAGE % 1024 == 0, "operand tiles are at multiples of 1024 bytes");
  __shared__ float rstd[COLUMNS], row_scale[ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.x * COLUMNS, n0 = blockIdx.y * ROWS;
  const int steps = (K + STEP - 1) / STEP, split = blockIdx.z, splits = gridDim.z;
  const int begin = steps * split / splits, end = steps * (split + 1) / splits;

  // What this thread copies: a piece of every W_RUN-th row of W, of every X_RUN-th of X. Rows beyond
  // N are never copied, and rows of X beyond M stay zero.
  constexpr int W_RUN = THREADS / PIECES, X_PIECES = STEP / 8, X_RUN = THREADS / X_PIECES;
  static_assert(W_RUN % 8 == 0 && X_RUN % 8 == 0 && COLUMNS % X_RUN == 0, "turned alike");
  const int w_row = threadIdx.x / PIECES, w_piece = threadIdx.x % PIECES;
  const int x_row = threadIdx.x / X_PIECES, x_piece = threadIdx.x % X_PIECES;
  const int w_rows = N - n0 - w_row, x_rows = M - m0 - x_row;
  const i64 w_bytes = weights.row_bytes();
  const i64 w_from = (n0 + w_row) * w_bytes + begin * ROW + 16 * w_piece;
  const u8* next_w[PLANES];
#pragma unroll
  for (int i = 0; i < PLANES; ++i) next_w[i] = weights.plane(i) + w_from;
  const __half* next_x = x + static_cast<i64>(m0 + x_row) * K + begin * STEP + 8 * x_piece;
  const i32 w_to = X_BYTES + w_row * ROW + 16 * (w_piece ^ F::turn(w_row));
  const i32 x_to = x_piece / 8 * X_TILE + x_row * 128 + 16 * (x_piece % 8 ^ x_row % 8);
  const i32 w_run = static_cast<i32>(W_RUN * w_bytes), x_run = X_RUN * K;
  i32 left_w = static_cast<i32>(w_bytes) - begin * ROW - 16 * w_piece;  // of a row, in bytes
  i32 left_x = K - begin * STEP - 8 * x_piece;
  const bool whole_w = n0 + ROWS <= N, whole_x = m0 + COLUMNS <= M;
  auto fetch_w = [&](u8* stage) {
    // Beyond K the end of the row comes again: finite numbers, which meet zeros of X.
    const i32 back = left_w > 0 ? 0 : left_w - 16;
    auto copy = [&](bool all) {
#pragma unroll
      for (int i = 0; i < PLANES; ++i)
#pragma unroll
        for (int r = 0; r < ROWS; r += W_RUN)
          if (all || r < w_rows)
            cp_async16(stage + i * PLANE + r * ROW + w_to,
                       next_w[i] + back + static_cast<i64>(r / W_RUN) * w_run);
    };
    if (whole_w)
      copy(true);
    else
      copy(false);
#pragma unroll
    for (int i = 0; i < PLANES; ++i) next_w[i] += ROW;
    left_w -= ROW;
  };
  auto fetch_x = [&](u8* stage) {
    const bool zero = left_x <= 0;
    const __half* const from = zero ? next_x + left_x - 8 : next_x;  // the end of the row
    auto copy = [&](bool all) {
#pragma unroll
      for (int r = 0; r < COLUMNS; r += X_RUN)
        if (all || r < x_rows)
          cp_async16_or_zero(stage + r * 128 + x_to, from + static_cast<i64>(r / X_RUN) * x_run,
                             zero);
    };
    if (whole_x)
      copy(true);
    else
      copy(false);
    next_x += STEP;
    left_x -= STEP;
  };

  launch_dependents();
  constexpr int AHEAD = STAGES - 1;  // after a barrier the stage of the step before is free
#pragma unroll
  for (int stage = 0; stage < AHEAD; ++stage)
    if (begin + stage < end) fetch_w(shared + stage * STAGE);
  if (!whole_x)
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
#pragma unroll
      for (int r = 0; r < COLUMNS; r += X_RUN)
        if (r >= x_rows)
          *reinterpret_cast<uint4*>(shared + stage * STAGE + r * 128 + x_to) = zero16();
  for (int row = threadIdx.x; row < ROWS; row += THREADS)
    row_scale[row] = n0 + row < N ? weights.row_scale(n0 + row) : 1.f;
  typename F::Factors factors;
  weights.load(factors, n0 + 16 * warp + g, N);
  wait_for_inputs();
#pragma unroll
  for (int stage = 0; stage < AHEAD; ++stage) {
    if (begin + stage < end) fetch_x(shared + stage * STAGE);
    cp_async_commit();
  }
  tile_scales<COLUMNS, THREADS / 32>(f, rstd, m0, M, 1.f / K);

  float acc[NB][NW / 2];
#pragma unroll
  for (int b = 0; b < NB; ++b)
#pragma unroll
    for (int i = 0; i < NW / 2; ++i) acc[b][i] = 0.f;
  typename F::Scales scales;
  weights.load(scales, n0 + 16 * warp + g, begin * STEP);
  int slot = 0, ahead = AHEAD;
  for (int step = begin; step < end; ++step) {
    cp_async_wait<AHEAD - 1>();
    fence_shared_for_wgmma();
    __syncthreads();
    u8* const stage = shared + slot * STAGE;
    if (step + AHEAD < end) {
      fetch_w(shared + ahead * STAGE);
      fetch_x(shared + ahead * STAGE);
    }
    cp_async_commit();
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    ahead = ahead == STAGES - 1 ? 0 : ahead + 1;
    const typename F::Scales now = scales;
    if (step + 1 < end) weights.load(scales, n0 + 16 * warp + g, (step + 1) * STEP);

    const u8* const rows = stage + X_BYTES + (16 * warp + g) * ROW;
    // Products are started and waited for UNITS chunks of 16 k at a time; with scales a group at a
    // time, into sums of its own.
    constexpr int UNITS = F::GROUP == 1 ? 2 : 4;
    float group[NB][SCALED ? NW / 2 : 1];
#pragma unroll
    for (int first = 0; first < STEP / 16; first += UNITS) {
      u32 a[UNITS][4];
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          F::template fragment<PLANE>(rows + 8 * half * ROW, F::turn(g), factors, now, first + unit,
                                      half, t, a[unit]);
        wgmma_hold(a[unit]);
      }
#pragma unroll
      for (int b = 0; b < NB; ++b) {
        if constexpr (SCALED) {
          if (first % (2 * F::GROUP) == 0)
#pragma unroll
            for (int i = 0; i < NW / 2; ++i) group[b][i] = 0.f;
          wgmma_hold(group[b]);
        } else {
          wgmma_hold(acc[b]);
        }
      }
      wgmma_fence();
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int b = 0; b < NB; ++b) {
          const int chunk = first + unit;
          const u64 tile =
              wgmma_tile(stage + chunk / 4 * X_TILE + b * (NW * 128) + 32 * (chunk % 4), 16, 1024);
          if constexpr (SCALED)
            wgmma_registers_k(group[b], a[unit], tile);
          else
            wgmma_registers_k(acc[b], a[unit], tile);
        }
      wgmma_commit();
#pragma unroll
      for (int b = 0; b < NB; ++b) {
        if constexpr (SCALED) {
          wgmma_wait<0>(group[b]);
          if ((first + UNITS) % (2 * F::GROUP) == 0)
#pragma unroll
            for (int i = 0; i < NW / 2; ++i)
              acc[b][i] = fmaf(F::scale(now, first / (2 * F::GROUP), i / 2 % 2), group[b][i],
                               acc[b][i]);
        } else {
          wgmma_wait<0>(acc[b]);
        }
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  constexpr int TILES = COLUMNS / 8;
  auto& own = reinterpret_cast<float(&)[1][TILES][4]>(acc);
  if (splits > 1 && !merge<1, TILES, THREADS>(own, workspace, tickets)) return;
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int row = 16 * warp + g + 8 * (v / 2);
      sums[(8 * j + 2 * t + v % 2) * PITCH + row] = own[0][j][v] * (F::UNIT * row_scale[row]);
    }
  __syncthreads();
  finish_sums<ROWS, COLUMNS, THREADS>(weights, x, f, sums, rstd, m0, n0, M, N, K);
}

struct HopperF16 {
  static constexpr int GROUP = 0, STEP = 64, PLANES = 1, ROW_BYTES = 2 * STEP;
  static constexpr float UNIT = 1.f;
  const __half* weight;
  i32 K;

  __device__ __forceinline__ const u8* plane(int) const {
    return reinterpret_cast<const u8*>(weight);
  }

  __device__ __forceinline__ i64 row_bytes() const { return 2 * K; }

  struct Factors {};
  struct Scales {};
  __device__ __forceinline__ static void load(Factors&, i32, i32) {}
  __device__ __forceinline__ static void load(Scales&, i32, i32) {}

  __device__ __forceinline__ static int turn(int row) { return row % 8; }

  template <int PLANE>
  __device__ __forceinline__ static void fragment(const u8* row, int turned, const Factors&,
                                                  const Scales&, int unit, int half, int t,
                                                  u32 (&a)[4]) {
    a[half] = *reinterpret_cast<const u32*>(row + 16 * (2 * unit ^ turned) + 4 * t);
    a[2 + half] = *reinterpret_cast<const u32*>(row + 16 * (2 * unit + 1 ^ turned) + 4 * t);
  }

  __device__ __forceinline__ static float row_scale(i32) { return 1.f; }
  __device__ __forceinline__ static bool extras(i32, i32) { return false; }
  __device__ __forceinline__ static float extra(i32, const __half*) { return 0.f; }
};

template <int FP8>
struct HopperNested : NestedRows {
  static constexpr int GROUP = 0, STEP = 64, PLANES = FP8 ? 1 : 2, ROW_BYTES = STEP;
  static constexpr float UNIT = FP8 ? UPPER_UNIT : 1.f;
  const u8 *upper, *lower;
  i32 K;

  __device__ __forceinline__ HopperNested(const NestedRows& rows, const u8* upper, const u8* lower,
                                          i32 K)
      : NestedRows(rows), upper(upper), lower(lower), K(K) {}

  __device__ __forceinline__ const u8* plane(int i) const { return i ? lower : upper; }

  __device__ __forceinline__ i64 row_bytes() const { return K; }

  __device__ __forceinline__ static int turn(int row) { return row / 2 % 4; }

  struct Factors {
    u32 factors[2];
  };
  struct Scales {};
  __device__ __forceinline__ static void load(Scales&, i32, i32) {}

  __device__ __forceinline__ void load(Factors& found, i32 row, i32 N) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      found.factors[half] =
          half_factor(!FP8 && shift && row + 8 * half < N ? shift[row + 8 * half] : 0);
  }

  // Bytes of 2 t, 2 t + 1 and of 8 further: what lane t has of 16 k.
  __device__ __forceinline__ static u32 four(const u8* piece, int t) {
    const u16* from = reinterpret_cast<const u16*>(piece + 2 * t);
    return from[0] | static_cast<u32>(from[4]) << 16;
  }

  // FP16 mode undoes a row's shift in the halves, as far as they go: see gemm_nested.cu.
  template <int PLANE>
  __device__ __forceinline__ static void fragment(const u8* row, int turned, const Factors& factors,
                                                  const Scales&, int unit, int half, int t,
                                                  u32 (&a)[4]) {
    const u8* piece = row + 16 * (unit ^ turned);
    if (FP8) {
      decode_upper_scaled(four(piece, t), a[half], a[2 + half]);
    } else {
      u32 pairs[2];
      decode_nested(four(piece, t), four(piece + PLANE, t), pairs[0], pairs[1]);
      a[half] = h2u(__hmul2(u2h(pairs[0]), u2h(factors.factors[half])));
      a[2 + half] = h2u(__hmul2(u2h(pairs[1]), u2h(factors.factors[half])));
    }
  }

  __device__ __forceinline__ float row_scale(i32 n) const {
    if (!shift) return 1.f;
    return power_of_two(FP8 ? shift[n] : max(shift[n] - HALF_SHIFT_MAX, 0));
  }

  __device__ __forceinline__ bool extras(i32 n, i32 end) const {
    return outlier_starts && outlier_starts[n] < outlier_starts[end];
  }

  __device__ __forceinline__ float extra(i32 n, const __half* x) const {
    return whole(0.f, row(n), x);
  }
};

// Products are of exact small integers, code - zero; scales multiply the FP32 sums of a group.
// GROUP: chunks of 32 k that share a scale in a step: 4 for groups of 128 or a larger power of two,
// 1 for groups of 32 and 64.
template <int GROUP_>
struct HopperW4 {
  static constexpr int GROUP = GROUP_, GROUPS = 4 / GROUP_;
  static constexpr int STEP = 128, PLANES = 1, ROW_BYTES = 64;
  static constexpr float UNIT = 1.f;
  struct Factors {};
  struct Scales {
    u16 scale[2][GROUPS];
    u32 zero[2][GROUPS];  // a pair of halves, 1024 + the zero
  };
  const u32* codes;
  const u16* scales;
  const u8* zeros;
  i32 group_shift, N, K;

  __device__ __forceinline__ const u8* plane(int) const {
    return reinterpret_cast<const u8*>(codes);
  }

  __device__ __forceinline__ i64 row_bytes() const { return (K + 127) / 128 * 64; }

  __device__ __forceinline__ static void load(Factors&, i32, i32) {}

  __device__ __forceinline__ void load(Scales& found, i32 row, i32 k) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const i32 at = k + 32 * GROUP * i, n = row + 8 * half;
        const i32 place = n * (K >> group_shift) + (at >> group_shift);
        const bool valid = n < N && at < K;
        const u32 zero = valid && zeros ? __ldg(zeros + place) : 8u;
        found.scale[half][i] = valid ? __ldg(scales + place) : static_cast<u16>(0);
        found.zero[half][i] = zero * 0x00010001u + 0x64006400u;
      }
  }

  __device__ __forceinline__ static int turn(int row) { return row / 2 % 4; }

  // Of a block of 128 k word 4 (j % 4) + j / 4 holds k = 8 j ..., its pairs 16 bits apart: lane t
  // has pair t of j = 2 unit and of 2 unit + 1.
  template <int PLANE>
  __device__ __forceinline__ static void fragment(const u8* row, int turned, const Factors&,
                                                  const Scales& scales, int unit, int half, int t,
                                                  u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = 2 * unit + i;
      const u32 word = *reinterpret_cast<const u32*>(row + 16 * (j % 4 ^ turned) + 4 * (j / 4));
      const u32 codes = lop3<0xEA>(word >> 4 * t, 0x000F000Fu, 0x64006400u);  // 1024 + code
      a[2 * i + half] = h2u(__hsub2(u2h(codes), u2h(scales.zero[half][unit / 2 / GROUP])));
    }
  }

  __device__ __forceinline__ static float scale(const Scales& scales, int group, int half) {
    return __half2float(bits_half(scales.scale[half][group]));
  }

  __device__ __forceinline__ static float row_scale(i32) { return 1.f; }
  __device__ __forceinline__ static bool extras(i32, i32) { return false; }
  __device__ __forceinline__ static float extra(i32, const __half*) { return 0.f; }
};

template <int WGS, int NW, int NB, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(128 * WGS, RESIDENT)
linear_f16_hopper(const __half* __restrict__ weight, const __half* __restrict__ x, i32 M, i32 N,
                  i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                  const float* __restrict__ sumsq, i32 partials, float eps,
                  float* __restrict__ residual, const __half* __restrict__ gamma,
                  float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  extern __shared__ __align__(1024) u8 shared[];
  const HopperF16 weights{weight, K};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  hopper_gemm<HopperF16, WGS, NW, NB, STAGES>(weights, x, finish, M, N, K, workspace, tickets, shared);
}

template <int FP8, int WGS, int NW, int NB, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(128 * WGS, RESIDENT)
linear_nested_hopper(const u8* __restrict__ upper, const u8* __restrict__ lower,
                     const signed char* __restrict__ shift, const i32* __restrict__ outlier_starts,
                     const i32* __restrict__ outlier_columns,
                     const __half* __restrict__ outlier_values, const __half* __restrict__ x, i32 M,
                     i32 N, i32 K, i32 epilogue, void* __restrict__ out,
                     const float* __restrict__ bias, const float* __restrict__ sumsq, i32 partials,
                     float eps, float* __restrict__ residual, const __half* __restrict__ gamma,
                     float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  extern __shared__ __align__(1024) u8 shared[];
  const HopperNested<FP8> weights({shift, outlier_starts, outlier_columns, outlier_values}, upper,
                                  lower, K);
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  hopper_gemm<HopperNested<FP8>, WGS, NW, NB, STAGES>(weights, x, finish, M, N, K, workspace, tickets,
                                                 shared);
}

template <int GROUP, int WGS, int NW, int NB, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(128 * WGS, RESIDENT)
linear_w4_hopper(const u32* __restrict__ codes, const u16* __restrict__ scales,
                 const u8* __restrict__ zeros, i32 group_shift, const __half* __restrict__ x, i32 M,
                 i32 N, i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                 const float* __restrict__ sumsq, i32 partials, float eps,
                 float* __restrict__ residual, const __half* __restrict__ gamma,
                 float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  extern __shared__ __align__(1024) u8 shared[];
  const HopperW4<GROUP> weights{codes, scales, zeros, group_shift, N, K};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  hopper_gemm<HopperW4<GROUP>, WGS, NW, NB, STAGES>(weights, x, finish, M, N, K, workspace, tickets,
                                               shared);
}
