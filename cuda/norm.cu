// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight, as float32, as q8 activations (layout 1) of
// x * weight with the row's factor beside them and/or as f16 activations (quants_f16.cuh).
//   x (T, K) float   weight (K)   qs (T, Kp) int8, ds (T, Kp/32), scale (T): rsqrt(mean(x^2) + eps)
//   h (T, Kp) f16, hs (T): x * weight times the power of two that puts the row's largest into
//   [2^14, 2^15), and rsqrt(mean(x^2) + eps) over it
//   y (T, K) float   qs (with ds and scale), h (with hs) or y may be null: not written
// Launch  grid = T, block = 512. The row's second reading comes from L1.
// Bytes   T * K * 4 in, T * K * 1.25 out: 2,048 rows of 896 7.9 us (H200, 2026-11-30).
// Decode does not use it: the products norm their input themselves (matvec.cu), which saves a launch.
#include "norm.cuh"
#include "q8.cuh"
#include "quants_f16.cuh"

__global__ void __launch_bounds__(kNormThreads)
rms_norm(const float* x, const float* weight, int8_t* qs, GroupScale* ds, float* scale, uint8_t* h, float* hs,
         float* y, int k, float eps) {
    pdl_trigger();
    __shared__ float partial[kNormWarps], largest_of[kNormWarps];
    pdl_wait();
    const float* row = x + static_cast<int64_t>(blockIdx.x) * k;
    const int padded = ceil_div(k, 128) * 128;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * padded;
    float largest = 0.0f;
    weighted_row(row, weight, k, padded, partial, [&](int i, float4 v) {
        if (qs) quantize4(v, i, true, qs + at, ds + at / 32);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    });
    largest = warp_max(largest);
    if (threadIdx.x % kWarp == 0) largest_of[threadIdx.x / kWarp] = largest;
    __syncthreads();
    const float rstd = row_rstd(partial, k, eps);
    if (qs && threadIdx.x == 0) scale[blockIdx.x] = rstd;
    if (h) {
        const float lift = lift_of(warp_max(largest_of[threadIdx.x % kNormWarps]));
        if (threadIdx.x == 0) hs[blockIdx.x] = __fdiv_rn(rstd, lift);
        for (int i = threadIdx.x * 4; i < padded; i += kNormThreads * 4) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < k) {
                const float4 u = *reinterpret_cast<const float4*>(row + i), w = *reinterpret_cast<const float4*>(weight + i);
                v = make_float4(__fmul_rn(u.x, w.x), __fmul_rn(u.y, w.y), __fmul_rn(u.z, w.z), __fmul_rn(u.w, w.w));
            }
            store_halves(h + at * 2, i, v, lift);
        }
    }
    if (!y) return;
    y += static_cast<int64_t>(blockIdx.x) * k;
    for (int i = threadIdx.x; i < k; i += kNormThreads) y[i] = __fmul_rn(__fmul_rn(row[i], weight[i]), rstd);
}
