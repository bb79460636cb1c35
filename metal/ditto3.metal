// DITTO3 in Metal (types/ditto3.h). The codebook is two words of four bytes.

struct block_ditto3 {
    half    d;
    uint8_t codebook[8], ql[64], qh[32];
};
static_assert(sizeof(block_ditto3) == GGML_EXT_DITTO3_BLOCK_BYTES, "DITTO3 is 106 bytes");

template <> struct ggml_ext_unpacker<block_ditto3> {
    enum { n = GGML_EXT_DITTO3_BLOCK_SIZE, n_groups = 1, rotated = GGML_EXT_DITTO3_ROTATED, has_table = 0 };
    uint low[2], high, codebook[2];

    void load(device const block_ditto3 & x, short c) {
        load_group(x, c, 0);
        low[1] = x.ql[32 + c];
    }
    void load_group(device const block_ditto3 & x, short c, short g) {
        device const ushort * words = (device const ushort *) x.codebook; // blocks are aligned to two bytes
        low[0] = low[1] = x.ql[32*(g/4) + c];
        high   = x.qh[c];
        codebook[0] = words[0] | (uint) words[1] << 16;
        codebook[1] = words[2] | (uint) words[3] << 16;
    }
    template <typename T> float value(short g, T table) const {
        (void) table;
        const uint word = high >> g & 1 ? codebook[1] : codebook[0];
        return (float) (word >> 8*((g < 4 ? low[0] : low[1]) >> 2*(g%4) & 3) & 127) - 64.0f;
    }
    static float scale(device const block_ditto3 & x, short g) {
        (void) g;
        return (float) x.d;
    }
};
