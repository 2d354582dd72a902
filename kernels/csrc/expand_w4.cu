// 4-bit weights back to FP16, for a matrix product of many rows by cuBLAS.
#include "w4.cuh"

// out [rows, K]: rows row0 ... of the weight, each value rounded to half once. A thread has the 16
// bytes of one lane of `gemm_w4.cu`: 32 values, 8 in each chunk. K is a multiple of 32.
__global__ void __launch_bounds__(256)
expand_w4(__half* __restrict__ out, const u32* __restrict__ codes, const u16* __restrict__ scales,
          const u8* __restrict__ zeros, i32 group_shift, i32 row0, i32 rows, i32 K) {
  const int blocks = (K + 127) / 128, groups = K >> group_shift;
  const i64 at = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= static_cast<i64>(rows) * blocks * 4) return;
  const int t = static_cast<int>(at % 4), block = static_cast<int>(at / 4 % blocks);
  const i64 row = at / 4 / blocks, source = row + row0;
  const uint4 four = ldg_stream(codes + (source * blocks + block) * 16 + 4 * t);
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    const int k = 128 * block + 32 * chunk + 8 * t;
    if (k >= K) break;
    const i64 group = source * groups + (k >> group_shift);
    const float scale = __half2float(bits_half(__ldg(scales + group)));
    const u32 word = chunk == 0 ? four.x : chunk == 1 ? four.y : chunk == 2 ? four.z : four.w;
    u32 pairs[4];
    decode_w4(word, zeros ? __ldg(zeros + group) : 8u, pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(u2h(pairs[i]));
      pairs[i] = h2u(__halves2half2(saturate_half(pair.x * scale), saturate_half(pair.y * scale)));
    }
    uint4 packed;
    packed.x = pairs[0], packed.y = pairs[1], packed.z = pairs[2], packed.w = pairs[3];
    *reinterpret_cast<uint4*>(out + row * K + k) = packed;
  }
}
