// One row of activations times quantised matrices: the linear layers of a decode step.
//   matvec<Q>              y = W x (+ bias) (+ residual)
//   matvec_gate_up<Q>      q8 (and float32) of silu(Wg x) * (Wu x)
//   matvec_qkv<Qq,Qk,Qv,KV>  the three projections, biases, RoPE and the KV store
// Shapes  W (N, K) in records (layout 2, quants.cuh), x one q8 row (layout 1), y (N) float.
// Split   `segments` warps share a strip of 8 rows, each a fixed range of its records, so that the
//         order of the sum depends on K and the type alone: fused or not, on any card, equal bits.
//         A block owns a contiguous share of strips; its warps stream them without a barrier, the
//         partial sums meet in shared memory once, at the end.
// Launch  grid = blocks (each with at most ceil(units / grid) units), block = 512, dynamic shared =
//         32 * strips * segments + 1.125 Kp (+ Kp / 4 where the type has minima) bytes.
// Bytes   N * K / kBlock * kRaw, read once. Q4_K 18944 x 3584: 38.2 MB, 8.9 us at 4.3 TB/s (H200).
//         In flight: 16 warps x kDepth records' lanes, about 32 KB a block.
// Why not one row per block (as is common): its last reduction and its launch cost more than its
//         2 KB; why not the input quantised here: every block would repeat it (gpu.md: +1 us a phase).
#include "q8.cuh"
#include "quants.cuh"
#include "rope.cuh"

constexpr int kThreads = 384;  // twice on an SM: 80 registers a thread
constexpr int kWarps = kThreads / kWarp;

// One q8 row as the blocks read it from shared memory.
struct SharedRow {
    const uint4* qs;    // (Kp / 16)
    const float4* d;    // (Kp / 128): scale / kMul of the four groups of a chunk
    const float2* sum;  // (Kp / 32): d * sum of values 0-15, 16-31; types with minima only
};

// Copy a q8 row to shared memory at `to`; all threads of the block, ends with a barrier.
template <class Q>
__device__ SharedRow share_row(const int8_t* qs, const GroupScale* ds, int chunks, char* to) {
    uint4* q = reinterpret_cast<uint4*>(to);
    float* d = reinterpret_cast<float*>(to + chunks * 128);
    float2* sum = reinterpret_cast<float2*>(d + chunks * 4);
    for (int i = threadIdx.x; i < chunks * 8; i += kThreads) q[i] = reinterpret_cast<const uint4*>(qs)[i];
    for (int i = threadIdx.x; i < chunks * 4; i += kThreads) {
        GroupScale s = ds[i];
        d[i] = __fmul_rn(s.d, 1.0f / Q::kMul);
        if (Q::kMin)
            sum[i] = make_float2(__fmul_rn(s.d, static_cast<float>(s.lo)), __fmul_rn(s.d, static_cast<float>(s.hi)));
    }
    __syncthreads();
    return SharedRow{q, reinterpret_cast<const float4*>(d), sum};
}

// acc + the lane's part of one record times the row; `chunk` is the record's first.
template <class Q>
__device__ inline float dot_record(const typename Q::Lane& l, const SharedRow& x, int chunk, int t, float acc) {
#pragma unroll
    for (int c = 0; c < Q::kChunks; ++c) {
        const uint4 x0 = x.qs[(chunk + c) * 8 + t * 2], x1 = x.qs[(chunk + c) * 8 + t * 2 + 1];
        const float4 d4 = x.d[chunk + c];
        const uint32_t xs[4][2] = {{x0.x, x0.y}, {x0.z, x0.w}, {x1.x, x1.y}, {x1.z, x1.w}};
        const float d[4] = {d4.x, d4.y, d4.z, d4.w};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            int low = __dp4a(static_cast<int>(Q::word(l, c, b, 0)), static_cast<int>(xs[b][0]), 0);
            if (Q::kHalf) {
                int high = __dp4a(static_cast<int>(Q::word(l, c, b, 1)), static_cast<int>(xs[b][1]), 0);
                acc = fmaf(__fmul_rn(Q::scale(l, c, b, 0), d[b]), static_cast<float>(low), acc);
                acc = fmaf(__fmul_rn(Q::scale(l, c, b, 1), d[b]), static_cast<float>(high), acc);
            } else {
                int both = __dp4a(static_cast<int>(Q::word(l, c, b, 1)), static_cast<int>(xs[b][1]), low);
                acc = fmaf(__fmul_rn(Q::scale(l, c, b, 0), d[b]), static_cast<float>(both), acc);
            }
        }
        if (Q::kMin) {  // the four lanes of a row take one block's minimum each
            const float2 sum = x.sum[(chunk + c) * 4 + t];
            if (Q::kHalf) {
                acc = fmaf(-Q::minimum(l, c, t, 0), sum.x, acc);
                acc = fmaf(-Q::minimum(l, c, t, 1), sum.y, acc);
            } else {
                acc = fmaf(-Q::minimum(l, c, t, 0), __fadd_rn(sum.x, sum.y), acc);
            }
        }
    }
    return acc;
}

// Partial sums of strips [begin, end) of `strips`, which maps a strip to the offset of its first record
// (in units of 16 bytes): parts[((strip - begin) * segments + segment) * 8 + row]. The first loads start
// before the wait for the input. Ends with a barrier.
template <class Q, class Strips>
__device__ void strip_sums(const Strips& strips, int begin, int end, const int8_t* qs, const GroupScale* ds,
                           int k, int segments, float* parts, char* row_memory) {
    constexpr int kDepth = Q::kDepth;  // records in flight a lane
    const int lane = threadIdx.x % kWarp;
    const int warp = __shfl_sync(kFull, threadIdx.x / kWarp, 0);  // the same for all lanes, and known to be
    const int records = ceil_div(k, Q::kRecK), segment = warp % segments, step = kWarps / segments;
    const int first = segment * records / segments, length = (segment + 1) * records / segments - first;

    // the load side runs kDepth records ahead of the use side
    int load_strip = begin + warp / segments, load_left = length;
    uint32_t load_at = load_strip < end ? strips.offset(load_strip) + first * (Q::kRecord / 16) : 0;
    auto load = [&](typename Q::Lane& l) {
        if (load_strip >= end) return;
        l = Q::template load<Streamed>(strips.base(load_strip) + load_at * 16ull, lane);
        load_at += Q::kRecord / 16;
        if (--load_left == 0) {
            load_left = length, load_strip += step;
            if (load_strip < end) load_at = strips.offset(load_strip) + first * (Q::kRecord / 16);
        }
    };
    typename Q::Lane ring[kDepth];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) load(ring[i]);
    pdl_wait();
    const SharedRow x = share_row<Q>(qs, ds, records * Q::kChunks, row_memory);

    float acc = 0.0f;
    int record = first;
    float* part = parts + (warp / segments * segments + segment) * 8;  // of the strip at hand
    for (int strip = begin + warp / segments; strip < end;) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            if (strip >= end) break;
            acc = dot_record<Q>(ring[i], x, record * Q::kChunks, lane & 3, acc);
            load(ring[i]);
            if (++record == first + length) {
                acc = __fadd_rn(acc, __shfl_xor_sync(kFull, acc, 1));
                acc = __fadd_rn(acc, __shfl_xor_sync(kFull, acc, 2));
                if ((lane & 3) == 0) part[lane >> 2] = acc;
                part += kWarps * 8;
                acc = 0.0f, record = first, strip += step;
            }
        }
    }
    __syncthreads();
}

// Row `row` (counted from the block's first strip) of what strip_sums left: segments in order.
__device__ inline float row_sum(const float* parts, int segments, int row) {
    const float* p = parts + (row >> 3) * segments * 8 + (row & 7);
    float sum = p[0];
    for (int s = 1; s < segments; ++s) sum = __fadd_rn(sum, p[s * 8]);
    return sum;
}

// A block's share of `units`: [begin, end).
struct Share {
    int begin, end;
};
__device__ inline Share share_of(int units, int block, int blocks) {
    int each = ceil_div(units, blocks);
    return Share{min(block * each, units), min((block + 1) * each, units)};
}

struct PlainStrips {
    const uint8_t* w;
    uint32_t strip_size;  // in units of 16 bytes
    __device__ const uint8_t* base(int) const { return w; }
    __device__ uint32_t offset(int strip) const { return strip * strip_size; }
};
template <class Q>
__device__ inline uint32_t strip_size(int k) {
    return ceil_div(k, Q::kRecK) * (Q::kRecord / 16);
}

template <class Q>
__global__ void __launch_bounds__(kThreads, 2)
matvec(const uint8_t* w, const int8_t* qs, const GroupScale* ds, const float* bias, const float* residual,
       float* y, int n, int k, int segments) {
    pdl_trigger();
    float* parts = reinterpret_cast<float*>(shared_bytes());
    const int strips = ceil_div(n, 8);
    const Share mine = share_of(strips, blockIdx.x, gridDim.x);
    const int most = ceil_div(strips, gridDim.x);
    const PlainStrips rows{w, strip_size<Q>(k)};
    strip_sums<Q>(rows, mine.begin, mine.end, qs, ds, k, segments, parts,
                  shared_bytes() + most * segments * 32);
    for (int r = threadIdx.x; r < (mine.end - mine.begin) * 8; r += kThreads) {
        const int row = mine.begin * 8 + r;
        if (row >= n) break;
        float v = row_sum(parts, segments, r);
        if (bias) v = __fadd_rn(v, bias[row]);
        if (residual) v = __fadd_rn(residual[row], v);
        y[row] = v;
    }
}

// Strips of a unit of 32 neurons: four of gate, then four of up. Past the last strip the last one is
// read again and its sums are not used.
struct GateUpStrips {
    const uint8_t *gate, *up;
    uint32_t strip_size;
    int strips;
    __device__ const uint8_t* base(int strip) const { return (strip & 4) ? up : gate; }
    __device__ uint32_t offset(int strip) const {
        return min((strip >> 3) * 4 + (strip & 3), strips - 1) * strip_size;
    }
};

//   gate, up (N, K)   qs_out (Np), ds_out (Np / 32): q8 row of N values, y (N) float; null: not written
// Launch as matvec, units of 32 neurons (8 strips), Np / 32 of them.
template <class Q>
__global__ void __launch_bounds__(kThreads, 2)
matvec_gate_up(const uint8_t* gate, const uint8_t* up, const int8_t* qs, const GroupScale* ds, int8_t* qs_out,
               GroupScale* ds_out, float* y, int n, int k, int segments) {
    pdl_trigger();
    float* parts = reinterpret_cast<float*>(shared_bytes());
    const int units = ceil_div(n, 128) * 4;
    const Share mine = share_of(units, blockIdx.x, gridDim.x);
    const int most = ceil_div(units, gridDim.x) * 8;
    const GateUpStrips rows{gate, up, strip_size<Q>(k), ceil_div(n, 8)};
    strip_sums<Q>(rows, mine.begin * 8, mine.end * 8, qs, ds, k, segments, parts,
                  shared_bytes() + most * segments * 32);
    // eight lanes a unit, four neurons a lane; whole warps stay together for quantize4
    const int lane = threadIdx.x % 8;
    for (int base = 0; base < mine.end - mine.begin; base += kThreads / 8) {
        const int unit = base + threadIdx.x / 8, neuron = (mine.begin + unit) * 32 + lane * 4;
        const bool inside = unit < mine.end - mine.begin;
        float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!inside || neuron + i >= n) continue;
            const int r = unit * 64 + lane * 4 + i;
            v[i] = swiglu_value(row_sum(parts, segments, r), row_sum(parts, segments, r + 32));
            if (y) y[neuron + i] = v[i];
        }
        if (qs_out) quantize4(make_float4(v[0], v[1], v[2], v[3]), neuron, inside, qs_out, ds_out);
    }
}

struct QkvArguments {
    const uint8_t* w[3];    // q (H*E, K), k (G*E, K), v (G*E, K)
    const float* bias[3];   // (H*E), (G*E), (G*E)
    const int8_t* qs;       // (Kp)
    const GroupScale* ds;   // (Kp / 32)
    const float2* rope;     // (S, E/2) cos, sin
    const int* position;    // of this token
    float* q;               // (H*E)
    void *k_cache, *v_cache;  // (S, G, E) of this layer
    int k, heads, kv_heads, head_dim, context;
    int segments[3];
    int blocks[3];          // of the grid, for q, k, v
};

// Strips of a unit of 16 rows: rows 8p.. and their RoPE partners E/2 further on.
struct HeadStrips {
    const uint8_t* w;
    uint32_t strip_size;
    int head_strips;  // E / 8
    __device__ int strip_of(int strip) const {
        const int half = head_strips / 2, unit = strip >> 1;
        return unit / half * head_strips + unit % half + (strip & 1) * half;
    }
    __device__ const uint8_t* base(int) const { return w; }
    __device__ uint32_t offset(int strip) const { return strip_of(strip) * strip_size; }
};

template <class Q, class KV>
__device__ void project_heads(const QkvArguments& a, int which, int block) {
    float* parts = reinterpret_cast<float*>(shared_bytes());
    const int e = a.head_dim, heads = which == 0 ? a.heads : a.kv_heads;
    const int units = heads * e / 16, segments = a.segments[which];
    const Share mine = share_of(units, block, a.blocks[which]);
    const int most = ceil_div(units, a.blocks[which]) * 2;
    const HeadStrips rows{a.w[which], strip_size<Q>(a.k), e / 8};
    strip_sums<Q>(rows, mine.begin * 2, mine.end * 2, a.qs, a.ds, a.k, segments, parts,
                  shared_bytes() + most * segments * 32);
    const int position = *a.position;
    for (int i = threadIdx.x; i < (mine.end - mine.begin) * 8; i += kThreads) {
        const int first = rows.strip_of((mine.begin + i / 8) * 2) * 8 + i % 8, second = first + e / 2;
        float2 v = make_float2(row_sum(parts, segments, i / 8 * 16 + i % 8),
                               row_sum(parts, segments, i / 8 * 16 + 8 + i % 8));
        const float *bias = a.bias[which];
        if (which == 2) {
            v = make_float2(__fadd_rn(v.x, bias[first]), __fadd_rn(v.y, bias[second]));
        } else {
            const float2 cs = a.rope[static_cast<int64_t>(position) * (e / 2) + first % e];
            v = rope_pair(v.x, v.y, bias[first], bias[second], cs);
        }
        if (which == 0) {
            a.q[first] = v.x, a.q[second] = v.y;
        } else if (position < a.context) {
            KV* cache = static_cast<KV*>(which == 1 ? a.k_cache : a.v_cache) +
                        static_cast<int64_t>(position) * a.kv_heads * e;
            store_kv(cache + first, v.x);
            store_kv(cache + second, v.y);
        }
    }
}

// Launch  grid = blocks[0] + blocks[1] + blocks[2], units of 16 rows; the rest as matvec.
template <class Qq, class Qk, class Qv, class KV>
__global__ void __launch_bounds__(kThreads, 1) matvec_qkv(QkvArguments a) {
    pdl_trigger();
    const int block = blockIdx.x;
    if (block < a.blocks[0]) {
        project_heads<Qq, KV>(a, 0, block);
    } else if (block < a.blocks[0] + a.blocks[1]) {
        project_heads<Qk, KV>(a, 1, block - a.blocks[0]);
    } else {
        project_heads<Qv, KV>(a, 2, block - a.blocks[0] - a.blocks[1]);
    }
}
