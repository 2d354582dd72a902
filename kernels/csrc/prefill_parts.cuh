// Where the tokens of a tile of rows are cut into parts, each with a CTA of its own: what prefill
// kernels leave for each other, and the last one's merge.
#pragma once
#include "kv_convert.cuh"

// int8 only: weights carry their token's V scale, for a V of halves that carried it would be rounded
// once more, or overflow. Half must hold 2^slack * VALUE_LIFT * scale: the largest scale is 516
// (what finite halves quantise to), the smallest, 2^-14, shall keep clear of subnormals. So the lift
// is 2^4, and the slack less than elsewhere.
constexpr float VALUE_LIFT = 16.f;

// A pair of V scales as weights are multiplied by them: times VALUE_LIFT.
DEV u32 lifted(u32 scales) { return h2u(__hmul2(u2h(scales), u2h(0x4C004C00u))); }

// log2 of what a score may exceed the reference by.
template <bool SCALED>
constexpr float SLACK = SCALED ? 2.f : 8.f;

// What sums of weights times V are still to be multiplied by.
template <int FORMAT>
DEV float value_gain() {
  using Traits = KvTraits<FORMAT>;
  return Traits::SCALED ? 1.f / VALUE_LIFT : code_gain<Traits::V_CODE>();
}

// Two elements of the result. int8 codes may stand for a little more than the largest half.
template <bool SCALED>
DEV u32 result_pair(float low, float high) {
  return SCALED ? saturate_half2(low, high) : pack_half2(low, high);
}

// What a CTA of a prefill kernel computes, from the plan's int4 {span, first packed row, first and
// end of its tokens in units of PART_UNIT (two 16-bit numbers), part}.
constexpr int PART_UNIT = 128;
struct PrefillJob {
  int span, row, begin, end;
  int part;  // -1: all tokens; or first partial << 8 | index << 4 | parts - 1
};

DEV PrefillJob prefill_job(const int4& tile) {
  return {tile.x, tile.y, (tile.z & 0xFFFF) * PART_UNIT,
          static_cast<int>(static_cast<u32>(tile.z) >> 16) * PART_UNIT, tile.w};
}

// Each of THREADS threads has MT times N accumulators of 4 as mma.m16n8k16 has them (the last two
// for a second row), and for these rows the reference of the exponents and the sum of weights.
// Stores them; the last CTA of a tile takes all parts together, in their order, and gets true.
// `partials`: float4 [partials, kv_heads, MT (N + 1), THREADS]; `sync` is a barrier of the threads.
template <int MT, int N, int THREADS, typename Sync>
DEV bool merge_parts(float (&o)[MT][N][4], float (&top)[MT][2], float (&sum)[MT][2], float4* partials,
                     int* tickets, int part, int kv_head, int kv_heads, int thread, float scale,
                     int* shared, Sync sync) {
  constexpr int RECORD = MT * (N + 1) * THREADS;
  const int first = part >> 8, index = part >> 4 & 15, parts = (part & 15) + 1;
  float4* const here = partials + (static_cast<i64>(first) * kv_heads + kv_head) * RECORD + thread;
  const i64 stride = static_cast<i64>(kv_heads) * RECORD;
  float4* mine = here + index * stride;
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int n = 0; n < N; n++)
      mine[(m * (N + 1) + n) * THREADS] =
          make_float4(o[m][n][0], o[m][n][1], o[m][n][2], o[m][n][3]);
    mine[(m * (N + 1) + N) * THREADS] = make_float4(top[m][0], top[m][1], sum[m][0], sum[m][1]);
  }
  sync();
  if (thread == 0) *shared = take_ticket(tickets + first * kv_heads + kv_head);
  sync();
  if (*shared != parts - 1) return false;
  if (thread == 0) tickets[first * kv_heads + kv_head] = 0;
#pragma unroll
  for (int m = 0; m < MT; m++) {
    const float4* const ends = here + (m * (N + 1) + N) * THREADS;
    top[m][0] = top[m][1] = -infinity();
    for (int i = 0; i < parts; i++) {
      const float4 end = ld_cg(ends + i * stride);
      top[m][0] = fmaxf(top[m][0], end.x), top[m][1] = fmaxf(top[m][1], end.y);
    }
    sum[m][0] = sum[m][1] = 0.f;
#pragma unroll
    for (int n = 0; n < N; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.f;
    for (int i = 0; i < parts; i++) {
      const float4 end = ld_cg(ends + i * stride);
      const float low = ex2((end.x - top[m][0]) * scale), high = ex2((end.y - top[m][1]) * scale);
      sum[m][0] += low * end.z, sum[m][1] += high * end.w;
      const float4* const from = here + m * (N + 1) * THREADS + i * stride;
#pragma unroll
      for (int n = 0; n < N; n++) {
        const float4 x = ld_cg(from + n * THREADS);
        o[m][n][0] += low * x.x, o[m][n][1] += low * x.y;
        o[m][n][2] += high * x.z, o[m][n][3] += high * x.w;
      }
    }
  }
  return true;
}
