// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight, as float32 and/or as q8 activations (layout 1) of
// x * weight with the row's factor beside them.
//   x (T, K) float   weight (K)   qs (T, Kp) int8, ds (T, Kp/32), scale (T): rsqrt(mean(x^2) + eps)
//   y (T, K) float   qs (with ds and scale) or y may be null: not written
// Launch  grid = T, block = 512.
// Bytes   T * K * 4 in, T * K * 1.25 out: 2,048 rows of 896 7.9 us (H200, 2026-11-30).
// Decode does not use it: the products norm their input themselves (matvec.cu), which saves a launch.
#include "norm.cuh"
#include "q8.cuh"

__global__ void __launch_bounds__(kNormThreads)
rms_norm(const float* x, const float* weight, int8_t* qs, GroupScale* ds, float* scale, float* y, int k, float eps) {
    pdl_trigger();
    __shared__ float partial[kNormWarps];
    pdl_wait();
    const float* row = x + static_cast<int64_t>(blockIdx.x) * k;
    const int padded = ceil_div(k, 128) * 128;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * padded;
    weighted_row(row, weight, k, padded, partial, [&](int i, float4 v) {
        if (qs) quantize4(v, i, true, qs + at, ds + at / 32);
    });
    __syncthreads();
    const float rstd = row_rstd(partial, k, eps);
    if (qs && threadIdx.x == 0) scale[blockIdx.x] = rstd;
    if (!y) return;
    y += static_cast<int64_t>(blockIdx.x) * k;
    for (int i = threadIdx.x; i < k; i += kNormThreads) y[i] = __fmul_rn(__fmul_rn(row[i], weight[i]), rstd);
}
