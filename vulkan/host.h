// Host code for ggml-ext types, included in the middle of ggml-vulkan.cpp, whose structs and functions it uses.
#pragma once

#include "ggml-ext-supports.h"
#include "types/codes.h"

static bool ggml_ext_vk_is_weight_type(ggml_type type) {
    switch (type) {
        GGML_EXT_WEIGHT_CASES return true;
        default:              return false;
    }
}

// Block size of a rotated type, 0 for other types.
static int ggml_ext_vk_rotated_block(ggml_type type) {
    switch (type) {
#define GGML_EXT_X(NAME, name) case GGML_TYPE_##NAME: return GGML_EXT_##NAME##_ROTATED ? GGML_EXT_##NAME##_BLOCK_SIZE : 0;
        GGML_EXT_WEIGHT_TYPES(GGML_EXT_X)
#undef GGML_EXT_X
        default: return 0;
    }
}

// Index of the pipelines that rotate blocks of this size.
static constexpr int ggml_ext_vk_rotate_index(int block) {
    return block == 256 ? 2 : block == 64 ? 1 : 0;
}

// --- shared memory ---------------------------------------------------------------------------------------------------

// Bytes of a type's table in shared memory (trellis.glsl, ditto5.glsl).
static uint32_t ggml_ext_vk_table_bytes(ggml_type type) {
    switch (type) {
        GGML_EXT_TRELLIS_CASES  return 4096*sizeof(uint16_t);
        GGML_EXT_CODEBOOK_CASES return 32*sizeof(float);
        default:                return 0;
    }
}

// Bytes of shared memory of a device. Tests lower it.
static uint32_t ggml_ext_vk_shared_bytes(const vk_device & device) {
    static const char * limit = getenv("GGML_EXT_VK_SHARED_BYTES");
    return limit ? (uint32_t) atoi(limit) : device->properties.limits.maxComputeSharedMemorySize;
}

// Whether the table fits next to the smallest tiles of mul_mm, which need up to 13 KB. Devices with less than 32 KB of shared memory do
// not support the trellis types.
static bool ggml_ext_vk_table_fits(const vk_device & device, ggml_type type) {
    return ggml_ext_vk_table_bytes(type) < 1024 || ggml_ext_vk_shared_bytes(device) >= 32*1024;
}

// Table bytes for upstream's choice of tiles, 0 for an unsupported type: upstream rejects a device where the smallest tile of any type
// does not fit.
static uint32_t ggml_ext_vk_lut_size(const vk_device & device, ggml_type type) {
    return ggml_ext_vk_table_fits(device, type) ? ggml_ext_vk_table_bytes(type) : 0;
}

// Tests force reductions in shared memory on a device with subgroups.
static bool ggml_ext_vk_no_subgroups() {
    static const bool is_set = getenv("GGML_EXT_VK_NO_SUBGROUPS") != nullptr;
    return is_set;
}

// --- activations -----------------------------------------------------------------------------------------------------

// Whether a product reads its activations from a copy in prealloc_y. Rotated types always do, because the copy rotates. mul_mm does for
// all types, because its shaders only take F16 activations in the order of the codes.
static bool ggml_ext_vk_copies_y(const ggml_tensor * w, bool is_mul_mm) {
    return is_mul_mm ? ggml_ext_vk_is_weight_type(w->type) : ggml_ext_vk_rotated_block(w->type) != 0;
}

// Get the pipeline of that copy, in place of ggml_vk_get_cpy_pipeline().
static vk_pipeline ggml_ext_vk_get_y_pipeline(ggml_backend_vk_context * ctx, const ggml_tensor * w, const ggml_tensor * x, const ggml_tensor * dst,
                                              ggml_type y_type) {
    const int block = ggml_ext_vk_rotated_block(w->type);
    const bool is_mul_mm = y_type == GGML_TYPE_F16; // mul_mat_vec reads F32
    if (block == 0 && !(is_mul_mm && ggml_ext_vk_is_weight_type(w->type))) {
        return ggml_vk_get_cpy_pipeline(ctx, x, dst, y_type);
    }
    GGML_ASSERT(x->type == GGML_TYPE_F32 && (is_mul_mm || y_type == GGML_TYPE_F32));
    if (block == 0) {
        GGML_ASSERT(ggml_blck_size(w->type) == 256);
        return ctx->device->pipeline_ggml_ext_reorder;
    }
    return ctx->device->pipeline_ggml_ext_rotate[ggml_ext_vk_rotate_index(block)][is_mul_mm];
}

// --- supported operations --------------------------------------------------------------------------------------------

// Whether the device has pipelines of mul_mm. It has none where VK_NV_cooperative_matrix2 is used without VK_KHR_cooperative_matrix
// (coopmat2.h); then log a warning once.
static bool ggml_ext_vk_has_mul_mm(const vk_device & device, ggml_type type, bool mul_mat_id) {
    if (device->pipeline_matmul.count({type, GGML_TYPE_F16, mul_mat_id, false})) {
        return true;
    }
    static const bool warned = [] {
        GGML_LOG_WARN("ggml_vulkan: types of ggml-ext have no kernels for products on this device and run on the CPU; if GGML_VK_DISABLE_COOPMAT is "
                      "set, set GGML_VK_DISABLE_COOPMAT2=1 too\n");
        return true;
    }();
    return !warned;
}

// Whether the device has a kernel for op. Called only for operations on ggml-ext types.
static bool ggml_ext_vk_supports_op(const vk_device & device, const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    const ggml_tensor * x = op->src[1];
    if (!w || !x || !ggml_ext_vk_is_weight_type(w->type) || !ggml_ext_vk_table_fits(device, w->type) || w->nb[0] != ggml_type_size(w->type)) {
        return false;
    }
    switch (op->op) {
        case GGML_OP_MUL_MAT_ID:
            if (op->src[2]->ne[3] != x->ne[3] || ggml_get_op_params_i32(op, 3) == GGML_PREC_F32 ||
                !(device->mul_mat_id_s[w->type] || device->mul_mat_id_m[w->type] || device->mul_mat_id_l[w->type])) {
                return false; // upstream's rule
            }
            break;
        case GGML_OP_MUL_MAT:
            if (w->ne[3] != x->ne[3]) {
                return false;
            }
            break;
        case GGML_OP_GET_ROWS:
            return x->type == GGML_TYPE_I32 && (op->type == GGML_TYPE_F32 || op->type == GGML_TYPE_F16);
        default:
            return false;
    }
    if (x->type != GGML_TYPE_F32 || op->type != GGML_TYPE_F32 || !ggml_vk_dim01_contiguous(w)) {
        return false;
    }
    return ggml_ext_vk_has_mul_mm(device, w->type, op->op == GGML_OP_MUL_MAT_ID);
}

// --- pipelines of mul_mm ---------------------------------------------------------------------------------------------

// Arguments of GGML_EXT_WEIGHT_TYPES in the branches of ggml_vk_load_shaders(), whose lambdas they call. They follow upstream's lines
// for types with look-up tables and F16 activations. coopmat2.h uses them too.
#define GGML_EXT_VK_MM_CM1(NAME, name)                                                                                          \
    if (device->coopmat_acc_f16_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, true}, tc_mmq, "matmul_" #name "_f16_f16acc",                       \
                   matmul_##name##_f16_f16acc_cm1_len, matmul_##name##_f16_f16acc_cm1_data, sizeof(vk_mat_mat_push_constants), 3); \
    }                                                                                                                           \
    if (device->coopmat_acc_f32_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, false}, tc_mmq, "matmul_" #name "_f16",                             \
                   matmul_##name##_f16_cm1_len, matmul_##name##_f16_cm1_data, sizeof(vk_mat_mat_push_constants), 3);            \
    }
#define GGML_EXT_VK_MM_ID_CM1(NAME, name)                                                                                       \
    if (device->coopmat_acc_f16_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, true}, tc_mmq_id, "matmul_id_subgroup_" #name "_f16_f16acc",         \
                   matmul_id_subgroup_##name##_f16_f16acc_cm1_len, matmul_id_subgroup_##name##_f16_f16acc_cm1_data,             \
                   sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count);                                               \
    }                                                                                                                           \
    if (device->coopmat_acc_f32_support) {                                                                                      \
        cm1_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, false}, tc_mmq_id, "matmul_id_subgroup_" #name "_f16",               \
                   matmul_id_subgroup_##name##_f16_cm1_len, matmul_id_subgroup_##name##_f16_cm1_data,                           \
                   sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count);                                               \
    }

#define GGML_EXT_VK_MM_FP16(NAME, name)                                                                                         \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, true}, tc_mmq, "matmul_" #name "_f16_f16acc",                            \
              SPV_DOT2_F16ACC(matmul_##name##_f16), sizeof(vk_mat_mat_push_constants), 3);                                      \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, false}, tc_mmq, "matmul_" #name "_f16",                                  \
              SPV_DOT2(matmul_##name##_f16), sizeof(vk_mat_mat_push_constants), 3);
// mul_mat_id, with subgroup ballots and the subgroup's size, or without (0)
#define GGML_EXT_VK_MM_ID_FP16_AS(NAME, kernel, subgroup_size)                                                                 \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, true}, tc_mmqid, #kernel "_f16acc", SPV_DOT2_F16ACC(kernel),             \
              sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count, subgroup_size);                                    \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, false}, tc_mmqid, #kernel, SPV_DOT2(kernel),                             \
              sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count, subgroup_size);
#define GGML_EXT_VK_MM_ID_SUBGROUP_FP16(NAME, name) GGML_EXT_VK_MM_ID_FP16_AS(NAME, matmul_id_subgroup_##name##_f16, mul_mat_subgroup_size)
#define GGML_EXT_VK_MM_ID_FP16(NAME, name)          GGML_EXT_VK_MM_ID_FP16_AS(NAME, matmul_id_##name##_f16, 0)

#define GGML_EXT_VK_MM_FP32(NAME, name)                                                                                        \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, false, false}, tc_mmq, "matmul_" #name "_f16",                                 \
              matmul_##name##_f16_fp32_len, matmul_##name##_f16_fp32_data, sizeof(vk_mat_mat_push_constants), 3);
#define GGML_EXT_VK_MM_ID_FP32_AS(NAME, kernel, subgroup_size)                                                                 \
    sg_create({GGML_TYPE_##NAME, GGML_TYPE_F16, true, false}, tc_mmqid, #kernel, kernel##_fp32_len, kernel##_fp32_data,        \
              sizeof(vk_mat_mat_id_push_constants), mul_mat_id_param_count, subgroup_size);
#define GGML_EXT_VK_MM_ID_SUBGROUP_FP32(NAME, name) GGML_EXT_VK_MM_ID_FP32_AS(NAME, matmul_id_subgroup_##name##_f16, mul_mat_subgroup_size)
#define GGML_EXT_VK_MM_ID_FP32(NAME, name)          GGML_EXT_VK_MM_ID_FP32_AS(NAME, matmul_id_##name##_f16, 0)
