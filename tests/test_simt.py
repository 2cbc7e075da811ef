"""The SIMT shim itself: it computes what CUDA computes, and names a fault with its place."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from devices import simt_device
from kernel_coverage import all_kernels, complaints, unsupported
from simt.device import SimtArray, SimtDevice, SimtError

from minfer_cuda.errors import KernelError

ROOT = Path(__file__).resolve().parents[1]
RNG = np.random.default_rng(4)


def device_for(source: str, checks: bool = True) -> SimtDevice:
    """A device whose every kernel file is `source`, under the name sample.cu."""
    simt_device()  # skips where there is no compiler
    text = '#line 1 "cuda/sample.cu"\n' + source.lstrip("\n")
    return SimtDevice(checks=checks, source=lambda stem: text)


def run(source: str, out: np.ndarray, *inputs: np.ndarray, grid: int = 1, block: int = 32):
    """What kernel `k(inputs..., out)` leaves in `out`."""
    device = device_for(source)
    array = device.upload(out)
    device.kernel("sample", "k")(grid, block, *map(device.upload, inputs), array)
    return device.download(array)


# ---- faults: a right kernel, an edit, what the error must say ------------------------------------

REVERSE = """
__global__ void k(const float* a, float* b, int n) {
    __shared__ float tile[64];
    const int i = blockIdx.x * 64 + threadIdx.x;
    tile[threadIdx.x] = i < n ? a[i] : 0.0f;          // line 4
    __syncthreads();
    float v = tile[63 - threadIdx.x];                 // line 6
    for (int m = 16; m > 0; m >>= 1)
        v += __shfl_xor_sync(0xffffffffu, v, m);      // line 8
    if (i < n) b[i] = v;                              // line 9
}
"""
TILE = "tile[threadIdx.x] ="
FAULTS = [
    ("a missing barrier", "__syncthreads();", "", "uninitialised", 6),
    ("a barrier of one warp only", "__syncthreads()", "__syncwarp()", "uninitialised", 6),
    ("a tail one too long", "if (i < n) b", "if (i <= n) b", "out of bounds", 9),
    ("a read past the end", "i < n ? a[i] : 0.0f", "a[i]", "out of bounds", 4),
    ("a shared index too large", "tile[63 -", "tile[64 -", "out of bounds", 6),
    ("a lane that left", "float v =", "if (threadIdx.x == 5) return; float v =", "divergence", 8),
    ("a lane in another loop", "v += ", "if (m != 4 || threadIdx.x) v += ", "divergence", 8),
    ("a barrier for half", "if (i", "if (i % 64 < 40) __syncthreads(); if (i", "barrier", 9),
    ("a thread that left", "__sync", "if (threadIdx.x == 63) return; __sync", "barrier", 5),
    ("a value not set", TILE, "if (threadIdx.x) " + TILE, "uninitialised", 6),
    ("one writer too many", TILE, "tile[threadIdx.x / 2] =", "race", 4),
    ("a write that follows reads", "for (int", TILE + " v; for (int", "race", 6),
    ("blocks in each other's way", "b[i] = v", "b[threadIdx.x] = v", "race", 9),
    ("a misaligned vector", "b[i] = v", "*(float2*)(b + 1) = make_float2(v, v)", "misaligned", 9),
    ("lanes by luck", "0xffffffffu", "__activemask()", "forbidden", 8),
]


def reverse(source: str, checks: bool = True) -> np.ndarray:
    device = device_for(source, checks)
    out = device.empty(100, np.float32)
    device.kernel("sample", "k")(2, 64, device.upload(np.arange(100, dtype=np.float32)), out, 100)
    return device.download(out)


@pytest.mark.parametrize("checks", [True, False])
def test_a_right_kernel_gives_right_values(checks):
    padded = np.pad(np.arange(100, dtype=np.float32), (0, 28)).reshape(2, 2, 32)
    expected = np.repeat(padded[:, ::-1].sum(2), 32)[:100]
    np.testing.assert_array_equal(reverse(REVERSE, checks), expected)


@pytest.mark.parametrize("name, old, new, kind, line", FAULTS, ids=[f[0] for f in FAULTS])
def test_a_fault_is_named_with_its_place(name, old, new, kind, line):
    assert old in REVERSE
    with pytest.raises(SimtError) as caught:
        reverse(REVERSE.replace(old, new, 1))
    assert (caught.value.kind, caught.value.places[0]) == (kind, f"sample.cu:{line}")
    assert "k: " in str(caught.value) and "block (" in str(caught.value)


def test_a_race_names_both_threads_and_places():
    source = """
__global__ void k(int* out) {
    __shared__ int x;
    if (threadIdx.x == 0) x = 1;
    out[threadIdx.x] = threadIdx.x < 64 ? 0 : x;
}"""
    words = r"thread \(64, 0, 0\) at sample.cu:4; thread \(0, 0, 0\) at sample.cu:3"
    with pytest.raises(SimtError, match=words):
        run(source, np.zeros(96, np.int32), block=96)


def test_a_read_of_unwritten_global_memory_is_an_error():
    device = device_for("__global__ void k(const int* a, int* out) { *out = *a; }")
    with pytest.raises(SimtError, match="uninitialised: read of 4 bytes of global memory"):
        device.kernel("sample", "k")(1, 1, device.empty(1, np.int32), device.empty(1, np.int32))


def test_a_pointer_in_a_structure_gives_access_to_its_allocation_and_no_more():
    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_uint64), ("at", ctypes.c_int32)]

    device = device_for("""
        struct Pair { const int* a; int at; };
        __global__ void k(Pair p, int* out) { *out = p.a[p.at]; }""")
    array, out = device.upload(np.arange(5, dtype=np.int32)), device.empty(1, np.int32)
    kernel = device.kernel("sample", "k")
    kernel(1, 1, Pair(array.data.ptr, 4), out)
    assert device.download(out)[0] == 4
    with pytest.raises(SimtError, match="out of bounds"):
        kernel(1, 1, Pair(array.data.ptr, 5), out)


@pytest.mark.parametrize(
    "body",
    ["*out = n / *out;", "*out = deep(n);"],
    ids=["division by zero", "endless recursion"],
)
def test_a_kernel_that_crashes_is_named_and_the_device_goes_on(body):
    device = device_for(
        """
        __device__ __noinline__ int deep(int n) {
            volatile int frame[64]; frame[n % 64] = n; return deep(n + 1) + frame[n % 64]; }
        __global__ void k(int* out, int n) { BODY }
        __global__ void fine(int* out) { *out = 7; }""".replace("BODY", body)
    )
    array = device.zeros(1, np.int32)
    with pytest.raises(SimtError, match="k: crash: signal") as caught:
        device.kernel("sample", "k")(1, 1, array, 5)
    assert "sample.cu:3" in caught.value.places or "sample.cu:2" in caught.value.places
    device.kernel("sample", "fine")(1, 1, array)
    assert device.download(array)[0] == 7


LAST_BLOCK = """
__global__ void k(int* partial, int* arrived, int* out) {
    __shared__ bool last;
    partial[blockIdx.x * 32 + threadIdx.x] = blockIdx.x;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    int sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += partial[b * 32 + threadIdx.x];
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) *arrived = 0;
}
"""


def test_blocks_may_exchange_through_a_fence_and_an_atomic():
    device = device_for(LAST_BLOCK)
    arrived, out = device.zeros(1, np.int32), device.empty(32, np.int32)
    for _ in range(2):
        device.kernel("sample", "k")(5, 32, device.empty(160, np.int32), arrived, out)
        assert (device.download(out) == 10).all()
    unfenced = device_for(LAST_BLOCK.replace("__threadfence();", ""))
    arrived, out = unfenced.zeros(1, np.int32), unfenced.empty(32, np.int32)
    with pytest.raises(SimtError, match="race: read of global memory that another block") as caught:
        unfenced.kernel("sample", "k")(5, 32, unfenced.empty(160, np.int32), arrived, out)
    assert caught.value.places == ["sample.cu:10"]


COPY = """
__global__ void k(const uint4* a, uint4* out) {
    __shared__ uint4 tile[64];
    simt_copy_async(tile + threadIdx.x, a + threadIdx.x, 16);
    simt_copy_async_commit();
    simt_copy_async(tile + 32 + threadIdx.x, a + 32 + threadIdx.x, 16);
    simt_copy_async_commit();
    simt_copy_async_wait(1);
    __syncthreads();
    out[threadIdx.x] = tile[31 - threadIdx.x];
}
"""


def test_asynchronous_copies_arrive_group_by_group():
    a = RNG.integers(0, 2**32, (64, 4), dtype=np.uint32)
    np.testing.assert_array_equal(run(COPY, np.zeros((32, 4), np.uint32), a), a[31::-1])
    for old, new in (("wait(1)", "wait(2)"), ("31 - threadIdx.x", "63 - threadIdx.x")):
        with pytest.raises(SimtError, match="race: read of .* that a cp.async is still filling"):
            run(COPY.replace(old, new), np.zeros((32, 4), np.uint32), a)
    with pytest.raises(SimtError, match="uninitialised: read of 16 bytes of shared memory"):
        run(COPY.replace("__syncthreads()", ""), np.zeros((32, 4), np.uint32), a)


# ---- warps that wait for each other: arrivals and named barriers --------------------------------

RING = """
__global__ void k(const int* a, int* out) {
    __shared__ int stage[2][64];
    __shared__ uint64_t full[2], empty[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 50)
        for (int s = 0; s < 2; ++s) {
            simt_arrival_begin(full + s, 1);
            simt_arrival_begin(empty + s, 2);
        }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 37; ++i) {
        const int s = i % 2, phase = i / 2 % 2;
        if (warp == PRODUCER) {
            if (lane) return;
            simt_arrival_wait(empty + s, phase ^ 1);                  // line 16
            simt_arrival_expect(full + s, 256);
            for (int j = 0; j < 64; ++j) stage[s][j] = a[64 * i + j]; // line 18
            simt_arrival_come(full + s, 256);
        } else {
            simt_arrival_wait(full + s, phase);                       // line 21
            sum += stage[s][lane] - stage[s][lane + 32];              // line 22
            __syncwarp();
            if (lane == 0) simt_arrival_arrive(empty + s);            // line 24
        }
    }
    if (warp != PRODUCER) out[blockIdx.x * 96 + threadIdx.x] = sum;
}
"""
EMPTY_WAIT = "simt_arrival_wait(empty + s, phase ^ 1);"
FULL_WAIT = "simt_arrival_wait(full + s, phase);"
GIVE_BACK = "if (lane == 0) simt_arrival_arrive(empty + s);"


def ring(producer: int, source: str = RING, checks: bool = True) -> np.ndarray:
    """What the three warps of each of two blocks leave."""
    device = device_for(source.replace("PRODUCER", str(producer)), checks)
    out = device.zeros((2, 3, 32), np.int32)
    items = device.upload(np.arange(37 * 64, dtype=np.int32) ** 2 % 1009)
    device.kernel("sample", "k")(2, 96, items, out)
    return device.download(out)


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("producer", [0, 2])
def test_a_ring_of_a_producer_and_consumers_hands_on_every_stage(producer, checks):
    items = (np.arange(37 * 64) ** 2 % 1009).reshape(37, 2, 32)
    expected = np.tile((items[:, 0] - items[:, 1]).sum(0), (2, 3, 1))
    expected[:, producer] = 0
    np.testing.assert_array_equal(ring(producer, checks=checks), expected)


RING_FAULTS = [  # what becomes of it where the first warp is the producer, and where the last
    ("a consumer that does not wait", FULL_WAIT, "", ("uninitialised", 22), ("race", 22)),
    ("a producer that does not wait", EMPTY_WAIT, "", ("race", 18), ("race", 18)),
    ("a stage read after it was given back", GIVE_BACK, GIVE_BACK + " sum += stage[s][lane];",
     ("race", 18), ("race", 18)),
    ("a consumer that nobody waits for", GIVE_BACK,
     "if (threadIdx.x == 32) for (int n = 0; n < 2; ++n) simt_arrival_arrive(empty + s);",
     ("race", 18), ("race", 18)),
    ("a consumer that nobody waits for any more", GIVE_BACK,
     "for (int n = i < 9 ? lane == 0 : 2 * (threadIdx.x == 32); n; --n) "
     "simt_arrival_arrive(empty + s);", ("race", 18), ("race", 18)),
    ("a stage told full too early", "for (int j", "simt_arrival_come(full + s, 256); for (int j",
     ("uninitialised", 22), ("uninitialised", 22)),
    ("bytes too many", "come(full + s, 256)", "come(full + s, 260)",
     ("barrier", 19), ("barrier", 19)),
    ("a phase that is none", "s, phase);", "s, phase + 2);", ("barrier", 21), ("barrier", 21)),
    ("a stage that was never begun", "s < 2;", "s < 1;",
     ("uninitialised", 21), ("uninitialised", 21)),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, old, new, first, last", RING_FAULTS, ids=[f[0] for f in RING_FAULTS]
)
def test_a_fault_of_a_ring_is_named_with_its_place(name, old, new, first, last):
    assert old in RING
    for producer, (kind, line) in ((0, first), (2, last)):
        with pytest.raises(SimtError) as caught:
            ring(producer, RING.replace(old, new, 1))
        assert (caught.value.kind, caught.value.places[0]) == (kind, f"sample.cu:{line}")


def test_bytes_that_do_not_come_are_told_with_the_lines_that_wait_for_them():
    short = RING.replace("come(full + s, 256)", "come(full + s, 252)")
    # The producer can fill both stages; then it waits too.
    full = "an mbarrier at sample.cu:21 misses 0 of 1 arrivals and 4 bytes in phase 0"
    empty = "an mbarrier at sample.cu:16 misses 2 of 2 arrivals and 0 bytes in phase 0"
    for producer, words in ((0, f"{empty}, {full}"), (2, f"{full}, {empty}")):
        for checks in (True, False):
            with pytest.raises(SimtError, match="barrier: " + words):
                ring(producer, short, checks)


def test_who_has_waited_for_all_readers_may_write_and_update_repeatedly():
    source = """
__global__ void k(int* out) {
    __shared__ int x, y;
    __shared__ uint64_t bar;
    if (threadIdx.x == 0) x = 3, y = 4, simt_arrival_begin(&bar, 64);
    __syncthreads();
    if (threadIdx.x == 0) {
        simt_arrival_wait(&bar, 0);
        for (int n = 0; n < 3; ++n) x = n, atomicAdd(&y, 1);
        out[0] = x + y;
    } else if (threadIdx.x >= 32) {
        out[threadIdx.x] = x + y;
        simt_arrival_arrive(&bar);
    }
}"""
    got = run(source, np.zeros(96, np.int32), block=96)
    assert got[0] == 2 + 7 and (got[32:] == 7).all()
    for left in ("x = n", "atomicAdd(&y, 1)"):
        hasty = source.replace("simt_arrival_wait(&bar, 0);", "")
        hasty = hasty.replace("x = n, atomicAdd(&y, 1)", left)
        with pytest.raises(SimtError, match="race"):
            run(hasty, np.zeros(96, np.int32), block=96)


def test_a_race_of_warps_whose_numbers_fall_into_one_set_is_found():
    source = """
__global__ void k(int* out) {
    __shared__ int x;
    if (threadIdx.x == 32) x = 1;
    __syncthreads();
    if (threadIdx.x % 480 == 0) out[threadIdx.x] = x;
    if (threadIdx.x == 0) x = 2;
}"""
    with pytest.raises(SimtError, match="race: write of .* that another thread reads"):
        run(source, np.zeros(512, np.int32), block=512)


def faulty(body: str, checks: bool) -> SimtError:
    """What becomes of 64 threads that do `body`."""
    device = device_for(
        """
__global__ void k(uint64_t* out) {
    __shared__ uint64_t bar[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) simt_arrival_begin(bar, 2);
    __syncthreads();
    BODY
}""".replace("BODY", body),
        checks,
    )
    with pytest.raises(SimtError) as caught:
        device.kernel("sample", "k")(1, 64, device.zeros(4, np.uint64))
    return caught.value


MISUSES = [
    ("arrival_expect(bar, 8); simt_arrival_arrive(bar);",
     "barrier: more arrivals in a phase of an mbarrier than its count, 2"),
    ("arrival_arrive(bar + 1)", "uninitialised: an mbarrier that was never begun"),
    ("arrival_wait(bar + 1, 1)", "uninitialised: an mbarrier that was never begun"),
    ("arrival_come(out, 8)", "out of bounds: an mbarrier outside of shared memory"),
    ("arrival_begin(out, 1)", "out of bounds: an mbarrier outside of shared memory"),
    ("arrival_begin(bar + 2, 1)", "out of bounds: an mbarrier outside of shared memory"),
    ("arrival_begin((uint64_t*)((char*)bar + 4), 1)", "misaligned: an mbarrier at"),
    ("arrival_begin(bar, 0)", "barrier: an mbarrier of 0 arrivals"),
    ("arrival_begin(bar, 65536)", "barrier: an mbarrier of 65536 arrivals"),
    ("arrival_expect(bar, 1 << 20)", "barrier: an mbarrier that misses 1048576 bytes"),
    ("named_barrier(0, 64)", "barrier: named barrier 0: the ids are 1 to 15"),
    ("named_barrier(16, 64)", "barrier: named barrier 16: the ids are 1 to 15"),
    ("named_barrier(1, 48)", "barrier: named barrier 1 of 48 threads: not whole warps of a block"),
    ("named_barrier(1, 0)", "barrier: named barrier 1 of 0 threads: not whole warps of a block"),
    ("named_barrier(1, 96)", "barrier: named barrier 1 of 96 threads: not whole warps of a block"),
    ("named_barrier(1, lane ? 64 : 32)",
     "barrier: named barrier 1 of (32|64) threads, but others wait at it for (32|64)"),
]  # fmt: skip


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("call, words", MISUSES, ids=[m[0] for m in MISUSES])
def test_a_misused_barrier_of_a_part_of_the_block_is_named(call, words, checks):
    caught = faulty(f"simt_{call};", checks)
    assert re.search(words, str(caught)) and (not checks or caught.places[0] == "sample.cu:6")


STUCK = [
    ("if (warp) simt_named_barrier(3, 64);",
     "named barrier 3 at sample.cu:6 misses 32 of 64 threads"),
    ("if (warp) simt_arrival_wait(bar, 0); else if (!lane) simt_arrival_arrive(bar);",
     "an mbarrier at sample.cu:6 misses 1 of 2 arrivals and 0 bytes in phase 0"),
    ("if (warp) simt_arrival_wait(bar, 0); else __syncthreads();", "an mbarrier at sample.cu:6"),
    ("if (lane == 5) simt_arrival_wait(bar, 0); __syncwarp();", "an mbarrier at sample.cu:6"),
]  # fmt: skip


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("body, words", STUCK, ids=[s[0] for s in STUCK])
def test_who_waits_for_what_never_comes_is_named(body, words, checks):
    caught = faulty(body, checks)
    assert f"barrier: {words}" in str(caught)


PAIRS = """
__global__ void k(int* out) {
    __shared__ int x[160];
    const int i = threadIdx.x, pair = i / 64;
    x[i] = i;
    if (i >= 128) {
        out[i] = i;
        return;
    }
    for (int n = 0; n < 9; ++n) {
        FIRST
        const int v = x[i ^ 33];
        LAST
        x[i] = v + 1;
    }
    out[i] = x[i];
}
"""
MEET = "simt_named_barrier(1 + pair, 64);"


def test_pairs_of_warps_meet_at_named_barriers_of_their_own():
    i = np.arange(160)
    expected = np.where(i < 128, (i ^ 33) + 9, i)
    anywhere = f"if (i & 32) {MEET} else\n {MEET}"
    for first, last in ((anywhere, MEET), ("", MEET), (anywhere, "")):
        source = PAIRS.replace("FIRST", first).replace("LAST", last)
        if first and last:
            got = run(source, np.zeros(160, np.int32), block=160)
            np.testing.assert_array_equal(got, expected)
            continue
        with pytest.raises(SimtError, match="race|uninitialised"):
            run(source, np.zeros(160, np.int32), block=160)


HANDED_ON = """
__global__ void k(int* out) {
    __shared__ int x;
    __shared__ uint64_t bar[2];
    const int i = threadIdx.x;
    if (i < 2) simt_arrival_begin(bar + i, 1);
    __syncthreads();
    if (i == 0) x = 5;
    if (i == 0) simt_arrival_arrive(bar);
    if (i == 32) simt_arrival_wait(bar, 0);
    HAND
    if (i == 64) *out = x;                             // line 11
}
"""
HANDS = ["if (i == 32) simt_arrival_arrive(bar + 1); if (i == 64) simt_arrival_wait(bar + 1, 0);",
         "__syncwarp(); if (i >= 32) simt_named_barrier(1, 64);"]  # fmt: skip


@pytest.mark.parametrize("hand", HANDS, ids=["arrival", "named barrier"])
def test_what_a_warp_has_waited_for_it_hands_on(hand):
    source = HANDED_ON.replace("HAND", hand)
    assert run(source, np.zeros(1, np.int32), block=96)[0] == 5
    with pytest.raises(SimtError, match="race: read of shared memory") as caught:
        run(source.replace("simt_arrival_wait(bar, 0)", ""), np.zeros(1, np.int32), block=96)
    assert caught.value.places[0] == "sample.cu:11"


LANES = """
__global__ void k(int* out) {
    __shared__ int x[3];
    __shared__ uint64_t bar;
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) simt_arrival_begin(&bar, 1);
    __syncthreads();
    for (int n = 0; n < 20; ++n) {
        if (threadIdx.x == 32 + n) simt_arrival_arrive(&bar);
        if (threadIdx.x >= 32) continue;
        if (lane == 0) {
            x[0] = n;
            simt_arrival_arrive(&bar);
            x[1] = n;
        }
        __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);
        if (lane == 15) {
            const int sum = x[0] + x[1];
            simt_arrival_arrive(&bar);
            x[2] = sum;
        }
        __syncwarp();
        if (lane == 31) out[n] = x[2] + x[1];
        __syncwarp(); // behind
    }
}
"""


def test_phases_that_end_between_the_lanes_of_a_warp_leave_their_order_alone():
    got = run(LANES, np.zeros(20, np.int32), block=64)
    np.testing.assert_array_equal(got, 3 * np.arange(20))
    for old in ("__syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);", "__syncwarp();"):
        with pytest.raises(SimtError, match="race|uninitialised"):
            run(LANES.replace(old, "", 1), np.zeros(20, np.int32), block=64)


@pytest.mark.parametrize("mask", ["0xffffffffu", "lane < 16 ? 0xffffu : 0xffff0000u"])
def test_what_lanes_knew_before_a_phase_ended_tells_nothing_of_later_accesses(mask):
    source = """
__global__ void k(int* out) {
    __shared__ int x[32];
    __shared__ uint64_t bar;
    const int lane = threadIdx.x;
    x[lane] = 1;
    if (lane == 0) simt_arrival_begin(&bar, 32);
    for (int n = 0; n < 5; ++n) __syncwarp(MASK);
    simt_arrival_arrive(&bar);
    simt_arrival_wait(&bar, 0);
    x[lane] = 2;
    AGAIN
    out[lane] = x[lane ^ 1];
}""".replace("MASK", mask)
    got = run(source.replace("AGAIN", f"__syncwarp({mask});"), np.zeros(32, np.int32))
    assert (got == 2).all()
    with pytest.raises(SimtError, match="race"):
        run(source.replace("AGAIN", ""), np.zeros(32, np.int32))


@pytest.mark.parametrize(
    "argument, words",
    [
        (2.0, "parameter is int"),
        (2**31, "not an int32"),
        (np.int64(1), "parameter is int"),
        (None, "parameter is int"),
        ("n", "parameter is int"),
    ],
)
def test_a_wrong_scalar_is_refused(argument, words):
    device = device_for(REVERSE)
    array = device.zeros(100, np.float32)
    with pytest.raises(KernelError, match=words):
        device.kernel("sample", "k")(1, 64, array, array, argument)


def test_wrong_arrays_and_launches_are_refused():
    device = device_for(REVERSE)
    array, kernel = device.zeros((10, 10), np.float32), device.kernel("sample", "k")
    for wrong, words in (
        (array.T, "not contiguous"),
        (array + 1, "not a device array"),
        (np.zeros(100, np.float32), "not a device array"),
        (array.view(np.int32), "points to float32"),
    ):
        with pytest.raises(KernelError, match=words):
            kernel(1, 64, wrong, array, 100)
    for grid, block, shared, words in (
        (0, 64, 0, "is empty"),
        (1, 1025, 0, "launch limits"),
        (1, 64, 228 << 10, "bytes of shared memory"),
    ):
        with pytest.raises(KernelError, match=words):
            kernel(grid, block, array, array, 100, shared=shared)
    with pytest.raises(KernelError, match="it takes 3 arguments, got 2"):
        kernel(1, 64, array, array)
    with pytest.raises(KernelError, match="does not compile for the CPU: .*sample.cu:1.*error"):
        device_for("__global__ void k(int* a) { *a = b; }").kernel("sample", "k")


# ---- values -------------------------------------------------------------------------------------


def test_half_and_bfloat16_convert_exactly():
    halves = np.arange(65536, dtype=np.uint16)
    source = """__global__ void k(const unsigned short* a, float* out) {
        const int i = blockIdx.x * 256 + threadIdx.x;
        out[i] = __half2float(__ushort_as_half(a[i]));
    }"""
    got = run(source, np.zeros(65536, np.float32), halves, grid=256, block=256)
    np.testing.assert_array_equal(got, halves.view(np.float16).astype(np.float32))
    # Every half, the points half-way to its neighbour and just beside, subnormals and overflow.
    values = halves.view(np.float16).astype(np.float32)
    values = values[np.isfinite(values)]
    middle = (values[:-1] + values[1:]) / 2
    floats = np.concatenate([values, middle, np.nextafter(middle, np.float32(0)), middle * 1.0001,
                             np.float32([65519, 65520, 1e9, -1e9, 1e-9, np.inf])])  # fmt: skip
    count = len(floats) // 256
    floats = floats[: count * 256].astype(np.float32)
    source = """__global__ void k(const float* a, unsigned short* out) {
        const int i = blockIdx.x * 256 + threadIdx.x;
        out[i] = __half_as_ushort(__float2half_rn(a[i]));
    }"""
    got = run(source, np.zeros(len(floats), np.uint16), floats, grid=count, block=256)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, floats.astype(np.float16).view(np.uint16))
    source = source.replace("half", "bfloat16").replace("bfloat16_rn", "bfloat16")
    got = run(source, np.zeros(len(floats), np.uint16), floats, grid=count, block=256)
    bits = floats.view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(got, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def test_lanes_exchange_values():
    source = """__global__ void k(const int* a, int* out) {
        const int lane = threadIdx.x, v = a[lane]; int* o = out + lane;
        o[0] = __shfl_sync(0xffffffffu, v, lane + 3);
        o[32] = __shfl_xor_sync(0xffffffffu, v, 5);
        o[64] = __shfl_up_sync(0xffffffffu, v, 2, 8);
        o[96] = __shfl_down_sync(0xffffffffu, v, 2);
        o[128] = __ballot_sync(0xffffffffu, v & 1);
        o[160] = __match_any_sync(0xffffffffu, v & 3);
        o[192] = __reduce_max_sync(0xffffffffu, v);
        o[224] = lane < 8 ? __reduce_add_sync(0xffu, v) : 0;
    }"""
    v, lane = RNG.integers(-99, 99, 32), np.arange(32)
    got = run(source, np.zeros((8, 32), np.int32), v.astype(np.int32))
    sets = [sum(1 << int(j) for j in np.flatnonzero((v & 3) == x)) for x in v & 3]
    expected = [
        v[(lane + 3) % 32], v[lane ^ 5], np.where(lane % 8 < 2, v, np.roll(v, 2)),
        np.where(lane < 30, np.roll(v, -2), v),
        np.full(32, sum(1 << int(j) for j in np.flatnonzero(v & 1))), sets, np.full(32, v.max()),
        np.where(lane < 8, v[:8].sum(), 0),
    ]  # fmt: skip
    np.testing.assert_array_equal(got, np.array(expected).astype(np.uint32).view(np.int32))


def test_bytes_are_permuted_and_multiplied_as_the_device_does():
    source = """__global__ void k(const unsigned* a, unsigned* out) {
        const unsigned x = a[0], y = a[1];
        out[0] = __byte_perm(x, y, 0x7250); out[1] = __byte_perm(x, y, 0xbf19);
        out[2] = __dp4a((int)x, (int)y, 7); out[3] = __dp4a(x, y, 7u);
        out[4] = __brev(x); out[5] = __clz(x >> 5); out[6] = __ffs(x & 0xff00); out[7] = __popc(y);
        out[8] = __umulhi(x, y); out[9] = __float2int_rn(2.5f); out[10] = __float2int_rn(3e9f);
        out[11] = __funnelshift_r(x, y, 12); out[12] = __umulhi(0x80000000u, 6);
    }"""
    x, y = 0x8F41C3F0, 0x7E90A512
    both = [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]
    signed = [np.int8(np.uint8(b)).astype(int) if b < 128 else b - 256 for b in both]
    sign = [0xFF if b > 127 else 0 for b in both]
    expected = [
        both[7] << 24 | both[2] << 16 | both[5] << 8 | both[0],
        sign[3] << 24 | sign[7] << 16 | both[1] << 8 | sign[1],
        7 + sum(signed[i] * signed[4 + i] for i in range(4)),
        7 + sum(both[i] * both[4 + i] for i in range(4)),
        int(f"{x:032b}"[::-1], 2), 5, 9, y.bit_count(), x * y >> 32, 2, 2**31 - 1,
        (y << 32 | x) >> 12 & 0xFFFFFFFF, 3,
    ]  # fmt: skip
    got = run(source, np.zeros(13, np.uint32), np.array([x, y], np.uint32), block=1)
    np.testing.assert_array_equal(got, np.array(expected, np.int64).astype(np.uint32))


def test_mma_multiplies_fragments():
    source = """__global__ void k(const unsigned* a, const unsigned* b, int* out) {
        const int lane = threadIdx.x, g = lane / 4, t = lane % 4;  // rows of 8 words
        const unsigned fa[4] = {a[g*8+t], a[(g+8)*8+t], a[g*8+4+t], a[(g+8)*8+4+t]};
        const unsigned fb[2] = {b[g*8+t], b[g*8+4+t]};
        int d[4] = {1, 1, 1, 1}; float f[4] = {0, 0, 0, 0};
        simt_mma_s8(d, fa, fb, 32);
        simt_mma_f16(f, fa, fb);
        for (int i = 0; i < 4; ++i) {
            out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
            out[128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2] = __float_as_int(f[i]);
        }
    }"""
    halves = RNG.standard_normal((24, 16)).astype(np.float16)
    a, b = halves[:16], halves[16:]
    got = run(source, np.zeros((2, 16, 8), np.int32), a.view(np.uint32), b.view(np.uint32))
    bytes_a, bytes_b = a.view(np.int8).astype(int), b.view(np.int8).astype(int)
    np.testing.assert_array_equal(got[0], bytes_a @ bytes_b.T + 1)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_array_equal(got[1].view(np.float32), exact.astype(np.float32))


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_from_shared_memory(transposed):
    source = """__global__ void k(const uint4* a, unsigned* out) {
        __shared__ uint4 rows[32];
        rows[threadIdx.x] = a[threadIdx.x];
        __syncwarp();
        simt_load_matrices(out + threadIdx.x * 4, rows + threadIdx.x, TRANSPOSED);
    }""".replace("TRANSPOSED", str(int(transposed)))
    a = RNG.integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    got = run(source, np.zeros((32, 4), np.uint32), a.view(np.uint32).reshape(32, 4))
    wanted = a.swapaxes(1, 2) if transposed else a
    wanted = np.ascontiguousarray(wanted).view(np.uint32).reshape(4, 32).T
    np.testing.assert_array_equal(got, wanted)
    unsynced = source.replace("__syncwarp();", "")
    with pytest.raises(SimtError, match="race|uninitialised"):
        run(unsynced.replace("rows + threadIdx.x,", "rows + (threadIdx.x ^ 1),"),
            np.zeros((32, 4), np.uint32), a.view(np.uint32).reshape(32, 4))  # fmt: skip


def test_arrays_keep_their_memory_through_views_and_uploads():
    device = SimtDevice() if simt_device() else None
    array = device.upload(np.arange(12, dtype=np.float32).reshape(3, 4))
    assert isinstance(array[1], SimtArray) and array[1].data.ptr == array.data.ptr + 16
    device.upload(np.zeros(4, np.float32), into=array[1])
    assert device.download(array)[1].sum() == 0 and type(device.download(array)) is np.ndarray
    with pytest.raises(KernelError, match="upload of float32"):
        device.upload(np.zeros(5, np.float32), into=array[1])


def test_a_kernel_that_never_ran_is_named_and_so_is_a_stale_entry_of_the_list():
    ours = all_kernels()
    assert {"matvec", "attention", "rms_norm", "add"} <= ours
    listed = unsupported()
    for kernel, test in listed.items():
        file, function = test.split("::")
        assert kernel in ours and f"def {function}(" in (ROOT / file).read_text()
    assert complaints(ours - set(listed)) == []
    (words,) = complaints(ours - set(listed) - {"matvec"})
    assert words.startswith("kernel matvec has not run")
    assert len(complaints(ours)) == len(listed)


def test_every_kernel_is_declared_in_the_form_that_the_coverage_check_finds():
    declared = sum(path.read_text().count("__global__") for path in (ROOT / "cuda").glob("*.cu*"))
    assert declared == len(all_kernels())
