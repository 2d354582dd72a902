// Linear layers with 4-bit weights for 17 rows and more by Hopper's warpgroup products (sm_90a).
// Groups are of 128 columns or a larger power of two, so K is a multiple of 128.
//
// A CTA has 64 WGS rows of W and COLUMNS rows of X; each of its warpgroups has 64 rows of W, whose
// codes it turns into exact small integers in registers, the A operand, and all rows of X, which
// products read from shared memory. Both pass through a ring there; a stage is one block of 128 k,
// which has one scale. Its products are summed in FP32 by themselves, and scales multiply those
// sums, so no weight is rounded. A warpgroup waits for its products before it does anything else
// (ptxas would put other values into registers that they still read); meanwhile others decode.
//
// Pieces of 16 bytes are turned within their rows, W's so that the words that a fragment needs fall
// into different banks, X's as products want it.
#include "gemm_shared.cuh"
#include "w4.cuh"
#include "wgmma.cuh"

constexpr int W4_STEP = 128, W4_ROW = W4_STEP / 2;

// What a lane needs of a step to decode rows row and row + 8 of W.
struct W4Step {
  u16 scale[2];
  u32 zero[2];  // a pair of halves, 1024 + the zero
};

// Grid: x over COLUMNS rows of X, y over 64 WGS rows of W, z over splits of K; `workspace` and
// `tickets` as for `tiled_gemm`.
template <int WGS, int COLUMNS, int STAGES, int RESIDENT>
__global__ void __launch_bounds__(128 * WGS, RESIDENT)
linear_w4_hopper(const u32* __restrict__ codes, const u16* __restrict__ scales,
                 const u8* __restrict__ zeros, i32 group_shift, const __half* __restrict__ x, i32 M,
                 i32 N, i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                 const float* __restrict__ sumsq, i32 partials, float eps,
                 float* __restrict__ residual, const __half* __restrict__ gamma,
                 float* __restrict__ sumsq_out, float* workspace, i32* tickets) {
  constexpr int ROWS = 64 * WGS, THREADS = 128 * WGS, PITCH = finish_pitch(ROWS);
  constexpr int X_TILE = COLUMNS * 128, X_BYTES = 2 * X_TILE;  // a tile is 64 k
  constexpr int STAGE = X_BYTES + ROWS * W4_ROW, TILES = COLUMNS / 8;
  static_assert(STAGE % 1024 == 0, "operand tiles are at multiples of 1024 bytes");
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ float rstd[COLUMNS];
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.x * COLUMNS, n0 = blockIdx.y * ROWS;
  const int steps = K / W4_STEP, split = blockIdx.z, splits = gridDim.z;
  const int begin = steps * split / splits, end = steps * (split + 1) / splits;

  // What this thread copies: a piece of every W_RUN-th row of W, of every X_RUN-th of X. Rows beyond
  // N are never copied, and rows of X beyond M stay zero.
  constexpr int W_RUN = THREADS / 4, X_RUN = THREADS / 16;
  static_assert(W_RUN % 8 == 0 && X_RUN % 8 == 0 && COLUMNS % X_RUN == 0, "turned alike");
  const int w_row = threadIdx.x / 4, w_piece = threadIdx.x % 4;
  const int x_row = threadIdx.x / 16, x_piece = threadIdx.x % 16;
  const int w_rows = N - n0 - w_row, x_rows = M - m0 - x_row;
  const u8* next_w = reinterpret_cast<const u8*>(codes) +
                     (static_cast<i64>(n0 + w_row) * steps + begin) * W4_ROW + 16 * w_piece;
  const __half* next_x = x + static_cast<i64>(m0 + x_row) * K + begin * W4_STEP + 8 * x_piece;
  const i32 w_to = X_BYTES + w_row * W4_ROW + 16 * (w_piece ^ w_row / 2 % 4);
  const i32 x_to = x_piece / 8 * X_TILE + x_row * 128 + 16 * (x_piece % 8 ^ x_row % 8);
  const i32 w_run = W_RUN * steps * W4_ROW, x_run = X_RUN * K;
  auto fetch_w = [&](u8* stage) {
#pragma unroll
    for (int r = 0; r < ROWS; r += W_RUN)
      if (r < w_rows)
        cp_async16(stage + r * W4_ROW + w_to, next_w + static_cast<i64>(r / W_RUN) * w_run);
    next_w += W4_ROW;
  };
  auto fetch_x = [&](u8* stage) {
#pragma unroll
    for (int r = 0; r < COLUMNS; r += X_RUN)
      if (r < x_rows)
        cp_async16(stage + r * 128 + x_to, next_x + static_cast<i64>(r / X_RUN) * x_run);
    next_x += W4_STEP;
  };
  const int row0 = n0 + 16 * warp + g, groups = K >> group_shift;
  auto load_scales = [&](int step) {
    W4Step found;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = row0 + 8 * half, at = row * groups + ((step * W4_STEP) >> group_shift);
      const bool valid = row < N && step < steps;
      const u32 zero = valid && zeros ? __ldg(zeros + at) : 8u;
      found.scale[half] = valid ? __ldg(scales + at) : static_cast<u16>(0);
      found.zero[half] = zero * 0x00010001u + 0x64006400u;
    }
    return found;
  };

  launch_dependents();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage)
    if (begin + stage < end) fetch_w(shared + stage * STAGE);
  if (M - m0 < COLUMNS)
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage)
#pragma unroll
      for (int r = 0; r < COLUMNS; r += X_RUN)
        if (r >= x_rows)
          *reinterpret_cast<uint4*>(shared + stage * STAGE + r * 128 + x_to) = zero16();
  W4Step next = load_scales(begin);
  wait_for_inputs();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (begin + stage < end) fetch_x(shared + stage * STAGE);
    cp_async_commit();
  }
  tile_scales<COLUMNS, THREADS / 32>(finish, rstd, m0, M, 1.f / K);

  float acc[COLUMNS / 2];
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = 0.f;
  int slot = 0, ahead = STAGES - 1;
  for (int step = begin; step < end; ++step) {
    cp_async_wait<STAGES - 2>();
    fence_shared_for_wgmma();
    __syncthreads();  // this step is there, and the step before is done with its stage
    u8* const stage = shared + slot * STAGE;
    if (step + STAGES - 1 < end) {
      fetch_w(shared + ahead * STAGE);
      fetch_x(shared + ahead * STAGE);
    }
    cp_async_commit();
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    ahead = ahead == STAGES - 1 ? 0 : ahead + 1;
    const W4Step now = next;
    if (step + 1 < end) next = load_scales(step + 1);

    float group[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) group[i] = 0.f;
    const u8* const rows = stage + X_BYTES + (16 * warp + g) * W4_ROW;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      // Word 4 (j % 4) + j / 4 of a block holds k = 8 j ..., its pairs 16 bits apart: lane t has
      // pair t of j = 2 unit and of 2 unit + 1, for each unit of 16 k.
      u32 a[4][4];
#pragma unroll
      for (int unit = 0; unit < 4; ++unit) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int j = 2 * (4 * tile + unit) + i;
            const u32 word = *reinterpret_cast<const u32*>(
                rows + 8 * half * W4_ROW + 16 * (j % 4 ^ g / 2) + 4 * (j / 4));
            const u32 code = lop3<0xEA>(word >> 4 * t, 0x000F000Fu, 0x64006400u);  // 1024 + code
            a[unit][2 * i + half] = h2u(__hsub2(u2h(code), u2h(now.zero[half])));
          }
        wgmma_hold(a[unit]);
      }
      wgmma_hold(group);
      wgmma_fence();
#pragma unroll
      for (int unit = 0; unit < 4; ++unit)
        wgmma_registers_k(group, a[unit], wgmma_tile(stage + tile * X_TILE + 32 * unit, 16, 1024));
      wgmma_commit();
      wgmma_wait<0>(group);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i)
      acc[i] = fmaf(__half2float(bits_half(now.scale[i / 2 % 2])), group[i], acc[i]);
  }
  cp_async_wait<0>();
  __syncthreads();

  auto& own = reinterpret_cast<float(&)[1][TILES][4]>(acc);
  if (splits > 1 && !merge<1, TILES, THREADS>(own, workspace, tickets)) return;
  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < TILES; ++j)
#pragma unroll
    for (int v = 0; v < 4; ++v)
      sums[(8 * j + 2 * t + v % 2) * PITCH + 16 * warp + g + 8 * (v / 2)] = own[0][j][v];
  __syncthreads();
  finish_tile<ROWS, COLUMNS, THREADS>(finish, sums, rstd, m0, n0, M, N);
}
