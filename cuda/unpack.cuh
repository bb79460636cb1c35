// The unpack contract on the device. A block of n = 256 or 64 weights has n/32 threads with 32 weights each: thread k holds the
// weights L*g + 4*k + b, L = n/8, g = 0 ... 7, b = 0 ... 3, as eight words of four bytes. A type specialises
// unpacker<block>::unpack(x, k):
//   q[g]       byte b: the code of weight L*g + 4*k + b, equal to that of the scalar reference
//   d, offset  float: value = d * scale[g/2] * (code - offset)
//   scale[4]   integer scales, of types with more than one group alone (CCQ2: groups of 64 in a block of 256)
// and three constants: `offset`, that of all blocks, or with `own_offset` a number near theirs; `pairs`, 0 if codes lie as above (else
// code_place). Everything else in this folder follows: products (mmvq.cuh, mmq.cuh), dequantisation (dequantize.cuh).
//
// Any source that includes this compiles as host code too, over the few intrinsics of tests/cuda_host/common.cuh.
#pragma once

#include "common.cuh"
#include "ggml-ext-traits.h"

// What upstream's kernels ask about a type: VDR_MMVQ of QI words are one thread's part of a block, QI/VDR_MMVQ threads a block.
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

constexpr int N_WORDS = 8; // of a thread: 32 weights

// Threads and blocks of type B, and of 256 weights, which eight threads have whatever the type.
template <typename B> constexpr int N_THREADS     = traits<B>::block_size/(4*N_WORDS);
template <typename B> constexpr int N_BLOCKS_256  = QK_K/traits<B>::block_size;
constexpr int                       N_THREADS_256 = QK_K/(4*N_WORDS);

struct unpacked {
    uint32_t q[N_WORDS];
    float    d, offset;
    int      scale[GGML_EXT_MAX_GROUPS];
};

template <typename B> struct unpacker;

// A look-up of nibbles leaves the codes of a byte's two side by side: of groups g and g + pairs, in two words. Products with vectors take
// them so, with the activations in the same order (quantize.cuh); all others put them in order first. This is the byte of the
// 32 where the code of weight L*g + 4*k + b lies.
constexpr __host__ __device__ int code_place(int pairs, int g, int b) {
    return pairs == 0 ? 4*g + b : 4*((g & ~pairs) + b/2*pairs) + 2*(b%2) + g/pairs%2;
}

// What C has no words for.
#ifdef __CUDACC__
// As __byte_perm, but selectors of 8 and more give eight copies of the selected byte's top bit (PTX's prmt).
static __device__ __forceinline__ uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t s) {
    uint32_t d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(lo), "r"(hi), "r"(s));
    return d;
}
// (x & mask) | (y & ~mask); left to itself the compiler takes two instructions
static __device__ __forceinline__ uint32_t select(uint32_t x, uint32_t y, uint32_t mask) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(d) : "r"(mask), "r"(x), "r"(y));
    return d;
}
// The constant x, kept in a register: it would be copied to one anew for each permute that takes it. The compiler does not see that
// a grid's y, 65,535 at most, has no bits from 20 on; that a thread's index has none from 16 on it does see for sm_100 and sm_120.
static __device__ __forceinline__ uint32_t in_register(uint32_t x) {
    uint32_t zero;
    asm("{ .reg .u32 y; mov.u32 y, %%nctaid.y; shr.u32 %0, y, 20; }" : "=r"(zero));
    return x + zero;
}
#endif

// Words of a block of 2 + 4*n bytes, 18 to 130, which is aligned to two bytes only. Word m holds the bytes 2 + 4*m and on: two
// aligned loads and a permute, at the same places whether the block is a multiple of four or not; `before` begins a byte
// earlier. The loads begin and end with words that hold a byte of the block: at most two bytes before it and two behind it,
// those behind only if it lies at a multiple of four. Outside of a tensor those are padding, since it is allocated at and in
// multiples of more than four.
struct block_words {
    const uint32_t * w;
    uint32_t         odd; // 2 if the block begins in the middle of a word, or 0
    struct pair { uint32_t word, before; };

    __device__ __forceinline__ explicit block_words(const void * block)
        : w((const uint32_t *) ((uintptr_t) block & ~(uintptr_t) 3)), odd((uintptr_t) block & 2) {}
    __device__ __forceinline__ pair at(int m) const {
        const uint32_t lo = __ldg(w + m), hi = __ldg(w + m + 1), s = odd ? 0x7654 : 0x5432;
        return {prmt(lo, hi, s), prmt(lo, hi, s - 0x1111)};
    }
    __device__ __forceinline__ uint32_t operator[](int m) const { return at(m).word; }
    // the first two bytes of the block in the low half
    __device__ __forceinline__ uint32_t header() const { return __ldg(w) >> 8*odd; }
};

// Four bytes as a constant.
constexpr __host__ __device__ uint32_t bytes4(int b0, int b1, int b2, int b3) {
    return (uint32_t) b0 | (uint32_t) b1 << 8 | (uint32_t) b2 << 16 | (uint32_t) b3 << 24;
}

// A look-up in 16 bytes below 128, for four nibbles, is two byte permutes: a selector of 8 or more gives copies of the selected
// byte's top bit, which is 0, so that one of the two gives the entry and the other 0.
struct lookup16 {
    uint32_t words[4];
    __device__ __forceinline__ lookup16(const uint8_t (&t)[16]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) { // a permute takes one of its two words from a register
            const uint32_t word = bytes4(t[4*i], t[4*i + 1], t[4*i + 2], t[4*i + 3]);
            words[i] = i%2 ? word : in_register(word);
        }
    }
    // entries of the four low nibbles of s: low + high
    __device__ __forceinline__ uint32_t low(uint32_t s) const { return prmt(words[0], words[1], s); }
    __device__ __forceinline__ uint32_t high(uint32_t s) const { return prmt(words[2], words[3], s ^ 0x88888888); }
};

// Bytes A0 B0 A1 B1 | A2 B2 A3 B3 to A0 A1 A2 A3 | B0 B1 B2 B3.
static __device__ __forceinline__ void deinterleave(const uint32_t lo, const uint32_t hi, uint32_t & a, uint32_t & b) {
    a = __byte_perm(lo, hi, 0x6420);
    b = __byte_perm(lo, hi, 0x7531);
}

// The codes by group, whatever the type's order.
template <typename B>
static __device__ __forceinline__ unpacked unpack_by_group(const B & x, int k) {
    constexpr int pairs = unpacker<B>::pairs;
    unpacked u = unpacker<B>::unpack(x, k);
#pragma unroll
    for (int g = 0; g < N_WORDS; ++g) {
        if ((g & pairs) == 0 && pairs != 0) {
            deinterleave(u.q[g], u.q[g + pairs], u.q[g], u.q[g + pairs]);
        }
    }
    return u;
}

} // namespace ggml_ext
