// One block a row: look up the embedding, start the residual and the first norm.
#include "primitives.cuh"

// residual[row] = embedding[ids[row]] as float; hidden = residual * gamma, saturating; sums of
// squares over 16 columns each. `hidden`, `sumsq` and `gamma` may be null together. `columns` is a
// multiple of 8.
__global__ void __launch_bounds__(128)
    embed(float* __restrict__ residual, __half* __restrict__ hidden, float* __restrict__ sumsq,
          const i32* __restrict__ ids, const __half* __restrict__ embedding,
          const __half* __restrict__ gamma, i32 columns, i32 partials) {
  const i64 row = blockIdx.x;
  const __half* from = embedding + static_cast<i64>(ids[row]) * columns;
  // Whole warps go round, so that the two threads of a sum of 16 always meet.
  for (i32 base = 0; base < columns; base += 8 * blockDim.x) {
    const i32 column = base + 8 * threadIdx.x;
    const bool inside = column < columns;
    const uint4 bits = inside ? ldg_stream(from + column) : make_uint4(0, 0, 0, 0);
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    float x[8];
    float sum = 0.f;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(u2h(words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
      sum += pair.x * pair.x + pair.y * pair.y;
    }
    if (inside) {
      float4* to = reinterpret_cast<float4*>(residual + row * columns + column);
      to[0] = make_float4(x[0], x[1], x[2], x[3]);
      to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    if (hidden == nullptr) continue;
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    if (inside) {
      if (threadIdx.x % 2 == 0) sumsq[row * partials + column / 16] = sum;
      const uint4 scale = *reinterpret_cast<const uint4*>(gamma + column);
      *reinterpret_cast<uint4*>(hidden + row * columns + column) =
          make_uint4(scaled_half2(x[0], x[1], scale.x), scaled_half2(x[2], x[3], scale.y),
                     scaled_half2(x[4], x[5], scale.z), scaled_half2(x[6], x[7], scale.w));
    }
  }
}
