// Attention, what a warp of the prefill does: stage key tiles in shared memory, 16 query rows against a
// tile's keys, running softmax. attention.cu has the shapes and the order of things.
#pragma once

#include "common.cuh"

constexpr int kThreads = 128;  // of a block of the prefill
constexpr int kKeys = 64;      // keys of a tile of the prefill
constexpr float kLog2e = 1.4426950408889634f;

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

// What exponents are taken against: a row that has seen no key has no maximum, and all its weights
// exp2(-inf - 0) are zero instead of exp2(-inf + inf) = NaN.
__device__ inline float exponent_base(float top) { return top == minus_infinity() ? 0.0f : top; }

__device__ inline uint32_t pack_half2(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

// ---- staging ------------------------------------------------------------------------------------
// Offset in halves of 8 values of a row: rows of 128 or 256 bytes, their 16-byte chunks swizzled so
// that the 8 rows of an 8x8 matrix lie in different banks.
template <int E>
__device__ inline int tile_offset(int row, int chunk) {
    return row * E + ((chunk ^ (row & 7)) << 3);
}

__device__ inline void copy_chunk(__half* to, const __half* from, bool valid) {
    copy_async16(to, from, valid);
}
__device__ inline void copy_chunk(__half* to, const float* from, bool valid) {
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (valid) {
        const float4 a = reinterpret_cast<const float4*>(from)[0];
        const float4 b = reinterpret_cast<const float4*>(from)[1];
        packed = make_uint4(pack_half2(a.x, a.y), pack_half2(a.z, a.w), pack_half2(b.x, b.y),
                            pack_half2(b.z, b.w));
    }
    *reinterpret_cast<uint4*>(to) = packed;
}

// Keys first..first + 63 of one kv head. Rows at or past `length` hold anything and become zeros.
template <typename KV, int E>
__device__ inline void stage_tile(__half* tile, const KV* head, int first, int length,
                                  int64_t stride) {
    constexpr int kChunks = E / 8, kStep = kThreads / kChunks;
    static_assert(kStep % 8 == 0, "a thread's rows share their swizzle");
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    __half* to = tile + tile_offset<E>(row, chunk);
    const KV* from = head + (first + row) * stride + chunk * 8;
#pragma unroll
    for (int step = 0; step < kKeys; step += kStep)
        copy_chunk(to + step * E, from + step * stride, first + row + step < length);
}

// The rows of a tile: (token, head of the group) pairs of one kv head.
struct Place {
    int first_row, rows;       // of all T*R; `rows` of the tile exist
    int tokens, group, heads;  // T, R, H
    int first_head;            // query head of the group's head 0

    // One token, decode, spares the division: its latency is in every layer's path.
    __device__ int token(int row) const { return tokens == 1 ? 0 : (first_row + row) / group; }
    __device__ int head(int row) const { return head(row, token(row)); }
    __device__ int head(int row, int token) const {
        return first_head + first_row + row - token * group;
    }
    // of the row's E values in (T, H, E)
    __device__ int64_t index(int row) const {
        return static_cast<int64_t>(token(row)) * heads + head(row);
    }
};

// ---- one warp: 16 rows against its keys of a tile -----------------------------------------------
template <int E>
struct Rows {
    float o[E / 8][4];     // sums of weights * v: d fragments
    float top[2], sum[2];  // of rows lane/4 and lane/4 + 8; `sum` is this lane's share
    int token[2];          // their tokens
};

// `tokens` of the warp's rows.
template <int E>
__device__ inline void start_rows(Rows<E>& rows, const int* tokens) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        rows.token[half] = tokens[threadIdx.x % kWarp / 4 + 8 * half];
        rows.top[half] = minus_infinity();
        rows.sum[half] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < E / 8; ++n)
        rows.o[n][0] = rows.o[n][1] = rows.o[n][2] = rows.o[n][3] = 0.0f;
}

template <int E>
__device__ inline float query_scale() {
    return kLog2e * (E == 64 ? 0.125f : 0.08838834764831845f);  // log2(e)/sqrt(E)
}

// The lane's part of its two rows as they lie in memory: asked for with the key tiles, and packed while
// those are under way.
template <int E>
struct Queries {
    float2 x[2][E / 8];
};

// Rows that the tile lacks repeat its last.
template <int E>
__device__ inline void load_queries(Queries<E>& queries, const float* q, const Place& place,
                                    const Rows<E>& rows, int first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = min(first + static_cast<int>(threadIdx.x) % kWarp / 4 + 8 * half, place.rows - 1);
        const int token = rows.token[half];
        const int64_t index = static_cast<int64_t>(token) * place.heads + place.head(row, token);
        const float* from = q + index * E + threadIdx.x % 4 * 2;
#pragma unroll
        for (int step = 0; step < E / 8; ++step)
            queries.x[half][step] = *reinterpret_cast<const float2*>(from + step * 8);
    }
}

// The A fragments of 16 rows.
template <int E>
__device__ inline void pack_queries(uint32_t packed[E / 16][4], const Queries<E>& queries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 0; step < E / 8; ++step) {
            const float2 x = queries.x[half][step];
            packed[step / 2][half + step % 2 * 2] =
                pack_half2(x.x * query_scale<E>(), x.y * query_scale<E>());
        }
    }
}

// s = q k^T over the KEYS keys of a tile, with the A fragments of q.
template <int E, int KEYS>
__device__ inline void scores(float s[KEYS / 8][4], const uint32_t q[E / 16][4],
                              const __half* tile) {
    const int lane = threadIdx.x % kWarp;
    const int row = lane / 16 * 8 + lane % 8;  // two matrices of keys 0-7, two of 8-15
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < E / 16; ++step) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            uint32_t k[4];
            load_matrices<false>(k, tile + tile_offset<E>(row + n * 8, step * 2 + lane / 8 % 2));
            mma_f16(s[n], q[step], k);
            mma_f16(s[n + 1], q[step], k + 2);
        }
    }
}

// Hide the keys behind each row's query; the first is `key` behind token 0.
template <int E, int KEYS>
__device__ inline void mask(float s[KEYS / 8][4], const Rows<E>& rows, int key) {
    key += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (key + n * 8 + i % 2 > rows.token[i / 2]) s[n][i] = minus_infinity();
    }
}

// Turn scores into weights against the running maximum and scale what was summed before.
template <int E, int KEYS>
__device__ inline void weigh(float s[KEYS / 8][4], Rows<E>& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = rows.top[half];
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
            top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(kFull, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFull, top, 2));
        const float base = exponent_base(top);
        const float shrink = exp2_fast(rows.top[half] - base);
        float sum = rows.sum[half] * shrink;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
            s[n][2 * half] = exp2_fast(s[n][2 * half] - base);
            s[n][2 * half + 1] = exp2_fast(s[n][2 * half + 1] - base);
            sum += s[n][2 * half] + s[n][2 * half + 1];
        }
        rows.top[half] = top;
        rows.sum[half] = sum;
#pragma unroll
        for (int n = 0; n < E / 8; ++n) {
            rows.o[n][2 * half] *= shrink;
            rows.o[n][2 * half + 1] *= shrink;
        }
    }
}

// o += weights * v. The weights' d fragments are the A fragments of the product as they lie.
template <int E, int KEYS>
__device__ inline void add_values(Rows<E>& rows, const float s[KEYS / 8][4], const __half* tile) {
    const int lane = threadIdx.x % kWarp;
    const int row = lane / 8 % 2 * 8 + lane % 8;  // keys 0-7, 8-15 of dims 0-7, then 8-15
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
        const float *low = s[n], *high = s[n + 1];  // keys 0-7 and 8-15
        const uint32_t p[4] = {pack_half2(low[0], low[1]), pack_half2(low[2], low[3]),
                               pack_half2(high[0], high[1]), pack_half2(high[2], high[3])};
#pragma unroll
        for (int dims = 0; dims < E / 8; dims += 2) {
            uint32_t v[4];
            load_matrices<true>(v, tile + tile_offset<E>(row + n * 8, dims + lane / 16));
            mma_f16(rows.o[dims], p, v);
            mma_f16(rows.o[dims + 1], p, v + 2);
        }
    }
}

// Of all lanes of the row.
template <int E>
__device__ inline float row_sum(const Rows<E>& rows, int half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(kFull, sum, 1);
    return sum + __shfl_xor_sync(kFull, sum, 2);
}

// Sums, maxima and weight sums of the warp's 16 rows to shared memory: rows `stride` floats apart.
template <int E>
__device__ inline void store_rows(const Rows<E>& rows, float* sums, float2* stats, int stride) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        const float sum = row_sum(rows, half);
        if (lane % 4 == 0) stats[row] = make_float2(rows.top[half], sum);
#pragma unroll
        for (int n = 0; n < E / 8; ++n)
            *reinterpret_cast<float2*>(sums + row * stride + n * 8 + lane % 4 * 2) =
                make_float2(rows.o[n][2 * half], rows.o[n][2 * half + 1]);
    }
}
