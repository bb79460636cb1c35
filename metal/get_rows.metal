// get_rows: a simdgroup dequantizes 256 weights and rotates them back in registers. The arguments are upstream's, with
// ne00t = threads per row, 32 for each 256 weights.

template <typename B, bool rotated> struct ggml_ext_unrotate {
    static void run(thread float * v, short lane) { ggml_ext_rotate_back<ggml_ext_lanes<B>::n>(v, lane); }
};
template <typename B> struct ggml_ext_unrotate<B, false> {
    static void run(thread float * v, short lane) {
        (void) v;
        (void) lane;
    }
};

template <typename B>
kernel void kernel_ext_get_rows(
        constant ggml_metal_kargs_get_rows & args,
        device const char * src0,
        device const char * src1,
        device       char * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort  tiisg[[thread_index_in_simdgroup]],
        ushort  sgitg[[simdgroup_index_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    typedef ggml_ext_unpacker<B> unpacker;
    typedef ggml_ext_lanes<B>    lanes;

    const int i10 = tgpig.x%args.ne10;
    const int i11 = tgpig.y;
    const int i12 = tgpig.z;

    const int i_simdgroup = tgpig.x/args.ne10*(ntg.x/N_SIMDWIDTH) + sgitg; // within the row
    if (N_SIMDWIDTH*i_simdgroup >= args.ne00t) {
        return;
    }
    const int row = *(device const int32_t *) (src1 + i10*args.nb10 + i11*args.nb11 + i12*args.nb12);

    const int   ib     = lanes::n_blocks*i_simdgroup + tiisg/lanes::n_lanes;
    const short c      = tiisg%lanes::n_lanes;
    const bool  inside = lanes::n*ib < args.ne00;

    device const B     & x = ((device const B *) (src0 + row*args.nb01 + i11*args.nb02 + i12*args.nb03))[inside ? ib : 0];
    device       float * y = (device float *) (dst + i10*args.nb1 + i11*args.nb2 + i12*args.nb3) + lanes::n*ib + c;

    unpacker u;
    u.load(x, c);
    float v[GGML_EXT_N_PER_LANE];
    FOR_UNROLL (short g = 0; g < GGML_EXT_N_PER_LANE; ++g) {
        v[g] = unpacker::scale(x, g)*u.value(g, ggml_ext_table<B, unpacker::has_table>::codes());
    }
    ggml_ext_unrotate<B, unpacker::rotated>::run(v, tiisg);
    if (inside) {
        FOR_UNROLL (short g = 0; g < GGML_EXT_N_PER_LANE; ++g) {
            y[lanes::n_lanes*g] = v[g];
        }
    }
}
