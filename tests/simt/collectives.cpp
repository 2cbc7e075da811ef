// Warp collectives: barriers, votes, shuffles, reductions and tensor cores. The lanes that a mask names
// meet; the last to come computes the result for all.
#include <string.h>

#include "runtime.h"

// The collective that the lanes of a warp are gathering for. Where disjoint masks gather at the same
// time it is one of them; the others are found from the lanes' states.
struct Meeting {
    const char *what, *file;
    int line;
    unsigned mask, arrived;
};
static Meeting meetings[kMaxThreads / kWarpSize];

void forget_meetings() {
    for (Meeting& meeting : meetings) meeting.arrived = 0;
}

// The lanes of `mask` that wait in this very collective. What can never come is an error.
static unsigned arrived_lanes(Fibre* warp, int lane, const Meeting& meeting, void* frame) {
    unsigned arrived = 0;
    for (int l = 0; l < kWarpSize; ++l) {
        if (l == lane || !(meeting.mask >> l & 1)) continue;
        const bool exists = warp->thread + l < g.threads;
        if (!exists || warp[l].state == kDone)
            stop(kDivergence, frame, "%s: lane %d of mask %08x %s", meeting.what, l, meeting.mask,
                 exists ? "has ended" : "does not exist");
        if (warp[l].state != kAtCollective || !(warp[l].mask >> lane & 1)) continue;
        if (warp[l].mask != meeting.mask || warp[l].what != meeting.what ||
            !same_place(warp[l], meeting.file, meeting.line))
            stop(kDivergence, frame,
                 "%s (mask %08x) at %s:%d, but lane %d waits in %s (mask %08x) at %s:%d", meeting.what,
                 meeting.mask, base_name(meeting.file), meeting.line, l, warp[l].what, warp[l].mask,
                 base_name(warp[l].file), warp[l].line);
        arrived |= 1u << l;
    }
    return arrived;
}

// The lanes in `mask` meet, the last to come runs `complete` for all of them.
static void collective(const char* what, unsigned mask, void* payload, Complete complete, const char* file,
                       int line) {
    void* frame = __builtin_frame_address(0);
    Fibre& self = *g.current;
    const int lane = self.thread % kWarpSize;
    Fibre* warp = g.fibres + (self.thread - lane);
    if (!(mask >> lane & 1)) stop(kDivergence, frame, "%s: lane %d is not in its mask %08x", what, lane, mask);
    const Meeting mine{what, file, line, mask, 1u << lane};
    Meeting& open = meetings[self.thread / kWarpSize];
    const bool same = open.arrived && open.mask == mask && open.what == what && open.file == file && open.line == line;
    const unsigned arrived = mine.arrived | (same ? open.arrived : arrived_lanes(warp, lane, mine, frame));
    self.payload = payload;
    self.mask = mask;
    if (arrived != mask) {
        if (same || !open.arrived) {
            open = mine;
            open.arrived = arrived;
        }
        wait(kAtCollective, what, file, line, frame);
        return;
    }
    if (same) open.arrived = 0;
    complete(warp, mask);
    for (int l = 0; l < kWarpSize; ++l)
        if (mask >> l & 1) warp[l].state = kReady;
}

template <typename Payload>
static Payload& of(const Fibre& fibre) {
    return *static_cast<Payload*>(fibre.payload);
}
template <typename Function>
static void each(unsigned mask, Function function) {
    for (int l = 0; l < kWarpSize; ++l)
        if (mask >> l & 1) function(l);
}

// ---- collectives --------------------------------------------------------------------------------------------
extern "C" void simt_warp_barrier(unsigned mask, const char* file, int line) {
    collective("__syncwarp", mask, nullptr,
               [](Fibre* warp, unsigned m) { memory_after_warp_barrier(warp->thread / kWarpSize, m); }, file,
               line);
}

struct Shuffle {
    uint64_t value, result;
    int source;
};
extern "C" uint64_t simt_shuffle(unsigned mask, uint64_t value, int source, const char* file, int line) {
    if (!(mask >> source & 1))
        stop(kDivergence, __builtin_frame_address(0), "shuffle: source lane %d is not in the mask %08x", source,
             mask);
    Shuffle shuffle{value, 0, source};
    collective("shuffle", mask, &shuffle,
               [](Fibre* warp, unsigned m) {
                   each(m, [&](int l) {
                       of<Shuffle>(warp[l]).result = of<Shuffle>(warp[of<Shuffle>(warp[l]).source]).value;
                   });
               },
               file, line);
    return shuffle.result;
}

extern "C" unsigned simt_ballot(unsigned mask, bool value, const char* file, int line) {
    unsigned vote = value;
    collective("vote", mask, &vote,
               [](Fibre* warp, unsigned m) {
                   unsigned votes = 0;
                   each(m, [&](int l) { votes |= of<unsigned>(warp[l]) << l; });
                   each(m, [&](int l) { of<unsigned>(warp[l]) = votes; });
               },
               file, line);
    return vote;
}

struct Match {
    uint64_t value;
    unsigned result;
};
extern "C" unsigned simt_match(unsigned mask, uint64_t value, const char* file, int line) {
    Match match{value, 0};
    collective("__match_any_sync", mask, &match,
               [](Fibre* warp, unsigned m) {
                   each(m, [&](int a) {
                       each(m, [&](int b) {
                           if (of<Match>(warp[a]).value == of<Match>(warp[b]).value)
                               of<Match>(warp[a]).result |= 1u << b;
                       });
                   });
               },
               file, line);
    return match.result;
}

struct Reduce {
    uint32_t value;
    int op;
};
static uint32_t combine(int op, uint32_t a, uint32_t b) {
    const int32_t x = static_cast<int32_t>(a), y = static_cast<int32_t>(b);
    switch (op) {  // the order of simt.h
        case 0: return a + b;
        case 1: return x < y ? a : b;
        case 2: return x < y ? b : a;
        case 3: return a < b ? a : b;
        case 4: return a < b ? b : a;
        case 5: return a & b;
        case 6: return a | b;
        default: return a ^ b;
    }
}
extern "C" uint32_t simt_reduce(unsigned mask, uint32_t value, int op, const char* file, int line) {
    Reduce reduce{value, op};
    collective("reduction", mask, &reduce,
               [](Fibre* warp, unsigned m) {
                   const int first = __builtin_ctz(m);
                   Reduce total = of<Reduce>(warp[first]);
                   each(m & (m - 1), [&](int l) { total.value = combine(total.op, total.value, of<Reduce>(warp[l]).value); });
                   each(m, [&](int l) { of<Reduce>(warp[l]).value = total.value; });
               },
               file, line);
    return reduce.value;
}

// ---- tensor cores: fragments as common.cuh describes them ------------------------------------------------------
struct Mma {
    void* d;
    const uint32_t *a, *b;
    int k;
};
static int byte_of(uint32_t word, int i) { return static_cast<int8_t>(word >> (8 * i)); }

static void complete_mma_s8(Fibre* warp, unsigned) {
    int8_t a[16][32], b[32][8];
    const int k = of<Mma>(warp[0]).k;
    for (int l = 0; l < kWarpSize; ++l) {
        const Mma& lane = of<Mma>(warp[l]);
        for (int half = 0; half < k / 16; ++half)
            for (int i = 0; i < 4; ++i) {
                const int column = 16 * half + 4 * (l % 4) + i;
                a[l / 4][column] = byte_of(lane.a[2 * half], i);
                a[l / 4 + 8][column] = byte_of(lane.a[2 * half + 1], i);
                b[column][l / 4] = byte_of(lane.b[half], i);
            }
    }
    for (int l = 0; l < kWarpSize; ++l)
        for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
            int sum = 0;
            for (int j = 0; j < k; ++j) sum += a[row][j] * b[j][column];
            static_cast<int*>(of<Mma>(warp[l]).d)[i] += sum;
        }
}
extern "C" void simt_mma_s8(int* d, const uint32_t* a, const uint32_t* b, int k, const char* file, int line) {
    Mma mma{d, a, b, k};
    collective("mma", 0xffffffffu, &mma, complete_mma_s8, file, line);
}

static float half_value(uint32_t pair, int i) {
    const uint32_t h = pair >> (16 * i) & 0xffff, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    uint32_t bits = (h & 0x8000) << 16 | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float value;
    memcpy(&value, &bits, 4);
    if (exponent == 0) value = (h & 0x8000 ? -0x1p-24f : 0x1p-24f) * static_cast<float>(mantissa);
    return value;
}
// Products and their sum are rounded once, where a tensor core truncates: the tests allow for both.
static void complete_mma_f16(Fibre* warp, unsigned) {
    float a[16][16], b[16][8];
    for (int l = 0; l < kWarpSize; ++l) {
        const Mma& lane = of<Mma>(warp[l]);
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 2; ++i) {
                const int column = 8 * half + 2 * (l % 4) + i;
                a[l / 4][column] = half_value(lane.a[2 * half], i);
                a[l / 4 + 8][column] = half_value(lane.a[2 * half + 1], i);
                b[column][l / 4] = half_value(lane.b[half], i);
            }
    }
    for (int l = 0; l < kWarpSize; ++l)
        for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
            float& d = static_cast<float*>(of<Mma>(warp[l]).d)[i];
            double sum = d;
            for (int j = 0; j < 16; ++j) sum += static_cast<double>(a[row][j]) * b[j][column];
            d = static_cast<float>(sum);
        }
}
extern "C" void simt_mma_f16(float* d, const uint32_t* a, const uint32_t* b, const char* file, int line) {
    Mma mma{d, a, b, 16};
    collective("mma", 0xffffffffu, &mma, complete_mma_f16, file, line);
}

struct Matrices {
    uint32_t* r;
    const char* row;
    bool transposed;
};
static void complete_load_matrices(Fibre* warp, unsigned) {
    for (int l = 0; l < kWarpSize; ++l)
        for (int matrix = 0; matrix < 4; ++matrix) {
            uint32_t pair = 0;
            for (int i = 0; i < 2; ++i) {
                int row = l / 4, column = 2 * (l % 4) + i;
                const Matrices& lane = of<Matrices>(warp[l]);
                if (lane.transposed) row = 2 * (l % 4) + i, column = l / 4;
                uint16_t value;
                memcpy(&value, of<Matrices>(warp[matrix * 8 + row]).row + 2 * column, 2);
                pair |= static_cast<uint32_t>(value) << (16 * i);
            }
            of<Matrices>(warp[l]).r[matrix] = pair;
        }
}
extern "C" void simt_load_matrices(uint32_t* r, const void* shared, bool transposed, const char* file, int line) {
    hook(shared, 16, kRead, true, __builtin_frame_address(0));
    Matrices matrices{r, static_cast<const char*>(shared), transposed};
    collective("ldmatrix", 0xffffffffu, &matrices, complete_load_matrices, file, line);
}
