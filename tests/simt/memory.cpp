// Every access of a kernel, checked against shadow words: two of 64 bits for each byte of shared and
// global memory, who wrote it last and who read it.
//   thread 10 | epoch 18 | time 15 | place 18 | flags 3
// epoch: barriers and phases of them complete since the launch began (0: before it); time: __syncwarps of
// the warp in that epoch; place: the program counter from the library's start.
// Two accesses by different threads, one of them a write, race unless a __syncthreads lies between, or
// a __syncwarp of both lanes (WarpClock), or arrivals and named barriers that hand the first on to the
// warp of the second (Knowledge). Between blocks nothing orders them except a
// __threadfence and an atomic of the writer followed by an atomic of the reader.
#include "runtime.h"

#include <stdio.h>
#include <string.h>

#include <unordered_map>
#include <vector>

namespace {
constexpr uint64_t kEpochs = 1 << 18, kTimes = 1 << 15, kPlaces = 1 << 18;
constexpr int kSets = 15;  // as many as a time has bits
// Of a write word, never 0 once written; kCopying: a cp.async is under way.
enum : uint64_t { kAtomic = 1, kCopying = 2, kInitial = 4 };
// Of a read word: read by several lanes, by several warps, by another block of the launch.
enum : uint64_t { kLanes = 1, kWarps = 2, kOtherBlocks = 4 };

uint64_t thread_of(uint64_t w) { return w >> 54; }
uint64_t epoch_of(uint64_t w) { return w >> 36 & (kEpochs - 1); }
uint64_t time_of(uint64_t w) { return w >> 21 & (kTimes - 1); }
uint64_t place_of(uint64_t w) { return w >> 3 & (kPlaces - 1); }

struct Region {
    uint64_t begin, end;
    uint64_t *writes, *reads;
    bool shared;
    uint64_t first, last;  // bytes that the launch has touched
};
struct Block {
    uint64_t first_epoch, released_epoch;
};

struct Copy {
    char* to;
    char value[16];
    unsigned bytes;
    int group;
    uint64_t pc;
};
struct Copies {
    std::vector<Copy> pending;
    int committed = 0;  // groups
};
std::vector<Copies> copies;  // of each thread of the block

// The accesses that a warp may build on: of each warp those of epochs before this. Coarser than the
// hardware, so that a race may be missed, none invented: a warp's lanes know the same, an arrival hands on
// all of its epoch (what follows it too), and within a warp a new epoch orders all.
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
struct Knowledge {
    uint64_t before[kMaxWarps];
    void join(const Knowledge& other) {
        for (int w = 0; w < kMaxWarps; ++w)
            if (other.before[w] > before[w]) before[w] = other.before[w];
    }
};
Knowledge known[kMaxWarps];
struct Handover {
    Knowledge arrived, complete;  // brought by arrivals so far, and by those of the phases that are over
};
std::unordered_map<const void*, Handover> handovers;

std::vector<Region> regions;
size_t recent;  // region of the last access
std::vector<Block> blocks;
std::vector<uint64_t> shared_words;
uint64_t fence_epoch;  // of the block's last __threadfence, 0: none
bool acquired;         // the block has done an atomic on global memory

struct Visit {
    Access access;
    uint64_t address;
    unsigned bytes;
    uint64_t me;  // the word of this access
    const Fibre* self;
    void* frame;
    bool shared;
};

uint64_t word(const Fibre& self, uint64_t pc) {
    uint64_t place = pc - g.launch.module.image_begin;
    if (place >= kPlaces) place = 0;
    const uint64_t time = g.clocks[self.thread / kWarpSize].now;
    return static_cast<uint64_t>(self.thread) << 54 | g.epoch << 36 | time << 21 | place << 3;
}

bool ordered(uint64_t w, const Fibre& self) {
    const uint64_t epoch = epoch_of(w);
    if (epoch < g.barrier_epoch) return true;
    const int thread = static_cast<int>(thread_of(w)), warp = thread / kWarpSize;
    if (warp != self.thread / kWarpSize) return epoch < known[self.thread / kWarpSize].before[warp];
    if (thread == self.thread || epoch < g.epoch) return true;
    const WarpClock& clock = g.clocks[warp];
    return time_of(w) < clock.known_to_all ||
           (clock.partial && time_of(w) < clock.known[self.thread % kWarpSize][thread % kWarpSize]);
}
// The same for all readers since the last plain write `w`. A word of several warps has in place of the
// time a set of them, modulo kSets, and tells only of the last when it read.
bool readers_ordered(uint64_t r, uint64_t w, const Fibre& self) {
    const int mine = self.thread / kWarpSize, last = static_cast<int>(thread_of(r)) / kWarpSize;
    if (r & kLanes && epoch_of(r) == g.epoch) return last == mine && time_of(r) < g.clocks[mine].known_to_all;
    if (!(r & kWarps)) return ordered(r, self);
    if (epoch_of(r) < g.barrier_epoch) return true;
    const uint64_t since = w & kAtomic || epoch_of(w) < g.barrier_epoch ? g.barrier_epoch : epoch_of(w);
    if (since == g.epoch) return false;
    const uint64_t* before = known[mine].before;
    if (last != mine && before[last] <= epoch_of(r)) return false;
    for (int set = 0; set < kSets; ++set) {
        bool seen = !(time_of(r) >> set & 1);
        for (int warp = set; warp * kWarpSize < g.threads; warp += kSets) seen |= warp == mine || before[warp] > since;
        if (!seen) return false;
    }
    return true;
}
bool released(uint64_t epoch) {
    if (!acquired) return false;
    size_t low = 0, high = blocks.size();
    while (high - low > 1) {
        const size_t middle = (low + high) / 2;
        (blocks[middle].first_epoch <= epoch ? low : high) = middle;
    }
    return blocks[low].released_epoch >= epoch;
}

const char* name_of(Access access) {
    return access == kWrite ? "write" : access == kAtomicUpdate ? "atomic" : "read";
}

// `what` completes "read of shared memory that ...".
[[noreturn]] void race(const Visit& v, uint64_t other, const char* what) {
    SimtFault& fault = *g.fault;
    fault.address = v.address;
    fault.bytes = v.bytes;
    if (place_of(other)) fault.other_frames[0] = g.launch.module.image_begin + place_of(other);
    if (epoch_of(other) >= g.block_epoch) {
        const unsigned thread = static_cast<unsigned>(thread_of(other)), *size = g.launch.block;
        fault.has_other = 1;
        fault.other_thread[0] = thread % size[0];
        fault.other_thread[1] = thread / size[0] % size[1];
        fault.other_thread[2] = thread / size[0] / size[1];
    }
    stop(kRace, v.frame, "%s of %s memory that %s", name_of(v.access), v.shared ? "shared" : "global", what);
}

void check_against_write(const Visit& v, uint64_t w) {
    if (v.access == kAtomicUpdate && w & kAtomic) return;
    const uint64_t epoch = epoch_of(w);
    if (epoch >= g.block_epoch) {
        if (w & kCopying) race(v, w, "a cp.async is still filling");
        if (!ordered(w, *v.self))
            race(v, w, w & kAtomic ? "another thread updates atomically with no barrier between"
                                   : "another thread writes with no barrier between");
    } else if (epoch != 0 && !v.shared && !released(epoch)) {
        race(v, w, "another block of the launch writes");
    }
}
void check_against_reads(const Visit& v, uint64_t r, uint64_t w) {
    if (v.shared && epoch_of(r) < g.block_epoch) return;
    if (!v.shared && ((epoch_of(r) != 0 && epoch_of(r) < g.block_epoch) || r & kOtherBlocks)) {
        if (!acquired) race(v, r, "another block of the launch reads");
        return;
    }
    if (!readers_ordered(r, w, *v.self)) race(v, r, "another thread reads with no barrier between");
}

bool initialised(const Visit& v, uint64_t w) { return v.shared ? epoch_of(w) >= g.block_epoch : w != 0; }

[[noreturn]] void uninitialised(const Visit& v) {
    g.fault->address = v.address;
    g.fault->bytes = v.bytes;
    stop(kUninitialised, v.frame, "%s of %u bytes of %s memory that nothing has written", name_of(v.access),
         v.bytes, v.shared ? "shared" : "global");
}

// What the read word becomes when this access joins it.
uint64_t joined(const Visit& v, uint64_t r, uint64_t w) {
    const uint64_t epoch = epoch_of(r);
    uint64_t flags = r & kOtherBlocks;
    if (!v.shared && epoch != 0 && epoch < g.block_epoch) flags = kOtherBlocks;
    if (v.shared && epoch < g.block_epoch) flags = 0;
    if (epoch < g.block_epoch || readers_ordered(r & ~kOtherBlocks, w, *v.self)) return v.me | flags;
    const uint64_t warp = thread_of(r) / kWarpSize, mine = thread_of(v.me) / kWarpSize;
    if (warp == mine && !(r & kWarps)) return v.me | flags | kLanes;
    const uint64_t warps = (r & kWarps ? time_of(r) : 1ull << warp % kSets) | 1ull << mine % kSets;
    return (v.me & ~((kTimes - 1) << 21)) | warps << 21 | flags | kWarps;
}

void visit(const Visit& v, Region& region) {
    const uint64_t at = v.address - region.begin;
    uint64_t *writes = region.writes + at, *reads = region.reads + at;
    if (at < region.first) region.first = at;
    if (at + v.bytes > region.last) region.last = at + v.bytes;
    const bool writing = v.access == kWrite || v.access == kAtomicUpdate;
    const uint64_t flag = v.access == kAtomicUpdate ? uint64_t{kAtomic} : 0;
    uint64_t last_w = 0, last_r = 0, next_r = 0;
    for (unsigned i = 0; i < v.bytes; ++i) {
        const uint64_t w = writes[i], r = reads[i];
        if (i == 0 || w != last_w || r != last_r) {  // bytes of a word mostly share their history
            if (v.access != kWrite && !initialised(v, w)) uninitialised(v);
            if (v.access != kVolatile) check_against_write(v, w);
            if (writing && r) check_against_reads(v, r, w);
            if (v.access == kRead) next_r = r ? joined(v, r, w) : v.me;
            last_w = w;
            last_r = r;
        }
        if (writing) writes[i] = v.me | kInitial | flag;
        if (v.access == kRead) reads[i] = next_r;
        if (v.access == kWrite) reads[i] = 0;  // who comes after this comes after them
    }
}

[[noreturn]] void out_of_bounds(const Visit& v) {
    g.fault->address = v.address;
    g.fault->bytes = v.bytes;
    stop(kOutOfBounds, v.frame, "%s of %u bytes outside of every buffer", name_of(v.access), v.bytes);
}

Region* find(uint64_t address, uint64_t end) {
    if (recent < regions.size() && address >= regions[recent].begin && end <= regions[recent].end)
        return &regions[recent];
    for (size_t i = 0; i < regions.size(); ++i)
        if (address >= regions[i].begin && end <= regions[i].end) {
            recent = i;
            return &regions[i];
        }
    return nullptr;
}

uint64_t* write_words(uint64_t address, unsigned bytes) {
    const Region* region = find(address, address + bytes);
    return region ? region->writes + (address - region->begin) : nullptr;
}

void check(const Fibre& self, uint64_t address, unsigned bytes, Access access, bool aligned, void* frame) {
    const uint64_t stack = reinterpret_cast<uint64_t>(self.stack);
    if (address - stack < kStackBytes) return;
    const uint64_t pc = reinterpret_cast<uint64_t>(static_cast<void**>(frame)[1]);
    Visit v{access, address, bytes, word(self, pc), &self, frame, false};
    Region* region = find(address, address + bytes);
    if (!region) {
        const SimtModule& m = g.launch.module;
        if (access == kRead && address >= m.image_begin && address + bytes <= m.image_end) return;  // constants
        out_of_bounds(v);
    }
    if (aligned && address % bytes) {
        g.fault->address = address;
        stop(kMisaligned, frame, "%s of %u bytes at an address that is not a multiple of %u", name_of(access),
             bytes, bytes);
    }
    v.shared = region->shared;
    visit(v, *region);
    if (access == kAtomicUpdate && !region->shared) {
        acquired = true;
        if (fence_epoch) blocks.back().released_epoch = g.epoch;
    }
}

// The launch ends when the running fibre next waits.
void too_long(const char* what, uint64_t most) {
    if (!g.launch.checked) return;
    g.fault->kind = kForbidden;
    snprintf(g.fault->text, sizeof g.fault->text, "more than %d %s in a launch with checks",
             static_cast<int>(most), what);
}

void next_epoch() {
    if (++g.epoch >= kEpochs) too_long("barrier intervals", kEpochs);
    for (int w = 0; w * kWarpSize < g.threads; ++w) {
        WarpClock& clock = g.clocks[w];
        clock.now = clock.known_to_all = 0;
        if (clock.partial) memset(clock.known, 0, sizeof clock.known);
        clock.partial = false;
    }
}
}  // namespace

void hook(const void* address, unsigned bytes, Access access, bool aligned, void* frame) {
    if (g.current && g.launch.checked)
        check(*g.current, reinterpret_cast<uint64_t>(address), bytes, access, aligned, frame);
}

void memory_begin_launch() {
    const SimtLaunch& launch = g.launch;
    const uint64_t dynamic = reinterpret_cast<uint64_t>(g.dynamic_shared);
    const uint64_t fixed_bytes = launch.module.shared_end - launch.module.shared_begin;
    g.epoch = 0;
    memset(known, 0, sizeof known);
    regions.clear();
    blocks.clear();
    if (!launch.checked) return;
    shared_words.assign(2 * (launch.shared_bytes + fixed_bytes), 0);
    uint64_t* words = shared_words.data();
    const auto add = [](uint64_t begin, uint64_t end, uint64_t* writes, uint64_t* reads, bool shared) {
        regions.push_back({begin, end, writes, reads, shared, ~0ull, 0});
    };
    add(dynamic, dynamic + launch.shared_bytes, words, words + launch.shared_bytes, true);
    words += 2 * launch.shared_bytes;
    add(launch.module.shared_begin, launch.module.shared_end, words, words + fixed_bytes, true);
    for (int i = 0; i < launch.range_count; ++i) {
        const SimtRange& range = launch.ranges[i];
        add(range.begin, range.end, range.writes, range.reads, false);
    }
}

// To the next launch everything done here is complete.
void memory_end_launch() {
    for (Region& region : regions) {
        if (region.shared) continue;
        for (uint64_t i = region.first; i < region.last; ++i) {
            if (region.writes[i]) region.writes[i] = kInitial;
            region.reads[i] = 0;
        }
    }
}

void memory_begin_block() {
    next_epoch();
    g.block_epoch = g.barrier_epoch = g.epoch;
    blocks.push_back({g.epoch, 0});
    fence_epoch = 0;
    acquired = false;
    handovers.clear();
    copies.assign(static_cast<size_t>(g.threads), Copies());
    // Stale values of the block before would hide a missing initialisation from unchecked runs.
    memset(g.dynamic_shared, 0xff, g.launch.shared_bytes);
    memset(reinterpret_cast<void*>(g.launch.module.shared_begin), 0xff,
           g.launch.module.shared_end - g.launch.module.shared_begin);
}
void memory_after_barrier() {
    next_epoch();
    g.barrier_epoch = g.epoch;
}

void memory_release(const void* object) {
    if (!g.launch.checked) return;
    const int warp = g.current->thread / kWarpSize;
    Knowledge& arrived = handovers[object].arrived;
    arrived.join(known[warp]);
    arrived.before[warp] = g.epoch + 1;
}
void memory_after_phase(const void* object) {
    next_epoch();
    if (!g.launch.checked) return;
    Handover& handover = handovers[object];
    handover.complete = handover.arrived;
}
void memory_acquire(const Fibre& fibre, const void* object) {
    if (g.launch.checked) known[fibre.thread / kWarpSize].join(handovers[object].complete);
}

void memory_after_warp_barrier(int warp, unsigned mask) {
    WarpClock& clock = g.clocks[warp];
    if (++clock.now >= kTimes) too_long("__syncwarps between barriers", kTimes);
    const int lanes = g.threads - warp * kWarpSize;
    if (mask == (lanes >= kWarpSize ? 0xffffffffu : (1u << lanes) - 1)) {
        clock.known_to_all = clock.now;
        return;
    }
    clock.partial = true;
    unsigned short joined[kWarpSize] = {};
    for (int l = 0; l < kWarpSize; ++l)
        for (int from = 0; mask >> l & 1 && from < kWarpSize; ++from) {
            const unsigned short known =
                mask >> from & 1 ? static_cast<unsigned short>(clock.now) : clock.known[l][from];
            if (known > joined[from]) joined[from] = known;
        }
    for (int l = 0; l < kWarpSize; ++l)
        if (mask >> l & 1) memcpy(clock.known[l], joined, sizeof joined);
}

// ---- cp.async -------------------------------------------------------------------------------------------
extern "C" void simt_copy_async(void* shared, const void* global, int size) {
    void* frame = __builtin_frame_address(0);
    const unsigned bytes = static_cast<unsigned>(size);
    if (global) hook(global, bytes, kRead, true, frame);
    hook(shared, bytes, kWrite, true, frame);
    Copies& mine = copies[g.current->thread];
    const uint64_t pc = reinterpret_cast<uint64_t>(static_cast<void**>(frame)[1]);
    Copy copy{static_cast<char*>(shared), {}, bytes, mine.committed, pc};
    if (global) memcpy(copy.value, global, bytes);
    mine.pending.push_back(copy);
    if (!g.launch.checked) return;
    uint64_t* words = write_words(reinterpret_cast<uint64_t>(shared), bytes);
    for (unsigned i = 0; i < bytes; ++i) words[i] |= kCopying;
}
extern "C" void simt_copy_async_commit() { ++copies[g.current->thread].committed; }
extern "C" void simt_copy_async_wait(int pending) {
    Copies& mine = copies[g.current->thread];
    size_t done = 0;
    for (; done < mine.pending.size(); ++done) {
        const Copy& copy = mine.pending[done];
        if (copy.group >= mine.committed - pending) break;
        memcpy(copy.to, copy.value, copy.bytes);
        if (!g.launch.checked) continue;
        uint64_t* words = write_words(reinterpret_cast<uint64_t>(copy.to), copy.bytes);
        for (unsigned i = 0; i < copy.bytes; ++i) words[i] = word(*g.current, copy.pc) | kInitial;
    }
    mine.pending.erase(mine.pending.begin(), mine.pending.begin() + static_cast<long>(done));
}

extern "C" void simt_fence() { fence_epoch = g.epoch; }
extern "C" void simt_atomic(const void* address, int bytes) {
    hook(address, static_cast<unsigned>(bytes), kAtomicUpdate, true, __builtin_frame_address(0));
}
