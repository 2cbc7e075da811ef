// matmul_float<Q>: y[t, n] = sum_k W[n, k] x[t, k] (+ bias[n]) (+ residual[t, n]) for F32, F16 and BF16
// weights and float32 activations, any T; products and sums in float32.
//   w (N, K) row-major, K % 4 == 0     x (T, K) float     y, residual (T, stride) float
// Launch  grid = (ceil(N / 8), ceil(T / 4)), block = 256: a warp makes one row for four tokens.
// Bytes   W once per four tokens: exact for checkpoints in float; decode reads W once, at the card's speed.
// Prompts in F16 and BF16 take f16 tensor cores from sm_80 on (matmul_f16.cu). F32 stays here: exact
// float32 products are what it is for.
#include "quants.cuh"

constexpr int kThreads = 256;
constexpr int kTokens = 4;

struct FloatArguments {
    const uint8_t* w;
    const float *x, *bias, *residual;  // bias, residual: null for none
    float* y;
    int n, k, tokens, stride;
};

template <class Q>
__global__ void __launch_bounds__(kThreads) matmul_float(FloatArguments a) {
    pdl_trigger();
    pdl_wait();
    const int lane = threadIdx.x % kWarp, row = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
    const int token0 = blockIdx.y * kTokens, count = min(kTokens, a.tokens - token0);
    if (row >= a.n) return;
    const uint8_t* w = a.w + static_cast<int64_t>(row) * a.k * Q::kBytes;
    const float* x = a.x + static_cast<int64_t>(token0) * a.k;
    float acc[kTokens] = {};
#pragma unroll 4
    for (int k = lane * 4; k < a.k; k += kWarp * 4) {
        const float4 v = Q::load4(w, k);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            if (i >= count) break;
            const float4 u = *reinterpret_cast<const float4*>(x + static_cast<int64_t>(i) * a.k + k);
            acc[i] = fmaf(v.x, u.x, fmaf(v.y, u.y, fmaf(v.z, u.z, fmaf(v.w, u.w, acc[i]))));
        }
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        float v = warp_sum(acc[i]);
        if (lane != 0 || i >= count) continue;
        const int64_t at = static_cast<int64_t>(token0 + i) * a.stride + row;
        if (a.bias) v = __fadd_rn(v, a.bias[row]);
        if (a.residual) v = __fadd_rn(a.residual[at], v);
        a.y[at] = v;
    }
}
