// sampling: the next token from one row of logits, all of it on the device
//   logits    (V) float, of the row to continue
//   params, state   SamplerParams and StepState in device memory: one graph serves all values
//   counts    (V) int, occurrences in the penalty window; far below 0 for ids that are exempt
//   bias      (V) float, read when params->has_bias
//   mask      (V / 32 rounded up) bits, lowest first: the ids that may be drawn; read by <Masked> kernels
//   lists     (blocks * k rounded up to 8) keys: each block's k largest and maybe more, descending, then 0
//   bins      sums over runs of like logits; keys (V), binned (V)
//   results   ring of n_slots DrawResult, at slot `draws` % n_slots
// Two paths, by the parameters; both are exact, so for the same u they give the host sampler's token.
//   top_k 1..256, and greedy (k = 1):  local_top_k -> draw_top_k
//   all candidates:                    adjust_logits -> fill_bins -> scatter_bins -> draw_bins
// With log probabilities wanted, local_top_k<Raw> and logprobs follow.
// Launch  `blocks` blocks of 512 threads share the V logits, `chunk` <= 4,096 each; then one block of 512.
// Bytes   608 KB of logits (V = 151,936), from L2; then 8 keys of each list, 8 KB of 132, by one block.
// Expect  cycles after the wait, top_k 40, 132 blocks: local_top_k 700 for the logits, 200 largest, 500
//         histogram and limit, 400 list and ranks; draw_top_k 700 for the keys, 200, 500, 200, ranks and
//         exponentials 500, draw 600. With two launches 4.5 us, greedy 3 us: instructions that miss the
//         caches would double that, hence the rehearsal.
// Time    8 to 10 us of a step with top_k 40 (H200, 2026-11-30), of 22 to 24 before the rehearsal.
// Why not a sort of V keys: 5 passes over 1.2 MB. Why not one block for everything: one SM reads 608 KB
//         in 6-10 us a pass. Why not the last of the blocks to draw: a fence and a counter cost what a
//         dependent launch costs. Why integer masses: sums in any order are the same bits.
#include "bins.cuh"
#include "sampling.cuh"
#include "shortlist.cuh"

// ---- mask, and steps 1 and 2: bias and penalties --------------------------------------------
__device__ inline bool allows(const uint32_t* mask, int id) { return mask[id / 32] >> id % 32 & 1; }

// counts: null without penalties.
__device__ inline float adjusted(float l, const SamplerParams& p, const float* bias, const int* counts,
                                 int id) {
    if (p.has_bias) l = __fadd_rn(l, bias[id]);
    int count = counts ? counts[id] : 0;
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
__device__ inline void finish(uint32_t best, int token, const SamplerParams& p, StepState before,
                              StepState* state, int* counts, int* history, DrawResult* results,
                              DrawShape shape) {
    uint32_t flags = before.flags;
    if (!is_finite(best)) token = 0, flags |= kNotFinite;
    // A draw has a place of its own in the context, so 32 bits of its number are all. One store: the
    // results lie in the host's memory.
    DrawResult* result = results + static_cast<uint32_t>(before.draws) % shape.n_slots;
    *reinterpret_cast<uint4*>(result) = make_uint4(token, flags, 0, 0);
    *state = {token, before.position + shape.advance, before.draws + 1, flags, before.n_history + 1, {}};
    if (!p.has_penalty) return;
    if (p.window > 0) {
        int* place = history + before.n_history % p.window;
        int leaving = before.n_history >= p.window ? *place : -1;
        if (leaving >= 0 && leaving < shape.n_vocab) atomicAdd(&counts[leaving], -1);
        *place = token;
    }
    atomicAdd(&counts[token], 1);
}

// ---- each block's k largest ---------------------------------------------------------------------------
// Before they wait, these two kernels go through their own code once, on made-up keys and without a trace:
// the code is run once a token, and by then the weights have driven it out of the caches. Until the wait
// only the parameters and the bias are read, which no kernel writes: a stale line would stay in L1.
constexpr int kRehearsal = 0, kReal = 1;

constexpr int kRun = 8;  // ids in a row that a block takes, 32 bytes; like ids get like logits
__device__ inline int id_at(unsigned i) {  // of the block's logit number i
    return static_cast<int>((i / kRun * gridDim.x + blockIdx.x) * kRun + i % kRun);
}
constexpr int kHeads = 8;  // keys of a list that the draw looks at first
__device__ inline int list_stride(int k) { return ceil_div(k, kHeads) * kHeads; }

// Raw: of the logits as the model gave them, with each block's maximum and sum of exp(l - maximum).
struct RawSum {
    double best, sum;
};
// Masked: an id that the mask lacks is as if there were no such id.
template <bool Raw, bool Masked, int Threads>
__global__ void __launch_bounds__(Threads, 3)
    local_top_k(const float* logits, const SamplerParams* params, const float* bias, const int* counts,
                const uint32_t* mask, uint64_t* lists, RawSum* sums, int n_vocab, int chunk) {
    constexpr int kChunk = 4096;
    __shared__ uint32_t order[kChunk];  // a logit's bits, then its order; 0: there is none
    __shared__ Shortlist list;
    __shared__ Exchange exchange;
    pdl_trigger();
    const SamplerParams p = *params;
    const int k = Raw ? p.n_logprobs : p.top_k, stride = list_stride(k);
    uint64_t* const out = lists + static_cast<int64_t>(blockIdx.x) * stride;
    auto key_at = [&](int i) { return order[i] == 0 ? 0 : make_key(order[i], id_at(i)); };
#pragma unroll 1
    for (int turn = kRehearsal; turn <= kReal; ++turn) {
        const int n = turn == kReal ? chunk : Threads;
        __syncthreads();
        clear<Threads>(list);
        if (turn == kReal) {
            pdl_wait();
#pragma unroll 1
            for (int i = threadIdx.x; i < n; i += Threads)
                if (id_at(i) < n_vocab)
                    copy_async(order + i, reinterpret_cast<const uint32_t*>(logits) + id_at(i));
            copy_async_commit();
            copy_async_wait<0>();
        } else {
            order[threadIdx.x] = __float_as_uint(threadIdx.x * 0.125f);
        }
        const int* seen = turn == kReal && p.has_penalty ? counts : nullptr;
        uint64_t best = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < n; i += Threads) {  // of which this thread has copied each
            const int id = id_at(i);
            uint32_t own = 0;
            if (id < n_vocab && (!Masked || turn == kRehearsal || allows(mask, id))) {
                const float l = __uint_as_float(order[i]);
                own = ordered(Raw ? l : adjusted(l, p, bias, seen, id));
                best = make_key(own, id) > best ? make_key(own, id) : best;
            }
            order[i] = own;
        }
        best = block_max(exchange, best);
        if (Raw) {
            const float top = logit_of(order_of(best));
            double sum = 0;
#pragma unroll 1
            for (int i = threadIdx.x; i < n; i += Threads)
                if (order[i] != 0 && is_finite(order_of(best)))
                    sum += exp(static_cast<double>(logit_of(order[i])) - top);
            sum = block_sum(exchange, sum);
            if (turn == kReal && threadIdx.x == 0) sums[blockIdx.x] = {top, sum};
        }
        if (k == 1) {
            if (turn == kReal && threadIdx.x < kHeads) out[threadIdx.x] = threadIdx.x == 0 ? best : 0;
            continue;
        }
        rank_largest<Threads>(list, best, n, k, key_at, [&](int rank, uint64_t key, int part) {
            if (turn == kReal && part == 0 && rank < stride) out[rank] = key;
        });
        if (turn == kReal)
#pragma unroll 1
            for (int i = list.count + threadIdx.x; i < stride; i += Threads) out[i] = 0;
    }
}

// ---- steps 4 to 9 on the lists' k largest --------------------------------------------------------------
constexpr int kMaxLists = 256;
struct Drawing {
    __align__(16) uint64_t heads[kMaxLists * kHeads];  // each list's first keys
    uint64_t sorted[kMaxTopK], ones[kMaxTopK], warm[kMaxTopK];  // masses at temperature 1 and at p's
    int more[kMaxLists], n_more;  // lists whose heads are all within the limit
    __align__(16) StepState before;
    double u;
};

// To the shortlist: what of the lists is within its limit. A list's keys descend.
template <int Threads>
__device__ inline void offer_lists(Shortlist& list, Drawing& d, const uint64_t* lists, int n_lists,
                                   int stride, uint64_t best) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n_lists * kHeads; i += Threads)
        if (offer(list, d.heads[i], best) && i % kHeads == kHeads - 1 && stride > kHeads)
            d.more[atomicAdd(&d.n_more, 1)] = i / kHeads;
    __syncthreads();
    if (d.n_more == 0) return;
#pragma unroll 1
    for (int j = threadIdx.x / kWarp; j < d.n_more; j += Threads / kWarp) {
        const uint64_t* from = lists + static_cast<int64_t>(d.more[j]) * stride;
        bool all = true;
#pragma unroll 1
        for (int i = kHeads + threadIdx.x % kWarp; all; i += kWarp)
            all = __all_sync(kFull, offer(list, i < stride ? from[i] : 0, best));
    }
    __syncthreads();
}

// First warp: the key drawn from d.sorted, each lane working on a run of neighbours.
__device__ inline uint64_t pick(Drawing& d, int kept, float top_p) {
    const int each = ceil_div(kept, kWarp), first = threadIdx.x * each, last = min(first + each, kept);
    if (top_p < 1.0f) {
        uint64_t own = 0;
#pragma unroll 1
        for (int i = first; i < last; ++i) own += d.ones[i];
        uint64_t before = warp_scan(own);
        double target = static_cast<double>(top_p) * static_cast<double>(__shfl_sync(kFull, before, 31));
        before -= own;
#pragma unroll 1
        for (int i = first; i < last; ++i) {  // `before` is 0 at the first candidate alone
            if (before > 0 && static_cast<double>(before) >= target) d.warm[i] = 0;
            before += d.ones[i];
        }
    }
    uint64_t own = 0, drawn = 0;
#pragma unroll 1
    for (int i = first; i < last; ++i) own += d.warm[i];
    uint64_t before = warp_scan(own), total = __shfl_sync(kFull, before, 31);
    uint64_t target = static_cast<uint64_t>(d.u * static_cast<double>(total));
    before -= own;
#pragma unroll 1
    for (int i = first; i < last; ++i) {
        if (before <= target && target < before + d.warm[i]) drawn = d.sorted[i];
        before += d.warm[i];
    }
    return warp_max(drawn);
}

template <int Threads>
__global__ void __launch_bounds__(Threads, 3)
    draw_top_k(const uint64_t* lists, int n_lists, const SamplerParams* params, StepState* state,
               int* counts, int* history, DrawResult* results, DrawShape shape) {
    __shared__ Drawing d;
    __shared__ Shortlist list;
    __shared__ Exchange exchange;
    __shared__ SamplerParams p;
    pdl_trigger();
    *reinterpret_cast<const volatile int*>(state);  // past L1, into L2; what it says is not used
    for (unsigned i = threadIdx.x; i < sizeof(SamplerParams) / 4; i += Threads)
        reinterpret_cast<uint32_t*>(&p)[i] = reinterpret_cast<const uint32_t*>(params)[i];
    const unsigned n = n_lists * kHeads;
#pragma unroll 1
    for (int turn = kRehearsal; turn <= kReal; ++turn) {
        __syncthreads();
        const int k = p.top_k, stride = list_stride(k);
        clear<Threads>(list);
        if (threadIdx.x == 0) d.n_more = 0;
        if (turn == kReal) {
            pdl_wait();
            if (threadIdx.x < sizeof(StepState) / 16)
                copy_async16(reinterpret_cast<uint4*>(&d.before) + threadIdx.x,
                             reinterpret_cast<const uint4*>(state) + threadIdx.x);
#pragma unroll 1
            for (unsigned i = threadIdx.x * 2; i < n; i += Threads * 2)
                copy_async16(d.heads + i, lists + i / kHeads * stride + i % kHeads);
            copy_async_commit();
            copy_async_wait<0>();
        } else {
            if (threadIdx.x == 0) d.before = {};
#pragma unroll 1
            for (unsigned i = threadIdx.x; i < n; i += Threads)
                d.heads[i] = i % kHeads == 0 ? make_key(ordered(i * 0.015625f), i) : 0;
        }
        __syncthreads();
        uint64_t best = 0;
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < n; i += Threads) best = d.heads[i] > best ? d.heads[i] : best;
        best = block_max(exchange, best);
        uint64_t drawn = best;
        if (k > 1 && is_finite(order_of(best))) {
            count_levels<Threads>(list, best, n, [&](int i) { return d.heads[i]; });
            __syncthreads();
            if (threadIdx.x < kWarp) choose_limit(list, k);
            else if (threadIdx.x == kWarp) d.u = uniform(p.seed, d.before.draws);
            __syncthreads();
            offer_lists<Threads>(list, d, lists, n_lists, stride, best);
            if (__builtin_expect(list.count > kRoom, 0))
                choose_exactly<Threads>(list, n_lists * stride, k, [&](int i) { return lists[i]; });
            rank_found<Threads>(list, [&](int rank, uint64_t key, int part) {
                float z = distance(order_of(key), order_of(best));
                uint64_t own = mass(z, part == 0 ? 1.0f : p.temperature);
                if (rank >= k) return;
                if (part == 0) d.sorted[rank] = key, d.ones[rank] = own;
                if (part == 1) d.warm[rank] = z >= p.min_z ? own : 0;
            });
            __syncthreads();
            if (threadIdx.x < kWarp) drawn = pick(d, min(k, list.count), p.top_p);
        }
        if (turn == kReal && threadIdx.x == 0)
            finish(order_of(best), id_of(drawn), p, d.before, state, counts, history, results, shape);
    }
}

// ---- all candidates: bins of like logits, then exact searches inside the bins that matter ----------
template <bool Masked, int Threads>
__global__ void __launch_bounds__(Threads, 2)
    adjust_logits(const float* logits, const SamplerParams* params, const float* bias,
                  const int* counts, const uint32_t* mask, uint32_t* keys, uint32_t* bests,
                  Bins* bins, int n_vocab, int chunk) {
    __shared__ Exchange exchange;
    pdl_trigger();
    pdl_wait();
    const SamplerParams p = *params;
    if (!p.has_penalty) counts = nullptr;
    int first = blockIdx.x * chunk, last = min(first + chunk, n_vocab);
    uint32_t best = 0;
    for (int id = first + threadIdx.x; id < last; id += Threads) {
        uint32_t order = kNever;
        if (!Masked || allows(mask, id)) order = ordered(adjusted(logits[id], p, bias, counts, id));
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
    if (threadIdx.x == 0)
        finish(best, id_of(drawn), p, *state, state, counts, history, results, shape);
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
    const int kept = min(params->n_logprobs, shape.n_vocab), n = n_lists * list_stride(params->n_logprobs);
    auto key_at = [&](int i) { return lists[i]; };
    uint64_t first = 0;
    for (int i = threadIdx.x; i < n; i += Threads) first = lists[i] > first ? lists[i] : first;
    clear<Threads>(list);
    first = block_max(exchange, first);
    double best = logit_of(order_of(first)), sum = 0;
    for (int i = threadIdx.x; i < n_lists; i += Threads)
        if (sums[i].sum > 0) sum += sums[i].sum * exp(sums[i].best - best);
    double total = best + log(block_sum(exchange, sum));
    DrawResult* result = results + (state->draws - 1) % shape.n_slots;
    rank_largest<Threads>(list, first, n, kept, key_at, [&](int rank, uint64_t key, int part) {
        if (part != 0 || rank >= kept) return;
        result->ids[rank] = id_of(key);
        result->logprobs[rank] = static_cast<float>(logit_of(order_of(key)) - total);
    });
    if (threadIdx.x == 0) {
        result->n_logprobs = kept;
        result->logprob = static_cast<float>(logits[state->token] - total);
    }
}
