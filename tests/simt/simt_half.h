// f16 and bf16: bits, conversions rounded to nearest even, arithmetic rounded once per operation
// (float32 holds sums and products of two such values well enough that rounding twice changes nothing).
#pragma once

inline uint32_t simt_float_bits(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
}
inline float simt_bits_float(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}

inline float simt_half_to_float(uint16_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ffu;
    if (exponent == 31) return simt_bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact
        const float value = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -value : value;
    }
    return simt_bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline uint16_t simt_float_to_half(float f) {
    const uint32_t bits = simt_float_bits(f), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u) return 0x7fff;                  // NaN, as the device converts it
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;         // 65520 and above round to infinity
    if (magnitude < 0x38800000u)                                 // subnormal: units of 2^-24
        return sign | static_cast<uint16_t>(
                          __builtin_rintf(simt_bits_float(magnitude) * 0x1p24f));
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
    return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}
inline uint16_t simt_float_to_bfloat(float f) {
    const uint32_t bits = simt_float_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

struct __half {
    uint16_t bits;
    __half() = default;
    __half(float f) : bits(simt_float_to_half(f)) {}
    operator float() const { return simt_half_to_float(bits); }
};
struct alignas(4) __half2 {
    __half x, y;
};
struct __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : bits(simt_float_to_bfloat(f)) {}
    operator float() const { return simt_bits_float(static_cast<uint32_t>(bits) << 16); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline short __half_as_short(__half h) { return static_cast<short>(h.bits); }
inline __half __ushort_as_half(unsigned short u) {
    __half h;
    h.bits = u;
    return h;
}
inline __half __short_as_half(short s) { return __ushort_as_half(static_cast<unsigned short>(s)); }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float f) { return {__half(f), __half(f)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline __half __hadd(__half a, __half b) { return __half(float(a) + float(b)); }
inline __half __hsub(__half a, __half b) { return __half(float(a) - float(b)); }
inline __half __hmul(__half a, __half b) { return __half(float(a) * float(b)); }
inline __half __hneg(__half a) { return __ushort_as_half(a.bits ^ 0x8000u); }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
// a * b + c rounded once: the product is exact in double; where the sum is not, its last bit is
// made odd, which keeps the second rounding right.
inline __half __hfma(__half a, __half b, __half c) {
    const double product = double(float(a)) * double(float(b)), addend = float(c);
    double sum = product + addend;
    const double part = sum - product, error = (product - (sum - part)) + (addend - part);
    uint64_t bits;
    __builtin_memcpy(&bits, &sum, 8);
    if (error != 0 && error == error && !(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
    __builtin_memcpy(&sum, &bits, 8);
    float narrow = static_cast<float>(sum);  // again to odd: float32 is not the last step
    uint32_t low = simt_float_bits(narrow);
    const double lost = sum - narrow;
    if (lost != 0 && lost == lost && !(low & 1)) low += (lost > 0) == (narrow > 0) ? 1 : -1;
    return __half(simt_bits_float(low));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return {__nv_bfloat16(f), __nv_bfloat16(f)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__nv_bfloat16(float(a.x) * float(b.x)), __nv_bfloat16(float(a.y) * float(b.y))};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    __nv_bfloat16 b;
    b.bits = u;
    return b;
}
