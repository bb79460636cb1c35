#version 450
// Matrix-vector products with one to eight columns. A thread takes 32 weights of each of its rows. It loads activations once for all
// rows and unpacks weights once for all columns. With EXT_INTEGER activations and weights are integers (q8.glsl, unpack.glsl).
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

#ifdef EXT_INTEGER
#define EXT_SUM int
#else
#define EXT_SUM float
#endif
FLOAT_TYPE temp[NUM_COLS][NUM_ROWS];

// Accumulate in temp the products of thread k's 32 weights of block i, for all rows.
void add_block(const uint a_offset, const uint b_offset, const uint n_blocks, const uint first_row, const uint num_rows, const uint i, const uint k) {
    ext_words w[NUM_ROWS];
    EXT_SUM part[NUM_COLS][NUM_ROWS];
    float sum[NUM_COLS];
    [[unroll]] for (uint n = 0; n < num_rows; ++n) {
        w[n] = ext_load(a_offset + (first_row + n)*n_blocks + i, k);
    }
    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
        sum[j] = 0.0;
        [[unroll]] for (uint n = 0; n < num_rows; ++n) {
            part[j][n] = EXT_SUM(0);
        }
    }
#ifdef EXT_INTEGER
    ivec4 y[NUM_COLS];
#else
    vec4  y[NUM_COLS];
#endif
    [[unroll]] for (uint g = 0; g < 8; ++g) {
        [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
            const uint y0 = j*p.batch_stride_b + b_offset + i*QUANT_K;
#ifdef EXT_INTEGER
            if (g % 4 == 0) {
                y[j] = data_b[(y0/32 + k)/4].qs[2*((y0/32 + k) % 4) + g/4];
            }
#else
            y[j] = vec4(data_b_v4[(y0 + g*(QUANT_K/8))/4 + k]);
#ifdef EXT_OFFSET
            sum[j] += (y[j].x + y[j].y) + (y[j].z + y[j].w);
#endif
#endif
        }
        [[unroll]] for (uint n = 0; n < num_rows; ++n) {
#ifdef EXT_INTEGER
            const int v = ext_ints(w[n], g);
#else
            const vec4 v = ext_values(w[n], g);
#endif
            [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
#if !defined(EXT_INTEGER)
                part[j][n] = fma(v.x, y[j].x, fma(v.y, y[j].y, fma(v.z, y[j].z, fma(v.w, y[j].w, part[j][n]))));
#elif defined(EXT_GROUP_SCALE)
                part[j][n] += int(ext_group_scale(w[n], g))*ext_dot(v, y[j][g % 4]);
#else
                part[j][n] += ext_dot(v, y[j][g % 4]);
#endif
            }
        }
    }
    [[unroll]] for (uint j = 0; j < NUM_COLS; ++j) {
        float y_scale = 1.0;
#ifdef EXT_INTEGER
        const uint y0 = (j*p.batch_stride_b + b_offset + i*QUANT_K)/32 + k, ds = data_b[y0/4].ds[y0 % 4];
        y_scale = ext_q8_scale(ds);
        sum[j]  = ext_q8_sum(ds);
#endif
        [[unroll]] for (uint n = 0; n < num_rows; ++n) {
            float product = float(part[j][n]);
#ifdef EXT_OFFSET
            product = fma(-ext_offset(w[n]), sum[j], product);
#endif
            temp[j][n] = fma(ext_scale(w[n])*y_scale, product, temp[j][n]);
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
