// out = silu(gate) * up of rows whose columns come as eight of gate, eight of up, and so on.
#include "primitives.cuh"

DEV float silu_times(float gate, float up) {
  // Where exp(-gate) is too large to divide by, the quotient is zero, and so it should be.
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

DEV u32 silu_times2(u32 gate, u32 up) {
  const float2 g = __half22float2(u2h(gate)), u = __half22float2(u2h(up));
  return saturate_half2(silu_times(g.x, u.x), silu_times(g.y, u.y));
}

// `eights` is the number of groups of eight outputs over all rows: rows are contiguous.
__global__ void __launch_bounds__(256)
    swiglu(uint4* __restrict__ out, const uint4* __restrict__ gate_up, i64 eights) {
  const i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= eights) return;
  const uint4 gate = ldg_stream(gate_up + 2 * at), up = ldg_stream(gate_up + 2 * at + 1);
  out[at] = make_uint4(silu_times2(gate.x, up.x), silu_times2(gate.y, up.y),
                       silu_times2(gate.z, up.z), silu_times2(gate.w, up.w));
}
