// Paged prefill attention on Hopper's warpgroup products (sm_90a).
//
// As prefill_attention.cu in meaning, arguments, packed rows and softmax; read that first. Two
// warpgroups have 64 packed rows each; a third, of few registers, feeds them: two of its warps copy
// K and two V, in tiles of 128 tokens, swizzled, two tiles ahead at most. Quantised codes are staged
// as they are, and the same warps make halves of them. A warpgroup starts S of tile j + 1 and
// P V of tile j together, and makes P of tile j + 1 during the latter. The two take turns at
// starting products, so that one exponentiates while the tensor cores work for the other.
#include "pipeline.cuh"
#include "prefill_parts.cuh"
#include "wgmma.cuh"

constexpr int TILE = 128;   // tokens of a K or V tile
constexpr int GROUPS = 8;   // of 16 tokens, which always lie in one block
constexpr int ATOM = 128;   // bytes of a row of an operand tile: 64 halves
constexpr int WGS = 2;      // warpgroups that compute
constexpr int FEEDERS = 64; // threads that copy K; as many copy V

// Named barriers: a warpgroup's turn, its own, that of all warpgroups.
constexpr int TURN = 1, OWN = 3, ALL = 5;

template <int KV, int D>
struct Hopper {
  using Traits = KvTraits<KV>;
  static constexpr bool K_CODES = Traits::K_CODE != CODE_F16, V_CODES = Traits::V_CODE != CODE_F16;
  static constexpr int COLUMNS = D / 64;                   // operand tiles side by side
  static constexpr int Q_TILE = 64 * ATOM;                 // 64 rows of 64 halves
  static constexpr int KV_BYTES = COLUMNS * TILE * ATOM;   // a tile of K or V
  // Of a thread; what it begins with is 168.
  static constexpr int FEED_REGISTERS = V_CODES ? 72 : 40, REGISTERS = (504 - FEED_REGISTERS) / 2;
  // Operand tiles begin at multiples of 1,024.
  static constexpr int Q = 0;                              // [WGS, COLUMNS] Q_TILE
  static constexpr int K = Q + WGS * COLUMNS * Q_TILE;     // [2 (buffers)] KV_BYTES
  static constexpr int V = K + 2 * KV_BYTES;               // as K
  static constexpr int K_STAGE = V + 2 * KV_BYTES;                        // codes [2, TILE, D]
  static constexpr int V_STAGE = K_STAGE + (K_CODES ? 2 * TILE * D : 0);  // as K_STAGE
  static constexpr int SCALES = V_STAGE + (V_CODES ? 2 * TILE * D : 0);   // half [2 (K, V), 4, TILE]
  static constexpr int BARRIERS = SCALES + (Traits::SCALED ? 16 * TILE : 0);
  // Full K [2], full V [2], empty K [2], empty V [2].
  static constexpr int TICKET = BARRIERS + 64;
  static constexpr int BYTES = TICKET + 16;
};

// Chunk `chunk` of row `row` of an operand of `rows` rows.
DEV u32 placed(u32 row, u32 chunk, int rows) {
  return (chunk >> 3) * rows * ATOM + row * ATOM + (((chunk & 7) ^ (row & 7)) << 4);
}

// What K's and V's feeders are told. K's feed the scales of both: scores and weights are multiplied
// by them before V is waited for.
struct Feed {
  const u8* from;        // of the pool: K or V of the layer
  const u8* scales_from; // of the pool: K's scales of the head
  i64 v_scales;          // where V's are, from K's
  const i32* table;
  u8 *tiles, *stage;
  __half* scales;        // see Hopper::SCALES
  u64 *full, *empty;
  i64 block_bytes;
  i32 last_block, block_shift, kv_head, begin, kv_end, n_tiles;  // tokens begin at `begin`
};

// One of FEEDERS threads copies its share of all tiles, and of their scales where SCALED.
template <int CODE, int D, bool SCALED>
DEV void feed(const Feed& f, int thread) {
  constexpr bool CODES = CODE != CODE_F16;
  constexpr int ROW = CODES ? D : 2 * D, CHUNKS = ROW / 16;  // bytes, 16-byte chunks of a row
  constexpr int STEP = FEEDERS / CHUNKS, STEPS = 16 / STEP;  // rows at once, steps a group
  static_assert(STEP <= 16, "a step is in one group");
  const int lane = thread & 31, block_mask = (1 << f.block_shift) - 1;
  const u32 row = thread / CHUNKS, chunk = thread % CHUNKS;
  const u8* const from = f.from + (f.kv_head << f.block_shift) * ROW + row * ROW + chunk * 16;

  // Lane i holds the block of group i % 8 of a tile.
  auto block = [&](int j) {
    return f.table[min((f.begin + j * TILE + 16 * (lane & 7)) >> f.block_shift, f.last_block)];
  };
  // This thread's chunks of tile j, at `to(row)`; tokens beyond the last become zeros.
  auto copy = [&](int j, int ids, auto to) {
    const int token = f.begin + j * TILE;
    const bool whole = token + TILE <= f.kv_end;
    const u8* const first = from + (token & block_mask) * ROW;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const u8* const source = first + __shfl_sync(FULL_WARP, ids, group) * f.block_bytes +
                               ((16 * group) & block_mask) * ROW;
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const int local = 16 * group + i * STEP;
        if (whole) {
          cp_async16(to(local), source + i * STEP * ROW);
        } else {
          cp_async16_zfill(to(local), source + i * STEP * ROW,
                           token + local + static_cast<int>(row) < f.kv_end ? 16 : 0);
        }
      }
    }
    cp_async_commit();
  };
  auto freed = [&](int j) {
    if (j >= 2) arrivals_wait(f.empty + (j & 1), (j >> 1 & 1) ^ 1);
  };
  auto filled = [&](int j) {
    fence_shared_for_wgmma();
    __syncwarp();
    if (lane == 0) arrive(f.full + (j & 1));
  };

  if constexpr (!CODES) {
    // Rows of a step are STEP apart, so with fewer than eight the swizzle alternates.
    constexpr int PERIOD = STEP < 8 ? 8 / STEP : 1;
    u32 at[PERIOD];
#pragma unroll
    for (int i = 0; i < PERIOD; i++) at[i] = placed(row + i * STEP, chunk, TILE) - i * STEP * ATOM;
    int ids = block(0);
    for (int j = 0; j < f.n_tiles; j++) {
      const int next = block(j + 1);
      freed(j);
      u8* const tile = f.tiles + (j & 1) * (TILE * 2 * D);
      copy(j, ids, [&](int local) { return tile + at[local / STEP % PERIOD] + local * ATOM; });
      ids = next;
      cp_async_wait<0>();
      filled(j);
    }
  } else {
    auto stage = [&](int j, int ids) {
      u8* const here = f.stage + (j & 1) * (TILE * D) + thread * 16;
      copy(j, ids, [&](int local) { return here + local * ROW; });
    };
    // This thread's two scales of K and two of V, these lifted, of the tile whose blocks are `ids`.
    auto scale_pairs = [&](int j, int ids) {
      const int token = f.begin + j * TILE + 2 * thread, id = __shfl_sync(FULL_WARP, ids, thread >> 3);
      const u8* const k = f.scales_from + id * f.block_bytes + 2 * (token & block_mask);
      const u32 mask = token + 1 < f.kv_end ? 0xFFFFFFFFu : token < f.kv_end ? 0xFFFFu : 0u;
      return make_uint2(*reinterpret_cast<const u32*>(k) & mask,
                        lifted(*reinterpret_cast<const u32*>(k + f.v_scales) & mask));
    };
    const u32 at_low = placed(row, 2 * chunk, TILE), at_high = placed(row, 2 * chunk + 1, TILE);
    static_assert(STEP % 8 == 0, "the swizzle does not alternate");
    uint2 scales = make_uint2(0, 0);
    int ids = block(0);
    stage(0, ids);
    if constexpr (SCALED) scales = scale_pairs(0, ids);
    int ids1 = block(1);
    stage(1, ids1);
    ids = block(2);
    for (int j = 0; j < f.n_tiles; j++) {
      const int next = block(j + 3);
      cp_async_wait<1>();
      freed(j);
      if constexpr (SCALED) {
        __half* const tile_scales = f.scales + (j & 3) * TILE + 2 * thread;
        *reinterpret_cast<u32*>(tile_scales) = scales.x;
        *reinterpret_cast<u32*>(tile_scales + 4 * TILE) = scales.y;
        scales = scale_pairs(j + 1, ids1);
      }
      const u8* const here = f.stage + (j & 1) * (TILE * D) + thread * 16;
      u8* const tile = f.tiles + (j & 1) * (TILE * 2 * D);
#pragma unroll 4
      for (int i = 0; i < TILE / STEP; i++) {
        const uint4 codes = *reinterpret_cast<const uint4*>(here + i * STEP * ROW);
        uint4 low, high;
        code_halves<CODE>(codes.x, low.x, low.y);
        code_halves<CODE>(codes.y, low.z, low.w);
        code_halves<CODE>(codes.z, high.x, high.y);
        code_halves<CODE>(codes.w, high.z, high.w);
        *reinterpret_cast<uint4*>(tile + at_low + i * STEP * ATOM) = low;
        *reinterpret_cast<uint4*>(tile + at_high + i * STEP * ATOM) = high;
      }
      filled(j);
      stage(j + 2, ids);
      ids1 = ids;
      ids = next;
    }
    cp_async_wait<0>();
  }
}

// out half [rows, heads * D]; q half, rows `q_stride` elements apart, heads contiguous; tiles: see
// prefill_parts.cuh; spans {first row of q and out, rows, start, row of tables}.
// Grid (kv_heads, tiles), 128 * (WGS + 1) threads, Hopper<>::BYTES of dynamic shared memory.
template <int KV, int D>
__global__ void __launch_bounds__(128 * (WGS + 1), 1)
    paged_prefill_hopper(__half* __restrict__ out, const __half* __restrict__ q, i64 q_stride,
                         const u8* __restrict__ pool, i64 block_bytes, i64 k_offset, i64 v_offset,
                         i64 scale_offset, i32 block_shift, i32 kv_heads, i32 group, const int4* __restrict__ tiles,
                         const int4* __restrict__ spans, const i32* __restrict__ tables,
                         i32 table_stride, float scale_log2, float4* partials, i32* tickets) {
  using H = Hopper<KV, D>;
  constexpr int K_CODE = H::Traits::K_CODE, V_CODE = H::Traits::V_CODE;
  constexpr bool SCALED = H::Traits::SCALED;
  constexpr int ROWS = 64 * WGS, CHUNKS = D / 8;
  extern __shared__ __align__(1024) u8 smem[];
  u64* const full_k = reinterpret_cast<u64*>(smem + H::BARRIERS);
  u64 *const full_v = full_k + 2, *const empty_k = full_k + 4, *const empty_v = full_k + 6;

  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int warpgroup = warp >> 2, kv_head = blockIdx.x;
  const PrefillJob job = prefill_job(tiles[blockIdx.y]);
  const int4 span = spans[job.span];
  const int row0 = job.row, start = span.z;
  const int last = min(row0 + ROWS, span.y * group) - 1;
  const int kv_end = min(job.end, start + last / group + 1);  // tokens that any row attends
  const int n_tiles = (kv_end - job.begin + TILE - 1) / TILE;
  __half* const scales = reinterpret_cast<__half*>(smem + H::SCALES);

  if (tid < 4) {
    arrivals_init(full_k + tid, FEEDERS / 32);
    arrivals_init(empty_k + tid, 4 * WGS);
  }
  __syncthreads();
  if (warpgroup == WGS) {
    registers_at_most<H::FEED_REGISTERS>();
    const int thread = tid & (FEEDERS - 1);
    Feed f{pool + k_offset, pool + scale_offset + 2 * (kv_head << block_shift),
           2 * (kv_heads << block_shift), tables + static_cast<i64>(span.w) * table_stride,
           smem + H::K, smem + H::K_STAGE, scales, full_k, empty_k, block_bytes,
           (kv_end - 1) >> block_shift, block_shift, kv_head, job.begin, kv_end, n_tiles};
    if ((warp & 3) < 2) {
      feed<K_CODE, D, SCALED>(f, thread);
    } else {
      f.from = pool + v_offset;
      f.tiles = smem + H::V, f.stage = smem + H::V_STAGE;
      f.full = full_v, f.empty = empty_v;
      feed<V_CODE, D, false>(f, thread);
    }
  } else {
    registers_at_least<H::REGISTERS>();
    const int g = lane >> 2, t = lane & 3;
    const int warp_row = row0 + warp * 16;
    const bool busy = warp_row <= last;
    // Positions relative to the first token.
    const int origin = start - job.begin, first_position = origin + warp_row / group;
    const int limit[2] = {origin + (warp_row + g) / group - 2 * t,
                          origin + (warp_row + g + 8) / group - 2 * t};
    const float scale = scale_log2 * code_gain<K_CODE>();
    u8* const my_q = smem + H::Q + warpgroup * H::COLUMNS * H::Q_TILE;

    // Each warpgroup copies its rows of Q.
    const int thread = tid & 127;
#pragma unroll 4
    for (int i = 0; i < 64 * CHUNKS / 128; i++) {
      const int local = (thread + i * 128) / CHUNKS, chunk = thread % CHUNKS;
      const int packed = min(row0 + warpgroup * 64 + local, last);
      const __half* from = q + (span.x + packed / group) * q_stride +
                           (kv_head * group + packed % group) * D + chunk * 8;
      cp_async16(my_q + placed(local, chunk, 64), from);
    }
    cp_async_commit();

    float o[D / 2], s[TILE / 2], tops[1][2] = {{-infinity(), -infinity()}}, sums[1][2] = {};
    float(&top)[2] = tops[0], (&sum)[2] = sums[0];
    u32 p[TILE / 16][4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0.f;
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) s[i] = 0.f;

    auto scores = [&](int j) {
      const u8* const k = smem + H::K + (j & 1) * H::KV_BYTES;
      wgmma_hold(s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < D / 16; i++)
        wgmma_n128_shared(s, wgmma_tile(my_q + i / 4 * H::Q_TILE + i % 4 * 32, 16, 8 * ATOM),
                          wgmma_tile(k + i / 4 * (TILE * ATOM) + i % 4 * 32, 16, 8 * ATOM), i > 0);
      wgmma_commit();
    };
    // Masks and exponentiates the scores of tile j; true if the rows' reference was raised, and
    // then what was summed before must be multiplied by `keep`.
    auto softmax = [&](int j, float (&keep)[2]) {
      if constexpr (SCALED) {
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
          const float2 by = __half22float2(
              *reinterpret_cast<const __half2*>(scales + (j & 3) * TILE + 8 * n + 2 * t));
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
      const bool raise = __any_sync(FULL_WARP, ((tile_top[0] - top[0]) * scale > SLACK<SCALED>) |
                                                   ((tile_top[1] - top[1]) * scale > SLACK<SCALED>));
      if (raise) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float x = tile_top[h];
          x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
          x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
          // By the row's own scores alone: its result must not depend on its neighbours.
          if (!((x - top[h]) * scale > SLACK<SCALED>)) x = top[h];
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
        if constexpr (SCALED) {
#pragma unroll
          for (int n = 0; n < TILE / 8; n++) {
            const float2 by = __half22float2(*reinterpret_cast<const __half2*>(
                scales + (4 + (j & 3)) * TILE + 8 * n + 2 * t));
            s[4 * n] *= by.x, s[4 * n + 1] *= by.y, s[4 * n + 2] *= by.x, s[4 * n + 3] *= by.y;
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

    // O += P V of tile j, started.
    auto values = [&](int j) {
      const u8* const v = smem + H::V + (j & 1) * H::KV_BYTES;
      wgmma_hold(o);
#pragma unroll
      for (int k = 0; k < TILE / 16; k++) wgmma_hold(p[k]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < TILE / 16; k++)
        wgmma_registers(o, p[k], wgmma_tile(v + k * 16 * ATOM, TILE * ATOM, 8 * ATOM));
      wgmma_commit();
    };
    auto come = [&](u64* full, int j) { arrivals_wait(full + (j & 1), j >> 1 & 1); };
    auto release = [&](u64* empty, int j) {
      if (lane == 0) arrive(empty + (j & 1));
    };
    auto take_turn = [&]() {
      named_sync(TURN + warpgroup, 128 * WGS);
    };
    auto pass_turn = [&]() {
      named_arrive(TURN + (warpgroup ^ 1), 128 * WGS);
    };

    float keep[2] = {1.f, 1.f};
    if (warpgroup == 1) named_arrive(TURN, 128 * WGS);
    cp_async_wait<0>();
    fence_shared_for_wgmma();
    named_sync(OWN + warpgroup, 128);
    come(full_k, 0);
    take_turn();
    scores(0);
    pass_turn();
    wgmma_wait<0>(s);
    release(empty_k, 0);
    softmax(0, keep);
    pack();

    // The last tile is apart: ptxas overlaps products only where no branch lies between them.
    for (int j = 0; j + 1 < n_tiles; j++) {
      come(full_k, j + 1);
      come(full_v, j);
      take_turn();
      scores(j + 1);
      values(j);
      pass_turn();
      wgmma_wait<1>(s);
      release(empty_k, j + 1);
      const bool raised = softmax(j + 1, keep);
      wgmma_wait<0>(o);
      release(empty_v, j);
      if (raised) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
          o[4 * n] *= keep[0], o[4 * n + 1] *= keep[0];
          o[4 * n + 2] *= keep[1], o[4 * n + 3] *= keep[1];
        }
      }
      pack();
    }
    come(full_v, n_tiles - 1);
    values(n_tiles - 1);
    wgmma_wait<0>(o);
    if (warpgroup == 0) take_turn();  // what the other one passed last

    if (job.part >= 0) {
      auto sync = [] { named_sync(ALL, 128 * WGS); };
      if (!merge_parts<1, D / 8, 128 * WGS>(reinterpret_cast<float(&)[1][D / 8][4]>(o), tops, sums,
                                            partials, tickets, job.part, kv_head, kv_heads, tid,
                                            scale, reinterpret_cast<int*>(smem + H::TICKET), sync))
        return;
    }
    // A warp's rows of Q are its own, but products of the whole warpgroup read them.
    named_sync(OWN + warpgroup, 128);
    const int line0 = (warp & 3) * 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float x = sum[h];
      x += __shfl_xor_sync(FULL_WARP, x, 1);
      x += __shfl_xor_sync(FULL_WARP, x, 2);
      const float inverse = value_gain<KV>() / x;
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        *reinterpret_cast<u32*>(my_q + placed(line0 + 8 * h + g, n, 64) + 4 * t) =
            result_pair<SCALED>(o[4 * n + 2 * h] * inverse, o[4 * n + 2 * h + 1] * inverse);
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
          *reinterpret_cast<const uint4*>(my_q + placed(line0 + line, column, 64));
    }
  }
}
