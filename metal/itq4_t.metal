// ITQ4_T on the device: types/itq4_t.h, trellis.metal.

struct block_itq4_t {
    uint8_t d, start, ql[128];
};
static_assert(sizeof(block_itq4_t) == GGML_EXT_ITQ4_T_BLOCK_BYTES, "ITQ4_T is 130 bytes");

template <> struct ggml_ext_unpacker<block_itq4_t> {
    enum { n = GGML_EXT_ITQ4_T_BLOCK_SIZE, n_groups = 1, rotated = GGML_EXT_ITQ4_T_ROTATED, has_table = 1 };
    uint2 windows;

    static constant const uint8_t * codes() {
        return ggml_ext_itq4_t_codes;
    }
    static float offset() {
        return GGML_EXT_ITQ4_T_TRELLIS_OFFSET;
    }
    void load(device const block_itq4_t & x, short c) {
        windows = ggml_ext_trellis4_windows(x, c);
    }
    template <typename T> float value(short g, T table) const {
        return ggml_ext_entry(table, ggml_ext_trellis4_index(windows, g), offset());
    }
    static float scale(device const block_itq4_t & x, short g) {
        (void) g;
        return ggml_ext_e5m3(x.d);
    }
};
