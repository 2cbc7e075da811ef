// matmul_few<Q, Tiles>: few tokens times a matrix, quantised or F16 or BF16, on f16 tensor cores: what
// matmul_f16.cuh says, for prompts that take about as long as the weights take to read.
//   matrices (N, K), alone, or up to three above each other as one, in records (layout 2) or, F16 and
//   BF16, row-major with K % 8 == 0
// Units   16 rows; of a gated product 8 neurons, rows g of a fragment being gate and g + 8 up. A block has
//         `units` of them in a row, one of `parts` parts of K and up to Tiles * 8 tokens. It takes their
//         chunks of K in order, an equal run for each warp, whose lanes read their own words of the weights
//         from global memory, one chunk ahead and the first before the wait: no barrier in the loop.
// Tokens  of the part of K lie in shared memory, 4 to 8 KiB for 128 values. Those past the last are zeros.
// Scales  become {S, M} pairs in a table of the warp, by the lanes of row g one block each.
// Sums    of a unit's pieces, one for each warp that had of it, meet in shared memory and are added in the
//         order of K, then those of the parts, by the block that arrives last: no bit depends on
//         timing. `arrived` (token blocks, row groups) is zero before and after.
// Launch  grid = (row groups * parts, token blocks), block = 512 (a block an SM), dynamic shared:
//         kernels/matmul_few.py.
// Bytes   the matrix once for each token block. Time (H200, 2026-11-30, one launch after another): 7B Q4_K, 16
//         tokens: o 7.3 us, gate/up 36 (76 MB, 17.4 at 4.4 TB/s), down 21; 24: 10, 41, 26; 32: 11, 53, 32. Bound by the
//         instructions of unpacking, about 300 a warp for 16 x 128 values.
// Registers  sm_90: at most 128, no spills.
// Why not matmul_f16.cu: its tiles of 128 rows go through shared memory and two barriers a chunk; up to 16
//         tokens o took it 12.6 us and gate/up 45. A uniform branch that leaves tiles without tokens out cost
//         12 % of the full ones and gained 3 %.
#include "matmul_f16.cuh"

constexpr int kWarps = 16, kThreads = kWarps * kWarp;  // of 128 registers a thread, alone on an SM
constexpr int kGroup = 128;  // values of K: of h in one order, of a record's chunk
constexpr int kTokenBytes = kGroup * 2;

// Of a block for up to Tiles * 8 tokens.
template <int Tiles>
struct Few {
    static constexpr int kTokens = Tiles * 8, kGroupBytes = kTokens * kTokenBytes;
    static constexpr int kUnitSums = Tiles * kWarp;  // float4 of a unit
};

struct FewArguments : F16Product {
    float4* partial;    // (token blocks, row groups, parts, units, kUnitSums): where K has parts
    int* arrived;       // (token blocks, row groups)
    int units, all;     // of a block; of all matrices
    int parts, groups;  // of K; groups of 128 values of a part
};

// A chunk of a unit as a lane has it: words of its rows g and g + 8 and scales of one block of each ...
template <class Q, bool = Q::kFloat>
struct Piece {
    static constexpr int kValues = 128, kBlocks = 4, kHalves = ScalePairs<Q>::kHalves;
    static constexpr int kTable = kBlocks * 8 * 2 * kHalves;  // words of a warp
    typename Q::Lane words[2];
    typename Q::Pair scales[2];

    __device__ void load(const F16Product&, const uint8_t* const (&strips)[2], int chunk, int lane) {
        const int c = chunk % Q::kChunks, at = chunk / Q::kChunks * Q::kRecord;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint8_t* record = strips[r] + at;
            Q::template load_chunk<Streamed>(words[r], 0, record + c * Q::kChunkBytes, lane);
            scales[r] = Q::template load_pair<Streamed>(record, lane >> 2, 2 * c + (lane >> 1) % 2);
        }
    }
    // Lanes of row g one block each, as record_fragments has the table.
    __device__ void fill(uint32_t* table, const Lifts<Q>& lifts, int chunk, int lane) const {
        __syncwarp();  // read by all
#pragma unroll
        for (int r = 0; r < 2; ++r) store_scales<Q>(table, scales[r], r, lifts.of[r], chunk, lane);
        __syncwarp();
    }
    __device__ void fragments(uint32_t (&a)[2][4], const uint32_t* table, const Lifts<Q>&, int b, int lane) const {
        const ScalePairs<Q> pairs(table + (b * 8 + lane / 4) * 2 * kHalves);
#pragma unroll
        for (int r = 0; r < 2; ++r) weight_fragments<Q>(a, r, words[r], b, pairs);
    }
};
// ... or their values, zeros past K.
template <class Q>
struct Piece<Q, true> {
    static constexpr int kValues = 64, kBlocks = 2, kTable = 0;
    uint2 values[2][kBlocks][2];

    __device__ void load(const F16Product& a, const uint8_t* const (&strips)[2], int chunk, int lane) {
        const int first = chunk * kValues + lane % 4 * 4;
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int i = 0; i < 2 * kBlocks; ++i) {
                const int k = first + i * 16;
                values[r][i / 2][i % 2] = k < a.k ? load_stream8(strips[r] + k * Q::kBytes) : make_uint2(0, 0);
            }
    }
    __device__ void fill(uint32_t*, const Lifts<Q>&, int, int) const {}
    __device__ void fragments(uint32_t (&a)[2][4], const uint32_t*, const Lifts<Q>& lifts, int b, int) const {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) value_fragments<Q>(a[h], r, values[r][b][h], lifts);
    }
};

// Where the rows g and g + 8 of a unit begin: strips of records, or a lane's rows. Past the last: the last.
template <class Q>
__device__ inline void find_strips(const uint8_t* (&strips)[2], const F16Product& a, int unit, int lane) {
    const int row = unit * 16, matrix = a.gated ? 0 : (unit / 8 >= a.begins[0]) + (unit / 8 >= a.begins[1]);
    const int begin = matrix == 0 ? 0 : a.begins[matrix - 1] * 128, rows = a.n - begin;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint8_t* w = a.w[a.gated ? r : matrix];
        const int strip = a.gated ? unit : (row - begin) / 8 + r;
        if constexpr (Q::kFloat) {
            const int64_t at = min(strip * 8 + lane / 4, rows - 1);
            strips[r] = w + at * (a.k * Q::kBytes);
        } else {
            const int64_t at = min(strip, ceil_div(rows, 8) - 1);
            strips[r] = w + at * (ceil_div(a.k, Q::kRecK) * Q::kRecord);
        }
    }
}

// A block's chunks in order: all of its first unit, of the next, ... A warp has a run of them, of one at
// least or, where there are more warps, of none.
struct Run {
    int units, chunks, warps;
    __device__ Run(int units, int chunks) : units(units), chunks(chunks), warps(min(units * chunks, kWarps)) {}
    __device__ int begin(int warp) const { return units * chunks * min(warp, warps) / warps; }
    __device__ int owner(int at) const { return ((at + 1) * warps - 1) / (units * chunks); }
};

// The block's tokens of groups first .. first + groups - 1: by groups, as token_offset says.
template <int Tiles>
__device__ inline void copy_tokens(char* to, const F16Product& a, int first, int groups) {
    using F = Few<Tiles>;
    constexpr int kPieces = kTokenBytes / 16, kOfGroup = kPieces * F::kTokens, kAtOnce = kThreads / kOfGroup;
    const int piece = threadIdx.x % kPieces, slot = threadIdx.x / kPieces % F::kTokens;
    const int token = blockIdx.y * F::kTokens + slot;
    const int64_t row = static_cast<int64_t>(ceil_div(a.k, kGroup)) * kTokenBytes;
    const uint8_t* from = a.h + min(token, a.tokens - 1) * row + first * kTokenBytes + piece * 16;
    to += token_offset(piece, slot, F::kTokens);
    if (threadIdx.x < kAtOnce * kOfGroup)  // whole groups at once
        for (int i = threadIdx.x / kOfGroup; i < groups; i += kAtOnce)
            copy_async16(to + i * F::kGroupBytes, from + i * kTokenBytes, token < a.tokens);
    copy_async_commit();
}

// acc += a chunk.
template <class Q, int Tiles>
__device__ inline void multiply(float (&acc)[Tiles][4], const Piece<Q>& piece, const uint32_t* table,
                                const char* tokens, const Lifts<Q>& lifts, int chunk, int lane) {
    using F = Few<Tiles>;
    constexpr int kOfGroup = kGroup / Piece<Q>::kValues;
    const int first = chunk % kOfGroup * Piece<Q>::kBlocks;
    const char* group = tokens + chunk / kOfGroup * F::kGroupBytes;
#pragma unroll
    for (int b = 0; b < Piece<Q>::kBlocks; ++b) {
        uint32_t v[Tiles][2][2];
#pragma unroll
        for (int n = 0; n < Tiles; ++n) token_fragments<F::kTokens>(v[n], group, first + b, n * 8, lane);
        uint32_t a[2][4];
        piece.fragments(a, table, lifts, b, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int n = 0; n < Tiles; ++n) mma_f16(acc[n], a[h], v[n][h]);
    }
}

// Sums of each piece of the warp's run, of part `part` of K and units from `first` on, to sums[warp + unit].
template <class Q, int Tiles>
__device__ inline void run_sums(const FewArguments& a, const Run& run, int first, int part, uint32_t* table, float4* sums) {
    constexpr int kOfGroup = kGroup / Piece<Q>::kValues, kAhead = 2;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int begin = run.begin(warp), chunk0 = part * a.groups * kOfGroup;
    int left = run.begin(warp + 1) - begin, unit = begin / run.chunks, chunk = begin - unit * run.chunks;

    // the reading side
    int read_unit = first + unit, read_chunk = chunk;
    const uint8_t* strips[2];
    find_strips<Q>(strips, a, read_unit, lane);
    auto read = [&](Piece<Q>& piece, int ahead) {
        if (ahead >= left) return;
        piece.load(a, strips, chunk0 + read_chunk, lane);
        if (++read_chunk < run.chunks) return;
        read_chunk = 0;
        find_strips<Q>(strips, a, ++read_unit, lane);
    };
    Piece<Q> pieces[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) read(pieces[i], i);
    const Lifts<Q> lifts(a);
    pdl_wait();
    char* tokens = shared_bytes();
    copy_tokens<Tiles>(tokens, a, part * a.groups, ceil_div(run.chunks, kOfGroup));
    copy_async_wait<0>();
    __syncthreads();

    float acc[Tiles][4] = {};
#pragma unroll 1
    while (left > 0) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (left <= 0) break;
            pieces[i].fill(table, lifts, chunk0 + chunk, lane);
            multiply<Q, Tiles>(acc, pieces[i], table, tokens, lifts, chunk, lane);
            read(pieces[i], kAhead);
            --left;
            if (++chunk < run.chunks && left > 0) continue;
#pragma unroll
            for (int n = 0; n < Tiles; ++n) {
                sums[(warp + unit) * Few<Tiles>::kUnitSums + n * kWarp + lane] =
                    make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
                acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
            }
            chunk = 0;
            ++unit;
        }
    }
    __syncthreads();
}

__device__ inline float4 sum_of(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// The results of a lane: rows g and g + 8 of a unit, tokens 2t and 2t + 1 of the tile from `token` on.
template <class Q>
__device__ inline void write(const FewArguments& a, float4 v, int unit, int token, int lane) {
    const float acc[1][1][4] = {{{v.x, v.y, v.z, v.w}}};
    const int token0 = token + lane % 4 * 2;
    if (a.gated)
        write_neurons<Q, 1, 1>(acc, a, unit * 8 + lane / 4, token0, a.tokens);
    else
        write_rows<Q, 1, 1>(acc, a, unit * 16 + lane / 4, token0, a.tokens);
}

template <class Q, int Tiles>
__global__ void __launch_bounds__(kThreads, 1) matmul_few(FewArguments a) {
    using F = Few<Tiles>;
    constexpr int kUnitSums = F::kUnitSums;
    pdl_trigger();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    pdl_wait();
    return;  // prefill.py does not choose it on sm_75
#endif
    const int group = blockIdx.x / a.parts, part = blockIdx.x - group * a.parts, first = group * a.units;
    const int values = min(a.groups * kGroup, a.k - part * a.groups * kGroup);
    const Run run(min(a.units, a.all - first), ceil_div(values, Piece<Q>::kValues));
    float4* sums = reinterpret_cast<float4*>(shared_bytes() + a.groups * F::kGroupBytes);
    uint32_t* tables = reinterpret_cast<uint32_t*>(sums + (kWarps + a.units) * kUnitSums);
    run_sums<Q, Tiles>(a, run, first, part, tables + threadIdx.x / kWarp * Piece<Q>::kTable, sums);
    const int lane = threadIdx.x % kWarp, token = blockIdx.y * F::kTokens;
    const int count = run.units * kUnitSums, stride = a.units * kUnitSums;
    const int shared = blockIdx.y * (gridDim.x / a.parts) + group;  // what parts of K add up to
    float4* shares = a.partial + static_cast<int64_t>(shared) * a.parts * stride;
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const int unit = i / kUnitSums, at = unit * run.chunks;
        const float4* from = sums + unit * kUnitSums + i % kUnitSums;
        const int begin = run.owner(at), end = run.owner(at + run.chunks - 1);
        float4 v = from[begin * kUnitSums];
        for (int w = begin + 1; w <= end; ++w) v = sum_of(v, from[w * kUnitSums]);
        if (a.parts == 1)
            write<Q>(a, v, first + unit, token + i / kWarp % Tiles * 8, lane);
        else
            shares[part * stride + i] = v;
    }
    if (a.parts == 1) return;
    __threadfence();
    bool last = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* arrived = reinterpret_cast<unsigned*>(a.arrived + shared);
        last = atomicInc(arrived, a.parts - 1) + 1 == static_cast<unsigned>(a.parts);
    }
    if (!__syncthreads_or(last)) return;
    __threadfence();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        float4 v = load_coherent(shares + i);
        for (int p = 1; p < a.parts; ++p) v = sum_of(v, load_coherent(shares + p * stride + i));
        write<Q>(a, v, first + i / kUnitSums, token + i / kWarp % Tiles * 8, lane);
    }
}
