// Linear layers for 17 rows and more: tiles of W and of X pass through shared memory.
//
// A CTA has 16 MT WR rows of W and 8 NT WC rows of X. Of its WR WC WK warps each has 16 MT by 8 NT of
// them, and every WK-th block of k. A stage of the ring holds both as they are in memory: codes are
// decoded in registers, by the warps that have those rows. Where N alone makes too few CTAs,
// gridDim.z of them split K; the last to come adds the partial sums in the order of the splits.
//
// The order of k within a block is that of W's bytes: lane t = lane % 4 of a row's four takes its
// 16 t ... 16 t + 15 bytes, whatever they hold, and the same k of X. F16 and both modes of nested
// weights share one order: their sums are the same bits. Rows in shared memory are turned so that
// the reads of eight lanes, 16 bytes each, fall into different banks; the two halves of a sector of
// 32 bytes stay together, which copies want.
//
// How the weights are stored is the policy F:
//   BLOCK             k of a row that its four lanes take at once
//   ARRAYS, PIECES    how many arrays W is, and the pieces of 16 bytes of a row and block in each
//   PLANES            pieces that a lane reads for a block
//   GROUP             chunks of 32 k that share a scale; 0: no scales, sums stay where they are
//   UNIT              what all sums are multiplied by at the end
//   array(i), row_bytes()           where W is
//   turn(row)                       what a row's pieces are turned by (exclusive or)
//   place<ROWS>(row, t, plane)      where in a block of a stage a lane's pieces are
//   piece(unit, t), x_turn(row)     which piece of a row of X goes with 32 k, how X is turned
//   Scales            what a lane needs besides to decode 16 rows of a block
//   load(scales, row, k)            of rows row and row + 8 of the block at k
//   Factors, factors(row)           the same, once for all of K
//   fragments(planes, scales, factors, unit, half, a)   A operands of two mma, of row g (half 0) or
//                     g + 8 (1)
//   scale(scales, unit, half)       what a group's sums are multiplied by
//   row_scale(row)                  what a row's sums are multiplied by, a power of two
//   extra(row, x)                   what is added to them after that, for this row of X
//   extras(row, end)                whether any of these rows has something to add
#pragma once
#include "gemm_finish.cuh"

// Leaves this split's sums in the workspace. In the CTA that comes last true, and `sums` is that of
// all splits, added in their order.
template <int MT, int NT, int THREADS>
DEV bool merge(float (&sums)[MT][NT][4], float* workspace, i32* tickets) {
  const int splits = gridDim.z, block = blockIdx.y * gridDim.x + blockIdx.x;
  float4* const lane = reinterpret_cast<float4*>(workspace) +
                       static_cast<i64>(block) * splits * (MT * NT * THREADS) + threadIdx.x;
  __shared__ bool last;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
      lane[(static_cast<int>(blockIdx.z) * MT * NT + i * NT + j) * THREADS] =
          make_float4(sums[i][j][0], sums[i][j][1], sums[i][j][2], sums[i][j][3]);
  __syncthreads();
  if (threadIdx.x == 0) {
    last = take_ticket(tickets + block) == splits - 1;
    if (last) tickets[block] = 0;
  }
  __syncthreads();
  if (!last) return false;
  clear(sums);
  constexpr int AT_ONCE = MT * NT > 8 ? 1 : 2;  // as many loads as registers allow
#pragma unroll AT_ONCE
  for (int split = 0; split < splits; ++split)
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const float4 four = ld_cg(lane + (split * MT * NT + i * NT + j) * THREADS);
        sums[i][j][0] += four.x, sums[i][j][1] += four.y;
        sums[i][j][2] += four.z, sums[i][j][3] += four.w;
      }
  return true;
}

// What is left to do with the sums of a tile, in shared memory.
template <int ROWS, int COLUMNS, int THREADS, class F>
DEV void finish_sums(const F& weights, const __half* x, const Finish& f, float* sums,
                     const float* rstd, i32 m0, i32 n0, i32 M, i32 N, i32 K) {
  if (weights.extras(n0, min(n0 + ROWS, N))) {
    for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
      const int row = e % ROWS, column = e / ROWS;
      if (n0 + row < N && m0 + column < M)
        sums[column * finish_pitch(ROWS) + row] +=
            weights.extra(n0 + row, x + static_cast<i64>(m0 + column) * K);
    }
    __syncthreads();
  }
  finish_tile<ROWS, COLUMNS, THREADS>(f, sums, rstd, m0, n0, M, N);
}

// Grid: x over blocks of 8 NT WC rows of X, y over 16 MT WR rows of W, z over splits of K.
// `workspace` has gridDim.x y z blocks of 16 MT WR * 8 NT WC floats, `tickets` a zero for each x, y
// (and is left so); both unused if gridDim.z is 1. `shared`: as `linear_tiled.py` computes it.
template <class F, int NT, int MT, int WR, int WC, int WK, int STAGES>
DEV void tiled_gemm(const F& weights, const __half* __restrict__ x, const Finish& f, i32 M, i32 N,
                    i32 K, float* workspace, i32* tickets, uint4* shared) {
  constexpr int WARPS = WR * WC * WK, THREADS = 32 * WARPS, PLANES = F::PLANES;
  constexpr int ROWS = 16 * MT * WR, COLUMNS = 8 * NT * WC, PITCH = finish_pitch(ROWS), OWN = MT / WK;
  constexpr int STEP = F::BLOCK * WK, UNITS = F::BLOCK / 32;
  // Of a row and step in each array, of a row of X; and the rows that all threads copy at once.
  constexpr int W_ROW = F::PIECES * WK, X_ROW = STEP / 8, X_BLOCK = F::BLOCK / 8;
  constexpr int W_RUN = THREADS / W_ROW, X_RUN = THREADS / X_ROW;
  constexpr int W_PIECES = F::ARRAYS * ROWS * W_ROW, STAGE = W_PIECES + COLUMNS * X_ROW;
  static_assert(MT % WK == 0 && W_RUN % 2 == 0 && X_RUN % 2 == 0, "whole shares, turned alike");
  static_assert(ROWS % W_RUN == 0 && COLUMNS % X_RUN == 0, "whole runs");
  __shared__ float rstd[COLUMNS], row_scale[ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int wr = warp % WR, wc = warp / WR % WC, wk = warp / (WR * WC);
  const int m0 = blockIdx.x * COLUMNS, n0 = blockIdx.y * ROWS, splits = gridDim.z;
  const int steps = (K + STEP - 1) / STEP, split = blockIdx.z;
  const int begin = steps * split / splits, end = steps * (split + 1) / splits;

  // What this thread copies: a piece of every W_RUN-th row of W, of every X_RUN-th of X. Rows beyond
  // N are never copied, and rows of X beyond M stay zero.
  const int w_row = threadIdx.x / W_ROW, w_piece = threadIdx.x % W_ROW;
  const int x_row = threadIdx.x / X_ROW, x_piece = threadIdx.x % X_ROW;
  const int w_rows = N - n0 - w_row, x_rows = M - m0 - x_row;
  const i64 w_bytes = weights.row_bytes();
  const i64 w_from = (n0 + w_row) * w_bytes + begin * (16 * W_ROW) + 16 * w_piece;
  const int w_to = (w_piece / F::PIECES * F::ARRAYS * ROWS + w_row) * F::PIECES +
                   (w_piece % F::PIECES ^ F::turn(w_row));
  const __half* x_from = x + static_cast<i64>(m0 + x_row) * K + begin * STEP + 8 * x_piece;
  const int x_to = W_PIECES + (x_piece / X_BLOCK * COLUMNS + x_row) * X_BLOCK +
                   (x_piece % X_BLOCK ^ F::x_turn(x_row));
  const u8* next_w[F::ARRAYS];
#pragma unroll
  for (int i = 0; i < F::ARRAYS; ++i) next_w[i] = weights.array(i) + w_from;
  const i32 w_run = static_cast<i32>(W_RUN * w_bytes), x_run = X_RUN * K;
  i32 left_w = static_cast<i32>(w_bytes) - begin * (16 * W_ROW) - 16 * w_piece;  // of a row, in bytes
  i32 left_x = K - begin * STEP - 8 * x_piece;
  const bool whole_w = n0 + ROWS <= N, whole_x = m0 + COLUMNS <= M;
  auto fetch_w = [&](uint4* stage) {
    // Beyond K the end of the row comes again: finite numbers, which meet zeros of X.
    const i32 back = left_w > 0 ? 0 : left_w - 16;
    auto copy = [&](bool all) {
#pragma unroll
      for (int i = 0; i < F::ARRAYS; ++i)
#pragma unroll
        for (int r = 0; r < ROWS; r += W_RUN)
          if (all || r < w_rows)
            cp_async16(stage + (i * ROWS + r) * F::PIECES + w_to,
                       next_w[i] + back + static_cast<i64>(r / W_RUN) * w_run);
    };
    if (whole_w)
      copy(true);
    else
      copy(false);
#pragma unroll
    for (int i = 0; i < F::ARRAYS; ++i) next_w[i] += 16 * W_ROW;
    left_w -= 16 * W_ROW;
  };
  auto fetch_x = [&](uint4* stage) {
    const bool zero = left_x <= 0;
    const __half* const from = zero ? x_from + left_x - 8 : x_from;  // the end of the row
    auto copy = [&](bool all) {
#pragma unroll
      for (int r = 0; r < COLUMNS; r += X_RUN)
        if (all || r < x_rows)
          cp_async16_or_zero(stage + r * X_BLOCK + x_to,
                             from + static_cast<i64>(r / X_RUN) * x_run, zero);
    };
    if (whole_x)
      copy(true);
    else
      copy(false);
    x_from += STEP;
    left_x -= STEP;
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
        if (r >= x_rows) shared[stage * STAGE + r * X_BLOCK + x_to] = zero16();
  for (int row = threadIdx.x; row < ROWS; row += THREADS)
    row_scale[row] = n0 + row < N ? weights.row_scale(n0 + row) : 1.f;
  const int row0 = n0 + 16 * MT * wr + g;
  typename F::Factors factors[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) weights.load(factors[i], row0 + 16 * i, N);
  wait_for_inputs();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (begin + stage < end) fetch_x(shared + stage * STAGE);
    cp_async_commit();
  }
  tile_scales<COLUMNS, WARPS>(f, rstd, m0, M, 1.f / K);

  float acc[MT][NT][4];
  clear(acc);
  typename F::Scales scales[MT];
  auto load_scales = [&](int step) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
      weights.load(scales[i], row0 + 16 * i, step * STEP + wk * F::BLOCK);
  };
  load_scales(begin);
  // Where this lane reads in a stage: its rows of W, and of X the piece of each 32 k.
  int w_at[PLANES], x_at[UNITS];
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane)
    w_at[plane] = F::template place<ROWS>(16 * MT * wr + g, t, plane) +
                  wk * F::ARRAYS * ROWS * F::PIECES;
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit)
    x_at[unit] = W_PIECES + (wk * COLUMNS + 8 * NT * wc + g) * X_BLOCK +
                 (F::piece(unit, t) ^ F::x_turn(g));
  u32 slot = 0;
  for (int step = begin; step < end; ++step) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this step is there, and the step before is done with its stage
    const uint4* const stage = shared + slot;
    const u32 before = slot ? slot - STAGE : (STAGES - 1) * STAGE;
    slot = slot == (STAGES - 1) * STAGE ? 0 : slot + STAGE;
    uint4 planes[MT][2][PLANES];
    typename F::Scales now[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      now[i] = scales[i];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
          planes[i][half][plane] = stage[w_at[plane] + (16 * i + 8 * half) * F::PIECES];
    }
    if (step + STAGES - 1 < end) {
      fetch_w(shared + before);
      fetch_x(shared + before);
    }
    cp_async_commit();
    if (F::GROUP && step + 1 < end) load_scales(step + 1);
    constexpr int GROUP = F::GROUP ? F::GROUP : UNITS;
#pragma unroll
    for (int first = 0; first < UNITS; first += GROUP) {
      float group[MT][NT][4];
      if (F::GROUP) clear(group);
      auto& into = F::GROUP ? group : acc;
#pragma unroll
      for (int unit = first; unit < first + GROUP; ++unit) {
        uint4 b[NT];
#pragma unroll
        for (int j = 0; j < NT; ++j) b[j] = stage[x_at[unit] + 8 * j * X_BLOCK];
        u32 a[MT][2][4];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            F::fragments(planes[i][half], now[i], factors[i], unit, half, a[i]);
        // Products into the same sums are far apart: each takes the latency of many.
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int i = 0; i < MT; ++i)
            mma16816(into[i][j], a[i][0][0], a[i][0][1], a[i][0][2], a[i][0][3], b[j].x, b[j].y);
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int i = 0; i < MT; ++i)
            mma16816(into[i][j], a[i][1][0], a[i][1][1], a[i][1][2], a[i][1][3], b[j].z, b[j].w);
      }
      if (F::GROUP)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int v = 0; v < 4; ++v) {
            const float scale = F::scale(now[i], first / GROUP, v / 2);
#pragma unroll
            for (int j = 0; j < NT; ++j) acc[i][j][v] = fmaf(scale, group[i][j][v], acc[i][j][v]);
          }
    }
  }
  cp_async_wait<0>();
  __syncthreads();

  // The warps of a row's K share its tiles: each ends up with the whole sums of some.
  float own[OWN][NT][4];
  if (WK == 1) {
#pragma unroll
    for (int i = 0; i < OWN; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int v = 0; v < 4; ++v) own[i][j][v] = acc[i][j][v];
  } else {
    // [warp][row tile][n-tile][lane] 16 bytes
    float4* const parts = reinterpret_cast<float4*>(shared) + lane;
#pragma unroll
    for (int i = 0; i < MT; ++i)
      if (i / OWN != wk)
#pragma unroll
        for (int j = 0; j < NT; ++j)
          parts[((warp * MT + i) * NT + j) * 32] =
              make_float4(acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MT; ++i)
      if (i / OWN == wk)
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          float total[4] = {};
#pragma unroll
          for (int from = 0; from < WK; ++from) {
            float four[4] = {acc[i][j][0], acc[i][j][1], acc[i][j][2], acc[i][j][3]};
            if (from != wk) {
              const float4 part = parts[(((warp + (from - wk) * WR * WC) * MT + i) * NT + j) * 32];
              four[0] = part.x, four[1] = part.y, four[2] = part.z, four[3] = part.w;
            }
#pragma unroll
            for (int v = 0; v < 4; ++v) total[v] += four[v];
          }
#pragma unroll
          for (int v = 0; v < 4; ++v) own[i % OWN][j][v] = total[v];
        }
  }
  if (splits > 1 && !merge<OWN, NT, THREADS>(own, workspace, tickets)) return;
  __syncthreads();  // nobody reads the parts any more

  float* const sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < OWN; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int row = 16 * (MT * wr + OWN * wk + i) + g + 8 * (v / 2);
        sums[(8 * (NT * wc + j) + 2 * t + v % 2) * PITCH + row] = own[i][j][v] * (F::UNIT * row_scale[row]);
      }
  __syncthreads();
  finish_sums<ROWS, COLUMNS, THREADS>(weights, x, f, sums, rstd, m0, n0, M, N, K);
}
