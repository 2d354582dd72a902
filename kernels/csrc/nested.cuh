// Nested weights: FP16 values as two planes of bytes [N, K], of which the upper alone is the weight
// in FP8. See kernels/nested.py.
#pragma once
#include "primitives.cuh"

// Four weights of both planes, as two pairs of halves: the very bits that were encoded. Where the
// kept mantissa was rounded up, bit 7 of the lower byte says so; no borrow crosses a byte.
DEV void decode_nested(u32 upper, u32 lower, u32& low, u32& high) {
  // 255 in each such byte, which times 0x01010101 (-1 / 255 among u32) is -1 in each.
  const u32 kept = signs(lower) * 0x01010101u + upper;
  const u32 top = ((kept >> 1) & 0x3F3F3F3Fu) | (upper & 0x80808080u);
  low = prmt(lower, top, 0x5140);
  high = prmt(lower, top, 0x7362);
}

// Four weights of the upper plane alone: moved by a place its bits are the rounded weight.
DEV void decode_upper(u32 upper, u32& low, u32& high) {
  const u32 even = prmt(upper, 0, 0x1404), odd = prmt(upper, 0, 0x3424);
  low = ((even >> 1) & 0x3F803F80u) | (even & 0x80008000u);
  high = ((odd >> 1) & 0x3F803F80u) | (odd & 0x80008000u);
}

// The same times 1 / UPPER_UNIT, by the conversion that newer cards have.
#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 890
constexpr float UPPER_UNIT = 1.f / 256;
DEV void decode_upper_scaled(u32 upper, u32& low, u32& high) {
  e4m3x4_to_halves(upper, low, high);
}
#else
constexpr float UPPER_UNIT = 1.f;
DEV void decode_upper_scaled(u32 upper, u32& low, u32& high) { decode_upper(upper, low, high); }
#endif

// Eight weights of a row, 8-byte aligned, as four pairs of halves; without `lower` if FP8.
template <int FP8>
DEV void load_nested(u32 (&pairs)[4], const u8* upper, const u8* lower) {
  const uint2 high = *reinterpret_cast<const uint2*>(upper);
  if (FP8) {
    decode_upper(high.x, pairs[0], pairs[1]);
    decode_upper(high.y, pairs[2], pairs[3]);
  } else {
    const uint2 low = *reinterpret_cast<const uint2*>(lower);
    decode_nested(high.x, low.x, pairs[0], pairs[1]);
    decode_nested(high.y, low.y, pairs[2], pairs[3]);
  }
}

DEV float power_of_two(i32 exponent) { return __uint_as_float((127 + exponent) << 23); }

// 2^shift as a pair of halves, as far as halves go: what is left above that is for the sum.
constexpr i32 HALF_SHIFT_MAX = 15;
DEV u32 half_factor(i32 shift) {
  const float factor = power_of_two(min(shift, HALF_SHIFT_MAX));
  return pack_half2(factor, factor);
}

// What a sum over the planes needs to become that of the weight: 2^shift, and the weights that are
// not in the planes, a list by rows. Each array may be null.
struct NestedRows {
  const signed char* shift;        // [N]
  const i32* outlier_starts;       // [N + 1]
  const i32* outlier_columns;
  const __half* outlier_values;

  struct Row {
    float scale;
    i32 first, last;
  };

  __device__ __forceinline__ Row row(i32 n) const {
    Row found = {1.f, 0, 0};
    if (shift) found.scale = power_of_two(shift[n]);
    if (outlier_starts) found.first = outlier_starts[n], found.last = outlier_starts[n + 1];
    return found;
  }

  // `x` is a row of X, which another kernel may have written.
  __device__ __forceinline__ float whole(float sum, const Row& row, const __half* x) const {
    float listed = 0.f;
#pragma unroll 4
    for (i32 i = row.first; i < row.last; ++i) {
      const u16 bits = ld_cg(reinterpret_cast<const u16*>(x) + outlier_columns[i]);
      listed = fmaf(__half2float(outlier_values[i]), __half2float(bits_half(bits)), listed);
    }
    return fmaf(sum, row.scale, listed);
  }
};
