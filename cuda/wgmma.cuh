// What sm_90a does while its threads go on, until they wait for it: products of a warpgroup, four warps that multiply 64
// rows together, and copies of many bytes to shared memory. Source: PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions", "cp.async.bulk", "mbarrier".
#pragma once
#include "matmul_tiles.cuh"

constexpr int kAtomBytes = 1024;  // eight tokens by 64 values: begins at a multiple

#if defined(MINFER_SIMT)
#define __grid_constant__
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MINFER_WGMMA 1
#endif

// What was begun since the last commit is one group.
__device__ inline void wgmma_commit() {
#ifdef MINFER_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Wait until at most `N` groups of this warpgroup are under way.
template <int N>
__device__ inline void wgmma_wait() {
#ifdef MINFER_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#endif
}

// ---- bulk copies ------------------------------------------------------------------------------------------
// A matrix of halves in global memory, as cuTensorMapEncodeTiled describes it (Device.tensor_map), to be copied in
// boxes of 64 columns.
struct alignas(64) TensorMap {
#ifdef MINFER_SIMT
    const uint8_t* base;
    uint64_t columns, rows;
    uint64_t none[13];
#else
    uint64_t words[16];
#endif
};

// What this thread did with shared memory comes before what is copied there after the next barrier.
__device__ inline void before_bulk_copy() {
#ifdef MINFER_WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Counts the bytes of a stage that have come, or the warps that are done with it. Phases alternate between 0 and 1.
struct Arrival {
    uint64_t state;

    // By one thread, before a barrier of all. A phase is over once it was told `count` times how many bytes to expect, or that
    // somebody is done, and all bytes came.
    __device__ void begin(int count = 1) {
#ifdef MINFER_WGMMA
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.proxy.async.shared::cta;" ::"r"(at()), "r"(count) : "memory");
#elif defined(MINFER_SIMT)
        simt_arrival_begin(&state, count);
#endif
    }
    __device__ void arrive() {
#ifdef MINFER_WGMMA
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at()) : "memory");
#elif defined(MINFER_SIMT)
        simt_arrival_arrive(&state);
#endif
    }
    __device__ void expect(int bytes) {
#ifdef MINFER_WGMMA
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes) : "memory");
#elif defined(MINFER_SIMT)
        simt_arrival_expect(&state, bytes);
#endif
    }
    // Until the phase is over; of a fresh one, phase 1 is.
    __device__ void wait(int phase) {
#ifdef MINFER_WGMMA
        asm volatile("{\n\t.reg .pred there;\n\tagain:\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n\t@!there bra again;\n\t}"
                     ::"r"(at()), "r"(phase) : "memory");
#elif defined(MINFER_SIMT)
        simt_arrival_wait(&state, phase);
#endif
    }
    // `bytes`, by 16 as both addresses are.
    __device__ void copy(char* shared, const uint8_t* global, int bytes) {
#ifdef MINFER_WGMMA
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(address(shared)), "l"(global), "r"(bytes), "r"(at()) : "memory");
#elif defined(MINFER_SIMT)
        for (int i = 0; i < bytes; i += 16)
            *reinterpret_cast<uint4*>(shared + i) = *reinterpret_cast<const uint4*>(global + i);
        simt_arrival_come(&state, bytes);
#endif
    }
    // 64 columns of as many rows as the map's boxes have, as token_offset says; zeros past the last row.
    __device__ void copy_box(char* shared, const TensorMap& map, int column, int row, int rows) {
#ifdef MINFER_WGMMA
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(address(shared)), "l"(&map), "r"(column), "r"(row), "r"(at()) : "memory");
#elif defined(MINFER_SIMT)
        for (int i = 0; i < rows * 8; ++i) {
            const uint64_t from = (row + i / 8) * map.columns + column + i % 8 * 8;
            uint4* to = reinterpret_cast<uint4*>(shared + token_offset(i % 8, i / 8, rows));
            *to = row + i / 8 < static_cast<int>(map.rows) ? *reinterpret_cast<const uint4*>(map.base + from * 2) : make_uint4(0, 0, 0, 0);
        }
        simt_arrival_come(&state, rows * 128);
#endif
    }

  private:
#ifdef MINFER_WGMMA
    __device__ static uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
    __device__ uint32_t at() const { return address(&state); }
#endif
};

// ---- products ---------------------------------------------------------------------------------------------
// The kernel's dynamic shared memory, where an atom of columns may begin.
__device__ inline char* atom_aligned_bytes() {
#ifdef MINFER_SIMT
    return simt_dynamic_shared();
#else
    extern __shared__ __align__(kAtomBytes) char minfer_atoms[];
    return minfer_atoms;
#endif
}

// Where columns lie in shared memory, before pieces change places.
struct Columns {
#ifdef MINFER_SIMT
    const char* at;
    __device__ explicit Columns(const char* columns) : at(columns) {}
    __device__ Columns after(int bytes) const { return Columns(at + bytes); }
#else
    uint32_t low;  // by 16 bytes: the address, and the way between pieces, which the swizzle has no use for
    __device__ explicit Columns(const char* columns)
        : low(static_cast<uint32_t>(__cvta_generic_to_shared(columns)) / 16 | 1u << 16) {}
    __device__ Columns after(int bytes) const {
        Columns c = *this;
        c.low += bytes / 16;
        return c;
    }
    // and from atom to atom of the columns; then the kind of the swizzle, 128 bytes
    __device__ uint64_t descriptor() const { return static_cast<uint64_t>(1u << 30 | kAtomBytes / 16) << 32 | low; }
#endif
};

#ifdef MINFER_WGMMA
// clang-format off
#define MINFER_SUMS1 "%0,%1,%2,%3"
#define MINFER_SUMS2 MINFER_SUMS1 ",""%4,%5,%6,%7"
#define MINFER_SUMS3 MINFER_SUMS2 ",""%8,%9,%10,%11"
#define MINFER_SUMS4 MINFER_SUMS3 ",""%12,%13,%14,%15"
#define MINFER_SUMS5 MINFER_SUMS4 ",""%16,%17,%18,%19"
#define MINFER_SUMS6 MINFER_SUMS5 ",""%20,%21,%22,%23"
#define MINFER_SUMS7 MINFER_SUMS6 ",""%24,%25,%26,%27"
#define MINFER_SUMS8 MINFER_SUMS7 ",""%28,%29,%30,%31"
#define MINFER_SUMS9 MINFER_SUMS8 ",""%32,%33,%34,%35"
#define MINFER_SUMS10 MINFER_SUMS9 ",""%36,%37,%38,%39"
#define MINFER_SUMS11 MINFER_SUMS10 ",""%40,%41,%42,%43"
#define MINFER_SUMS12 MINFER_SUMS11 ",""%44,%45,%46,%47"
#define MINFER_SUMS13 MINFER_SUMS12 ",""%48,%49,%50,%51"
#define MINFER_SUMS14 MINFER_SUMS13 ",""%52,%53,%54,%55"
#define MINFER_SUMS15 MINFER_SUMS14 ",""%56,%57,%58,%59"
#define MINFER_SUMS16 MINFER_SUMS15 ",""%60,%61,%62,%63"
#define MINFER_SUMS17 MINFER_SUMS16 ",""%64,%65,%66,%67"
#define MINFER_SUMS18 MINFER_SUMS17 ",""%68,%69,%70,%71"
#define MINFER_SUMS19 MINFER_SUMS18 ",""%72,%73,%74,%75"
#define MINFER_SUMS20 MINFER_SUMS19 ",""%76,%77,%78,%79"
#define MINFER_SUMS21 MINFER_SUMS20 ",""%80,%81,%82,%83"
#define MINFER_SUMS22 MINFER_SUMS21 ",""%84,%85,%86,%87"
#define MINFER_SUMS23 MINFER_SUMS22 ",""%88,%89,%90,%91"
#define MINFER_SUMS24 MINFER_SUMS23 ",""%92,%93,%94,%95"
#define MINFER_SUMS25 MINFER_SUMS24 ",""%96,%97,%98,%99"
#define MINFER_SUMS26 MINFER_SUMS25 ",""%100,%101,%102,%103"
#define MINFER_SUMS27 MINFER_SUMS26 ",""%104,%105,%106,%107"
#define MINFER_SUMS28 MINFER_SUMS27 ",""%108,%109,%110,%111"
#define MINFER_SUMS29 MINFER_SUMS28 ",""%112,%113,%114,%115"
#define MINFER_SUMS30 MINFER_SUMS29 ",""%116,%117,%118,%119"
#define MINFER_SUMS31 MINFER_SUMS30 ",""%120,%121,%122,%123"
#define MINFER_SUMS32 MINFER_SUMS31 ",""%124,%125,%126,%127"
// clang-format on
#define MINFER_TILE(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define MINFER_STEP(n, sums, a, b)                                                                                  \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" sums "}, {" a "}, " b ", 1, 1, 1, 0;\n\t"
#define MINFER_STEPS(n, sums, a0, a1, b0, b1) \
    "wgmma.fence.sync.aligned;\n\t" MINFER_STEP(n, sums, a0, b0) MINFER_STEP(n, sums, a1, b1)
#define MINFER_INPUTS                                                                                               \
    "r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]), "r"(a[1][3]), \
        "l"(block.descriptor()), "l"(block.after(32).descriptor())
#define MINFER_TILES16 MINFER_TILE(0), MINFER_TILE(1), MINFER_TILE(2), MINFER_TILE(3), MINFER_TILE(4), MINFER_TILE(5), MINFER_TILE(6), MINFER_TILE(7), \
    MINFER_TILE(8), MINFER_TILE(9), MINFER_TILE(10), MINFER_TILE(11), MINFER_TILE(12), MINFER_TILE(13), MINFER_TILE(14), MINFER_TILE(15)
#define MINFER_TILES20 MINFER_TILES16, MINFER_TILE(16), MINFER_TILE(17), MINFER_TILE(18), MINFER_TILE(19)
#define MINFER_TILES32 MINFER_TILES20, MINFER_TILE(20), MINFER_TILE(21), MINFER_TILE(22), MINFER_TILE(23), MINFER_TILE(24), MINFER_TILE(25), \
    MINFER_TILE(26), MINFER_TILE(27), MINFER_TILE(28), MINFER_TILE(29), MINFER_TILE(30), MINFER_TILE(31)
#define MINFER_USED(tiles, n, all, a0, a1, b0, b1)                                                                  \
    if constexpr (Used == tiles)                                                                                    \
        asm volatile(MINFER_STEPS(n, MINFER_SUMS##tiles, a0, a1, b0, b1) : all : MINFER_INPUTS : "memory");
#define MINFER_USED16(tiles, n) MINFER_USED(tiles, n, MINFER_TILES16, "%64,%65,%66,%67", "%68,%69,%70,%71", "%72", "%73")
#define MINFER_USED20(tiles, n) MINFER_USED(tiles, n, MINFER_TILES20, "%80,%81,%82,%83", "%84,%85,%86,%87", "%88", "%89")
#define MINFER_USED32(tiles, n) \
    MINFER_USED(tiles, n, MINFER_TILES32, "%128,%129,%130,%131", "%132,%133,%134,%135", "%136", "%137")
#endif

// d += a, 32 values of K of 16 rows a warp as two of mma_f16's fragments, times 8 columns Used times, of more than 16 an even number.
// The columns lie as token_offset says; `block` is where the values of the first are.
// a may change once the group has been waited for.
template <int Used, int Tiles>
__device__ inline void wgmma_f16(float (&d)[Tiles][4], const uint32_t (&a)[2][4], Columns block) {
    static_assert(Tiles == 16 || Tiles == 20 || Tiles == 32, "");
#ifdef MINFER_WGMMA
    if constexpr (Tiles == 16) {
        MINFER_USED16(1, 8)
        MINFER_USED16(2, 16)
        MINFER_USED16(3, 24)
        MINFER_USED16(4, 32)
        MINFER_USED16(5, 40)
        MINFER_USED16(6, 48)
        MINFER_USED16(7, 56)
        MINFER_USED16(8, 64)
        MINFER_USED16(9, 72)
        MINFER_USED16(10, 80)
        MINFER_USED16(11, 88)
        MINFER_USED16(12, 96)
        MINFER_USED16(13, 104)
        MINFER_USED16(14, 112)
        MINFER_USED16(15, 120)
        MINFER_USED16(16, 128)
    } else if constexpr (Tiles == 20) {
        MINFER_USED20(2, 16)
        MINFER_USED20(4, 32)
        MINFER_USED20(6, 48)
        MINFER_USED20(8, 64)
        MINFER_USED20(10, 80)
        MINFER_USED20(12, 96)
        MINFER_USED20(14, 112)
        MINFER_USED20(16, 128)
        MINFER_USED20(18, 144)
        MINFER_USED20(20, 160)
    } else {
        MINFER_USED32(2, 16)
        MINFER_USED32(4, 32)
        MINFER_USED32(6, 48)
        MINFER_USED32(8, 64)
        MINFER_USED32(10, 80)
        MINFER_USED32(12, 96)
        MINFER_USED32(14, 112)
        MINFER_USED32(16, 128)
        MINFER_USED32(18, 144)
        MINFER_USED32(20, 160)
        MINFER_USED32(22, 176)
        MINFER_USED32(24, 192)
        MINFER_USED32(26, 208)
        MINFER_USED32(28, 224)
        MINFER_USED32(30, 240)
        MINFER_USED32(32, 256)
    }
#elif defined(MINFER_SIMT)
    const int lane = threadIdx.x % kWarp;
    const int column = lane / 4, piece = reinterpret_cast<uintptr_t>(block.at) / 16 % 8;
    for (int n = 0; n < Used; ++n)
        for (int h = 0; h < 2; ++h) {
            uint32_t b[2];
            for (int i = 0; i < 2; ++i) {
                const int at = (piece + 2 * h + i ^ column) - piece;
                b[i] = *reinterpret_cast<const uint32_t*>(block.at + n * kAtomBytes + column * 128 + at * 16 + lane % 4 * 4);
            }
            mma_f16(d[n], a[h], b);
        }
#endif
}
