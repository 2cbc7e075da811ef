// embed: x[i, :] = W[tokens[i], :], one row of the embedding table per token, exact float32.
//   table  (V, D) in records or row-major floats      tokens (T) int32      x (T, D) float
// Launch  grid = T, block = 128, or 512 for a single token, whose step waits for it; thread = four values.
// Bytes   one row of the table a token.
#include "quants.cuh"

template <class Q>
__global__ void __launch_bounds__(512) embed(const uint8_t* table, const int* tokens, float* x, int d) {
    pdl_trigger();
    pdl_wait();
    const int row = tokens[blockIdx.x];
    const int length = Q::kFloat ? d : ceil_div(d, 128);
    float* out = x + static_cast<int64_t>(blockIdx.x) * d;
    for (int k = threadIdx.x * 4; k < d; k += blockDim.x * 4)
        *reinterpret_cast<float4*>(out + k) = row_values<Q>(table, row, k, length);
}
