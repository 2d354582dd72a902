// Paged prefill attention: causal with an offset, many spans in one launch.
//
// Row i of a span sits at position start + i and attends every cached token below it and itself;
// K and V, the step's own included, are read from the paged pool. A CTA computes some packed rows
// of one KV head: packed row r of a span is its token r / group and, of the KV head's group,
// query head r % group, so that all heads of a group share the K and V tiles.
//
// FlashAttention-2's loop: for each 64 tokens S = Q K^T, P = 2^(scale S - max), O += P V. K and V
// tiles lie in shared memory as halves, 16-byte chunks swizzled so that eight rows of one chunk
// column fall into different banks. Quantised codes are staged as they are and converted once a
// CTA. Each of WARPS warps has 16 * MT rows; P stays in registers as the A operand of P V.
//
// The running maximum is raised only when a score exceeds it by more than 2^8 in the result (2^2
// with scales of V): sums and products are relative to any reference, and 2^8 is far from what a
// half P or a float sum can hold. So most tiles need no rescaling and no exchange between lanes. Tiles of tokens begin at
// multiples of 64 whatever the span, so a row's bits do not depend on how a prompt is cut (unless
// the tokens of a tile of rows are cut into parts: see prefill_parts.cuh).
#include "prefill_parts.cuh"

constexpr int TILE = 64;   // tokens of a K or V tile
constexpr int GROUPS = 4;  // of 16 tokens, which always lie in one block

// Where the 16-byte chunk `chunk` of row `row` lies in a tile of rows of D halves.
template <int D>
DEV u32 swizzled(u32 row, u32 chunk) {
  static_assert(D == 64 || D == 96 || D == 128, "head dims with a conflict-free swizzle");
  // Rows of 12 chunks start 4 banks-of-16-bytes apart, so two bits of the row are enough.
  const u32 key = D == 96 ? (row >> 1) & 3 : row & 7;
  return row * (2 * D) + ((chunk ^ key) << 4);
}

// The offset `k` pairs of chunks to the right of `base` = swizzled(row, 0 or 1): the swizzle is an
// exclusive or, so one register and a constant give all columns of a row.
template <int D>
DEV u32 columns_on(u32 base, int k) {
  return D == 96 ? (base ^ ((k & 1) << 5)) + (k >> 1) * 64 : base ^ (k << 5);
}

// The i-th 16-byte chunk that one of THREADS threads copies or converts, in rows of PER_ROW chunks.
template <int PER_ROW, int THREADS>
DEV void chunk_of(u32 thread, int i, u32& row, u32& chunk) {
  if constexpr (THREADS % PER_ROW == 0) {
    // Said like this, the compiler sees that only constants tell one i from another.
    row = thread / PER_ROW + i * (THREADS / PER_ROW), chunk = thread % PER_ROW;
  } else {
    row = (thread + i * THREADS) / PER_ROW, chunk = (thread + i * THREADS) % PER_ROW;
  }
}

// Two words of four codes to halves.
template <int CODE>
DEV uint4 code_chunk(u32 first, u32 second) {
  uint4 r;
  code_halves<CODE>(first, r.x, r.y);
  code_halves<CODE>(second, r.z, r.w);
  return r;
}

// A staged tile of codes [TILE, D] to swizzled halves, by THREADS threads.
template <int CODE, int D, int THREADS>
DEV void convert_tile(u32 thread, const u8* stage, u8* to) {
  constexpr int PER_ROW = D / 16;
#pragma unroll
  for (int i = 0; i < (TILE * PER_ROW + THREADS - 1) / THREADS; i++) {
    u32 row, chunk;
    chunk_of<PER_ROW, THREADS>(thread, i, row, chunk);
    if (TILE * PER_ROW % THREADS && row >= TILE) break;
    const uint4 codes = *reinterpret_cast<const uint4*>(stage + (thread + i * THREADS) * 16);
    *reinterpret_cast<uint4*>(to + swizzled<D>(row, 2 * chunk)) =
        code_chunk<CODE>(codes.x, codes.y);
    *reinterpret_cast<uint4*>(to + swizzled<D>(row, 2 * chunk + 1)) =
        code_chunk<CODE>(codes.z, codes.w);
  }
}

template <int N>
struct Bytes {
  static constexpr int value = N;
};

// How a KV format lies in the pool and in shared memory.
template <int KV, int D, int MT, int WARPS>
struct Prefill {
  using Traits = KvTraits<KV>;
  static constexpr bool K_CODES = Traits::K_CODE != CODE_F16, V_CODES = Traits::V_CODE != CODE_F16;
  static constexpr int ROWS = 16 * MT * WARPS;
  static constexpr int HALVES = TILE * D * 2;  // bytes of a tile of halves
  // Halves straight from the pool arrive while the tile before is in use: two buffers.
  static constexpr int K_BUFFERS = K_CODES ? 1 : 2, V_BUFFERS = V_CODES ? 1 : 2;
  static constexpr int Q = 0;
  static constexpr int K = Q + ROWS * D * 2;
  static constexpr int V = K + K_BUFFERS * HALVES;
  static constexpr int K_STAGE = V + V_BUFFERS * HALVES;
  static constexpr int V_STAGE = K_STAGE + (K_CODES ? TILE * D : 0);
  // half [2 (buffers), 2 (K, V), TILE]: read while the next tile's arrive.
  static constexpr int SCALES = V_STAGE + (V_CODES ? TILE * D : 0);
  static constexpr int IDS = SCALES + (Traits::SCALED ? 8 * TILE : 0);  // int [2, GROUPS]
  static constexpr int JOB = IDS + 4 * 2 * GROUPS;                       // int4
  static constexpr int WARP_JOBS = JOB + 16;                              // int4 [WARPS]
  static constexpr int BYTES = WARP_JOBS + 16 * WARPS;
};

// out half [rows, heads * D]; q half, rows `q_stride` elements apart, heads contiguous; tiles: see
// prefill_parts.cuh; spans {first row of q and out, rows, start, row of tables}.
// Grid (kv_heads, tiles), 32 * WARPS threads, Prefill<>::BYTES of dynamic shared memory.
template <int KV, int D, int MT, int WARPS>
__global__ void __launch_bounds__(32 * WARPS, WARPS == 8 ? 1 : MT == 2 ? 2 : 3)
    paged_prefill(__half* __restrict__ out, const __half* __restrict__ q, i64 q_stride,
                  const u8* __restrict__ pool, i64 block_bytes, i64 k_offset, i64 v_offset,
                  i64 scale_offset, i32 block_shift, i32 kv_heads, i32 group, const int4* __restrict__ tiles,
                  const int4* __restrict__ spans, const i32* __restrict__ tables,
                  i32 table_stride, float scale_log2, float4* partials, i32* tickets) {
  using P = Prefill<KV, D, MT, WARPS>;
  constexpr int CHUNKS = D / 8, KSTEPS = D / 16, WARP_ROWS = 16 * MT, THREADS = 32 * WARPS;
  extern __shared__ __align__(128) u8 smem[];
  i32* const ids = reinterpret_cast<i32*>(smem + P::IDS);

  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int kv_head = blockIdx.x;
  const PrefillJob part = prefill_job(tiles[blockIdx.y]);
  const int4 span = spans[part.span];
  const int row0 = part.row, rows = span.y * group, start = span.z;
  const int last = min(row0 + P::ROWS, rows) - 1;
  const int kv_end = min(part.end, start + last / group + 1);  // tokens that any row attends
  const int j0 = part.begin / TILE;
  const int block_size = 1 << block_shift;


  // What the matrix products don't need waits in shared memory, or it would be spilled. For the
  // copies: where the block table begins, its last entry in use, kv_end, and a zero: what is
  // derived from that the compiler cannot compute ahead of the loop. For each warp: positions of
  // its first and last row (-1 if it has none), start, its first row.
  if (tid == 0)
    *reinterpret_cast<int4*>(smem + P::JOB) =
        make_int4(span.w * table_stride, (kv_end - 1) >> block_shift, kv_end, 0);
  int4* const warp_job = reinterpret_cast<int4*>(smem + P::WARP_JOBS) + warp;
  if (lane == 0) {
    const int first = row0 + warp * WARP_ROWS;
    *warp_job = make_int4(
        start + first / group,
        first > last ? -1 : start + min(first + WARP_ROWS - 1, last) / group, start, first);
  }
  auto block_of = [&](const int4& job, int j, int part) {
    return tables + job.x + min((j * TILE + 16 * part) >> block_shift, job.y);
  };
  // Copies rows of the pool to shared memory: TILE rows of `row_bytes`, swizzled for halves.
  auto load_tile = [&](const int4& job, int j, auto element_bytes, u8* to, i64 offset) {
    constexpr bool CODES = decltype(element_bytes)::value == 1;
    constexpr int ROW = CODES ? D : 2 * D, PER_ROW = ROW / 16;
#pragma unroll
    for (int i = 0; i < (TILE * PER_ROW + THREADS - 1) / THREADS; i++) {
      const u32 copier = (tid + job.w) & (THREADS - 1);
      u32 row, chunk;
      chunk_of<PER_ROW, THREADS>(copier, i, row, chunk);
      if (TILE * PER_ROW % THREADS && row >= TILE) break;
      const int token = j * TILE + row;
      const u8* from = pool + ids[(j & 1) * GROUPS + (row >> 4)] * block_bytes + offset +
                       static_cast<i64>(kv_head * block_size + (token & (block_size - 1))) * ROW +
                       chunk * 16;
      cp_async16_zfill(to + (CODES ? (copier + i * THREADS) * 16 : swizzled<D>(row, chunk)), from,
                       token < job.z ? 16 : 0);
    }
  };
  // Tile j, and the block ids that tile j + 1 will need.
  auto load = [&](int j) {
    const int half = j & 1;
    const int4 job = *reinterpret_cast<const int4*>(smem + P::JOB);
    const int copier = (tid + job.w) & (THREADS - 1);
    if (copier < GROUPS) cp_async4(ids + (half ^ 1) * GROUPS + copier, block_of(job, j + 1, copier));
    load_tile(job, j, Bytes<P::Traits::K_BYTES>(),
              smem + (P::K_CODES ? P::K_STAGE : P::K + half * P::HALVES), k_offset);
    load_tile(job, j, Bytes<P::Traits::V_BYTES>(),
              smem + (P::V_CODES ? P::V_STAGE : P::V + half * P::HALVES), v_offset);
    if constexpr (P::Traits::SCALED) {
      if (copier < 16) {
        // Eight scales a chunk: K of the tile's 64 tokens, then V.
        const int which = copier >> 3, token = j * TILE + (copier & 7) * 8;
        const u8* from = pool + ids[half * GROUPS + ((copier & 7) >> 1)] * block_bytes +
                         scale_offset +
                         2 * ((which * kv_heads + kv_head) * block_size +
                              (token & (block_size - 1)));
        cp_async16_zfill(smem + P::SCALES + half * 4 * TILE + copier * 16, from,
                         max(0, min(16, 2 * (job.z - token))));
      }
    }
  };

#pragma unroll 4
  for (int i = 0; i < P::ROWS * CHUNKS / THREADS; i++) {
    u32 row, chunk;
    chunk_of<CHUNKS, THREADS>(tid, i, row, chunk);
    const int packed = min(row0 + static_cast<int>(row), last);
    const __half* from = q + (span.x + packed / group) * q_stride +
                         (kv_head * group + packed % group) * D + chunk * 8;
    cp_async16(smem + P::Q + swizzled<D>(row, chunk), from);
  }
  __syncthreads();
  if (tid < GROUPS)
    ids[tid] = *block_of(*reinterpret_cast<const int4*>(smem + P::JOB), j0, tid);
  __syncthreads();
  load(j0);
  cp_async_commit();

  float o[MT][D / 8][4], top[MT][2], sum[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int n = 0; n < D / 8; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.f;
    top[m][0] = top[m][1] = -infinity();
    sum[m][0] = sum[m][1] = 0.f;
  }
  constexpr int K_CODE = P::Traits::K_CODE, V_CODE = P::Traits::V_CODE;

  for (int j = j0; j * TILE < reinterpret_cast<const int4*>(smem + P::JOB)->z; j++) {
    cp_async_wait<0>();
    __syncthreads();  // tile j has landed, and nobody reads the buffers of tile j - 1 any more
    const int4 job = *reinterpret_cast<const int4*>(smem + P::JOB);
    if constexpr (P::V_CODES) {
      const u32 copier = (tid + job.w) & (THREADS - 1);
      // Codes to halves; afterwards the staging is free for the next tile.
      if constexpr (P::K_CODES)
        convert_tile<K_CODE, D, THREADS>(copier, smem + P::K_STAGE, smem + P::K);
      convert_tile<V_CODE, D, THREADS>(copier, smem + P::V_STAGE, smem + P::V);
      __syncthreads();
    }
    if ((j + 1) * TILE < job.z) load(j + 1);
    cp_async_commit();

    const int4 mine = *warp_job;
    if (j * TILE <= mine.y) {
      // What ldmatrix reads: rows of Q and of K with the two halves of a k-step as its columns,
      // rows of V (tokens) transposed.
      const u32 here = (tid + job.w) & (THREADS - 1), line = here & 31, t = line & 3;
      u32 v_base = swizzled<D>(line & 15, line >> 4);
      u32 q_base = P::Q + (here >> 5) * (WARP_ROWS * 2 * D) + v_base;
      u32 k_base = P::K + (P::K_CODES ? 0 : (j & 1) * P::HALVES) +
                   swizzled<D>((line & 7) + ((line >> 4) << 3), (line >> 3) & 1);
      v_base += P::V + (P::V_CODES ? 0 : (j & 1) * P::HALVES);
      // Without these the compiler keeps every column's offset in a register of its own, and spills.
      opaque(q_base);
      opaque(k_base);
      opaque(v_base);
      float s[MT][TILE / 8][4];
#pragma unroll
      for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
      }
#pragma unroll
      for (int k = 0; k < KSTEPS; k++) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
          ldmatrix_x4(a[m], smem + columns_on<D>(q_base, k) + m * 32 * D);
#pragma unroll
        for (int n = 0; n < TILE / 16; n++) {
          u32 b[4];
          ldmatrix_x4(b, smem + columns_on<D>(k_base, k) + n * 32 * D);
#pragma unroll
          for (int m = 0; m < MT; m++) {
            mma16816(s[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
            mma16816(s[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
          }
        }
      }
      if constexpr (P::Traits::SCALED) {
        const u8* const scales = smem + P::SCALES + (j & 1) * 4 * TILE;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
          const float2 scale =
              __half22float2(*reinterpret_cast<const __half2*>(scales + 16 * n + 4 * t));
#pragma unroll
          for (int m = 0; m < MT; m++) {
            s[m][n][0] *= scale.x, s[m][n][1] *= scale.y;
            s[m][n][2] *= scale.x, s[m][n][3] *= scale.y;
          }
        }
      }
      if (j * TILE + TILE - 1 > mine.x) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int limit =
                mine.z + (mine.w + 16 * m + 8 * h + static_cast<int>(line >> 2)) / group -
                j * TILE - 2 * static_cast<int>(t);
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
              if (8 * n > limit) s[m][n][2 * h] = -infinity();
              if (8 * n + 1 > limit) s[m][n][2 * h + 1] = -infinity();
            }
          }
        }
      }
      // Softmax: raise the reference only where a score of the warp leaves the slack.
      const float scale = scale_log2 * code_gain<K_CODE>();
      float tile_top[MT][2];
      bool leaves = false;
#pragma unroll
      for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float x = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
          for (int n = 1; n < TILE / 8; n++)
            x = fmaxf(x, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
          tile_top[m][h] = x;
          leaves |= (x - top[m][h]) * scale > SLACK<P::Traits::SCALED>;
        }
      }
      if (__any_sync(FULL_WARP, leaves)) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float x = tile_top[m][h];
            x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
            x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
            // By the row's own scores alone: its result must not depend on its neighbours.
            if (!((x - top[m][h]) * scale > SLACK<P::Traits::SCALED>)) x = top[m][h];
            const float keep = ex2((top[m][h] - x) * scale);
            top[m][h] = x;
            sum[m][h] *= keep;
#pragma unroll
            for (int n = 0; n < D / 8; n++) o[m][n][2 * h] *= keep, o[m][n][2 * h + 1] *= keep;
          }
        }
      }
#pragma unroll
      for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float base = top[m][h] * scale;
#pragma unroll
          for (int n = 0; n < TILE / 8; n++) {
            s[m][n][2 * h] = ex2(s[m][n][2 * h] * scale - base);
            s[m][n][2 * h + 1] = ex2(s[m][n][2 * h + 1] * scale - base);
            sum[m][h] += s[m][n][2 * h] + s[m][n][2 * h + 1];
          }
        }
      }
      if constexpr (P::Traits::SCALED) {
        const u8* const scales = smem + P::SCALES + (j & 1) * 4 * TILE + 2 * TILE;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
          const float2 by = __half22float2(
              u2h(lifted(*reinterpret_cast<const u32*>(scales + 16 * n + 4 * t))));
#pragma unroll
          for (int m = 0; m < MT; m++) {
            s[m][n][0] *= by.x, s[m][n][1] *= by.y;
            s[m][n][2] *= by.x, s[m][n][3] *= by.y;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < TILE / 16; k++) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
          a[m][0] = pack_half2(s[m][2 * k][0], s[m][2 * k][1]);
          a[m][1] = pack_half2(s[m][2 * k][2], s[m][2 * k][3]);
          a[m][2] = pack_half2(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
          a[m][3] = pack_half2(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
          u32 b[4];
          ldmatrix_x4_trans(b, smem + columns_on<D>(v_base, n) + k * 32 * D);
#pragma unroll
          for (int m = 0; m < MT; m++) {
            mma16816(o[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
            mma16816(o[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
          }
        }
      }
    }
  }

  const int parts = tiles[blockIdx.y].w;
  if (parts >= 0) {
    auto sync = [] { __syncthreads(); };
    if (!merge_parts<MT, D / 8, THREADS>(o, top, sum, partials, tickets, parts, kv_head, kv_heads,
                                         tid, scale_log2 * code_gain<K_CODE>(), ids, sync))
      return;
  }
  if (warp_job->y < 0) return;
  // Derived again rather than kept in registers all along.
  const int zero = reinterpret_cast<const int4*>(smem + P::JOB)->w, heads = kv_heads * group;
  const u32 thread = (tid + zero) & (THREADS - 1), line = thread & 31, warp_row = (thread >> 5) * WARP_ROWS;
  // Each warp's rows of Q are its own: they become the staging of its rows of the result.
#pragma unroll
  for (int m = 0; m < MT; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float x = sum[m][h];
      x += __shfl_xor_sync(FULL_WARP, x, 1);
      x += __shfl_xor_sync(FULL_WARP, x, 2);
      const float inverse = value_gain<KV>() / x;
      const u32 row = warp_row + 16 * m + 8 * h + (line >> 2);
#pragma unroll
      for (int n = 0; n < D / 8; n++)
        *reinterpret_cast<u32*>(smem + P::Q + swizzled<D>(row, n) + 4 * (line & 3)) =
            result_pair<P::Traits::SCALED>(o[m][n][2 * h] * inverse, o[m][n][2 * h + 1] * inverse);
    }
  }
  __syncwarp();
  const int4 tile_again = tiles[blockIdx.y + zero];
  const int4 span_again = spans[tile_again.x];
  const int divisor = group + zero, end = span_again.y * divisor;
#pragma unroll 4
  for (int i = 0; i < WARP_ROWS * CHUNKS / 32; i++) {
    const u32 index = line + i * 32, row = warp_row + index / CHUNKS,
              chunk = index % CHUNKS;
    const int packed = tile_again.y + row;
    if (packed >= end) break;
    const i64 head = static_cast<i64>(span_again.x + packed / divisor) * heads + kv_head * group +
                     packed % divisor;
    *reinterpret_cast<uint4*>(out + head * D + chunk * 8) =
        *reinterpret_cast<const uint4*>(smem + P::Q + swizzled<D>(row, chunk));
  }
}
