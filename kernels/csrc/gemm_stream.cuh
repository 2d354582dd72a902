// Linear layers for 1 to 16 rows, bound by reading W once.
//
// A CTA takes tile after tile of 16 rows, and its WARPS warps split K: warp w has the steps w,
// w + WARPS, ... of every tile. So a warp needs the same few pieces of X for all tiles: HELD steps
// of them stay in registers (HELD = 0: too many, they are read anew). Every lane copies its own
// share of W into a ring in shared memory with cp.async, STAGES steps ahead, and reads it back
// itself: bytes under way cost no registers, and the ring needs no barrier of the CTA. The first
// are on their way before the kernel waits for the one that makes its inputs.
//
// The sums of the warps meet in shared memory, in two buffers by turns, so a tile costs one barrier;
// a few warps, each time others, add them in the order of the warps and finish the outputs. A result
// depends on WARPS but on nothing else: not on M, NT, STAGES, HELD or the grid.
//
// How the weights are stored is the policy F:
//   CHUNKS            chunks of 32 in a step
//   STAGE_BYTES       what a step of 16 rows takes in the ring: lines of 128 bytes
//   SIDE_BYTES        what it takes beside the ring
//   GROUP_CHUNKS      chunks that share a scale; 0: no scales
//   UNIT              what all sums are multiplied by at the end
//   Cursor            a lane's place in W: at(tile) of it, moved by skip(cursor, tiles)
//   fetch(stage, side, cursor, step)      issues the copies of a step
//   read(part, stage, side, tile, step)   a lane's Part of it, back in registers
//   fragments(part, chunk, a)       the A operands of the chunk's two mma
//   HIGH              what the sums of the second of the two are multiplied by
//   scale(part, group, half), zero(part, group, half)   of row g (half 0) or g + 8 (1), the zero as
//                     fragments has codes
//   ONE               a pair of halves, 1 (0 without scales)
//   SHARES            whether lanes read what others have copied
//   x_offset(chunk, t)              where in a step the lane's 8 values of X are
//   row(n), whole(sum, row, x)      what a row needs at the end, and its sum with that
#pragma once
#include "gemm.cuh"

// Rows whose sums are all that there is to them.
struct PlainRows {
  struct Row {};
  __device__ __forceinline__ static Row row(i32) { return {}; }
  __device__ __forceinline__ static float whole(float sum, const Row&, const __half*) {
    return sum;
  }
};

constexpr int stream_residents(int warps) { return warps < 16 ? 16 / warps : 1; }

template <class F, int NT, int WARPS, int STAGES, int HELD>
DEV void stream_gemm(const F& weights, const __half* __restrict__ x, const Finish& f, i32 M, i32 N,
                     i32 K, u8* shared) {
  constexpr int COLUMNS = 8 * NT, FINISHERS = 4 * NT, PIECES = HELD > 0 ? HELD : 1;
  constexpr bool STAGED = HELD < 0;
  constexpr int CHUNKS = F::CHUNKS, STEP = 32 * CHUNKS;
  constexpr int GROUP = F::GROUP_CHUNKS ? F::GROUP_CHUNKS : CHUNKS, GROUPS = CHUNKS / GROUP;
  constexpr bool SCALED = F::GROUP_CHUNKS > 0;
  constexpr bool SUMS_HELD = SCALED && HELD > 0 && GROUPS == 1;
  constexpr int STAGE_BYTES = F::STAGE_BYTES + (STAGED ? 512 * CHUNKS * NT : 0);
  static_assert(WARPS >= FINISHERS && (WARPS & (WARPS - 1)) == 0, "a warp finishes 32 outputs");
  __shared__ float sums[2][WARPS][16 * COLUMNS];
  __shared__ float rstd[COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.x * COLUMNS, tiles = (N + 15) / 16, steps = (K + STEP - 1) / STEP;
  const int mine = steps > warp ? (steps - warp + WARPS - 1) / WARPS : 0;  // steps of a tile
  u8* const ring = shared + warp * (STAGES * STAGE_BYTES);
  u8* const sides = shared + WARPS * STAGES * STAGE_BYTES + warp * (STAGES * F::SIDE_BYTES);

  int ahead_tile = mine ? blockIdx.y : tiles, ahead_step = warp;
  typename F::Cursor cursor = weights.at(blockIdx.y);
  // Staged, a lane's share of X lies behind that of W; rows beyond M are zero from the beginning.
  auto stage_x = [&](u8* stage, int step) {
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int m = m0 + 8 * j + g, k = step * STEP + F::x_offset(chunk, t);
        u8* place = stage + F::STAGE_BYTES + 512 * (chunk * NT + j) + 16 * lane;
        if (m < M && k < K)
          cp_async16(place, x + static_cast<i64>(m) * K + k);
        else if (m < M)
          *reinterpret_cast<uint4*>(place) = zero16();
      }
  };
  auto fetch = [&](u32 slot, bool with_x) {
    u8* const stage = ring + slot;
    if (ahead_tile < tiles) {
      weights.fetch(stage, sides + slot / STAGE_BYTES * F::SIDE_BYTES, cursor, ahead_step);
      if (STAGED && with_x) stage_x(stage, ahead_step);
      if (HELD != 1) ahead_step += WARPS;
      if (HELD == 1 || ahead_step >= steps) {
        ahead_step = warp;
        ahead_tile += gridDim.y;
        weights.skip(cursor, gridDim.y);
      }
    }
    cp_async_commit();
  };
  launch_dependents();
#pragma unroll 1  // what runs once should be short: every launch reads its instructions anew
  for (int stage = 0; stage < STAGES; ++stage) fetch(stage * STAGE_BYTES, false);
  const float share = 1.f / K;
  wait_for_inputs();
  if (STAGED) {
    int tile = mine ? blockIdx.y : tiles, step = warp;
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      u8* const to = ring + stage * STAGE_BYTES;
#pragma unroll
      for (int i = 0; i < CHUNKS * NT; ++i)
        if (m0 + 8 * (i % NT) + g >= M)
          *reinterpret_cast<uint4*>(to + F::STAGE_BYTES + 512 * i + 16 * lane) = zero16();
      if (tile < tiles) stage_x(to, step);
      cp_async_commit();
      step += WARPS;
      if (step >= steps) step = warp, tile += gridDim.y;
    }
  }

  // Rows beyond M and columns beyond K are zero.
  typedef uint4 Values[CHUNKS][NT];
  auto load_x = [&](uint4 (&values)[NT], int step, int chunk) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const int m = m0 + 8 * j + g, k = step * STEP + F::x_offset(chunk, t);
      values[j] = zero16();
      if (m < M && k < K)
        values[j] = ld_cg(reinterpret_cast<const uint4*>(x + static_cast<i64>(m) * K + k));
    }
  };
  // The sum of x that a zero point multiplies: every row of the product of ones and x.
  auto sum_x = [&](float (&totals)[NT][4], const uint4 (&values)[NT]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      mma16816(totals[j], F::ONE, F::ONE, F::ONE, F::ONE, values[j].x, values[j].z);
      mma16816(totals[j], F::ONE, F::ONE, F::ONE, F::ONE, values[j].y, values[j].w);
    }
  };
  Values values[PIECES];
  float x_sums[PIECES][NT][4];
#pragma unroll
  for (int p = 0; p < PIECES && !STAGED; ++p)
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
      load_x(values[p][chunk], warp + p * WARPS, chunk);
  row_scales<COLUMNS, WARPS>(f, rstd, m0, M, share);
  if (SUMS_HELD)
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
      clear(x_sums[p]);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk)
        sum_x(x_sums[p], values[p][chunk]);
    }

  u32 slot = 0;
  int first = 0;  // of the warps that finish this tile
  for (int tile = blockIdx.y, buffer = 0; tile < tiles; tile += gridDim.y, buffer ^= 1) {
    // What the outputs need besides the sums is on its way early.
    const int rank = (warp - first) & (WARPS - 1);
    const bool finishes = rank < FINISHERS && m0 + 2 * rank < M;
    bool valid = false;
    float before = 0.f, gamma = 0.f, bias = 0.f;
    typename F::Row end = {};
    if (finishes) {
      const int m = m0 + 2 * rank + lane / 16, n = 16 * tile + lane % 16;
      valid = m < M && n < N;
      if (valid) end = weights.row(n);
      if (valid && f.bias) bias = f.bias[n];
      if (valid && f.epilogue == RESIDUAL) {
        before = ld_cg(f.residual + static_cast<i64>(m) * N + n);
        gamma = __half2float(f.gamma[n]);
      }
    }

    float acc[2][NT][4];  // without scales one chain for each mma of a chunk
    clear(acc);
    // Multiplies a step; without HELD each chunk of x makes room for that of `next`.
    auto advance = [&](Values& b, float (&totals)[NT][4], int step, int next) {
      cp_async_wait<STAGES - 1>();
      if (F::SHARES) __syncwarp();
      typename F::Part part;
      u8* const stage = ring + slot;
      weights.read(part, stage, sides + slot / STAGE_BYTES * F::SIDE_BYTES, tile, step);
      if (F::SHARES) __syncwarp();
      if (STAGED)
#pragma unroll
        for (int i = 0; i < CHUNKS * NT; ++i)
          b[i / NT][i % NT] =
              *reinterpret_cast<const uint4*>(stage + F::STAGE_BYTES + 512 * i + 16 * lane);
      fetch(slot, true);
      slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
      opaque(slot);  // one place in the ring to move, not one for each address in it
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        float group[2][NT][4];
        if (SCALED) clear(group);
        if (SCALED && !SUMS_HELD) clear(totals);
        auto& into = SCALED ? group : acc;
#pragma unroll
        for (int chunk = GROUP * i; chunk < GROUP * (i + 1); ++chunk) {
          u32 a[2][4];
          weights.fragments(part, chunk, a);
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            const uint4 four = b[chunk][j];
            mma16816(into[0][j], a[0][0], a[0][1], a[0][2], a[0][3], four.x, four.z);
            mma16816(into[1][j], a[1][0], a[1][1], a[1][2], a[1][3], four.y, four.w);
          }
          if (SCALED && !SUMS_HELD) sum_x(totals, b[chunk]);
          if (HELD == 0) load_x(b[chunk], next, chunk);
        }
        if (SCALED)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float scale = weights.scale(part, i, half), zero = weights.zero(part, i, half);
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
              for (int v = 0; v < 2; ++v) {
                const int e = 2 * half + v;
                const float codes = fmaf(group[1][j][e], F::HIGH, group[0][j][e]);
                acc[0][j][e] = fmaf(scale, fmaf(-zero, totals[j][v], codes), acc[0][j][e]);
              }
          }
      }
    };
    if (HELD > 0) {
#pragma unroll
      for (int p = 0; p < HELD; ++p)
        if (p < mine) advance(values[p], x_sums[p], warp + p * WARPS, 0);
    } else {
      const int start = tile + gridDim.y < tiles ? warp : steps;  // of the next tile; steps: none
      for (int step = warp; step < steps; step += WARPS)
        advance(values[0], x_sums[0], step, step + WARPS < steps ? step + WARPS : start);
    }
    // A pair of columns fills a line of 32, turned so that neither side meets itself in a bank.
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v)
        sums[buffer][warp][128 * j + 32 * t + ((16 * (v % 2) + 8 * (v / 2) + g + 8 * t) & 31)] =
            SCALED ? acc[0][j][v] : acc[0][j][v] + acc[1][j][v];
    __syncthreads();
    first += FINISHERS + 1;  // odd, for warps four apart share a scheduler
    if (!finishes) continue;

    const int row = lane % 16, column = 2 * rank + lane / 16, m = m0 + column, n = 16 * tile + row;
    const i64 at = static_cast<i64>(m) * N + n;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w)
      sum += sums[buffer][w][32 * rank + ((lane + 8 * rank) & 31)];
    sum = weights.whole(sum * F::UNIT, end, x + static_cast<i64>(m) * K);
    if (f.epilogue == RESIDUAL) {
      const float r = valid ? before + (sum + bias) : 0.f;
      float square = r * r;
#pragma unroll
      for (int offset = 8; offset; offset >>= 1)
        square += __shfl_xor_sync(FULL_WARP, square, offset);
      if (valid) {
        f.residual[at] = r;
        static_cast<__half*>(f.out)[at] = saturate_half(r * gamma);
        if (row == 0) f.sumsq_out[static_cast<i64>(m) * tiles + tile] = square;
      }
      continue;
    }
    const float value = sum * rstd[column] + bias;
    if (f.epilogue == SWIGLU) {
      const float up = __shfl_xor_sync(FULL_WARP, value, 8);
      if (valid && row < 8)
        static_cast<__half*>(f.out)[static_cast<i64>(m) * (N / 2) + (8 * tile + row)] =
            saturate_half(silu(value) * up);
    } else if (valid) {
      if (f.epilogue == LOGITS)
        static_cast<float*>(f.out)[at] = value;
      else
        static_cast<__half*>(f.out)[at] = saturate_half(value);
    }
  }
}
