// CCQ2 in Metal (types/ccq2.h). Each of a lane's two bytes has a 15-bit code of four weights.

struct block_ccq2 {
    uint8_t d, scales, qs[64];
};
static_assert(sizeof(block_ccq2) == GGML_EXT_CCQ2_BLOCK_BYTES, "CCQ2 is 66 bytes");

template <> struct ggml_ext_unpacker<block_ccq2> {
    enum { n = GGML_EXT_CCQ2_BLOCK_SIZE, n_groups = n/GGML_EXT_CCQ2_GROUP, rotated = GGML_EXT_CCQ2_ROTATED, has_table = 0 };
    uint code[2];

    void load(device const block_ccq2 & x, short c) {
        code[0] = 121*(uint) x.qs[c]      + 1178;
        code[1] = 121*(uint) x.qs[32 + c] + 1178;
    }
    void load_group(device const block_ccq2 & x, short c, short g) {
        code[0] = code[1] = 121*(uint) x.qs[32*(g/4) + c] + 1178;
    }
    template <typename T> float value(short g, T table) const {
        (void) table;
        return (float) ((g < 4 ? code[0] : code[1]) >> (9 - 3*(g%4)) & 63) - 32.0f;
    }
    static float scale(device const block_ccq2 & x, short g) {
        const uint scales = 11u << 24 | 8u << 16 | 6u << 8 | 5u;
        return ggml_ext_e5m3(x.d)*(float) (scales >> 8*(x.scales >> 2*(g/2) & 3) & 255);
    }
};
