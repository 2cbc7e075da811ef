// Attention, what a warp of the decode does: 8 query rows against 16 keys of its own at a time. Keys are
// the rows of the products and queries the columns, so that no half of a tile is empty:
// S^T = K Q^T, then O^T = V^T P^T. attention.cu has the order of things.
#pragma once

#include "attention.cuh"

constexpr int kHeads = 8;      // query rows of a block
constexpr int kWarpKeys = 16;  // keys of a tile

// A warp's own tile: its keys, then its values; those at or past `length` become zeros. A lane copies
// the same chunks of a slot each time.
template <typename KV, int E>
__device__ inline void stage_own(__half* slot, const KV* k, const KV* v, int tile, int length,
                                 int64_t stride) {
    constexpr int kChunks = E / 8, kStep = kWarp / kChunks;
    const int lane = threadIdx.x % kWarp, chunk = lane % kChunks;
    const int first = tile * kWarpKeys + lane / kChunks;
    const int64_t offset = first * stride + chunk * 8;
    k += offset;
    v += offset;
#pragma unroll
    for (int row = 0; row < kWarpKeys; row += kStep) {
        __half* at = slot + tile_offset<E>(row + lane / kChunks, chunk);
        copy_chunk(at, k + row * stride, first + row < length);
        copy_chunk(at + kWarpKeys * E, v + row * stride, first + row < length);
    }
}

// The rows that a block shares, to shared memory as rows of a key tile lie. What needs no data is done
// at construction, before the wait.
template <int E, int THREADS>
struct SharedQueries {
    static constexpr int kUnits = kHeads * (E / 4), kEach = (kUnits + THREADS - 1) / THREADS;
    int64_t from[kEach];  // of four values, below zero: the row does not exist

    __device__ explicit SharedQueries(const Place& place) {
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = threadIdx.x + n * THREADS, row = i / (E / 4);
            from[n] = row < place.rows ? place.index(row) * E + i % (E / 4) * 4 : -1;
        }
    }
    __device__ void stage(__half* to, const float* q) const {
        float4 x[kEach];
#pragma unroll
        for (int n = 0; n < kEach; ++n)
            x[n] = from[n] < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                               : *reinterpret_cast<const float4*>(q + from[n]);
        const float scale = query_scale<E>();
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = threadIdx.x + n * THREADS, row = i / (E / 4), dim = i % (E / 4) * 4;
            if (i >= kUnits) break;
            *reinterpret_cast<uint2*>(to + tile_offset<E>(row, dim / 8) + dim % 8) = make_uint2(
                pack_half2(x[n].x * scale, x[n].y * scale), pack_half2(x[n].z * scale, x[n].w * scale));
        }
    }
};

template <int E>
struct Columns {
    uint32_t q[E / 16][2];  // B fragments
    float o[E / 16][4];     // sums of v * weights: d fragments, dims lane/4 and lane/4 + 8
    float top[2], sum[2];   // of query rows lane%4 * 2 and the next; `sum` is this lane's share
    int query[2];           // their positions
};

template <int E>
__device__ inline void start_columns(Columns<E>& columns, const Place& place, int position) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        columns.query[h] = position + place.token(threadIdx.x % 4 * 2 + h);
        columns.top[h] = minus_infinity();
        columns.sum[h] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < E / 16; ++n)
        columns.o[n][0] = columns.o[n][1] = columns.o[n][2] = columns.o[n][3] = 0.0f;
}

template <int E>
__device__ inline void load_columns(Columns<E>& columns, const __half* queries) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 0; step < E / 16; step += 2) {
        uint32_t q[4];
        load_matrices<false>(q, queries + tile_offset<E>(lane % 8, step * 2 + lane / 8));
        columns.q[step][0] = q[0];
        columns.q[step][1] = q[1];
        columns.q[step + 1][0] = q[2];
        columns.q[step + 1][1] = q[3];
    }
}

// s = K q^T: keys lane/4 and lane/4 + 8, query rows lane%4 * 2 and the next. Even and odd steps are
// summed apart, which halves the chain of products that wait for one another.
template <int E>
__device__ inline void score_keys(float s[4], const Columns<E>& columns, const __half* keys) {
    const int lane = threadIdx.x % kWarp;
    float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll
    for (int step = 0; step < E / 16; ++step) {
        uint32_t k[4];
        load_matrices<false>(k, keys + tile_offset<E>(lane % 16, step * 2 + lane / 16));
        mma_f16(step % 2 ? odd : s, k, columns.q[step]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += odd[i];
}

// Hide the keys behind each row's query; `key` is the position of the first.
template <int E>
__device__ inline void mask_keys(float s[4], const Columns<E>& columns, int key) {
    key += threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (key + i / 2 * 8 > columns.query[i % 2]) s[i] = minus_infinity();
}

// Turn scores into weights against the running maximum and scale what was summed before.
template <int E>
__device__ inline void weigh_keys(float s[4], Columns<E>& columns) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = fmaxf(columns.top[h], fmaxf(s[h], s[h + 2]));
#pragma unroll
        for (int m = 4; m < kWarp; m <<= 1) top = fmaxf(top, __shfl_xor_sync(kFull, top, m));
        const float base = exponent_base(top), shrink = exp2_fast(columns.top[h] - base);
        s[h] = exp2_fast(s[h] - base);
        s[h + 2] = exp2_fast(s[h + 2] - base);
        columns.top[h] = top;
        columns.sum[h] = columns.sum[h] * shrink + (s[h] + s[h + 2]);
#pragma unroll
        for (int n = 0; n < E / 16; ++n) {
            columns.o[n][h] *= shrink;
            columns.o[n][h + 2] *= shrink;
        }
    }
}

// o += V^T weights. The weights' d fragments become the B fragments through `turn`, 16 rows of 8 halves
// of the warp's shared memory.
template <int E>
__device__ inline void add_keys(Columns<E>& columns, const float s[4], __half* turn,
                                const __half* values) {
    const int lane = threadIdx.x % kWarp;
    uint32_t* words = reinterpret_cast<uint32_t*>(turn);
    words[lane] = pack_half2(s[0], s[1]);
    words[lane + kWarp] = pack_half2(s[2], s[3]);
    __syncwarp();
    uint32_t p[4];  // matrices of keys 0-7 and 8-15, twice
    load_matrices<true>(p, turn + lane % 16 * 8);
#pragma unroll
    for (int n = 0; n < E / 16; ++n) {
        uint32_t v[4];
        load_matrices<true>(
            v, values + tile_offset<E>(lane / 16 * 8 + lane % 8, n * 2 + lane / 8 % 2));
        mma_f16(columns.o[n], v, p);
    }
}

// Sums, maxima and weight sums of the warp's 8 rows to shared memory: rows `stride` floats apart.
template <int E>
__device__ inline void store_rows(const Columns<E>& columns, float* sums, float2* stats,
                                  int stride) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = lane % 4 * 2 + h;
        float sum = columns.sum[h];
#pragma unroll
        for (int m = 4; m < kWarp; m <<= 1) sum += __shfl_xor_sync(kFull, sum, m);
        if (lane < 4) stats[row] = make_float2(columns.top[h], sum);
#pragma unroll
        for (int n = 0; n < E / 16; ++n) {
            sums[row * stride + n * 16 + lane / 4] = columns.o[n][h];
            sums[row * stride + n * 16 + lane / 4 + 8] = columns.o[n][h + 2];
        }
    }
}
