// matmul_f16<Q, Tile, Stages>: many tokens times a matrix, quantised or F16 or BF16, on f16 tensor
// cores, float32 sums.
//   y[t, n] = sum_k W[n, k] x[t, k] (+ bias[n]) (+ residual[t, n]), or with a second matrix `up`
//   neurons[t, n] = silu(sum_k W[n, k] x[t, k]) * sum_k up[n, k] x[t, k], as f16 activations
//   matrices (N, K), alone, or up to three above each other as one, in records (layout 2); peak,
//   up_peak: their largest |scale|, from `peak<Q>`
//   F16, BF16: row-major, K % 8 == 0; the peak of BF16 is its largest |value|, F16 has none
//   h (T, Kp) f16, hs (T): f16 activations, x = h * hs, each 16 values in half_offset's order
// Weights are the rows (M), tokens the columns (N). Both tiles go to shared memory by cp.async, the
// weights as they are; a warp unpacks its A fragments in registers (quants_f16.cuh), so the loop has
// no scaling of sums. Scales of the next chunk become {S, M} pairs in a table while this chunk is
// multiplied: the pairs of a row are made once a block, not once a lane.
// Floats  F16 goes into the products bit for bit. BF16 is lifted, so that its largest |value| is in
//         [2^14, 2^15): exact down to 2^-28 of that, below to 2^-39 of it. NaN and Inf stay what they are.
// Work    in tiles and units, as matmul_tiles.cuh says; a unit of F16 and BF16 has 64 values of K.
// Launch  grid = G, block = Tile::kThreads, dynamic shared = Stages stages and two tables.
// Limits  (H200, 608 TFLOP/s: a m16n8k16 each 6.2 clocks of a quarter SM.) A warp of 64 x 64 and 32
//         values of K: 64 mma = 397 clocks; 72 (nibbles) to 130 (Q6_K) instructions of unpacking, 10
//         to 14 reads of 16 bytes and 4 of 8 (48-60 of the 100 clocks of shared memory that 64 mma take of
//         an SM). Tiles of 128 x 128 read 26 bytes a clock and SM from L2. Measured 290 TFLOP/s at 2,048
//         tokens (7B, Q4_K), as much as tiles of 256 x 128; 128 x 64 190 at 64 tokens, three
//         blocks an SM, and tiles of 8 tokens past the last are left out. Few tokens: matmul_few.cu; sm_90 and
//         quantised types: matmul_wgmma.cu.
// Why not int8: a scale every 32 values costs more than the products (matmul.cu: 100 TOP/s) and its
//         rounding of activations 700 times the divergence (kernels.md).
#include "matmul_tiles.cuh"

// WarpsM x WarpsN warps, each MTiles x NTiles tiles of 16 rows x 8 tokens; Blocks of them an SM. Skips: tiles of
// tokens past those of a block are left out.
template <int WarpsM, int WarpsN, int MTiles, int NTiles, int Blocks, bool Skips>
struct Tile {
    static constexpr int kWarpsN = WarpsN, kMTiles = MTiles, kNTiles = NTiles, kBlocks = Blocks;
    static constexpr int kThreads = WarpsM * WarpsN * kWarp;
    static constexpr int kRows = WarpsM * MTiles * 16, kStrips = kRows / 8;
    static constexpr int kTokens = WarpsN * NTiles * 8;
    static constexpr int kSums = MTiles * NTiles * 4, kSharesAtOnce = kSums;  // of a thread
    static constexpr bool kSkips = Skips;
};

// The thread's place in its block; cheap to find again, so that no register holds it for long.
template <class T>
struct Place {
    unsigned lane, warp_m, warp_n;
    __device__ Place() {
        const unsigned thread = thread_again(), warp = thread / kWarp;
        lane = thread % kWarp;
        warp_m = warp / T::kWarpsN;
        warp_n = warp % T::kWarpsN;
    }
};

// A chunk of a type: values of K, bytes of 8 rows, bytes of their scales, {S, M} pairs of a block.
// Rows of F16 and BF16 come as they are; with 64 values two blocks of an SM have room for three stages.
template <class Q, bool = Q::kFloat>
struct Chunk {
    static constexpr int kValues = 128, kStripBytes = Q::kChunkBytes, kScales = kScaleBytes<Q>;
    static constexpr int kHalves = Q::kHalf ? 2 : 1;
    using Lane = typename Q::Lane;  // words that a lane keeps
};
template <class Q>
struct Chunk<Q, true> {
    static constexpr int kValues = 64, kStripBytes = 8 * kValues * Q::kBytes, kScales = 0, kHalves = 0;
    struct Lane {};
};

template <class Q, class T>
struct Stage {  // activations, planes or rows of the chunk, scales of the chunk that comes next
    static constexpr int kTokenBytes = Chunk<Q>::kValues * 2;
    static constexpr int kPlanes = T::kTokens * kTokenBytes;
    static constexpr int kScales = kPlanes + T::kStrips * Chunk<Q>::kStripBytes;
    static constexpr int kBytes = kScales + T::kStrips * Chunk<Q>::kScales;
    static constexpr int kTable = T::kRows * 4 * Chunk<Q>::kHalves;  // words
};

// ---- staging ------------------------------------------------------------------------------------------
// The rows of a row tile's strips, the last again past the last, zeros past K. Sections of 32 bytes
// change places by row: the 16 lanes that read of four rows at once (row_fragments) meet all banks.
template <class Q, class T>
__device__ inline void copy_rows(char* to, const F16Arguments& a, const Source& source, int chunk) {
    constexpr int kRowBytes = Chunk<Q>::kStripBytes / 8, kOfRow = kRowBytes / 16;
    constexpr int kAtOnce = T::kThreads / kOfRow;  // rows: a strip of each matrix of a gated product
    static_assert(kAtOnce % 16 == 0 && T::kRows % kAtOnce == 0, "");
    const int thread = thread_again(), piece = thread % kOfRow, first = thread / kOfRow;
    const int row_bytes = a.k * Q::kBytes, at = chunk * kRowBytes + piece * 16;
    const uint8_t* from = (a.gated && first % 16 >= 8 ? a.w[1] : source.w) + at;
    const int step = a.gated ? kAtOnce / 2 : kAtOnce;
    const int row0 = source.strip * (a.gated ? 4 : 8) + (a.gated ? first / 16 * 8 + first % 8 : first);
    to += first * kRowBytes + (piece ^ (first & 3) << 1) * 16;
#pragma unroll
    for (int j = 0; j < T::kRows / kAtOnce; ++j) {
        const int row = min(row0 + j * step, source.rows - 1);
        copy_async16(to + j * kAtOnce * kRowBytes, from + static_cast<int64_t>(row) * row_bytes, at < row_bytes);
    }
}
// Pieces of 16 bytes of every strip of a row tile, `Each` of a strip, from byte `at` on.
template <class Q, class T, int Each>
__device__ inline void copy_strips(char* to, const F16Arguments& a, const Source& source, unsigned at) {
    constexpr int kPieces = T::kStrips * Each;
    const unsigned thread = thread_again();
#pragma unroll
    for (int j = 0; j < (kPieces + T::kThreads - 1) / T::kThreads; ++j) {
        const unsigned i = j * T::kThreads + thread;
        if (kPieces % T::kThreads == 0 || i < kPieces)
            copy_async16(to + i * 16, strip_at<Q>(a, source, i / Each, at + i % Each * 16));
    }
}
template <class Q, class T>
__device__ inline void copy_scales(char* stage, const F16Arguments& a, const Cursor& c) {
    if constexpr (!Q::kFloat) {
        const unsigned at = c.chunk / Q::kChunks * Q::kRecord + Q::kScales;
        copy_strips<Q, T, kScaleBytes<Q> / 16>(stage + Stage<Q, T>::kScales, a, Source(a, c.row_tile * T::kRows), at);
    }
}
template <class Q, class T>
__device__ inline void copy_planes(char* stage, const F16Arguments& a, const Cursor& c) {
    const Source source(a, c.row_tile * T::kRows);
    if constexpr (Q::kFloat) {
        copy_rows<Q, T>(stage + Stage<Q, T>::kPlanes, a, source, c.chunk);
    } else {
        const unsigned at = c.chunk / Q::kChunks * Q::kRecord + c.chunk % Q::kChunks * Q::kChunkBytes;
        copy_strips<Q, T, Q::kChunkBytes / 16>(stage + Stage<Q, T>::kPlanes, a, source, at);
    }
}

// A chunk of a tile's tokens, zeros past the last.
template <class Q, class T>
__device__ inline void copy_tokens(char* stage, const F16Arguments& a, const Cursor& c) {
    constexpr int kTokenBytes = Stage<Q, T>::kTokenBytes;
    constexpr unsigned kPieces = kTokenBytes / 16, kAtOnce = T::kThreads / kPieces;  // tokens
    static_assert(T::kTokens % kAtOnce == 0 && kAtOnce % 8 == 0, "");
    const unsigned thread = thread_again(), piece = thread % kPieces, first = thread / kPieces;
    char* to = stage + token_offset(piece, first, T::kTokens);
    const int row_bytes = ceil_div(a.chunks, 128 / Chunk<Q>::kValues) * 128 * 2;
    const int row0 = (c.tile - c.row_tile * a.token_tiles) * a.tokens_each + first;
    const uint8_t* from = a.h + (static_cast<int64_t>(row0) * row_bytes + c.chunk * kTokenBytes + piece * 16);
#pragma unroll
    for (int j = 0; j < T::kTokens; j += kAtOnce) {
        if (T::kSkips && j >= a.tokens_each) break;
        copy_async16(to + j * 128, from + j * row_bytes, row0 + j < a.tokens);
    }
}

// {S, M} of chunk C of a record for all rows of the tile, in the order in which `multiply` reads them.
template <class Q, class T, int C>
__device__ inline void convert_scales(uint32_t* table, const uint8_t* scales, const Lifts<Q>& lifts) {
    constexpr int kHalves = Chunk<Q>::kHalves;
    const unsigned row = thread_again(), strip = row / 8, g = row % 8;
    static_assert(T::kThreads == T::kRows, "");
    typename Q::Lane l;
    load_scales<Q>(l, scales + strip * kScaleBytes<Q>, g);
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            table[(((strip / 2 * 4 + b) * 8 + g) * 2 + strip % 2) * kHalves + h] = half_scale<Q>(
                scale_of<Q>(l, C, b, h), minimum_of<Q>(l, C, b, h), strip % 2 ? lifts.of[1] : lifts.of[0]);
}
template <class Q, class T>
__device__ inline void convert_scales(uint32_t* table, const char* stage, int chunk, const Lifts<Q>& lifts) {
    if constexpr (!Q::kFloat) {
        const uint8_t* scales = reinterpret_cast<const uint8_t*>(stage) + Stage<Q, T>::kScales;
        if (Q::kChunks == 1 || chunk % 2 == 0)
            convert_scales<Q, T, 0>(table, scales, lifts);
        else
            convert_scales<Q, T, Q::kChunks - 1>(table, scales, lifts);
    }
}

// ---- products -----------------------------------------------------------------------------------------
// The A fragments of block b of 16 rows, one each half: from records, whose words l keeps from block
// to block, with the {S, M} pairs at `from` ...
template <class Q>
__device__ inline void record_fragments(uint32_t (&a)[2][4], typename Q::Lane (&l)[2], const uint8_t* planes,
                                        const uint32_t* from, unsigned lane, int b) {
    const ScalePairs<Q> scales(from);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        load_words<Q>(l[r], planes + r * Q::kChunkBytes, lane, b);
        weight_fragments<Q>(a, r, l[r], b, scales);
    }
}
// ... and from rows as they are: `rows` is where row g and the lane's four values begin, `swizzle` how
// copy_rows moved its sections.
template <class Q>
__device__ inline void row_fragments(uint32_t (&a)[2][4], const uint8_t* rows, unsigned swizzle, int b,
                                     const Lifts<Q>& lifts) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint2 w = Shared::get8(rows + r * Chunk<Q>::kStripBytes + ((b * 64 + h * 32) ^ swizzle));
            value_fragments<Q>(a[h], r, w, lifts);
        }
}

// acc += the chunk of a stage; `tiles` of 8 tokens of the warp have tokens. All columns are read before the
// rows, which is 10 % faster, or each where a branch may leave it out.
template <class Q, class T>
__device__ inline void multiply(float (&acc)[T::kMTiles][T::kNTiles][4], const char* stage, const uint32_t* table,
                                const Lifts<Q>& lifts, int tiles) {
    constexpr int kHalves = Chunk<Q>::kHalves;
    const Place<T> place;
    const unsigned lane = place.lane, g = lane >> 2, t = lane & 3, warp_m = place.warp_m, warp_n = place.warp_n;
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(stage) + Stage<Q, T>::kPlanes +
                             warp_m * T::kMTiles * 2 * Chunk<Q>::kStripBytes;
    table += (warp_m * T::kMTiles * 32 + g) * 2 * kHalves;
    const unsigned x = token_offset(lane / 8, warp_n * T::kNTiles * 8 + lane % 8, T::kTokens);  // of block 0: as token_fragments
    typename Chunk<Q>::Lane l[T::kMTiles][2];
    auto rows = [&](uint32_t (&to)[2][4], int m, int b) {
        const uint8_t* strips = weights + m * 2 * Chunk<Q>::kStripBytes;
        if constexpr (Q::kFloat)
            row_fragments<Q>(to, strips + g * (Chunk<Q>::kStripBytes / 8) + t * 8, (g & 3) * 32, b, lifts);
        else
            record_fragments<Q>(to, l[m], strips, table + (m * 4 + b) * 16 * kHalves, lane, b);
    };
    auto columns = [&](uint32_t (&to)[2][2], int n, int b) {
        load_matrices<false>(&to[0][0], stage + ((x ^ b % 2 * 64) + b / 2 * T::kTokens * 128 + n * 1024));
    };
#pragma unroll
    for (int b = 0; b < Chunk<Q>::kValues / 32; ++b) {
        if constexpr (T::kSkips) {
            uint32_t a[T::kMTiles][2][4];
#pragma unroll
            for (int m = 0; m < T::kMTiles; ++m) rows(a[m], m, b);
#pragma unroll
            for (int n = 0; n < T::kNTiles; ++n) {
                if (n >= tiles) break;
                uint32_t v[2][2];
                columns(v, n, b);
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int m = 0; m < T::kMTiles; ++m) mma_f16(acc[m][n], a[m][h], v[h]);
            }
        } else {
            uint32_t v[T::kNTiles][2][2];
#pragma unroll
            for (int n = 0; n < T::kNTiles; ++n) columns(v[n], n, b);
#pragma unroll
            for (int m = 0; m < T::kMTiles; ++m) {
                uint32_t a[2][4];
                rows(a, m, b);
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int n = 0; n < T::kNTiles; ++n) mma_f16(acc[m][n], a[h], v[n][h]);
            }
        }
    }
}

template <class Q, class T, int Stages>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks) matmul_f16(F16Arguments a) {
    pdl_trigger();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    pdl_wait();
    return;  // sm_75 has no room for the stages: prefill.py does not choose it there
#endif
    __shared__ int order;
    char* stages = shared_bytes();
    uint32_t* tables = reinterpret_cast<uint32_t*>(stages + Stages * Stage<Q, T>::kBytes);
    const Lifts<Q> lifts(a);

    Cursor at(a), ahead = at;  // ahead: the unit whose scales are copied next, one before its chunk
    int slot = 0;  // stage of `at`
    auto stage = [&](int later) {
        const int i = slot + later;
        return stages + (i < Stages ? i : i - Stages) * Stage<Q, T>::kBytes;
    };
    auto load_weights = [&](char* to) {
        copy_planes<Q, T>(to, a, ahead);
        ahead.advance(a);
        if (ahead.tile >= 0) copy_scales<Q, T>(to, a, ahead);
    };
    auto load = [&](char* to) {
        if (ahead.tile >= 0) {
            copy_tokens<Q, T>(to, a, ahead);
            load_weights(to);
        }
        copy_async_commit();
    };

    // the first stages' weights before the wait, what they are multiplied with after it
    copy_scales<Q, T>(stage(Stages - 1), a, at);
    copy_async_commit();
#pragma unroll 1
    for (int i = 0; i < Stages - 1; ++i)
        if (ahead.tile >= 0) load_weights(stage(i));
    pdl_wait();
    Cursor first = at;
#pragma unroll 1
    for (int i = 0; i < Stages - 1; ++i) {
        if (first.tile >= 0) {
            copy_tokens<Q, T>(stage(i), a, first);
            first.advance(a);
        }
        copy_async_commit();
    }
    copy_async_wait<Stages - 1>();
    __syncthreads();
    convert_scales<Q, T>(tables, stage(Stages - 1), at.chunk, Lifts<Q>(a));
    int parity = 0;  // table of `at`

    while (at.tile >= 0) {
        const int tile = at.tile;
        float acc[T::kMTiles][T::kNTiles][4] = {};
        do {
            copy_async_wait<Stages - 2>();
            __syncthreads();  // this chunk and its table are there, and everybody is done with the one before
            load(stage(Stages - 1));
            at.advance(a);
            if (at.tile >= 0)
                convert_scales<Q, T>(tables + (parity ^ 1) * Stage<Q, T>::kTable, stage(0), at.chunk, Lifts<Q>(a));
            multiply<Q, T>(acc, stage(0), tables + parity * Stage<Q, T>::kTable, lifts, a.tokens_each / 8);
            slot = slot + 1 < Stages ? slot + 1 : 0;
            parity ^= 1;
        } while (at.tile == tile);

        if (is_shared(a, tile) && !add_shares<T>(acc, a, tile - a.whole, &order, T::kNTiles)) continue;
        const Place<T> place;
        const int lane = place.lane, warp_m = place.warp_m, warp_n = place.warp_n;
        const int row0 = tile / a.token_tiles * T::kRows + warp_m * T::kMTiles * 16;
        const int first = tile % a.token_tiles * a.tokens_each, end = min(a.tokens, first + a.tokens_each);
        const int token0 = first + warp_n * T::kNTiles * 8 + (lane & 3) * 2;
        if (a.gated)
            write_neurons<Q, T::kMTiles, T::kNTiles>(acc, a, row0 / 2 + (lane >> 2), token0, end);
        else
            write_rows<Q, T::kMTiles, T::kNTiles>(acc, a, row0 + (lane >> 2), token0, end);
    }
    copy_async_wait<0>();
}

// peak<Q>: the largest |scale| of a matrix in records, of BF16 the largest finite |value|. out (1) is
// zero before.   records: of the matrix, of BF16 its values by fours
// Launch  grid = any, block = 256; a warp takes records, a lane row g and block t of each chunk.
template <class Q>
__global__ void __launch_bounds__(256) peak(const uint8_t* w, float* out, int records) {
    pdl_trigger();
    pdl_wait();
    float largest = 0.0f;
    if constexpr (Q::kFloat) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < records; i += gridDim.x * blockDim.x) {
            const float4 v = Q::load4(w, static_cast<int64_t>(i) * 4);
            const float values[4] = {fabsf(v.x), fabsf(v.y), fabsf(v.z), fabsf(v.w)};
#pragma unroll
            for (int j = 0; j < 4; ++j) largest = fmaxf(largest, values[j] <= 3.4028235e38f ? values[j] : 0.0f);
        }
    } else {
        const int lane = threadIdx.x % kWarp, warps = gridDim.x * (blockDim.x / kWarp);
        for (int i = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp; i < records; i += warps) {
            const typename Q::Lane l = Q::template load<Streamed>(w + static_cast<int64_t>(i) * Q::kRecord, lane);
#pragma unroll
            for (int j = 0; j < Q::kChunks * 8; ++j)
                largest = fmaxf(largest, fabsf(scale_of<Q>(l, j / 8, j / 2 % 4, j % 2)));
        }
    }
    largest = warp_max(largest);
    if (threadIdx.x % kWarp == 0) atomicMax(reinterpret_cast<int*>(out), __float_as_int(largest));
}

// halve: rows of x (T, K) float as f16 activations h (T, Kp), hs (T). hs is the power of two that
// puts the row's largest |x| into [2^14, 2^15). Launch  grid = T, block = 256.
__global__ void __launch_bounds__(256) halve(const float* x, uint8_t* h, float* hs, int k) {
    pdl_trigger();
    pdl_wait();
    __shared__ float partial[8];
    const float* row = x + static_cast<int64_t>(blockIdx.x) * k;
    float largest = 0.0f;
    for (int i = threadIdx.x * 4; i < k; i += blockDim.x * 4) {
        const float4 v = *reinterpret_cast<const float4*>(row + i);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
    largest = warp_max(largest);
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = largest;
    __syncthreads();
    largest = warp_max(partial[threadIdx.x % 8]);
    const float lift = lift_of(largest);
    if (threadIdx.x == 0) hs[blockIdx.x] = __fdiv_rn(1.0f, lift);
    const int padded = ceil_div(k, 128) * 128;
    for (int i = threadIdx.x * 4; i < padded; i += blockDim.x * 4) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < k) v = *reinterpret_cast<const float4*>(row + i);
        store_halves(h + static_cast<int64_t>(blockIdx.x) * padded * 2, i, v, lift);
    }
}
