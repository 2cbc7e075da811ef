// Bins of like logits, for draws from all candidates: sums for each bin tell in which bin a running sum
// reaches a number, and a search among that bin's keys alone then tells at which key.
#pragma once
#include "sampling.cuh"

constexpr int kBins = 2048;
constexpr float kRange = 29.0f;  // exp(-29) * 2^40 < 1/2: no mass from there on
struct Bins {
    uint64_t mass_one[kBins];  // at temperature 1
    uint64_t mass[kBins];
    uint32_t count[kBins];
    uint32_t filled[kBins];
};
// Grows as z falls. All of the last bin has mass 0: it is neither counted nor filled.
__device__ inline int bin_of(float z, float temperature) {
    float per_nat = (kBins - 1) / (kRange * fmaxf(temperature, 1.0f));
    return static_cast<int>(fminf(__fmul_rn(-z, per_nat), kBins - 1.0f));
}

__device__ inline uint32_t best_of(Exchange& exchange, const uint32_t* bests, int n) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) best = bests[i] > best ? bests[i] : best;
    return static_cast<uint32_t>(block_max(exchange, best));
}

// What the one block of draw_bins works with.
struct BinSearch {
    Selection selection;
    Exchange exchange;
    uint64_t before;
    int bin;
};

template <class Value>
__device__ uint64_t sum_below(BinSearch& s, int end, Value value_of_bin) {
    uint64_t sum = 0;
    for (int bin = threadIdx.x; bin < end; bin += blockDim.x) sum += value_of_bin(bin);
    return block_sum(s.exchange, sum);
}

// The key at which the running sum of weight_of(key) over the candidates reaches `need`, when the
// bins' sums are value_of_bin(bin); s.bin is its bin.
template <int Threads, class Value, class WeightOf>
__device__ uint64_t find(BinSearch& s, const Bins* bins, const uint64_t* binned, uint64_t need,
                         Value value_of_bin, WeightOf weight_of) {
    constexpr int kEach = kBins / Threads;
    uint64_t own = 0, total;
    for (int i = 0; i < kEach; ++i) own += value_of_bin(threadIdx.x * kEach + i);
    uint64_t before = block_scan(s.exchange, own, total) - own;
    for (int i = 0; i < kEach; ++i) {
        int bin = threadIdx.x * kEach + i;
        uint64_t value = value_of_bin(bin);
        if (before < need && need <= before + value) s.bin = bin, s.before = before;
        before += value;
    }
    __syncthreads();
    uint64_t start = sum_below(s, s.bin, [&](int bin) { return uint64_t(bins->count[bin]); });
    return select_key(s.selection, bins->count[s.bin], need - s.before,
                      [&](int i) { return binned[start + i]; }, weight_of);
}

// Sum of weight_of(key) over the candidates of `bin` and, by value_of_bin, of those before it.
template <class Value, class WeightOf>
__device__ uint64_t sum_through(BinSearch& s, const Bins* bins, const uint64_t* binned, int bin,
                                Value value_of_bin, WeightOf weight_of) {
    uint64_t start = sum_below(s, bin, [&](int b) { return uint64_t(bins->count[b]); });
    uint64_t sum = sum_below(s, bin, value_of_bin), own = 0;
    for (int i = threadIdx.x; i < static_cast<int>(bins->count[bin]); i += blockDim.x)
        own += weight_of(binned[start + i]);
    return sum + block_sum(s.exchange, own);
}
