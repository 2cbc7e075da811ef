// RMSNorm of one row by a block of kNormThreads: the words that the separate kernel (norm.cu) and the
// products that take their input unnormed (matvec.cu) share, so that both give the same bits.
#pragma once
#include "common.cuh"

constexpr int kNormThreads = 320;

// rsqrt(mean(x^2) + eps). Thread i adds values 4i.., 4(i + kNormThreads)..; warps, then the block, in
// a fixed order. `copy` (K floats of shared memory) receives the row: what a thread will need later
// it has written itself. Ends with a barrier. `partial` is shared memory for a float a warp.
__device__ inline float row_rstd(const float* row, int k, float eps, float* copy, float* partial) {
    float sum = 0.0f;
    for (int i = threadIdx.x * 4; i < k; i += kNormThreads * 4) {
        const float4 v = *reinterpret_cast<const float4*>(row + i);
        sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
        *reinterpret_cast<float4*>(copy + i) = v;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
    __syncthreads();
    const int lane = threadIdx.x % kWarp;
    sum = warp_sum(lane < kNormThreads / kWarp ? partial[lane] : 0.0f);
    return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(k)), eps));
}

__device__ inline float4 normed(float4 v, float rstd, float4 w) {
    return make_float4(__fmul_rn(__fmul_rn(v.x, rstd), w.x), __fmul_rn(__fmul_rn(v.y, rstd), w.y),
                       __fmul_rn(__fmul_rn(v.z, rstd), w.z), __fmul_rn(__fmul_rn(v.w, rstd), w.w));
}
