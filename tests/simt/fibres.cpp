// Threads as fibres: each runs until it waits at a barrier (arrivals.cpp has those of a part of the
// block) or in a warp collective (collectives.cpp), which completes when all that it names have come.
// Who can never come is an error.
#include "runtime.h"

#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

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
static void simt_switch(void** save, void* to) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}
static void* new_context(Fibre& fibre, void (*entry)()) {
    // Kept at the stack's top.
    ucontext_t* context = reinterpret_cast<ucontext_t*>(fibre.stack + kStackBytes) - 1;
    getcontext(context);
    context->uc_stack.ss_sp = fibre.stack;
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

// ---- crashes -----------------------------------------------------------------------------------------
// A division by zero, or a stack that local arrays have overrun: an error too, not the process's end.
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous[4];
static stack_t previous_stack;

static void on_signal(int number, siginfo_t*, void* state) {
    void* frame = nullptr;
#if defined(__x86_64__)
    const auto* registers = static_cast<ucontext_t*>(state)->uc_mcontext.gregs;
    // As if the instruction had called us: its address is a return address, less one.
    void* top[2] = {reinterpret_cast<void*>(registers[REG_RBP]), reinterpret_cast<void*>(registers[REG_RIP] + 1)};
    frame = top;
#else
    (void)state;
#endif
    stop(kCrash, frame, "signal %d (%s)", number, number == SIGFPE ? "division by zero" : "bad address or stack");
}
static void catch_signals() {
    static char stack[64 << 10];
    const stack_t own{stack, 0, sizeof stack};
    sigaltstack(&own, &previous_stack);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // it does not return
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &action, &previous[i]);
}
static void release_signals() {
    for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &previous[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
}

// ---- waiting ----------------------------------------------------------------------------------------------
void wait(State state, const char* what, const char* file, int line, void* frame) {
    Fibre& self = *g.current;
    self.state = state;
    self.what = what;
    self.file = file;
    self.line = line;
    self.frame = frame;
    simt_switch(&self.context, g.scheduler);
}

void yield() {
    g.current->state = kYielding;
    simt_switch(&g.current->context, g.scheduler);
}

const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
bool same_place(const Fibre& f, const char* file, int line) {
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

static bool at_arrival(const Fibre& f) { return f.state == kAtArrival || f.state == kAtNamedBarrier; }

// A lane that the collective waits for and that waits elsewhere, or null.
static const Fibre* missing_lane(const Fibre& waiting) {
    const Fibre* elsewhere = nullptr;
    const int first = waiting.thread & ~(kWarpSize - 1);
    for (int i = first; i < first + kWarpSize && i < g.threads; ++i) {
        const Fibre& f = g.fibres[i];
        const bool same = f.state == waiting.state && f.mask == waiting.mask;
        if (waiting.mask >> (i - first) & 1 && !same) elsewhere = &f;
    }
    return elsewhere;
}

// What is missing there, and in the first other place.
static void describe_arrivals(const Fibre& waiting, SimtFault& fault) {
    constexpr int size = sizeof fault.text, half = size / 2;
    const int end = describe_wait(waiting, fault.text, half);
    for (int i = 0; i < g.threads; ++i) {
        const Fibre& f = g.fibres[i];
        if (!at_arrival(f) || f.payload == waiting.payload || end >= half - 2) continue;
        memcpy(fault.text + end, ", ", 2);
        describe_wait(f, fault.text + end + 2, size - end - 2);
        return;
    }
}

// Nobody can go on: named from the view of the first who waits. A collective whose lane waits for an
// arrival is not the cause.
static void report_deadlock() {
    const Fibre* waiting = nullptr;
    int best = 0;
    for (int i = 0; i < g.threads; ++i) {
        const Fibre& f = g.fibres[i];
        int rank = f.state == kAtBarrier ? 1 : at_arrival(f) ? 2 : 0;
        if (f.state == kAtCollective) {
            const Fibre* lane = missing_lane(f);
            rank = lane && at_arrival(*lane) ? 0 : 3;
        }
        if (rank > best) waiting = &f, best = rank;
    }
    SimtFault& fault = *g.fault;
    fault.kind = waiting->state == kAtCollective ? kDivergence : kBarrier;
    memcpy(fault.block, g.block, sizeof fault.block);
    memcpy(fault.thread, waiting->index, sizeof fault.thread);
    walk_frames(waiting->frame, fault.frames);
    if (at_arrival(*waiting)) return describe_arrivals(*waiting, fault);
    if (const Fibre* elsewhere = missing_lane(*waiting))
        snprintf(fault.text, sizeof fault.text, "%s (mask %08x) waits for lane %d, which waits in %s at %s:%d",
                 waiting->what, waiting->mask, elsewhere->thread % kWarpSize, elsewhere->what,
                 base_name(elsewhere->file), elsewhere->line);
    else
        snprintf(fault.text, sizeof fault.text, "%s waits for threads that never come", waiting->what);
}

static bool run_block() {
    g.done = g.at_barrier = g.barrier_votes = 0;
    forget_meetings();
    forget_named_barriers();
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
            for (int i = first; i < first + kWarpSize && i < g.threads; ++i)
                if (g.fibres[i].state == kYielding) g.fibres[i].state = kReady;
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
    for (int i = 0; i < kMaxThreads; ++i) {
        g.fibres[i].stack = stacks + i * kStackBytes;
        mprotect(g.fibres[i].stack, 4096, PROT_NONE);
    }
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
    catch_signals();
    bool fine = true;
    for (unsigned z = 0; fine && z < launch->grid[2]; ++z)
        for (unsigned y = 0; fine && y < launch->grid[1]; ++y)
            for (unsigned x = 0; fine && x < launch->grid[0]; ++x) {
                g.block[0] = x, g.block[1] = y, g.block[2] = z;
                memory_begin_block();
                fine = run_block();
            }
    release_signals();
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
