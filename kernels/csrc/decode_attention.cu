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
//
// Lane (g = lane / 4, t = lane % 4) holds of K rows g and g + 8, four lanes side by side in a row;
// of V rows 2t, 2t + 1, 2t + 8 and 2t + 9, eight lanes side by side.
//
// Merge. The warps of a CTA merge in shared memory. If the sequence has several partitions, each
// CTA leaves its unnormalised sum, its maximum and its weight in the workspace and takes a ticket;
// the one that takes the last merges all in ascending order, so the result does not depend on who
// came last, and resets the ticket for the next launch.
#include "kv_convert.cuh"

constexpr int TILE = 16;             // tokens
constexpr int MAX_PARTITIONS = 128;  // of one sequence; kernels/attention.py says so too
constexpr float LOWEST = -1e30f;     // below any score, and finite: differences stay numbers
// Weights of int8 carry their token's V scale. 2^6 keeps the smallest scale (2^-14) clear of
// half's subnormals, and the largest that finite halves quantise to (516) clear of its end.
constexpr float SCALE_LIFT = 64.f;

// Where a warp's ring keeps a tile, and the grains of its rows.
template <int FORMAT, int D, int STAGES>
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

  DEV int k_at(int row, int grain, int lane) {
    return ((row * K_GRAINS + grain) * 32 + lane) * K_GRAIN;
  }
  DEV int v_at(int row, int grain, int lane) {
    return V_AT + ((row * V_GRAINS + grain) * 32 + lane) * V_GRAIN;
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
  using R = Ring<FORMAT, D, 1>;
  if constexpr (R::Kv::K_CODE == CODE_F16) {
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const uint4 v = *reinterpret_cast<const uint4*>(q + i * 32 + 8 * t);
      b[2 * i][0] = v.x, b[2 * i][1] = v.y;
      b[2 * i + 1][0] = v.z, b[2 * i + 1][1] = v.w;
    }
  } else {
    constexpr int WORDS = R::K_GRAIN / 4;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      const int dim = (i / WORDS) * 4 * R::K_GRAIN + R::K_GRAIN * t + 4 * (i % WORDS);
      const uint2 v = *reinterpret_cast<const uint2*>(q + dim);
      b[i][0] = prmt(v.x, v.y, 0x5410);  // dims 0 and 2 of the word's four
      b[i][1] = prmt(v.x, v.y, 0x7632);  // 1 and 3
    }
  }
}

// Scores of a tile: s[c] is rows g and g + 8 of columns 8c + 2t and 8c + 2t + 1.
template <int FORMAT, int D, int COLUMNS>
DEV void score_tile(float (&s)[COLUMNS][4], const u8* stage, const u32 (&q)[COLUMNS][D / 16][2],
                    int lane) {
  using R = Ring<FORMAT, D, 1>;
  constexpr int WORDS = R::K_GRAIN / 4;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0.f;
#pragma unroll
  for (int i = 0; i < R::K_GRAINS; i++) {
    u32 low[WORDS], high[WORDS];  // rows g and g + 8
    load_words<R::K_GRAIN>(low, stage + R::k_at(0, i, lane));
    load_words<R::K_GRAIN>(high, stage + R::k_at(1, i, lane));
    if constexpr (R::Kv::K_CODE == CODE_F16) {
#pragma unroll
      for (int w = 0; w < WORDS; w += 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const u32(&b)[2] = q[c][(i * WORDS + w) / 2];
          mma16816(s[c], low[w], high[w], low[w + 1], high[w + 1], b[0], b[1]);
        }
    } else {
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        u32 a0, a1, a2, a3;
        code_pairs<R::Kv::K_CODE>(low[w], a0, a2);
        code_pairs<R::Kv::K_CODE>(high[w], a1, a3);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const u32(&b)[2] = q[c][i * WORDS + w];
          mma16816(s[c], a0, a1, a2, a3, b[0], b[1]);
        }
      }
    }
  }
}

// The first dim of accumulator j of a lane; a pair (d, d + 1) of dims is in one accumulator.
template <int FORMAT, int D>
DEV int accumulator_dim(int j, int g) {
  using R = Ring<FORMAT, D, 1>;
  constexpr int WORDS = R::V_GRAIN / 4;
  if constexpr (R::Kv::V_CODE == CODE_F16) {
    return (j / WORDS) * 4 * R::V_GRAIN + g * (R::V_GRAIN / 2) + 2 * (j % WORDS);
  } else {
    return (j / 2 / WORDS) * 8 * R::V_GRAIN + g * R::V_GRAIN + 4 * (j / 2 % WORDS) + 2 * (j % 2);
  }
}

// o += V^T p. `p` are B fragments of the weights; V rows from `valid` on are taken as zero,
// since 0 * NaN is not 0 and nothing says what lies beyond a sequence's end.
template <int FORMAT, int D, int COLUMNS>
DEV void accumulate_tile(float (&o)[D / 16][COLUMNS][4], const u8* stage,
                         const u32 (&p)[COLUMNS][2], int valid, int lane) {
  using R = Ring<FORMAT, D, 1>;
  constexpr int WORDS = R::V_GRAIN / 4;
  const int row = 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < R::V_GRAINS; i++) {
    u32 v0[WORDS], v1[WORDS], v2[WORDS], v3[WORDS];  // rows 2t, 2t + 1, 2t + 8, 2t + 9
    load_words<R::V_GRAIN>(v0, stage + R::v_at(0, i, lane));
    load_words<R::V_GRAIN>(v1, stage + R::v_at(1, i, lane));
    load_words<R::V_GRAIN>(v2, stage + R::v_at(2, i, lane));
    load_words<R::V_GRAIN>(v3, stage + R::v_at(3, i, lane));
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if (valid < TILE) {
        if (row >= valid) v0[w] = 0;
        if (row + 1 >= valid) v1[w] = 0;
        if (row + 8 >= valid) v2[w] = 0;
        if (row + 9 >= valid) v3[w] = 0;
      }
      const u32 low01 = prmt(v0[w], v1[w], 0x5410), high01 = prmt(v0[w], v1[w], 0x7632);
      const u32 low23 = prmt(v2[w], v3[w], 0x5410), high23 = prmt(v2[w], v3[w], 0x7632);
      if constexpr (R::Kv::V_CODE == CODE_F16) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          mma16816(o[i * WORDS + w][c], low01, high01, low23, high23, p[c][0], p[c][1]);
      } else {
        u32 a0, a1, a2, a3;
        code_pairs<R::Kv::V_CODE>(low01, a0, a1);
        code_pairs<R::Kv::V_CODE>(low23, a2, a3);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          mma16816(o[2 * (i * WORDS + w)][c], a0, a1, a2, a3, p[c][0], p[c][1]);
        code_pairs<R::Kv::V_CODE>(high01, a0, a1);
        code_pairs<R::Kv::V_CODE>(high23, a2, a3);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          mma16816(o[2 * (i * WORDS + w) + 1][c], a0, a1, a2, a3, p[c][0], p[c][1]);
      }
    }
  }
}

// One CTA's copies of tiles into its warps' rings.
template <int FORMAT, int D, int STAGES>
struct TileCopier {
  using R = Ring<FORMAT, D, STAGES>;
  const u8* k;       // of the KV head, in block 0
  const u8* v;
  const u8* scales;  // K scales of the KV head, in block 0
  i64 block_bytes, v_scale_step;
  int tiles_shift;   // log2(tiles a block)
  u8* ring;          // this warp's

  // Copy tile `tile` of the sequence, which lies in block `block`, to `stage`.
  DEV void copy(const TileCopier& c, int block, int tile, int stage, int lane) {
    const int row0 = (tile & ((1 << c.tiles_shift) - 1)) * TILE, g = lane >> 2, t = lane & 3;
    const i64 at = block * c.block_bytes;
    u8* to = c.ring + stage * R::STAGE_BYTES;
    const u8* k = c.k + at + (row0 + g) * R::K_ROW + t * R::K_GRAIN;
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int i = 0; i < R::K_GRAINS; i++)
        cp_async<R::K_GRAIN>(to + R::k_at(r, i, lane), k + 8 * r * R::K_ROW + i * 4 * R::K_GRAIN);
    const u8* v = c.v + at + (row0 + 2 * t) * R::V_ROW + g * R::V_GRAIN;
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int i = 0; i < R::V_GRAINS; i++)
        cp_async<R::V_GRAIN>(to + R::v_at(r, i, lane),
                             v + ((r & 1) + 8 * (r >> 1)) * R::V_ROW + i * 8 * R::V_GRAIN);
    if constexpr (R::Kv::SCALED) {
      // 16 K scales, then 16 V scales: four runs of 16 bytes.
      if (lane < 4)
        cp_async16(to + R::SCALES_AT + 16 * lane,
                   c.scales + at + (lane >> 1) * c.v_scale_step + 2 * row0 + 16 * (lane & 1));
    }
  }
};

template <int FORMAT, int D, int COLUMNS, int WARPS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS, (COLUMNS == 1 ? 16 : 12) / WARPS)
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
  using R = Ring<FORMAT, D, STAGES>;
  constexpr int HEADS = 8 * COLUMNS, STRIDE = D + 4, THREADS = 32 * WARPS;
  // A weight may exceed 1 by 2^SLACK before the running maximum, and with it the accumulators,
  // follow: a vote instead of six shuffles for most tiles. Scaled weights need the room.
  constexpr float SLACK = R::Kv::SCALED ? 0.f : 6.f;
  extern __shared__ __align__(16) u8 shared[];
  __shared__ float warp_m[WARPS][HEADS], warp_l[WARPS][HEADS];
  __shared__ int is_last;

  const int kv_head = blockIdx.x, row = blockIdx.y, part = blockIdx.z;
  const int kv_heads = gridDim.x, partitions = gridDim.z;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int block_size = TILE << tiles_shift;
  const int first_tile = part * (partition / TILE);
  const int* table = tables + (i64)row * table_stride;

  // Lane i holds the block of this warp's i-th next tile. Read before the length is known, to
  // wait for both at once; entries beyond the sequence are not used.
  auto load_blocks = [&](int nth) {
    const int at = (first_tile + warp + (nth + lane) * WARPS) >> tiles_shift;
    return at < table_columns ? table[at] : 0;
  };
  int blocks = load_blocks(0);
  const int len = lens[row];
  if (len <= 0 && part == 0) {
    __half* zeros = out + ((i64)row * kv_heads + kv_head) * group * D;
    for (int i = threadIdx.x; i < group * D; i += THREADS) zeros[i] = __float2half_rn(0.f);
  }
  const int begin = part * partition;
  if (begin >= len) return;
  const int end = min(len, begin + partition);
  const int used = (len + partition - 1) / partition;
  const int tiles = (end - begin + TILE - 1) / TILE;
  const int mine = tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;

  TileCopier<FORMAT, D, STAGES> copier;
  copier.k = storage + k_offset + (i64)kv_head * block_size * R::K_ROW;
  copier.v = storage + v_offset + (i64)kv_head * block_size * R::V_ROW;
  copier.scales = storage + scale_offset + (i64)kv_head * block_size * 2;
  copier.v_scale_step = (i64)kv_heads * block_size * 2;
  copier.block_bytes = block_bytes;
  copier.tiles_shift = tiles_shift;
  copier.ring = shared + warp * R::WARP_BYTES;
  auto request = [&](int nth) {
    if (nth < mine) {
      if (nth && nth % 32 == 0) blocks = load_blocks(nth);
      const int block = __shfl_sync(FULL_WARP, blocks, nth & 31);
      copier.copy(copier, block, first_tile + warp + nth * WARPS, nth % STAGES, lane);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) request(i);

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

  for (int nth = 0; nth < mine; nth++) {
    cp_async_wait<STAGES - 1>();
    if constexpr (R::Kv::SCALED) __syncwarp();
    const u8* stage = copier.ring + nth % STAGES * R::STAGE_BYTES;
    const int valid = end - begin - (warp + nth * WARPS) * TILE;  // tokens; more than 16 if full

    float s[COLUMNS][4];
    score_tile<FORMAT, D, COLUMNS>(s, stage, qb, lane);
    const float gain = scale_log2 * code_gain<R::Kv::K_CODE>();
    float k_scale[2] = {gain, gain}, v_scale[2] = {1.f, 1.f};  // of rows g and g + 8
    if constexpr (R::Kv::SCALED) {
      const __half* scales = reinterpret_cast<const __half*>(stage + R::SCALES_AT);
      k_scale[0] *= __half2float(scales[g]);
      k_scale[1] *= __half2float(scales[g + 8]);
      v_scale[0] = g < valid ? SCALE_LIFT * __half2float(scales[TILE + g]) : 0.f;
      v_scale[1] = g + 8 < valid ? SCALE_LIFT * __half2float(scales[TILE + g + 8]) : 0.f;
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
    accumulate_tile<FORMAT, D, COLUMNS>(o, stage, p, valid, lane);
    if constexpr (R::Kv::SCALED) __syncwarp();
    request(nth + STAGES);
  }

  // The ring's memory, all copies done, holds the warps' sums: [WARPS][HEADS][STRIDE].
  cp_async_wait<0>();
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
        *reinterpret_cast<float2*>(to + accumulator_dim<FORMAT, D>(j, g)) =
            make_float2(o[j][c][i] * gain, o[j][c][i + 2] * gain);
    }
  }
  __syncthreads();

  const i64 group_at = (i64)row * kv_heads + kv_head;
  __half* result = out + group_at * group * D;
  auto store = [&](int head, int dim, float4 x, float factor) {
    // Saturating: int8 codes may stand for a little more than the largest half.
    const __half h[4] = {saturate_half(x.x * factor), saturate_half(x.y * factor),
                         saturate_half(x.z * factor), saturate_half(x.w * factor)};
    *reinterpret_cast<uint2*>(result + head * D + dim) =
        make_uint2(half_bits(h[0]) | (u32)half_bits(h[1]) << 16,
                   half_bits(h[2]) | (u32)half_bits(h[3]) << 16);
  };
  auto add = [](float4& total, float factor, const float4& x) {
    total.x += factor * x.x, total.y += factor * x.y;
    total.z += factor * x.z, total.w += factor * x.w;
  };
  for (int i = threadIdx.x; i < group * (D / 4); i += THREADS) {
    const int head = i / (D / 4), dim = i % (D / 4) * 4;
    float top = LOWEST, weight = 0.f;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_m[w][head]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float factor = ex2(warp_m[w][head] - top);
      weight += factor * warp_l[w][head];
      add(total, factor,
          *reinterpret_cast<const float4*>(sums + (w * HEADS + head) * STRIDE + dim));
    }
    if (used == 1) {
      store(head, dim, total, 1.f / weight);
    } else {
      const i64 at = (group_at * partitions + part) * group + head;
      *reinterpret_cast<float4*>(partial_out + at * D + dim) = total;
      if (dim == 0) partial_ml[at] = make_float2(top, weight);
    }
  }
  if (used == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(tickets + group_at, 1) == used - 1;
    if (is_last) tickets[group_at] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();

  // Factors of the partitions, [group][MAX_PARTITIONS], where the sums were; already divided by
  // the whole weight.
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
    weight = warp_sum(weight);
#pragma unroll
    for (int i = 0; i < MAX_PARTITIONS / 32; i++)
      factors[head * MAX_PARTITIONS + 32 * i + lane] = x[i].x / weight;
  }
  __syncthreads();
  const float* sources = partial_out + group_at * partitions * group * D;
  for (int i = threadIdx.x; i < group * (D / 4); i += THREADS) {
    const int head = i / (D / 4), dim = i % (D / 4) * 4;
    const float4* from = reinterpret_cast<const float4*>(sources + head * D + dim);
    const float* factor = factors + head * MAX_PARTITIONS;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
    for (int p = 0; p < used; p++) add(total, factor[p], ld_cg(from + (i64)p * group * (D / 4)));
    store(head, dim, total, 1.f);
  }
}
