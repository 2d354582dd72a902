// Paged prefill attention of an FP16 pool on Hopper's warpgroup products (sm_90a).
//
// As prefill_attention.cu in meaning, arguments, packed rows and softmax; read that first. Each of a
// CTA's one or two warpgroups (WGS) has 64 packed rows. Tiles of K and V are 128 tokens, copied
// swizzled by the warpgroups themselves. While a warpgroup makes P of tile j + 1, the tensor cores
// multiply its P of tile j with V, or work for the other one.
#include "wgmma.cuh"

constexpr int TILE = 128;   // tokens of a K or V tile
constexpr int GROUPS = 8;   // of 16 tokens, which always lie in one block
constexpr int ATOM = 128;   // bytes of a row of an operand tile: 64 halves
constexpr float SLACK = 8;  // log2 of what a score may exceed the reference by

// Shared memory: operand tiles begin at multiples of 1,024.
template <int D, int WGS>
struct Hopper {
  static constexpr int COLUMNS = D / 64;             // operand tiles side by side
  static constexpr int Q_TILE = 64 * ATOM;           // 64 rows of 64 halves
  static constexpr int KV_TILE = TILE * ATOM;        // TILE tokens of 64 halves
  static constexpr int Q = 0;                        // [WGS, COLUMNS] Q_TILE
  static constexpr int K = Q + WGS * COLUMNS * Q_TILE;   // [2 (buffers), COLUMNS] KV_TILE
  static constexpr int V = K + 2 * COLUMNS * KV_TILE;    // as K
  static constexpr int IDS = V + 2 * COLUMNS * KV_TILE;  // int [4, GROUPS]
  static constexpr int BYTES = IDS + 4 * 4 * GROUPS;
};

// out half [rows, heads * D]; q half, rows `q_stride` elements apart, heads contiguous; tiles
// {span, first packed row}; spans {first row of q and out, rows, start, row of tables}.
// Grid (kv_heads, tiles), 128 * WGS threads, Hopper<>::BYTES of dynamic shared memory.
template <int D, int WGS>
__global__ void __launch_bounds__(128 * WGS, 1)
    paged_prefill_hopper(__half* __restrict__ out, const __half* __restrict__ q, i64 q_stride,
                         const u8* __restrict__ pool, i64 block_bytes, i64 k_offset, i64 v_offset,
                         i32 block_shift, i32 kv_heads, i32 group, const int2* __restrict__ tiles,
                         const int4* __restrict__ spans, const i32* __restrict__ tables,
                         i32 table_stride, float scale) {
  using H = Hopper<D, WGS>;
  constexpr int ROWS = 64 * WGS;
  constexpr int CHUNKS = D / 8, STEP = 128 * WGS / CHUNKS;  // rows that all threads copy at once
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

  if (tid < 3 * GROUPS) ids[tid] = *block_of(tid / GROUPS, tid % GROUPS);
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
  load(0, H::K, k_offset);
  cp_async_commit();
  load(0, H::V, v_offset);
  if (n_tiles > 1) load(1, H::K, k_offset);
  cp_async_commit();

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
    if (j + 2 < n_tiles) load(j + 2, H::K, k_offset);
    load(j + 1, H::V, v_offset);
    if (tid < GROUPS) cp_async4(ids + ((j + 3) & 3) * GROUPS + tid, block_of(j + 3, tid));
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
  u8* const staged = smem + H::Q + warpgroup * H::COLUMNS * H::Q_TILE;
  const int local = (warp & 3) * 16;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float x = sum[h];
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    x += __shfl_xor_sync(FULL_WARP, x, 2);
    const float inverse = 1.f / x;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *reinterpret_cast<u32*>(staged + placed(local + 8 * h + g, n, 64) + 4 * t) =
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
        *reinterpret_cast<const uint4*>(staged + placed(local + line, column, 64));
  }
}
