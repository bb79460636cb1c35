// DITTO5 in Metal (types/ditto5.h). The codebook is in constant memory, like upstream's of IQ4_NL.

struct block_ditto5 {
    half    d;
    uint8_t ql[128], qh[32];
};
static_assert(sizeof(block_ditto5) == GGML_EXT_DITTO5_BLOCK_BYTES, "DITTO5 is 162 bytes");

constant uint8_t ggml_ext_ditto5_codebook[16] = GGML_EXT_DITTO5_CODEBOOK;

template <> struct ggml_ext_unpacker<block_ditto5> {
    enum { n = GGML_EXT_DITTO5_BLOCK_SIZE, n_groups = 1, rotated = GGML_EXT_DITTO5_ROTATED, has_table = 0 };
    uint low[4], high;

    void load(device const block_ditto5 & x, short c) {
        FOR_UNROLL (short i = 0; i < 4; ++i) {
            low[i] = x.ql[32*i + c];
        }
        high = x.qh[c];
    }
    template <typename T> float value(short g, T table) const {
        (void) table;
        const float v = (float) ggml_ext_ditto5_codebook[low[g%4/2*2 + g/4] >> 4*(g%2) & 15] - GGML_EXT_DITTO5_CODEBOOK_OFFSET;
        return high >> g & 1 ? -v : v;
    }
    static float scale(device const block_ditto5 & x, short g) {
        (void) g;
        return (float) x.d;
    }
};
