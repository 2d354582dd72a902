// One block a row: look up the embedding, start the residual and the first norm.
#include "nested.cuh"

struct HalfTable {
  const __half* values;

  // Eight columns of a row.
  __device__ __forceinline__ void load(float (&x)[8], i64 row, i32 column, i32 columns) const {
    const uint4 bits = ldg_stream(values + row * columns + column);
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(u2h(words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
};

struct NestedTable : NestedRows {
  const u8 *upper, *lower;  // lower null: the values that FP8 has

  __device__ __forceinline__ void load(float (&x)[8], i64 row, i32 column, i32 columns) const {
    const i64 at = row * columns + column;
    u32 words[4];
    if (lower)
      load_nested<0>(words, upper + at, lower + at);
    else
      load_nested<1>(words, upper + at, lower);
    const Row whole = this->row(static_cast<i32>(row));
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(u2h(words[i]));
      x[2 * i] = pair.x * whole.scale;
      x[2 * i + 1] = pair.y * whole.scale;
    }
    for (i32 i = whole.first; i < whole.last; ++i)
#pragma unroll
      for (i32 j = 0; j < 8; ++j)
        if (outlier_columns[i] == column + j) x[j] = __half2float(outlier_values[i]);
  }
};

// residual[row] = table[ids[row]] as float; hidden = residual * gamma, saturating; sums of squares
// over 16 columns each. `hidden`, `sumsq` and `gamma` may be null together. `columns` is a multiple
// of 8.
template <class Table>
DEV void embed_row(float* residual, __half* hidden, float* sumsq, const i32* ids,
                   const Table& table, const __half* gamma, i32 columns, i32 partials) {
  const i64 row = blockIdx.x, id = ids[row];
  // Whole warps go round, so that the two threads of a sum of 16 always meet.
  for (i32 base = 0; base < columns; base += 8 * blockDim.x) {
    const i32 column = base + 8 * threadIdx.x;
    const bool inside = column < columns;
    float x[8] = {};
    if (inside) table.load(x, id, column, columns);
    float sum = 0.f;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) sum += x[2 * i] * x[2 * i] + x[2 * i + 1] * x[2 * i + 1];
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

__global__ void __launch_bounds__(128)
embed(float* __restrict__ residual, __half* __restrict__ hidden, float* __restrict__ sumsq,
      const i32* __restrict__ ids, const __half* __restrict__ embedding,
      const __half* __restrict__ gamma, i32 columns, i32 partials) {
  embed_row(residual, hidden, sumsq, ids, HalfTable{embedding}, gamma, columns, partials);
}

__global__ void __launch_bounds__(128)
embed_nested(float* __restrict__ residual, __half* __restrict__ hidden, float* __restrict__ sumsq,
             const i32* __restrict__ ids, const u8* __restrict__ upper,
             const u8* __restrict__ lower, const signed char* __restrict__ row_shift,
             const i32* __restrict__ outlier_starts, const i32* __restrict__ outlier_columns,
             const __half* __restrict__ outlier_values, const __half* __restrict__ gamma,
             i32 columns, i32 partials) {
  const NestedTable table{
      {row_shift, outlier_starts, outlier_columns, outlier_values}, upper, lower};
  embed_row(residual, hidden, sumsq, ids, table, gamma, columns, partials);
}
