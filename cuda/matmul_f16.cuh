// What the products on f16 tensor cores have in common: their arguments, the lifts of a matrix's values,
// the A fragments of a block, and the way from sums to results.
#pragma once
#include "q8.cuh"
#include "quants_f16.cuh"

//   y[t, n] = sum_k W[n, k] x[t, k] (+ bias[n]) (+ residual[t, n]), or with a second matrix `up`
//   neurons[t, n] = silu(sum_k W[n, k] x[t, k]) * sum_k up[n, k] x[t, k], as f16 activations
struct F16Product {
    const uint8_t* w[3];            // one matrix, or up to three above each other; gated: gate, up
    const float *peak, *up_peak;    // (1); of matrices above each other one for all
    const uint8_t* h;               // (T, Kp) f16 and its scale (T): x = h * hs, in half_offset's order
    const float* hs;
    const float *bias, *residual;   // null: none; residual may be y
    float* y;
    uint8_t* neurons;               // (T, Np) f16 and its scale (T), of a gated product
    float* neuron_scale;
    int n, k, tokens, stride;       // n: rows in all, gated of one; stride of y and residual, in floats
    int begins[2];                  // where the second and third matrix begin, in 128 rows
    int gated;
};

// ---- lifts of a matrix's values ------------------------------------------------------------------------
template <class Q>
constexpr bool kAsIs = false;  // values are halves as they stand
template <>
constexpr bool kAsIs<F16> = true;

// What values of BF16 are multiplied by; types in records have it in their scales.
template <class Q>
__device__ inline float value_lift(const float* peak) {
    if constexpr (kAsIs<Q>)
        return 1.0f;
    else
        return lift_of(*peak);
}
// The same of rows g and g + 8 of a fragment.
template <class Q>
struct Lifts {
    float of[2];
    __device__ explicit Lifts(const F16Product& a) : of{value_lift<Q>(a.peak), value_lift<Q>(a.gated ? a.up_peak : a.peak)} {}
};
// Two values of BF16 times a power of two, exact.
__device__ inline uint32_t lifted(uint32_t pair, float by) {
    const __nv_bfloat162 v =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), __float2bfloat162_rn(by));
    return *reinterpret_cast<const uint32_t*>(&v);
}
// Two float32 as halves.
__device__ inline uint32_t half_bits_of(uint32_t x, uint32_t y) {
    return pair_bits(__floats2half2_rn(__uint_as_float(x), __uint_as_float(y)));
}
// What undoes a matrix's lift in its products.
template <class Q>
__device__ inline float undo_lift(const float* peak) {
    if constexpr (Q::kFloat)
        return __fdiv_rn(1.0f, value_lift<Q>(peak));
    else
        return unlift_of<Q>(*peak);
}

// ---- B fragments ----------------------------------------------------------------------------------------
// Where piece `piece` of token `token` of a tile lies in shared memory; a piece is eight halves of K. 64 values of
// `tokens` tokens after each other, 128 bytes each, in which pieces change places by token, so that the same piece of
// eight tokens meets all banks, and two neighbours stay in one sector: wgmma's swizzle of 128 bytes.
__device__ inline int token_offset(unsigned piece, unsigned token, unsigned tokens) {
    return (piece / 8 * tokens + token) * 128 + (piece % 8 ^ token % 8) * 16;
}
// The fragments of both halves of block b of 8 tokens from the tile's `first` on.
template <int Tokens>
__device__ inline void token_fragments(uint32_t (&to)[2][2], const char* tile, int b, int first, int lane) {
    load_matrices<false>(&to[0][0], tile + token_offset(b * 4 + lane / 8, first + lane % 8, Tokens));
}

// ---- A fragments ----------------------------------------------------------------------------------------
// The {S, M} pairs of a block (of each half, kHalf) of rows g and g + 8, as they lie in a table.
template <class Q>
struct ScalePairs {
    static constexpr int kHalves = Q::kHalf ? 2 : 1;
    uint32_t of[2][kHalves];
    __device__ explicit ScalePairs(const uint32_t* from) {
        if constexpr (kHalves == 1) {
            const uint2 s = *reinterpret_cast<const uint2*>(from);
            of[0][0] = s.x, of[1][0] = s.y;
        } else {
            const uint4 s = *reinterpret_cast<const uint4*>(from);
            of[0][0] = s.x, of[0][1] = s.y, of[1][0] = s.z, of[1][1] = s.w;
        }
    }
};
// A lane's part of such a table, four blocks of a chunk by eight rows g: of block lane % 4, row g = lane / 4 (r = 0) or g + 8,
// whose scales are `pair`.
template <class Q>
__device__ inline void store_scales(uint32_t* table, const typename Q::Pair& pair, int r, float lift, int chunk, int lane) {
    constexpr int kHalves = ScalePairs<Q>::kHalves;
    const int p = 2 * (chunk % Q::kChunks) + (lane >> 1) % 2, i = lane % 2;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
        table[((lane % 4 * 8 + lane / 4) * 2 + r) * kHalves + h] =
            half_scale<Q>(scale_of<Q>(pair, p, i, h), minimum_of<Q>(pair, p, i, h), lift);
}
// Row g (r = 0) or g + 8 of the fragments of block b, one each half, from its words ...
template <class Q>
__device__ inline void weight_fragments(uint32_t (&a)[2][4], int r, const typename Q::Lane& l, int b,
                                        const ScalePairs<Q>& scales) {
    uint32_t pairs[2][2];
    half_weights<Q>(pairs, l, b, scales.of[r]);
#pragma unroll
    for (int h = 0; h < 2; ++h) a[h][r] = pairs[h][0], a[h][2 + r] = pairs[h][1];
}
// ... and of one half from its four values of F16 or BF16.
template <class Q>
__device__ inline void value_fragments(uint32_t (&a)[4], int r, uint2 w, const Lifts<Q>& lifts) {
    if constexpr (kAsIs<Q>) {
        a[r] = __byte_perm(w.x, w.y, 0x5410), a[2 + r] = __byte_perm(w.x, w.y, 0x7632);
    } else {
        const uint32_t x = lifted(w.x, lifts.of[r]), y = lifted(w.y, lifts.of[r]);
        a[r] = half_bits_of(x << 16, y << 16);
        a[2 + r] = half_bits_of(x & 0xffff0000u, y & 0xffff0000u);
    }
}

// ---- results --------------------------------------------------------------------------------------------
// y of MTiles x NTiles tiles of 16 rows x 8 tokens; row0 and token0 are the lane's first, those of
// tokens before `end`.
template <class Q, int MTiles, int NTiles>
__device__ inline void write_rows(const float (&acc)[MTiles][NTiles][4], const F16Product& a, int row0, int token0, int end) {
    const float unlift = undo_lift<Q>(a.peak);
#pragma unroll
    for (int n = 0; n < NTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = token0 + n * 8 + i;
            if (token >= end) continue;
            const float scale = __fmul_rn(unlift, a.hs[token]);
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int row = row0 + m * 16 + r * 8;
                    if (row >= a.n) continue;
                    const int64_t at = static_cast<int64_t>(token) * a.stride + row;
                    float v = __fmul_rn(acc[m][n][2 * r + i], scale);
                    if (a.bias) v = __fadd_rn(v, a.bias[row]);
                    if (a.residual) v = __fadd_rn(a.residual[at], v);
                    a.y[at] = v;
                }
        }
}

// Neurons of a gated tile: rows g and g + 8 of a fragment are gate and up. Lanes of values e and
// e + 2 of a four, neighbours in half_offset's order, exchange: each stores both for one token.
template <class Q, int MTiles, int NTiles>
__device__ inline void write_neurons(const float (&acc)[MTiles][NTiles][4], const F16Product& a, int neuron0, int token0, int end) {
    const float gate_unlift = undo_lift<Q>(a.peak), up_unlift = undo_lift<Q>(a.up_peak);
    const int lane = threadIdx.x % kWarp, padded = ceil_div(a.n, 128) * 128;
    const bool second = (lane & 8) != 0;
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
        float gate_scale[2], up_scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = token0 + n * 8 + i;
            const float hs = a.hs[min(token, a.tokens - 1)];
            gate_scale[i] = __fmul_rn(gate_unlift, hs), up_scale[i] = __fmul_rn(up_unlift, hs);
            if (neuron0 == 0 && token < end) a.neuron_scale[token] = kNeuronScale;
        }
#pragma unroll
        for (int m = 0; m < MTiles; ++m) {
            const int neuron = neuron0 + m * 8;
            uint32_t bits[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float v = swiglu_value(__fmul_rn(acc[m][n][i], gate_scale[i]), __fmul_rn(acc[m][n][2 + i], up_scale[i]));
                bits[i] = neuron < a.n ? __half_as_ushort(__float2half_rn(__fmul_rn(v, 1.0f / kNeuronScale))) : 0;
            }
            const uint32_t other = __shfl_xor_sync(kFull, second ? bits[0] : bits[1], 8);
            const int token = token0 + n * 8 + second;
            if (token >= end || neuron >= padded) continue;
            const uint32_t pair = second ? other | bits[1] << 16 : bits[0] | other << 16;
            const int first = neuron & ~2;  // value e of {e, e + 2}
            uint8_t* to = a.neurons + (static_cast<int64_t>(token) * padded + (neuron & ~127) + half_offset(first & 127)) * 2;
            *reinterpret_cast<uint32_t*>(to) = pair;
        }
    }
}

