// Dequantize 16 weights for upstream's mul_mm: those of the activations from 16*il on of the block. Rotated weights stay rotated, as the
// activations are, and in the order in which kernel_ext_rotate writes these: 16 weights are two lanes.
template <typename B, bool rotated> struct ggml_ext_sixteen {
    template <typename type4x4> static void dequantize(device const B & x, short il, thread type4x4 & reg) {
        typedef ggml_ext_unpacker<B> unpacker;
        FOR_UNROLL (short i = 0; i < 2; ++i) {
            unpacker u;
            u.load(x, 2*il + i);
            FOR_UNROLL (short g = 0; g < GGML_EXT_N_PER_LANE; ++g) {
                reg[2*i + g/4][g%4] = unpacker::scale(x, g)*u.value(g, ggml_ext_table<B, unpacker::has_table>::codes());
            }
        }
    }
};

// The other types read the activations where they are, in the order of the row: 16 weights are one group of 16 lanes.
template <typename B> struct ggml_ext_sixteen<B, false> {
    template <typename type4x4> static void dequantize(device const B & x, short il, thread type4x4 & reg) {
        typedef ggml_ext_unpacker<B> unpacker;
        typedef ggml_ext_lanes<B>    lanes;
        static_assert(lanes::n_lanes%16 == 0, "16 weights have one group");
        const short g = 16*il/lanes::n_lanes;
        FOR_UNROLL (short i = 0; i < 16; ++i) {
            unpacker u;
            u.load_group(x, 16*il%lanes::n_lanes + i, g);
            reg[i/4][i%4] = unpacker::scale(x, g)*u.value(g, ggml_ext_table<B, unpacker::has_table>::codes());
        }
    }
};

template <typename B, typename type4x4>
void ggml_ext_dequantize(device const B * x, short il, thread type4x4 & reg) {
    ggml_ext_sixteen<B, ggml_ext_unpacker<B>::rotated>::dequantize(*x, il, reg);
}
