// Between the QKV projection and attention: norms of q and k, rotary embedding, and the cache.
#include "kv_convert.cuh"

constexpr i32 ROPE_WARPS = 4;
constexpr float HALF_MAX = 65504.f;
constexpr float INT8_SCALE_MIN = 6.103515625e-05f;  // 2^-14, the smallest normal half

// The largest magnitude that a code can hold; beyond it elements are clamped, and counted.
template <int CODE>
DEV float code_max() {
  return CODE == CODE_E4M3 ? 448.f : CODE == CODE_E5M2 ? 57344.f : HALF_MAX;
}

// Stores four elements of a head, rounded to halves first: two neighbours at `low` and two at
// `high` (elements of `to`). Returns how many of them were clamped.
template <int CODE>
DEV i32 store_kv(u8* to, __half* scale, const float (&exact)[4], i32 low, i32 high, bool inside) {
  i32 clamped = 0;
  float x[4];
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    x[i] = __half2float(saturate_half(exact[i]));
    // Said so that NaN, of which no comparison holds, counts too.
    const bool fits = fabsf(exact[i]) <= HALF_MAX && fabsf(x[i]) <= code_max<CODE>();
    clamped += inside && !fits;
  }
  u32 codes[4];
  if constexpr (CODE == CODE_I8) {
    // Lanes outside the head hold zeros.
    const float largest = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    const float wanted = fmaxf(__fdiv_rn(warp_max(largest), 127.f), INT8_SCALE_MIN);
    // Codes are made with the scale that readers see: the rounded one.
    const __half rounded = __float2half_rn(wanted);
    if (threadIdx.x % 32 == 0) *scale = rounded;
    const float step = __half2float(rounded);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const i32 code = __float2int_rn(__fdiv_rn(x[i], step));
      codes[i] = static_cast<u32>(max(-127, min(127, code))) & 0xFFu;
    }
  }
  if constexpr (CODE == CODE_E4M3 || CODE == CODE_E5M2) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i)
      codes[i] = CODE == CODE_E4M3 ? float_to_e4m3(x[i]) : float_to_e5m2(x[i]);
  }
  if (!inside) return 0;
  if constexpr (CODE == CODE_F16) {
    *reinterpret_cast<u32*>(to + 2 * low) = pack_half2(x[0], x[1]);
    *reinterpret_cast<u32*>(to + 2 * high) = pack_half2(x[2], x[3]);
  } else {
    *reinterpret_cast<u16*>(to + low) = static_cast<u16>(codes[0] | codes[1] << 8);
    *reinterpret_cast<u16*>(to + high) = static_cast<u16>(codes[2] | codes[3] << 8);
  }
  return clamped;
}

// One warp a row and head of qkv [rows, heads + 2 kv_heads, head_dim]. A lane has two neighbouring
// pairs: dimensions (low, high) and (low + 1, high + 1), of which RoPE rotates those below
// `rotary_dim`. q is rewritten in place; k and v go to the pool, as halves first, then as codes of
// the pool. A negative position marks padding: nothing is written. head_dim is a multiple of 4 up
// to 128, rotary_dim a multiple of 4.
template <int FORMAT>
__global__ void __launch_bounds__(32 * ROPE_WARPS)
    rope_kv_write(__half* __restrict__ qkv, u8* __restrict__ storage,
                  const i32* __restrict__ positions, const i32* __restrict__ sequences,
                  const i32* __restrict__ block_tables, const float* __restrict__ cosines,
                  const float* __restrict__ sines, const __half* __restrict__ q_norm,
                  const __half* __restrict__ k_norm, u64* __restrict__ saturations, i32 heads,
                  i32 kv_heads, i32 head_dim, i32 rotary_dim, float eps, i32 table_stride,
                  i32 block_shift, i64 block_bytes, i64 k_offset, i64 v_offset, i64 scale_offset) {
  using Traits = KvTraits<FORMAT>;
  launch_dependents();
  wait_for_inputs();
  const i32 lane = threadIdx.x % 32, head = blockIdx.y * ROPE_WARPS + threadIdx.x / 32;
  const i32 row = blockIdx.x, position = ld_cg(positions + row), half_rotary = rotary_dim / 2;
  i32 clamped = 0;
  if (head < heads + 2 * kv_heads && position >= 0) {
    const bool is_q = head < heads, is_v = head >= heads + kv_heads;
    const i32 pair = 2 * lane;
    const bool inside = pair < head_dim / 2, rotated = !is_v && pair < half_rotary;
    // Behind the rotated dimensions, and in v, the two pairs are any that are left.
    const i32 low = is_v || rotated ? pair : pair + half_rotary;
    const i32 high = rotated ? pair + half_rotary : pair + head_dim / 2;
    __half* vector =
        qkv + (static_cast<i64>(row) * (heads + 2 * kv_heads) + head) * static_cast<i64>(head_dim);
    float x[4] = {0.f, 0.f, 0.f, 0.f};
    if (inside) {
      const float2 a = __half22float2(u2h(ld_cg(reinterpret_cast<const u32*>(vector + low))));
      const float2 b = __half22float2(u2h(ld_cg(reinterpret_cast<const u32*>(vector + high))));
      x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
    }
    const __half* gamma = is_q ? q_norm : is_v ? nullptr : k_norm;
    if (gamma != nullptr) {
      const float sum = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
      const float rstd = rsqrtf(sum / head_dim + eps);
      if (inside) {
        const float2 a = __half22float2(*reinterpret_cast<const __half2*>(gamma + low));
        const float2 b = __half22float2(*reinterpret_cast<const __half2*>(gamma + high));
        x[0] *= rstd * a.x, x[1] *= rstd * a.y, x[2] *= rstd * b.x, x[3] *= rstd * b.y;
      }
    }
    if (rotated) {
      const i64 at = static_cast<i64>(position) * half_rotary + pair;
      const float2 c = *reinterpret_cast<const float2*>(cosines + at);
      const float2 s = *reinterpret_cast<const float2*>(sines + at);
      const float first = x[0] * c.x - x[2] * s.x, second = x[1] * c.y - x[3] * s.y;
      x[2] = x[2] * c.x + x[0] * s.x;
      x[3] = x[3] * c.y + x[1] * s.y;
      x[0] = first;
      x[1] = second;
    }
    if (is_q) {
      if (inside) {
        *reinterpret_cast<u32*>(vector + low) = saturate_half2(x[0], x[1]);
        *reinterpret_cast<u32*>(vector + high) = saturate_half2(x[2], x[3]);
      }
    } else {
      const i32 block = ld_cg(block_tables + static_cast<i64>(ld_cg(sequences + row)) * table_stride +
                              (position >> block_shift));
      const i32 slot = position & ((1 << block_shift) - 1);
      const i32 kv_head = head - heads - (is_v ? kv_heads : 0);
      const i64 token = (static_cast<i64>(kv_head) << block_shift) + slot;
      u8* start = storage + block * block_bytes;
      __half* scale = reinterpret_cast<__half*>(start + scale_offset) + token;
      if (is_v) {
        u8* to = start + v_offset + token * head_dim * Traits::V_BYTES;
        scale += static_cast<i64>(kv_heads) << block_shift;
        clamped = store_kv<Traits::V_CODE>(to, scale, x, low, high, inside);
      } else {
        u8* to = start + k_offset + token * head_dim * Traits::K_BYTES;
        clamped = store_kv<Traits::K_CODE>(to, scale, x, low, high, inside);
      }
    }
  }
  // Clamping is rare: usually one barrier is all it costs.
  if (__syncthreads_or(clamped)) {
    __shared__ i32 total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    if (clamped) atomicAdd(&total, clamped);
    __syncthreads();
    if (threadIdx.x == 0 && saturations != nullptr)
      atomicAdd(saturations, static_cast<u64>(total));
  }
}
