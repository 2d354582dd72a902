// KV cache codes to halves.
//
// Storage of a K or V element: half; int8 (signed, one half scale a token and KV head); E4M3;
// E5M2. A word of four codes b0..b3 (b0 the lowest byte) becomes two pairs of halves. What is
// cheap to apply later is left out of the halves:
//   value = half * code_gain<CODE>()         (and * the token's scale for int8)
// The bit trick for E4M3 works in half, not float: -ftz would zero the smallest codes.
#pragma once
#include "primitives.cuh"

// Formats of a KV pool, as kernels/attention.py numbers them.
enum KvFormat { KV_F16 = 0, KV_I8 = 1, KV_E4M3 = 2, KV_E5M2 = 3, KV_K16V8 = 4 };

// Element codes: what one of K and V is stored as.
enum KvCode { CODE_F16 = 0, CODE_I8 = 1, CODE_E4M3 = 2, CODE_E5M2 = 3 };

template <int FORMAT>
struct KvTraits {
  static constexpr int K_CODE = FORMAT == KV_K16V8 ? CODE_F16 : FORMAT;
  static constexpr int V_CODE = FORMAT == KV_K16V8 ? CODE_E4M3 : FORMAT;
  static constexpr int K_BYTES = K_CODE == CODE_F16 ? 2 : 1;
  static constexpr int V_BYTES = V_CODE == CODE_F16 ? 2 : 1;
  static constexpr bool SCALED = FORMAT == KV_I8;
};

#if !defined(SIMT_EMULATION) && __CUDA_ARCH__ >= 890
constexpr bool HARDWARE_E4M3 = true;
#else
constexpr bool HARDWARE_E4M3 = false;
#endif

// What halves made by `code_pairs` and `code_halves` are still to be multiplied by.
template <int CODE>
DEV float code_gain() {
  return CODE == CODE_E4M3 && !HARDWARE_E4M3 ? 256.f : 1.f;
}

// Two E4M3 codes in the high bytes of `x`'s 16-bit halves: as half bits, value / 256, exactly.
DEV u32 e4m3_high_bytes(u32 x) { return (x & 0x80008000u) | ((x >> 1) & 0x3F803F80u); }

// Signed bytes in the low bytes of a prmt with 0x64: the half 0x64uu is 1024 + u, u = byte + 128.
DEV u32 offset_bytes(u32 x) { return h2u(__hsub2(u2h(x), u2h(0x64806480u))); }

// Four codes as (b0, b2) and (b1, b3): the cheapest order, for operands whose order is free.
template <int CODE>
DEV void code_pairs(u32 word, u32& even, u32& odd) {
  static_assert(CODE != CODE_F16, "halves need no conversion");
  if constexpr (CODE == CODE_E5M2) {
    even = prmt(word, 0, 0x2404);
    odd = word & 0xFF00FF00u;
  } else if constexpr (CODE == CODE_E4M3) {
    if constexpr (HARDWARE_E4M3) {
      const u32 sorted = prmt(word, 0, 0x3120);
      even = e4m3x2_to_half2(static_cast<u16>(sorted));
      odd = e4m3x2_to_half2(static_cast<u16>(sorted >> 16));
    } else {
      even = e4m3_high_bytes(word << 8);
      odd = e4m3_high_bytes(word);
    }
  } else {
    const u32 biased = word ^ 0x80808080u;
    even = offset_bytes(prmt(biased, 0x64646464u, 0x4240));
    odd = offset_bytes(prmt(biased, 0x64646464u, 0x4341));
  }
}

// Four codes in their order: (b0, b1) and (b2, b3).
template <int CODE>
DEV void code_halves(u32 word, u32& low, u32& high) {
  static_assert(CODE != CODE_F16, "halves need no conversion");
  if constexpr (CODE == CODE_E5M2) {
    low = prmt(word, 0, 0x1404);
    high = prmt(word, 0, 0x3424);
  } else if constexpr (CODE == CODE_E4M3) {
    if constexpr (HARDWARE_E4M3) {
      low = e4m3x2_to_half2(static_cast<u16>(word));
      high = e4m3x2_to_half2(static_cast<u16>(word >> 16));
    } else {
      low = e4m3_high_bytes(prmt(word, 0, 0x1404));
      high = e4m3_high_bytes(prmt(word, 0, 0x3424));
    }
  } else {
    const u32 biased = word ^ 0x80808080u;
    low = offset_bytes(prmt(biased, 0x64646464u, 0x4140));
    high = offset_bytes(prmt(biased, 0x64646464u, 0x4342));
  }
}
