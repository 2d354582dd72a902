// 4-bit weights with a scale (and a zero point) for each group of k.
//
// codes [N, K' / 8] words, K' = K rounded up to 128 (padding codes are 0). A row is a sequence of
// blocks of 128 k, each 16 words: word 4 t + c of a block holds k = 32 c + 8 t ... + 7, so that the
// 16 bytes a lane t loads are its share of four chunks of 32. Within a word element j is the nibble
// at [0, 4, 1, 5, 2, 6, 3, 7][j]: neighbours are 16 bits apart, ready to become half2.
//   weight[n, k] = scales[n, k / group] * (code - zeros[n, k / group])
// scales half [N, K / group], zeros u8 of the same shape, 0 ... 16; null: 8 everywhere.
#pragma once
#include "primitives.cuh"

// The eight code - zero of a word as four half2, exactly: 0x6400 | q is 1024 + q as a half, and a
// nibble that stands four bits higher gives 1024 + 16 q.
DEV void decode_w4(u32 word, u32 zero, u32 (&pairs)[4]) {
  constexpr int AND_OR = 0xEA;
  const __half2 low_zero = u2h(zero * 0x00010001u + 0x64006400u);   // 1024 + z
  const __half2 high_zero = u2h(zero * 0x00100010u + 0xD400D400u);  // -(64 + z)
  const __half2 sixteenth = u2h(0x2C002C00u);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 bits = word >> 8 * i;
    const u32 low = lop3<AND_OR>(bits, 0x000F000Fu, 0x64006400u);
    const u32 high = lop3<AND_OR>(bits, 0x00F000F0u, 0x64006400u);
    pairs[2 * i] = h2u(__hsub2(u2h(low), low_zero));
    pairs[2 * i + 1] = h2u(__hfma2(u2h(high), sixteenth, high_zero));
  }
}
