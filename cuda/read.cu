// read_xor: every 16 bytes of a buffer once and nothing else: the rate that this card's memory gives a
// kernel, which benchmarks divide by.
//   x (n) of 16 bytes   out (gridDim.x * 512): the xor of the words that a thread has read
// Launch  grid = 2 blocks an SM, block = 512; 8 loads of 16 bytes in flight a thread, 128 KB an SM.
// Bytes   16 n. H200: 64 MiB 2.1, 278 MiB 3.6, 1.1 GiB 4.1, 4 GiB 4.33 TB/s.
// Why not a library's reduction: what it does beside reading would be part of the ceiling.
#include "common.cuh"

constexpr int kThreads = 512;
constexpr int kLoads = 8;

__device__ inline uint32_t xor_words(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

__global__ void __launch_bounds__(kThreads, 2) read_xor(const uint4* x, uint32_t* out, int n) {
    pdl_trigger();
    pdl_wait();
    const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    uint32_t found = 0;
    int64_t i = thread;
    for (; i + (kLoads - 1) * stride < n; i += kLoads * stride) {
        uint4 v[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j) v[j] = load_stream16(x + i + j * stride);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) found ^= xor_words(v[j]);
    }
    for (; i < n; i += stride) found ^= xor_words(load_stream16(x + i));
    out[thread] = found;
}
