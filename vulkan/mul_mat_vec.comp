#version 450
// Matrix-vector products with one to eight columns. A thread takes 32 weights of each of its rows. It loads activations once for all
// rows and unpacks weights once for all columns.
#include "mul_mat_vec_base.glsl"
#include "ggml_ext/unpack.glsl"

layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

#ifdef USE_SUBGROUP_ADD_NO_SHMEM
// each subgroup has rows of its own, so that several subgroups share one table
#define EXT_TID          gl_SubgroupInvocationID
#define EXT_N_TID        gl_SubgroupSize
#define EXT_ROW_GROUP(x) ((x)*gl_NumSubgroups + gl_SubgroupID)
#else
#define EXT_TID          gl_LocalInvocationID.x
#define EXT_N_TID        gl_WorkGroupSize.x
#define EXT_ROW_GROUP(x) (x)
#endif

const uint N_THREADS = QUANT_K/32; // per block

FLOAT_TYPE temp[NUM_COLS][NUM_ROWS];

// Accumulate in temp the products of thread k's 32 weights of block i, for all rows.
void add_block(const uint a_offset, const uint b_offset, const uint n_blocks, const uint first_row, const uint num_rows, const uint i, const uint k) {
    ext_words w[NUM_ROWS];
    float part[NUM_COLS][NUM_ROWS], sum[NUM_COLS];
    [[unroll]] for (uint n = 0; n < num_rows; ++n) {
        w[n] = ext_load(a_offset + (first_row + n)*n_blocks + i, k);
    }
    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
        sum[j] = 0.0;
        [[unroll]] for (uint n = 0; n < num_rows; ++n) {
            part[j][n] = 0.0;
        }
    }
    [[unroll]] for (uint g = 0; g < 8; ++g) {
        vec4 y[NUM_COLS];
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
            y[j] = vec4(data_b_v4[(j*p.batch_stride_b + b_offset + i*QUANT_K + g*(QUANT_K/8))/4 + k]);
#ifdef EXT_OFFSET
            sum[j] += (y[j].x + y[j].y) + (y[j].z + y[j].w);
#endif
        }
        [[unroll]] for (uint n = 0; n < num_rows; ++n) {
            const vec4 v = ext_values(w[n], g);
            [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
                part[j][n] = fma(v.x, y[j].x, fma(v.y, y[j].y, fma(v.z, y[j].z, fma(v.w, y[j].w, part[j][n]))));
            }
        }
    }
    [[unroll]] for (uint n = 0; n < num_rows; ++n) {
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
#ifdef EXT_OFFSET
            part[j][n] = fma(-ext_offset(w[n]), sum[j], part[j][n]);
#endif
            temp[j][n] = fma(ext_scale(w[n]), part[j][n], temp[j][n]);
        }
    }
}

void compute_outputs(const uint first_row, const uint num_rows) {
    uint a_offset, b_offset, d_offset;
    get_offsets(a_offset, b_offset, d_offset);
    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
        [[unroll]] for (uint n = 0; n < NUM_ROWS; ++n) {
            temp[j][n] = FLOAT_TYPE(0);
        }
    }
    const uint n_blocks = p.ncols / QUANT_K;
    for (uint i = EXT_TID / N_THREADS; i < n_blocks; i += EXT_N_TID / N_THREADS) {
        add_block(a_offset, b_offset, n_blocks, first_row, num_rows, i, EXT_TID % N_THREADS);
    }
    reduce_result(temp, d_offset, first_row, num_rows, EXT_TID);
}

void main() {
#ifdef NEEDS_INIT_IQ_SHMEM
    init_iq_shmem(gl_WorkGroupSize);
#endif
    const uint first_row = NUM_ROWS*EXT_ROW_GROUP(gl_WorkGroupID.x + gl_NumWorkGroups.x*gl_WorkGroupID.z);
    if (first_row + NUM_ROWS <= p.stride_d) {
        compute_outputs(first_row, NUM_ROWS);
    } else if (first_row < p.stride_d) {
        compute_outputs(first_row, p.stride_d - first_row);
    }
}
