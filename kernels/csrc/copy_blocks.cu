// Copies whole blocks inside a pool; several CTAs a block.
#include "primitives.cuh"

// pairs[i] = (from, to). No block may be both a source and a target. `vectors` is the size of a
// block in 16 bytes.
__global__ void __launch_bounds__(256)
    copy_blocks(uint4* __restrict__ pool, const int2* __restrict__ pairs, i64 vectors) {
  const int2 pair = pairs[blockIdx.x];
  const uint4* from = pool + pair.x * vectors;
  uint4* to = pool + pair.y * vectors;
  const i64 step = static_cast<i64>(gridDim.y) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x; i < vectors; i += step)
    to[i] = ldg_stream(from + i);
}
