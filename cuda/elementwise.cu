// What the unfused path does between matrices.
// swiglu:   y = silu(gate) * up, as q8 activations, f16 activations and/or float32.   gate, up (T, K)
//           float, row stride `stride` floats;   qs (T, Kp) with ds (T, Kp/32), h (T, Kp) f16 with
//           hs (T), y (T, K); null: not written
// quantize: the same for a row as it is (y = x).
// add:      out = a + b
// pick:     row *row of up to kPicked arrays, each to an array of one row
// Launch  swiglu, quantize: grid = (ceil(Kp/1024), T), block = 256, four values a thread.
//         add: grid = ceil(n/1024), block = 256.   pick: grid = arrays, block = 256.
// Bytes   each input and output once.
#include "q8.cuh"
#include "quants_f16.cuh"

template <bool Gated>
__device__ void quantize_row(const float* gate, const float* up, int stride, int8_t* qs, GroupScale* ds,
                             uint8_t* h, float* hs, float* y, int k) {
    const int padded = ceil_div(k, 128) * 128, i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    const int64_t row = blockIdx.y;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < k) {
        v = *reinterpret_cast<const float4*>(gate + row * stride + i);
        if constexpr (Gated) {
            float4 u = *reinterpret_cast<const float4*>(up + row * stride + i);
            v = make_float4(swiglu_value(v.x, u.x), swiglu_value(v.y, u.y), swiglu_value(v.z, u.z),
                            swiglu_value(v.w, u.w));
        }
        if (y) *reinterpret_cast<float4*>(y + row * k + i) = v;
    }
    if (h && i < padded) store_halves(h + row * padded * 2, i, v, 1.0f / kNeuronScale);
    if (h && i == 0) hs[row] = kNeuronScale;
    if (qs) quantize4(v, i, i < padded, qs + row * padded, ds + row * (padded / 32));
}

__global__ void __launch_bounds__(256) swiglu(const float* gate, const float* up, int stride, int8_t* qs, GroupScale* ds,
                                               uint8_t* h, float* hs, float* y, int k) {
    pdl_trigger();
    pdl_wait();
    quantize_row<true>(gate, up, stride, qs, ds, h, hs, y, k);
}

__global__ void __launch_bounds__(256) quantize(const float* x, int8_t* qs, GroupScale* ds, int k) {
    pdl_trigger();
    pdl_wait();
    quantize_row<false>(x, nullptr, k, qs, ds, nullptr, nullptr, nullptr, k);
}

__global__ void __launch_bounds__(256) add(const float* a, const float* b, float* out, int n) {
    pdl_trigger();
    pdl_wait();
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i < n) {
        float4 u = *reinterpret_cast<const float4*>(a + i), v = *reinterpret_cast<const float4*>(b + i);
        *reinterpret_cast<float4*>(out + i) =
            make_float4(__fadd_rn(u.x, v.x), __fadd_rn(u.y, v.y), __fadd_rn(u.z, v.z), __fadd_rn(u.w, v.w));
    }
}

constexpr int kPicked = 6;
struct Picked {
    const uint32_t* from[kPicked];
    uint32_t* to[kPicked];
    int words[kPicked];  // of a row
};

__global__ void __launch_bounds__(256) pick(Picked p, const int* row) {
    pdl_trigger();
    pdl_wait();
    const int words = p.words[blockIdx.x];
    const uint32_t* from = p.from[blockIdx.x] + static_cast<int64_t>(*row) * words;
    for (int i = threadIdx.x; i < words; i += blockDim.x) p.to[blockIdx.x][i] = from[i];
}
