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
//   GROUP_CHUNKS      chunks that share a scale; 0: no scales
//   UNIT              what all sums are multiplied by at the end
//   Cursor            a lane's place in W, at its warp's first step: at(tile) of it, moved by
//                     skip(cursor, tiles)
//   fetch(stage, cursor, step, ahead)     issues the copies of a step, `ahead` steps from there
//   read(part, stage, tile, step)         a lane's Part of it, back in registers
//   fragments(part, chunk, a)       the A operands of the chunk's two mma
//   Shifts, shifts(tile)            what fragments of a tile need besides, read a tile ahead
//   shift(now, a)                   applies it
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
  struct Shifts {};
  __device__ __forceinline__ static Shifts shifts(i32) { return {}; }
  template <int N>
  __device__ __forceinline__ static void shift(const Shifts&, u32 (&)[N][2][4]) {}
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
  // Steps that are decoded before the inputs are there: for more rows of X registers do not suffice.
  constexpr int EARLY = !F::DECODED || STAGED || NT > 1 ? 0 : HELD > 0 ? HELD : 1;
  constexpr int STAGE_BYTES = F::STAGE_BYTES + (STAGED ? 512 * CHUNKS * NT : 0);
  static_assert(WARPS >= FINISHERS && (WARPS & (WARPS - 1)) == 0, "a warp finishes 32 outputs");
  // So a stage always holds the same of a warp's steps, of which there are HELD or, above 1, fewer.
  static_assert(HELD <= 2 && (HELD <= 0 || STAGES % HELD == 0), "a stage for each step");
  __shared__ float sums[2][WARPS][16 * COLUMNS];
  __shared__ float rstd[COLUMNS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int m0 = blockIdx.x * COLUMNS, tiles = (N + 15) / 16, steps = (K + STEP - 1) / STEP;
  const int mine = steps > warp ? (steps - warp + WARPS - 1) / WARPS : 0;  // steps of a tile
  u8* const ring = shared + warp * (STAGES * STAGE_BYTES);

  int ahead_tile = mine ? blockIdx.y : tiles, ahead_turn = 0;
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
  // `turn`: which of the warp's steps.
  auto fetch = [&](u32 slot, int turn, bool with_x) {
    u8* const stage = ring + slot;
    if (ahead_tile < tiles) {
      weights.fetch(stage, cursor, warp + turn * WARPS, turn * WARPS);
      if (STAGED && with_x) stage_x(stage, warp + turn * WARPS);
      if (turn + 1 == HELD || turn + 1 == mine) {
        ahead_tile += gridDim.y;
        weights.skip(cursor, gridDim.y);
      }
    }
    cp_async_commit();
  };
  launch_dependents();
#pragma unroll 1  // what runs once should be short: every launch reads its instructions anew
  for (int stage = 0; stage < STAGES; ++stage) {
    fetch(stage * STAGE_BYTES, ahead_turn, false);
    if (++ahead_turn >= mine) ahead_turn = 0;
  }
  typename F::Shifts next_shifts = weights.shifts(blockIdx.y);
  const float share = 1.f / K;

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
  // The kernel ahead has done its part: what it wrote is read from here on.
  auto begin = [&] {
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
#pragma unroll
    for (int p = 0; p < PIECES && !STAGED; ++p)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk)
        load_x(values[p][chunk], warp + p * WARPS, chunk);
  };
  // The rest of what is done once: every load is under way before one is waited for.
  auto begun = [&] {
    row_scales<COLUMNS, WARPS>(f, rstd, m0, M, share);
    if (SUMS_HELD)
#pragma unroll
      for (int p = 0; p < PIECES; ++p) {
        clear(x_sums[p]);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
          sum_x(x_sums[p], values[p][chunk]);
      }
  };

  u32 slot = 0;
  int first = 0;  // of the warps that finish this tile
  // The first weights are decoded before the inputs are there, if registers are plenty.
  bool waiting = EARLY > 0;
  if (!EARLY) {
    begin();
    begun();
  }
  for (int tile = blockIdx.y, buffer = 0; tile < tiles; tile += gridDim.y, buffer ^= 1) {
    const int rank = (warp - first) & (WARPS - 1);
    const bool finishes = rank < FINISHERS && m0 + 2 * rank < M;
    const int end_m = m0 + 2 * rank + lane / 16, end_n = 16 * tile + lane % 16;
    const bool valid = finishes && end_m < M && end_n < N;
    float before = 0.f, gamma = 0.f, bias = 0.f;
    typename F::Row end = {};
    // What the outputs need besides the sums is on its way early.
    if (valid) end = weights.row(end_n);
    if (valid && f.bias) bias = f.bias[end_n];
    if (valid && f.epilogue == RESIDUAL) gamma = __half2float(f.gamma[end_n]);
    auto load_residual = [&] {
      if (valid && f.epilogue == RESIDUAL)
        before = ld_cg(f.residual + static_cast<i64>(end_m) * N + end_n);
    };
    if (!waiting) load_residual();

    const typename F::Shifts shifts = next_shifts;
    next_shifts = weights.shifts(tile + gridDim.y);
    float acc[2][NT][4];  // without scales one chain for each mma of a chunk
    clear(acc);
    // A step as it is multiplied.
    struct Taken {
      typename F::Part part;
      u32 a[SCALED ? 1 : CHUNKS][2][4];
    };
    auto take = [&](Taken& taken, Values& b, int turn, int step) {
      cp_async_wait<STAGES - 1>();
      if (F::SHARES) __syncwarp();
      u8* const stage = ring + slot;
      weights.read(taken.part, stage, tile, step);
      if (F::SHARES) __syncwarp();
      if (STAGED)
#pragma unroll
        for (int i = 0; i < CHUNKS * NT; ++i)
          b[i / NT][i % NT] =
              *reinterpret_cast<const uint4*>(stage + F::STAGE_BYTES + 512 * i + 16 * lane);
      if (HELD > 0) {
        fetch(slot, turn, true);
      } else {
        fetch(slot, ahead_turn, true);
        if (++ahead_turn >= mine) ahead_turn = 0;
      }
      slot = slot == (STAGES - 1) * STAGE_BYTES ? 0 : slot + STAGE_BYTES;
      opaque(slot);  // one place in the ring to move, not one for each address in it
      if constexpr (!SCALED) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
          weights.fragments(taken.part, chunk, taken.a[chunk]);
        weights.shift(shifts, taken.a);
      }
    };
    // Without HELD each chunk of x makes room for that of `next`.
    auto multiply = [&](Taken& taken, Values& b, float (&totals)[NT][4], int next) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        float group[2][NT][4];
        if (SCALED) clear(group);
        if (SCALED && !SUMS_HELD) clear(totals);
        auto& into = SCALED ? group : acc;
#pragma unroll
        for (int chunk = GROUP * i; chunk < GROUP * (i + 1); ++chunk) {
          auto& a = taken.a[SCALED ? 0 : chunk];
          if (SCALED) weights.fragments(taken.part, chunk, a);
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
            const float scale = weights.scale(taken.part, i, half);
            const float zero = weights.zero(taken.part, i, half);
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
    auto wait = [&] {
      if (!waiting) return;
      waiting = false;
      begin();
      load_residual();
      begun();
    };
    if constexpr (HELD > 0) {
      Taken taken[HELD];
#pragma unroll
      for (int p = 0; p < EARLY; ++p)
        if (p < mine) take(taken[p], values[p], p, warp + p * WARPS);
      wait();
#pragma unroll
      for (int p = 0; p < HELD; ++p)
        if (p < mine) {
          if (p >= EARLY) take(taken[p], values[p], p, warp + p * WARPS);
          multiply(taken[p], values[p], x_sums[p], 0);
        }
    } else {
      const int start = tile + gridDim.y < tiles ? warp : steps;  // of the next tile; steps: none
      int step = warp;
      do {
        Taken taken;
        if (step < steps) take(taken, values[0], 0, step);
        wait();
        if (step < steps)
          multiply(taken, values[0], x_sums[0], step + WARPS < steps ? step + WARPS : start);
        step += WARPS;
      } while (step < steps);
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

    const int row = lane % 16, column = 2 * rank + lane / 16, m = end_m, n = end_n;
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
