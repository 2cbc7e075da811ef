// Where specialised warps wait for each other: arrivals (mbarrier) and named barriers (bar.sync).
#include <stdio.h>

#include "runtime.h"

// ---- arrivals -------------------------------------------------------------------------------------------
// The 8 bytes of one. Bytes may come before they are expected: less than 0 until then.
struct Arrival {
    uint64_t magic : 9, phase : 1, count : 16, pending : 16;
    int64_t bytes : 22;
};
static_assert(sizeof(Arrival) == 8, "an mbarrier has 8 bytes");
constexpr uint64_t kMagic = 0x14b;  // neither of zeros nor of the 0xff that a block begins with
constexpr int kMaxCount = (1 << 16) - 1, kMaxBytes = (1 << 20) - 1;

static Arrival& place(uint64_t* state, void* frame) {
    const uint64_t begin = reinterpret_cast<uint64_t>(state), end = begin + 8;
    const uint64_t dynamic = reinterpret_cast<uint64_t>(g.dynamic_shared);
    const SimtModule& module = g.launch.module;
    if ((begin < dynamic || end > dynamic + g.launch.shared_bytes) &&
        (begin < module.shared_begin || end > module.shared_end))
        stop(kOutOfBounds, frame, "an mbarrier outside of shared memory");
    if (begin % 8) stop(kMisaligned, frame, "an mbarrier at an address that is not a multiple of 8");
    return *reinterpret_cast<Arrival*>(state);
}
static Arrival& begun(uint64_t* state, void* frame) {
    Arrival& arrival = place(state, frame);
    if (arrival.magic != kMagic) stop(kUninitialised, frame, "an mbarrier that was never begun");
    return arrival;
}

// Who waits for `object` goes on.
static void wake(State state, const void* object) {
    for (int i = 0; i < g.threads; ++i) {
        Fibre& f = g.fibres[i];
        if (f.state != state || f.payload != object) continue;
        f.state = kReady;
        memory_acquire(f, object);
    }
}

// `arrivals` threads come and the bytes that miss change by `bytes`: may end the phase.
static void change(Arrival& arrival, int arrivals, int bytes, void* frame) {
    if (arrivals > static_cast<int>(arrival.pending))
        stop(kBarrier, frame, "more arrivals in a phase of an mbarrier than its count, %d",
             static_cast<int>(arrival.count));
    const int64_t missing = arrival.bytes + static_cast<int64_t>(bytes);
    arrival.pending -= static_cast<unsigned>(arrivals);
    if (missing < 0 && !arrival.pending)
        stop(kBarrier, frame, "%d bytes more have come to an mbarrier than it expects", static_cast<int>(-missing));
    if (missing > kMaxBytes || missing < -kMaxBytes)
        stop(kBarrier, frame, "an mbarrier that misses %lld bytes, at most %d can be", static_cast<long long>(missing),
             kMaxBytes);
    arrival.bytes = missing;
    memory_release(&arrival);
    if (arrival.pending || arrival.bytes) return;
    arrival.pending = arrival.count;
    arrival.phase ^= 1;
    memory_after_phase(&arrival);
    wake(kAtArrival, &arrival);
    yield();  // else a producer that waits for nobody would be done before any consumer reads
}

extern "C" void simt_arrival_begin(uint64_t* state, int count) {
    void* frame = __builtin_frame_address(0);
    Arrival& arrival = place(state, frame);
    if (count < 1 || count > kMaxCount)
        stop(kBarrier, frame, "an mbarrier of %d arrivals; 1 to %d are possible", count, kMaxCount);
    const uint64_t pending = static_cast<uint64_t>(count);
    arrival = {kMagic, 0, pending, pending, 0};
}
extern "C" void simt_arrival_arrive(uint64_t* state) {
    void* frame = __builtin_frame_address(0);
    change(begun(state, frame), 1, 0, frame);
}
extern "C" void simt_arrival_expect(uint64_t* state, int bytes) {
    void* frame = __builtin_frame_address(0);
    change(begun(state, frame), 1, bytes, frame);
}
extern "C" void simt_arrival_come(uint64_t* state, int bytes) {
    void* frame = __builtin_frame_address(0);
    change(begun(state, frame), 0, -bytes, frame);
}
extern "C" void simt_arrival_wait(uint64_t* state, int phase, const char* file, int line) {
    void* frame = __builtin_frame_address(0);
    Arrival& arrival = begun(state, frame);
    if (phase & ~1) stop(kBarrier, frame, "a wait for phase %d of an mbarrier: it is 0 or 1", phase);
    if (static_cast<int>(arrival.phase) != phase) return memory_acquire(*g.current, &arrival);
    g.current->payload = &arrival;
    wait(kAtArrival, "an mbarrier's wait", file, line, frame);
}

// ---- named barriers ---------------------------------------------------------------------------------------
struct NamedBarrier {
    int threads, arrived;
};
constexpr int kNamedBarriers = 16;  // the first is that of __syncthreads
static NamedBarrier named[kNamedBarriers];

void forget_named_barriers() {
    for (NamedBarrier& barrier : named) barrier = {0, 0};
}

extern "C" void simt_named_barrier(int id, int threads, const char* file, int line) {
    void* frame = __builtin_frame_address(0);
    if (id < 1 || id >= kNamedBarriers) stop(kBarrier, frame, "named barrier %d: the ids are 1 to 15", id);
    if (threads < 1 || threads % kWarpSize || threads > g.threads)
        stop(kBarrier, frame, "named barrier %d of %d threads: not whole warps of a block of %d", id, threads,
             g.threads);
    NamedBarrier& barrier = named[id];
    if (barrier.arrived && barrier.threads != threads)
        stop(kBarrier, frame, "named barrier %d of %d threads, but others wait at it for %d", id, threads,
             barrier.threads);
    barrier.threads = threads;
    memory_release(&barrier);
    if (++barrier.arrived < threads) {
        g.current->payload = &barrier;
        return wait(kAtNamedBarrier, "a named barrier", file, line, frame);
    }
    barrier.arrived = 0;
    memory_after_phase(&barrier);
    memory_acquire(*g.current, &barrier);
    wake(kAtNamedBarrier, &barrier);
}

int describe_wait(const Fibre& f, char* text, int size) {
    const char* file = base_name(f.file);
    if (f.state == kAtArrival) {
        const Arrival& a = *static_cast<const Arrival*>(f.payload);
        return snprintf(text, size, "an mbarrier at %s:%d misses %d of %d arrivals and %d bytes in phase %d", file,
                        f.line, static_cast<int>(a.pending), static_cast<int>(a.count), static_cast<int>(a.bytes),
                        static_cast<int>(a.phase));
    }
    const NamedBarrier& b = *static_cast<const NamedBarrier*>(f.payload);
    return snprintf(text, size, "named barrier %d at %s:%d misses %d of %d threads", static_cast<int>(&b - named),
                    file, f.line, b.threads - b.arrived, b.threads);
}
