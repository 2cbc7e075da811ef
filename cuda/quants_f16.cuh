// The types of quants.cuh as f16 pairs, the A fragments of mma.m16n8k16.
//
// A code u < 1024 in the low bits of a half is, as it stands, the subnormal number u * 2^-24. One
// fused multiply-add makes it a weight, rounded once:
//   weight * (kUnit * lift * 2^-24)  =  u * S + M,    S = f16(scale * lift),
//   u = kUnit * code + kOffset,    M = -kOffset * 2^-24 * S - minimum * (kUnit * lift * 2^-24)
// so unpacking is a mask and a multiply-add a pair, without subtracting a bias first. `lift` is the
// power of two that puts the matrix's largest |scale| into [2^14, 2^15): S is normal for scales down
// to 2^-29 of the largest, a weight is normal down to 2^-10 (nibbles) or 2^-14 (bytes) of the
// largest and exact to 2^-25 below. The product undoes lift in float32.
#pragma once
#include "quants.cuh"

// Order of K: pair j of half h of block b holds values 32b + 16h + 4t + {j, j + 2} of lane t. With
// mma's k = 2t, 2t+1 for pair 0 and 8+2t, 9+2t for pair 1 a k16 step is 16 consecutive values, and its
// columns are in order when each 16 activations are stored the even ones first.
__device__ inline int half_offset(int k) {  // index of value k inside its group of 128
    return (k & 112) + (k & 1) * 8 + ((k >> 1) & 7);
}

// Any type, from its int8 words: signed bytes become unsigned by their top bit.
template <class Q>
struct HalfCodes {
    static constexpr bool kSigned = !Q::kMin;
    static constexpr int kUnit = Q::kMul, kOffset = kSigned ? 128 : 0;
    static constexpr int kHighShift = 0;  // bits that codes of h = 1 lie above those of h = 0
    __device__ static void block(uint32_t (&u)[2][2], const typename Q::Lane& l, int b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t w = Q::word(l, 0, b, h) ^ (kSigned ? 0x80808080u : 0u);
            u[h][0] = __byte_perm(w, 0u, 0x4240);
            u[h][1] = __byte_perm(w, 0u, 0x4341);
        }
    }
};
// Nibbles at bits 0-3 (h = 0) and 4-7 (h = 1) of the bytes, used where they are.
template <class Q, uint32_t Flip>
struct NibbleCodes {
    static constexpr int kUnit = 1, kOffset = Flip, kHighShift = 4;
    __device__ static void block(uint32_t (&u)[2][2], const typename Q::Lane& l, int b) {
        const uint32_t w = l.q[0][b], odd = w >> 8;
        u[0][0] = (w & 0x000f000fu) ^ (Flip * 0x00010001u);
        u[0][1] = (odd & 0x000f000fu) ^ (Flip * 0x00010001u);
        u[1][0] = (w & 0x00f000f0u) ^ (Flip * 0x00100010u);
        u[1][1] = (odd & 0x00f000f0u) ^ (Flip * 0x00100010u);
    }
};
template <>
struct HalfCodes<Q4_0> : NibbleCodes<Q4_0, 8> {};  // stored as two's complement
template <>
struct HalfCodes<Q4_1> : NibbleCodes<Q4_1, 0> {};
template <>
struct HalfCodes<Q4_K> : NibbleCodes<Q4_K, 0> {};

// The power of two that puts the largest |value|, `peak`, into [2^14, 2^15); 1 where all are zero, and
// 2^114 at most.
__device__ inline float lift_of(float peak) {
    const int exponent = max(static_cast<int>(__float_as_uint(peak) >> 23) - 127, -100);
    return peak > 0.0f ? __int_as_float((127 + 14 - exponent) << 23) : 1.0f;
}
// What undoes a matrix's lift in its products.
template <class Q>
__device__ inline float unlift_of(float peak) {
    return __fdiv_rn(16777216.0f / HalfCodes<Q>::kUnit, lift_of(peak));
}

// S and M of a block (or half block) as two halves.
template <class Q>
__device__ inline uint32_t half_scale(float scale, float minimum, float lift) {
    const __half s = __float2half_rn(__fmul_rn(scale, lift));
    float m = __fmul_rn(__half2float(s), -HalfCodes<Q>::kOffset / 16777216.0f);
    if constexpr (Q::kMin) m = -__fmul_rn(minimum, __fmul_rn(lift, HalfCodes<Q>::kUnit / 16777216.0f));
    return __half_as_ushort(s) | static_cast<uint32_t>(__half_as_ushort(__float2half_rn(m))) << 16;
}

__device__ inline __half2 half_pair(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ inline uint32_t pair_bits(__half2 v) { return *reinterpret_cast<const uint32_t*>(&v); }

// The four pairs of block b of a lane, two a half, from its {S, M} of each half (kHalf) or of both.
template <class Q>
__device__ inline void half_weights(uint32_t (&a)[2][2], const typename Q::Lane& l, int b, const uint32_t* scales) {
    uint32_t u[2][2];
    HalfCodes<Q>::block(u, l, b);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const __half2 scale = half_pair(scales[Q::kHalf ? h : 0]);
        __half2 s = __half2half2(__low2half(scale));
        const __half2 m = __half2half2(__high2half(scale));
        if (h == 1 && HalfCodes<Q>::kHighShift != 0)
            s = __hmul2(s, __float2half2_rn(1.0f / (1 << HalfCodes<Q>::kHighShift)));
#pragma unroll
        for (int j = 0; j < 2; ++j) a[h][j] = pair_bits(__hfma2(half_pair(u[h][j]), s, m));
    }
}

// ---- pieces of a record -----------------------------------------------------------------------------
template <class Q>
constexpr int kScaleBytes = Q::kRecord - Q::kScales;  // of the 8 rows of a record

// The scale words of row `row` (0-7) from the scales of its record: up to 16 bytes a row, then what
// is left of each row.
template <class Q>
__device__ inline void load_scales(typename Q::Lane& l, const uint8_t* scales, int row) {
    constexpr int kRow = kScaleBytes<Q> / 8, kMain = kRow > 16 ? 16 : kRow & ~3, kTail = kRow - kMain;
    const uint8_t* at = scales + row * kMain;
    if constexpr (kMain == 16) {
        const uint4 s = Shared::get16(at);
        l.s[0] = s.x, l.s[1] = s.y, l.s[2] = s.z, l.s[3] = s.w;
    } else {
#pragma unroll
        for (int i = 0; i < kMain / 4; ++i) l.s[i] = Shared::get4(at + 4 * i);
    }
    if constexpr (kTail == 4) l.s[kMain / 4] = Shared::get4(scales + 8 * kMain + row * 4);
    if constexpr (kTail == 2) l.s[kMain / 4] = Shared::get2(scales + 8 * kMain + row * 2);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kFewRegisters = true;  // words kept for four blocks spill there: loads of two
#else
constexpr bool kFewRegisters = false;
#endif

// The words of block b and those after it that come with the same load, as chunk 0 of the lane.
template <class Q>
__device__ inline void load_words(typename Q::Lane& l, const uint8_t* planes, int lane, int b) {
    if constexpr (Q::kLow == 8) {
        if (b % 2 == 0) {
            const uint4 v = Shared::get16(planes + b * 256 + lane * 16);
            l.q[0][2 * b] = v.x, l.q[0][2 * b + 1] = v.y, l.q[0][2 * b + 2] = v.z, l.q[0][2 * b + 3] = v.w;
        }
    } else if constexpr (Q::kLow == 4 && kFewRegisters) {
        if (b % 2 == 0) {
            const uint2 v = Shared::get8(planes + lane * 16 + b * 4);
            l.q[0][b] = v.x, l.q[0][b + 1] = v.y;
        }
    } else if (b == 0) {
        if constexpr (Q::kLow == 4) {
            const uint4 v = Shared::get16(planes + lane * 16);
            l.q[0][0] = v.x, l.q[0][1] = v.y, l.q[0][2] = v.z, l.q[0][3] = v.w;
        } else {
            const uint2 v = Shared::get8(planes + lane * 8);
            l.q[0][0] = v.x, l.q[0][1] = v.y;
        }
    }
    if constexpr (Q::kHigh == 1)
        if (b == 0 || (kFewRegisters && b == 2))
            l.h[0][0] = *reinterpret_cast<const volatile uint32_t*>(planes + Q::kLowBytes + lane * 4);
    if constexpr (Q::kHigh == 2)
        if (b % 2 == 0) l.h[0][b / 2] = Shared::get4(planes + Q::kLowBytes + lane * 8 + b * 2);
}

// ---- activations ------------------------------------------------------------------------------------
// Activations of SwiGLU are stored divided by this: f16 holds up to 4.2e6, exact to 2e-6.
constexpr float kNeuronScale = 64.0f;

// Values k..k+3 of a row (k % 4 == 0) times `by`, where half_offset has them.
__device__ inline void store_halves(uint8_t* row, int k, float4 v, float by) {
    const uint32_t even = __half_as_ushort(__float2half_rn(__fmul_rn(v.x, by))) |
                         static_cast<uint32_t>(__half_as_ushort(__float2half_rn(__fmul_rn(v.z, by)))) << 16;
    const uint32_t odd = __half_as_ushort(__float2half_rn(__fmul_rn(v.y, by))) |
                          static_cast<uint32_t>(__half_as_ushort(__float2half_rn(__fmul_rn(v.w, by)))) << 16;
    uint8_t* at = row + ((k & ~127) + half_offset(k & 127)) * 2;
    *reinterpret_cast<uint32_t*>(at) = even;
    *reinterpret_cast<uint32_t*>(at + 16) = odd;
}
