#version 450
// Copy activations into prealloc_y, rotated in blocks of EXT_ROTATION unless that is 0, with the bindings, push constants and grid of upstream's
// copies: 512 values per workgroup. The source may have any strides. The copies, whose blocks have EXT_BLOCK values:
//   EXT_QUANTIZE   integers (q8.glsl), contiguous
//   EXT_ORDER      for mul_mm (F16), in the order of the codes: a block lane by lane (unpack.glsl), so that the eight weights of a lane meet eight
//                  neighbouring activations
//   neither        for mul_mat_vec (F32), whose threads load words of codes, in the order of the row
#extension GL_EXT_control_flow_attributes : enable
#extension GL_EXT_shader_16bit_storage : require
#ifdef EXT_QUANTIZE
#include "ggml_ext/q8.glsl"
#endif
#include "generic_unary_head.glsl"
#define EXT_VALUES 512
#include "ggml_ext/rotation.glsl"

layout(local_size_x = 64, local_size_y = 1, local_size_z = 1) in;

const uint EXT_LANES = EXT_BLOCK/8;

#ifdef EXT_QUANTIZE
shared uint ext_magnitudes[64];
shared int  ext_sums[64];

// Quantize 16 groups. Four threads share a group. Inf or NaN among its values makes the scale NaN; values with a subnormal scale become 0.
void write_values(const uint first) {
    const uint tid = gl_LocalInvocationID.x, group = tid/4, quarter = tid % 4;
    const uint begin = 32*group - 32*group % EXT_BLOCK + 4*(group % (EXT_BLOCK/32)) + 2*quarter*EXT_LANES;
    float v[8];
    uint  bits = 0; // largest magnitude; as bits NaN > Inf > finite
    [[unroll]] for (uint i = 0; i < 8; ++i) {
        v[i] = ext_shared[ext_padded(begin + i/4*EXT_LANES + i % 4)];
        bits = max(bits, floatBitsToUint(v[i]) & 0x7fffffff);
    }
    ext_magnitudes[tid] = bits;
    barrier();
    [[unroll]] for (uint i = 0; i < 4; ++i) {
        bits = max(bits, ext_magnitudes[4*group + i]);
    }
    const bool  is_finite = bits < 0x7f800000, is_zero = uintBitsToFloat(bits) < 1.5e-36; // 127*FLT_MIN
    const uint  d     = !is_finite ? 0x7fc00000 : is_zero ? 0 : (floatBitsToUint(uintBitsToFloat(bits)/127.0) + 0xffff) & 0xffff0000;
    const float inv_d = is_finite && !is_zero ? 1.0/uintBitsToFloat(d) : 0.0;
    int sum = 0;
    uint words[2] = uint[2](0, 0);
    [[unroll]] for (uint i = 0; i < 8; ++i) {
        const int q = is_finite ? int(roundEven(v[i]*inv_d)) : 0;
        words[i/4] |= (uint(q) & 0xff) << 8*(i % 4);
        sum += q;
    }
    ext_sums[tid] = sum;
    barrier();
    const uint i_group = first/32 + group, i = i_group/4;
    if (first + 32*group < p.ne) {
        [[unroll]] for (uint w = 0; w < 2; ++w) {
            data_d[i].qs[2*(i_group % 4) + quarter/2][2*(quarter & 1) + w] = int(words[w]);
        }
        if (quarter == 0) {
            data_d[i].ds[i_group % 4] = d | uint(ext_sums[tid] + ext_sums[tid + 1] + ext_sums[tid + 2] + ext_sums[tid + 3]) & 0xffff;
        }
    }
}
#else
// Place in the row of value i of the copy.
uint source(const uint i) {
#ifdef EXT_ORDER
    const uint j = i % EXT_BLOCK;
    return i - j + EXT_LANES*(j % 8) + j/8;
#else
    return i;
#endif
}
void write_values(const uint first) {
    for (uint i = gl_LocalInvocationID.x; i < EXT_VALUES && first + i < p.ne; i += 64) {
        data_d[get_doffset() + dst_idx(first + i)] = D_TYPE(ext_shared[ext_padded(source(i))]);
    }
}
#endif

void main() {
    const uint first = gl_WorkGroupID.z*262144 + gl_WorkGroupID.y*512 + gl_WorkGroupID.x*512;
    for (uint i = gl_LocalInvocationID.x; i < EXT_VALUES; i += 64) { // rows are multiples of a block
        ext_shared[ext_padded(i)] = first + i < p.ne ? ext_signed(float(data_a[get_aoffset() + src0_idx(first + i)]), i) : 0.0;
    }
    barrier();
    ext_rotate();
    write_values(first);
}
