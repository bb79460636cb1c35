// Matrix-vector products with up to four columns. A simdgroup takes NR0 rows, 256 weights at a time. A lane multiplies the eight
// weights that it unpacks and reuses its activations for all rows. kernel_ext_rotate has rotated the activations of rotated types.

constant short FC_mul_mv_nsg  [[function_constant(FC_MUL_MV + 0)]];
constant short FC_mul_mv_ne12 [[function_constant(FC_MUL_MV + 2)]];
constant short FC_mul_mv_r2   [[function_constant(FC_MUL_MV + 3)]];
constant short FC_mul_mv_r3   [[function_constant(FC_MUL_MV + 4)]];

template <typename B, short n_columns, typename args_t>
void ggml_ext_mul_mv(
        args_t args,
        device const char * src0,
        device const char * src1,
        device       char * dst,
        threadgroup  char * shmem,
        uint3  tgpig,
        ushort tiitg,
        ushort tiisg,
        ushort sgitg) {
    typedef ggml_ext_unpacker<B> unpacker;
    typedef ggml_ext_lanes<B>    lanes;
    const short n_rows    = GGML_EXT_METAL_NR0;
    const short group     = GGML_EXT_N_PER_LANE/unpacker::n_groups; // weights of a lane per scale

    typedef ggml_ext_table<B, unpacker::has_table> table_t;
    threadgroup typename table_t::entry * table = (threadgroup typename table_t::entry *) shmem;
    if (unpacker::has_table) {
        table_t::fill(table, tiitg, N_SIMDWIDTH*FC_mul_mv_nsg);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    const int im  = tgpig.z;
    const int i12 = im%FC_mul_mv_ne12;
    const int i13 = im/FC_mul_mv_ne12;

    const int row0    = (tgpig.x*FC_mul_mv_nsg + sgitg)*n_rows;
    const int column0 = tgpig.y*n_columns;

    // clamp rows and columns to the last
    device const B     * x[n_rows];
    device const float * y[n_columns];
    FOR_UNROLL (short r = 0; r < n_rows; ++r) {
        const int row = min(row0 + r, args.ne01 - 1);
        x[r] = (device const B *) (src0 + row*args.nb01 + i12/FC_mul_mv_r2*args.nb02 + i13/FC_mul_mv_r3*args.nb03);
    }
    FOR_UNROLL (short j = 0; j < n_columns; ++j) {
        const int column = min(column0 + j, args.ne11 - 1);
        y[j] = (device const float *) (src1 + column*args.nb11 + i12*args.nb12 + i13*args.nb13);
    }

    float sum[n_rows][n_columns];
    FOR_UNROLL (short r = 0; r < n_rows; ++r) {
        FOR_UNROLL (short j = 0; j < n_columns; ++j) {
            sum[r][j] = 0.0f;
        }
    }

    const int   n_blocks = args.ne00/lanes::n;
    const short c        = tiisg%lanes::n_lanes;

    for (int ib = tiisg/lanes::n_lanes; ib < n_blocks; ib += lanes::n_blocks) {
        float yl[n_columns][GGML_EXT_N_PER_LANE];
        FOR_UNROLL (short j = 0; j < n_columns; ++j) {
            if (unpacker::rotated) { // in the order of the lanes, aligned to 32 bytes
                device const float4 * y4 = (device const float4 *) (y[j] + lanes::n*ib) + 2*c;
                const float4 low = y4[0], high = y4[1];
                FOR_UNROLL (short g = 0; g < 4; ++g) {
                    yl[j][g]     = low[g];
                    yl[j][g + 4] = high[g];
                }
            } else {
                FOR_UNROLL (short g = 0; g < GGML_EXT_N_PER_LANE; ++g) {
                    yl[j][g] = y[j][lanes::n*ib + lanes::n_lanes*g + c];
                }
            }
        }
        FOR_UNROLL (short r = 0; r < n_rows; ++r) {
            device const B & xb = x[r][ib];
            unpacker u;
            u.load(xb, c);
            FOR_UNROLL (short first = 0; first < GGML_EXT_N_PER_LANE; first += group) {
                float part[n_columns];
                FOR_UNROLL (short j = 0; j < n_columns; ++j) {
                    part[j] = 0.0f;
                }
                FOR_UNROLL (short g = first; g < first + group; ++g) {
                    const float v = u.value(g, table);
                    FOR_UNROLL (short j = 0; j < n_columns; ++j) {
                        part[j] += v*yl[j][g];
                    }
                }
                const float scale = unpacker::scale(xb, first);
                FOR_UNROLL (short j = 0; j < n_columns; ++j) {
                    sum[r][j] += scale*part[j];
                }
            }
        }
    }

    device float * dst_f32 = (device float *) dst + ((uint64_t) im*args.ne1 + column0)*args.ne0 + row0;

    FOR_UNROLL (short r = 0; r < n_rows; ++r) {
        FOR_UNROLL (short j = 0; j < n_columns; ++j) {
            const float total = simd_sum(sum[r][j]);
            if (tiisg == 0 && row0 + r < args.ne01 && column0 + j < args.ne11) {
                dst_f32[(uint64_t) j*args.ne0 + r] = total;
            }
        }
    }
}

template <typename B, short n_columns>
kernel void kernel_ext_mul_mv(
        constant ggml_metal_kargs_mul_mv & args,
        device const char * src0,
        device const char * src1,
        device       char * dst,
        threadgroup  char * shmem [[threadgroup(0)]],
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]],
        ushort tiisg[[thread_index_in_simdgroup]],
        ushort sgitg[[simdgroup_index_in_threadgroup]]) {
    ggml_ext_mul_mv<B, n_columns, constant ggml_metal_kargs_mul_mv &>(args, src0, src1, dst, shmem, tgpig, tiitg, tiisg, sgitg);
}

// mul_mat_id: z counts the pairs of a token and one of its nei0 experts.
template <typename B>
kernel void kernel_ext_mul_mv_id(
        constant ggml_metal_kargs_mul_mv_id & args,
        device const char * src0,
        device const char * src1,
        device       char * dst,
        device const char * ids,
        threadgroup  char * shmem [[threadgroup(0)]],
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]],
        ushort tiisg[[thread_index_in_simdgroup]],
        ushort sgitg[[simdgroup_index_in_threadgroup]]) {
    const int token  = tgpig.z/args.nei0;
    const int i      = tgpig.z%args.nei0;
    const int expert = ((device const int32_t *) (ids + token*args.nbi1))[i];
    tgpig.z = 0;

    ggml_metal_kargs_mul_mv column_args; // one matrix, one column
    column_args.ne00 = args.ne00;
    column_args.ne01 = args.ne01;
    column_args.nb01 = args.nb01;
    column_args.nb02 = column_args.nb03 = 0;
    column_args.ne11 = 1;
    column_args.nb11 = column_args.nb12 = column_args.nb13 = 0;
    column_args.ne0 = args.ne0;
    column_args.ne1 = 1;

    ggml_ext_mul_mv<B, 1, thread const ggml_metal_kargs_mul_mv &>(
        column_args, src0 + expert*args.nb02, src1 + i%args.ne11*args.nb11 + token*args.nb12,
        dst + ((uint64_t) token*args.ne1 + i)*args.ne0*sizeof(float), shmem, tgpig, tiitg, tiisg, sgitg);
}
