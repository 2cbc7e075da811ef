// matmul_wgmma<Q, Tokens, Stages>: many tokens times a quantised matrix by the tensor cores of sm_90a: what
// matmul_f16.cuh says, in the tiles of matmul_tiles.cuh, 128 rows by up to Tokens tokens.
//   matrices (N, K) in records (layout 2), alone, or up to three above each other as one
// Weights are the rows (M) and go through registers, tokens the columns (N), from shared memory. Each warp has 16
//         rows: it brings their records itself, in bulk, makes the {S, M} pairs of a chunk of 128 values of K, one
//         block a lane, and unpacks its fragments while wgmma multiplies those before.
// Tokens  of a chunk come by one thread, by TMA, a stage ahead: the only barrier in the loop is for them. wgmma takes as
//         many as there are, by 8 (by 16 where Tokens > 128).
// Sums    are written through a stage, so that rows of y are whole and the code is short: it runs cold.
// Launch  grid = G, block = 256, dynamic shared: kernels/matmul_f16.py.
// Limits  (H200) wgmma alone 989 TFLOP/s, a chunk of 128 x 128 in 1,024 clocks of an SM; a warp issues about 430
//         instructions a chunk, 230 of them around wgmma, so an SM needs at least 860. Measured, one launch after
//         another, 2026-11-30, 7B Q4_K: gate/up 70, 79, 103 us at 40, 64, 128 tokens, 447 TFLOP/s at 2,048, down
//         528; of these about 14 us a launch whatever it does.
// Registers  113 to 128 of two blocks an SM, 193 of one; no spills.
// Why not mma.sync (matmul_f16.cu): 290 TFLOP/s; it reads each fragment of the tokens into registers, 32 instructions a
//         block, and has 1,312 multiply-adds a clock instead of 2,048. Why not a warp that only loads: 9 warps
//         leave 96 registers. 256 tokens with one block an SM are slower for all types whose records leave room
//         for two blocks of 128 (gate/up at 2,048: 1,335 us, not 1,245).
// arch-specific: sm_90a
#include "wgmma.cuh"

// Two warpgroups, each 64 rows by up to Tokens tokens; up to 128 tokens two blocks an SM.
template <int Tokens>
struct Wide {
    static constexpr int kMTiles = 1, kNTiles = Tokens > 128 ? 32 : 16, kThreads = 256, kWarps = kThreads / kWarp;
    static constexpr int kRows = 128, kStrips = kRows / 8, kTokens = Tokens, kSums = kNTiles * 4, kSharesAtOnce = 16;
    static constexpr int kStage = Tokens * 256;  // bytes of 128 values of the tokens
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
        const Source source(a, next.row_tile, T::kRows);
#pragma unroll
        for (int s = 0; s < 2; ++s) strips[s] = strip_at<Q, T>(a, source, thread_again() / kWarp * 2 + s, 0);
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

// The {S, M} pairs of chunk `chunk` of a warp's records: lanes of row g one block each, as ScalePairs has them; to be read
// after a barrier.
template <class Q, class T>
__device__ inline void convert_scales(Ring<Q, T>& ring, int slot, const Lifts<Q>& lifts, int chunk) {
    constexpr int kHalves = ScalePairs<Q>::kHalves;
    const int lane = threadIdx.x % kWarp, p = 2 * (chunk % Q::kChunks) + (lane >> 1) % 2, i = lane % 2;
    __syncwarp();  // read by all
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const typename Q::Pair scales =
            Q::template load_pair<Shared>(reinterpret_cast<const uint8_t*>(ring.records[slot][r]), lane >> 2, p);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
            ring.pairs[((lane % 4 * 8 + lane / 4) * 2 + r) * kHalves + h] =
                half_scale<Q>(scale_of<Q>(scales, p, i, h), minimum_of<Q>(scales, p, i, h), lifts.of[r]);
    }
}

// The chunk's tokens, by one thread.
template <class T>
__device__ inline void load_tokens(char* stage, Arrival& arrival, const F16Arguments& a, const TensorMap& map, const Cursor& at) {
    const int token = (at.tile - at.row_tile * a.token_tiles) * a.tokens_each;
    arrival.expect(a.tokens_each * 256);
#pragma unroll
    for (int h = 0; h < 2; ++h)
        arrival.copy_box(stage + h * T::kStage / 2, map, at.chunk * 128 + h * 64, token, a.tokens_each);
}

// ---- products -------------------------------------------------------------------------------------------------
// acc += a chunk, `tiles` of 8 tokens, while the rows of the next block are unpacked.
template <class Q, class T>
__device__ inline void multiply(float (&acc)[1][T::kNTiles][4], const Ring<Q, T>& ring, int slot, int chunk, const char* tokens, int tiles) {
    constexpr int kHalves = ScalePairs<Q>::kHalves;
    const int lane = threadIdx.x % kWarp;
    typename Q::Lane words[2];
    uint32_t a[2][2][4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const ScalePairs<Q> pairs(ring.pairs + (b * 8 + lane / 4) * 2 * kHalves);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            load_words<Q>(words[r], reinterpret_cast<const uint8_t*>(ring.records[slot][r]) + chunk % Q::kChunks * Q::kChunkBytes, lane, b);
            weight_fragments<Q>(a[b % 2], r, words[r], b, pairs);
        }
        wgmma_f16(acc[0], a[b % 2], tokens + b / 2 * T::kStage / 2 + b % 2 * 64, tiles);
        wgmma_commit();
        if (b < 3) wgmma_wait<1>();
    }
    wgmma_wait<0>();
}

// ---- results --------------------------------------------------------------------------------------------------
// A tile's sums, half of the tokens at a time through shared memory, so that rows of y are written whole and by little code,
// which runs cold. `room`: a stage, tokens x 128 floats, in which rows change places by token.
__device__ inline float& sum_at(float* room, unsigned token, unsigned row) {
    return room[token * 128 + (row ^ (token / 2 % 4 * 8))];
}
template <class Q>
__device__ inline void write_tile_rows(float* room, const F16Arguments& a, int row0, int token0, int count) {
    const int row = row0 + threadIdx.x % 128;
    if (row >= a.n) return;
    const float unlift = undo_lift<Q>(a.peak), bias = a.bias ? a.bias[row] : 0.0f;
#pragma unroll 4
    for (int t = threadIdx.x / 128; t < count; t += 2) {
        const int64_t at = static_cast<int64_t>(token0 + t) * a.stride + row;
        float v = __fmul_rn(sum_at(room, t, row - row0), __fmul_rn(unlift, a.hs[token0 + t]));
        if (a.bias) v = __fadd_rn(v, bias);
        if (a.residual) v = __fadd_rn(a.residual[at], v);
        a.y[at] = v;
    }
}
// Rows g and g + 8 of each 16 are gate and up of a neuron; a thread makes neurons k and k + 2, neighbours in
// half_offset's order.
template <class Q>
__device__ inline void write_tile_neurons(float* room, const F16Arguments& a, int row0, int token0, int count) {
    const int padded = ceil_div(a.n, 128) * 128, pair = threadIdx.x % 32, k = pair / 2 * 4 + pair % 2;
    const int neuron = row0 / 2 + k, row = k / 8 * 16 + k % 8;
    const float gate_unlift = undo_lift<Q>(a.peak), up_unlift = undo_lift<Q>(a.up_peak);
#pragma unroll 1
    for (int t = threadIdx.x / 32; t < count; t += 8) {
        const int token = token0 + t;
        const float hs = a.hs[token], gate_scale = __fmul_rn(gate_unlift, hs), up_scale = __fmul_rn(up_unlift, hs);
        uint32_t bits[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float v = swiglu_value(__fmul_rn(sum_at(room, t, row + 2 * i), gate_scale),
                                         __fmul_rn(sum_at(room, t, row + 2 * i + 8), up_scale));
            bits[i] = neuron + 2 * i < a.n ? __half_as_ushort(__float2half_rn(__fmul_rn(v, 1.0f / kNeuronScale))) : 0;
        }
        if (row0 == 0 && pair == 0) a.neuron_scale[token] = kNeuronScale;
        if (neuron >= padded) continue;
        uint8_t* to = a.neurons + (static_cast<int64_t>(token) * padded + (neuron & ~127) + half_offset(neuron & 127)) * 2;
        *reinterpret_cast<uint32_t*>(to) = bits[0] | bits[1] << 16;
    }
}
template <class Q, class T>
__device__ inline void write_tile(const float (&acc)[1][T::kNTiles][4], float* room, const F16Arguments& a, int tile) {
    const int lane = threadIdx.x % kWarp, row = threadIdx.x / kWarp * 16 + lane / 4;
    const int row0 = tile / a.token_tiles * T::kRows, first = tile % a.token_tiles * a.tokens_each;
    const int end = min(a.tokens, first + a.tokens_each);
    constexpr int kAtOnce = T::kTokens / 2;
    static_assert(kAtOnce * T::kRows * 4 == T::kStage && kAtOnce % 8 == 0, "");
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token0 = first + half * kAtOnce;
        if (token0 >= end) break;
        __syncthreads();  // nobody reads the stage or the half before
#pragma unroll
        for (int n = 0; n < kAtOnce / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum_at(room, n * 8 + lane % 4 * 2 + i % 2, row + i / 2 * 8) = acc[0][half * kAtOnce / 8 + n][i];
        __syncthreads();
        if (a.gated)
            write_tile_neurons<Q>(room, a, row0, token0, min(kAtOnce, end - token0));
        else
            write_tile_rows<Q>(room, a, row0, token0, min(kAtOnce, end - token0));
    }
    before_bulk_copy();
    __syncthreads();  // the stage may be loaded again
}

template <class Q, int Tokens, int Stages>
__global__ void __launch_bounds__(256, Tokens > 128 ? 1 : 2) matmul_wgmma(F16Arguments a, const __grid_constant__ TensorMap map) {
    using T = Wide<Tokens>;
    pdl_trigger();
#if !defined(MINFER_SIMT) && !defined(MINFER_WGMMA)
    pdl_wait();
    return;  // sm_90 alone has these instructions
#endif
    char* stages = atom_aligned_bytes();
    Ring<Q, T>* rings = reinterpret_cast<Ring<Q, T>*>(stages + Stages * T::kStage);
    Arrival* arrivals = reinterpret_cast<Arrival*>(rings + T::kWarps);
    Cursor* ahead = reinterpret_cast<Cursor*>(arrivals + Stages);  // whose tokens are loaded next
    int* order = reinterpret_cast<int*>(ahead + 1);
    Ring<Q, T>& ring = rings[threadIdx.x / kWarp];

    // the first weights before the wait, what they are multiplied with after it
    Cursor at(a);
    if (threadIdx.x % kWarp == 0) {
        ring.begin(a, at);
        ring.load(a, 0);
        ring.load(a, 1);
    }
    pdl_wait();
    if (threadIdx.x == 0) {
        *ahead = at;
        for (int i = 0; i < Stages; ++i) {
            arrivals[i].begin();
            if (i == Stages - 1 || ahead->tile < 0) continue;
            load_tokens<T>(stages + i * T::kStage, arrivals[i], a, map, *ahead);
            ahead->advance(a);
        }
    }
    __syncthreads();
    const Lifts<Q> lifts(a);
    int slot = 0;              // stage of `at`
    unsigned phases = 0;       // bit s: of stage s's arrival
    int records = 0;           // that were begun

    while (at.tile >= 0) {
        const int tile = at.tile;
        float acc[1][T::kNTiles][4] = {};
        bool begins = true;  // a record
        do {
            if (begins || at.chunk % Q::kChunks == 0) {
                __syncwarp();
                if (records > 0 && threadIdx.x % kWarp == 0) ring.load(a, records - 1 & 1);
                __syncwarp();
                ring.arrivals[records & 1].wait(records >> 1 & 1);
                ++records;
                begins = false;
            }
            const int record = records - 1 & 1, chunk = at.chunk;
            convert_scales(ring, record, lifts, chunk);
            arrivals[slot].wait(phases >> slot & 1);
            phases ^= 1u << slot;
            __syncthreads();  // everybody is done with the stage before
            if (thread_again() == 0 && ahead->tile >= 0) {
                const int free = slot > 0 ? slot - 1 : Stages - 1;
                load_tokens<T>(stages + free * T::kStage, arrivals[free], a, map, *ahead);
                ahead->advance(a);
            }
            at.advance(a);
            multiply(acc, ring, record, chunk, stages + slot * T::kStage, a.tokens_each / 8);
            slot = slot + 1 < Stages ? slot + 1 : 0;
        } while (at.tile == tile);

        const int shared_tile = tile - a.whole, unit = shared_tile * a.chunks;
        const bool shared = shared_tile >= 0 && (unit < first_unit(a, blockIdx.x) ||
                                                 unit + a.chunks > first_unit(a, blockIdx.x + 1));
        if (shared && !add_shares<T>(acc, a, shared_tile, order, a.tokens_each / 8)) continue;
        const int done = slot > 0 ? slot - 1 : Stages - 1;  // the stage of the tile's last chunk
        write_tile<Q, T>(acc, reinterpret_cast<float*>(stages + done * T::kStage), a, tile);
    }
}
