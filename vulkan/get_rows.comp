#version 450
// get_rows: a workgroup unpacks 1024 weights and rotates them back in shared memory, bit-equal to the reference.
#extension GL_EXT_control_flow_attributes : enable
#include "types.glsl"
#include "generic_binary_head.glsl"
#include "ggml_ext/unpack.glsl"
#define EXT_VALUES 1024
#include "ggml_ext/rotation.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

// Unpack the row's weights from `first` on into shared memory, 32 per thread.
void unpack_row(const uint a_offset, const uint first) {
    const uint j0 = 32*gl_LocalInvocationID.x, begin = j0 - j0 % QUANT_K, k = j0 % QUANT_K / 32;
    if (j0 < EXT_VALUES && first + begin < p.ne00) {
        const ext_words w = ext_load(a_offset + (first + begin)/QUANT_K, k);
        [[unroll]] for (uint g = 0; g < 8; ++g) {
            precise vec4 v = ext_values(w, g);
#ifdef EXT_OFFSET
            v -= ext_offset(w);
#endif
            v *= ext_scale(w);
            [[unroll]] for (uint b = 0; b < 4; ++b) {
                ext_shared[ext_padded(begin + (QUANT_K/8)*g + 4*k + b)] = v[b];
            }
        }
    }
}

void write_row(const uint d_offset, const uint first) {
    ext_rotate();
    for (uint i = gl_LocalInvocationID.x; i < EXT_VALUES && first + i < p.ne00; i += 64) {
        data_d[d_offset + first + i] = D_TYPE(ext_signed(ext_shared[ext_padded(i)], i));
    }
}

void main() {
#ifdef NEEDS_INIT_IQ_SHMEM
    init_iq_shmem(gl_WorkGroupSize);
#endif
    const uint first = gl_WorkGroupID.x*EXT_VALUES;
    for (uint z = gl_WorkGroupID.z; z < p.ne11*p.ne12; z += gl_NumWorkGroups.z) {
        const uint i11 = z / p.ne12, i12 = z % p.ne12;
        for (uint i10 = gl_WorkGroupID.y; i10 < p.ne10; i10 += gl_NumWorkGroups.y) {
            const uint i01 = data_b[get_boffset() + i10*p.nb10 + i11*p.nb11 + i12*p.nb12];
            barrier(); // the previous row has been written
            unpack_row(get_aoffset() + i01*p.nb01 + i11*p.nb02 + i12*p.nb03, first);
            barrier();
            write_row(get_doffset() + i10*p.nb21 + i11*p.nb22 + i12*p.nb23, first);
        }
    }
}
