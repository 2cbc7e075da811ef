// Layout 1 (ARCHITECTURE.md): float32 rows to int8 with one scale per 32 values.
#pragma once
#include "common.cuh"

// Four quantised values, and the scale of the group of 32 that they belong to.
struct Quad {
    uint32_t word;  // int8 x 4
    GroupScale scale;
};

// Quantises four consecutive values per lane: lanes 8i..8i+7 of a warp hold the 32 values of one group
// in order; all 32 lanes must call. q = rint(x * (127 / amax)), d = amax * (1 / 127); a group below 1e-35,
// whose reciprocal would overflow, is zeros. A group with a NaN gets d = NaN, so that it is reported
// and not lost.
__device__ inline Quad quantize_quad(float4 v) {
    // |v| as unsigned integers are in the order of their values, NaN above all
    const uint32_t x = __float_as_uint(fabsf(v.x)), y = __float_as_uint(fabsf(v.y));
    const uint32_t z = __float_as_uint(fabsf(v.z)), w = __float_as_uint(fabsf(v.w));
    uint32_t most = max(max(x, y), max(z, w));
#pragma unroll
    for (int m = 1; m < 8; m <<= 1) most = max(most, __shfl_xor_sync(kFull, most, m));
    float amax = __uint_as_float(most);
    if (amax < 1e-35f) amax = 0.0f;
    const float inverse = amax == 0.0f ? 0.0f : __fdiv_rn(127.0f, amax);
    const int q[4] = {__float2int_rn(__fmul_rn(v.x, inverse)), __float2int_rn(__fmul_rn(v.y, inverse)),
                      __float2int_rn(__fmul_rn(v.z, inverse)), __float2int_rn(__fmul_rn(v.w, inverse))};
    int sum = q[0] + q[1] + q[2] + q[3];
    sum += __shfl_xor_sync(kFull, sum, 1);
    sum += __shfl_xor_sync(kFull, sum, 2);
    const int other = __shfl_xor_sync(kFull, sum, 4);  // lanes 0-3 of the group hold values 0-15
    Quad out;
    out.word = (q[0] & 0xff) | (q[1] & 0xff) << 8 | (q[2] & 0xff) << 16 |
               static_cast<uint32_t>(q[3] & 0xff) << 24;
    out.scale.d = __fmul_rn(amax, 1.0f / 127.0f);
    out.scale.lo = static_cast<int16_t>(sum);  // right in the group's first lane
    out.scale.hi = static_cast<int16_t>(other);
    return out;
}
// Byte offset in a row of the word of values k..k+3.
__device__ inline int q8_word_offset(int k) { return (k & ~127) + q8_offset(k & 127); }

// The same, stored to a row in global memory. `k` is the index of v.x in the row, `valid` false
// stores nothing.
__device__ inline void quantize4(float4 v, int k, bool valid, int8_t* qs_row, GroupScale* ds_row) {
    const Quad quad = quantize_quad(v);
    if (!valid) return;
    *reinterpret_cast<uint32_t*>(qs_row + q8_word_offset(k)) = quad.word;
    if ((k & 31) == 0) ds_row[k >> 5] = quad.scale;
}

// silu(gate) * up, the one formula of the fused and the unfused path.
__device__ inline float swiglu_value(float gate, float up) {
    // within 2 ulp, and without the branch of a division that is rounded right, which many of them wait for
    return __fmul_rn(__fdividef(gate, __fadd_rn(1.0f, expf(-gate))), up);
}
