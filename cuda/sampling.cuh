// Pieces of the sampler: keys whose order is the candidate order, integer masses, block-wide sums, and
// the search for the key at which a running sum reaches a number. minfer_cuda/sampling.py is the
// definition that all of this follows.
#pragma once
#include "common.cuh"
#include "state.cuh"

struct SamplerParams {
    float temperature;  // > 0 unless top_k is 1: an argmax
    float top_p;        // >= 1: all
    float min_z;        // ln(min_p), -inf: all
    float repeat, frequency, presence;
    int top_k;   // 0: all
    int window;  // ids whose repetition is penalised; -1: the whole history
    int has_penalty, has_bias;
    int n_logprobs;
    uint32_t seed[2];
};
static_assert(sizeof(SamplerParams) == 52, "");

// ---- keys: descending key = descending logit, lowest id first on ties; 0 is no key ---------------
__device__ inline uint32_t ordered(float logit) {
    if (logit != logit) return 0xffffffffu;  // above +inf: the maximum shows every bad logit
    uint32_t bits = logit == 0.0f ? 0u : __float_as_uint(logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float logit_of(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}
constexpr uint32_t kNever = 0x007fffffu;  // of -inf
__device__ inline bool is_finite(uint32_t order) {  // of the largest: -inf means that all are
    return order < 0xff800000u && order > kNever;
}
__device__ inline uint64_t make_key(uint32_t order, int id) {
    return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(id);
}
__device__ inline uint32_t order_of(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
__device__ inline int id_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

__device__ inline float distance(uint32_t order, uint32_t best) {  // z = l - l_max
    return __fsub_rn(logit_of(order), logit_of(best));
}
__device__ inline uint64_t mass(float z, float temperature) {
    double relative = exp(static_cast<double>(z) / static_cast<double>(temperature));
    return static_cast<uint64_t>(rint(relative * 1099511627776.0));
}

// The least integer, not below 1, that as a double is at least `target`.
__device__ inline uint64_t first_reaching(double target) {
    uint64_t n = static_cast<uint64_t>(target);
    while (static_cast<double>(n) < target) ++n;
    while (n > 1 && static_cast<double>(n - 1) >= target) --n;
    return n > 1 ? n : 1;
}

// Philox4x32-10, first word of counter (index, 0, 0): the upper 24 bits as a number in [0, 1).
__device__ inline double uniform(const uint32_t seed[2], uint64_t index) {
    uint32_t c0 = static_cast<uint32_t>(index), c1 = static_cast<uint32_t>(index >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = seed[0], k1 = seed[1];
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        uint32_t low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
        uint32_t low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
        c0 = high1 ^ c1 ^ k0, c1 = low1;
        c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return (c0 >> 8) * (1.0 / 16777216.0);
}

// ---- block-wide sums, in an order that the block size alone decides --------------------------------
struct Exchange {
    uint64_t warps[32], bests[32];
    double sums[32];
};

template <class T>
__device__ inline T warp_scan(T v) {  // inclusive
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        T left = __shfl_up_sync(kFull, v, step);
        if (threadIdx.x % kWarp >= step) v += left;
    }
    return v;
}

// Inclusive sum over the threads up to this one; `total` receives that of all.
__device__ inline uint64_t block_scan(Exchange& x, uint64_t v, uint64_t& total) {
    int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, n_warps = blockDim.x / kWarp;
    v = warp_scan(v);
    if (lane == kWarp - 1) x.warps[warp] = v;
    __syncthreads();
    if (warp == 0) {
        uint64_t sum = warp_scan(lane < n_warps ? x.warps[lane] : uint64_t(0));
        x.warps[lane] = sum;
    }
    __syncthreads();
    v += warp > 0 ? x.warps[warp - 1] : 0;
    total = x.warps[31];
    __syncthreads();
    return v;
}
__device__ inline uint64_t block_sum(Exchange& x, uint64_t v) {
    uint64_t total;
    block_scan(x, v, total);
    return total;
}

__device__ inline uint64_t warp_max(uint64_t v) {
#if defined(MINFER_SIMT) || __CUDA_ARCH__ >= 800
    uint32_t high = __reduce_max_sync(kFull, order_of(v));
    uint32_t low = __reduce_max_sync(kFull, order_of(v) == high ? static_cast<uint32_t>(v) : 0u);
    return static_cast<uint64_t>(high) << 32 | low;
#else
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
        uint64_t other = __shfl_xor_sync(kFull, v, m);
        v = v > other ? v : other;
    }
    return v;
#endif
}

// One barrier: a second call needs another before it.
__device__ inline uint64_t block_max(Exchange& x, uint64_t v) {
    int lane = threadIdx.x % kWarp;
    v = warp_max(v);
    if (lane == 0) x.bests[threadIdx.x / kWarp] = v;
    __syncthreads();
    return warp_max(lane < static_cast<int>(blockDim.x) / kWarp ? x.bests[lane] : 0);
}

__device__ inline double block_sum(Exchange& x, double v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(kFull, v, m);
    if (threadIdx.x % kWarp == 0) x.sums[threadIdx.x / kWarp] = v;
    __syncthreads();
    double sum = 0;
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) sum += x.sums[warp];
    __syncthreads();
    return sum;
}

// ---- search ----------------------------------------------------------------------------------------
constexpr int kDigits = 256;
struct Selection {
    uint32_t low[kDigits], high[kDigits];  // sums of weights by the key's next 8 bits
    uint32_t members[kDigits];
    uint64_t prefix, need;
    int alone;
};

// First warp: the highest digit at which the running sum reaches s.need.
__device__ inline void choose_digit(Selection& s, int shift) {
    constexpr int kEach = kDigits / kWarp;
    int top = kDigits - 1 - static_cast<int>(threadIdx.x) * kEach;
    auto weight = [&](int digit) { return static_cast<uint64_t>(s.high[digit]) << 32 | s.low[digit]; };
    uint64_t need = s.need, sum = 0;
    for (int i = 0; i < kEach; ++i) sum += weight(top - i);
    uint64_t after = warp_scan(sum), before = after - sum;
    __syncwarp();  // all have read s.need
    if (before >= need || after < need) return;  // one lane goes on
    int digit = top;
    while (before + weight(digit) < need) before += weight(digit--);
    s.prefix |= static_cast<uint64_t>(digit) << shift;
    s.need = need - before;
    s.alone = s.members[digit] == 1;
}

// Of the keys key_at(0..n-1), in descending order, the first at which the running sum of
// weight_of(key) reaches `need`, which is at least 1 and at most the sum of all. All threads call it.
template <class KeyAt, class WeightOf>
__device__ uint64_t select_key(Selection& s, int n, uint64_t need, KeyAt key_at, WeightOf weight_of) {
    auto shares = [&](uint64_t key, int shift) { return shift > 63 || (key ^ s.prefix) >> shift == 0; };
    if (threadIdx.x == 0) s.prefix = 0, s.need = need;
    int shift = 64;
    do {
        shift -= 8;
        for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x)
            s.low[digit] = s.high[digit] = s.members[digit] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            uint64_t key = key_at(i), weight = shares(key, shift + 8) ? weight_of(key) : 0;
            if (weight == 0) continue;
            int digit = static_cast<int>(key >> shift) & (kDigits - 1);
            uint32_t low = static_cast<uint32_t>(weight);
            uint32_t carry = atomicAdd(&s.low[digit], low) + low < low;
            uint32_t high = static_cast<uint32_t>(weight >> 32) + carry;
            if (high != 0) atomicAdd(&s.high[digit], high);
            atomicAdd(&s.members[digit], 1u);
        }
        __syncthreads();
        if (threadIdx.x < kWarp) choose_digit(s, shift);
        __syncthreads();
    } while (shift > 0 && !s.alone);
    uint64_t prefix = s.prefix;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        uint64_t key = key_at(i);
        if ((key ^ prefix) >> shift == 0 && weight_of(key) != 0) s.prefix = key;  // one thread
    }
    __syncthreads();
    uint64_t found = s.prefix;
    __syncthreads();
    return found;
}
