// Words every kernel uses. Inline PTX appears only here, in cluster.cuh and in wgmma.cuh, each function with its
// host meaning beside it (MINFER_SIMT: the sources compiled by a C++ compiler and run under tests/simt).
#pragma once

#ifdef MINFER_SIMT
#include "simt.h"  // threadIdx, __syncthreads, shuffles, half, ...: tests/simt
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#ifdef __CUDACC_RTC__  // NVRTC has no <cstdint>
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

constexpr int kWarp = 32;
constexpr unsigned kFull = 0xffffffffu;

// The kernel's dynamic shared memory, 16-byte aligned: `shared_bytes()` is its first byte.
__device__ inline char* shared_bytes() {
#ifdef MINFER_SIMT
    return simt_dynamic_shared();
#else
    extern __shared__ __align__(16) char minfer_shared[];
    return minfer_shared;
#endif
}

// ---- dependent launch (sm_90): the next kernel of the stream may start early ------------------
__device__ inline void pdl_trigger() {
#if !defined(MINFER_SIMT) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// All earlier kernels of the chain are complete and their writes visible after this.
__device__ inline void pdl_wait() {
#if !defined(MINFER_SIMT) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// threadIdx.x, read anew: what a loop computes from it is not kept in registers across the loop.
__device__ inline unsigned thread_again() {
#ifdef MINFER_SIMT
    return threadIdx.x;
#else
    unsigned i;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
    return i;
#endif
}

// ---- loads --------------------------------------------------------------------------------------
// Weights are read once a token: 16 bytes that need not stay in L1.
__device__ inline uint4 load_stream16(const void* p) {
#ifdef MINFER_SIMT
    return *static_cast<const uint4*>(p);
#else
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
#endif
}
__device__ inline uint2 load_stream8(const void* p) {
#ifdef MINFER_SIMT
    return *static_cast<const uint2*>(p);
#else
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
#endif
}
__device__ inline uint32_t load_stream4(const void* p) {
#ifdef MINFER_SIMT
    return *static_cast<const uint32_t*>(p);
#else
    uint32_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
#endif
}
__device__ inline uint16_t load_stream2(const void* p) {
#ifdef MINFER_SIMT
    return *static_cast<const uint16_t*>(p);
#else
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
#endif
}

// 16 bytes that stay in L1, and 16 bytes of shared memory, as one load each.
__device__ inline uint4 load_cached16(const void* p) {
#ifdef MINFER_SIMT
    return *static_cast<const uint4*>(p);
#else
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
#endif
}
__device__ inline uint4 load_shared16(const void* p) {
#ifdef MINFER_SIMT
    return *static_cast<const uint4*>(p);
#else
    uint4 v;
    uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(p));
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(s) : "memory");
    return v;
#endif
}

// What another block wrote before a counter said so: from L2, never from this SM's L1.
__device__ inline float load_coherent(const float* p) {
#ifdef MINFER_SIMT
    return *p;
#else
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
#endif
}

__device__ inline float4 load_coherent(const float4* p) {
#ifdef MINFER_SIMT
    return *p;
#else
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
#endif
}

// Asynchronous copy of 16 bytes to shared memory; `valid` false writes zeros. sm_75 copies at once.
__device__ inline void copy_async16(void* shared, const void* global, bool valid = true) {
#ifdef MINFER_SIMT
    simt_copy_async(shared, valid ? global : nullptr, 16);
#elif __CUDA_ARCH__ >= 800
    uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(s), "l"(global), "r"(bytes)
                 : "memory");
#else
    *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
#endif
}
// The same for 4 or 8 bytes.
template <class T>
__device__ inline void copy_async(T* shared, const T* global) {
#ifdef MINFER_SIMT
    simt_copy_async(shared, global, sizeof(T));
#elif __CUDA_ARCH__ >= 800
    uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(s), "l"(global), "n"(sizeof(T))
                 : "memory");
#else
    *shared = *global;
#endif
}
__device__ inline void copy_async_commit() {
#ifdef MINFER_SIMT
    simt_copy_async_commit();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until at most `N` committed groups of this thread are pending.
template <int N>
__device__ inline void copy_async_wait() {
#ifdef MINFER_SIMT
    simt_copy_async_wait(N);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- tensor cores -------------------------------------------------------------------------------
// d (16x8, s32) += a (16x32, s8, row) * b (32x8, s8, col). Fragments of a lane (g = lane/4, t = lane%4):
// a0 (g, 4t..), a1 (g+8, 4t..), a2 (g, 16+4t..), a3 (g+8, 16+4t..); b0 (4t.., g), b1 (16+4t.., g);
// d0 (g, 2t), d1 (g, 2t+1), d2 (g+8, 2t), d3 (g+8, 2t+1).
__device__ inline void mma_s8_k32(int d[4], const uint32_t a[4], const uint32_t b[2]) {
#ifdef MINFER_SIMT
    simt_mma_s8(d, a, b, 32);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    // Turing: four m8n8k16 on the same registers.
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%4}, {%8}, {%0,%1};\n\t"
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%6}, {%9}, {%0,%1};\n\t"
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%2,%3}, {%5}, {%8}, {%2,%3};\n\t"
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%2,%3}, {%7}, {%9}, {%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// The same with K = 16: a0 (g, 4t..), a1 (g+8, 4t..); b (4t.., g).
__device__ inline void mma_s8_k16(int d[4], uint32_t a0, uint32_t a1, uint32_t b) {
#ifdef MINFER_SIMT
    uint32_t a[2] = {a0, a1};
    simt_mma_s8(d, a, &b, 16);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(b));
#else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%4}, {%6}, {%0,%1};\n\t"
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%2,%3}, {%5}, {%6}, {%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(b));
#endif
}
// d (16x8, f32) += a (16x16, f16, row) * b (16x8, f16, col). Each register two halves:
// a0 (g, 2t..), a1 (g+8, 2t..), a2 (g, 8+2t..), a3 (g+8, 8+2t..); b0 (2t.., g), b1 (8+2t.., g).
__device__ inline void mma_f16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
#ifdef MINFER_SIMT
    simt_mma_f16(d, a, b);
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%8}, {%0,%1,%2,%3};\n\t"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%6,%7}, {%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// Four 8x8 matrices of 16-bit values from shared memory: lane l gives the address of row l%8 of
// matrix l/8 and receives, of each, the pair (row lane/4, columns 2*(lane%4)..+1). `Transposed`
// gives the pair of the transposed matrix.
template <bool Transposed>
__device__ inline void load_matrices(uint32_t r[4], const void* shared) {
#ifdef MINFER_SIMT
    simt_load_matrices(r, shared, Transposed);
#else
    uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    if constexpr (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(s) : "memory");
#endif
}

// ---- small arithmetic -----------------------------------------------------------------------------
__device__ inline float half_bits(uint16_t h) { return __half2float(__ushort_as_half(h)); }
__device__ inline float bf16_bits(uint16_t h) { return __uint_as_float(static_cast<uint32_t>(h) << 16); }
__device__ inline int byte_of(uint32_t w, int i) { return __byte_perm(w, 0, 0x4440 | i); }
__device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ inline float warp_sum(float v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(kFull, v, m);
    return v;
}
__device__ inline float warp_max(float v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v = fmaxf(v, __shfl_xor_sync(kFull, v, m));
    return v;
}

// 2^x in one instruction (ex2.approx.ftz, 2 ulp; results below 2^-126 are zero).
__device__ inline float exp2_fast(float x) {
#ifdef MINFER_SIMT
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// One 32-value group of layout 1 (ARCHITECTURE.md): value = d * q, lo and hi the sums of q over
// values 0-15 and 16-31.
struct GroupScale {
    float d;
    int16_t lo, hi;
};
static_assert(sizeof(GroupScale) == 8, "");
// Byte offset of value k inside its group of 128.
__device__ inline int q8_offset(int k) {
    return ((k >> 2) & 3) * 32 + ((k >> 5) & 3) * 8 + ((k >> 4) & 1) * 4 + (k & 3);
}
