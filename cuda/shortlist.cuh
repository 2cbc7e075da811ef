// The k largest of a block's keys, sorted. A histogram of the keys' distances from the best tells where
// the k-th lies; the few keys from there up go to a list in shared memory, whose ranks are counted.
// Each step looks at a key once. Where too many are alike, an exact search chooses k of them first.
#pragma once
#include "sampling.cuh"

constexpr int kMaxTopK = 256;
constexpr int kRoom = 512;  // of the list
constexpr int kLevels = 256;
struct Shortlist {
    __align__(16) uint32_t levels[kLevels];  // keys of each
    uint64_t found[kRoom];                   // in any order, then zeros
    int count;                               // of `found`; above kRoom: some had no room
    int limit;                               // keys up to this level are found
    Selection selection;
};

// 0..255, growing with the distance from the best: 32 levels an octave of distance + 1/4, so that a
// level holds few keys beside those before it, wherever the k-th lies. NaN and what is far: the last.
__device__ inline int level_of(uint64_t key, uint64_t best) {
    float from = 0.25f - distance(order_of(key), order_of(best));
    return static_cast<int>((__float_as_uint(fminf(from, 63.75f)) - __float_as_uint(0.25f)) >> 18);
}

template <int Threads>
__device__ inline void clear(Shortlist& list) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRoom; i += Threads) list.found[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < kLevels; i += Threads) list.levels[i] = 0;
    if (threadIdx.x == 0) list.count = 0;
}

template <int Threads, class KeyAt>
__device__ inline void count_levels(Shortlist& list, uint64_t best, int n, KeyAt key_at) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += Threads) {
        uint64_t key = key_at(i);
        if (key != 0) atomicAdd(&list.levels[level_of(key, best)], 1u);
    }
}

// First warp: the first level up to which there are k keys; the last if there are fewer.
__device__ inline void choose_limit(Shortlist& list, int k) {
    constexpr int kEach = kLevels / kWarp;
    uint32_t own[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += own[i] = list.levels[threadIdx.x * kEach + i];
    uint32_t through = warp_scan(sum) - sum, passed = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        through += own[i];
        passed += through < static_cast<uint32_t>(k);
    }
    passed = warp_scan(passed);
    if (threadIdx.x == kWarp - 1) list.limit = min(static_cast<int>(passed), kLevels - 1);
}

// Into the list if the key's level is within the limit: that is the answer.
__device__ inline bool offer(Shortlist& list, uint64_t key, uint64_t best) {
    if (key == 0 || level_of(key, best) > list.limit) return false;
    int place = atomicAdd(&list.count, 1);
    if (place < kRoom) list.found[place] = key;
    return true;
}

// The list is the k <= kMaxTopK largest of key_at(0..n-1), of which at least k are keys.
template <int Threads, class KeyAt>
__device__ void choose_exactly(Shortlist& list, int n, int k, KeyAt key_at) {
    auto one = [](uint64_t key) { return static_cast<uint64_t>(key != 0); };
    uint64_t least = select_key(list.selection, n, k, key_at, one);
    clear<Threads>(list);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += Threads) {
        uint64_t key = key_at(i);
        if (key >= least) list.found[atomicAdd(&list.count, 1)] = key;
    }
    __syncthreads();
}

// emit(rank, key, part) for each key of the list, by eight lanes: part 0..7.
template <int Threads, class Emit>
__device__ inline void rank_found(const Shortlist& list, Emit emit) {
    constexpr int kParts = 8, kAtOnce = 4;
    const int part = threadIdx.x % kParts, count = list.count;
#pragma unroll 1
    for (int first = 0; first < count; first += Threads / kParts) {
        const int i = first + threadIdx.x / kParts;
        const uint64_t key = list.found[min(i, kRoom - 1)];
        int rank = 0;
#pragma unroll 1
        for (int other = part; other < count; other += kAtOnce * kParts) {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) rank += list.found[other + j * kParts] > key;
        }
#pragma unroll
        for (int m = kParts / 2; m > 0; m >>= 1) rank += __shfl_xor_sync(kFull, rank, m);
        if (i < count) emit(rank, key, part);
    }
}

// All of it: emit(rank, key, part) for at least the k <= kMaxTopK largest of key_at(0..n-1), of which
// the largest is `best`. The list is clear, and stays used.
template <int Threads, class KeyAt, class Emit>
__device__ inline void rank_largest(Shortlist& list, uint64_t best, int n, int k, KeyAt key_at,
                                    Emit emit) {
    count_levels<Threads>(list, best, n, key_at);
    __syncthreads();
    if (threadIdx.x < kWarp) choose_limit(list, k);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += Threads) offer(list, key_at(i), best);
    __syncthreads();
    if (__builtin_expect(list.count > kRoom, 0)) choose_exactly<Threads>(list, n, k, key_at);
    rank_found<Threads>(list, emit);
}
