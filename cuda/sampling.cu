// sampling: the next token from one row of logits, all of it on the device
//   logits    (V) float, of the row to continue
//   params, state   SamplerParams and StepState in device memory: one graph serves all values
//   counts    (V) int, occurrences in the penalty window; far below 0 for ids that are exempt
//   bias      (V) float, read when params->has_bias
//   lists     (blocks * k) keys: each block's k largest, 0 where it has fewer
//   bins      sums over runs of like logits; keys (V), binned (V)
//   results   ring of n_slots DrawResult, at slot `draws` % n_slots
// Two paths, by the parameters; both are exact, so for the same u they give the host sampler's token.
//   top_k 1..256, and greedy (k = 1):  local_top_k -> draw_top_k
//   all candidates:                    adjust_logits -> fill_bins -> scatter_bins -> draw_bins
// With log probabilities wanted, local_top_k<true> and logprobs follow.
// Launch  `blocks` blocks of 512 threads share the V logits, `chunk` <= 4,096 each; then one block: 1,024
//         threads for the lists, 512 for the bins.
// Bytes   608 KB of logits (V = 151,936), from L2: 132 blocks read them in about 2 us.
// Why not a sort of V keys: 5 passes over 1.2 MB. Why not one block for everything: one SM reads 608 KB
//         in 6-10 us a pass. Why integer masses: sums in any order are the same bits.
#include "bins.cuh"
#include "sampling.cuh"

// ---- steps 1 and 2: bias and penalties --------------------------------------------------------------
__device__ inline float adjusted(const float* logits, const SamplerParams& p, const float* bias,
                                 const int* counts, int id) {
    float l = logits[id];
    if (p.has_bias) l = __fadd_rn(l, bias[id]);
    int count = p.has_penalty ? counts[id] : 0;
    if (count <= 0) return l;
    l = l > 0.0f ? __fdiv_rn(l, p.repeat) : __fmul_rn(l, p.repeat);
    if (p.frequency != 0.0f || p.presence != 0.0f) {
        float times = __fmul_rn(static_cast<float>(count), p.frequency);
        l = __fsub_rn(l, __fadd_rn(times, p.presence));
    }
    return l;
}

// ---- the end of every draw: one thread ----------------------------------------------------------------
struct DrawShape {
    int n_vocab, n_slots;
    int advance;  // added to state->position
};
__device__ inline void finish(uint32_t best, int token, const SamplerParams& p, StepState* state,
                              int* counts, int* history, DrawResult* results, DrawShape shape) {
    bool good = is_finite(best);
    if (!good) token = 0, state->flags |= kNotFinite;
    DrawResult* result = results + state->draws % shape.n_slots;
    result->token = token;
    result->flags = state->flags;
    result->n_logprobs = 0;
    if (p.has_penalty) {
        if (p.window > 0) {
            int* place = history + state->n_history % p.window;
            int leaving = state->n_history >= p.window ? *place : -1;
            if (leaving >= 0 && leaving < shape.n_vocab) --counts[leaving];
            *place = token;
        }
        ++counts[token];
    }
    state->n_history += 1;
    state->draws += 1;
    state->token = token;
    state->position += shape.advance;
}

// ---- each block's k largest ---------------------------------------------------------------------------
// Raw: of the logits as the model gave them, with each block's maximum and sum of exp(l - maximum).
struct RawSum {
    double best, sum;
};
template <bool Raw, int Threads>
__global__ void __launch_bounds__(Threads, 2)
    local_top_k(const float* logits, const SamplerParams* params, const float* bias, const int* counts,
                uint64_t* lists, RawSum* sums, int n_vocab, int chunk) {
    constexpr int kChunk = 4096;
    __shared__ uint32_t order[kChunk];
    __shared__ Shortlist list;
    __shared__ Exchange exchange;
    pdl_trigger();
    pdl_wait();
    const SamplerParams p = *params;
    int first = blockIdx.x * chunk, n = min(chunk, n_vocab - first);
    int k = Raw ? p.n_logprobs : p.top_k;
    auto key_at = [&](int i) { return make_key(order[i], first + i); };
    uint64_t best = 0;
    for (int i = threadIdx.x; i < n; i += Threads) {
        order[i] = ordered(Raw ? logits[first + i] : adjusted(logits, p, bias, counts, first + i));
        best = key_at(i) > best ? key_at(i) : best;
    }
    best = block_max(exchange, best);
    if (Raw) {
        float top = logit_of(order_of(best));
        double sum = 0;
        for (int i = threadIdx.x; i < n; i += Threads)
            sum += is_finite(order_of(best)) ? exp(static_cast<double>(logit_of(order[i])) - top) : 0;
        sum = block_sum(exchange, sum);
        if (threadIdx.x == 0) sums[blockIdx.x] = {top, sum};
    }
    uint64_t* out = lists + static_cast<int64_t>(blockIdx.x) * k;
    if (k == 1) {
        if (threadIdx.x == 0) out[0] = best;
        return;
    }
    int kept = min(k, n);
    largest_sorted(list, n, kept, key_at);
    for (int i = threadIdx.x; i < k; i += Threads) out[i] = i < kept ? list.sorted[i] : 0;
}

// ---- steps 4 to 9 on the lists' k largest --------------------------------------------------------------
__device__ inline void draw_from(Shortlist& list, Exchange& exchange, int kept, const SamplerParams& p,
                                 uint64_t draws, uint64_t& drawn) {
    int i = threadIdx.x;
    uint64_t key = i < kept ? list.sorted[i] : 0, total;
    float z = distance(order_of(i < kept ? key : list.sorted[0]), order_of(list.sorted[0]));
    bool in = i < kept;
    if (p.top_p < 1.0f) {
        uint64_t own = in ? mass(z, 1.0f) : 0;
        uint64_t before = block_scan(exchange, own, total) - own;
        in = in && before < first_reaching(static_cast<double>(p.top_p) * static_cast<double>(total));
    }
    in = in && z >= p.min_z;
    uint64_t own = in ? mass(z, p.temperature) : 0;
    uint64_t before = block_scan(exchange, own, total) - own;
    uint64_t target = static_cast<uint64_t>(uniform(p.seed, draws) * static_cast<double>(total));
    if (before <= target && target < before + own) drawn = key;
    __syncthreads();
}

template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    draw_top_k(const uint64_t* lists, int n_lists, const SamplerParams* params, StepState* state,
               int* counts, int* history, DrawResult* results, DrawShape shape) {
    __shared__ Shortlist list;
    __shared__ Exchange exchange;
    __shared__ uint64_t drawn;
    pdl_trigger();
    pdl_wait();
    const SamplerParams p = *params;
    int n = n_lists * p.top_k, kept = min(p.top_k, shape.n_vocab);
    if (p.top_k == 1) {  // greedy too
        uint64_t best = 0;
        for (int i = threadIdx.x; i < n; i += Threads) best = lists[i] > best ? lists[i] : best;
        best = block_max(exchange, best);
        if (threadIdx.x == 0) list.sorted[0] = drawn = best;
        __syncthreads();
    } else {
        largest_sorted(list, n, kept, [&](int i) { return lists[i]; });
        if (threadIdx.x == 0) drawn = list.sorted[0];
        __syncthreads();
        if (is_finite(order_of(list.sorted[0]))) draw_from(list, exchange, kept, p, state->draws, drawn);
    }
    if (threadIdx.x == 0)
        finish(order_of(list.sorted[0]), id_of(drawn), p, state, counts, history, results, shape);
}

// ---- all candidates: bins of like logits, then exact searches inside the bins that matter ----------
template <int Threads>
__global__ void __launch_bounds__(Threads, 2)
    adjust_logits(const float* logits, const SamplerParams* params, const float* bias,
                  const int* counts, uint32_t* keys, uint32_t* bests, Bins* bins, int n_vocab, int chunk) {
    __shared__ Exchange exchange;
    pdl_trigger();
    pdl_wait();
    const SamplerParams p = *params;
    int first = blockIdx.x * chunk, last = min(first + chunk, n_vocab);
    uint32_t best = 0;
    for (int id = first + threadIdx.x; id < last; id += Threads) {
        uint32_t order = ordered(adjusted(logits, p, bias, counts, id));
        keys[id] = order;
        best = order > best ? order : best;
    }
    best = static_cast<uint32_t>(block_max(exchange, static_cast<uint64_t>(best)));
    if (threadIdx.x == 0) bests[blockIdx.x] = best;
    uint64_t* words = reinterpret_cast<uint64_t*>(bins);
    for (int i = blockIdx.x * Threads + threadIdx.x; i < static_cast<int>(sizeof(Bins) / 8);
         i += gridDim.x * Threads)
        words[i] = 0;
}

template <int Threads>
__global__ void __launch_bounds__(Threads, 2)
    fill_bins(const uint32_t* keys, const uint32_t* bests, const SamplerParams* params, Bins* bins,
              int n_vocab, int chunk) {
    __shared__ Exchange exchange;
    pdl_trigger();
    pdl_wait();
    const SamplerParams p = *params;
    uint32_t best = best_of(exchange, bests, gridDim.x);
    int first = blockIdx.x * chunk, last = min(first + chunk, n_vocab);
    if (!is_finite(best)) return;
    for (int id = first + threadIdx.x; id < last; id += Threads) {
        float z = distance(keys[id], best);
        int bin = bin_of(z, p.temperature);
        if (bin == kBins - 1) continue;
        uint64_t one = mass(z, 1.0f);
        uint64_t warm = p.temperature == 1.0f ? one : mass(z, p.temperature);
        atomicAdd(&bins->count[bin], 1u);
        if (one != 0) atomicAdd(&bins->mass_one[bin], one);
        if (warm != 0) atomicAdd(&bins->mass[bin], warm);
    }
}

template <int Threads>
__global__ void __launch_bounds__(Threads, 2)
    scatter_bins(const uint32_t* keys, const uint32_t* bests, const SamplerParams* params, Bins* bins,
                 uint64_t* binned, int n_vocab, int chunk) {
    constexpr int kEach = kBins / Threads;
    __shared__ Exchange exchange;
    __shared__ uint32_t starts[kBins];
    pdl_trigger();
    pdl_wait();
    const SamplerParams p = *params;
    uint32_t best = best_of(exchange, bests, gridDim.x);
    uint64_t own = 0, total;
    for (int i = 0; i < kEach; ++i) own += bins->count[threadIdx.x * kEach + i];
    uint64_t start = block_scan(exchange, own, total) - own;
    for (int i = 0; i < kEach; ++i) {
        starts[threadIdx.x * kEach + i] = static_cast<uint32_t>(start);
        start += bins->count[threadIdx.x * kEach + i];
    }
    __syncthreads();
    int first = blockIdx.x * chunk, last = min(first + chunk, n_vocab);
    if (!is_finite(best)) return;
    for (int id = first + threadIdx.x; id < last; id += Threads) {
        int bin = bin_of(distance(keys[id], best), p.temperature);
        if (bin == kBins - 1) continue;
        binned[starts[bin] + atomicAdd(&bins->filled[bin], 1u)] = make_key(keys[id], id);
    }
}

template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    draw_bins(const Bins* bins, const uint64_t* binned, const uint32_t* bests, int n_bests,
              const SamplerParams* params, StepState* state, int* counts, int* history,
              DrawResult* results, DrawShape shape) {
    __shared__ BinSearch s;
    pdl_trigger();
    pdl_wait();
    const SamplerParams p = *params;
    uint32_t best = best_of(s.exchange, bests, n_bests);
    uint64_t least = 0, drawn = 0;  // the last candidate kept
    int last_bin = kBins - 1;       // and its bin
    auto count_of = [&](int bin) { return uint64_t(bins->count[bin]); };
    auto z_of = [&](uint64_t key) { return distance(order_of(key), best); };
    if (is_finite(best)) {
        uint64_t counted = sum_below(s, kBins, count_of);
        if (p.top_k > 0 && static_cast<uint64_t>(p.top_k) < counted) {
            least = find<Threads>(s, bins, binned, p.top_k, count_of, [](uint64_t) { return uint64_t(1); });
            last_bin = s.bin;
        }
        if (p.top_p < 1.0f) {
            auto value = [&](int bin) { return bins->mass_one[bin]; };
            auto weight = [&](uint64_t key) { return key >= least ? mass(z_of(key), 1.0f) : 0; };
            uint64_t total = sum_through(s, bins, binned, last_bin, value, weight);
            double target = static_cast<double>(p.top_p) * static_cast<double>(total);
            uint64_t key = find<Threads>(s, bins, binned, first_reaching(target), value, weight);
            least = key, last_bin = s.bin;
        }
        last_bin = min(last_bin, bin_of(p.min_z, p.temperature));
        auto value = [&](int bin) { return bins->mass[bin]; };
        auto weight = [&](uint64_t key) {
            float z = z_of(key);
            return key >= least && z >= p.min_z ? mass(z, p.temperature) : 0;
        };
        uint64_t total = sum_through(s, bins, binned, last_bin, value, weight);
        double u = uniform(p.seed, state->draws);
        uint64_t target = static_cast<uint64_t>(u * static_cast<double>(total));
        drawn = find<Threads>(s, bins, binned, target + 1, value, weight);
    }
    if (threadIdx.x == 0) finish(best, id_of(drawn), p, state, counts, history, results, shape);
}

// ---- log probabilities of the model's own distribution, after the draw -----------------------------------
template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    logprobs(const float* logits, const uint64_t* lists, const RawSum* sums, int n_lists,
             const SamplerParams* params, const StepState* state, DrawResult* results, DrawShape shape) {
    __shared__ Shortlist list;
    __shared__ Exchange exchange;
    pdl_trigger();
    pdl_wait();
    int n = params->n_logprobs, kept = min(n, shape.n_vocab);
    largest_sorted(list, n_lists * n, kept, [&](int i) { return lists[i]; });
    double best = logit_of(order_of(list.sorted[0])), sum = 0;
    for (int i = threadIdx.x; i < n_lists; i += Threads)
        if (sums[i].sum > 0) sum += sums[i].sum * exp(sums[i].best - best);
    double total = best + log(block_sum(exchange, sum));
    DrawResult* result = results + (state->draws - 1) % shape.n_slots;
    for (int i = threadIdx.x; i < kept; i += Threads) {
        result->ids[i] = id_of(list.sorted[i]);
        result->logprobs[i] = static_cast<float>(logit_of(order_of(list.sorted[i])) - total);
    }
    if (threadIdx.x == 0) {
        result->n_logprobs = kept;
        result->logprob = static_cast<float>(logits[state->token] - total);
    }
}
