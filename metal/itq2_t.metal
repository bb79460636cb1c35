// ITQ2_T on the device: types/itq2_t.h, trellis.metal.

struct block_itq2_t {
    uint8_t d, start, ql[64];
};
static_assert(sizeof(block_itq2_t) == GGML_EXT_ITQ2_T_BLOCK_BYTES, "ITQ2_T is 66 bytes");

template <> struct ggml_ext_unpacker<block_itq2_t> {
    enum { n = GGML_EXT_ITQ2_T_BLOCK_SIZE, n_groups = 1, rotated = GGML_EXT_ITQ2_T_ROTATED, has_table = 1 };
    uint window;

    static constant const uint8_t * codes() {
        return ggml_ext_itq2_t_codes;
    }
    static float offset() {
        return GGML_EXT_ITQ2_T_TRELLIS_OFFSET;
    }
    void load(device const block_itq2_t & x, short c) {
        window = ggml_ext_trellis2_window(x, c);
    }
    template <typename T> float value(short g, T table) const {
        return ggml_ext_entry(table, ggml_ext_trellis2_index(window, g), offset());
    }
    static float scale(device const block_itq2_t & x, short g) {
        (void) g;
        return ggml_ext_e5m3(x.d);
    }
};
