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

// What halves made of codes are still to be multiplied by.
template <int CODE>
DEV float code_gain() {
  return CODE == CODE_E4M3 && !HARDWARE_E4M3 ? 256.f : 1.f;
}

// Two E4M3 codes in the high bytes of `x`'s 16-bit halves: as half bits, value / 256, exactly.
DEV u32 e4m3_high_bytes(u32 x) { return (x & 0x80008000u) | ((x >> 1) & 0x3F803F80u); }

// Two halves 0x64uu, that is 1024 + u, where u is a signed byte + 128: the bytes.
DEV u32 offset_bytes(u32 x) { return h2u(__hsub2(u2h(x), u2h(0x64806480u))); }

// Four codes in their order: (b0, b1) and (b2, b3).
template <int CODE>
DEV void code_halves(u32 word, u32& low, u32& high) {
  static_assert(CODE != CODE_F16, "halves need no conversion");
  if constexpr (CODE == CODE_E5M2) {
    low = prmt(word, 0, 0x1404);
    high = prmt(word, 0, 0x3424);
  } else if constexpr (CODE == CODE_E4M3) {
    if constexpr (HARDWARE_E4M3) {
      e4m3x4_to_halves(word, low, high);
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

// Whether a word is converted with fewer instructions to (b0, b2) and (b1, b3).
template <int CODE>
constexpr bool PAIRS_ALTERNATE = CODE == CODE_E4M3 && !HARDWARE_E4M3;

// Four codes as two pairs in the order that costs least, and four halves in the same order: for
// operands whose order is free.
template <int CODE>
DEV void code_operands(u32 word, u32& first, u32& second) {
  if constexpr (PAIRS_ALTERNATE<CODE>) {
    first = e4m3_high_bytes(word << 8);
    second = e4m3_high_bytes(word);
  } else {
    code_halves<CODE>(word, first, second);
  }
}

template <int CODE>
DEV void half_operands(uint2 halves, u32& first, u32& second) {
  first = PAIRS_ALTERNATE<CODE> ? prmt(halves.x, halves.y, 0x5410) : halves.x;
  second = PAIRS_ALTERNATE<CODE> ? prmt(halves.x, halves.y, 0x7632) : halves.y;
}

// Words of two rows as pairs (a0, b0), (a1, b1), (a2, b2), (a3, b3): their columns.
template <int CODE>
DEV void code_columns(u32 a, u32 b, u32 (&pairs)[4]) {
  if constexpr (PAIRS_ALTERNATE<CODE>) {
    code_operands<CODE>(prmt(a, b, 0x5410), pairs[0], pairs[1]);
    code_operands<CODE>(prmt(a, b, 0x7632), pairs[2], pairs[3]);
  } else {
    code_halves<CODE>(prmt(a, b, 0x5140), pairs[0], pairs[1]);
    code_halves<CODE>(prmt(a, b, 0x7362), pairs[2], pairs[3]);
  }
}
