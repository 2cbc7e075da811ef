// Threads as fibres: each runs until it waits at a barrier or a warp collective, which completes when
// all that it names have come. Who can never come is an error.
#include "runtime.h"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

Machine g;

// ---- switching stacks -------------------------------------------------------------------------------
#if defined(__x86_64__)
// void simt_switch(void** save, void* to): callee-saved registers lie on the stack that is left.
asm(R"(
.text
.type simt_switch, @function
simt_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
.size simt_switch, .-simt_switch
)");
extern "C" void simt_switch(void** save, void* to);

static void* new_context(Fibre& fibre, void (*entry)()) {
    void** top = reinterpret_cast<void**>(fibre.stack + kStackBytes);
    *--top = nullptr;  // entry's return address: none; entry sees the stack as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;  // rbp = 0 ends the walk over frames
    return top;
}
#else
#include <ucontext.h>
static void simt_switch(void** save, void* to) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}
static void* new_context(Fibre& fibre, void (*entry)()) {
    ucontext_t* context = reinterpret_cast<ucontext_t*>(fibre.stack);  // kept at the stack's far end
    getcontext(context);
    context->uc_stack.ss_sp = fibre.stack + sizeof(ucontext_t);
    context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return context;
}
#endif

// ---- faults ---------------------------------------------------------------------------------------------
void walk_frames(void* frame, uint64_t* out) {
    int count = 0;
    const SimtModule& module = g.launch.module;
    for (void** f = static_cast<void**>(frame); f && count < kMaxFrames - 1; f = static_cast<void**>(f[0])) {
        const uint64_t pc = reinterpret_cast<uint64_t>(f[1]);
        if (pc >= module.image_begin && pc < module.image_end) out[count++] = pc;
    }
    out[count] = 0;
}

void stop(FaultKind kind, void* frame, const char* format, ...) {
    SimtFault& fault = *g.fault;
    fault.kind = kind;
    memcpy(fault.block, g.block, sizeof fault.block);
    memcpy(fault.thread, g.current->index, sizeof fault.thread);
    walk_frames(frame, fault.frames);
    va_list values;
    va_start(values, format);
    vsnprintf(fault.text, sizeof fault.text, format, values);
    va_end(values);
    void* abandoned;
    simt_switch(&abandoned, g.scheduler);
    abort();
}

// ---- waiting ----------------------------------------------------------------------------------------------
static void wait(State state, const char* what, const char* file, int line, void* frame) {
    Fibre& self = *g.current;
    self.state = state;
    self.what = what;
    self.file = file;
    self.line = line;
    self.frame = frame;
    simt_switch(&self.context, g.scheduler);
}

static const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
static bool same_place(const Fibre& f, const char* file, int line) {
    return f.line == line && (f.file == file || strcmp(f.file, file) == 0);
}

extern "C" int simt_barrier(int value, const char* file, int line) {
    void* frame = __builtin_frame_address(0);
    if (g.done)
        stop(kBarrier, frame, "__syncthreads, but %d of %d threads of the block have ended", g.done, g.threads);
    for (int i = 0; g.at_barrier && i < g.threads; ++i) {
        const Fibre& other = g.fibres[i];
        if (other.state != kAtBarrier) continue;
        if (!same_place(other, file, line))
            stop(kBarrier, frame, "__syncthreads at %s:%d, but thread %d waits at the one at %s:%d",
                 base_name(file), line, i, base_name(other.file), other.line);
        break;
    }
    g.barrier_votes += value;
    if (++g.at_barrier < g.threads) {
        wait(kAtBarrier, "__syncthreads", file, line, frame);
        return g.barrier_result;
    }
    g.barrier_result = g.barrier_votes;
    g.at_barrier = g.barrier_votes = 0;
    for (int i = 0; i < g.threads; ++i) g.fibres[i].state = kReady;
    memory_after_barrier();
    return g.barrier_result;
}

// The collective that the lanes of a warp are gathering for. Where disjoint masks gather at the same
// time it is one of them; the others are found from the lanes' states.
struct Meeting {
    const char *what, *file;
    int line;
    unsigned mask, arrived;
};
static Meeting meetings[kMaxThreads / kWarpSize];

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
    check_shared_read(*g.current, shared, 16, __builtin_frame_address(0));
    Matrices matrices{r, static_cast<const char*>(shared), transposed};
    collective("ldmatrix", 0xffffffffu, &matrices, complete_load_matrices, file, line);
}

// ---- what a thread is ---------------------------------------------------------------------------------------
struct Index3 {
    unsigned x, y, z;
};
static Index3 index3(const unsigned* v) { return {v[0], v[1], v[2]}; }
extern "C" Index3 simt_thread_idx() { return index3(g.current->index); }
extern "C" Index3 simt_block_idx() { return index3(g.block); }
extern "C" Index3 simt_block_dim() { return index3(g.launch.block); }
extern "C" Index3 simt_grid_dim() { return index3(g.launch.grid); }
extern "C" int simt_lane() { return g.current->thread % kWarpSize; }
extern "C" char* simt_dynamic_shared() { return g.dynamic_shared; }
extern "C" long long simt_clock() {
    static long long ticks;
    return ++ticks;
}
extern "C" void simt_forbidden(const char* what) { stop(kForbidden, __builtin_frame_address(0), "%s", what); }

// ---- running blocks ---------------------------------------------------------------------------------------
// A thread that ends leaves nobody waiting for it.
static void check_ending(Fibre& self) {
    if (g.at_barrier)
        for (int i = 0; i < g.threads; ++i)
            if (g.fibres[i].state == kAtBarrier)
                stop(kBarrier, g.fibres[i].frame, "this thread has ended, but %d of %d threads wait at __syncthreads",
                     g.at_barrier, g.threads);
    const int first = self.thread & ~(kWarpSize - 1), lane = self.thread - first;
    for (int i = first; i < first + kWarpSize && i < g.threads; ++i) {
        const Fibre& other = g.fibres[i];
        if (other.state == kAtCollective && other.mask >> lane & 1)
            stop(kDivergence, other.frame, "lane %d has ended, but lane %d waits for it in %s (mask %08x)", lane,
                 i - first, other.what, other.mask);
    }
}

static void fibre_entry() {
    Fibre& self = *g.current;
    g.launch.run(g.launch.arguments);
    check_ending(self);
    self.state = kDone;
    ++g.done;
    simt_switch(&self.context, g.scheduler);
    abort();
}

static bool resume(Fibre& fibre) {
    g.current = &fibre;
    simt_switch(&g.scheduler, fibre.context);
    return g.fault->kind == kNone;
}

// Nobody can go on: named from the view of the first who waits.
static void report_deadlock() {
    Fibre* waiting = nullptr;
    for (int i = 0; i < g.threads; ++i) {
        Fibre& f = g.fibres[i];
        if (f.state == kAtCollective && (!waiting || waiting->state != kAtCollective)) waiting = &f;
        if (f.state == kAtBarrier && !waiting) waiting = &f;
    }
    SimtFault& fault = *g.fault;
    fault.kind = waiting->state == kAtCollective ? kDivergence : kBarrier;
    memcpy(fault.block, g.block, sizeof fault.block);
    memcpy(fault.thread, waiting->index, sizeof fault.thread);
    walk_frames(waiting->frame, fault.frames);
    const Fibre* elsewhere = nullptr;
    const int first = waiting->thread & ~(kWarpSize - 1);
    for (int i = first; i < first + kWarpSize && i < g.threads; ++i) {
        const Fibre& f = g.fibres[i];
        if (waiting->mask >> (i - first) & 1 && (f.state != waiting->state || f.mask != waiting->mask)) elsewhere = &f;
    }
    if (elsewhere)
        snprintf(fault.text, sizeof fault.text, "%s (mask %08x) waits for lane %d, which waits in %s at %s:%d",
                 waiting->what, waiting->mask, elsewhere->thread - first, elsewhere->what,
                 base_name(elsewhere->file), elsewhere->line);
    else
        snprintf(fault.text, sizeof fault.text, "%s waits for threads that never come", waiting->what);
}

static bool run_block() {
    g.done = g.at_barrier = g.barrier_votes = 0;
    for (Meeting& meeting : meetings) meeting.arrived = 0;
    for (int i = 0; i < g.threads; ++i) {
        Fibre& f = g.fibres[i];
        const unsigned *size = g.launch.block, t = static_cast<unsigned>(i);
        f.thread = i;
        f.index[0] = t % size[0];
        f.index[1] = t / size[0] % size[1];
        f.index[2] = t / size[0] / size[1];
        f.state = kReady;
        f.context = new_context(f, fibre_entry);
    }
    while (g.done < g.threads) {
        bool progress = false;
        for (int first = 0; first < g.threads; first += kWarpSize) {
            for (bool again = true; again;) {  // a warp runs until all its lanes wait
                again = false;
                for (int i = first; i < first + kWarpSize && i < g.threads; ++i) {
                    if (g.fibres[i].state != kReady) continue;
                    again = progress = true;
                    if (!resume(g.fibres[i])) return false;
                }
            }
        }
        if (!progress) {
            report_deadlock();
            return false;
        }
    }
    return true;
}

static void* map(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    return p;
}

static void prepare_fibres() {
    if (g.fibres) return;
    g.fibres = static_cast<Fibre*>(calloc(kMaxThreads, sizeof(Fibre)));
    g.clocks = static_cast<WarpClock*>(calloc(kMaxThreads / kWarpSize, sizeof(WarpClock)));
    char* stacks = static_cast<char*>(map(kMaxThreads * kStackBytes));
    for (int i = 0; i < kMaxThreads; ++i) g.fibres[i].stack = stacks + i * kStackBytes;
}

// Runs a launch to its end or its first fault. Returns the fault's kind, 0 where there is none.
extern "C" int simt_launch(const SimtLaunch* launch, SimtFault* fault) {
    prepare_fibres();
    memset(fault, 0, sizeof *fault);
    g.launch = *launch;
    g.fault = fault;
    g.threads = static_cast<int>(launch->block[0] * launch->block[1] * launch->block[2]);
    const size_t mapped = (launch->shared_bytes + 4096) & ~size_t{4095};
    g.dynamic_shared = static_cast<char*>(map(mapped));
    memory_begin_launch();
    bool fine = true;
    for (unsigned z = 0; fine && z < launch->grid[2]; ++z)
        for (unsigned y = 0; fine && y < launch->grid[1]; ++y)
            for (unsigned x = 0; fine && x < launch->grid[0]; ++x) {
                g.block[0] = x, g.block[1] = y, g.block[2] = z;
                memory_begin_block();
                fine = run_block();
            }
    g.current = nullptr;
    memory_end_launch();
    munmap(g.dynamic_shared, mapped);
    return fault->kind;
}

// The library that holds `code`, as this thread sees it.
extern "C" int simt_module(void* code, SimtModule* module) {
    struct Search {
        uint64_t code;
        SimtModule* module;
    } search{reinterpret_cast<uint64_t>(code), module};
    return dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            const Search& s = *static_cast<Search*>(data);
            SimtModule found{~0ull, 0, 0, 0};
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const ElfW(Phdr)& p = info->dlpi_phdr[i];
                const uint64_t begin = info->dlpi_addr + p.p_vaddr;
                if (p.p_type == PT_LOAD) {
                    if (begin < found.image_begin) found.image_begin = begin;
                    if (begin + p.p_memsz > found.image_end) found.image_end = begin + p.p_memsz;
                }
                if (p.p_type == PT_TLS) {
                    found.shared_begin = reinterpret_cast<uint64_t>(info->dlpi_tls_data);
                    found.shared_end = found.shared_begin + p.p_memsz;
                }
            }
            if (s.code < found.image_begin || s.code >= found.image_end) return 0;
            *s.module = found;
            return 1;
        },
        &search);
}
