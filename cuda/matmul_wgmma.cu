// matmul_wgmma<Q, Wide<Rows, Tokens>, Stages>: many tokens times a quantised matrix by the tensor cores of sm_90a: what
// matmul_f16.cuh says, in the tiles of matmul_tiles.cuh, Rows rows by up to Tokens tokens.
//   matrices (N, K) in records (layout 2), alone, or up to three above each other as one
// Weights are the rows (M) and go through registers, tokens the columns (N), from shared memory. Each warp has 16
//         rows: it brings their records itself, in bulk, makes the {S, M} pairs of a chunk of 128 values of K, one
//         block a lane, and unpacks its fragments. Both overlap with wgmma: the fragments of a block with the block
//         before, the pairs of a chunk with the last block of the chunk before.
// Tokens  of a chunk come by one thread, by TMA, into a stage that all warps are done with; no barrier in the loop.
//         wgmma takes as many as there are, by 8 (by 16 of more than 128), known where the loop over the blocks is: a
//         jump at each wgmma ended its group, and nothing overlapped (gate/up of 128 tokens 102 us instead of 95).
// Sums    are written through shared memory, so that rows of y are whole and the code is short: it runs cold. All that
//         a thread reads for several tokens is under way at once: one after another took 16 us of a tile, beside
//         36 for its products. Where there are fewer tiles than blocks, a tile is a cluster's: each block adds up and
//         writes a part of the tokens.
// Launch  grid = (G) or (tiles, 1, cluster), block = 2 Rows, dynamic shared: kernels/matmul_f16.py.
// Limits  (H200) wgmma alone 989 TFLOP/s, a chunk of 128 x 128 in 1,024 clocks of an SM. Fewer than 256 tokens wait for
//         their warps, which issue about 300 instructions a chunk one after another: 12 warps of 192 rows take a
//         chunk of 144 tokens in the time that 8 take one of 128. Measured, one launch after another, 2026-12-01,
//         7B Q4_K: gate/up 59, 63, 82, 89, 130 us at 40, 64, 128, 129, 256 tokens, 642 TFLOP/s at 2,048.
// Registers  sm_90a: 128 of two blocks an SM, 156 of 12 warps, 195 to 255 of 8; no spills.
// Why not mma.sync (matmul_f16.cu): 290 TFLOP/s; it reads each fragment of the tokens into registers, 32 instructions a
//         block, and has 1,312 multiply-adds a clock instead of 2,048. Why not warps that only load and make pairs,
//         with registers handed over by setmaxnreg: as fast as these at 256 tokens, and slower than two blocks below.
// arch-specific: sm_90a
#include "cluster.cuh"
#include "wgmma.cuh"

// A warpgroup for each 64 of Rows rows, by up to Tokens tokens: 128 by 128, of which an SM has two blocks, 192 by 160, or
// 128 by 256.
template <int Rows, int Tokens>
struct Wide {
    static constexpr int kRows = Rows, kTokens = Tokens, kThreads = 2 * Rows, kWarps = kThreads / kWarp, kStrips = Rows / 8;
    static constexpr int kBlocks = kThreads * (Tokens / 2 + 64) <= 32768 ? 2 : 1;  // of an SM
    static constexpr int kMTiles = 1, kNTiles = Tokens > 160 ? 32 : Tokens > 128 ? 20 : 16, kSums = kNTiles * 4;
    static constexpr int kBy = kBlocks == 1 ? 2 : 1;  // that many 8 tokens, of which wgmma takes some
    static constexpr int kStage = Tokens * 256;  // bytes of 128 values of the tokens
    static constexpr int kParts = Rows > 128 ? 4 : 2, kPart = Tokens / kParts;  // tokens whose sums a stage has room for
    static_assert(kPart * Rows * 4 <= kStage && kPart % 8 == 0, "");
    // as there are registers left
    static constexpr int kSharesAtOnce = kNTiles == 20 ? 16 : 32, kEightsAtOnce = kNTiles > 20 ? 4 : 2;
};

// ---- staging --------------------------------------------------------------------------------------------------
// A warp's weights, in shared memory: records of its two strips, one being multiplied while the next one comes, and
// what the lane that loads has to know, so that no register holds it meanwhile.
template <class Q, class T>
struct alignas(16) Ring {
    char records[2][2][Q::kRecord];
    uint32_t pairs[4 * 8 * 2 * ScalePairs<Q>::kHalves];  // {S, M} of a chunk
    Arrival arrivals[2];
    const uint8_t* strips[2];
    Cursor next;

    __device__ void begin(const F16Arguments& a, const Cursor& first) {
        arrivals[0].begin();
        arrivals[1].begin();
        next = first;
        find(a);
    }
    __device__ void find(const F16Arguments& a) {
        if (next.tile < 0) return;
        const Source source(a, next.row_tile * T::kRows + thread_again() / kWarp * 16);
#pragma unroll
        for (int s = 0; s < 2; ++s) strips[s] = strip_at<Q>(a, source, s, 0);
    }
    __device__ void load(const F16Arguments& a, int slot) {
        if (next.tile < 0) return;
        const int record = next.chunk / Q::kChunks, row_tile = next.row_tile;
        arrivals[slot].expect(2 * Q::kRecord);
#pragma unroll
        for (int s = 0; s < 2; ++s) arrivals[slot].copy(records[slot][s], strips[s] + record * Q::kRecord, Q::kRecord);
        next.chunk = min((record + 1) * Q::kChunks, next.end) - 1;
        next.advance(a);
        if (next.row_tile != row_tile) find(a);
    }
};

// The {S, M} pairs of chunk `chunk` of a warp's records.
template <class Q, class T>
__device__ inline void convert_scales(Ring<Q, T>& ring, int slot, const Lifts<Q>& lifts, int chunk) {
    const int lane = thread_again() % kWarp, p = 2 * (chunk % Q::kChunks) + (lane >> 1) % 2;
    __syncwarp();  // read by all
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const typename Q::Pair scales =
            Q::template load_pair<Shared>(reinterpret_cast<const uint8_t*>(ring.records[slot][r]), lane >> 2, p);
        store_scales<Q>(ring.pairs, scales, r, lifts.of[r], chunk, lane);
    }
    __syncwarp();
}

// The chunk's tokens, by one thread.
template <class T>
__device__ inline void load_tokens(char* stage, Arrival& arrival, const F16Arguments& a, const TensorMap& map,
                                   const Cursor& at) {
    const int token = (at.tile - at.row_tile * a.token_tiles) * a.tokens_each;
    arrival.expect(a.tokens_each * 256);
#pragma unroll
    for (int h = 0; h < 2; ++h)
        arrival.copy_box(stage + h * T::kStage / 2, map, at.chunk * 128 + h * 64, token, a.tokens_each);
}

// ---- products -------------------------------------------------------------------------------------------------
// acc += a chunk, Tiles of 8 tokens, while the rows of the next block are unpacked. Half way tokens() has a later chunk's
// tokens loaded, and at the end next() makes the next chunk's weights ready.
template <class Q, class T, int Tiles, class Tokens, class Next>
__device__ __forceinline__ void multiply_some(float (&acc)[1][T::kNTiles][4], const Ring<Q, T>& ring, int slot, int chunk,
                                              Columns columns, const Tokens& tokens, const Next& next) {
    constexpr int kHalves = ScalePairs<Q>::kHalves;
    const int lane = threadIdx.x % kWarp;
    typename Q::Lane words[2];
    uint32_t a[2][2][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const ScalePairs<Q> pairs(ring.pairs + (b * 8 + lane / 4) * 2 * kHalves);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const char* planes = ring.records[slot][r] + chunk % Q::kChunks * Q::kChunkBytes;
            load_words<Q>(words[r], reinterpret_cast<const uint8_t*>(planes), lane, b);
            weight_fragments<Q>(a[b % 2], r, words[r], b, pairs);
        }
        wgmma_f16<Tiles>(acc[0], a[b % 2], columns.after(b / 2 * T::kStage / 2 + b % 2 * 64));
        wgmma_commit();
        if (b == 1) tokens();
        if (b < 3) wgmma_wait<1>();
    }
    next();
    wgmma_wait<0>();
}
// The same of a number of tiles, Least, Least + By, ... or Most, that is known here: code without a jump at each wgmma,
// which would end its group.
template <class Q, class T, int Least = T::kBy, int Most = T::kTokens / 8, class Tokens, class Next>
__device__ __forceinline__ void multiply(float (&acc)[1][T::kNTiles][4], const Ring<Q, T>& ring, int slot, int chunk,
                                         Columns columns, int tiles, const Tokens& tokens, const Next& next) {
    constexpr int kHalf = Least + (Most - Least) / T::kBy / 2 * T::kBy;
    if constexpr (Least == Most)
        multiply_some<Q, T, Most>(acc, ring, slot, chunk, columns, tokens, next);
    else if (tiles <= kHalf)
        multiply<Q, T, Least, kHalf>(acc, ring, slot, chunk, columns, tiles, tokens, next);
    else
        multiply<Q, T, kHalf + T::kBy, Most>(acc, ring, slot, chunk, columns, tiles, tokens, next);
}

// ---- results --------------------------------------------------------------------------------------------------
// A tile's sums go through shared memory, so that rows of y are written whole and by little code, which runs cold:
// eight tokens after each other, Rows rows each. Of a tile that a cluster shares each block has a part of all sums.
template <int Rows>
struct Sums {
    static constexpr int kRows = Rows;
    float* own;

    // Of token t of eight: rows g of all warps, which are gates, before rows g + 8, and those change places by token.
    __device__ static unsigned at(unsigned eight, unsigned t, unsigned row) {
        return (eight * 8 + t) * Rows + row / 8 % 2 * (Rows / 2) + ((row / 16 * 8 + row % 8) ^ t / 2 * 8);
    }
    // N of them at at(i).
    template <int N, class At>
    __device__ void load(float (&v)[N], const At& at) const {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = own[at(i)];
    }
};
// The same of a cluster, in the order of K; four blocks' are under way at once.
template <int Rows>
struct ClusterSums : Sums<Rows> {
    template <int N, class At>
    __device__ void load(float (&v)[N], const At& at) const {
        const int blocks = gridDim.z;
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = 0.0f;
#pragma unroll 1
        for (int block = 0; block < blocks; block += 4) {
            float w[4][N];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const float* from = cluster_peer(this->own, min(block + b, blocks - 1));
#pragma unroll
                for (int i = 0; i < N; ++i) w[b][i] = from[at(i)];
            }
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int i = 0; i < N; ++i)
                    if (block + b < blocks) v[i] = __fadd_rn(v[i], w[b][i]);
        }
    }
};
// Of the `count` tokens from `token0` on the eights begin .. end - 1, AtOnce at a time, whose loads are all under way
// together; y may be residual.
template <class Q, int AtOnce, class From>
__device__ inline void write_tile_rows(const From& sums, const F16Arguments& a, int row0, int token0, int count,
                                       int begin, int end) {
    const int r = threadIdx.x % From::kRows, row = row0 + r, first = threadIdx.x / From::kRows;
    if (row >= a.n) return;
    const float unlift = undo_lift<Q>(a.peak), bias = a.bias ? a.bias[row] : 0.0f;
#pragma unroll 1
    for (int eight = begin; eight < end; eight += AtOnce) {
        constexpr int kValues = AtOnce * 4;
        float v[kValues], scales[kValues], residual[kValues];
        auto token_of = [&](int i) { return (eight + i / 4) * 8 + first + i % 4 * 2; };
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const int token = token0 + token_of(i);
            const bool valid = eight + i / 4 < end && token_of(i) < count;
            scales[i] = valid ? a.hs[token] : 0.0f;
            residual[i] = valid && a.residual ? a.residual[static_cast<int64_t>(token) * a.stride + row] : 0.0f;
        }
        sums.load(v, [&](int i) { return From::at(min(eight + i / 4, end - 1), first + i % 4 * 2, r); });
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            v[i] = __fmul_rn(v[i], __fmul_rn(unlift, scales[i]));
            if (a.bias) v[i] = __fadd_rn(v[i], bias);
            if (a.residual) v[i] = __fadd_rn(residual[i], v[i]);
            if (eight + i / 4 < end && token_of(i) < count)
                a.y[static_cast<int64_t>(token0 + token_of(i)) * a.stride + row] = v[i];
        }
    }
}
// Rows g and g + 8 of each 16 are gate and up of a neuron; a thread makes neurons k and k + 2, neighbours in
// half_offset's order, of a token of each eight.
template <class Q, int AtOnce, class From>
__device__ inline void write_tile_neurons(const From& sums, const F16Arguments& a, int row0, int token0, int count,
                                          int begin, int end) {
    constexpr int kPairs = From::kRows / 4;
    const int padded = ceil_div(a.n, 128) * 128, pair = threadIdx.x % kPairs, k = pair / 2 * 4 + pair % 2;
    const int neuron = row0 / 2 + k, row = k / 8 * 16 + k % 8;
    const float gate_unlift = undo_lift<Q>(a.peak), up_unlift = undo_lift<Q>(a.up_peak);
#pragma unroll 1
    for (int eight = begin; eight < end; eight += AtOnce) {
        float scales[AtOnce], v[AtOnce * 4];  // of each token two gates and two ups
        auto token_of = [&](int i) { return (eight + i) * 8 + static_cast<int>(threadIdx.x / kPairs); };
#pragma unroll
        for (int i = 0; i < AtOnce; ++i) scales[i] = a.hs[token0 + min(token_of(i), count - 1)];
        sums.load(v, [&](int i) {
            return From::at(min(eight + i / 4, end - 1), threadIdx.x / kPairs, row) + i % 2 * 2 + i / 2 % 2 * (From::kRows / 2);
        });
#pragma unroll
        for (int i = 0; i < AtOnce; ++i) {
            const float gate_scale = __fmul_rn(gate_unlift, scales[i]), up_scale = __fmul_rn(up_unlift, scales[i]);
            uint32_t bits[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float x = swiglu_value(__fmul_rn(v[4 * i + j], gate_scale), __fmul_rn(v[4 * i + 2 + j], up_scale));
                bits[j] = neuron + 2 * j < a.n ? __half_as_ushort(__float2half_rn(__fmul_rn(x, 1.0f / kNeuronScale))) : 0;
            }
            if (eight + i >= end || token_of(i) >= count) continue;
            const int token = token0 + token_of(i);
            if (row0 == 0 && pair == 0) a.neuron_scale[token] = kNeuronScale;
            if (neuron >= padded) continue;
            uint8_t* to = a.neurons + (static_cast<int64_t>(token) * padded + (neuron & ~127) + half_offset(neuron & 127)) * 2;
            *reinterpret_cast<uint32_t*>(to) = bits[0] | bits[1] << 16;
        }
    }
}
// The lane's sums of a part of the tokens.
template <class T>
__device__ inline void store_sums(float* to, const float (&acc)[1][T::kNTiles][4], int part) {
    const int lane = thread_again() % kWarp, row = thread_again() / kWarp * 16 + lane / 4;
    constexpr int kTiles = T::kPart / 8;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[Sums<T::kRows>::at(n, lane % 4 * 2 + i % 2, row + i / 2 * 8)] = acc[0][part * kTiles + n][i];
}
template <class Q, int AtOnce, class From>
__device__ inline void write_tokens(const From& sums, const F16Arguments& a, int row0, int token0, int count, int begin,
                                    int end) {
    if (a.gated)
        write_tile_neurons<Q, AtOnce>(sums, a, row0, token0, count, begin, end);
    else
        write_tile_rows<Q, AtOnce>(sums, a, row0, token0, count, begin, end);
}
// Parts of the tokens after each other, for each of which `room`, a stage, suffices.
template <class Q, class T>
__device__ inline void write_tile(const float (&acc)[1][T::kNTiles][4], float* room, const F16Arguments& a, int row0,
                                  int token0) {
    const int all = min(a.tokens - token0, a.tokens_each);
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
        const int first = part * T::kPart, count = min(T::kPart, all - first);
        if (count <= 0) break;
        __syncthreads();  // nobody reads what lies there
        store_sums<T>(room, acc, part);
        __syncthreads();
        write_tokens<Q, T::kEightsAtOnce>(Sums<T::kRows>{room}, a, row0, token0 + first, count, 0, ceil_div(count, 8));
    }
    before_bulk_copy();
    __syncthreads();  // the stage may be loaded again
}
// Of a tile that a cluster shares each block writes a part of the tokens. It has no more tiles, so that all stages are free.
template <class Q, class T>
__device__ inline void write_cluster_tile(const float (&acc)[1][T::kNTiles][4], float* room, const F16Arguments& a,
                                          int row0, int token0) {
    const int all = min(a.tokens - token0, a.tokens_each);
    const unsigned eights = ceil_div(all, 8);
    const unsigned begin = eights * blockIdx.z / gridDim.z, end = eights * (blockIdx.z + 1) / gridDim.z;
    __syncthreads();  // nobody reads what lies there
#pragma unroll
    for (int part = 0; part < T::kParts; ++part)
        if (part * T::kPart < all) store_sums<T>(room + part * T::kPart * T::kRows, acc, part);
    cluster_arrive();
    cluster_wait();
    write_tokens<Q, 1>(ClusterSums<T::kRows>{{room}}, a, row0, token0, all, begin, end);
    cluster_arrive_relaxed();  // the others read this block's
    cluster_wait();
}

template <class Q, class T, int Stages>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks)
matmul_wgmma(F16Arguments a, const __grid_constant__ TensorMap map) {
    pdl_trigger();
#if !defined(MINFER_SIMT) && !defined(MINFER_WGMMA)
    pdl_wait();
    return;  // sm_90 alone has these instructions
#endif
    char* stages = atom_aligned_bytes();
    Ring<Q, T>* rings = reinterpret_cast<Ring<Q, T>*>(stages + Stages * T::kStage);
    Arrival* arrivals = reinterpret_cast<Arrival*>(rings + T::kWarps);  // of a stage's tokens,
    Arrival* leavings = arrivals + Stages;                              // and of the warps that are done with them
    Cursor* ahead = reinterpret_cast<Cursor*>(leavings + Stages);       // whose tokens are loaded next
    int* order = reinterpret_cast<int*>(ahead + 1);
    Ring<Q, T>& ring = rings[threadIdx.x / kWarp];

    // the first weights before the wait, what they are multiplied with after it
    Cursor at(a);
    if (threadIdx.x % kWarp == 0) {
        ring.begin(a, at);
#pragma unroll 1  // here and below: short code, it runs cold
        for (int record = 0; record < 2; ++record) ring.load(a, record);
    }
    pdl_wait();
    if (threadIdx.x == 0) {
        *ahead = at;
#pragma unroll 1
        for (int i = 0; i < Stages; ++i) {
            arrivals[i].begin();
            leavings[i].begin(T::kWarps);
            if (i == Stages - 1 || ahead->tile < 0) continue;
            load_tokens<T>(stages + i * T::kStage, arrivals[i], a, map, *ahead);
            ahead->advance(a);
        }
    }
    __syncthreads();
    const Lifts<Q> lifts(a);
    unsigned step = 0;  // chunks that were multiplied
    int records = 0;    // that were begun
    int tile = -1;      // that is multiplied
    // The weights of the chunk `at`, of the record that is begun here or that is under way.
    auto prepare = [&] {
        if (at.tile < 0) return;
        if (at.tile != tile || at.chunk % Q::kChunks == 0) {
            __syncwarp();
            if (records > 0 && threadIdx.x % kWarp == 0) ring.load(a, records - 1 & 1);
            __syncwarp();
            ring.arrivals[records & 1].wait(records >> 1 & 1);
            ++records;
        }
        convert_scales(ring, records - 1 & 1, lifts, at.chunk);
    };
    auto next = [&] {
        at.advance(a);
        prepare();
    };
    // The tokens of the chunk after those that were loaded, where those of the chunk before have been.
    auto tokens = [&] {
        if (thread_again() == 0 && ahead->tile >= 0) {
            const unsigned then = step + Stages - 1, free = then % Stages;
            leavings[free].wait(1 - then / Stages % 2);
            load_tokens<T>(stages + free * T::kStage, arrivals[free], a, map, *ahead);
            ahead->advance(a);
        }
        __syncwarp();
    };
    prepare();
    while (at.tile >= 0) {
        tile = at.tile;
        float acc[1][T::kNTiles][4] = {};
        do {
            const unsigned slot = step % Stages;
            arrivals[slot].wait(step / Stages % 2);
            const Columns columns(stages + slot * T::kStage);
            multiply<Q, T>(acc, ring, records - 1 & 1, at.chunk, columns, a.tokens_each / 8, tokens, next);
            __syncwarp();
            if (thread_again() % kWarp == 0) leavings[slot].arrive();
            ++step;
        } while (at.tile == tile);

        if (is_shared(a, tile) && !add_shares<T>(acc, a, tile - a.whole, order, a.tokens_each / 8)) continue;
        const int row0 = tile / a.token_tiles * T::kRows, token0 = tile % a.token_tiles * a.tokens_each;
        if (gridDim.z > 1)
            write_cluster_tile<Q, T>(acc, reinterpret_cast<float*>(stages), a, row0, token0);
        else  // where the tile's last chunk was
            write_tile<Q, T>(acc, reinterpret_cast<float*>(stages + (step - 1) % Stages * T::kStage), a, row0, token0);
    }
}
