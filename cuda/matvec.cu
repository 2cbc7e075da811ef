// One row of activations times quantised matrices: the linear layers of a decode step.
//   matvec<Q, In>              y = W x (+ bias) (+ residual)
//   matvec_gate_up<Q, In>      q8 (and float32) of silu(Wg x) * (Wu x)
//   matvec_qkv<Qq,Qk,Qv,KV,In> the three projections, biases, RoPE and the KV store
// Shapes  W (N, K) in records (layout 2, quants.cuh), y (N) float. The input x is, by In,
//         Quantised  one q8 row (layout 1), read through L1: copying it to shared memory first would
//                    hold up the whole block; or
//         Normed     a float row and an RMSNorm weight: every block norms and quantises it itself into
//                    shared memory, with the bits of norm.cu, which costs less than another launch.
// Split   a strip of 8 rows is cut along K into parts of `part_records` records, a divisor of its records;
//         partial sums meet in shared memory once, at the end, and are added there in four chains, in order
//         of K each. The order depends on K and the type alone: fused or not, on any card, equal bits. A block
//         owns one or two runs of whole strips, each contiguous in memory; its warps take their parts in turn
//         and stream them without a barrier.
// Launch  block = 512, dynamic shared and grid: kernels/matvec.py.
// Bytes   N * K / kBlock * kRaw, read once. Q4_K 18944 x 3584: 38.2 MB, 8.9 us at 4.3 TB/s (H200).
//         In flight: 16 warps x kDepth records, about 36 KB a block. Issue slots are the other limit:
//         a warp spends about 140 instructions on a Q4_K record of 1,152 bytes, which an SM receives
//         in 62 clocks; so two blocks of 16 warps an SM, and few instructions around the products.
// Time    inside a step with dependent launch (H200, 2026-11-30): 7B Q4_K gate/up 76.4 MB 26 us, q/k/v 9 us,
//         o 3.8 us, down 17 us (47 MB, half of the layers Q6_K), Q6_K head 447 MB 105 us, 4.26 TB/s;
//         0.5B q/k/v 2.9, o 1.5, gate/up 4.4, down 3.1, Q8_0 head 145 MB 38 us.
// Why not one row per block (as is common): its last reduction and its launch cost more than its 2 KB.
#include "norm.cuh"
#include "q8.cuh"
#include "quants.cuh"
#include "rope.cuh"
#include "state.cuh"

constexpr int kThreads = kNormThreads;  // twice on an SM: 64 registers a thread
constexpr int kWarps = kThreads / kWarp;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1000)
constexpr int kBlocks = 1;  // of an SM: 64 registers spill there
#else
constexpr int kBlocks = 2;
#endif

struct Input {
    const int8_t* qs;         // Quantised: (Kp), ds (Kp / 32)
    const GroupScale* ds;
    const float* scale;       // factor of the row; null: 1
    const float *x, *weight;  // Normed: (K) each
    float eps;
    int k, part_records;
};

// How a block gets its row: `before` what may start before the wait, `take` the rest, `factor` the row's
// factor when all sums are made. A warp reads it by `values` (two times 16 bytes of a lane), `scales` (d
// of a chunk's four groups) and `group_sum` (d times the sum of values 0-15, 16-31 of a group). `memory`
// is the shared memory that take() leaves the row in.
struct Quantised {
    static constexpr int kWeights = 0;
    const int8_t* qs;
    const GroupScale* ds;
    __device__ static void before(const Input&, float*) {}
    __device__ static Quantised take(const Input& in, char*, int, float*, float* partial) {
        if (in.scale && threadIdx.x == 0) copy_async(partial, in.scale);
        return Quantised{in.qs, in.ds};
    }
    __device__ static float factor(const Input& in, const float* partial) { return in.scale ? *partial : 1.0f; }
    __device__ uint4 values(int chunk, int t, int i) const { return load_cached16(qs + chunk * 128 + t * 32 + i * 16); }
    __device__ float4 scales(int chunk) const {
        const GroupScale* s = ds + chunk * 4;
        return make_float4(s[0].d, s[1].d, s[2].d, s[3].d);
    }
    __device__ float2 group_sum(int group) const {
        const GroupScale s = ds[group];
        return make_float2(__fmul_rn(s.d, static_cast<float>(s.lo)), __fmul_rn(s.d, static_cast<float>(s.hi)));
    }
};
struct Normed {
    static constexpr int kWeights = 1;
    const char* qs;      // (Kp)
    const float* d;      // (Kp / 32)
    const float2* sums;  // (Kp / 32)
    __device__ static void before(const Input& in, float* weight) {
#pragma unroll 1
        for (int i = threadIdx.x * 4; i < in.k; i += kThreads * 4) copy_async16(weight + i, in.weight + i);
        copy_async_commit();
    }
    __device__ static Normed take(const Input& in, char* memory, int chunks, float* weight, float* partial) {
        float* d = reinterpret_cast<float*>(memory + chunks * 128);
        float2* sums = reinterpret_cast<float2*>(d + chunks * 4);
        copy_async_wait<0>();  // of the weights, a thread reads what it has copied itself
        weighted_row(in.x, weight, in.k, chunks * 128, partial, [&](int i, float4 v) {
            const Quad quad = quantize_quad(v);
            *reinterpret_cast<uint32_t*>(memory + q8_word_offset(i)) = quad.word;
            if ((i & 31) != 0) return;
            d[i >> 5] = quad.scale.d;
            sums[i >> 5] = make_float2(__fmul_rn(quad.scale.d, static_cast<float>(quad.scale.lo)),
                                       __fmul_rn(quad.scale.d, static_cast<float>(quad.scale.hi)));
        });
        __syncthreads();
        return Normed{memory, d, sums};
    }
    __device__ static float factor(const Input& in, const float* partial) { return row_rstd(partial, in.k, in.eps); }
    __device__ uint4 values(int chunk, int t, int i) const { return load_shared16(qs + chunk * 128 + t * 32 + i * 16); }
    __device__ float4 scales(int chunk) const { return *reinterpret_cast<const float4*>(d + chunk * 4); }
    __device__ float2 group_sum(int group) const { return sums[group]; }
};

// acc + the lane's part of one record times the row; `chunk` is the record's first.
template <class Q, class In>
__device__ inline float dot_record(const typename Q::Lane& l, const In& x, int chunk, int t, float acc) {
    float sum = 0.0f, least = 0.0f;
#pragma unroll
    for (int c = 0; c < Q::kChunks; ++c) {
        const uint4 x0 = x.values(chunk + c, t, 0), x1 = x.values(chunk + c, t, 1);
        const float4 d4 = x.scales(chunk + c);
        const uint32_t xs[4][2] = {{x0.x, x0.y}, {x0.z, x0.w}, {x1.x, x1.y}, {x1.z, x1.w}};
        const float d[4] = {d4.x, d4.y, d4.z, d4.w};
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
            float scale = d[b];
            if constexpr (!Q::kInteger) scale = __fmul_rn(Q::scale(l, c, b, 0), scale);
            sum = fmaf(static_cast<float>(dot), scale, sum);
        }
        if constexpr (Q::kMin) {  // the four lanes of a row take one block's minimum each
            const float2 of = x.group_sum((chunk + c) * 4 + t);
            if constexpr (Q::kHalf) {
                least = fmaf(static_cast<float>(Q::int_min(l, c, t, 0)), of.x, least);
                least = fmaf(static_cast<float>(Q::int_min(l, c, t, 1)), of.y, least);
            } else if constexpr (Q::kInteger) {
                least = fmaf(static_cast<float>(Q::int_min(l, c, t, 0)), __fadd_rn(of.x, of.y), least);
            } else {
                least = fmaf(Q::minimum(l, c, t, 0), __fadd_rn(of.x, of.y), least);
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

// A block's records: `parts` parts, the first `split` of them from `first` on, the others from `second`
// on, each run contiguous.
struct Runs {
    const uint8_t *first, *second;
    int split, parts;
};

// Partial sums of every part: sums[part * 8 + row of its strip]. The first loads start before the wait
// for the input. `addends.before` and `.after` start asynchronous copies of what the end will need, before
// the wait and after it. Ends with a barrier, all that and `partial`, from which In::factor makes the row's
// factor, in shared memory.
template <class Q, class In, int Depth = Q::kDepth, class Addends>
__device__ void part_sums(const Runs& runs, const Input& in, float* sums, float* partial, char* row_memory,
                          Addends& addends) {
    const int lane = threadIdx.x % kWarp;
    const int warp = __shfl_sync(kFull, threadIdx.x / kWarp, 0);  // the same for all lanes, and known to be
    const int records = ceil_div(in.k, Q::kRecK), strip_parts = records / in.part_records;
    const int part_bytes = in.part_records * Q::kRecord;

    // the load side runs Depth records ahead of the use side
    int ahead = warp, left = in.part_records;
    auto start = [&](int part) {
        const uint8_t* run = part < runs.split ? runs.first : runs.second - static_cast<int64_t>(runs.split) * part_bytes;
        return run + static_cast<int64_t>(part) * part_bytes;
    };
    const uint8_t* at = start(ahead);
    auto load = [&](typename Q::Lane& l) {
        if (ahead >= runs.parts) return;
        l = Q::template load<Streamed>(at, lane);
        at += Q::kRecord;
        if (--left == 0) left = in.part_records, ahead += kWarps, at = start(ahead);
    };
    typename Q::Lane ring[Depth];
#pragma unroll
    for (int i = 0; i < Depth; ++i) load(ring[i]);
    In::before(in, sums);
    addends.before();
    pdl_wait();
    addends.after();
    const In row = In::take(in, row_memory, records * Q::kChunks, sums, partial);
    copy_async_commit();

    float acc = 0.0f;
    float* out = sums + warp * 8 + (lane >> 2);
    const int step = kWarps % strip_parts;
    int part = warp, strip_part = warp % strip_parts, record = strip_part * in.part_records, rest = in.part_records;
    while (part < runs.parts) {
#pragma unroll
        for (int i = 0; i < Depth; ++i) {
            if (part >= runs.parts) break;
            acc = dot_record<Q, In>(ring[i], row, record * Q::kChunks, lane & 3, acc);
            load(ring[i]);
            ++record;
            if (--rest == 0) {
                acc = __fadd_rn(acc, __shfl_xor_sync(kFull, acc, 1));
                acc = __fadd_rn(acc, __shfl_xor_sync(kFull, acc, 2));
                if ((lane & 3) == 0) *out = acc;
                out += kWarps * 8;
                acc = 0.0f, rest = in.part_records, part += kWarps;
                strip_part += step;
                if (strip_part >= strip_parts) strip_part -= strip_parts;
                record = strip_part * in.part_records;
            }
        }
    }
    copy_async_wait<0>();
    __syncthreads();
}

// Row `row` of the block, counted over its strips, of what part_sums left. One chain of additions, 74 of them in
// down of the 7B, would be longer than all else at the end.
template <class Q>
__device__ inline float row_sum(const float* sums, const Input& in, int row) {
    const int strip_parts = ceil_div(in.k, Q::kRecK) / in.part_records;
    const float* p = sums + (row >> 3) * strip_parts * 8 + (row & 7);
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = 0; i < strip_parts; i += 4) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] = __fadd_rn(sum[j], i + j < strip_parts ? p[(i + j) * 8] : 0.0f);
    }
    return __fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3]));
}

// Bytes of a strip, and parts of it.
template <class Q>
struct Strip {
    int64_t bytes;
    int parts;
    __device__ explicit Strip(const Input& in)
        : bytes(static_cast<int64_t>(ceil_div(in.k, Q::kRecK)) * Q::kRecord),
          parts(ceil_div(in.k, Q::kRecK) / in.part_records) {}
};
// Where a normed row lies in shared memory: behind the sums, or the norm's weights before them.
template <class In>
__device__ inline char* row_memory(const Input& in, int parts) {
    return shared_bytes() + max(parts * 32, in.k * static_cast<int>(sizeof(float)) * In::kWeights);
}

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
    __device__ void after() {
        if (inside && out.residual) copy_async(residual, out.residual + row);
    }
};

// A block has `strips` strips, the last one what is left.
template <class Q, class In>
__global__ void __launch_bounds__(kThreads, kBlocks) matvec(const uint8_t* w, Input in, Output out, int strips) {
    pdl_trigger();
    __shared__ float bias[kThreads], residual[kThreads], partial[kWarps];
    float* sums = reinterpret_cast<float*>(shared_bytes());
    const Strip<Q> strip(in);
    const int first = blockIdx.x * strips, count = min(strips, ceil_div(out.n, 8) - first), t = threadIdx.x;
    const int row0 = first * 8, rows = min(count * 8, out.n - row0);
    const uint8_t* from = w + first * strip.bytes;
    RowAddends addends{out, bias + t, residual + t, row0 + t, t < rows};
    part_sums<Q, In>(Runs{from, from, 0, count * strip.parts}, in, sums, partial,
                     row_memory<In>(in, strips * strip.parts), addends);
    if (t >= rows) return;
    const float scale = In::factor(in, partial);
    for (int r = t; r < rows; r += kThreads) {
        float v = __fmul_rn(row_sum<Q>(sums, in, r), scale);
        if (out.bias) v = __fadd_rn(v, r == t ? bias[t] : out.bias[row0 + r]);
        if (out.residual) v = __fadd_rn(r == t ? residual[t] : out.residual[row0 + r], v);
        out.y[row0 + r] = v;
    }
}

struct Nothing {
    __device__ void before() {}
    __device__ void after() {}
};

//   gate, up (N, K)   qs_out (Np), ds_out (Np / 32): q8 row of N values, y (N) float; null: not written
// A block makes 32 neurons, four strips of each matrix: one group of the q8 row. Grid = Np / 32; strips
// past the last are other strips again, whose sums are not used.
template <class Q, class In>
__global__ void __launch_bounds__(kThreads, kBlocks)
matvec_gate_up(const uint8_t* gate, const uint8_t* up, Input in, int8_t* qs_out, GroupScale* ds_out, float* y, int n) {
    pdl_trigger();
    __shared__ float partial[kWarps];
    float* sums = reinterpret_cast<float*>(shared_bytes());
    const Strip<Q> strip(in);
    const int strips = ceil_div(n, 8), first = min(static_cast<int>(blockIdx.x) * 4, strips - 1);
    const int count = min(4, strips - first), parts = count * strip.parts;
    const Runs runs{gate + first * strip.bytes, up + first * strip.bytes, parts, 2 * parts};
    Nothing nothing;
    part_sums<Q, In>(runs, in, sums, partial, row_memory<In>(in, 8 * strip.parts), nothing);
    if (threadIdx.x >= kWarp) return;
    const float scale = In::factor(in, partial);
    const int lane = threadIdx.x, neuron = blockIdx.x * 32 + lane;
    float v = 0.0f;
    if (neuron < n) {
        v = swiglu_value(__fmul_rn(row_sum<Q>(sums, in, lane), scale),
                         __fmul_rn(row_sum<Q>(sums, in, count * 8 + lane), scale));
        if (y) y[neuron] = v;
    }
    const int l = lane % 8 * 4;  // the first eight lanes take four neurons each, the others the same again
    const float4 four = make_float4(__shfl_sync(kFull, v, l), __shfl_sync(kFull, v, l + 1), __shfl_sync(kFull, v, l + 2),
                                    __shfl_sync(kFull, v, l + 3));
    if (qs_out) quantize4(four, blockIdx.x * 32 + l, lane < 8, qs_out, ds_out);
}

constexpr int kMostPairs = 64;

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

struct QkvArguments {
    const uint8_t* w[3];    // q (H*E, K), k (G*E, K), v (G*E, K)
    const float* bias[3];   // (H*E), (G*E), (G*E)
    Input in;
    const float2* rope;     // (S, E/2) cos, sin
    const int* position;    // of this token
    float* q;               // (H*E)
    void *k_cache, *v_cache;  // (S, G, E) of this layer
    int heads, kv_heads, head_dim, context;
    int strips;             // of a block, and as many RoPE partners: a divisor of E / 16
    int part_records[3];
};

// Biases and rotation of a thread's pair of rows (first, first + E/2) of q, k or v, under way while the
// sums are made. The rotation is that of the position as it is before the wait, so that its reading is not in
// the way of a product. Only in the first layer can the wait be for a kernel that moves it: read again.
struct PairAddends {
    const QkvArguments& a;
    float* bias;  // shared: two, then the rotation
    float2* cs;
    int* position;  // before the wait, and after it
    int which, first;
    bool inside;
    __device__ const float2* rotation_at(int where) const {
        const unsigned row = min(static_cast<unsigned>(where), static_cast<unsigned>(a.context - 1));
        return a.rope + static_cast<size_t>(row) * (a.head_dim / 2) + first % a.head_dim;
    }
    __device__ void before() {
        if (!inside) return;
        copy_async(bias, a.bias[which] + first);
        copy_async(bias + 1, a.bias[which] + first + a.head_dim / 2);
        position[0] = read_position(a.position);
        if (which != 2) copy_async(cs, rotation_at(position[0]));
    }
    __device__ void after() {
        if (inside) copy_async(position + 1, a.position);
    }
    __device__ float2 rotation() const { return position[1] == position[0] ? *cs : *rotation_at(position[1]); }
};

// A block makes `strips` strips of a head and those of their RoPE partners, E/2 rows further on.
template <class Q, class KV, class In>
__device__ void project_heads(const QkvArguments& a, int which, int block) {
    __shared__ float bias[2 * kMostPairs];
    __shared__ float2 rotation[kMostPairs];
    __shared__ int positions[2 * kMostPairs];
    __shared__ float partial[kWarps];
    float* sums = reinterpret_cast<float*>(shared_bytes());
    Input in = a.in;
    in.part_records = a.part_records[which];
    const Strip<Q> strip(in);
    const int half = a.head_dim / 16, head = block * a.strips / half, t = threadIdx.x;  // strips of half a head
    const int strip0 = head * 2 * half + block * a.strips % half, pairs = a.strips * 8, parts = a.strips * strip.parts;
    const int first = strip0 * 8 + t, second = first + a.head_dim / 2;
    const uint8_t* from = a.w[which] + strip0 * strip.bytes;
    PairAddends addends{a, bias + 2 * t, rotation + t, positions + 2 * t, which, first, t < pairs};
    part_sums<Q, In, Q::kPairDepth>(Runs{from, from + half * strip.bytes, parts, 2 * parts}, in, sums, partial,
                                    row_memory<In>(in, 2 * parts), addends);
    if (t >= pairs) return;
    const float scale = In::factor(in, partial);
    const float x0 = __fmul_rn(row_sum<Q>(sums, in, t), scale), x1 = __fmul_rn(row_sum<Q>(sums, in, pairs + t), scale);
    const float b0 = bias[2 * t], b1 = bias[2 * t + 1];
    const float2 v = which == 2 ? make_float2(__fadd_rn(x0, b0), __fadd_rn(x1, b1))
                                : rope_pair(x0, x1, b0, b1, addends.rotation());
    const int position = positions[2 * t + 1];
    if (which == 0) {
        a.q[first] = v.x, a.q[second] = v.y;
    } else if (position < a.context) {
        KV* cache = static_cast<KV*>(which == 1 ? a.k_cache : a.v_cache) +
                    static_cast<int64_t>(position) * a.kv_heads * a.head_dim;
        store_kv(cache + first, v.x);
        store_kv(cache + second, v.y);
    }
}

// Launch  grid = (H + 2 G) E / 16 / strips blocks: those of q, then k, then v.
template <class Qq, class Qk, class Qv, class KV, class In>
__global__ void __launch_bounds__(kThreads, kBlocks) matvec_qkv(QkvArguments a) {
    pdl_trigger();
    const int block = blockIdx.x, each = 16 * a.strips;
    const int q = a.heads * a.head_dim / each, k = a.kv_heads * a.head_dim / each;
    const int which = block < q ? 0 : block < q + k ? 1 : 2, of = block - (which == 0 ? 0 : which == 1 ? q : q + k);
    if constexpr (is_same<Qq, Qk> && is_same<Qk, Qv>) {  // one body, as the code runs cold once a layer
        project_heads<Qq, KV, In>(a, which, of);
    } else if (which == 2) {
        project_heads<Qv, KV, In>(a, 2, of);
    } else if constexpr (is_same<Qq, Qk>) {
        project_heads<Qq, KV, In>(a, which, of);
    } else if (which == 0) {
        project_heads<Qq, KV, In>(a, 0, of);
    } else {
        project_heads<Qk, KV, In>(a, 1, of);
    }
}
