// The unpack interface in CUDA. A block of n = 256, 64 or 32 weights has n/32 threads with 32 weights each. Thread k holds the
// weights L*g + 4*k + b, L = n/8, g = 0 ... 7, b = 0 ... 3, as eight words of four bytes. A type specializes
// unpacker<block>::unpack(x, k), which returns:
//   q[g]       byte b: the code of weight L*g + 4*k + b, equal to the scalar reference's
//   d, offset  float: value = d * scale[g/2] * (code - offset)
//   scale[4]   integer scales, only for types with several groups (CCQ2: groups of 64 in a block of 256)
// and defines constants: `offset`, of all blocks, or with `own_offset` a number near theirs; `nibble_distance`, between the groups
// of a byte's two nibbles, which sets the order of the codes (code_place); 0 for the order above.
//
// All files of this directory also compile as host code with tests/cuda_host/common.cuh.
#pragma once

#include "common.cuh"
#include "ggml-ext-traits.h"

// Traits for upstream's kernels: a block has QI/VDR_MMVQ threads.
constexpr int GGML_EXT_VDR_MMVQ = 4;

#define GGML_EXT_X(NAME, name)                                           \
    template <> struct ggml_cuda_type_traits<GGML_TYPE_##NAME> {         \
        static constexpr int qk = GGML_EXT_##NAME##_BLOCK_SIZE;          \
        static constexpr int qr = 2;                                     \
        static constexpr int qi = qk/(4*qr);                             \
        static constexpr int bs = sizeof(block_##name);                  \
    };
GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X

namespace ggml_ext {

constexpr int N_WORDS = 8; // per thread: 32 weights

// Threads per block of type B; blocks and threads per 256 weights.
template <typename B> constexpr int N_THREADS     = traits<B>::block_size/(4*N_WORDS);
template <typename B> constexpr int N_BLOCKS_256  = QK_K/traits<B>::block_size;
constexpr int                       N_THREADS_256 = QK_K/(4*N_WORDS);

struct unpacked {
    uint32_t q[N_WORDS];
    float    d, offset;
    int      scale[GGML_EXT_MAX_GROUPS];
};

template <typename B> struct unpacker;

// The byte among a thread's 32 that holds the code of weight L*g + 4*k + b. A look-up of nibbles interleaves the codes of groups g and
// g + nibble_distance in two words. MMVQ keeps that order and has the activations in it too (quantize.cuh); others call unpack_by_group().
constexpr __host__ __device__ int code_place(int nibble_distance, int g, int b) {
    return nibble_distance == 0 ? 4*g + b : 4*((g & ~nibble_distance) + b/2*nibble_distance) + 2*(b%2) + g/nibble_distance%2;
}

#ifdef __CUDACC__
// __byte_perm, except that a selector >= 8 replicates the sign bit of the selected byte (PTX's prmt).
static __device__ __forceinline__ uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t s) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(lo), "r"(hi), "r"(s));
    return d;
}
// (x & mask) | (y & ~mask), for which the compiler emits two instructions
static __device__ __forceinline__ uint32_t select(uint32_t x, uint32_t y, uint32_t mask) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(x), "r"(y));
    return d;
}
// The constant x in a register: the compiler would load it again for every permute. It does not know that grid y, at most 65,535,
// has no bits above 19. For the thread index it knows on sm_100 and sm_120.
static __device__ __forceinline__ uint32_t in_register(uint32_t x) {
    uint32_t zero;
    asm("{ .reg .u32 y; mov.u32 y, %%nctaid.y; shr.u32 %0, y, 20; }" : "=r"(zero));
    return x + zero;
}
#endif

// Words of a 2-byte aligned block of 2 + 4*n bytes. Word m holds the bytes from 2 + 4*m on, `before` those from one byte earlier, the
// high half of `previous` the two bytes before word m: two aligned loads and a permute. The loads reach at most two bytes
// outside of the block, in words that also hold a byte of it. At the ends of a tensor these bytes are padding, because allocations are
// aligned to more than four bytes.
struct block_words {
    const uint32_t * w;
    uint32_t         odd; // 2 if the block begins inside a word, else 0
    struct window { uint32_t word, before, previous; };

    __device__ __forceinline__ explicit block_words(const void * block)
        : w((const uint32_t *) ((uintptr_t) block & ~(uintptr_t) 3)), odd((uintptr_t) block & 2) {}
    __device__ __forceinline__ window at(int m) const {
        const uint32_t lo = __ldg(w + m), hi = __ldg(w + m + 1), s = odd ? 0x7654 : 0x5432;
        return {prmt(lo, hi, s), prmt(lo, hi, s - 0x1111), prmt(lo, hi, s - 0x4400)};
    }
    __device__ __forceinline__ uint32_t operator[](int m) const { return at(m).word; }
    // bytes 0 and 1 of the block, in the low half
    __device__ __forceinline__ uint32_t header() const { return __ldg(w) >> 8*odd; }
};

constexpr __host__ __device__ uint32_t bytes4(int b0, int b1, int b2, int b3) {
    return (uint32_t) b0 | (uint32_t) b1 << 8 | (uint32_t) b2 << 16 | (uint32_t) b3 << 24;
}

// Look up four nibbles in 16 bytes below 128 with two byte permutes. A selector >= 8 gives copies of a top bit, which is 0, so one
// of the permutes gives the entry and the other 0.
struct lookup16 {
    uint32_t words[4];
    __device__ __forceinline__ lookup16(const uint8_t (&t)[16]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) { // a permute needs one of its two words in a register
            const uint32_t word = bytes4(t[4*i], t[4*i + 1], t[4*i + 2], t[4*i + 3]);
            words[i] = i%2 ? word : in_register(word);
        }
    }
    // the entries of the four low nibbles of s are low(s) + high(s)
    __device__ __forceinline__ uint32_t low(uint32_t s) const { return prmt(words[0], words[1], s); }
    __device__ __forceinline__ uint32_t high(uint32_t s) const { return prmt(words[2], words[3], s ^ 0x88888888); }
};

// A0 B0 A1 B1 | A2 B2 A3 B3 to A0 A1 A2 A3 | B0 B1 B2 B3.
static __device__ __forceinline__ void deinterleave(const uint32_t lo, const uint32_t hi, uint32_t & a, uint32_t & b) {
    a = __byte_perm(lo, hi, 0x6420);
    b = __byte_perm(lo, hi, 0x7531);
}

// Unpack with q[g] holding the codes of group g, for any `nibble_distance`.
template <typename B>
static __device__ __forceinline__ unpacked unpack_by_group(const B & x, int k) {
    constexpr int nibble_distance = unpacker<B>::nibble_distance;
    unpacked u = unpacker<B>::unpack(x, k);
#pragma unroll
    for (int g = 0; g < N_WORDS; ++g) {
        if ((g & nibble_distance) == 0 && nibble_distance != 0) {
            deinterleave(u.q[g], u.q[g + nibble_distance], u.q[g], u.q[g + nibble_distance]);
        }
    }
    return u;
}

} // namespace ggml_ext
