// Activations as integers: four groups of 32, each with the values of one thread of a block in the order of its words (unpack.glsl).
//   ds   high half: scale as bfloat16, rounded up before the values are divided by it, so that none exceeds 127; low half: sum of the values
//   qs   two for each group
#extension GL_EXT_spirv_intrinsics : enable

struct ext_q8 {
    uint  ds[4];
    ivec4 qs[8];
};
#define block_q8_1_x4_packed128 ext_q8 // upstream's mul_mmq reads it by this name; the sizes are equal

float ext_q8_scale(const uint ds) { return uintBitsToFloat(ds & 0xffff0000); }
float ext_q8_sum(const uint ds) { return float(bitfieldExtract(int(ds), 0, 16)); }

// Dot product of four signed bytes. Not every glslc knows GL_EXT_integer_dot_product (Debian 12's does not); all know this form of it.
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int ext_dot_packed(int a, int b, spirv_literal int format);
int ext_dot(const int a, const int b) { return ext_dot_packed(a, b, 0); }
