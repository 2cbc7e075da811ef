// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight, as q8 activations (layout 1) and/or float32.
//   x (T, K) float   weight (K)   qs (T, Kp) int8, ds (T, Kp/32)   y (T, K) float; null: not written
// Launch  grid = T, block = 320, dynamic shared = 4 K bytes (the row, read once).
// Bytes   T * K * 4 in, T * K * 1.25 out: 2,048 rows of 896 7.9 us (H200, 2026-11-30).
// Decode does not use it: the products norm their input themselves (matvec.cu), which saves a launch.
#include "norm.cuh"
#include "q8.cuh"

__global__ void __launch_bounds__(kNormThreads)
rms_norm(const float* x, const float* weight, int8_t* qs, GroupScale* ds, float* y, int k, float eps) {
    pdl_trigger();
    __shared__ float partial[kNormThreads / kWarp];
    float* row = reinterpret_cast<float*>(shared_bytes());
    pdl_wait();
    const float rstd = row_rstd(x + static_cast<int64_t>(blockIdx.x) * k, k, eps, row, partial);
    const int padded = ceil_div(k, 128) * 128;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * padded;
    // a warp has 128 values, so it is inside or outside as a whole
    for (int i = threadIdx.x * 4; i < padded; i += kNormThreads * 4) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < k) {
            v = normed(*reinterpret_cast<const float4*>(row + i), rstd, *reinterpret_cast<const float4*>(weight + i));
            if (y) *reinterpret_cast<float4*>(y + static_cast<int64_t>(blockIdx.x) * k + i) = v;
        }
        if (qs) quantize4(v, i, true, qs + at, ds + at / 32);
    }
}
