// Tiles of some rows by some tokens, in which the products of many tokens are cut up (matmul_f16.cu, matmul_wgmma.cu): how
// blocks share them, where their weights are, and the sums of shared tiles.
//
// Work    a unit is a tile by a chunk of K. Block i of G takes the whole tiles i, i + G, ... of `waves` waves, then
//         1/G of the units of the tiles that are left, in order; a tile shared by blocks is added up by
//         the one that arrives last, in the order of K (no bit depends on timing). `arrived` (tiles that are
//         left) is zero before and after. Where the grid has a z, one tile a block in x and y, the chunks of
//         which are shared by its z.
#pragma once
#include "matmul_f16.cuh"

struct F16Arguments : F16Product {
    float* partial;            // (2 G, tile) sums of shared tiles
    int* arrived;
    int token_tiles, chunks;   // tiles of a row of tiles, chunks of K
    int tokens_each;           // of a tile, the last excepted: by 8, at most Tile::kTokens
    int waves, whole, units;   // whole waves and their tiles; units of the tiles that are left
};

// ---- sharing out the work ---------------------------------------------------------------------------
__device__ inline int first_unit(const F16Arguments& a, int block) {
    return static_cast<unsigned>(a.units) * block / gridDim.x;  // less than 2^31: units of two waves at most
}
__device__ inline int owner(const F16Arguments& a, int unit) {
    return (static_cast<unsigned>(unit + 1) * gridDim.x - 1) / a.units;
}
// Whether this block has only a part of a tile that it has something of.
__device__ inline bool is_shared(const F16Arguments& a, int tile) {
    const int unit = (tile - a.whole) * a.chunks;
    return tile >= a.whole && (unit < first_unit(a, blockIdx.x) || unit + a.chunks > first_unit(a, blockIdx.x + 1));
}
// Where block `block` puts its sums of a shared tile: it may have two such tiles. `first`: the block that
// begins the tile, after the end of another or not; all others begin inside it.
__device__ inline int share_slot(const F16Arguments& a, int block, int first, int tile) {
    return 2 * block + (block == first && first_unit(a, first) < tile * a.chunks);
}

// A block's units in order: `chunk` of `tile`, tile < 0 at the end. `row_tile` of all matrices.
struct Cursor {
    int tile, chunk, end, wave, unit, row_tile;
    __device__ explicit Cursor(const F16Arguments& a) : wave(0), unit(first_unit(a, blockIdx.x)) {
        next_tile(a);
        if (gridDim.z == 1) return;
        tile = blockIdx.x, row_tile = tile / a.token_tiles;
        chunk = a.chunks * blockIdx.z / gridDim.z, end = a.chunks * (blockIdx.z + 1) / gridDim.z;
    }
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
    __device__ void advance(const F16Arguments& a) {
        if (++chunk == end) next_tile(a);
    }
};

// ---- where weights are ---------------------------------------------------------------------------------
// The matrix of row `row` of all, a multiple of 16, which of its strips begins there, and how many rows it has with those
// below it.
struct Source {
    const uint8_t* w;
    int strip, rows;
    __device__ Source(const F16Arguments& a, int row) {
        const int matrix = (row / 128 >= a.begins[0]) + (row / 128 >= a.begins[1]);
        const int begin = matrix == 0 ? 0 : a.begins[matrix - 1] * 128;
        w = a.w[matrix];
        strip = (row - begin) / 8;
        rows = a.n - begin;
    }
};

// Bytes `at` of the s-th strip after a source's. A gated product takes strips of both matrices in turn, so that
// rows g and g + 8 of a fragment are gate and up of one neuron. Past the last strip: the last.
template <class Q>
__device__ inline const uint8_t* strip_at(const F16Arguments& a, const Source& from, int s, unsigned at) {
    const int first = from.strip + s, strip = min(a.gated ? first / 2 : first, ceil_div(from.rows, 8) - 1);
    const unsigned strip_bytes = ceil_div(a.k, Q::kRecK) * Q::kRecord;  // a matrix has less than 4 GiB
    return (a.gated && (s & 1) ? a.w[1] : from.w) + (strip * strip_bytes + at);
}

// ---- shared tiles ---------------------------------------------------------------------------------------
// A tile whose chunks several blocks share: true in the one that comes last, with the sum of all. `order` is shared;
// `tiles` of 8 tokens of a warp have tokens.
template <class T>
__device__ inline bool add_shares(float (&acc)[T::kMTiles][T::kNTiles][4], const F16Arguments& a, int tile, int* order,
                                  int tiles) {
    float* sums = &acc[0][0][0];
    const int first = owner(a, tile * a.chunks), last = owner(a, (tile + 1) * a.chunks - 1);
    constexpr int64_t kFloats = static_cast<int64_t>(T::kSums) * T::kThreads;
    float* own = a.partial + share_slot(a, blockIdx.x, first, tile) * kFloats + threadIdx.x;
#pragma unroll
    for (int i = 0; i < T::kSums; ++i)
        if (i / 16 * 4 % T::kNTiles < tiles) own[i * T::kThreads] = sums[i];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *order = atomicAdd(a.arrived + tile, 1);
        if (*order == last - first) a.arrived[tile] = 0;
    }
    __syncthreads();
    if (*order != last - first) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < T::kSums; ++i) sums[i] = 0.0f;
    for (int block = first; block <= last; ++block) {
        const float* from = a.partial + share_slot(a, block, first, tile) * kFloats + threadIdx.x;
#pragma unroll
        for (int i = 0; i < T::kSums; i += T::kSharesAtOnce) {
            if (i / 4 % T::kNTiles >= tiles) continue;
            float share[T::kSharesAtOnce];
#pragma unroll
            for (int j = 0; j < T::kSharesAtOnce; ++j) {
                const bool valid = (i + j) / 4 % T::kNTiles < tiles;
                share[j] = valid ? load_coherent(from + (i + j) * T::kThreads) : 0.0f;
                if (j % 32 == 31) __syncwarp();  // no more loads at once than there are registers left
            }
#pragma unroll
            for (int j = 0; j < T::kSharesAtOnce; ++j) sums[i + j] = __fadd_rn(sums[i + j], share[j]);
        }
    }
    return true;
}
