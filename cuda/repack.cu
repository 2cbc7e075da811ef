// repack: a quantised matrix from the file's blocks to weight records (layout 2, quants.cuh).
//   raw   (N, K / kBlock) blocks of Q::kRaw bytes, row-major, as in the file
//   out   (ceil(N/8), Kp / kRecK) records of Q::kRecord bytes; rows past N and values past K get
//         code 0 and scale 0
// Launch  grid = records, block = 64: thread = chunk * 32 + lane.
// Bytes   reads and writes the matrix once; runs once at load, hidden behind the upload.
// Why not on the host: NumPy needs about a minute for a 7B model, this runs at copy speed.
#include "quants.cuh"

template <class Q>
__global__ void __launch_bounds__(64) repack(const uint8_t* raw, uint8_t* out, int n, int k) {
    pdl_trigger();
    pdl_wait();
    constexpr int kBlocks = Q::kRecK / Q::kBlock;  // blocks of one row in a record
    const int records = ceil_div(k, Q::kRecK), row_blocks = k / Q::kBlock;
    const int strip = blockIdx.x / records, record = blockIdx.x % records;
    uint8_t* rec = out + static_cast<int64_t>(blockIdx.x) * Q::kRecord;
    const int chunk = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int g = lane >> 2, t = lane & 3, row = strip * 8 + g;
    const uint8_t* row_raw = raw + static_cast<int64_t>(row) * row_blocks * Q::kRaw;

    if (chunk < Q::kChunks) {
        constexpr int kLowWords = Q::kLow == 8 ? 8 : Q::kLow == 4 ? 4 : 2;
        uint32_t low[kLowWords] = {}, high[2] = {};
#pragma unroll
        for (int b = 0; b < 4; ++b)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    int i = record * Q::kRecK + chunk * 128 + 32 * b + 16 * h + 4 * t + e;
                    uint32_t code = 0;
                    if (row < n && i < k) code = Q::code(row_raw + i / Q::kBlock * Q::kRaw, i % Q::kBlock);
                    low[Q::low_word(b, h)] |= (code & ((1u << Q::kLow) - 1)) << Q::low_bit(b, h, e);
                    if (Q::kHigh) high[Q::high_word(b)] |= (code >> Q::kLow) << Q::high_bit(b, h, e);
                }
        uint8_t* plane = rec + chunk * Q::kChunkBytes;
        if constexpr (Q::kLow == 2) {
            *reinterpret_cast<uint2*>(plane + lane * 8) = make_uint2(low[0], low[1]);
        } else {
#pragma unroll
            for (int i = 0; i < Q::kLow / 4; ++i)
                *reinterpret_cast<uint4*>(plane + i * 512 + lane * 16) =
                    make_uint4(low[4 * i], low[4 * i + 1], low[4 * i + 2], low[4 * i + 3]);
        }
        plane += Q::kLowBytes;
        if constexpr (Q::kHigh == 1) *reinterpret_cast<uint32_t*>(plane + lane * 4) = high[0];
        if constexpr (Q::kHigh == 2) *reinterpret_cast<uint2*>(plane + lane * 8) = make_uint2(high[0], high[1]);
    }
    if (threadIdx.x < 8 * kBlocks) {  // scales: thread = row in strip, block in record
        int r = threadIdx.x / kBlocks, b = threadIdx.x % kBlocks, block = record * kBlocks + b;
        uint8_t zeros[Q::kRaw];
        const uint8_t* source = raw + (static_cast<int64_t>(strip * 8 + r) * row_blocks + block) * Q::kRaw;
        if (strip * 8 + r >= n || block >= row_blocks) {
            for (int i = 0; i < Q::kRaw; ++i) zeros[i] = 0;
            source = zeros;
        }
        Q::pack_scales(source, rec, r, b);
    }
}
