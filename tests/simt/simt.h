// What CUDA C++ gives a kernel, for a host compiler: `cuda/*.cu` include this where MINFER_SIMT is
// defined. Threads are fibres (fibres.cpp), memory accesses are checked through the calls that
// -fsanitize=thread inserts (memory.cpp). Intrinsics that synchronise take their place in the source
// from default arguments.
#pragma once

#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // the plain C headers: half the compile time of <cmath>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stdint.h>

// Kernels are inline, so that their shared variables are visible to alias analysis as globals are,
// and each access is seen by the checks.
#define __global__ inline
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__ __restrict
// A module's thread-local segment is its static shared memory: nothing else in it is thread-local.
#define __shared__ static thread_local

#include "simt_vectors.h"
#include "simt_half.h"

// ---- what fibres.cpp and memory.cpp supply --------------------------------------------------------
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMT_UNCHECKED __attribute__((no_sanitize("thread"), no_sanitize("undefined"), noinline))

extern "C" {
__attribute__((const)) uint3 simt_thread_idx();
__attribute__((const)) uint3 simt_block_idx();
__attribute__((const)) uint3 simt_block_dim();
__attribute__((const)) uint3 simt_grid_dim();
__attribute__((const)) int simt_lane();
char* simt_dynamic_shared();
int simt_barrier(int value, const char* file, int line);  // the number of threads with value != 0
void simt_warp_barrier(unsigned mask, const char* file, int line);
// bar.sync: until `threads` threads of the block have come to barrier `id` of 1 to 15.
void simt_named_barrier(int id, int threads, SIMT_SITE);
// An mbarrier, 8 bytes of shared memory: a phase is over when `count` arrivals and all the bytes that
// were expected have come. Copies are synchronous: their bytes come when the kernel says so.
void simt_arrival_begin(uint64_t* state, int count);
void simt_arrival_arrive(uint64_t* state);
void simt_arrival_expect(uint64_t* state, int bytes);  // and one arrival
void simt_arrival_come(uint64_t* state, int bytes);
void simt_arrival_wait(uint64_t* state, int phase, SIMT_SITE);  // phase 1 of a fresh one is over
uint64_t simt_shuffle(unsigned mask, uint64_t value, int source, const char* file, int line);
unsigned simt_ballot(unsigned mask, bool value, const char* file, int line);
unsigned simt_match(unsigned mask, uint64_t value, const char* file, int line);
uint32_t simt_reduce(unsigned mask, uint32_t value, int op, const char* file, int line);
void simt_mma_s8(int* d, const uint32_t* a, const uint32_t* b, int k, SIMT_SITE);
void simt_mma_f16(float* d, const uint32_t* a, const uint32_t* b, SIMT_SITE);
void simt_load_matrices(uint32_t* r, const void* shared, bool transposed, SIMT_SITE);
// The bytes arrive when a wait covers their group; until then the target may be neither read nor written.
void simt_copy_async(void* shared, const void* global, int bytes);  // null: zeros
void simt_copy_async_commit();
void simt_copy_async_wait(int pending);
void simt_atomic(const void* address, int bytes);  // checks the access; the caller does it
void simt_fence();
long long simt_clock();
void simt_forbidden(const char* what);
}

#define threadIdx simt_thread_idx()
#define blockIdx simt_block_idx()
#define blockDim simt_block_dim()
#define gridDim simt_grid_dim()
constexpr int warpSize = 32;

// ---- barriers, votes, shuffles ----------------------------------------------------------------------
inline void __syncthreads(SIMT_SITE) { simt_barrier(0, file, line); }
inline int __syncthreads_count(int p, SIMT_SITE) { return simt_barrier(p != 0, file, line); }
inline int __syncthreads_or(int p, SIMT_SITE) { return simt_barrier(p != 0, file, line) != 0; }
inline int __syncthreads_and(int p, SIMT_SITE) { return simt_barrier(p == 0, file, line) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) { simt_warp_barrier(mask, file, line); }
inline unsigned __ballot_sync(unsigned mask, int p, SIMT_SITE) {
    return simt_ballot(mask, p != 0, file, line);
}
inline int __any_sync(unsigned mask, int p, SIMT_SITE) {
    return simt_ballot(mask, p != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int p, SIMT_SITE) {
    return simt_ballot(mask, p == 0, file, line) == 0;
}
inline unsigned __activemask() {
    simt_forbidden("__activemask: which lanes are active together is not defined");
    return 0;
}

template <typename T>
inline uint64_t simt_bits(T value) {
    static_assert(sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <typename T>
inline T simt_from_bits(uint64_t bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
// A source outside of the lane's segment of `width` lanes means the lane itself.
template <typename T>
inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, SIMT_SITE) {
    const int from = (simt_lane() & ~(width - 1)) | (source & (width - 1));
    return simt_from_bits<T>(simt_shuffle(mask, simt_bits(v), from, file, line));
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T v, int lane_mask, int width = 32, SIMT_SITE) {
    const int lane = simt_lane(), from = lane ^ lane_mask;
    const bool inside = from < (lane & ~(width - 1)) + width;
    return simt_from_bits<T>(simt_shuffle(mask, simt_bits(v), inside ? from : lane, file, line));
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_SITE) {
    const int lane = simt_lane(), from = lane - static_cast<int>(delta);
    const bool inside = from >= (lane & ~(width - 1));
    return simt_from_bits<T>(simt_shuffle(mask, simt_bits(v), inside ? from : lane, file, line));
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_SITE) {
    const int lane = simt_lane(), from = lane + static_cast<int>(delta);
    const bool inside = from < (lane & ~(width - 1)) + width;
    return simt_from_bits<T>(simt_shuffle(mask, simt_bits(v), inside ? from : lane, file, line));
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T v, SIMT_SITE) {
    return simt_match(mask, simt_bits(v), file, line);
}
enum { kSimtAdd, kSimtMinS, kSimtMaxS, kSimtMinU, kSimtMaxU, kSimtAnd, kSimtOr, kSimtXor };
#define SIMT_REDUCE(name, type, op)                                                              \
    inline type name(unsigned mask, type v, SIMT_SITE) {                                        \
        return static_cast<type>(simt_reduce(mask, static_cast<uint32_t>(v), op, file, line)); \
    }
SIMT_REDUCE(__reduce_add_sync, int, kSimtAdd)
SIMT_REDUCE(__reduce_add_sync, unsigned, kSimtAdd)
SIMT_REDUCE(__reduce_min_sync, int, kSimtMinS)
SIMT_REDUCE(__reduce_max_sync, int, kSimtMaxS)
SIMT_REDUCE(__reduce_min_sync, unsigned, kSimtMinU)
SIMT_REDUCE(__reduce_max_sync, unsigned, kSimtMaxU)
SIMT_REDUCE(__reduce_and_sync, unsigned, kSimtAnd)
SIMT_REDUCE(__reduce_or_sync, unsigned, kSimtOr)
SIMT_REDUCE(__reduce_xor_sync, unsigned, kSimtXor)

inline void __threadfence() { simt_fence(); }
inline void __threadfence_block() {}
inline void __threadfence_system() { simt_fence(); }
inline long long clock64() { return simt_clock(); }
inline void __nanosleep(unsigned) {}
[[noreturn]] inline void __trap() {
    simt_forbidden("__trap");
    abort();
}

// ---- atomics ------------------------------------------------------------------------------------------
#define SIMT_ATOMIC(name, expression)                              \
    template <typename T>                                          \
    SIMT_UNCHECKED inline T name(T* p, decltype(T() + 0, T()) v) { \
        simt_atomic(p, sizeof(T));                                 \
        const T old = *p;                                          \
        *p = (expression);                                         \
        return old;                                                \
    }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicExch, v)
SIMT_ATOMIC(atomicMin, old < v ? old : v)
SIMT_ATOMIC(atomicMax, old < v ? v : old)
SIMT_ATOMIC(atomicAnd, old & v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicXor, old ^ v)
SIMT_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
SIMT_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <typename T>
SIMT_UNCHECKED inline T atomicCAS(T* p, decltype(T() + 0, T()) compare, decltype(T() + 0, T()) v) {
    simt_atomic(p, sizeof(T));
    const T old = *p;
    if (old == compare) *p = v;
    return old;
}

#include "simt_arithmetic.h"
