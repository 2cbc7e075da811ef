// RMSNorm of one row by a block of kNormThreads: the words that the separate kernel (norm.cu) and the
// products that take their input unnormed (matvec.cu) share, so that both give the same bits.
// The q8 form of a normed row is that of x * weight; its factor 1 / rms, one for the row, goes into the
// products' results. So the quantising does not wait for the sum of squares.
#pragma once
#include "common.cuh"

constexpr int kNormThreads = 512;
constexpr int kNormWarps = kNormThreads / kWarp;

// use(i, x * weight) for values i..i+3 of the row, zeros behind its end up to `padded`; whole warps
// call it together. The squares of x go to partial[warp].
template <class Use>
__device__ inline void weighted_row(const float* x, const float* weight, int k, int padded, float* partial, Use use) {
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    int i = threadIdx.x * 4;
    float4 next = i < k ? *reinterpret_cast<const float4*>(x + i) : zero;
    float sum = 0.0f;
#pragma unroll 1
    while (i < padded) {  // a warp has 128 values, so it is inside or outside as a whole
        const float4 v = next, w = i < k ? *reinterpret_cast<const float4*>(weight + i) : zero;
        const int at = i;
        i += kNormThreads * 4;
        next = i < k ? *reinterpret_cast<const float4*>(x + i) : zero;
        sum = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, sum))));
        use(at, make_float4(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), __fmul_rn(v.z, w.z), __fmul_rn(v.w, w.w)));
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = sum;
}

// 1 / rms from the warps' sums of squares, behind a barrier.
__device__ inline float row_rstd(const float* partial, int k, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kNormWarps; ++i) sum = __fadd_rn(sum, partial[i]);
    return rsqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(k)), eps));
}
