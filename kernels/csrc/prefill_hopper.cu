// Paged prefill attention on Hopper's warpgroup products (sm_90a).
//
// As prefill_attention.cu in meaning, arguments, packed rows and softmax; read that first. Each of a
// CTA's one or two warpgroups (WGS) has 64 packed rows. Tiles of K and V are 128 tokens, copied
// swizzled by the warpgroups themselves. While a warpgroup makes P of tile j + 1, the tensor cores
// multiply its P of tile j with V, or work for the other one. Quantised codes are staged as they
// are and converted, by the threads that copied them, in that time too.
#include "kv_convert.cuh"
#include "wgmma.cuh"

constexpr int TILE = 128;   // tokens of a K or V tile
constexpr int GROUPS = 8;   // of 16 tokens, which always lie in one block
constexpr int ATOM = 128;   // bytes of a row of an operand tile: 64 halves
constexpr float SLACK = 8;  // log2 of what a score may exceed the reference by

// Shared memory: operand tiles begin at multiples of 1,024.
template <int N>
struct Code {
  static constexpr int value = N;
};

template <int KV, int D, int WGS>
struct Hopper {
  using Traits = KvTraits<KV>;
  static constexpr bool K_CODES = Traits::K_CODE != CODE_F16, V_CODES = Traits::V_CODE != CODE_F16;
  static constexpr int COLUMNS = D / 64;                 // operand tiles side by side
  static constexpr int Q_TILE = 64 * ATOM;               // 64 rows of 64 halves
  static constexpr int KV_TILE = TILE * ATOM;            // TILE tokens of 64 halves
  static constexpr int Q = 0;                            // [WGS, COLUMNS] Q_TILE
  static constexpr int K = Q + WGS * COLUMNS * Q_TILE;   // [2 (buffers), COLUMNS] KV_TILE
  static constexpr int V = K + 2 * COLUMNS * KV_TILE;    // as K
  static constexpr int K_STAGE = V + 2 * COLUMNS * KV_TILE;             // codes [TILE, D]
  static constexpr int V_STAGE = K_STAGE + (K_CODES ? TILE * D : 0);    // as K_STAGE
  static constexpr int SCALES = V_STAGE + (V_CODES ? TILE * D : 0);     // half [4, 2 (K, V), TILE]
  static constexpr int IDS = SCALES + (Traits::SCALED ? 16 * TILE : 0);  // int [4, GROUPS]
  static constexpr int BYTES = IDS + 4 * 4 * GROUPS;
};

// out half [rows, heads * D]; q half, rows `q_stride` elements apart, heads contiguous; tiles
// {span, first packed row}; spans {first row of q and out, rows, start, row of tables}.
// Grid (kv_heads, tiles), 128 * WGS threads, Hopper<>::BYTES of dynamic shared memory.
template <int KV, int D, int WGS>
__global__ void __launch_bounds__(128 * WGS, 1)
    paged_prefill_hopper(__half* __restrict__ out, const __half* __restrict__ q, i64 q_stride,
                         const u8* __restrict__ pool, i64 block_bytes, i64 k_offset, i64 v_offset,
                         i64 scale_offset, i32 block_shift, i32 kv_heads, i32 group, const int2* __restrict__ tiles,
                         const int4* __restrict__ spans, const i32* __restrict__ tables,
                         i32 table_stride, float scale_log2) {
  using H = Hopper<KV, D, WGS>;
  constexpr int K_CODE = H::Traits::K_CODE, V_CODE = H::Traits::V_CODE;
  constexpr bool SCALED = H::Traits::SCALED;
  constexpr int ROWS = 64 * WGS;
  constexpr int CHUNKS = D / 8, STEP = 128 * WGS / CHUNKS;  // rows that all threads copy at once
  constexpr int CODE_CHUNKS = D / 16, CODE_STEP = 128 * WGS / CODE_CHUNKS;
  extern __shared__ __align__(1024) u8 smem[];
  i32* const ids = reinterpret_cast<i32*>(smem + H::IDS);

  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int warpgroup = warp >> 2, kv_head = blockIdx.x, block_size = 1 << block_shift;
  const int2 tile = tiles[blockIdx.y];
  const int4 span = spans[tile.x];
  const int row0 = tile.y, start = span.z;
  const int last = min(row0 + ROWS, span.y * group) - 1;
  const int kv_end = start + last / group + 1;  // tokens that any row of the tile attends
  const int n_tiles = (kv_end + TILE - 1) / TILE;
  const i32* const table = tables + static_cast<i64>(span.w) * table_stride;
  const int last_block = (kv_end - 1) >> block_shift;
  const int warp_row = row0 + warp * 16;
  const bool busy = warp_row <= last;
  const int first_position = start + warp_row / group;
  const int limit[2] = {start + (warp_row + g) / group - 2 * t,
                        start + (warp_row + g + 8) / group - 2 * t};

  const float scale = scale_log2 * code_gain<K_CODE>();

  // Chunk `chunk` of row `row` of an operand of `rows` rows.
  const u32 row = tid / CHUNKS, chunk = tid % CHUNKS;
  auto placed = [&](u32 row, u32 chunk, int rows) {
    return (chunk >> 3) * rows * ATOM + row * ATOM + (((chunk & 7) ^ (row & 7)) << 4);
  };
  auto block_of = [&](int j, int part) {
    return table + min((j * TILE + 16 * part) >> block_shift, last_block);
  };
  auto load = [&](int j, int to, i64 offset) {
    const u32 at = to + (j & 1) * H::COLUMNS * H::KV_TILE + placed(row, chunk, TILE);
    const u8* const base = pool + offset + chunk * 16;
#pragma unroll
    for (int i = 0; i < TILE / STEP; i++) {
      const int token = j * TILE + i * STEP + row;
      const int id = ids[(j & 3) * GROUPS + (i * STEP + row) / 16];
      const u8* from = base + id * block_bytes +
                       (kv_head * block_size + (token & (block_size - 1))) * (2 * D);
      cp_async16_zfill(smem + at + i * STEP * ATOM, from, token < kv_end ? 16 : 0);
    }
  };

  // Codes of tile j as they are; the same threads make halves of them later, with no barrier.
  const u32 code_row = tid / CODE_CHUNKS, code_chunk = tid % CODE_CHUNKS;
  auto stage = [&](int j, int to, i64 offset) {
    const u8* const base = pool + offset + code_chunk * 16;
#pragma unroll
    for (int i = 0; i < TILE / CODE_STEP; i++) {
      const int token = j * TILE + i * CODE_STEP + code_row;
      const int id = ids[(j & 3) * GROUPS + (i * CODE_STEP + code_row) / 16];
      const u8* from =
          base + id * block_bytes + (kv_head * block_size + (token & (block_size - 1))) * D;
      cp_async16_zfill(smem + to + (i * CODE_STEP + code_row) * D + code_chunk * 16, from,
                       token < kv_end ? 16 : 0);
    }
  };
  auto convert = [&](auto code, int j, int stage, int to, const __half* scales) {
    constexpr int CODE = decltype(code)::value;
    const int at = to + (j & 1) * H::COLUMNS * H::KV_TILE;
#pragma unroll
    for (int i = 0; i < TILE / CODE_STEP; i++) {
      const u32 row = i * CODE_STEP + code_row;
      const uint4 codes = *reinterpret_cast<const uint4*>(smem + stage + row * D + code_chunk * 16);
      uint4 low, high;
      code_halves<CODE>(codes.x, low.x, low.y);
      code_halves<CODE>(codes.y, low.z, low.w);
      code_halves<CODE>(codes.z, high.x, high.y);
      code_halves<CODE>(codes.w, high.z, high.w);
      if (scales) {
        const __half2 by = u2h(half_bits(scales[row]) * 0x10001u);
        low.x = h2u(__hmul2(u2h(low.x), by)), low.y = h2u(__hmul2(u2h(low.y), by));
        low.z = h2u(__hmul2(u2h(low.z), by)), low.w = h2u(__hmul2(u2h(low.w), by));
        high.x = h2u(__hmul2(u2h(high.x), by)), high.y = h2u(__hmul2(u2h(high.y), by));
        high.z = h2u(__hmul2(u2h(high.z), by)), high.w = h2u(__hmul2(u2h(high.w), by));
      }
      *reinterpret_cast<uint4*>(smem + at + placed(row, 2 * code_chunk, TILE)) = low;
      *reinterpret_cast<uint4*>(smem + at + placed(row, 2 * code_chunk + 1, TILE)) = high;
    }
  };
  auto scales_of = [&](int j, int which) {
    return reinterpret_cast<__half*>(smem + H::SCALES) + ((j & 3) * 2 + which) * TILE;
  };
  auto load_scales = [&](int j) {
    if (SCALED && tid < TILE / 4) {
      // Eight scales a chunk: K of the tile's tokens, then V.
      const int which = tid / (TILE / 8), first = tid % (TILE / 8) * 8, token = j * TILE + first;
      const u8* from = pool + ids[(j & 3) * GROUPS + first / 16] * block_bytes + scale_offset +
                       2 * ((which * kv_heads + kv_head) * block_size + (token & (block_size - 1)));
      cp_async16_zfill(scales_of(j, which) + first, from, max(0, min(16, 2 * (kv_end - token))));
    }
  };
  // Begins copies: `direct` for halves, to where they are used; `staged` for codes.
  auto direct = [&](int k, int v) {
    if constexpr (!H::K_CODES) {
      if (k < n_tiles) load(k, H::K, k_offset);
    }
    if constexpr (!H::V_CODES) {
      if (v < n_tiles) load(v, H::V, v_offset);
    }
  };
  auto staged = [&](int k, int v) {
    if constexpr (H::K_CODES) {
      if (k < n_tiles) stage(k, H::K_STAGE, k_offset);
    }
    if constexpr (H::V_CODES) {
      if (v < n_tiles) stage(v, H::V_STAGE, v_offset);
    }
  };
  auto convert_k = [&](int j) {
    if constexpr (H::K_CODES) {
      if (j < n_tiles) convert(Code<K_CODE>(), j, H::K_STAGE, H::K, nullptr);
    }
  };
  auto convert_v = [&](int j) {
    if constexpr (H::V_CODES) {
      if (j < n_tiles)
        convert(Code<V_CODE>(), j, H::V_STAGE, H::V, SCALED ? scales_of(j, 1) : nullptr);
    }
  };

  if (tid < 4 * GROUPS) ids[tid] = *block_of(tid / GROUPS, tid % GROUPS);
#pragma unroll 4
  for (int i = 0; i < ROWS / STEP; i++) {
    const int local = i * STEP + row, packed = min(row0 + local, last);
    const __half* from = q + (span.x + packed / group) * q_stride +
                         (kv_head * group + packed % group) * D + chunk * 8;
    cp_async16(smem + H::Q + (local >> 6) * H::COLUMNS * H::Q_TILE +
                   placed(local & 63, chunk, 64),
               from);
  }
  __syncthreads();
  direct(0, n_tiles);
  staged(0, 0);
  load_scales(0);
  load_scales(1);
  cp_async_commit();
  direct(1, 0);
  cp_async_commit();
  if constexpr (H::V_CODES) {
    cp_async_wait<0>();
    __syncthreads();  // scales of V
    convert_k(0);
    convert_v(0);
    staged(1, n_tiles);
    cp_async_commit();
    cp_async_wait<0>();
    convert_k(1);
    staged(2, 1);
    cp_async_commit();
  }

  float o[D / 2], s[TILE / 2], top[2] = {-infinity(), -infinity()}, sum[2] = {0.f, 0.f};
  u32 p[TILE / 16][4];
#pragma unroll
  for (int i = 0; i < D / 2; i++) o[i] = 0.f;
#pragma unroll
  for (int i = 0; i < TILE / 2; i++) s[i] = 0.f;

  const u8* const my_q = smem + H::Q + warpgroup * H::COLUMNS * H::Q_TILE;
  auto scores = [&](int j) {
    const u8* const k = smem + H::K + (j & 1) * H::COLUMNS * H::KV_TILE;
    wgmma_hold(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++)
      wgmma_n128_shared(s, wgmma_tile(my_q + i / 4 * H::Q_TILE + i % 4 * 32, 16, 8 * ATOM),
                        wgmma_tile(k + i / 4 * H::KV_TILE + i % 4 * 32, 16, 8 * ATOM), i > 0);
    wgmma_commit();
  };
  // Masks and exponentiates the scores of tile j; true if the rows' reference was raised, and
  // then what was summed before must be multiplied by `keep`.
  auto softmax = [&](int j, float (&keep)[2]) {
    if constexpr (SCALED) {
#pragma unroll
      for (int n = 0; n < TILE / 8; n++) {
        const float2 by = __half22float2(
            *reinterpret_cast<const __half2*>(scales_of(j, 0) + 8 * n + 2 * t));
        s[4 * n] *= by.x, s[4 * n + 1] *= by.y, s[4 * n + 2] *= by.x, s[4 * n + 3] *= by.y;
      }
    }
    if (j * TILE + TILE - 1 > first_position) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int within = limit[h] - j * TILE;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
          if (8 * n > within) s[4 * n + 2 * h] = -infinity();
          if (8 * n + 1 > within) s[4 * n + 2 * h + 1] = -infinity();
        }
      }
    }
    float tile_top[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float x = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int n = 1; n < TILE / 8; n++) x = fmaxf(x, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      tile_top[h] = x;
    }
    const bool raise = __any_sync(FULL_WARP, ((tile_top[0] - top[0]) * scale > SLACK) |
                                                 ((tile_top[1] - top[1]) * scale > SLACK));
    if (raise) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float x = tile_top[h];
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
        // By the row's own scores alone: its result must not depend on its neighbours.
        if (!((x - top[h]) * scale > SLACK)) x = top[h];
        keep[h] = ex2((top[h] - x) * scale);
        top[h] = x;
        sum[h] *= keep[h];
      }
    }
    // A warp without rows skips this. But it is a branch for the sake of all others: in one block
    // with the wait that follows, ptxas would wait first and exponentiate afterwards.
    if (busy) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float base = top[h] * scale;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
          s[4 * n + 2 * h] = ex2(s[4 * n + 2 * h] * scale - base);
          s[4 * n + 2 * h + 1] = ex2(s[4 * n + 2 * h + 1] * scale - base);
          sum[h] += s[4 * n + 2 * h] + s[4 * n + 2 * h + 1];
        }
      }
    }
    return raise;
  };
  auto pack = [&]() {
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
#pragma unroll
      for (int i = 0; i < 4; i++) p[k][i] = pack_half2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
  };

  float keep[2] = {1.f, 1.f};
  cp_async_wait<1>();
  fence_shared_for_wgmma();
  __syncthreads();
  scores(0);
  wgmma_wait<0>(s);
  softmax(0, keep);
  pack();

  // O += P V of tile j, started.
  auto values = [&](int j) {
    const u8* const v = smem + H::V + (j & 1) * H::COLUMNS * H::KV_TILE;
    wgmma_hold(o);
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) wgmma_hold(p[k]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
      wgmma_registers(o, p[k], wgmma_tile(v + k * 16 * ATOM, H::KV_TILE, 8 * ATOM));
    wgmma_commit();
  };
  // K of tile j + 1 and V of tile j have landed; nobody multiplies with K of j or V of j - 1.
  auto landed = [&]() {
    cp_async_wait<0>();
    fence_shared_for_wgmma();
    __syncthreads();
  };

  // The last tile is apart: ptxas overlaps products only where no branch lies between them.
  for (int j = 0; j + 1 < n_tiles; j++) {
    landed();
    scores(j + 1);
    values(j);
    direct(j + 2, j + 1);
    convert_k(j + 2);
    convert_v(j + 1);
    staged(j + 3, j + 2);
    if (j + 2 < n_tiles) load_scales(j + 2);
    if (tid < GROUPS) cp_async4(ids + (j & 3) * GROUPS + tid, block_of(j + 4, tid));
    cp_async_commit();
    wgmma_wait<1>(s);
    const bool raised = softmax(j + 1, keep);
    wgmma_wait<0>(o);
    if (raised) {
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        o[4 * n] *= keep[0], o[4 * n + 1] *= keep[0];
        o[4 * n + 2] *= keep[1], o[4 * n + 3] *= keep[1];
      }
    }
    pack();
  }
  landed();
  values(n_tiles - 1);
  wgmma_wait<0>(o);

  // A warp's rows of Q are its own, but products of the whole warpgroup read them.
  __syncthreads();
  u8* const result = smem + H::Q + warpgroup * H::COLUMNS * H::Q_TILE;
  const int local = (warp & 3) * 16;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float x = sum[h];
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    x += __shfl_xor_sync(FULL_WARP, x, 2);
    const float inverse = code_gain<V_CODE>() / x;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<u32*>(result + placed(local + 8 * h + g, n, 64) + 4 * t) =
          pack_half2(o[4 * n + 2 * h] * inverse, o[4 * n + 2 * h + 1] * inverse);
  }
  __syncwarp();
  const int heads = kv_heads * group;
#pragma unroll 4
  for (int i = 0; i < 16 * CHUNKS / 32; i++) {
    const int index = lane + i * 32, line = index / CHUNKS, column = index % CHUNKS;
    const int packed = warp_row + line;
    if (packed > last) break;
    const i64 head = static_cast<i64>(span.x + packed / group) * heads + kv_head * group +
                     packed % group;
    *reinterpret_cast<uint4*>(out + head * D + column * 8) =
        *reinterpret_cast<const uint4*>(result + placed(local + line, column, 64));
  }
}
