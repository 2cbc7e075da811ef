// matmul<Q, Tile, Stages>: y[t, n] = sum_k W[n, k] x[t, k] (+ bias[n]) (+ residual[t, n]) for T >= 2 tokens,
// int8 tensor cores with a scale every 32 (16) values, so that it is as accurate as matvec.
//   w   (N, K) in records (layout 2)       qs (T, Kp), ds (T, Kp / 32) q8 activations (layout 1)
//   of rows that are `scale` (T) times as large
//   y, residual (T, stride) float, columns [0, N)
// Tile    weights are the rows (M) of the product, tokens the columns (N), so 2 or 2,048 tokens use the
//         same weight path. A block makes 128 rows x Tile::kTokens; a stage is one record of K, of
//         16 strips and all its tokens, copied by cp.async; unpacked from shared memory to registers.
// Split   grid.z parts of K; partial sums go to `partial` and the block that arrives last adds them in
//         order (the bits do not depend on timing). `arrived` (tiles) is zero between launches.
// Launch  grid = (ceil(N / 128), ceil(T / kTokens), splits), block = 256, dynamic shared = Stages stages.
// Bytes   W once per ceil(T / kTokens); operations 2 N K T. What bounds it is scaling the int32 sums:
//         385 TOP/s at 32 values a scale with all in registers (gpu ceilings in benchmarks/NOTES.md).
// Serves  prompts on cards without fast f16 (prefill.py).
// Why not matmul_f16: half the rate on consumer cards, and it needs sm_80. Why not wider scale groups:
//         they fail the accuracy bar.
#include "q8.cuh"
#include "quants.cuh"

constexpr int kThreads = 256;
constexpr int kStrips = 16;  // 128 rows

// WarpsN warps side by side over the tokens, 8 / WarpsN over the rows; each makes MTiles x NTiles
// tiles of 16 rows x 8 tokens.
template <int WarpsN, int MTiles, int NTiles>
struct TileShape {
    static constexpr int kWarpsN = WarpsN, kMTiles = MTiles, kNTiles = NTiles;
    static constexpr int kTokens = WarpsN * NTiles * 8;
    static_assert(8 / WarpsN * MTiles * 16 == kStrips * 8, "128 rows");
};
using Tokens8 = TileShape<1, 1, 1>;
using Tokens16 = TileShape<1, 1, 2>;
using Tokens32 = TileShape<1, 1, 4>;
using Tokens64 = TileShape<2, 2, 4>;

constexpr int kTokenBytes = 128 + 16;  // a chunk of one token, padded so that 8 lanes meet 32 banks
constexpr int kScaleBytes = 32 + 16;   // its four GroupScale, padded likewise

template <class Q, class Tile>
struct Stage {
    static constexpr int kWeights = kStrips * Q::kRecord;
    static constexpr int kValues = Tile::kTokens * kTokenBytes;  // one chunk
    static constexpr int kScales = Tile::kTokens * kScaleBytes;
    static constexpr int kBytes = kWeights + Q::kChunks * (kValues + kScales);
};

// Copy record `record` of the tile's strips and its tokens to `stage`. Strips past the last and tokens
// past T are zeros: scale 0.
template <class Q, class Tile>
__device__ void load_stage(char* stage, const uint8_t* w, const int8_t* qs, const GroupScale* ds, int strip0,
                           int strips, int token0, int tokens, int record, int records) {
    constexpr int kPieces = Q::kRecord / 16;
    for (int i = threadIdx.x; i < kStrips * kPieces; i += kThreads) {
        const int s = i / kPieces;
        const bool valid = strip0 + s < strips;
        const int64_t at = (static_cast<int64_t>(valid ? strip0 + s : 0) * records + record) * Q::kRecord;
        copy_async16(stage + i * 16, w + at + i % kPieces * 16, valid);
    }
    const int64_t chunks = static_cast<int64_t>(records) * Q::kChunks;
#pragma unroll
    for (int c = 0; c < Q::kChunks; ++c) {
        char* to = stage + Stage<Q, Tile>::kWeights + c * (Stage<Q, Tile>::kValues + Stage<Q, Tile>::kScales);
        for (int i = threadIdx.x; i < Tile::kTokens * 10; i += kThreads) {  // 8 pieces of values, 2 of scales
            const int token = i / 10, piece = i % 10;
            const bool valid = token0 + token < tokens;
            const int64_t chunk = (valid ? token0 + token : 0) * chunks + record * Q::kChunks + c;
            if (piece < 8) {
                copy_async16(to + token * kTokenBytes + piece * 16, qs + chunk * 128 + piece * 16, valid);
            } else {
                copy_async16(to + Stage<Q, Tile>::kValues + token * kScaleBytes + (piece - 8) * 16,
                             ds + chunk * 4 + (piece - 8) * 2, valid);
            }
        }
    }
}

// One chunk's A fragments and scales of a lane: rows g and g + 8 of each 16-row tile.
template <class Q, int MTiles>
struct Weights {
    static constexpr int kScales = Q::kHalf ? 2 : 1;
    uint32_t a[MTiles][4][4];
    float scale[MTiles][4][kScales][2];
    float minimum[Q::kMin ? MTiles : 1][4][kScales][2];

    __device__ void unpack(const typename Q::Lane (&l)[MTiles][2], int c) {
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    a[m][b][r] = Q::word(l[m][r], c, b, 0);
                    a[m][b][2 + r] = Q::word(l[m][r], c, b, 1);
#pragma unroll
                    for (int h = 0; h < kScales; ++h) {
                        scale[m][b][h][r] = __fmul_rn(scale_of<Q>(l[m][r], c, b, h), 1.0f / Q::kMul);
                        if (Q::kMin) minimum[m][b][h][r] = -minimum_of<Q>(l[m][r], c, b, h);
                    }
                }
    }
};

// acc += one block of 32 values: rows g, g+8 and tokens 2t, 2t+1 in mma order.
template <class Q, int MTiles>
__device__ inline void add_block(float (&acc)[4], const Weights<Q, MTiles>& w, int m, int b, const uint32_t (&x)[2],
                                 const GroupScale& s0, const GroupScale& s1) {
    if constexpr (Q::kHalf) {
        int low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
        mma_s8_k16(low, w.a[m][b][0], w.a[m][b][1], x[0]);
        mma_s8_k16(high, w.a[m][b][2], w.a[m][b][3], x[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float d = (i & 1) ? s1.d : s0.d;
            acc[i] = fmaf(static_cast<float>(low[i]), __fmul_rn(w.scale[m][b][0][i >> 1], d), acc[i]);
            acc[i] = fmaf(static_cast<float>(high[i]), __fmul_rn(w.scale[m][b][1][i >> 1], d), acc[i]);
        }
    } else {
        int sum[4] = {0, 0, 0, 0};
        mma_s8_k32(sum, w.a[m][b], x);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            acc[i] = fmaf(static_cast<float>(sum[i]), __fmul_rn(w.scale[m][b][0][i >> 1], (i & 1) ? s1.d : s0.d), acc[i]);
    }
    if constexpr (Q::kMin) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const GroupScale& s = (i & 1) ? s1 : s0;
            if constexpr (Q::kHalf) {
                acc[i] = fmaf(w.minimum[m][b][0][i >> 1], __fmul_rn(s.d, static_cast<float>(s.lo)), acc[i]);
                acc[i] = fmaf(w.minimum[m][b][1][i >> 1], __fmul_rn(s.d, static_cast<float>(s.hi)), acc[i]);
            } else {
                acc[i] = fmaf(w.minimum[m][b][0][i >> 1], __fmul_rn(s.d, static_cast<float>(s.lo + s.hi)), acc[i]);
            }
        }
    }
}

// acc += the products of the stage's record.
template <class Q, class Tile>
__device__ void multiply_stage(float (&acc)[Tile::kMTiles][Tile::kNTiles][4], const char* stage, int lane, int warp_m,
                               int warp_n) {
    const int g = lane >> 2, t = lane & 3;
    typename Q::Lane l[Tile::kMTiles][2];
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int strip = (warp_m * Tile::kMTiles + m) * 2 + r;
            l[m][r] = Q::template load<Shared>(reinterpret_cast<const uint8_t*>(stage) + strip * Q::kRecord, lane);
        }
#pragma unroll
    for (int c = 0; c < Q::kChunks; ++c) {
        Weights<Q, Tile::kMTiles> w;
        w.unpack(l, c);
        const char* values = stage + Stage<Q, Tile>::kWeights + c * (Stage<Q, Tile>::kValues + Stage<Q, Tile>::kScales);
        const char* scales = values + Stage<Q, Tile>::kValues;
#pragma unroll
        for (int n = 0; n < Tile::kNTiles; ++n) {
            const int token = (warp_n * Tile::kNTiles + n) * 8;
            const uint4* x = reinterpret_cast<const uint4*>(values + (token + g) * kTokenBytes + t * 32);
            const uint4 x0 = x[0], x1 = x[1];
            const uint32_t xs[4][2] = {{x0.x, x0.y}, {x0.z, x0.w}, {x1.x, x1.y}, {x1.z, x1.w}};
            alignas(16) GroupScale s[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4* from = reinterpret_cast<const uint4*>(scales + (token + 2 * t + i) * kScaleBytes);
                reinterpret_cast<uint4*>(s[i])[0] = from[0];
                reinterpret_cast<uint4*>(s[i])[1] = from[1];
            }
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int m = 0; m < Tile::kMTiles; ++m) add_block<Q>(acc[m][n], w, m, b, xs[b], s[0][b], s[1][b]);
        }
    }
}

// f(value, row, token) for each output of the lane that lies inside.
template <class Tile, class F>
__device__ inline void for_each_output(const float (&acc)[Tile::kMTiles][Tile::kNTiles][4], int row0, int token0, int n,
                                       int tokens, F f) {
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
        for (int c = 0; c < Tile::kNTiles; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = row0 + m * 16 + (i >> 1) * 8, token = token0 + c * 8 + (i & 1);
                if (row < n && token < tokens) f(acc[m][c][i], row, token);
            }
}

struct MatmulArguments {
    const uint8_t* w;
    const int8_t* qs;
    const GroupScale* ds;
    const float* scale;            // (T) factor of each row; null: 1
    const float *bias, *residual;  // null: none
    float* y;
    float* partial;  // (splits, T, N); unused with one split
    int* arrived;    // (tiles)
    int n, k, tokens, stride;  // of y and residual, in floats
};

template <class Q, class Tile, int Stages>
__global__ void __launch_bounds__(kThreads, 1) matmul(MatmulArguments a) {
    pdl_trigger();
    pdl_wait();
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int warp_n = warp % Tile::kWarpsN, warp_m = warp / Tile::kWarpsN;
    const int strip0 = blockIdx.x * kStrips, token0 = blockIdx.y * Tile::kTokens;
    const int strips = ceil_div(a.n, 8), records = ceil_div(a.k, Q::kRecK), splits = gridDim.z;
    const int first = static_cast<int64_t>(records) * blockIdx.z / splits;
    const int last = static_cast<int64_t>(records) * (blockIdx.z + 1) / splits;
    char* stages = shared_bytes();
    auto load = [&](int record) {
        if (record < last)
            load_stage<Q, Tile>(stages + record % Stages * Stage<Q, Tile>::kBytes, a.w, a.qs, a.ds, strip0, strips,
                                token0, a.tokens, record, records);
        copy_async_commit();
    };

    float acc[Tile::kMTiles][Tile::kNTiles][4] = {};
    for (int i = 0; i < Stages - 1; ++i) load(first + i);
    for (int record = first; record < last; ++record) {
        copy_async_wait<Stages - 2>();
        __syncthreads();  // this record has arrived, and everybody is done with the one before
        load(record + Stages - 1);
        multiply_stage<Q, Tile>(acc, stages + record % Stages * Stage<Q, Tile>::kBytes, lane, warp_m, warp_n);
    }
    copy_async_wait<0>();

    const int row0 = (strip0 + warp_m * Tile::kMTiles * 2) * 8 + (lane >> 2);
    const int column0 = token0 + warp_n * Tile::kNTiles * 8 + (lane & 3) * 2;
    const int64_t plane = static_cast<int64_t>(a.tokens) * a.n;
    bool adds = true;  // this block writes y
    if (splits > 1) {
        for_each_output<Tile>(acc, row0, column0, a.n, a.tokens, [&](float v, int row, int token) {
            a.partial[blockIdx.z * plane + static_cast<int64_t>(token) * a.n + row] = v;
        });
        __shared__ int order;
        __threadfence();
        __syncthreads();
        const int tile = blockIdx.y * gridDim.x + blockIdx.x;
        if (threadIdx.x == 0) {
            order = atomicAdd(a.arrived + tile, 1);
            if (order == splits - 1) a.arrived[tile] = 0;
        }
        __syncthreads();
        adds = order == splits - 1;
        __threadfence();
    }
    if (!adds) return;
    for_each_output<Tile>(acc, row0, column0, a.n, a.tokens, [&](float v, int row, int token) {
        if (splits > 1) {
            v = 0.0f;
            for (int z = 0; z < splits; ++z)
                v = __fadd_rn(v, load_coherent(a.partial + z * plane + static_cast<int64_t>(token) * a.n + row));
        }
        const int64_t at = static_cast<int64_t>(token) * a.stride + row;
        if (a.scale) v = __fmul_rn(v, a.scale[token]);
        if (a.bias) v = __fadd_rn(v, a.bias[row]);
        if (a.residual) v = __fadd_rn(a.residual[at], v);
        a.y[at] = v;
    });
}
