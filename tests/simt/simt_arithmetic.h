// CUDA's arithmetic functions. Fast approximations are the exact functions here.
#pragma once

// ---- bits -----------------------------------------------------------------------------------------
inline float __uint_as_float(unsigned u) { return simt_bits_float(u); }
inline float __int_as_float(int i) { return simt_bits_float(static_cast<uint32_t>(i)); }
inline unsigned __float_as_uint(float f) { return simt_float_bits(f); }
inline int __float_as_int(float f) { return static_cast<int>(simt_float_bits(f)); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline unsigned __brev(unsigned v) {
    v = (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
    v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
    v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(v);
}
// Byte i of the result is byte (selector nibble i & 7) of y:x, or its sign repeated where bit 3 is set.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> (4 * i) & 15;
        unsigned byte = static_cast<unsigned>(both >> (8 * (pick & 7))) & 0xff;
        if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << (8 * i);
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return by & 31 ? high << (by & 31) | low >> (32 - (by & 31)) : high;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return by & 31 ? low >> (by & 31) | high << (32 - (by & 31)) : low;
}

// ---- integers ---------------------------------------------------------------------------------------
template <typename A, typename B>
inline int simt_dot4(uint32_t a, uint32_t b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<A>(a >> (8 * i)) * static_cast<B>(b >> (8 * i));
    return c;
}
inline int __dp4a(int a, int b, int c) { return simt_dot4<int8_t, int8_t>(a, b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    return static_cast<unsigned>(simt_dot4<uint8_t, uint8_t>(a, b, static_cast<int>(c)));
}
// dp4a.u32.s32, which has no intrinsic in CUDA C++; kernels reach it by a named function.
inline int simt_dp4a_us(uint32_t a, int b, int c) { return simt_dot4<uint8_t, int8_t>(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline int __vadd4(int a, int b) {
    uint32_t sum = 0;
    for (int i = 0; i < 32; i += 8)
        sum |= ((static_cast<uint32_t>(a) >> i) + (static_cast<uint32_t>(b) >> i) & 0xff) << i;
    return static_cast<int>(sum);
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    uint32_t difference = 0;
    for (int i = 0; i < 32; i += 8) difference |= ((a >> i) - (b >> i) & 0xff) << i;
    return difference;
}

#define SIMT_MIN_MAX(type)                                          \
    inline type min(type a, type b) { return a < b ? a : b; }       \
    inline type max(type a, type b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline float abs(float a) { return fabsf(a); }
inline double abs(double a) { return fabs(a); }
inline long long abs(long long a) { return a < 0 ? -a : a; }

// ---- floats: one rounding each ------------------------------------------------------------------------
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float rsqrtf(float a) { return __frsqrt_rn(a); }
inline double rsqrt(double a) { return 1.0 / sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float a) { return expf(a); }
inline float __exp10f(float a) { return powf(10.0f, a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float a) { return sinf(a); }
inline float __cosf(float a) { return cosf(a); }
inline void __sincosf(float a, float* s, float* c) { *s = sinf(a), *c = cosf(a); }
inline void sincosf(float a, float* s, float* c) { *s = sinf(a), *c = cosf(a); }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline float normcdff(float a) { return 0.5f * erfcf(-a * 0.70710678f); }

// ---- conversions: the device saturates, NaN becomes 0 ---------------------------------------------------
template <typename T>
inline T simt_saturate(double value, double low, double high) {
    return value != value ? T(0) : value <= low ? T(low) : value >= high ? T(high) : T(value);
}
inline int simt_to_int(double v) { return simt_saturate<int>(v, -2147483648.0, 2147483647.0); }
inline unsigned simt_to_uint(double v) { return simt_saturate<unsigned>(v, 0.0, 4294967295.0); }
inline int __float2int_rn(float f) { return simt_to_int(rintf(f)); }
inline int __float2int_rz(float f) { return simt_to_int(truncf(f)); }
inline int __float2int_rd(float f) { return simt_to_int(floorf(f)); }
inline int __float2int_ru(float f) { return simt_to_int(ceilf(f)); }
inline unsigned __float2uint_rn(float f) { return simt_to_uint(rintf(f)); }
inline unsigned __float2uint_rz(float f) { return simt_to_uint(truncf(f)); }
inline float __int2float_rn(int i) { return static_cast<float>(i); }
inline float __uint2float_rn(unsigned u) { return static_cast<float>(u); }
inline double __hiloint2double(int high, int low) {
    const uint64_t bits = static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
    double d;
    __builtin_memcpy(&d, &bits, 8);
    return d;
}

// ---- loads and stores with a caching hint -----------------------------------------------------------------
#define SIMT_LOAD(name)        \
    template <typename T>      \
    inline T name(const T* p) { return *p; }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
#define SIMT_STORE(name)       \
    template <typename T>      \
    inline void name(T* p, T v) { *p = v; }
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwb)
SIMT_STORE(__stwt)
