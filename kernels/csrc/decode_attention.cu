// Paged GQA decode attention: one query row a sequence against its paged KV cache.
//
// Grid (kv_heads, rows, partitions); one CTA = one KV head of one sequence over `partition`
// tokens. Its WARPS warps take the partition's 16-token tiles in turn:
//
//   S^T [16 tokens x 8 heads] = K Q^T      K is the A operand, as it lies in the pool
//   O^T [16 dims   x 8 heads] = V^T P^T    V likewise, byte-permuted between two tokens
//
// so the query heads of a group are the columns of mma.m16n8k16: COLUMNS = 1 tile of 8 for up to 8
// heads a KV head, 2 for up to 16. Idle columns compute with a zero query and are not written.
//
// Loads. A lane's fragments are whole runs of a row ("grains" of 16, 8 or 4 bytes): the order of
// the contracted dimension is free as long as both operands share it. Every lane copies its own
// grains into a ring in shared memory with cp.async, STAGES tiles ahead, and reads them back
// itself. So bytes under way cost no registers, and the ring needs no barrier and has no bank
// conflicts. (Scales are the exception: four lanes copy what all read, hence the __syncwarp.)
// With BULK (Hopper) one lane asks the copy engine for a warp's whole tile, rows as they lie, and
// the warp waits on a barrier a stage: no lane spends instructions or load slots on the copies.
// There a launch may begin while the kernel ahead still writes q and the newest K and V.
// Offsets of a lane are opaque to the compiler, or it would work out every address anew instead
// of adding a constant in the instruction.
//
// Lane (g = lane / 4, t = lane % 4) holds of K rows g and g + 8, four lanes side by side in a row;
// of V rows 2t, 2t + 1, 2t + 8 and 2t + 9, eight lanes side by side.
//
// Merge. The warps of a CTA merge in shared memory. If the sequence has several partitions, each
// CTA leaves its unnormalised sum, its maximum and its weight in the workspace and takes a ticket;
// the one that takes the last merges all in ascending order, so the result does not depend on who
// came last, and resets the ticket for the next launch.
#include "bulk_copy.cuh"
#include "kv_convert.cuh"

constexpr int TILE = 16;             // tokens
constexpr int MAX_PARTITIONS = 128;  // of one sequence; kernels/attention.py says so too
constexpr u32 FEW_CTAS = 64;
constexpr float LOWEST = -1e30f;     // below any score, and finite: differences stay numbers
// Weights of int8 carry their token's V scale. 2^6 keeps the smallest scale (2^-14) clear of
// half's subnormals, and the largest that finite halves quantise to (516) clear of its end.
constexpr float SCALE_LIFT = 64.f;

// Where a warp's ring keeps a tile, and the grains of its rows.
template <int FORMAT, int D, int STAGES, bool BULK>
struct Ring {
  using Kv = KvTraits<FORMAT>;
  static constexpr int K_ROW = D * Kv::K_BYTES;  // bytes
  static constexpr int V_ROW = D * Kv::V_BYTES;
  // Bytes a lane takes at once: the widest that divides a row between 4 (K) or 8 (V) lanes.
  static constexpr int K_GRAIN = K_ROW % 64 == 0 ? 16 : 8;
  static constexpr int V_GRAIN = V_ROW % 128 == 0 ? 16 : V_ROW % 64 == 0 ? 8 : 4;
  static constexpr int K_GRAINS = K_ROW / (4 * K_GRAIN);
  static constexpr int V_GRAINS = V_ROW / (8 * V_GRAIN);
  static constexpr int V_AT = TILE * K_ROW;
  static constexpr int SCALES_AT = V_AT + TILE * V_ROW;
  static constexpr int STAGE_BYTES = SCALES_AT + (Kv::SCALED ? 4 * TILE : 0);
  static constexpr int WARP_BYTES = STAGES * STAGE_BYTES;

  // Grains that one lane has, from its first: of K rows g and g + 8, of V rows 2t, 2t + 1, 2t + 8
  // and 2t + 9.
  DEV int k_at(int row, int grain) {
    return BULK ? 8 * row * K_ROW + grain * 4 * K_GRAIN
                : (row * K_GRAINS + grain) * 32 * K_GRAIN;
  }
  DEV int v_at(int row, int grain) {
    return BULK ? ((row & 1) + 8 * (row >> 1)) * V_ROW + grain * 8 * V_GRAIN
                : (row * V_GRAINS + grain) * 32 * V_GRAIN;
  }
  // A lane's first grains of K and of V, from the tile's.
  DEV int k_lane(int lane) {
    return BULK ? (lane >> 2) * K_ROW + (lane & 3) * K_GRAIN : lane * K_GRAIN;
  }
  DEV int v_lane(int lane) {
    return BULK ? (lane & 3) * 2 * V_ROW + (lane >> 2) * V_GRAIN : lane * V_GRAIN;
  }
};

template <int BYTES>
DEV void load_words(u32 (&words)[BYTES / 4], const u8* p) {
  if constexpr (BYTES == 16) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (BYTES == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = *reinterpret_cast<const u32*>(p);
  }
}

// One query row's B fragments, in the order of contraction that K's grains have.
template <int FORMAT, int D>
DEV void load_query(u32 (&b)[D / 16][2], const __half* q, int t) {
  using R = Ring<FORMAT, D, 1, false>;
  if constexpr (R::Kv::K_CODE == CODE_F16) {
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const uint4 v = ld_cg(reinterpret_cast<const uint4*>(q + i * 32 + 8 * t));
      b[2 * i][0] = v.x, b[2 * i][1] = v.y;
      b[2 * i + 1][0] = v.z, b[2 * i + 1][1] = v.w;
    }
  } else {
    constexpr int WORDS = R::K_GRAIN / 4;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      const int dim = (i / WORDS) * 4 * R::K_GRAIN + R::K_GRAIN * t + 4 * (i % WORDS);
      half_operands<R::Kv::K_CODE>(ld_cg(reinterpret_cast<const uint2*>(q + dim)), b[i][0], b[i][1]);
    }
  }
}

// Scores of a tile: s[c] is rows g and g + 8 of columns 8c + 2t and 8c + 2t + 1. `k` is the
// lane's first grain. Two sums by turns: one would be a chain of D / 16 dependent instructions.
template <class R, int D, int COLUMNS>
DEV void score_tile(float (&s)[COLUMNS][4], const u8* k, const u32 (&q)[COLUMNS][D / 16][2]) {
  constexpr int WORDS = R::K_GRAIN / 4;
  float sums[2][COLUMNS][4];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[0][c][i] = sums[1][c][i] = 0.f;
#pragma unroll
  for (int i = 0; i < R::K_GRAINS; i++) {
    u32 low[WORDS], high[WORDS];  // rows g and g + 8
    load_words<R::K_GRAIN>(low, k + R::k_at(0, i));
    load_words<R::K_GRAIN>(high, k + R::k_at(1, i));
    if constexpr (R::Kv::K_CODE == CODE_F16) {
#pragma unroll
      for (int w = 0; w < WORDS; w += 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const int step = (i * WORDS + w) / 2;
          mma16816(sums[step % 2][c], low[w], high[w], low[w + 1], high[w + 1], q[c][step][0],
                   q[c][step][1]);
        }
    } else {
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        const int step = i * WORDS + w;
        u32 a0, a1, a2, a3;
        code_operands<R::Kv::K_CODE>(low[w], a0, a2);
        code_operands<R::Kv::K_CODE>(high[w], a1, a3);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          mma16816(sums[step % 2][c], a0, a1, a2, a3, q[c][step][0], q[c][step][1]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[c][i] = sums[0][c][i] + sums[1][c][i];
}

// The first dim of accumulator j of a lane; a pair (d, d + 1) of dims is in one accumulator.
template <class R>
DEV int accumulator_dim(int j, int g) {
  constexpr int WORDS = R::V_GRAIN / 4;
  if constexpr (R::Kv::V_CODE == CODE_F16) {
    return (j / WORDS) * 4 * R::V_GRAIN + g * (R::V_GRAIN / 2) + 2 * (j % WORDS);
  } else {
    return (j / 2 / WORDS) * 8 * R::V_GRAIN + g * R::V_GRAIN + 4 * (j / 2 % WORDS) + 2 * (j % 2);
  }
}

// V rows from `valid` on become zero: 0 * NaN is not 0, and nothing says what lies beyond a
// sequence's end. A lane clears its own grains.
template <class R>
DEV void clear_tail(u8* v, int valid, int t) {
#pragma unroll
  for (int r = 0; r < 4; r++) {
    if (2 * t + (r & 1) + 8 * (r >> 1) < valid) continue;
#pragma unroll
    for (int i = 0; i < R::V_GRAINS; i++)
#pragma unroll
      for (int w = 0; w < R::V_GRAIN; w += 4)
        *reinterpret_cast<u32*>(v + R::v_at(r, i) + w) = 0;
  }
}

// o += V^T p. `v` is the lane's first grain, `p` are B fragments of the weights.
template <class R, int D, int COLUMNS>
DEV void accumulate_tile(float (&o)[D / 16][COLUMNS][4], const u8* v,
                         const u32 (&p)[COLUMNS][2]) {
  constexpr int WORDS = R::V_GRAIN / 4;
#pragma unroll
  for (int i = 0; i < R::V_GRAINS; i++) {
    u32 v0[WORDS], v1[WORDS], v2[WORDS], v3[WORDS];  // rows 2t, 2t + 1, 2t + 8, 2t + 9
    load_words<R::V_GRAIN>(v0, v + R::v_at(0, i));
    load_words<R::V_GRAIN>(v1, v + R::v_at(1, i));
    load_words<R::V_GRAIN>(v2, v + R::v_at(2, i));
    load_words<R::V_GRAIN>(v3, v + R::v_at(3, i));
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if constexpr (R::Kv::V_CODE == CODE_F16) {
        const u32 a0 = prmt(v0[w], v1[w], 0x5410), a1 = prmt(v0[w], v1[w], 0x7632);
        const u32 a2 = prmt(v2[w], v3[w], 0x5410), a3 = prmt(v2[w], v3[w], 0x7632);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          mma16816(o[i * WORDS + w][c], a0, a1, a2, a3, p[c][0], p[c][1]);
      } else {
        u32 low[4], high[4];
        code_columns<R::Kv::V_CODE>(v0[w], v1[w], low);
        code_columns<R::Kv::V_CODE>(v2[w], v3[w], high);
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
          for (int c = 0; c < COLUMNS; c++)
            mma16816(o[2 * (i * WORDS + w) + x][c], low[2 * x], low[2 * x + 1], high[2 * x],
                     high[2 * x + 1], p[c][0], p[c][1]);
      }
    }
  }
}

// Copies a tile to a lane's grains. `k` and `v` are the lane's first grains in global memory.
template <class R>
DEV void copy_tile(u8* k_to, u8* v_to, const u8* k, const u8* v) {
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < R::K_GRAINS; i++)
      cp_async<R::K_GRAIN>(k_to + R::k_at(r, i), k + 8 * r * R::K_ROW + i * 4 * R::K_GRAIN);
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int i = 0; i < R::V_GRAINS; i++)
      cp_async<R::V_GRAIN>(v_to + R::v_at(r, i),
                           v + ((r & 1) + 8 * (r >> 1)) * R::V_ROW + i * 8 * R::V_GRAIN);
}

template <int FORMAT, int D, int COLUMNS, int WARPS, int STAGES, bool BULK>
__global__ void __launch_bounds__(32 * WARPS, (COLUMNS == 1 ? 16 : BULK ? 8 : 12) / WARPS)
    paged_decode(__half* __restrict__ out,            // [rows, heads, D]
                 float* __restrict__ partial_out,     // [rows, kv_heads, partitions, group, D]
                 float2* __restrict__ partial_ml,     // the same without D: maximum (log2), weight
                 int* __restrict__ tickets,           // [rows, kv_heads], zero between launches
                 const __half* __restrict__ q,        // [rows, heads, D], rows q_stride apart
                 const u8* __restrict__ storage,      // [blocks, block_bytes]
                 const int* __restrict__ tables,      // [rows, table_columns]
                 const int* __restrict__ lens,        // [rows]; 0 = padding row: writes zeros
                 i64 block_bytes, i64 k_offset, i64 v_offset, i64 scale_offset,  // bytes
                 int q_stride, int table_stride, int table_columns, int group, int tiles_shift,
                 int partition, float scale_log2) {
  using R = Ring<FORMAT, D, STAGES, BULK>;
  constexpr int HEADS = 8 * COLUMNS, STRIDE = D + 4, THREADS = 32 * WARPS;
  // A weight may exceed 1 by 2^SLACK before the running maximum, and with it the accumulators,
  // follow: a vote instead of six shuffles for most tiles. Scaled weights need the room.
  constexpr float SLACK = R::Kv::SCALED ? 0.f : 6.f;
  extern __shared__ __align__(16) u8 shared[];
  __shared__ u64 all_barriers[WARPS][BULK ? STAGES : 1];
  __shared__ float warp_m[WARPS][HEADS], warp_l[WARPS][HEADS];
  __shared__ int is_last;

  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int g = lane >> 2, t = lane & 3;
  const int kv_head = blockIdx.x, row = blockIdx.y, part = blockIdx.z;
  const int kv_heads = gridDim.x, partitions = gridDim.z;
  auto& barriers = all_barriers[warp];
  // What follows may come early where most multiprocessors are idle, to fetch its weights. Elsewhere
  // its CTAs would crowd on those that are done first.
  const bool few = kv_heads * gridDim.y * partitions <= FEW_CTAS;
  if (few) launch_dependents();
  if constexpr (BULK) {
    if (lane < STAGES) bulk_barrier_init(&barriers[lane]);
    bulk_barriers_made();
  }
  wait_for_inputs();
  const int first_tile = part * (partition / TILE);
  const int* table = tables + (i64)row * table_stride;

  // Lane i holds the block of this warp's i-th next tile. Read before the length is known, to
  // wait for both at once; entries beyond the sequence are not used.
  auto load_blocks = [&](int nth) {
    const int at = (first_tile + warp + (nth + lane) * WARPS) >> tiles_shift;
    return at < table_columns ? ld_cg(table + at) : 0;
  };
  int blocks = load_blocks(0);
  // A length beyond the table would wait for partitions that the grid does not have.
  const int len = min(ld_cg(lens + row), table_columns * (TILE << tiles_shift));
  if (len <= 0 && part == 0) {
    __half* zeros = out + ((i64)row * kv_heads + kv_head) * group * D;
    for (int i = thread; i < group * D; i += THREADS) zeros[i] = __float2half_rn(0.f);
  }
  const int begin = part * partition;
  if (begin >= len) return;
  const int end = min(len, begin + partition);
  const int used = (len + partition - 1) / partition;
  const int tiles = (end - begin + TILE - 1) / TILE;
  const int mine = tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;

  // Where this lane copies from (first grains, or with BULK the tile's) in block 0 of the pool,
  // and where in stage 0 of the ring its grains are.
  const i64 head_rows = (i64)kv_head * (TILE << tiles_shift);
  const u8* k = storage + k_offset + (head_rows + (BULK ? 0 : g)) * R::K_ROW +
                (BULK ? 0 : t * R::K_GRAIN);
  const u8* v = storage + v_offset + (head_rows + (BULK ? 0 : 2 * t)) * R::V_ROW +
                (BULK ? 0 : g * R::V_GRAIN);
  const u32 ring_at = warp * R::WARP_BYTES;
  u32 k_to = ring_at + R::k_lane(lane);
  u32 v_to = ring_at + R::V_AT + R::v_lane(lane);
  opaque(k_to);
  opaque(v_to);
  const i64 scales_apart = (i64)kv_heads * (TILE << tiles_shift) * 2;  // K's from V's, bytes
  const u8* scales = storage + scale_offset + head_rows * 2 +
                     (BULK ? 0 : (lane >> 1 & 1) * scales_apart + 16 * (lane & 1));
  u8* ring = shared + ring_at;
  u8* scales_to = ring + R::SCALES_AT;

  auto request = [&](int nth, int stage, int stage_at) {
    if (nth < mine) {
      if (nth && nth % 32 == 0) blocks = load_blocks(nth);
      const u32 block = __shfl_sync(FULL_WARP, blocks, nth & 31);
      const int row0 = (first_tile + warp + nth * WARPS & (1 << tiles_shift) - 1) * TILE;
      const u64 at = (u64)block * (u32)block_bytes;  // attention.py: block_bytes < 2^31
      if constexpr (BULK) {
        if (lane == 0) {
          u64* barrier = &barriers[stage];
          bulk_expect(barrier, R::STAGE_BYTES);
          bulk_copy(ring + stage_at, k + at + row0 * R::K_ROW, R::V_AT, barrier);
          bulk_copy(ring + stage_at + R::V_AT, v + at + row0 * R::V_ROW, R::SCALES_AT - R::V_AT,
                    barrier);
          if constexpr (R::Kv::SCALED) {
            const u8* from = scales + at + 2 * row0;
            bulk_copy(scales_to + stage_at, from, 2 * TILE, barrier);
            bulk_copy(scales_to + stage_at + 2 * TILE, from + scales_apart, 2 * TILE, barrier);
          }
        }
      } else {
        copy_tile<R>(shared + k_to + stage_at, shared + v_to + stage_at, k + at + row0 * R::K_ROW,
                     v + at + row0 * R::V_ROW);
        if constexpr (R::Kv::SCALED) {
          // 16 K scales, then 16 V scales: four runs of 16 bytes.
          if (lane < 4) cp_async16(scales_to + stage_at + 16 * lane, scales + at + 2 * row0);
        }
      }
    }
    if constexpr (!BULK) cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) request(i, i, i * R::STAGE_BYTES);

  u32 qb[COLUMNS][D / 16][2];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    const int head = 8 * c + g;
    if (head < group) {
      load_query<FORMAT, D>(qb[c], q + (i64)row * q_stride + (kv_head * group + head) * D, t);
    } else {
#pragma unroll
      for (int i = 0; i < D / 16; i++) qb[c][i][0] = qb[c][i][1] = 0;
    }
  }

  float o[D / 16][COLUMNS][4], m[COLUMNS][2], l[COLUMNS][2];
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    m[c][0] = m[c][1] = LOWEST;
    l[c][0] = l[c][1] = 0.f;
#pragma unroll
    for (int j = 0; j < D / 16; j++) o[j][c][0] = o[j][c][1] = o[j][c][2] = o[j][c][3] = 0.f;
  }

  const float k_gain = scale_log2 * code_gain<R::Kv::K_CODE>();
  int valid = end - begin - warp * TILE;  // tokens from here; more than 16 if the tile is full
  int stage = 0, stage_at = 0;
  u32 parity = 0;
  for (int nth = 0; nth < mine; nth++, valid -= WARPS * TILE) {
    if constexpr (BULK) {
      bulk_wait(&barriers[stage], parity);
    } else {
      cp_async_wait<STAGES - 1>();
      if constexpr (R::Kv::SCALED) __syncwarp();
    }

    float s[COLUMNS][4];
    score_tile<R, D, COLUMNS>(s, shared + k_to + stage_at, qb);
    float k_scale[2] = {k_gain, k_gain}, v_scale[2] = {1.f, 1.f};  // of rows g and g + 8
    if constexpr (R::Kv::SCALED) {
      const __half* both = reinterpret_cast<const __half*>(scales_to + stage_at);
      k_scale[0] *= __half2float(both[g]);
      k_scale[1] *= __half2float(both[g + 8]);
      v_scale[0] = g < valid ? SCALE_LIFT * __half2float(both[TILE + g]) : 0.f;
      v_scale[1] = g + 8 < valid ? SCALE_LIFT * __half2float(both[TILE + g + 8]) : 0.f;
    }
    bool higher = false;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[c][i] = g + 8 * (i >> 1) < valid ? s[c][i] * k_scale[i >> 1] : LOWEST;
        higher |= s[c][i] > m[c][i & 1] + SLACK;
      }
    }
    if (__any_sync(FULL_WARP, higher)) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        float top[2] = {fmaxf(s[c][0], s[c][2]), fmaxf(s[c][1], s[c][3])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int x = 4; x < 32; x <<= 1)
            top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], x));
          top[i] = fmaxf(top[i], m[c][i]);
          const float factor = ex2(m[c][i] - top[i]);
          m[c][i] = top[i];
          l[c][i] *= factor;
#pragma unroll
          for (int j = 0; j < D / 16; j++) {
            o[j][c][i] *= factor;
            o[j][c][i + 2] *= factor;
          }
        }
      }
    }
    u32 p[COLUMNS][2];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[c][i] = ex2(s[c][i] - m[c][i & 1]);
        l[c][i & 1] += s[c][i];
        if constexpr (R::Kv::SCALED) s[c][i] *= v_scale[i >> 1];
      }
      p[c][0] = movm(pack_half2(s[c][0], s[c][1]));
      p[c][1] = movm(pack_half2(s[c][2], s[c][3]));
    }
    u8* values = shared + v_to + stage_at;
    if (valid < TILE) clear_tail<R>(values, valid, t);
    accumulate_tile<R, D, COLUMNS>(o, values, p);
    if constexpr (BULK || R::Kv::SCALED) __syncwarp();
    request(nth + STAGES, stage, stage_at);
    const bool wraps = stage_at == (STAGES - 1) * R::STAGE_BYTES;
    stage_at = wraps ? 0 : stage_at + R::STAGE_BYTES;
    if constexpr (BULK) {
      stage = wraps ? 0 : stage + 1;
      parity ^= wraps;
    }
  }

  if (!few) launch_dependents();
  // The ring's memory, all copies done, holds the warps' sums: [WARPS][HEADS][STRIDE].
  if constexpr (!BULK) cp_async_wait<0>();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);
  const float gain = R::Kv::SCALED ? 1.f / SCALE_LIFT : code_gain<R::Kv::V_CODE>();
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = 8 * c + 2 * t + i;
#pragma unroll
      for (int x = 4; x < 32; x <<= 1) l[c][i] += __shfl_xor_sync(FULL_WARP, l[c][i], x);
      if (g == 0) {
        warp_m[warp][head] = m[c][i];
        warp_l[warp][head] = l[c][i];
      }
      float* to = sums + (warp * HEADS + head) * STRIDE;
#pragma unroll
      for (int j = 0; j < D / 16; j++)
        *reinterpret_cast<float2*>(to + accumulator_dim<R>(j, g)) =
            make_float2(o[j][c][i] * gain, o[j][c][i + 2] * gain);
    }
  }
  __syncthreads();

  // From here a thread has runs of four dims of the group's output, THREADS apart.
  constexpr int RUNS = (HEADS * D / 4 + THREADS - 1) / THREADS;
  const i64 group_at = (i64)row * kv_heads + kv_head;
  __half* result = out + group_at * group * D;
  auto store = [&](int at, const float4& x) {
    // Saturating: int8 codes may stand for a little more than the largest half.
    const __half h[4] = {saturate_half(x.x), saturate_half(x.y), saturate_half(x.z),
                         saturate_half(x.w)};
    *reinterpret_cast<uint2*>(result + at) =
        make_uint2(half_bits(h[0]) | (u32)half_bits(h[1]) << 16,
                   half_bits(h[2]) | (u32)half_bits(h[3]) << 16);
  };
  auto add = [](float4& total, float factor, const float4& x) {
    total.x += factor * x.x, total.y += factor * x.y;
    total.z += factor * x.z, total.w += factor * x.w;
  };
  for (int at = 4 * thread; at < group * D; at += 4 * THREADS) {
    const int head = at / D, dim = at % D;
    float top = LOWEST, weight = 0.f, factor[WARPS];
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_m[w][head]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      factor[w] = ex2(warp_m[w][head] - top);
      weight += factor[w] * warp_l[w][head];
    }
    const float scale = used == 1 ? 1.f / weight : 1.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      add(total, factor[w] * scale,
          *reinterpret_cast<const float4*>(sums + (w * HEADS + head) * STRIDE + dim));
    if (used == 1) {
      store(at, total);
    } else {
      const i64 vector = (group_at * partitions + part) * group;
      *reinterpret_cast<float4*>(partial_out + vector * D + at) = total;
      if (dim == 0) partial_ml[vector + head] = make_float2(top, weight);
    }
  }
  if (used == 1) return;

  __syncthreads();
  if (thread == 0) {
    int* ticket = tickets + group_at;
    is_last = take_ticket(ticket) == used - 1;
    if (is_last) *ticket = 0;
  }
  __syncthreads();
  if (!is_last) return;

  // BATCH partitions of every run are under way at any time; those beyond the last are read as
  // the last, with a factor of zero.
  constexpr int BATCH = RUNS >= 4 ? 4 : RUNS >= 2 ? 8 : 16;
  const float* sources = partial_out + group_at * partitions * group * D;
  auto load = [&](int p, int at) {
    return ld_cg(reinterpret_cast<const float4*>(sources + (i64)min(p, used - 1) * group * D + at));
  };
  float4 loaded[RUNS][BATCH], total[RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const int at = 4 * (thread + r * THREADS);
    total[r] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (at < group * D)
#pragma unroll
      for (int u = 0; u < BATCH; u++) loaded[r][u] = load(u, at);
  }
  // Factors of the partitions, [group][MAX_PARTITIONS], where the sums were; the whole weight is
  // divided out of them.
  float* factors = sums;
  const float2* ml = partial_ml + group_at * partitions * group;
  for (int head = warp; head < group; head += WARPS) {
    float2 x[MAX_PARTITIONS / 32];
    float top = LOWEST, weight = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_PARTITIONS / 32; i++) {
      const int p = 32 * i + lane;
      x[i] = p < used ? ld_cg(ml + p * group + head) : make_float2(LOWEST, 0.f);
      top = fmaxf(top, x[i].x);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < MAX_PARTITIONS / 32; i++) {
      x[i].x = ex2(x[i].x - top);
      weight += x[i].x * x[i].y;
    }
    const float scale = 1.f / warp_sum(weight);
#pragma unroll
    for (int i = 0; i < MAX_PARTITIONS / 32; i++)
      factors[head * MAX_PARTITIONS + 32 * i + lane] = x[i].x * scale;
  }
  __syncthreads();
  for (int p = 0; p < used; p += BATCH) {
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      const int at = 4 * (thread + r * THREADS);
      if (at >= group * D) continue;
      const float* factor = factors + at / D * MAX_PARTITIONS + p;
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        add(total[r], factor[u], loaded[r][u]);
        if (p + BATCH < used) loaded[r][u] = load(p + BATCH + u, at);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const int at = 4 * (thread + r * THREADS);
    if (at < group * D) store(at, total[r]);
  }
}
