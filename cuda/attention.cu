// Attention: out[t, h] = softmax(q[t, h] k^T / sqrt(E)) v, causal.
//   attention<KV, E>                64 rows a block: prefill
//   attention_decode<KV, E, WARPS, DEPTH>  8 rows a block: one token, or a few
//   q         (T, H, E) float, rotated          k, v  (S, G, E) KV, one layer: __half or float
//   position  int32 in device memory: the position of token 0; token t sees keys 0..*position + t
//   out       (T, H*E) float; qs (T, Kp), ds (T, Kp/32): the same in layout 1; h (T, Kp), hs (T): as
//             f16 activations with scale 1, exact enough for means of f16 values; null: not written
//   partials  attention: per (row tile, kv head, split) 64 x E float sums, behind all of them 64 x {m, l};
//             attention_decode: per (row tile, kv head) 16 boxes, where there are no clusters
//   arrivals  int per (row tile, kv head), zero before and after every launch
// Query head h reads kv head h / R, R = H/G. The rows of a tile are the (token, head of the group)
// pairs of one kv head: row r is token r / R, head r % R of the group, so keys and values are read
// once for all R heads.
// Launch  grid = (G, row tiles, splits). attention: block = 128, 16 rows a warp, tiles of 64 keys shared
//         by all warps; row tiles run last first: under the causal mask the last see most keys.
//         attention_decode: block = 32 * WARPS, each warp streams tiles of 16 keys of its own through
//         its own ring, without a barrier; the warps' sums meet once, at the end.
// Splits  of a row tile take equal runs of keys (kernels/attention.py); how many of them have work
//         follows from *position alone. One: it writes the result. More: attention's leave partials, and
//         the last to arrive adds them up in split order, so no bit depends on timing. The up to 16 of
//         attention_decode are a cluster (sm_90): each merges a sixteenth of the result, half a row,
//         from what the others write into its shared memory. Without clusters they write the same to
//         global memory, and the last to arrive merges all, to the same bits.
// Early   A decode block stages its first tiles before the wait of dependent launch, from the position
//         as it reads it then; after the wait it stages the tile of the new keys again, and all of them
//         if the position has moved. Keys of earlier steps are sure to be there: each kernel here starts
//         its successor only after its own wait, so what runs later began after the keys before this
//         layer's attention were complete. A prefill block reads the position early too and finds its
//         keys by it: after the wait position, q and the first key tile come in one latency. Where the
//         position has moved it asks for another tile.
// Numbers q * log2(e)/sqrt(E) is rounded to f16 once; k, v (an f32 cache while staging) and the
//         weights exp2(s - max) are f16; scores, maxima, sums and the output are float32.
// Bytes   decode 2*G*E*sizeof(KV) per position: 7B at 16,384 33.6 MB -> 7.8 us a layer at 4.3 TB/s
//         (H200), 0.5B 8.4 MB -> 1.95 us. Prefill 4*T*S*H*E operations, half of them masked: 7B,
//         2,048 tokens 30 GFLOP a layer -> 49 us at 608 TFLOP/s.
// Time    a launch of a decode step at depth 300, 4,096, 16,384 (H200, 2026-11-30): 0.5B 3.4, 4.5, 7.7 us,
//         7B 4.1, 6.8, 14.0 us; with splits merged through global memory 5.2, 6.3, 9.5 and 5.7, 8.4, 14.8.
//         Prefill: benchmarks/NOTES.md.
// Registers  sm_90: attention E 64 168, E 128 219, f32 cache 168, 254; attention_decode 8 warps 96, 117, with one
//         tile under way 95, 112, 4 warps 96, 132, f32 cache 144, 222. No spills from sm_75 to sm_120. 8 warps of
//         128 registers and 69 or 137 KB leave room on an SM of sm_90 for a block of the product before or after.
// Shared  attention 32, 64 KB; attention_decode 8 warps 69, 137 KB where a card has that much. For more kv heads
//         than clusters of 16 SMs fit (14B, 32B: an H200 holds seven, and the eighth waited for one to end) half
//         of it, one tile a warp under way, so that two blocks share an SM: a step of the 14B at 1,024 and 16,384
//         keys 3,034 and 3,876 us instead of 3,197 and 4,136. Else 4 warps, 36, 39 KB: at most what sm_75 has.
#include "attention.cuh"
#include "attention_decode.cuh"
#include "cluster.cuh"
#include "q8.cuh"
#include "quants_f16.cuh"
#include "state.cuh"

struct AttentionShape {
    int tokens, heads, kv_heads, context;  // T, H, G, S
    int alone_keys;                        // up to so many keys one split takes all,
    int min_keys;                          // else each at least so many
};

// The 8 rows of a decode's tile are merged in 16 slices, each half a row. A box has what the splits say
// of a slice: kValues sums of each, then {m, l} of each.
constexpr int kSplits = 16;  // most, and slices: a cluster has a block for each
template <int E>
struct Box {
    static constexpr int kValues = kHeads * E / kSplits;
    static constexpr int kFloats = kSplits * (kValues + 2);
    float* at;

    __device__ float4* sums(int split) const { return reinterpret_cast<float4*>(at + split * kValues); }
    __device__ float2* stats() const { return reinterpret_cast<float2*>(at + kSplits * kValues); }
};

// The prefill's block: 64 rows, 16 a warp, over key tiles that all warps share.
template <int E>
struct Prefill {
    static constexpr int kThreads = ::kThreads;
    static constexpr int kRows = 64, kSlots = 1;  // warps that share rows
    static constexpr int kStride = E + 8;
    static constexpr int kStages = 2;
    static constexpr int kSharedBytes = kStages * 2 * kKeys * E * 2;
};

// The decode's block: 8 rows, which all warps share, each over key tiles of its own.
template <int E, int WARPS, int DEPTH>
struct Decode {
    static constexpr int kThreads = WARPS * kWarp;
    static constexpr int kRows = kHeads, kSlots = WARPS;
    static constexpr int kStride = E + 4;
    static constexpr int kTile = 2 * kWarpKeys * E;               // halves: keys, values
    static constexpr int kTurn = kWarpKeys * kRows;               // of a warp: its weights
    static constexpr int kTurns = WARPS * DEPTH * kTile, kQueries = kTurns + WARPS * kTurn;
    static constexpr int kBox = kQueries + kRows * E;
    static constexpr int kSharedBytes = kBox * 2 + Box<E>::kFloats * 4;
    static_assert(WARPS > 4 || kSharedBytes <= 64 << 10, "what sm_75 has");
};

constexpr int kMaxSplits = 128;  // of a prefill

template <int E, class Tile>
struct Sums {
    // Rows of sums in shared memory lie kStride apart: fragments are written without bank conflicts.
    static constexpr int kStats = Tile::kSlots * Tile::kRows * Tile::kStride;
    static_assert(E == 64 || E == 128, "head dims of the family");
    static_assert((kStats + Tile::kSlots * Tile::kRows * 2) * 4 <= Tile::kSharedBytes, "of all warps");
    static_assert(Tile::kRows * kMaxSplits * 4 <= Tile::kSharedBytes, "weights of the splits");
};

// The keys that a block works on.
struct Work {
    int length;      // keys that the tile's last token sees
    int begin, end;  // key tiles of this split
    int active;      // splits that have work
};

// A row whose place is known: no division finds it.
struct KnownRow {
    int heads, known_token, known_head;

    __device__ int token(int) const { return known_token; }
    __device__ int head(int) const { return known_head; }
    __device__ int64_t index(int) const {
        return static_cast<int64_t>(known_token) * heads + known_head;
    }
};

struct Output {
    float* out;  // (T, H*E), may be null
    int8_t* qs;  // layout 1 of (T, H*E), may be null
    GroupScale* ds;
    uint8_t* h;  // f16 activations (quants_f16.cuh), may be null
    float* hs;
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

// Of a row tile whose last token is `last`.
template <int KEYS>
__device__ inline Work find_work(const AttentionShape& shape, int last, int position) {
    Work work;
    work.length = min(position + last + 1, shape.context);
    const int tiles = ceil_div(work.length, KEYS);
    const int share = work.length <= shape.alone_keys
                          ? tiles
                          : max(shape.min_keys / KEYS, ceil_div(tiles, static_cast<int>(gridDim.z)));
    work.active = ceil_div(tiles, share);
    work.begin = blockIdx.z * share;
    work.end = min(work.begin + share, tiles);
    return work;
}

// Four consecutive values of a row, the same of layout 1 or as f16; all lanes of a warp call. Where
// H*E is no multiple of 128 the last head writes the zeros behind it too.
template <int E, class Where>
__device__ inline void emit(const Output& output, const Where& place, int row, int dim, float4 v,
                            bool valid) {
    if (output.out && valid)
        *reinterpret_cast<float4*>(output.out + place.index(row) * E + dim) = v;
    if (!output.qs && !output.h) return;
    const int head = place.head(row), width = place.heads * E, token = place.token(row);
    const int64_t at = static_cast<int64_t>(token) * (ceil_div(width, 128) * 128);
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const bool behind = width % 128 != 0 && valid && head == place.heads - 1;
    if (output.h) {
        if (valid) store_halves(output.h + at * 2, head * E + dim, v, 1.0f);
        if (behind) store_halves(output.h + at * 2, width + dim, zero, 1.0f);
        if (valid && head * E + dim == 0) output.hs[token] = 1.0f;
    }
    if (!output.qs) return;
    quantize4(v, head * E + dim, valid, output.qs + at, output.ds + at / 32);
    if (width % 128 != 0) quantize4(zero, width + dim, behind, output.qs + at, output.ds + at / 32);
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
template <int E, class Tile>
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
        add_scaled(v, sums + slot * Tile::kStride + dim, weight);
    }
    *stat = make_float2(top, sum);
    return v;
}

// True in the one block that comes last of `expected`; what the others wrote before is visible.
__device__ inline bool arrive_last(int* arrivals, int expected) {
    __threadfence();
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0)  // the last sets the counter back to zero
        last = atomicInc(reinterpret_cast<unsigned*>(arrivals), expected - 1) + 1 == expected;
    last = __syncthreads_or(last);
    if (last) __threadfence();
    return last;
}

// What each split counts in each row, divided by the row's sum of weights: (rows, active).
template <class Tile>
__device__ inline void weigh_splits(float* weights, const float2* stats, int active, int rows) {
    const int lane = threadIdx.x % kWarp;
    for (int row = threadIdx.x / kWarp; row < rows; row += Tile::kThreads / kWarp) {
        float2 stat[kMaxSplits / kWarp];
        float top = minus_infinity(), sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            const int s = i * kWarp + lane;
            stat[i] = s < active ? stats[s * Tile::kRows + row]
                                 : make_float2(minus_infinity(), 0.0f);
        }
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) top = fmaxf(top, stat[i].x);
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            stat[i].x = exp2_fast(stat[i].x - top);
            sum = fmaf(stat[i].y, stat[i].x, sum);
        }
        sum = 1.0f / warp_sum(sum);
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i)
            if (i * kWarp + lane < active)
                weights[row * active + i * kWarp + lane] = stat[i].x * sum;
    }
}

// The result of a row tile from the partials of its `active` splits, added in their order. Few rows:
// two threads have four values, each half of the splits. The first sums are asked for before the
// weights, which need as long a way.
template <int E, class Tile>
__device__ inline void merge_splits(const float* sums, const float2* stats, int active,
                                    const Place& place, const Output& output) {
    constexpr int kBatch = 16;
    float* weights = reinterpret_cast<float*>(shared_bytes());
    const int units = place.rows * (E / 4), parts = 2 * units <= Tile::kThreads ? 2 : 1;
    const int lanes = Tile::kThreads / parts, part = static_cast<int>(threadIdx.x) >= lanes;
    const int begin = part * active / parts, end = (part + 1) * active / parts;
    float4* halves = reinterpret_cast<float4*>(weights + ceil_div(place.rows * active, 4) * 4);
    for (int base = 0; base < units; base += lanes) {
        const int i = base + threadIdx.x - part * lanes;
        const bool valid = i < units;
        const int row = valid ? i / (E / 4) : 0, dim = i % (E / 4) * 4;
        const float* from = sums + row * E + dim;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int s = begin; s < end; s += kBatch) {
            float4 x[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j)
                x[j] = *reinterpret_cast<const float4*>(
                    from + static_cast<int64_t>(min(s + j, end - 1)) * Tile::kRows * E);
            if (base == 0 && s == begin) {
                weigh_splits<Tile>(weights, stats, active, place.rows);
                __syncthreads();
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const float weight = s + j < end ? weights[row * active + s + j] : 0.0f;
                v = make_float4(fmaf(x[j].x, weight, v.x), fmaf(x[j].y, weight, v.y),
                                fmaf(x[j].z, weight, v.z), fmaf(x[j].w, weight, v.w));
            }
        }
        if (parts == 2) {
            if (part == 1) halves[i] = v;
            __syncthreads();
            if (part == 0) add_scaled(v, reinterpret_cast<const float*>(halves + i), 1.0f);
        }
        const int token = place.token(row);
        const KnownRow known = {place.heads, token, place.head(row, token)};
        emit<E>(output, known, row, dim, v, valid && part == 0);
    }
}

struct Scratch {
    float* partials;
    int* arrivals;
};

// The result of a warp's rows as f16 activations, straight from its fragments. Of 16 values of a row, two
// tiles of columns, each of its four lanes has two pairs {even, odd}; they exchange until lane 0 has the even values
// of row lane/4, lane 2 the odd ones, lanes 1 and 3 those of the row 8 behind: half_offset's order.
template <int E>
__device__ inline void store_fragments(const Rows<E>& rows, int first, const Place& place,
                                       const Output& output) {
    const int lane = threadIdx.x % kWarp;
    const bool behind8 = lane % 2, odds = lane % 4 / 2;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) inverse[half] = 1.0f / row_sum(rows, half);
    const int row = first + lane / 4 + (behind8 ? 8 : 0), token = behind8 ? rows.token[1] : rows.token[0];
    const int head = place.head(row, token), width = place.heads * E;
    const bool last = width % 128 != 0 && head == place.heads - 1;
    uint2 words[E / 8];  // values k, k+2 and k+1, k+3 of k = head*E + n*8 + (0 or 4)
#pragma unroll
    for (int n = 0; n < E / 8; ++n) {
        const float* o = rows.o[n];
        const uint32_t low = pack_half2(o[0] * inverse[0], o[1] * inverse[0]);
        const uint32_t high = pack_half2(o[2] * inverse[1], o[3] * inverse[1]);
        const uint32_t other = __shfl_xor_sync(kFull, behind8 ? low : high, 1);
        const uint32_t a = behind8 ? other : low, b = behind8 ? high : other;
        words[n] = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
    const int k = head * E;
    uint8_t* to = output.h + (static_cast<int64_t>(token) * (ceil_div(width, 128) * 128) + k + (odds ? 8 : 0)) * 2;
#pragma unroll
    for (int n = 0; n < E / 8; n += 2) {
        uint32_t own[2], other[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            own[i] = odds ? words[n + i].y : words[n + i].x;
            other[i] = __shfl_xor_sync(kFull, odds ? words[n + i].x : words[n + i].y, 2);
        }
        if (row >= place.rows) continue;
        uint4* at = reinterpret_cast<uint4*>(to + n * 16);
        *at = odds ? make_uint4(other[0], own[0], other[1], own[1]) : make_uint4(own[0], other[0], own[1], other[1]);
        if (last) at[E / 8] = make_uint4(0, 0, 0, 0);
    }
    if (row < place.rows && head == 0 && !odds) output.hs[token] = 1.0f;
}

// From a warp's sums to the result, or to this split's partials and, in the last block of the row tile
// to arrive, from all of them to the result. A warp needs only its own 16 rows: lane n knows row n % 16,
// and the lanes of a row have four of its values each.
template <int E>
__device__ inline void finish(const Rows<E>& rows, int first, int active, const Place& place,
                              const Output& output, const Scratch& scratch) {
    using Tile = Prefill<E>;
    constexpr int kUnits = E / 4, kAtOnce = kWarp / kUnits;
    if (active == 1 && !output.out && !output.qs) {
        store_fragments(rows, first, place, output);
        return;
    }
    __syncthreads();  // the stages are free
    float* sums = reinterpret_cast<float*>(shared_bytes());
    float2* stats = reinterpret_cast<float2*>(sums + Sums<E, Tile>::kStats) + first;
    sums += first * Tile::kStride;
    store_rows(rows, sums, stats, Tile::kStride);
    __syncwarp();

    const int lane = threadIdx.x % kWarp, own = lane % 16, count = min(place.rows - first, 16);
    const float2 stat = stats[own];
    const float* from = sums + lane / kUnits * Tile::kStride + lane % kUnits * 4;
    if (active == 1) {
        const int low = __shfl_sync(kFull, rows.token[0], own % 8 * 4);
        const int high = __shfl_sync(kFull, rows.token[1], own % 8 * 4);
        const int token = own < 8 ? low : high, head = place.head(first + own, token);
        const float inverse = 1.0f / stat.y;
        float4 next = *reinterpret_cast<const float4*>(from);
#pragma unroll 1
        for (int i = 0; i < 16; i += kAtOnce) {
            const int row = i + lane / kUnits;
            const float4 v = next;
            next = *reinterpret_cast<const float4*>(from + (i + kAtOnce) % 16 * Tile::kStride);
            const KnownRow known = {place.heads, __shfl_sync(kFull, token, row),
                                    __shfl_sync(kFull, head, row)};
            emit<E>(output, known, row, lane % kUnits * 4,
                    scaled(v, __shfl_sync(kFull, inverse, row)), row < count);
        }
        return;
    }
    const int64_t tile_id = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    const int64_t first_part = tile_id * gridDim.z;
    const int64_t parts = static_cast<int64_t>(gridDim.y) * gridDim.x * gridDim.z;
    float2* part_stats = reinterpret_cast<float2*>(scratch.partials + parts * Tile::kRows * E) +
                         first_part * Tile::kRows;
    float* part_sums = scratch.partials + first_part * Tile::kRows * E;
    const int at = blockIdx.z * Tile::kRows + first;
    float4* to = reinterpret_cast<float4*>(part_sums + static_cast<int64_t>(at) * E) + lane;
#pragma unroll 4
    for (int i = 0; i < 16; i += kAtOnce)
        if (i + lane / kUnits < count)
            to[i * kUnits] = *reinterpret_cast<const float4*>(from + i * Tile::kStride);
    if (lane < count) part_stats[at + own] = stat;
    if (arrive_last(scratch.arrivals + tile_id, active))
        merge_splits<E, Tile>(part_sums, part_stats, active, place, output);
}

// What a slice of a decode's result is added up from: `count` sources, at most 16, in their order.
struct Sources {
    const float* sums;  // of the first, `stride` before the next's
    const float2* stats;
    int stride, stats_stride, count;
};

// One warp.
template <int E>
__device__ inline void merge_slice(const Sources& from, int slice, const Place& place,
                                   const Output& output) {
    constexpr int kUnits = Box<E>::kValues / 4, kParts = kWarp / kUnits;
    const int lane = threadIdx.x % kWarp, unit = lane % kUnits, part = lane / kUnits;
    float4 x[kSplits / kParts];
#pragma unroll
    for (int n = 0; n < kSplits / kParts; ++n)
        x[n] = reinterpret_cast<const float4*>(
            from.sums + min(n * kParts + part, from.count - 1) * from.stride)[unit];
    const float2 stat = lane < from.count ? from.stats[lane * from.stats_stride]
                                          : make_float2(minus_infinity(), 0.0f);
    const float own = exp2_fast(stat.x - warp_max(stat.x));
    const float weight = own / warp_sum(stat.y * own);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int n = 0; n < kSplits / kParts; ++n) {
        const float by = __shfl_sync(kFull, weight, n * kParts + part);  // 0 from `count` on
        v = make_float4(fmaf(x[n].x, by, v.x), fmaf(x[n].y, by, v.y), fmaf(x[n].z, by, v.z),
                        fmaf(x[n].w, by, v.w));
    }
#pragma unroll
    for (int m = kUnits; m < kWarp; m <<= 1) {
        v.x += __shfl_xor_sync(kFull, v.x, m);
        v.y += __shfl_xor_sync(kFull, v.y, m);
        v.z += __shfl_xor_sync(kFull, v.z, m);
        v.w += __shfl_xor_sync(kFull, v.w, m);
    }
    emit<E>(output, place, slice / 2, slice % 2 * Box<E>::kValues + unit * 4, v, part == 0);
}

// The same of a decode. One split: slices are added up from its warps' sums. More: each block's sums go
// into the slices' boxes. In a cluster a box lies in the block that merges the slice, each its own;
// else in global memory, and the last block to arrive merges all.
template <int E, class Tile>
__device__ inline void finish_decode(const Columns<E>& columns, int active, const Place& place,
                                     const Output& output, const Scratch& scratch, bool clustered) {
    constexpr int kValues = Box<E>::kValues, kBox = Box<E>::kFloats;
    static_assert((Sums<E, Tile>::kStats + Tile::kSlots * Tile::kRows * 2) * 4 <= Tile::kBox * 2, "");
    float* sums = reinterpret_cast<float*>(shared_bytes());
    float2* stats = reinterpret_cast<float2*>(sums + Sums<E, Tile>::kStats);
    const int warp = threadIdx.x / kWarp;
    __syncthreads();  // the ring is free
    store_rows(columns, sums + warp * Tile::kRows * Tile::kStride, stats + warp * Tile::kRows,
               Tile::kStride);
    __syncthreads();
    int slice = warp, step = Tile::kSlots;
    float* boxes = reinterpret_cast<float*>(shared_bytes() + Tile::kBox * 2);
    if (active > 1) {
        const int tile_id = blockIdx.y * gridDim.x + blockIdx.x;
        if (clustered)
            cluster_wait();  // all have begun
        else
            boxes = scratch.partials + static_cast<int64_t>(tile_id) * kSplits * kBox;
        for (int i = threadIdx.x; i < place.rows * (E / 4); i += Tile::kThreads) {
            float2 stat;
            const float4 sum =
                combine_warps<E, Tile>(sums, stats, i / (E / 4), i % (E / 4) * 4, &stat);
            const int to = i / (kValues / 4), unit = i % (kValues / 4);
            const Box<E> box = {clustered ? cluster_peer(boxes, to) : boxes + to * kBox};
            box.sums(blockIdx.z)[unit] = sum;
            if (unit == 0) box.stats()[blockIdx.z] = stat;
        }
        if (clustered) {
            cluster_arrive();
            cluster_wait();
            slice = blockIdx.z + warp * kSplits;  // its own, by the first warp
            step = kSplits * Tile::kSlots;
            boxes -= blockIdx.z * kBox;
        } else if (!arrive_last(scratch.arrivals + tile_id, active)) {
            return;
        }
    }
    for (; slice < 2 * place.rows; slice += step) {
        Sources from = {sums + slice / 2 * Tile::kStride + slice % 2 * kValues, stats + slice / 2,
                        Tile::kRows * Tile::kStride, Tile::kRows, Tile::kSlots};
        if (active > 1) {
            const Box<E> box = {boxes + slice * kBox};
            from = {reinterpret_cast<const float*>(box.sums(0)), box.stats(), kValues, 1, active};
        }
        merge_slice<E>(from, slice, place, output);
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

template <typename KV, int E>
__global__ void __launch_bounds__(kThreads, E == 64 ? 3 : 2)
    attention(const float* q, const KV* k, const KV* v, const int* position_at, float* out,
              int8_t* qs, GroupScale* ds, uint8_t* h, float* hs, float* partials, int* arrivals,
              AttentionShape shape) {
    using Tile = Prefill<E>;
    static_assert(Tile::kStages == 2, "one is filled before the first tile is done");
    constexpr int kStage = 2 * kKeys * E;
    const int first = threadIdx.x / kWarp * 16;
    const Place place = find_place<Tile::kRows>(shape);
    __half* stages = reinterpret_cast<__half*>(shared_bytes());
    int* tokens = reinterpret_cast<int*>(stages + kStage);  // of all rows, until that stage is filled
    if (threadIdx.x < Tile::kRows)
        tokens[threadIdx.x] = place.token(min(static_cast<int>(threadIdx.x), place.rows - 1));
    int position = min(max(read_position(position_at), 0), shape.context - shape.tokens);
    __syncthreads();
    Rows<E> rows;
    start_rows(rows, tokens + first);
    const int first_token = place.token(0), last_token = place.token(place.rows - 1);
    Work work = find_work<kKeys>(shape, last_token, position);
    const int64_t stride = static_cast<int64_t>(shape.kv_heads) * E;
    k += blockIdx.x * E;
    v += blockIdx.x * E;
    pdl_wait();
    pdl_trigger();  // not before: a decode step's early reads count on it
    Queries<E> queries;
    for (;;) {  // again where the position has moved
        const int known = read_position(position_at);
        if (work.begin < work.end) {
            stage<KV, E>(stages, k, v, work.begin, work, stride);
            load_queries(queries, q, place, rows, first);
        }
        if (known == position) break;
        position = known;
        work = find_work<kKeys>(shape, last_token, position);
        copy_async_wait<0>();
    }
    if (work.begin >= work.end) return;

    uint32_t packed[E / 16][4];
    pack_queries<E>(packed, queries);
    for (int tile = work.begin; tile < work.end; ++tile) {
        copy_async_wait<0>();
        __syncthreads();  // this tile is there, and the stage to fill next has been read by all
        const int slot = (tile - work.begin) % Tile::kStages;
        stage<KV, E>(stages + (1 - slot) * kStage, k, v, tile + 1, work, stride);
        const __half* keys = stages + slot * kStage;
        float s[kKeys / 8][4];
        scores<E, kKeys>(s, packed, keys);
        const int key = tile * kKeys - position;  // behind token 0
        if (key + kKeys - 1 > first_token) mask<E, kKeys>(s, rows, key);
        weigh<E, kKeys>(s, rows);
        add_values<E, kKeys>(rows, s, keys + kKeys * E);
    }
    finish<E>(rows, first, work.active, place, Output{out, qs, ds, h, hs},
              Scratch{partials, arrivals});
}

// A warp's ring of tiles: its n-th tile is n * WARPS behind its first and lies in slot n % DEPTH.
template <typename KV, int E, int WARPS, int DEPTH>
struct Ring {
    using Tile = Decode<E, WARPS, DEPTH>;
    const KV *k, *v;  // of the kv head
    int64_t stride;
    __half* slots;

    __device__ int tile(const Work& work, int n) const {
        return work.begin + threadIdx.x / kWarp + n * WARPS;
    }
    __device__ __half* slot(int n) const { return slots + n % DEPTH * Tile::kTile; }
    __device__ void add(const Work& work, int n) const {
        if (tile(work, n) < work.end)
            stage_own<KV, E>(slot(n), k, v, tile(work, n), work.length, stride);
    }
};

template <typename KV, int E, int WARPS, int DEPTH>
__global__ void __launch_bounds__(WARPS * kWarp, 2)
    attention_decode(const float* q, const KV* k, const KV* v, const int* position_at, float* out,
                     int8_t* qs, GroupScale* ds, uint8_t* h, float* hs, float* partials,
                     int* arrivals, AttentionShape shape) {
    using Tile = Decode<E, WARPS, DEPTH>;
    // A float32 cache is read through L1, which may hold lines of before the wait.
    constexpr bool kEarly = sizeof(KV) == 2;
    const int warp = threadIdx.x / kWarp;
    const Place place = find_place<Tile::kRows>(shape);
    __half* shared = reinterpret_cast<__half*>(shared_bytes());
    const Ring<KV, E, WARPS, DEPTH> ring = {k + blockIdx.x * E, v + blockIdx.x * E,
                                     static_cast<int64_t>(shape.kv_heads) * E,
                                     shared + warp * DEPTH * Tile::kTile};
    int position = min(max(read_position(position_at), 0), shape.context - shape.tokens);
    Work work = find_work<kWarpKeys>(shape, place.token(place.rows - 1), position);
#pragma unroll 1
    for (int n = 0; n < DEPTH; ++n) {
        if (kEarly) ring.add(work, n);
        copy_async_commit();
    }
    const bool clustered = cluster_size() > 1;
    if (clustered) cluster_arrive_relaxed();
    const SharedQueries<E, Tile::kThreads> queries(place);
    pdl_wait();
    pdl_trigger();
    const int known = read_position(position_at);
    // Tiles that reach past `from` have keys of before the wait: again, all where the guess was wrong.
    for (int from = kEarly ? position : 0;; from = 0) {
#pragma unroll 1
        for (int n = 0; n < DEPTH; ++n) {
            if ((ring.tile(work, n) + 1) * kWarpKeys <= from) continue;
            copy_async_wait<0>();
            ring.add(work, n);
        }
        copy_async_commit();
        if (from == 0) copy_async_wait<0>();
        queries.stage(shared + Tile::kQueries, q);
        if (known == position) break;
        position = known;
        work = find_work<kWarpKeys>(shape, place.token(place.rows - 1), position);
    }
    if (work.begin >= work.end && (work.active == 1 || !clustered)) return;
    __syncthreads();

    Columns<E> columns;
    load_columns(columns, shared + Tile::kQueries);
    start_columns(columns, place, position);
    for (int tile = work.begin + warp, n = 0; tile < work.end; tile += WARPS, ++n) {
        const bool newest = (tile + 1) * kWarpKeys > position;
        if (newest)
            copy_async_wait<0>();
        else  // all but the groups of the DEPTH - 1 next tiles
            copy_async_wait<DEPTH - 1>();
        __syncwarp();
        const __half* keys = ring.slot(n);
        float s[4];
        score_keys(s, columns, keys);
        if (newest) mask_keys(s, columns, tile * kWarpKeys);
        weigh_keys(s, columns);
        add_keys(columns, s, shared + Tile::kTurns + warp * Tile::kTurn, keys + kWarpKeys * E);
        __syncwarp();  // the slot has been read by all
        ring.add(work, n + DEPTH);
        copy_async_commit();
    }
    finish_decode<E, Tile>(columns, work.active, place, Output{out, qs, ds, h, hs},
                           Scratch{partials, arrivals}, clustered);
}
