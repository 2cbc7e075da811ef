// GGML tensor types on the device: one struct per type, the only place that knows its bits.
//
// Quantised types are read from weight records (layout 2 of ARCHITECTURE.md): 8 rows x kRecK values,
//   chunk 0: low plane, high plane | (chunk 1: low plane, high plane) | scales of the 8 rows
// where a chunk is 128 values of K and lane 4g + t of a warp owns row g. Value 32b + 16h + 4t + e of
// a chunk is byte e of the int8 word (b, h) that `word` returns, times kMul (a power of two that lets
// signed codes be used as they are stored). A value is exactly
//   scale(b, h) * code - minimum(b, h)          (`minimum` also takes a run-time b) in float32, each step rounded once.
// Functions take the lane's words l and (c, b, h): chunk, block, half of the block.
// K types have integer scales under one float: scale = super * int_scale, minimum = super_min * int_min
// (kInteger), so that a product can weigh its integer sums before it converts them.
// kHalf: scale or minimum differ between h = 0 and 1 (16-value sub-blocks). kMin: minimum is not 0.
// Pair: the scales of a row's blocks 2p and 2p + 1 of a record, as few words as hold them; i of 0, 1
// picks the block, at run time.
//
// A type defines: kBlock, kRaw (values, bytes of a block in the file), kLow, kHigh (bits of a code in
// each plane), kMul, kHalf, kMin, kScaleRow, code(), pack_scales(), Lane scales, word(), scale(),
// minimum(), and of a Pair load_pair(), scale(), minimum(). Sources: the GGUF formats as read by
// gguf.quants, which the tests compare bit for bit.
#pragma once
#include "common.cuh"

constexpr uint32_t kNibble = 0x0f0f0f0fu;

__device__ inline uint32_t raw16(const uint8_t* p) { return p[0] | p[1] << 8; }
__device__ inline void put16(uint8_t* p, uint32_t v) {
    p[0] = static_cast<uint8_t>(v);
    p[1] = static_cast<uint8_t>(v >> 8);
}

// Where a record is read from: streamed past L1 from global memory, or from shared memory.
struct Streamed {
    __device__ static uint4 get16(const uint8_t* p) { return load_stream16(p); }
    __device__ static uint2 get8(const uint8_t* p) { return load_stream8(p); }
    __device__ static uint32_t get4(const uint8_t* p) { return load_stream4(p); }
    __device__ static uint16_t get2(const uint8_t* p) { return load_stream2(p); }
};
struct Shared {
    __device__ static uint4 get16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }
    __device__ static uint2 get8(const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); }
    __device__ static uint32_t get4(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }
    __device__ static uint16_t get2(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
};

// One lane's share of one record: its words of the planes by chunk, and the scales of its row.
template <int Chunks, int Low, int High, int ScaleWords>
struct LaneWords {
    uint32_t q[Chunks][Low == 8 ? 8 : Low == 4 ? 4 : 2];
    uint32_t h[Chunks][High == 0 ? 1 : High];
    uint32_t s[ScaleWords];
};

// What the record types share: sizes, and where a code sits in the planes.
template <int Block, int Raw, int Low, int High, int ScaleWords, int PairWords>
struct RecordType {
    static constexpr bool kFloat = false, kInteger = Block == 256;
    static constexpr int kBlock = Block, kRaw = Raw, kLow = Low, kHigh = High;
    static constexpr int kRecK = Block == 32 ? 128 : 256;
    static constexpr int kChunks = kRecK / 128;
    static constexpr int kLowBytes = 128 * 8 * Low / 8, kHighBytes = 128 * 8 * High / 8;
    static constexpr int kChunkBytes = kLowBytes + kHighBytes;
    static constexpr int kRecord = 8 * (kRecK / Block) * Raw;
    static constexpr int kScales = kChunks * kChunkBytes;  // offset of the scales in a record
    static_assert(kRecord % 16 == 0, "records keep 16-byte alignment");
    using Lane = LaneWords<kChunks, Low, High, ScaleWords>;
    struct Pair {
        uint32_t s[PairWords];
    };
    // Records a lane of a matvec keeps in flight: what 64 registers a thread have room for.
    static constexpr int kWords = kChunks * (Low + High) + ScaleWords;
    static constexpr int kDepth = kWords < 11 ? 3 : 2;
    // The same where rows of a rotation are paired at the end, which takes registers, too.
    static constexpr int kPairDepth = kWords > 12 ? 1 : 2;

    template <class M>
    __device__ static void load_planes(Lane& l, const uint8_t* rec, int lane) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) load_chunk<M>(l, c, rec + c * kChunkBytes, lane);
    }
    // The planes at p as chunk c of the lane.
    template <class M>
    __device__ static void load_chunk(Lane& l, int c, const uint8_t* p, int lane) {
        if constexpr (Low == 2) {
            uint2 v = M::get8(p + lane * 8);
            l.q[c][0] = v.x, l.q[c][1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < Low / 4; ++i) {
                uint4 v = M::get16(p + i * 512 + lane * 16);
                l.q[c][4 * i] = v.x, l.q[c][4 * i + 1] = v.y;
                l.q[c][4 * i + 2] = v.z, l.q[c][4 * i + 3] = v.w;
            }
        }
        p += kLowBytes;
        if constexpr (High == 1) l.h[c][0] = M::get4(p + lane * 4);
        if constexpr (High == 2) {
            uint2 v = M::get8(p + lane * 8);
            l.h[c][0] = v.x, l.h[c][1] = v.y;
        }
    }
    // Bit position of the low part of code (b, h, e) in word index `low_word(b, h)` of the lane.
    __device__ static int low_word(int b, int h) { return Low == 8 ? 2 * b + h : Low == 4 ? b : b >> 1; }
    __device__ static int low_bit(int b, int h, int e) {
        return 8 * e + (Low == 8 ? 0 : Low == 4 ? 4 * h : 2 * (2 * (b & 1) + h));
    }
    __device__ static int high_word(int b) { return High == 2 ? b >> 1 : 0; }
    __device__ static int high_bit(int b, int h, int e) {
        return 8 * e + (High == 2 ? 2 * (2 * (b & 1) + h) : 2 * b + h);
    }
};

// Shift left by a compile-time amount that may be negative.
__device__ inline uint32_t shift(uint32_t w, int by) { return by >= 0 ? w << by : w >> -by; }

// ---- types of 32-value blocks: one half per block (or half2 d, m) and row: scales [row][block] ----
template <int Raw, int Low, int High>
struct OneScale : RecordType<32, Raw, Low, High, 2, 1> {
    using Base = RecordType<32, Raw, Low, High, 2, 1>;
    using Lane = typename Base::Lane;
    using Pair = typename Base::Pair;
    static constexpr bool kHalf = false, kMin = false;
    template <class M>
    __device__ static Lane load(const uint8_t* rec, int lane) {
        Lane l;
        Base::template load_planes<M>(l, rec, lane);
        uint2 s = M::get8(rec + Base::kScales + (lane >> 2) * 8);
        l.s[0] = s.x, l.s[1] = s.y;
        return l;
    }
    __device__ static float scale(const Lane& l, int, int b, int) {
        return half_bits(static_cast<uint16_t>(l.s[b >> 1] >> (16 * (b & 1))));
    }
    template <class M>
    __device__ static Pair load_pair(const uint8_t* rec, int row, int p) {
        return {{M::get4(rec + Base::kScales + row * 8 + p * 4)}};
    }
    __device__ static float scale(const Pair& l, int, int i, int) { return half_bits(static_cast<uint16_t>(l.s[0] >> (16 * i))); }
    __device__ static void pack_scales(const uint8_t* block, uint8_t* rec, int row, int b) {
        put16(rec + Base::kScales + row * 8 + b * 2, raw16(block));
    }
};
template <int Raw, int High>
struct ScaleMin : RecordType<32, Raw, 4, High, 4, 2> {
    using Base = RecordType<32, Raw, 4, High, 4, 2>;
    using Lane = typename Base::Lane;
    using Pair = typename Base::Pair;
    static constexpr bool kHalf = false, kMin = true;
    template <class M>
    __device__ static Lane load(const uint8_t* rec, int lane) {
        Lane l;
        Base::template load_planes<M>(l, rec, lane);
        uint4 s = M::get16(rec + Base::kScales + (lane >> 2) * 16);
        l.s[0] = s.x, l.s[1] = s.y, l.s[2] = s.z, l.s[3] = s.w;
        return l;
    }
    __device__ static float scale(const Lane& l, int, int b, int) {
        return half_bits(static_cast<uint16_t>(l.s[b]));
    }
    __device__ static float minimum(const Lane& l, int, int b, int) {
        const uint32_t dm = b == 0 ? l.s[0] : b == 1 ? l.s[1] : b == 2 ? l.s[2] : l.s[3];
        return -half_bits(static_cast<uint16_t>(dm >> 16));
    }
    template <class M>
    __device__ static Pair load_pair(const uint8_t* rec, int row, int p) {
        const uint2 s = M::get8(rec + Base::kScales + row * 16 + p * 8);
        return {{s.x, s.y}};
    }
    __device__ static uint32_t scale_min(const Pair& l, int i) { return i ? l.s[1] : l.s[0]; }
    __device__ static float scale(const Pair& l, int, int i, int) { return half_bits(static_cast<uint16_t>(scale_min(l, i))); }
    __device__ static float minimum(const Pair& l, int, int i, int) {
        return -half_bits(static_cast<uint16_t>(scale_min(l, i) >> 16));
    }
    __device__ static void pack_scales(const uint8_t* block, uint8_t* rec, int row, int b) {
        put16(rec + Base::kScales + row * 16 + b * 4, raw16(block));
        put16(rec + Base::kScales + row * 16 + b * 4 + 2, raw16(block + 2));
    }
};

struct Q4_0 : OneScale<18, 4, 0> {  // stored as two's complement nibbles
    static constexpr int kMul = 16;
    __device__ static int code(const uint8_t* block, int i) {
        return ((block[2 + (i & 15)] >> (4 * (i >> 4))) & 15) ^ 8;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) {
        return (h ? l.q[c][b] : l.q[c][b] << 4) & 0xf0f0f0f0u;
    }
};
struct Q4_1 : ScaleMin<20, 0> {
    static constexpr int kMul = 1;
    __device__ static int code(const uint8_t* block, int i) {
        return (block[4 + (i & 15)] >> (4 * (i >> 4))) & 15;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) { return (l.q[c][b] >> (4 * h)) & kNibble; }
};
struct Q5_0 : OneScale<22, 4, 1> {  // the fifth bit inverted is the sign
    static constexpr int kMul = 8;
    __device__ static int code(const uint8_t* block, int i) {
        int low = (block[6 + (i & 15)] >> (4 * (i >> 4))) & 15;
        return low | (((block[2 + (i >> 3)] >> (i & 7)) & 1) ^ 1) << 4;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) {
        uint32_t low = (h ? l.q[c][b] >> 1 : l.q[c][b] << 3) & 0x78787878u;
        return low | (shift(l.h[c][0], 7 - (2 * b + h)) & 0x80808080u);
    }
};
struct Q5_1 : ScaleMin<24, 1> {
    static constexpr int kMul = 1, kPairDepth = 1;
    __device__ static int code(const uint8_t* block, int i) {
        int low = (block[8 + (i & 15)] >> (4 * (i >> 4))) & 15;
        return low | ((block[4 + (i >> 3)] >> (i & 7)) & 1) << 4;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) {
        return ((l.q[c][b] >> (4 * h)) & kNibble) | (shift(l.h[c][0], 4 - (2 * b + h)) & 0x10101010u);
    }
};
struct Q8_0 : OneScale<34, 8, 0> {
    static constexpr int kMul = 1, kPairDepth = 1;
    __device__ static int code(const uint8_t* block, int i) { return block[2 + i]; }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) { return l.q[c][2 * b + h]; }
};
// IQ4: a nibble is an index into 16 int8 values; the four nibbles of a word (b, h) lie side by side
// in half a register, which is what a byte permute takes as its selector.
__device__ inline uint32_t iq4_word(uint32_t w, int h) {
    uint32_t index = (w & 0x77777777u) >> (16 * h);
    uint32_t pick = (((w & 0x88888888u) >> 1) | 0x32103210u) >> (16 * h);
    uint32_t low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, index);   // -127 -104 -83 -65 -49 -35 -22 -10
    uint32_t high = __byte_perm(0x26190d01u, 0x71594535u, index);  // 1 13 25 38 53 69 89 113
    return __byte_perm(low, high, pick);
}
struct IQ4_NL : OneScale<18, 4, 0> {
    static constexpr int kMul = 1;
    __device__ static int low_bit(int, int h, int e) { return 16 * h + 4 * e; }
    __device__ static int code(const uint8_t* block, int i) {
        return (block[2 + (i & 15)] >> (4 * (i >> 4))) & 15;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) { return iq4_word(l.q[c][b], h); }
};

// ---- K types: 256 values, scales [row] -----------------------------------------------------------
// Q4_K and Q5_K: d, dmin and eight 6-bit (scale, minimum) pairs in 12 bytes: 16 bytes a row.
template <int Raw, int High>
struct KScaleMin : RecordType<256, Raw, 4, High, 4, 4> {
    using Base = RecordType<256, Raw, 4, High, 4, 4>;
    using Lane = typename Base::Lane;
    using Pair = typename Base::Pair;
    static constexpr bool kHalf = false, kMin = true;
    static constexpr int kMul = 1;
    template <class M>
    __device__ static Lane load(const uint8_t* rec, int lane) {
        Lane l;
        Base::template load_planes<M>(l, rec, lane);
        uint4 s = M::get16(rec + Base::kScales + (lane >> 2) * 16);
        l.s[0] = s.x, l.s[1] = s.y, l.s[2] = s.z, l.s[3] = s.w;
        return l;
    }
    // Sub-block j < 4: six low bits of byte j (scale) and j + 4 (minimum); j >= 4: a nibble of byte
    // j + 4 and the two top bits of byte j - 4 (scale) or j (minimum).
    __device__ static int six_bits(const uint32_t* s, int c, int b, bool minimum) {
        const uint32_t first = minimum ? s[2] : s[1];
        const uint32_t four = c == 0 ? first & 0x3f3f3f3fu
                                     : ((s[3] >> (minimum ? 4 : 0)) & kNibble) | ((first >> 2) & 0x30303030u);
        return byte_of(four, b);
    }
    template <class Words>
    __device__ static float super(const Words& l) { return half_bits(static_cast<uint16_t>(l.s[0])); }
    template <class Words>
    __device__ static float super_min(const Words& l) { return half_bits(static_cast<uint16_t>(l.s[0] >> 16)); }
    __device__ static int int_scale(const Lane& l, int c, int b, int) { return six_bits(l.s, c, b, false); }
    __device__ static int int_min(const Lane& l, int c, int b, int) { return six_bits(l.s, c, b, true); }
    template <class M>
    __device__ static Pair load_pair(const uint8_t* rec, int row, int) {
        const uint4 s = M::get16(rec + Base::kScales + row * 16);
        return {{s.x, s.y, s.z, s.w}};
    }
    __device__ static int int_scale(const Pair& l, int p, int i, int) { return six_bits(l.s, p >> 1, 2 * (p & 1) + i, false); }
    __device__ static int int_min(const Pair& l, int p, int i, int) { return six_bits(l.s, p >> 1, 2 * (p & 1) + i, true); }
    __device__ static void pack_scales(const uint8_t* block, uint8_t* rec, int row, int) {
        for (int i = 0; i < 16; ++i) rec[Base::kScales + row * 16 + i] = block[i];
    }
};
struct Q4_K : KScaleMin<144, 0> {
    __device__ static int code(const uint8_t* block, int i) {  // 64 values share 32 bytes
        return (block[16 + 32 * (i >> 6) + (i & 31)] >> (4 * ((i >> 5) & 1))) & 15;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) { return (l.q[c][b] >> (4 * h)) & kNibble; }
};
struct Q5_K : KScaleMin<176, 1> {
    __device__ static int code(const uint8_t* block, int i) {
        int low = (block[48 + 32 * (i >> 6) + (i & 31)] >> (4 * ((i >> 5) & 1))) & 15;
        return low | ((block[16 + (i & 31)] >> (i >> 5)) & 1) << 4;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) {
        return ((l.q[c][b] >> (4 * h)) & kNibble) | (shift(l.h[c][0], 4 - (2 * b + h)) & 0x10101010u);
    }
};
// Q6_K: int8 scale per 16 values [row][16], then d [row].
struct Q6_K : RecordType<256, 210, 4, 2, 5, 2> {
    static constexpr bool kHalf = true, kMin = false;
    static constexpr int kMul = 4;  // codes stored so that 4 * (q - 32) falls out signed
    template <class M>
    __device__ static Lane load(const uint8_t* rec, int lane) {
        Lane l;
        load_planes<M>(l, rec, lane);
        int g = lane >> 2;
        uint4 s = M::get16(rec + kScales + g * 16);
        l.s[0] = s.x, l.s[1] = s.y, l.s[2] = s.z, l.s[3] = s.w;
        l.s[4] = M::get2(rec + kScales + 128 + g * 2);
        return l;
    }
    __device__ static int code(const uint8_t* block, int i) {
        int n = i >> 7, quarter = (i >> 5) & 3, j = i & 31;
        int low = (block[64 * n + 32 * (quarter & 1) + j] >> (4 * (quarter >> 1))) & 15;
        return low | (((block[128 + 32 * n + j] >> (2 * quarter)) & 3) ^ 2) << 4;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) {
        uint32_t low = (h ? l.q[c][b] >> 2 : l.q[c][b] << 2) & 0x3c3c3c3cu;
        return low | (shift(l.h[c][b >> 1], 6 - 2 * (2 * (b & 1) + h)) & 0xc0c0c0c0u);
    }
    __device__ static float super(const Lane& l) { return half_bits(static_cast<uint16_t>(l.s[4])); }
    __device__ static int int_scale(const Lane& l, int c, int b, int h) {
        return static_cast<int8_t>(l.s[2 * c + (b >> 1)] >> (16 * (b & 1) + 8 * h));
    }
    template <class M>
    __device__ static Pair load_pair(const uint8_t* rec, int row, int p) {
        return {{M::get4(rec + kScales + row * 16 + p * 4), M::get2(rec + kScales + 128 + row * 2)}};
    }
    __device__ static float super(const Pair& l) { return half_bits(static_cast<uint16_t>(l.s[1])); }
    __device__ static int int_scale(const Pair& l, int, int i, int h) { return static_cast<int8_t>(l.s[0] >> (16 * i + 8 * h)); }
    __device__ static void pack_scales(const uint8_t* block, uint8_t* rec, int row, int) {
        for (int i = 0; i < 16; ++i) rec[kScales + row * 16 + i] = block[192 + i];
        put16(rec + kScales + 128 + row * 2, raw16(block + 208));
    }
};
// Q3_K: sixteen 6-bit scales in 12 bytes [row], then d [row].
struct Q3_K : RecordType<256, 110, 2, 1, 4, 3> {
    static constexpr bool kHalf = true, kMin = false;
    static constexpr int kMul = 32;  // two bits, and the inverted third as the sign
    template <class M>
    __device__ static Lane load(const uint8_t* rec, int lane) {
        Lane l;
        load_planes<M>(l, rec, lane);
        int g = lane >> 2;
#pragma unroll
        for (int i = 0; i < 3; ++i) l.s[i] = M::get4(rec + kScales + g * 12 + 4 * i);
        l.s[3] = M::get2(rec + kScales + 96 + g * 2);
        return l;
    }
    __device__ static int code(const uint8_t* block, int i) {
        int low = (block[32 + 32 * (i >> 7) + (i & 31)] >> (2 * ((i >> 5) & 3))) & 3;
        return low | (((block[i & 31] >> (i >> 5)) & 1) ^ 1) << 2;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) {
        uint32_t low = shift(l.q[c][b >> 1], 5 - 2 * (2 * (b & 1) + h)) & 0x60606060u;
        return low | (shift(l.h[c][0], 7 - (2 * b + h)) & 0x80808080u);
    }
    // Scale j: low nibble in byte j % 8 (upper half of the byte for j >= 8), top two bits in byte
    // 8 + j % 4 at 2 * (j / 4). Here j = 8c + 2b + h.
    __device__ static float super(const Lane& l) { return half_bits(static_cast<uint16_t>(l.s[3])); }
    __device__ static int int_scale(const Lane& l, int c, int b, int h) {
        int j = 2 * b + h;
        uint32_t low = (l.s[j >> 2] >> (8 * (j & 3) + 4 * c)) & 15;
        uint32_t top = (l.s[2] >> (8 * (j & 3) + 2 * (2 * c + (j >> 2)))) & 3;
        return static_cast<int>(low | top << 4) - 32;
    }
    template <class M>
    __device__ static Pair load_pair(const uint8_t* rec, int row, int p) {
        const uint8_t* at = rec + kScales + row * 12;
        return {{M::get4(at + 4 * (p & 1)), M::get4(at + 8), M::get2(rec + kScales + 96 + row * 2)}};
    }
    __device__ static float super(const Pair& l) { return half_bits(static_cast<uint16_t>(l.s[2])); }
    __device__ static int int_scale(const Pair& l, int p, int i, int h) {
        const uint32_t four = ((l.s[0] >> (p & 2) * 2) & kNibble) | ((l.s[1] >> 2 * p) & 0x03030303u) << 4;
        return byte_of(four, 2 * i + h) - 32;
    }
    __device__ static void pack_scales(const uint8_t* block, uint8_t* rec, int row, int) {
        for (int i = 0; i < 12; ++i) rec[kScales + row * 12 + i] = block[96 + i];
        put16(rec + kScales + 96 + row * 2, raw16(block + 108));
    }
};
// Q2_K: sixteen bytes of (scale, minimum) nibbles [row], then d and dmin [row].
struct Q2_K : RecordType<256, 84, 2, 0, 5, 2> {
    static constexpr bool kHalf = true, kMin = true;
    static constexpr int kMul = 1;
    template <class M>
    __device__ static Lane load(const uint8_t* rec, int lane) {
        Lane l;
        load_planes<M>(l, rec, lane);
        int g = lane >> 2;
        uint4 s = M::get16(rec + kScales + g * 16);
        l.s[0] = s.x, l.s[1] = s.y, l.s[2] = s.z, l.s[3] = s.w;
        l.s[4] = M::get4(rec + kScales + 128 + g * 4);
        return l;
    }
    __device__ static int code(const uint8_t* block, int i) {
        return (block[16 + 32 * (i >> 7) + (i & 31)] >> (2 * ((i >> 5) & 3))) & 3;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) {
        return (l.q[c][b >> 1] >> (2 * (2 * (b & 1) + h))) & 0x03030303u;
    }
    __device__ static uint32_t pair(const Lane& l, int c, int b, int h) {
        return (b < 2 ? l.s[2 * c] : l.s[2 * c + 1]) >> (16 * (b & 1) + 8 * h);
    }
    __device__ static float super(const Lane& l) { return half_bits(static_cast<uint16_t>(l.s[4])); }
    __device__ static float super_min(const Lane& l) { return half_bits(static_cast<uint16_t>(l.s[4] >> 16)); }
    __device__ static int int_scale(const Lane& l, int c, int b, int h) { return pair(l, c, b, h) & 15; }
    __device__ static int int_min(const Lane& l, int c, int b, int h) { return (pair(l, c, b, h) >> 4) & 15; }
    template <class M>
    __device__ static Pair load_pair(const uint8_t* rec, int row, int p) {
        return {{M::get4(rec + kScales + row * 16 + p * 4), M::get4(rec + kScales + 128 + row * 4)}};
    }
    __device__ static float super(const Pair& l) { return half_bits(static_cast<uint16_t>(l.s[1])); }
    __device__ static float super_min(const Pair& l) { return half_bits(static_cast<uint16_t>(l.s[1] >> 16)); }
    __device__ static int int_scale(const Pair& l, int, int i, int h) { return (l.s[0] >> (16 * i + 8 * h)) & 15; }
    __device__ static int int_min(const Pair& l, int, int i, int h) { return (l.s[0] >> (16 * i + 8 * h + 4)) & 15; }
    __device__ static void pack_scales(const uint8_t* block, uint8_t* rec, int row, int) {
        for (int i = 0; i < 16; ++i) rec[kScales + row * 16 + i] = block[i];
        for (int i = 0; i < 4; ++i) rec[kScales + 128 + row * 4 + i] = block[80 + i];
    }
};
// IQ4_XS: d, eight 6-bit scales as 2 + 4 bytes: 8 bytes a row.
struct IQ4_XS : RecordType<256, 136, 4, 0, 2, 2> {
    static constexpr bool kHalf = false, kMin = false;
    static constexpr int kMul = 1;
    __device__ static int low_bit(int, int h, int e) { return 16 * h + 4 * e; }
    template <class M>
    __device__ static Lane load(const uint8_t* rec, int lane) {
        Lane l;
        load_planes<M>(l, rec, lane);
        uint2 s = M::get8(rec + kScales + (lane >> 2) * 8);
        l.s[0] = s.x, l.s[1] = s.y;
        return l;
    }
    __device__ static int code(const uint8_t* block, int i) {
        return (block[8 + 16 * (i >> 5) + (i & 15)] >> (4 * ((i >> 4) & 1))) & 15;
    }
    __device__ static uint32_t word(const Lane& l, int c, int b, int h) { return iq4_word(l.q[c][b], h); }
    template <class Words>
    __device__ static float super(const Words& l) { return half_bits(static_cast<uint16_t>(l.s[0])); }
    __device__ static int six_bits(const uint32_t* s, int j) {
        const uint32_t low = (s[1] >> (4 * j)) & 15, top = (s[0] >> (16 + 2 * j)) & 3;
        return static_cast<int>(low | top << 4) - 32;
    }
    __device__ static int int_scale(const Lane& l, int c, int b, int) { return six_bits(l.s, 4 * c + b); }
    template <class M>
    __device__ static Pair load_pair(const uint8_t* rec, int row, int) {
        const uint2 s = M::get8(rec + kScales + row * 8);
        return {{s.x, s.y}};
    }
    __device__ static int int_scale(const Pair& l, int p, int i, int) { return six_bits(l.s, 2 * p + i); }
    __device__ static void pack_scales(const uint8_t* block, uint8_t* rec, int row, int) {
        for (int i = 0; i < 8; ++i) rec[kScales + row * 8 + i] = block[i];
    }
};

// The float scale and minimum of sub-block (c, b, h) of a lane, or (p, i, h) of a Pair, whatever the type keeps.
template <class Q, class Words>
__device__ inline float scale_of(const Words& l, int c, int b, int h) {
    if constexpr (Q::kInteger)
        return __fmul_rn(Q::super(l), static_cast<float>(Q::int_scale(l, c, b, h)));
    else
        return Q::scale(l, c, b, h);
}
template <class Q, class Words>
__device__ inline float minimum_of(const Words& l, int c, int b, int h) {
    if constexpr (!Q::kMin)
        return 0.0f;
    else if constexpr (Q::kInteger)
        return __fmul_rn(Q::super_min(l), static_cast<float>(Q::int_min(l, c, b, h)));
    else
        return Q::minimum(l, c, b, h);
}

// ---- float types: row-major, as in the file -------------------------------------------------------
struct F32 {
    static constexpr bool kFloat = true;
    static constexpr int kBytes = 4;
    __device__ static float4 load4(const uint8_t* row, int64_t k) {
        uint4 v = load_stream16(row + k * 4);
        return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                           __uint_as_float(v.w));
    }
};
struct F16 {
    static constexpr bool kFloat = true;
    static constexpr int kBytes = 2;
    __device__ static float4 load4(const uint8_t* row, int64_t k) {
        uint2 v = load_stream8(row + k * 2);
        return make_float4(half_bits(static_cast<uint16_t>(v.x)), half_bits(static_cast<uint16_t>(v.x >> 16)),
                           half_bits(static_cast<uint16_t>(v.y)), half_bits(static_cast<uint16_t>(v.y >> 16)));
    }
};
struct BF16 {
    static constexpr bool kFloat = true;
    static constexpr int kBytes = 2;
    __device__ static float4 load4(const uint8_t* row, int64_t k) {
        uint2 v = load_stream8(row + k * 2);
        return make_float4(bf16_bits(static_cast<uint16_t>(v.x)), bf16_bits(static_cast<uint16_t>(v.x >> 16)),
                           bf16_bits(static_cast<uint16_t>(v.y)), bf16_bits(static_cast<uint16_t>(v.y >> 16)));
    }
};

// Values k..k+3 (k % 4 == 0) of row `row` of a matrix of type Q, exactly as the format defines them.
// `row_chunks` is Kp / 128 for record types; for float types K.
template <class Q>
__device__ inline float4 row_values(const uint8_t* w, int row, int k, int row_length) {
    if constexpr (Q::kFloat) {
        return Q::load4(w + static_cast<int64_t>(row) * row_length * Q::kBytes, k);
    } else {
        int64_t records = row_length * 128 / Q::kRecK;
        const uint8_t* rec = w + ((row >> 3) * records + k / Q::kRecK) * Q::kRecord;
        int b = (k >> 5) & 3, h = (k >> 4) & 1, t = (k >> 2) & 3;
        int c = (k % Q::kRecK) >> 7;
        typename Q::Lane l = Q::template load<Streamed>(rec, (row & 7) * 4 + t);
        uint32_t w4 = Q::word(l, c, b, h);
        float scale = scale_of<Q>(l, c, b, h), minimum = minimum_of<Q>(l, c, b, h);
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int code = static_cast<int8_t>(w4 >> (8 * e)) / Q::kMul;
            v[e] = __fmul_rn(scale, static_cast<float>(code));
            if (Q::kMin) v[e] = __fsub_rn(v[e], minimum);
        }
        return make_float4(v[0], v[1], v[2], v[3]);
    }
}
