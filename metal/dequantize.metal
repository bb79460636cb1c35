// Dequantize the 16 weights from 16*il on for upstream's mul_mm. Rotated weights stay rotated, as the activations are.
template <typename B, typename type4x4>
void ggml_ext_dequantize(device const B * x, short il, thread type4x4 & reg) {
    typedef ggml_ext_unpacker<B> unpacker;
    typedef ggml_ext_lanes<B>    lanes;
    FOR_UNROLL (short i = 0; i < 16; ++i) {
        const short j = 16*il + i;
        const short g = j/lanes::n_lanes;
        unpacker u;
        u.load(*x, j%lanes::n_lanes);
        reg[i/4][i%4] = unpacker::scale(*x, g)*u.value(g, ggml_ext_table<B, unpacker::has_table>::codes());
    }
}
