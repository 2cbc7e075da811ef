// Bias, rotation and cache store of one pair: the words that the separate kernel (rope.cu) and the
// fused QKV product share. Every rounding is spelled out, so that both give the same bits whatever
// the compiler would contract around them.
#pragma once

#include "common.cuh"

// The NEOX pair (i, i + E/2) of a head: projections `x0`, `x1` without their biases `b0`, `b1`, and
// (cos, sin) `cs` of the pair's angle, YaRN's scale folded in.
__device__ inline float2 rope_pair(float x0, float x1, float b0, float b1, float2 cs) {
    const float y0 = __fadd_rn(x0, b0);
    const float y1 = __fadd_rn(x1, b1);
    return make_float2(__fadd_rn(__fmul_rn(y0, cs.x), -__fmul_rn(y1, cs.y)),
                       __fadd_rn(__fmul_rn(y1, cs.x), __fmul_rn(y0, cs.y)));
}

__device__ inline void store_kv(float* cache, float value) { *cache = value; }
__device__ inline void store_kv(__half* cache, float value) { *cache = __float2half_rn(value); }
