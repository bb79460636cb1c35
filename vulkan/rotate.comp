#version 450
// Rotate activations into prealloc_y, with the bindings, push constants and grid of upstream's copies: 512 values per workgroup.
// The source may have any strides; the result is contiguous. For mul_mm (F16) it has the order of the codes, for mul_mat_vec (F32), whose
// threads load words of codes, that of the row.
#extension GL_EXT_control_flow_attributes : enable
#extension GL_EXT_shader_16bit_storage : require
#include "generic_unary_head.glsl"
#define EXT_VALUES 512
#include "ggml_ext/rotation.glsl"
#ifdef EXT_ORDER
#include "ggml_ext/order.glsl"
#else
uint ext_ordered(const uint j) { return j; }
#endif

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

void main() {
    const uint tid = gl_LocalInvocationID.x;
    const uint first = gl_WorkGroupID.z*262144 + gl_WorkGroupID.y*512 + gl_WorkGroupID.x*512;
    for (uint i = tid; i < EXT_VALUES; i += 64) { // rows are multiples of a block
        float x = 0.0;
        if (first + i < p.ne) {
            x = ext_signed(float(data_a[get_aoffset() + src0_idx(first + i)]), i % EXT_N);
        }
        ext_shared[ext_padded(i)] = x;
    }
    barrier();
    for (uint item = tid; item < EXT_ITEMS; item += 64) {
        ext_transform_neighbors(item);
    }
    barrier();
    for (uint item = tid; item < EXT_ITEMS; item += 64) {
        float v[EXT_R];
        ext_transform_strides(item, v);
        const uint j = first + ext_position(item);
        [[unroll]] for (uint i = 0; i < EXT_R; ++i) {
            if (j + EXT_R*i < p.ne) {
                data_d[get_doffset() + dst_idx(ext_ordered(j + EXT_R*i))] = D_TYPE(v[i]);
            }
        }
    }
}
