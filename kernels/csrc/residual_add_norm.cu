#include "row_norm.cuh"

// residual += branch; out = RMS norm of the sum; one block a row.
__global__ void __launch_bounds__(NORM_THREADS)
    residual_add_norm(__half* __restrict__ out, float* __restrict__ residual,
                      const __half* __restrict__ branch, const __half* __restrict__ gamma,
                      i32 columns, float eps) {
  row_norm<true>(out, residual, branch, gamma, columns, eps);
}
