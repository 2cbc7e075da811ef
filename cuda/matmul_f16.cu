// matmul_f16<Q, Tile, Stages>: many tokens times a matrix, quantised or F16 or BF16, on f16 tensor
// cores, float32 sums.
//   y[t, n] = sum_k W[n, k] x[t, k] (+ bias[n]) (+ residual[t, n]), or with a second matrix `up`
//   neurons[t, n] = silu(sum_k W[n, k] x[t, k]) * sum_k up[n, k] x[t, k], as f16 activations
//   matrices (N, K), alone, or up to three above each other as one, in records (layout 2); peak,
//   up_peak: their largest |scale|, from `peak<Q>`
//   F16, BF16: row-major, K % 8 == 0; the peak of BF16 is its largest |value|, F16 has none
//   h (T, Kp) f16, hs (T): f16 activations, x = h * hs, each 128 values in half_offset's order
// Weights are the rows (M), tokens the columns (N). Both tiles go to shared memory by cp.async, the
// weights as they are; a warp unpacks its A fragments in registers (quants_f16.cuh), so the loop has
// no scaling of sums. Scales of the next chunk become {S, M} pairs in a table while this chunk is
// multiplied: the pairs of a row are made once a block, not once a lane.
// Floats  F16 goes into the products bit for bit. BF16 is lifted, so that its largest |value| is in
//         [2^14, 2^15): exact down to 2^-28 of that, below to 2^-39 of it. NaN and Inf stay what they are.
// Work    a unit is a tile by 128 values of K, by 64 of F16 and BF16. Block i of G takes the whole
//         tiles i, i + G, ... of `waves` waves, then 1/G of the units of the tiles that are left, in
//         order; a tile shared by blocks is added up by the one that arrives last, in the order of K
//         (no bit depends on timing). `arrived` (tiles that are left) is zero before and after.
// Launch  grid = G, block = Tile::kThreads, dynamic shared = Stages stages and two tables.
// Limits  (H200, 608 TFLOP/s: a m16n8k16 each 6.2 clocks of a quarter SM.) A warp of 64 x 64 and 32
//         values of K: 64 mma = 397 clocks; 72 (nibbles) to 130 (Q6_K) instructions of unpacking, 10
//         to 14 LDS.128 and 4 LDS.64 (48-60 of the 100 clocks of shared memory that 64 mma take of
//         an SM). Tiles of 128 x 128 read 26 bytes a clock and SM from L2. Measured 290 TFLOP/s at 2,048
//         tokens (7B, Q4_K), as much as tiles of 256 x 128; 128 x 32 175, and the better up to
//         64 to 128 tokens; up to 16 a tile of 128 x 16 with 32 warps an SM, bound by the instructions
//         around the products. Tokens past the last are not read.
// Why not int8: a scale every 32 values costs more than the products (matmul.cu: 100 TOP/s) and its
//         rounding of activations 700 times the divergence (kernels.md).
#include "q8.cuh"
#include "quants_f16.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFewThreads = 512;  // of an SM, with few tokens: 64 registers spill there
#else
constexpr int kFewThreads = 1024;
#endif

// WarpsM x WarpsN warps, each MTiles x NTiles tiles of 16 rows x 8 tokens.
template <int WarpsM, int WarpsN, int MTiles, int NTiles>
struct Tile {
    static constexpr int kWarpsN = WarpsN, kMTiles = MTiles, kNTiles = NTiles;
    static constexpr int kThreads = WarpsM * WarpsN * kWarp;
    static constexpr int kRows = WarpsM * MTiles * 16, kStrips = kRows / 8;
    static constexpr int kTokens = WarpsN * NTiles * 8;
    static constexpr int kSums = MTiles * NTiles * 4;  // of a thread
    static constexpr bool kFew = kSums <= 8;  // a step is bound by latency: 32 warps an SM
    static constexpr int kBlocks = (kFew ? kFewThreads : 256) / kThreads;  // an SM: 64 or 255 registers a thread
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

struct F16Arguments {
    const uint8_t* w[3];            // one matrix, or up to three above each other; gated: gate, up
    const float *peak, *up_peak;    // (1); of matrices above each other one for all
    const uint8_t* h;
    const float* hs;
    const float *bias, *residual;   // null: none; residual may be y
    float* y;
    uint8_t* neurons;               // (T, Np) f16 and its scale (T), of a gated product
    float* neuron_scale;
    float* partial;                 // (2 G, tile) sums of shared tiles
    int* arrived;
    int n, k, tokens, stride;       // n: rows in all, gated of one; stride of y and residual, in floats
    int token_tiles, chunks;        // tiles of a row of tiles, chunks of K
    int waves, whole, units;        // whole waves and their tiles; units of the tiles that are left
    int begins[2];                  // row tiles where the second and third matrix begin
    int gated;
};

// ---- sharing out the work ---------------------------------------------------------------------------
__device__ inline int first_unit(const F16Arguments& a, int block) {
    return static_cast<int64_t>(a.units) * block / gridDim.x;
}
__device__ inline int owner(const F16Arguments& a, int unit) {
    return (static_cast<int64_t>(unit + 1) * gridDim.x - 1) / a.units;
}
// Where block `block` puts its sums of a shared tile: it may have two such tiles. `first`: the block that
// begins the tile, after the end of another or not; all others begin inside it.
__device__ inline int share_slot(const F16Arguments& a, int block, int first, int tile) {
    return 2 * block + (block == first && first_unit(a, first) < tile * a.chunks);
}

// A block's units in order: `chunk` of `tile`, tile < 0 at the end. `row_tile` of all matrices.
struct Cursor {
    int tile, chunk, end, wave, unit, row_tile;
    __device__ explicit Cursor(const F16Arguments& a) : wave(0), unit(first_unit(a, blockIdx.x)) { next_tile(a); }
    __device__ void next_tile(const F16Arguments& a) {
        const int last = first_unit(a, blockIdx.x + 1);
        if (wave < a.waves) {
            tile = blockIdx.x + wave++ * gridDim.x;
            chunk = 0;
            end = a.chunks;
        } else if (unit < last) {
            const int at = unit / a.chunks;
            tile = a.whole + at;
            chunk = unit - at * a.chunks;
            end = min(a.chunks, chunk + last - unit);
            unit += end - chunk;
        } else {
            tile = -1;
            return;
        }
        row_tile = tile / a.token_tiles;
    }
    // True where a tile ends.
    __device__ bool advance(const F16Arguments& a) {
        if (++chunk < end) return false;
        next_tile(a);
        return true;
    }
};

// ---- lifts of a matrix's values ------------------------------------------------------------------------
template <class Q>
constexpr bool kAsIs = false;  // values are halves as they stand
template <>
constexpr bool kAsIs<F16> = true;

// What values of BF16 are multiplied by; types in records have it in their scales.
template <class Q>
__device__ inline float value_lift(const float* peak) {
    if constexpr (kAsIs<Q>)
        return 1.0f;
    else
        return lift_of(*peak);
}
// The same of rows g and g + 8 of a fragment.
template <class Q>
struct Lifts {
    float of[2];
    __device__ explicit Lifts(const F16Arguments& a) : of{value_lift<Q>(a.peak), value_lift<Q>(a.gated ? a.up_peak : a.peak)} {}
};
// Two values of BF16 times a power of two, exact.
__device__ inline uint32_t lifted(uint32_t pair, float by) {
    const __nv_bfloat162 v =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), __float2bfloat162_rn(by));
    return *reinterpret_cast<const uint32_t*>(&v);
}
// Two float32 as halves.
__device__ inline uint32_t half_bits_of(uint32_t x, uint32_t y) {
    return pair_bits(__floats2half2_rn(__uint_as_float(x), __uint_as_float(y)));
}
// What undoes a matrix's lift in its products.
template <class Q>
__device__ inline float undo_lift(const float* peak) {
    if constexpr (Q::kFloat)
        return __fdiv_rn(1.0f, value_lift<Q>(peak));
    else
        return unlift_of<Q>(*peak);
}

// ---- staging ------------------------------------------------------------------------------------------
// The matrix of a row tile, which of its row tiles it is, and rows from its first on.
struct Source {
    const uint8_t* w;
    int row_tile, rows;
    __device__ Source(const F16Arguments& a, int tile, int tile_rows) {
        const int matrix = (tile >= a.begins[0]) + (tile >= a.begins[1]);
        const int begin = matrix == 0 ? 0 : a.begins[matrix - 1];
        w = a.w[matrix];
        row_tile = tile - begin;
        rows = a.n - begin * tile_rows;
    }
};

// Bytes `at` of strip `s` of a row tile. A gated product takes strips of both matrices in turn, so that
// rows g and g + 8 of a fragment are gate and up of one neuron. Past the last strip: the last.
template <class Q, class T>
__device__ inline const uint8_t* strip_at(const F16Arguments& a, const Source& from, int s, unsigned at) {
    const int first = from.row_tile * T::kStrips + s, strip = min(a.gated ? first / 2 : first, ceil_div(from.rows, 8) - 1);
    const unsigned strip_bytes = ceil_div(a.k, Q::kRecK) * Q::kRecord;  // a matrix has less than 4 GiB
    return (a.gated && (s & 1) ? a.w[1] : from.w) + (strip * strip_bytes + at);
}

// Where a thread's pieces of 16 bytes of planes and scales are, in the first record of a tile's strips: kept
// while the tile lasts where registers allow, which saves half of a step's instructions with few tokens.
template <class Q, class T, bool = Q::kFloat>
struct Pieces {
    static constexpr bool kKept = T::kFew;
    static constexpr int kOfPlanes = Q::kChunkBytes / 16, kOfScales = kScaleBytes<Q> / 16;  // of a strip
    static constexpr int kPlanes = T::kStrips * kOfPlanes, kScales = T::kStrips * kOfScales;
    static constexpr int kPlanesEach = (kPlanes + T::kThreads - 1) / T::kThreads;
    static constexpr int kScalesEach = (kScales + T::kThreads - 1) / T::kThreads;
    const uint8_t *planes[kPlanesEach], *scales[kScalesEach];

    static __device__ const uint8_t* plane(const F16Arguments& a, const Source& source, unsigned i, unsigned at) {
        return strip_at<Q, T>(a, source, i / kOfPlanes, at + i % kOfPlanes * 16);
    }
    static __device__ const uint8_t* scale(const F16Arguments& a, const Source& source, unsigned i, unsigned at) {
        return strip_at<Q, T>(a, source, i / kOfScales, at + Q::kScales + i % kOfScales * 16);
    }
    __device__ void find(const F16Arguments& a, const Cursor& c) {
        if (kKept && c.tile >= 0) {
            const Source source(a, c.row_tile, T::kRows);
            const int thread = thread_again();
#pragma unroll
            for (int j = 0; j < kPlanesEach; ++j) planes[j] = plane(a, source, j * T::kThreads + thread, 0);
#pragma unroll
            for (int j = 0; j < kScalesEach; ++j) scales[j] = scale(a, source, j * T::kThreads + thread, 0);
        }
    }
    __device__ void copy_planes(char* stage, const F16Arguments& a, const Cursor& c) const {
        const Source source(a, c.row_tile, T::kRows);
        const unsigned at = c.chunk / Q::kChunks * Q::kRecord + c.chunk % Q::kChunks * Q::kChunkBytes;
        const int thread = thread_again();
#pragma unroll
        for (int j = 0; j < kPlanesEach; ++j) {
            const unsigned i = j * T::kThreads + thread;
            if (kPlanes % T::kThreads == 0 || i < kPlanes)
                copy_async16(stage + Stage<Q, T>::kPlanes + i * 16, kKept ? planes[j] + at : plane(a, source, i, at));
        }
    }
    __device__ void copy_scales(char* stage, const F16Arguments& a, const Cursor& c) const {
        const Source source(a, c.row_tile, T::kRows);
        const unsigned at = c.chunk / Q::kChunks * Q::kRecord;
        const int thread = thread_again();
#pragma unroll
        for (int j = 0; j < kScalesEach; ++j) {
            const unsigned i = j * T::kThreads + thread;
            if (kScales % T::kThreads == 0 || i < kScales)
                copy_async16(stage + Stage<Q, T>::kScales + i * 16, kKept ? scales[j] + at : scale(a, source, i, at));
        }
    }
};

// The rows of a row tile's strips, the last again past the last, zeros past K. Sections of 32 bytes
// change places by row: the 16 lanes that read of four rows at once (row_fragments) meet all banks.
template <class Q, class T>
struct Pieces<Q, T, true> {
    __device__ void find(const F16Arguments&, const Cursor&) {}
    __device__ void copy_scales(char*, const F16Arguments&, const Cursor&) const {}
    __device__ void copy_planes(char* stage, const F16Arguments& a, const Cursor& c) const {
        constexpr int kRowBytes = Chunk<Q>::kStripBytes / 8, kOfRow = kRowBytes / 16;
        constexpr int kAtOnce = T::kThreads / kOfRow;  // rows: a strip of each matrix of a gated product
        static_assert(kAtOnce % 16 == 0 && T::kRows % kAtOnce == 0, "");
        const Source source(a, c.row_tile, T::kRows);
        const int thread = thread_again(), piece = thread % kOfRow, first = thread / kOfRow;
        const int row_bytes = a.k * Q::kBytes, at = c.chunk * kRowBytes + piece * 16;
        const uint8_t* from = (a.gated && first % 16 >= 8 ? a.w[1] : source.w) + at;
        const int step = a.gated ? kAtOnce / 2 : kAtOnce;
        const int row0 = source.row_tile * (T::kRows / kAtOnce) * step + (a.gated ? first / 16 * 8 + first % 8 : first);
        char* to = stage + Stage<Q, T>::kPlanes + first * kRowBytes + (piece ^ (first & 3) << 1) * 16;
#pragma unroll
        for (int j = 0; j < T::kRows / kAtOnce; ++j) {
            const int row = min(row0 + j * step, source.rows - 1);
            copy_async16(to + j * kAtOnce * kRowBytes, from + static_cast<int64_t>(row) * row_bytes, at < row_bytes);
        }
    }
};

template <class Q, class T>
__device__ inline void copy_tokens(char* stage, const F16Arguments& a, const Cursor& c) {
    constexpr int kTokenBytes = Stage<Q, T>::kTokenBytes;
    constexpr unsigned kPieces = kTokenBytes / 16, kAtOnce = T::kThreads / kPieces;  // tokens
    constexpr bool kAll = T::kTokens % kAtOnce == 0;  // else kAtOnce is more
    static_assert((kAll || kAtOnce > T::kTokens) && kAtOnce % 2 == 0, "");
    const unsigned thread = thread_again(), piece = thread % kPieces, first = thread / kPieces;
    char* to = stage + first * kTokenBytes + (piece ^ (first & 1) << 2) * 16;
    const int row_bytes = ceil_div(a.chunks, 128 / Chunk<Q>::kValues) * 128 * 2, row0 = (c.tile - c.row_tile * a.token_tiles) * T::kTokens + first;
    const uint8_t* from = a.h + (static_cast<int64_t>(row0) * row_bytes + c.chunk * kTokenBytes + piece * 16);
#pragma unroll
    for (unsigned j = 0; j < ceil_div(T::kTokens, kAtOnce); ++j) {
        if (!kAll && first >= T::kTokens) break;
        copy_async16(to + j * kAtOnce * kTokenBytes, from + j * kAtOnce * row_bytes, row0 + static_cast<int>(j * kAtOnce) < a.tokens);
    }
}

// {S, M} of chunk C of a record for all rows of the tile, in the order in which `multiply` reads them. Where
// there are threads for two parts, each takes two blocks of a row.
template <class Q, class T, int C>
__device__ inline void convert_scales(uint32_t* table, const uint8_t* scales, const Lifts<Q>& lifts) {
    constexpr int kHalves = Chunk<Q>::kHalves, kParts = T::kThreads > T::kRows ? 2 : 1;
    const unsigned thread = thread_again(), row = thread % T::kRows, strip = row / 8, g = row % 8;
    static_assert(T::kThreads == kParts * T::kRows, "");
    typename Q::Lane l;
    load_scales<Q>(l, scales + strip * kScaleBytes<Q>, g);
#pragma unroll
    for (int b = 0; b < 4; ++b)
        if (kParts == 1 || (thread >= T::kRows) == (b >= 2))
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
    constexpr int kHalves = Chunk<Q>::kHalves;
    uint32_t scales[2 * kHalves];
    if constexpr (kHalves == 1) {
        const uint2 s = *reinterpret_cast<const uint2*>(from);
        scales[0] = s.x, scales[1] = s.y;
    } else {
        const uint4 s = *reinterpret_cast<const uint4*>(from);
        scales[0] = s.x, scales[1] = s.y, scales[2] = s.z, scales[3] = s.w;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        load_words<Q>(l[r], planes + r * Q::kChunkBytes, lane, b);
        uint32_t pairs[2][2];
        half_weights<Q>(pairs, l[r], b, scales + r * kHalves);
#pragma unroll
        for (int h = 0; h < 2; ++h) a[h][r] = pairs[h][0], a[h][2 + r] = pairs[h][1];
    }
}
// ... and from rows as they are: `rows` is where row g and the lane's four values begin, `swizzle` how
// copy_rows moved its sections.
template <class Q>
__device__ inline void row_fragments(uint32_t (&a)[2][4], const uint8_t* rows, unsigned swizzle, int b,
                                     const float (&lifts)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint2 w = Shared::get8(rows + r * Chunk<Q>::kStripBytes + ((b * 64 + h * 32) ^ swizzle));
            if constexpr (kAsIs<Q>) {
                a[h][r] = __byte_perm(w.x, w.y, 0x5410), a[h][2 + r] = __byte_perm(w.x, w.y, 0x7632);
            } else {
                const uint32_t x = lifted(w.x, lifts[r]), y = lifted(w.y, lifts[r]);
                a[h][r] = half_bits_of(x << 16, y << 16);
                a[h][2 + r] = half_bits_of(x & 0xffff0000u, y & 0xffff0000u);
            }
        }
}

// acc += the chunk of a stage.
template <class Q, class T>
__device__ inline void multiply(float (&acc)[T::kMTiles][T::kNTiles][4], const char* stage, const uint32_t* table,
                                const float (&lifts)[2]) {
    constexpr int kHalves = Chunk<Q>::kHalves, kTokenBytes = Stage<Q, T>::kTokenBytes;
    const Place<T> place;
    const unsigned lane = place.lane, g = lane >> 2, t = lane & 3, warp_m = place.warp_m, warp_n = place.warp_n;
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(stage) + Stage<Q, T>::kPlanes +
                             warp_m * T::kMTiles * 2 * Chunk<Q>::kStripBytes;
    table += (warp_m * T::kMTiles * 32 + g) * 2 * kHalves;
    const char* x = stage + (warp_n * T::kNTiles * 8 + g) * kTokenBytes + t * 16;
    const unsigned odd = (g & 1) * 64;  // the swizzle of an odd token's pieces: blocks change places
    typename Chunk<Q>::Lane l[T::kMTiles][2];
#pragma unroll
    for (int b = 0; b < Chunk<Q>::kValues / 32; ++b) {
        uint4 v[T::kNTiles];
#pragma unroll
        for (int n = 0; n < T::kNTiles; ++n)
            v[n] = *reinterpret_cast<const uint4*>(x + n * 8 * kTokenBytes + (b & 2) * 64 + ((b & 1) * 64 ^ odd));
#pragma unroll
        for (int m = 0; m < T::kMTiles; ++m) {
            const uint8_t* strips = weights + m * 2 * Chunk<Q>::kStripBytes;
            uint32_t a[2][4];
            if constexpr (Q::kFloat)
                row_fragments<Q>(a, strips + g * (Chunk<Q>::kStripBytes / 8) + t * 8, (g & 3) * 32, b, lifts);
            else
                record_fragments<Q>(a, l[m], strips, table + (m * 4 + b) * 16 * kHalves, lane, b);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < T::kNTiles; ++n) {
                    const uint32_t two[2] = {h ? v[n].z : v[n].x, h ? v[n].w : v[n].y};
                    mma_f16(acc[m][n], a[h], two);
                }
        }
    }
}

// ---- results ------------------------------------------------------------------------------------------
// A tile whose chunks several blocks share: true in the one that comes last, with the sum of all.
template <class T>
__device__ inline bool add_shares(float (&acc)[T::kMTiles][T::kNTiles][4], const F16Arguments& a, int tile) {
    float* sums = &acc[0][0][0];
    const int first = owner(a, tile * a.chunks), last = owner(a, (tile + 1) * a.chunks - 1);
    constexpr int64_t kFloats = static_cast<int64_t>(T::kSums) * T::kThreads;
    float* own = a.partial + share_slot(a, blockIdx.x, first, tile) * kFloats + threadIdx.x;
#pragma unroll
    for (int i = 0; i < T::kSums; ++i) own[i * T::kThreads] = sums[i];
    __shared__ int order;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        order = atomicAdd(a.arrived + tile, 1);
        if (order == last - first) a.arrived[tile] = 0;
    }
    __syncthreads();
    if (order != last - first) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < T::kSums; ++i) sums[i] = 0.0f;
    constexpr int kAtOnce = T::kFew ? 4 : 1;  // shares under way
    for (int block = first; block <= last; block += kAtOnce) {
        float shares[kAtOnce][T::kSums];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int64_t slot = share_slot(a, min(block + j, last), first, tile);
            const float* from = a.partial + slot * kFloats + threadIdx.x;
#pragma unroll
            for (int i = 0; i < T::kSums; ++i) {
                shares[j][i] = load_coherent(from + i * T::kThreads);
                if (i % 16 == 15 && !T::kFew) __syncwarp();  // no more loads at once than there are registers left
            }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
            for (int i = 0; i < T::kSums; ++i)
                if (block + j <= last) sums[i] = __fadd_rn(sums[i], shares[j][i]);
    }
    return true;
}

// y of a tile; row0 and token0 are the lane's first.
template <class Q, class T>
__device__ inline void write_rows(const float (&acc)[T::kMTiles][T::kNTiles][4], const F16Arguments& a, int row0, int token0) {
    const float unlift = undo_lift<Q>(a.peak);
#pragma unroll
    for (int n = 0; n < T::kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = token0 + n * 8 + i;
            if (token >= a.tokens) continue;
            const float scale = __fmul_rn(unlift, a.hs[token]);
#pragma unroll
            for (int m = 0; m < T::kMTiles; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = row0 + m * 16 + r * 8;
                    if (row >= a.n) continue;
                    const int64_t at = static_cast<int64_t>(token) * a.stride + row;
                    float v = __fmul_rn(acc[m][n][2 * r + i], scale);
                    if (a.bias) v = __fadd_rn(v, a.bias[row]);
                    if (a.residual) v = __fadd_rn(a.residual[at], v);
                    a.y[at] = v;
                }
        }
}

// Neurons of a gated tile: rows g and g + 8 of a fragment are gate and up. Lanes of values e and
// e + 2 of a four, neighbours in half_offset's order, exchange: each stores both for one token.
template <class Q, class T>
__device__ inline void write_neurons(const float (&acc)[T::kMTiles][T::kNTiles][4], const F16Arguments& a, int neuron0, int token0) {
    const float gate_unlift = undo_lift<Q>(a.peak), up_unlift = undo_lift<Q>(a.up_peak);
    const int lane = threadIdx.x % kWarp, padded = ceil_div(a.n, 128) * 128;
    const bool second = (lane & 8) != 0;
#pragma unroll
    for (int n = 0; n < T::kNTiles; ++n) {
        float gate_scale[2], up_scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = token0 + n * 8 + i;
            const float hs = a.hs[min(token, a.tokens - 1)];
            gate_scale[i] = __fmul_rn(gate_unlift, hs), up_scale[i] = __fmul_rn(up_unlift, hs);
            if (neuron0 == 0 && token < a.tokens) a.neuron_scale[token] = kNeuronScale;
        }
#pragma unroll
        for (int m = 0; m < T::kMTiles; ++m) {
            const int neuron = neuron0 + m * 8;
            uint32_t bits[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float v = swiglu_value(__fmul_rn(acc[m][n][i], gate_scale[i]), __fmul_rn(acc[m][n][2 + i], up_scale[i]));
                bits[i] = neuron < a.n ? __half_as_ushort(__float2half_rn(__fmul_rn(v, 1.0f / kNeuronScale))) : 0;
            }
            const uint32_t other = __shfl_xor_sync(kFull, second ? bits[0] : bits[1], 8);
            const int token = token0 + n * 8 + second;
            if (token >= a.tokens || neuron >= padded) continue;
            const uint32_t pair = second ? other | bits[1] << 16 : bits[0] | other << 16;
            const int first = neuron & ~2;  // value e of {e, e + 2}
            uint8_t* to = a.neurons + (static_cast<int64_t>(token) * padded + (neuron & ~127) + half_offset(first & 127)) * 2;
            *reinterpret_cast<uint32_t*>(to) = pair;
        }
    }
}

template <class Q, class T, int Stages>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks) matmul_f16(F16Arguments a) {
    pdl_trigger();
    pdl_wait();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return;  // sm_75 has no room for the stages: prefill.py does not choose it there
#endif
    char* stages = shared_bytes();
    uint32_t* tables = reinterpret_cast<uint32_t*>(stages + Stages * Stage<Q, T>::kBytes);
    const Lifts<Q> lifts(a);
    // of records anew for each chunk where registers are short
    auto lifts_again = [&] { return T::kFew ? lifts : Lifts<Q>(a); };

    Cursor at(a), ahead = at;  // ahead: the unit whose scales are copied next, one before its chunk
    Pieces<Q, T> pieces;  // of `ahead`
    int slot = 0;  // stage of `at`
    auto stage = [&](int later) {
        const int i = slot + later;
        return stages + (i < Stages ? i : i - Stages) * Stage<Q, T>::kBytes;
    };
    auto load = [&](char* to) {
        if (ahead.tile >= 0) {
            copy_tokens<Q, T>(to, a, ahead);
            pieces.copy_planes(to, a, ahead);
            if (ahead.advance(a)) pieces.find(a, ahead);
            if (ahead.tile >= 0) pieces.copy_scales(to, a, ahead);
        }
        copy_async_commit();
    };

    pieces.find(a, at);
    pieces.copy_scales(stage(Stages - 1), a, at);
    copy_async_commit();
#pragma unroll 1
    for (int i = 0; i < Stages - 1; ++i) load(stage(i));
    copy_async_wait<Stages - 1>();
    __syncthreads();
    convert_scales<Q, T>(tables, stage(Stages - 1), at.chunk, lifts_again());
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
                convert_scales<Q, T>(tables + (parity ^ 1) * Stage<Q, T>::kTable, stage(0), at.chunk, lifts_again());
            multiply<Q, T>(acc, stage(0), tables + parity * Stage<Q, T>::kTable, lifts.of);
            slot = slot + 1 < Stages ? slot + 1 : 0;
            parity ^= 1;
        } while (at.tile == tile);

        const int shared_tile = tile - a.whole, unit = shared_tile * a.chunks;
        const bool shared = shared_tile >= 0 && (unit < first_unit(a, blockIdx.x) ||
                                                 unit + a.chunks > first_unit(a, blockIdx.x + 1));
        if (shared && !add_shares<T>(acc, a, shared_tile)) continue;
        const Place<T> place;
        const int lane = place.lane, warp_m = place.warp_m, warp_n = place.warp_n;
        const int row0 = tile / a.token_tiles * T::kRows + warp_m * T::kMTiles * 16;
        const int token0 = tile % a.token_tiles * T::kTokens + warp_n * T::kNTiles * 8 + (lane & 3) * 2;
        if (a.gated)
            write_neurons<Q, T>(acc, a, row0 / 2 + (lane >> 2), token0);
        else
            write_rows<Q, T>(acc, a, row0 + (lane >> 2), token0);
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
