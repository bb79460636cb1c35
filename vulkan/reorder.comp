#version 450
// Copy the activations of types that are not rotated for mul_mm, in the order of the codes. Bindings, push constants and grid as in rotate.comp.
#extension GL_EXT_control_flow_attributes : enable
#extension GL_EXT_shader_16bit_storage : require
#include "generic_unary_head.glsl"
#include "ggml_ext/order.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

void main() {
    const uint first = gl_WorkGroupID.z*262144 + gl_WorkGroupID.y*512 + gl_WorkGroupID.x*512;
    for (uint j = first + gl_LocalInvocationID.x; j < min(first + 512, p.ne); j += 64) {
        data_d[get_doffset() + dst_idx(ext_ordered(j))] = D_TYPE(data_a[get_aoffset() + src0_idx(j)]);
    }
}
