// Linear layers for 17 to 256 rows by Hopper's warpgroup products (sm_90a): FP16 and nested weights.
//
// W is operand A, in registers: whatever it is stored as, it passes through shared memory as it is,
// and is decoded on its way to the product. X is operand B, in shared memory. Four warps only copy:
// two of them W, two X, a ring of stages ahead, with cp.async that arrive at a barrier by
// themselves. WGS warpgroups have 64 rows of W each and multiply.
//
// The work is a row of steps: those of K for the first ROWS rows of W, then for the next ROWS. A CTA
// takes `share` of them, whatever tiles these belong to, and copies of the next tile are under way
// while one is finished. Where CTAs share a tile, the last to come adds their sums in the order
// of K. So a result depends on `share`, STEP and ROWS, but neither on M nor on how the weights are
// stored: FP16 mode of nested weights has the bits of plain FP16.
//
// How the weights are stored is the policy F:
//   PLANES, BYTES     planes that it reads, bytes of a weight in each
//   UNIT              what all sums are multiplied by at the end
//   planes[]          of bytes, rows of K weights
//   PAIRS             whether a lane has four neighbouring k of every 16, of which the first two are
//                     its first in the product's order; X is turned to that order in shared memory
//   lane_offset<STEP>(row, lane)    where in a plane's stage a lane reads, row: the first of its warp
//   read<STEP, PLANE>(plane, offset, unit, raw)     what it reads of 32 k
//   decode(raw, half, a)            the A operand of the first or the second 16 of them
//   Rows              what a lane needs to know of its two rows of a tile
//   rows(n, N)        of row n and n + 8
//   Factors, factors(rows), shift(factors, a)   what fragments are multiplied by
//   scale(rows, half)               what their sums are multiplied by
//   extras(row, end), extra(row, x) as in gemm_shared.cuh
#include "cluster.cuh"
#include "gemm_finish.cuh"
#include "nested.cuh"
#include "pipeline.cuh"
#include "wgmma.cuh"

constexpr int GROUP = 32;      // rows of X that are finished at once
constexpr int COPIERS = 64;    // threads that copy W; as many copy X
constexpr int EVERYONE = 1;    // named barrier of the warpgroups that multiply

// Where 16-byte chunk `chunk` of row `row` is, in rows of BYTES (64, 128 or a multiple of that): in
// every eight rows of a column of chunks each bank occurs once.
template <int BYTES>
DEV u32 turned(u32 row, u32 chunk) {
  if (BYTES == 64) return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
  return row * BYTES + (chunk >> 3) * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

template <class F, int COLUMNS, int WGS, int STEP, int STAGES>
struct Warpgroups {
  static constexpr int ROWS = 64 * WGS, MULTIPLIERS = 128 * WGS, PITCH = finish_pitch(ROWS);
  static constexpr int X_TILE = COLUMNS * 128;  // 64 k of X
  static constexpr int X_BYTES = STEP / 64 * X_TILE;
  static constexpr int ROW_BYTES = STEP * F::BYTES, PLANE = ROWS * ROW_BYTES;
  static constexpr int STAGE = X_BYTES + F::PLANES * PLANE;  // X first
  static constexpr int SUMS = STAGES * STAGE;                // float [GROUP][PITCH]
  static constexpr int BARRIERS = SUMS + GROUP * PITCH * 4;  // full [STAGES], empty [STAGES]
  static constexpr int BYTES = BARRIERS + 16 * STAGES;
  // Registers of a thread: what there are for each of one CTA an SM, what copying needs, and what
  // that leaves to those that multiply, who take it where their sums are many.
  static constexpr int EQUAL = 65536 / (MULTIPLIERS + 128) / 8 * 8, COPY_REGISTERS = 56;
  static constexpr int REGISTERS = (EQUAL * (WGS + 1) - COPY_REGISTERS) / WGS / 8 * 8;
  static constexpr bool MOVED = COLUMNS * WGS >= 192;
  static_assert(STAGE % 1024 == 0 && STEP % 64 == 0, "operand tiles are at multiples of 1024");
};

// Which steps this CTA has, and who else has some of a tile's.
struct Steps {
  i32 begin, end, steps, share;  // `steps` in a tile

  __device__ __forceinline__ Steps(i32 tiles, i32 steps, i32 share, i32 cluster)
      : begin(static_cast<i32>(blockIdx.x) * share), end(min(begin + share, tiles * steps)),
        steps(steps), share(share) {
    if (cluster == 1) return;
    const i32 tile = blockIdx.x / cluster, rank = blockIdx.x % cluster;
    begin = tile * steps + steps * rank / cluster;
    end = tile * steps + steps * (rank + 1) / cluster;
  }

  __device__ __forceinline__ i32 first(i32 tile) const { return tile * steps / share; }
  __device__ __forceinline__ i32 last(i32 tile) const { return (tile * steps + steps - 1) / share; }

  // Where a CTA leaves its sums of a tile that it shares: at most its first tile and its last one.
  __device__ __forceinline__ i32 place(i32 cta, i32 tile) const {
    if (steps % share == 0) return cta;
    return 2 * cta + (tile != cta * share / steps);
  }
};

// Copies the 16 bytes of chunk `chunk` of every PASS-th of COUNT rows from `row`, of which there are
// `left`: `bytes` of them, the rest zeros. `tile` has rows of BYTES. Addresses are made ahead of the
// copies that use them, each in registers of its own: a copy takes long to read them.
template <int COUNT, int PASS, int BYTES>
DEV void copy_rows(u8* tile, const u8* from, i64 stride, int row, int chunk, int left, int bytes) {
  constexpr int EACH = COUNT / PASS, TURNS = PASS % 8 ? 8 / PASS : 1;
  constexpr int BATCH = EACH < 8 ? EACH : EACH % 8 ? 6 : 8;
  static_assert(BATCH % TURNS == 0 && EACH % BATCH == 0, "whole batches");
  u8* to[TURNS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) to[i] = tile + turned<BYTES>(row + i * PASS, chunk) - i * PASS * BYTES;
#pragma unroll
  for (int first = 0; first < EACH; first += BATCH) {
    const u8* sources[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) sources[i] = from + i * stride;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) opaque(sources[i]);
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if ((first + i) * PASS < left)
        cp_async16_zfill(to[i % TURNS] + (first + i) * PASS * BYTES, sources[i], bytes);
    from += BATCH * stride;
  }
}

// One of COPIERS threads copies its share of W, stage after stage.
template <class C, class F, int STEP, int STAGES>
DEV void copy_weights(const F& weights, const Steps& work, u8* shared, u64* full, u64* empty,
                      int thread, i32 N, i32 K) {
  constexpr int CHUNKS = C::ROW_BYTES / 16, PASS = COPIERS / CHUNKS;  // of a row; rows at once
  const int chunk = thread % CHUNKS, row = thread / CHUNKS;
  const i64 pitch = static_cast<i64>(K) * F::BYTES;
  int slot = 0;
  u32 parity = 1;
  i32 tile = work.begin / work.steps, step = work.begin - tile * work.steps;
  for (i32 unit = work.begin; unit < work.end; ++unit) {
    arrivals_wait(empty + slot, parity);
    u8* const stage = shared + slot * C::STAGE + C::X_BYTES;
    const int left = N - tile * C::ROWS - row;  // rows from this thread's first
    const i64 at = (tile * C::ROWS + row) * pitch + step * C::ROW_BYTES + 16 * chunk;
    const bool within = step * C::ROW_BYTES + 16 * chunk < pitch;
#pragma unroll
    for (int plane = 0; plane < F::PLANES; ++plane)
      copy_rows<C::ROWS, PASS, C::ROW_BYTES>(stage + plane * C::PLANE,
                                             weights.planes[plane] + (within ? at : 0),
                                             within ? PASS * pitch : 0, row, chunk, left,
                                             within ? 16 : 0);
    arrive_copied(full + slot);
    if (++slot == STAGES) slot = 0, parity ^= 1;
    if (++step == work.steps) step = 0, ++tile;
  }
}

// The same for X, whose rows from m0 there are `rows` of.
template <class C, int COLUMNS, int STEP, int STAGES>
DEV void copy_inputs(const __half* x, const Steps& work, u8* shared, u64* full, u64* empty,
                     int thread, i32 rows, i32 K) {
  constexpr int CHUNKS = STEP / 8, PASS = COPIERS / CHUNKS;
  const int chunk = thread % CHUNKS, row = thread / CHUNKS, left = rows - row;
  int slot = 0;
  u32 parity = 1;
  i32 step = work.begin % work.steps;
  for (i32 unit = work.begin; unit < work.end; ++unit) {
    arrivals_wait(empty + slot, parity);
    const int k = step * STEP + 8 * chunk;
    const bool within = k < K;
    const __half* from = within ? x + static_cast<i64>(row) * K + k : x;
    copy_rows<COLUMNS, PASS, 128>(shared + slot * C::STAGE + chunk / 8 * C::X_TILE,
                                  reinterpret_cast<const u8*>(from),
                                  within ? static_cast<i64>(2 * PASS) * K : 0, row, chunk % 8, left,
                                  within ? 16 : 0);
    arrive_copied(full + slot);
    if (++slot == STAGES) slot = 0, parity ^= 1;
    if (++step == work.steps) step = 0;
  }
}

// The same where the policy has PAIRS: of every 16 k, 0 1 4 5 8 9 12 13 come before the others. Each
// warp turns what it has copied, when that has come.
template <class C, int COLUMNS, int STEP, int STAGES>
DEV void copy_paired_inputs(const __half* x, const Steps& work, u8* shared, u64* full, u64* empty,
                            int thread, i32 rows, i32 K) {
  constexpr int CHUNKS = STEP / 8, PASS = COPIERS / CHUNKS, EACH = COLUMNS / PASS;
  constexpr int AHEAD = STAGES - 1, BATCH = C::MOVED || EACH < 8 ? 2 : 4;
  const int chunk = thread % CHUNKS, row = thread / CHUNKS, left = rows - row, odd = chunk % 2;
  int slot = 0, ahead_slot = 0;
  u32 parity = 1;
  i32 ahead = work.begin, ahead_step = work.begin % work.steps;
  auto request = [&](bool waits) {
    if (ahead < work.end) {
      if (waits) arrivals_wait(empty + ahead_slot, parity);
      const int k = ahead_step * STEP + 8 * chunk;
      const bool within = k < K;
      const __half* from = within ? x + static_cast<i64>(row) * K + k : x;
      copy_rows<COLUMNS, PASS, 128>(shared + ahead_slot * C::STAGE + chunk / 8 * C::X_TILE,
                                    reinterpret_cast<const u8*>(from),
                                    within ? static_cast<i64>(2 * PASS) * K : 0, row, chunk % 8,
                                    left, within ? 16 : 0);
      if (++ahead_slot == STAGES) ahead_slot = 0, parity ^= 1;
      if (++ahead_step == work.steps) ahead_step = 0;
      ++ahead;
    }
    cp_async_commit();
  };
  for (int i = 0; i < AHEAD; ++i) request(false);
  for (i32 unit = work.begin; unit < work.end; ++unit) {
    cp_async_wait<AHEAD - 1>();
    __syncwarp();
    u8* const tile = shared + slot * C::STAGE + chunk / 8 * C::X_TILE;
    // Of two lanes with the chunks of a pair one turns the even rows, the other the odd ones.
#pragma unroll 1
    for (int first = 0; first < EACH / 2; first += BATCH) {
      uint4 own[BATCH], other[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int at = row + (2 * (first + i) + odd) * PASS;
        own[i] = *reinterpret_cast<const uint4*>(tile + turned<128>(at, chunk % 8));
        other[i] = *reinterpret_cast<const uint4*>(tile + turned<128>(at, chunk % 8 ^ 1));
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int at = row + (2 * (first + i) + odd) * PASS;
        const uint4 low = odd ? other[i] : own[i], high = odd ? own[i] : other[i];
        const uint4 before = make_uint4(low.x, low.z, high.x, high.z);
        const uint4 after = make_uint4(low.y, low.w, high.y, high.w);
        *reinterpret_cast<uint4*>(tile + turned<128>(at, chunk % 8)) = odd ? after : before;
        *reinterpret_cast<uint4*>(tile + turned<128>(at, chunk % 8 ^ 1)) = odd ? before : after;
      }
    }
    fence_shared_for_wgmma();
    arrive(full + slot);
    if (++slot == STAGES) slot = 0;
    request(true);
  }
}

// `workspace` has a block of ROWS * COLUMNS floats for each place of a CTA that shares tiles,
// `tickets` a zero for each tile (and is left so); both by blocks of COLUMNS rows of X.
// Grid: x over shares of steps, y over blocks of COLUMNS rows of X. With a CLUSTER of CTAs these
// share a tile, without a workspace: each leaves its sums in its shared memory and adds up and
// finishes those of its share of X's rows.
template <class F, int COLUMNS, int WGS, int STEP, int STAGES, int CLUSTER>
DEV void warpgroup_gemm(const F& weights, const __half* __restrict__ x, const Finish& f, i32 M,
                        i32 N, i32 K, float* workspace, i32* tickets, i32 share, u8* shared) {
  using C = Warpgroups<F, COLUMNS, WGS, STEP, STAGES>;
  constexpr int ROWS = C::ROWS, MULTIPLIERS = C::MULTIPLIERS, PITCH = C::PITCH;
  __shared__ float rstd[COLUMNS];
  __shared__ bool is_last;
  u64* const full = reinterpret_cast<u64*>(shared + C::BARRIERS);
  u64* const empty = full + STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const i32 tiles = (N + ROWS - 1) / ROWS, m0 = static_cast<i32>(blockIdx.y) * COLUMNS;
  const Steps work(tiles, (K + STEP - 1) / STEP, share, CLUSTER);

  launch_dependents();
  if (threadIdx.x < STAGES) {
    arrivals_init(full + threadIdx.x, 2 * COPIERS);
    arrivals_init(empty + threadIdx.x, 4 * WGS);
  }
  __syncthreads();
  if (warp >= 4 * WGS) {
    if (C::MOVED) registers_at_most<C::COPY_REGISTERS>();
    const int thread = threadIdx.x - MULTIPLIERS;
    if (thread < COPIERS) {
      copy_weights<C, F, STEP, STAGES>(weights, work, shared, full, empty, thread, N, K);
    } else {
      wait_for_inputs();
      const __half* const rows = x + static_cast<i64>(m0) * K;
      if (F::PAIRS)
        copy_paired_inputs<C, COLUMNS, STEP, STAGES>(rows, work, shared, full, empty,
                                                     thread - COPIERS, M - m0, K);
      else
        copy_inputs<C, COLUMNS, STEP, STAGES>(rows, work, shared, full, empty, thread - COPIERS,
                                              M - m0, K);
    }
    cp_async_wait<0>();
    return;
  }
  if (C::MOVED) registers_at_least<C::REGISTERS>();

  float acc[COLUMNS / 2];
  float* const sums = reinterpret_cast<float*>(shared + C::SUMS);
  const u32 offset = F::template lane_offset<STEP>(16 * warp, lane);
  i32 tile = work.begin / work.steps, unit = work.begin;
  typename F::Rows next_rows = weights.rows(tile * ROWS + 16 * warp + g, N);
  wait_for_inputs();
  tile_scales<COLUMNS, 4 * WGS>(f, rstd, m0, M, 1.f / K);

  int slot = 0;
  u32 parity = 0;
  for (; unit < work.end; ++tile) {
    const typename F::Rows rows = next_rows;
    const typename F::Factors factors = F::factors(rows);
    const i32 n0 = tile * ROWS, stop = min(work.end, (tile + 1) * work.steps);
    next_rows = weights.rows(n0 + ROWS + 16 * warp + g, N);
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) acc[i] = 0.f;
    for (; unit < stop; ++unit) {
      const u8* const stage = shared + slot * C::STAGE;
      arrivals_wait(full + slot, parity);
      typename F::Raw raw[STEP / 32];
#pragma unroll
      for (int i = 0; i < STEP / 32; ++i)
        F::template read<STEP, C::PLANE>(stage + C::X_BYTES, offset, i, raw[i]);
      fence_shared_for_wgmma();
      const u64 b = wgmma_tile(stage, 16, 1024);
      // No branch from here to the wait: across one, ptxas forgets that a product still reads A.
#pragma unroll
      for (int batch = 0; batch < STEP / 64; ++batch) {
        u32 a[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          F::decode(raw[2 * batch + i / 2], i % 2, a[i]);
          F::shift(factors, a[i]);
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          wgmma_registers_k(acc, a[i], b + (batch * C::X_TILE + 32 * i) / 16);
        wgmma_commit();
      }
      wgmma_wait<0>(acc);
      if (lane == 0) arrive(empty + slot);
      if (++slot == STAGES) slot = 0, parity ^= 1;
    }

    if constexpr (CLUSTER > 1) {
      constexpr int SLICE = COLUMNS / CLUSTER, QUADS = ROWS / 4;
      static_assert(COLUMNS * PITCH * 4 <= C::SUMS, "the ring has room for all sums");
      const int own = blockIdx.x % CLUSTER * SLICE, m = m0 + own;
      const float scales[2] = {F::UNIT * F::scale(rows, 0), F::UNIT * F::scale(rows, 1)};
      float* const parts = reinterpret_cast<float*>(shared);
      named_sync(EVERYONE, MULTIPLIERS);  // nobody reads the ring any more
#pragma unroll
      for (int i = 0; i < COLUMNS / 8; ++i)
#pragma unroll
        for (int v = 0; v < 4; ++v)
          parts[(8 * i + 2 * t + v % 2) * PITCH + 16 * warp + g + 8 * (v / 2)] =
              acc[4 * i + v] * scales[v / 2];
      cluster_arrive<CLUSTER>();
      cluster_wait();
      for (int e = threadIdx.x; e < SLICE * QUADS; e += MULTIPLIERS) {
        const int at = (own + e / QUADS) * PITCH + e % QUADS * 4;
        float4 part[CLUSTER];
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) part[rank] = cluster_load(parts + at, rank);
#pragma unroll
        for (int rank = 1; rank < CLUSTER; ++rank) {
          part[0].x += part[rank].x, part[0].y += part[rank].y;
          part[0].z += part[rank].z, part[0].w += part[rank].w;
        }
        *reinterpret_cast<float4*>(sums + e / QUADS * PITCH + e % QUADS * 4) = part[0];
      }
      cluster_arrive<CLUSTER>();
      named_sync(EVERYONE, MULTIPLIERS);
      if (m < M) {
        if (weights.extras(n0, min(n0 + ROWS, N))) {
          for (int e = threadIdx.x; e < ROWS * SLICE; e += MULTIPLIERS) {
            const int row = e / SLICE, column = e % SLICE;
            if (n0 + row < N && m + column < M)
              sums[column * PITCH + row] +=
                  weights.extra(n0 + row, x + static_cast<i64>(m + column) * K);
          }
          named_sync(EVERYONE, MULTIPLIERS);
        }
        finish_tile<ROWS, SLICE, MULTIPLIERS>(f, sums, rstd + own, m, n0, M, N);
      }
      cluster_wait();  // others may still read this CTA's sums
      return;
    }

    const i32 first = work.first(tile), last = work.last(tile);
    if (first != last) {
      const i32 block = static_cast<i32>(blockIdx.y) * gridDim.x * 2;
      float4* const places = reinterpret_cast<float4*>(workspace) + threadIdx.x;
      auto place = [&](i32 cta) {
        return places + static_cast<i64>(block + work.place(cta, tile)) * (COLUMNS / 8 * MULTIPLIERS);
      };
      float4* const own = place(blockIdx.x);
#pragma unroll
      for (int i = 0; i < COLUMNS / 8; ++i)
        own[i * MULTIPLIERS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
      named_sync(EVERYONE, MULTIPLIERS);
      if (threadIdx.x == 0) {
        i32* const ticket = tickets + static_cast<i32>(blockIdx.y) * tiles + tile;
        is_last = take_ticket(ticket) == last - first;
        if (is_last) *ticket = 0;
      }
      named_sync(EVERYONE, MULTIPLIERS);
      if (!is_last) continue;
      // So many loads at once as there are registers for: they take long.
      constexpr int AT_ONCE = COLUMNS > 64 ? 2 : 4;
#pragma unroll
      for (int from = 0; from < COLUMNS / 8; from += 4) {
#pragma unroll
        for (int i = 4 * from; i < 4 * from + 16; ++i) acc[i] = 0.f;
        for (i32 cta = first; cta <= last; cta += AT_ONCE) {
          float4 parts[AT_ONCE][4];
#pragma unroll
          for (int other = 0; other < AT_ONCE; ++other) {
            const float4* const theirs = place(min(cta + other, last)) + from * MULTIPLIERS;
#pragma unroll
            for (int i = 0; i < 4; ++i) parts[other][i] = ld_cg(theirs + i * MULTIPLIERS);
          }
#pragma unroll
          for (int other = 0; other < AT_ONCE; ++other)
            if (cta + other <= last)
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                float* const to = acc + 4 * (from + i);
                to[0] += parts[other][i].x, to[1] += parts[other][i].y;
                to[2] += parts[other][i].z, to[3] += parts[other][i].w;
              }
        }
      }
    }

    const float scales[2] = {F::UNIT * F::scale(rows, 0), F::UNIT * F::scale(rows, 1)};
    const bool extras = weights.extras(n0, min(n0 + ROWS, N));
#pragma unroll 1
    for (int group = 0; group < COLUMNS / GROUP; ++group) {
      const i32 m = m0 + GROUP * group;
      if (m >= M) break;
      named_sync(EVERYONE, MULTIPLIERS);  // nobody reads the sums any more
#pragma unroll
      for (int own = 0; own < COLUMNS / GROUP; ++own)
        if (own == group)
#pragma unroll
          for (int i = 0; i < GROUP / 8; ++i)
#pragma unroll
            for (int v = 0; v < 4; ++v)
              sums[(8 * i + 2 * t + v % 2) * PITCH + 16 * warp + g + 8 * (v / 2)] =
                  acc[GROUP / 2 * own + 4 * i + v] * scales[v / 2];
      named_sync(EVERYONE, MULTIPLIERS);
      if (extras) {
        for (int e = threadIdx.x; e < ROWS * GROUP; e += MULTIPLIERS) {
          const int row = e / GROUP, column = e % GROUP;
          if (n0 + row < N && m + column < M)
            sums[column * PITCH + row] +=
                weights.extra(n0 + row, x + static_cast<i64>(m + column) * K);
        }
        named_sync(EVERYONE, MULTIPLIERS);
      }
      finish_tile<ROWS, GROUP, MULTIPLIERS>(f, sums, rstd + GROUP * group, m, n0, M, N);
    }
  }
}

struct WarpgroupF16 {
  static constexpr int PLANES = 1, BYTES = 2;
  static constexpr bool PAIRS = false;
  static constexpr float UNIT = 1.f;
  struct Rows {};
  struct Factors {};
  struct Raw {
    u32 a[2][4];
  };
  const u8* planes[1];

  template <int STEP>
  __device__ __forceinline__ static u32 lane_offset(int row, int lane) {
    return turned<2 * STEP>(row + lane % 8 + 8 * (lane / 8 % 2), lane / 16);
  }

  template <int STEP, int PLANE>
  __device__ __forceinline__ static void read(const u8* plane, u32 offset, int unit, Raw& raw) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ldmatrix_x4(raw.a[half], plane + (offset ^ ((2 * unit + half) % 4 * 32)) + unit / 2 * 128);
  }

  __device__ __forceinline__ static void decode(const Raw& raw, int half, u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = raw.a[half][i];
  }

  __device__ __forceinline__ static Rows rows(i32, i32) { return {}; }
  __device__ __forceinline__ static Factors factors(const Rows&) { return {}; }
  __device__ __forceinline__ static void shift(const Factors&, u32 (&)[4]) {}
  __device__ __forceinline__ static float scale(const Rows&, int) { return 1.f; }
  __device__ __forceinline__ static bool extras(i32, i32) { return false; }
  __device__ __forceinline__ static float extra(i32, const __half*) { return 0.f; }
};

// PAIRED: a lane reads four neighbouring weights of a row at once, otherwise two and two. Either way a
// product has the same 16 k, whose order does not matter to it.
//
// FP16 mode undoes a row's shift in the halves, where it is exact, not in the sum: a stored weight
// may be subnormal though the weight is not, and tensor cores cut products of such off earlier.
template <int FP8, bool PAIRED>
struct WarpgroupNested : NestedRows {
  static constexpr int PLANES = FP8 ? 1 : 2, BYTES = 1;
  static constexpr bool PAIRS = PAIRED;
  static constexpr float UNIT = FP8 ? UPPER_UNIT : 1.f;
  struct Rows {
    i32 shifts[2];
  };
  struct Factors {
    u32 pairs[2];
  };
  struct Raw {
    u32 four[PLANES][4];  // of rows g and g + 8 in the first 16 k, then in the others
  };
  const u8* planes[2];

  template <int STEP>
  __device__ __forceinline__ static u32 lane_offset(int row, int lane) {
    if (!PAIRED) return turned<STEP>(row + lane / 4, 0) + 2 * (lane % 4);
    return turned<STEP>(row + lane % 8 + 8 * (lane / 8 % 2), lane / 16);
  }

  // Two weights of the first eight k of a chunk, and those of the other eight, 8 bytes further.
  __device__ __forceinline__ static u32 four(const u8* from) {
    return *reinterpret_cast<const u16*>(from) |
           static_cast<u32>(*reinterpret_cast<const u16*>(from + 8)) << 16;
  }

  template <int STEP, int PLANE>
  __device__ __forceinline__ static void read(const u8* plane, u32 offset, int unit, Raw& raw) {
    if (!PAIRED) {
#pragma unroll
      for (int i = 0; i < PLANES; ++i)
#pragma unroll
        for (int at = 0; at < 4; ++at)
          raw.four[i][at] = four(plane + (offset ^ ((2 * unit + at / 2) * 16)) +
                                 8 * (at % 2) * STEP + i * PLANE);
      return;
    }
#pragma unroll
    for (int i = 0; i < PLANES; ++i)
      ldmatrix_x4(raw.four[i], plane + i * PLANE + (offset ^ (unit * 32)));
  }

  __device__ __forceinline__ static void decode(const Raw& raw, int half, u32 (&a)[4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
      if constexpr (FP8)
        decode_upper_scaled(raw.four[0][2 * half + row], a[row], a[2 + row]);
      else
        decode_nested(raw.four[0][2 * half + row], raw.four[PLANES - 1][2 * half + row], a[row],
                      a[2 + row]);
  }

  __device__ __forceinline__ Rows rows(i32 n, i32 N) const {
    Rows found = {};
    if (NestedRows::shift)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (n + 8 * half < N) found.shifts[half] = NestedRows::shift[n + 8 * half];
    return found;
  }

  __device__ __forceinline__ static Factors factors(const Rows& rows) {
    return {{half_factor(rows.shifts[0]), half_factor(rows.shifts[1])}};
  }

  __device__ __forceinline__ static void shift(const Factors& factors, u32 (&a)[4]) {
    if (!FP8)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = h2u(__hmul2(u2h(a[i]), u2h(factors.pairs[i % 2])));
  }

  __device__ __forceinline__ static float scale(const Rows& rows, int half) {
    return power_of_two(FP8 ? rows.shifts[half] : max(rows.shifts[half] - HALF_SHIFT_MAX, 0));
  }

  __device__ __forceinline__ bool extras(i32 n, i32 end) const {
    return outlier_starts && outlier_starts[n] < outlier_starts[end];
  }

  __device__ __forceinline__ float extra(i32 n, const __half* x) const {
    return whole(0.f, row(n), x);
  }
};

template <int COLUMNS, int WGS, int STEP, int STAGES, int RESIDENT, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, RESIDENT) __cluster_dims__(CLUSTER, 1, 1)
linear_f16_warpgroup(const __half* __restrict__ weight, const __half* __restrict__ x, i32 M, i32 N,
                     i32 K, i32 epilogue, void* __restrict__ out, const float* __restrict__ bias,
                     const float* __restrict__ sumsq, i32 partials, float eps,
                     float* __restrict__ residual, const __half* __restrict__ gamma,
                     float* __restrict__ sumsq_out, float* workspace, i32* tickets, i32 share) {
  extern __shared__ __align__(1024) u8 shared[];
  const WarpgroupF16 weights{{reinterpret_cast<const u8*>(weight)}};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  warpgroup_gemm<WarpgroupF16, COLUMNS, WGS, STEP, STAGES, CLUSTER>(weights, x, finish, M, N, K, workspace,
                                                           tickets, share, shared);
}

template <int FP8, int COLUMNS, int WGS, int STEP, int STAGES, int RESIDENT, int CLUSTER>
__global__ void __launch_bounds__(128 * WGS + 128, RESIDENT) __cluster_dims__(CLUSTER, 1, 1)
linear_nested_warpgroup(const u8* __restrict__ upper, const u8* __restrict__ lower,
                        const signed char* __restrict__ shift,
                        const i32* __restrict__ outlier_starts,
                        const i32* __restrict__ outlier_columns,
                        const __half* __restrict__ outlier_values, const __half* __restrict__ x,
                        i32 M, i32 N, i32 K, i32 epilogue, void* __restrict__ out,
                        const float* __restrict__ bias, const float* __restrict__ sumsq,
                        i32 partials, float eps, float* __restrict__ residual,
                        const __half* __restrict__ gamma, float* __restrict__ sumsq_out,
                        float* workspace, i32* tickets, i32 share) {
  extern __shared__ __align__(1024) u8 shared[];
  // Turning X pays where there is little of it and much to decode.
  using Policy = WarpgroupNested<FP8, (!FP8 && COLUMNS <= 32)>;
  const Policy weights{{shift, outlier_starts, outlier_columns, outlier_values},
                       {upper, lower}};
  const Finish finish{epilogue, out, bias, sumsq, partials, eps, residual, gamma, sumsq_out};
  warpgroup_gemm<Policy, COLUMNS, WGS, STEP, STAGES, CLUSTER>(
      weights, x, finish, M, N, K, workspace, tickets, share, shared);
}
