// ITQ3_S in Metal (types/itq3_s.h).

struct block_itq3_s {
    half    d, z;
    uint8_t ql[64], qh[32];
};
static_assert(sizeof(block_itq3_s) == GGML_EXT_ITQ3_S_BLOCK_BYTES, "ITQ3_S is 100 bytes");

template <> struct ggml_ext_unpacker<block_itq3_s> {
    enum { n = GGML_EXT_ITQ3_S_BLOCK_SIZE, n_groups = 1, rotated = GGML_EXT_ITQ3_S_ROTATED, has_table = 0 };
    uint  low[2], high;
    float z;

    void load(device const block_itq3_s & x, short c) {
        low[0] = x.ql[c];
        low[1] = x.ql[32 + c];
        high   = x.qh[c];
        z      = (float) x.z;
    }
    template <typename T> float value(short g, T table) const {
        (void) table;
        return (float) ((low[g/4] >> 2*(g%4) & 3) | (high >> g & 1) << 2) - z;
    }
    static float scale(device const block_itq3_s & x, short g) {
        (void) g;
        return (float) x.d;
    }
};
