// One row of activations times quantised matrices: the linear layers of a decode step.
//   matvec<Q, In>              y = W x (+ bias) (+ residual)
//   matvec_gate_up<Q, In>      q8 (and float32) of silu(Wg x) * (Wu x)
//   matvec_qkv<Qq,Qk,Qv,KV,In> the three projections, biases, RoPE and the KV store
// Shapes  W (N, K) in records (layout 2, quants.cuh), y (N) float. The input x is, by In,
//         Quantised  one q8 row (layout 1), read through L1: copying it to shared memory first would
//                    hold up the whole block; or
//         Normed     a float row and an RMSNorm weight: every block norms and quantises it itself into
//                    shared memory, with the bits of norm.cu, which costs less than another launch.
// Split   a strip of 8 rows is cut along K into parts of `part_records` records; partial sums meet in
//         shared memory once, at the end, and are added in order of K. The order depends on K and the
//         type alone: fused or not, on any card, equal bits. A block owns a contiguous share of
//         strips; its warps take (strip, part) tasks in turn and stream them without a barrier.
// Launch  block = 320, grid = blocks that share the units, dynamic shared: kernels/matvec.py.
// Bytes   N * K / kBlock * kRaw, read once. Q4_K 18944 x 3584: 38.2 MB, 8.9 us at 4.3 TB/s (H200).
//         In flight: 10 warps x kDepth records, about 30 KB a block.
// Why not one row per block (as is common): its last reduction and its launch cost more than its 2 KB.
#include "norm.cuh"
#include "q8.cuh"
#include "quants.cuh"
#include "rope.cuh"

constexpr int kThreads = kNormThreads;  // twice on an SM: 96 registers a thread
constexpr int kWarps = kThreads / kWarp;

struct Input {
    const int8_t* qs;         // Quantised: (Kp), ds (Kp / 32)
    const GroupScale* ds;
    const float* scale;       // factor of the row; null: 1
    const float *x, *weight;  // Normed: (K) each
    float eps;
    int k, part_records;
};

// A q8 row, in global or in shared memory.
struct Row {
    const int8_t* qs;      // (Kp)
    const GroupScale* ds;  // (Kp / 32)
};

// How a block gets its row: `before` what may start before the wait, `take` the rest, `scale` the row's
// factor when all sums are made. `memory` is the shared memory that take() leaves the row in.
struct Quantised {
    static constexpr int kWeights = 0;
    __device__ static void before(const Input&, float*) {}
    __device__ static Row take(const Input& in, char*, int, float*, float* partial) {
        if (in.scale && threadIdx.x == 0) copy_async(partial, in.scale);
        return Row{in.qs, in.ds};
    }
    __device__ static float scale(const Input& in, const float* partial) { return in.scale ? *partial : 1.0f; }
};
struct Normed {
    static constexpr int kWeights = 1;
    __device__ static void before(const Input& in, float* weight) {
        for (int i = threadIdx.x * 4; i < in.k; i += kThreads * 4) copy_async16(weight + i, in.weight + i);
        copy_async_commit();
    }
    __device__ static Row take(const Input& in, char* memory, int chunks, float* weight, float* partial) {
        int8_t* qs = reinterpret_cast<int8_t*>(memory);
        GroupScale* ds = reinterpret_cast<GroupScale*>(memory + chunks * 128);
        copy_async_wait<0>();  // of the weights, a thread reads what it has copied itself
        weighted_row(in.x, weight, in.k, chunks * 128, partial,
                     [&](int i, float4 v) { quantize4(v, i, true, qs, ds); });
        __syncthreads();
        return Row{qs, ds};
    }
    __device__ static float scale(const Input& in, const float* partial) { return row_rstd(partial, in.k, in.eps); }
};

// acc + the lane's part of one record times the row; `chunk` is the record's first.
template <class Q>
__device__ inline float dot_record(const typename Q::Lane& l, const Row& x, int chunk, int t, float acc) {
    float sum = 0.0f, least = 0.0f;
#pragma unroll
    for (int c = 0; c < Q::kChunks; ++c) {
        const uint4* qs = reinterpret_cast<const uint4*>(x.qs + (chunk + c) * 128 + t * 32);
        const uint4* ds = reinterpret_cast<const uint4*>(x.ds + (chunk + c) * 4);
        const uint4 x0 = qs[0], x1 = qs[1], d0 = ds[0], d1 = ds[1];
        const uint32_t xs[4][2] = {{x0.x, x0.y}, {x0.z, x0.w}, {x1.x, x1.y}, {x1.z, x1.w}};
        const uint32_t d[4] = {d0.x, d0.z, d1.x, d1.z};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            int dot = __dp4a(static_cast<int>(Q::word(l, c, b, 0)), static_cast<int>(xs[b][0]), 0);
            if constexpr (Q::kHalf) {
                const int high = __dp4a(static_cast<int>(Q::word(l, c, b, 1)), static_cast<int>(xs[b][1]), 0);
                dot = dot * Q::int_scale(l, c, b, 0) + high * Q::int_scale(l, c, b, 1);
            } else {
                dot = __dp4a(static_cast<int>(Q::word(l, c, b, 1)), static_cast<int>(xs[b][1]), dot);
                if constexpr (Q::kInteger) dot *= Q::int_scale(l, c, b, 0);
            }
            float scale = __uint_as_float(d[b]);
            if constexpr (!Q::kInteger) scale = __fmul_rn(Q::scale(l, c, b, 0), scale);
            sum = fmaf(static_cast<float>(dot), scale, sum);
        }
        if constexpr (Q::kMin) {  // the four lanes of a row take one block's minimum each
            const GroupScale of = x.ds[(chunk + c) * 4 + t];
            if constexpr (Q::kHalf) {
                const int both = Q::int_min(l, c, t, 0) * of.lo + Q::int_min(l, c, t, 1) * of.hi;
                least = fmaf(static_cast<float>(both), of.d, least);
            } else if constexpr (Q::kInteger) {
                least = fmaf(static_cast<float>(Q::int_min(l, c, t, 0) * (of.lo + of.hi)), of.d, least);
            } else {
                least = fmaf(__fmul_rn(Q::minimum(l, c, t, 0), of.d), static_cast<float>(of.lo + of.hi), least);
            }
        }
    }
    constexpr float kUnit = 1.0f / Q::kMul;
    if constexpr (Q::kInteger) {
        acc = fmaf(__fmul_rn(Q::super(l), kUnit), sum, acc);
        if constexpr (Q::kMin) acc = fmaf(-Q::super_min(l), least, acc);
        return acc;
    } else {
        acc = fmaf(sum, kUnit, acc);
        return Q::kMin ? __fsub_rn(acc, least) : acc;
    }
}

// A warp's tasks: part `part` of strip `strip`, counted from the block's first; kWarps tasks a step.
struct Task {
    int strip, part;
    __device__ void advance(int parts) {
        part += kWarps;
        while (part >= parts) part -= parts, ++strip;
    }
};

// Partial sums of strips [begin, end): sums[((strip - begin) * parts + part) * 8 + row]. `strips` maps
// a strip to its matrix and the offset of its first record (in units of 16 bytes). The first loads
// start before the wait for the input. `addends.before`, `.early` and `.late` start asynchronous copies
// of what the end will need: before the wait, after it, and once more when that has arrived. Returns
// the row's factor, behind a barrier and with all that in shared memory.
template <class Q, class In, int Depth = Q::kDepth, class Strips, class Addends>
__device__ float strip_sums(const Strips& strips, int begin, int end, const Input& in, float* sums, char* row_memory,
                           Addends& addends) {
    const int lane = threadIdx.x % kWarp;
    const int warp = __shfl_sync(kFull, threadIdx.x / kWarp, 0);  // the same for all lanes, and known to be
    const int records = ceil_div(in.k, Q::kRecK), parts = ceil_div(records, in.part_records);
    const int count = end - begin;
    auto length = [&](int part) { return min(in.part_records, records - part * in.part_records); };
    auto offset = [&](const Task& task) {
        return strips.offset(begin + task.strip) + task.part * in.part_records * (Q::kRecord / 16);
    };

    // the load side runs Depth records ahead of the use side
    Task ahead{0, warp};
    ahead.part -= kWarps;
    ahead.advance(parts);
    Task task = ahead;
    int left = 0;
    uint32_t at = 0;
    if (ahead.strip < count) left = length(ahead.part), at = offset(ahead);
    auto load = [&](typename Q::Lane& l) {
        if (ahead.strip >= count) return;
        l = Q::template load<Streamed>(strips.base(begin + ahead.strip) + at * 16ull, lane);
        at += Q::kRecord / 16;
        if (--left == 0) {
            ahead.advance(parts);
            if (ahead.strip < count) left = length(ahead.part), at = offset(ahead);
        }
    };
    typename Q::Lane ring[Depth];
#pragma unroll
    for (int i = 0; i < Depth; ++i) load(ring[i]);
    In::before(in, sums);
    addends.before();
    pdl_wait();
    addends.early();
    __shared__ float partial[kWarps];
    const Row row = In::take(in, row_memory, records * Q::kChunks, sums, partial);
    addends.late();
    copy_async_commit();

    float acc = 0.0f;
    int record = task.part * in.part_records, rest = length(task.part);
    while (task.strip < count) {
#pragma unroll
        for (int i = 0; i < Depth; ++i) {
            if (task.strip >= count) break;
            acc = dot_record<Q>(ring[i], row, record * Q::kChunks, lane & 3, acc);
            load(ring[i]);
            ++record;
            if (--rest == 0) {
                acc = __fadd_rn(acc, __shfl_xor_sync(kFull, acc, 1));
                acc = __fadd_rn(acc, __shfl_xor_sync(kFull, acc, 2));
                if ((lane & 3) == 0) sums[(task.strip * parts + task.part) * 8 + (lane >> 2)] = acc;
                task.advance(parts);
                acc = 0.0f, record = task.part * in.part_records, rest = length(task.part);
            }
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    return In::scale(in, partial);
}

// Row `row`, counted from the block's first, of what strip_sums left.
template <class Q>
__device__ inline float row_sum(const float* sums, const Input& in, int row) {
    const int parts = ceil_div(ceil_div(in.k, Q::kRecK), in.part_records);
    const float* p = sums + (row >> 3) * parts * 8 + (row & 7);
    float sum = p[0];
    for (int i = 1; i < parts; ++i) sum = __fadd_rn(sum, p[i * 8]);
    return sum;
}

// A block's share of `units`: [begin, end), of ceil or floor of the mean.
struct Share {
    int begin, end;
};
__device__ inline Share share_of(int units, int block, int blocks) {
    return Share{static_cast<int>(static_cast<int64_t>(units) * block / blocks),
                 static_cast<int>(static_cast<int64_t>(units) * (block + 1) / blocks)};
}
// Where the row lies in shared memory: behind the sums, and behind what the input's sharing takes.
template <class Q, class In>
__device__ inline char* row_memory(const Input& in, int most_strips) {
    const int parts = ceil_div(ceil_div(in.k, Q::kRecK), in.part_records);
    // the norm's weights lie where the sums will
    return shared_bytes() + max(most_strips * parts * 32, in.k * static_cast<int>(sizeof(float)) * In::kWeights);
}
template <class Q>
__device__ inline uint32_t strip_size(const Input& in) {
    return ceil_div(in.k, Q::kRecK) * (Q::kRecord / 16);
}

struct PlainStrips {
    const uint8_t* w;
    uint32_t strip_size;  // in units of 16 bytes
    __device__ const uint8_t* base(int) const { return w; }
    __device__ uint32_t offset(int strip) const { return strip * strip_size; }
};

struct Output {
    const float *bias, *residual;  // (N); null: none
    float* y;                      // (N)
    int n;
};
// Bias and residual of a thread's first row, under way while the sums are made.
struct RowAddends {
    const Output& out;
    float *bias, *residual;  // shared
    int row;
    bool inside;
    __device__ void before() {
        if (inside && out.bias) copy_async(bias, out.bias + row);
    }
    __device__ void early() {
        if (inside && out.residual) copy_async(residual, out.residual + row);
    }
    __device__ void late() {}
};

template <class Q, class In>
__global__ void __launch_bounds__(kThreads, 2) matvec(const uint8_t* w, Input in, Output out) {
    pdl_trigger();
    float* sums = reinterpret_cast<float*>(shared_bytes());
    const int strips = ceil_div(out.n, 8);
    const Share mine = share_of(strips, blockIdx.x, gridDim.x);
    const int row0 = mine.begin * 8, rows = min(mine.end * 8, out.n) - row0;
    const PlainStrips plain{w, strip_size<Q>(in)};
    __shared__ float bias[kThreads], residual[kThreads];
    const int t = threadIdx.x;
    RowAddends addends{out, bias + t, residual + t, row0 + t, t < rows};
    const float scale = strip_sums<Q, In>(plain, mine.begin, mine.end, in, sums,
                                          row_memory<Q, In>(in, ceil_div(strips, gridDim.x)), addends);
    for (int r = t; r < rows; r += kThreads) {
        float v = __fmul_rn(row_sum<Q>(sums, in, r), scale);
        if (out.bias) v = __fadd_rn(v, r == t ? bias[t] : out.bias[row0 + r]);
        if (out.residual) v = __fadd_rn(r == t ? residual[t] : out.residual[row0 + r], v);
        out.y[row0 + r] = v;
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
struct Nothing {
    __device__ void before() {}
    __device__ void early() {}
    __device__ void late() {}
};

//   gate, up (N, K)   qs_out (Np), ds_out (Np / 32): q8 row of N values, y (N) float; null: not written
// Launch as matvec, units of 32 neurons (8 strips), Np / 32 of them.
template <class Q, class In>
__global__ void __launch_bounds__(kThreads, 2)
matvec_gate_up(const uint8_t* gate, const uint8_t* up, Input in, int8_t* qs_out, GroupScale* ds_out, float* y, int n) {
    pdl_trigger();
    float* sums = reinterpret_cast<float*>(shared_bytes());
    const int units = ceil_div(n, 128) * 4;
    const Share mine = share_of(units, blockIdx.x, gridDim.x);
    const GateUpStrips strips{gate, up, strip_size<Q>(in), ceil_div(n, 8)};
    Nothing nothing;
    const float scale = strip_sums<Q, In>(strips, mine.begin * 8, mine.end * 8, in, sums,
                                          row_memory<Q, In>(in, ceil_div(units, gridDim.x) * 8), nothing);
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
            v[i] = swiglu_value(__fmul_rn(row_sum<Q>(sums, in, r), scale),
                                __fmul_rn(row_sum<Q>(sums, in, r + 32), scale));
            if (y) y[neuron + i] = v[i];
        }
        if (qs_out) quantize4(make_float4(v[0], v[1], v[2], v[3]), neuron, inside, qs_out, ds_out);
    }
}

struct QkvArguments {
    const uint8_t* w[3];    // q (H*E, K), k (G*E, K), v (G*E, K)
    const float* bias[3];   // (H*E), (G*E), (G*E)
    Input in;
    const float2* rope;     // (S, E/2) cos, sin
    const int* position;    // of this token
    float* q;               // (H*E)
    void *k_cache, *v_cache;  // (S, G, E) of this layer
    int heads, kv_heads, head_dim, context;
    int part_records[3];
    int blocks[3];          // of the grid, for q, k, v
};

// Strips of a unit of 16 rows: rows 8p.. and their RoPE partners E/2 further on.
struct HeadStrips {
    const uint8_t* w;
    uint32_t strip_size;
    int shift;  // log2(E / 16), units of a head
    __device__ int strip_of(int strip) const {
        const int unit = strip >> 1, low = unit & ((1 << shift) - 1);
        return ((unit - low) << 1) + low + ((strip & 1) << shift);
    }
    __device__ const uint8_t* base(int) const { return w; }
    __device__ uint32_t offset(int strip) const { return strip_of(strip) * strip_size; }
};

// Biases and rotation of a thread's pair of rows (first, first + E/2) of q, k or v, under way while the
// sums are made. A block has at most kThreads pairs.
struct PairAddends {
    const QkvArguments& a;
    float* bias;  // shared: two, then the rotation
    float2* cs;
    int which, first;
    bool inside;
    __device__ void before() {
        if (!inside) return;
        copy_async(bias, a.bias[which] + first);
        copy_async(bias + 1, a.bias[which] + first + a.head_dim / 2);
    }
    __device__ void early() {}
    __device__ void late() {
        if (inside && which != 2)
            copy_async(cs, a.rope + static_cast<int64_t>(*a.position) * (a.head_dim / 2) + first % a.head_dim);
    }
};

template <class Q, class KV, class In>
__device__ void project_heads(const QkvArguments& a, int which, int block) {
    __shared__ float bias[2 * kThreads];
    __shared__ float2 rotation[kThreads];
    float* sums = reinterpret_cast<float*>(shared_bytes());
    Input in = a.in;
    in.part_records = a.part_records[which];
    const int units = (which == 0 ? a.heads : a.kv_heads) * a.head_dim / 16, t = threadIdx.x;
    const Share mine = share_of(units, block, a.blocks[which]);
    const HeadStrips strips{a.w[which], strip_size<Q>(in), a.head_dim == 64 ? 2 : 3};
    const int first = strips.strip_of((mine.begin + t / 8) * 2) * 8 + t % 8, second = first + a.head_dim / 2;
    PairAddends addends{a, bias + 2 * t, rotation + t, which, first, t < (mine.end - mine.begin) * 8};
    constexpr int kDepth = Q::kDepth - 1;  // three bodies in one kernel: fewer registers each
    const float scale = strip_sums<Q, In, kDepth>(strips, mine.begin * 2, mine.end * 2, in, sums,
                                                  row_memory<Q, In>(in, ceil_div(units, a.blocks[which]) * 2), addends);
    const int position = *a.position;
    if (!addends.inside) return;
    float2 v = make_float2(__fmul_rn(row_sum<Q>(sums, in, t / 8 * 16 + t % 8), scale),
                           __fmul_rn(row_sum<Q>(sums, in, t / 8 * 16 + 8 + t % 8), scale));
    const float b0 = bias[2 * t], b1 = bias[2 * t + 1];
    v = which == 2 ? make_float2(__fadd_rn(v.x, b0), __fadd_rn(v.y, b1)) : rope_pair(v.x, v.y, b0, b1, rotation[t]);
    if (which == 0) {
        a.q[first] = v.x, a.q[second] = v.y;
    } else if (position < a.context) {
        KV* cache = static_cast<KV*>(which == 1 ? a.k_cache : a.v_cache) +
                    static_cast<int64_t>(position) * a.kv_heads * a.head_dim;
        store_kv(cache + first, v.x);
        store_kv(cache + second, v.y);
    }
}

// Launch  grid = blocks[0] + blocks[1] + blocks[2], units of 16 rows; the rest as matvec.
template <class Qq, class Qk, class Qv, class KV, class In>
__global__ void __launch_bounds__(kThreads, 2) matvec_qkv(QkvArguments a) {
    pdl_trigger();
    const int block = blockIdx.x;
    if (block < a.blocks[0]) {
        project_heads<Qq, KV, In>(a, 0, block);
    } else if (block < a.blocks[0] + a.blocks[1]) {
        project_heads<Qk, KV, In>(a, 1, block - a.blocks[0]);
    } else {
        project_heads<Qv, KV, In>(a, 2, block - a.blocks[0] - a.blocks[1]);
    }
}
