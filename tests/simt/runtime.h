// What fibres.cpp (threads, barriers, warp collectives) and memory.cpp (access checks) share, and the
// structures that device.py fills and reads. One launch at a time, one block at a time.
#pragma once
#include <stdint.h>

constexpr int kWarpSize = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxFrames = 24;

extern "C" {
// Device memory that the launch may touch, and the shadow words of its bytes (memory.cpp).
struct SimtRange {
    uint64_t begin, end;
    uint64_t *writes, *reads;
};
// What a loaded kernel library occupies: its image, and its thread-local segment (static shared memory).
struct SimtModule {
    uint64_t image_begin, image_end, shared_begin, shared_end;
};
struct SimtLaunch {
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    int checked;
    void (*run)(void* const*);
    void* const* arguments;
    SimtModule module;
    SimtRange* ranges;
    int range_count;
};
enum FaultKind { kNone, kOutOfBounds, kMisaligned, kUninitialised, kRace, kDivergence, kBarrier, kForbidden, kCrash };
struct SimtFault {
    int kind;
    unsigned block[3], thread[3];
    unsigned other_thread[3];  // the second thread of a race
    int has_other;
    uint64_t address;
    unsigned bytes;
    uint64_t frames[kMaxFrames];        // return addresses, innermost first, ended by 0
    uint64_t other_frames[kMaxFrames];
    char text[512];
};
}

// kYielding: ready again when the other warps have had their turn.
enum State { kReady, kYielding, kAtBarrier, kAtCollective, kAtArrival, kAtNamedBarrier, kDone };

struct Fibre;
using Complete = void (*)(Fibre* warp, unsigned mask);

struct Fibre {
    void* context;  // saved stack pointer, or ucontext_t*
    char* stack;
    unsigned index[3];
    int thread;
    State state;
    // Where it waits, and what it brought.
    const char *what, *file;
    int line;
    unsigned mask;
    void* payload;
    void* frame;
};

// Order between lanes of a warp inside one barrier interval: `now` counts its __syncwarps; an access at
// time t is known to lane l when t < known_to_all, or t < known[l][lane that made it].
struct WarpClock {
    unsigned now, known_to_all;
    bool partial;  // `known` is in use
    unsigned short known[kWarpSize][kWarpSize];
};

struct Machine {
    SimtLaunch launch;
    SimtFault* fault;
    Fibre* current;  // null outside of a kernel
    Fibre* fibres;
    WarpClock* clocks;
    int threads, done, at_barrier;
    int barrier_votes, barrier_result;
    unsigned block[3];
    char* dynamic_shared;
    // Since the launch began: how often a barrier, or a phase of one, was complete; where the block
    // began; and the last __syncthreads.
    uint64_t epoch, block_epoch, barrier_epoch;
    void* scheduler;
};
extern Machine g;

constexpr uint64_t kStackBytes = 256 << 10;

// Ends the launch: fills the fault from the running fibre and never returns to it. `frame` is the frame
// address to walk from.
[[noreturn]] void stop(FaultKind kind, void* frame, const char* format, ...);
void walk_frames(void* frame, uint64_t* out);

// fibres.cpp: until another fibre makes this one ready. `frame` is for the report of a deadlock.
void wait(State state, const char* what, const char* file, int line, void* frame);
bool same_place(const Fibre& fibre, const char* file, int line);
const char* base_name(const char* path);
void yield();

// collectives.cpp
void forget_meetings();

// arrivals.cpp
void forget_named_barriers();
int describe_wait(const Fibre& fibre, char* text, int size);  // as snprintf: what is missing, and where

// memory.cpp
enum Access { kRead, kWrite, kAtomicUpdate, kVolatile };
void hook(const void* address, unsigned bytes, Access access, bool aligned, void* frame);
void memory_begin_launch();
void memory_begin_block();
void memory_end_launch();
void memory_after_barrier();
// Of an arrival or named barrier, `object`: the running fibre comes; all have come; who waited goes on.
void memory_release(const void* object);
void memory_after_phase(const void* object);
void memory_acquire(const Fibre& fibre, const void* object);
void memory_after_warp_barrier(int warp, unsigned mask);
