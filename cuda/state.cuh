// What a step leaves on the device for the next one, so that one captured graph serves every token.
// minfer_cuda/kernels/sampling.py mirrors these structures.
#pragma once
#include "common.cuh"

struct StepState {
    int token;         // the last drawn id: what the next step embeds
    int position;      // where it will sit
    uint64_t draws;    // since `begin`: the counter of the next random number
    uint32_t flags;    // kNotFinite from the first bad logits to the next `begin`
    int n_history;     // ids of prompt and output
    int unused[2];
};
static_assert(sizeof(StepState) == 32, "");

constexpr uint32_t kNotFinite = 1;
constexpr int kMaxLogprobs = 32;

// One draw, for the host.
struct DrawResult {
    int token;
    uint32_t flags;
    float logprob;  // of `token`
    int n_logprobs;
    int ids[kMaxLogprobs];
    float logprobs[kMaxLogprobs];
};
static_assert(sizeof(DrawResult) == 16 + 8 * kMaxLogprobs, "");

// A step's position, from L2: before and after the wait of dependent launch it may differ.
__device__ inline int read_position(const int* at) { return *static_cast<const volatile int*>(at); }
