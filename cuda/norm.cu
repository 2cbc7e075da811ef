// rms_norm: y = x * rsqrt(mean(x^2) + eps) * weight, as q8 activations (layout 1) and/or float32.
//   x (T, K) float   weight (K)   qs (T, Kp) int8, ds (T, Kp/32)   y (T, K) float; null: not written
// Launch  grid = T, block = 32..1024 (four values a thread, at least).
// Bytes   T * K * 4 in, T * K * 1.25 out: 28 KB for T = 1, K = 3584, a latency of about 2 us.
// Why not inside the consumer: each of its 132 blocks would read and reduce the whole row again.
#include "q8.cuh"

__global__ void __launch_bounds__(1024) rms_norm(const float* x, const float* weight, int8_t* qs, GroupScale* ds, float* y, int k, float eps) {
    pdl_trigger();
    __shared__ float partial[32];
    pdl_wait();
    const float* row = x + static_cast<int64_t>(blockIdx.x) * k;
    float sum = 0.0f;
    for (int i = threadIdx.x * 4; i < k; i += blockDim.x * 4) {
        float4 v = *reinterpret_cast<const float4*>(row + i);
        sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
    __syncthreads();
    sum = threadIdx.x % kWarp < blockDim.x / kWarp ? partial[threadIdx.x % kWarp] : 0.0f;
    const float rstd = rsqrtf(__fadd_rn(__fdiv_rn(warp_sum(sum), static_cast<float>(k)), eps));

    const int padded = ceil_div(k, 128) * 128;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * padded;
    // every lane of a warp takes part in the groups' reductions, also past the row's end
    for (int base = 0; base < padded; base += blockDim.x * 4) {
        int i = base + threadIdx.x * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < k) {
            v = *reinterpret_cast<const float4*>(row + i);
            float4 w = *reinterpret_cast<const float4*>(weight + i);
            v = make_float4(__fmul_rn(__fmul_rn(v.x, rstd), w.x), __fmul_rn(__fmul_rn(v.y, rstd), w.y),
                            __fmul_rn(__fmul_rn(v.z, rstd), w.z), __fmul_rn(__fmul_rn(v.w, rstd), w.w));
            if (y) *reinterpret_cast<float4*>(y + static_cast<int64_t>(blockIdx.x) * k + i) = v;
        }
        if (qs) quantize4(v, i, i < padded, qs + at, ds + at / 32);
    }
}
