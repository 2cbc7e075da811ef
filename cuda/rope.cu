// rope_store<KV>: adds biases to projected q, k, v, rotates q and k, stores k and v in the cache
//   qkv       (T, (H+2G)*E) float: the heads of q, then k, then v       bias ((H+2G)*E) float
//   table     (S, E/2) float2: (cos, sin) of every position, YaRN's scale folded in
//   position  int32 in device memory: the position of token 0; token t sits at *position + t
//   q         (T, H, E) float         k_cache, v_cache (S, G, E) KV, one layer: float or __half
// Launch  grid = (T, ceil((H+2G)*E/2 / 128)), block = 128: a thread per pair (i, i + E/2).
// Bytes   a token reads (H+2G)*E*4 twice (qkv, bias) and E*4, writes H*E*4 + 2*G*E*sizeof(KV).
//         7B, 2,048 tokens: 38 + 29 + 4 MB -> 17 us at 4.3 TB/s (H200). Decode: a launch's latency.
// Registers  28 to 32 (sm_75 to sm_120).
// A position at or past S is refused by the host; here nothing is written for it.
#include "rope.cuh"

constexpr int kThreads = 128;

struct RopeShape {
    int tokens, heads, kv_heads, head_dim, context;  // T, H, G, E, S
};

template <typename KV>
__global__ void __launch_bounds__(kThreads)
    rope_store(const float* qkv, const float* bias, const float2* table, const int* position,
               float* q, KV* k_cache, KV* v_cache, RopeShape shape) {
    pdl_trigger();
    pdl_wait();
    const int half_dim = shape.head_dim / 2;
    const int pair = blockIdx.y * kThreads + threadIdx.x;
    const int head = pair / half_dim;
    const int i = pair % half_dim;
    const int token = blockIdx.x;
    const int64_t pos = static_cast<int64_t>(*position) + token;
    if (head >= shape.heads + 2 * shape.kv_heads || pos < 0 || pos >= shape.context) return;

    const int column = head * shape.head_dim + i;
    const int64_t width = static_cast<int64_t>(shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    const float x0 = qkv[token * width + column];
    const float x1 = qkv[token * width + column + half_dim];
    const float b0 = bias[column];
    const float b1 = bias[column + half_dim];

    const int64_t kv_row = pos * shape.kv_heads;
    const int k_head = head - shape.heads;
    const int v_head = k_head - shape.kv_heads;
    if (v_head >= 0) {
        KV* out = v_cache + (kv_row + v_head) * shape.head_dim + i;
        store_kv(out, __fadd_rn(x0, b0));
        store_kv(out + half_dim, __fadd_rn(x1, b1));
        return;
    }
    const float2 y = rope_pair(x0, x1, b0, b1, table[pos * half_dim + i]);
    if (k_head >= 0) {
        KV* out = k_cache + (kv_row + k_head) * shape.head_dim + i;
        store_kv(out, y.x);
        store_kv(out + half_dim, y.y);
    } else {
        float* out = q + (static_cast<int64_t>(token) * shape.heads + head) * shape.head_dim + i;
        out[0] = y.x;
        out[half_dim] = y.y;
    }
}
