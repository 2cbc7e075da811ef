// attention<KV, E, WARPS_M, WARPS_K>: out[t, h] = softmax(q[t, h] k^T / sqrt(E)) v, causal
//   q         (T, H, E) float, rotated          k, v  (S, G, E) KV, one layer: __half or float
//   position  int32 in device memory: the position of token 0; token t sees keys 0..*position + t
//   out       (T, H*E) float; qs (T, Kp), ds (T, Kp/32): the same in layout 1; null: not written
//   partials  per (row tile, kv head, split): ROWS x E float sums, behind all of them ROWS x {m, l}
//   arrivals  int per (row tile, kv head), zero before and after every launch
// Query head h reads kv head h / R, R = H/G. The rows of a tile are the (token, head of the group)
// pairs of one kv head: row r is token r / R, head r % R of the group, so keys and values are read
// once for all R heads, and one token (decode) or many (prefill) run the same code.
// Launch  grid = (G, row tiles, splits), block = 128: 4 warps. WARPS_M x WARPS_K = 4 x 1: 64 rows,
//         16 a warp (prefill); 1 x 4: 16 rows, each warp 16 of a tile's 64 keys (decode). Row tiles
//         run last first: under the causal mask the last see most keys.
// Splits  of a row tile take equal runs of key tiles, at least `min_tiles` each; how many of them
//         have work follows from *position alone, the others leave. One: it writes the result. More:
//         the last to arrive adds the partials in split order, so no bit depends on timing.
// Numbers q * log2(e)/sqrt(E) is rounded to f16 once; k, v (an f32 cache while staging) and the
//         weights exp2(s - max) are f16; scores, maxima, sums and the output are float32.
// Bytes   decode 2*G*E*sizeof(KV) per position: 7B at 16,384 33.6 MB -> 7.8 us a layer at 4.3 TB/s
//         (H200), 0.5B 8.4 MB -> 1.95 us. Prefill 4*T*S*H*E operations, half of them masked: 7B,
//         2,048 tokens 30 GFLOP a layer -> 49 us at 608 TFLOP/s.
// Registers  sm_90, 4 x 1 and 1 x 4: f16 cache E 64 166, 118, E 128 218, 165 (2 to 4 blocks an SM);
//         f32 cache 168, 167 and 255, 255. No spills from sm_75 to sm_120.
// Shared  64 KB, E 64 4 x 1 32 KB: at most what sm_75 has.
#include "attention.cuh"
#include "q8.cuh"

struct AttentionShape {
    int tokens, heads, kv_heads, context;  // T, H, G, S
    int min_tiles;                         // key tiles that a split takes at least
};

template <int E, int WARPS_M, int WARPS_K>
struct Tiling {
    static_assert(E == 64 || E == 128, "head dims of the family");
    static_assert(WARPS_M * WARPS_K * kWarp == kThreads, "");
    static constexpr int kRows = 16 * WARPS_M;
    static constexpr int kSlots = WARPS_K;  // warps that share rows
    static constexpr int kWarpKeys = kKeys / WARPS_K;
    static_assert(kWarpKeys % 16 == 0, "a warp's keys are whole k16 steps");
    // Enough bytes in flight from few blocks in decode; 64 KB is all that sm_75 has.
    static constexpr int kStages = WARPS_K > 1 && E == 64 ? 4 : 2;
    static constexpr int kSharedBytes = kStages * 2 * kKeys * E * 2;
    static constexpr int kMaxSplits = 128;
    // Rows of sums in shared memory lie 8 words apart from a multiple of 32: fragments are written
    // without bank conflicts.
    static constexpr int kSumStride = E + 8;
    static_assert(kSharedBytes <= 65536, "");
    static_assert(WARPS_K * kRows * (kSumStride + 2) * 4 <= kSharedBytes, "sums of all warps");
    static_assert(kRows * kMaxSplits * 4 <= kSharedBytes, "weights of the splits");
};

// The keys that a block works on.
struct Work {
    int first_query;  // position of the tile's first token
    int length;       // keys that the tile's last token sees
    int begin, end;   // key tiles of this split
    int active;       // splits that have work
};

struct Output {
    float* out;  // (T, H*E), may be null
    int8_t* qs;  // layout 1 of (T, H*E), may be null
    GroupScale* ds;
};

template <int ROWS>
__device__ inline Place find_place(const AttentionShape& shape) {
    Place place;
    place.tokens = shape.tokens;
    place.group = shape.heads / shape.kv_heads;
    place.heads = shape.heads;
    place.first_head = blockIdx.x * place.group;
    place.first_row = (gridDim.y - 1 - blockIdx.y) * ROWS;
    place.rows = min(ROWS, shape.tokens * place.group - place.first_row);
    return place;
}

__device__ inline Work find_work(const AttentionShape& shape, const Place& place, int position) {
    Work work;
    work.first_query = position + place.token(0);
    work.length = min(position + place.token(place.rows - 1) + 1, shape.context);
    const int tiles = ceil_div(work.length, kKeys);
    const int share = max(shape.min_tiles, ceil_div(tiles, static_cast<int>(gridDim.z)));
    work.active = ceil_div(tiles, share);
    work.begin = blockIdx.z * share;
    work.end = min(work.begin + share, tiles);
    return work;
}

// Four consecutive values of a row, the same of layout 1; all lanes of a warp call. Where H*E is no
// multiple of 128 the last head writes the zeros behind it too.
template <int E>
__device__ inline void emit(const Output& output, const Place& place, int row, int dim, float4 v,
                            bool valid) {
    if (output.out && valid)
        *reinterpret_cast<float4*>(output.out + place.index(row) * E + dim) = v;
    if (!output.qs) return;
    const int head = place.head(row), width = place.heads * E;
    const int64_t at = static_cast<int64_t>(place.token(row)) * (ceil_div(width, 128) * 128);
    quantize4(v, head * E + dim, valid, output.qs + at, output.ds + at / 32);
    if (width % 128 != 0)
        quantize4(make_float4(0.0f, 0.0f, 0.0f, 0.0f), width + dim,
                  valid && head == place.heads - 1, output.qs + at, output.ds + at / 32);
}

__device__ inline float4 scaled(float4 v, float by) {
    return make_float4(v.x * by, v.y * by, v.z * by, v.w * by);
}
__device__ inline void add_scaled(float4& sum, const float* from, float by) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    sum = make_float4(fmaf(v.x, by, sum.x), fmaf(v.y, by, sum.y), fmaf(v.z, by, sum.z),
                      fmaf(v.w, by, sum.w));
}

// Four sums of a row over the warps that share it, and the row's {m, l}.
template <int E, typename Tile>
__device__ inline float4 combine_warps(const float* sums, const float2* stats, int row, int dim,
                                       float2* stat) {
    float top = minus_infinity(), sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Tile::kSlots; ++w) top = fmaxf(top, stats[w * Tile::kRows + row].x);
    const float base = exponent_base(top);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < Tile::kSlots; ++w) {
        const int slot = w * Tile::kRows + row;
        const float weight = exp2_fast(stats[slot].x - base);
        sum = fmaf(stats[slot].y, weight, sum);
        add_scaled(v, sums + slot * Tile::kSumStride + dim, weight);
    }
    *stat = make_float2(top, sum);
    return v;
}

// True in the one block that comes last of `expected`; what the others wrote before is visible.
__device__ inline bool arrive_last(int* arrivals, int expected, int* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *flag = atomicAdd(arrivals, 1) == expected - 1;
        if (*flag) *arrivals = 0;
    }
    __syncthreads();
    const bool last = *flag != 0;
    __syncthreads();
    __threadfence();
    return last;
}

// The result of a row tile from the partials of its `active` splits.
template <int E, typename Tile>
__device__ inline void merge_splits(const float* sums, const float2* stats, int active,
                                    const Place& place, const Output& output) {
    float* weights = reinterpret_cast<float*>(shared_bytes());  // (rows, active), divided by l
    const int rows = place.rows;
    for (int row = threadIdx.x / kWarp; row < rows; row += kThreads / kWarp) {
        float top = minus_infinity(), sum = 0.0f;
        for (int s = threadIdx.x % kWarp; s < active; s += kWarp)
            top = fmaxf(top, stats[s * Tile::kRows + row].x);
        top = warp_max(top);
        for (int s = threadIdx.x % kWarp; s < active; s += kWarp) {
            const float2 stat = stats[s * Tile::kRows + row];
            weights[row * active + s] = exp2_fast(stat.x - top);
            sum = fmaf(stat.y, weights[row * active + s], sum);
        }
        sum = 1.0f / warp_sum(sum);
        for (int s = threadIdx.x % kWarp; s < active; s += kWarp) weights[row * active + s] *= sum;
    }
    __syncthreads();
    for (int base = 0; base < rows * (E / 4); base += kThreads) {
        const int i = base + threadIdx.x;
        const bool valid = i < rows * (E / 4);
        const int row = valid ? i / (E / 4) : 0, dim = i % (E / 4) * 4;
        const float* from = sums + row * E + dim;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 16
        for (int s = 0; s < active; ++s, from += Tile::kRows * E)
            add_scaled(v, from, weights[row * active + s]);
        emit<E>(output, place, row, dim, v, valid);
    }
}

// Keys and values of a tile into its stage: keys first, then values.
template <typename KV, int E>
__device__ inline void stage(__half* to, const KV* k, const KV* v, int tile, const Work& work,
                             int64_t stride) {
    if (tile < work.end) {
        stage_tile<KV, E>(to, k, tile * kKeys, work.length, stride);
        stage_tile<KV, E>(to + kKeys * E, v, tile * kKeys, work.length, stride);
    }
    copy_async_commit();
}

template <typename KV, int E, int WARPS_M, int WARPS_K>
__global__ void __launch_bounds__(kThreads, E == 64 ? 3 : 2)
    attention(const float* q, const KV* k, const KV* v, const int* position_at, float* out,
              int8_t* qs, GroupScale* ds, float* partials, int* arrivals, AttentionShape shape) {
    using Tile = Tiling<E, WARPS_M, WARPS_K>;
    pdl_trigger();
    const int warp = threadIdx.x / kWarp, warp_m = warp / WARPS_K, warp_k = warp % WARPS_K;
    const Place place = find_place<Tile::kRows>(shape);
    Queries<E> queries;
    locate_queries(queries, place, warp_m * 16);
    pdl_wait();
    const int position = *position_at;
    load_queries(queries, q);
    const Work work = find_work(shape, place, position);
    if (work.begin >= work.end) return;

    const int64_t stride = static_cast<int64_t>(shape.kv_heads) * E;
    k += blockIdx.x * E;
    v += blockIdx.x * E;
    __half* stages = reinterpret_cast<__half*>(shared_bytes());
    constexpr int kStage = 2 * kKeys * E;
#pragma unroll
    for (int i = 0; i < Tile::kStages - 1; ++i)
        stage<KV, E>(stages + i * kStage, k, v, work.begin + i, work, stride);

    Rows<E> rows;
    start_rows(rows, queries, position);
    for (int tile = work.begin; tile < work.end; ++tile) {
        copy_async_wait<Tile::kStages - 2>();
        __syncthreads();  // this tile is there, and the stage to fill next has been read by all
        const int done = tile - work.begin, ahead = Tile::kStages - 1;
        __half* free_stage = stages + (done + ahead) % Tile::kStages * kStage;
        stage<KV, E>(free_stage, k, v, tile + ahead, work, stride);
        const __half* keys = stages + done % Tile::kStages * kStage;
        float s[Tile::kWarpKeys / 8][4];
        scores<E, Tile::kWarpKeys>(s, rows, keys, warp_k * Tile::kWarpKeys);
        if (tile * kKeys + kKeys - 1 > work.first_query)
            mask<E, Tile::kWarpKeys>(s, rows, tile * kKeys + warp_k * Tile::kWarpKeys);
        weigh<E, Tile::kWarpKeys>(s, rows);
        add_values<E, Tile::kWarpKeys>(rows, s, keys + kKeys * E, warp_k * Tile::kWarpKeys);
    }
    __syncthreads();  // the stages are free

    float* sums = reinterpret_cast<float*>(shared_bytes());
    float2* stats = reinterpret_cast<float2*>(sums + WARPS_K * Tile::kRows * Tile::kSumStride);
    const int slot = warp_k * Tile::kRows + warp_m * 16;
    store_rows(rows, sums + slot * Tile::kSumStride, stats + slot, Tile::kSumStride);
    __syncthreads();

    const Output output = {out, qs, ds};
    const int64_t tile_id = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    const int64_t first_part = tile_id * gridDim.z;
    const int64_t parts = static_cast<int64_t>(gridDim.y) * gridDim.x * gridDim.z;
    float2* part_stats =
        reinterpret_cast<float2*>(partials + parts * Tile::kRows * E) + first_part * Tile::kRows;
    float* part_sums = partials + first_part * Tile::kRows * E;
    const int units = place.rows * (E / 4);
    for (int base = 0; base < units; base += kThreads) {
        const int i = base + threadIdx.x;
        const bool valid = i < units;
        const int row = valid ? i / (E / 4) : 0, dim = i % (E / 4) * 4;
        float2 stat;
        const float4 sum = combine_warps<E, Tile>(sums, stats, row, dim, &stat);
        if (work.active == 1) {
            emit<E>(output, place, row, dim, scaled(sum, 1.0f / stat.y), valid);
        } else if (valid) {
            const int at = blockIdx.z * Tile::kRows + row;
            *reinterpret_cast<float4*>(part_sums + static_cast<int64_t>(at) * E + dim) = sum;
            if (dim == 0) part_stats[at] = stat;
        }
    }
    if (work.active == 1) return;
    int* flag = reinterpret_cast<int*>(shared_bytes());
    if (!arrive_last(arrivals + tile_id, work.active, flag)) return;
    merge_splits<E, Tile>(part_sums, part_stats, work.active, place, output);
}
